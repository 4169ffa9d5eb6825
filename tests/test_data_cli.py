"""`tacit data list`, `get` and `check`."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tacit.cli.data import app
from tacit.core.errors import TacitError
from tacit.data.catalogue import SOURCES


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TACIT_DATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "150")
    return tmp_path


def said(*words: str) -> str:
    return CliRunner().invoke(app, list(words), catch_exceptions=False).output


def put_isic(root: Path) -> None:
    total = np.repeat(np.arange(7), SOURCES["isic2018"].total)
    test = np.arange(len(total)) % 5 == 0
    np.savez_compressed(
        root / "isic2018.npz",
        x_train=np.zeros((int((~test).sum()), 32, 32, 3), np.uint8),
        y_train=total[~test],
        x_test=np.zeros((int(test.sum()), 32, 32, 3), np.uint8),
        y_test=total[test],
    )


def test_list(root: Path) -> None:
    text = said("list")
    for name in SOURCES:
        assert name in text
    assert "2642 MB" in text
    assert "CC BY-NC 4.0" in text
    put_isic(root)
    line = next(line for line in said("list").splitlines() if "isic2018" in line)
    assert "here" in line


def test_list_one_says_where_it_looks(root: Path) -> None:
    text = said("list", "svhn")
    assert text.startswith(f"1. the cache: {root / 'svhn' / 'prepared'}")
    assert "train_32x32.mat" in text


def test_get_and_check(root: Path) -> None:
    put_isic(root)
    assert "8,012 training and 2,003 test images, 32×32×3, 7 classes" in said("get", "isic2018")
    assert (root / "isic2018" / "prepared" / "meta.json").exists()
    assert "8,012" in said("get", "isic2018")
    text = said("check", "isic2018")
    for words in ("nv", "5,364", "1,341", "mean 0.0000 0.0000 0.0000", "fingerprint", "HAM10000"):
        assert words in text
    with open(root / "isic2018" / "prepared" / "test_images.npy", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    with pytest.raises(TacitError, match="fingerprint"):
        said("check", "isic2018")
    said("get", "isic2018")
    said("check", "isic2018")


def test_check_of_own_data_and_of_what_is_not_here(root: Path) -> None:
    images = np.arange(20, dtype=np.uint8)[:, None, None] + np.zeros((20, 8, 8), np.uint8)
    np.savez(root / "mine.npz", x_train=images, y_train=np.array([0, 1] * 8 + [-1] * 4))
    text = said("check", str(root / "mine.npz"))
    assert "mine: " in text
    assert "(unlabelled)" in text
    with pytest.raises(TacitError, match="fetching it was not allowed"):
        said("check", "cifar100")
    with pytest.raises(TacitError, match="Did you mean 'cifar10'"):
        said("get", "cifar")
