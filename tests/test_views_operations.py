"""Every operation against PIL: equal to the last bit, grey and colour, square and not, at several magnitudes."""

import math
import platform
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter, ImageOps
from torch import Tensor

from tacit.views import affine, augment, pixels
from tacit.views.randaugment import POOLS, randaugment

# PIL's blend is one multiplication and one addition; compilers for other processors may fuse and round them once
BLEND_TOLERANCE = 0 if platform.machine().lower() in ("x86_64", "amd64") else 1

SHAPES = [(3, 32, 32), (1, 28, 28), (3, 8, 8), (1, 13, 20), (3, 21, 10)]


def pictures(channels: int, height: int, width: int) -> Tensor:
    """Noise, a dark and a pale picture with few values, a slope, two flat ones, one with a single odd pixel."""
    generator = torch.Generator().manual_seed(channels * 1000 + height + width)
    shape = (3, channels, height, width)
    noise = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    dark = torch.randint(3, 40, shape, generator=generator, dtype=torch.uint8)
    pale = torch.randint(180, 250, shape, generator=generator, dtype=torch.uint8)
    slope = torch.linspace(10, 240, height * width).view(1, 1, height, width).expand(1, channels, -1, -1).byte()
    flat = torch.tensor([0, 77, 255]).view(3, 1, 1, 1).expand(shape).byte()
    spot = torch.full((1, channels, height, width), 90, dtype=torch.uint8)
    spot[..., 4, 5] = 200
    return torch.cat([noise, dark, pale, slope, flat, spot])


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).contiguous().numpy())


def from_pil(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array.unsqueeze(0) if array.dim() == 2 else array.permute(2, 0, 1)


def check(ours: Tensor, images: Tensor, theirs: Callable[[Image.Image, int], Image.Image], tolerance: int = 0) -> None:
    """`theirs` gets a PIL image and its number; the result must be the same, as a rule to the last bit."""
    expected = torch.stack([from_pil(theirs(to_pil(image), index)) for index, image in enumerate(images)])
    assert ours.dtype == torch.uint8
    assert ours.shape == expected.shape
    assert (ours.int() - expected.int()).abs().max().item() <= tolerance


def amounts(low: float, high: float, images: Tensor) -> Tensor:
    """A different value for every image, both ends included."""
    return torch.linspace(low, high, len(images), dtype=torch.float64)


@pytest.fixture(params=SHAPES, ids=str)
def images(request: pytest.FixtureRequest) -> Tensor:
    return pictures(*request.param)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pixels.autocontrast, ImageOps.autocontrast),
        (pixels.equalize, ImageOps.equalize),
        (pixels.invert, ImageOps.invert),
    ],
)
def test_operations_without_magnitude(
    images: Tensor, ours: Callable[[Tensor], Tensor], theirs: Callable[[Image.Image], Image.Image]
) -> None:
    check(ours(images), images, lambda image, _: theirs(image))


def test_equalize_with_room_to_spread() -> None:
    """Large enough that more than 255 pixels share a step, so the table is not the identity."""
    images = pictures(3, 64, 64)
    ours = pixels.equalize(images)
    assert not torch.equal(ours[0], images[0])
    check(ours, images, lambda image, _: ImageOps.equalize(image))


@pytest.mark.parametrize("bits", [1, 2, 4, 5, 7, 8])
def test_posterize(images: Tensor, bits: int) -> None:
    ours = pixels.posterize(images, torch.full((len(images),), bits))
    check(ours, images, lambda image, _: ImageOps.posterize(image, bits))


@pytest.mark.parametrize("ends", [(0.0, 256.0), (256.0, 0.0), (0.0, 0.0), (256.0, 256.0), (100.3, 110.9)])
def test_solarize(images: Tensor, ends: tuple[float, float]) -> None:
    threshold = amounts(*ends, images)  # fractions: PIL says int but compares any number
    ours = pixels.solarize(images, threshold)
    check(ours, images, lambda image, index: ImageOps.solarize(image, float(threshold[index])))  # type: ignore[arg-type]


