"""`make evidence`: several methods on one split and budget, several seeds, on real data, at a stated reduced scale.

`make evidence PART=server SEEDS=3` runs one part (benchmarks/parts/*.toml). What is finished lies in evidence/runs and
is not repeated, what was stopped goes on: so the whole can be interrupted at any time. `AGAIN=yes` makes a part from
scratch, `ROWS=provenance` the rows with that in their label alone. Each finished run renews docs/evidence.md, which
`PART=page` makes alone. `PART=robust` and `PART=private` are
the tables of docs/privacy.md (benchmarks/safeguards.py).
"""

import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import curves, order, page, safeguards
from benchmarks.shelf import on_the_shelf, place_of, put_away
from tacit.compare.rows import PendingRun, Row, run_folder
from tacit.config.resolve import resolve
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.engine.run import run_experiment
from tacit.runs.progress import watcher_for

PARTS = Path(__file__).parent / "parts"
RUNS = Path("runs/evidence")  # whole run folders, with weights and checkpoints: not committed


def parts() -> dict[str, dict[str, Any]]:
    """Every part by name, in the order of the page."""
    found = {path.stem: read(path) for path in sorted(PARTS.glob("*.toml"))}
    return dict(sorted(found.items(), key=lambda pair: pair[1]["order"]))


def read(path: Path) -> dict[str, Any]:
    """A part as its file has it, on top of the one in `common/` that it is `like`, which may be like another."""
    part = tomllib.loads(path.read_text())
    if "like" not in part:
        return part
    below = read(PARTS / "common" / f"{part.pop('like')}.toml")
    training = " ".join(text for text in (part.get("training"), below.get("training")) if text)
    whole = {**laid_on(below, part), "training": training}
    return {**whole, "scale": f"{part['scale']} {training}"} if "scale" in part else whole


def laid_on(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """What both say, table by table; where they differ, what the upper one says.

    >>> laid_on({"rows": {"a": {"rounds": 1, "seed": 0}, "b": {}}}, {"rows": {"a": {"rounds": 2}}})
    {'rows': {'a': {'rounds': 2, 'seed': 0}, 'b': {}}}
    """
    tables = {
        k: laid_on(below[k], v) for k, v in above.items() if isinstance(v, dict) and isinstance(below.get(k), dict)
    }
    return {**below, **above, **tables}


def rows_of(part: Mapping[str, Any], seeds: int, shelf: Mapping[str, Path]) -> list[Row]:
    """The rows of a part, each with its seeds; the folders are those on the shelf.

    A row "PLACE: METHOD" has what the part's `places` and `methods` say of these, then what its `lengths` say of both
    together, and then what it says itself.
    """
    rows = []
    for label, changes in part["rows"].items():
        place, _, method = label.partition(": ")
        said = (("places", place), ("methods", method), ("lengths", label))
        one = resolve(part.get("shared", {}), *(part.get(table, {}).get(name, {}) for table, name in said), changes)
        experiments = [one.model_copy(update={"seed": seed}) for seed in range(seeds)]
        rows.append(Row(label, tuple(PendingRun(each, place_of(each, shelf)) for each in experiments)))
    return rows


def run_part(name: str, part: dict[str, Any], seeds: int, again: bool, screen: SafeConsole, only: str = "") -> None:
    """All rows of a part, or those whose labels hold `only`, one seed of all rows after the other, so that an early
    page has all rows."""
    rows = [row for row in rows_of(part, seeds, on_the_shelf()) if only in row.label]
    for seed in range(seeds):
        for row in rows:
            kept = row.jobs[seed]
            if kept.finished and not again:
                continue
            job = PendingRun(kept.experiment, run_folder(RUNS, kept.experiment.method["name"], kept.experiment))
            if again:
                shutil.rmtree(job.folder, ignore_errors=True)
            watcher = watcher_for(screen, f"{name}/{row.label} seed {seed}")
            try:
                run_experiment(job.experiment, job.folder, resume=True, watcher=watcher)
            finally:
                watcher.close()
            put_away(job, kept.folder)
            page.write(all_rows())


def all_rows() -> page.Parts:
    """Every part with its rows, and with as many seeds as any run on the shelf has."""
    shelf = on_the_shelf()
    seeds = 1 + max((int(path.name.rpartition("-seed")[2]) for path in shelf.values()), default=0)
    return {name: (part, rows_of(part, seeds, shelf)) for name, part in parts().items()}


def run_parts(chosen: Mapping[str, dict[str, Any]], settings: Mapping[str, str], screen: SafeConsole) -> list[str]:
    """One part after the other; gives those that could not be run, as where a data set cannot be had, and says why."""
    stopped = []
    for name, part in chosen.items():
        seeds = int(settings.get("SEEDS", part["seeds"]))
        try:
            run_part(name, part, seeds, "AGAIN" in settings, screen, settings.get("ROWS", ""))
        except KeyboardInterrupt:
            screen.print("\nStopped. Finished rounds are saved; the same command goes on.")
            raise SystemExit(130) from None
        except TacitError as error:
            screen.print(f"{name}: {error}", highlight=False)
            stopped.append(name)
    return stopped


def main() -> None:
    settings = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word and word.split("=", 1)[1])
    known = parts()
    asked = settings.get("PART", "")
    if asked and asked not in (*known, *safeguards.TABLES, "page"):
        there = ", ".join([*known, *safeguards.TABLES])
        raise SystemExit(f"There is no part '{asked}'. There are: {there}, and page.")
    screen = SafeConsole(soft_wrap=True)
    for name, cells in safeguards.TABLES.items():
        if asked in ("", name):
            seeds, rows = int(settings.get("SEEDS", 3)), settings.get("ROWS", "")
            safeguards.run_table(name, cells(), seeds, "AGAIN" in settings, rows, screen)
    safeguards.write_page()
    if asked in safeguards.TABLES:
        screen.print(f"Written: {safeguards.PAGE}", highlight=False)
        return
    stopped = run_parts({name: part for name, part in known.items() if asked in ("", name)}, settings, screen)
    shown = all_rows()
    for name, (part, rows) in shown.items():
        if (done := page.finished(rows)) and not part.get("guarded"):
            curves.draw(done, page.PICTURES / f"{name}.png")
    if found := page.order_of(shown):
        order.draw(found, page.PICTURES / "order.png")
    page.write(shown)
    screen.print(f"Written: {page.PAGE}", highlight=False)
    if stopped:
        raise SystemExit(f"Not finished, for the reasons above: {', '.join(stopped)}")


if __name__ == "__main__":
    main()
