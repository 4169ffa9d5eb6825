"""RandAugment: each image replayed on its own with PIL from the same random numbers, and the pools' statistics."""

import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from tacit.views.augment import draw
from tacit.views.randaugment import HOLE_NUMBERS, PICK_NUMBERS, POOLS, randaugment

AFFINE = Image.Transform.AFFINE
Step = Callable[[Image.Image, float, int], Image.Image]  # image, level of 0 … 10, sign


def noise(count: int, channels: int = 3, size: int = 32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)


def slopes(count: int, channels: int, size: int) -> Tensor:
    """Smooth pictures, none alike: operations show on them as they do on photographs."""
    down, across = torch.arange(size).view(1, 1, -1, 1), torch.arange(size).view(1, 1, 1, -1)
    number, channel = torch.arange(count).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return ((number * 7 + channel * 50 + down * (number % 5) + across * 3) % 256).to(torch.uint8)


def shared_steps(shift: Callable[[Image.Image, float, int], float]) -> dict[str, Step]:
    """The 14 operations of `fixmatch` and `ssl`; they differ in how far a translation goes."""
    return {
        "autocontrast": lambda image, level, sign: ImageOps.autocontrast(image),
        "brightness": lambda image, level, sign: ImageEnhance.Brightness(image).enhance(0.05 + 0.09 * level),
        "color": lambda image, level, sign: ImageEnhance.Color(image).enhance(0.05 + 0.09 * level),
        "contrast": lambda image, level, sign: ImageEnhance.Contrast(image).enhance(0.05 + 0.09 * level),
        "equalize": lambda image, level, sign: ImageOps.equalize(image),
        "identity": lambda image, level, sign: image,
        "posterize": lambda image, level, sign: ImageOps.posterize(image, 4 + int(0.4 * level)),
        "sharpness": lambda image, level, sign: ImageEnhance.Sharpness(image).enhance(0.05 + 0.09 * level),
        "solarize": lambda image, level, sign: ImageOps.solarize(image, 256 - 25.6 * level),
        "rotate": lambda image, level, sign: image.rotate(sign * 3 * level),
        "shear_x": lambda image, level, sign: image.transform(image.size, AFFINE, (1, sign * 0.03 * level, 0, 0, 1, 0)),
        "shear_y": lambda image, level, sign: image.transform(image.size, AFFINE, (1, 0, 0, sign * 0.03 * level, 1, 0)),
        "translate_x": lambda image, level, sign: image.transform(
            image.size, AFFINE, (1, 0, shift(image, level, sign), 0, 1, 0)
        ),
        "translate_y": lambda image, level, sign: image.transform(
            image.size, AFFINE, (1, 0, 0, 0, 1, shift(image, level, sign))
        ),
    }


FIXMATCH = shared_steps(lambda image, level, sign: int(sign * 0.03 * level * image.width))
SSL = shared_steps(lambda image, level, sign: sign * 0.03 * level * image.width)
LEGACY: dict[str, Step] = {
    "autocontrast": lambda image, level, sign: ImageOps.autocontrast(image),
    "brightness": lambda image, level, sign: ImageEnhance.Brightness(image).enhance(1.9),
    "color": lambda image, level, sign: ImageEnhance.Color(image).enhance(1.9),
    "contrast": lambda image, level, sign: ImageEnhance.Contrast(image).enhance(1.9),
    "cutout": lambda image, level, sign: image,  # replayed in `replay`: it needs the place
    "equalize": lambda image, level, sign: ImageOps.equalize(image),
    "invert": lambda image, level, sign: ImageOps.invert(image),
    "posterize": lambda image, level, sign: ImageOps.posterize(image, 4),
    "rotate": lambda image, level, sign: image.rotate(sign * 30),
    "sharpness": lambda image, level, sign: ImageEnhance.Sharpness(image).enhance(1.9),
    "shear_x": lambda image, level, sign: image.transform(image.size, AFFINE, (1, sign * 0.3, 0, 0, 1, 0)),
    "shear_y": lambda image, level, sign: image.transform(image.size, AFFINE, (1, 0, 0, sign * 0.3, 1, 0)),
    "solarize": lambda image, level, sign: ImageOps.invert(image),  # threshold 0
    "translate_x": lambda image, level, sign: Image.new(image.mode, image.size, 0),  # 100 pixels of 32
    "translate_y": lambda image, level, sign: Image.new(image.mode, image.size, 0),
}


