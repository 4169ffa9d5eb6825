"""Secure aggregation: a client's reply as numbers that can be added up, and a reply made of the sum.

A merge that needs only sums (`Method.merges_sums`) is given one reply in place of all: their mean, by the weights that
the merge would give them. So the method's own `server_merge` serves both, and never sees a single client's reply.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tacit.contract import kinds
from tacit.contract.fixed_point import FixedPoint, Floats, Ring, clipped, ring_type
from tacit.contract.kinds import Kind
from tacit.contract.method import Method, Reply
from tacit.core.errors import TacitError
from tacit.core.payload import Payload, Value
from tacit.core.safeguards import Privacy

WAYS = ("mean", "sum", "rows")
WHOLE = 2.0**20  # range of whole numbers among weights: BN's counters of steps
UNIT = 1.01  # range of shares and distributions: a mean of probabilities may be off by a rounding


@dataclass(frozen=True)
class Slot:
    """Where one tensor (or number) of a reply lies in the vector, and how it gets there."""

    name: str
    inner: str  # its name in a group of tensors; '' if it is none of a group
    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: a number
    way: str
    limit: float
    clips: bool  # values beyond the limit are clipped; else they were refused before

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def weights(self) -> bool:
        """Whether it holds weights in the narrow sense: no counters, no variances."""
        floats = self.dtype is not None and self.dtype.is_floating_point
        return self.way == "mean" and bool(self.inner) and floats and not self.inner.endswith("running_var")


@dataclass(frozen=True)
class Summed:
    """What a sum tells: one reply in place of all, and how exact it is."""

    reply: Reply
    clipped: float  # share of the values that were beyond the range, the mean over clients
    error: float  # of each weight in the mean, at most


@dataclass(frozen=True)
class Summation:
    """How the replies of one round become vectors, and their sum a reply. All parties have the same one."""

    method: Method
    slots: tuple[Slot, ...]
    bits: int
    clients: int  # that are asked, at most so many are in the sum
    most: float  # examples of a client

    @property
    def means(self) -> tuple[str, ...]:
        """The names that have a mean, each with a weight of its own: a client may not send all of them."""
        return tuple(dict.fromkeys(slot.name for slot in self.slots if slot.way == "mean"))

    @property
    def most_weight(self) -> float:
        return max(self.method.most_sum_weight(self.most), 2.0**-20)

    @property
    def length(self) -> int:
        """Numbers in the vector."""
        return len(self.means) + 3 + sum(slot.size for slot in self.slots)

    @property
    def nbytes(self) -> int:
        return self.length * self.bits // 8

    def point(self, most: float) -> FixedPoint:
        """Steps for values of which each client has no more than this."""
        return FixedPoint.wide(self.bits, self.clients * most)

    def encode(self, reply: Reply, labeled: bool) -> Ring:
        """The vector of a client's reply, which was looked at before: it is finite and as declared."""
        weight = self.method.sum_weight(reply, labeled)
        if not 0 <= weight <= self.most_weight * (1 + 1e-9):
            raise TacitError(f"a reply weighs {weight:g} in a sum, from 0 to {self.most_weight:g} were expected")
        outside, parts = 0, list[Ring]()
        for slot in self.slots:
            values, counts = _values(reply.send, slot), weight if slot.way == "mean" else 1.0
            values, more = clipped(values, slot.limit)
            outside += more if slot.clips else 0
            most = self.most_weight if slot.way == "mean" else 1.0
            parts.append(self.point(most * slot.limit).encode(values * counts))
        present = [weight if name in reply.send else 0.0 for name in self.means]
        share = outside / max(sum(slot.size for slot in self.slots if slot.clips), 1)
        head = [
            self.point(self.most_weight).encode(np.array(present)),
            self.point(self.most).encode(np.array([reply.examples])),
            self.point(1.0).encode(np.array([float(reply.examples > 0), share])),
        ]
        return np.concatenate([*head, *parts])

    def decode(self, total: Ring, clients: int) -> Summed:
        """The reply that stands for so many clients, from the sum of their vectors."""
        if total.shape != (self.length,) or total.dtype != ring_type(self.bits):
            raise TacitError(f"a sum of {total.shape} numbers, {self.length} were expected")
        counts = len(self.means)
        weights = dict(zip(self.means, self.point(self.most_weight).decode(total[:counts]).tolist(), strict=True))
        examples = float(self.point(self.most).decode(total[counts : counts + 1])[0])
        learned, outside = self.point(1.0).decode(total[counts + 1 : counts + 3]).tolist()
        send: Payload = {}
        for slot, part in self._parts(total[counts + 3 :]):
            if (value := self._value(slot, part, weights)) is None:
                continue
            if slot.inner:
                group = send.setdefault(slot.name, {})
                assert isinstance(group, dict)
                group[slot.inner] = value
            else:
                send[slot.name] = value if slot.dtype is not None else float(value)
        reply = Reply(send=send, examples=examples, parties=max(round(learned), 1))
        return Summed(reply, outside / max(clients, 1), self._error(weights, clients))

    def _parts(self, total: Ring) -> Iterator[tuple[Slot, Ring]]:
        start = 0
        for slot in self.slots:
            yield slot, total[start : start + slot.size]
            start += slot.size

    def _value(self, slot: Slot, part: Ring, weights: Mapping[str, float]) -> Tensor | None:
        """The sum or mean of one slot; None where nobody sent it and not everybody must."""
        numbers = self.point((self.most_weight if slot.way == "mean" else 1.0) * slot.limit).decode(part)
        numbers = numbers.reshape(slot.shape)
        if slot.way == "mean":
            weight = weights[slot.name]
            if weight <= 0 and not _always(self.method, slot.name):
                return None
            numbers = numbers / weight if weight > 0 else np.zeros_like(numbers)
        elif slot.way == "rows":
            numbers = mean_rows(numbers)
        whole = slot.dtype is not None and not slot.dtype.is_floating_point
        return torch.from_numpy(np.asarray(np.rint(numbers) if whole else numbers)).to(slot.dtype or torch.float64)

    def _error(self, weights: Mapping[str, float], clients: int) -> float:
        """Half a step for each client in Σ w·x and in Σ w, over Σ w: the most that a weight in a mean can be off."""
        errors = [0.0]
        for slot in self.slots:
            if slot.weights and weights[slot.name] > 0:
                numerator = self.point(self.most_weight * slot.limit).step
                denominator = self.point(self.most_weight).step * slot.limit
                errors.append(clients / 2 * (numerator + denominator) / weights[slot.name])
        return max(errors)


