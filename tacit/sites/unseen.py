"""Secure aggregation at real sites, the server's side: four questions to the sites, of which the third is the training.

| question | what the server sends | what a site answers |
|---|---|---|
| `keys` | nothing | two public keys, new for this round |
| `shares` | the keys of its circle | for each other site a sealed share of its secrets |
| `masked` | the task, and the shares that are sealed for this site | its reply as whole numbers, masked |
| `unmask` | who is in the sum, and who is gone | shares of the former's own masks, of the latter's pairs |

Whoever does not answer a question is asked no further; the sum is over those whose masked reply arrived.
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from tacit.contract.fixed_point import Ring, ring_type
from tacit.contract.method import Task
from tacit.contract.sums import Summation
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.payload import Limits, Payload, Weights
from tacit.core.text import safe
from tacit.engine.secure import Total, too_few
from tacit.sites.secagg import Assembly, Keys, Shares, circle_of
from tacit.sites.wire import Response, unpack

T = TypeVar("T")
ROOM = 1 << 20  # bytes that an answer may have beside its vector
LONGEST_FAULT = 400
SEALED, ASKED, MOST = "tacit:sealed", "tacit:clients", "tacit:most"  # beside what a task sends


def context_of(run: str, step: int) -> bytes:
    """What the secrets of a round are for."""
    return f"{run}/{step}".encode()


class Asking(Protocol):
    """Asks the sites of a round; of each there is the answer, or why there is none."""

    def __call__(
        self, kind: str, contents: Mapping[int, Payload], done: Callable[[int], None]
    ) -> dict[int, bytes | str]: ...


@dataclass
class Round:
    """One sum over sites, step by step: who still takes part, who fell out and why."""

    asking: Asking
    context: bytes
    names: Sequence[str]  # of all sites, by client
    tasks: Mapping[int, Task]
    rule: Summation
    least: int
    refused: list[dict[str, Any]] = field(default_factory=list)
    bytes_up: int = 0

    def ask(
        self,
        kind: str,
        contents: Mapping[int, Payload],
        read: Callable[[int, Payload], T],
        done: Callable[[int], None] = lambda count: None,
    ) -> dict[int, T]:
        """What each of these clients answers to a question; who gives no answer is left out, and why."""
        found: dict[int, T] = {}
        for client, response in self.asking(kind, contents, done).items():
            if isinstance(response, str):
                self.leave_out(client, response)
                continue
            self.bytes_up += len(response)
            try:
                found[client] = read(client, read_answer(response, kind, client, self.rule.nbytes + ROOM))
            except TacitError as error:
                self.leave_out(client, str(error))
        return found

    def leave_out(self, client: int, why: str) -> None:
        self.refused.append({"client": client, "why": f"{self.names[client]}: {safe(why, LONGEST_FAULT)}"})

    def total(self, vector: Ring | None, clients: Collection[int], why: str = "") -> Total:
        return Total(vector, tuple(sorted(clients)), self.refused, self.bytes_up, [None] * len(self.tasks), why=why)

    def too_few(self, left: Collection[int]) -> Total | None:
        return self.total(None, (), too_few(len(left), self.least)) if len(left) < self.least else None


def add_up(current: Round, late: Collection[int], neighbours: int, done: Callable[[int], None]) -> Total:
    """The sum of what the sites of a round send, of whom none was seen alone."""
    keys = current.ask("keys", {client: {} for client in current.tasks}, lambda client, answer: read_keys(answer))
    if few := current.too_few(keys):
        return few
    ring = list(keys)
    secrets.SystemRandom().shuffle(ring)
    circles = {client: circle_of(ring, client, neighbours) for client in keys}
    questions = {client: ask_shares(keys, circles[client], current.least) for client in keys}
    sealed = current.ask("shares", questions, lambda client, answer: read_sealed(answer, client, circles[client]))
    if few := current.too_few(sealed):
        return few
    tasks = {client: masked_task(current, client, sealed, circles[client]) for client in sealed}
    rule = current.rule
    vectors = current.ask("masked", tasks, lambda client, answer: read_vector(answer, rule), done)
    for client in set(vectors) & set(late):
        del vectors[client]
        current.refused.append({"client": client, "why": "came too late"})
    if few := current.too_few(vectors):
        return few
    assembly = Assembly(current.context, current.least, keys, circles, tuple(sealed))
    return _opened(current, assembly, vectors)


def _opened(current: Round, assembly: Assembly, vectors: Mapping[int, Ring]) -> Total:
    """The sum without its masks, by what those in it hand out."""
    alive = sorted(vectors)
    opening = {client: ask_opening(alive, assembly.gone(alive), assembly.circles[client]) for client in alive}
    answers = current.ask("unmask", opening, lambda client, answer: read_shares(answer))
    total = np.zeros(current.rule.length, ring_type(current.rule.bits))
    for client in alive:
        total = total + vectors[client]
    try:
        return current.total(assembly.open(total, alive, answers), alive)
    except TacitError as error:
        return current.total(None, (), f"the sum could not be opened ({safe(error, LONGEST_FAULT)}): the model stays")


def wire_type(bits: int) -> torch.dtype:
    """As what masked numbers travel: a payload has no unsigned ones of this width, and bytes are bytes."""
    return torch.int32 if bits == 32 else torch.int64


def read_answer(response: bytes, kind: str, client: int, largest: int) -> Payload:
    """The payload of an answer, or a TacitError that says why it is none."""
    header, content = unpack(response, Response, largest)
    if header.kind == "refused":
        raise TacitError(f"refused: {header.why}")
    if header.kind != kind or header.client != client:
        raise TacitError("an answer to another question")
    return payload.from_bytes(content, Limits(total=largest))


# --- Questions and answers as payloads -----------------------------------------------------------------------------


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(value: object) -> bytes:
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        raise TacitError("bytes were expected")
    return value.numpy().tobytes()


def packed_bytes(parts: Mapping[int, bytes]) -> Weights:
    """Bytes by client, as a group of a payload.

    >>> unpacked_bytes({"them": packed_bytes({3: b"abc"})}, "them")
    {3: b'abc'}
    """
    return {str(client): as_tensor(data) for client, data in parts.items()}


def unpacked_bytes(content: Payload, name: str) -> dict[int, bytes]:
    group = content.get(name)
    if not isinstance(group, Mapping) or not all(key.isascii() and key.isdecimal() for key in group):
        raise TacitError(f"'{name}' is not what it should be")
    return {int(client): as_bytes(data) for client, data in group.items()}


def keys_payload(keys: Keys) -> Payload:
    return {"mask": as_tensor(keys.mask), "seal": as_tensor(keys.seal)}


def read_keys(answer: Payload) -> Keys:
    return Keys(as_bytes(answer.get("mask")), as_bytes(answer.get("seal")))


def ask_shares(keys: Mapping[int, Keys], circle: Sequence[int], threshold: int) -> Payload:
    masks = packed_bytes({client: keys[client].mask for client in circle})
    seals = packed_bytes({client: keys[client].seal for client in circle})
    return {"masks": masks, "seals": seals, "threshold": threshold}


def read_circle(content: Payload, least: int) -> tuple[dict[int, Keys], int]:
    """The keys of a circle, and how many of it open a sum: no fewer than the experiment says."""
    masks, seals, threshold = (
        unpacked_bytes(content, "masks"),
        unpacked_bytes(content, "seals"),
        content.get("threshold"),
    )
    if set(masks) != set(seals) or not isinstance(threshold, int):
        raise TacitError("the keys of a circle are not what they should be")
    if threshold < least:
        raise TacitError(f"{threshold} sites could open a sum, fewer than the experiment allows")
    return {client: Keys(masks[client], seals[client]) for client in masks}, threshold


def read_sealed(answer: Payload, client: int, circle: Sequence[int]) -> dict[int, bytes]:
    sealed = unpacked_bytes(answer, "sealed")
    if set(sealed) != set(circle) - {client}:
        raise TacitError("it sealed shares for others than it was asked to")
    return sealed


def masked_task(
    current: Round, client: int, sealed: Mapping[int, Mapping[int, bytes]], circle: Sequence[int]
) -> Payload:
    """A client's task, with the shares that others sealed for it and with what its numbers must fit into."""
    mine = {other: sealed[other][client] for other in circle if other in sealed and other != client}
    rule = current.rule
    return {**current.tasks[client].send, SEALED: packed_bytes(mine), ASKED: rule.clients, MOST: float(rule.most)}


