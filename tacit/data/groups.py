"""Images that belong together (one patient, one lesion, one picture saved twice): who does, how we know, what is held
out.

Groups come from a column or array of the user's, from names (`group_names`) and from pictures that look the same
(`near_duplicates`). What belongs together by any of them, or is equal pixel for pixel, is one group.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from tacit.core.errors import TacitError
from tacit.core.seeds import numpy_generator
from tacit.core.text import safe
from tacit.data.arrays import hold_out, joined_groups
from tacit.data.dataset import Dataset
from tacit.data.group_names import groups_by_name
from tacit.data.near_duplicates import near_duplicates

HELD_OUT = 0.2
NO_GROUPS = "no groups are known"
WITHOUT_GROUPS = (
    "No groups are known: images of one patient (one lesion, one animal) may be both trained and tested on, and the "
    "figures may then flatter. Give a group column (docs/data.md), if one person or thing has several images."
)
REFUSE_GUESS = 'groups = "given" under [data]'


class Image(Protocol):
    """What is known about one image (`folder_report.Item`)."""

    @property
    def path(self) -> Path: ...
    @property
    def label(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def array(self) -> np.ndarray | None: ...
    @property
    def twin(self) -> bytes: ...
    @property
    def glance(self) -> bytes: ...


@dataclass(frozen=True)
class Groups:
    """Which images belong together, and how that is known."""

    numbers: np.ndarray  # int64 [N]: equal for images that belong together; also those with equal pixels
    given: np.ndarray  # [N] names of groups by the user; images without one have a name of their own
    how: tuple[str, ...] = ()  # what was found, in words: counts only
    examples: tuple[str, ...] = ()  # the same, with names of files: for the screen
    by_pixels_only: bool = True  # nothing but equal pixels joins images
    identities: bool = False  # a column or names tell who is who; a picture saved twice does not

    @property
    def remarks(self) -> list[str]:
        return [*self.how, *([] if self.identities else [NO_GROUPS])]


def find(items: Sequence[Image], guess: bool = True) -> Groups:
    """The groups of somebody's images; without `guess` only those that were given, and equal pixels."""
    given = _alone(tuple(item.group for item in items))
    kinds, how, examples = [given], [], []
    if number := sum(bool(item.group) for item in items):
        how.append(f"groups are given for {number:,} images: {len({item.group for item in items if item.group}):,}")
    names, looks = _by_names(items) if guess else given[:0], given[:0]
    if guess:
        looks = near_duplicates([item.glance for item in items])
    for kind, why in ((names, "by their names"), (looks, "by their looks (near-duplicates)")):
        members = _members(kind)
        if members:
            kinds.append(kind)
            images = sum(len(places) for places in members)
            how.append(f"{images:,} images belong together in {len(members):,} groups {why}")
            shown = "; ".join(" = ".join(_short(items[place].path) for place in places[:3]) for places in members[:3])
            more = "; …" * (len(members) > 3)
            examples.append(f"taken as one group each, {why}: {shown}{more}. If that is wrong, write {REFUSE_GUESS}")
    numbers = joined_groups(None, np.array([item.twin.hex() or f"\0{n}" for n, item in enumerate(items)]))
    for kind in kinds:
        numbers = joined_groups(kind, numbers)
    by_name = bool(len(names)) and bool(_members(names))
    return Groups(numbers, given, tuple(how), tuple(examples), not how, bool(number) or by_name)


def _by_names(items: Sequence[Image]) -> np.ndarray:
    """Names of groups by the names of files; what lies in an array has none."""
    files = [place for place, item in enumerate(items) if item.array is None]
    found = [""] * len(items)
    names = groups_by_name([items[place].path for place in files], [items[place].label for place in files])
    for place, name in zip(files, names, strict=True):
        found[place] = name
    return _alone(found)


def _alone(names: Sequence[str]) -> np.ndarray:
    """An image without a group is a group of its own."""
    return np.array([name or f"\0{number}" for number, name in enumerate(names)], dtype=object).astype(str)


