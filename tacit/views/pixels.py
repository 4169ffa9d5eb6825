"""Operations on pixel values, each image with its own magnitude, equal to PIL's to the last bit.

Images are uint8 [N, C, H, W] with C = 1 (grey) or 3 (red, green, blue); magnitudes are [N]. The formulas keep
PIL's order of arithmetic and its way of cutting off fractions, which is what makes them equal.
"""

import math

import torch
from torch import Tensor

from tacit.views.augment import per_image


def invert(images: Tensor) -> Tensor:
    """255 − value.

    >>> invert(torch.tensor([0, 100, 255], dtype=torch.uint8)).tolist()
    [255, 155, 0]
    """
    return images.bitwise_not()


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keeps the upper `bits` (1 … 8) of each value.

    >>> posterize(torch.full((1, 1, 1, 1), 0b10111011, dtype=torch.uint8), torch.tensor([4])).item() == 0b10110000
    True
    """
    mask = 256 - torch.pow(2, 8 - bits.long())
    return images & per_image(mask, images).to(torch.uint8)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Inverts the values from the threshold on (0: all of them, 256: none).

    >>> solarize(torch.tensor([[[[99, 100]]]], dtype=torch.uint8), torch.tensor([100.0])).flatten().tolist()
    [99, 155]
    """
    whole = threshold.ceil()  # for whole values the same limit
    inverted = images >= per_image(whole.clamp(max=255).to(torch.uint8), images)
    inverted &= per_image(whole < 256, images)
    return images ^ inverted.view(torch.uint8) * 255


def blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """degenerate + factor · (image − degenerate), cut to 0 … 255: what PIL's enhancers have in common.

    >>> grey, image = torch.tensor([[[[100.0]]]]), torch.tensor([[[[200]]]], dtype=torch.uint8)
    >>> [blend(grey, image, torch.tensor([factor])).item() for factor in (0.0, 0.5, 1.0, 1.9)]
    [100, 150, 200, 255]
    """
    result = images.float().sub_(degenerate).mul_(per_image(factor.float(), images)).add_(degenerate)
    return result.clamp_(0, 255).to(torch.uint8)


def grey(images: Tensor) -> Tensor:
    """The luminance as int32 [N, 1, H, W] (ITU-R 601 weights in 2⁻¹⁶ steps, as PIL); grey images as they are.

    >>> grey(torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)).item()     # 255 · 0.299
    76
    """
    values = images.int()
    if images.shape[1] == 1:
        return values
    red, green, blue = values.split(1, dim=1)
    return (red * 19595 + green * 38470 + blue * 7471 + 2**15) >> 16


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """0: black, 1: as it was, 2: twice as bright.

    >>> brightness(torch.full((1, 1, 1, 1), 101, dtype=torch.uint8), torch.tensor([0.5])).item()
    50
    """
    return images.float().mul_(per_image(factor.float(), images)).clamp_(0, 255).to(torch.uint8)


def color(images: Tensor, factor: Tensor) -> Tensor:
    """0: grey, 1: as it was, 2: gaudy. Grey images stay as they are.

    >>> red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    >>> color(red, torch.tensor([0.0])).flatten().tolist()
    [76, 76, 76]
    """
    if images.shape[1] == 1:
        return images.clone()
    return blend(grey(images).float(), images, factor)


