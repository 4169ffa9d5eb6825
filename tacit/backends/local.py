"""All clients one after the other, in this process."""

from collections.abc import Callable, Sequence

from torch import Tensor

from tacit.backends.base import Outcome, Worker, waves
from tacit.data.federation import Federation
from tacit.kept import Kept
from tacit.method import Stage, Task
from tacit.payload import Weights
from tacit.sides import Moment, Setup


class LocalBackend:
    """The simplest backend, and the one that the others must agree with."""

    def __init__(self, setup: Setup, federation: Federation, kept: Kept) -> None:
        self.worker = Worker(setup, federation, kept)

    def run(self, stage: Stage, moment: Moment, tasks: Sequence[Task], done: Callable[[int], None]) -> list[Outcome]:
        self.worker.kept.forget(moment.step)
        outcomes: dict[int, Outcome] = {}
        for number, wave in enumerate(waves(tasks)):
            for place, task in wave:
                outcomes[place] = self.worker.run(stage, moment, number, task)
                done(len(outcomes))
        return [outcomes[place] for place in range(len(tasks))]

    def predict_test(self, weights: Weights) -> Tensor:
        return self.worker.predict_test(weights, slice(None))

    def kept_bytes(self) -> int:
        return self.worker.kept.nbytes()

    def close(self) -> None:
        pass
