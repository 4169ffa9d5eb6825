"""The split of a run and the pictures in its folder."""

import base64
import hashlib
import io
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from PIL import Image

from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data.dataset import Dataset
from tacit.data.federation import load_dataset
from tacit.data.holdings import FILE as HOLDINGS
from tacit.data.holdings import MOST_PARTIES, holdings, read_holdings
from tacit.data.split import Split, load_split, party_names, title

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
        "parties": split.recipe.get("site_names") or [],  # of own data; real sites stay numbers
        "test": len(split.test),
    }
    known = read_holdings(path.parent / HOLDINGS)
    if known is not None:
        return {**found, **known}
    try:
        dataset = _labels_of(json.dumps({key: recipe[key] for key in Data.model_fields if key in recipe}))
        split.check_against(dataset)
    except TacitError as error:
        return {**found, **_totals(split), "classes": [], "note": f"Classes are not shown. {error}"}
    return {**found, **holdings(split, dataset)}


@lru_cache(maxsize=4)
def _labels_of(settings: str) -> Dataset:
    """The data set as it lies here, of a run that did not write down who held what; nothing is fetched for a report."""
    try:
        return load_dataset(Data.model_validate_json(settings), fetch=False)
    except ValueError as error:
        raise TacitError(f"The split's settings cannot be read ({type(error).__name__}).") from None


def _totals(split: Split) -> dict[str, Any]:
    clients = split.clients[:MOST_PARTIES]
    names = party_names(split)[:MOST_PARTIES]
    labeled = [[len(part.labeled)] for part in clients]
    unlabeled = [[len(part.unlabeled)] for part in clients]
    if len(split.server):
        names, labeled, unlabeled = ["server", *names], [[len(split.server)], *labeled], [[0], *unlabeled]
    return {"columns": ["all classes"], "rows": names, "labeled": labeled, "unlabeled": unlabeled}


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
