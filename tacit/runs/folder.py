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
import shutil
import signal
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from safetensors.torch import load as load_weights
from safetensors.torch import save as save_weights
from torch import Tensor

from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.files import append, digest, read_bytes, remove, sweep, told
from tacit.core.payload import Payload, Weights, write_atomically
from tacit.core.settings import Experiment, differences, read_toml, resolve
from tacit.data.split import Split
from tacit.runs import manifest
from tacit.runs.image_grid import sheet
from tacit.runs.manifest import Entry, Manifest, load_manifest
from tacit.runs.memory import Kept, step_of

STEP = "tacit.step"  # the name under which a checkpoint carries the number of rounds done
_CHECKPOINT = re.compile(r"step-(?P<step>\d+)\.safetensors")
_OLD_CHECKPOINT = "latest.safetensors"  # the only one of a run of an older version, which has no manifest
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
        return found if isinstance(found, dict) else None

    def add_to_summary(self, **figures: Any) -> None:
        """Figures that are known only beside other runs, such as the gap closed between two bounds."""
        text = json.dumps({**(self.summary or {}), **figures}, indent=2) + "\n"
        write_atomically(self.folder / "summary.json", text.encode())
        written = load_manifest(self.folder)
        if written is not None:
            written.append({"files": {"summary.json": digest(text.encode())}})

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
        old = self.folder / "checkpoint" / _OLD_CHECKPOINT
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


def holds_run(folder: Path) -> bool:
    with told(folder, "read"):
        return any((folder / name).is_file() for name in ("experiment.toml", manifest.NAME))


def experiment_in(folder: Path) -> Experiment:
    """The experiment of a run: from its experiment.toml or, where that cannot be read, from its manifest."""
    path = folder / "experiment.toml"
    if (found := _read_experiment(path)) is not None:
        return found
    written = load_manifest(folder)
    if written is not None:
        return resolve(tomllib.loads(written.begin["experiment"]))
    if not read_bytes(path).strip():
        raise TacitError(f"{path} is empty: nobody knows what was run. {START_ANEW}")
    return resolve(read_toml(path))  # it says what is wrong with it


def _read_experiment(path: Path) -> Experiment | None:
    """The experiment in a file; None where there is none that can be read."""
    if path.is_file():
        _check_access(path, os.R_OK, "read")  # it may be as it was written: nobody replaces it
    try:
        settings = read_toml(path)
        return resolve(settings) if settings else None
    except (TacitError, OSError):
        return None


