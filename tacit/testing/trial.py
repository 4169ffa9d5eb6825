"""Tiny real runs of a method on the embedded digits, and how to compare their outcomes."""

import hashlib
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tacit.backends import Backend, LocalBackend
from tacit.config.resolve import SMOKE, resolve
from tacit.contract.method import Method, Stage
from tacit.contract.parties import RoundInfo
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.core.text import safe
from tacit.data.federation import Federation
from tacit.engine.run import run_plan
from tacit.runs.folder import Run
from tacit.runs.memory import ClientMemory
from tacit.runs.plan import Plan, prepare
from tacit.runs.watchers import NullWatcher, Watcher
from tacit.runs.writer import OpenRun
from tacit.testing.observe import Notebook, observed

TINY = {"data.subset": 400, "data.test_subset": 200}
TIMINGS = ("seconds", "cpu_seconds", "phases")
LONGEST = 300  # characters of an exception that are told


@dataclass(frozen=True)
class Whole:
    """A run from its beginning to its end, and what was seen of it."""

    plan: Plan
    run: Run
    notebook: Notebook


@dataclass
class Trial:
    """A method in one placement. All that its runs write is in a folder that goes away."""

    name: str  # as `method.name` takes it
    kind: type[Method]
    file: Path | None  # of a method of the user's own
    placement: str
    preset: str
    threshold: float
    folder: Path
    made: int = field(default=0, init=False)  # folders of runs so far

    def experiment(self, changes: Mapping[str, Any] | None = None) -> Experiment:
        """The smoke experiment with some settings changed; bits are compared, so it is computed on the CPU."""
        small = {} if self.preset == "smoke" else SMOKE
        layers = {"method.name": self.name, "method.preset": self.preset, "data.placement": self.placement}
        return resolve(layers, small, TINY, {"backend.name": "local", "device": "cpu"}, changes or {})

    def plan(self, changes: Mapping[str, Any] | None = None) -> Plan:
        return prepare(self.experiment(changes))

    def out(self) -> Path:
        """A folder for one more run."""
        self.made += 1
        return self.folder / f"{self.placement}-{self.made}"

    def local(self, plan: Plan, out: Path | None = None, resume: bool = False, watcher: Watcher | None = None) -> Run:
        """Run what was prepared, in this process."""
        return run_plan(plan, out or self.out(), local_backend, resume, watcher or NullWatcher())

    @cached_property
    def whole(self) -> Whole:
        """The run that others are compared with; what its clients and its server did is written down."""
        plan, notebook = self.plan(), Notebook()
        return Whole(plan, self.local(replace(plan, stages=observed(plan.stages, notebook))), notebook)

    def told(self, error: BaseException) -> str:
        """An exception in words: what, where in the author's file, and what was going on."""
        return told(error, self.file)


def local_backend(plan: Plan, folder: OpenRun) -> Backend:
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    return LocalBackend(plan.setup, federation, ClientMemory(folder.memory_folder, plan.experiment.keep))


def told(error: BaseException, file: Path | None) -> str:
    """An exception in words: what, where in this file (the deepest place), and what was going on.

    >>> told(ZeroDivisionError("division by zero"), None)
    'ZeroDivisionError: division by zero'
    """
    if isinstance(error, TacitError):
        return safe(error, LONGEST)
    what = f"{type(error).__name__}: {safe(error, LONGEST)}" if str(error) else type(error).__name__
    context = [safe(note, LONGEST) for note in getattr(error, "__notes__", ())]
    if file is not None and not isinstance(error, SyntaxError):  # which tells its place itself
        lines = "".join(traceback.format_exception(error))  # a worker process sends its own as text
        places = re.findall(rf'File "{re.escape(str(file))}", line (\d+)(, in \w+)?', lines)
        context[:0] = [f"{safe(file.name)}, line {line}{verb}" for line, verb in places[-1:]]
    return what + (f" ({'; '.join(context)})" if context else "")


def digest(run: Run) -> str:
    """The model of a run, as a hash of its bytes."""
    return hashlib.sha256((run.folder / "model.safetensors").read_bytes()).hexdigest()


def timeless(run: Run) -> list[dict[str, Any]]:
    """The records of a run without what a clock says."""
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in run.records]


def parting(one: Run, other: Run) -> str:
    """Where two runs that should be equal part, in words; '' if they do nowhere."""
    for mine, yours in zip(timeless(one), timeless(other), strict=False):
        differing = [key for key in {**mine, **yours} if mine.get(key) != yours.get(key)]
        if differing:
            key = "loss" if "loss" in differing else differing[0]
            figures = f"{safe(mine.get(key), 60)} and {safe(yours.get(key), 60)}"
            return f"they part in round {mine['round']} of stage '{mine['stage']}': {key} is {figures}"
    if len(one.records) != len(other.records):
        return f"they have {len(one.records)} and {len(other.records)} rounds"
    return "" if digest(one) == digest(other) else "the records are equal, but the last model is not"


class Stopped(KeyboardInterrupt):
    """As if somebody had pressed Ctrl-C."""


class Interruptions(NullWatcher):
    """Ctrl-C, once at every moment: in the middle of each round, and after each, a stage's last one aside.

    So a run that was stopped in a stage's last round also goes on into the next stage without another stop.
    """

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.last = {stage.name: stage.rounds - 1 for stage in stages[:-1]}
        self.happened: list[tuple[int, str]] = []

    def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None:
        if done == 1:
            self._stop(round_info.step, "middle")

    def round_done(self, record: Mapping[str, Any]) -> None:
        if self.last.get(record["stage"]) != record["round"]:
            self._stop(record["step"], "end")

    def _stop(self, step: int, where: str) -> None:
        if (step, where) not in self.happened:
            self.happened.append((step, where))
            raise Stopped
