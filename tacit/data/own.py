"""The user's own data: a folder of images, a table of paths and labels (.csv, .tsv, .parquet), or an .npz; one of them,
or one for each site.

What a folder means is decided in `tacit.data.layout`, what a table's columns mean in `tacit.data.columns`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from tacit.core.errors import Answer, Question, TacitError
from tacit.core.memory_bounds import check_images
from tacit.core.settings import Data
from tacit.core.text import safe
from tacit.data import near_duplicates
from tacit.data.arrays import Arrays, check_arrays, number_groups, to_dataset
from tacit.data.dataset import Dataset
from tacit.data.download import Progress, silent
from tacit.data.drafts import SERVER, draft_of, gathered, readable_tables
from tacit.data.folder_report import FolderReport, Item
from tacit.data.glance import blank, glance_at, glancing
from tacit.data.groups import Parts, check_given, held_out
from tacit.data.images import (
    check_size,
    eight_bits,
    fingerprint,
    is_deep,
    is_grey,
    open_deep,
    pixels,
    used_bits,
    why_unreadable,
)
from tacit.data.layout import FLAT, Reading, as_party, choose, scan
from tacit.data.names import spelt_alike

AUTO = Data()


def load_own(path: Path, how: Data = AUTO, progress: Progress = silent) -> Dataset:
    """The data set at a path; an error with a full report where something is wrong with it."""
    return _load_report(inspect(path, progress, how), path.resolve().stem, how, progress)


def load_sites(paths: list[Path], name: str, how: Data = AUTO, progress: Progress = silent) -> Dataset:
    """The data of several sites as one data set that remembers whose is what. A site called `server` is the server."""
    return _load_report(inspect_sites(paths, progress, how), name, how, progress)


def inspect(path: Path, progress: Progress = silent, how: Data = AUTO, known: Sequence[str] = ()) -> FolderReport:
    """Look at every image of a folder, a table or an .npz. `known`: the classes that a model knows, which may tell
    what a folder means."""
    if not path.is_dir():
        reading = Reading("table", [path])
    else:
        reading = choose(path, how.layout, readable_tables(path, how) if how.layout == "auto" else [], known)
        how = how.model_copy(update={"layout": "table"}) if reading.kind == "table" else how
    tests = [*reading.tests, *(Path(test) for test in how.tests)]
    if reading.kind == "sites" or tests:
        report = gathered(reading.paths, tests, how)
    elif reading.kind == "table":
        report = draft_of(reading.paths[0], how)
    else:
        report = as_party(scan(reading.paths[0]), reading.paths[0].resolve().name)
    report.path, report.kind, report.paths, report.tests = path, reading.kind, reading.paths, tests
    report.ignored += reading.ignored
    report.stray += reading.stray
    report.told += told(reading)
    return _looked_at(report, how, progress)


def told(reading: Reading) -> list[str]:
    """How a folder was read, where it could have been otherwise."""
    if not reading.why or reading.why.startswith(FLAT):
        return []
    if reading.kind == "sites" and len(reading.paths) == 1:
        return [f"the folder inside, {safe(reading.paths[0].name)}/, is the one that is read"]
    other = {"sites": "classes", "classes": "sites"}[reading.kind]
    return [
        f"the folders inside are taken as {reading.kind}, not as {other}: {safe(reading.why)}; if they are {other} "
        f"nevertheless, add --{other}"
    ]


def inspect_sites(paths: list[Path], progress: Progress = silent, how: Data = AUTO) -> FolderReport:
    """Look at several sites, one path each, as at one whole, and at the tests that they share."""
    tests = [Path(test) for test in how.tests]
    return _looked_at(gathered(paths, tests, how), how, progress)


def inspect_folder(path: Path, progress: Progress = silent, how: Data = AUTO) -> FolderReport:
    """Look at one party's folder: one sub-folder for each class, and optionally unlabelled images; or `train` and
    `test`, each with class folders; or images and a table that names them."""
    return _looked_at(draft_of(path, how), how, progress)


def _load_report(report: FolderReport, name: str, how: Data, progress: Progress) -> Dataset:
    if report.hopeless:
        raise TacitError(f"{report.text}\nThis cannot be used as it is: fix what is marked ✗ first.")
    if report.bad and not how.skip_unreadable:
        raise TacitError(
            f"{report.text}\nMend what is marked ✗, or go on without it: skip_unreadable = true under [data] "
            "(`--set data.skip_unreadable=true`)."
        )
    return _load_items(report, name, how.image_size or report.size, progress)


def _looked_at(report: FolderReport, how: Data, progress: Progress) -> FolderReport:
    """The same report after every image was decoded once, or after a glance."""
    _settle_spellings(report, how)
    waiting, report.items = report.items, []
    if glancing():
        glance_at(waiting, report, picture)
        report.depth, report.guess_groups = how.depth or 16, how.groups == "found"
        return report
    for number, item in enumerate(waiting, start=1):
        try:
            image = _deep_picture(item)
            if is_deep(image):
                report.deep[used_bits(image)] += 1
        except Exception as error:  # decoders raise errors of every kind on damaged files
            report.unreadable.append((item.path, why_unreadable(error, item.path)))
            continue
        look = near_duplicates.glance(eight_bits(image, used_bits(image)) if is_deep(image) else image)
        report.items.append(replace(item, twin=fingerprint(image), glance=look))
        report.sizes[image.size] += 1
        report.grey += is_grey(image)
        report.colour += not is_grey(image)
        progress("looking at the images", number, len(waiting))
    report.depth = how.depth or max(report.deep, default=16)
    report.guess_groups = how.groups == "found"
    return report


def _settle_spellings(report: FolderReport, how: Data) -> None:
    """Classes that are one word in two spellings: one, two, or a question."""
    counts = report.counts("train") + report.counts("test")
    names = {*(name for name in counts if name), *report.folders}
    for alike in spelt_alike(names):
        shown = " and ".join(f"'{safe(name, 60)}' ({counts[name]:,} images)" for name in alike)
        if how.spellings == "ask":
            raise Question(
                f"{report.path}: {shown} are one word in {len(alike)} spellings.",
                [
                    Answer("they are one class", "--merge-spellings", {"spellings": "merge"}),
                    Answer("they are different classes", "--keep-spellings", {"spellings": "keep"}),
                ],
                "Or rename them.",
            )
        report.chosen = report.chosen | {"spellings": how.spellings}
        if how.spellings == "keep":
            report.notes.append(f"{shown} are different classes, as was asked for")
            continue
        kept = max(alike, key=lambda name: counts[name])
        report.items = [replace(item, label=kept) if item.label in alike else item for item in report.items]
        report.folders = list(dict.fromkeys(kept if name in alike else name for name in report.folders))
        report.order = list(dict.fromkeys(kept if name in alike else name for name in report.order))
        report.notes.append(f"{shown} are one class, '{safe(kept, 60)}'")


def picture(item: Item, depth: int = 16) -> Image.Image:
    """The decoded image of an item, wherever it lies, with eight bits a channel."""
    return eight_bits(_deep_picture(item), depth)


def _deep_picture(item: Item) -> Image.Image:
    if item.array is None:
        return open_deep(item.path)
    check_size((item.array.shape[1], item.array.shape[0]))
    return Image.fromarray(item.array)


def counts_only(fault: str) -> str:
    """A fault without the names of files.

    >>> counts_only("not images, by their names (1): notes.txt")
    'not images, by their names (1)'
    """
    return f"{fault.partition('): ')[0].rstrip(')')})"


def _load_items(report: FolderReport, name: str, size: int, progress: Progress) -> Dataset:
    """Read the images that the report found good."""
    classes, grey = report.classes, report.colour == 0
    usable, parts = report.usable, _parts(report)
    kept = np.flatnonzero(~parts.left_out)
    items, test, joined = [usable[place] for place in kept], parts.test[kept], report.groups.numbers[kept]
    check_images(len(items), 1 if grey else 3, size)
    side = 1 if glancing() else size
    images = np.zeros((len(items), 1 if grey else 3, side, side), np.uint8)
    for number, item in enumerate(() if glancing() else items):
        images[number] = pixels(picture(item, report.depth), size, grey)
        progress("reading the images", number + 1, len(items))
    labels = np.array([classes.index(item.label) if item.label else -1 for item in items], np.int64)
    arrays = Arrays(images[~test], labels[~test], images[test], labels[test], tuple(classes))
    left_out = [f"left out: {counts_only(fault)}" for fault in report.bad]  # a note travels, file names stay at home
    arrays = replace(arrays, note="; ".join([*left_out, *report.remarks(size), *parts.remarks]))
    check_arrays(arrays, str(report.path))
    if not report.groups.by_pixels_only:  # what was found may lie in both parts of a given split, and is then told
        train_groups, test_groups = number_groups(joined[~test], joined[test])
        arrays = replace(arrays, train_groups=train_groups, test_groups=test_groups)
    sites = tuple(site for site in report.sites if site != SERVER)
    numbers = {site: number for number, site in enumerate(sites)} | {SERVER: -1}
    train = [item for item, tested in zip(items, test, strict=True) if not tested]
    dataset = to_dataset(arrays, name, mirror=True)
    return replace(
        blank(dataset, dataset.channels, size) if glancing() else dataset,
        sites=sites,
        train_sites=np.array([numbers[item.site] for item in train], np.int64),
        train_files=tuple(str(item.path) for item in train),
        depth=report.depth,
    )


def _parts(report: FolderReport) -> Parts:
    """Which of the usable images are tested with: those given for that, or a part that is held out by whole groups."""
    items, classes = report.usable, report.classes
    labels = np.array([classes.index(item.label) if item.label else -1 for item in items], np.int64)
    if report.has_test:
        test = np.array([item.part == "test" for item in items])
        check_given(report.groups.given, test, str(report.path))
        return Parts(test, np.zeros(len(items), bool))
    parts = held_out(labels, report.groups.numbers)
    if not parts.test.any():
        raise TacitError(
            f"{report.path}: no labelled image can be held out to test with, because each has copies that are "
            f"needed in training (equal pixels, or one group). Give more pictures, or a test set"
            f"{_if_wrong(report)}."
        )
    return parts


def _if_wrong(report: FolderReport) -> str:
    return "; or, if these are no groups: " + "; ".join(report.groups.examples) if report.groups.examples else ""
