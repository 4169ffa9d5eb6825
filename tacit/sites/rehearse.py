"""A simulated split as folders, one for each party: what a federation would look like if each had its own machine.

A run over these folders ends with the very model of the simulation they were written from.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from tacit.core.errors import TacitError
from tacit.core.payload import write_atomically
from tacit.core.text import csv_text
from tacit.data.party import FACTS, TABLE, Facts
from tacit.runs.plan import Plan

Row = tuple[str, str, str]  # path, label, split


def write_parties(plan: Plan, folder: Path) -> list[Path]:
    """`server` and `site-0`, `site-1` … under this folder: images as PNG, and a table of their order and labels."""
    if folder.exists() and any(folder.iterdir()):
        raise TacitError(f"{folder} is not empty. Choose a new folder with --out.")
    if plan.experiment.data.reveal == "all":
        raise TacitError("data.reveal = 'all' gives labels that nobody has: it cannot be written out as parties.")
    dataset, split = plan.dataset, plan.split
    written = []
    for number, part in enumerate(split.clients):
        labeled = np.union1d(part.labeled, split.kept_back(number))  # it chooses what to keep back by itself
        known = set(labeled.tolist())
        rows = [(index, index in known) for index in np.union1d(labeled, part.unlabeled).tolist()]
        written.append(_write(folder / f"site-{number}", plan, [(index, known, "train") for index, known in rows]))
    server = [(index, True, "train") for index in np.union1d(split.server, split.kept_back(-1)).tolist()]
    written.insert(
        0, _write(folder / "server", plan, [*server, *((index, True, "test") for index in split.test.tolist())])
    )
    facts = Facts(dataset.classes, dataset.channels, dataset.size, dataset.mean, dataset.std, dataset.mirror)
    facts.save(folder / "server" / FACTS)
    return written


def _write(folder: Path, plan: Plan, rows: list[tuple[int, bool, str]]) -> Path:
    (folder / "images").mkdir(parents=True)
    table = [("path", "label", "split")]
    for index, known, part in rows:
        test = part == "test"
        images, labels = (
            (plan.dataset.test_images, plan.dataset.test_labels)
            if test
            else (plan.dataset.train_images, plan.dataset.train_labels)
        )
        path = f"images/{part}-{index:06d}.png"
        image = images[index]
        Image.fromarray(image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))).save(
            folder / path
        )
        table.append((path, plan.dataset.classes[labels[index]] if known else "", part))
    write_atomically(folder / TABLE, csv_text(table).encode())
    return folder
