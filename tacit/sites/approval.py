"""Jobs at a site: what a server asks for, known by its digest, and whether the people of the site said yes.

`jobs/JOB.json` in the site's folder holds each job with what would leave and its state. With `tacit site join --ask` a
new one waits until somebody says yes, on the terminal or with `tacit site allow JOB`; until then the server is told
that it waits. `tacit site deny JOB` ends any job, asked for or not, from its next message on.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tacit.contract.kinds import parse
from tacit.contract.method import Stage
from tacit.contract.parties import Setup
from tacit.core.errors import TacitError
from tacit.core.files import digest, read_bytes, write_atomically
from tacit.core.formatting import size_text
from tacit.core.settings import Experiment
from tacit.core.text import safe
from tacit.nets.heads import feature_size
from tacit.pieces.train import weights_of
from tacit.sites.accept import Refusal
from tacit.sites.policy import privacy_of
from tacit.sites.wire import Request

FOLDER = "jobs"
MOST = 10_000  # jobs: a server can think of any number of them
SHOWN = 12  # letters of a job's name that people are shown
SHORTEST = 4  # letters of a job's name that are enough, if they are of one only
State = Literal["waiting", "allowed", "denied", "not asked"]


class Waiting(Refusal):
    """The people of a site have not said yes yet; it may be asked again."""


@dataclass(frozen=True)
class SiteJob:
    """A job as a site knows it."""

    job: str
    state: State
    run: str  # in which it was first asked for
    time: str
    method: str
    rounds: int
    text: str  # what would leave, for people

    @property
    def short(self) -> str:
        """The beginning of its name: enough for people."""
        return self.job[:SHOWN]


def job_of(request: Request) -> str:
    """A job's name: the digest of what is to be done, by whatever name the run goes. So neither a restart nor another
    run of the same experiment is a new job, and what was contributed to it is counted together.

    The whole digest: of a short one a server could find two experiments, and get a yes to the harmless one.
    """
    same = {"experiment", "method_sha256", "frozen_sha256", "facts"}
    return digest(json.dumps(request.model_dump(include=same)).encode())


class Approval:
    """The jobs of the site in a folder. The files are read at every message, so a decision counts at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER

    def find(self, job: str) -> SiteJob | None:
        path = self.folder / f"{job}.json"
        if not path.exists():
            return None
        try:
            return SiteJob(**json.loads(read_bytes(path)))
        except (ValueError, TypeError):
            raise TacitError(
                f"{path} is damaged: it tells whether a job is allowed. Remove it, and decide anew."
            ) from None

    def all(self) -> list[SiteJob]:
        """Every job that was ever asked for, the oldest first."""
        found = [job for path in self.folder.glob("*.json") if (job := self.find(path.stem)) is not None]
        return sorted(found, key=lambda job: (job.time, job.job))

    def note(self, new: SiteJob) -> None:
        if self.find(new.job) is None and sum(1 for _ in self.folder.glob("*.json")) >= MOST:
            raise Refusal(f"it knows {MOST} jobs already and takes no new one until its people remove some")
        write_atomically(self.folder / f"{new.job}.json", (json.dumps(asdict(new), indent=2) + "\n").encode())

    def decide(self, word: str, state: State) -> SiteJob:
        """Allow or deny the job whose name begins so."""
        known = self.all()
        fitting = [job for job in known if len(word) >= SHORTEST and job.job.startswith(word)]
        if len(fitting) != 1:
            there = ", ".join(job.short for job in known) or "none"
            raise TacitError(
                f"'{safe(word, 40)}' is no job of this site, or the beginning of several. Give a job's name, or its "
                f"first letters ({SHORTEST} at least). There is: {there}."
            )
        decided = SiteJob(**{**asdict(fitting[0]), "state": state})
        self.note(decided)
        return decided


def permission(found: SiteJob, ask: bool) -> None:
    """Refuse what was denied and, where people want to be asked, what they have not said yes to."""
    if found.state == "denied":
        raise Refusal(f"its people denied this job ({found.short})")
    if ask and found.state != "allowed":
        raise Waiting(f"its people have not said yes to this job ({found.short}) yet")


# --- What people are shown -------------------------------------------------------------------------------------


def new_job(request: Request, experiment: Experiment, stages: tuple[Stage, ...], setup: Setup, ask: bool) -> SiteJob:
    """A job that was not seen before."""
    return SiteJob(
        job_of(request),
        "waiting" if ask else "not asked",
        request.run,
        time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        str(experiment.method["name"]),
        sum(stage.rounds for stage in stages),
        describe_job(job_of(request), experiment, stages, setup),
    )


def describe_job(job: str, experiment: Experiment, stages: tuple[Stage, ...], setup: Setup) -> str:
    """A job in some lines: method, settings that matter, what would leave by name and bytes, for how many rounds."""
    method = experiment.method
    options = ", ".join(f"{key} = {value}" for key, value in method.items() if key not in ("name", "preset"))
    on, epsilon = privacy_of(experiment)
    budget = f" until ε = {epsilon:g}" if epsilon else " without a budget"
    train = experiment.train
    return "\n".join(
        [
            f"Job {job[:SHOWN]}: {safe(method['name'], 60)} ({safe(options, 600) or 'no options'})",
            f"  labels at: {experiment.data.placement}; classes: {len(setup.classes)}; net: {experiment.net.name}; "
            f"{train.epochs} epochs a round; seed {experiment.seed}",
            f"  differential privacy: {'yes,' + budget if on else 'no'}; secure aggregation: "
            f"{'yes' if experiment.privacy.secure_aggregation else 'no'}",
            *(f"  {line}" for stage in stages for line in _leaves(stage, setup)),
            *(["  with each evaluation: tally (three numbers a class)"] if experiment.data.validation else []),
            "  once: whether this site holds labels, and how many images",
        ]
    )


def _leaves(stage: Stage, setup: Setup) -> list[str]:
    net = setup.build()
    own = sum(tensor.numel() * tensor.element_size() for tensor in weights_of(net).values())
    weights = stage.method.estimated_weights_bytes(own, setup.channels, feature_size(net.state_dict()))
    sizes = {n: parse(kind).nbytes(weights, len(setup.classes)) for n, kind in stage.method.client_sends.items()}
    names = ", ".join(f"{name.removesuffix('?')} ({size_text(size)})" for name, size in sizes.items())
    each = sum(size or 0 for size in sizes.values())
    return [
        f"stage {stage.name}, up to {stage.rounds} rounds: in each leave {names or 'nothing'}, the number of examples "
        "and the method's own figures",
        f"  that is {size_text(each)} a reply, {size_text(each * stage.rounds)} for one reply in every round",
    ]
