"""The user's own data: a folder of images, a table of paths and labels (.csv, .parquet), or an .npz; one of them, or
one for each site."""

import csv
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tacit.core.errors import TacitError
from tacit.core.seeds import numpy_generator
from tacit.core.text import from_csv_cell, safe
from tacit.data.archives import most_bytes, naming
from tacit.data.arrays import Arrays, check_arrays, hold_out, joined_groups, number_groups, to_dataset
from tacit.data.dataset import Dataset
from tacit.data.download import Progress, silent
from tacit.data.folder_report import FolderReport, Item
from tacit.data.images import ENDINGS, RULE, check_size, fingerprint, is_grey, open_image, pixels, why_unreadable
from tacit.data.mapped import Look, Looks, check_room, key_of_files, made_once
from tacit.data.readers import read_npz

HELD_OUT = 0.2
UNLABELED = "unlabeled"
COLUMNS = ("path", "label", "split", "group", "site")  # of a table; others are not read
MOST_ROWS = 5_000_000
LONGEST_CELL = 131_072  # characters, as in CSV files
SERVER = "server"  # a site of this name is the server


def load_own(path: Path, *, skip_unreadable: bool = False, image_size: int = 0, progress: Progress = silent) -> Dataset:
    """The data set at a path; an error with a full report where something is wrong with it."""
    return _load_report(inspect(path, progress), path.resolve().stem, skip_unreadable, image_size, progress)


def load_sites(
    paths: list[Path], name: str, *, skip_unreadable: bool = False, image_size: int = 0, progress: Progress = silent
) -> Dataset:
    """The data of several sites as one data set that remembers whose is what. A site called `server` is the server."""
    return _load_report(inspect_sites(paths, progress), name, skip_unreadable, image_size, progress)


def inspect(path: Path, progress: Progress = silent) -> FolderReport:
    """Look at every image of a folder, a table or an .npz."""
    if path.is_dir():
        return inspect_folder(path, progress)
    if path.suffix.lower() == ".npz" and path.is_file():
        return inspect_npz(path, progress)
    if path.suffix.lower() in (".csv", ".parquet") and path.is_file():
        return inspect_table(path, progress)
    missing = "is no data set" if path.exists() else "does not exist"
    raise TacitError(
        f"{path} {missing}. Expected a folder with one folder of images for each class, an .npz, "
        "or a .csv or .parquet with the columns path and label."
    )


def inspect_sites(paths: list[Path], progress: Progress = silent) -> FolderReport:
    """Look at several sites, one path each, as at one whole."""
    whole = FolderReport(Path(os.path.commonpath([path.resolve().parent for path in paths])))
    for path, site in zip(paths, site_names(paths), strict=True):
        report = inspect(path, progress)
        for name in report.sites:  # a table may name several sites itself
            own = name if len(report.sites) > 1 else site
            whole.items += [replace(item, site=own) for item in report.items if item.site == name]
            if own not in whole.sites:
                whole.sites.append(own)
        whole.folders += [name for name in report.folders if name not in whole.folders]
        for one, more in ((whole.unreadable, report.unreadable), (whole.stray, report.stray)):
            one += more  # type: ignore[operator]
        whole.not_images += report.not_images
        whole.ignored += [f"{site}/{name}" for name in report.ignored]
        whole.sizes += report.sizes
        whole.grey += report.grey
        whole.colour += report.colour
    return whole


