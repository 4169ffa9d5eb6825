"""PDCFed: two stages of selection, the entropy term, the boost of labelled clients."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from runs import World, client, hub, world_of
from tacit.config.resolve import build_method, resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client
from tacit.core.errors import TacitError
from tacit.core.payload import Weights, tensor_in, weights_in
from tacit.methods.pdcfed import (
    PDCFed,
    agreement,
    masked_entropy,
    rising_share,
    two_stage_labels,
    usualness,
)
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


def world(placement: str = "some-clients", **settings: Any) -> World:
    return world_of("pdcfed", placement, **settings)


def method(**changes: Any) -> PDCFed:
    return PDCFed(**{"threshold": 0.8, "lower": 0.5, "agreement": 0.6, "decay": 1.0, "entropy": 0.0, **changes})


def usual(mean: float = 0.5, variance: float = 1.0) -> Weights:
    return {"mean": torch.tensor(mean), "variance": torch.tensor(variance)}


# Formulas


def test_rising_classes_are_counted_by_image() -> None:
    """Three images, four classes: a mean over the wrong axis would give four numbers. Equal is not rising."""
    weak = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1]])
    strong = torch.tensor([[0.4, 0.2, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.1, 0.2]])
    assert rising_share(weak, strong).tolist() == [0.75, 0.0, 0.25]


def test_the_gaussian_is_steeper_above_the_mean() -> None:
    mean, variance = torch.tensor(0.4), torch.tensor(0.09)
    below, at, above = usualness(torch.tensor([0.1, 0.4, 0.7]), mean, variance).tolist()
    assert below == pytest.approx(0.999 * math.exp(-0.09 / (2 * 0.09 / 4)), rel=1e-5)  # exp(−2)
    assert at == pytest.approx(0.999)
    assert above == pytest.approx(0.999 * math.exp(-0.09 / (2 * 0.09 / 9)), rel=1e-5)  # exp(−4.5)


def test_agreement_by_hand() -> None:
    """The distance is the Euclidean one of the whole vectors, (.3, .4, 0, …) → .5; less usual weighs it more."""
    weak, strong = torch.tensor([[0.5, 0.1, 0.4]] * 2), torch.tensor([[0.2, 0.5, 0.4]] * 2)
    values = agreement(weak, strong, torch.tensor([1.0, 0.25])).tolist()
    assert values == pytest.approx([math.exp(-0.5), math.exp(-2.0)], rel=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0, 1), st.sampled_from([0.0, 1e-30, 1e-4, 1.0]))
def test_agreement_is_a_number_between_0_and_1(seed: int, mean: float, variance: float) -> None:
    """Also where the Gaussian is infinitely narrow, and where both views are seen as exactly the same."""
    weak, strong = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(seed)).mul(3).softmax(dim=2)
    strong[0] = weak[0]
    usual = usualness(rising_share(weak, strong), torch.tensor(mean), torch.tensor(variance))
    values = agreement(weak, strong, usual)
    assert torch.isfinite(values).all()
    assert ((values >= 0) & (values <= 1)).all()
    assert values[0] == 1.0


def test_the_borders_of_the_stages() -> None:
    """From `upper` on believed whatever the strong view says; between the two, exclusively, only in agreement."""
    weak = torch.tensor([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5], [0.6, 0.4], [0.4, 0.6]])
    agreeing = torch.tensor([False, True, True, True, False])
    label, kept = two_stage_labels(weak, agreeing, upper=0.75, lower=0.5)
    assert kept.tolist() == [True, True, False, True, False]
    assert label.tolist()[-1] == 1


def test_entropy_by_hand_and_its_direction() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 5.0]]).mul(0.5).requires_grad_()  # at T = ½: ¼ and ¾
    value = masked_entropy(logits, torch.tensor([True, False]), temperature=0.5)
    by_hand = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / 2  # over both images
    assert value.item() == pytest.approx(by_hand, rel=1e-5)
    value.backward()
    assert logits.grad is not None
    assert logits.grad[0, 1] < 0 < logits.grad[0, 0]  # down the gradient the likelier class gains
    assert logits.grad[1].tolist() == [0.0, 0.0]


# Selection


def test_running_mean_and_variance() -> None:
    """Shares 1, 0, ½ (of two classes): mean ½, unbiased variance ¼; taken in before they decide."""
    weak = torch.tensor([[0.7, 0.2], [0.6, 0.4], [0.6, 0.4]])
    strong = torch.tensor([[0.71, 0.3], [0.6, 0.4], [0.7, 0.3]])
    memory = usual(mean=0.1)
    method(decay=0.9).select(weak, strong, memory)
    assert memory["mean"].item() == pytest.approx(0.9 * 0.1 + 0.1 * 0.5)
    assert memory["variance"].item() == pytest.approx(0.9 * 1.0 + 0.1 * 0.25)
    narrow = usual(mean=0.0, variance=1e-9)
    method(decay=0.0).select(weak, strong, narrow)  # only this batch counts
    assert (narrow["mean"].item(), narrow["variance"].item()) == (0.5, 0.25)


def test_both_stages_by_hand() -> None:
    """Mean ½ and variance 1 stay (decay 1). With two classes one rises: usualness .999 for all."""
    weak = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4], [0.45, 0.55], [0.5, 0.5]])
    strong = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.1, 0.9], [0.44, 0.56], [0.51, 0.49]])
    # distances: 1.131, .283, .707, .014, .014; agreements: .322, .753, .493, .986, .986
    (label, kept), _ = method().select(weak, strong, usual())
    assert label.tolist()[:4] == [0, 0, 0, 1]
    assert kept.tolist() == [True, True, False, True, False]  # the last is not above `lower`
    assert method(agreement=0.4).select(weak, strong, usual())[0].accepted.tolist() == [True] * 4 + [False]


def test_entropy_is_of_views_that_agree() -> None:
    """Stage one's image does not agree, so it is learned but not sharpened; and the second stage's is both."""
    weak = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.45, 0.55], [0.5, 0.5]])
    strong = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.9, 0.1], [0.51, 0.49]])
    (label, kept), certain = method().select(weak, strong, usual())
    assert kept.tolist() == [True, True, False, False]
    assert certain.tolist() == [False, True, False, False]
    expected = masked_entropy(strong.log(), certain, 0.9)
    with_entropy, without = (
        method(weight=1.0, entropy=entropy).unlabeled_loss(strong.log(), label, kept, certain).item()
        for entropy in (0.5, 0.0)
    )
    assert with_entropy - without == pytest.approx(0.5 * expected.item(), abs=1e-6)


def test_one_softmax_unless_released() -> None:
    """With two, a perfect prediction still costs ln(1 + 1/e): the loss cannot tell sure from very sure."""
    logits, label, kept = torch.tensor([[20.0, 0.0]]), torch.tensor([0]), torch.tensor([True])
    assert method(weight=1.0).unlabeled_loss(logits, label, kept, kept).item() == pytest.approx(0.0, abs=1e-6)
    assert PDCFed().double_softmax is False
    released = method(weight=1.0, double_softmax=True).unlabeled_loss(logits, label, kept, kept).item()
    assert released == pytest.approx(math.log1p(math.exp(-1.0)), rel=1e-5)


def test_the_loss_of_a_batch_by_hand() -> None:
    """Weak views are labelled, strong views learned: the weighted cross-entropy over all, and the entropy term."""
    weak, strong = torch.tensor([[0.0, 2.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 0.5]])  # logits
    (label, kept), certain = method().select(weak.softmax(dim=1), strong.softmax(dim=1), usual())
    assert kept.tolist() == [True, True]  # one by each stage: .88, and .73 in agreement
    expected = 0.5 * F.cross_entropy(strong, torch.tensor([1, 1])) + 0.3 * masked_entropy(strong, certain, 0.9)
    loss = method(weight=0.5, entropy=0.3).unlabeled_loss(strong, label, kept, certain)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


# Clients


@pytest.fixture(scope="module")
def here() -> World:
    return world()


@pytest.fixture(scope="module")
def weights(here: World) -> Weights:
    return hub(here).new_weights()


def test_an_unlabelled_client_goes_on_where_it_stopped(here: World, weights: Weights) -> None:
    method = PDCFed(decay=0.8, keep_momentum=True)
    me = client(here, 1)
    assert not len(me.shard.labeled)
    first = method.client_train(Task(1, {"model": weights}), {}, me)
    start = method.recall({}, client(here, 1))
    assert (start["mean"].item(), start["variance"].item()) == (pytest.approx(0.1), 1.0)
    assert 0 < float(tensor_in(first.keep, "variance")) < 1.0
    going_on = method.recall(first.keep, client(here, 1))
    assert torch.equal(going_on["mean"], tensor_in(first.keep, "mean"))
    second = method.client_train(Task(1, {"model": weights}), first.keep, client(here, 1))
    assert not torch.equal(tensor_in(second.keep, "mean"), tensor_in(first.keep, "mean"))
    assert set(second.keep) == {"mean", "variance", "momentum"}
    assert set(PDCFed().client_train(Task(1, {"model": weights}), {}, client(here, 1)).keep) == {"mean", "variance"}
    assert first.examples == len(me.shard.unlabeled)  # all it holds, whatever it believed


def test_rates_and_epochs(here: World, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels alone: so many epochs at train.lr; unlabelled images: train.epochs at unlabeled_lr."""
    rates: list[float] = []
    original = Client.optimizer

    def watched(me: Client, model: nn.Module, lr: float | None = None, *rest: Any, **more: Any) -> Any:
        rates.append(me.learning_rate if lr is None else lr)
        return original(me, model, lr, *rest, **more)

    monkeypatch.setattr(Client, "optimizer", watched)
    passes: list[int | None] = []
    fit_labeled = Client.fit_labeled
    monkeypatch.setattr(
        Client,
        "fit_labeled",
        lambda me, model, epochs=None, **rest: passes.append(epochs) or fit_labeled(me, model, epochs, **rest),
    )
    method = PDCFed(labeled_epochs=3, unlabeled_lr=0.004)
    labeled = hub(here).labeled_clients[0]
    for number in (labeled, next(n for n in range(4) if n != labeled)):
        method.client_train(Task(number, {"model": weights}), {}, client(here, number))
    assert rates == [here[0].setup.train.lr, 0.004]
    assert passes == [3]
    assert method.estimated_passes(1) == (3, 1)


