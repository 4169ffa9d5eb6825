"""Rotation, shear and translation of a batch, each image by its own amount, equal to PIL's to the last bit.

Six coefficients [a, b, c, d, e, f] an image say where a destination pixel (x, y) is read: at a·x + b·y + c across
and d·x + e·y + f down, from the nearest source pixel; what lies outside is black. PIL does this in whole numbers
(2⁻¹⁶ steps), which torch repeats exactly on any device.
"""

import torch
from torch import Tensor


def sample_nearest(images: Tensor, coefficients: Tensor) -> Tensor:
    """Reads each destination pixel from the nearest source pixel; outside is 0. Coefficients are [N, 6].

    >>> image = torch.tensor([[[[1, 2, 3]]]], dtype=torch.uint8)
    >>> sample_nearest(image, torch.tensor([[1.0, 0, 1, 0, 1, 0]])).flatten().tolist()
    [2, 3, 0]
    """
    count, channels, height, width = images.shape
    a, b, c, d, e, f = coefficients.double().unbind(1)
    centred = torch.stack([a, b, c + 0.5 * a + 0.5 * b, d, e, f + 0.5 * d + 0.5 * e])  # pixel centres: halves
    fixed = (centred * 2**16 + 0.5).floor().to(torch.int32)
    a, b, c, d, e, f = fixed.to(images.device).view(6, count, 1, 1)
    x = torch.arange(width, dtype=torch.int32, device=images.device)
    y = torch.arange(height, dtype=torch.int32, device=images.device).view(-1, 1)
    column = ((a * x + c) + b * y).bitwise_right_shift_(16)
    row = ((d * x + f) + e * y).bitwise_right_shift_(16)
    inside = (column >= 0).logical_and_(column < width).logical_and_(row >= 0).logical_and_(row < height)
    place = row.clamp_(0, height - 1).mul_(width).add_(column.clamp_(0, width - 1)).long()
    flat = images.reshape(count, channels, height * width)
    picked = flat.gather(2, place.view(count, 1, height * width).expand(-1, channels, -1))
    return picked.view(images.shape).mul_(inside.unsqueeze(1))


def rotation(degrees: Tensor, height: int, width: int) -> Tensor:
    """Coefficients of a turn about the middle, anticlockwise as one looks at the image."""
    angle = torch.deg2rad(degrees.double())
    cosine, sine = angle.cos(), angle.sin()
    across = width / 2 - cosine * (width / 2) + sine * (height / 2)
    down = height / 2 - sine * (width / 2) - cosine * (height / 2)
    return torch.stack([cosine, -sine, across, sine, cosine, down], dim=1)


def _moved(place: int, amount: Tensor) -> Tensor:
    """The coefficients that change nothing, but for the one at `place`."""
    coefficients = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=torch.float64).repeat(len(amount), 1)
    coefficients[:, place] = amount.double()
    return coefficients


def shear_across(amount: Tensor, height: int, width: int) -> Tensor:
    """Coefficients of a shear: a row moves left by its distance from the top times the amount."""
    return _moved(1, amount)


def shear_down(amount: Tensor, height: int, width: int) -> Tensor:
    """Coefficients of a shear: a column moves up by its distance from the left times the amount."""
    return _moved(3, amount)


def shift_across(pixels: Tensor, height: int, width: int) -> Tensor:
    """Coefficients of a move to the left by so many pixels (the nearest whole number, ½ goes up)."""
    return _moved(2, (pixels.double() + 0.5).floor())


def shift_down(pixels: Tensor, height: int, width: int) -> Tensor:
    """Coefficients of a move upwards by so many pixels (the nearest whole number, ½ goes up)."""
    return _moved(5, (pixels.double() + 0.5).floor())


COEFFICIENTS = {
    "rotate": rotation,
    "shear_x": shear_across,
    "shear_y": shear_down,
    "translate_x": shift_across,
    "translate_y": shift_down,
}


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """A turn about the middle, anticlockwise.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]], dtype=torch.uint8)
    >>> rotate(image, torch.tensor([90.0]))[0, 0].tolist()
    [[2, 4], [1, 3]]
    """
    return sample_nearest(images, rotation(degrees, *images.shape[2:]))


def shear_x(images: Tensor, amount: Tensor) -> Tensor:
    """A row moves left by its distance from the top times the amount.

    >>> image = torch.tensor([[[[1, 2, 3], [1, 2, 3]]]], dtype=torch.uint8)
    >>> shear_x(image, torch.tensor([1.0]))[0, 0].tolist()         # the rows' middles lie at ½ and 1½
    [[2, 3, 0], [3, 0, 0]]
    """
    return sample_nearest(images, shear_across(amount, *images.shape[2:]))


def shear_y(images: Tensor, amount: Tensor) -> Tensor:
    """A column moves up by its distance from the left times the amount.

    >>> image = torch.tensor([[[[1, 1], [2, 2], [3, 3]]]], dtype=torch.uint8)
    >>> shear_y(image, torch.tensor([1.0]))[0, 0].tolist()
    [[2, 3], [3, 0], [0, 0]]
    """
    return sample_nearest(images, shear_down(amount, *images.shape[2:]))


def translate_x(images: Tensor, pixels: Tensor) -> Tensor:
    """A move to the left by so many pixels (to the right if negative).

    >>> translate_x(torch.tensor([[[[1, 2, 3]]]], dtype=torch.uint8), torch.tensor([-1.0])).flatten().tolist()
    [0, 1, 2]
    """
    return sample_nearest(images, shift_across(pixels, *images.shape[2:]))


def translate_y(images: Tensor, pixels: Tensor) -> Tensor:
    """A move upwards by so many pixels (downwards if negative).

    >>> translate_y(torch.tensor([[[[1], [2], [3]]]], dtype=torch.uint8), torch.tensor([1.0])).flatten().tolist()
    [2, 3, 0]
    """
    return sample_nearest(images, shift_down(pixels, *images.shape[2:]))
