"""`make evidence`: several methods on one split and budget, several seeds, on real data, at a stated reduced scale.

Runs that are finished are not repeated, one that was stopped goes on; so the whole can be interrupted at any time.
`make evidence PART=server SEEDS=3` runs one part. Tables go to evidence/PART.json and evidence/PART.md.
"""

import json
import statistics
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

from tacit.cli.progress import watcher_for
from tacit.compare import gap_closed
from tacit.engine import run_experiment
from tacit.errors import TacitError
from tacit.experiment import resolve
from tacit.units import clock

HERE = Path(__file__).parent
RUNS = Path("runs/evidence")
RESULTS = Path("evidence")


def parts() -> dict[str, dict[str, Any]]:
    """Every part by name: benchmarks/parts/*.toml, each with shared settings and a table of rows."""
    return {path.stem: tomllib.loads(path.read_text()) for path in sorted((HERE / "parts").glob("*.toml"))}


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def run_part(name: str, part: dict[str, Any], seeds: int, screen: Console) -> None:
    """All rows of a part with all seeds; writes the table as it stands after each row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for label, changes in part["rows"].items():
        for seed in range(seeds):
            experiment = resolve(part["shared"], changes, {"seed": seed})
            folder = RUNS / name / f"{label}-seed{seed}"
            watcher = watcher_for(screen, f"{name}/{label} seed {seed}")
            try:
                run = run_experiment(experiment, folder, resume=True, watcher=watcher)
            finally:
                watcher.close()
            tail = [record["accuracy"] for record in run.records if record.get("accuracy") is not None][-5:]
            rows.setdefault(label, []).append({**(run.summary or {}), "last_five": statistics.fmean(tail)})
        write_results(name, part, rows)


def write_results(name: str, part: dict[str, Any], rows: dict[str, list[dict[str, Any]]]) -> None:
    """The table as JSON and as Markdown: made from run folders, never typed."""
    RESULTS.mkdir(exist_ok=True)
    table = [row_of(label, runs, rows) for label, runs in rows.items()]
    facts = {"part": name, "title": part["title"], "scale": part["scale"], "commit": commit(), "rows": table}
    (RESULTS / f"{name}.json").write_text(json.dumps({**facts, "shared": part["shared"]}, indent=2) + "\n")
    lines = [
        f"# {part['title']}",
        "",
        f"{part['scale']} Command: `make evidence PART={name} SEEDS={table[0]['seeds']}`, commit {facts['commit']}.",
        "Accuracy in per cent, mean ± standard deviation over seeds; *last five* is the mean of the last five rounds.",
        "",
        "| method | seeds | accuracy | last five | AUC | gap closed | labels right | kept | time a run |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        cells = [row["label"], row["seeds"], row["accuracy"], row["last_five"], row["auc"], row["gap"]]
        cells += [row["right"], row["kept"], row["time"]]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")


def row_of(label: str, runs: list[dict[str, Any]], rows: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    def mean(name: str, of: list[dict[str, Any]] = runs) -> float | None:
        values = [run[name] for run in of if run.get(name) is not None]
        return statistics.fmean(values) if values else None

    def percent(name: str) -> str:
        values = [100 * run[name] for run in runs if run.get(name) is not None]
        if not values:
            return "–"
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.1f}{spread}"

    lower, upper = (mean("last_five", rows[bound]) if bound in rows else None for bound in ("lower", "upper"))
    gap = gap_closed(mean("last_five"), lower, upper)
    return {
        "label": label,
        "seeds": len(runs),
        "accuracy": percent("accuracy"),
        "last_five": percent("last_five"),
        "auc": percent("auc"),
        "gap": "–" if gap is None or label in ("lower", "upper") else f"{100 * gap:.0f} %",
        "right": percent("pseudo_accuracy"),
        "kept": percent("kept_ratio"),
        "time": clock(mean("seconds") or 0),
        "per_seed": [run["last_five"] for run in runs],
    }


def main() -> None:
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word and word.split("=", 1)[1])
    known = parts()
    chosen = [settings["PART"]] if "PART" in settings else list(known)
    screen = Console(soft_wrap=True)
    for name in chosen:
        if name not in known:
            raise SystemExit(f"There is no part '{name}'. There are: {', '.join(known)}.")
        try:
            run_part(name, known[name], int(settings.get("SEEDS", known[name].get("seeds", 1))), screen)
        except KeyboardInterrupt:
            screen.print("\nStopped. Finished rounds are saved; the same command goes on.")
            raise SystemExit(130) from None
        except TacitError as error:
            raise SystemExit(f"{name}: {error}") from None
        screen.print((RESULTS / f"{name}.md").read_text(), markup=False, highlight=False)


if __name__ == "__main__":
    main()