def hole(image: Image.Image, across: float, down: float, side: float, fill: tuple[int, ...]) -> Image.Image:
    left, top = int(max(0, across * image.width - side / 2)), int(max(0, down * image.height - side / 2))
    if side >= 1:
        box = (left, top, left + int(side) - 1, top + int(side) - 1)
        ImageDraw.Draw(image).rectangle(box, fill if image.mode == "RGB" else fill[-1])
    return image


def replay(image: Image.Image, row: list[float], pool: str) -> Image.Image:
    """One image, one operation after the other."""
    steps = {"fixmatch": FIXMATCH, "ssl": SSL, "semifl-legacy": LEGACY, "ddrfed": SSL}[pool]
    for pick in range(3 if pool in ("ssl", "ddrfed") else 2):
        which, chance, strength, third, fourth = row[5 * pick : 5 * pick + 5]
        name = list(steps)[int(which * len(steps))]
        level = {"fixmatch": 1 + int(strength * 9), "ssl": 10 * strength, "semifl-legacy": 10, "ddrfed": 5}[pool]
        if pool in ("ssl", "ddrfed") or chance < 0.5:
            sign = -1 if third < 0.5 else 1
            image = steps[name](image, level, sign)
            if name == "cutout":
                image = hole(image, third, fourth, 40, (127, 127, 127))
    if pool == "fixmatch":
        image = hole(image, row[10], row[11], image.width / 2, (127, 127, 127))
    if pool == "ssl":
        fill = (125, 123, 114) if image.mode == "RGB" else (123,)
        image = hole(image, row[15], row[16], row[17] / 2 * image.width, fill)
    return image


@pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"),
    reason="PIL's blend may round otherwise on this processor, and what follows can enlarge that",
)
@pytest.mark.parametrize("pool", list(POOLS))
@pytest.mark.parametrize(("channels", "size"), [(3, 32), (1, 28)])
def test_every_image_equals_its_own_replay_with_pil(pool: str, channels: int, size: int) -> None:
    images = torch.cat([slopes(250, channels, size), noise(50, channels, size)])
    numbers = draw(len(images), POOLS[pool].numbers, torch.Generator().manual_seed(5))
    ours = randaugment(images, numbers, POOLS[pool])
    for index, image in enumerate(images):
        array = image[0].numpy() if channels == 1 else image.permute(1, 2, 0).contiguous().numpy()
        theirs = torch.from_numpy(np.array(replay(Image.fromarray(array), numbers[index].tolist(), pool)))
        theirs = theirs.unsqueeze(0) if channels == 1 else theirs.permute(2, 0, 1)
        assert torch.equal(ours[index], theirs), f"image {index}"


def test_pools_have_the_published_operations() -> None:
    assert {operation.name for operation in POOLS["fixmatch"].operations} == set(FIXMATCH)
    assert {operation.name for operation in POOLS["ssl"].operations} == set(SSL)
    assert {operation.name for operation in POOLS["semifl-legacy"].operations} == set(LEGACY)
    assert [len(pool.operations) for pool in POOLS.values()] == [14, 14, 15, 14]
    assert [pool.numbers for pool in POOLS.values()] == [
        2 * PICK_NUMBERS + HOLE_NUMBERS,
        3 * PICK_NUMBERS + HOLE_NUMBERS,
        2 * PICK_NUMBERS,
        3 * PICK_NUMBERS,
    ]


def test_ddrfed_s_views_are_three_operations_at_strength_5_and_no_hole() -> None:
    """Sec. 4.1.1. With each draw a rotation, all images are turned by three times 15 degrees, whatever the chance."""
    pool = POOLS["ddrfed"]
    assert (pool.picks, pool.chance, pool.hole) == (3, 1.0, None)
    assert pool.level(torch.rand(100)).unique().tolist() == [5.0]
    assert pool.operations == POOLS["ssl"].operations
    place = [operation.name for operation in pool.operations].index("rotate")
    numbers = draw(50, pool.numbers, torch.Generator().manual_seed(0))
    for pick in range(3):
        numbers[:, pick * PICK_NUMBERS] = (place + 0.5) / 14
        numbers[:, pick * PICK_NUMBERS + 3] = 0.9  # the same direction
    views = randaugment(noise(1).expand(50, -1, -1, -1), numbers, pool)
    assert len(views.flatten(1).unique(dim=0)) == 1


