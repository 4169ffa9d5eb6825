"""`tacit init`: look at somebody's images, say what is there, and write an experiment that fits."""

import sys
import time
import tomllib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tacit.core.console import SafeConsole, noted
from tacit.core.errors import Answer, Question, TacitError
from tacit.core.text import as_bytes, as_word, csv_text, safe, safe_lines

if TYPE_CHECKING:
    from tacit.config.propose import Measured
    from tacit.core.settings import Data, Experiment
    from tacit.data.folder_report import FolderReport

MOST_CLASSES = 20  # more are summed up


def init(
    data: Annotated[
        list[Path], typer.Argument(help="a folder, .csv, .parquet or .npz; one, or one for each site (docs/data.md)")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the file to write (default: NAME.toml)")] = None,
    clients: Annotated[int, typer.Option(min=0, help="pretend that one folder is spread over so many clients")] = 0,
    test: Annotated[list[Path] | None, typer.Option(help="test images that all sites share")] = None,
    sites: Annotated[bool, typer.Option("--sites", help="the folders inside are sites, not classes")] = False,
    classes: Annotated[bool, typer.Option("--classes", help="the folders inside are classes, not sites")] = False,
    table: Annotated[bool, typer.Option("--table", help="the table in the folder counts, not the folders")] = False,
    merge_spellings: Annotated[bool, typer.Option("--merge-spellings", help="Mel and mel are one class")] = False,
    keep_spellings: Annotated[bool, typer.Option("--keep-spellings", help="Mel and mel are two classes")] = False,
    path_column: Annotated[str, typer.Option(help="of a table: paths, names or ids of images")] = "",
    label_column: Annotated[str, typer.Option(help="of a table: labels (one-hot: columns of 0 and 1)")] = "",
    group_column: Annotated[str, typer.Option(help="of a table: what belongs together, as a patient")] = "",
    site_column: Annotated[str, typer.Option(help="of a table: who holds the image")] = "",
    split_column: Annotated[str, typer.Option(help="of a table: train or test")] = "",
    siteless: Annotated[str, typer.Option(help="rows that name no site: the site they belong to, or leave-out")] = "",
    force: Annotated[bool, typer.Option("--force", help="write over the file if it is there")] = False,
) -> None:
    """Look at your images, say what is there and what is wrong, and write an experiment that fits them.

    Where they can be read in two ways, you are asked; where nobody can answer, nothing is written.
    """
    import torch

    from tacit.cli.preview import rounds_text
    from tacit.config.propose import propose
    from tacit.config.resolve import resolve
    from tacit.core.paths import check_file, user_path
    from tacit.core.payload import write_atomically
    from tacit.data.groups import WITHOUT_GROUPS
    from tacit.nets.weights import installed
    from tacit.runs.plan import stages_of

    console = SafeConsole()
    paths, tests = _by_name([user_path(str(path)) for path in data], [user_path(str(path)) for path in test or ()])
    target = out or Path(f"{name_of(paths)}.toml")
    check_file(target)
    if clients and len(paths) > 1:
        raise _one_folder(clients, len(paths))
    if target.exists() and not force:
        raise TacitError(f"{target} is there already. Nothing was changed. Choose another --out, or add --force.")
    given = {
        "tests": [str(path.resolve()) for path in tests],
        "layout": _one({"sites": sites, "classes": classes, "table": table}) or "auto",
        "spellings": _one({"merge-spellings": merge_spellings, "keep-spellings": keep_spellings}).split("-")[0]
        or "ask",
        "path_column": path_column,
        "label_column": label_column,
        "group_column": group_column,
        "site_column": site_column,
        "split_column": split_column,
        "siteless": siteless,
    }
    how = resolve({f"data.{key}": value for key, value in given.items()}).data
    report = _inspect(paths, how, console)
    if clients and len(report.paths) > 1:
        raise _one_folder(clients, len(report.paths))
    show(report, console)
    if report.hopeless:
        raise TacitError("This cannot be used as it is: fix what is marked ✗ first. Nothing was written.")
    proposed = partial(
        propose, report, paths, target.stem, clients, gpu=torch.cuda.is_available(), pretrained=installed("lite0")
    )
    measured = measure(resolve(tomllib.loads(proposed().toml)))  # what we propose must be valid
    proposal = proposed(measured=measured)
    experiment = resolve(tomllib.loads(proposal.toml))
    _list_unusable(report, target, console)
    write_atomically(target, proposal.toml.encode())
    for remark in proposal.remarks:
        console.print(noted(remark))
    if experiment.guard.on:
        console.print(f"The guard is on: {proposal.guard} ([guard] in the file, docs/guard.md).")
    elif proposal.method != "fedavg":
        console.print(noted(proposal.guard))
    again = as_word(target)
    if proposal.held_out:
        console.print(
            Text.assemble(
                ("No test images were given", "yellow"),
                f": about {proposal.test_images:,} of the labelled ones (20 % of each class) are held out, and all "
                "figures will rest on them.",
            )
        )
    if not report.groups.identities:
        first, _, rest = WITHOUT_GROUPS.partition(":")
        console.print(Text.assemble((first, "yellow"), f":{rest}"))
    console.print(
        Text.assemble(
            (f"\nWritten: {safe_lines(target)}", "bold"),
            f" (method {proposal.method}, placement {proposal.placement}, {rounds_text(stages_of(experiment))}; the "
            f"reasons are in the file). Next:\n"
            f"  tacit run {again} --dry-run   # who holds what, and how long it takes\n"
            f"  tacit run {again}",
        )
    )


def measure(experiment: "Experiment") -> "Measured | None":
    """What a proposal takes on this machine: a few steps are timed, no image is read. None where it cannot run."""
    from tacit.cli.preview import stage_seconds
    from tacit.config.propose import Measured
    from tacit.data.glance import glance
    from tacit.runs.plan import label_passes, prepare, typical_client

    try:
        with glance():
            plan = prepare(experiment, fetch=False)
    except TacitError:
        return None
    # The file is for later, so what else this machine computes just now does not count.
    needed = stage_seconds(plan, time.process_time if plan.setup.device.type == "cpu" else time.perf_counter)
    fixed = needed.get("warm-up") or 0.0
    growing = sum(seconds or 0.0 for seconds in needed.values()) - fixed
    held = typical_client(plan.split, experiment.train.batch)
    return Measured(experiment.rounds, growing, fixed, label_passes(plan.stages, experiment.train, held))


def _by_name(paths: list[Path], tests: list[Path]) -> tuple[list[Path], list[Path]]:
    """`a/ b/ test/`: a folder called `test` beside others holds test images for all of them."""
    from tacit.data.names import role

    if len(paths) < 2:
        return paths, tests
    named = [path for path in paths if role(path.resolve().name) == "test"]
    return [path for path in paths if path not in named] or paths, [*tests, *named]


def _one(options: dict[str, bool]) -> str:
    """The one of some options that was given; '' where none was.

    >>> _one({"sites": True, "classes": False}), _one({"sites": False, "classes": False})
    ('sites', '')
    """
    given = [name for name, value in options.items() if value]
    if len(given) > 1:
        raise TacitError(f"--{given[0]} and --{given[1]} exclude each other: give one of them.")
    return (given or [""])[0]


def _one_folder(clients: int, sites: int) -> TacitError:
    return TacitError(f"--clients {clients} spreads one folder over pretended clients, but there are {sites} sites.")


def _inspect(paths: list[Path], how: "Data", console: SafeConsole) -> "FolderReport":
    """Look at everything; what the data leaves open is asked, if somebody is there to answer."""
    from tacit.cli.data import fetch_bar
    from tacit.data import own

    while True:
        try:
            with fetch_bar(console) as progress:
                if len(paths) > 1:
                    return own.inspect_sites(paths, progress, how)
                return own.inspect(paths[0], progress, how)
        except Question as question:
            if not (someone_is_there() and question.answers):
                raise
            how = how.model_copy(update=dict(_ask(question, console).settings))


def someone_is_there() -> bool:
    """Whether a question can be answered."""
    return sys.stdin.isatty()


def _ask(question: Question, console: SafeConsole) -> Answer:
    """The answer that somebody chooses by its number."""
    console.print(Text.assemble((safe_lines(question.what), "yellow")))
    for number, answer in enumerate(question.answers, start=1):
        console.print(f"  {number}  {answer.words}  ({answer.option})")
    number = typer.prompt("Which is right? (Ctrl-C: neither)", type=click.IntRange(1, len(question.answers)))
    return question.answers[number - 1]


def _list_unusable(report: "FolderReport", target: Path, console: SafeConsole) -> None:
    """Every file that is not used, with the reason, beside the experiment."""
    from tacit.core.payload import write_atomically

    place = target.with_name(f"{target.stem}-unusable.csv")
    found = report.unusable
    if found or place.is_file():  # an earlier list would tell of what is mended now
        rows = [("path", "reason"), *((str(path), safe(why)) for path, why in found)]
        write_atomically(place, as_bytes(csv_text(rows)))
    if found:
        console.print(f"What is not used, file by file ({len(found):,} lines): {safe_lines(place)}")


def name_of(data: list[Path]) -> str:
    """A short name: of the folder, or of the folder that all sites lie in.

    >>> name_of([Path("/x/photos")]), name_of([Path("/x/clinics/north"), Path("/x/clinics/south")])
    ('photos', 'clinics')
    """
    whole = [path.expanduser().resolve() for path in data]
    if len(whole) == 1:
        return whole[0].stem
    parents = {path.parent for path in whole}
    return parents.pop().name or "sites" if len(parents) == 1 else "sites"


def show(report: "FolderReport", console: SafeConsole) -> None:
    """All that was found, in one screen."""
    from tacit.config.propose import parties
    from tacit.data.folder_report import NO_TEST_SET
    from tacit.data.groups import NO_GROUPS

    held = parties(report)
    console.print(
        Text.assemble(
            (safe_lines(report.path), "bold"),
            f": {len(report.items):,} readable images, {len(report.classes)} classes, "
            f"{len(held)} {'site' if len(held) == 1 else 'sites'}",
        )
    )
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, head in enumerate(("", "labelled", "unlabelled", *(["test"] if report.has_test else []))):
        table.add_column(head, justify="right" if number else "left")
    for party in held:
        cells = [party.labeled, party.unlabeled, *([party.test] if report.has_test else [])]
        table.add_row(safe(party.name), *(f"{cell:,}" for cell in cells))
    if shared := sum(item.part == "test" and not item.site for item in report.usable):
        table.add_row("(shared by all)", "", "", f"{shared:,}")
    console.print(table)
    console.print(f"Labels by class: {by_class(report)}")
    for fault in (*report.hopeless, *report.bad):
        console.print(Text.assemble("  ", ("✗", "red"), f" {safe_lines(fault)}"))
    for remark in (*report.told, *report.remarks(report.size), *report.quarrels):
        if remark in (NO_TEST_SET, NO_GROUPS):  # said below, in full
            continue
        console.print(f"  · {remark}")


def by_class(report: "FolderReport") -> str:
    """The classes with their labelled training images; the rarest ones where there are too many to show."""
    counts = report.counts("train")
    names, rest = report.classes, ""
    if len(names) > MOST_CLASSES:
        names = sorted(names, key=lambda name: counts[name])[:MOST_CLASSES]
        rest = f", … (the rarest of {len(report.classes)})"
    return ", ".join(f"{safe(name, 60)} {counts[name]:,}" for name in names) + rest


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: `tacit init photos/`, or one path a site: `tacit init north/ south/ west/`")(init)
