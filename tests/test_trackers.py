"""Trackers are told what the record says, go on after a resume, and never harm a run."""

import json
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from runs import TINY, digest
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.runs import trackers as module
from tacit.runs.folder import Run
from tacit.runs.trackers import TRACKERS, Together, Tracker, check_trackers, trackers
from tacit.runs.watchers import NullWatcher


def experiment(**changes: Any) -> Experiment:
    settings = {"method.name": "fedavg", "method.preset": "smoke", "data.placement": "clients", "rounds": 4, **TINY}
    return resolve(settings, changes)


class StopAfter(NullWatcher):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def round_done(self, record: Mapping[str, Any]) -> None:
        if record["step"] + 1 == self.rounds:
            raise KeyboardInterrupt


def tracked(name: str, folder: Path, stop: int = 0) -> Run:
    """A run with a tracker, stopped after so many rounds."""
    watcher = Together(*trackers([name], folder), StopAfter(stop))
    try:
        return run_experiment(experiment(), folder, resume=True, watcher=watcher)
    finally:
        watcher.close()


def stopped_and_resumed(name: str, folder: Path) -> Run:
    """Two rounds with the tracker, one that it does not see, and the last one with it again."""
    with pytest.raises(KeyboardInterrupt):
        tracked(name, folder, stop=2)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment(), folder, resume=True, watcher=StopAfter(3))
    return tracked(name, folder)


def events(folder: Path) -> dict[str, dict[int, float]]:
    """The scalars in TensorBoard's event files: (length, check, event, check) one after the other."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    assert event.step not in found.setdefault(value.tag, {}), "told twice"
                    found[value.tag][event.step] = value.simple_value
    return found


def test_tensorboard_holds_every_round_once_also_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9)  # all within one second, by which the event files are named
    run = stopped_and_resumed("tensorboard", tmp_path / "run")
    scalars = events(tmp_path / "run" / "tracking" / "tensorboard")
    assert scalars["accuracy"] == pytest.approx(dict(enumerate(run["accuracy"])))
    assert scalars["answered"] == dict.fromkeys(range(4), 4)
    assert set(scalars["per_class/3"]) == {0, 1, 2, 3}
    assert set(scalars["phases/train"]) == {0, 1, 2, 3}


def test_mlflow_in_a_local_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="too heavy for the test environment: pip install 'tacit[mlflow]'")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = stopped_and_resumed("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("tacit").experiment_id])
    assert found.info.status == "FINISHED"
    assert found.data.params["method.name"] == "fedavg"
    history = client.get_metric_history(found.info.run_id, "accuracy")
    assert {point.step: point.value for point in history} == pytest.approx(dict(enumerate(run["accuracy"])))
    assert len(history) == 4


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="too heavy for the test environment: pip install 'tacit[wandb]'")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    stopped_and_resumed("wandb", tmp_path / "run")
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.stem for path in files}) == 1  # one run, whichever number of sessions it took
    assert any(b"per_class/3" in path.read_bytes() for path in files)
    assert json.loads((tmp_path / "run" / "tracking" / "wandb.json").read_text())["steps"] == 4


def test_what_is_not_there_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TacitError, match=r"There is no tracker 'tensorbord'. Did you mean 'tensorboard'\?"):
        check_trackers(["tensorbord"])
    for name, tracker in TRACKERS.items():
        monkeypatch.setitem(sys.modules, tracker.module, None)  # as if it were not installed
        with pytest.raises(TacitError, match=rf"pip install 'tacit\[{name}\]'"):
            trackers([name], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Tracker):
        name, module = "broken", "json"
        told = 0

        def begin(self, settings: Mapping[str, Any]) -> str:
            return "x"

        def log_scalars(self, numbers: Mapping[str, float], step: int) -> None:
            Broken.told += 1
            raise OSError("no space left")

    monkeypatch.setitem(module.TRACKERS, "broken", Broken)
    with pytest.warns(UserWarning, match="broken failed .OSError: no space left. and is told nothing more"):
        run = tracked("broken", tmp_path / "run")
    assert Broken.told == 1
    assert digest(run) == digest(run_experiment(experiment(), tmp_path / "plain"))


def test_tracking_is_not_part_of_the_experiment(tmp_path: Path) -> None:
    run = tracked("tensorboard", tmp_path / "run")
    assert "track" not in (run.folder / "experiment.toml").read_text()
    assert digest(run) == digest(run_experiment(experiment(), tmp_path / "plain"))
