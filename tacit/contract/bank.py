"""The bank of features (`net.views`): what the frozen part of a net makes of images, computed once and kept on disk.

Where only the head or the last blocks learn, all that comes before gives the same answer whenever it sees the same
view. So a party shows it each image once as it is, and so many weak and strong views of it, and trains from what came
out.
Methods do not change: what they take for images are tickets (which image, which view of it), `BankViews` turns tickets
into features where `Views` turns images into pixels, and the net is the part that learns.

What lies in the bank is as private as the images: its folder (`features` in the folder of all data) is for this user
alone, nothing of it is sent, and a party's files hold its own images only. It may be deleted at any time.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.contract.shard import Labeled, Shard
from tacit.core import seeds
from tacit.core.errors import TacitError
from tacit.core.files import atomic_path, write_atomically
from tacit.core.machine import cpu_type
from tacit.core.paths import data_root
from tacit.views import ViewKind, Views
from tacit.views.augment import choose, draw

KINDS: tuple[ViewKind, ...] = ("plain", "weak", "strong")
BATCH = 16  # images that the frozen part sees at once, always: the last bits of a sum may depend on their number
AT_ONCE = 1 << 25  # numbers in the views that are made at once
MOST_NUMBERS = 1 << 16  # that the frozen part may make of one view
KEY = 16  # bytes of the digest of an image
SPARE = 1 << 30  # bytes that a disk keeps free
HELD = 1 << 30  # bytes of banks that a process holds from one task to the next

Body = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Source:
    """What makes features: the frozen part of a net, and the views that it is shown."""

    views: Views
    count: int  # weak views of an image, and as many strong ones
    shape: tuple[int, ...]  # of what the frozen part makes of one view
    frozen: str  # the digest of the frozen part's weights
    net: str  # which net it is a part of, and how large a part, in words
    body: Callable[[], Body]  # builds it; asked only where something is missing
    device: torch.device

    @property
    def folder(self) -> Path:
        """Where banks that this source made lie: whoever makes the same features shares it."""
        made_by = {
            "scheme": 1,
            "frozen": self.frozen,
            "net": self.net,
            "views": {f.name: str(getattr(self.views, f.name)) for f in dataclasses.fields(Views)},
            "count": self.count,
            "shape": self.shape,
            "machine": cpu_type() if self.device.type == "cpu" else self.device.type,
        }
        text = json.dumps(made_by, sort_keys=True)
        return data_root() / "features" / hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def views_of(self, kind: ViewKind) -> int:
        return 1 if kind == "plain" else self.count

    def made_of(self, kind: ViewKind, images: Tensor, keys: Sequence[bytes]) -> Iterator[tuple[slice, Tensor]]:
        """The features of all views of a kind, some images at a time: [n, views, …].

        The chance in a view is the image's own, whoever holds it, at whatever place and under whatever seed.
        """
        body, many = self.body(), self.views_of(kind)
        step = max(1, min(256, AT_ONCE // max(images[:1].numel(), 1)) // many)
        for start in range(0, len(images), step):
            part = slice(start, min(start + step, len(images)))
            chances = [seeds.generator("bank", kind, place, key.hex()) for key in keys[part] for place in range(many)]
            views = self.views.drawn(kind, images[part].repeat_interleave(many, dim=0), chances)
            yield part, in_batches(body, views).view(-1, many, *self.shape).float().cpu()


@torch.inference_mode()
def in_batches(body: Body, views: Tensor) -> Tensor:
    """What a function makes of images, shown so many at a time that each of its batches is full.

    >>> in_batches(lambda x: torch.full((len(x),), len(x)), torch.zeros(3, 1))
    tensor([16, 16, 16])
    """
    parts = []
    for part in views.split(BATCH):
        full = torch.cat([part, part[-1:].expand(BATCH - len(part), *part.shape[1:])]) if len(part) < BATCH else part
        parts.append(body(full)[: len(part)])
    return torch.cat(parts).clone()


def keys_of(images: Tensor) -> list[bytes]:
    """A digest of each image, by which it is known wherever it lies."""
    rows = images.cpu().numpy()
    return [hashlib.blake2b(np.ascontiguousarray(row).data, digest_size=KEY).digest() for row in rows]


class Bank:
    """The features of one party's images. A kind of view is made when it is first asked for, or mapped from disk."""

    def __init__(self, source: Source, images: Tensor) -> None:
        self.source = source
        self.images = images
        self.keys = keys_of(images)
        self.nbytes = images.nbytes  # in memory; what is mapped does not count
        self._rows: dict[ViewKind, Tensor] = {}

    def rows(self, kind: ViewKind) -> Tensor:
        """What the frozen part makes of all views of a kind [n, views, …]."""
        if kind not in self._rows:
            self._rows[kind] = self._mapped(kind)
        return self._rows[kind]

    def _mapped(self, kind: ViewKind) -> Tensor:
        shape = (len(self.keys), self.source.views_of(kind), *self.source.shape)
        folder = self.source.folder
        name = hashlib.blake2b(b"".join(self.keys), digest_size=KEY).hexdigest()
        path = folder / f"{name}-{kind}.npy"
        if (there := open_rows(path, shape)) is not None:
            return torch.from_numpy(there)
        if not len(self.keys) or not has_room(folder, 4 * math.prod(shape)):
            rows = np.empty(shape, np.float32)
            self._fill(rows, kind)
            self.nbytes += rows.nbytes
            return torch.from_numpy(rows)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_path(path) as new:
            written = np.lib.format.open_memmap(new, mode="w+", dtype=np.float32, shape=shape)
            self._fill(written, kind)
            written.flush()
            del written
        write_atomically(folder / f"{name}.keys", b"".join(self.keys))
        again = open_rows(path, shape)
        assert again is not None
        return torch.from_numpy(again)

    def _fill(self, rows: np.ndarray, kind: ViewKind) -> None:
        """Copy what other banks have of these images (of another seed, say), and compute the rest."""
        places: dict[bytes, list[int]] = {}
        for place, key in enumerate(self.keys):
            places.setdefault(key, []).append(place)
        for key, row in known_elsewhere(self.source.folder, kind, set(places), rows.shape[1:]):
            rows[places.pop(key)] = row
        missing = list(places)
        images = self.images[torch.tensor([places[key][0] for key in missing], dtype=torch.int64)]
        for part, made in self.source.made_of(kind, images, missing) if missing else ():
            for key, row in zip(missing[part], made.numpy(), strict=True):
                rows[places[key]] = row


