"""Reading and writing files: nobody ever reads half of one, and what goes wrong is said in a sentence."""

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tacit.core.errors import TacitError

# What a half-written file is called. Nothing else has such a name, so what a killed process left can be removed.
_TEMPORARY = re.compile(r"\.tacit-tmp-\d+-.+")

_REMEDIES = {
    errno.ENOSPC: "Make room on that disk, or move the folder to another one, and try again",
    errno.EDQUOT: "Make room within your quota, or move the folder to another disk, and try again",
    errno.EACCES: "Give this user the right to read and write it and the folder it lies in",
    errno.EPERM: "Give this user the right to read and write it and the folder it lies in",
    errno.EROFS: "That disk can only be read: copy the folder to another one",
    errno.EISDIR: "There is a folder where a file should be: move it away",
    errno.ENOTDIR: "There is a file where a folder should be: move it away",
    errno.EEXIST: "There is a file where a folder should be: move it away",
    errno.ENOTEMPTY: "There is a folder where a file should be: move it away",
    errno.ENOENT: "Put it back from a copy",
}


@contextmanager
def file_errors(path: Path, action: str = "written") -> Iterator[None]:
    """An error of the file system becomes a sentence that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "Check the disk and the rights to the folder")
        raise TacitError(f"{path} cannot be {action} ({error.strerror or error}). {remedy}.") from error


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Where to write. Then it is flushed to disk and renamed: a kill or a power cut leaves the old file or the new."""
    new = path.with_name(f".tacit-tmp-{os.getpid()}-{path.name}")
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield new
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)  # half a file, where something went wrong


def write_atomically(path: Path, data: bytes) -> None:
    """The old content or the new one, never half of it."""
    with atomic_path(path) as new:
        new.write_bytes(data)


def append(path: Path, line: str) -> None:
    """One more line, flushed to disk. A kill may leave a part of it, which has no line end."""
    with file_errors(path), path.open("a") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_bytes(path: Path) -> bytes:
    with file_errors(path, "read"):
        return path.read_bytes()


def remove(path: Path) -> None:
    """Remove a file that we wrote; it may be gone already."""
    with file_errors(path, "removed"):
        path.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed processes left half-written, anywhere in a folder that nobody else is writing to."""
    for path in folder.rglob(".tacit-tmp-*"):
        if _TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            remove(path)


def digest(data: bytes) -> str:
    """SHA-256: with the instructions that CPUs have for it, as fast as the disk, and no accident passes it.

    >>> digest(b"tacit")[:12]
    '497fd753ad54'
    """
    return hashlib.sha256(data).hexdigest()
