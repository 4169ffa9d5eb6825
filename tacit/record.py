"""A run is a folder. Everything in it can be read at any moment, also while the run goes on or after it was killed.

experiment.toml     fully resolved: running it again reproduces the run
rounds.jsonl        one object per round
summary.json        the result, when the run is complete
split.npz           who held what
pictures/           what a method drew (`hub.draw`), such as generated images
model.safetensors   the model after the last round
model.json          what one needs to use it: classes, size, normalisation, temperature
evaluation.json     its figures on the test images: confusions, calibration
card.md, card.html  the model card, for people
checkpoint/         the server's state after the last finished round, and of each finished stage
kept/               what clients keep (in a simulation all of them live here)
replies/            models on their way between processes, or too many for memory: only while a round goes on
"""

import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from safetensors.torch import load as load_weights
from safetensors.torch import save as save_weights
from torch import Tensor

from tacit import payload
from tacit.errors import TacitError
from tacit.experiment import Experiment, differences, read_toml, resolve
from tacit.payload import Payload, Weights, write_atomically
from tacit.pictures import sheet

STEP = "tacit.step"  # the name under which a checkpoint carries the number of rounds done


def default_out(name: str, seed: int) -> Path:
    """Where a run goes when nobody says: by the recipe and the seed, so that --resume finds it.

    >>> default_out("cbafed/table1.toml", 3).as_posix()
    'runs/cbafed-table1-seed3'
    """
    return Path("runs") / f"{name.removesuffix('.toml').strip('./').replace('/', '-')}-seed{seed}"


class Run:
    """A run folder, to read."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        if not (self.folder / "experiment.toml").is_file():
            raise TacitError(f"{self.folder} holds no run of tacit (there is no experiment.toml in it).")

    @property
    def experiment(self) -> Experiment:
        return resolve(read_toml(self.folder / "experiment.toml"))

    @property
    def records(self) -> Any:
        """All finished rounds as a list of dicts."""
        return self.rounds()

    def rounds(self) -> list[dict[str, Any]]:
        return read_records(self.folder / "rounds.jsonl")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, or None while the run is not complete."""
        path = self.folder / "summary.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        except (FileNotFoundError, json.JSONDecodeError):  # a damaged one is made again on resume
            return None

    def add_to_summary(self, **figures: Any) -> None:
        """Figures that are known only beside other runs, such as the gap closed between two bounds."""
        text = json.dumps({**(self.summary or {}), **figures}, indent=2) + "\n"
        write_atomically(self.folder / "summary.json", text.encode())

    def __getitem__(self, name: str) -> np.ndarray:
        """A figure by round as an array: run["accuracy"]; NaN where a round has none."""
        rounds = self.rounds()
        values = [record.get(name) for record in rounds]
        if all(value is None for value in values):
            known = sorted({key for record in rounds for key in record})
            raise KeyError(f"no round has '{name}'; there is: {', '.join(known)}")
        lists = [value for value in values if isinstance(value, list)]
        numbers = all(entry is None or isinstance(entry, int | float) for value in lists for entry in value)
        if not lists and all(value is None or isinstance(value, int | float) for value in values):
            return np.array([np.nan if value is None else value for value in values])
        if lists and lists[0] and numbers and len({len(value) for value in lists}) == 1:
            missing = [None] * len(lists[0])
            return np.array(
                [[np.nan if v is None else v for v in (missing if value is None else value)] for value in values]
            )
        ragged = np.empty(len(values), dtype=object)  # who answered, why someone was refused: as they are
        ragged[:] = values
        return ragged

    @property
    def weights(self) -> Weights:
        """The model after the last round."""
        return load_weights((self.folder / "model.safetensors").read_bytes())

    def state(self) -> Payload:
        """The server's state after the last finished round."""
        state = payload.read(self.folder / "checkpoint" / "latest.safetensors")
        del state[STEP]
        return state

    def stage_state(self, number: int) -> Payload | None:
        """The server's last state of a finished stage, the last stage aside; None while it is not finished."""
        path = self._stage_path(number)
        return payload.read(path) if path.is_file() else None

    def _stage_path(self, number: int) -> Path:
        return self.folder / "checkpoint" / f"stage-{number}.safetensors"

    @property
    def kept_folder(self) -> Path:
        return self.folder / "kept"

    @property
    def split_path(self) -> Path:
        return self.folder / "split.npz"

    @property
    def in_use(self) -> bool:
        """Whether a process is working on this run now."""
        return is_in_use(self.folder)


