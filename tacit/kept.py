"""What clients keep: files on the client's own disk, each name with the moment it was kept at.

A client reads the newest version from *before* its task. So a round that was killed half-way and is run again
finds what it found the first time, though some clients had already written: resume is exact without a journal.
"""

import re
from pathlib import Path

from tacit import payload
from tacit.payload import Payload

_FILE = re.compile(r"(?P<name>.+)@(?P<step>\d+)-(?P<wave>\d+)\.safetensors")


class Kept:
    """The memory of all clients of one place: a folder with a folder for each client."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _versions(self, client: int) -> dict[str, list[tuple[tuple[int, int], Path]]]:
        versions: dict[str, list[tuple[tuple[int, int], Path]]] = {}
        home = self.folder / f"client-{client}"
        for path in home.iterdir() if home.is_dir() else ():
            if match := _FILE.fullmatch(path.name):
                when = (int(match["step"]), int(match["wave"]))
                versions.setdefault(match["name"], []).append((when, path))
        return {name: sorted(found) for name, found in versions.items()}

    def read(self, client: int, step: int, wave: int) -> Payload:
        """What this client had kept before this moment."""
        result: Payload = {}
        for name, found in sorted(self._versions(client).items()):
            before = [path for when, path in found if when < (step, wave)]
            if before:
                result[name] = payload.read(before[-1])["kept"]
        return result

    def write(self, client: int, step: int, wave: int, keep: Payload) -> None:
        """Keep these from this moment on; versions that no resume can ask for any more are removed."""
        for name, value in keep.items():
            payload.write(self.folder / f"client-{client}" / f"{name}@{step}-{wave}.safetensors", {"kept": value})
        versions = self._versions(client) if keep else {}
        for name in keep:
            committed = [found for found in versions[name] if found[0] < (step, 0)]
            for _, path in committed[:-1]:
                path.unlink(missing_ok=True)

    def nbytes(self) -> int:
        """Disk in use by all clients."""
        return sum(path.stat().st_size for path in self.folder.rglob("*.safetensors"))
