"""Writes the images of docs/your-own-images.md: `python -m benchmarks.own_images FOLDER [SET]`.

Three sites with 10 labels of each class and 800 unlabelled images, odd sizes, JPEG and PNG, some files broken; beside
it FOLDER-new (1,000 images without labels) and FOLDER-labelled-later (1,000 with).
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image

from tacit.data.sources import load

LABELED, UNLABELED = 10, 800


def write(folder: Path, name: str) -> None:
    dataset, generator = load(name), np.random.default_rng(0)
    names = [one.replace("/", "-") for one in dataset.classes]
    order = generator.permutation(len(dataset.train_labels))
    waiting = {label: order[dataset.train_labels[order] == label].tolist() for label in range(len(names))}

    def save(image: np.ndarray, path: Path) -> None:
        """A quarter is enlarged to an odd size, a quarter becomes JPEG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
        kind = generator.integers(4)
        if kind == 0:
            size = (picture.width * 2, picture.height * 2 + int(generator.integers(6)))
            picture = picture.resize(size, Image.Resampling.BICUBIC)
        if kind == 1:
            picture.save(path.with_suffix(".jpg"), quality=92)
        else:
            picture.save(path)

    for site in ("north", "south", "west"):
        for label, one in enumerate(names):
            for _ in range(LABELED):
                index = waiting[label].pop()
                save(dataset.train_images[index], folder / site / one / f"img_{index:05d}.png")
        for _ in range(UNLABELED):
            index = waiting[int(generator.integers(len(names)))].pop()
            save(dataset.train_images[index], folder / site / "unlabeled" / f"img_{index:05d}.png")
    for index in range(1000):
        save(dataset.test_images[index], Path(f"{folder}-new") / f"new_{index:04d}.png")
    for index in range(1000, 2000):
        one = names[dataset.test_labels[index]]
        save(dataset.test_images[index], Path(f"{folder}-labelled-later") / one / f"later_{index:04d}.png")
    spoil(folder, names)


def spoil(folder: Path, names: list[str]) -> None:
    """Every kind of fault, once."""
    whole = next((folder / "north" / names[1]).glob("*.png")).read_bytes()
    (folder / "north" / names[0] / "cut.png").write_bytes(whole[:60])
    (folder / "south" / names[2] / "empty.jpg").touch()
    (folder / "south" / names[2] / "notes.txt").write_text("hm")
    (folder / "west" / "lost.png").write_bytes(whole)
    (folder / "west" / "slipper").mkdir()
    (Path(f"{folder}-new") / "broken.png").write_text("not a picture")


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "fashion-mnist")