def test_legacy_pool_blackens_an_eighth() -> None:
    """A pick translates (2 of 15) and is used (½): 1/15. Twice: 1 − (14/15)² = 12.9 % of the views lose all content.

    Some of them are inverted, solarised or cut out afterwards (3 of 15, used ½), so that 1/15 + 1/15 · (1 − 1/15 −
    1/10) = 12.2 % are black in the end.
    """
    count = 12_000
    pool = POOLS["semifl-legacy"]
    numbers = draw(count, pool.numbers, torch.Generator().manual_seed(11))
    views = randaugment(noise(200, size=32).repeat(count // 200, 1, 1, 1), numbers, pool)
    black = (views.amax(dim=(1, 2, 3)) == 0).double().mean().item()
    assert black == pytest.approx(0.1222, abs=0.012)  # four standard deviations
    few_values = torch.tensor([len(view.unique()) <= 2 for view in views[:3000]])  # black, white, black and hole
    assert few_values.double().mean().item() == pytest.approx(0.129, abs=0.025)


def test_fixmatch_uses_an_operation_half_of_the_time_at_levels_1_to_9() -> None:
    """Seen in the picture: brightness alone scales a flat picture by .14, .23, … .86 (+ the hole)."""
    pool = POOLS["fixmatch"]
    names = [operation.name for operation in pool.operations]
    count = 4000
    numbers = draw(count, pool.numbers, torch.Generator().manual_seed(2))
    numbers[:, 0] = (names.index("brightness") + 0.5) / len(names)
    numbers[:, PICK_NUMBERS] = (names.index("identity") + 0.5) / len(names)
    numbers[:, 2 * PICK_NUMBERS : 2 * PICK_NUMBERS + 2] = 0.0  # the hole in the upper left corner
    views = randaugment(torch.full((count, 1, 8, 8), 200, dtype=torch.uint8), numbers, pool)
    values, counts = views[:, 0, 7, 7].unique(return_counts=True)
    expected = [int(200 * np.float32(0.05 + 0.09 * level)) for level in range(1, 10)]
    assert values.tolist() == [*expected, 200]
    assert counts[-1].item() == pytest.approx(count / 2, abs=4 * (count / 4) ** 0.5)
    assert (counts[:-1] - count / 18).abs().max().item() < 4.5 * (count / 18) ** 0.5


def test_hole_of_half_the_side_in_fixmatch_up_to_half_in_ssl() -> None:
    areas = {}
    for name in ("fixmatch", "ssl"):
        pool = POOLS[name]
        numbers = draw(3000, pool.numbers, torch.Generator().manual_seed(8))
        numbers[:, : pool.picks * PICK_NUMBERS : PICK_NUMBERS] = 5.5 / 14  # identity only
        assert pool.operations[5].name == "identity"
        views = randaugment(torch.zeros(3000, 3, 32, 32, dtype=torch.uint8), numbers, pool)
        assert set(views[:, 0].unique().tolist()) == {0, pool.fill[0]}
        assert set(views[:, 2].unique().tolist()) == {0, pool.fill[2]}
        hit = views[:, 0] > 0
        areas[name] = torch.stack([hit.any(2).sum(1), hit.any(1).sum(1)])  # height and width of the hole
    # at 32 pixels: 16 wide, moved inside on the left, cut off down to 9 on the right
    assert areas["fixmatch"].max() == 16
    assert areas["fixmatch"].min() == 9
    assert areas["ssl"].max() == 15
    assert areas["ssl"].min() == 0
    whole = areas["fixmatch"] == 16
    assert whole.double().mean().item() == pytest.approx(25 / 32, abs=0.025)  # centres left of 25


def test_operations_are_equally_likely_and_drawn_for_each_image() -> None:
    """Every operation leaves its own trace on one picture; with no hole in the way, 14 kinds of view appear."""
    pool = POOLS["ssl"]
    count = 2800
    numbers = draw(count, pool.numbers, torch.Generator().manual_seed(4))
    numbers[:, [PICK_NUMBERS, 2 * PICK_NUMBERS]] = 5.5 / 14  # one real operation, then identity twice
    numbers[:, 2] = 0.43  # the same strength …
    numbers[:, 3] = 0.9  # … and direction for all
    numbers[:, -1] = 0.0  # no hole
    views = randaugment(noise(1).expand(count, -1, -1, -1), numbers, pool)
    _, counts = views.flatten(1).unique(dim=0, return_counts=True)
    # noise fills the whole range already: autocontrast and identity look alike
    assert len(counts) == 13
    assert counts.max().item() == pytest.approx(400, abs=80)
    assert (counts.sort().values[:-1] - 200).abs().max().item() < 60
