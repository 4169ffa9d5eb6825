"""Secure aggregation in the engine: one reply in place of all, made of a sum that real sites hand over masked.

In a simulation nothing is hidden from this process, so nothing is masked. But the replies become the same whole
numbers, are added up alike, and the merge is given what it would be given at real sites: the results are the same, bit
for bit.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from tacit.backends import Outcome
from tacit.contract.fixed_point import Ring
from tacit.contract.method import Stage, Task
from tacit.contract.parties import RoundInfo
from tacit.contract.sums import Summation, summation, summed
from tacit.core.errors import TacitError
from tacit.core.safeguards import Privacy
from tacit.runs.plan import Plan

COARSE = 1e-3  # an error of weights that is told
LARGEST_COUNT = 2.0**31  # images of a client of which nothing is known


@dataclass(frozen=True)
class Heard:
    """What came of asking clients in a round: what may reach the merge, and what it cost."""

    usable: list[Outcome]
    refused: list[dict[str, Any]]
    bytes_up: int
    cpu: list[float | None]
    skipped: str = ""  # why nothing came of it
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Total:
    """A sum over clients, and who is in it. None: there is none, because too few were left."""

    vector: Ring | None
    clients: tuple[int, ...]
    refused: list[dict[str, Any]]
    bytes_up: int
    cpu: list[float | None]
    audit: dict[str, list[float]] | None = None  # what only a simulation knows, over all clients
    why: str = ""


@runtime_checkable
class Unseeing(Protocol):
    """A backend that adds up what clients send without seeing it."""

    def add_up(
        self,
        stage: Stage,
        round_info: RoundInfo,
        tasks: Sequence[Task],
        rule: Summation,
        least: int,
        late: Collection[int],
        done: Callable[[int], None],
    ) -> Total: ...


def most_examples(plan: Plan, stage: Stage, client: int) -> float:
    """The most examples that a client can tell of, by what it registered."""
    registered = plan.registered
    return stage.method.most_examples(registered[client], max(registered)) if registered else LARGEST_COUNT


def rule_for(plan: Plan, stage: Stage, tasks: Sequence[Task]) -> Summation:
    """How the replies to these tasks are added up."""
    if len({task.client for task in tasks}) < len(tasks):
        raise TacitError(
            f"Stage '{stage.name}' asks a client twice in a round, but secure aggregation adds up one reply of each."
        )
    if len(tasks) < 2:
        raise TacitError(
            f"Stage '{stage.name}' asks one client in a round: a sum over one client is that client's own. Ask at "
            "least two, or switch privacy.secure_aggregation off."
        )
    most = max(most_examples(plan, stage, task.client) for task in tasks)
    return summation(
        stage.method, tasks[0].send, len(plan.setup.classes), plan.experiment.privacy, len(tasks), max(most, 1.0)
    )


def add_up_here(
    plan: Plan,
    rule: Summation,
    asked: int,
    outcomes: Sequence[Outcome],
    usable: Sequence[Outcome],
    refused: list[dict[str, Any]],
) -> Total:
    """The sum of the replies of a simulation."""
    clients, least = tuple(outcome.reply.client for outcome in usable), plan.experiment.privacy.least(asked)
    cpu, up = [outcome.cpu for outcome in outcomes], rule.nbytes * len(outcomes)
    if len(usable) < least:
        why = too_few(len(usable), least)
        return Total(None, clients, refused, up, cpu, why=why)
    vector = summed(rule, (outcome.reply for outcome in usable), plan.setup.labeled_clients)
    return Total(vector, clients, refused, up, cpu, added([o.audit for o in usable if o.audit is not None]))


def too_few(left: int, least: int) -> str:
    return f"{left} clients left for a sum, {least} needed (privacy.threshold): the model stays"


def heard_of(total: Total, rule: Summation) -> Heard:
    """What a sum gives to the merge: the mean of all clients as one reply."""
    if total.vector is None:
        return Heard([], total.refused, total.bytes_up, total.cpu, total.why)
    found = rule.decode(total.vector, len(total.clients))
    mean = Outcome(found.reply, total.audit, 0.0, clients=total.clients)
    figures = {"secure_clipped": found.clipped, "secure_error": found.error}
    return Heard([mean], total.refused, total.bytes_up, total.cpu, figures=figures)


def worth_telling(figures: Mapping[str, float], privacy: Privacy) -> list[str]:
    """What the figures of a sum say that its owner should hear.

    >>> worth_telling({"secure_clipped": 0.01, "secure_error": 1e-7}, Privacy(secure_aggregation=True))
    ['1 % of the weights were beyond privacy.range = 16, and clipped: raise it']
    """
    told = []
    if (share := figures.get("secure_clipped", 0.0)) > 0:
        told.append(
            f"{100 * share:.2g} % of the weights were beyond privacy.range = {privacy.range:g}, and clipped: raise it"
        )
    if (error := figures.get("secure_error", 0.0)) > COARSE:
        told.append(
            f"weights may be off by {error:.2g} after the sum: write privacy.bits = 64, or a lower privacy.range"
        )
    return told


def added(audits: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]] | None:
    """What was counted at several clients, added up; by epoch it differs from client to client, and is left out.

    >>> added([{"seen": [1.0, 2.0]}, {"seen": [0.0, 3.0], "known": [1.0, 1.0], "known_by_epoch": [1.0]}])
    {'seen': [1.0, 5.0], 'known': [1.0, 1.0]}
    """
    total: dict[str, list[float]] = {}
    for counts in audits:
        for name, values in counts.items():
            if not name.endswith("_by_epoch"):
                before = total.get(name, [0.0] * len(values))
                total[name] = [one + other for one, other in zip(before, values, strict=True)]
    return total or None
