"""Bounds on what a client may send (`[robust]`): its examples, what it counts, and how far it moved from the model
that was sent to it. What is out of bounds is cut or refused, by rule, and named in the record."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tacit.backends import Outcome
from tacit.contract import kinds
from tacit.contract.method import Method, Reply, Stage, Task
from tacit.core.errors import TacitError
from tacit.core.payload import Payload, Weights, weights_in
from tacit.core.safeguards import Robust
from tacit.engine import aside
from tacit.pieces.robust import shortened, update_norm


@dataclass(frozen=True)
class Bounded:
    """The replies that may go on, as they may, and what became of the others."""

    used: list[Outcome]
    refused: list[dict[str, Any]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)  # what is told of it; nothing where there are no bounds


def bounded(
    settings: Robust, method: Method, state: Payload, tasks: Sequence[Task], outcomes: Sequence[Outcome]
) -> Bounded:
    """Replies within their bounds. `state` holds the norms of recent rounds, from which a limit may follow."""
    if not settings.bounds:
        return Bounded(list(outcomes))
    sent = {(task.client, task.group): task for task in tasks}
    bases = [bases_of(method, sent[o.reply.client, o.reply.group], state) for o in outcomes] if outcomes else []
    norms = [_norm(outcome.reply, base) for outcome, base in zip(outcomes, bases, strict=True)]
    limit = norm_limit(settings, aside.norms_in(state), norms)
    used: list[Outcome] = []
    refused: list[dict[str, Any]] = []
    clipped: list[dict[str, Any]] = []
    for outcome, base, norm in zip(outcomes, bases, norms, strict=True):
        reply, why = within(outcome.reply, method, settings.max_examples, base, norm, limit)
        if why and settings.out_of_bounds == "refuse":
            refused.append({"client": reply.client, "why": "; ".join(why)})
            continue
        if why:
            clipped.append({"client": reply.client, "why": "; ".join(why)})
        used.append(dataclasses.replace(outcome, reply=reply) if why else outcome)
    told: dict[str, Any] = {"clipped": clipped}
    if settings.bounds_norms:
        told |= {"update_norms": [round(norm, 6) for norm in norms], "norm_limit": limit}
    return Bounded(used, refused, norms if settings.norm_quantile else [], told)


def check_defended(settings: Robust, stage: Stage) -> None:
    """Refuse to go on with a robust mean that a method does not use: it merged replies without hub.mean_model."""
    if settings.mean != "mean":
        raise TacitError(
            f"Stage '{stage.name}' makes its model without hub.mean_model, so that robust.mean = \"{settings.mean}\" "
            "defends nothing. In a method of your own, write hub.mean_model(old, replies) for mean_model(replies); "
            'else leave robust.mean out, and write means = "nobody" in the class.'
        )


def bases_of(method: Method, task: Task | None, state: Payload) -> dict[str, Weights]:
    """The weights from which each group of weights that a client sends has moved: as they were sent down."""
    found = {}
    for name, text in method.client_sends.items():
        bare = name.removesuffix("?")
        if kinds.parse(text).word == "weights":
            there = task.send if task is not None and bare in task.send else state
            found[bare] = weights_in(there, bare) if isinstance(there.get(bare), Mapping) else {}
    return found


def _norm(reply: Reply, bases: Mapping[str, Weights]) -> float:
    """Of all groups of weights together."""
    parts = [update_norm(reply.weights(name), base) for name, base in bases.items() if name in reply.send]
    return float(torch.linalg.vector_norm(torch.tensor(parts, dtype=torch.float64))) if parts else 0.0


def norm_limit(settings: Robust, recent: Sequence[float], now: Sequence[float]) -> float | None:
    """The largest norm that is taken as it is: fixed, or a quantile of recent rounds' (in the first round: its own).

    >>> norm_limit(Robust(max_norm=3.0), [], [1.0]), norm_limit(Robust(max_examples=9), [], [1.0])
    (3.0, None)
    >>> settings = Robust(norm_quantile=0.5, norm_factor=2.0)
    >>> norm_limit(settings, [1.0, 2.0, 9.0], [50.0]), norm_limit(settings, [], [1.0, 3.0])
    (4.0, 4.0)
    """
    if settings.max_norm:
        return settings.max_norm
    known = recent or now
    if not (settings.norm_quantile and known):
        return None
    quantile = torch.tensor(known, dtype=torch.float64).quantile(settings.norm_quantile)
    return settings.norm_factor * float(quantile)


def within(
    reply: Reply, method: Method, most: int, bases: Mapping[str, Weights], norm: float, limit: float | None
) -> tuple[Reply, list[str]]:
    """A reply cut to its bounds, and in which way it was out of them."""
    why: list[str] = []
    send: Payload = dict(reply.send)
    examples = reply.examples
    if most and examples > most:
        why.append(f"its number of examples is {examples:g}, at most {most:,} count (robust.max_examples)")
        examples = float(most)
    if most:
        for name, kind in counts_of(method, send):
            value, counted = _fewer(kind, send[name], most)
            if counted > most:
                why.append(f"its '{name}' counts {counted:g} images, at most {most:,} count (robust.max_examples)")
                send[name] = value
    if limit is not None and norm > limit:
        why.append(f"its update has the norm {norm:.4g}, at most {limit:.4g} is taken as it is")
        factor = limit / norm
        send |= {name: shortened(reply.weights(name), base, factor) for name, base in bases.items() if name in send}
    return (dataclasses.replace(reply, send=send, examples=examples) if why else reply), why


def counts_of(method: Method, send: Payload) -> list[tuple[str, kinds.Kind]]:
    """What a client counted: images, of each class or at all."""
    declared = [(name.removesuffix("?"), kinds.parse(text)) for name, text in method.client_sends.items()]
    return [(name, kind) for name, kind in declared if kind.word in ("count", "counts") and name in send]


def _fewer(kind: kinds.Kind, value: Any, most: int) -> tuple[Any, float]:
    """Counts that sum up to no more than `most`, in the same proportions, and what they summed up to."""
    if isinstance(value, Tensor):
        counted = float(value.double().sum())
        return (value.double() * (most / counted)).to(value.dtype) if counted > most else value, counted
    return min(value, most), float(value)