def site_names(paths: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart.

    >>> site_names([Path("/x/north"), Path("/x/south.csv")]), site_names([Path("/north/data"), Path("/south/data")])
    (['north', 'south'], ['north/data', 'south/data'])
    """
    whole = [path.resolve().with_suffix("") if path.suffix else path.resolve() for path in paths]
    if len(set(whole)) < len(whole):
        raise TacitError(f"A site is given twice among {', '.join(str(path) for path in paths)}: give each once.")
    for length in range(1, max(len(path.parts) for path in whole)):
        names = ["/".join(path.parts[-length:]) for path in whole]
        if len(set(names)) == len(names):
            break
    return names


def _load_report(report: FolderReport, name: str, skip_unreadable: bool, size: int, progress: Progress) -> Dataset:
    if report.hopeless:
        raise TacitError(f"{report.text}\nThis cannot be used as it is: fix what is marked ✗ first.")
    if report.bad and not skip_unreadable:
        raise TacitError(
            f"{report.text}\nMend what is marked ✗, or go on without it: skip_unreadable = true under [data] "
            "(`--set data.skip_unreadable=true`)."
        )
    return _load_items(report, name, size or report.size, progress)


def inspect_folder(path: Path, progress: Progress = silent) -> FolderReport:
    """Look at every file of a folder: one sub-folder for each class, and optionally `unlabeled`; or `train` and
    `test`, each with class folders."""
    report = FolderReport(path)
    items: list[Item] = []
    train, test, unlabeled = path / "train", path / "test", path / UNLABELED
    if folders_in(train):
        with_test = bool(folders_in(test))
        parts = {"train": train} | ({"test": test} if with_test else {})
        read = {train, unlabeled} | ({test} if with_test else set())
        report.ignored = [folder.name for folder in folders_in(path) if folder not in read]
        if unlabeled.is_dir():
            items += [Item(file) for file in _images_in(unlabeled, report)]
        report.stray += loose_images(path)
    else:
        parts = {"train": path}
    for part, top in parts.items():
        report.stray += loose_images(top)
        for folder in folders_in(top):
            label = "" if folder.name == UNLABELED else folder.name
            if label and label not in report.folders:
                report.folders.append(label)
            items += [Item(file, label, part) for file in _images_in(folder, report)]
    report.sites = [path.resolve().name]
    _look_at([replace(item, site=report.sites[0]) for item in items], report, progress)
    return report


def inspect_npz(path: Path, progress: Progress = silent) -> FolderReport:
    """Look at every image of an .npz: the same report as for files."""
    arrays = read_npz(path)
    most = int(max(arrays.train_labels.max(initial=-1), arrays.test_labels.max(initial=-1)))
    classes = arrays.classes or tuple(str(label) for label in range(most + 1))
    if most >= len(classes):
        raise TacitError(f"{path}: the label {most} is none of its {len(classes)} classes.")
    notes = [arrays.note] if arrays.note else []
    report = FolderReport(path, order=list(classes), sites=[path.stem], notes=notes)
    parts = (
        ("train", arrays.train_images, arrays.train_labels, arrays.train_groups),
        ("test", arrays.test_images, arrays.test_labels, arrays.test_groups),
    )
    items = []
    for part, images, labels, groups in parts:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            name = "" if label < 0 else classes[label]
            group = "" if groups is None else str(groups[number])
            grey_or_rgb = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
            items.append(Item(Path(f"{path}[{part} {number}]"), name, part, group, path.stem, grey_or_rgb))
    report.largest = max(arrays.train_images.shape[1:])  # what is an array already keeps its size
    _look_at(items, report, progress)
    return report


def inspect_table(path: Path, progress: Progress = silent) -> FolderReport:
    """Look at every file that a table names; paths are relative to the table's own folder."""
    report = FolderReport(path)
    items = []
    for number, row in enumerate(table_rows(path), start=1):
        part = row.get("split", "") or "train"
        if part not in ("train", "test"):
            raise TacitError(f"{path}, row {number}: split is '{part}'. Expected train, test, or nothing (train).")
        if not row["path"]:
            raise TacitError(f"{path}, row {number}: the path is empty.")
        site = row.get("site", "") or path.stem
        if site not in report.sites:
            report.sites.append(site)
        items.append(Item(path.parent / row["path"], row["label"], part, row.get("group", ""), site))
    report.sites.sort()
    _look_at(items, report, progress)
    return report


def folders_in(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(".")) if path.is_dir() else []


def loose_images(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.suffix.lower() in ENDINGS and p.is_file() and not _hidden(p.name))


def _hidden(name: str) -> bool:
    """What file managers leave behind is nobody's mistake."""
    return name.startswith(".") or name.lower() in ("thumbs.db", "desktop.ini")


def _images_in(folder: Path, report: FolderReport) -> Iterator[Path]:
    """Files that are images by their names, at any depth, in a fixed order; the others go into the report."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if Path(name).suffix.lower() in ENDINGS and not _hidden(name):
                yield Path(place, name)
            elif not _hidden(name):
                report.not_images.append(Path(place, name))


def _look_at(items: list[Item], report: FolderReport, progress: Progress) -> None:
    looks = Looks([item.path for item in items if item.array is None], report.path)
    for number, item in enumerate(items, start=1):
        try:
            seen = look_at(item) if item.array is not None else looks.of(item.path, partial(look_at, item))
        except Exception as error:  # Pillow's decoders raise errors of every kind on damaged files
            report.unreadable.append((item.path, why_unreadable(error, item.path)))
            continue
        report.items.append(replace(item, twin=bytes.fromhex(seen.twin)))
        report.sizes[seen.width, seen.height] += 1
        report.grey += seen.grey
        report.colour += not seen.grey
        progress("looking at the images", number, len(items))
    looks.save()


def look_at(item: Item) -> Look:
    """What the decoded image of an item shows of itself."""
    image = picture(item)
    return Look(fingerprint(image).hex(), *image.size, is_grey(image))


def picture(item: Item) -> Image.Image:
    """The decoded image of an item, wherever it lies."""
    if item.array is None:
        return open_image(item.path)
    check_size((item.array.shape[1], item.array.shape[0]))
    return Image.fromarray(item.array)


def counts_only(fault: str) -> str:
    """A fault without the names of files.

    >>> counts_only("not images, by their names (1): notes.txt")
    'not images, by their names (1)'
    """
    return f"{fault.partition('): ')[0].rstrip(')')})"


def table_rows(path: Path, needed: tuple[str, ...] = ("path", "label")) -> list[dict[str, str]]:
    """The rows of a table as text; nothing and null are the empty text."""
    rows: list[dict[str, Any]]
    with naming(path):
        rows, columns = _csv_rows(path) if path.suffix.lower() == ".csv" else _parquet_rows(path)
    missing = [column for column in needed if column not in columns]
    if missing:
        raise TacitError(
            f"{path} has the columns {', '.join(columns) or '(none)'}; {' and '.join(missing)} missing. "
            f"Expected {', '.join(needed)} (and, to learn from, optionally split (train or test), group and site)."
        )
    return [{column: _text(row.get(column)) for column in columns} for row in rows]


def _csv_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a CSV file, without the apostrophes that `tacit.core.text.csv_cell` puts before formulas."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restkey="")
            rows = [{name: from_csv_cell(cell or "") for name, cell in row.items() if name} for row in reader]
            return rows, list(reader.fieldnames or ())
    except csv.Error as error:  # among others a cell of more than 131,072 characters
        raise TacitError(f"{path} cannot be read as a table: {error}.") from None


def _parquet_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a Parquet file, of the columns that mean something here.

    Few bytes can promise many long texts, so sizes are looked at before texts are made: what it says of itself, and
    then the distinct texts of each part (`read_dictionary` keeps each of them once).
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TacitError("Parquet files need pyarrow: pip install 'tacit[tables]'") from None
    try:
        columns = list(parquet.read_schema(path).names)
        used = [name for name in columns if name in COLUMNS]
        with parquet.ParquetFile(path, read_dictionary=used) as file:
            about, most = file.metadata, most_bytes(path)
            unpacked = sum(about.row_group(number).total_byte_size for number in range(about.num_row_groups))
            if about.num_rows > MOST_ROWS or unpacked > most:
                raise TacitError(
                    f"{path} promises {about.num_rows:,} rows and {unpacked:,} bytes; at most {MOST_ROWS:,} rows and "
                    f"{most:,} bytes are read from such a file. Split it, or write it without compression."
                )
            rows: list[dict[str, Any]] = []
            for batch in file.iter_batches(batch_size=10_000, columns=used):
                for name in used:
                    if _longest_text(batch.column(name)) > LONGEST_CELL:
                        raise TacitError(f"{path}: a text in column {name} has more than {LONGEST_CELL:,} characters.")
                rows += batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(safe(error)) from None
    return rows, columns


def _longest_text(column: Any) -> int:
    """The bytes of the longest text in a column of Arrow's; 0 where it holds something else."""
    from pyarrow import compute, types

    values = column.dictionary if types.is_dictionary(column.type) else column
    is_text = types.is_string(values.type) or types.is_large_string(values.type)
    return (compute.max(compute.binary_length(values)).as_py() or 0) if is_text else 0


def _text(value: Any) -> str:
    """
    >>> _text(None), _text(" cat "), _text(3), _text(3.0), _text(float("nan"))
    ('', 'cat', '3', '3', '')
    """
    if value is None or value != value:  # NaN is how some writers say "nothing"
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of whole numbers with gaps is stored as fractions
    return str(value).strip()


def _load_items(report: FolderReport, name: str, size: int, progress: Progress) -> Dataset:
    """Read the images that the report found good."""
    items, classes, grey = report.usable, report.classes, report.colour == 0
    check_room(len(items), 1 if grey else 3, size)
    labels = np.array([classes.index(item.label) if item.label else -1 for item in items], np.int64)
    groups = None
    if any(item.group for item in items):  # an image without a group is a group of its own
        groups = np.array([item.group or f"\0{number}" for number, item in enumerate(items)])
    test = np.array([item.part == "test" for item in items])
    if not report.has_test:
        test = _held_out(labels, joined_groups(groups, np.array([item.twin.hex() for item in items])))
        if not test.any():
            raise TacitError(
                f"{report.path}: no labelled image can be held out to test with, because each has copies that are "
                "needed in training (equal pixels, or one group). Give more pictures, or a test set."
            )
    train_groups, test_groups = (None, None) if groups is None else number_groups(groups[~test], groups[test])
    parts = [[item for item, is_test in zip(items, test, strict=True) if is_test == wanted] for wanted in (False, True)]
    train_images, test_images = (decoded(part, size, grey, progress) for part in parts)
    arrays = Arrays(train_images, labels[~test], test_images, labels[test], tuple(classes), train_groups, test_groups)
    left_out = [f"left out: {counts_only(fault)}" for fault in report.bad]  # a note travels, file names stay at home
    arrays = replace(arrays, note="; ".join([*left_out, *report.remarks(size)]))
    check_arrays(arrays, str(report.path))
    sites = tuple(site for site in report.sites if site != SERVER)
    numbers = {site: number for number, site in enumerate(sites)} | {SERVER: -1}
    train = [item for item, tested in zip(items, test, strict=True) if not tested]
    return replace(
        to_dataset(arrays, name, mirror=True),
        sites=sites,
        train_sites=np.array([numbers[item.site] for item in train], np.int64),
        train_files=tuple(str(item.path) for item in train),
    )


def decoded(items: Sequence[Item], size: int, grey: bool, progress: Progress = silent) -> np.ndarray:
    """The images of items, uint8 [N, 1 or 3, size, size]; many files are decoded once, and mapped from then on."""

    def fill(images: np.ndarray) -> None:
        for number, item in enumerate(items):
            images[number] = pixels(picture(item), size, grey)
            progress("reading the images", number + 1, len(items))

    in_files = all(item.array is None for item in items)
    key = key_of_files([item.path for item in items], size, grey, RULE) if in_files else ""
    return made_once(key, (len(items), 1 if grey else 3, size, size), fill)


def _held_out(labels: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """The same images whatever the experiment's seed, so that all runs are measured on the same test set."""
    return hold_out(labels, groups, HELD_OUT, numpy_generator("own data", "test set"))
