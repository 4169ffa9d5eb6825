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
from tacit.core.seeds import numpy_generator
from tacit.data.arrays import hold_out, mean_and_std
from tacit.data.folder_report import FolderReport, Item
from tacit.data.images import open_image, pixels
from tacit.data.own import HELD_OUT, decoded, inspect_folder, inspect_table
from tacit.data.readers import read_npz

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
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise TacitError(
            f"{path} does not tell the facts of a federation ({type(error).__name__}: {error}). Expected classes, "
            "channels, size, mean, std and optionally mirror."
        ) from error
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

    def without_labels(self) -> "PartyData":
        return dataclasses.replace(self, labels=np.full(len(self.labels), -1, np.int64))


def look(path: Path) -> FolderReport:
    """What lies in a party's folder or table; unreadable files and files that are no images are errors."""
    if path.is_dir() and (path / TABLE).is_file():
        report = inspect_table(path / TABLE)
    elif path.is_dir():
        report = inspect_folder(path)
        if not report.items and not report.unreadable:  # images that lie loose: a party without labels
            report.items = [Item(file) for file in report.stray]
            report.stray = []
            for item in report.items:
                image = open_image(item.path)
                report.sizes[image.size] += 1
                report.grey, report.colour = report.grey + (image.mode == "L"), report.colour + (image.mode != "L")
    elif path.suffix.lower() in (".csv", ".parquet"):
        report = inspect_table(path)
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


def load_party(path: Path, facts: Facts) -> PartyData:
    """The images of a party at the size, with the channels and with the class numbers of its federation."""
    if path.suffix.lower() == ".npz":
        return _npz(path, facts)
    report = look(path)
    items = report.items
    check_images(len(items), facts.channels, facts.size)
    numbers = _numbers(report.classes, facts, path)
    labels = np.array([numbers[item.label] if item.label else -1 for item in items], np.int64)
    test = np.array([item.part == "test" for item in items], bool)
    parts = [[item for item, is_test in zip(items, test, strict=True) if is_test == wanted] for wanted in (False, True)]
    images, test_images = (decoded(part, facts.size, facts.channels == 1) for part in parts)
    return PartyData(images, labels[~test], test_images, labels[test])


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
    return PartyData(parts[0], to_number[arrays.train_labels], parts[1], to_number[arrays.test_labels])


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
    bare = Facts(tuple(report.classes), 1 if report.colour == 0 else 3, image_size or report.size, (), ())
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

    With the labels at the server a fifth of each class is held out, seeded; else all labelled images are for testing.
    """
    labeled = np.flatnonzero(party.labels >= 0)
    if not labels_at_server:
        return labeled[:0], labeled
    test = hold_out(party.labels[labeled], None, HELD_OUT, numpy_generator("own data", "test set"))
    return labeled[~test], labeled[test]