def test_labelled_clients_weigh_six_times() -> None:
    here = world()
    server = hub(here)
    labeled = server.labeled_clients[0]
    other = next(number for number in range(4) if number != labeled)
    old = server.new_weights()

    def reply(number: int, by: float, examples: int) -> Reply:
        moved = {name: tensor + by for name, tensor in old.items()}
        return Reply(send={"model": moved}, examples=examples, client=number)

    replies = [reply(other, 1.0, 40), reply(labeled, 3.0, 10)]  # 40 and 60 of 100
    after = weights_in(PDCFed().server_merge({"model": old}, replies, server), "model")
    assert torch.allclose(after["fc.bias"], old["fc.bias"] + 0.4 * 1.0 + 0.6 * 3.0, atol=1e-5)
    assert server.notes["client_weights"] == pytest.approx([0.4, 0.6])
    without = weights_in(PDCFed().server_merge({"model": old}, replies[:1], hub(here)), "model")
    assert torch.allclose(without["fc.bias"], old["fc.bias"] + 1.0, atol=1e-5)  # the labelled one was not asked
    nobody = weights_in(PDCFed().server_merge({"model": old}, [reply(other, 9.0, 0)], hub(here)), "model")
    assert torch.equal(nobody["fc.bias"], old["fc.bias"])


