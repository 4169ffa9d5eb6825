"""All clients one after the other, in this process."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from tacit.backends.base import Inbox, Outcome, Worker, waves
from tacit.contract.method import Stage, Task
from tacit.contract.parties import RoundInfo, Setup
from tacit.core.payload import Weights, hand_over, seal
from tacit.data.federation import Federation
from tacit.runs.memory import ClientMemory, MemoryIndex


class LocalBackend:
    """The simplest backend, and the one that the others must agree with."""

    def __init__(self, setup: Setup, federation: Federation, memory: ClientMemory) -> None:
        self.worker = Worker(setup, federation, memory)
        self.memory_index = MemoryIndex(memory)
        self.inbox = Inbox(memory.folder.with_name("replies"))
        self.judges = federation.judges()

    def run(
        self, stage: Stage, round_info: RoundInfo, tasks: Sequence[Task], done: Callable[[int], None]
    ) -> list[Outcome]:
        self.memory_index.forget(round_info.step)
        self.inbox.open(len(tasks))
        for number, wave in enumerate(waves(tasks)):
            for place, task in wave:
                self.inbox.put(place, self._run(stage, round_info, number, task))
                done(len(self.inbox))
        self.memory_index.look(task.client for task in tasks)
        return self.inbox.in_order()

    def _run(self, stage: Stage, round_info: RoundInfo, wave: int, task: Task) -> Outcome:
        """One client behind a wall, as in a process of its own: what it is sent is its own copy, and what it answers
        is one too, so that nothing it does later reaches it."""
        outcome = self.worker.run(stage, round_info, wave, replace(task, send=seal(task.send)))
        return replace(outcome, reply=replace(outcome.reply, send=hand_over(outcome.reply.send)))

    def predict_test(self, weights: Weights) -> Tensor:
        return self.worker.predict_test(weights, slice(None))

    def validate(self, weights: Weights) -> Tensor:
        return self.worker.validate(weights, self.judges)

    def compare(self, models: Sequence[Weights]) -> Tensor:
        return self.worker.compare(models, self.judges)

    def memory_bytes(self) -> int:
        return self.memory_index.nbytes()

    def close(self) -> None:
        self.inbox.clear()
