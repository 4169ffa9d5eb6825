"""A split: which images each party holds, which of them with labels, and which images are tested on.

Some labelled images may be kept back for validation: their holders judge models by them and never learn them.

A split is small (index lists only), remembers its recipe and seed and the data it was made for, and loads
back exactly, so that two methods or two machines see the same one.
"""

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tacit.core.errors import TacitError
from tacit.core.payload import write_atomically
from tacit.core.seeds import numpy_generator
from tacit.core.settings import Data
from tacit.core.text import safe
from tacit.data import placement
from tacit.data.catalogue import SOURCES
from tacit.data.dataset import Dataset
from tacit.data.groups import group_warnings
from tacit.data.published import PUBLISHED, place_published

FORMAT = "tacit-split-1"
FEW_IMAGES = 10  # a client with fewer is worth a warning
FEW_OWN_LABELS = 10  # of a class in somebody's own data: below, that is told before any training
FEW_LABELS = 5  # so is a class with fewer labels, where chance made it so


@dataclass(frozen=True, eq=False)
class Part:
    """The images of one client, as ascending indices of training images."""

    labeled: np.ndarray  # int64
    unlabeled: np.ndarray  # int64; an image in both lists counts as unlabelled data, too


@dataclass(frozen=True, eq=False)
class Split:
    """Who holds what. The arrays are read-only."""

    server: np.ndarray  # int64: labelled training images at the server
    clients: tuple[Part, ...]
    test: np.ndarray  # int64: the test images in use
    recipe: dict[str, Any]  # the settings it was drawn with, the sizes of the data, what happened in the draw
    seed: int
    fingerprint: str  # of the data set
    validation: tuple[np.ndarray, ...] = ()  # int64: labelled images kept back at the server and at each client

    def kept_back(self, client: int) -> np.ndarray:
        """The labelled images that a client (-1: the server) keeps back for validation."""
        return self.validation[client + 1] if self.validation else np.zeros(0, np.int64)

    def save(self, path: Path) -> None:
        write_atomically(path, self.to_bytes())

    def to_bytes(self) -> bytes:
        """One compressed .npz: all indices in a row, where each list begins, and the rest as JSON."""
        lists = _lists(self)
        metadata = {
            "format": FORMAT,
            "recipe": self.recipe,
            "seed": self.seed,
            "fingerprint": self.fingerprint,
        }
        file = io.BytesIO()
        np.savez_compressed(
            file,
            indices=np.concatenate(lists).astype(np.int32),
            offsets=np.cumsum([0, *(len(part) for part in lists)]).astype(np.int32),
            metadata=np.array(json.dumps(metadata)),
        )
        return file.getvalue()

    def check_against(self, dataset: Dataset) -> None:
        """Refuse data that this split was not made for."""
        made_for = self.recipe["name"]
        sizes = (len(dataset.train_labels), len(dataset.test_labels))
        expected = (self.recipe["train_images"], self.recipe["test_images"])
        if sizes != expected:
            raise TacitError(
                f"This split was made for '{made_for}' with {expected[0]} training and {expected[1]} test images, "
                f"but '{dataset.name}' has {sizes[0]} and {sizes[1]}. Use the data it was made for, or make a "
                "new split."
            )
        if self.fingerprint and dataset.fingerprint and self.fingerprint != dataset.fingerprint:
            raise TacitError(
                f"This split was made for other images or labels (data '{made_for}', fingerprint "
                f"{self.fingerprint}) than '{dataset.name}' has ({dataset.fingerprint}). Use the data it was "
                "made for, or make a new split."
            )


