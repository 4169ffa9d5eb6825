"""Writing files so that nobody ever reads half of one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Where to write. Then it is flushed to disk and renamed: a kill or a power cut leaves the old file or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)  # half a file, where something went wrong


def write_atomically(path: Path, data: bytes) -> None:
    """The old content or the new one, never half of it."""
    with beside(path) as new:
        new.write_bytes(data)
