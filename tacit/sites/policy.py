"""What the people of a site allow, whatever a server asks for: `policy.toml` in the site's folder.

    methods = ["fedavg", "feddb", "mine.py"]   # which methods may be run
    names = ["model", "app_u"]                 # what may leave ("tally": how good a model is on kept-back images)
    metrics = ["loss"]                         # which figures may go with it
    max_message_bytes = 50_000_000
    max_job_bytes = 2_000_000_000
    max_rounds = 100                           # of one job; a round that is asked for again counts again
    max_replies = 200                          # of one job; some methods ask a site several times a round
    max_jobs = 10
    min_images = 100                           # with fewer images it does not take part
    min_images_per_class = 5                   # labelled images of a class with fewer are left out
    require_dp = true                          # the experiment must have differential privacy ([privacy])
    max_epsilon = 8.0                          # and a budget of at most this
    require_secure_aggregation = true

What is left out is not limited.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tacit.contract.method import Stage
from tacit.core.chain import Entry
from tacit.core.errors import TacitError, nearest
from tacit.core.formatting import size_text
from tacit.core.settings import Experiment
from tacit.core.text import safe
from tacit.methods import known_methods
from tacit.sites.accept import Refusal
from tacit.sites.trail import PLAIN, REPLIES, Counts, keys_of, names_in

FILE = "policy.toml"
Names = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=100)], ...], Field(strict=False)]
Limit = Annotated[int, Field(ge=1, lt=2**63)]
Least = Annotated[int, Field(ge=0, lt=2**31)]


class Policy(BaseModel):
    """The rules of a site. None: no such rule."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    methods: Names | None = None
    names: Names | None = None
    metrics: Names | None = None
    max_message_bytes: Limit | None = None
    max_job_bytes: Limit | None = None
    max_rounds: Limit | None = None
    max_replies: Limit | None = None
    max_jobs: Limit | None = None
    min_images: Least = 0
    min_images_per_class: Least = 0
    require_dp: bool = False
    max_epsilon: Annotated[float, Field(gt=0)] | None = None
    require_secure_aggregation: bool = False

    @model_validator(mode="after")
    def _epsilon_of_something(self) -> "Policy":
        if self.max_epsilon is not None and not self.require_dp:
            raise ValueError("max_epsilon bounds differential privacy, which nothing asks for: add require_dp = true")
        return self


def policy_of(folder: Path, given: Path | None, own_methods: Sequence[str] = ()) -> Policy:
    """The policy of the site in a folder: the file that was given, else policy.toml there, else no rule."""
    if given is None and not (folder / FILE).exists():
        return Policy()
    return read_policy(given or folder / FILE, own_methods)


