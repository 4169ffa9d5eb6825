"""`make evidence PART=robust` and `PART=private`: the two tables of docs/privacy.md, on Fashion-MNIST at a small scale.

robust: CBAFed, FedDB and SemiFL with 0, 1 and 3 of 10 clients that attack, by a plain mean and by each defence.
private: accuracy against epsilon with 100 clients. What was measured is kept in evidence/safeguards.json and not
repeated; `AGAIN=yes` makes it anew, `ROWS=semifl` runs the rows that have this word in their name.
"""

import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, processor
from tacit.config.resolve import resolve
from tacit.core.console import SafeConsole
from tacit.core.safeguards import Privacy
from tacit.core.settings import Experiment
from tacit.engine.accounting import noise_for
from tacit.engine.run import run_experiment
from tacit.runs.progress import watcher_for

SHEET, PAGE = Path("evidence/safeguards.json"), Path("docs/privacy.md")
LAST = 3  # rounds whose mean accuracy is told

ROBUST: dict[str, Any] = {
    "data.name": "fashion-mnist",
    "data.placement": "clients",
    "data.clients": 10,
    "data.labels": 400,
    "data.partition": "dirichlet",
    "data.alpha": 0.8,
    "data.subset": 3000,
    "data.test_subset": 2000,
    "net.name": "cnn-16",
    "net.norm": "gn",
    "rounds": 10,
    "train.batch": 32,
    "train.epochs": 2,
    "train.lr": 0.05,
    "backend.name": "local",  # starting workers would cost more than these short runs
}
METHODS: dict[str, dict[str, Any]] = {
    "cbafed": {"method.name": "cbafed", "method.warmup": 0},
    "feddb": {"method.name": "feddb", "method.batch": 32},
    "semifl": {"method.name": "semifl"},
}
ATTACKS: dict[str, dict[str, Any]] = {
    "sign-flip ×4": {"faults.attack": "sign-flip", "faults.attack_scale": 4.0},
    "scale ×10": {"faults.attack": "scale", "faults.attack_scale": 10.0},
    "label-flip": {"faults.attack": "label-flip"},
}
MEANS: dict[str, dict[str, Any]] = {
    "mean": {},
    "median": {"robust.mean": "median"},
    "trimmed-mean": {"robust.mean": "trimmed-mean", "robust.trim": 0.3},
    "multi-krum": {"robust.mean": "multi-krum", "robust.byzantine": 3},
}

PRIVATE: dict[str, Any] = {
    "data.name": "fashion-mnist",
    "data.clients": 100,
    "data.partition": "iid",
    "data.subset": 6100,
    "data.test_subset": 2000,
    "net.name": "cnn-8",
    "net.norm": "gn",
    "rounds": 10,
    "train.batch": 16,
    "train.lr": 0.1,
    "train.momentum": 0.0,
    "backend.name": "local",
}
LEARNERS: dict[str, dict[str, Any]] = {
    "fedavg, labels at clients": {"method.name": "fedavg", "data.placement": "clients", "data.labels": 0},
    "semifl, 100 labels at the server": {
        "method.name": "semifl",
        "data.placement": "server",
        "data.labels": 100,
        "train.server_epochs": 5,
    },
}
CLIP, DELTA, BUDGETS = 0.5, 1e-3, (1.0, 3.0, 8.0)


@dataclass(frozen=True)
class Cell:
    """One figure of a table."""

    row: str
    column: str
    settings: dict[str, Any]

    def experiment(self, seed: int = 0) -> Experiment:
        return resolve(self.settings, {"seed": seed})

    def found(self, sheet: Mapping[str, Any], seed: int) -> dict[str, Any] | None:
        """What was measured with these settings, as they are written here: defaults that come later change nothing."""
        kept: dict[str, Any] | None = sheet.get(self.key(seed))
        return kept if kept is not None and kept["settings"] == self.settings else None

    def key(self, seed: int) -> str:
        return f"{self.row} | {self.column} | seed {seed}"


def robust_cells() -> list[Cell]:
    """Each method, clean and under each attack, by each mean."""
    cells = []
    for method, options in METHODS.items():
        troubles = {"nobody attacks": dict[str, Any]()}
        for count in (1, 3):
            troubles |= {f"{count} × {name}": {"faults.attackers": count, **how} for name, how in ATTACKS.items()}
        for trouble, faults in troubles.items():
            for mean, defence in MEANS.items():
                cells.append(Cell(f"{method}: {trouble}", mean, {**ROBUST, **options, **faults, **defence}))
    return cells


