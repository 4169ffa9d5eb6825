"""Draws views.png, the picture of docs/views.md, from Fashion-MNIST: `python docs/pictures/make_views.py`."""

from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from tacit.core.seeds import generator
from tacit.data.sources import load
from tacit.views import Views
from tacit.views.dsa import dsa
from tacit.views.pipe import augment_pipe

IMAGES, ZOOM, GAP, MARGIN = 12, 2, 2, 108


def main() -> None:
    data = load("fashion-mnist", fetch=False)
    images = torch.from_numpy(data.train_images[:IMAGES].copy())
    views = {name: Views(data.mean, data.std, strong=name) for name in ("fixmatch", "ssl", "semifl-legacy")}
    resized = Views(data.mean, data.std, weak="resize-crop")

    def draw(name: str) -> torch.Generator:
        return generator("picture", name)

    def shown(normalised: Tensor) -> Tensor:
        return (normalised * data.std[0] + data.mean[0]).mul(255).round().clamp(0, 255).byte()

    plain = views["ssl"].plain(images)
    rows = {
        "as they are": images,
        "crop": views["ssl"].raw_weak(images, draw("crop")),
        "resize-crop": resized.raw_weak(images, draw("resize")),
        **{name: view.raw_strong(images, draw(name)) for name, view in views.items()},
        "DSA": torch.cat([shown(dsa(part, draw(f"dsa {i}"))) for i, part in enumerate(plain.split(3))]),
        "pipe": shown(augment_pipe(plain, draw("pipe"))[0]),
    }
    step = 28 * ZOOM + GAP
    sheet = Image.new("L", (MARGIN + IMAGES * step, len(rows) * step), 255)
    for line, (name, row) in enumerate(rows.items()):
        ImageDraw.Draw(sheet).text((4, line * step + step // 2 - 6), name, fill=0, font_size=14)
        for column, image in enumerate(row):
            tile = Image.fromarray(image[0].numpy()).resize((28 * ZOOM, 28 * ZOOM), Image.Resampling.NEAREST)
            sheet.paste(tile, (MARGIN + column * step, line * step))
    sheet.save(Path(__file__).with_name("views.png"), optimize=True)


if __name__ == "__main__":
    main()
