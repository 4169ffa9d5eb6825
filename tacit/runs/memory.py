"""What clients keep: files on the client's own disk, each name with the moment it was kept at.

A client reads the newest version from *before* its task. So a round that was killed half-way and is run again
finds what it found the first time, though some clients had already written: resume is exact without a journal.
Versions stay as long as a checkpoint that needs them (`keep.checkpoints`), so that a run can go back that far.

Nothing of it stays in memory: it is read when the client is asked, and written when the client has answered. Two
settings bound the disk: `keep.half` writes weights in half precision, `keep.latest` lets only so many clients keep.
"""

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from tacit.core import payload
from tacit.core.files import file_errors, remove
from tacit.core.payload import Payload, Value
from tacit.core.settings import Keep

_FILE = re.compile(r"(?P<name>.+)@(?P<step>\d+)-(?P<wave>\d+)\.safetensors")
_HOME = re.compile(r"client-(?P<client>\d+)")
_FORGOTTEN = re.compile(r"forgotten-(?P<step>\d+)")
LARGEST_HALF = torch.finfo(torch.float16).max

StepWave = tuple[int, int]  # (step, wave)
Version = tuple[StepWave, Path]


def version_of(file: str) -> tuple[str, StepWave] | None:
    """The name and the moment of a version, from its file's name; None for a file that is no version.

    >>> version_of("local@3-0.safetensors"), version_of("notes.txt")
    (('local', (3, 0)), None)
    """
    match = _FILE.fullmatch(file)
    return (match["name"], (int(match["step"]), int(match["wave"]))) if match else None


def step_of(file: str) -> int:
    """The round in which a version was kept, from its path.

    >>> step_of("client-4/local@3-0.safetensors")
    3
    """
    found = version_of(file.rsplit("/", 1)[-1])
    return found[1][0] if found else -1


class ClientMemory:
    """The memory of all clients of one place: a folder with a folder for each client."""

    def __init__(self, folder: Path, settings: Keep | None = None) -> None:
        self.folder = folder
        self.settings = settings or Keep()

    def _versions(self, home: Path) -> dict[str, list[Version]]:
        """Every version of every name in a client's folder, the oldest first."""
        versions: dict[str, list[Version]] = {}
        with file_errors(home, "read"):
            for path in home.iterdir() if home.is_dir() else ():
                if found := version_of(path.name):
                    versions.setdefault(found[0], []).append((found[1], path))
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
            for _, path in self.not_needed(versions[name], step):
                remove(path)

    def horizon(self, step: int) -> int:
        """The earliest round that a run may go back to when it is at this one: checkpoints are kept for no other."""
        return step - (self.settings.checkpoints - 1)

    def not_needed(self, versions: list[Version], step: int) -> list[Version]:
        """The versions that neither this round nor one that the run may go back to can ask for."""
        return committed(versions, self.horizon(step))[:-1]

    def clients(self) -> list[int]:
        """Who keeps something here."""
        return sorted(int(match["client"]) for match, _ in self._folders(_HOME))

    def _folders(self, pattern: re.Pattern[str]) -> list[tuple[re.Match[str], Path]]:
        with file_errors(self.folder, "read"):
            inside = sorted(self.folder.iterdir()) if self.folder.is_dir() else []
        return [(match, path) for path in inside if (match := pattern.fullmatch(path.name)) and path.is_dir()]

    def written(self, clients: Iterable[int], step: int | None = None) -> dict[str, str]:
        """The files that these clients wrote (in this round), with the digests that they carry."""
        found = [
            path
            for client in sorted(set(clients))
            for versions in self._versions(self._home(client)).values()
            for when, path in versions
            if step is None or when[0] == step
        ]
        return {path.relative_to(self.folder).as_posix(): payload.digest_in(path) for path in found}

    def find(self, files: Iterable[str], step: int) -> dict[str, Path]:
        """Where files lie that a run at this round needs: a client may have been told later to forget them."""
        later = [path for match, path in self._folders(_FORGOTTEN) if int(match["step"]) >= step]
        return {
            file: next((path / file for path in later if (path / file).exists()), self.folder / file) for file in files
        }

    def go_back(self, step: int) -> None:
        """To the state before this round: what was kept since is removed, what was forgotten since is there again."""
        for match, forgotten in self._folders(_FORGOTTEN):
            if int(match["step"]) >= step:
                for path in forgotten.glob("client-*/*"):
                    _move(path, self.folder / path.relative_to(forgotten))
                shutil.rmtree(forgotten, ignore_errors=True)
        for client in self.clients():
            for versions in self._versions(self._home(client)).values():
                for when, path in versions:
                    if when >= (step, 0):
                        remove(path)

    def forget_clients(self, clients: Iterable[int], step: int) -> None:
        """Let these forget all that they kept before this round. It is put aside while a run may still go back."""
        for client in clients:
            home = self._home(client)
            for versions in self._versions(home).values():
                for _, path in committed(versions, step):
                    _move(path, self.folder / f"forgotten-{step}" / home.name / path.name)
            if not any(home.iterdir()):
                home.rmdir()

    def remove_forgotten(self, step: int) -> None:
        """Remove for good what was forgotten before any round that the run may go back to."""
        for match, path in self._folders(_FORGOTTEN):
            if int(match["step"]) <= self.horizon(step):
                shutil.rmtree(path, ignore_errors=True)

    def forget(self, step: int) -> None:
        """Before a round, when nobody is at work: remove what neither this round nor a resume can ask for."""
        MemoryIndex(self).forget(step)

    def nbytes(self) -> int:
        """Disk in use by all clients."""
        return MemoryIndex(self).nbytes()


