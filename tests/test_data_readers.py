"""Every reader, on small files that the test writes in the public format, whole and damaged."""

import gzip
import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from tacit.core.errors import TacitError
from tacit.data import readers
from tacit.data.isic import CLASSES, read_isic


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def write_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


# IDX


def test_idx_set_from_an_archive(tmp_path: Path) -> None:
    arrays = noise(6, 4, 5), np.array([0, 1, 2, 3, 4, 5], np.uint8), noise(2, 4, 5), np.array([9, 8], np.uint8)
    with zipfile.ZipFile(tmp_path / "source.zip", "w") as archive:
        for name, array in zip(readers.IDX_FILES, arrays, strict=True):
            archive.writestr(f"package/data/{name}", idx_bytes(array))
    found = readers.idx_archive(tmp_path / "source.zip")
    assert np.array_equal(found.train_images[:, 0], arrays[0])
    assert found.train_images.shape == (6, 1, 4, 5)
    assert found.train_labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.train_labels.dtype == np.int64
    assert np.array_equal(found.test_images[:, 0], arrays[2])
    assert found.test_labels.tolist() == [9, 8]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>not found</html>",
        idx_bytes(noise(6, 4, 5))[:-20],  # gzip cut short
        gzip.decompress(idx_bytes(noise(6, 4, 5)))[:-1],  # one value missing
        gzip.decompress(idx_bytes(noise(6, 4, 5)))[:9],  # cut inside the header
        bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]),  # floats
    ],
)
def test_damaged_idx_is_named(content: bytes) -> None:
    with pytest.raises(TacitError, match=r"train-images.*(cut short|damaged)"):
        readers.read_idx(content, "train-images")


# CIFAR


def cifar10_files(number: int = 3) -> tuple[dict[str, bytes], np.ndarray]:
    """Protocol 2 and byte keys, as in the official files."""
    images = noise(6 * number, 3 * 32 * 32)
    files = {}
    for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        part = slice(index * number, (index + 1) * number)
        batch = {b"data": images[part], b"labels": [(index + i) % 10 for i in range(number)], b"batch_label": b"x"}
        files[f"cifar-10-batches-py/{name}"] = pickle.dumps(batch, protocol=2)
    return files, images


@pytest.mark.parametrize("form", ["tar", "folder"])
def test_cifar10(tmp_path: Path, form: str) -> None:
    files, images = cifar10_files()
    if form == "tar":
        path = write_tar(tmp_path / "cifar-10-python.tar.gz", files)
    else:
        path = tmp_path / "cifar-10-batches-py"
        path.mkdir()
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
    found = readers.read_cifar10(path)
    assert np.array_equal(found.train_images, images[:15].reshape(15, 3, 32, 32))
    assert np.array_equal(found.test_images, images[15:].reshape(3, 3, 32, 32))
    assert found.train_labels.tolist() == [0, 1, 2, 1, 2, 3, 2, 3, 4, 3, 4, 5, 4, 5, 6]
    assert found.test_labels.tolist() == [5, 6, 7]


def test_cifar100_takes_the_fine_labels_and_their_names(tmp_path: Path) -> None:
    names = [f"class {i}" for i in range(100)]
    batch = {b"data": noise(4, 3072), b"fine_labels": [99, 0, 1, 2], b"coarse_labels": [7, 7, 7, 7]}
    files = {
        "cifar-100-python/train": pickle.dumps(batch, protocol=2),
        "cifar-100-python/test": pickle.dumps(batch, protocol=2),
        "cifar-100-python/meta": pickle.dumps({b"fine_label_names": [n.encode() for n in names]}, protocol=2),
    }
    found = readers.read_cifar100(write_tar(tmp_path / "cifar-100-python.tar.gz", files))
    assert found.train_labels.tolist() == [99, 0, 1, 2]
    assert found.classes == tuple(names)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (os.system, (f"touch {self.marker}",))


def test_a_pickle_cannot_run_code(tmp_path: Path) -> None:
    marker = tmp_path / "was-here"
    files, _ = cifar10_files()
    files["cifar-10-batches-py/data_batch_3"] = pickle.dumps({b"data": Evil(marker), b"labels": []}, protocol=2)
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", files)
    with pytest.raises(TacitError, match=r"data_batch_3.*refused.*posix.system"):
        readers.read_cifar10(path)
    assert not marker.exists()


@pytest.mark.parametrize("reference", ["builtins eval", "builtins getattr", "numpy load", "os system", "codecs decode"])
def test_nothing_but_arrays_is_unpickled(reference: str) -> None:
    module, name = reference.split()
    with pytest.raises(TacitError, match="refused"):
        readers.unpickle_batch(f"c{module}\n{name}\n.".encode(), "batch")


