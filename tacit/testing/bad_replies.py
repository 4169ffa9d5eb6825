"""Bad replies, made from honest ones by what a method declares: a small fixed set, each of which must be refused."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tacit.contract import kinds
from tacit.contract.kinds import GROUPS, NUMBERS, Kind, Registration
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client
from tacit.core.payload import Payload, difference
from tacit.testing.observe import Wrapped

HUGE = 3e38  # the largest numbers of float32 are 3.4e38
HONEST = 2  # clients that answer as they should


@dataclass(frozen=True)
class Case:
    """An honest reply, and what is known of the client that gave it."""

    task: Task
    reply: Reply
    party: Registration


@dataclass(frozen=True)
class Harm:
    """One way to spoil a reply. `spoil` gives None for a reply to which it cannot be done."""

    what: str
    name: str  # of the entry; '': the reply as a whole
    spoil: Callable[[Case], Reply | None]


def harms_of(declared: Mapping[str, str]) -> list[Harm]:
    """The bad replies that a declaration must keep out.

    >>> [harm.what for harm in harms_of({"sure": "share"})][:3]
    ["'sure' is nan", "'sure' is 1.5", "'sure' is -1.0"]
    >>> len(harms_of({"model": "weights"})), len(harms_of({"model": "weights", "counts": "counts[K]"}))
    (9, 14)
    """
    found: list[Harm] = []
    for name, text in declared.items():
        bare, kind = name.removesuffix("?"), kinds.parse(text)
        found += _numbers(bare, kind) if kind.word in NUMBERS else _tensors(bare, kind)
        if bare == name:
            found.append(Harm(f"'{bare}' is missing", bare, _missing(bare, kind)))
    first = next((name.removesuffix("?") for name in declared), "")
    if first:
        found.append(Harm(f"'{first}' is a list", first, _replaced(first, lambda value: [1.0])))
    found += [
        Harm(f"its number of examples is {number:g}", "", _examples(number)) for number in (math.nan, -1.0, 1e300)
    ]
    return [*found, Harm("it holds 'undeclared'", "", _more)]


def _numbers(name: str, kind: Kind) -> list[Harm]:
    bad = {"number": (math.nan, 1e300), "share": (math.nan, 1.5, -1.0), "count": (-1.0, 0.5, 1e300)}[kind.word]

    def putting(number: float) -> Callable[[Any], object]:
        return lambda value: number

    return [Harm(f"'{name}' is {number}", name, _replaced(name, putting(number))) for number in bad]


def _tensors(name: str, kind: Kind) -> list[Harm]:
    """For a tensor, or for one of a group: NaN, far too large, another shape, and below zero where nothing is.

    What is declared as "any" may have any shape and size; that it may be less is told by `wide_entries`.
    """
    ways: dict[str, Callable[[Tensor], Tensor | None]] = {
        f"'{name}' holds NaN": lambda tensor: _filled(tensor, math.nan)
    }
    if kind.word != "any":
        ways[f"'{name}' holds {HUGE:g}"] = lambda tensor: _filled(tensor, HUGE)
        ways[f"'{name}' has another shape"] = lambda tensor: tensor.flatten()[:-1] if tensor.numel() > 1 else None
    if kind.word not in ("", *GROUPS):
        ways[f"'{name}' is below 0"] = lambda tensor: _filled(tensor, -1.0)
    return [Harm(what, name, _spoilt(name, way)) for what, way in ways.items()]


def _filled(tensor: Tensor, number: float) -> Tensor | None:
    return torch.full_like(tensor, number) if tensor.is_floating_point() and tensor.numel() else None


def _spoilt(name: str, way: Callable[[Tensor], Tensor | None]) -> Callable[[Case], Reply | None]:
    """Change a tensor, or the first of a group that it can be done to."""

    def spoil(case: Case) -> Reply | None:
        value = case.reply.send.get(name)
        if isinstance(value, Tensor):
            changed = way(value)
            return _with(case.reply, name, changed) if changed is not None else None
        group = dict(value) if isinstance(value, Mapping) else {}
        for inner, tensor in group.items():
            if (changed := way(tensor)) is not None:
                return _with(case.reply, name, {**group, inner: changed})
        return None

    return spoil


def wide_entries(declared: Mapping[str, str], sent: Payload, reply: Reply) -> list[str]:
    """What is declared as "any" although it has the names and shapes of weights that were sent down.

    >>> weights: Payload = {"model": {"w": torch.zeros(2)}}
    >>> wide_entries({"model": "any"}, weights, Reply(send=weights, examples=1))
    ['model']
    >>> wide_entries({"model": "any"}, weights, Reply(send={"model": torch.zeros(2)}, examples=1))
    []
    """
    groups = [group for group in sent.values() if isinstance(group, Mapping)]
    names = [name.removesuffix("?") for name, text in declared.items() if kinds.parse(text).word == "any"]
    values = {name: reply.send[name] for name in names if name in reply.send}
    return [
        name
        for name, value in values.items()
        if isinstance(value, Mapping) and value and any(not difference(value, group) for group in groups)
    ]


def _replaced(name: str, make: Callable[[Any], object]) -> Callable[[Case], Reply | None]:
    return lambda case: _with(case.reply, name, make(case.reply.send[name])) if name in case.reply.send else None


def _missing(name: str, kind: Kind) -> Callable[[Case], Reply | None]:
    def spoil(case: Case) -> Reply | None:
        if not kinds.is_due(kind, case.party) or name not in case.reply.send:
            return None
        return replace(case.reply, send={other: value for other, value in case.reply.send.items() if other != name})

    return spoil


def _examples(number: float) -> Callable[[Case], Reply | None]:
    return lambda case: replace(case.reply, examples=number)


def _more(case: Case) -> Reply:
    return _with(case.reply, "undeclared", 1.0)


def _with(reply: Reply, name: str, value: Any) -> Reply:
    send: Payload = {**reply.send, name: value}
    return replace(reply, send=send)


@dataclass
class Attack:
    """Who answers badly, and how: each client after the first ones takes a harm that its reply allows."""

    harms: list[Harm]
    honest: list[int] = field(default_factory=list)
    chosen: dict[int, Harm] = field(default_factory=dict)
    spoilt: Counter[int] = field(default_factory=Counter)  # bad replies by client

    def answer(self, case: Case, client: int) -> Reply:
        if client not in self.chosen and client not in self.honest:
            self._choose(case, client)
        harm = self.chosen.get(client)
        bad = harm.spoil(case) if harm else None
        self.spoilt[client] += bad is not None
        return case.reply if bad is None else bad

    def _choose(self, case: Case, client: int) -> None:
        fitting = next((harm for harm in self.harms if harm.spoil(case) is not None), None)
        if len(self.honest) < HONEST or fitting is None:
            self.honest.append(client)
        else:
            self.harms.remove(fitting)
            self.chosen[client] = fitting


@dataclass(frozen=True)
class Attacked(Wrapped):
    """A method some of whose clients answer badly."""

    attack: Attack

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        reply = self.inner.client_train(task, memory, me)
        party = Registration(labeled=len(me.shard.labeled) > 0, unlabeled=len(me.shard.unlabeled) > 0)
        return self.attack.answer(Case(task, reply, party), me.number)


def at_the_edge(reply: Reply, declared: Mapping[str, str]) -> Reply:
    """The least that may be sent: every number 0, every count 0, nothing learned from any example."""
    send: dict[str, Any] = dict(reply.send)
    for name, text in declared.items():
        bare, kind = name.removesuffix("?"), kinds.parse(text)
        value = send.get(bare)
        if kind.word in NUMBERS and bare in send:
            send[bare] = 0.0
        elif kind.word in ("counts", "distributions") and isinstance(value, Tensor):
            send[bare] = torch.zeros_like(value)
    return replace(reply, send=send, examples=0.0)
