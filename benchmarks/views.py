"""How many views a CPU-second, against a plain PIL loop in the same run.

Both make the same kind of view (flip, crop or resize-crop, RandAugment, cutout, normalise to float32) on one thread.
"""

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from benchmarks.timing import Row, interleaved, single_thread, spread
from tacit.views import Views

TITLE = "Views"
AFFINE = Image.Transform.AFFINE
BATCH = 1024  # images a call of ours
CALLS = 8  # calls of ours a turn
PIL_BATCH = 512  # images a turn of PIL's: it needs no large batch to be at its best
TIMES = 7

Operation = Callable[[Image.Image, float], Image.Image]  # an image and a level of 0 … 10


def _affine(a: float, b: float, c: float, d: float, e: float, f: float) -> Operation:
    """An affine move whose b, c, d, f grow with the level and point either way."""

    def move(image: Image.Image, level: float) -> Image.Image:
        level = random.choice((-level, level))
        return image.transform(image.size, AFFINE, (a, b * level, c * level, d * level, e, f * level))

    return move


POOL: list[Operation] = [
    lambda image, level: ImageOps.autocontrast(image),
    lambda image, level: ImageEnhance.Brightness(image).enhance(0.05 + 0.09 * level),
    lambda image, level: ImageEnhance.Color(image).enhance(0.05 + 0.09 * level),
    lambda image, level: ImageEnhance.Contrast(image).enhance(0.05 + 0.09 * level),
    lambda image, level: ImageOps.equalize(image),
    lambda image, level: image,
    lambda image, level: ImageOps.posterize(image, 4 + int(0.4 * level)),
    lambda image, level: ImageEnhance.Sharpness(image).enhance(0.05 + 0.09 * level),
    lambda image, level: ImageOps.solarize(image, 256 - int(25.6 * level)),
    lambda image, level: image.rotate(random.choice((-3, 3)) * level),
    _affine(1, 0.03, 0, 0, 1, 0),
    _affine(1, 0, 0, 0.03, 1, 0),
    _affine(1, 0, 0.96, 0, 1, 0),
    _affine(1, 0, 0, 0, 1, 0.96),
]


def pil_crop(image: Image.Image) -> Image.Image:
    if random.random() < 0.5:
        image = ImageOps.mirror(image)
    margins = [(4, 4), (4, 4)] + [(0, 0)] * (len(image.getbands()) > 1)
    padded = Image.fromarray(np.pad(np.asarray(image), margins, mode="reflect"))
    left, top = random.randint(0, 8), random.randint(0, 8)
    return padded.crop((left, top, left + image.width, top + image.height))