def test_damaged_cifar_is_named(tmp_path: Path) -> None:
    files, _ = cifar10_files()
    whole = write_tar(tmp_path / "whole.tar.gz", files).read_bytes()
    cut = tmp_path / "cifar-10-python.tar.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TacitError, match=r"cifar-10-python.tar.gz"):
        readers.read_cifar10(cut)
    cut.write_bytes(b"an error page")
    with pytest.raises(TacitError, match=r"cifar-10-python.tar.gz"):
        readers.read_cifar10(cut)
    del files["cifar-10-batches-py/data_batch_4"]
    with pytest.raises(TacitError, match=r"lacks data_batch_4"):
        readers.read_cifar10(write_tar(cut, files))
    files["cifar-10-batches-py/data_batch_4"] = pickle.dumps({b"labels": []}, protocol=2)
    with pytest.raises(TacitError, match=r"data_batch_4"):
        readers.read_cifar10(write_tar(cut, files))


def png(rows: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(rows).save(file, "PNG")
    return file.getvalue()


def test_cifar10_as_png(tmp_path: Path) -> None:
    """Each row of a picture is one image: pixel (y, x) of image n lies at row n, column 32 y + x."""
    pictures = noise(6, 2, 1024, 3)
    files = {f"package/data_batch_{i + 1}.png": png(pictures[i]) for i in range(5)}
    files["package/test_batch.png"] = png(pictures[5])
    files["package/train_lables.json"] = json.dumps(list(range(10))).encode()
    files["package/test_lables.json"] = b"[3, 8]"
    found = readers.read_cifar10_png(write_tar(tmp_path / "package.tgz", files))
    assert found.train_images.shape == (10, 3, 32, 32)
    assert found.train_images[3, 2, 5, 7] == pictures[1, 1, 32 * 5 + 7, 2]
    assert found.test_images[1, 0, 31, 0] == pictures[5, 1, 32 * 31, 0]
    assert found.train_labels.tolist() == list(range(10))
    assert found.test_labels.tolist() == [3, 8]

    files["package/data_batch_2.png"] = files["package/data_batch_2.png"][:1000]
    with pytest.raises(TacitError, match=r"data_batch_2.png"):
        readers.read_cifar10_png(write_tar(tmp_path / "package.tgz", files))


# SVHN


def test_svhn(tmp_path: Path) -> None:
    images = noise(32, 32, 3, 4)
    savemat(tmp_path / "train_32x32.mat", {"X": images, "y": np.array([[10], [1], [9], [10]], np.uint8)})
    savemat(tmp_path / "test_32x32.mat", {"X": images[..., :2], "y": np.array([[2], [10]], np.uint8)})
    found = readers.read_svhn(tmp_path / "train_32x32.mat", tmp_path / "test_32x32.mat")
    assert found.train_images.shape == (4, 3, 32, 32)
    assert found.train_images[2, 1, 30, 4] == images[30, 4, 1, 2]
    assert found.train_labels.tolist() == [0, 1, 9, 0]
    assert found.test_labels.tolist() == [2, 0]


@pytest.mark.parametrize("keep", [0, 60, 5000])
def test_damaged_svhn_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "train_32x32.mat"
    savemat(path, {"X": noise(32, 32, 3, 4), "y": np.ones((4, 1), np.uint8)}, do_compression=True)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TacitError, match=r"train_32x32.mat"):
        readers.read_svhn(path, path)


# .npz and MedMNIST


def test_npz(tmp_path: Path) -> None:
    images = noise(5, 8, 8, 3)
    np.savez(
        tmp_path / "own.npz",
        x_train=images[:3],
        y_train=np.array([0, 1, -1]),
        x_test=images[3:],
        y_test=np.array([[1], [0]]),
        classes=np.array(["cat", "dog"]),
        group_train=np.array(["p2", "p1", "p2"]),
        group_test=np.array(["p3", "p0"]),
    )
    found = readers.read_npz(tmp_path / "own.npz")
    assert np.array_equal(found.train_images, images[:3].transpose(0, 3, 1, 2))
    assert found.train_labels.tolist() == [0, 1, -1]
    assert found.test_labels.tolist() == [1, 0]
    assert found.classes == ("cat", "dog")
    assert found.train_groups is not None
    assert found.test_groups is not None
    assert (found.train_groups.tolist(), found.test_groups.tolist()) == ([2, 1, 2], [3, 0])


def test_npz_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    path.write_bytes(b"PK nothing")
    with pytest.raises(TacitError, match=r"own.npz"):
        readers.read_npz(path)
    np.savez(path, images=noise(2, 8, 8))
    with pytest.raises(TacitError, match=r"holds images\. Expected x_train"):
        readers.read_npz(path)
    np.savez(path, x_train=np.array([Path("a")], dtype=object), y_train=np.array([0]))  # would need unpickling
    with pytest.raises(TacitError, match=r"own.npz"):
        readers.read_npz(path)
    np.savez(path, x_train=noise(2, 8, 8), y_train=np.array(["cat", "dog"]))
    with pytest.raises(TacitError, match=r"whole numbers"):
        readers.read_npz(path)
    np.savez(path, x_train=np.full((2, 8, 8), 300), y_train=np.array([0, 1]))
    with pytest.raises(TacitError, match=r"from 300 to 300"):
        readers.read_npz(path)


