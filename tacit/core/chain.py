"""Lines that hold each other: a file of JSON lines in which one that was changed, lost or put in is noticed.

Each line ends with "chain", a digest of itself and of all lines before it. A run's manifest is such a file, and so is a
site's list of what left it.
"""

import json
from collections.abc import Mapping
from typing import Any

from tacit.core.files import digest

Entry = dict[str, Any]


def link(before: str, entry: Mapping[str, Any]) -> str:
    """The digest of an entry and, by the digest `before`, of all that stand above it ("" above the first).

    >>> one = link("", {"round": 0})
    >>> link(one, {"round": 1}) == digest((one + '{"round": 1}').encode())
    True
    """
    return digest((before + json.dumps(entry)).encode())


def chained(before: str, entry: Mapping[str, Any]) -> tuple[str, str]:
    """An entry as a line of the file, and its digest, which the next line is linked to."""
    own = link(before, entry)
    return json.dumps({**entry, "chain": own}) + "\n", own


def read_line(line: bytes) -> tuple[Entry, str] | None:
    """What a line says and the digest that it ends with; None if it is no such line.

    >>> read_line(chained("", {"round": 0})[0].encode())[0]
    {'round': 0}
    >>> read_line(b'{"round": 0}') is None
    True
    """
    try:
        entry = json.loads(line)
        stored = entry.pop("chain")
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        return None
    return (dict(entry), stored) if isinstance(entry, dict) and isinstance(stored, str) else None
