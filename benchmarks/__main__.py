"""`make bench`: speed and memory as ratios within one run. `make bench ONLY=round` runs one part.

Everything goes to runs/bench.json; where all parts ran, also to evidence/bench.json and docs/speed.md.
"""

import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.machine import commit, processor
from benchmarks.timing import Row

PARTS = ("round", "workers", "clients", "views", "engine", "simulation", "buffers", "inference")
COLUMNS = ("what", "median", "spread", "goal", "reached", "note")
QUIET = 0.5  # a load above this is somebody else's work
RUNS, EVIDENCE, PAGE = Path("runs"), Path("evidence"), Path("docs/speed.md")

INTRO = """*This page is made by `make bench`; nobody types its numbers.* One part: `make bench ONLY=round`.

What tacit takes is compared with something else in the same run, turn by turn, because the same machine is faster or
slower from one minute to the next. Figures are medians, the spread is from the lowest turn to the highest. A goal is
what we set out to reach; whether it was, is told beside it."""


def machine() -> dict[str, Any]:
    """Where this was measured."""
    load = os.getloadavg()[0]
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "load_at_start": load,
        "quiet": load <= QUIET,
    }


def describe(facts: dict[str, Any]) -> str:
    """The machine in a line or two."""
    text = (
        f"{facts['processor']}, {facts['cores']} cores, {facts['memory_gb']} GB, {facts['system']}; Python "
        f"{facts['python']}, torch {facts['torch']}; commit {facts['commit']}; load at start "
        f"{facts['load_at_start']:.2f}."
    )
    return text if facts["quiet"] else f"{text} The machine was not quiet: do not trust these figures."


def sentences(module: Any) -> str:
    """What the part says of itself, without its line breaks."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (module.__doc__ or "").strip().split("\n\n"))


def markdown(facts: dict[str, Any], results: dict[str, list[Row]]) -> str:
    lines = ["# Speed and memory", "", INTRO, "", describe(facts), ""]
    for name, rows in results.items():
        module = importlib.import_module(f"benchmarks.{name}")
        lines += [f"## {module.TITLE}", "", sentences(module), ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(row.cells()) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def record(facts: dict[str, Any], results: dict[str, list[Row]]) -> str:
    parts = {name: [row.record() for row in rows] for name, rows in results.items()}
    return json.dumps({"machine": facts, "parts": parts}, indent=2, ensure_ascii=False) + "\n"


def main(only: list[str]) -> None:
    if unknown := [name for name in only if name not in PARTS]:
        raise SystemExit(f"There is no part '{unknown[0]}'. There are: {', '.join(PARTS)}.")
    screen, facts = Console(), machine()
    screen.print(describe(facts), highlight=False)
    results: dict[str, list[Row]] = {}
    RUNS.mkdir(exist_ok=True)
    for name in only or PARTS:
        module, started = importlib.import_module(f"benchmarks.{name}"), time.perf_counter()
        results[name] = module.measure()
        table = Table(*COLUMNS, title=f"{module.TITLE} ({time.perf_counter() - started:.0f} s)")
        for row in results[name]:
            table.add_row(*row.cells())
        screen.print(table)
        (RUNS / "bench.json").write_text(record(facts, results))
    written = [RUNS / "bench.json"]
    if not only:
        EVIDENCE.mkdir(exist_ok=True)
        (EVIDENCE / "bench.json").write_text(record(facts, results))
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(markdown(facts, results))
        written += [EVIDENCE / "bench.json", PAGE]
    screen.print(f"Written to {', '.join(map(str, written))}")


if __name__ == "__main__":
    main(sys.argv[1:])
