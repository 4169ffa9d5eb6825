"""`tacit compare`: several experiments, same splits and seeds, one table."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from tacit.cli.options import Quiet, Set, Track, console
from tacit.cli.running import run_and_show
from tacit.core.console import SafeConsole, noted
from tacit.core.errors import TacitError
from tacit.core.text import markdown, safe_lines

if TYPE_CHECKING:
    from tacit.compare.results import Survey
    from tacit.compare.rows import PendingRun, Row
    from tacit.compare.tables import Sheet
    from tacit.runs.progress import Display

Format = Literal["console", "markdown", "csv", "latex", "json"]
ENDINGS: dict[str, Format] = {".md": "markdown", ".csv": "csv", ".tex": "latex", ".json": "json"}


def compare(
    names: Annotated[
        list[str], typer.Argument(metavar="A B …", help="recipes, folders of recipes, TOML files, or run folders")
    ],
    seeds: Annotated[
        int | None, typer.Option(min=1, max=1000, help="runs of each row, with seeds one after the other")
    ] = None,
    set_: Set = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="only those with this in their name; repeat")
    ] = None,
    scale: Annotated[
        str, typer.Option(help="full, half, quarter, tenth, hundredth, or a number: the same protocol, smaller")
    ] = "full",
    tuned: Annotated[
        Path | None, typer.Option(metavar="FILE", help="train all rows as in this file, written by tacit tune")
    ] = None,
    bounds: Annotated[bool, typer.Option("--bounds", help="add the lower and the upper bound where missing")] = False,
    format_: Annotated[Format | None, typer.Option("--format", help="of the table (default: by FILE's ending)")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="also write the table here")] = None,
    runs: Annotated[Path, typer.Option(help="where the runs go, and are found again")] = Path("runs/compare"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what is missing, show the rest, run nothing")] = False,
    quiet: Quiet = False,
    track: Track = None,
) -> None:
    """Run what is missing of several experiments, and show them side by side: same splits, same seeds."""
    from tacit.cli.data import load_shown
    from tacit.compare.results import blocks_of, notes, run_missing, survey, with_bounds
    from tacit.compare.rows import make_rows
    from tacit.core.paths import check_file, check_folder
    from tacit.core.settings import parse_setting
    from tacit.engine.checks import check_run
    from tacit.runs.trackers import check_trackers

    check_trackers(track or ())
    check_folder(runs, "--runs")
    if out is not None:
        check_file(out)
    form: Format = format_ or (ENDINGS.get(out.suffix, "markdown") if out else "console")
    screen = console(error=form != "console" and out is None)  # a table for programs has the standard output alone
    settings = {**training_in(tuned), **dict(parse_setting(text) for text in set_ or [])}
    rows = make_rows(names, settings, seeds=seeds, scale=scale, only=only or (), runs=runs)
    if bounds:
        rows = with_bounds(rows, runs)
    missing = [job for row in rows for job in row.jobs if not job.finished]
    for job in missing:
        check_run(job.experiment, job.folder)
    if not quiet:
        for data in dict.fromkeys(job.experiment.data.name for job in missing):
            load_shown(data, screen)
    seen = survey(rows)
    remarks = notes(blocks_of(rows), seen)
    if not quiet:
        announce(rows, missing, remarks, screen)
    again = command_again()

    def run(job: "PendingRun", label: str) -> None:
        left = sum(not one.finished for one in missing)
        shown = f"{label} ({len(missing) - left + 1} of {len(missing)})"
        view: Display = "quiet" if quiet else "auto"
        run_and_show(job.experiment, job.folder, True, again, shown, view, track or (), screen)

    if not dry_run:
        try:
            run_missing(rows, run)
        except KeyboardInterrupt:  # between two runs; within one, run_and_show says it
            stopped = f"\nStopped. All finished rounds are saved in {runs}. To go on:\n  {again}"
            screen.print(stopped)
            raise typer.Exit(130) from None
    show(rows, seen, remarks, form, out, screen, quiet)


def training_in(path: Path | None) -> dict[str, Any]:
    """The training of a file that `tacit tune` wrote: [train], [server], the rounds, and how it was found."""
    from tacit.core.settings import flatten, read_toml

    if path is None:
        return {}
    given = flatten(read_toml(path))
    found = {key: value for key, value in given.items() if key.startswith(("train.", "server."))}
    if not found:
        raise TacitError(f"{path} has neither [train] nor [server]. --tuned takes what `tacit tune` wrote.")
    return {**found, **{key: given[key] for key in ("rounds", "tuned") if key in given}}


def command_again() -> str:
    """The command that was given: with the same words it goes on."""
    return shlex.join(["tacit", *sys.argv[1:]])


def announce(rows: "list[Row]", missing: "list[PendingRun]", remarks: list[str], screen: SafeConsole) -> None:
    """Before the work: what there is to do, and in what the rows are not on a par."""
    jobs, to_do = sum(len(row.jobs) for row in rows), len(missing)
    screen.print(f"{len(rows)} rows, {jobs} runs: {jobs - to_do} finished, {to_do} to do.")
    for note in remarks:
        screen.print(noted(note))


def _marked(sheet: "Sheet") -> "Sheet":
    """With notes that Markdown shows as they are."""
    return replace(sheet, notes=tuple(markdown(note, 1000) for note in sheet.notes))


def show(
    rows: "list[Row]",
    seen: "Survey",
    remarks: list[str],
    form: Format,
    out: Path | None,
    screen: SafeConsole,
    quiet: bool,
) -> None:
    """The table on the screen, and in a file if one is wanted."""
    from tacit.compare import tables
    from tacit.compare.recalls import few_tests, recall_notes
    from tacit.compare.results import results
    from tacit.compare.verdicts import unsettled, verdicts
    from tacit.core.payload import write_atomically

    blocks = results(rows, seen)
    found = [*verdicts(blocks), *unsettled(blocks), *few_tests(rows), *recall_notes(rows)]
    sheet = tables.sheet(blocks, notes=[*found, *remarks])
    if form != "console":
        if form in ("csv", "json"):
            figures = tables.records(blocks, [*unsettled(blocks), *remarks])
            text = tables.csv_text(figures) if form == "csv" else tables.json_text(figures)
        else:
            text = tables.markdown(_marked(sheet)) if form == "markdown" else tables.latex(sheet)
        if out is None:
            print(safe_lines(text.replace("\r\n", "\n")), end="")
            return
        write_atomically(out, text.encode())
    if not quiet:
        if not screen.is_terminal:
            screen.width = 1000  # a file has room for whole lines
        for table in tables.for_screen(sheet, screen.width):
            screen.print(table)
        for note in sheet.notes:
            screen.print(Text(note, "dim"))
        if out is not None:
            screen.print(f"Written to {out}")
