"""Metrics against scikit-learn and scipy, with ties, missing classes and undefined cases."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import distance
from sklearn import metrics as oracle
from torch import Tensor

from tacit.core.errors import TacitError
from tacit.evaluation import metrics


def example(count: int, classes: int, missing: bool, ties: bool, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Predictions that are better than chance; if missing, the last class has no image."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes - 1 if missing else classes, (count,), generator=generator)
    logits = torch.randn(count, classes, dtype=torch.float64, generator=generator)
    logits[torch.arange(count), labels] += 1
    probs = logits.softmax(1)
    if ties:
        probs = (probs * 4).round() + 1
        probs = probs / probs.sum(1, keepdim=True)
    return probs, labels


def mean_binary_auc(probs: np.ndarray, labels: np.ndarray) -> float:
    present = np.unique(labels)
    return float(np.mean([oracle.roc_auc_score(labels == one, probs[:, one]) for one in present]))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(("count", "classes"), [(400, 3), (500, 10), (2000, 100)])
def test_agreement_with_scikit_learn(count: int, classes: int, missing: bool, ties: bool) -> None:
    probs, labels = example(count, classes, missing, ties)
    p, y = probs.numpy(), labels.numpy()
    predicted, every = p.argmax(1), np.arange(classes)
    figures = metrics.summary(probs, labels)
    close = pytest.approx
    assert figures["accuracy"] == close(oracle.accuracy_score(y, predicted), abs=1e-6)
    assert figures["macro_f1"] == close(oracle.f1_score(y, predicted, average="macro"), abs=1e-6)
    assert figures["loss"] == close(oracle.log_loss(y, p, labels=every), abs=1e-6)
    assert figures["auc"] == close(mean_binary_auc(p, y), abs=1e-6)
    if not missing:
        expected = oracle.roc_auc_score(y, p, multi_class="ovr", average="macro")
        assert figures["auc"] == close(expected, abs=1e-6)
    assert metrics.confusion(probs, labels).tolist() == oracle.confusion_matrix(y, predicted, labels=every).tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn warns about predicted classes that do not occur
        recall = oracle.recall_score(y, predicted, labels=every, average=None, zero_division=np.nan)
        assert figures["balanced_accuracy"] == close(oracle.balanced_accuracy_score(y, predicted), abs=1e-6)
    np.testing.assert_allclose(figures["per_class"], recall, atol=1e-6)
    assert math.isnan(figures["per_class"][-1]) == missing


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=2, max_size=12))
def test_auc_counts_pairs(pairs: list[tuple[int, int]]) -> None:
    scores, labels = torch.tensor(pairs).T
    probs = torch.stack([4 - scores, scores], dim=1) / 4
    wins = [
        (high > low) + (high == low) / 2 for high, label in pairs for low, other in pairs if label == 1 and other == 0
    ]
    value = metrics.macro_auc(probs, labels)
    assert math.isnan(value) if not wins else value == pytest.approx(sum(wins) / len(wins))


def test_float32_and_zero_probabilities() -> None:
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    labels = torch.tensor([0, 0, 1, 2])
    expected = oracle.log_loss(labels.numpy(), probs.double().numpy())
    assert metrics.negative_log_likelihood(probs, labels) == pytest.approx(expected, abs=1e-6)
    probs, labels = example(500, 10, False, False)
    expected = mean_binary_auc(probs.float().numpy(), labels.numpy())
    assert metrics.macro_auc(probs.float(), labels) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("count", "classes"), [(1, 2), (300, 3), (1000, 10)])
def test_calibration_error_equals_a_plain_loop(count: int, classes: int) -> None:
    probs, labels = example(count, classes, False, False)
    confidence, predicted = (part.numpy() for part in probs.max(1))
    expected = 0.0
    for bin_number in range(15):
        inside = (confidence > bin_number / 15) & (confidence <= (bin_number + 1) / 15)
        if inside.any():
            right = predicted[inside] == labels.numpy()[inside]
            expected += inside.mean() * abs(right.mean() - confidence[inside].mean())
    assert metrics.expected_calibration_error(probs, labels) == pytest.approx(expected, abs=1e-9)


def test_calibration_error_at_the_ends() -> None:
    sure = torch.eye(4)
    assert metrics.expected_calibration_error(sure, torch.arange(4)) == 0
    assert metrics.expected_calibration_error(sure, torch.tensor([1, 2, 3, 0])) == 1
    # gaps of opposite sign in one bin cancel, in two bins they add up: .9 right, .6 wrong
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]], dtype=torch.float64)
    assert metrics.expected_calibration_error(probs, torch.tensor([0, 1])) == pytest.approx((0.1 + 0.6) / 2)
    assert metrics.expected_calibration_error(probs, torch.tensor([0, 1]), bins=1) == pytest.approx(0.25)


def test_f1_counts_a_class_that_is_only_predicted() -> None:
    probs = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.1, 0.2, 0.7, 0.0]])  # labels 0, 0; predicted 0, 2
    # class 0: 2·1/(2 + 1); class 2: 0; classes 1 and 3 occur nowhere
    assert metrics.macro_f1(probs, torch.tensor([0, 0])) == pytest.approx((2 / 3 + 0) / 2)


def test_jensen_shannon_equals_scipys() -> None:
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 10, 100):
        p, q = torch.rand(2, classes, generator=generator)
        p[0] = 0
        expected = distance.jensenshannon(p.numpy(), q.numpy()) ** 2
        assert metrics.jensen_shannon(p, q) == pytest.approx(expected, abs=1e-6)
        assert metrics.jensen_shannon(p, q) == pytest.approx(metrics.jensen_shannon(q, p), abs=1e-12)
        assert 0 <= metrics.jensen_shannon(p, p) < 1e-12
    # (1/2, 1/2) and (1, 0) have the middle (3/4, 1/4)
    by_hand = 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)) + 0.5 * math.log(1 / 0.75)
    assert metrics.jensen_shannon(torch.tensor([1, 1]), torch.tensor([5, 0])) == pytest.approx(by_hand)
    assert math.isnan(metrics.jensen_shannon(torch.zeros(3), torch.ones(3)))


def test_undefined_is_nan_and_never_a_crash() -> None:
    nothing = metrics.summary(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert all(math.isnan(value) for value in np.atleast_1d(np.hstack(list(nothing.values()))))
    one_class = metrics.summary(torch.tensor([[0.6, 0.4], [0.7, 0.3]]), torch.tensor([0, 0]))
    assert math.isnan(one_class["auc"])
    assert one_class["accuracy"] == one_class["balanced_accuracy"] == one_class["macro_f1"] == 1
    broken = metrics.summary(torch.full((4, 3), math.nan), torch.tensor([0, 1, 2, 0]))
    assert math.isnan(broken["auc"])
    assert math.isnan(broken["loss"])
    assert math.isnan(broken["ece"])


def test_inputs_are_not_changed() -> None:
    probs, labels = example(50, 4, False, False)
    copies = probs.clone(), labels.clone()
    metrics.summary(probs, labels)
    assert torch.equal(probs, copies[0])
    assert torch.equal(labels, copies[1])


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (torch.ones(3, 2), torch.zeros(2, dtype=torch.int64), r"got \[3, 2\] and \[2\]"),
        (torch.ones(3), torch.zeros(3, dtype=torch.int64), r"got \[3\] and \[3\]"),
        (torch.ones(2, 2), torch.tensor([0, 2]), "labels from 0 to 1, got 0 to 2"),
        (torch.ones(2, 2), torch.tensor([-1, 1]), "label is not known"),
        (torch.ones(2, 2), torch.tensor([0, 1], dtype=torch.uint8), "int64, got torch.uint8"),
    ],
)
def test_wrong_inputs_are_refused(probs: Tensor, labels: Tensor, message: str) -> None:
    for function in (metrics.accuracy, metrics.macro_auc, metrics.confusion, metrics.summary):
        with pytest.raises(TacitError, match=message):
            function(probs, labels)


def test_two_distributions_over_different_classes_are_refused() -> None:
    with pytest.raises(TacitError, match=r"got \[3\] and \[2\]"):
        metrics.jensen_shannon(torch.ones(3), torch.ones(2))
