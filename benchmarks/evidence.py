"""`make evidence`: several methods on one split and budget, several seeds, on real data, at a stated reduced scale.

Runs that are finished are not repeated, one that was stopped goes on; so the whole can be interrupted at any time.
`make evidence PART=server SEEDS=3` runs one part. Tables go to evidence/PART.json and evidence/PART.md.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from rich.console import Console

from tacit import tables
from tacit.cli.progress import watcher_for
from tacit.compare import Survey, blocks_of, notes, results, survey
from tacit.engine import run_experiment
from tacit.errors import TacitError
from tacit.experiment import resolve
from tacit.lineup import Job, Row

HERE = Path(__file__).parent
RUNS = Path("runs/evidence")
RESULTS = Path("evidence")


def parts() -> dict[str, dict[str, Any]]:
    """Every part by name: benchmarks/parts/*.toml, each with shared settings and a table of rows."""
    return {path.stem: tomllib.loads(path.read_text()) for path in sorted((HERE / "parts").glob("*.toml"))}


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def rows_of(name: str, part: dict[str, Any], seeds: int) -> list[Row]:
    """The rows of a part, each with its seeds."""
    rows = []
    for label, changes in part["rows"].items():
        experiments = [resolve(part["shared"], changes, {"seed": seed}) for seed in range(seeds)]
        jobs = tuple(Job(one, RUNS / name / f"{label}-seed{one.seed}") for one in experiments)
        rows.append(Row(label, jobs))
    return rows


def run_part(name: str, part: dict[str, Any], seeds: int, screen: Console) -> None:
    """All rows of a part with all seeds; writes the table as it stands after each row."""
    rows = rows_of(name, part, seeds)
    seen = survey(rows)
    for number, row in enumerate(rows, start=1):
        for job in row.jobs:
            watcher = watcher_for(screen, f"{name}/{row.label} seed {job.experiment.seed}")
            try:
                run_experiment(job.experiment, job.folder, resume=True, watcher=watcher)
            finally:
                watcher.close()
        write_results(name, part, rows[:number], seen)


COLUMNS = ("method", "seeds", "accuracy", "last five", "AUC", "gap closed", "labels right", "kept", "time a run")


def write_results(name: str, part: dict[str, Any], rows: list[Row], seen: Survey) -> None:
    """The table as JSON and as Markdown: made from run folders, never typed."""
    RESULTS.mkdir(exist_ok=True)
    blocks = results(rows, seen, score="last_five")
    said = [
        "*Last five* is the mean of the last five evaluated rounds; the gap closed is made of it.",
        *notes(blocks_of(rows), seen),
    ]
    facts = {"part": name, "title": part["title"], "scale": part["scale"], "commit": commit()}
    table = {**facts, "rows": tables.records(blocks), "notes": said, "shared": part["shared"]}
    (RESULTS / f"{name}.json").write_text(json.dumps(table, indent=2) + "\n")
    seeds = len(rows[0].jobs)
    made = f"{part['scale']} Command: `make evidence PART={name} SEEDS={seeds}`, commit {facts['commit']}."
    text = tables.markdown(tables.sheet(blocks, notes=said, columns=COLUMNS))
    (RESULTS / f"{name}.md").write_text(f"# {part['title']}\n\n{made}\n\n{text}")


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
