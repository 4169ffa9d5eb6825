"""Rounds of an experiment, one at a time, just as the engine runs them: for the parts that time them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tacit.contract.method import Method
from tacit.contract.parties import RoundInfo
from tacit.core.payload import Payload
from tacit.engine.loop import Engine
from tacit.engine.run import backend_of
from tacit.runs.plan import Plan
from tacit.runs.watchers import NullWatcher
from tacit.runs.writer import OpenRun

ROUNDS = 1_000_000  # as many as anybody asks for: none of them is the last one, which would be evaluated
UNEVALUATED = {"evaluate_every": ROUNDS, "data.test_subset": 10}  # no round is evaluated


class Rounds:
    """The last stage of a run; `next` is its next round, with all that belongs to one, the checkpoint included."""

    def __init__(self, engine: Engine, method: Method | None, seen: "Memory") -> None:
        self.engine = engine
        stage = engine.plan.stages[-1]
        self.stage = stage if method is None else replace(stage, method=method)
        self.state: Payload = self.stage.method.server_start(engine._hub(self._moment(-1)), {})
        self.number = 0
        self._seen = seen

    def next(self) -> None:
        self.state = self.engine._run_round(self.stage, self._moment(self.number), self.state)
        self.number += 1

    @property
    def record(self) -> Mapping[str, Any]:
        """What was recorded of the last round."""
        return self._seen.record

    def _moment(self, number: int) -> RoundInfo:
        return RoundInfo(self.stage.name, number, ROUNDS, max(number, 0))


class Memory(NullWatcher):
    """Remembers the last round."""

    record: Mapping[str, Any]

    def round_done(self, record: Mapping[str, Any]) -> None:
        self.record = record


@contextmanager
def open_rounds(plan: Plan, folder: Path, method: Method | None = None) -> Iterator[Rounds]:
    """A run in a folder of its own, on the backend that its experiment names; `method` takes its method's place."""
    opened = OpenRun(folder, plan.experiment, resume=False)
    try:
        opened.recover(plan.split)
        backend = backend_of(plan, opened)
        try:
            seen = Memory()
            yield Rounds(Engine(plan, opened, backend, seen), method, seen)
        finally:
            backend.close()
    finally:
        opened.close()