def _move(path: Path, target: Path) -> None:
    with file_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)


class MemoryIndex:
    """What lies on the disks of all clients of a simulation, without looking at all of them in each round.

    It looks once at everybody; after that only at those who were asked (`look`), because nobody else has changed.
    """

    def __init__(self, memory: ClientMemory) -> None:
        self.memory = memory
        self.step = 0  # of the round that goes on
        self.versions: dict[int, dict[str, list[Version]]] = {}
        self.bytes: dict[int, int] = {}
        self.changed: set[int] = set()
        self.several: set[int] = set()  # who has older versions of something, to be removed one day
        self.look(memory.clients())

    def look(self, clients: Iterable[int]) -> None:
        """These may have kept something since."""
        for client in set(clients):
            found = self.memory._versions(self.memory._home(client))
            self.changed.add(client)
            self.versions[client] = found
            self.bytes[client] = sum(self._bytes(versions) for versions in found.values())
            (self.several.add if any(len(v) > 1 for v in found.values()) else self.several.discard)(client)
            if not found:
                del self.versions[client], self.bytes[client]

    def _bytes(self, versions: list[Version]) -> int:
        """Without the versions that are there only for a run that goes back: a run that did counts the same."""
        older = committed(versions, self.step)[:-1]
        return sum(path.stat().st_size for _, path in versions[len(older) :])

    def forget(self, step: int) -> None:
        """Before a round, when nobody is at work: remove what neither this round nor a resume can ask for.

        Of each name only the newest version stays, and older ones while the run may go back to them; with
        `keep.latest`, only the clients that kept something last (of one round the lower numbers first). It looks at
        finished rounds alone, so a round that is run again forgets the same clients.
        """
        self.step = step
        touched = (self.changed | self.several) & self.versions.keys()
        for client in touched:
            for found in self.versions[client].values():
                for _, path in self.memory.not_needed(found, step):
                    remove(path)
        self.look(touched)
        if self.memory.settings.latest:
            newest = {
                client: max(last[0] for found in names.values() for last, _ in committed(found, step)[-1:])
                for client, names in self.versions.items()
                if any(committed(found, step) for found in names.values())
            }
            dropped = too_many(newest, self.memory.settings.latest)
            self.memory.forget_clients(dropped, step)
            self.memory.remove_forgotten(step)
            self.look(dropped)
        self.changed = set()

    def nbytes(self) -> int:
        """Disk in use by all clients for what they remember."""
        return sum(self.bytes.values())


def too_many(newest: dict[int, int], latest: int) -> list[int]:
    """The clients that must forget where only so many may keep, from the step at which each kept something last.

    >>> too_many({0: 3, 1: 5, 2: 3}, latest=2)
    [2]
    """
    return sorted(newest, key=lambda client: (-newest[client], client))[latest:]


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
