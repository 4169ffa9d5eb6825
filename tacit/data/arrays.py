"""What a reader hands over before it becomes a `Dataset`, and the sums every source needs."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacit.core.errors import TacitError
from tacit.core.text import safe
from tacit.data.dataset import Dataset

MOST_CLASSES = 10_000  # as at real sites (tacit.sites.wire)


@dataclass(frozen=True)
class Arrays:
    """Images as uint8 [N, C, H, W] and labels as int64 [N] (-1: nobody knows), for training and test."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple[str, ...] = ()
    train_groups: np.ndarray | None = None  # int64 [N]: images that belong together
    test_groups: np.ndarray | None = None
    note: str = ""

    def named(self) -> Iterator[tuple[str, np.ndarray]]:
        """Every array that is there, with its name, always in the same order."""
        for name in ("train_images", "train_labels", "test_images", "test_labels"):
            yield name, getattr(self, name)
        for name in ("train_groups", "test_groups"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)


def to_dataset(
    arrays: Arrays,
    name: str,
    *,
    mirror: bool,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> Dataset:
    """A `Dataset` with its fingerprint; mean and std are computed from the training images unless given."""
    if mean is None or std is None:
        mean, std = mean_and_std(arrays.train_images)
    fields: dict[str, Any] = dict(arrays.named())
    return Dataset(
        name=name,
        **fields,
        classes=arrays.classes,
        mean=mean,
        std=std,
        mirror=mirror,
        fingerprint=fingerprint(arrays),
        note=arrays.note,
    )


def arrays_of(dataset: Dataset) -> Arrays:
    """The arrays of a data set, for checks that work on arrays."""
    return Arrays(
        dataset.train_images,
        dataset.train_labels,
        dataset.test_images,
        dataset.test_labels,
        dataset.classes,
        dataset.train_groups,
        dataset.test_groups,
        dataset.note,
    )


def fingerprint(arrays: Arrays) -> str:
    """blake2b over the name, type, shape and bytes of every array.

    >>> one = np.zeros((1, 1, 8, 8), np.uint8), np.zeros(1, np.int64)
    >>> fingerprint(Arrays(*one, *one)) == fingerprint(Arrays(*one, *one))
    True
    >>> fingerprint(Arrays(*one, *one)) == fingerprint(Arrays(*one, one[0] + 1, one[1]))
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, array in arrays.named():
        digest.update(f"{name} {array.dtype.str} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def mean_and_std(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of images scaled to 0..1.

    Counted exactly, by how often each of the 256 values occurs, so that no order of summing matters.

    >>> mean_and_std(np.array([[[[0, 255], [0, 255]]]], np.uint8))
    ((0.5,), (0.5,))
    """
    values = np.arange(256, dtype=np.float64) / 255
    means, stds = [], []
    for channel in range(images.shape[1]):
        counts = np.zeros(256, np.int64)
        for start in range(0, len(images), 4096):  # bincount widens to int64: a part at a time
            counts += np.bincount(images[start : start + 4096, channel].ravel(), minlength=256)
        share = counts / counts.sum()
        mean = float(share @ values)
        means.append(mean)
        stds.append(float(np.sqrt(share @ (values - mean) ** 2)))
    return tuple(means), tuple(stds)


def histogram(labels: np.ndarray, classes: int) -> tuple[int, ...]:
    """How many images each class has; unlabelled ones (-1) are not counted.

    >>> histogram(np.array([0, 2, 2, -1]), 3)
    (1, 0, 2)
    """
    return tuple(int(count) for count in np.bincount(labels[labels >= 0], minlength=classes))


def channels_first(images: np.ndarray, where: str) -> np.ndarray:
    """uint8 [N, C, H, W] from [N, H, W], [N, H, W, C] or [N, C, H, W], with 1 or 3 channels.

    >>> channels_first(np.zeros((5, 8, 9, 3), np.uint8), "x").shape
    (5, 3, 8, 9)
    >>> channels_first(np.full((5, 8, 8), 0.5), "x")[0, 0, 0, 0]      # fractions are scaled to 0..255
    np.uint8(128)
    """
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise TacitError(
            f"{where} has the shape {images.shape}. Expected [images, height, width], or the same with 1 or 3 "
            "channels at the end or after the first axis."
        )
    return np.ascontiguousarray(_as_bytes(images, where))


def _as_bytes(images: np.ndarray, where: str) -> np.ndarray:
    if images.dtype == np.uint8:
        return images
    low, high = (float(images.min()), float(images.max())) if images.size else (0.0, 0.0)
    if images.dtype.kind == "f" and low >= 0 and high <= 1:
        return np.rint(images * 255).astype(np.uint8)
    if images.dtype.kind in "iu" and low >= 0 and high <= 255:
        return images.astype(np.uint8)
    raise TacitError(
        f"{where} holds {images.dtype} values from {low:g} to {high:g}. "
        "Expected whole numbers 0..255 (uint8), or fractions 0..1."
    )


def whole_labels(labels: np.ndarray, where: str) -> np.ndarray:
    """int64 [N] from [N] or [N, 1]; -1 means unlabelled.

    >>> whole_labels(np.array([[1.0], [-1.0]]), "y")
    array([ 1, -1])
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1:
        raise TacitError(
            f"{where} has the shape {labels.shape}: expected one label for each image. Several labels for one "
            "image (multi-label data) are not supported."
        )
    if labels.dtype.kind not in "iuf" or not np.array_equal(labels, np.trunc(labels)):
        raise TacitError(f"{where} must hold whole numbers (class 0, 1, 2, …; -1: unlabelled), not {labels.dtype}.")
    if len(labels) and labels.min() < -1:
        raise TacitError(f"{where} holds the label {labels.min()}; the only negative label is -1, unlabelled.")
    if len(labels) and labels.max() >= MOST_CLASSES:
        raise TacitError(
            f"{where} holds the label {labels.max()}; there are at most {MOST_CLASSES:,} classes. Number them from 0 "
            "on without gaps (-1: unlabelled)."
        )
    return labels.astype(np.int64)


def check_class_names(names: Sequence[str], where: str) -> None:
    """Refuse names that are none, that two classes share, or that cannot be written down; and too many of them."""
    if len(names) > MOST_CLASSES:
        raise TacitError(f"{where} has {len(names):,} classes; there may be at most {MOST_CLASSES:,}.")
    for name, times in Counter(names).items():
        if why := invalid_name(name) or ("is there twice" if times > 1 else ""):
            raise TacitError(f"{where}: the class name '{safe(name)}' {why}. Rename the class.")


def invalid_name(name: str) -> str:
    """Why this cannot be the name of a class; '' if it can.

    >>> invalid_name("cat"), invalid_name("c\\0t"), invalid_name(" ")
    ('', 'holds the character NUL', 'is empty')
    """
    if "\0" in name:
        return "holds the character NUL"
    if not name.strip():
        return "is empty"
    try:
        name.encode()
    except UnicodeEncodeError:
        return "is not text (UTF-8)"
    return ""


def number_groups(train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Group names (of any type) as whole numbers that mean the same in both parts.

    >>> number_groups(np.array(["b", "a"]), np.array(["c"]))
    (array([1, 0]), array([2]))
    """
    _, numbers = np.unique(np.concatenate([train, test]), return_inverse=True)
    return numbers[: len(train)].astype(np.int64), numbers[len(train) :].astype(np.int64)


def hold_out(
    labels: np.ndarray, groups: np.ndarray | None, fraction: float, generator: np.random.Generator
) -> np.ndarray:
    """Which images become the test set: about `fraction` of every class, whole groups, only labelled images.

    A class keeps at least one group for training; a group with an unlabelled image stays in training.

    >>> labels = np.array([0] * 10 + [1] * 5 + [2] + [-1] * 4)
    >>> test = hold_out(labels, None, 0.2, np.random.default_rng(0))
    >>> [int(test[labels == label].sum()) for label in (0, 1, 2, -1)]
    [2, 1, 0, 0]
    """
    members = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    number = int(members.max()) + 1 if len(members) else 0
    group_label = np.full(number, -1)
    group_label[members[::-1]] = labels[::-1]  # the first image of a group decides its class
    group_label[members[labels < 0]] = -1
    chosen = np.zeros(number, bool)
    for label in range(int(labels.max(initial=-1)) + 1):
        candidates = generator.permutation(np.flatnonzero(group_label == label))
        share = max(1, round(fraction * len(candidates)))
        chosen[candidates[: min(share, len(candidates) - 1)]] = True
    return chosen[members]


def joined_groups(groups: np.ndarray | None, twins: np.ndarray) -> np.ndarray:
    """Groups [N] in which also images with equal pixels (equal numbers in `twins`) belong together.

    Numbered by their first image, so that images that stand alone keep their order.

    >>> joined_groups(None, np.array([7, 8, 7, 9])).tolist()
    [0, 1, 0, 3]
    >>> joined_groups(np.array(["p", "q", "q", "r"]), np.array([7, 8, 9, 7])).tolist()    # p and r share a picture
    [0, 1, 1, 0]
    """
    first = np.arange(len(twins))
    kinds = [twins] if groups is None else [twins, groups]
    numbers = [np.unique(kind, return_inverse=True)[1] for kind in kinds]
    while True:  # each pass gives every image the smallest number among those it belongs to
        before = first.copy()
        for kind in numbers:
            smallest = np.full(int(kind.max(initial=-1)) + 1, len(first))
            np.minimum.at(smallest, kind, first)
            first = smallest[kind]
        if np.array_equal(first, before):
            return first


def check_arrays(arrays: Arrays, where: str) -> None:
    """Refuse what no method could use: empty parts, lengths or shapes that differ, unknown labels, groups that
    lie in both parts."""
    train, test = arrays.train_images, arrays.test_images
    check_class_names(arrays.classes, where)
    for part, images, labels in (("train", train, arrays.train_labels), ("test", test, arrays.test_labels)):
        if len(images) != len(labels):
            raise TacitError(f"{where}: {len(images)} {part} images but {len(labels)} {part} labels.")
        if not len(images):
            raise TacitError(f"{where}: there is no {part} image.")
        if labels.max() >= len(arrays.classes):
            raise TacitError(
                f"{where}: the {part} label {labels.max()} is none of the {len(arrays.classes)} classes "
                f"(labels go from 0 to {len(arrays.classes) - 1})."
            )
    if train.shape[1:] != test.shape[1:]:
        raise TacitError(f"{where}: train images are {train.shape[1:]}, test images {test.shape[1:]}.")
    if len(arrays.classes) < 2:
        raise TacitError(f"{where}: only {len(arrays.classes)} class; at least two are needed to tell apart.")
    if arrays.test_labels.min() < 0:
        raise TacitError(f"{where}: some test images have no label, so nothing could be measured on them.")
    _check_groups(arrays, where)


def _check_groups(arrays: Arrays, where: str) -> None:
    if arrays.train_groups is None or arrays.test_groups is None:
        return
    if len(arrays.train_groups) != len(arrays.train_images) or len(arrays.test_groups) != len(arrays.test_images):
        raise TacitError(f"{where}: there must be one group for each image.")
    both = np.intersect1d(arrays.train_groups, arrays.test_groups)
    if len(both):
        raise TacitError(
            f"{where}: {len(both)} groups (images of one lesion, one patient, …) lie in both the training and "
            "the test set, so the test would be too easy. Put each group wholly into one of them."
        )
