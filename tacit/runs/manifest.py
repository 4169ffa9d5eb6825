"""What a run wrote, with digests: `manifest.jsonl` in its folder, by which damage is noticed.

It grows by a line a round, so it costs what the round wrote and not what all clients keep:

    {"begin": {"experiment": TOML, "split": digest, "returned": [rounds it went back to]}}
    {"round": 3, "record": digest of its line, "checkpoint": digest, "kept": {file: digest}}
    {"stage": 0, "rounds": 4, "state": digest}
    {"noted": {name: digest}}          what it wrote down of its data, which can be made again
    {"files": {name: digest}}          the results; with summary.json among them, the run is finished

A round is finished when its line is there. Each line ends with a digest of itself and of all lines before it
("chain"), so that a line that was changed, lost or put in is noticed. A line that was cut off by a kill is none.
"""

from pathlib import Path

from tacit.core.chain import Entry, chained, link, read_line
from tacit.core.errors import TacitError
from tacit.core.files import append, read_bytes, write_atomically
from tacit.runs.memory import too_many, version_of

NAME = "manifest.jsonl"


class Manifest:
    """The lines of a manifest that are whole; `append` adds one to the file."""

    def __init__(self, path: Path, entries: list[Entry], clean: bool = True, damaged: int = 0) -> None:
        self.path = path
        self.entries = entries
        self.clean = clean  # whether the file holds these lines and nothing else
        self.damaged = damaged  # the number of the last line, where that is not as it was written
        self._chain = ""
        for entry in entries:
            self._chain = link(self._chain, entry)

    def append(self, entry: Entry) -> None:
        line, self._chain = chained(self._chain, entry)
        self.entries.append(entry)
        append(self.path, line)

    def rewrite(self, entries: list[Entry]) -> None:
        """Replace all lines at once."""
        chain, lines = "", []
        for entry in entries:
            line, chain = chained(chain, entry)
            lines.append(line)
        write_atomically(self.path, "".join(lines).encode())
        self.entries, self._chain, self.clean = entries, chain, True

    def cut(self, rounds: int, returned: bool) -> None:
        """Forget everything after so many rounds. `returned`: these were finished rounds, dropped on purpose."""
        remaining = [
            entry
            for entry in self.entries
            if {"begin", "noted"} & entry.keys()
            or entry.get("round", rounds) < rounds
            or entry.get("rounds", rounds) < rounds
        ]
        if returned:
            remaining[0] = {"begin": {**self.begin, "returned": [*self.returned, rounds]}}
        if remaining != self.entries or not self.clean:
            self.rewrite(remaining)

    @property
    def begin(self) -> Entry:
        found: Entry = self.entries[0]["begin"]
        return found

    @property
    def returned(self) -> list[int]:
        """The rounds that the run went back to, in order: checkpoints of later ones may still lie there."""
        return list(self.begin["returned"])

    @property
    def rounds(self) -> list[Entry]:
        return [entry for entry in self.entries if "round" in entry]

    @property
    def done(self) -> int:
        """How many rounds are finished."""
        return len(self.rounds)

    @property
    def stages(self) -> list[Entry]:
        return [entry for entry in self.entries if "stage" in entry]

    @property
    def files(self) -> dict[str, str]:
        """The results and their digests; none before the run is finished."""
        return {name: found for entry in self.entries for name, found in entry.get("files", {}).items()}

    @property
    def noted(self) -> dict[str, str]:
        """What a run wrote down of its data, and the digests."""
        return {name: found for entry in self.entries for name, found in entry.get("noted", {}).items()}

    def memory_at(self, rounds: int, latest: int) -> dict[str, str]:
        """The files, with digests, that clients need to go on after so many rounds (`latest` as in keep.latest)."""
        newest: dict[int, dict[str, tuple[tuple[int, int], str, str]]] = {}
        lines = self.rounds
        for step in range(rounds + 1):
            if latest:  # as before each round, and so before the one that comes next
                last = {client: max(when[0] for when, _, _ in names.values()) for client, names in newest.items()}
                for client in too_many(last, latest):
                    del newest[client]
            if step == rounds:
                break
            for file, found in lines[step]["kept"].items():
                home, _, name = file.partition("/")
                thing, when = version_of(name) or ("", (0, 0))
                names = newest.setdefault(int(home.removeprefix("client-")), {})
                names[thing] = max(names.get(thing, (when, file, found)), (when, file, found))
        return {file: found for names in newest.values() for _, file, found in names.values()}


def load_manifest(folder: Path) -> Manifest | None:
    """The manifest of a run folder; None where there is none (or nothing in it).

    A last line that is damaged or cut off is left out: the round before it is still there. Damage further up means
    that nothing below can be relied on, and is an error.
    """
    path = folder / NAME
    if not path.exists():
        return None
    lines = read_bytes(path).split(b"\n")
    cut_off = lines.pop()
    entries: list[Entry] = []
    chain = ""
    for number, line in enumerate(lines, 1):
        entry = _entry(line, chain, first=number == 1)
        if entry is None:
            if number < len(lines) or number == 1:
                raise TacitError(
                    f"{path} is damaged in line {number}. Put it back from a copy. Without one, delete it: the run "
                    "then goes on with what is there, unchecked."
                )
            return Manifest(path, entries, clean=False, damaged=number)
        chain = link(chain, entry)
        entries.append(entry)
    return Manifest(path, entries, clean=not cut_off) if entries else None


def _entry(line: bytes, chain: str, first: bool) -> Entry | None:
    """What a line says; None if it is not as it was written."""
    found = read_line(line)
    if found is None or found[1] != link(chain, found[0]) or first != ("begin" in found[0]):
        return None
    return found[0]
