"""DSA, differentiable siamese augmentation (Zhao and Bilen 2021): DDRFed's weak view for its losses.

One operation is drawn for the whole batch and done to every image with the same amount ("siamese"); gradients
flow through it to the images. Images are float [N, C, H, W], normalised, so that 0 is the mean colour.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tacit.views.augment import draw

DSA_OPERATIONS = ("crop", "flip", "scale", "rotate", "color", "cutout")


def _between(number: float, low: float, high: float) -> float:
    return low + number * (high - low)


def _warp(images: Tensor, matrix: list[list[float]]) -> Tensor:
    """Reads the images at matrix · (x, y, 1), in coordinates −1 … 1 from edge to edge; outside is 0."""
    theta = torch.tensor(matrix, dtype=images.dtype, device=images.device).expand(len(images), -1, -1)
    grid = functional.affine_grid(theta, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="zeros", align_corners=False)


def _crop(images: Tensor, numbers: list[float]) -> Tensor:
    """A shift by up to an eighth of the side; 0 moves in."""
    height, width = images.shape[2:]
    down, across = int(height / 8 + 0.5), int(width / 8 + 0.5)
    top, left = int(numbers[0] * (2 * down + 1)), int(numbers[1] * (2 * across + 1))
    return functional.pad(images, (across, across, down, down))[:, :, top : top + height, left : left + width]


def _flip(images: Tensor, numbers: list[float]) -> Tensor:
    """Left and right change places, or (as often) nothing happens."""
    return images.flip(3) if numbers[0] < 0.5 else images


def _scale(images: Tensor, numbers: list[float]) -> Tensor:
    """Stretched or squeezed by up to 1.2, width and height each on its own."""
    across, down = (_between(number, 1 / 1.2, 1.2) for number in numbers[:2])
    return _warp(images, [[across, 0, 0], [0, down, 0]])


def _rotate(images: Tensor, numbers: list[float]) -> Tensor:
    """A turn by up to 15 degrees either way."""
    angle = math.radians(_between(numbers[0], -15, 15))
    return _warp(images, [[math.cos(angle), -math.sin(angle), 0], [math.sin(angle), math.cos(angle), 0]])


def _color(images: Tensor, numbers: list[float]) -> Tensor:
    """Brightness ± ½, then saturation × 0 … 2, then contrast × ½ … 1½."""
    images = images + _between(numbers[0], -0.5, 0.5)
    grey = images.mean(dim=1, keepdim=True)
    images = (images - grey) * _between(numbers[1], 0, 2) + grey
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (images - mean) * _between(numbers[2], 0.5, 1.5) + mean


def _cutout(images: Tensor, numbers: list[float]) -> Tensor:
    """A hole of half the side, cut off where it leaves the image, filled with 0."""
    height, width = images.shape[2:]
    top, left = int(numbers[0] * (height + 1)) - height // 4, int(numbers[1] * (width + 1)) - width // 4
    keep = torch.ones(height, width, dtype=images.dtype, device=images.device)
    keep[max(top, 0) : max(top + height // 2, 0), max(left, 0) : max(left + width // 2, 0)] = 0
    return images * keep


_FUNCTIONS: dict[str, Callable[[Tensor, list[float]], Tensor]] = {
    "crop": _crop,
    "flip": _flip,
    "scale": _scale,
    "rotate": _rotate,
    "color": _color,
    "cutout": _cutout,
}


def dsa(images: Tensor, generator: torch.Generator, operations: Sequence[str] = DSA_OPERATIONS) -> Tensor:
    """One random operation out of `operations`, the same for every image of the batch; differentiable.

    Leave "flip" out where a flip changes the class (digits).

    >>> images = torch.arange(4.0).view(1, 1, 1, 4).repeat(2, 1, 4, 1)
    >>> seen = dsa(images, torch.Generator().manual_seed(0), ["flip"])
    >>> torch.equal(seen[0], seen[1]), seen[0, 0, 0].tolist() in ([0, 1, 2, 3], [3, 2, 1, 0])
    (True, True)
    """
    which, *numbers = draw(1, 4, generator)[0].tolist()
    if not len(images):  # torch's samplers refuse an empty batch
        return images
    return _FUNCTIONS[operations[int(which * len(operations))]](images, numbers)