@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.05, 0.95), (0.95, 0.14), (1.0, 1.9), (1.9, 1.9), (0.5, 0.5)])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pixels.brightness, ImageEnhance.Brightness),
        (pixels.color, ImageEnhance.Color),
        (pixels.contrast, ImageEnhance.Contrast),
        (pixels.sharpness, ImageEnhance.Sharpness),
    ],
)
def test_enhancers(
    images: Tensor, ours: Callable[[Tensor, Tensor], Tensor], theirs: type, ends: tuple[float, float]
) -> None:
    factor = amounts(*ends, images)
    check(
        ours(images, factor),
        images,
        lambda image, index: theirs(image).enhance(float(factor[index])),
        BLEND_TOLERANCE,
    )


def test_smoothing_alone(images: Tensor) -> None:
    ours = pixels.sharpness(images, torch.zeros(len(images)))
    check(ours, images, lambda image, _: image.filter(ImageFilter.SMOOTH))


@pytest.mark.parametrize("ends", [(-30.0, 30.0), (30.0, 30.0), (3.0, 27.0), (-0.7, 0.9), (90.0, 270.0)])
def test_rotate(images: Tensor, ends: tuple[float, float]) -> None:
    degrees = amounts(*ends, images)
    ours = affine.rotate(images, degrees)
    check(ours, images, lambda image, index: image.rotate(float(degrees[index])))


@pytest.mark.parametrize("ends", [(-0.3, 0.3), (0.3, 0.3), (-0.3, -0.3), (0.03, 0.27), (-0.011, 0.017)])
@pytest.mark.parametrize("name", ["shear_x", "shear_y"])
def test_shear(images: Tensor, name: str, ends: tuple[float, float]) -> None:
    amount = amounts(*ends, images)
    ours = getattr(affine, name)(images, amount)

    def theirs(image: Image.Image, index: int) -> Image.Image:
        value = float(amount[index])
        data = (1, value, 0, 0, 1, 0) if name == "shear_x" else (1, 0, 0, value, 1, 0)
        return image.transform(image.size, Image.Transform.AFFINE, data)

    check(ours, images, theirs)


@pytest.mark.parametrize("ends", [(-9.0, 9.0), (-9.6, 9.6), (0.5, 0.5), (-0.5, -0.5), (100.0, -100.0)])
@pytest.mark.parametrize("name", ["translate_x", "translate_y"])
def test_translate(images: Tensor, name: str, ends: tuple[float, float]) -> None:
    amount = amounts(*ends, images)
    ours = getattr(affine, name)(images, amount)

    def theirs(image: Image.Image, index: int) -> Image.Image:
        value = float(amount[index])
        data = (1, 0, value, 0, 1, 0) if name == "translate_x" else (1, 0, 0, 0, 1, value)
        return image.transform(image.size, Image.Transform.AFFINE, data)

    check(ours, images, theirs)


@pytest.mark.parametrize("side", [0.0, 1.0, 5.5, 16.0, 40.0])
def test_cutout(images: Tensor, side: float) -> None:
    across, down = amounts(0, 0.999, images), amounts(0.999, 0, images)
    colour = (125, 123, 114)[: images.shape[1]]
    ours = augment.cutout(images, across, down, torch.full_like(across, side), colour)

    def theirs(image: Image.Image, index: int) -> Image.Image:
        left = int(max(0, float(across[index]) * image.width - side / 2))
        top = int(max(0, float(down[index]) * image.height - side / 2))
        if side >= 1:  # PIL draws the second corner, too
            box = (left, top, left + int(side) - 1, top + int(side) - 1)
            ImageDraw.Draw(image).rectangle(box, colour if len(colour) == 3 else colour[0])
        return image

    check(ours, images, theirs)


def test_flip(images: Tensor) -> None:
    flipped = torch.arange(len(images)) % 3 == 0
    ours = augment.flip(images, flipped)
    check(ours, images, lambda image, index: ImageOps.mirror(image) if flipped[index] else image)