def read_bounds(content: Payload) -> tuple[int, float]:
    """How many clients a sum is over, at most, and the most examples of one."""
    asked, most = content.get(ASKED), content.get(MOST)
    if not isinstance(asked, int) or not isinstance(most, float) or asked < 2 or not 1 <= most <= 2.0**53:
        raise TacitError("the bounds of a sum are not what they should be")
    return asked, most


def vector_payload(vector: Ring) -> Payload:
    width = vector.dtype.itemsize
    return {"masked": torch.from_numpy(vector.view(f"<i{width}").copy())}


def read_vector(answer: Payload, rule: Summation) -> Ring:
    vector = answer.get("masked")
    if not isinstance(vector, Tensor) or vector.shape != (rule.length,) or vector.dtype != wire_type(rule.bits):
        raise TacitError("its masked reply is not as long as the others'")
    numbers: Ring = vector.numpy().view(ring_type(rule.bits))
    return numbers


def ask_opening(alive: Sequence[int], gone: Sequence[int], circle: Sequence[int]) -> Payload:
    return {
        "alive": torch.tensor([client for client in alive if client in circle], dtype=torch.int64),
        "gone": torch.tensor([client for client in gone if client in circle], dtype=torch.int64),
    }


def shares_payload(shares: Shares) -> Payload:
    return {"seeds": packed_bytes(shares.seeds), "keys": packed_bytes(shares.keys)}


def read_shares(answer: Payload) -> Shares:
    return Shares(unpacked_bytes(answer, "seeds"), unpacked_bytes(answer, "keys"))
