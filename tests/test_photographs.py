"""ISIC 2018 at a size that is asked for: from its photographs, which are kept; never enlarged from small ones."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_data_readers import write_isic

from tacit.config.recipes import known_recipes, load_recipe
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data import sources
from tacit.data.catalogue import SOURCES
from tacit.data.federation import load_dataset
from tacit.data.sources import load
from tacit.runs.plan import prepare


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder that knows of an ISIC of 42 photographs (28 for training), and no network."""
    monkeypatch.setitem(SOURCES, "isic2018", replace(SOURCES["isic2018"], images=(28, 14), total=(6,) * 7))
    monkeypatch.setattr(sources, "download", lambda address, *_, **__: pytest.fail(f"{address} was asked for"))
    folder = tmp_path / "data"
    monkeypatch.setenv("TACIT_DATA", str(folder))
    (folder / "isic2018").mkdir(parents=True)
    return folder


@pytest.mark.parametrize("zipped", [True, False])
def test_photographs_are_read_at_the_size_that_is_asked_for(root: Path, zipped: bool) -> None:
    write_isic(root / "isic2018", zipped)
    files = sorted(path.name for path in (root / "isic2018").iterdir())
    large, small = load("isic2018", image_size=48), load("isic2018")
    assert large.train_images.shape == (28, 3, 48, 48)
    assert small.train_images.shape == (28, 3, 32, 32)
    for name in ("train_labels", "test_labels", "train_groups", "test_groups"):  # the same images in the same order
        assert np.array_equal(getattr(large, name), getattr(small, name)), name
    assert large.fingerprint != small.fingerprint
    assert "squashed to 48×48" in large.note
    left = sorted(path.name for path in (root / "isic2018").iterdir() if not path.name.startswith("."))
    assert left == sorted([*files, "prepared", "prepared-48"])  # photographs are kept, and each size has its cache
    assert load_dataset(Data(name="isic2018", image_size=48)).size == 48
    assert load_dataset(Data(name="isic2018", image_size=16)).size == 16  # shrunk from what is stored


def test_it_is_the_photograph_and_not_the_small_image_enlarged(root: Path) -> None:
    """A photograph of stripes, 2 pixels wide each at 64: at 32 they are grey, at 64 they are there."""
    from PIL import Image

    write_isic(root / "isic2018", zipped=False)
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    for path in (root / "isic2018").rglob("*.jpg"):
        Image.fromarray(stripes).save(path, quality=100, subsampling=0)
    assert load("isic2018", image_size=64).train_images.std() > 100
    assert load_dataset(Data(name="isic2018")).train_images.std() < 40


def test_small_images_are_not_enlarged(root: Path) -> None:
    arrays = {"x_train": np.zeros((28, 32, 32, 3), np.uint8), "y_train": np.repeat(np.arange(7), 4)}
    arrays |= {"x_test": np.zeros((14, 32, 32, 3), np.uint8), "y_test": np.repeat(np.arange(7), 2)}
    np.savez(root / "isic2018.npz", **arrays)
    assert load("isic2018").size == 32
    with pytest.raises(TacitError) as caught:
        load("isic2018", image_size=224, fetch=False)
    said = str(caught.value)
    assert "isic2018 at 224×224 pixels is not here and could not be had" in said
    assert "isic2018.npz is there, but its images are smaller, and enlarging them would add nothing to see" in said
    assert "ISIC2018_Task3_Training_Input.zip" in said
    write_isic(root, zipped=True)  # beside the .npz: the photographs are used for the large size, the .npz for its own
    assert load("isic2018", image_size=224, fetch=False).size == 224
    assert load("isic2018").size == 32


def test_a_download_is_kept_for_another_size(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "public").mkdir()
    write_isic(tmp_path / "public", zipped=True)
    asked: list[str] = []

    def download(address: str, target: Path, **_: object) -> None:
        asked.append(target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "public" / target.name, target)

    monkeypatch.setattr(sources, "download", download)
    assert load("isic2018", image_size=40).size == 40
    assert len(asked) == 3
    assert load("isic2018", image_size=48, fetch=False).size == 48
    assert load("isic2018", fetch=False).size == 32
    assert len(asked) == 3


def test_the_recipes_ask_for_240_cropped_to_224(root: Path) -> None:
    names = [name for name in known_recipes() if "isic2018" in name]
    assert len(names) == 9
    for name in names:
        experiment = resolve(load_recipe(name))
        assert (experiment.data.image_size, experiment.views.weak, experiment.views.resize) == (224, "resize-crop", 240)
    write_isic(root / "isic2018", zipped=True)
    small = {"data.clients": 2, "data.alpha": 100.0, "data.min_size": 1, "data.cover": 0}
    plan = prepare(resolve(load_recipe("cbafed/table1/isic2018-lower"), small))
    assert (plan.setup.size, plan.setup.views.resize) == (224, 240)
    with pytest.raises(TacitError, match=r"views\.resize = 200 is below the size of the images, 224 pixels"):
        prepare(resolve(load_recipe("cbafed/table1/isic2018-lower"), {**small, "views.resize": 200}))
    with pytest.raises(TacitError, match=r"views\.weak is 'crop'"):
        prepare(resolve(load_recipe("cbafed/table1/isic2018-lower"), {**small, "views.weak": "crop"}))