def make_split(dataset: Dataset, settings: Data, seed: int) -> Split:
    """Draw the split that the settings describe, or load the saved one that they name.

    A published split (`PUBLISHED`) is drawn as well: of it only the counts of the labelled client are known.
    """
    if settings.split and settings.split not in PUBLISHED:
        return _saved_split(dataset, settings)
    labels = np.asarray(dataset.train_labels)
    groups = dataset.train_groups
    generator = numpy_generator(seed, "split", "train")
    if settings.split:
        placed = place_published(labels, settings, generator)
    elif settings.partition == "sites":
        placed = placement.place_sites(labels, dataset.train_sites, dataset.sites, settings)
    else:
        placed = placement.place(labels, groups, settings, generator)
    test = np.arange(len(dataset.test_labels))
    if settings.test_subset:
        test_generator = numpy_generator(seed, "split", "test")
        test = placement.stratified(np.asarray(dataset.test_labels), settings.test_subset, test_generator)
    recipe = {
        **settings.model_dump(mode="json", exclude={"split"}),
        **({"published": settings.split} if settings.split else {}),
        "train_images": len(labels),
        "test_images": len(dataset.test_labels),
        "site_names": list(dataset.sites) if settings.partition == "sites" else [],
        **placed.record,
    }
    validation = _kept_back(placed, labels, groups, settings.validation, seed)
    server, clients = placed.server, placed.clients
    if validation:
        server = np.setdiff1d(server, validation[0])
        held = zip(clients, validation[1:], strict=True)
        clients = [(np.setdiff1d(one, kept), np.setdiff1d(other, kept)) for (one, other), kept in held]
    if settings.reveal == "all":
        clients = [placement.reveal(labels, labeled, unlabeled) for labeled, unlabeled in clients]
    parts = tuple(Part(_fixed(labeled), _fixed(unlabeled)) for labeled, unlabeled in clients)
    return Split(_fixed(server), parts, _fixed(test), recipe, seed, dataset.fingerprint, validation)


def _kept_back(
    placed: placement.Placed, labels: np.ndarray, groups: np.ndarray | None, share: float, seed: int
) -> tuple[np.ndarray, ...]:
    """What the server and each client keep back of their labelled images; nothing at all where none is asked for."""
    if not share:
        return ()
    kept = []
    for client, held in enumerate([placed.server, *(labeled for labeled, _ in placed.clients)], start=-1):
        own_groups = None if groups is None else groups[held]
        chosen = placement.keep_back(labels[held], own_groups, share, validation_generator(seed, client))
        kept.append(_fixed(held[chosen]))
    if not sum(map(len, kept)):
        raise TacitError(
            f"validation = {share:g} keeps no image back: the labelled parties hold too few labels for that. Write a "
            "larger share, or validation = 0."
        )
    return tuple(kept)


def validation_generator(seed: int, client: int) -> np.random.Generator:
    """The chance by which a party (-1: the server) chooses its validation images, the same at a real site."""
    return numpy_generator(seed, "split", "validation", client)


def _saved_split(dataset: Dataset, settings: Data) -> Split:
    """The named split, if it fits the data and says the same as what others read from the settings."""
    split = load_split(Path(settings.split))
    split.check_against(dataset)
    for key, asked in (("clients", settings.clients), ("placement", settings.placement)):
        if split.recipe[key] != asked:
            raise TacitError(
                f"The saved split {settings.split} has {key} = {split.recipe[key]}, but the experiment says "
                f"{key} = {asked}. Write {key} = {split.recipe[key]}, or use another split."
            )
    if split.recipe.get("validation", 0.0) != settings.validation:
        raise TacitError(
            f"The saved split {settings.split} keeps back {split.recipe.get('validation', 0.0):g} of the labels, but "
            f"the experiment says validation = {settings.validation:g}. Write the same, or use another split."
        )
    if settings.reveal == "all" and split.recipe["reveal"] != "all":
        labels = np.asarray(dataset.train_labels)
        clients = (placement.reveal(labels, part.labeled, part.unlabeled) for part in split.clients)
        parts = tuple(Part(_fixed(labeled), _fixed(unlabeled)) for labeled, unlabeled in clients)
        split = replace(split, clients=parts, recipe={**split.recipe, "reveal": "all"})
    return split


