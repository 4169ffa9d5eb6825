"""Images with more than eight bits: the range that is there is used, by training and by prediction alike; DICOM."""

import builtins
import io
import struct
import tomllib
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tacit.cli.app import app
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data.images import open_image
from tacit.data.own import inspect
from tacit.data.party import Facts, facts_of, load_party, read_facts
from tacit.data.sources import load
from tacit.inference.images import collect, read
from tacit.inference.model import Description, describe
from tacit.runs.plan import prepare

SIDE = 8


def deep(path: Path, value: int, other: int | None = None) -> Path:
    """A grey image with 16 bits a pixel: one value, and another in the lower half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.full((SIDE, SIDE), value, np.uint16)
    values[SIDE // 2 :] = value if other is None else other
    Image.fromarray(values).save(path)
    return path


def twelve_bits(root: Path) -> Path:
    """Two classes, ten images each, values up to 4095."""
    for number in range(10):
        deep(root / "dark" / f"{number}.png", 16 * number)
        deep(root / "light" / f"{number}.tif", 4095 - 16 * number)
    return root


def test_twelve_bits_are_not_black(tmp_path: Path) -> None:
    report = inspect(twelve_bits(tmp_path / "x"))
    assert report.deep == Counter({12: 10, 8: 10})
    assert report.depth == 12
    (told,) = [remark for remark in report.remarks(SIDE) if "16-bit" in remark]
    assert told == "16-bit files (20) use 8 bits (10), 12 bits (10); 12 are taken: the values 0 to 4095 become 0 to 255"
    found = load(str(tmp_path / "x"))
    shades = np.concatenate([found.train_images, found.test_images])[:, 0, 0, 0]
    assert sorted(shades.tolist()) == [*range(10), *range(246, 256)]
    assert found.depth == 12
    assert told in found.note


@pytest.mark.parametrize(
    ("top", "depth", "shade"), [(200, 8, 200), (1000, 10, 250), (16000, 14, 250), (64000, 16, 250)]
)
def test_the_range_that_is_there(tmp_path: Path, top: int, depth: int, shade: int) -> None:
    for number in range(4):
        deep(tmp_path / "a" / f"{number}.png", number)
        deep(tmp_path / "b" / f"{number}.png", top, number)
    report = inspect(tmp_path)
    assert report.depth == depth
    assert load(str(tmp_path)).train_images.max() == shade
    assert load(str(tmp_path), how=Data(depth=16)).train_images.max() == top >> 8


def test_pictures_that_differ_in_low_bits_are_no_copies(tmp_path: Path) -> None:
    report = inspect(twelve_bits(tmp_path / "x"))
    assert len({item.twin for item in report.items}) == 20


def test_init_writes_the_depth_and_prediction_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    twelve_bits(tmp_path / "x")
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["init", "x"], catch_exceptions=False)
    assert "12 are taken" in result.output
    experiment = resolve(tomllib.loads(Path("x.toml").read_text()))
    assert experiment.data.depth == 12
    plan = prepare(experiment)
    description = Description.from_json(describe(plan).to_json())
    assert description.depth == 12
    assert "of 16-bit files the upper 8 of 12 bits" in description.rule
    new = deep(tmp_path / "new" / "1.png", 2048)  # half of the range
    images, faults = read(collect([tmp_path / "new"]), description)
    assert faults == [""]
    assert images.unique().tolist() == [128]
    images, _ = read(collect([Path(path) for path in plan.dataset.train_files]), description)
    assert np.array_equal(images.numpy(), plan.dataset.train_images)  # training and prediction see the same pixels
    assert open_image(new).getpixel((0, 0)) == 8  # as it was


def test_real_sites_share_the_depth(tmp_path: Path) -> None:
    server = twelve_bits(tmp_path / "server")
    facts = facts_of(server)
    assert facts.depth == 12
    facts.save(tmp_path / "facts.toml")
    assert read_facts(tmp_path / "facts.toml") == facts
    deep(tmp_path / "site" / "unlabeled" / "1.png", 2048)
    assert load_party(tmp_path / "site", facts).images.max() == 128
    whole = Facts(facts.classes, 1, SIDE, (0.5,), (0.5,))
    with pytest.raises(TacitError, match=r"use 12 bits, but this federation takes 16 .*nearly black.*depth = 12"):
        load_party(tmp_path / "site", whole)
    deep(tmp_path / "site" / "unlabeled" / "2.png", 60000)
    with pytest.raises(TacitError, match=r"use 16 bits, but this federation takes 12 .*nearly white"):
        load_party(tmp_path / "site", facts)


def test_sixteen_bits_a_colour(tmp_path: Path) -> None:
    """Pillow keeps the upper eight bits of these: where the upper ones are empty, the file is named, not blackened."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def colour(value: int) -> Path:
        rows = b"".join(b"\0" + np.full((SIDE, 3), value, ">u2").tobytes() for _ in range(SIDE))
        head = struct.pack(">IIBBBBB", SIDE, SIDE, 16, 2, 0, 0, 0)
        data = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
        (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
        return tmp_path / "x.png"

    assert open_image(colour(40000)).getpixel((0, 0)) == (156, 156, 156)
    with pytest.raises(ValueError, match="16 bits a colour"):
        open_image(colour(4095))


# DICOM


def dicom(path: Path, values: np.ndarray, **tags: Any) -> Path:
    """A small, valid, uncompressed file."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    stored = Dataset()
    stored.file_meta = FileMetaDataset()
    stored.file_meta.TransferSyntaxUID = tags.pop("syntax", ExplicitVRLittleEndian)
    stored.file_meta.MediaStorageSOPClassUID = stored.SOPClassUID = SecondaryCaptureImageStorage
    stored.file_meta.MediaStorageSOPInstanceUID = stored.SOPInstanceUID = generate_uid()
    stored.Rows, stored.Columns = values.shape[:2]
    stored.SamplesPerPixel = 3 if values.ndim == 3 else 1
    stored.PhotometricInterpretation = "RGB" if values.ndim == 3 else "MONOCHROME2"
    stored.BitsAllocated = 8 * values.dtype.itemsize
    stored.BitsStored = tags.get("BitsStored", stored.BitsAllocated)
    stored.HighBit = stored.BitsStored - 1
    stored.PixelRepresentation = int(values.dtype.kind == "i")
    if values.ndim == 3:
        stored.PlanarConfiguration = 0
    stored.PixelData = values.tobytes()
    for name, value in tags.items():
        setattr(stored, name, value)
    stored["PixelData"].VR = "OW" if values.dtype.itemsize > 1 else "OB"
    path.parent.mkdir(parents=True, exist_ok=True)
    stored.save_as(path, enforce_file_format=True)
    return path


def ramp(*values: int, kind: str = "<u2") -> np.ndarray:
    return np.array([values, values], kind)


def shades(path: Path, depth: int = 16) -> list[int]:
    found: list[int] = np.asarray(open_image(path, depth))[0].tolist()
    return found


def test_windows_rescale_and_inversion(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    # CT: stored 0, 1024, 2048 are -1024, 0, 1024; a window of 401 around 0 (linear: from -200.5 to 199.5)
    scale = {"RescaleSlope": 1, "RescaleIntercept": -1024, "BitsStored": 12}
    window = {"WindowCenter": [0, 500], "WindowWidth": [401, 10]}
    values = ramp(0, 824, 924, 1024, 1124, 1224, 2048)
    assert shades(dicom(tmp_path / "ct.dcm", values, **scale, **window)) == [0, 0, 64, 128, 192, 255, 255]
    inverted = dicom(tmp_path / "cr.dcm", values, PhotometricInterpretation="MONOCHROME1", **scale, **window)
    assert shades(inverted) == [255, 255, 191, 127, 63, 0, 0]
    assert is_same(tmp_path / "ct.dcm", 255 - np.asarray(open_image(inverted)))


def is_same(path: Path, values: np.ndarray) -> bool:
    return np.array_equal(np.asarray(open_image(path)), values)


def test_without_a_window_the_range_of_the_data_set_counts(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    for number in range(6):
        dicom(tmp_path / "a" / f"{number}.dcm", np.full((SIDE, SIDE), 16 * number, "<u2"), BitsStored=12)
        light = np.full((SIDE, SIDE), 4095 - 16 * number, "<u2")
        dicom(tmp_path / "b" / f"1.2.840.{number}", light, BitsStored=12)  # no ending that tells
    (tmp_path / "b" / "notes.17").write_text("no DICOM")
    report = inspect(tmp_path)
    assert (report.depth, len(report.items), [path.name for path in report.not_images]) == (12, 12, ["notes.17"])
    found = load(str(tmp_path), skip_unreadable=True)
    assert sorted({*found.train_images.ravel().tolist(), *found.test_images.ravel().tolist()}) == [
        *range(6),
        *range(250, 256),
    ]
    signed = dicom(tmp_path / "signed.dcm", ramp(-2048, 0, 2047, kind="<i2"), BitsStored=12)
    assert shades(signed, 12) == [0, 128, 255]
    inverted = dicom(tmp_path / "x.dcm", ramp(0, 4095), BitsStored=12, PhotometricInterpretation="MONOCHROME1")
    assert shades(inverted, 12) == [255, 0]


def test_colours(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 0] = 200
    assert open_image(dicom(tmp_path / "rgb.dcm", red)).getpixel((0, 0)) == (200, 0, 0)
    grey = np.full((4, 4, 3), 128, np.uint8)
    grey[..., 0] = 90  # Y, Cb, Cr
    ybr = dicom(tmp_path / "ybr.dcm", grey, PhotometricInterpretation="YBR_FULL")
    assert open_image(ybr).getpixel((0, 0)) == (90, 90, 90)


def test_a_jpeg_inside_must_be_as_large_as_the_header_says(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    from pydicom.encaps import encapsulate
    from pydicom.uid import JPEGBaseline8Bit

    def packed(path: Path, side: int) -> Path:
        file = io.BytesIO()
        Image.new("L", (side, side), 77).save(file, "JPEG")
        stored = {"syntax": JPEGBaseline8Bit, "PixelData": encapsulate([file.getvalue()])}
        return dicom(path, np.zeros((16, 16), np.uint8), **stored)

    assert open_image(packed(tmp_path / "a.dcm", 16)).getpixel((0, 0)) == 77
    with pytest.raises(ValueError, match="the picture inside is 4000×4000, the header says 16×16"):
        open_image(packed(tmp_path / "b.dcm", 4000))


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    values = ramp(0, 1, 2, 3)
    refused = {
        "a DICOM of 3 frames": dicom(tmp_path / "frames.dcm", values, NumberOfFrames=3),
        "a deflated DICOM": dicom(tmp_path / "deflated.dcm", values, syntax=DeflatedExplicitVRLittleEndian),
        "no window": dicom(tmp_path / "pet.dcm", values, RescaleSlope=0.37, RescaleIntercept=0),
        "more than 89,478,485 are not read": dicom(tmp_path / "large.dcm", values, Rows=60000, Columns=60000),
    }
    for message, path in refused.items():
        with pytest.raises(ValueError, match=message):
            open_image(path)
    cut = tmp_path / "cut.dcm"
    cut.write_bytes(dicom(tmp_path / "whole.dcm", values).read_bytes()[:-8])
    (tmp_path / "text.dcm").write_text("not at all")
    bad = tmp_path / "set"
    for name in ("nv", "mel"):
        for number in range(3):
            deep(bad / name / f"{name}{number}.png", 1000 * number + len(name))
    for path in (*refused.values(), cut, tmp_path / "text.dcm"):
        path.rename(bad / "nv" / path.name)
    report = inspect(bad)
    assert len(report.unreadable) == 6
    assert len(report.items) == 6


def test_a_hint_where_pydicom_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nv", "mel"):
        for number in range(3):
            deep(tmp_path / name / f"{number}.png", 20000 * number + len(name))
    (tmp_path / "nv" / "x.dcm").write_bytes(b"\0" * 128 + b"DICM")
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("pydicom"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    report = inspect(tmp_path)
    assert report.unreadable == [(tmp_path / "nv" / "x.dcm", "DICOM: pip install 'tacit[dicom]' to read it")]
    assert "pip install 'tacit[dicom]'" in report.text
