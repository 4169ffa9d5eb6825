"""A method behind glass: it does what it does, and everything that crosses the wall is written down."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from tacit.contract.kinds import Registration
from tacit.contract.method import UNKNOWN, Held, Method, Reply, Stage, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, seal
from tacit.core.settings import Experiment

OF_SUMS = ("merges_sums", "merges_each", "asks_labeled")
DECLARATIONS = ("server_sends", "client_sends", "client_keeps")


@dataclass(frozen=True)
class Wrapped(Method):
    """A method that passes every question on to another one; what is to be changed is overridden."""

    inner: Method

    def __post_init__(self) -> None:
        for name in (*DECLARATIONS, *OF_SUMS, "citation", "placements", "presets"):
            object.__setattr__(self, name, getattr(self.inner, name))

    def __getattr__(self, name: str) -> Any:  # what is no verb of the contract
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def before(self) -> tuple[Stage, ...]:
        return self.inner.before()

    def refuses(self, experiment: Experiment) -> str:
        return self.inner.refuses(experiment)

    def check_installed(self) -> None:
        self.inner.check_installed()

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int] | None:
        return self.inner.estimated_passes(epochs, held)

    def estimated_tasks(self, asked: int) -> int:
        return self.inner.estimated_tasks(asked)

    def estimated_weights_bytes(self, classifier: int, channels: int, features: int = 0) -> int:
        return self.inner.estimated_weights_bytes(classifier, channels, features)

    def most_examples(self, images: int, largest: int) -> float:
        return self.inner.most_examples(images, largest)

    def needs_each(self, experiment: Experiment) -> str:
        return self.inner.needs_each(experiment)

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        return self.inner.sum_weight(reply, labeled)

    def most_sum_weight(self, most: float) -> float:
        return self.inner.most_sum_weight(most)

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        return self.inner.server_start(hub, past)

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return self.inner.server_send(state, hub)

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        return self.inner.client_train(task, memory, me)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        return self.inner.server_merge(state, replies, hub)

    def server_answer(self, state: Payload, hub: Hub) -> Weights | None:
        return self.inner.server_answer(state, hub)


@dataclass(frozen=True)
class Crossing:
    """One client's work in one round: what it was sent, and what it answered, as they were at that moment."""

    stage: str
    round: int
    client: int
    method: Method
    sent: Payload
    reply: Reply
    party: Registration

    @property
    def where(self) -> str:
        return f"client {self.client} in round {self.round} of stage '{self.stage}'"


@dataclass(frozen=True)
class Merging:
    """What a merge was given."""

    method: Method
    state: Payload
    replies: tuple[Reply, ...]
    hub: Hub


@dataclass
class Notebook:
    """What was seen of a run."""

    crossings: list[Crossing] = field(default_factory=list)
    merges: list[Merging] = field(default_factory=list)
    changes: dict[str, str] = field(default_factory=dict)  # what was changed that belongs to others: where first
    sent: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)  # name, the client's own, as it was then

    def compare(self, what: str, before: Payload, now: Mapping[str, Any]) -> None:
        """Write down if something that was given to a verb is not as it was."""
        if what not in self.changes and (name := first_change(before, now)):
            self.changes[what] = name

    @property
    def changed_after_sending(self) -> str:
        """The first tensor that a client went on changing after it had sent it; '' if there is none."""
        return next((name for name, own, then in self.sent if not same(own, then)), "")


@dataclass(frozen=True)
class Observed(Wrapped):
    """A method that is looked at while it works. What it is given and what it gives stays as it is."""

    notebook: Notebook

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        before = seal(state)
        tasks = self.inner.server_send(state, hub)
        self.notebook.compare("server_send changes the state", before, state)
        return tasks

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        sent, remembered = seal(task.send), seal(memory)
        reply = self.inner.client_train(task, memory, me)
        self.notebook.compare("client_train changes what it was sent", sent, task.send)
        self.notebook.compare("client_train changes its memory", remembered, memory)
        if isinstance(reply, Reply):
            party = Registration(labeled=len(me.shard.labeled) > 0, unlabeled=len(me.shard.unlabeled) > 0)
            then = replace(reply, send=copied(reply.send), keep=copied(reply.keep))
            self.notebook.crossings.append(Crossing(me.stage, me.round, me.number, self.inner, sent, then, party))
            self.notebook.sent += [
                (name, own, copy)
                for (name, own), (_, copy) in zip(entries(reply.send), entries(then.send), strict=True)
                if isinstance(own, Tensor) and isinstance(copy, Tensor)
            ]
        return reply

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        before, copies = seal(state), tuple(replace(reply, send=seal(reply.send)) for reply in replies)
        merged = self.inner.server_merge(state, replies, hub)
        self.notebook.compare("server_merge changes the state", before, state)
        for reply, copy in zip(replies, copies, strict=False):
            self.notebook.compare("server_merge changes the replies", copy.send, reply.send)
        self.notebook.merges.append(Merging(self.inner, before, copies, hub))
        return merged

    def server_answer(self, state: Payload, hub: Hub) -> Weights | None:
        before = seal(state)
        weights = self.inner.server_answer(state, hub)
        self.notebook.compare("server_answer changes the state", before, state)
        return weights


def entries(parts: object) -> Iterator[tuple[str, object]]:
    """Every entry with its full name, whatever it is: a reply may hold what no payload may.

    >>> import torch
    >>> [name for name, _ in entries({"model": {"w": torch.zeros(2)}, "n": 4, "odd": [1]})]
    ['model/w', 'n', 'odd']
    """
    for name, value in parts.items() if isinstance(parts, Mapping) else ():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", entry) for inner, entry in value.items())
        else:
            yield str(name), value


def copied(parts: Any) -> Any:
    """The same with copies of the tensors; unlike `seal` it takes what is no payload."""
    if isinstance(parts, Tensor):
        return parts.detach().clone()
    return {name: copied(value) for name, value in parts.items()} if isinstance(parts, Mapping) else parts


def first_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first entry that is new, gone or other than it was; '' if there is none.

    >>> import torch
    >>> first_change({"w": torch.zeros(2), "n": 1}, {"w": torch.zeros(2), "n": 1})
    ''
    >>> first_change({"w": torch.zeros(2)}, {"w": torch.ones(2)}), first_change({}, {"n": 1})
    ('w', 'n')
    """
    old, new = dict(entries(before)), dict(entries(now))
    for name in {**old, **new}:
        if name not in old or name not in new or not same(old[name], new[name]):
            return name
    return ""


def same(one: object, other: object) -> bool:
    """Whether two entries are equal; NaN is equal to NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    return one == other or (one != one and other != other)


def observed(stages: tuple[Stage, ...], notebook: Notebook) -> tuple[Stage, ...]:
    """The same stages, each with its method behind glass."""
    return tuple(replace(stage, method=Observed(stage.method, notebook)) for stage in stages)