def load_split(path: Path) -> Split:
    """The split that `save` wrote; a file that is not one is named and not used."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TacitError(
            f"There is no readable split at {path} ({error.strerror}). Make one with `tacit split`, or fix the path."
        ) from error
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            indices, offsets = file["indices"].astype(np.int64), file["offsets"].astype(np.int64)
            metadata = json.loads(file["metadata"].item())
        if metadata["format"] != FORMAT:
            raise ValueError(f"its format is {metadata['format']!r}, expected {FORMAT!r}")
        recipe, seed, fingerprint = metadata["recipe"], int(metadata["seed"]), str(metadata["fingerprint"])
        train_images, test_images, clients = (int(recipe[key]) for key in ("train_images", "test_images", "clients"))
        lists = np.split(indices, offsets[1:-1])
        in_order = offsets[0] == 0 and offsets[-1] == len(indices) and (np.diff(offsets) >= 0).all()
        kept_back = clients + 1 if recipe.get("validation") else 0
        if len(lists) != 2 * clients + 2 + kept_back or not in_order:
            raise ValueError("its lists do not belong together")
        *train, test = lists[: 2 * clients + 2]
        validation = lists[2 * clients + 2 :]
        if not (_within(np.concatenate([*train, *validation]), train_images) and _within(test, test_images)):
            raise ValueError("it names images that do not exist")
    except Exception as error:  # there is no end to what the readers of a damaged zip can raise
        raise TacitError(
            f"{path} is damaged or is not a split of tacit ({error}). It was not used. "
            "Make it again with `tacit split`."
        ) from error
    parts = tuple(
        Part(_fixed(labeled), _fixed(unlabeled)) for labeled, unlabeled in zip(train[1::2], train[2::2], strict=True)
    )
    kept = tuple(_fixed(part) for part in validation)
    return Split(_fixed(train[0]), parts, _fixed(test), recipe, seed, fingerprint, kept)


def _lists(split: Split) -> list[np.ndarray]:
    """Server, then labelled and unlabelled of each client, then test, then validation: the order in the file."""
    return [
        split.server,
        *(one for part in split.clients for one in (part.labeled, part.unlabeled)),
        split.test,
        *split.validation,
    ]


def _within(indices: np.ndarray, count: int) -> bool:
    return bool(indices.min(initial=0) >= 0 and indices.max(initial=-1) < count)


def _fixed(indices: np.ndarray) -> np.ndarray:
    """An int64 copy that nobody can write to."""
    fixed = np.array(indices, dtype=np.int64)
    fixed.setflags(write=False)
    return fixed


# --- What a split means -----------------------------------------------------------------------------------


def class_table(split: Split, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Labelled and unlabelled images by party (the server first, then the clients) and class.

    Images without a known label are in no column.
    """

    def counts(indices: np.ndarray) -> np.ndarray:
        return np.bincount(labels[indices] + 1, minlength=classes + 1)[1:]

    labeled = np.stack([counts(split.server), *(counts(part.labeled) for part in split.clients)])
    unlabeled = np.stack([np.zeros(classes, np.int64), *(counts(part.unlabeled) for part in split.clients)])
    return labeled, unlabeled


def title(split: Split) -> str:
    """One line that says how the split was made."""
    recipe = split.recipe
    skew = {"shards": f" {recipe['shards']}", "iid": "", "sites": ""}.get(recipe["partition"], f" {recipe['alpha']:g}")
    holders = {
        "server": f"{len(split.server)} labels at the server",
        "clients": f"{sum(len(part.labeled) for part in split.clients)} labels at the clients",
        "some-clients": f"{sum(len(part.labeled) > 0 for part in split.clients)} labelled",
    }
    labels = "all labels revealed" if recipe["reveal"] == "all" else holders[recipe["placement"]]
    name = Path(recipe["name"]).name if Path(recipe["name"]).is_absolute() else recipe["name"]
    how = f"{recipe['published']}, the rest " if "published" in recipe else ""
    return f"{name}: {how}{recipe['partition']}{skew}, {len(split.clients)} clients, {labels}, seed {split.seed}"


def party_names(split: Split) -> list[str]:
    """The clients: sites by their own names, others by number."""
    return split.recipe.get("site_names") or [f"client {number}" for number in range(len(split.clients))]


