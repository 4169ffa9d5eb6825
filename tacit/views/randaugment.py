"""RandAugment for a batch: every image draws its own operations; images with the same operation go together.

A pool says which operations there are, how many are picked, how strong they are and what cutout follows. The
first three pools are those of the public code that the papers used, the last is DDRFed's text (see docs/views.md):

    fixmatch       2 of 14, each used with probability ½, strength 1 … 9 of 10; a hole of half the side
    ssl            3 of 14, all used, any strength; a hole of up to half the width
    semifl-legacy  2 of 15 made for large images, each used with probability ½, full strength; no further hole
    ddrfed         3 of 14, all used, strength 5 of 10; no hole
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from tacit.views.affine import COEFFICIENTS, sample_nearest
from tacit.views.augment import choose, cutout
from tacit.views.pixels import (
    autocontrast,
    brightness,
    color,
    contrast,
    equalize,
    invert,
    posterize,
    sharpness,
    solarize,
)

PoolName = Literal["fixmatch", "ssl", "semifl-legacy", "ddrfed"]

PICK_NUMBERS = 5  # random numbers for one pick: operation, whether used, strength, two for direction or place
HOLE_NUMBERS = 3  # random numbers for the last cutout: across, down, side

PIXELWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": lambda images, _: autocontrast(images),
    "equalize": lambda images, _: equalize(images),
    "invert": lambda images, _: invert(images),
    "posterize": posterize,
    "solarize": solarize,
    "brightness": brightness,
    "color": color,
    "contrast": contrast,
    "sharpness": sharpness,
}


@dataclass(frozen=True)
class Operation:
    """An operation and its range: value = start + span · level / 10 for a level of 0 … 10.

    >>> Operation("posterize", start=4, span=4, whole=True).value(torch.tensor([1.0, 9.0]), None, 32).tolist()
    [4.0, 7.0]
    >>> backwards = torch.tensor([False, True])
    >>> Operation("rotate", span=30, signed=True).value(torch.tensor([5.0, 5.0]), backwards, 32).tolist()
    [15.0, -15.0]
    """

    name: str
    start: float = 0.0
    span: float = 0.0
    signed: bool = False  # the value is negative half of the time
    of_side: bool = False  # the value is a share of the image's side
    whole: bool = False  # the fraction is cut off

    def value(self, level: Tensor, backwards: Tensor | None, side: int) -> Tensor:
        value = self.start + level.double() * self.span / 10
        if self.signed and backwards is not None:
            value = torch.where(backwards, -value, value)
        if self.of_side:
            value = value * side
        return value.trunc() if self.whole else value


@dataclass(frozen=True)
class Pool:
    """What RandAugment may do. The functions turn a random number in [0, 1) into what they are named after."""

    operations: tuple[Operation, ...]
    picks: int  # operations an image draws, with replacement
    chance: float  # with which a drawn operation is used
    level: Callable[[Tensor], Tensor]  # strength, 0 … 10
    hole: Callable[[Tensor], Tensor] | None  # side of the last cutout as a share of the width, or no such hole
    fill: tuple[int, int, int]  # colour of holes

    @property
    def numbers(self) -> int:
        """Random numbers that one image takes."""
        return self.picks * PICK_NUMBERS + (HOLE_NUMBERS if self.hole else 0)

    def color(self, channels: int) -> tuple[int, ...]:
        """The colour of holes, or its luminance for grey images."""
        red, green, blue = self.fill
        return self.fill if channels == 3 else ((red * 19595 + green * 38470 + blue * 7471 + 2**15) >> 16,)


_SMALL_IMAGE_OPERATIONS = (
    Operation("autocontrast"),
    Operation("brightness", start=0.05, span=0.9),
    Operation("color", start=0.05, span=0.9),
    Operation("contrast", start=0.05, span=0.9),
    Operation("equalize"),
    Operation("identity"),
    Operation("posterize", start=4, span=4, whole=True),
    Operation("sharpness", start=0.05, span=0.9),
    Operation("solarize", start=256, span=-256),
    Operation("rotate", span=30, signed=True),
    Operation("shear_x", span=0.3, signed=True),
    Operation("shear_y", span=0.3, signed=True),
)

_SSL_OPERATIONS = (
    *_SMALL_IMAGE_OPERATIONS,
    Operation("translate_x", span=0.3, signed=True, of_side=True),
    Operation("translate_y", span=0.3, signed=True, of_side=True),
)

POOLS = MappingProxyType(
    {
        "fixmatch": Pool(
            operations=(
                *_SMALL_IMAGE_OPERATIONS,
                Operation("translate_x", span=0.3, signed=True, of_side=True, whole=True),
                Operation("translate_y", span=0.3, signed=True, of_side=True, whole=True),
            ),
            picks=2,
            chance=0.5,
            level=lambda number: 1 + choose(number, 9),
            hole=lambda number: torch.full_like(number, 0.5),
            fill=(127, 127, 127),
        ),
        "ssl": Pool(
            operations=_SSL_OPERATIONS,
            picks=3,
            chance=1.0,
            level=lambda number: 10 * number,
            hole=lambda number: number / 2,
            fill=(125, 123, 114),
        ),
        "semifl-legacy": Pool(
            operations=(
                Operation("autocontrast"),
                Operation("brightness", start=0.1, span=1.8),
                Operation("color", start=0.1, span=1.8),
                Operation("contrast", start=0.1, span=1.8),
                Operation("cutout", span=40),
                Operation("equalize"),
                Operation("invert"),
                Operation("posterize", span=4),
                Operation("rotate", span=30, signed=True),
                Operation("sharpness", start=0.1, span=1.8),
                Operation("shear_x", span=0.3, signed=True),
                Operation("shear_y", span=0.3, signed=True),
                Operation("solarize", start=256, span=-256),
                Operation("translate_x", span=100, signed=True),
                Operation("translate_y", span=100, signed=True),
            ),
            picks=2,
            chance=0.5,  # the public code draws a probability in .2 … .8 first: on average, and so in effect, ½
            level=lambda number: torch.full_like(number, 10),
            hole=None,
            fill=(127, 127, 127),
        ),
        "ddrfed": Pool(  # Sec. 4.1.1: "three random transformations … with an intensity level of 5"
            operations=_SSL_OPERATIONS,
            picks=3,
            chance=1.0,
            level=lambda number: torch.full_like(number, 5),
            hole=None,
            fill=(125, 123, 114),
        ),
    }
)


def _apply_pick(images: Tensor, numbers: Tensor, pool: Pool) -> Tensor:
    """Each image's next operation. `numbers` is [N, PICK_NUMBERS], on the CPU."""
    height, width = images.shape[2:]
    choice = choose(numbers[:, 0], len(pool.operations)).masked_fill_(numbers[:, 1] >= pool.chance, -1)
    level, backwards = pool.level(numbers[:, 2]), numbers[:, 3] < 0.5
    places, changed = [], []
    moved, coefficients = [], []
    for code, operation in enumerate(pool.operations):
        chosen = (choice == code).nonzero().squeeze(1)
        if operation.name == "identity" or not len(chosen):
            continue
        side = height if operation.name == "translate_y" else width
        value = operation.value(level[chosen], backwards[chosen], side)
        if operation.name in COEFFICIENTS:  # all moves are one kind of work: done together below
            moved.append(chosen)
            coefficients.append(COEFFICIENTS[operation.name](value, height, width))
            continue
        group = images.index_select(0, chosen.to(images.device))
        places.append(chosen)
        if operation.name == "cutout":
            across, down = numbers[chosen, 3], numbers[chosen, 4]
            changed.append(cutout(group, across, down, value, pool.color(images.shape[1])))
        else:
            changed.append(PIXELWISE[operation.name](group, value))
    if moved:
        chosen = torch.cat(moved)
        places.append(chosen)
        changed.append(sample_nearest(images.index_select(0, chosen.to(images.device)), torch.cat(coefficients)))
    return _replace(images, places, changed)