def is_in_use(folder: Path) -> bool:
    """Whether some process holds the lock of a run folder. Looking takes a shared lock for a moment."""
    try:
        with (folder / "run.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file: nobody ever worked here
        return False
    return False


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records in a file, up to a line that was cut off by a kill."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class OpenRun(Run):
    """A run folder that this process, and no other, writes to."""

    def __init__(self, folder: Path, experiment: Experiment, resume: bool) -> None:
        self._lock = _lock(folder)
        try:
            _open(folder, experiment, resume)
        except BaseException:
            self._lock.close()
            raise
        super().__init__(folder)
        shutil.rmtree(folder / "replies", ignore_errors=True)  # of a process that was killed

    def close(self) -> None:
        self._lock.close()

    @property
    def done(self) -> int:
        """How many rounds, of all stages, are finished."""
        path = self.folder / "checkpoint" / "latest.safetensors"
        return int(payload.read(path)[STEP]) if path.is_file() else 0  # type: ignore[arg-type]

    def rewind(self) -> None:
        """Forget records after the checkpoint: their round was not finished and is run again."""
        done = self.done
        records = [record for record in self.records if record["step"] < done]
        if [record["step"] for record in records] != list(range(done)):
            raise TacitError(
                f"{self.folder / 'rounds.jsonl'} is damaged: {done} rounds are finished, but their records are not all "
                "there. Put the file back from a copy, or start anew in another folder with --out."
            )
        for left_over in [*self.folder.glob(".*.*"), *self.folder.glob("checkpoint/.*.*")]:
            left_over.unlink()  # half-written files of a process that was killed
        text = "".join(json.dumps(record) + "\n" for record in records)
        write_atomically(self.folder / "rounds.jsonl", text.encode())

    def finish_stage(self, number: int, state: Payload) -> None:
        with uninterrupted():
            payload.write(self._stage_path(number), state)

    def finish_round(
        self, step: int, record: dict[str, Any], state: Payload, pictures: Mapping[str, Tensor] | None = None
    ) -> None:
        """The record first, then the checkpoint: a round counts as finished when its checkpoint is there."""
        with uninterrupted():
            for name, images in (pictures or {}).items():
                write_atomically(self.folder / "pictures" / f"{name}.png", sheet(images))
            with (self.folder / "rounds.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
                file.flush()
                os.fsync(file.fileno())
            payload.write(self.folder / "checkpoint" / "latest.safetensors", {STEP: step + 1, **state})

    def finish(self, weights: Weights | None, summary: dict[str, Any], beside: Mapping[str, bytes]) -> None:
        """The weights, what is written beside them (how to use them, the card), and last the summary: it is done."""
        with uninterrupted():
            for name, content in beside.items():
                write_atomically(self.folder / name, content)
            if weights is not None:
                data = save_weights({name: tensor.contiguous() for name, tensor in weights.items()})
                write_atomically(self.folder / "model.safetensors", data)
            text = json.dumps(summary, indent=2) + "\n"
            write_atomically(self.folder / "summary.json", text.encode())


def _lock(folder: Path) -> Any:
    """An exclusive lock that ends with the process, however it ends."""
    if folder.exists() and not folder.is_dir():
        raise TacitError(f"{folder} is a file. A run needs a folder: choose another --out.")
    if folder.is_dir() and not (folder / "experiment.toml").is_file():
        strangers = [p.name for p in folder.iterdir() if p.name != "run.lock" and not p.name.startswith(".")]
        if strangers:
            raise TacitError(
                f"{folder} is not empty and holds no run ({', '.join(sorted(strangers)[:3])} …). "
                "Choose a new folder with --out."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "run.lock").open("a+")
    except OSError as error:
        raise TacitError(f"{folder} cannot be written to ({error.strerror}). Choose another --out.") from None
    try:
        _take(file)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise TacitError(
            f"Another process (number {owner}) is working in {folder}. Wait for it, stop it, or choose another --out."
        ) from None
    file.seek(0)
    file.truncate()
    file.write(str(os.getpid()))
    file.flush()
    return file


def _take(file: Any, patience: float = 0.3) -> None:
    """Lock the file. Someone who only looks (`is_in_use`) holds it for a moment, so ask more than once."""
    end = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def _open(folder: Path, experiment: Experiment, resume: bool) -> None:
    path = folder / "experiment.toml"
    if not path.is_file():
        write_atomically(path, experiment.to_toml().encode())
        return
    if not resume:
        done = len(Run(folder).records)
        raise TacitError(
            f"{folder} already holds a run ({done} rounds done). Nothing was changed. Add --resume to go on with it, "
            "or choose another folder with --out."
        )
    check_same(folder, experiment)


def check_same(folder: Path, experiment: Experiment) -> None:
    """Refuse to go on with a run that was started with other settings, and show which."""
    path = folder / "experiment.toml"
    changed = differences(resolve(read_toml(path)), experiment) if path.is_file() else []
    if changed:
        listed = "\n  ".join(changed)
        raise TacitError(
            f"The run in {folder} was started with other settings:\n  {listed}\n"
            f"Go on with its own settings (tacit resume {folder}), or start anew in another folder with --out."
        )


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the write is done, and counts then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if caught and callable(before):
            before(*caught[0])
