"""The view of self-supervised learning (SimCLR, BYOL): a part of the image, enlarged, in other colours.

A random part of the image (an area of 0.2 … 1, sides of 3:4 … 4:3) is enlarged to the old size and mirrored half of the
time; with probability 0.8 brightness, contrast and saturation change by up to 0.4 and the hue by up to a tenth of the
circle; with probability 0.2 the colours go. This is the usual form for images of 32 pixels: without blur.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tacit.views.pixels import brightness, color, contrast, hue

SIAMESE_NUMBERS = 11  # random numbers that one view takes: four for the part, mirror, six for the colours
LEAST_AREA = 0.2
JITTER, HUE = 0.4, 0.1
JITTER_CHANCE, GREY_CHANCE = 0.8, 0.2


def siamese_view(images: Tensor, numbers: Tensor, flip: bool) -> Tensor:
    """A view of each image, uint8 as they are, from its row of random numbers [N, 11]."""
    area, ratio, top, left, mirrored, jitter, bright, strong, vivid, turned, grey = numbers.unbind(1)
    mirror = (mirrored < 0.5) & flip
    views = resized_part(images, *part_of(area, ratio, top, left), mirror)
    changed = jitter < JITTER_CHANCE
    for operation, number in ((brightness, bright), (contrast, strong), (color, vivid)):
        views = operation(views, torch.where(changed, 1 + JITTER * (2 * number - 1), 1.0))
    views = hue(views, torch.where(changed, HUE * (2 * turned - 1), 0.0))
    return color(views, torch.where(grey < GREY_CHANCE, 0.0, 1.0))


def part_of(area: Tensor, ratio: Tensor, top: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers in [0, 1) as a part of the image: its height, width, top and left, each as a share of the side.

    >>> numbers = [torch.tensor([value], dtype=torch.float64) for value in (0.0, 0.5, 0.5, 1.0)]
    >>> [round(share.item(), 4) for share in part_of(*numbers)]             # √0.2, in the middle, at the right edge
    [0.4472, 0.4472, 0.2764, 0.5528]
    """
    share = LEAST_AREA + (1 - LEAST_AREA) * area
    wider = torch.exp((2 * ratio - 1) * math.log(4 / 3))  # width by height
    height, width = (share / wider).sqrt().clamp(max=1), (share * wider).sqrt().clamp(max=1)
    return height, width, top * (1 - height), left * (1 - width)


def resized_part(images: Tensor, height: Tensor, width: Tensor, top: Tensor, left: Tensor, mirror: Tensor) -> Tensor:
    """The part of each image in the images' own size, bilinear; mirrored where `mirror` [N] is true.

    >>> row = torch.tensor([0, 100, 200, 100], dtype=torch.uint8).expand(1, 1, 4, 4)
    >>> one, none = torch.ones(1), torch.zeros(1)
    >>> resized_part(row, one, one, none, none, torch.tensor([False]))[0, 0, 0].tolist()
    [0, 100, 200, 100]
    >>> resized_part(row, one, 0.5 * one, none, 0.5 * one, torch.tensor([True]))[0, 0, 0].tolist()   # 200 100, mirrored
    [100, 125, 175, 175]
    """
    side = images.shape[-1]
    across = _places(width, left, side, mirror)[:, None, :].expand(-1, images.shape[-2], -1)
    down = _places(height, top, images.shape[-2])[:, :, None].expand(-1, -1, side)
    grid = torch.stack([across, down], dim=3).float().to(images.device)
    views = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return views.round_().clamp_(0, 255).to(torch.uint8)


def _places(share: Tensor, start: Tensor, size: int, mirror: Tensor | None = None) -> Tensor:
    """Where each of `size` pixels is read, in −1 … 1 from edge to edge: [N] → [N, size]."""
    centres = (2 * torch.arange(size, dtype=torch.float64) + 1) / size - 1
    facing = share if mirror is None else torch.where(mirror, -share, share)
    return facing[:, None] * centres + (2 * start + share - 1)[:, None]
