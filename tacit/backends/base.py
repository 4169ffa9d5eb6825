"""What the engine asks of a backend, and what runs one client in every one of them."""

import dataclasses
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tacit.backends.attack import attacked, attacking_shard
from tacit.backends.protect import protected, without_share
from tacit.contract.bank import Banks
from tacit.contract.method import Method, Reply, Stage, Task
from tacit.contract.parties import Client, Labeled, NetPool, RoundInfo, Setup, Shard
from tacit.contract.parts import shard_in_turn
from tacit.core.payload import Payload, Weights, at_hand, check, nbytes, set_aside
from tacit.core.text import safe
from tacit.evaluation.paired import right_patterns
from tacit.evaluation.scores import PREDICT_BATCH, audit, tally
from tacit.pieces.train import predict
from tacit.runs.memory import ClientMemory

IN_MEMORY = 1 << 29  # bytes of replies: the eleven ResNet-18s of an ordinary round need not be read from disk
NOTHING = Reply(send={}, examples=0)
MOST_METRICS, LONGEST_METRIC = 100, 100  # as in the header of an answer from a real site


@dataclass(frozen=True)
class Outcome:
    """A client's reply (what it keeps is already on its disk) and what only a simulation knows about it."""

    reply: Reply
    audit: dict[str, list[float]] | None
    seconds: float
    fault: str = ""  # why there is no reply: the site was gone, or its answer was refused
    cpu: float | None = None  # seconds of computing, where they are known
    clients: tuple[int, ...] = ()  # secure aggregation: all whose mean the reply is

    @property
    def parties(self) -> tuple[int, ...]:
        """Whose reply it is."""
        return self.clients or (self.reply.client,)


class Backend(Protocol):
    """Runs clients. Outcomes come in the order of the tasks, whoever was ready first."""

    def run(
        self, stage: Stage, round_info: RoundInfo, tasks: Sequence[Task], done: Callable[[int], None]
    ) -> list[Outcome]: ...

    def predict_test(self, weights: Weights) -> Tensor: ...

    def validate(self, weights: Weights) -> Tensor:
        """The tally (`evaluation.scores.tally`) of a model over what all parties keep back."""
        ...

    def compare(self, models: Sequence[Weights]) -> Tensor:
        """The right answers of several models (`evaluation.paired.right_patterns`) over what all parties keep back."""
        ...

    def memory_bytes(self) -> int:
        """What all clients keep, on their disks, where this can be seen."""
        ...

    def close(self) -> None: ...


def waves(tasks: Sequence[Task]) -> Iterator[list[tuple[int, Task]]]:
    """Tasks with their places, in waves in which no client occurs twice: a client never has two at once.

    >>> [[place for place, _ in wave] for wave in waves([Task(0, {}), Task(1, {}), Task(0, {}, group=1)])]
    [[0, 1], [2]]
    """
    left = list(enumerate(tasks))
    while left:
        busy: set[int] = set()
        wave: list[tuple[int, Task]] = []
        later: list[tuple[int, Task]] = []
        for place, task in left:
            (later if task.client in busy else wave).append((place, task))
            busy.add(task.client)
        yield wave
        left = later


class Inbox:
    """The replies of a round until they are merged: at hand if all of them fit into memory, else each on disk."""

    def __init__(self, folder: Path, budget: int = IN_MEMORY) -> None:
        self.folder = folder
        self.budget = budget
        self.expected = 0
        self.outcomes: dict[int, Outcome] = {}

    def __len__(self) -> int:
        return len(self.outcomes)

    def open(self, expected: int) -> None:
        """For so many replies; nothing of the round before is needed any more."""
        self.clear()
        self.expected = expected

    def path(self, name: str | int) -> Path:
        """Where something of this round may lie."""
        return self.folder / f"{name}.safetensors"

    def put(self, place: int, outcome: Outcome) -> None:
        """Take in the reply to the task at this place."""
        send = outcome.reply.send
        many = nbytes(send) * self.expected > self.budget  # taking all for as large as this one
        send = set_aside(send, self.path(place)) if many else at_hand(send)
        self.outcomes[place] = dataclasses.replace(outcome, reply=dataclasses.replace(outcome.reply, send=send))

    def in_order(self) -> list[Outcome]:
        """All of them, in the order of the tasks, whoever was ready first."""
        return [self.outcomes[place] for place in sorted(self.outcomes)]

    def clear(self) -> None:
        self.outcomes = {}
        shutil.rmtree(self.folder, ignore_errors=True)


class Shards(Protocol):
    """Who has the data of the clients that run here: in a simulation all of them, at a real site one."""

    def client_shard(self, client: int) -> Shard: ...

    def truth(self, client: int) -> Tensor: ...

    def test(self) -> Labeled: ...

    def validation(self, client: int) -> Labeled:
        """What a client keeps back to judge models by; -1: the server."""
        ...