def _members(kind: np.ndarray) -> list[list[int]]:
    """The places of each group of several images, in the order of their first ones."""
    held: dict[str | int, list[int]] = {}
    for place, name in enumerate(kind.tolist()):
        held.setdefault(name, []).append(place)
    return [places for places in held.values() if len(places) > 1]


def _short(path: Path) -> str:
    return safe(f"{path.parent.name}/{path.name}", 60)


@dataclass(frozen=True)
class Parts:
    """Which images are trained on, which tested with, and which are left out."""

    test: np.ndarray  # bool [N]
    left_out: np.ndarray  # bool [N]: unlabelled, of a group that is tested with

    @property
    def remarks(self) -> list[str]:
        number = int(self.left_out.sum())
        return [f"unlabelled images of groups that are tested with are left out ({number:,})"] if number else []


def held_out(labels: np.ndarray, groups: np.ndarray) -> Parts:
    """A fifth of each class, by whole groups: the same images whatever the experiment's seed, so that all runs are
    measured on the same test set.

    An unlabelled image of a tested group would be learned from, too (its pseudo-label is nearly a label of the tested
    one), so it is left out. A class keeps at least one labelled image to learn from.

    >>> labels = np.array([0, 0, -1, 1, 1, -1])
    >>> parts = held_out(labels, np.array([0, 1, 0, 2, 3, 2]))
    >>> bool((labels[parts.test] >= 0).all()), bool((labels[parts.left_out] == -1).all()), int(parts.test.sum())
    (True, True, 2)
    """
    labeled = np.flatnonzero(labels >= 0)
    test = np.zeros(len(labels), bool)
    test[labeled] = hold_out(labels[labeled], groups[labeled], HELD_OUT, numpy_generator("own data", "test set"))
    for label in np.unique(labels[labeled]).tolist():  # a group of several classes may have taken one's last images
        own = labels == label
        if not (own & ~test).any():
            test &= ~np.isin(groups, groups[own])
    return Parts(test, ~test & np.isin(groups, groups[test]) & (labels < 0))


def check_given(given: np.ndarray, test: np.ndarray, where: str) -> None:
    """Refuse groups by the user that lie in both parts of a split by the user."""
    both = np.intersect1d(given[~test], given[test])
    if len(both):
        raise TacitError(
            f"{where}: {len(both)} groups (images of one lesion, one patient, …) lie in both the training and "
            "the test set, so the test would be too easy. Put each group wholly into one of them."
        )


def shared(numbers: np.ndarray, test: np.ndarray) -> int:
    """How many test images have a training image in their group.

    >>> shared(np.array([0, 1, 1, 1, 2]), np.array([False, False, True, True, True]))
    2
    """
    return int((test & np.isin(numbers, numbers[~test])).sum())


def shared_sentence(number: int, of: int) -> str:
    return (
        f"{number:,} of {of:,} test images are of a group that is trained on, too (by names or looks): the figures "
        "flatter. Put each patient, lesion or picture wholly into one part."
    )


def group_warnings(dataset: Dataset) -> list[str]:
    """What the groups of own data, or that there are none, mean for the figures."""
    found = []
    train, test = dataset.train_groups, dataset.test_groups
    number = 0 if train is None or test is None else int(np.isin(test, train).sum())
    if number:
        found.append(shared_sentence(number, len(dataset.test_labels)))
    if NO_GROUPS in dataset.note:
        found.append(WITHOUT_GROUPS)
    return found


def halves(groups: np.ndarray | None, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Two sets of places, none with an image of a group that the other has, as nearly equal as groups allow.

    >>> [half.tolist() for half in halves(None, 5)], [half.tolist() for half in halves(np.array([7, 7, 7, 8, 9]), 5)]
    ([[0, 2, 4], [1, 3]], [[0, 1, 2], [3, 4]])
    """
    places = np.arange(number)
    if groups is None:
        return places[::2], places[1::2]
    sizes = Counter(groups.tolist())
    first: set[int] = set()
    balance = 0  # images more in the first half
    for group, size in sorted(sizes.items(), key=lambda pair: -pair[1]):
        if balance <= 0:
            first.add(group)
        balance += size if group in first else -size
    mine = np.isin(groups, list(first))
    return places[mine], places[~mine]
