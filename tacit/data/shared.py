"""One copy of the images for all processes: workers map the arrays that the engine has."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tacit.data.dataset import Dataset

IMAGES = ("train_images", "test_images")


@dataclass(frozen=True)
class SharedDataset:
    """A data set without its images, and the files in which they lie; small enough to be sent to a process."""

    bare: Dataset
    files: dict[str, Path]

    def open(self) -> Dataset:
        """The data set again, its images memory-mapped."""
        return dataclasses.replace(
            self.bare, **{name: np.load(path, mmap_mode="r") for name, path in self.files.items()}
        )


def share(dataset: Dataset, folder: Path) -> SharedDataset:
    """Make the images available to other processes: where they are not mapped from a file already (own, resized or
    coloured images), they are written into this folder once."""
    files = {}
    for name in IMAGES:
        images: np.ndarray = getattr(dataset, name)
        files[name] = _mapped_from(images) or _written(images, folder / f"{name}.npy")
    none = np.zeros((0, dataset.channels, dataset.size, dataset.size), dtype=np.uint8)
    return SharedDataset(dataclasses.replace(dataset, train_images=none, test_images=none), files)


def _mapped_from(images: np.ndarray) -> Path | None:
    """The file that this very array is mapped from, if it is."""
    if not isinstance(images, np.memmap) or images.filename is None or Path(images.filename).suffix != ".npy":
        return None
    again = np.load(images.filename, mmap_mode="r")
    same = again.shape == images.shape and again.dtype == images.dtype and again.strides == images.strides
    return Path(images.filename) if same else None


def _written(images: np.ndarray, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, images)
    return path
