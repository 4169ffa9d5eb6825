"""Images of any kind and size to what a model takes: files, folders, tables, arrays, opened images."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tacit.core.errors import TacitError
from tacit.core.text import safe
from tacit.data.arrays import channels_first
from tacit.data.columns import read_table
from tacit.data.folder_report import Item
from tacit.data.images import is_grey, is_image, pixels, why_unreadable
from tacit.data.names import is_hidden
from tacit.data.own import picture
from tacit.data.readers import npz_arrays
from tacit.data.tables import TABLES
from tacit.inference.model import Description

ARRAYS = ("images", "x", "x_test", "x_train")  # where an .npz may have its images


def collect(places: Sequence[Path]) -> list[Item]:
    """Every image that some paths name, in a fixed order: files, folders at any depth, tables with a column `path`,
    .npz. Whether each can be read is not looked at yet."""
    return [item for place in places for item in _collect(place)]


def _collect(place: Path) -> Iterator[Item]:
    ending = place.suffix.lower()
    if not place.exists():
        raise TacitError(f"There is nothing at {place}. Expected an image, a folder, a .csv, a .parquet or an .npz.")
    if place.is_dir():
        yield from (Item(path) for path in image_files(place))
    elif ending in TABLES:
        table = read_table(place, needed=("path",))
        yield from (Item(table.files.look(row["path"]) or place.parent / row["path"]) for row in table.rows)
    elif ending == ".npz":
        yield from _arrays(place)
    else:
        yield Item(place)


def image_files(folder: Path) -> list[Path]:
    """Files that are images by their names, at any depth, without hidden ones."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        found += [Path(place, name) for name in sorted(files) if is_image(Path(place, name))]
    return found


def _arrays(place: Path) -> Iterator[Item]:
    def wanted(names: list[str]) -> list[str]:
        found = [name for name in ARRAYS if name in names][:1]
        if not found:
            raise TacitError(
                f"{place} holds {safe(', '.join(names)) or 'nothing'}; expected images in one of {', '.join(ARRAYS)}."
            )
        return found

    ((name, stored),) = npz_arrays(place, wanted).items()
    for number, image in enumerate(channels_first(stored, f"{place} ({name})")):
        yield Item(Path(f"{place}[{name} {number}]"), array=_plain(image))


def _plain(image: np.ndarray) -> np.ndarray:
    """[H, W] or [H, W, 3] from channels first, as Pillow has it."""
    return image[0] if len(image) == 1 else image.transpose(1, 2, 0)


def prepared(image: Image.Image, description: Description) -> Tensor:
    """One image by the model's rule: uint8 [C, S, S]."""
    return torch.from_numpy(pixels(image, description.size, grey=description.channels == 1).copy())


def read(items: Sequence[Item], description: Description) -> tuple[Tensor, list[str]]:
    """The images [N, C, S, S] (zeros for those that cannot be read) and what is wrong with each ('' if nothing)."""
    side = (description.channels, description.size, description.size)
    images = torch.zeros(len(items), *side, dtype=torch.uint8)
    faults = []
    for number, item in enumerate(items):
        try:
            images[number] = prepared(picture(item, description.depth), description)
            faults.append("")
        except Exception as error:  # Pillow's decoders raise errors of every kind on damaged files
            faults.append(why_unreadable(error, item.path))
    return images, faults


def as_items(images: Any) -> list[Item]:
    """What may be called images in Python: a path or several, an array or a tensor of one or many, opened images."""
    if isinstance(images, str | Path):
        return collect([Path(images)])
    if isinstance(images, Image.Image):
        return as_items([images])
    if isinstance(images, Tensor):
        images = images.detach().cpu().numpy()
    if isinstance(images, np.ndarray):
        array = (
            images[None]
            if images.ndim == 2 or (images.ndim == 3 and 3 in (images.shape[0], images.shape[2]))
            else images
        )
        return [Item(Path(f"[{n}]"), array=_plain(i)) for n, i in enumerate(channels_first(array, "images"))]
    listed = list(images)
    if all(isinstance(image, str | Path) for image in listed):
        return collect([Path(image) for image in listed])
    if all(isinstance(image, Image.Image) for image in listed):
        return [Item(Path(f"[{number}]"), array=_opened(image)) for number, image in enumerate(listed)]
    if all(isinstance(image, np.ndarray | Tensor) for image in listed):
        single = [as_items(image) for image in listed]
        return [Item(Path(f"[{number}]"), array=items[0].array) for number, items in enumerate(single)]
    raise TacitError(
        "Images are given as paths, as an array or a tensor, or as opened images; not as a mixture of them."
    )


def _opened(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("L" if is_grey(image) else "RGB"))
