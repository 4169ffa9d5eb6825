"""DSA (one operation for the batch, differentiable) and the augmentation pipe with its label."""

import math

import pytest
import torch
from torch import Tensor

from tacit.core.seeds import generator
from tacit.views.dsa import DSA_OPERATIONS, dsa
from tacit.views.pipe import PIPE_LABEL, augment_pipe


def floats(count: int, channels: int = 3, height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(count, channels, height, width, generator=generator("floats"))


def test_dsa_does_the_same_to_every_image_of_the_batch() -> None:
    image = floats(1)
    kinds = []
    for seed in range(40):
        seen = dsa(image.repeat(4, 1, 1, 1), generator(seed))
        assert torch.equal(seen, seen[:1].expand_as(seen))
        kinds.append(seen[0].flatten())
    assert len(torch.stack(kinds).unique(dim=0)) > 30  # but another batch gets another


def test_dsa_same_seed_same_view() -> None:
    images = floats(3)
    assert torch.equal(dsa(images, generator(1)), dsa(images, generator(1)))


@pytest.mark.parametrize("operation", DSA_OPERATIONS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 9, 14)])
def test_dsa_gradients_are_right(operation: str, shape: tuple[int, int, int]) -> None:
    """The operations are linear in the image but for a constant, so a finite difference is exact."""
    images = floats(2, *shape).double().requires_grad_()
    towards = floats(2, *shape).double().flip(0)
    for seed in range(6):
        seen = dsa(images, generator(seed), [operation])
        assert seen.shape == images.shape
        (gradient,) = torch.autograd.grad((seen * towards).sum(), images)
        assert gradient.abs().sum() > 0
        moved = dsa((images + 0.5 * towards).detach(), generator(seed), [operation])
        step = ((moved - seen.detach()) * towards).sum()
        assert torch.allclose(step, 0.5 * (gradient * towards).sum())


def test_dsa_operations_by_hand() -> None:
    ones = torch.ones(2, 1, 32, 32)
    ramp = torch.arange(32.0).expand(2, 3, 32, 32)
    for seed in range(20):
        hole = dsa(ones, generator(seed), ["cutout"])
        rows, columns = (hole[0, 0] == 0).any(1).sum(), (hole[0, 0] == 0).any(0).sum()
        assert 8 <= rows <= 16
        assert 8 <= columns <= 16
        assert (hole == 0).sum() == 2 * rows * columns
        cropped = dsa(ones, generator(seed), ["crop"])
        kept = (cropped[0, 0].any(1).sum(), cropped[0, 0].any(0).sum())
        assert min(kept) >= 28
        assert cropped[0].sum() == kept[0] * kept[1]
        flipped = dsa(ramp, generator(seed), ["flip"])
        assert torch.equal(flipped, ramp) or torch.equal(flipped, ramp.flip(3))
        colour = dsa(ramp, generator(seed), ["color"])
        slope = (colour[..., 1:] - colour[..., :-1]).unique()
        assert slope.min() > 0.49  # grey: saturation does nothing, contrast is within ½ … 1½
        assert slope.max() < 1.51
        assert (colour.mean() - ramp.mean()).abs() <= 0.5 + 1e-4


def test_dsa_turns_by_up_to_15_degrees_and_scales_by_up_to_a_fifth() -> None:
    """Where a spot 12 pixels right of and 8 below the middle goes tells the angle and both factors."""
    y, x = torch.arange(64.0).view(-1, 1) - 31.5, torch.arange(64.0) - 31.5
    spot = torch.exp(-((x - 12) ** 2 + (y - 8) ** 2) / 8).expand(1, 1, 64, 64)
    angles, factors = [], []
    for seed in range(60):
        for name in ("rotate", "scale"):
            seen = dsa(spot, generator(seed), [name])[0, 0].double()
            right, down = ((seen * x).sum() / seen.sum()).item(), ((seen * y).sum() / seen.sum()).item()
            if name == "rotate":
                angles.append(math.degrees(math.atan2(down, right) - math.atan2(8, 12)))
                assert math.hypot(down, right) == pytest.approx(math.hypot(8, 12), abs=0.05)
            else:
                factors += [right / 12, down / 8]
    assert 12 < max(angles) < 15.1
    assert -15.1 < min(angles) < -12
    assert 1.15 < max(factors) < 1.205
    assert 0.83 < min(factors) < 0.87


def test_dsa_draws_every_operation() -> None:
    """A flat picture of ones: a flip or a colour keeps it flat, the others bring zeros in, each in its own way."""
    ones = torch.ones(1, 1, 32, 32)
    flat = sum(len(dsa(ones, generator(seed)).unique()) == 1 for seed in range(600))
    # flip and colour always, crop when it does not move (1/81), scale when it magnifies both ways (about ¼)
    assert flat / 600 == pytest.approx((2 + 1 / 81 + 0.25) / 6, abs=0.1)
    only = {dsa(ones, generator(seed), ["cutout", "cutout"]).min().item() for seed in range(10)}
    assert only == {0.0}


def test_dsa_empty_batch() -> None:
    assert dsa(torch.zeros(0, 3, 32, 32), generator(1)).shape == (0, 3, 32, 32)


def test_pipe_label_is_zero_exactly_where_the_image_is_untouched() -> None:
    images = floats(800, 3, 16, 16)
    seen, labels = augment_pipe(images, generator(1))
    assert seen.shape == images.shape
    assert labels.shape == (800, 9)
    assert len(PIPE_LABEL) == 9
    untouched = (seen == images).flatten(1).all(dim=1)
    assert torch.equal(untouched, (labels == 0).all(dim=1))
    assert untouched.double().mean().item() == pytest.approx(0.88**6, abs=4 * (0.25 / 800) ** 0.5)


