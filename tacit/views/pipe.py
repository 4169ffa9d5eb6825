"""Augmentation that tells the net what was done: for DDRFed's diffusion model.

Each image is moved by chance, and a label of nine numbers says how. A net that is given the label learns to draw
moved images only when told so; at sampling time it gets nine zeros and draws upright ones. The operations,
their ranges and the label follow the non-leaking augmentation of EDM (Karras et al. 2022), but for two points:
left-right flips are as rare as the rest, and a squeeze is written as a stretch across it. (A stretch by −v has
the same label as one by v in the opposite direction, so with negative v a label could mean two things.)
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from tacit.views.augment import draw

PIPE_LABEL = (
    "flipped left-right (0 or 1)",
    "flipped top-bottom (0 or 1)",
    "size: w, the image is 2^(0.2 w) times as large",
    "turned clockwise by an angle: its cosine − 1",
    "… its sine",
    "stretched by 2^(0.2 v) in a direction, squeezed as much across it: v · cosine of the direction",
    "… v · its sine",
    "moved right, in eighths of the width",
    "moved down, in eighths of the height",
)
_OPERATIONS = 6  # flip, flip, size, turn, stretch, move: each is switched on with the given probability
_NUMBERS = _OPERATIONS + 6  # and what six amounts are drawn from


def _normal(numbers: Tensor) -> Tensor:
    """Uniform numbers → standard normal ones, each from its own, so that a row depends on nothing but itself."""
    return torch.special.ndtri(numbers.clamp(min=1e-12))


def _matrices(*entries: Tensor | float) -> Tensor:
    """The nine entries of 3×3 matrices, row by row (each [N], or one number for all) → [N, 3, 3]."""
    count = next(len(entry) for entry in entries if isinstance(entry, Tensor))
    columns = [entry if isinstance(entry, Tensor) else torch.full((count,), entry).double() for entry in entries]
    return torch.stack(columns, dim=1).view(count, 3, 3)


def _scaling(across: Tensor, down: Tensor) -> Tensor:
    return _matrices(across, 0.0, 0.0, 0.0, down, 0.0, 0.0, 0.0, 1.0)


def _turn(angle: Tensor) -> Tensor:
    cosine, sine = angle.cos(), angle.sin()
    return _matrices(cosine, -sine, 0.0, sine, cosine, 0.0, 0.0, 0.0, 1.0)


def _moves(numbers: Tensor, probability: float, height: int, width: int) -> tuple[Tensor, Tensor]:
    """The movement of each image as a matrix [N, 3, 3] in pixels from the middle, and its label [N, 9]."""
    flip_x, flip_y, resized, turned, stretched, moved = (numbers[:, :_OPERATIONS] < probability).double().unbind(1)
    amounts = numbers[:, _OPERATIONS:]
    size, stretch = resized * _normal(amounts[:, 0]), stretched * _normal(amounts[:, 1]).abs()
    right, down = moved * _normal(amounts[:, 2]), moved * _normal(amounts[:, 3])
    angle = turned * (2 * amounts[:, 4] - 1) * math.pi
    direction = (2 * amounts[:, 5] - 1) * math.pi

    one = torch.ones_like(size)
    matrix = _scaling(1 - 2 * flip_x, 1 - 2 * flip_y)
    matrix = _scaling(2 ** (0.2 * size), 2 ** (0.2 * size)) @ matrix
    matrix = _turn(angle) @ matrix
    matrix = _turn(direction) @ _scaling(2 ** (0.2 * stretch), 2 ** (-0.2 * stretch)) @ _turn(-direction) @ matrix
    matrix = _matrices(one, 0.0, right * width / 8, 0.0, one, down * height / 8, 0.0, 0.0, one) @ matrix

    along = [stretch * direction.cos(), stretch * direction.sin()]
    label = [flip_x, flip_y, size, angle.cos() - 1, angle.sin(), *along, right, down]
    return matrix, torch.stack(label, dim=1)


def augment_pipe(images: Tensor, generator: torch.Generator, probability: float = 0.12) -> tuple[Tensor, Tensor]:
    """Moved images and their labels [N, 9] (`PIPE_LABEL`); a label of zeros means: this image is untouched.

    Each of six operations is switched on with the given probability, for each image on its own: a flip left-right,
    one top-bottom, another size, a turn by any angle, a stretch in any direction, a move. What comes in from
    outside is the image reflected at its edge. Images are float [N, C, H, W].

    >>> images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    >>> same, labels = augment_pipe(images, torch.Generator().manual_seed(0), probability=0.0)
    >>> torch.equal(same, images), labels.shape, bool(labels.any())
    (True, torch.Size([4, 9]), False)
    """
    count, _, height, width = images.shape
    matrix, labels = _moves(draw(count, _NUMBERS, generator), probability, height, width)
    labels = labels.to(images.device, images.dtype)
    touched = labels.any(dim=1).nonzero().squeeze(1)
    if not len(touched):
        return images, labels
    # The sampler asks where a pixel comes from (the inverse) and counts from −1 to 1, not in pixels.
    units = torch.tensor([width / 2, height / 2, 1.0], dtype=torch.float64)
    source = torch.linalg.inv(matrix) * units / units.view(3, 1)
    theta = source[:, :2].to(images.device, images.dtype).index_select(0, touched)
    chosen = images.index_select(0, touched)
    grid = functional.affine_grid(theta, list(chosen.shape), align_corners=False)
    moved = functional.grid_sample(chosen, grid, padding_mode="reflection", align_corners=False)
    return images.index_copy(0, touched, moved), labels