def private_cells() -> list[Cell]:
    """Each method by each budget, spent over all rounds; without any noise, and without clipping, too."""
    cells, settings = [], Privacy(clip=CLIP, noise=1.0, delta=DELTA)
    clients, rounds = PRIVATE["data.clients"], PRIVATE["rounds"]
    for name, options in LEARNERS.items():
        for budget in BUDGETS:
            noise = round(noise_for(settings, budget, clients, clients, rounds), 3)
            on = {"privacy.clip": CLIP, "privacy.delta": DELTA, "privacy.noise": noise}
            cells.append(Cell(name, f"ε = {budget:g}", {**PRIVATE, **options, **on}))
        cells.append(Cell(name, "clipped, no noise (ε = ∞)", {**PRIVATE, **options, "privacy.clip": CLIP}))
        cells.append(Cell(name, "no [privacy]", {**PRIVATE, **options}))
    return cells


TABLES = {"robust": robust_cells, "private": private_cells}


def read_sheet() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(SHEET.read_text()) if SHEET.is_file() else {}
    return found


def measured(experiment: Experiment, screen: SafeConsole, label: str) -> dict[str, Any]:
    """One run, in a folder that is gone afterwards."""
    watcher = watcher_for(screen, label)
    try:
        with tempfile.TemporaryDirectory(prefix="tacit-safeguards-") as folder:
            run = run_experiment(experiment, Path(folder) / "run", watcher=watcher)
            records, summary = run.records, run.summary or {}
    finally:
        watcher.close()
    accuracies = [record["accuracy"] for record in records if record.get("accuracy") is not None]
    return {
        "accuracy": round(statistics.fmean(accuracies[-LAST:]), 5),
        "epsilon": summary.get("privacy", {}).get("epsilon"),
        "cpu_seconds": round(sum(record["cpu_seconds"] or 0 for record in records), 1),
        "commit": commit(),
        "machine": processor(),
    }


def run_table(name: str, cells: Iterable[Cell], seeds: int, again: bool, rows: str, screen: SafeConsole) -> None:
    """What is missing of a table, one seed of all its cells after the other; the page is renewed after each."""
    cells = [cell for cell in cells if rows in cell.row]
    for seed in range(seeds):
        for cell in cells:
            sheet = read_sheet()
            if cell.found(sheet, seed) is not None and not again:
                continue
            figures = measured(cell.experiment(seed), screen, f"{name}/{cell.row}/{cell.column} seed {seed}")
            sheet[cell.key(seed)] = {**figures, "settings": cell.settings}
            SHEET.parent.mkdir(exist_ok=True)
            SHEET.write_text(json.dumps(sheet, indent=1, sort_keys=True) + "\n")
            write_page()


def table(cells: Iterable[Cell], sheet: Mapping[str, Any]) -> str:
    """Accuracy in per cent, the mean over the seeds that are there ± their standard deviation; –: not run yet."""
    found: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for cell in cells:
        figures = [cell.found(sheet, seed) for seed in range(10)]
        values = [100 * one["accuracy"] for one in figures if one is not None]
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        found.setdefault(cell.row, {})[cell.column] = f"{statistics.fmean(values):.1f}{spread}" if values else "–"
        columns += [] if cell.column in columns else [cell.column]
    lines = ["| " + " | ".join(["", *columns]) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += ["| " + " | ".join([row, *(cells.get(c, "–") for c in columns)]) + " |" for row, cells in found.items()]
    return "\n".join(lines)


def with_tables(page: str, sheet: Mapping[str, Any]) -> str:
    """The page with its tables as the sheet has them, between marks."""
    for name, cells in TABLES.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->"
        if begin in page:
            before, rest = page.split(begin, 1)
            page = f"{before}{begin}\n{table(cells(), sheet)}\n\n{end}{rest.split(end, 1)[1]}"
    return page


def write_page() -> None:
    if PAGE.is_file():
        PAGE.write_text(with_tables(PAGE.read_text(), read_sheet()))