def medmnist(path: Path, **changes: np.ndarray) -> Path:
    stored = {
        f"{part}_{what}": value
        for part, number in (("train", 6), ("val", 2), ("test", 3))
        for what, value in (("images", noise(number, 28, 28)), ("labels", np.arange(number)[:, None] % 3))
    }
    np.savez(path, **(stored | changes))
    return path


def test_medmnist_leaves_validation_out(tmp_path: Path) -> None:
    found = readers.read_npz(medmnist(tmp_path / "breastmnist.npz"))
    assert found.train_images.shape == (6, 1, 28, 28)
    assert found.train_labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert len(found.test_images) == 3
    assert "2 validation images are left out" in found.note
    colour = readers.read_npz(medmnist(tmp_path / "x.npz", train_images=noise(6, 28, 28, 3)))
    assert colour.train_images.shape == (6, 3, 28, 28)


def test_medmnist_multi_label_and_volumes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TacitError, match=r"chestmnist.npz is a multi-label set \(14 labels"):
        readers.read_npz(medmnist(tmp_path / "chestmnist.npz", train_labels=np.ones((6, 14), int)))
    with pytest.raises(TacitError, match=r"volumes"):
        readers.read_npz(medmnist(tmp_path / "organmnist3d.npz", train_images=noise(6, 28, 28, 28)))


# ISIC 2018


def photograph(brightness: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (60, 45), (brightness, 0, 0)).save(file, "JPEG")
    return file.getvalue()


def write_isic(folder: Path, zipped: bool) -> tuple[Path, Path, Path]:
    """42 photographs of 21 lesions, three lesions for each class, each lesion twice."""
    prefix = "ISIC2018_Task3_Training_"
    order = ("MEL", "NV", "BCC", "AKIEC", "BKL", "DF", "VASC")  # the official order of the columns
    truth = [f"image,{','.join(order)}"]
    groupings = ["image,lesion_id,diagnosis_confirm_type"]
    photographs = {}
    for number in range(42):
        name, kind = f"ISIC_{number:07d}", number % 7
        truth.append(f"{name},{','.join('1.0' if kind == column else '0.0' for column in range(7))}")
        groupings.append(f"{name},HAM_{number % 21:07d},histopathology")
        photographs[f"{prefix}Input/{name}.jpg"] = photograph(6 * number)
    photographs[f"{prefix}Input/LICENSE.txt"] = b"CC BY-NC 4.0"
    groups = folder / f"{prefix}LesionGroupings.csv"
    groups.write_text("\n".join(groupings))
    if zipped:
        with zipfile.ZipFile(folder / f"{prefix}Input.zip", "w") as archive:
            for name, content in photographs.items():
                archive.writestr(name, content)
        with zipfile.ZipFile(folder / f"{prefix}GroundTruth.zip", "w") as archive:
            archive.writestr(f"{prefix}GroundTruth/{prefix}GroundTruth.csv", "\n".join(truth))
        return folder / f"{prefix}Input.zip", folder / f"{prefix}GroundTruth.zip", groups
    (folder / f"{prefix}Input").mkdir()
    for name, content in photographs.items():
        (folder / name).write_bytes(content)
    (folder / f"{prefix}GroundTruth.csv").write_text("\n".join(truth))
    return folder / f"{prefix}Input", folder / f"{prefix}GroundTruth.csv", groups


@pytest.mark.parametrize("zipped", [True, False])
def test_isic(tmp_path: Path, zipped: bool) -> None:
    found = read_isic(*write_isic(tmp_path, zipped))
    assert found.classes == CLASSES
    assert found.train_images.shape[1:] == (3, 32, 32)
    # of three lesions a class holds out round(.2 × 3) = 1, with both of its photographs
    assert np.bincount(found.test_labels).tolist() == [2] * 7
    assert np.bincount(found.train_labels).tolist() == [4] * 7
    assert found.train_groups is not None
    assert found.test_groups is not None
    assert not set(found.train_groups) & set(found.test_groups)
    # image 0 is the darkest and has the first official column, MEL; the next has NV
    darkest = np.concatenate([found.train_images, found.test_images])[:, 0].mean((1, 2)).argsort()[:2]
    labels = np.concatenate([found.train_labels, found.test_labels])
    assert [CLASSES[label] for label in labels[darkest]] == ["mel", "nv"]


def test_isic_names_what_is_missing(tmp_path: Path) -> None:
    images, truth, groups = write_isic(tmp_path, zipped=False)
    (images / "ISIC_0000003.jpg").write_bytes(photograph(0)[:300])
    with pytest.raises(TacitError, match=r"ISIC_0000003.jpg"):
        read_isic(images, truth, groups)
    (images / "ISIC_0000003.jpg").unlink()
    with pytest.raises(TacitError, match=r"no photograph for 1 of 42 images \(the first is ISIC_0000003"):
        read_isic(images, truth, groups)
    groups.write_text("image,lesion\n")
    truth.write_text(truth.read_text().replace("BKL", "BXX"))
    with pytest.raises(TacitError, match=r"GroundTruth.csv.*no column BKL"):
        read_isic(images, truth, groups)
