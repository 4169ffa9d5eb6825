"""Views: normalisation by hand, the same seed the same view, other images and pieces without a say, statistics."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import tacit.views
from tacit.core.errors import TacitError
from tacit.core.seeds import generator
from tacit.views import Views

POOLS = ["fixmatch", "ssl", "semifl-legacy", "ddrfed"]
WEAK = ["crop", "resize-crop", "none"]
KINDS = ["weak_view", "strong_view", "raw_weak", "raw_strong"]


def noise(count: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    shape = (count, channels, height, width)
    return torch.randint(0, 256, shape, generator=generator("noise"), dtype=torch.uint8)


def of(channels: int, **options: Any) -> Views:
    return Views(mean=(0.5, 0.4, 0.3)[:channels], std=(0.25, 0.2, 0.1)[:channels], **options)


def test_normalisation_by_hand() -> None:
    images = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    images[0, 0, 0, 0], images[0, 1, 2, 3], images[0, 2, 7, 7] = 255, 51, 153
    seen = of(3).plain(images)
    assert seen.dtype == torch.float32
    assert seen[0, 0, 0, 0].item() == pytest.approx((1 - 0.5) / 0.25, abs=1e-6)
    assert seen[0, 1, 2, 3].item() == pytest.approx((0.2 - 0.4) / 0.2, abs=1e-6)
    assert seen[0, 2, 7, 7].item() == pytest.approx((0.6 - 0.3) / 0.1, abs=1e-6)
    assert seen[0, 2, 0, 0].item() == pytest.approx(-3, abs=1e-6)
    assert torch.equal(of(3).normalise(images), seen)


def test_normalisation_within_rounding_of_double_precision() -> None:
    images = noise(4)
    mean, std = torch.tensor((0.5, 0.4, 0.3)).double(), torch.tensor((0.25, 0.2, 0.1)).double()
    exact = (images.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    assert (of(3).plain(images) - exact).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_float_types(dtype: torch.dtype) -> None:
    seen = of(3, dtype=dtype).weak_view(noise(3), generator(1))
    assert seen.dtype == dtype
    assert torch.equal(seen, of(3).weak_view(noise(3), generator(1)).to(dtype))


@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("strong", POOLS)
@pytest.mark.parametrize("weak", WEAK)
def test_float_view_is_the_normalised_raw_view(weak: Any, strong: Any, kind: str) -> None:
    views, images = of(3, weak=weak, strong=strong), noise(40)
    raw = getattr(views, f"raw_{kind}")(images, generator(7))
    assert raw.dtype == torch.uint8
    seen = getattr(views, f"{kind}_view")(images, generator(7))
    assert torch.equal(seen, views.normalise(raw))
    lowest = (0 - torch.tensor(views.mean)) / torch.tensor(views.std)
    highest = (1 - torch.tensor(views.mean)) / torch.tensor(views.std)
    assert (seen >= lowest.view(3, 1, 1) - 1e-5).all()
    assert (seen <= highest.view(3, 1, 1) + 1e-5).all()


@pytest.mark.parametrize("strong", POOLS)
@pytest.mark.parametrize("weak", WEAK)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (1, 28, 28), (3, 33, 20), (3, 64, 64)])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_any_number_size_and_channels(weak: Any, strong: Any, shape: tuple[int, int, int], count: int) -> None:
    views, images = of(shape[0], weak=weak, strong=strong), noise(count, *shape)
    for kind in KINDS:
        seen = getattr(views, kind)(images, generator(3))
        assert seen.shape == images.shape
        assert seen.dtype == (torch.uint8 if kind.startswith("raw") else torch.float32)
        assert seen.isfinite().all()
    assert views.plain(images).shape == images.shape


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strong", POOLS)
@pytest.mark.parametrize("weak", ["crop", "resize-crop"])
def test_same_seed_same_view_other_seed_another(weak: Any, strong: Any, kind: str) -> None:
    view = getattr(of(3, weak=weak, strong=strong), kind)
    images = noise(30)
    once = view(images, generator(1))
    assert torch.equal(once, view(images, generator(1)))
    assert not torch.equal(once, view(images, generator(2)))
    # and the state of the generator is all that matters
    going = generator(1)
    assert torch.equal(once, view(images, going))
    assert not torch.equal(once, view(images, going))


@pytest.mark.parametrize("strong", POOLS)
@pytest.mark.parametrize("weak", ["crop", "resize-crop"])
def test_two_images_of_a_batch_get_different_draws(weak: Any, strong: Any) -> None:
    views = of(3, weak=weak, strong=strong)
    same = noise(1).repeat(64, 1, 1, 1)
    weak_kinds = len(views.raw_weak(same, generator(5)).flatten(1).unique(dim=0))
    assert weak_kinds > 35  # 162 possible views, 64 draws: 53 different ones are expected
    strong_kinds = len(views.raw_strong(same, generator(5)).flatten(1).unique(dim=0))
    assert strong_kinds > 45


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strong", POOLS)
@pytest.mark.parametrize("weak", WEAK)
def test_piece_size_has_no_say(weak: Any, strong: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view = getattr(of(3, weak=weak, strong=strong), kind)
    images = noise(70)
    whole = view(images, generator(1))
    for size in (1, 32, 69, 70):
        monkeypatch.setattr(tacit.views, "CHUNK", size)
        assert torch.equal(view(images, generator(1)), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strong", POOLS)
@pytest.mark.parametrize("weak", WEAK)
def test_other_images_have_no_say(weak: Any, strong: Any, kind: str) -> None:
    """A batch split in two, one after the other from the same generator, is the whole batch; and the neighbours'
    content does not matter."""
    view = getattr(of(3, weak=weak, strong=strong), kind)
    images = noise(50)
    whole = view(images, generator(1))
    going = generator(1)
    assert torch.equal(torch.cat([view(images[:17], going), view(images[17:], going)]), whole)
    others = images.clone()
    others[::2] = 0
    assert torch.equal(view(others, generator(1))[1::2], whole[1::2])


def test_inputs_are_not_written_to() -> None:
    images = noise(50)
    before = images.clone()
    for weak in WEAK:
        for strong in POOLS:
            views = of(3, weak=weak, strong=strong)
            for kind in KINDS:
                getattr(views, kind)(images, generator(1))
    assert torch.equal(images, before)
    none = of(3, weak="none").raw_weak(images, generator(1))
    none.zero_()  # a raw view is its owner's own, also when nothing was done
    assert torch.equal(images, before)


def places(count: int) -> Tensor:
    """Pictures that tell where a pixel comes from: channel 0 is the row, channel 1 the column."""
    row, column = torch.arange(32).view(32, 1).expand(32, 32), torch.arange(32).expand(32, 32)
    return torch.stack([row, column, row]).to(torch.uint8).repeat(count, 1, 1, 1)


def test_crop_offsets_are_uniform_and_half_are_flipped() -> None:
    count = 16_200
    views = of(3).raw_weak(places(count), generator(1))
    flipped = views[:, 1, 16, 16] < views[:, 1, 16, 15]
    assert flipped.double().mean().item() == pytest.approx(0.5, abs=4 * (0.25 / count) ** 0.5)
    top = views[:, 0, 16, 16].long() - 12  # 4 is the middle
    left = torch.where(flipped, views[:, 1, 16, 15], views[:, 1, 16, 16]).long() - 12
    assert (top.min(), top.max(), left.min(), left.max()) == (0, 8, 0, 8)
    cells = torch.bincount((top * 9 + left) * 2 + flipped, minlength=162)
    chi_square = ((cells - count / 162) ** 2 / (count / 162)).sum().item()
    assert 161 - 5 * (2 * 161) ** 0.5 < chi_square < 161 + 5 * (2 * 161) ** 0.5  # 161 degrees of freedom


def test_resize_crop_offsets_are_uniform_and_half_are_flipped() -> None:
    """Enlarged to 40, a step to the right is 0.8 of an old pixel: the first column starts at 0 … 8 · 0.8."""
    count = 8_100
    images = places(count) * 8
    views = of(3, weak="resize-crop").raw_weak(images, generator(1))
    flipped = views[:, 1, 16, 31] < views[:, 1, 16, 0]
    assert flipped.double().mean().item() == pytest.approx(0.5, abs=4 * (0.25 / count) ** 0.5)
    for first in (views[:, 0, 0, 0], torch.where(flipped, views[:, 1, 0, 31], views[:, 1, 0, 0])):
        values, cells = first.unique(return_counts=True)
        assert len(values) == 9
        chi_square = ((cells - count / 9) ** 2 / (count / 9)).sum().item()
        assert chi_square < 8 + 5 * 16**0.5  # 8 degrees of freedom


@pytest.mark.parametrize("weak", ["crop", "resize-crop"])
def test_nothing_is_flipped_where_flips_change_the_class(weak: Any) -> None:
    views = of(3, weak=weak, flip=False).raw_weak(places(500), generator(1))
    assert (views[:, 1, 16, 5] < views[:, 1, 16, 25]).all()


def test_no_weak_view_leaves_the_images_alone() -> None:
    images = noise(5)
    assert torch.equal(of(3, weak="none").raw_weak(images, generator(1)), images)


def test_the_choice_of_weak_view_does_not_change_the_strong_operations() -> None:
    """A flat picture does not show the weak view; what remains are the strong operations."""
    flat = torch.full((60, 3, 32, 32), 180, dtype=torch.uint8)
    crop, none = (of(3, weak=weak).raw_strong(flat, generator(1)) for weak in ("crop", "none"))
    assert torch.equal(crop, none)


def test_views_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        of(3).weak = "none"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weak": "crops"}, "no weak view 'crops'. Did you mean 'crop'"),
        ({"strong": "semifl"}, "no strong view 'semifl'. Did you mean 'semifl-legacy'"),
        ({"std": (0.1, 0.2)}, "do not fit together"),
        ({"std": (0.1, 0.0, 0.2)}, "above 0"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TacitError, match=message):
        Views(**{"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2), **options})


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.full((2, 3, 32, 32), -1.5), r"values from 0 to 1.*torch\.float32"),
        (torch.zeros(2, 3, 32, 32, dtype=torch.int64), "torch.int64"),
        (torch.zeros(3, 32, 32, dtype=torch.uint8), r"\[3, 32, 32\]"),
        (torch.zeros(2, 1, 32, 32, dtype=torch.uint8), "1 channel"),
        (torch.zeros(2, 3, 7, 32, dtype=torch.uint8), "at least 8 pixels"),
    ],
)
def test_wrong_images_are_named(images: Tensor, message: str) -> None:
    with pytest.raises(TacitError, match=message):
        of(3).weak_view(images, generator(1))


def test_float_images_from_0_to_1_give_the_views_of_their_bytes() -> None:
    images = noise(6)
    views = of(3)
    for kind in ("weak_view", "strong_view", "raw_weak"):
        seen = [getattr(views, kind)(form, generator("float")) for form in (images, images.float() / 255)]
        assert torch.equal(*seen)


def test_siamese_views_do_not_depend_on_the_other_images() -> None:
    images = torch.randint(256, (8, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    views, seeded = Views((0.5,) * 3, (0.25,) * 3), torch.Generator().manual_seed(2)
    whole = views.siamese_view(images, torch.Generator().manual_seed(2))
    parts = [views.siamese_view(part, seeded) for part in (images[:5], images[5:])]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, views.siamese_view(images, seeded))  # another chance, another view


def test_siamese_views_show_a_part_in_other_colours_and_mirror_only_where_allowed() -> None:
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(400, 3, 32, 32).contiguous()  # bright to the right
    for flip, least, most in ((False, 0, 0), (True, 150, 250)):
        views = Views((0.0,) * 3, (1.0,) * 3, flip=flip).siamese_view(ramp, torch.Generator().manual_seed(0))
        mirrored = (views[..., -1].mean(dim=(1, 2)) < views[..., 0].mean(dim=(1, 2))).sum()
        assert least <= int(mirrored) <= most
    assert float(views.min()) >= 0
    assert float(views.max()) <= 1
    spread = views.amax(dim=3) - views.amin(dim=3)
    assert float(spread.mean()) < 0.9 * float(ramp.float().amax() - ramp.float().amin()) / 255  # parts, not wholes
