"""Small files that would become large: refused with a sentence, before memory is taken for them."""

import gzip
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tacit.core.errors import TacitError
from tacit.core.payload import FORMAT, Limits, from_bytes
from tacit.data.archives import at_most, collect
from tacit.data.arrays import MOST_CLASSES, check_class_names, whole_labels
from tacit.data.images import MOST_PIXELS, open_image, square
from tacit.data.own import inspect
from tacit.data.readers import npz_arrays, read_idx, read_npz
from tacit.data.tables import table_rows
from tacit.sites.wire import SharedFacts

MB = 1 << 20
MOST_GROWTH = 60 * MB  # of a process that refuses one after the other


def png(path: Path, width: int, height: int) -> Path:
    """A picture of so many zero pixels, without ever having them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer, packed = zlib.compressobj(9), b""
    if width * height <= 10**8:
        for _ in range(height):
            packed += packer.compress(bytes(width + 1))
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", packed + packer.flush()) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def npy_header(shape: tuple[int, ...], kind: str = "|u1") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
    return file.getvalue()


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def zeros_npz(path: Path, size: int) -> Path:
    """Truthful, and a thousand times as large as its file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("x_train.npy", "w") as member:
        member.write(npy_header((size // 64, 8, 8)))
        for _ in range(size // MB):
            member.write(bytes(MB))
    return path


def large_header() -> bytes:
    """A payload whose header has 16 MiB of empty tensors' names."""
    about = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    names = {f"t{number}": about for number in range(200_000)}
    text = json.dumps({"__metadata__": {"format": FORMAT, "order": "[]"}, **names}).encode()
    return struct.pack("<Q", len(text)) + text


def make_bombs(folder: Path) -> dict[str, Path]:
    arrays = {"x_train": np.zeros((2, 8, 8), np.uint8), "y_train": np.array([0, 2**62])}
    np.savez_compressed(folder / "label.npz", **arrays)
    (folder / "header.bin").write_bytes(large_header())
    text = pyarrow.array(["x" * (32 * MB)]).dictionary_encode()
    long = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1000, pyarrow.int32()), text.dictionary)
    parquet.write_table(pyarrow.table({"path": long, "label": long}), folder / "cells.parquet")
    rows = pyarrow.array(np.zeros(6_000_000, np.int8))
    parquet.write_table(pyarrow.table({"path": rows, "label": rows}), folder / "rows.parquet")
    (folder / "cells.csv").write_text("path,label\n" + "x" * (2 * MB) + ",a\n")
    return {
        "label": folder / "label.npz",
        "shape": npz(folder / "shape.npz", x_train=npy_header((2**40, 28, 28)), y_train=npy_header((2,))),
        "lying": npz(folder / "lying.npz", x_train=npy_header((3 * 10**6, 28, 28)), y_train=npy_header((2,))),
        "zeros": zeros_npz(folder / "zeros.npz", 300 * MB),
        "narrow": png(folder / "narrow.png", 3_000_000, 1),
        "large": png(folder / "large.png", 60_000, 60_000),
        "header": folder / "header.bin",
        "rows": folder / "rows.parquet",
        "csv": folder / "cells.csv",
        "one": png(folder / "one.png", 65_500, 1),
        "cells": folder / "cells.parquet",  # the last one: it may take some of the 256 MiB that any file may
    }


CHILD = """
import json, sys
from pathlib import Path
from tacit.data.images import open_image, pixels
from tacit.data.own import inspect
from tacit.data.tables import table_rows
from tacit.core.payload import Limits, from_bytes
import pyarrow.parquet, pyarrow.compute
from PIL import Image
from tacit.core.errors import TacitError

def peak():  # of this program; ru_maxrss would be that of the process which started it, if that was larger
    status = Path("/proc/self/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 if status.exists() else 0

def try_one(name, path):
    if path.suffix == ".npz":
        return inspect(path)
    if path.suffix == ".png":
        return pixels(open_image(path), 64, grey=True)
    if path.suffix in (".csv", ".parquet"):
        return table_rows(path)
    return from_bytes(path.read_bytes(), Limits(total=1 << 30))

found, before = {}, peak()
for name, path in json.loads(sys.argv[1]).items():
    try:
        try_one(name, Path(path))
        said = "NOT REFUSED"
    except (TacitError, ValueError, Image.DecompressionBombError) as error:
        said = str(error)
    found[name] = [said, peak() - before]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, int]]:
    """What a fresh process said to each bomb, and by how much it had grown then."""
    bombs = make_bombs(tmp_path_factory.mktemp("bombs"))
    given = json.dumps({name: str(path) for name, path in bombs.items()})
    done = subprocess.run([sys.executable, "-c", CHILD, given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[str, int]] = json.loads(done.stdout)
    return found


SAYS = {
    "label": r"holds the label 4611686018427387904; there are at most 10,000 classes",
    "shape": r"promises .* bytes, but holds",
    "lying": r"promises 2,352,000,000 bytes, but holds",
    "zeros": r"would take 314,\d+,\d+ bytes, and at most 268,435,456 are read.*without compression",
    "narrow": r"3,000,000×1 pixels: one side is more than 100 times as long",
    "large": r"exceeds limit|more than 89,478,485",
    "header": r"a header of .* bytes, at most 1048576 are allowed",
    "cells": r"more than 131,072 characters|at most .* bytes are read",
    "rows": r"promises 6,000,000 rows",
    "csv": r"field larger than field limit",
    "one": r"65,500×1 pixels",
}


@pytest.mark.parametrize("name", SAYS)
def test_refused_with_a_sentence(refused: dict[str, tuple[str, int]], name: str) -> None:
    said, _ = refused[name]
    assert re.search(SAYS[name], said), said
    assert len(said) < 1000


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_none_of_them_takes_memory(refused: dict[str, tuple[str, int]]) -> None:
    growth = {name: grown for name, (_, grown) in refused.items()}
    assert growth.pop("cells") < 450 * MB  # its rows would have 64 GB
    assert max(growth.values()) < MOST_GROWTH, growth


def test_as_many_classes_as_at_real_sites() -> None:
    (most,) = (rule.max_length for rule in SharedFacts.model_fields["classes"].metadata if hasattr(rule, "max_length"))
    assert most == MOST_CLASSES


@pytest.mark.parametrize("label", [MOST_CLASSES, 2**62, 1e300, float("inf")])
def test_labels_beyond_the_most_classes(label: float) -> None:
    with pytest.raises(TacitError, match="at most 10,000 classes"):
        whole_labels(np.array([0, label]), "y")
    assert whole_labels(np.array([0, MOST_CLASSES - 1]), "y").tolist() == [0, MOST_CLASSES - 1]


def test_unsigned_labels_do_not_turn_negative() -> None:
    with pytest.raises(TacitError, match="18446744073709551615"):
        whole_labels(np.array([2**64 - 1], np.uint64), "y")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("a", "b\0"), "NUL"),
        (("a", "\udc80"), "not text"),
        (("a", ""), "is empty"),
        (("a", "a"), "there twice"),
        (tuple(map(str, range(MOST_CLASSES + 1))), "at most 10,000"),
    ],
)
def test_class_names_that_are_none(names: tuple[str, ...], why: str) -> None:
    with pytest.raises(TacitError, match=why):
        check_class_names(names, "data")


def test_a_picture_that_would_become_too_large() -> None:
    picture = Image.new("L", (900, 10))
    with pytest.raises(TacitError, match=r"would become 900,000×10,000"):
        square(picture, 10_000)
    assert square(picture, 20).size == (20, 20)


def test_usual_pictures_are_still_read(tmp_path: Path) -> None:
    Image.new("RGB", (1000, 10), (1, 2, 3)).save(tmp_path / "a.png")
    assert open_image(tmp_path / "a.png").size == (1000, 10)
    assert MOST_PIXELS > 8000 * 10_000  # a camera's
    sixteen = np.array([[0, 255, 256], [65535, 4660, 511]], np.uint16)
    Image.fromarray(sixteen).save(tmp_path / "b.png")
    assert np.asarray(open_image(tmp_path / "b.png")).tolist() == [[0, 0, 1], [255, 18, 1]]


def test_a_bad_array_is_one_bad_image(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=np.zeros((2, 1, 5000), np.uint8), y_train=np.array([0, 1]))
    report = inspect(tmp_path / "x.npz")
    assert [why for _, why in report.unreadable] == [
        "5,000×1 pixels: one side is more than 100 times as long as the other; cut it into pieces"
    ] * 2


BAD_NPZ = {
    "empty": b"",
    "garbage": b"PK\x03\x04" + bytes(range(200)),
    "text": b"not an archive at all",
    "npy": npy_header((2**50,)),
    "object": None,
    "cut": None,
}


@pytest.mark.parametrize("kind", BAD_NPZ)
def test_bad_npz(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{kind}.npz"
    if kind == "object":
        np.savez(path, x_train=np.array([{}, {}], dtype=object), y_train=np.array([0, 1]))
    elif kind == "cut":
        np.savez(path, x_train=np.zeros((50, 8, 8), np.uint8), y_train=np.zeros(50, int))
        path.write_bytes(path.read_bytes()[:-200])
    else:
        path.write_bytes(BAD_NPZ[kind] or b"")
    for read in (read_npz, npz_arrays):
        with pytest.raises(TacitError, match=f"{kind}.npz"):
            read(path)


def test_good_npz_of_every_layout_are_read(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", x_train=np.asfortranarray(np.ones((3, 8, 9))), y_train=np.array([0, 1, 1], np.uint8))
        assert read_npz(tmp_path / "x.npz").train_images.shape == (3, 1, 8, 9)
    assert list(npz_arrays(tmp_path / "x.npz", lambda names: names[1:])) == ["y_train"]


def test_archives_do_not_unpack_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TacitError, match=r"more than 10 bytes"):
        at_most(io.BytesIO(bytes(11)), "x", 10)
    assert at_most(io.BytesIO(bytes(10)), "x", 10) == bytes(10)
    monkeypatch.setattr("tacit.data.archives.LARGEST_MEMBER", MB)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big", bytes(2 * MB))
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as tar:
        entry = tarfile.TarInfo("big")
        entry.size = 2 * MB
        tar.addfile(entry, io.BytesIO(bytes(2 * MB)))
    for name in ("a.zip", "b.tar.gz"):
        with pytest.raises(TacitError, match="unpacked it has more than 1,048,576 bytes"):
            collect(tmp_path / name, ("big",))
    with pytest.raises(TacitError, match="unpacked it has more than"):
        read_idx(gzip.compress(bytes(2 * MB)), "labels")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        entry = tarfile.TarInfo("small")
        entry.size = 3
        tar.addfile(entry, io.BytesIO(b"abc"))
    assert collect(tmp_path / "a.tar.gz", ("small",)) == {"small": b"abc"}
    assert read_idx(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 1, 7])), "labels").tolist() == [7]


def test_names_in_refusals_are_bounded() -> None:
    name = "w" * 500_000
    order = json.dumps([[name, "tensor"]])
    text = json.dumps({"__metadata__": {"format": FORMAT, "order": order}}).encode()
    with pytest.raises(TacitError) as caught:
        from_bytes(struct.pack("<Q", len(text)) + text, Limits(header=2 * MB))
    assert len(str(caught.value)) < 500


def test_tables_are_read_as_before(tmp_path: Path) -> None:
    columns = {"path": ["a", None], "label": [3.0, None], "site": ["x", "y"], "more": [1, 2]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    rows = [{"path": "a", "label": "3", "site": "x", "more": ""}, {"path": "", "label": "", "site": "y", "more": ""}]
    assert table_rows(tmp_path / "t.parquet") == rows
    (tmp_path / "t.csv").write_text("path,label,site\na,'=1,x,rest\nb\n")
    assert table_rows(tmp_path / "t.csv") == [
        {"path": "a", "label": "=1", "site": "x"},
        {"path": "b", "label": "", "site": ""},
    ]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1garbagePAR1")
    with pytest.raises(TacitError, match="damaged or not what its name says"):
        table_rows(tmp_path / "bad.parquet")
