"""ISIC 2018, task 3 (HAM10000): photographs of skin lesions, from the challenge's official files.

Several photographs may show one lesion, so the split into training and test is by lesion.
"""

import csv
import io
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


def read_isic(images: Path, truth: Path, groupings: Path, progress: Progress = silent) -> Arrays:
    """Squash every photograph to 32×32 (bicubic, both sides), then hold out 20 % of each class by lesion.

    `images` is the zip or the folder of .jpg files; `truth` the CSV (or the zip that holds it) with one column
    of 0.0/1.0 for each class; `groupings` the CSV with the columns image and lesion_id.
    """
    label_of = _labels(truth)
    lesion_of = {row["image"]: row["lesion_id"] for row in _rows(groupings, ("image", "lesion_id"))}
    small: dict[str, np.ndarray] = {}
    for name, content in members(images, lambda name: name.lower().endswith(".jpg")):
        image_id = Path(name).stem
        if image_id in label_of:
            with naming(f"{images} ({name})"), Image.open(io.BytesIO(content)) as photograph:
                squashed = photograph.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BICUBIC)
                small[image_id] = np.asarray(squashed).transpose(2, 0, 1)
            progress("shrinking photographs", len(small), len(label_of))
    for what, known in (("photograph", small), ("lesion id", lesion_of)):
        missing = [image_id for image_id in label_of if image_id not in known]
        if missing:
            place = images if known is small else groupings
            raise TacitError(
                f"{place} is not complete: no {what} for {len(missing)} of {len(label_of)} images "
                f"(the first is {missing[0]}). Delete it and get it again."
            )
    order = sorted(label_of)
    pixels = np.stack([small[image_id] for image_id in order])
    labels = np.array([label_of[image_id] for image_id in order], np.int64)
    lesions = np.array([lesion_of[image_id] for image_id in order])
    test = hold_out(labels, lesions, 0.2, numpy_generator("isic2018", "split"))
    groups = number_groups(lesions[~test], lesions[test])
    note = "split by lesion, seeded: 20 % of each class's lesions are the test set; squashed to 32×32"
    return Arrays(pixels[~test], labels[~test], pixels[test], labels[test], CLASSES, *groups, note=note)


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
