"""`make bench`: speed as ratios against a reference in the same run. `make bench ONLY=engine` runs one part."""

import json
import os
import platform
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import engine, views


def processor() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    only = sys.argv[1:]
    screen = Console()
    screen.print(f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; one thread everywhere")
    results: dict[str, object] = {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if not only or "views" in only:
        rows = views.measure()
        table = Table("view", "ours, images a CPU-second", "a PIL loop", "ratio", "spread", title="Views")
        for row in rows:
            ours, pil = f"{row['ours_per_second']:,.0f}", f"{row['pil_per_second']:,.0f}"
            table.add_row(str(row["name"]), ours, pil, f"{row['ratio']:.1f}×", f"{row['spread']:.0%}")
        screen.print(table)
        results["views"] = rows
    if not only or "engine" in only:
        overhead = engine.measure()
        screen.print(
            f"Engine, ResNet-18 on a tenth of Fashion-MNIST (10 clients, FedAvg, {overhead['seconds_a_round']:.0f} s a "
            f"round): {overhead['idle_percent']:.1f} % of a round is the engine's (goal: under 3 %). As a difference "
            f"from bare training: {overhead['difference_percent']:.1f} % of CPU time, from "
            f"{overhead['difference_lowest']:.1f} to {overhead['difference_highest']:.1f} over the rounds."
        )
        results["engine"] = overhead
    path = Path("runs/bench.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2, default=str) + "\n")
    screen.print(f"Written to {path}")


if __name__ == "__main__":
    main()
