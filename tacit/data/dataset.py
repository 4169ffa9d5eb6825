"""One data set in memory: images once, as uint8, channels first; everything else refers to them by index."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Dataset:
    """What every source delivers. The arrays may be memory-mapped and must not be written to."""

    name: str
    train_images: np.ndarray  # uint8 [N, C, H, W]
    train_labels: np.ndarray  # int64 [N]; -1 where nobody knows the label
    test_images: np.ndarray  # uint8 [M, C, H, W]
    test_labels: np.ndarray  # int64 [M]
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, of images scaled to 0..1
    std: tuple[float, ...]
    mirror: bool = False  # does a left-right flip keep the class? (not for digits)
    train_groups: np.ndarray | None = None  # int64 [N]: images that belong together (one lesion, one patient)
    test_groups: np.ndarray | None = None
    fingerprint: str = ""  # of all arrays; a saved split names the data it was made for
    note: str = ""  # what a reader of results should know about this data
    sites: tuple[str, ...] = ()  # own data: the parties that hold it, by name
    train_sites: np.ndarray | None = None  # int64 [N]: the site of each image; -1 is the server
    train_files: tuple[str, ...] = ()  # own data: where each training image was read from
    depth: int = 16  # own data: the bits that were used of 16-bit files, so that later images are read alike

    @property
    def channels(self) -> int:
        return int(self.train_images.shape[1])

    @property
    def size(self) -> int:
        return int(self.train_images.shape[2])
