"""Images at the size in which they are needed: decoded or resized once, then mapped from this machine's own cache.

What lies there is a copy of images, so its folder is for this user alone (`sized` in the folder of all data), and
nothing of it is ever sent. It may be deleted at any time.
"""

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tacit.core.errors import TacitError
from tacit.core.files import atomic_path, write_atomically
from tacit.core.formatting import size_text
from tacit.core.memory_bounds import check_images
from tacit.core.paths import data_root

WORTH = 1 << 24  # bytes: less than this is made anew sooner than it is looked for
SPARE = 1 << 30  # bytes that a disk keeps free


def folder() -> Path:
    return data_root() / "sized"


def made_once(key: str, shape: tuple[int, int, int, int], fill: Callable[[np.ndarray], None]) -> np.ndarray:
    """The uint8 images that `fill` writes into an array, mapped from the cache; few ones, or without a key, in memory.

    The key names all that the images are made of: whoever has the same key gets the same images.
    """
    if not key or math.prod(shape) < WORTH or not _has_room(math.prod(shape)):
        check_images(shape[0], shape[1], shape[2])
        images = np.empty(shape, np.uint8)
        fill(images)
        return images
    path = folder() / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.npy"
    if (there := _mapped(path, shape)) is not None:
        return there
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_path(path) as new:
        written = np.lib.format.open_memmap(new, mode="w+", dtype=np.uint8, shape=shape)
        fill(written)
        written.flush()
        del written
    again = _mapped(path, shape)
    assert again is not None
    return again


def _mapped(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The images in a file of the cache; None where it is not there, or not whole."""
    try:
        images: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)  # what is written stays here
    except (OSError, ValueError, EOFError):
        return None
    return images if images.shape == shape and images.dtype == np.uint8 else None


def lies_here(images: np.ndarray) -> bool:
    """Whether images are mapped from a file of this cache."""
    return isinstance(images, np.memmap) and images.filename is not None and Path(images.filename).parent == folder()


def _has_room(needed: int) -> bool:
    place = folder()
    while not place.exists():
        place = place.parent
    return os.access(place, os.W_OK) and shutil.disk_usage(place).free > needed + SPARE


def check_room(count: int, channels: int, size: int) -> None:
    """Refuse so many square images where neither the disk of the cache nor the memory would hold them."""
    if not _has_room(count * channels * size**2):
        check_images(count, channels, size)


def key_of_files(files: Sequence[Path], *more: object) -> str:
    """A key for what is made of files as they are now, and of settings."""
    return "\n".join([*(_as_it_is(file) for file in files), *map(str, more)])


def _as_it_is(file: Path) -> str:
    """A file's place, size and times: another content has others (the time of a change cannot be set)."""
    about = file.stat()
    return f"{file.resolve()}|{about.st_size}|{about.st_mtime_ns}|{about.st_ctime_ns}"


@dataclass(frozen=True)
class Look:
    """What was found when an image was decoded."""

    twin: str  # equal for equal pixels
    width: int
    height: int
    grey: bool
    bits: int = 0  # that a 16-bit file uses; 0: it is none
    glance: str = ""  # for near-duplicates


class Looks:
    """What was seen of the files of a data set, kept from one start to the next, so that none is decoded twice.

    Neither names nor pixels are in it: digests of what files were, and of what they showed.
    """

    def __init__(self, files: Sequence[Path], what: object) -> None:
        name = hashlib.blake2b(str(what).encode(), digest_size=16).hexdigest()
        self._path = folder() / f"{name}.json"
        self._known: dict[str, Look] = {}
        self._new = False
        if sum(_bytes_of(file) for file in files) < WORTH:
            self._path = None
            return
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            self._known = {str(key): Look(**look) for key, look in stored.items()}

    _path: Path | None

    def of(self, file: Path, look: Callable[[], Look]) -> Look:
        """What a file shows: as it was seen before if it has not changed since, else looked at now."""
        if self._path is None:
            return look()
        key = hashlib.blake2b(_as_it_is(file).encode(), digest_size=16).hexdigest()
        if key not in self._known:
            self._known[key] = look()
            self._new = True
        return self._known[key]

    def save(self) -> None:
        """Keep what was seen; a cache that cannot be written to saves no time, and no more."""
        if self._path is not None and self._new:
            with contextlib.suppress(TacitError, OSError):
                folder().mkdir(mode=0o700, parents=True, exist_ok=True)
                content = json.dumps({key: asdict(look) for key, look in self._known.items()})
                write_atomically(self._path, content.encode())


def _bytes_of(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.stat().st_size
    return 0


def told(count: int, channels: int, size: int) -> str:
    """Where so many images will lie, in words.

    >>> told(10, 3, 224)
    '10 images of 224×224×3 bytes: 1.5 MB in memory'
    """
    needed = count * channels * size**2
    where = "in memory" if needed < WORTH else f"mapped from {folder()}" if _has_room(needed) else "in memory"
    return f"{count:,} images of {size}×{size}×{channels} bytes: {size_text(needed)} {where}"