def known_elsewhere(
    folder: Path, kind: ViewKind, wanted: set[bytes], shape: tuple[int, ...]
) -> Iterator[tuple[bytes, np.ndarray]]:
    """The rows that other banks of the same source have of these images, each once."""
    wanted = set(wanted)
    for file in sorted(folder.glob("*.keys")):
        if not wanted:
            return
        with contextlib.suppress(OSError):  # it may be deleted while we read
            stored = file.read_bytes()
            keys = [stored[start : start + KEY] for start in range(0, len(stored), KEY)]
            found = {key: place for place, key in enumerate(keys) if key in wanted}
            rows = open_rows(file.with_name(f"{file.stem}-{kind}.npy"), (len(keys), *shape)) if found else None
            if rows is not None:
                wanted -= found.keys()
                yield from ((key, rows[place]) for key, place in found.items())


def open_rows(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The rows in a file of a bank, mapped; None where it is not there, or not whole."""
    try:
        rows: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)  # what is written stays here
    except (OSError, ValueError, EOFError):
        return None
    return rows if rows.shape == shape and rows.dtype == np.float32 else None


def has_room(place: Path, needed: int) -> bool:
    while not place.exists():
        place = place.parent
    return os.access(place, os.W_OK) and shutil.disk_usage(place).free > needed + SPARE


def tickets(count: int, first: int, device: torch.device) -> Tensor:
    """For so many images from a place on: (which image, which view of it); 0 is the image as it is.

    >>> tickets(2, 5, torch.device("cpu")).tolist()
    [[5, 0], [6, 0]]
    """
    which = torch.arange(first, first + count, device=device)
    return torch.stack([which, torch.zeros_like(which)], dim=1)


@dataclass(frozen=True, kw_only=True)
class BankViews(Views):
    """Views of tickets: features out of a bank. Chance chooses among the views that are there."""

    bank: Bank

    def plain(self, images: Tensor) -> Tensor:
        """The features that tickets are for: of images as they are, or of the view that `raw_weak` or `raw_strong`
        chose."""
        self._check(images)
        count = self.bank.source.count
        which, view = images[:, 0].cpu(), images[:, 1].cpu()
        kind = (view + count - 1) // count  # 0, then `count` weak ones, then `count` strong ones
        result = torch.empty(len(images), *self.bank.source.shape)
        for number in kind.unique().tolist():
            mine, offset = kind == number, 1 + count * (number - 1) if number else 0
            result[mine] = self.bank.rows(KINDS[number])[which[mine], view[mine] - offset]
        return result.to(images.device, self.dtype)

    def weak_view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self.plain(self.raw_weak(images, generator))

    def strong_view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        return self.plain(self.raw_strong(images, generator))

    def raw_weak(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Tickets for weak views of the same images."""
        return self._chosen(images, 1, generator)

    def raw_strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Tickets for strong views of the same images."""
        return self._chosen(images, 1 + self.bank.source.count, generator)

    def siamese_view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        raise TacitError(
            "A bank of features (net.views) has plain, weak and strong views, and none for self-supervised learning. "
            "Write net.views = 0."
        )

    def _chosen(self, images: Tensor, first: int, generator: torch.Generator) -> Tensor:
        self._check(images)
        view = first + choose(draw(len(images), 1, generator)[:, 0], self.bank.source.count)
        return torch.stack([images[:, 0], view.to(images.device)], dim=1)

    def _check(self, images: Tensor) -> None:
        if images.dtype != torch.int64 or images.dim() != 2 or images.shape[1] != 2:
            raise TacitError(
                f"With net.views = {self.bank.source.count} views are made of tickets, int64 [N, 2], as the party's "
                f"shard has them; these are {images.dtype} {list(images.shape)}. A method that makes images of its own "
                "needs net.views = 0 (needs_pixels = True says so before any work)."
            )


def banked(bank: Bank, shard: Shard) -> Shard:
    """A party's shard with tickets for images: those with labels first, then the others."""
    source, labeled = bank.source, len(shard.labeled)
    device = shard.labeled.labels.device
    settings: dict[str, Any] = {f.name: getattr(source.views, f.name) for f in dataclasses.fields(Views)}
    return Shard(
        Labeled(tickets(labeled, 0, device), shard.labeled.labels),
        tickets(len(shard.unlabeled), labeled, device),
        shard.repeated,
        BankViews(**settings, bank=bank),
    )


class Banks:
    """The banks of one process, held from one task to the next as long as they are small; without a source, none."""

    def __init__(self, source: Source | None) -> None:
        self.source = source
        self._held: OrderedDict[Hashable, tuple[Bank, Shard]] = OrderedDict()  # the shard has tickets, no pixels

    def of(self, who: Hashable, shard: Callable[[], Shard]) -> Shard:
        """The shard as its party sees it: with images, or with tickets of its bank. Tickets are new each time, so that
        nobody can spoil those of the next task."""
        if self.source is None:
            return shard()
        if who not in self._held:
            own = shard()
            bank = Bank(self.source, torch.cat([own.labeled.images, own.unlabeled]))
            self._held[who] = bank, banked(bank, own)
        self._held.move_to_end(who)
        while len(self._held) > 1 and sum(bank.nbytes for bank, _ in self._held.values()) > HELD:
            self._held.popitem(last=False)
        mine = self._held[who][1]
        labeled = Labeled(mine.labeled.images.clone(), mine.labeled.labels.clone())
        return dataclasses.replace(mine, labeled=labeled, unlabeled=mine.unlabeled.clone())

    def of_images(self, who: Hashable, images: Callable[[], Tensor]) -> Shard:
        """The same for images that are only looked at, such as those of a test."""

        def unlabeled() -> Shard:
            found = images()
            return Shard(Labeled(found[:0], torch.zeros(0, dtype=torch.int64, device=found.device)), found)

        return self.of(who, unlabeled)
