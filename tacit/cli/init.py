"""`tacit init`: look at somebody's images, say what is there, and write an experiment that fits."""

import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.text import safe, safe_lines

if TYPE_CHECKING:
    from tacit.data.folder_report import FolderReport

MOST_CLASSES = 20  # more are summed up


def init(
    data: Annotated[
        list[Path], typer.Argument(help="a folder, .csv, .parquet or .npz; one, or one for each site (docs/data.md)")
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="the file to write (default: NAME.toml)")] = None,
    clients: Annotated[int, typer.Option(min=0, help="pretend that one folder is spread over so many clients")] = 0,
    classes: Annotated[bool, typer.Option("--classes", help="the folders inside are classes, not sites")] = False,
    force: Annotated[bool, typer.Option("--force", help="write over the file if it is there")] = False,
) -> None:
    """Look at your images, say what is there and what is wrong, and write an experiment that fits them."""
    import torch

    from tacit.cli.data import fetch_bar
    from tacit.config.propose import propose
    from tacit.config.resolve import resolve
    from tacit.core.paths import check_file, user_path
    from tacit.core.payload import write_atomically
    from tacit.data.groups import WITHOUT_GROUPS
    from tacit.data.own import inspect, inspect_sites

    console = SafeConsole()
    paths = [user_path(str(path)) for path in data]
    nested = len(paths) == 1 and not classes and len(sites_in(paths[0])) > 1
    if nested:
        paths = sites_in(paths[0])
    name = name_of(data)
    target = out or Path(f"{name}.toml")
    check_file(target)
    if clients and len(paths) > 1:
        raise TacitError(
            f"--clients {clients} spreads one folder over pretended clients, but there are {len(paths)} sites."
        )
    if target.exists() and not force:
        raise TacitError(f"{target} is there already. Nothing was changed. Choose another --out, or add --force.")
    with fetch_bar(console) as progress:
        report = inspect_sites(paths, progress) if len(paths) > 1 else inspect(paths[0], progress)
    show(report, console)
    if nested:
        console.print(
            "  · the folders inside are taken as sites, because they hold folders of the same names; if they are "
            "classes, add --classes"
        )
    if report.hopeless:
        raise TacitError("This cannot be used as it is: fix what is marked ✗ first. Nothing was written.")
    proposal = propose(report, paths, target.stem, clients, gpu=torch.cuda.is_available())
    resolve(tomllib.loads(proposal.toml))  # what we propose must be valid
    write_atomically(target, proposal.toml.encode())
    again = shlex.quote(str(target))
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
            f" (method {proposal.method}, placement {proposal.placement}, {proposal.rounds} rounds; the reasons are in "
            f"the file). Next:\n  tacit run {again} --dry-run   # who holds what, and how long it takes\n"
            f"  tacit run {again}",
        )
    )


def sites_in(folder: Path) -> list[Path]:
    """The sites, if a folder holds one folder for each site instead of one for each class; else the folder itself.

    Sites are folders that hold folders of the same names, the classes.
    """
    from tacit.data.own import folders_in

    inside = folders_in(folder)
    if len(inside) < 2 or {one.name for one in inside} <= {"train", "test", "unlabeled", "val", "valid"}:
        return [folder]
    named = [{sub.name for sub in folders_in(one)} for one in inside]
    others = [set().union(*(names for names in named if names is not own)) for own in named]
    alike = [len(own & rest) >= 2 for own, rest in zip(named, others, strict=True)]
    return inside if all(alike) else [folder]


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
    console.print(table)
    console.print(f"Labels by class: {by_class(report)}")
    for fault in (*report.hopeless, *report.bad):
        console.print(Text.assemble("  ", ("✗", "red"), f" {safe_lines(fault)}"))
    for remark in (*report.remarks(report.size), *report.quarrels):
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
