"""Images are there once: workers map what the engine has."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np

from runs import TINY, digest
from tacit.config.resolve import resolve
from tacit.data.federation import adapt
from tacit.data.shared import share
from tacit.data.sources import load
from tacit.engine.run import run_experiment


def test_mapped_images_are_not_written_again(tmp_path: Path) -> None:
    digits = load("digits")
    np.save(tmp_path / "train.npy", digits.train_images)
    np.save(tmp_path / "test.npy", digits.test_images)
    mapped = dataclasses.replace(
        digits,
        train_images=np.load(tmp_path / "train.npy", mmap_mode="r"),
        test_images=np.load(tmp_path / "test.npy", mmap_mode="r"),
    )
    shared = share(mapped, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    assert np.array_equal(shared.open().train_images, digits.train_images)
    part = dataclasses.replace(mapped, train_images=mapped.train_images[5:])  # a view of a map is not the map
    assert np.array_equal(share(part, tmp_path / "new").open().train_images, digits.train_images[5:])


def test_other_images_are_written_once_and_sent_small(tmp_path: Path) -> None:
    large = adapt(load("digits"), size=16, rgb=True)
    shared = share(large, tmp_path / "images")
    back = pickle.loads(pickle.dumps(shared))
    assert len(pickle.dumps(shared)) < 40_000  # labels and names, no images
    assert isinstance(back.open().train_images, np.memmap)
    assert np.array_equal(back.open().test_images, large.test_images)
    assert back.open().classes == large.classes


def test_resized_images_on_the_pool_give_the_same_bytes_and_leave_nothing(tmp_path: Path) -> None:
    settings = {"method": "fedavg", "method.preset": "smoke", "data.placement": "clients", "data.image_size": 12}
    local = run_experiment(resolve(settings, TINY, {"data.rgb": True}), tmp_path / "local")
    pool = run_experiment(
        resolve(settings, TINY, {"data.rgb": True, "backend.name": "pool", "backend.workers": 2}), tmp_path / "pool"
    )
    assert digest(pool) == digest(local)
    assert not (tmp_path / "pool" / "images").exists()
