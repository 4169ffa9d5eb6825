"""The split of a run and the pictures in its folder."""

import base64
import hashlib
import io
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tacit.core.errors import TacitError
from tacit.data.dataset import Dataset
from tacit.data.draw import rows_of
from tacit.data.sources import load
from tacit.data.split import Split, load_split, title

MOST_PARTIES = 100  # rows of a split; beyond, a row is the mean of several clients
MOST_PICTURES, LONGEST_SIDE = 12, 1200
NOT_SEARCHED = ("kept", "checkpoint")


def read_split(path: Path) -> dict[str, Any]:
    """Who held what, by class; without the data set only how much each party held."""
    split = load_split(path)
    recipe = split.recipe
    found: dict[str, Any] = {
        "title": title(split),
        "id": hashlib.sha256(path.read_bytes()).hexdigest()[:12],
        "clients": len(split.clients),
        "test": len(split.test),
    }
    size = int(recipe.get("image_size", 0))
    try:
        dataset = _labels_of(
            str(recipe["name"]), bool(recipe.get("skip_unreadable")), size, recipe.get("groups", "found")
        )
        split.check_against(dataset)
    except TacitError as error:
        return {**found, **_totals(split), "classes": [], "note": f"Classes are not shown. {error}"}
    rows = rows_of(split, dataset, MOST_PARTIES)
    note = f"A row is the mean of {rows.merged} clients." if rows.merged > 1 else ""
    return {
        **found,
        "classes": list(dataset.classes),
        "columns": [*dataset.classes, *(["(unknown)"] if rows.unknown else [])],
        "rows": rows.names,
        "labeled": _plain(rows.labeled),
        "unlabeled": _plain(rows.unlabeled),
        "note": note,
    }


@lru_cache(maxsize=4)
def _labels_of(name: str, skip_unreadable: bool, image_size: int, groups: str) -> Dataset:
    """The data set as it lies here; nothing is fetched for a report."""
    guess = groups == "found"
    return load(name, fetch=False, skip_unreadable=skip_unreadable, image_size=image_size, guess_groups=guess)


def _totals(split: Split) -> dict[str, Any]:
    clients = split.clients[:MOST_PARTIES]
    names = [f"client {number}" for number in range(len(clients))]
    labeled = [[len(part.labeled)] for part in clients]
    unlabeled = [[len(part.unlabeled)] for part in clients]
    if len(split.server):
        names, labeled, unlabeled = ["server", *names], [[len(split.server)], *labeled], [[0], *unlabeled]
    return {"columns": ["all classes"], "rows": names, "labeled": labeled, "unlabeled": unlabeled}


def _plain(table: np.ndarray) -> list[list[float | int]]:
    return [[int(v) if float(v).is_integer() else round(float(v), 1) for v in row] for row in table]


def picture_files(folder: Path) -> list[Path]:
    """The PNG files of a run: in its folder and one below, without what clients keep."""
    below = [path for path in folder.glob("*/*.png") if path.parent.name not in NOT_SEARCHED]
    return [*sorted(folder.glob("*.png")), *sorted(below)]


def read_pictures(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The pictures, to be put into the page, and what is wrong with those that cannot be."""
    files = picture_files(folder)
    found, problems = [], []
    for path in files[:MOST_PICTURES]:
        name = path.relative_to(folder).as_posix()
        try:
            with Image.open(path) as picture:
                picture.load()
                width, height = picture.size
                data = path.read_bytes() if max(width, height) <= LONGEST_SIDE else _smaller(picture)
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises all three on damaged files
            problems.append(f"The picture {name} cannot be read ({error}).")
            continue
        source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        found.append({"name": name, "width": width, "height": height, "source": source})
    if len(files) > MOST_PICTURES:
        problems.append(f"Only the first {MOST_PICTURES} of {len(files)} pictures are shown.")
    return found, problems


def _smaller(picture: Image.Image) -> bytes:
    picture = picture.convert("RGB")
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()
