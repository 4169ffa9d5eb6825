"""The audit trail of a site: a line for every message, written down before it leaves.

    sent.jsonl  {"number": 7, "before": digest of the line before, "time": …, "run": …, "job": …, "asked": "train",
                 "kind": "train", "stage": "main", "round": 3, "bytes": …, "sha256": digest of the message,
                 what was in it: "send" (names and shapes), "numbers", "examples", "metrics"; "chain": own digest}
    sent.head   the number and the digest of the last line: so that an end that was cut off is noticed

Lines are only ever added. Each is on the disk before its message leaves; where it cannot be written, nothing leaves.
What `job` is: `tacit.sites.approval.job_of`.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tacit.core import payload
from tacit.core.chain import Entry, chained, link, read_line
from tacit.core.errors import TacitError
from tacit.core.files import digest, file_errors, read_bytes, write_atomically
from tacit.sites.wire import Response, unpack

FILE, HEAD = "sent.jsonl", "sent.head"
TALK = ("who", "hello", "refused", "waiting")  # messages that hold nothing that was learned
REPLIES = ("train", "masked")  # what was learned in a round, in the clear or under the masks of secure aggregation
PLAIN = ("train", "judge", "compare")  # messages in which everything has its name


@dataclass(frozen=True)
class Counts:
    """What a site has contributed to a job so far."""

    replies: int = 0
    rounds: int = 0  # a round that is asked for again counts again
    bytes: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.replies + other.replies, self.rounds + other.rounds, self.bytes + other.bytes)


def contents_of(message: bytes) -> Entry:
    """What is in a message that is about to leave, read from its very bytes.

    >>> from tacit.sites.wire import pack
    >>> found = contents_of(pack(Response(kind="train", examples=5.0), payload.to_bytes({"share": 0.5})))
    >>> found["kind"], found["numbers"], found["examples"]
    ('train', {'share': 0.5}, 5.0)
    """
    header, content = unpack(message, Response)
    told: Entry = {"kind": header.kind}
    if header.kind in ("refused", "waiting"):
        return {**told, "why": header.why}
    if header.kind == "hello":
        return {**told, "labeled": header.labeled, "images": header.images, "answered": header.answered}
    sent = payload.from_bytes(content) if content else {}
    return {
        **told,
        "send": {name: list(tensor.shape) for name, tensor in payload.tensors(sent)},
        "numbers": {name: value for name, value in sent.items() if isinstance(value, int | float)},
        "examples": header.examples,
        "metrics": header.metrics,
    }


def names_in(entry: Entry) -> list[str]:
    """The names of what was sent, groups of tensors by the name of the group.

    >>> names_in({"send": {"model/fc.weight": [2], "model/fc.bias": [2], "counts": [10]}, "numbers": {"share": 0.5}})
    ['model', 'counts', 'share']
    """
    full = [*keys_of(entry, "send"), *keys_of(entry, "numbers")]
    return list(dict.fromkeys(name.partition("/")[0] for name in full))


def keys_of(entry: Entry, part: str) -> list[str]:
    """The names in a part of a line; none where a line that somebody wrote has something else there."""
    found = entry.get(part)
    return list(found) if isinstance(found, dict) else []


def place_of(entry: Entry) -> str:
    """What a line answers, for people.

    >>> place_of({"asked": "train", "stage": "main", "round": 3}), place_of({"asked": "hello"})
    ('main round 4', 'hello')
    """
    if entry.get("stage") and isinstance(entry.get("round"), int):
        return f"{entry['stage']} round {entry['round'] + 1}"
    return str(entry.get("asked", ""))


def size_of(entry: Entry) -> int:
    """How many bytes a message had; 0 where a line that somebody wrote does not tell."""
    size = entry.get("bytes")
    return size if isinstance(size, int) else 0


def contribution(entry: Entry) -> Counts:
    """What a line counts for."""
    if entry.get("kind", "who") in TALK:
        return Counts()
    reply = entry["kind"] in REPLIES
    return Counts(int(reply), int(reply and not entry.get("wave")), size_of(entry))


def counted(entries: Iterable[Entry]) -> dict[str, Counts]:
    """What was contributed, by job."""
    found: dict[str, Counts] = {}
    for entry in entries:
        job = entry.get("job", "")
        found[job] = found.get(job, Counts()) + contribution(entry)
    return found


class Trail:
    """The trail of the site that lives in a folder; it is read and checked when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.path, self.head = folder / FILE, folder / HEAD
        self._size = -1  # of the file, when it was read or written last
        self._number, self._last = 0, ""
        self._counts: dict[str, Counts] = {}

    def open(self) -> None:
        """Read what is there; a trail that is not as it was written is not gone on with."""
        with self._locked():
            self._catch_up()

    def append(self, message: bytes, about: Entry) -> None:
        """Write a line about a message, onto the disk, before it leaves."""
        if self._size < 0:
            self.open()
        with self._locked() as file:
            self._catch_up()
            now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            entry = {"number": self._number + 1, "before": self._last, "time": now, **about}
            entry |= {"bytes": len(message), "sha256": digest(message)}
            line, own = chained(self._last, entry)
            os.truncate(self.path, self._size)  # half a line that a kill left; its message never left
            if os.write(file, line.encode()) < len(line):  # ASCII, so as many bytes as letters
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file)
            write_atomically(self.head, (json.dumps({"number": self._number + 1, "chain": own}) + "\n").encode())
            self._number, self._last, self._size = self._number + 1, own, self._size + len(line)
            job = entry.get("job", "")
            self._counts[job] = self._counts.get(job, Counts()) + contribution(entry)

    def counts(self, job: str) -> Counts:
        """What was contributed to a job so far."""
        if self._size < 0:
            self.open()
        return self._counts.get(job, Counts())

    def jobs(self) -> set[str]:
        """The jobs that something was contributed to."""
        if self._size < 0:
            self.open()
        return {job for job, counts in self._counts.items() if counts.replies}

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Nobody else adds a line meanwhile, be it another process that was started by mistake."""
        with file_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
            finally:
                os.close(file)

    def _catch_up(self) -> None:
        size = self.path.stat().st_size
        if size == self._size and self.head.exists():
            return
        if wrong := problems(self.path.parent):
            listed = "\n  ".join(wrong[:5])
            raise TacitError(
                f"{self.path} is not as it was written, so nothing is sent:\n  {listed}\nIf you know why, move {FILE} "
                f"and {HEAD} to a place where they are kept, and join again: a new list is begun."
            )
        data = read_bytes(self.path)
        self._number, self._last = 0, _start(data)
        entries = list(_entries(data))
        if entries:
            self._number, self._last = entries[-1][0]["number"], entries[-1][1]
        self._counts = counted(entry for entry, _ in entries)
        self._size = data.rfind(b"\n") + 1


# --- Reading --------------------------------------------------------------------------------------------------


def _lines(data: bytes) -> tuple[list[bytes], list[bytes]]:
    """The lines that a tacit without a chain wrote, which may only stand at the top; and all others."""
    lines = data.split(b"\n")[:-1]
    old = 0
    while old < len(lines) and _is_old(lines[old]):
        old += 1
    return lines[:old], lines[old:]


def _is_old(line: bytes) -> bool:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(entry, dict) and not {"chain", "number", "before"} & entry.keys()


def _start(data: bytes) -> str:
    """What the first line is linked to: the digest of older lines without a chain; '' where there are none."""
    old, _ = _lines(data)
    return digest(b"\n".join(old)) if old else ""


def _entries(data: bytes) -> Iterator[tuple[Entry, str]]:
    for line in _lines(data)[1]:
        if (found := read_line(line)) is not None:
            yield found


def read_trail(folder: Path) -> list[Entry]:
    """All lines that can be read, older ones without a chain included; whether they are true is for `problems`."""
    path = folder / FILE
    data = read_bytes(path) if path.exists() else b""
    return [*(json.loads(line) for line in _lines(data)[0]), *(entry for entry, _ in _entries(data))]


def head_of(folder: Path) -> str:
    """The digest of the last line: who keeps it elsewhere can tell later whether anything before it was changed."""
    path = folder / FILE
    found = list(_entries(read_bytes(path))) if path.exists() else []
    return found[-1][1] if found else ""


def problems(folder: Path, known_head: str = "") -> list[str]:
    """What in a trail is not as it was written, line by line; nothing, if all is well.

    Found is a line that was changed, removed, put in or moved, and an end that was cut off. Who rewrites all lines
    from some place on, and sent.head too, is found out only by a digest that was kept elsewhere (`known_head`).
    """
    path = folder / FILE
    data = read_bytes(path) if path.exists() else b""
    old, lines = _lines(data)
    found: list[str] = []
    before: str | None = _start(data)
    expected, digests = 1, dict[int, str]()
    for place, line in enumerate(lines, len(old) + 1):
        read = read_line(line)
        if read is None or not _has_place(read[0]):
            found.append(f"line {place} was changed or put in: it is no line of this list")
            before = None
            continue
        entry, own = read
        wrong = _wrong(place, entry, own, before, expected)
        found += [wrong] if wrong else []
        before, expected = own, entry["number"] + 1
        digests[entry["number"]] = own
    found += _wrong_end(folder / HEAD, digests)
    if known_head and known_head not in digests.values():
        found.append(f"no line has the digest {known_head[:16]}… that was kept: the list was rewritten or cut off")
    return found


def _has_place(entry: Entry) -> bool:
    return type(entry.get("number")) is int and isinstance(entry.get("before"), str)


def _wrong(place: int, entry: Entry, own: str, before: str | None, expected: int) -> str:
    """What is wrong with a line, by itself or beside the one before it; '' if nothing is."""
    number = entry["number"]
    if link(entry["before"], entry) != own:
        return f"line {place} was changed: its digest is not that of what it says"
    if before is None or entry["before"] == before:
        return "" if number == expected or before is None else f"line {place} has the number {number}, not {expected}"
    if number > expected:
        gone = f"{expected}" if number == expected + 1 else f"{expected} to {number - 1}"
        return f"before line {place} something was removed: the message{'s' * (number > expected + 1)} number {gone}"
    if number < expected:
        return f"line {place - 1} was put in, or lines were moved: line {place} is number {number}, not {expected}"
    return f"line {place - 1} was rewritten: line {place} knows it by another digest"


def _wrong_end(head: Path, digests: Mapping[int, str]) -> list[str]:
    """Whether the list ends where it ended when tacit wrote it. A kill may leave one line that the head has not yet."""
    last = max(digests, default=0)
    if not head.exists():
        return [f"{head} is missing: whether the end was cut off cannot be told"] if last else []
    try:
        stored = json.loads(read_bytes(head))
        number, chain = int(stored["number"]), str(stored["chain"])
    except (ValueError, TypeError, LookupError):
        return [f"{head} was changed: it does not tell the last line"]
    if last < number:
        gone = f"{number}" if number == last + 1 else f"{last + 1} to {number}"
        return [f"the end was cut off: number {gone} is not there"]
    if last > number + 1:
        return [f"the lines after number {number} were not written by tacit, or {head} was changed"]
    if digests.get(number, chain) != chain:
        return [f"number {number} was rewritten, or {head} was changed: that knows it by another digest"]
    return []
