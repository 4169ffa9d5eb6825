"""TensorBoard, MLflow and Weights & Biases as onlookers of a run. Off unless asked for (`--track`), never needed.

They are told what the record of each round says and change nothing: a tracker that fails is left out with a warning,
and the run goes on. After a resume they go on where they were. All three write to local folders; MLflow and Weights &
Biases follow their own environment variables (MLFLOW_TRACKING_URI, WANDB_MODE) if those say otherwise.
"""

import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit.contract.parties import RoundInfo
from tacit.contract.record import CLIENT_LISTS
from tacit.core.errors import TacitError, nearest
from tacit.core.payload import write_atomically
from tacit.core.settings import flatten
from tacit.runs.folder import Run
from tacit.runs.plan import Plan
from tacit.runs.watchers import Watcher


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record by name: lists of numbers entry by entry, lists of clients by their length.

    >>> scalars({"round": 3, "accuracy": 0.9, "per_class": [0.8, None], "answered": [4, 7], "skipped": "", "auc": None})
    {'round': 3.0, 'accuracy': 0.9, 'per_class/0': 0.8, 'answered': 2.0}
    """
    found: dict[str, float] = {}
    for name, value in record.items():
        if name in CLIENT_LISTS:
            found[name] = float(len(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = float(value)
        elif isinstance(value, Mapping):
            found.update({f"{name}/{inner}": number for inner, number in scalars(value).items()})
        elif isinstance(value, list) and all(entry is None or isinstance(entry, int | float) for entry in value):
            found.update({f"{name}/{k}": float(entry) for k, entry in enumerate(value) if entry is not None})
    return found


class Tracker:
    """What the three share: which rounds they have been told, also over a resume; and that they never harm a run."""

    name = ""
    module = ""  # that must be importable

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.note = folder / "tracking" / f"{self.name}.json"  # {"id": of the tracker's run, "steps": rounds told}
        self.id = ""
        self.working = False

    # What a tracker does; everything else is done here.

    def begin(self, settings: Mapping[str, Any]) -> str:
        """Open, or go on with the run `self.id`; returns its id."""
        raise NotImplementedError

    def log_scalars(self, numbers: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def end(self, complete: bool) -> None:
        raise NotImplementedError

    # The watcher's side.

    def start(self, plan: Plan, done: int) -> None:
        self.working = True
        self._safely(lambda: self._start(plan, done))

    def _start(self, plan: Plan, done: int) -> None:
        known: dict[str, Any] = {"id": "", "steps": 0}
        if self.note.is_file():
            known = json.loads(self.note.read_text())
        self.id = known["id"]
        self.id = self.begin(flatten(plan.experiment.to_dict()))
        self._noted(known["steps"])
        for record in Run(self.folder).records[known["steps"] : done]:  # rounds that it was not there for
            self._round(record)

    def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None:
        self._safely(lambda: self._round(record))

    def _round(self, record: Mapping[str, Any]) -> None:
        self.log_scalars(scalars(record), record["step"])
        self._noted(record["step"] + 1)

    def _noted(self, steps: int) -> None:
        self.note.parent.mkdir(exist_ok=True)
        write_atomically(self.note, json.dumps({"id": self.id, "steps": steps}).encode())

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._safely(lambda: self.end(True))
        self.working = False

    def close(self) -> None:
        """When the run ends, however it ends."""
        self._safely(lambda: self.end(False))
        self.working = False

    def _safely(self, work: Callable[[], None]) -> None:
        if not self.working:
            return
        try:
            work()
        except Exception as error:
            self.working = False
            warnings.warn(
                f"{self.name} failed ({type(error).__name__}: {error}) and is told nothing more; the run goes on.",
                stacklevel=2,
            )


class TensorBoard(Tracker):
    """Event files in the run's folder: `tensorboard --logdir runs` shows all runs."""

    name, module = "tensorboard", "tensorboardX"

    def begin(self, settings: Mapping[str, Any]) -> str:
        from tensorboardX import SummaryWriter

        folder = self.folder / "tracking" / "tensorboard"
        # A file's name tells its second of birth; a run resumed within that second must not overwrite the first file.
        self.writer = SummaryWriter(str(folder), filename_suffix=f".{len(list(folder.glob('events.*')))}")
        if not self.id:
            text = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
            self.writer.add_text("experiment", f"| setting | value |\n|---|---|\n{text}")
        return self.folder.name

    def log_scalars(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def end(self, complete: bool) -> None:
        self.writer.close()


class MLflow(Tracker):
    """A folder `mlruns` beside the run's folder: `mlflow ui --backend-store-uri runs/mlruns`."""

    name, module = "mlflow", "mlflow"

    def begin(self, settings: Mapping[str, Any]) -> str:
        from mlflow import MlflowClient

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions want to be asked for a plain folder
        place = os.environ.get("MLFLOW_TRACKING_URI") or (self.folder.parent / "mlruns").absolute().as_uri()
        self.client = MlflowClient(tracking_uri=place)
        if self.id:
            self.client.set_terminated(self.id, "RUNNING")
            return self.id
        found = self.client.get_experiment_by_name("tacit")
        experiment = found.experiment_id if found else self.client.create_experiment("tacit")
        run = self.client.create_run(experiment, run_name=self.folder.name).info.run_id
        for key, value in settings.items():
            self.client.log_param(run, key, value)
        return str(run)

    def log_scalars(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.client.log_metric(self.id, name, value, step=step)

    def end(self, complete: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if complete else "KILLED")


class WandB(Tracker):
    """Weights & Biases, offline: a folder `wandb` beside the run's folder, to be sent by `wandb sync` if one wants."""

    name, module = "wandb", "wandb"

    def begin(self, settings: Mapping[str, Any]) -> str:
        import wandb

        self.run = wandb.init(
            project="tacit",
            name=self.folder.name,
            id=self.id or None,
            dir=str(self.folder.parent),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=dict(settings),
            settings=wandb.Settings(silent=True, save_code=False, disable_git=True, console="off"),
        )
        return str(self.run.id)

    def log_scalars(self, numbers: Mapping[str, float], step: int) -> None:
        self.run.log(dict(numbers), step=step)

    def end(self, complete: bool) -> None:
        self.run.finish(exit_code=0 if complete else 1)


TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in (TensorBoard, MLflow, WandB)}


def check_trackers(names: Iterable[str]) -> None:
    """Refuse what is not known or not installed, before any work."""
    for name in names:
        if name not in TRACKERS:
            raise TacitError(
                f"There is no tracker '{name}'.{nearest(name, TRACKERS)} Write one of {', '.join(TRACKERS)}."
            )
        try:
            importlib.import_module(TRACKERS[name].module)
        except ImportError as error:
            raise TacitError(
                f"--track {name} needs a package that is not installed here ({error}). Install it with "
                f"`pip install 'tacit[{name}]'`, or leave --track {name} out."
            ) from None


def trackers(names: Sequence[str], folder: Path) -> list[Tracker]:
    """The trackers by name, for one run."""
    check_trackers(names)
    return [TRACKERS[name](folder) for name in dict.fromkeys(names)]


class Together:
    """Several onlookers as one."""

    def __init__(self, *watchers: Watcher) -> None:
        self.watchers = watchers

    def start(self, plan: Plan, done: int) -> None:
        for watcher in self.watchers:
            watcher.start(plan, done)

    def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None:
        for watcher in self.watchers:
            watcher.client_done(round_info, done, asked)

    def round_done(self, record: Mapping[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.round_done(record)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for watcher in self.watchers:
            watcher.finish(summary)

    def close(self) -> None:
        for watcher in self.watchers:
            if close := getattr(watcher, "close", None):
                close()