def hue(images: Tensor, turn: Tensor) -> Tensor:
    """All colours turned about the grey axis, by a share of the whole circle; brightness stays. Grey images stay.

    >>> reddish = torch.tensor([120, 100, 100], dtype=torch.uint8).view(1, 3, 1, 1)         # luminance 106: +14 −6 −6
    >>> [hue(reddish, torch.tensor([turn])).flatten().tolist() for turn in (0.0, 0.5)]      # half a turn: −14 +6 +6
    [[120, 100, 100], [92, 112, 112]]
    """
    if images.shape[1] == 1:
        return images.clone()
    angle = turn.double() * 2 * math.pi
    cosine, sine = (per_image(part.float(), images) for part in (angle.cos(), angle.sin()))
    colours = images.float()
    luminance = 0.299 * colours[:, :1] + 0.587 * colours[:, 1:2] + 0.114 * colours[:, 2:]
    red, blue = colours[:, :1] - luminance, colours[:, 2:] - luminance  # what the colour differs from grey by
    in_phase, quadrature = 0.736 * red - 0.268 * blue, 0.478 * red + 0.413 * blue  # YIQ, from R − Y and B − Y
    across, up = cosine * in_phase - sine * quadrature, sine * in_phase + cosine * quadrature
    parts = [0.956 * across + 0.621 * up, -0.272 * across - 0.647 * up, -1.106 * across + 1.703 * up]
    turned = luminance + torch.cat(parts, dim=1)
    changed = per_image(turn != 0, images)
    return torch.where(changed, turned.round_().clamp_(0, 255).to(torch.uint8), images)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """0: the mean luminance everywhere, 1: as it was, 2: twice as far from the mean.

    >>> contrast(torch.tensor([[[[50, 150]]]], dtype=torch.uint8), torch.tensor([0.5])).flatten().tolist()
    [75, 125]
    """
    pixels = images.shape[2] * images.shape[3]
    mean = (grey(images).sum(dim=(1, 2, 3)).double() / pixels + 0.5).floor()
    return blend(per_image(mean.float(), images), images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """0: smoothed (3×3, the centre counts five times, the border stays), 1: as it was, 2: sharpened.

    >>> dot = torch.zeros(1, 1, 3, 3, dtype=torch.uint8)
    >>> dot[0, 0, 1, 1] = 130
    >>> sharpness(dot, torch.tensor([0.0]))[0, 0].tolist()         # 130 · 5/13 in the middle
    [[0, 0, 0], [0, 50, 0], [0, 0, 0]]
    """
    # All rows as one line: a pixel's neighbours lie 1 and `width` places away. Only at the left and right border
    # is that wrong, and the border is not smoothed anyway.
    width = images.shape[3]
    line = images.flatten(2).to(torch.int16)
    inner = slice(width + 1, line.shape[2] - width - 1)
    across = (line[..., :-2] + line[..., 1:-1]).add_(line[..., 2:])
    around = (across[..., : -2 * width] + across[..., width:-width]).add_(across[..., 2 * width :])
    around.add_(line[..., inner], alpha=4)
    # a whole number / 13 is never within 1/26 of a half, so this rounding is safe in single precision
    smooth = around.float().add_(6.5).div_(13).floor_()
    result = images.clone()
    result.flatten(2)[..., inner] = blend(smooth, line[..., inner], factor)
    result[..., 0], result[..., -1] = images[..., 0], images[..., -1]
    return result


def autocontrast(images: Tensor) -> Tensor:
    """Stretches each channel so that its least value becomes 0 and its greatest 255.

    >>> autocontrast(torch.tensor([[[[10, 61, 112]]]], dtype=torch.uint8)).flatten().tolist()
    [0, 127, 255]
    """
    lowest = images.amin(dim=(2, 3), keepdim=True).double()
    highest = images.amax(dim=(2, 3), keepdim=True).double()
    flat = highest == lowest  # nothing to stretch: scale 1 and offset 0 keep the channel
    # torch turns number / tensor into number · (1 / tensor), rounded twice; tensor / tensor is rounded once
    scale = torch.where(flat, 1.0, torch.full_like(highest, 255.0) / (highest - lowest))
    offset = torch.where(flat, 0.0, -lowest * scale)
    return images.double().mul_(scale).add_(offset).clamp_(0, 255).to(torch.uint8)


def equalize(images: Tensor) -> Tensor:
    """Spreads each channel's values so that their histogram becomes nearly level.

    The new value is the number of darker pixels (rounded) in units of `step`, the pixels per new value.

    >>> image = torch.arange(256).view(1, 1, 16, 16) // 2 + 60          # 60 … 187, two pixels of each value
    >>> equalize(image.to(torch.uint8)).flatten()[[0, 2, 254]].tolist()     # no room: 254 // 255 = 0
    [60, 61, 187]
    >>> equalize(image.repeat(1, 1, 2, 1).to(torch.uint8)).flatten()[[0, 2, 254]].tolist()
    [0, 4, 255]
    """
    count, channels, height, width = images.shape
    values = images.reshape(count * channels, height * width).long()
    histogram = torch.zeros(count * channels, 256, dtype=torch.int32, device=images.device)
    histogram.scatter_add_(1, values, torch.ones(1, 1, dtype=torch.int32, device=images.device).expand_as(values))
    brightest = histogram.gather(1, values.amax(dim=1, keepdim=True))
    step = (height * width - brightest) // 255
    darker = histogram.cumsum(1, dtype=torch.int32) - histogram
    table = ((step // 2 + darker) // step.clamp(min=1)).clamp_(max=255)
    table = torch.where(step > 0, table, torch.arange(256, dtype=torch.int32, device=images.device))
    return table.to(torch.uint8).gather(1, values).view_as(images)
