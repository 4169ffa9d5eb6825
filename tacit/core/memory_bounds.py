"""How much memory something would take, told before it is taken."""

import os
from pathlib import Path

from tacit.core.errors import TacitError
from tacit.core.formatting import size_text

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def machine_memory() -> int:
    """Bytes of memory that this machine, or this container, has."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in LIMITS:
        try:
            found = min(found, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return found


def check_memory(needed: int, what: str, instead: str) -> None:
    """Refuse what is larger than all the memory there is.

    >>> check_memory(10**18, "A net", "Write a smaller one.")
    Traceback (most recent call last):
    tacit.core.errors.TacitError: A net would take 1.0 EB of memory; this machine has ... Write a smaller one.
    """
    if needed > (there := machine_memory()):
        raise TacitError(
            f"{what} would take {size_text(needed)} of memory; this machine has {size_text(there)}. {instead}"
        )


def check_images(count: int, channels: int, size: int) -> None:
    """Refuse to hold so many square images of bytes."""
    check_memory(
        count * channels * size**2,
        f"{count:,} images of {size}×{size} pixels with {channels} channel{'s' if channels > 1 else ''}",
        "Write a smaller data.image_size.",
    )
