"""A run folder that this process, and no other, writes to: rounds, checkpoints, results, going back and going on."""

import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from safetensors.torch import save as save_weights
from torch import Tensor

from tacit.core import payload
from tacit.core.chain import Entry
from tacit.core.errors import TacitError
from tacit.core.files import append, digest, read_bytes, remove, sweep
from tacit.core.payload import Payload, Weights, write_atomically
from tacit.core.settings import Experiment, differences
from tacit.core.text import as_word
from tacit.data.split import Split
from tacit.runs import manifest
from tacit.runs.folder import (
    OLD_CHECKPOINT,
    START_ANEW,
    STEP,
    Run,
    check_access,
    experiment_in,
    holds_run,
    read_experiment,
)
from tacit.runs.image_grid import sheet
from tacit.runs.integrity import changed_settings, damage_at, damaged_files, way_back, whole_lines
from tacit.runs.manifest import Manifest, load_manifest
from tacit.runs.memory import ClientMemory, step_of


class OpenRun(Run):
    """A run folder that this process, and no other, writes to."""

    def __init__(self, folder: Path, experiment: Experiment, resume: bool) -> None:
        self._lock = _lock(folder)
        try:
            self.notes: list[str] = []  # what was damaged, and what was done about it
            self.finished = False  # known after `recover`
            self._saving = Saving()
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
        try:
            self._saving.wait()
        finally:
            self._lock.close()

    @property
    def done(self) -> int:
        """How many rounds, of all stages, are finished."""
        self._saving.wait()
        return self.manifest.done

    def rounds(self) -> list[dict[str, Any]]:
        self._saving.wait()
        return super().rounds()

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
            self.manifest = Manifest(self.folder / manifest.NAME, [])
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
            check_access(path, os.W_OK, "written")

    def _adopt(self, split: Split) -> Manifest:
        """A manifest for a run that has none: a new one, or one of an older version (or somebody deleted it)."""
        old = self.folder / "checkpoint" / OLD_CHECKPOINT
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
        memory_files: dict[int, dict[str, str]] = {}
        memory = ClientMemory(self.memory_folder)
        for file, found in memory.written(memory.clients()).items():
            memory_files.setdefault(step_of(file), {})[file] = found
        for step, line in enumerate(whole_lines(path)[:done]):
            path = self._checkpoint_path(step + 1)
            if path.exists() and _step_in(path) != step + 1:
                raise TacitError(f"{path} is another round's. {START_ANEW}")
            checkpoint = payload.read_with_digest(path)[1] if path.exists() else ""
            entry = {
                "round": step,
                "record": digest(line),
                "checkpoint": checkpoint,
                "kept": memory_files.get(step, {}),
            }
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
        records = whole_lines(self.folder / "rounds.jsonl")[:done]
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
        ClientMemory(self.memory_folder).go_back(done)

    def note(self, name: str, make: Callable[[], bytes | None]) -> None:
        """Write down something of the data (None: nothing), unless it is there as it was written before."""
        known = {name: self.manifest.noted[name]} if name in self.manifest.noted else {}
        if known and not damaged_files(self.folder, known):
            return
        if (content := make()) is not None:
            write_atomically(self.folder / name, content)
            if known != {name: digest(content)}:
                self.manifest.append({"noted": {name: digest(content)}})

    def finish_stage(self, number: int, state: Payload) -> None:
        self._saving.wait()
        with uninterrupted():
            found = payload.write(self._stage_path(number), state)
            self.manifest.append({"stage": number, "rounds": self.done, "state": found})

    def finish_round(
        self, step: int, record: dict[str, Any], state: Payload, pictures: Mapping[str, Tensor] | None = None
    ) -> None:
        """The record, the checkpoint, and last the line in the manifest: with it, the round counts as finished.

        It is written while the next round goes on, from a copy of the state; whatever looks at the folder waits for it.
        """
        line, copy = json.dumps(record) + "\n", payload.seal(state)
        memory_files = ClientMemory(self.memory_folder).written(record["asked"], step)  # before clients go on

        def save() -> None:
            for name, images in (pictures or {}).items():
                write_atomically(self.folder / "pictures" / f"{name}.png", sheet(images))
            append(self.folder / "rounds.jsonl", line)
            found = payload.write(self._checkpoint_path(step + 1), {STEP: step + 1, **copy})
            self.manifest.append(
                {"round": step, "record": digest(line.encode()), "checkpoint": found, "kept": memory_files}
            )
            for rounds, path in self.checkpoints().items():
                if rounds <= step + 1 - self._settings.keep.checkpoints:
                    remove(path)

        self._saving.begin(save)

    def finish(self, weights: Weights | None, summary: dict[str, Any], other_files: Mapping[str, bytes]) -> None:
        """The weights, what is written beside them (how to use them, the card), and last the summary: it is done."""
        self._saving.wait()
        with uninterrupted():
            written = dict(other_files)
            if weights is not None:
                written["model.safetensors"] = save_weights({name: t.contiguous() for name, t in weights.items()})
            written["summary.json"] = (json.dumps(summary, indent=2) + "\n").encode()
            for name, content in written.items():
                write_atomically(self.folder / name, content)
            self.manifest.append({"files": {n: digest(content) for n, content in written.items() if n in RESULTS}})


class Saving:
    """One piece of writing at a time, in a thread of its own. What goes wrong there is raised where it is waited for.

    >>> saving, done = Saving(), []
    >>> saving.begin(lambda: done.append(1))
    >>> saving.begin(lambda: done.append(2))                        # waits for the first
    >>> saving.wait()
    >>> done
    [1, 2]
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, work: Callable[[], None]) -> None:
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="tacit-saving")
        with uninterrupted():
            self._thread.start()

    def wait(self) -> None:
        with uninterrupted():
            if self._thread is not None:
                self._thread.join()
                self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error


RESULTS = ("model.safetensors", "model.json", "evaluation.json", "summary.json")


def _step_in(path: Path) -> int:
    step = payload.read(path).get(STEP)
    if not isinstance(step, int):
        raise TacitError(f"{path} is no checkpoint of a round. {START_ANEW}")
    return step


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
    if written is not None and read_experiment(path) is None:
        notes.append(f"{path} was missing or damaged. It was written again from {manifest.NAME}.")
        write_atomically(path, written.begin["experiment"].encode())


def check_same(folder: Path, experiment: Experiment) -> None:
    """Refuse to go on with a run that was started with other settings, and show which."""
    if not holds_run(folder):
        return
    written = load_manifest(folder)
    if written is not None and (edited := changed_settings(folder, written)):
        raise TacitError(edited)
    changed = differences(experiment_in(folder), experiment)
    if changed:
        listed = "\n  ".join(changed)
        raise TacitError(
            f"The run in {folder} was started with other settings:\n  {listed}\n"
            f"Go on with its own settings (tacit resume {as_word(folder)}), or start anew in another folder with --out."
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
