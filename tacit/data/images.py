"""One image file to one array, by one rule: shorter side to S pixels, then the centre square."""

import hashlib
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from tacit.core.errors import TacitError
from tacit.data.dicom import DICOM_ENDINGS, is_dicom, read_dicom

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm", ".pnm")
LARGEST, SMALLEST = 64, 8  # the range of S where nobody asks for a size: enough for the nets, small in memory
# What Pillow itself warns of: a quarter of a gigabyte as RGB. Larger ones, and those that would become so large when
# their shorter side is enlarged, are refused before memory is taken for them.
MOST_PIXELS = 89_478_485
NARROWEST = 100  # times as long as wide, at most
RULE = "the shorter side becomes {size} pixels (bicubic), then the centre square is cut out"


def is_image(path: Path) -> bool:
    """By its name; a file whose name tells nothing is a DICOM if it begins like one.

    >>> is_image(Path("a.JPG")), is_image(Path("a.dcm")), is_image(Path("notes.txt")), is_image(Path("._a.jpg"))
    (True, True, False, False)
    """
    ending = path.suffix.lower()
    if path.name.startswith(".") or ending in ENDINGS + DICOM_ENDINGS:
        return not path.name.startswith(".")
    return (not ending or ending[1:].isdecimal()) and is_dicom(path)


def open_image(path: Path, depth: int = 16) -> Image.Image:
    """The decoded image with eight bits a channel; of 16-bit files the upper eight of their `depth` bits."""
    return eight_bits(open_deep(path), depth)


def open_deep(path: Path) -> Image.Image:
    """The decoded image with all its bits, the right way up (cameras note the rotation instead of doing it), first
    frame only.

    Raises whatever Pillow and pydicom raise on a file that they cannot read.
    """
    if path.suffix.lower() in DICOM_ENDINGS or (path.suffix.lower() not in ENDINGS and is_dicom(path)):
        return read_dicom(path, check_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we refuse what Pillow warns of
        opened = Image.open(path)
    with opened as image:
        check_size(image.size)  # the file says how large it is before anything is decoded
        cut = not is_deep(image) and any(";16" in str(tile) for tile in image.tile)  # Pillow keeps the upper 8 of 16
        image.load()
        upright = ImageOps.exif_transpose(image)
    if upright.mode == "F":
        raise ValueError("floating-point pixels")
    if cut and max(high for _, high in _extrema(upright)[:3]) < 64:
        raise ValueError("16 bits a colour, of which the upper two are not used: nearly black; save it with 8 bits")
    return upright


def _extrema(image: Image.Image) -> tuple[tuple[int, int], ...]:
    found = image.getextrema()
    return found if isinstance(found[0], tuple) else (found,)  # type: ignore[return-value]


def is_deep(image: Image.Image) -> bool:
    """Whether it has more than eight bits a pixel."""
    return image.mode.startswith("I")


def used_bits(image: Image.Image) -> int:
    """The usual number of bits (8, 10, 12, 14 or 16) that the values of a deep image need.

    >>> [used_bits(Image.new("I", (1, 1), value)) for value in (0, 255, 256, 4095, 4096, 65535)]
    [8, 8, 10, 12, 14, 16]
    """
    needed = int(np.asarray(image).max()).bit_length()
    return min(max(needed + needed % 2, 8), 16)


def eight_bits(image: Image.Image, depth: int = 16) -> Image.Image:
    """An image with eight bits a channel; a deep one by the upper eight of its `depth` bits.

    >>> [eight_bits(Image.new("I", (1, 1), 2048), depth).getpixel((0, 0)) for depth in (16, 12, 10)]
    [8, 128, 255]
    """
    if not is_deep(image):
        return image
    return Image.fromarray((np.asarray(image) >> (depth - 8)).clip(0, 255).astype(np.uint8))


def check_size(size: tuple[int, int]) -> None:
    """Refuse pictures that are too large, or much too narrow.

    >>> check_size((3_000_000, 1))
    Traceback (most recent call last):
    ValueError: 3,000,000×1 pixels: one side is more than 100 times as long as the other; cut it into pieces
    """
    width, height = size
    if width * height > MOST_PIXELS:
        raise ValueError(f"{width:,}×{height:,} pixels: more than {MOST_PIXELS:,} are not read; make it smaller")
    if max(size) > NARROWEST * min(size):
        raise ValueError(
            f"{width:,}×{height:,} pixels: one side is more than {NARROWEST} times as long as the other; cut it into "
            "pieces"
        )


def why_unreadable(error: Exception, path: Path) -> str:
    """What an error of Pillow says, in a few words and without the path.

    >>> why_unreadable(OSError("cannot identify image file '/x/a.png'"), Path("/x/a.png"))
    'cannot identify image file'
    """
    text = "no such file" if isinstance(error, FileNotFoundError) else str(error).split(str(path))[0]
    return text.strip(" '\"") or type(error).__name__


def is_grey(image: Image.Image) -> bool:
    """Grey by what the file says; a palette is colour, and what has 16 bits is grey.

    >>> is_grey(Image.new("L", (2, 2))), is_grey(Image.new("RGB", (2, 2)))
    (True, False)
    """
    return image.mode in ("1", "L", "LA", "La") or is_deep(image)


def fingerprint(image: Image.Image) -> bytes:
    """Equal for equal pixels, however the file is packed or named.

    >>> fingerprint(Image.new("RGB", (2, 2))) == fingerprint(Image.new("RGBA", (2, 2)))
    True
    >>> fingerprint(Image.new("L", (2, 2), 1)) == fingerprint(Image.new("L", (2, 2), 2))
    False
    """
    mode = image.mode if is_deep(image) else "L" if is_grey(image) else "RGB"
    plain = image if image.mode == mode else image.convert(mode)
    digest = hashlib.blake2b(f"{plain.mode} {plain.size};".encode(), digest_size=16)
    digest.update(plain.tobytes())
    return digest.digest()


def square(image: Image.Image, size: int) -> Image.Image:
    """Shorter side to `size`, then the centre square; an image that is `size` square stays as it is.

    >>> square(Image.new("L", (40, 20)), 10).size
    (10, 10)
    """
    if image.size == (size, size):
        return image
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    if width * height > MOST_PIXELS:
        raise TacitError(
            f"A picture of {image.width:,}×{image.height:,} pixels would become {width:,}×{height:,}, with {size:,} "
            f"for its shorter side; at most {MOST_PIXELS:,} pixels are made. Cut it, or lower data.image_size."
        )
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + size, top + size))


def pixels(image: Image.Image, size: int, grey: bool) -> np.ndarray:
    """uint8 [1 or 3, size, size]; transparency is dropped.

    >>> pixels(Image.new("L", (30, 20), 7), 8, grey=False).shape
    (3, 8, 8)
    """
    array = np.asarray(square(image.convert("L" if grey else "RGB"), size))
    return array[None] if grey else array.transpose(2, 0, 1)