def read_policy(path: Path, own_methods: Sequence[str] = ()) -> Policy:
    """The policy in a file; a TacitError that names the key, what was found and what was expected."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TacitError(f"{path} cannot be read as a policy ({safe(error, 200)}). Expected TOML.") from None
    try:
        policy = Policy.model_validate(given)
    except ValidationError as error:
        listed = "\n".join(f"  {_in_words(problem, given)}" for problem in error.errors(include_url=False))
        raise TacitError(
            f"{path} is no policy, and the site does not join:\n{listed}\nWhat a policy may say: docs/sites.md, "
            "'A policy'."
        ) from None
    there = [*known_methods(), *own_methods]
    for name in policy.methods or ():
        if name not in there:
            raise TacitError(
                f"{path}: methods names '{safe(name, 60)}', which this site does not have.{nearest(name, there)} It "
                f"has: {', '.join(there)} (a file of your own: --method FILE, and its name here)."
            )
    return policy


def _in_words(problem: Any, given: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"there is no rule '{safe(key, 60)}'.{nearest(key, Policy.model_fields)}"
    said = problem["msg"].removeprefix("Value error, ")
    if not key:
        return said
    return f"{safe(key, 60)} = {safe(repr(problem['input']), 60)}: {said[0].lower() + said[1:]}"


# --- Before anything is computed -------------------------------------------------------------------------------


def check_job(policy: Policy, experiment: Experiment, stages: Sequence[Stage]) -> None:
    """Refuse a job that breaks a rule, by what is known before data is read."""
    _check_methods(policy, experiment)
    _check_names(policy, experiment, stages)
    rounds = sum(stage.rounds for stage in stages)
    if policy.max_rounds is not None and rounds > policy.max_rounds:
        raise Refusal(f"its policy allows {policy.max_rounds} rounds of a job, this one has {rounds} (max_rounds)")
    _check_privacy(policy, experiment)


def _check_methods(policy: Policy, experiment: Experiment) -> None:
    asked = [experiment.method["name"], *([experiment.pretrain.method] if experiment.pretrain.on else [])]
    for name in asked:
        if policy.methods is not None and name not in policy.methods:
            allowed = ", ".join(policy.methods) or "none"
            raise Refusal(f"its policy does not allow the method {safe(name, 60)} (methods: {allowed})")


def _check_names(policy: Policy, experiment: Experiment, stages: Sequence[Stage]) -> None:
    if policy.names is None:
        return
    declared = [name for stage in stages for name in stage.method.client_sends if not name.endswith("?")]
    declared += ["tally"] if experiment.data.validation else []
    declared += ["patterns"] if experiment.guard.on else []
    for name in declared:
        if name not in policy.names:
            raise Refusal(f"its policy does not let '{name}' leave, which this job sends (names)")


def _check_privacy(policy: Policy, experiment: Experiment) -> None:
    on, epsilon = privacy_of(experiment)
    if policy.require_dp and not on:
        raise Refusal(
            "its policy asks for differential privacy, which this job does not have (require_dp): set privacy.clip and "
            "privacy.noise"
        )
    if policy.max_epsilon is not None and not 0 < epsilon <= policy.max_epsilon:
        has = f"has {epsilon:g}" if epsilon else "has none"
        most = f"{policy.max_epsilon:g}"
        raise Refusal(f"its policy allows a privacy budget of {most} at most, this job {has} (max_epsilon)")
    if policy.require_secure_aggregation and not experiment.privacy.secure_aggregation:
        raise Refusal(
            "its policy asks for secure aggregation, which this job does not have (require_secure_aggregation)"
        )


def privacy_of(experiment: Experiment) -> tuple[bool, float]:
    """Whether an experiment has differential privacy, and the ε at which it ends (0: none is set)."""
    settings = experiment.privacy
    return (True, settings.epsilon or 0.0) if settings.on and settings.noise > 0 else (False, 0.0)


def check_images(policy: Policy, images: int) -> None:
    """Refuse to take part with few images; the server is not told how many there are."""
    if images < policy.min_images:
        raise Refusal("it has fewer images than its policy asks for to take part (min_images)")


def check_counts(policy: Policy, so_far: Counts, jobs: int, kind: str, new_round: bool) -> None:
    """Refuse work whose answer would be one too many. `jobs`: how many there would be with this one."""
    if policy.max_jobs is not None and jobs > policy.max_jobs:
        raise Refusal(f"its policy allows {policy.max_jobs} jobs, and they are used up (max_jobs)")
    if policy.max_job_bytes is not None and so_far.bytes >= policy.max_job_bytes:
        raise Refusal(f"it sent the {size_text(policy.max_job_bytes)} that its policy allows for a job (max_job_bytes)")
    if kind not in REPLIES:
        return
    if policy.max_replies is not None and so_far.replies >= policy.max_replies:
        raise Refusal(f"it gave the {policy.max_replies} replies that its policy allows for a job (max_replies)")
    if policy.max_rounds is not None and new_round and so_far.rounds >= policy.max_rounds:
        raise Refusal(f"it took part in the {policy.max_rounds} rounds that its policy allows for a job (max_rounds)")


# --- Before a message leaves ------------------------------------------------------------------------------------


def check_message(policy: Policy, told: Entry, size: int, so_far: Counts) -> None:
    """Refuse to let a message go that holds what may not leave, or too much of it.

    Under secure aggregation a reply is one masked vector: there the names that the method declares are all that counts.
    """
    for rule, allowed, there in (
        ("names", policy.names if told["kind"] in PLAIN else None, names_in(told)),
        ("metrics", policy.metrics, keys_of(told, "metrics")),
    ):
        wrong = [name for name in there if allowed is not None and name not in allowed]
        if wrong:
            raise Refusal(f"its policy does not let '{safe(wrong[0], 60)}' leave ({rule})")
    if policy.max_message_bytes is not None and size > policy.max_message_bytes:
        most = size_text(policy.max_message_bytes)
        raise Refusal(f"its reply has {size_text(size)}, its policy allows {most} (max_message_bytes)")
    if policy.max_job_bytes is not None and so_far.bytes + size > policy.max_job_bytes:
        most = size_text(policy.max_job_bytes)
        raise Refusal(f"with this reply it would have sent more than the {most} of its policy (max_job_bytes)")
