"""A run is a folder. Everything in it can be read at any moment, also while the run goes on or after it was killed.

experiment.toml     fully resolved: running it again reproduces the run
rounds.jsonl        one object per round
summary.json        the result, when the run is complete
split.npz           who held what
parties.json        the same in numbers, by class: for reports
trained.npz         own data: digests of the images that were learned from
pictures/           what a method drew (`hub.draw`), such as generated images
model.safetensors   the model after the last round
model.json          what one needs to use it: classes, size, normalisation, temperature
evaluation.json     its figures on the test images: confusions, calibration
card.md, card.html  the model card, for people
audit.json          what `tacit audit` found: how well the model's training images can be told from others
checkpoint/         the server's state after each of the last finished rounds, and of each finished stage
manifest.jsonl      what was written, with digests: a round is finished when its line is there
kept/               what clients keep (in a simulation all of them live here)
replies/            models on their way between processes, or too many for memory: only while a round goes on
"""

import errno
import fcntl
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load as load_weights

from tacit.config.resolve import resolve
from tacit.contract.record import upgraded
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.files import digest, file_errors, read_bytes
from tacit.core.payload import Payload, Weights, write_atomically
from tacit.core.settings import Experiment, read_toml
from tacit.runs import manifest
from tacit.runs.manifest import load_manifest

STEP = "tacit.step"  # the name under which a checkpoint carries the number of rounds done
_CHECKPOINT = re.compile(r"step-(?P<step>\d+)\.safetensors")
OLD_CHECKPOINT = "latest.safetensors"  # the only one of a run of an older version, which has no manifest
START_ANEW = "Put it back from a copy, or start anew in another folder with --out."


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
        if not holds_run(self.folder):
            raise TacitError(f"{self.folder} holds no run of tacit (there is no experiment.toml in it).")

    @property
    def experiment(self) -> Experiment:
        return experiment_in(self.folder)

    @property
    def records(self) -> Any:
        """All finished rounds as a list of dicts."""
        return self.rounds()

    def rounds(self) -> list[dict[str, Any]]:
        return read_records(self.folder / "rounds.jsonl")

    @property
    def summary(self) -> dict[str, Any] | None:
        """The result, or None while the run is not complete."""
        try:
            found = json.loads((self.folder / "summary.json").read_text())
        except (OSError, ValueError):  # a damaged one is made again on resume
            return None
        return upgraded(found) if isinstance(found, dict) else None

    def add_to_summary(self, **figures: Any) -> None:
        """Figures that are known only beside other runs, such as the gap closed between two bounds."""
        text = json.dumps({**(self.summary or {}), **figures}, indent=2) + "\n"
        self.replace_results({"summary.json": text.encode()})

    def replace_results(self, files: Mapping[str, bytes]) -> None:
        """Write results of a finished run anew, such as its card; the manifest knows them from then on."""
        for name, data in files.items():
            write_atomically(self.folder / name, data)
        written = load_manifest(self.folder)
        if written is not None:
            written.append({"files": {name: digest(data) for name, data in files.items()}})

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

    def checkpoints(self) -> dict[int, Path]:
        """The checkpoints that are there, by the number of rounds after which they were written, the newest first."""
        found = {}
        for path in (self.folder / "checkpoint").glob("step-*.safetensors"):
            if match := _CHECKPOINT.fullmatch(path.name):
                found[int(match["step"])] = path
        return dict(sorted(found.items(), reverse=True))

    def _checkpoint_path(self, rounds: int) -> Path:
        return self.folder / "checkpoint" / f"step-{rounds}.safetensors"

    def state(self) -> Payload:
        """The server's state after the last finished round."""
        newest = max(self.checkpoints(), default=None)
        old = self.folder / "checkpoint" / OLD_CHECKPOINT
        state = payload.read(old if newest is None else self._checkpoint_path(newest))
        del state[STEP]
        return state

    def stage_state(self, number: int) -> Payload | None:
        """The server's last state of a finished stage, the last stage aside; None while it is not finished."""
        path = self._stage_path(number)
        return payload.read(path) if path.exists() else None

    def _stage_path(self, number: int) -> Path:
        return self.folder / "checkpoint" / f"stage-{number}.safetensors"

    @property
    def memory_folder(self) -> Path:
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


def holds_run(folder: Path) -> bool:
    with file_errors(folder, "read"):
        return any((folder / name).is_file() for name in ("experiment.toml", manifest.NAME))


def experiment_in(folder: Path) -> Experiment:
    """The experiment of a run: from its experiment.toml or, where that cannot be read, from its manifest."""
    path = folder / "experiment.toml"
    if (found := read_experiment(path)) is not None:
        return found
    written = load_manifest(folder)
    if written is not None:
        return resolve(tomllib.loads(written.begin["experiment"]))
    if not read_bytes(path).strip():
        raise TacitError(f"{path} is empty: nobody knows what was run. {START_ANEW}")
    return resolve(read_toml(path))  # it says what is wrong with it


def read_experiment(path: Path) -> Experiment | None:
    """The experiment in a file; None where there is none that can be read."""
    if path.is_file():
        check_access(path, os.R_OK, "read")  # it may be as it was written: nobody replaces it
    try:
        settings = read_toml(path)
        return resolve(settings) if settings else None
    except (TacitError, OSError):
        return None


def check_access(path: Path, mode: int, action: str) -> None:
    with file_errors(path, action):
        if not os.access(path, mode):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records in a file, up to a line that is none (the last one may have been cut off by a kill)."""
    records: list[dict[str, Any]] = []
    with file_errors(path, "read"):
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(record, dict):
            break
        records.append(upgraded(record))
    return records
