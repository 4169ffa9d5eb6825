"""What clients keep: files on the client's own disk, each name with the moment it was kept at.

A client reads the newest version from *before* its task. So a round that was killed half-way and is run again
finds what it found the first time, though some clients had already written: resume is exact without a journal.

Nothing of it stays in memory: it is read when the client is asked, and written when the client has answered. Two
settings bound the disk: `keep.half` writes weights in half precision, `keep.latest` lets only so many clients keep.
"""

import re
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

    def forget(self, step: int) -> None:
        """Before a round, when nobody is at work: remove what neither this round nor a resume can ask for.

        Of each name only the newest version stays; with `keep.latest`, only the clients that kept something last
        (of one round the lower numbers first). It looks at finished rounds alone, so a round that is run again
        forgets the same clients.
        """
        last_kept: dict[int, list[Version]] = {}
        for home in self.folder.glob("client-*"):
            names = [committed(found, step) for found in self._versions(home).values()]
            for _, path in (version for found in names for version in found[:-1]):
                path.unlink(missing_ok=True)
            if newest := [found[-1] for found in names if found]:
                last_kept[int(home.name.removeprefix("client-"))] = newest
        if self.settings.latest:
            order = sorted(last_kept, key=lambda client: (-max(when[0] for when, _ in last_kept[client]), client))
            for client in order[self.settings.latest :]:
                for _, path in last_kept[client]:
                    path.unlink(missing_ok=True)
                if not any(self._home(client).iterdir()):
                    self._home(client).rmdir()

    def nbytes(self) -> int:
        """Disk in use by all clients."""
        return sum(path.stat().st_size for path in self.folder.glob("client-*/*.safetensors"))


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
