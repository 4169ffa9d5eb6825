"""Run folders as plain data, ready for JSON: what the page shows is decided here, how it looks is not.

A run is in one of four states. `finished`: its result is there. `running`: a process is at work in its folder.
`stopped`: it was interrupted, killed, or failed, and can go on. `broken`: its files cannot be read or contradict
each other; then `problems` says what is wrong.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tacit.config.resolve import resolve
from tacit.contract.record import upgraded
from tacit.core.errors import TacitError
from tacit.core.settings import read_toml
from tacit.core.text import as_word
from tacit.engine.private import privacy_spent
from tacit.engine.summary import summarize
from tacit.evaluation.interval import wilson_interval
from tacit.report.figures import CELLS, describe, events, read_figures
from tacit.report.groups import group
from tacit.report.thumbnails import picture_files, read_pictures, read_split
from tacit.runs.folder import is_in_use, read_records
from tacit.runs.plan import stages_of
from tacit.version import __version__

SIGNS = ("experiment.toml", "rounds.jsonl", "run.lock")  # a folder with one of these is a run, or what is left of it
ALL_CELLS = 120_000  # of the heat maps of one kind in a page: with many runs each gets fewer
WATCHED = (*SIGNS, "summary.json", "split.npz", "evaluation.json")
NOTHING_YET: dict[str, Any] = {"steps": [], "stages": [], "stride": 1, "series": {}, "grids": {}, "cubes": {}}

Files = tuple[tuple[str, int, int], ...]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run folders among and below the given ones, each once, in order."""
    found: dict[Path, Path] = {}
    for folder in folders:
        for path in _below(folder):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _below(folder: Path) -> Iterator[Path]:
    for place, below, files in os.walk(folder):
        if any(sign in files for sign in SIGNS):
            below.clear()  # there are no runs in a run
            yield Path(place)
        below[:] = sorted(name for name in below if not name.startswith("."))


class Collector:
    """Reads the runs below some folders, again and again; a run whose files did not change is not read again."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = list(folders)
        self._known: dict[Path, tuple[Any, dict[str, Any], dict[str, Any] | None]] = {}

    def collect(self) -> dict[str, Any]:
        """All runs, their groups and splits."""
        paths = find_runs(self.folders)
        cells = max(1000, min(CELLS, ALL_CELLS // max(1, len(paths))))
        runs, splits = [], {}
        for path, name in zip(paths, self._names(paths), strict=True):
            key = (name, cells, _files(path), is_in_use(path))
            known = self._known.get(path)
            if known is None or known[0] != key:
                known = (key, *collect_run(path, name, cells))
                self._known[path] = known
            _, run, split = known
            runs.append(run)
            if split is not None:
                splits[split["id"]] = split
        names = dict.fromkeys(
            name for run in runs for kind in ("series", "grids", "cubes") for name in run["figures"].get(kind, ())
        )
        return {
            "version": __version__,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "runs": runs,
            "groups": group(runs),
            "splits": splits,
            "figures": {name: describe(name) for name in names},
        }

    def _names(self, paths: Sequence[Path]) -> list[str]:
        """The runs' paths below what the given folders have in common."""
        roots = [folder.resolve() for folder in self.folders]
        given = [root.parent if _is_run(root) else root for root in roots]
        base = os.path.commonpath(given) if given else ""
        return [os.path.relpath(path.resolve(), base) for path in paths]


def collect(folders: Sequence[Path]) -> dict[str, Any]:
    """All runs among and below some folders, as plain data."""
    return Collector(folders).collect()


def collect_run(folder: Path, name: str, cells: int = CELLS) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """One run, and its split if that can be read."""
    problems: list[str] = []
    remarks: list[str] = []
    settings, text = _settings(folder, problems)
    records = _records(folder, problems)
    summary = _summary(folder, problems)
    split = None
    try:
        split = read_split(folder / "split.npz") if (folder / "split.npz").is_file() else None
    except TacitError as error:
        problems.append(str(error))
    pictures, wrong = read_pictures(folder)
    remarks += [*wrong, *privacy_spent(summary or {})]
    working = is_in_use(folder)
    of = summary.get("rounds", len(records)) if summary else _rounds_in_all(settings, remarks)
    state = "broken" if problems else "finished" if summary else "running" if working else "stopped"
    rule = str(settings.get("reporting", "last"))
    classes, parties = (split["classes"], split["parties"]) if split else ([], [])
    run = {
        "id": name,
        "name": name,
        "folder": str(folder),
        "state": state,
        "says": _says(state, len(records), of, working),
        "problems": problems,
        "remarks": remarks,
        "settings": _plain(settings),
        "toml": text,
        "seed": settings.get("seed"),
        "title": str(settings.get("title", "")),
        "method": _text_in(settings, "method", "name"),
        "data": _text_in(settings, "data", "name"),
        "placement": _text_in(settings, "data", "placement"),
        "reporting": rule,
        "paper": _plain(_table_in(settings, "paper")),
        "rounds": {"done": len(records), "of": of},
        "results": _plain(_results(records, summary, rule)),
        "summary": _plain(summary or {}),
        "figures": read_figures(records, classes, cells, parties) if records else NOTHING_YET,
        "events": events(records, parties=parties),
        "recall": _recall(folder, classes),
        "split": split["id"] if split else None,
        "pictures": pictures,
        "reproduce": _reproduce(folder, state, _text_in(settings, "backend", "name") == "flower"),
    }
    return run, split


# --- The files of a run -----------------------------------------------------------------------------------


