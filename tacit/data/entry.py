"""What the catalogue says about one named data set."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tacit.data.arrays import Arrays
from tacit.data.download import Progress
from tacit.data.packages import Package


@dataclass(frozen=True)
class Official:
    """One file of the data set's own publication."""

    name: str
    addresses: tuple[str, ...]
    md5: str = ""
    instead: tuple[str, ...] = ()  # what serves as well: the unpacked file or folder

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.instead)


@dataclass(frozen=True)
class Source:
    """Everything tacit knows about a named data set."""

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    licence: str
    megabytes: int  # of the public download
    mirror: bool
    images: tuple[int, int]  # training, test
    train: tuple[int, ...] = ()  # known class counts; empty where they are not known
    test: tuple[int, ...] = ()
    total: tuple[int, ...] = ()  # of both together, where the split is ours
    mean: tuple[float, ...] | None = None  # the papers' constants; None: computed from the training images
    std: tuple[float, ...] | None = None
    files: tuple[Official, ...] = ()
    read: Callable[[dict[str, Path], Progress], Arrays] | None = None  # by official name
    package: Package | None = None
    read_package: Callable[[Path], Arrays] | None = None
    note: str = ""
    read_at: Callable[[dict[str, Path], Progress, int], Arrays] | None = (
        None  # photographs, at a size that is asked for
    )
    size: int = 0  # the size that was asked for (0: as `shape` says)

    @property
    def npz(self) -> str:
        """The one file in tacit's own layout that may stand in for the official ones."""
        return f"{self.name.rsplit('/')[-1]}.npz"

    def at(self, size: int) -> "Source":
        """The same set, read from its photographs at a larger size than it is stored at; itself where that cannot be.

        What is to be smaller is shrunk from what is stored.
        """
        read = self.read_at
        if read is None or size <= self.shape[-1]:
            return self
        shape = (self.shape[0], size, size)
        return replace(self, shape=shape, size=size, read=lambda files, progress: read(files, progress, size))