class Ceiling(NamedTuple):
    """What no method can exceed on this split."""

    missing: tuple[int, ...]  # the classes that no labelled party holds
    accuracy: float  # the share of the test images in use that are of the other classes


def ceiling(split: Split, dataset: Dataset) -> Ceiling:
    """The classes without any label, and the best accuracy that is then possible."""
    labeled, _ = class_table(split, np.asarray(dataset.train_labels), len(dataset.classes))
    missing = np.flatnonzero(labeled.sum(axis=0) == 0)
    tested = np.asarray(dataset.test_labels)[split.test]
    reachable = ~np.isin(tested, missing)
    return Ceiling(tuple(missing.tolist()), float(reachable.mean()) if len(tested) else 0.0)


def warnings(split: Split, dataset: Dataset) -> list[str]:
    """What one should know about this split before a run, in plain sentences; often nothing."""
    found = []
    classes = len(dataset.classes)
    labeled, _ = class_table(split, np.asarray(dataset.train_labels), classes)
    labels_by_class = labeled.sum(axis=0)
    missing, best = ceiling(split, dataset)
    if missing:
        kind, them = ("classes", "them") if len(missing) > 1 else ("class", "it")
        found.append(
            f"No labelled party holds the {kind} {_names(missing, dataset)}. No method can learn {them}: "
            f"accuracy cannot exceed {100 * best:.1f} %."
        )
    found += _few_labels(split, dataset, labels_by_class)
    untested = np.setdiff1d(np.arange(classes), np.asarray(dataset.test_labels)[split.test])
    if len(untested):
        found.append(f"No test image in use shows {_names(untested, dataset)}.")
    sizes = np.array([len(np.union1d(part.labeled, part.unlabeled)) for part in split.clients])
    small = np.flatnonzero(sizes < FEW_IMAGES)
    if len(small):
        found.append(
            f"{len(small)} of {len(sizes)} clients hold fewer than {FEW_IMAGES} images (the smallest, client "
            f"{sizes.argmin()}, holds {sizes.min()})."
        )
    if split.recipe["placement"] == "clients":
        without = sum(len(part.labeled) == 0 for part in split.clients)
        if without:
            found.append(f"{without} of {len(sizes)} clients hold no labelled image.")
    found += group_warnings(dataset)
    if split.recipe["placement"] != "some-clients" and split.recipe["reveal"] == "none":
        short = split.recipe["labels"] - int(labels_by_class.sum()) - sum(map(len, split.validation))
        if short > 0 and split.recipe["partition"] != "sites":
            found.append(
                f"The labelled pool is {short} images short of {split.recipe['labels']}: no whole group fitted "
                "into what was still wanted."
            )
    return found


def _few_labels(split: Split, dataset: Dataset, labels_by_class: np.ndarray) -> list[str]:
    """Classes with hardly a label: of own data always told, of a known set where chance made it so."""
    own = bool(split.recipe.get("sites")) or split.recipe.get("name", next(iter(SOURCES))) not in SOURCES
    enough = FEW_OWN_LABELS if own else FEW_LABELS
    few = np.flatnonzero((labels_by_class > 0) & (labels_by_class < enough))
    if len(few) and own:
        return [
            f"Fewer than {enough} labels in all for {_names(few, dataset)}: such a class is learned, and judged, from "
            "very little. Label more of it first if it matters (`tacit advise` says which images)."
        ]
    if len(few) and split.recipe["placement"] == "some-clients":
        return [
            f"Fewer than {enough} labels in all for {_names(few, dataset)}. `cover = n` draws again until each class "
            "has n."
        ]
    return []


def _names(which: tuple[int, ...] | np.ndarray, dataset: Dataset) -> str:
    """The classes by name, at most a dozen."""
    names = [f"'{safe(dataset.classes[label], 60)}'" for label in which[:12]]
    more = f" and {len(which) - 12} more" if len(which) > 12 else ""
    return ", ".join(names) + more
