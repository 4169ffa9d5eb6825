"""Photographs at the size they are needed: decoded once, mapped from then on, resized sets likewise."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tacit.core.settings import Data
from tacit.data import mapped, own
from tacit.data.federation import adapt, load_dataset
from tacit.data.party import Facts, load_party
from tacit.data.shared import share
from tacit.data.sources import load
from tacit.pieces import train
from tacit.pieces.train import viewed_batches
from tacit.views import Views


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, in which everything is worth keeping."""
    monkeypatch.setenv("TACIT_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(mapped, "WORTH", 1)
    return tmp_path / "cache" / "sized"


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for number in range(12):
        path = tmp_path / "photographs" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (40, 60, 3), np.uint8)).save(path)
    return tmp_path / "photographs"


def test_photographs_are_decoded_once_and_mapped(
    photographs: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mapped, "WORTH", 1 << 40)
        in_memory = own.load_own(photographs, Data(image_size=384))
    assert not isinstance(in_memory.train_images, np.memmap)
    first = load_dataset(Data(name=str(photographs), image_size=384))
    assert mapped.lies_here(first.train_images)
    assert not mapped.lies_here(in_memory.train_images)
    assert first.train_images.shape[1:] == (3, 384, 384)
    assert np.array_equal(first.train_images, in_memory.train_images)
    assert cache.stat().st_mode & 0o077 == 0  # for this user alone
    monkeypatch.setattr(own, "open_deep", lambda path: pytest.fail(f"{path} was decoded again"))
    again = load_dataset(Data(name=str(photographs), image_size=384))
    assert again.fingerprint == first.fingerprint
    files = share(again, tmp_path / "run").files  # workers map the very files
    assert all(path.parent == cache for path in files.values())
    assert not (tmp_path / "run").exists()
    kept = b"".join(path.read_bytes() for path in cache.glob("*.json"))
    assert b"photographs" not in kept


def test_a_changed_file_is_decoded_again(photographs: Path, cache: Path) -> None:
    before = own.load_own(photographs, Data(image_size=16))
    changed = photographs / "dog" / "0.png"
    times = changed.stat()
    pixels = np.asarray(Image.open(changed)).copy()
    pixels[:] = 255 - pixels
    Image.fromarray(pixels).save(changed)
    os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))  # as some copying programs do
    assert own.load_own(photographs, Data(image_size=16)).fingerprint != before.fingerprint


def test_half_a_file_in_the_cache_is_made_again(photographs: Path, cache: Path) -> None:
    before = own.load_own(photographs, Data(image_size=16))
    for path in cache.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:100])
    for path in cache.glob("*.json"):
        path.write_text("{")
    assert own.load_own(photographs, Data(image_size=16)).fingerprint == before.fingerprint


def test_a_party_maps_its_photographs_and_writing_into_them_reaches_nobody(photographs: Path, cache: Path) -> None:
    facts = Facts(("cat", "dog"), 3, 32, (0.5,) * 3, (0.25,) * 3)
    party = load_party(photographs, facts)
    assert isinstance(party.images, np.memmap)
    original = np.array(party.images)
    torch.from_numpy(party.images).zero_()
    assert np.array_equal(load_party(photographs, facts).images, original)


def test_resized_sets_are_mapped_and_equal(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load("digits")
    there = adapt(digits, 20, rgb=True)
    assert isinstance(there.train_images, np.memmap)
    monkeypatch.setattr(mapped, "WORTH", 1 << 40)
    plain = adapt(digits, 20, rgb=True)
    assert not isinstance(plain.train_images, np.memmap)
    assert np.array_equal(there.train_images, plain.train_images)
    assert there.mean == digits.mean * 3
    grey = adapt(digits, 20, rgb=False)
    assert np.array_equal(plain.test_images, grey.test_images.repeat(3, axis=1))


def test_without_room_on_the_disk_the_memory_is_asked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "SPARE", 1 << 60)
    assert not isinstance(adapt(load("digits"), 16, rgb=False).train_images, np.memmap)
    assert not cache.exists()


@pytest.mark.parametrize("weak", ["crop", "resize-crop"])
def test_the_number_of_images_at_once_changes_no_view(weak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (20, 3, 48, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views = Views((0.5,) * 3, (0.25,) * 3, weak=weak)  # type: ignore[arg-type]

    def epoch() -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [seen for _, seen in viewed_batches(images, 4, views.strong_view, generator)]

    at_once = epoch()
    monkeypatch.setattr(train, "MOST_NUMBERS", 1)
    monkeypatch.setattr("tacit.views.MOST_PIXELS", 1)
    monkeypatch.setattr("tacit.views.augment.CACHED", 1)
    assert all(torch.equal(one, other) for one, other in zip(at_once, epoch(), strict=True))