def pil_resize_crop(image: Image.Image) -> Image.Image:
    width, height = image.size
    larger = image.resize((width * 5 // 4, height * 5 // 4), Image.Resampling.BILINEAR)
    left, top = random.randint(0, larger.width - width), random.randint(0, larger.height - height)
    image = larger.crop((left, top, left + width, top + height))
    return ImageOps.mirror(image) if random.random() < 0.5 else image


def pil_hole(image: Image.Image, side: float) -> Image.Image:
    left = int(max(0, random.uniform(0, image.width) - side / 2))
    top = int(max(0, random.uniform(0, image.height) - side / 2))
    fill = (127, 127, 127) if image.mode == "RGB" else 127
    ImageDraw.Draw(image).rectangle((left, top, left + side - 1, top + side - 1), fill)
    return image


def pil_fixmatch(image: Image.Image) -> Image.Image:
    image = pil_crop(image)
    for operation in random.choices(POOL, k=2):
        level = random.randint(1, 9)
        if random.random() < 0.5:
            image = operation(image, level)
    return pil_hole(image, image.width // 2)


def pil_ssl(image: Image.Image) -> Image.Image:
    image = pil_crop(image)
    for operation in random.choices(POOL, k=3):
        image = operation(image, random.uniform(0, 10))
    return pil_hole(image, 1 + random.uniform(0, 0.5) * image.width)


# By the name in `views.weak`.
PIL_WEAK = {"crop": pil_crop, "resize-crop": pil_resize_crop, "none": lambda image: image}


def normalised(image: Image.Image, mean: np.ndarray, std: np.ndarray) -> Tensor:
    """What a data loader makes of a view: a tensor [C, H, W] of floats."""
    array = np.asarray(image, dtype=np.float32).reshape(image.height, image.width, -1) / 255
    return torch.from_numpy(((array - mean) / std).transpose(2, 0, 1).copy())


def pil_loop(images: np.ndarray, view: Callable[[Image.Image], Image.Image]) -> Tensor:
    """What a data loader does: an image, its view, a normalised tensor; then the batch."""
    mean, std = np.array([0.5], np.float32), np.array([0.25], np.float32)
    return torch.stack([normalised(view(Image.fromarray(image)), mean, std) for image in images])


Case = tuple[str, dict[str, Any], str, Callable[[Image.Image], Image.Image], tuple[int, int]]
CASES: list[Case] = [
    ("weak, crop, 32×32×3", {}, "weak_view", pil_crop, (3, 32)),
    ("weak, resize-crop, 32×32×3", {"weak": "resize-crop"}, "weak_view", pil_resize_crop, (3, 32)),
    ("strong, fixmatch, 32×32×3", {"strong": "fixmatch"}, "strong_view", pil_fixmatch, (3, 32)),
    ("strong, ssl, 32×32×3", {"strong": "ssl"}, "strong_view", pil_ssl, (3, 32)),
    ("weak, crop, 28×28×1", {}, "weak_view", pil_crop, (1, 28)),
    ("strong, fixmatch, 28×28×1", {"strong": "fixmatch"}, "strong_view", pil_fixmatch, (1, 28)),
    ("weak, resize-crop, 96×96×3", {"weak": "resize-crop"}, "weak_view", pil_resize_crop, (3, 96)),
    ("weak, resize-crop, 128×128×3", {"weak": "resize-crop"}, "weak_view", pil_resize_crop, (3, 128)),
    ("weak, resize-crop, 224×224×3", {"weak": "resize-crop"}, "weak_view", pil_resize_crop, (3, 224)),
    ("strong, fixmatch, 96×96×3", {"strong": "fixmatch"}, "strong_view", pil_fixmatch, (3, 96)),
    ("strong, fixmatch, 224×224×3", {"strong": "fixmatch"}, "strong_view", pil_fixmatch, (3, 224)),
]


def measure(cases: Sequence[Case] = CASES, times: int = TIMES) -> list[Row]:
    with single_thread():
        return [measure_case(*case, times=times) for case in cases]


def amounts(size: int) -> tuple[int, int, int]:
    """Images a call, calls a turn and images a turn of PIL's: about as many pixels at every size.

    >>> amounts(32), amounts(224)
    ((1024, 8, 512), (128, 1, 10))
    """
    fewer = max(1, size**2 // 32**2)
    return max(128, BATCH // fewer), max(1, CALLS // fewer), max(8, PIL_BATCH // fewer)


def measure_case(
    name: str,
    options: dict[str, Any],
    kind: str,
    pil_view: Callable[[Image.Image], Image.Image],
    shape: tuple[int, int],
    times: int,
) -> Row:
    """Images per CPU-second, ours over PIL's."""
    channels, size = shape
    generator = torch.Generator().manual_seed(0)
    batch, calls, pil_batch = amounts(size)
    images = torch.randint(0, 256, (batch, channels, size, size), generator=generator, dtype=torch.uint8)
    arrays = images[:pil_batch].permute(0, 2, 3, 1).contiguous().numpy()
    arrays = arrays[..., 0] if channels == 1 else arrays
    view = getattr(Views((0.5,) * channels, (0.25,) * channels, **options), kind)
    works = {
        "ours": lambda: [view(images, generator) for _ in range(calls)],
        "pil": lambda: pil_loop(arrays, pil_view),
    }
    spent = interleaved(works, times)
    ours = [batch * calls / max(one.cpu, 1e-9) for one in spent["ours"]]
    theirs = [pil_batch / max(one.cpu, 1e-9) for one in spent["pil"]]
    rates = f"{statistics.median(ours):,.0f} and {statistics.median(theirs):,.0f} images a CPU-second"
    return spread(f"{name}: ours / PIL", [a / b for a, b in zip(ours, theirs, strict=True)], "×", note=rates)
