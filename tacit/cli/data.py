"""`tacit data`: which data sets there are, how to get one, and whether it is whole."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from tacit.core.console import SafeConsole
from tacit.core.text import safe
from tacit.data import sources
from tacit.data.arrays import histogram, mean_and_std
from tacit.data.cache import data_root
from tacit.data.catalogue import SOURCES
from tacit.data.dataset import Dataset
from tacit.data.download import Progress as Report
from tacit.data.entry import Source

app = typer.Typer(help="The data sets: what is here, getting one, checking one.", no_args_is_help=True)


@app.command("list")
def list_sets(name: str = typer.Argument("", help="show where this one is looked for, in order")) -> None:
    """What is here, what can be had and how, its size and its licence."""
    console = SafeConsole(soft_wrap=False)
    if name:
        for number, place in enumerate(sources.where_it_looks(name), start=1):
            console.print(f"{number}. {place}", soft_wrap=True)
        return
    table = Table(title=f"Data sets (folder: {data_root()})", title_justify="left")
    table.add_column("name", no_wrap=True)
    for heading in ("where", "train / test", "pixels", "licence"):
        table.add_column(heading, overflow="fold")
    for source in SOURCES.values():
        channels, height, width = source.shape
        table.add_row(
            source.name,
            _where(source),
            f"{source.images[0]:,} / {source.images[1]:,}",
            f"{height}×{width}×{channels}",
            source.licence,
        )
    console.print(table)
    console.print("Your own data: give the path of a folder, .npz, .csv or .parquet (docs/data.md).")


def _where(source: Source) -> str:
    if sources.is_here(source.name):
        return "here"
    ways = []
    if source.package and not source.package.missing_tool():
        ways.append(f"{source.package.title} ({source.package.megabytes} MB)")
    return " or ".join([*ways, f"download ({source.megabytes} MB)"])


@app.command()
def get(name: str = typer.Argument(..., help="a name from `tacit data list`")) -> None:
    """Fetch a data set into the cache; does nothing if it is there, goes on where it was interrupted."""
    console = SafeConsole(soft_wrap=False)
    with fetch_bar(console) as progress:
        dataset = sources.get(name, progress=progress)
    console.print(f"{_summary(dataset)}\nReady in {data_root() / name}", soft_wrap=True)


@app.command()
def check(
    name: str = typer.Argument(..., help="a name from `tacit data list`, or the path of your own data"),
    skip_unreadable: bool = typer.Option(False, help="own images: go on without the bad files"),
) -> None:
    """Read a data set again, verify every byte, and print what it contains."""
    console = SafeConsole(soft_wrap=False)
    dataset = sources.check(name, skip_unreadable=skip_unreadable)
    console.print(_summary(dataset), soft_wrap=True)
    table = Table("class", "train", "test")
    number = len(dataset.classes)
    train, test = histogram(dataset.train_labels, number), histogram(dataset.test_labels, number)
    for label, in_train, in_test in zip(dataset.classes, train, test, strict=True):
        table.add_row(safe(label), f"{in_train:,}", f"{in_test:,}")
    if unlabeled := len(dataset.train_labels) - sum(train):
        table.add_row("(unlabelled)", f"{unlabeled:,}", "")
    console.print(table)
    mean, std = mean_and_std(dataset.train_images)
    console.print(f"of the training images: mean {_numbers(mean)}, std {_numbers(std)}")
    console.print(f"used to normalise:      mean {_numbers(dataset.mean)}, std {_numbers(dataset.std)}")
    if dataset.train_groups is not None and dataset.test_groups is not None:
        groups = len(set(dataset.train_groups.tolist())), len(set(dataset.test_groups.tolist()))
        both = len(np.intersect1d(dataset.train_groups, dataset.test_groups))
        console.print(f"groups: {groups[0]:,} train, {groups[1]:,} test, {both or 'none'} in both")
    console.print(f"fingerprint {dataset.fingerprint}")
    if dataset.note:
        console.print(f"note: {dataset.note}", soft_wrap=True)


def _summary(dataset: Dataset) -> str:
    channels, height, width = dataset.train_images.shape[1:]
    return (
        f"{dataset.name}: {len(dataset.train_images):,} training and {len(dataset.test_images):,} test images, "
        f"{height}×{width}×{channels}, {len(dataset.classes)} classes"
    )


def _numbers(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4f}" for value in values)


def load_shown(name: str, console: SafeConsole) -> None:
    """Have a named data set at hand, with a bar if it must be fetched first; own data is read later."""
    if name in SOURCES or name.startswith("medmnist/"):
        with fetch_bar(console) as progress:
            sources.load(name, progress=progress)


@contextmanager
def fetch_bar(console: SafeConsole) -> Iterator[Report]:
    """A progress bar that a source can report to: what is going on, how far, of how much."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)

        def report(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield report
