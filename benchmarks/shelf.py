"""The shelf: what is left of an evidence run for ever, small enough to be committed.

evidence/runs/METHOD-HASH-seedN/ is a run folder without weights, checkpoints and clients' details. `tacit report
evidence/runs` and `tacit compare evidence/runs/…` read it like any other. Beside it lies made.json: commit, day,
machine and the hashes of the split.
"""

import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, processor
from tacit.compare.results import Holdings, holdings_of
from tacit.compare.rows import PendingRun, identity, run_folder
from tacit.core.settings import Experiment
from tacit.runs.folder import Run

SHELF = Path("evidence/runs")
# Of each round, what the page shows. Clients' own figures would make a run a hundred times as large.
KEPT = (
    "stage",
    "round",
    "step",
    "accuracy",
    "balanced_accuracy",
    "auc",
    "pseudo_accuracy",
    "accepted_ratio",
    "seconds",
    "cpu_seconds",
    "phases",
)


def thin(record: Mapping[str, Any]) -> dict[str, Any]:
    """A round without what the page does not need; the time without evaluation as one number.

    >>> thin({"step": 3, "accuracy": 0.512345, "asked": [1], "phases": {"train": 2.0, "merge": 0.5, "evaluate": 1.0}})
    {'step': 3, 'accuracy': 0.51235, 'work': 2.5}
    """
    found = {name: record[name] for name in KEPT if record.get(name) is not None}
    phases = found.pop("phases", {})
    found["work"] = sum(seconds for name, seconds in phases.items() if name != "evaluate")
    return {name: round(value, 5) if isinstance(value, float) else value for name, value in found.items()}


def on_the_shelf() -> dict[str, Path]:
    """All kept runs by what decides their outcome. A setting that came later has its default in old runs."""
    return {identity(Run(path.parent).experiment): path.parent for path in sorted(SHELF.glob("*/summary.json"))}


def place_of(experiment: Experiment, shelf: Mapping[str, Path]) -> Path:
    """Where a run is, or will be, on the shelf. Parts that want the same run share it."""
    return shelf.get(identity(experiment)) or run_folder(SHELF, experiment.method["name"], experiment)


def put_away(job: PendingRun, place: Path) -> None:
    """Keep the records of a finished run; the summary last, for it says that the run is there."""
    run = Run(job.folder)
    place.mkdir(parents=True, exist_ok=True)
    made = {
        "commit": commit(),
        "day": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores",
        "holdings": holdings_of(job)._asdict(),
    }
    (place / "made.json").write_text(json.dumps(made, indent=2) + "\n")
    (place / "experiment.toml").write_text(job.experiment.to_toml())
    (place / "rounds.jsonl").write_text("".join(json.dumps(thin(record)) + "\n" for record in run.records))
    (place / "summary.json").write_text(json.dumps(run.summary, indent=2) + "\n")


def made(folder: Path) -> dict[str, Any]:
    """How a kept run came about."""
    found: dict[str, Any] = json.loads((folder / "made.json").read_text())
    return {**found, "holdings": Holdings(**found["holdings"])}
