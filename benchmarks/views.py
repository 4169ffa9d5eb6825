"""How many views a second, against a plain PIL loop in the same run: `python -m benchmarks.views`.

Both make the same kind of view (flip, crop or resize-crop, RandAugment, cutout, normalise to float32) on one thread.
Rounds of ours and PIL's alternate, so that a busy machine slows both; rates are per CPU-second.
"""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from tacit.views import Views

AFFINE = Image.Transform.AFFINE
BATCH = 1024  # images a call of ours
CALLS = 8  # calls of ours a round
PIL_BATCH = 512  # images a round of PIL's: it needs no large batch to be at its best
ROUNDS = 7

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


def _pil_crop(image: Image.Image) -> Image.Image:
    if random.random() < 0.5:
        image = ImageOps.mirror(image)
    margins = [(4, 4), (4, 4)] + [(0, 0)] * (len(image.getbands()) > 1)
    padded = Image.fromarray(np.pad(np.asarray(image), margins, mode="reflect"))
    left, top = random.randint(0, 8), random.randint(0, 8)
    return padded.crop((left, top, left + image.width, top + image.height))


def _pil_resize_crop(image: Image.Image) -> Image.Image:
    width, height = image.size
    larger = image.resize((width * 5 // 4, height * 5 // 4), Image.Resampling.BILINEAR)
    left, top = random.randint(0, larger.width - width), random.randint(0, larger.height - height)
    image = larger.crop((left, top, left + width, top + height))
    return ImageOps.mirror(image) if random.random() < 0.5 else image


def _pil_hole(image: Image.Image, side: float) -> Image.Image:
    left = int(max(0, random.uniform(0, image.width) - side / 2))
    top = int(max(0, random.uniform(0, image.height) - side / 2))
    fill = (127, 127, 127) if image.mode == "RGB" else 127
    ImageDraw.Draw(image).rectangle((left, top, left + side - 1, top + side - 1), fill)
    return image


def _pil_fixmatch(image: Image.Image) -> Image.Image:
    image = _pil_crop(image)
    for operation in random.choices(POOL, k=2):
        level = random.randint(1, 9)
        if random.random() < 0.5:
            image = operation(image, level)
    return _pil_hole(image, image.width // 2)


def _pil_ssl(image: Image.Image) -> Image.Image:
    image = _pil_crop(image)
    for operation in random.choices(POOL, k=3):
        image = operation(image, random.uniform(0, 10))
    return _pil_hole(image, 1 + random.uniform(0, 0.5) * image.width)


def _pil_loop(images: np.ndarray, view: Callable[[Image.Image], Image.Image]) -> Tensor:
    """What a data loader does: an image, its view, a normalised tensor; then the batch."""
    mean, deviation = np.float32(0.5), np.float32(0.25)
    seen = []
    for image in images:
        array = np.asarray(view(Image.fromarray(image)), dtype=np.float32) / 255
        array = ((array - mean) / deviation).reshape(*array.shape[:2], -1)
        seen.append(torch.from_numpy(array.transpose(2, 0, 1).copy()))
    return torch.stack(seen)


def _rate(work: Callable[[], Any], images: int) -> float:
    """Images per CPU-second."""
    start = time.process_time()
    work()
    return images / max(time.process_time() - start, 1e-9)


CASES: list[tuple[str, dict[str, Any], str, Callable[[Image.Image], Image.Image], tuple[int, int]]] = [
    ("weak, crop, 32×32×3", {}, "weak_view", _pil_crop, (3, 32)),
    ("weak, resize-crop, 32×32×3", {"weak": "resize-crop"}, "weak_view", _pil_resize_crop, (3, 32)),
    ("strong, fixmatch, 32×32×3", {"strong": "fixmatch"}, "strong_view", _pil_fixmatch, (3, 32)),
    ("strong, ssl, 32×32×3", {"strong": "ssl"}, "strong_view", _pil_ssl, (3, 32)),
    ("weak, crop, 28×28×1", {}, "weak_view", _pil_crop, (1, 28)),
    ("strong, fixmatch, 28×28×1", {"strong": "fixmatch"}, "strong_view", _pil_fixmatch, (1, 28)),
]


def measure(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """For each view: images per CPU-second of ours and of PIL (medians), their ratio, and its spread.

    The spread is the range of the single rounds' ratios as a share of the ratio.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [_measure_case(*case, rounds=rounds) for case in CASES]
    finally:
        torch.set_num_threads(threads)


def _measure_case(
    name: str,
    options: dict[str, Any],
    kind: str,
    pil_view: Callable[[Image.Image], Image.Image],
    shape: tuple[int, int],
    rounds: int,
) -> dict[str, Any]:
    channels, size = shape
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (BATCH, channels, size, size), generator=generator, dtype=torch.uint8)
    arrays = images[:PIL_BATCH].permute(0, 2, 3, 1).contiguous().numpy()
    arrays = arrays[..., 0] if channels == 1 else arrays
    view = getattr(Views((0.5,) * channels, (0.25,) * channels, **options), kind)
    view(images, generator), _pil_loop(arrays, pil_view)  # both once, unmeasured
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(_rate(lambda: [view(images, generator) for _ in range(CALLS)], BATCH * CALLS))
        theirs.append(_rate(lambda: _pil_loop(arrays, pil_view), PIL_BATCH))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    return {
        "name": name,
        "ours_per_second": statistics.median(ours),
        "pil_per_second": statistics.median(theirs),
        "ratio": ratio,
        "spread": (max(ratios) - min(ratios)) / ratio,
    }


def main() -> None:
    print(f"{'view':28} {'ours / CPU-s':>13} {'PIL / CPU-s':>12} {'ratio':>7} {'spread':>7}")
    for row in measure():
        rates = f"{row['ours_per_second']:13,.0f} {row['pil_per_second']:12,.0f}"
        print(f"{row['name']:28} {rates} {row['ratio']:6.1f}× {row['spread']:6.0%}")


if __name__ == "__main__":
    main()
