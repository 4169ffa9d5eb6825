"""Images side by side, as a PNG file. Pillow only."""

import io
import math

import torch
from PIL import Image
from torch import Tensor

from tacit.core.errors import TacitError

SMALL = 64  # images with shorter sides are shown twice as large


def tiled(images: Tensor, columns: int = 0, gap: int = 2) -> Tensor:
    """Images uint8 [N, C, H, W] as one [C, height, width], row by row on white, nearly square unless told otherwise.

    >>> tiled(torch.zeros(3, 1, 4, 4, dtype=torch.uint8), columns=2, gap=1).shape
    torch.Size([1, 9, 9])
    """
    count, channels, height, width = images.shape
    columns = columns or max(1, math.ceil(math.sqrt(count)))
    rows = max(1, -(-count // columns))
    whole = torch.full((channels, rows * (height + gap) - gap, columns * (width + gap) - gap), 255, dtype=torch.uint8)
    for i, image in enumerate(images):
        top, left = i // columns * (height + gap), i % columns * (width + gap)
        whole[:, top : top + height, left : left + width] = image
    return whole


def png(image: Tensor, zoom: int = 1) -> bytes:
    """One image uint8 [C, H, W] as the bytes of a PNG file; C = 1 or 3."""
    if image.dtype != torch.uint8 or image.dim() != 3 or image.shape[0] not in (1, 3):
        raise TacitError(f"A picture is uint8 [1 or 3, H, W]; this is {image.dtype} {list(image.shape)}.")
    pixels = image[0] if len(image) == 1 else image.permute(1, 2, 0)
    picture = Image.fromarray(pixels.cpu().contiguous().numpy())
    picture = picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def sheet(images: Tensor) -> bytes:
    """Images uint8 [N, C, H, W] side by side, as the bytes of a PNG file."""
    return png(tiled(images), zoom=2 if images.shape[-1] < SMALL else 1)
