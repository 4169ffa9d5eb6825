"""The images of one real party: its own folder, table or .npz; labelled, unlabelled or both.

Unlike a data set for simulations, a party's data needs no test set and may lack classes: what the classes are, and
the size of the images, are facts that all parties of a federation share.
"""

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tomli_w
from PIL import Image

from tacit.core.errors import TacitError
from tacit.core.memory_bounds import check_images
from tacit.core.payload import write_atomically
from tacit.data.arrays import mean_and_std
from tacit.data.folder_report import FolderReport
from tacit.data.groups import NO_GROUPS, held_out
from tacit.data.images import pixels
from tacit.data.own import decoded, inspect_folder
from tacit.data.readers import read_npz
from tacit.data.tables import TABLES

TABLE = "images.csv"  # in a folder: the images, their order and their labels
FACTS = "facts.toml"


@dataclass(frozen=True)
class Facts:
    """What all parties of a federation agree on before they start."""

    classes: tuple[str, ...]
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    mirror: bool = True
    depth: int = 16  # bits that are used of 16-bit files

    def save(self, path: Path) -> None:
        write_atomically(path, tomli_w.dumps(dataclasses.asdict(self)).encode())


def read_facts(path: Path) -> Facts:
    """The facts in a file; what is missing or odd is named."""
    try:
        given = tomllib.loads(path.read_text())
        facts = Facts(
            classes=tuple(str(name) for name in given["classes"]),
            channels=int(given["channels"]),
            size=int(given["size"]),
            mean=tuple(float(value) for value in given["mean"]),
            std=tuple(float(value) for value in given["std"]),
            mirror=bool(given.get("mirror", True)),
            depth=int(given.get("depth", 16)),
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise TacitError(
            f"{path} does not tell the facts of a federation ({type(error).__name__}: {error}). Expected classes, "
            "channels, size, mean, std and optionally mirror and depth."
        ) from error
    if facts.depth not in range(8, 17):
        raise TacitError(f"{path}: depth is {facts.depth}. Expected the bits that 16-bit files use, from 8 to 16.")
    if len(facts.mean) != facts.channels or len(facts.std) != facts.channels or len(facts.classes) < 2:
        raise TacitError(f"{path}: mean and std need one number for each channel, and there must be two classes.")
    return facts


@dataclass(frozen=True, eq=False)
class PartyData:
    """Images in the order in which they were found; the label is -1 where the party has none."""

    images: np.ndarray  # uint8 [N, C, S, S]
    labels: np.ndarray  # int64 [N]
    test_images: np.ndarray
    test_labels: np.ndarray
    groups: np.ndarray | None = None  # int64 [N]: equal for images that belong together; None: each stands alone
    test_groups: np.ndarray | None = None
    about_groups: str = NO_GROUPS  # how that is known, in words

    @property
    def known_groups(self) -> np.ndarray | None:
        """The groups, where anything is known of them."""
        return None if self.about_groups == NO_GROUPS else self.groups

    def without_labels(self) -> "PartyData":
        return dataclasses.replace(self, labels=np.full(len(self.labels), -1, np.int64))

    def without_small_classes(self, least: int) -> tuple["PartyData", list[int]]:
        """Without the labelled images of classes that have fewer than so many; and which classes these are.

        >>> party = PartyData(np.zeros((4, 1, 8, 8)), np.array([0, 0, 1, -1]), np.zeros(0), np.zeros(0))
        >>> kept, small = party.without_small_classes(2)
        >>> kept.labels.tolist(), small
        ([0, 0, -1], [1])
        """
        counts = np.bincount(self.labels[self.labels >= 0]) if (self.labels >= 0).any() else np.zeros(0, np.int64)
        small = [int(number) for number in np.flatnonzero((counts > 0) & (counts < least))]
        if not small:
            return self, []
        stay = ~np.isin(self.labels, small)
        groups = None if self.groups is None else self.groups[stay]
        return dataclasses.replace(self, images=self.images[stay], labels=self.labels[stay], groups=groups), small


def look(path: Path) -> FolderReport:
    """What lies in a party's folder or table; unreadable files and files that are no images are errors."""
    if path.is_dir() and (path / TABLE).is_file():
        report = inspect_folder(path / TABLE)
    elif path.is_dir() or path.suffix.lower() in TABLES:
        report = inspect_folder(path)
    else:
        raise TacitError(
            f"{path} is no data of a party. Expected a folder with one folder of images for each class (and "
            f"`unlabeled`), a folder with {TABLE}, a table with the columns path and label, or an .npz."
        )
    faults = [fault for fault in report.bad if not fault.startswith("empty classes")]
    if faults or not report.items:
        listed = "\n".join(f"  ✗ {fault}" for fault in faults or ["there is no image in it"])
        raise TacitError(f"{path} cannot be used as it is:\n{listed}\nMend what is marked ✗ first.")
    return report


def load_party(path: Path, facts: Facts, guess_groups: bool = True) -> PartyData:
    """The images of a party at the size, with the channels and with the class numbers of its federation."""
    if path.suffix.lower() == ".npz":
        return _npz(path, facts)
    report = dataclasses.replace(look(path), guess_groups=guess_groups)
    items = report.items
    _check_depth(report, facts, path)
    check_images(len(items), facts.channels, facts.size)
    known = _numbers(report.classes, facts, path)
    labels = np.array([known[item.label] if item.label else -1 for item in items], np.int64)
    test = np.array([item.part == "test" for item in items], bool)
    parts = [[item for item, is_test in zip(items, test, strict=True) if is_test == wanted] for wanted in (False, True)]
    images, test_images = (decoded(part, facts.size, facts.channels == 1, facts.depth) for part in parts)
    groups = report.groups
    numbered = groups.numbers[~test], groups.numbers[test]
    return PartyData(images, labels[~test], test_images, labels[test], *numbered, "; ".join(groups.remarks))


def _check_depth(report: FolderReport, facts: Facts, path: Path) -> None:
    """16-bit files that would become nearly black, or white, by what the federation agreed on."""
    bits = max(report.deep, default=facts.depth)
    if bits > facts.depth or bits + 4 <= facts.depth:
        raise TacitError(
            f"{path}: its 16-bit files use {bits} bits, but this federation takes {facts.depth} (the pictures would be "
            f"nearly {'white' if bits > facts.depth else 'black'}). Write depth = {bits} into the server's {FACTS} if "
            "that holds for all sites, or save the images with eight bits."
        )


def _numbers(names: Sequence[str], facts: Facts, path: Path) -> dict[str, int]:
    unknown = [name for name in names if name not in facts.classes]
    if unknown:
        raise TacitError(
            f"{path} has the classes {', '.join(unknown[:5])}, which this federation does not know. It knows: "
            f"{', '.join(facts.classes)}. Rename the folders (or labels), or put the images under `unlabeled`."
        )
    return {name: facts.classes.index(name) for name in names}


def _fitted(images: np.ndarray, facts: Facts) -> np.ndarray:
    """Arrays by the rule that files follow; those of the right size stay as they are."""
    check_images(len(images), facts.channels, facts.size)
    result = np.empty((len(images), facts.channels, facts.size, facts.size), np.uint8)
    for place, image in enumerate(images):
        picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
        result[place] = pixels(picture, facts.size, grey=facts.channels == 1)
    return result


def _npz(path: Path, facts: Facts) -> PartyData:
    arrays = read_npz(path)
    numbers = list(range(len(facts.classes)))
    if arrays.classes:
        by_name = _numbers(arrays.classes, facts, path)
        numbers = [by_name[name] for name in arrays.classes]
    highest = int(max(arrays.train_labels.max(initial=-1), arrays.test_labels.max(initial=-1)))
    if highest >= len(numbers):
        raise TacitError(f"{path} has the label {highest}, but this federation has {len(numbers)} classes (from 0).")
    to_number = np.array([*numbers, -1], np.int64)  # the label -1 stays -1
    if arrays.train_images.shape[1] > facts.channels:
        raise TacitError(f"{path} holds colour images, but this federation works on grey ones.")
    parts = [_fitted(images, facts) for images in (arrays.train_images, arrays.test_images)]
    labels = to_number[arrays.train_labels], to_number[arrays.test_labels]
    about = NO_GROUPS if arrays.train_groups is None else "groups are given"
    return PartyData(parts[0], labels[0], parts[1], labels[1], arrays.train_groups, arrays.test_groups, about)


def facts_of(path: Path, image_size: int = 0) -> Facts:
    """The facts that the server's own images tell: used where it has no file of facts."""
    if path.is_dir() and (path / FACTS).is_file():
        return read_facts(path / FACTS)
    if path.suffix.lower() == ".npz":
        arrays = read_npz(path)
        names = arrays.classes or tuple(str(label) for label in range(int(arrays.train_labels.max(initial=0)) + 1))
        mean, std = mean_and_std(arrays.train_images)
        return Facts(names, arrays.train_images.shape[1], image_size or arrays.train_images.shape[2], mean, std)
    report = look(path)
    if len(report.classes) < 2:
        raise TacitError(
            f"{path} shows {len(report.classes)} classes, so the federation's classes are not known. Put at least one "
            f"labelled image of each class there, or a file {FACTS} (classes, channels, size, mean, std)."
        )
    bare = Facts(
        tuple(report.classes), 1 if report.colour == 0 else 3, image_size or report.size, (), (), depth=report.depth
    )
    party = load_party(path, bare)
    mean, std = mean_and_std(party.images if len(party.images) else party.test_images)
    return dataclasses.replace(bare, mean=mean, std=std)


def coloured(facts: Facts, rgb: bool) -> Facts:
    """The facts of grey images that become coloured ones, where that is asked for.

    >>> coloured(Facts(("a", "b"), 1, 32, (0.5,), (0.25,)), True).mean
    (0.5, 0.5, 0.5)
    """
    if not rgb or facts.channels == 3:
        return facts
    return dataclasses.replace(facts, channels=3, mean=facts.mean * 3, std=facts.std * 3)


def server_parts(party: PartyData, labels_at_server: bool) -> tuple[np.ndarray, np.ndarray]:
    """Which of the server's own images it trains on and which it tests with, where it has no test set of its own.

    With the labels at the server a fifth of each class is held out by whole groups, seeded; else all labelled images
    are for testing.
    """
    labeled = np.flatnonzero(party.labels >= 0)
    if not labels_at_server:
        return labeled[:0], labeled
    groups = np.arange(len(party.labels)) if party.groups is None else party.groups
    test = held_out(party.labels[labeled], groups[labeled]).test
    return labeled[~test], labeled[test]
