"""Is everything in a run folder as it was written? What is damaged or missing is named, with what to do."""

import tomllib
from collections.abc import Mapping
from pathlib import Path

from tacit.config.resolve import resolve
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.files import digest, read_bytes
from tacit.core.settings import differences
from tacit.runs import manifest
from tacit.runs.folder import START_ANEW, Run, read_experiment
from tacit.runs.manifest import Manifest, load_manifest
from tacit.runs.memory import ClientMemory


def whole_lines(path: Path) -> list[bytes]:
    """The whole lines of a file; the last one may have been cut off by a kill, and is then none."""
    data = read_bytes(path) if path.exists() else b""
    return [line + b"\n" for line in data.split(b"\n")[:-1]]


def way_back(run: Run, written: Manifest, checkpoints: int) -> list[int]:
    """After how many rounds a run may go on, the newest first: where it is, and where there is an older checkpoint."""
    older = [rounds for rounds in run.checkpoints() if rounds < written.done]
    from_the_start = [0] if 0 < written.done < checkpoints else []
    return [written.done, *older, *from_the_start]


def damage_at(run: Run, written: Manifest, rounds: int, records_only: bool = False) -> list[str]:
    """What is wrong with the state of a run after so many rounds, each file in a sentence (without a full stop)."""
    path, wrong = run.folder / "rounds.jsonl", []
    try:
        lines = whole_lines(path)
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
    memory_files = written.memory_at(rounds, latest)
    places = ClientMemory(run.memory_folder).find(memory_files, rounds)
    expected |= {places[file]: found for file, found in memory_files.items()}
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
    if read_experiment(folder / "experiment.toml") is None:
        found.append(f"{folder / 'experiment.toml'} is missing or damaged. `tacit resume` writes it again.")
    if changed := changed_settings(folder, written):
        found.append(changed)
    if wrong := damaged_files(folder, {"split.npz": written.begin["split"]}):
        found += [f"{one}. `tacit resume` draws it again." for one in wrong]
    made_again = {**written.files, **written.noted}
    found += [f"{wrong}. `tacit resume` makes it again." for wrong in damaged_files(folder, made_again)]
    damage = {rounds: damage_at(run, written, rounds) for rounds in way_back(run, written, 0)}
    whole = [rounds for rounds, wrong in damage.items() if not wrong]
    remedy = f"`tacit resume` goes on from round {whole[0]}." if whole else START_ANEW
    if written.files and not damage_at(run, written, written.done, records_only=True):
        remedy = "The run is finished and its results do not need it, but it cannot be rolled back to there."
    found += [f"{wrong}. {remedy}" for wrong in dict.fromkeys(one for wrongs in damage.values() for one in wrongs)]
    return found


def changed_settings(folder: Path, written: Manifest) -> str:
    """Which settings in experiment.toml are not those that the run began with; '' if none (or it is unreadable)."""
    path = folder / "experiment.toml"
    now = read_experiment(path)
    changed = differences(resolve(tomllib.loads(written.begin["experiment"])), now) if now is not None else []
    if not changed:
        return ""
    listed = "\n  ".join(changed)
    return f"{path} was changed after the run began:\n  {listed}\nUndo that, or start anew with --out."
