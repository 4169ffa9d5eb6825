"""APP-U, debiased pseudo-labels and the bias they stand for, against numbers computed by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tacit.evaluation import metrics
from tacit.pieces.debias import FLOOR, average_prediction, bias_of, debias, moving_prediction
from tacit.pieces.label import confident


def predictions(rows: int, classes: int, seed: int, sharpness: float = 3.0) -> Tensor:
    return (sharpness * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed))).softmax(dim=1)


sizes = given(rows=st.integers(1, 9), classes=st.integers(2, 9), seed=st.integers(0, 10**6))


@sizes
@settings(deadline=None)
def test_app_u_is_a_vector_over_classes_that_sums_to_one(rows: int, classes: int, seed: int) -> None:
    """Also with as many images as classes, where a mean over the wrong axis would have the right shape."""
    app_u = average_prediction(predictions(rows, classes, seed))
    assert app_u.shape == (classes,)
    assert float(app_u.sum()) == pytest.approx(1.0, abs=1e-5)


def test_app_u_by_hand() -> None:
    """Three images, three classes; the mean over images is not the mean over classes."""
    probs = torch.tensor([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]])
    torch.testing.assert_close(average_prediction(probs), torch.tensor([0.5, 0.4, 0.1]))


def test_debiasing_by_hand() -> None:
    """(.8/.5, .1/.4, .1/.1) = (1.6, .25, 1) of 2.85; the majority loses, the minority wins, and one label changes."""
    probs = torch.tensor([[0.8, 0.1, 0.1], [0.45, 0.15, 0.4]])
    expected = torch.tensor([[1.6, 0.25, 1.0], [0.9, 0.375, 4.0]]) / torch.tensor([[2.85], [5.275]])
    debiased = debias(probs, torch.tensor([0.5, 0.4, 0.1]))
    torch.testing.assert_close(debiased, expected)
    assert probs.argmax(dim=1).tolist() == [0, 0]
    assert debiased.argmax(dim=1).tolist() == [0, 2]


@sizes
@settings(deadline=None)
def test_a_uniform_prior_is_the_identity(rows: int, classes: int, seed: int) -> None:
    probs = predictions(rows, classes, seed)
    torch.testing.assert_close(debias(probs, torch.full((classes,), 1 / classes)), probs)


@sizes
@settings(deadline=None)
def test_a_skewed_prior_moves_every_prediction_towards_the_minority(rows: int, classes: int, seed: int) -> None:
    """Rows stay distributions; the odds of the rarest class against the most frequent one rise by their ratio."""
    probs = predictions(rows, classes, seed).double()
    prior = predictions(1, classes, seed + 1)[0].double()
    many, few = int(prior.argmax()), int(prior.argmin())
    debiased = debias(probs, prior, floor=0.0)
    torch.testing.assert_close(debiased.sum(dim=1), torch.ones(rows, dtype=torch.float64))
    before, after = probs[:, few] / probs[:, many], debiased[:, few] / debiased[:, many]
    torch.testing.assert_close(after / before, (prior[many] / prior[few]).expand(rows))


def test_debiasing_is_not_silently_a_no_op() -> None:
    """With a mean that lacks its dim the prior is a number and nothing changes: this must."""
    probs = predictions(50, 10, seed=0) * torch.tensor([4.0] + [1.0] * 9)
    probs = probs / probs.sum(dim=1, keepdim=True)
    debiased = debias(probs, average_prediction(probs))
    assert not torch.allclose(debiased, probs)
    assert int((debiased.argmax(dim=1) == 0).sum()) < int((probs.argmax(dim=1) == 0).sum())


def test_images_are_debiased_one_by_one() -> None:
    probs, prior = predictions(6, 4, seed=3), torch.tensor([0.4, 0.3, 0.2, 0.1])
    alone = torch.cat([debias(row[None], prior) for row in probs])
    torch.testing.assert_close(debias(probs, prior), alone)


def test_a_class_that_is_never_predicted_stays_finite() -> None:
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    assert torch.equal(debias(probs, average_prediction(probs)), probs)
    debiased = debias(torch.tensor([[0.5, 0.5]]), torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(debiased, torch.tensor([[FLOOR / (1 + FLOOR), 1 / (1 + FLOOR)]]))


def test_nothing_to_predict_is_no_bias() -> None:
    assert average_prediction(torch.zeros(0, 4)).tolist() == [0.25] * 4
    assert debias(torch.zeros(0, 4), torch.full((4,), 0.25)).shape == (0, 4)
    before = torch.tensor([0.7, 0.3])
    assert torch.equal(moving_prediction(before, torch.zeros(0, 2), 0.5), before)


def test_as_a_plug_in_it_changes_which_labels_are_believed() -> None:
    """The line that turns FixMatch into FixMatch-FedDPL, on a model that says class 0 too often.

    APP-U is (.8, .2). The third image, .6 against .4, becomes .75 : 2, that is .27 against .73; the first two, .9
    against .1, become 1.125 : .5, that is .69 against .31, and are no longer believed at .7.
    """
    probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]])
    plain = confident(probs, 0.7)
    debiased = confident(debias(probs, average_prediction(probs)), 0.7)
    assert (plain.label.tolist(), plain.accepted.tolist()) == ([0, 0, 0], [True, True, False])
    assert (debiased.label.tolist(), debiased.accepted.tolist()) == ([0, 0, 1], [False, False, True])


def test_the_moving_average_forgets_by_half() -> None:
    """After five steps with γ = ½ the first APP-U has a weight of 1/32."""
    average = torch.tensor([1.0, 0.0])
    for _ in range(5):
        average = moving_prediction(average, torch.tensor([[0.0, 1.0]]), 0.5)
    torch.testing.assert_close(average, torch.tensor([1 / 32, 31 / 32]))


def test_true_bias_and_its_distance_to_app_u() -> None:
    """Accuracies .9, .3, .3 are the bias (.6, .2, .2): no distance to the APP-U that says so, some to equal labels."""
    bias = bias_of(torch.tensor([0.9, 0.3, 0.3]))
    assert metrics.jensen_shannon(bias, torch.tensor([0.6, 0.2, 0.2])) == pytest.approx(0.0, abs=1e-7)
    assert metrics.jensen_shannon(bias, torch.tensor([1.0, 1.0, 1.0])) > 0.01
    assert bias_of(torch.tensor([0.5, float("nan")])).tolist() == [1.0, 0.0]
