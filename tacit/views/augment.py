"""Weak views of a batch: flip, crop, enlarge-and-crop, and the hole of cutout.

Every function takes images [N, C, H, W] and one value per image, and treats each image on its own: nothing is
shared by the batch. Chance enters only through `draw`, on the CPU, so a GPU sees the same views; the
functions themselves are plain arithmetic, and most of them are one look-up of pixels by number (`gather`).
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

WEAK_NUMBERS = 3  # random numbers that one weak view takes: flip, top, left


def draw(count: int, numbers: int, generator: torch.Generator) -> Tensor:
    """Random numbers in [0, 1): one row for each image, float64 [count, numbers].

    The rows come one after the other from the generator, so the first images' rows do not depend on how many
    follow, and drawing 5 and then 3 rows is the same as drawing 8.

    >>> seeded = lambda: torch.Generator().manual_seed(1)
    >>> whole, again = draw(8, 3, seeded()), seeded()
    >>> torch.equal(whole, torch.cat([draw(5, 3, again), draw(3, 3, again)]))
    True
    """
    return torch.rand(count, numbers, generator=generator, dtype=torch.float64)


def choose(numbers: Tensor, choices: int) -> Tensor:
    """Turns numbers in [0, 1) into equally likely whole numbers 0 … choices−1.

    >>> choose(torch.tensor([0.0, 0.3, 0.34, 0.999], dtype=torch.float64), 3).tolist()
    [0, 0, 1, 2]
    """
    return (numbers.double() * choices).long()


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """One value per image, [N] → [N, 1, 1, 1], where the images are.

    >>> per_image(torch.tensor([1, 2]), torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 1, 1, 1])
    """
    return values.to(images.device).view(-1, *[1] * (images.dim() - 1))


def pick_pixels(images: Tensor, rows: Tensor, columns: Tensor, right: int = 0) -> Tensor:
    """out[n, c, y, x] = images[n, c, rows[n, y], columns[n, x] + right].

    >>> image = torch.arange(4).view(1, 1, 2, 2)
    >>> pick_pixels(image, torch.tensor([[1, 0]]), torch.tensor([[0, 0]])).tolist()
    [[[[2, 2], [0, 0]]]]
    """
    count, channels, height, width = images.shape
    place = rows[:, :, None] * width + columns[:, None, :]
    flat = images.reshape(count, channels, height * width)[:, :, right:]
    picked = flat.gather(2, place.flatten(1).unsqueeze(1).expand(-1, channels, -1))
    return picked.view(count, channels, *place.shape[1:])


def pick_rows(images: Tensor, rows: Tensor) -> Tensor:
    """out[n, c, y] = images[n, c, rows[n, y]]: whole rows, which is faster than pixel by pixel.

    >>> pick_rows(torch.arange(4).view(1, 1, 2, 2), torch.tensor([[1, 0]])).tolist()
    [[[[2, 3], [0, 1]]]]
    """
    count, channels, height, width = images.shape
    first = torch.arange(count * channels, device=images.device).view(count, channels, 1) * height
    picked = images.reshape(-1, width).index_select(0, (first + rows[:, None, :]).flatten())
    return picked.view(count, channels, rows.shape[1], width)


def flip(images: Tensor, flipped: Tensor) -> Tensor:
    """Left and right change places where `flipped` [N] is true.

    >>> flip(torch.tensor([[[[1, 2, 3]]], [[[1, 2, 3]]]]), torch.tensor([True, False])).flatten().tolist()
    [3, 2, 1, 1, 2, 3]
    """
    chosen = flipped.nonzero().squeeze(1).to(images.device)
    return images.index_copy(0, chosen, images.index_select(0, chosen).flip(3))


def mirror(position: Tensor, size: int) -> Tensor:
    """Folds positions beyond an edge back inside; the edge pixel itself is not repeated.

    >>> mirror(torch.tensor([-2, -1, 0, 1, 2, 3, 4]), 4).tolist()
    [2, 1, 0, 1, 2, 3, 2]
    """
    return size - 1 - (size - 1 - position.abs()).abs()


def _span(start: Tensor, size: int) -> Tensor:
    """[N] first positions → [N, size] positions one after the other."""
    return start[:, None] + torch.arange(size, device=start.device)


def _facing(columns: Tensor, flipped: Tensor) -> Tensor:
    """Reverses the rows of `columns` where `flipped` is true."""
    return torch.where(flipped[:, None], columns.flip(1), columns)


def padding_of(size: int) -> int:
    """Pixels added on each side before a crop: 4 at 32 pixels, in proportion elsewhere, at least 1.

    >>> [padding_of(size) for size in (8, 28, 32, 64)]
    [1, 4, 4, 8]
    """
    return max(1, round(size / 8))


def enlarged(size: int) -> int:
    """The size before a resize-crop: a quarter more, rounded up to an even number (32 → 40, 28 → 36).

    >>> [enlarged(size) for size in (8, 28, 32, 64)]
    [10, 36, 40, 80]
    """
    return 2 * -(-5 * size // 8)


def reflect_crop(images: Tensor, top: Tensor, left: Tensor, flipped: Tensor) -> Tensor:
    """A window of the images' own size out of the images padded by reflection, then flipped where asked.

    `top` and `left` [N] count from the padded image's corner: 0 … 2·padding, where padding is `padding_of`
    the height and the width; top = left = padding gives the image itself.

    >>> row = torch.arange(8).expand(1, 1, 8, 8)
    >>> window = lambda left: reflect_crop(row, torch.tensor([1]), torch.tensor([left]), torch.tensor([False]))
    >>> window(0)[0, 0, 0].tolist(), window(1)[0, 0, 0].tolist()
    ([1, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    height, width = images.shape[2:]
    rows = mirror(_span(top.to(images.device) - padding_of(height), height), height)
    columns = mirror(_span(left.to(images.device) - padding_of(width), width), width)
    return pick_pixels(images, rows, _facing(columns, flipped.to(images.device)))


@lru_cache(maxsize=64)
def _bilinear_taps(size: int, larger: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `larger` positions: the first of two neighbours, and both weights in 2⁻²² steps (as PIL)."""
    first, weights = [], []
    for position in range(larger):
        centre = (position + 0.5) * (size / larger) - 0.5
        start = min(max(math.floor(centre), 0), size - 2)
        near = [max(0.0, 1 - abs(start - centre)), max(0.0, 1 - abs(start + 1 - centre))]
        first.append(start)
        weights.append([int(0.5 + weight / sum(near) * 2**22) for weight in near])
    fixed = torch.tensor(weights, dtype=torch.int32)
    return torch.tensor(first), fixed[:, 0], fixed[:, 1]


def _mix(first: Tensor, second: Tensor, first_weight: Tensor, second_weight: Tensor) -> Tensor:
    """The weighted sum of two uint8 tensors, rounded; weights in 2⁻²² steps keep it inside 32 bits."""
    total = first.int().mul_(first_weight).add_(second.int().mul_(second_weight))
    return total.add_(2**21).bitwise_right_shift_(22).to(torch.uint8)


def enlarge(images: Tensor, height: int, width: int, rows: Tensor, columns: Tensor) -> Tensor:
    """The chosen rows and columns ([N, h], [N, w]) of the images enlarged to height × width, bilinear.

    The arithmetic is PIL's, in whole numbers: first along the width, rounded to uint8, then along the height.

    >>> image = torch.tensor([0, 100], dtype=torch.uint8).expand(1, 1, 2, 2)
    >>> every = torch.arange(4)[None]
    >>> enlarge(image, 4, 4, every, every)[0, 0, 0].tolist()
    [0, 25, 75, 100]
    """
    old_height, old_width = images.shape[2:]
    if height < old_height or width < old_width:
        raise ValueError(f"enlarge cannot make {old_height}×{old_width} images smaller ({height}×{width})")
    first, near, far = (part.to(images.device)[columns] for part in _bilinear_taps(old_width, width))
    every = torch.arange(old_height, device=images.device).expand(len(images), -1)
    left, right = pick_pixels(images, every, first), pick_pixels(images, every, first, right=1)
    wide = _mix(left, right, near[:, None, None, :], far[:, None, None, :])
    first, near, far = (part.to(images.device)[rows] for part in _bilinear_taps(old_height, height))
    upper, lower = pick_rows(wide, first), pick_rows(wide, first + 1)
    return _mix(upper, lower, near[:, None, :, None], far[:, None, :, None])


def crop_view(images: Tensor, numbers: Tensor, may_flip: bool = True) -> Tensor:
    """The usual weak view: flip with probability ½, reflect-pad, crop. `numbers` is draw(N, WEAK_NUMBERS, …).

    >>> images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8)
    >>> middle = torch.tensor([[0.9, 0.5, 0.5]])                   # no flip, the window in the middle
    >>> torch.equal(crop_view(images, middle), images)
    True
    """
    height, width = images.shape[2:]
    top = choose(numbers[:, 1], 2 * padding_of(height) + 1)
    left = choose(numbers[:, 2], 2 * padding_of(width) + 1)
    return reflect_crop(images, top, left, (numbers[:, 0] < 0.5) & may_flip)


def resize_crop_view(images: Tensor, numbers: Tensor, may_flip: bool = True, side: int = 0) -> Tensor:
    """CBAFed's weak view: enlarge by a quarter (`enlarged`) or to `side`, crop the old size, flip with probability ½.

    Only the pixels inside the window are computed, few images at a time: what is between stays in the cache of
    the processor, which makes it faster by a third.

    >>> view = resize_crop_view(torch.full((2, 1, 8, 8), 9, dtype=torch.uint8), torch.rand(2, 3))
    >>> view.shape, view.unique().tolist()
    (torch.Size([2, 1, 8, 8]), [9])
    """
    height, width = images.shape[2:]
    taller, wider = side or enlarged(height), side or enlarged(width)
    top = choose(numbers[:, 1], taller - height + 1).to(images.device)
    left = choose(numbers[:, 2], wider - width + 1).to(images.device)
    columns = _facing(_span(left, width), ((numbers[:, 0] < 0.5) & may_flip).to(images.device))
    pieces = zip(images.split(128), _span(top, height).split(128), columns.split(128), strict=True)
    return torch.cat([enlarge(piece, taller, wider, *places) for piece, *places in pieces])


def cutout(images: Tensor, across: Tensor, down: Tensor, side: Tensor, fill: tuple[int, ...]) -> Tensor:
    """A square of one colour: its centre at a share `across` and `down` of the image, `side` pixels wide.

    As in the public FixMatch code: a square that would begin beyond the left or upper edge is moved inside,
    one that ends beyond the right or lower edge is cut off. `fill` has one value per channel.

    >>> image = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    >>> holes = cutout(image, torch.tensor([0.0]), torch.tensor([0.95]), torch.tensor([4.0]), (127,))
    >>> (holes[0, 0] == 127).nonzero()[[0, -1]].tolist()           # rows 5–7 (cut off), columns 0–3 (moved)
    [[5, 0], [7, 3]]
    """
    height, width = images.shape[2:]
    left = (across.double() * width - side / 2).clamp(min=0).floor()
    top = (down.double() * height - side / 2).clamp(min=0).floor()
    left, right, top, bottom = (
        per_image(edge, images) for edge in (left, left + side.floor(), top, top + side.floor())
    )
    x = torch.arange(width, device=images.device)
    y = torch.arange(height, device=images.device).view(-1, 1)
    rows = ((y >= top) & (y < bottom)).view(torch.uint8) * 255
    columns = ((x >= left) & (x < right)).view(torch.uint8) * 255
    hole = rows & columns
    color = torch.tensor(fill, dtype=torch.uint8, device=images.device).view(-1, 1, 1)
    return (images & ~hole) | (color & hole)