class Worker:
    """One process's share of the work: it has the data, the clients' disks and a few nets; one client at a time."""

    def __init__(self, setup: Setup, federation: Shards, memory: ClientMemory) -> None:
        self.federation = federation
        self.memory = memory
        self.setup = setup
        self.net_pool = NetPool(setup)
        self.banks = Banks(setup.features)

    def run(self, stage: Stage, round_info: RoundInfo, wave: int, task: Task) -> Outcome:
        memory = self.memory.read(task.client, round_info.step, wave)
        outcome, keep = self.train(stage, round_info, task, memory)
        self.memory.write(task.client, round_info.step, wave, keep)
        return outcome

    def train(self, stage: Stage, round_info: RoundInfo, task: Task, memory: Payload) -> tuple[Outcome, Payload]:
        """One client's round, without its disk: what it answers, and what it wants to keep."""
        started, cpu = time.perf_counter(), time.process_time()
        self.net_pool.clear()
        shard = self.banks.of(task.client, lambda: self.federation.client_shard(task.client))
        truth = self.federation.truth(task.client)
        shard = attacking_shard(shard, truth, task.client, self.setup)
        turn = None
        if self.setup.train.parts > 1 and stage.method.in_parts:
            turn = shard_in_turn(
                shard, self.setup.train.parts, round_info.round, self.setup.seed, task.client, round_info.stage
            )
        me = Client(self.setup, shard, round_info, task.client, task.group, self.net_pool, turn)
        try:
            reply = stage.method.client_train(without_share(task), memory, me)
            if not isinstance(reply, Reply):
                raise TypeError(f"client_train returned a {type(reply).__name__}, not a Reply")
            check(reply.keep)
            counts = audit(me.labelling, truth[me.part], me.classes)
        except Exception as error:
            error.add_note(
                f"while client {task.client} trained in round {round_info.round} of stage '{round_info.stage}'"
            )
            raise
        fault = unsendable(stage.method, reply)
        sent = self._leaving(stage.method, plain_reply(reply), task, round_info) if not fault else NOTHING
        bare = dataclasses.replace(sent, client=task.client, group=task.group)
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        return Outcome(bare, counts, seconds, fault, cpu), reply.keep

    def _leaving(self, method: Method, reply: Reply, task: Task, round_info: RoundInfo) -> Reply:
        """A reply as it leaves: made bad by an attacker of a simulation, protected by [privacy]."""
        bad = attacked(reply, task, self.setup)
        return protected(bad, method, task, self.setup, round_info)

    def predict_test(self, weights: Weights, part: slice) -> Tensor:
        """The probabilities of some of the test images."""
        who = "test", part.start, part.stop
        return self._predict(weights, self.banks.of_images(who, lambda: self.federation.test().images[part]))

    def validate(self, weights: Weights, clients: Iterable[int]) -> Tensor:
        """The sum of the tallies of a model over what these clients keep back. Each predicts its own, so that the
        numbers are those of real sites."""
        counts = torch.zeros(3, len(self.setup.classes), dtype=torch.float64)
        for client in clients:
            kept = self.federation.validation(client)
            if len(kept):
                shown = self.banks.of_images(("kept back", client), lambda kept=kept: kept.images)  # type: ignore[misc]
                counts += tally(self._predict(weights, shown), kept.labels.cpu(), len(self.setup.classes))
        return counts

    def compare(self, models: Sequence[Weights], clients: Iterable[int]) -> Tensor:
        """On how many of the images that these clients keep back which of the models are right: counts and no more."""
        classes = len(self.setup.classes)
        counts = torch.zeros(2 ** len(models), classes, dtype=torch.float64)
        for client in clients:
            kept = self.federation.validation(client)
            if len(kept):
                shown = self.banks.of_images(("kept back", client), lambda kept=kept: kept.images)  # type: ignore[misc]
                probs = [self._predict(weights, shown) for weights in models]
                counts += right_patterns(probs, kept.labels.cpu(), classes)
        return counts

    def _predict(self, weights: Weights, shown: Shard) -> Tensor:
        self.net_pool.clear()
        views = shown.views or self.setup.views
        return predict(self.net_pool.take(weights), shown.unlabeled, views.plain, PREDICT_BATCH).cpu()


def unsendable(method: Method, reply: Reply) -> str:
    """Why a reply must not leave its client: it is none, or holds what the method does not declare; '' if it may go.

    >>> unsendable(Method(), Reply(send={"model": {}, "images": torch.zeros(3)}, examples=1))
    "'images' was not expected: the method does not declare it"
    >>> unsendable(Method(), Reply(send={"model": {"w": [1]}}, examples=1))
    "payload entry 'model/w' is a list; a payload holds tensors, groups of tensors and numbers"
    """
    try:
        check(reply.send)
        check({"examples": reply.examples})
    except TypeError as error:
        return str(error)
    declared = {name.removesuffix("?") for name in method.client_sends}
    extra = [safe(name) for name in reply.send if name not in declared]
    if extra:
        return f"'{extra[0]}' was not expected: the method does not declare it"
    if not isinstance(reply.examples, int | float):
        return "its number of examples is not a number"
    if not isinstance(reply.metrics, Mapping) or len(reply.metrics) > MOST_METRICS:
        return f"its metrics are not a dict of up to {MOST_METRICS} numbers"
    for name, value in reply.metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_METRIC or not is_plain_number(value):
            return f"its metric {safe(repr(name))} is not a number under a name of up to {LONGEST_METRIC} letters"
    return ""


def is_plain_number(value: object) -> bool:
    """Whether it is a number that floats have, be it NaN."""
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return not isinstance(value, str | bytes)


def plain_reply(reply: Reply) -> Reply:
    """The same with numbers as they arrive from another machine."""
    metrics = {name: float(value) for name, value in reply.metrics.items()}
    return Reply(send=reply.send, examples=float(reply.examples), metrics=metrics)


def one_thread() -> int:
    """Set one intra-op thread, because the number of threads changes float sums; returns what it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    return before
