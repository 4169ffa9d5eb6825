"""Reading tar and zip archives and folders without unpacking anything.

Members are read straight into memory, so that no archive can write anywhere. One that tries (a path with `..`,
an absolute path, a link under a wanted name) is refused as a whole: it is not the file it claims to be.
"""

import gzip
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from tacit.core.errors import TacitError

LEAST_ROOM, MOST_TIMES = 1 << 28, 100
LARGEST_MEMBER = 1 << 29  # bytes; CIFAR's largest file has 155 million
# what the standard readers raise on files that are cut short, altered or something else altogether
BROKEN = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError),
    *(MemoryError, struct.error, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile),
)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Turn any failure to read a file into an error that names the file."""
    try:
        yield
    except TacitError:
        raise
    except BROKEN as error:
        reason = str(error) or type(error).__name__
        raise TacitError(
            f"{path} is cut short, damaged or not what its name says ({reason}). "
            "Nothing of it was used. Delete it and get it again."
        ) from None


def members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """(file name, content) of each wanted regular file in a folder, tar or zip, at any depth.

    `wanted` is asked with the bare file name, e.g. "data_batch_1".
    """
    with naming(path):
        if path.is_dir():
            for file in sorted(path.rglob("*")):
                if file.is_file() and wanted(file.name):
                    yield file.name, file.read_bytes()
        elif zipfile.is_zipfile(path):
            yield from _zip_members(path, wanted)
        else:
            yield from _tar_members(path, wanted)


def _zip_members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            name = _safe_name(path, entry.filename)
            if entry.is_dir() or not wanted(name):
                continue
            if (entry.external_attr >> 28) == 0xA:  # Unix mode: symbolic link
                raise _hostile(path, entry.filename, "is a link")
            with archive.open(entry) as file:
                yield name, at_most(file, f"{path} ({name})")


def _tar_members(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        for entry in archive:
            name = _safe_name(path, entry.name)
            if entry.isdir() or not wanted(name):
                continue
            file = archive.extractfile(entry) if entry.isreg() else None
            if file is None:
                raise _hostile(path, entry.name, "is a link or a device")
            yield name, at_most(file, f"{path} ({name})")


def most_bytes(path: Path) -> int:
    """How much may be made of a compressed file: pictures and tables do not compress a hundredfold."""
    return max(LEAST_ROOM, MOST_TIMES * path.stat().st_size)


def at_most(file: IO[bytes] | gzip.GzipFile, where: str, most: int = 0) -> bytes:
    """All of a compressed file, unless it grows beyond what any public data set holds in one file."""
    most = most or LARGEST_MEMBER
    content = file.read(most + 1)
    if len(content) > most:
        raise TacitError(
            f"{where} is refused: unpacked it has more than {most:,} bytes, which the official file never has. Nothing "
            "of it was used. Delete it and get the official file."
        )
    return content


def _safe_name(path: Path, member: str) -> str:
    parts = PurePosixPath(member.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in parts.parts[:1]:
        raise _hostile(path, member, "points outside the archive")
    return parts.name


def _hostile(path: Path, member: str, why: str) -> TacitError:
    return TacitError(
        f"{path} is refused: its member {member!r} {why}, which the official file never does. "
        "Nothing was unpacked. Delete it and get the official file."
    )


def collect(path: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    """The wanted members by file name; an error names those that are missing."""
    found = dict(members(path, lambda name: name in names))
    missing = [name for name in names if name not in found]
    if missing:
        raise TacitError(f"{path} lacks {', '.join(missing)}: it is not the expected file. Delete it and get it again.")
    return found
