"""`make bench`: speed and memory as ratios within one run. `make bench ONLY=round` runs one part.

What a part measured replaces its older figures in evidence/bench.json, and docs/speed.md is made from all
of them (`make bench ONLY=page` makes it alone).
"""

import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.machine import commit, processor
from benchmarks.timing import Row
from tacit.core.console import SafeConsole

PARTS = (
    *("round", "workers", "clients", "views", "engine", "simulation", "buffers", "inference"),
    *("head", "private", "secure"),
)
COLUMNS = ("what", "median", "spread", "goal", "reached", "note")
QUIET = 0.5  # a load above this is somebody else's work
RECORD, PAGE = Path("evidence/bench.json"), Path("docs/speed.md")

INTRO = """*This page is made by `make bench`; nobody types its numbers.* One part: `make bench ONLY=round`.

What tacit takes is compared with something else in the same run, turn by turn, because the same machine is faster or
slower from one minute to the next. Figures are medians, the spread is from the lowest turn to the highest. A goal is
what we set out to reach; whether it was, is told beside it. A part may be older than the others: its commit is told."""


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


def markdown(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The page, from what was measured of each part, whenever that was."""
    lines = ["# Speed and memory", "", INTRO, ""]
    for name in [name for name in PARTS if name in measured]:
        module = importlib.import_module(f"benchmarks.{name}")
        lines += [f"## {module.TITLE}", "", sentences(module), "", describe(measured[name]["machine"]), ""]
        lines += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        lines += ["| " + " | ".join(Row.of(row).cells()) + " |" for row in measured[name]["rows"]]
        lines.append("")
    return "\n".join(lines)


def keep(name: str, facts: dict[str, Any], rows: list[Row]) -> None:
    """Put a part's figures in the place of its older ones, and make the page anew."""
    measured: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    measured[name] = {"machine": facts, "rows": [row.record() for row in rows]}
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(measured, indent=2, ensure_ascii=False) + "\n")
    write_page()


def write_page() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(markdown(json.loads(RECORD.read_text())))


def main(only: list[str]) -> None:
    if only == ["page"]:
        write_page()
        return
    if unknown := [name for name in only if name not in PARTS]:
        raise SystemExit(f"There is no part '{unknown[0]}'. There are: {', '.join(PARTS)}, and page.")
    screen, facts = SafeConsole(), machine()
    screen.print(describe(facts), highlight=False)
    for name in only or PARTS:
        module, started = importlib.import_module(f"benchmarks.{name}"), time.perf_counter()
        rows = module.measure()
        table = Table(*COLUMNS, title=f"{module.TITLE} ({time.perf_counter() - started:.0f} s)")
        for row in rows:
            table.add_row(*row.cells())
        screen.print(table)
        keep(name, facts, rows)
    screen.print(f"Written to {RECORD} and {PAGE}")


if __name__ == "__main__":
    main(sys.argv[1:])
