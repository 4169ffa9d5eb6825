"""The real data sets, as far as this machine can have them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runs import outside
from tacit.core.errors import TacitError
from tacit.data import cache
from tacit.data.arrays import histogram, mean_and_std
from tacit.data.dataset import Dataset
from tacit.data.sources import load


@pytest.fixture
def real(tmp_path: Path) -> Callable[[str], Dataset]:
    """A data set from the user's cache if it is there, else fetched into a folder of the test's own."""

    def get(name: str) -> Dataset:
        try:
            prepared = cache.prepared_folder(cache.data_root(), name) / "meta.json"
            return load(name, fetch=False) if prepared.is_file() else load(name, root=tmp_path)
        except TacitError as error:
            pytest.skip(f"{name} cannot be had here: {error}")

    return get


def test_digits() -> None:
    found = load("digits", root=Path("nowhere"))
    assert (found.train_images.shape, found.test_images.shape) == ((1442, 1, 8, 8), (355, 1, 8, 8))
    assert (found.train_images.min(), found.train_images.max()) == (0, 255)
    share = np.array(histogram(found.test_labels, 10)) / np.array(histogram(found.train_labels, 10))
    assert np.allclose(share, 0.25, atol=0.01)  # stratified: one to four
    assert not found.mirror
    # the first image of scikit-learn's set is a zero; its first row reads 0 0 5 13 9 1 0 0 of 16
    assert found.train_images[0, 0, 0].tolist() == [0, 0, 80, 207, 143, 16, 0, 0]
    assert found.train_labels[:5].tolist() == [0, 1, 2, 3, 4]
    assert load("digits").fingerprint == found.fingerprint


def test_fashion_mnist(real: Callable[[str], Dataset]) -> None:
    found = real("fashion-mnist")
    assert (found.train_images.shape, found.test_images.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert histogram(found.train_labels, 10) == (6000,) * 10
    assert histogram(found.test_labels, 10) == (1000,) * 10
    assert found.mean == pytest.approx((0.2860,), abs=1e-4)
    assert found.std == pytest.approx((0.3530,), abs=1e-4)
    assert found.classes[found.train_labels[0]] == "ankle boot"
    assert found.mirror
    assert isinstance(found.train_images, np.memmap)


def test_cifar10(real: Callable[[str], Dataset]) -> None:
    found = real("cifar10")
    assert (found.train_images.shape, found.test_images.shape) == ((50000, 3, 32, 32), (10000, 3, 32, 32))
    assert histogram(found.train_labels, 10) == (5000,) * 10
    mean, std = mean_and_std(found.train_images)
    assert mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=5e-5)
    assert std == pytest.approx((0.2470, 0.2435, 0.2616), abs=5e-5)
    assert found.std == (0.2023, 0.1994, 0.2010)  # the papers'
    assert "constants of the papers" in found.note
    assert [found.classes[label] for label in found.test_labels[:4]] == ["cat", "ship", "ship", "airplane"]


def test_mnist(real: Callable[[str], Dataset]) -> None:
    found = real("mnist")
    assert (found.train_images.shape, found.test_images.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert found.mean == pytest.approx((0.1307,), abs=1e-4)
    assert found.std == pytest.approx((0.3081,), abs=1e-4)
    assert found.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert not found.mirror


def test_isic_2018(tmp_path: Path) -> None:
    (tmp_path / "isic2018.npz").symlink_to(outside("isic2018.npz").resolve())
    found = load("isic2018", root=tmp_path)
    assert (found.train_images.shape, found.test_images.shape) == ((8009, 3, 32, 32), (2006, 3, 32, 32))
    assert found.classes == ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
    share = np.bincount(found.train_labels).max() / len(found.train_labels)
    assert share == pytest.approx(0.676, abs=0.001)
    assert found.train_groups is not None
    assert found.test_groups is not None
    assert not set(found.train_groups) & set(found.test_groups)
