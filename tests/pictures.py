"""Real images written out as somebody's own files: sites, classes, odd sizes, and every kind of fault."""

from pathlib import Path

import numpy as np
from PIL import Image

from tacit.data.dataset import Dataset

SITES = ("north", "south", "west")


def save(image: np.ndarray, path: Path, stretch: tuple[int, int] | None = None) -> Path:
    """One image [C, H, W] as a file; `stretch` is another (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
    (picture.resize(stretch) if stretch else picture).save(path)
    return path


def write_sites(dataset: Dataset, root: Path, labeled: int, unlabeled: int) -> Path:
    """Three sites with folders for each class (`labeled` images of each) and `unlabeled`; each image is used once."""
    waiting = {label: np.flatnonzero(dataset.train_labels == label).tolist() for label in range(len(dataset.classes))}
    for site in SITES:
        for label, name in enumerate(dataset.classes):
            for _ in range(labeled):
                index = waiting[label].pop()
                save(dataset.train_images[index], root / site / name.replace("/", "-") / f"{index:05d}.png")
        for number in range(unlabeled):
            index = waiting[number % len(dataset.classes)].pop()
            save(dataset.train_images[index], root / site / "unlabeled" / f"{index:05d}.png")
    return root


def write_tests(dataset: Dataset, root: Path, count: int) -> Path:
    """The first test images, without labels, some of them stretched, and one file that is no picture."""
    side = dataset.size
    for index in range(count):
        stretch = (2 * side + 3, 2 * side) if index % 10 == 0 else None
        save(dataset.test_images[index], root / f"new-{index:04d}.png", stretch)
    (root / "broken.png").write_text("not a picture")
    return root
