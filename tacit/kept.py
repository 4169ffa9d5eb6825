"""What clients keep: files on the client's own disk, each name with the moment it was kept at.

A client reads the newest version from *before* its task. So a round that was killed half-way and is run again
finds what it found the first time, though some clients had already written: resume is exact without a journal.

Nothing of it stays in memory: it is read when the client is asked, and written when the client has answered. Two
settings bound the disk: `keep.half` writes weights in half precision, `keep.latest` lets only so many clients keep.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from tacit import payload
from tacit.experiment import Keep
from tacit.payload import Payload, Value

_FILE = re.compile(r"(?P<name>.+)@(?P<step>\d+)-(?P<wave>\d+)\.safetensors")
LARGEST_HALF = torch.finfo(torch.float16).max

Version = tuple[tuple[int, int], Path]  # the moment (step, wave) and the file


class Kept:
    """The memory of all clients of one place: a folder with a folder for each client."""

    def __init__(self, folder: Path, settings: Keep | None = None) -> None:
        self.folder = folder
        self.settings = settings or Keep()

    def _versions(self, home: Path) -> dict[str, list[Version]]:
        """Every version of every name in a client's folder, the oldest first."""
        versions: dict[str, list[Version]] = {}
        for path in home.iterdir() if home.is_dir() else ():
            if match := _FILE.fullmatch(path.name):
                when = (int(match["step"]), int(match["wave"]))
                versions.setdefault(match["name"], []).append((when, path))
        return {name: sorted(found) for name, found in versions.items()}

    def _home(self, client: int) -> Path:
        return self.folder / f"client-{client}"

    def read(self, client: int, step: int, wave: int) -> Payload:
        """What this client had kept before this moment."""
        result: Payload = {}
        for name, found in sorted(self._versions(self._home(client)).items()):
            before = [path for when, path in found if when < (step, wave)]
            if before:
                stored = payload.read(before[-1])
                result[name] = widened(stored["kept"]) if "half" in stored else stored["kept"]
        return result

    def write(self, client: int, step: int, wave: int, keep: Payload) -> None:
        """Keep these from this moment on; versions that no resume can ask for any more are removed."""
        for name, value in keep.items():
            stored: Payload = {"kept": halved(value), "half": 1} if self.settings.half else {"kept": value}
            payload.write(self._home(client) / f"{name}@{step}-{wave}.safetensors", stored)
        versions = self._versions(self._home(client)) if keep else {}
        for name in keep:
            for _, path in committed(versions[name], step)[:-1]:
                path.unlink(missing_ok=True)

    def clients(self) -> list[int]:
        """Who keeps something here."""
        return sorted(int(home.name.removeprefix("client-")) for home in self.folder.glob("client-*"))

    def forget(self, step: int) -> None:
        """Before a round, when nobody is at work: remove what neither this round nor a resume can ask for."""
        Census(self).forget(step)

    def go_back(self, step: int) -> None:
        """Remove what was kept in this round and later ones: they are run again, perhaps with other parties."""
        for client in self.clients():
            for found in self._versions(self._home(client)).values():
                for when, path in found:
                    if when >= (step, 0):
                        path.unlink(missing_ok=True)

    def nbytes(self) -> int:
        """Disk in use by all clients."""
        return Census(self).nbytes()


class Census:
    """What lies on the disks of all clients of a simulation, without looking at all of them in each round.

    It looks once at everybody; after that only at those who were asked (`look`), because nobody else has changed.
    """

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.versions: dict[int, dict[str, list[Version]]] = {}
        self.bytes: dict[int, int] = {}
        self.changed: set[int] = set()
        self.look(kept.clients())

    def look(self, clients: Iterable[int]) -> None:
        """These may have kept something since."""
        for client in set(clients):
            found = self.kept._versions(self.kept._home(client))
            self.changed.add(client)
            self.versions[client] = found
            self.bytes[client] = sum(path.stat().st_size for files in found.values() for _, path in files)
            if not found:
                del self.versions[client], self.bytes[client]

    def forget(self, step: int) -> None:
        """Before a round, when nobody is at work: remove what neither this round nor a resume can ask for.

        Of each name only the newest version stays; with `keep.latest`, only the clients that kept something last
        (of one round the lower numbers first). It looks at finished rounds alone, so a round that is run again
        forgets the same clients.
        """
        touched = self.changed & self.versions.keys()
        self.changed = set()
        for client in touched:
            for found in self.versions[client].values():
                for _, path in committed(found, step)[:-1]:
                    path.unlink(missing_ok=True)
        self.look(touched)
        if self.kept.settings.latest:
            self._forget_all_but_latest(step)
        self.changed = set()

    def _forget_all_but_latest(self, step: int) -> None:
        finished = {
            client: newest
            for client, names in self.versions.items()
            if (newest := [last for found in names.values() for last in committed(found, step)[-1:]])
        }
        order = sorted(finished, key=lambda client: (-max(when[0] for when, _ in finished[client]), client))
        dropped = order[self.kept.settings.latest :]
        for client in dropped:
            for _, path in finished[client]:
                path.unlink(missing_ok=True)
            if not any(self.kept._home(client).iterdir()):
                self.kept._home(client).rmdir()
        self.look(dropped)

    def nbytes(self) -> int:
        """Disk in use by all clients."""
        return sum(self.bytes.values())


def committed(versions: list[Version], step: int) -> list[Version]:
    """The versions from rounds before this one, which are finished."""
    return [version for version in versions if version[0] < (step, 0)]


def halved(value: Value) -> Value:
    """Weights (a group of tensors) in half precision; vectors, numbers and whole-number buffers as they are.

    >>> halved({"w": torch.tensor([1e9]), "steps": torch.tensor(3)})
    {'w': tensor([65504.], dtype=torch.float16), 'steps': tensor(3)}
    >>> halved(torch.tensor([0.1]))
    tensor([0.1000])
    """
    if not isinstance(value, dict):
        return value
    return {
        name: t.clamp(-LARGEST_HALF, LARGEST_HALF).half() if t.dtype == torch.float32 else t
        for name, t in value.items()
    }


def widened(value: Value) -> Value:
    """Back from half precision: what `halved` made narrow.

    >>> widened({"w": torch.tensor([0.5], dtype=torch.float16), "steps": torch.tensor(3)})
    {'w': tensor([0.5000]), 'steps': tensor(3)}
    """
    if not isinstance(value, dict):
        return value
    return {name: t.float() if t.dtype == torch.float16 else t for name, t in value.items()}
