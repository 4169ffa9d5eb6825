"""DICOM files to images, with pydicom where it is installed: rescale, window, inversion, colours.

A file with a window becomes eight bits by that window, as a viewer shows it. One without keeps its stored values, and
is then scaled like any other 16-bit file, by the range of the whole data set.
"""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

DICOM_ENDINGS = (".dcm", ".dicom")
HINT = "DICOM: pip install 'tacit[dicom]' to read it"
DEFLATED = "1.2.840.10008.1.2.1.99"  # unpacked as a whole before its size is known
GREY = ("MONOCHROME1", "MONOCHROME2")


def is_dicom(path: Path) -> bool:
    """Whether a file begins like a DICOM: four letters after 128 bytes."""
    try:
        if not path.is_file():  # a pipe would wait for ever
            return False
        with open(path, "rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False


def read_dicom(path: Path, check_size: Callable[[tuple[int, int]], None]) -> Image.Image:
    """The one picture of a file, grey (8 or 16 bits) or RGB; a ValueError says what cannot be read."""
    try:
        import pydicom
    except ImportError:
        raise ValueError(HINT) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are not quite by the standard
        return _read(pydicom, path, check_size)


def _read(pydicom: Any, path: Path, check_size: Callable[[tuple[int, int]], None]) -> Image.Image:
    about = pydicom.filereader.read_file_meta_info(path)
    if about.get("TransferSyntaxUID") == DEFLATED:
        raise ValueError("a deflated DICOM; save it uncompressed")
    stored = pydicom.dcmread(path)
    if "PixelData" not in stored:
        raise ValueError("a DICOM without a picture")
    if (frames := int(stored.get("NumberOfFrames") or 1)) > 1:
        raise ValueError(f"a DICOM of {frames} frames; save the frames that you mean as files of their own")
    size = (int(stored.Columns), int(stored.Rows))
    check_size(size)  # before memory is taken for it
    _check_packed(stored, size)
    kind = str(stored.PhotometricInterpretation)
    if kind in GREY:
        return _grey(stored, kind)
    return _colour(stored, kind)


def _check_packed(stored: Any, size: tuple[int, int]) -> None:
    """What is compressed must be what Pillow knows, and of the size that the header says."""
    from pydicom import encaps
    from pydicom.uid import RLELossless

    syntax = stored.file_meta.TransferSyntaxUID
    if not syntax.is_encapsulated or syntax == RLELossless:
        return
    try:
        packed = Image.open(io.BytesIO(next(encaps.generate_frames(stored.PixelData, number_of_frames=1))))
    except OSError:
        raise ValueError(f"a DICOM compressed as {syntax.name}, which is not read here; save it uncompressed") from None
    if packed.size != size:
        raise ValueError(f"the picture inside is {packed.width}×{packed.height}, the header says {size[0]}×{size[1]}")


def _grey(stored: Any, kind: str) -> Image.Image:
    from pydicom.pixels import apply_modality_lut, apply_voi_lut, pixel_array

    values = pixel_array(stored)
    if _has_window(stored):
        shown = np.asarray(apply_voi_lut(apply_modality_lut(values, stored), stored), np.float64)
        low, high = _window_range(stored)
        grey = np.rint((shown - low) * (255 / (high - low))).clip(0, 255).astype(np.uint8)
        return Image.fromarray(255 - grey if kind == "MONOCHROME1" else grey)
    if float(stored.get("RescaleSlope") or 1) != 1 or "ModalityLUTSequence" in stored:
        raise ValueError("a DICOM with a scale of its own (rescale slope) and no window; save it with a window")
    bits = int(stored.BitsStored)
    if bits > 16 or values.dtype.kind == "f":
        raise ValueError(f"a DICOM with {bits} bits a pixel and no window")
    whole = values.astype(np.int64) + (1 << (bits - 1) if stored.PixelRepresentation else 0)
    if kind == "MONOCHROME1":
        whole = (1 << bits) - 1 - whole
    return Image.fromarray(whole.clip(0, 65535).astype(np.uint16 if bits > 8 else np.uint8))


def _has_table(stored: Any) -> bool:
    return bool(stored.get("VOILUTSequence")) and "LUTData" in stored.VOILUTSequence[0]


def _has_window(stored: Any) -> bool:
    return _has_table(stored) or None not in (stored.get("WindowCenter"), stored.get("WindowWidth"))


def _window_range(stored: Any) -> tuple[float, float]:
    """What `apply_voi_lut` gives far below and far above the window: these become black and white."""
    from pydicom.pixels import apply_voi_lut

    if _has_table(stored):
        return 0.0, float((1 << int(stored.VOILUTSequence[0].LUTDescriptor[2])) - 1)
    centre, width = (np.atleast_1d(stored[name].value).astype(float)[0] for name in ("WindowCenter", "WindowWidth"))
    low, high = apply_voi_lut(np.array([centre - 100 * width, centre + 100 * width]), stored)
    return float(low), float(high)


def _colour(stored: Any, kind: str) -> Image.Image:
    from pydicom.pixels import apply_color_lut, pixel_array

    if kind == "PALETTE COLOR":
        values = apply_color_lut(pixel_array(stored), stored)
        values = (values >> 8).astype(np.uint8) if values.dtype == np.uint16 else values
    elif kind == "RGB" or kind.startswith("YBR_"):
        values = pixel_array(stored)  # YBR becomes RGB there
    else:
        raise ValueError(f"a DICOM of the kind {kind}, which is not known")
    if values.dtype != np.uint8:
        raise ValueError(f"a DICOM with {stored.BitsAllocated} bits a colour; save it with eight")
    return Image.fromarray(np.ascontiguousarray(values))
