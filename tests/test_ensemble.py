"""BSemiFL's formulas: closeness and share by hand, and its two theorems for predictions of any kind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tacit.methods.bsemifl import agree, closeness, ensemble, share_by_closeness, share_by_strategy

GLOBAL = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.3, 0.6]])
LOCAL = torch.tensor([[0.2, 0.8, 0.0], [0.8, 0.2, 0.0]])
SERVER_SUMS, SERVER_PRIOR = torch.tensor([1.4, 0.7, 0.9]), torch.tensor([0.5, 0.25, 0.25])
CLIENT_SUMS, CLIENT_PRIOR = torch.tensor([0.2, 3.2, 1.0]), torch.tensor([0.25, 0.75, 0.0])


def test_closeness_by_hand() -> None:
    # ½·0.6/2 + ¼·0.3/1 + ¼·0.1/1 = 0.25;  ½·0.1/1.5 + ¼·0.3/1 + ¼·0.6/1.5 = 0.20833
    near = closeness(GLOBAL, SERVER_SUMS, SERVER_PRIOR)
    assert near.tolist() == pytest.approx([0.25, 0.0333333 + 0.075 + 0.1])
    # ¼·0.2/0.4 + ¾·0.8/4 + 0 = 0.275;  ¼·0.8/1 + ¾·0.2/3.4 = 0.24412
    near = closeness(LOCAL, CLIENT_SUMS, CLIENT_PRIOR)
    assert near.tolist() == pytest.approx([0.275, 0.2 + 0.75 * 0.2 / 3.4])


def test_closeness_as_the_algorithm_box_prints_it() -> None:
    # ¼·0.2/0.2 + ¾·0.8/3.2 = 0.4375
    near = closeness(LOCAL, CLIENT_SUMS, CLIENT_PRIOR, with_sample=False)
    assert near[0].item() == pytest.approx(0.4375)


def test_share_and_label_by_hand() -> None:
    near_global = closeness(GLOBAL, SERVER_SUMS, SERVER_PRIOR)
    near_local = closeness(LOCAL, CLIENT_SUMS, CLIENT_PRIOR)
    share = share_by_closeness(near_global, near_local)
    assert share[0].item() == pytest.approx(0.25 / 0.525)  # 10/21
    label = ensemble(GLOBAL, LOCAL, share)[0]
    assert label.tolist() == pytest.approx([0.2 + 0.4 * 10 / 21, 0.8 - 0.5 * 10 / 21, 0.1 * 10 / 21])
    assert label.sum().item() == pytest.approx(1.0)


def test_each_image_has_its_own_share() -> None:
    """A mean without a dimension would give all images one closeness."""
    near = closeness(GLOBAL, SERVER_SUMS, SERVER_PRIOR)
    alone = torch.cat([closeness(row[None], SERVER_SUMS, SERVER_PRIOR) for row in GLOBAL])
    assert near.shape == (2,)
    assert torch.equal(near, alone)
    assert near[0] != near[1]


def test_the_share_goes_to_one_when_the_local_model_is_far() -> None:
    near = torch.full((4,), 0.2)
    far = torch.tensor([0.2, 0.02, 0.0002, 0.0])
    assert share_by_closeness(near, far).tolist() == pytest.approx([0.5, 0.2 / 0.22, 0.2 / 0.2002, 1.0])


def test_no_closeness_is_ever_nan() -> None:
    """Classes that nobody predicted, priors of zero, predictions that underflowed."""
    probs, nothing = torch.tensor([[1.0, 0.0]]), torch.zeros(2)
    for with_sample in (True, False):
        for prior in (torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])):
            assert torch.isfinite(closeness(probs, nothing, prior, with_sample)).all()
    assert share_by_closeness(torch.zeros(1), torch.zeros(1)).item() == 0.5


def test_strategies() -> None:
    near, far = torch.full((1000,), 0.3), torch.full((1000,), 0.1)

    def share(strategy: str, seed: int = 0) -> Tensor:
        return share_by_strategy(strategy, near, far, torch.Generator().manual_seed(seed))  # type: ignore[arg-type]

    for strategy, expected in {"bayes": 0.75, "average": 0.5, "vote": 0.5, "global": 1.0, "local": 0.0}.items():
        assert share(strategy).tolist() == pytest.approx([expected] * 1000)
    random = share("random")
    assert torch.equal(random, share("random"))
    assert not torch.equal(random, share("random", seed=1))
    assert 0 <= random.min() < 0.05
    assert 0.95 < random.max() <= 1
    assert random.mean().item() == pytest.approx(0.5, abs=0.05)
    assert agree(GLOBAL, LOCAL).tolist() == [False, False]
    assert agree(GLOBAL, GLOBAL.flip(0)).tolist() == [False, False]
    assert agree(GLOBAL, GLOBAL).tolist() == [True, True]


def anything(seed: int, classes: int, sharpness: float) -> tuple[Tensor, ...]:
    """Predictions of two models on 300 images, what their closeness needs, and true labels: all drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> Tensor:
        logits = torch.randn(rows, classes, generator=generator, dtype=torch.float64) * sharpness
        return logits.softmax(dim=1)

    labels = torch.randint(classes, (300,), generator=generator)
    sums = [draw(1)[0] * 50 * torch.rand((), generator=generator) + 1e-3 for _ in range(2)]
    return draw(300), draw(300), sums[0], sums[1], draw(1)[0], draw(1)[0], labels


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    classes=st.integers(2, 20),
    sharpness=st.floats(0.1, 8),
    with_sample=st.booleans(),
)
def test_theorems_6_1_and_6_2(seed: int, classes: int, sharpness: float, with_sample: bool) -> None:
    """The ensemble's loss is never above the larger one (6.1). It is not above the plain average's where the closer
    model is also the one that gives the true class more (6.2), and not below it where it is the other way round.
    """
    f, g, f_sums, g_sums, f_prior, g_prior, labels = anything(seed, classes, sharpness)
    near_f, near_g = closeness(f, f_sums, f_prior), closeness(g, g_sums, g_prior, with_sample)
    share = share_by_closeness(near_f, near_g)

    def loss(probs: Tensor) -> Tensor:
        return -probs.gather(1, labels[:, None]).squeeze(1).log()

    bayes, average = loss(ensemble(f, g, share)), loss((f + g) / 2)
    assert (bayes <= torch.maximum(loss(f), loss(g)) + 1e-9).all()
    fits = (near_f - near_g) * (loss(g) - loss(f))
    assert (bayes[fits > 0] <= average[fits > 0] + 1e-9).all()
    assert (bayes[fits < 0] >= average[fits < 0] - 1e-9).all()