def test_pipe_operations_come_with_the_given_probability() -> None:
    _, labels = augment_pipe(torch.zeros(5000, 1, 8, 8), generator(2))
    used = (labels != 0).double().mean(dim=0)
    assert (used - 0.12).abs().max().item() < 5 * (0.12 * 0.88 / 5000) ** 0.5
    assert set(labels[:, :2].unique().tolist()) == {0.0, 1.0}
    angles = torch.atan2(labels[:, 4], labels[:, 3] + 1)[labels[:, 4] != 0]
    assert angles.abs().max() > 3  # any angle
    for column in (2, 7, 8):  # standard normal
        chosen = labels[:, column][labels[:, column] != 0]
        assert chosen.mean().abs() < 0.2
        assert chosen.std().item() == pytest.approx(1, abs=0.15)
    stretch = labels[:, 5:7].norm(dim=1)
    assert stretch[stretch > 0].square().mean().item() == pytest.approx(1, abs=0.3)


def only(labels: Tensor, *columns: int) -> Tensor:
    """Images whose label is zero everywhere but in these columns, and not zero there."""
    others = [column for column in range(9) if column not in columns]
    return ((labels[:, others] == 0).all(dim=1) & (labels[:, list(columns)] != 0).all(dim=1)).nonzero().squeeze(1)


@pytest.fixture(scope="module")
def smooth() -> tuple[Tensor, Tensor, Tensor]:
    """A bright spot right of and above the middle of a rectangular image, and what became of it."""
    y, x = torch.meshgrid(torch.arange(48.0) - 23.5, torch.arange(64.0) - 31.5, indexing="ij")
    spot = torch.exp(-((x - 3) ** 2 + (y + 2) ** 2) / 4.5)
    images = spot.expand(2500, 1, 48, 64)
    return images, *augment_pipe(images, generator(3))


def centre(images: Tensor) -> Tensor:
    """Where the spot is, in pixels right of and below the middle."""
    images = images[:, 0]
    x, y = torch.arange(64.0) - 31.5, torch.arange(48.0) - 23.5
    total = images.sum(dim=(1, 2))
    return torch.stack([(images.sum(1) * x).sum(1) / total, (images.sum(2) * y).sum(1) / total], dim=1)


def test_pipe_flips(smooth: tuple[Tensor, Tensor, Tensor]) -> None:
    images, seen, labels = smooth
    assert torch.allclose(seen[only(labels, 0)], images[only(labels, 0)].flip(3), atol=1e-4)
    assert torch.allclose(seen[only(labels, 1)], images[only(labels, 1)].flip(2), atol=1e-4)
    assert torch.allclose(seen[only(labels, 0, 1)], images[only(labels, 0, 1)].flip(2, 3), atol=1e-4)


def test_pipe_labels_say_what_was_done(smooth: tuple[Tensor, Tensor, Tensor]) -> None:
    """The spot's place, computed from the label by hand: it started at (3, −2)."""
    _, seen, labels = smooth
    start = torch.tensor([3.0, -2.0])

    chosen = only(labels, 2)
    expected = start * 2 ** (0.2 * labels[chosen, 2:3])
    assert torch.allclose(centre(seen[chosen]), expected, atol=0.05)

    chosen = only(labels, 3, 4)
    cosine, sine = labels[chosen, 3] + 1, labels[chosen, 4]
    assert torch.allclose(cosine**2 + sine**2, torch.ones(len(chosen)), atol=1e-5)
    expected = torch.stack([3 * cosine + 2 * sine, 3 * sine - 2 * cosine], dim=1)  # clockwise on the screen
    assert torch.allclose(centre(seen[chosen]), expected, atol=0.05)

    chosen = only(labels, 5, 6)
    amount = labels[chosen, 5:7].norm(dim=1, keepdim=True)
    along = labels[chosen, 5:7] / amount
    inside = (along * start).sum(dim=1, keepdim=True) * along  # the part of the place in the stretch's direction
    expected = inside * 2 ** (0.2 * amount) + (start - inside) * 2 ** (-0.2 * amount)
    assert torch.allclose(centre(seen[chosen]), expected, atol=0.1)

    chosen = only(labels, 7, 8)
    chosen = chosen[labels[chosen, 7:].abs().max(dim=1).values < 1]  # further out, reflections come in
    expected = start + labels[chosen, 7:] * torch.tensor([64 / 8, 48 / 8])
    assert len(chosen) > 20
    assert torch.allclose(centre(seen[chosen]), expected, atol=0.1)


def test_pipe_brings_in_the_image_reflected_not_black() -> None:
    ones = torch.ones(300, 1, 16, 16)
    seen, labels = augment_pipe(ones, generator(4), probability=0.5)
    assert labels.any()
    assert torch.allclose(seen, ones, atol=1e-5)


def test_pipe_same_seed_same_images_and_other_images_have_no_say() -> None:
    images = floats(40, 1, 8, 8)
    seen, labels = augment_pipe(images, generator(1))
    again, same = augment_pipe(images[:15], generator(1))
    assert torch.equal(labels[:15], same)
    assert torch.allclose(seen[:15], again, atol=1e-6)


def test_pipe_everything_at_once_stays_finite_and_in_range() -> None:
    images = floats(200, 3, 12, 12).clamp(-1, 1)
    seen, labels = augment_pipe(images, generator(1), probability=1.0)
    assert (labels[:, :2] == 1).all()
    assert seen.isfinite().all()
    assert seen.abs().max() <= 1 + 1e-5
    assert math.isfinite(labels.abs().max().item())


def test_pipe_empty_batch() -> None:
    seen, labels = augment_pipe(torch.zeros(0, 3, 32, 32), generator(1))
    assert seen.shape == (0, 3, 32, 32)
    assert labels.shape == (0, 9)
