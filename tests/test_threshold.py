"""Thresholds by class: CBAFed's theorem as a property, and plain-Python oracles for the others."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.methods.cbafed import balanced_labels, balanced_thresholds, tail_classes
from tacit.methods.flexmatch import flexible_thresholds
from tacit.methods.freematch import self_adaptive_fairness
from tacit.pieces.threshold import class_shares, self_adaptive_thresholds

counts_of_classes = st.lists(st.integers(0, 10_000), min_size=2, max_size=120).map(
    lambda counts: torch.tensor(counts, dtype=torch.float32)
)
thresholds = st.floats(0.0, 1.0)
CLOSE = 1e-5  # float32


@settings(max_examples=300, deadline=None)
@given(counts_of_classes, thresholds, thresholds)
def test_the_theorem(counts: torch.Tensor, base: float, ceiling: float) -> None:
    """CBAFed Theorem 3.1: base + share − sqrt(1/K) ≤ T ≤ base + share before the cap; T ≤ ceiling after it."""
    share = class_shares(counts, times_tenth=False)
    before = balanced_thresholds(share, base, math.inf)
    assert (before >= base + share - math.sqrt(1 / len(counts)) - CLOSE).all()
    assert (before <= base + share + CLOSE).all()
    assert torch.equal(balanced_thresholds(share, base, ceiling), before.clamp(max=ceiling))


@settings(max_examples=300, deadline=None)
@given(counts_of_classes, thresholds)
def test_the_theorem_with_the_factor(counts: torch.Tensor, base: float) -> None:
    """With Eq. 13's factor K/10 the bound gets the factor, too: for K ≤ 10 the theorem holds as it is printed."""
    classes = len(counts)
    share = class_shares(counts)
    before = balanced_thresholds(share, base, math.inf)
    assert (before >= base + share - classes / 10 * math.sqrt(1 / classes) - CLOSE * classes).all()
    if classes <= 10:
        assert (before >= base + share - math.sqrt(1 / classes) - CLOSE).all()


def test_the_printed_bound_is_reached_and_does_not_survive_the_factor() -> None:
    """All samples of one class give std = sqrt(1/K) exactly; times K/10 that is 1 for K = 100, far below the bound."""
    for classes in (2, 4, 10, 100):
        counts = torch.zeros(classes)
        counts[0] = 7.0
        share = class_shares(counts, times_tenth=False)
        assert balanced_thresholds(share, 0.84, 9.0)[1] == pytest.approx(0.84 - math.sqrt(1 / classes), abs=1e-6)
    assert balanced_thresholds(class_shares(counts), 0.84, 9.0)[1] == pytest.approx(0.84 - 1.0, abs=1e-5)


def test_nothing_counted_is_even() -> None:
    assert class_shares(torch.zeros(4), times_tenth=False).tolist() == [0.25] * 4
    assert balanced_thresholds(class_shares(torch.zeros(10)), 0.84, 0.95).tolist() == pytest.approx([0.94] * 10)
    assert not tail_classes(class_shares(torch.zeros(10)), 0.3).any()


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 6), st.integers(1, 30), st.integers(0, 2**31 - 1))
def test_balanced_labels_one_by_one(classes: int, count: int, seed: int) -> None:
    """The paper's set definitions (Eq. 14, 16, 17), image by image."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(count, classes, generator=generator).mul(4).softmax(dim=1)
    needed = torch.rand(classes, generator=generator)
    tail = torch.rand(classes, generator=generator) < 0.4
    label, kept = balanced_labels(probs, needed, tail)
    for row, given_label, was_kept in zip(probs.tolist(), label.tolist(), kept.tolist(), strict=True):
        first = row.index(max(row))
        masked = [p if c != first else 0.0 for c, p in enumerate(row)]
        second = masked.index(max(masked))
        if row[first] > float(needed[first]):
            assert (given_label, was_kept) == (first, True)
        elif tail[second]:
            assert (given_label, was_kept) == (second, True)
        else:
            assert (given_label, was_kept) == (first, False)


def test_a_threshold_that_is_only_reached_is_not_enough() -> None:
    probs = torch.tensor([[0.75, 0.25]])
    none = torch.zeros(2, dtype=torch.bool)
    assert not balanced_labels(probs, torch.tensor([0.75, 0.0]), none).accepted.item()
    assert balanced_labels(
        probs, torch.tensor([0.74, 0.99]), none
    ).accepted.item()  # the predicted class's, not the other's


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=60), thresholds)
def test_flexible_thresholds_by_counting(last: list[int], threshold: float) -> None:
    most = max(last.count(value) for value in range(-1, 5))
    expected = [threshold * (b := last.count(c) / most) / (2 - b) for c in range(5)]
    assert flexible_thresholds(torch.tensor(last), 5, threshold).tolist() == pytest.approx(expected, abs=1e-6)


def test_self_adaptive_thresholds_are_highest_for_the_class_predicted_most() -> None:
    got = self_adaptive_thresholds(torch.tensor(0.9), torch.tensor([0.1, 0.6, 0.3]))
    assert got.tolist() == pytest.approx([0.15, 0.9, 0.45])


def test_fairness_by_hand_and_its_direction() -> None:
    """Three views predicted 0, 0, 1; a class never predicted has no part; gradients reach kept views only."""
    logits = torch.tensor([[3.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [9.0, 0.0, 0.0]], requires_grad=True)
    kept = torch.tensor([True, True, True, False])
    mean, histogram = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.6, 0.4, 0.0])
    loss = self_adaptive_fairness(logits, kept, mean, histogram)
    target = [0.5 / 0.6, 0.3 / 0.4]
    target = [value / sum(target) for value in target]
    probs = logits.detach()[:3].softmax(dim=1).mean(dim=0).tolist()
    here = [probs[0] / (2 / 3), probs[1] / (1 / 3)]
    here = [value / sum(here) for value in here]
    assert loss.item() == pytest.approx(sum(t * math.log(h) for t, h in zip(target, here, strict=True)), abs=1e-5)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[:3].abs().sum() > 0
    assert logits.grad[3].abs().sum() == 0