# Settings


def test_thresholds_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(TacitError, match=r"\[method\] lower = 0.9 is above threshold = 0.85"):
        resolve({"method.name": "pdcfed", "method.lower": 0.9})
    with pytest.raises(ValueError, match="lower"):
        PDCFed(lower=0.9)


def test_presets() -> None:
    paper = resolve({"method.name": "pdcfed", "data.placement": "some-clients"})
    assert build_method(paper) == PDCFed()
    assert (paper.train.lr, paper.train.batch, paper.participation.count(10)) == (0.01, 128, 5)
    assert (PDCFed().threshold, PDCFed().lower, PDCFed().agreement, PDCFed().weight) == (0.85, 0.6, 0.6, 0.027)
    released = resolve({"method.name": "pdcfed", "method.preset": "released"})
    assert build_method(released) == PDCFed(double_softmax=True, keep_momentum=True)
    assert released.views.weak == "resize-crop"


def test_a_second_stage_keeps_more(tiny: Tiny) -> None:
    """On the same split with the same start, agreement adds labels that stage one alone leaves out."""
    common: dict[str, Any] = {"rounds": 1, "method__threshold": 0.7, "data__cover": 2}
    two = tiny("pdcfed", "some-clients", name="two", **common)
    one = tiny("pdcfed", "some-clients", name="one", method__lower=0.7, **common)
    assert two.records[-1]["accepted_ratio"] > one.records[-1]["accepted_ratio"] > 0
    assert len(two.records[-1]["client_weights"]) == 4