def _is_run(folder: Path) -> bool:
    return any((folder / sign).is_file() for sign in SIGNS)


def _files(folder: Path) -> Files:
    """What changes when a run goes on: names, sizes and times of its files."""
    found = []
    for path in [*(folder / name for name in WATCHED), *picture_files(folder)]:
        try:
            status = path.stat()
        except OSError:
            continue
        found.append((str(path), status.st_size, status.st_mtime_ns))
    return tuple(found)


def _settings(folder: Path, problems: list[str]) -> tuple[dict[str, Any], str]:
    """The experiment as it was written, not resolved again: its method may be a file that is no longer there."""
    path = folder / "experiment.toml"
    try:
        return read_toml(path), path.read_text()
    except (TacitError, OSError) as error:
        problems.append(str(error) if path.exists() else "experiment.toml is missing: nobody knows what was run.")
        return {}, ""


def _records(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The finished rounds. A last line that was cut off by a kill is no damage; a bad one before it is."""
    path = folder / "rounds.jsonl"
    if not path.is_file():
        return []
    try:
        lines = path.read_text().splitlines(keepends=True)
        records = read_records(path)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"rounds.jsonl cannot be read ({error}).")
        return []
    cut_off = bool(lines) and not lines[-1].endswith("\n")
    if len(records) < len(lines) - cut_off:
        later = len(lines) - len(records) - 1
        problems.append(f"rounds.jsonl is damaged in line {len(records) + 1}; {later} later lines are not shown.")
    whole = 0
    while whole < len(records) and _is_record(records[whole], whole):
        whole += 1
    if whole < len(records):
        problems.append(f"rounds.jsonl does not go on in order: line {whole + 1} is not the record of round {whole}.")
    return records[:whole]


def _is_record(record: Any, step: int) -> bool:
    return isinstance(record, dict) and record.get("step") == step and "stage" in record


def _summary(folder: Path, problems: list[str]) -> dict[str, Any] | None:
    path = folder / "summary.json"
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        problems.append("summary.json is damaged; `tacit resume` makes it again.")
        return None
    return upgraded(found)


def _recall(folder: Path, classes: Sequence[str]) -> list[dict[str, Any]]:
    """By class: test images, share recognised by the last model and its 95 % interval; [] where that is not known."""
    try:
        confusion = json.loads((folder / "evaluation.json").read_text())["confusion"]
        counts = [(int(row[number]), sum(int(count) for count in row)) for number, row in enumerate(confusion)]
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return []
    if len(counts) != len(classes):
        return []
    return [
        {
            "class": name,
            "images": images,
            "recall": hits / images if images else None,
            "interval": list(wilson_interval(hits, images)) if images else None,
        }
        for name, (hits, images) in zip(classes, counts, strict=True)
    ]


def _rounds_in_all(settings: Mapping[str, Any], remarks: list[str]) -> int | None:
    """How many rounds all stages of an unfinished run have together; None if its method is no longer to be had."""
    if not settings:
        return None
    try:
        return sum(stage.rounds for stage in stages_of(resolve(settings)))
    except Exception as error:  # a method may be a file of the user's, which can raise anything
        remarks.append(f"The experiment cannot be resolved here: {error}")
        return None


# --- What is told -----------------------------------------------------------------------------------------


def _says(state: str, done: int, of: int | None, working: bool) -> str:
    """The state in a sentence."""
    rounds = f"{done} of {of} rounds" if of is not None else f"{done} rounds"
    return {
        "finished": f"Finished: {done} rounds.",
        "running": f"Running: {rounds} done.",
        "stopped": f"Stopped: {rounds} done. It was interrupted or failed, and can go on.",
        "broken": f"Broken: {rounds} can be read{', and a process is at work here' if working else ''}.",
    }[state]


def _results(records: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None, rule: str) -> dict[str, Any]:
    """The result by the run's reporting rule; of an unfinished run, what it would be now."""
    if summary is not None:
        return {name: value for name, value in summary.items() if isinstance(value, int | float)}
    main = [r for r in records if r["stage"] == "main" and r.get("accuracy") is not None]
    totals = {name: sum(r.get(name) or 0 for r in records) for name in ("bytes_up", "bytes_down", "seconds")}
    return {**summarize(main, rule), **totals} if records else {}


def _reproduce(folder: Path, state: str, at_sites: bool) -> list[dict[str, str]]:
    """Commands to copy; of a run over real sites, those for the server's machine, while the sites have joined.

    Names of sites are for the server alone, and a page may be passed on.
    """
    place, experiment = as_word(folder), as_word(folder / "experiment.toml")
    words = "tacit site run --home HOME --sites NAMES" if at_sites else "tacit run"
    ways = [
        {
            "what": "Run it again (the same numbers on the same kind of CPU)",
            "command": f"{words} {experiment} --out runs/again",
        }
    ]
    if state == "stopped":
        on = f"{words} {experiment} --out {place} --resume" if at_sites else f"tacit resume {place}"
        ways.insert(0, {"what": "Go on with it", "command": on})
    ways.append({"what": "Make this page again", "command": f"tacit report {place} -o report.html"})
    return ways


def _table_in(settings: Mapping[str, Any], section: str) -> dict[str, Any]:
    found = settings.get(section)
    return dict(found) if isinstance(found, dict) else {}


def _text_in(settings: Mapping[str, Any], section: str, key: str) -> str:
    return str(_table_in(settings, section).get(key, ""))


def _plain(value: Any) -> Any:
    """The same without what JSON has no word for: NaN and infinity become None, dates become text."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