def test_reflect_crop(images: Tensor) -> None:
    """PIL cannot pad by reflection: numpy does that part."""
    height, width = images.shape[2:]
    down, across = augment.padding_of(height), augment.padding_of(width)
    top, left = torch.arange(len(images)) % (2 * down + 1), torch.arange(len(images)) * 5 % (2 * across + 1)
    flipped = torch.arange(len(images)) % 2 == 0
    ours = augment.reflect_crop(images, top, left, flipped)
    padded = np.pad(images.numpy(), [(0, 0), (0, 0), (down, down), (across, across)], mode="reflect")

    def theirs(_: Image.Image, index: int) -> Image.Image:
        image = to_pil(torch.from_numpy(padded[index]))
        x, y = int(left[index]), int(top[index])
        image = image.crop((x, y, x + width, y + height))
        return ImageOps.mirror(image) if flipped[index] else image

    check(ours, images, theirs)


@pytest.mark.parametrize("factor", [1.0, 1.25, 1.3, 2.0, 3.7])
def test_enlarge(images: Tensor, factor: float) -> None:
    height, width = math.ceil(images.shape[2] * factor), math.ceil(images.shape[3] * factor)
    rows, columns = torch.arange(height).expand(len(images), -1), torch.arange(width).expand(len(images), -1)
    ours = augment.enlarge(images, height, width, rows, columns)
    check(ours, images, lambda image, _: image.resize((width, height), Image.Resampling.BILINEAR))


def test_enlarge_refuses_to_shrink() -> None:
    with pytest.raises(ValueError, match="cannot make 8×8 images smaller"):
        augment.enlarge(pictures(1, 8, 8), 7, 8, torch.zeros(12, 7).long(), torch.zeros(12, 8).long())


@pytest.mark.parametrize("more", [0, 5])
def test_resize_crop(images: Tensor, more: int) -> None:
    height, width = images.shape[2:]
    side = max(height, width) + more if more else 0
    taller, wider = side or augment.enlarged(height), side or augment.enlarged(width)
    numbers = augment.draw(len(images), 3, torch.Generator().manual_seed(3))

    def theirs(image: Image.Image, index: int) -> Image.Image:
        chance, down, right = numbers[index].tolist()
        top, left = int(down * (taller - height + 1)), int(right * (wider - width + 1))
        image = image.resize((wider, taller), Image.Resampling.BILINEAR)
        image = image.crop((left, top, left + width, top + height))
        return ImageOps.mirror(image) if chance < 0.5 else image

    check(augment.resize_crop_view(images, numbers, side=side), images, theirs)


@pytest.mark.parametrize("name", ["posterize", "solarize", "brightness", "color", "contrast", "sharpness"])
def test_no_operation_writes_to_its_input(name: str) -> None:
    images = pictures(3, 16, 16)
    before = images.clone()
    getattr(pixels, name)(images, torch.full((len(images),), 1.5))
    assert torch.equal(images, before)


@pytest.mark.parametrize("channels", [1, 3])
def test_operations_take_no_images_at_all(channels: int) -> None:
    none, zero = torch.zeros(0, channels, 16, 16, dtype=torch.uint8), torch.zeros(0)
    for alone in (pixels.autocontrast, pixels.equalize, pixels.invert):
        assert alone(none).shape == none.shape
    for name in ("posterize", "solarize", "brightness", "color", "contrast", "sharpness"):
        assert getattr(pixels, name)(none, zero).shape == none.shape
    for name in ("rotate", "shear_x", "shear_y", "translate_x", "translate_y"):
        assert getattr(affine, name)(none, zero).shape == none.shape
    assert augment.cutout(none, zero, zero, zero, (127,) * channels).shape == none.shape
    assert augment.flip(none, zero.bool()).shape == none.shape
    for view in (augment.crop_view, augment.resize_crop_view):
        assert view(none, torch.zeros(0, 3)).shape == none.shape
    for pool in POOLS.values():
        assert randaugment(none, torch.zeros(0, pool.numbers), pool).shape == none.shape