def _replace(images: Tensor, places: list[Tensor], changed: list[Tensor]) -> Tensor:
    """The images, with changed ones at their places: one look-up over both, which copies whole images."""
    if not places:
        return images
    source, place = torch.arange(len(images)), torch.cat(places)
    source[place] = len(images) + torch.arange(len(place))
    return torch.cat([images, *changed]).index_select(0, source.to(images.device))


def randaugment(images: Tensor, numbers: Tensor, pool: Pool) -> Tensor:
    """RandAugment with each image's own operations. `numbers` is draw(N, pool.numbers, …), float64 on the CPU.

    >>> pool = POOLS["semifl-legacy"]
    >>> [operation.name for operation in pool.operations].index("invert")
    6
    >>> unused = [0.0, 0.9, 0, 0, 0]                              # the second number is not below ½: not used
    >>> numbers = torch.tensor([[6.5 / 15, 0.0, 0, 0, 0, *unused], unused * 2], dtype=torch.float64)
    >>> images = torch.full((2, 1, 8, 8), 55, dtype=torch.uint8)
    >>> randaugment(images, numbers, pool)[:, 0, 0, 0].tolist()        # the first is inverted, the second not
    [200, 55]
    """
    for pick in range(pool.picks):
        images = _apply_pick(images, numbers[:, pick * PICK_NUMBERS : (pick + 1) * PICK_NUMBERS], pool)
    if pool.hole:
        across, down, size = numbers[:, pool.picks * PICK_NUMBERS :].unbind(1)
        side = pool.hole(size) * images.shape[3]
        images = cutout(images, across, down, side, pool.color(images.shape[1]))
    return images