def _check_access(path: Path, mode: int, action: str) -> None:
    with told(path, action):
        if not os.access(path, mode):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records in a file, up to a line that is none (the last one may have been cut off by a kill)."""
    records: list[dict[str, Any]] = []
    with told(path, "read"):
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


class OpenRun(Run):
    """A run folder that this process, and no other, writes to."""

    def __init__(self, folder: Path, experiment: Experiment, resume: bool) -> None:
        self._lock = _lock(folder)
        try:
            self.notes: list[str] = []  # what was damaged, and what was done about it
            self.finished = False  # known after `recover`
            self._settings = experiment
            _open(folder, experiment, resume, self.notes)
            super().__init__(folder)
            sweep(folder)
            for name in ("replies", "images"):  # of a process that was killed
                shutil.rmtree(folder / name, ignore_errors=True)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        self._lock.close()

    @property
    def done(self) -> int:
        """How many rounds, of all stages, are finished."""
        return self.manifest.done

    def state(self) -> Payload:
        state = payload.read(self._checkpoint_path(self.done))
        del state[STEP]
        return state

    def recover(self, split: Split) -> None:
        """Bring the folder into the state after its last finished round, or begin. What is damaged is in `notes`.

        Where the newest checkpoint (or what belongs to it) is damaged, the run goes back to the one before it.
        """
        self._check_writable()
        found = load_manifest(self.folder)
        if found is None and "rounds" in (self.summary or {}):  # of an older version, and finished
            self.finished = True
            return
        self.manifest = found or self._adopt(split)
        if self.manifest.damaged:
            self.notes.append(f"{self.manifest.path} is damaged in its last line: what that round did is done again.")
        self._recover_split(split)
        wrong_files = damaged_files(self.folder, self.manifest.files)
        records = damage_at(self, self.manifest, self.done, records_only=True)
        self.finished = "summary.json" in self.manifest.files and not wrong_files and not records
        if self.finished:
            return
        self.notes += [f"{wrong}. It is made again." for wrong in wrong_files]
        rounds = self._newest_whole()
        self.manifest.cut(rounds, returned=rounds < self.done)
        self._clean_up()

    def _check_writable(self) -> None:
        """Say now, and not when a round is done, that it could not be saved."""
        files = (".", manifest.NAME, "rounds.jsonl", "checkpoint", "kept")
        for path in [self.folder / name for name in files if (self.folder / name).exists()]:
            _check_access(path, os.W_OK, "written")

    def _adopt(self, split: Split) -> Manifest:
        """A manifest for a run that has none: a new one, or one of an older version (or somebody deleted it)."""
        old = self.folder / "checkpoint" / _OLD_CHECKPOINT
        if old.is_file():
            old.replace(self._checkpoint_path(_step_in(old)))
        begin = {"experiment": self.experiment.to_toml(), "split": digest(split.to_bytes()), "returned": []}
        entries: list[Entry] = [{"begin": begin}]
        path, records = self.folder / "rounds.jsonl", self.records
        done = max(self.checkpoints(), default=0)
        if len(records) > done + 1 or [record.get("step") for record in records[:done]] != list(range(done)):
            raise TacitError(
                f"{path} is damaged or a checkpoint is missing: it has {len(records)} records that can be read, but "
                f"the newest checkpoint is of round {done}, and there is no {manifest.NAME} that tells more. Put these "
                "files back from a copy, or start anew in another folder with --out."
            )
        if done:
            self.notes.append(
                f"{self.folder / manifest.NAME} is missing: the {done} rounds that are done were taken as they are."
            )
        kept: dict[int, dict[str, str]] = {}
        memory = Kept(self.kept_folder)
        for file, found in memory.written(memory.clients()).items():
            kept.setdefault(step_of(file), {})[file] = found
        for step, line in enumerate(_lines(path)[:done]):
            path = self._checkpoint_path(step + 1)
            if path.exists() and _step_in(path) != step + 1:
                raise TacitError(f"{path} is another round's. {START_ANEW}")
            checkpoint = payload.read_with_digest(path)[1] if path.exists() else ""
            entry = {"round": step, "record": digest(line), "checkpoint": checkpoint, "kept": kept.get(step, {})}
            entries.append(entry)
        for path in sorted((self.folder / "checkpoint").glob("stage-*.safetensors")) if done else ():
            number = int(path.stem.removeprefix("stage-"))
            entries.append({"stage": number, "rounds": 0, "state": payload.read_with_digest(path)[1]})
        new = Manifest(self.folder / manifest.NAME, [])
        new.rewrite(entries)
        return new

    def _recover_split(self, split: Split) -> None:
        """The saved split must be the one that the run began with; it can be drawn again."""
        expected, path = self.manifest.begin["split"], self.split_path
        if path.is_file() and digest(read_bytes(path)) == expected:
            return
        again = split.to_bytes()
        if digest(again) != expected:
            raise TacitError(
                f"{path} is missing or damaged, and the split that is drawn now is another one (the data or the "
                f"experiment has changed). {START_ANEW}"
            )
        if self.manifest.done:
            self.notes.append(f"{path} was missing or damaged. It was drawn again, and is the same.")
        write_atomically(path, again)

    def _newest_whole(self) -> int:
        """After how many rounds the newest state is that is not damaged."""
        done = self.done
        ahead = [rounds for rounds in self.checkpoints() if rounds > done + 1]
        if ahead and self.manifest.returned[-1:] != [done]:  # nobody went back from there on purpose
            raise TacitError(
                f"{self.manifest.path} is damaged: it ends after {done} rounds, but there is a checkpoint of round "
                f"{max(ahead)}. Put it back from a copy. Without one, delete it: the run then goes on with what is "
                "there, unchecked."
            )
        all_wrong: list[str] = []
        for rounds in way_back(self, self.manifest, self._settings.keep.checkpoints):
            wrong = damage_at(self, self.manifest, rounds)
            if not wrong:
                if rounds < done:
                    told_of = "; ".join(dict.fromkeys(all_wrong))
                    self.notes.append(f"{told_of}. The run goes on from round {rounds} instead of {done}.")
                return rounds
            all_wrong += wrong
        listed = "\n  ".join(dict.fromkeys(all_wrong))
        raise TacitError(
            f"The run in {self.folder} is damaged and cannot go on:\n  {listed}\nPut these files back from a copy, or "
            "start anew in another folder with --out."
        )

    def _clean_up(self) -> None:
        """Remove what belongs to rounds that do not count: they were not finished, or the run went back."""
        done = self.done
        records = _lines(self.folder / "rounds.jsonl")[:done]
        write_atomically(self.folder / "rounds.jsonl", b"".join(records))
        for rounds, path in self.checkpoints().items():
            if rounds > done:
                remove(path)
        stages = {self._stage_path(entry["stage"]) for entry in self.manifest.stages}
        for path in (self.folder / "checkpoint").glob("stage-*.safetensors"):
            if path not in stages:
                remove(path)
        for name in RESULTS:
            remove(self.folder / name)
        Kept(self.kept_folder).go_back(done)

    def finish_stage(self, number: int, state: Payload) -> None:
        with uninterrupted():
            found = payload.write(self._stage_path(number), state)
            self.manifest.append({"stage": number, "rounds": self.done, "state": found})

    def finish_round(
        self, step: int, record: dict[str, Any], state: Payload, pictures: Mapping[str, Tensor] | None = None
    ) -> None:
        """The record, the checkpoint, and last the line in the manifest: with it, the round counts as finished."""
        with uninterrupted():
            for name, images in (pictures or {}).items():
                write_atomically(self.folder / "pictures" / f"{name}.png", sheet(images))
            line = json.dumps(record) + "\n"
            append(self.folder / "rounds.jsonl", line)
            found = payload.write(self._checkpoint_path(step + 1), {STEP: step + 1, **state})
            kept = Kept(self.kept_folder).written(record["asked"], step)
            self.manifest.append({"round": step, "record": digest(line.encode()), "checkpoint": found, "kept": kept})
            for rounds, path in self.checkpoints().items():
                if rounds <= step + 1 - self._settings.keep.checkpoints:
                    remove(path)

    def finish(self, weights: Weights | None, summary: dict[str, Any], beside: Mapping[str, bytes]) -> None:
        """The weights, what is written beside them (how to use them, the card), and last the summary: it is done."""
        with uninterrupted():
            written = dict(beside)
            if weights is not None:
                written["model.safetensors"] = save_weights({name: t.contiguous() for name, t in weights.items()})
            written["summary.json"] = (json.dumps(summary, indent=2) + "\n").encode()
            for name, content in written.items():
                write_atomically(self.folder / name, content)
            self.manifest.append({"files": {n: digest(content) for n, content in written.items() if n in RESULTS}})


RESULTS = ("model.safetensors", "model.json", "evaluation.json", "summary.json")


def _lines(path: Path) -> list[bytes]:
    """The whole lines of a file; the last one may have been cut off by a kill, and is then none."""
    data = read_bytes(path) if path.exists() else b""
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


def _step_in(path: Path) -> int:
    step = payload.read(path).get(STEP)
    if not isinstance(step, int):
        raise TacitError(f"{path} is no checkpoint of a round. {START_ANEW}")
    return step


def way_back(run: Run, written: Manifest, checkpoints: int) -> list[int]:
    """After how many rounds a run may go on, the newest first: where it is, and where there is an older checkpoint."""
    older = [rounds for rounds in run.checkpoints() if rounds < written.done]
    from_the_start = [0] if 0 < written.done < checkpoints else []
    return [written.done, *older, *from_the_start]


def damage_at(run: Run, written: Manifest, rounds: int, records_only: bool = False) -> list[str]:
    """What is wrong with the state of a run after so many rounds, each file in a sentence (without a full stop)."""
    path, wrong = run.folder / "rounds.jsonl", []
    try:
        lines = _lines(path)
    except TacitError as error:
        return [str(error).rstrip(".")]
    for entry in written.rounds[:rounds]:
        step = entry["round"]
        if len(lines) <= step:
            wrong.append(f"{path} has {len(lines)} of {written.done} records")
            break
        if digest(lines[step]) != entry["record"]:
            wrong.append(f"{path}: line {step + 1}, the record of round {step}, is not as it was written")
    if records_only or not rounds:
        return wrong
    expected = {run._checkpoint_path(rounds): written.rounds[rounds - 1]["checkpoint"]}
    expected |= {
        run._stage_path(entry["stage"]): entry["state"] for entry in written.stages if entry["rounds"] < rounds
    }
    latest = resolve(tomllib.loads(written.begin["experiment"])).keep.latest
    kept = written.kept_at(rounds, latest)
    places = Kept(run.kept_folder).find(kept, rounds)
    expected |= {places[file]: found for file, found in kept.items()}
    return wrong + [reason for file, found in expected.items() if (reason := _wrong_payload(file, found))]


def _wrong_payload(path: Path, expected: str) -> str:
    """Why a file is not the payload with this digest; '' if it is."""
    if not path.exists():
        return f"{path} is missing"
    try:
        found = payload.read_with_digest(path)[1]
    except TacitError as error:
        return str(error).rstrip(".")
    return "" if found == expected else f"{path} is not what the run wrote there"


def damaged_files(folder: Path, expected: Mapping[str, str]) -> list[str]:
    """Which of these files are missing or not as they were written, each in a sentence (without a full stop)."""
    wrong = []
    for name, found in expected.items():
        path = folder / name
        try:
            if not path.exists():
                wrong.append(f"{path} is missing")
            elif digest(read_bytes(path)) != found:
                wrong.append(f"{path} is not what the run wrote there")
        except TacitError as error:
            wrong.append(str(error).rstrip("."))
    return wrong


def saved_split(folder: Path) -> Path | None:
    """Where the split of a run lies; None if it is not the one that the run began with, and must be drawn again."""
    path, written = folder / "split.npz", load_manifest(folder)
    if not path.is_file() or (written and damaged_files(folder, {path.name: written.begin["split"]})):
        return None
    return path


def roll_back(folder: Path, rounds: int) -> None:
    """Go back to the state after so many rounds (of all stages): what came later is removed.

    It can be gone back to as far as there are checkpoints: `keep.checkpoints` says how many are kept.
    """
    experiment = Run(folder).experiment
    run = OpenRun(folder, experiment, resume=True)
    try:
        written = load_manifest(folder)
        possible = way_back(run, written, experiment.keep.checkpoints) if written else []
        if written is None or rounds not in possible:
            listed = " or ".join(str(number) for number in sorted(possible)) or "none"
            raise TacitError(
                f"The run in {folder} cannot go back to round {rounds}. It can go on after round {listed}: the others' "
                "checkpoints are gone. A new run keeps more of them with --set keep.checkpoints=10."
            )
        if wrong := damage_at(run, written, rounds):
            listed = "\n  ".join(wrong)
            raise TacitError(f"The run in {folder} cannot go back to round {rounds}:\n  {listed}\n{START_ANEW}")
        if rounds < written.done:
            written.cut(rounds, returned=True)
            run.manifest = written
            run._clean_up()
    finally:
        run.close()


def check_run(folder: Path) -> list[str]:
    """Everything in a run folder that is damaged or missing, each with what to do."""
    run = Run(folder)
    if run.in_use:
        raise TacitError(f"A process is working on {folder}. Check it when that is done, or stop it first.")
    written = load_manifest(folder)
    if written is None:
        return [
            f"{folder / manifest.NAME} is missing: the run is of an older version, or has not begun, and cannot be "
            "checked. `tacit resume` makes a new one from what is there."
        ]
    found = []
    if written.damaged:
        found.append(f"{written.path} is damaged in its last line. `tacit resume` does that round again.")
    if _read_experiment(folder / "experiment.toml") is None:
        found.append(f"{folder / 'experiment.toml'} is missing or damaged. `tacit resume` writes it again.")
    if changed := _changed_settings(folder, written):
        found.append(changed)
    if wrong := damaged_files(folder, {"split.npz": written.begin["split"]}):
        found += [f"{one}. `tacit resume` draws it again." for one in wrong]
    found += [f"{wrong}. `tacit resume` makes it again." for wrong in damaged_files(folder, written.files)]
    damage = {rounds: damage_at(run, written, rounds) for rounds in way_back(run, written, 0)}
    whole = [rounds for rounds, wrong in damage.items() if not wrong]
    remedy = f"`tacit resume` goes on from round {whole[0]}." if whole else START_ANEW
    if written.files and not damage_at(run, written, written.done, records_only=True):
        remedy = "The run is finished and its results do not need it, but it cannot be rolled back to there."
    found += [f"{wrong}. {remedy}" for wrong in dict.fromkeys(one for wrongs in damage.values() for one in wrongs)]
    return found


def _lock(folder: Path) -> Any:
    """An exclusive lock that ends with the process, however it ends."""
    if folder.exists() and not folder.is_dir():
        raise TacitError(f"{folder} is a file. A run needs a folder: choose another --out.")
    if folder.is_dir() and not holds_run(folder):
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


def _open(folder: Path, experiment: Experiment, resume: bool, notes: list[str]) -> None:
    path = folder / "experiment.toml"
    if not holds_run(folder):
        write_atomically(path, experiment.to_toml().encode())
        return
    if not resume:
        done = len(Run(folder).records)
        raise TacitError(
            f"{folder} already holds a run ({done} rounds done). Nothing was changed. Add --resume to go on with it, "
            "or choose another folder with --out."
        )
    check_same(folder, experiment)
    written = load_manifest(folder)
    if written is not None and _read_experiment(path) is None:
        notes.append(f"{path} was missing or damaged. It was written again from {manifest.NAME}.")
        write_atomically(path, written.begin["experiment"].encode())


def _changed_settings(folder: Path, written: Manifest) -> str:
    """Which settings in experiment.toml are not those that the run began with; '' if none (or it is unreadable)."""
    path = folder / "experiment.toml"
    now = _read_experiment(path)
    changed = differences(resolve(tomllib.loads(written.begin["experiment"])), now) if now is not None else []
    if not changed:
        return ""
    listed = "\n  ".join(changed)
    return f"{path} was changed after the run began:\n  {listed}\nUndo that, or start anew with --out."


def check_same(folder: Path, experiment: Experiment) -> None:
    """Refuse to go on with a run that was started with other settings, and show which."""
    if not holds_run(folder):
        return
    written = load_manifest(folder)
    if written is not None and (edited := _changed_settings(folder, written)):
        raise TacitError(edited)
    changed = differences(experiment_in(folder), experiment)
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
