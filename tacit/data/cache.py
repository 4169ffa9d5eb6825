"""The cache: one folder of .npy files for each data set, written beside and renamed, read memory-mapped.

    <root>/<name>/prepared/   train_images.npy train_labels.npy test_images.npy test_labels.npy
                              [train_groups.npy test_groups.npy] meta.json

The sub-folder `prepared` appears whole or not at all; official files that a user put into `<root>/<name>/`
lie beside it and are never touched.
"""

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tacit.core.errors import TacitError
from tacit.data.arrays import arrays_of, fingerprint, histogram
from tacit.data.dataset import Dataset

try:
    import fcntl
except ImportError:  # not on Windows: there the atomic rename alone keeps the cache whole
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".unfinished-"


def data_root() -> Path:
    """The folder of all data: TACIT_DATA, else `tacit` in the user's cache folder."""
    if chosen := os.environ.get("TACIT_DATA"):
        return Path(chosen).expanduser()
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "tacit"
    return Path.home() / ".cache" / "tacit"


def prepared_folder(root: Path, name: str, size: int = 0) -> Path:
    """Where the cached form of a named source lies; one of photographs, at a size that was asked for, has its own.

    >>> prepared_folder(Path("data"), "medmnist/pathmnist").as_posix()
    'data/medmnist/pathmnist/prepared'
    >>> prepared_folder(Path("data"), "isic2018", 224).as_posix()
    'data/isic2018/prepared-224'
    """
    return root / name / (f"prepared-{size}" if size else "prepared")


def writable(folder: Path) -> bool:
    """May we write here (or make it)? A folder marked read-only stays untouched even for root."""
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))


@contextlib.contextmanager
def locked(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Only one process at a time prepares this data set; the others wait and then find it done.

    The lock is the kernel's, so a killed process leaves none behind; what else it left behind is cleared away.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / ".lock", "w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            for leftover in folder.parent.glob(f"{TEMPORARY}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        yield


def write(folder: Path, dataset: Dataset, more: dict[str, Any]) -> None:
    """Write the arrays and meta.json into a folder beside, then rename it into place.

    What was there before (a damaged or outdated cache) is replaced. If another process got there first while
    we wrote, its copy stays and ours is dropped.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    workspace = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.parent))
    try:
        new = workspace / "new"
        new.mkdir()
        for name, array in arrays_of(dataset).named():
            np.save(new / f"{name}.npy", array, allow_pickle=False)
        (new / "meta.json").write_text(json.dumps(_meta(dataset) | more, indent=1), encoding="utf-8")
        _put_in_place(new, folder, workspace)
    except OSError as error:
        raise TacitError(f"{folder} could not be written: {error}. Is the disk full?") from None
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _put_in_place(new: Path, folder: Path, workspace: Path) -> None:
    """Rename `new` to `folder`, moving aside what was there; if others do the same, one of them wins."""
    for attempt in range(10):
        try:
            if folder.exists():
                folder.rename(workspace / f"old-{attempt}")
            new.rename(folder)
            return
        except OSError:  # somebody moved the old one away, or put theirs there, between our two steps
            if (folder / "meta.json").exists():
                return
    new.rename(folder)


def _meta(dataset: Dataset) -> dict[str, Any]:
    return {
        "name": dataset.name,
        "classes": dataset.classes,
        "mean": dataset.mean,
        "std": dataset.std,
        "mirror": dataset.mirror,
        "note": dataset.note,
        "fingerprint": dataset.fingerprint,
        "shapes": {name: array.shape for name, array in arrays_of(dataset).named()},
        "train_histogram": histogram(dataset.train_labels, len(dataset.classes)),
        "test_histogram": histogram(dataset.test_labels, len(dataset.classes)),
    }


def read_meta(folder: Path) -> dict[str, Any] | None:
    """meta.json of a cached data set; None where nothing is cached."""
    if not folder.exists():
        return None
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(folder, f"meta.json cannot be read ({error})") from None
    if not isinstance(meta, dict) or not set(_META_KEYS) <= set(meta):
        raise damaged(folder, "meta.json lacks entries")
    return meta


_META_KEYS = (
    *("name", "classes", "mean", "std", "mirror", "note", "fingerprint"),
    *("shapes", "train_histogram", "test_histogram"),
)


def read(folder: Path, *, fully: bool = False) -> Dataset | None:
    """The cached data set, memory-mapped; None where nothing is cached; an error that names any damage.

    Shapes, types and label counts are always compared with meta.json; `fully` also reads every byte and
    compares the fingerprint.
    """
    meta = read_meta(folder)
    if meta is None:
        return None
    arrays: dict[str, Any] = {name: _read_array(folder, name, shape) for name, shape in meta["shapes"].items()}
    classes = tuple(meta["classes"])
    for part in ("train", "test"):
        if list(histogram(arrays[f"{part}_labels"], len(classes))) != meta[f"{part}_histogram"]:
            raise damaged(folder, f"the class counts of {part}_labels.npy differ from meta.json")
    dataset = Dataset(
        name=meta["name"],
        **arrays,
        classes=classes,
        mean=tuple(meta["mean"]),
        std=tuple(meta["std"]),
        mirror=meta["mirror"],
        fingerprint=meta["fingerprint"],
        note=meta["note"],
    )
    if fully and fingerprint(arrays_of(dataset)) != dataset.fingerprint:
        raise damaged(folder, "the bytes differ from those that were written (fingerprint)")
    return dataset


def _read_array(folder: Path, name: str, shape: list[int]) -> np.ndarray:
    try:
        array: np.ndarray = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise damaged(folder, f"{name}.npy is missing") from None
    except (OSError, ValueError, EOFError) as error:
        raise damaged(folder, f"{name}.npy cannot be read ({error})") from None
    wanted = np.dtype(np.uint8 if name.endswith("images") else np.int64)
    if list(array.shape) != shape or array.dtype != wanted:
        raise damaged(folder, f"{name}.npy is {array.dtype} {array.shape}, expected {wanted} {tuple(shape)}")
    return array


def damaged(folder: Path, why: str) -> TacitError:
    """The error for a cache that must not be used."""
    return TacitError(
        f"The cached data in {folder} is damaged: {why}. Nothing of it was used. "
        "Make it anew with `tacit data get` and its name, or delete that folder."
    )
