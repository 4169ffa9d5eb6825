"""A glance instead of a reading: own images are counted by their names, a few headers are looked at, no pixel is read.

For `--dry-run`, which tells who would hold what and what it would cost, and must not take as long as reading a hundred
thousand photographs. It is a mode and not an argument, because everything between a command and a file would have to
pass it on: layouts, tables, sites. A data set that was glanced at has the right shapes, labels and names, and blank
images; it has no fingerprint, so nothing can take it for the real one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import numpy as np
from PIL import Image, UnidentifiedImageError

from tacit.data.dataset import Dataset
from tacit.data.folder_report import FolderReport, Item
from tacit.data.images import is_grey

SAMPLE = 200  # headers that are looked at: is it grey or colour, and how large
_ON: ContextVar[bool] = ContextVar("glancing", default=False)


@contextmanager
def glance() -> Iterator[None]:
    """Within this, no image is decoded."""
    before = _ON.set(True)
    try:
        yield
    finally:
        _ON.reset(before)


def glancing() -> bool:
    return _ON.get()


def glance_at(items: Sequence[Item], report: FolderReport, decode: Callable[[Item], Image.Image]) -> None:
    """Put the items into the report as if all could be read and all were different pictures."""
    for item in items[:: max(1, len(items) // SAMPLE)]:
        try:
            size, grey = _header(item, decode)
        except Exception:  # the run itself will say what is wrong with it
            continue
        report.sizes[size] += 1
        report.grey += grey
        report.colour += not grey
    report.items += [replace(item, twin=str(item.path).encode("utf-8", "surrogateescape")) for item in items]


def _header(item: Item, decode: Callable[[Item], Image.Image]) -> tuple[tuple[int, int], bool]:
    """(width, height), and whether the image is grey, without decoding it if Pillow knows the format."""
    if item.array is None:
        try:
            with Image.open(item.path) as image:
                sixteen_bits = image.mode.startswith("I")
                return image.size, sixteen_bits or is_grey(image)
        except UnidentifiedImageError:
            pass
    whole = decode(item)
    return whole.size, is_grey(whole)


def blank(dataset: Dataset, channels: int, size: int) -> Dataset:
    """The data set with images of this shape that hold nothing and take no memory."""

    def widened(images: np.ndarray) -> np.ndarray:
        return np.broadcast_to(np.zeros((1, 1, 1, 1), np.uint8), (len(images), channels, size, size))

    return replace(
        dataset,
        train_images=widened(dataset.train_images),
        test_images=widened(dataset.test_images),
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
        fingerprint="",
    )
