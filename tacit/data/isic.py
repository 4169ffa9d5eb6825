"""ISIC 2018, task 3 (HAM10000): photographs of skin lesions, from the challenge's official files.

Several photographs may show one lesion, so the split into training and test is by lesion.
"""

import csv
import io
from collections.abc import Collection
from pathlib import Path

import numpy as np
from PIL import Image

from tacit.core.errors import TacitError
from tacit.core.seeds import numpy_generator
from tacit.data.archives import members, naming
from tacit.data.arrays import Arrays, hold_out, number_groups
from tacit.data.download import Progress, silent

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
SIZE = 32


def read_isic(images: Path, truth: Path, groupings: Path, progress: Progress = silent, size: int = SIZE) -> Arrays:
    """Squash every photograph to a square of `size` pixels (bicubic, both sides); 20 % of each class are held out by
    lesion, the same ones whatever the size.

    `images` is the zip or the folder of .jpg files; `truth` the CSV (or the zip that holds it) with one column
    of 0.0/1.0 for each class; `groupings` the CSV with the columns image and lesion_id.
    """
    label_of = _labels(truth)
    lesion_of = {row["image"]: row["lesion_id"] for row in _rows(groupings, ("image", "lesion_id"))}
    _complete(groupings, "lesion id", label_of, lesion_of)
    order = sorted(label_of)
    labels = np.array([label_of[image_id] for image_id in order], np.int64)
    lesions = np.array([lesion_of[image_id] for image_id in order])
    test = hold_out(labels, lesions, 0.2, numpy_generator("isic2018", "split"))
    place = {image_id: int(number) for part in (~test, test) for number, image_id in enumerate(np.array(order)[part])}
    held_out = set(np.array(order)[test])
    pixels = {held: np.empty((int((test == held).sum()), 3, size, size), np.uint8) for held in (False, True)}
    read: set[str] = set()
    for name, content in members(images, lambda name: name.lower().endswith(".jpg")):
        image_id = Path(name).stem
        if image_id in label_of:
            with naming(f"{images} ({name})"), Image.open(io.BytesIO(content)) as photograph:
                squashed = photograph.convert("RGB").resize((size, size), Image.Resampling.BICUBIC)
                pixels[image_id in held_out][place[image_id]] = np.asarray(squashed).transpose(2, 0, 1)
            read.add(image_id)
            progress("shrinking photographs", len(read), len(label_of))
    _complete(images, "photograph", label_of, read)
    groups = number_groups(lesions[~test], lesions[test])
    note = f"split by lesion, seeded: 20 % of each class's lesions are the test set; squashed to {size}×{size}"
    return Arrays(pixels[False], labels[~test], pixels[True], labels[test], CLASSES, *groups, note=note)


def _complete(place: Path, what: str, wanted: Collection[str], there: Collection[str]) -> None:
    missing = [image_id for image_id in wanted if image_id not in there]
    if missing:
        raise TacitError(
            f"{place} is not complete: no {what} for {len(missing)} of {len(wanted)} images "
            f"(the first is {missing[0]}). Delete it and get it again."
        )


def _labels(truth: Path) -> dict[str, int]:
    labels = {}
    for row in _rows(truth, ("image", *(name.upper() for name in CLASSES))):
        marked = [i for i, name in enumerate(CLASSES) if row[name.upper()] in ("1", "1.0")]
        if len(marked) != 1:
            raise TacitError(f"{truth}: {row['image']} has {len(marked)} diagnoses, expected one.")
        labels[row["image"]] = marked[0]
    if not labels:
        raise TacitError(f"{truth} names no image. Delete it and get it again.")
    return labels


def _rows(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    with naming(path):
        if path.suffix == ".csv" and path.is_file():
            content = path.read_bytes()
        else:
            tables = [content for _, content in members(path, lambda name: name.endswith("GroundTruth.csv"))]
            if len(tables) != 1:
                raise ValueError(f"{len(tables)} tables *GroundTruth.csv in it, expected one")
            content = tables[0]
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"))))
        missing = [column for column in columns if rows and column not in rows[0]]
        if missing:
            raise ValueError(f"no column {', '.join(missing)}")
        return rows
