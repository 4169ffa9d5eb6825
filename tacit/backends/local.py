"""All clients one after the other, in this process."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from tacit.backends.base import Inbox, Outcome, Worker, waves
from tacit.contract.method import Stage, Task
from tacit.contract.parties import Moment, Setup
from tacit.core.payload import Weights, seal
from tacit.data.federation import Federation
from tacit.runs.memory import Census, Kept


class LocalBackend:
    """The simplest backend, and the one that the others must agree with."""

    def __init__(self, setup: Setup, federation: Federation, kept: Kept) -> None:
        self.worker = Worker(setup, federation, kept)
        self.census = Census(kept)
        self.inbox = Inbox(kept.folder.with_name("replies"))

    def run(self, stage: Stage, moment: Moment, tasks: Sequence[Task], done: Callable[[int], None]) -> list[Outcome]:
        self.census.forget(moment.step)
        self.inbox.open(len(tasks))
        for number, wave in enumerate(waves(tasks)):
            for place, task in wave:
                self.inbox.put(place, self._run(stage, moment, number, task))
                done(len(self.inbox))
        self.census.look(task.client for task in tasks)
        return self.inbox.in_order()

    def _run(self, stage: Stage, moment: Moment, wave: int, task: Task) -> Outcome:
        """One client behind a wall, as in a process of its own: what it is sent is its own copy, and what it answers
        is one too, so that nothing it does later reaches it."""
        outcome = self.worker.run(stage, moment, wave, replace(task, send=seal(task.send)))
        return replace(outcome, reply=replace(outcome.reply, send=seal(outcome.reply.send)))

    def predict_test(self, weights: Weights) -> Tensor:
        return self.worker.predict_test(weights, slice(None))

    def kept_bytes(self) -> int:
        return self.census.nbytes()

    def close(self) -> None:
        self.inbox.clear()