def mean_rows(total: Floats) -> Floats:
    """Rows of which each is a sum of distributions, as their means: each over those who know it, who are as many as the
    row sums to; a row that nobody knows stays zero.

    >>> mean_rows(np.array([[1.5, 0.5], [0.0, 0.0]]))
    array([[0.75, 0.25],
           [0.  , 0.  ]])
    """
    known = total.sum(axis=-1, keepdims=True)
    return np.where(known > 0.5, total / np.maximum(known, 0.5), 0.0)


def summation(
    method: Method, sent: Mapping[str, Value], classes: int, privacy: Privacy, clients: int, most: float
) -> Summation:
    """The vectors of a round in which so many clients are sent this; each tells of `most` examples, at most."""
    slots = [slot for name in method.merges_sums for slot in _slots(method, name, sent, classes, privacy, most)]
    return Summation(method, tuple(slots), privacy.bits, clients, most)


def _slots(
    method: Method, name: str, sent: Mapping[str, Value], classes: int, privacy: Privacy, most: float
) -> Iterator[Slot]:
    kind, way = kinds.parse(declared(method, name)), method.merges_sums[name]
    if kind.word == "weights":
        like = sent.get(name)
        if not isinstance(like, Mapping):
            raise TacitError(f"'{name}' cannot be summed: clients send it as weights, but are not sent any.")
        for inner, tensor in like.items():
            yield Slot(name, inner, tuple(tensor.shape), tensor.dtype, way, _limit(inner, tensor, privacy), True)
    elif kind.word in kinds.NUMBERS:
        yield Slot(name, "", (1,), None, way, _plain_limit(kind, privacy, most), kind.word == "number")
    else:
        shape = tuple(kind.sizes(classes))
        yield Slot(name, "", shape, kind.dtype, way, _plain_limit(kind, privacy, most), kind.word == "")


def _limit(inner: str, tensor: Tensor, privacy: Privacy) -> float:
    """The range of a tensor among weights: variances have the square of it, counters their own."""
    if not tensor.is_floating_point():
        return WHOLE
    return max(privacy.range**2, privacy.range) if inner.endswith("running_var") else privacy.range


def _plain_limit(kind: Kind, privacy: Privacy, most: float) -> float:
    if kind.word in ("count", "counts"):
        return most
    return UNIT if kind.word in ("share", "distribution", "distributions") else privacy.range


def _values(send: Payload, slot: Slot) -> Floats:
    """What a client sent in this place; zeros where it sent nothing."""
    value = send.get(slot.name)
    if value is None:
        return np.zeros(slot.size)
    if isinstance(value, Mapping):
        value = value[slot.inner]
    if isinstance(value, Tensor):
        return value.detach().cpu().double().numpy().reshape(-1)
    return np.array([float(value)])


def declared(method: Method, name: str) -> str:
    """What a method declares of a name that clients send, whether or not they always do."""
    return method.client_sends.get(name) or method.client_sends[f"{name}?"]


def _always(method: Method, name: str) -> bool:
    """Whether every client sends it."""
    return name in method.client_sends and not kinds.parse(method.client_sends[name]).due


# --- Who can, and who cannot ---------------------------------------------------------------------------------------


def why_not(method: Method) -> str:
    """Why a method's declaration does not say that sums are enough for its merge; '' if it does.

    A class that changes `server_merge` says anew what that needs: what it inherits was said of another merge.
    """
    if method.merges_each:
        return method.merges_each
    if not method.merges_sums:
        return "it does not declare that sums are enough for its server_merge (merges_sums)"
    if not said_of_this_merge(method):
        return "it changes server_merge, and does not declare anew that sums are enough for it (merges_sums)"
    for name, way in method.merges_sums.items():
        if name not in method.client_sends and f"{name}?" not in method.client_sends:
            return f"it declares a sum of '{name}', which clients do not send (client_sends)"
        kind = kinds.parse(declared(method, name))
        if way not in WAYS or kind.word == "any" or (way == "rows") != (kind.word == "distributions"):
            return f'it declares \'{name}\' as "{way}", which cannot be of "{declared(method, name)}"'
    return ""


def said_of_this_merge(method: Method) -> bool:
    """Whether what a method declares of sums was declared beside its `server_merge`, or below."""
    if "merges_sums" in vars(method):  # by its options
        return True
    for base in type(method).__mro__:
        if "merges_sums" in vars(base):
            return True
        if "server_merge" in vars(base):
            return False
    return False


def summed(rule: Summation, replies: Iterable[Reply], labeled: Container[int]) -> Ring:
    """The sum of replies, with nothing masked: masks cancel, so it is the very sum that real sites end with."""
    total = np.zeros(rule.length, ring_type(rule.bits))
    for reply in replies:  # one at a time: they may lie on disk
        total += rule.encode(reply, reply.client in labeled)
    return total
