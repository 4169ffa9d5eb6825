"""Writing files so that nobody ever reads half of one."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Write, flush to disk, rename: a kill or a power cut leaves the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
