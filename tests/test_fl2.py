"""(FL)²: thresholds that follow the client, consistency at the perturbed weights, weights by learning status."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runs import World, client, hub, world_of
from tacit.config.resolve import build_method, resolve
from tacit.contract.method import Reply, Task
from tacit.core.payload import Weights, weights_in
from tacit.methods import fl2
from tacit.methods.fl2 import ETA, FL2, asam_perturbation, consistency_term, masked_divergence, sharpness_consistency
from tacit.methods.semifl import SemiFL, fit_fix_and_mix
from tacit.nets.statistics import still_statistics
from tacit.pieces.train import weights_of
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


def world(placement: str = "server", **settings: Any) -> World:
    return world_of("fl2", placement, **settings)


def small_net(seed: int = 0) -> nn.Module:
    """Three classes, with BN between: what (FL)²'s nets have."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def batch(seed: int = 1, count: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Views, pseudo-labels, and which of them are strict (every second one)."""
    generator = torch.Generator().manual_seed(seed)
    views, label = torch.randn(count, 1, 2, 2, generator=generator), torch.arange(count) % 3
    return views, label, torch.arange(count) % 2 == 0


def gradients(net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in net.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(net.parameters()), retain_graph=True), strict=True))


# The perturbation


def test_the_perturbation_by_hand() -> None:
    """T = |w| + .01 and 1 for the bias; Tg = 3 and 4, so the joint norm is 5; ε = ρ T²g / 5."""
    weights = {"fc.weight": torch.tensor([-2.99]), "fc.bias": torch.tensor([7.0])}
    step = asam_perturbation(weights, {"fc.weight": torch.tensor([1.0]), "fc.bias": torch.tensor([-4.0])}, 0.5)
    assert step["fc.weight"].item() == pytest.approx(0.5 * 9.0 / 5.0)  # one norm for all, not one for each tensor
    assert step["fc.bias"].item() == pytest.approx(0.5 * -4.0 / 5.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 2.0), st.floats(1e-4, 1e3))
def test_the_perturbation_has_the_radius_in_scaled_weights(seed: int, radius: float, size: float) -> None:
    """‖ε / T‖₂ = ρ, however large the gradient is."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 2), "a.bias": (3,), "b.weight": (2,)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    slopes = {name: size * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    step = asam_perturbation(weights, slopes, radius)
    scale = {n: torch.ones_like(w) if n.endswith("bias") else w.abs() + ETA for n, w in weights.items()}
    assert torch.cat([(step[n] / scale[n]).flatten() for n in step]).norm().item() == pytest.approx(radius, rel=1e-3)


def test_no_gradient_no_step() -> None:
    step = asam_perturbation({"w": torch.ones(2)}, {"w": torch.zeros(2)}, 0.1)
    assert step["w"].tolist() == [0.0, 0.0]


def test_the_perturbation_raises_the_loss_it_was_made_for() -> None:
    net, (views, label, strict) = small_net(), batch()
    before = F.cross_entropy(net(views)[strict], label[strict])
    step = asam_perturbation(dict(net.named_parameters()), gradients(net, before), 0.1)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter += step[name]
    assert F.cross_entropy(net(views)[strict], label[strict]) > before


# The consistency


def test_its_gradient_is_that_of_the_divergence_at_the_perturbed_weights() -> None:
    """Against a second net that really has the weights w + ε."""
    net, (views, label, strict) = small_net(), batch()
    twin = copy.deepcopy(net)
    logits = net(views)
    result = sharpness_consistency(net, views, logits, label, strict, radius=0.5)
    ours = gradients(net, result)

    clean = twin(views)
    loss = (F.cross_entropy(clean, label, reduction="none") * strict).sum() / len(label)
    step = asam_perturbation(dict(twin.named_parameters()), gradients(twin, loss), 0.5)
    target = clean.detach().softmax(dim=1)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter += step[name]
    moved = twin(views).softmax(dim=1)
    expected = (target * (target.log() - moved.log())).sum(dim=1)[strict].sum() / len(label)
    assert result.item() == pytest.approx(expected.item(), rel=1e-4)
    assert result.item() > 0
    for name, slope in gradients(twin, expected).items():
        assert torch.allclose(ours[name], slope, atol=1e-6), name


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_weights_are_the_very_same_afterwards(layout: torch.memory_format) -> None:
    """Bit for bit, and the whole state: BN's running statistics and its counter do not count the pass."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))
    net = net.to(memory_format=layout)  # type: ignore[call-overload]
    views, label, strict = torch.randn(8, 3, 4, 4), torch.arange(8) % 3, torch.ones(8, dtype=torch.bool)
    logits = net(views)
    before, places = weights_of(net), [parameter.data_ptr() for parameter in net.parameters()]
    result = sharpness_consistency(net, views, logits, label, strict, radius=1.0)
    after = weights_of(net)
    assert before["1.num_batches_tracked"] == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [parameter.data_ptr() for parameter in net.parameters()] == places
    assert all(parameter.grad is None for parameter in net.parameters())
    assert net[1].training
    assert net[1].track_running_stats
    (F.cross_entropy(logits, label) + result).backward()  # the first graph is whole: no weight was written to
    after = weights_of(net)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_still_statistics_come_back_after_an_error() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False))
    with pytest.raises(ValueError, match="stop"), still_statistics(net):
        raise ValueError("stop")
    assert [layer.track_running_stats for layer in net] == [True, False]


def test_a_step_counts_its_batch_once() -> None:
    """Six images in batches of two, two epochs: six steps, and BN's counter says six, with consistency or without."""
    counted, results = [], []
    for strict in (torch.ones(6, dtype=torch.bool), torch.zeros(6, dtype=torch.bool)):
        net, (images, label, _) = small_net(), batch(count=6)
        fit_fix_and_mix(
            net,
            (images, label),
            (images, label),
            strong=lambda x, generator: x,
            weak=lambda x, generator: x,
            weight=0.0,
            shape=0.75,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            epochs=2,
            batch=2,
            clip=0.0,
            generator=torch.Generator().manual_seed(0),
            strong_term=consistency_term(net, label, strict, radius=1.0, weight=1.0),
        )
        counted.append(int(net[2].num_batches_tracked))  # type: ignore[index]
        results.append(net[4].weight.detach())  # type: ignore[index]
    assert counted == [6, 6]
    assert not torch.equal(results[0], results[1])  # and the consistency did something


def test_the_term_takes_labels_and_masks_of_its_own_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(fl2, "sharpness_consistency", lambda *given: seen.append(given) or torch.tensor(2.0))
    term = consistency_term(nn.Identity(), torch.arange(4), torch.tensor([True, False, True, False]), 0.1, weight=3.0)
    assert term(torch.tensor([3, 0]), torch.zeros(2, 1), torch.zeros(2, 5)) == 6.0
    assert (seen[0][3].tolist(), seen[0][4].tolist(), seen[0][5]) == ([3, 0], [False, True], 0.1)


def test_nothing_strict_costs_no_pass() -> None:
    net, (views, label, _) = small_net(), batch()
    logits = net(views)
    net.register_forward_hook(lambda *_: pytest.fail("a pass too many"))
    assert sharpness_consistency(net, views, logits, label, torch.zeros(8, dtype=torch.bool), 0.1) == 0


def test_the_divergence_by_hand() -> None:
    """KL(target ‖ prediction), not the other way round; summed over classes, mean over all four images."""
    target = torch.tensor([[0.9, 0.1]] * 4)
    logits = torch.tensor([[0.5, 0.5]] * 4).log()
    expected = 0.9 * torch.tensor(1.8).log() + 0.1 * torch.tensor(0.2).log()
    chosen = torch.tensor([True, False, True, False])
    assert masked_divergence(target, logits, chosen).item() == pytest.approx(expected.item() * 2 / 4, rel=1e-5)


# Thresholds and learning status

PROBS = torch.tensor([[0.8, 0.1, 0.1], [0.6, 0.3, 0.1], [0.7, 0.2, 0.1], [0.3, 0.5, 0.2], [0.35, 0.25, 0.4]])


def test_thresholds_follow_the_client_class_by_class() -> None:
    """Mean highest probability .6; mean prediction .55, .27, .18: thresholds .6, .2945, .1964."""
    found = FL2().accept(PROBS)
    assert found.label.tolist() == [0, 0, 0, 1, 2]
    assert found.accepted.tolist() == [True, True, True, True, True]
    sharper = PROBS.clone()
    sharper[0] = torch.tensor([0.98, 0.01, 0.01])  # the mean is now .636, class 0 still the one seen most
    assert FL2().accept(sharper).accepted.tolist() == [True, False, True, True, True]
    assert FL2(adaptive=False, threshold=0.7).accept(PROBS).accepted.tolist() == [True, False, True, False, False]
    assert len(FL2().accept(torch.zeros(0, 0)).accepted) == 0


def test_debiased_labels() -> None:
    probs = torch.tensor([[0.9, 0.1]] * 5 + [[0.6, 0.4]] * 5)
    assert FL2().accept(probs).label.tolist() == [0] * 10
    assert FL2(debias=True).accept(probs).label.tolist() == [0] * 5 + [1] * 5


def test_a_client_tells_the_status_of_the_model_as_it_came() -> None:
    here = world()
    weights = hub(here).new_weights()
    reply = FL2().client_train(Task(0, {"model": weights}), {}, client(here))
    me = client(here)
    probs = SemiFL().look(me.model(weights), me.shard.unlabeled, me)
    assert reply.number("status") == pytest.approx(float(probs.max(dim=1).values.mean()), rel=1e-6)
    assert reply.metrics["status"] == reply.send["status"]
    assert reply.examples == int(FL2().accept(probs).accepted.sum()) > 0


def test_a_labelled_client_measures_itself_on_its_own_images() -> None:
    here = world("some-clients")
    weights = hub(here).new_weights()
    labeled = hub(here).labeled_clients[0]
    me = client(here, labeled)
    assert not len(me.shard.unlabeled)
    probs = SemiFL().look(me.model(weights), me.shard.labeled.images, me)
    reply = FL2().client_train(Task(labeled, {"model": weights}), {}, client(here, labeled))
    assert reply.examples == len(me.shard.labeled)
    assert reply.number("status") == pytest.approx(float(probs.max(dim=1).values.mean()), rel=1e-6)


def test_strict_are_the_surest_of_the_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean confidence .97: an image of the commonest class with .96 is above τ_f = .95 but not accepted."""
    here = world()
    me = client(here)
    probs = torch.full((len(me.shard.unlabeled), 10), 0.02 / 9)
    probs[:, 0] = 0.98
    probs[0, 0], probs[0, 1] = 0.96, 0.04
    probs[1] = torch.tensor([0.0, 0.6, *[0.05] * 8])  # a rare class: accepted, not strict
    seen: dict[str, Any] = {}

    def spy(model: nn.Module, label: Tensor, strict: Tensor, **options: float) -> None:
        seen.update(label=label, strict=strict, **options)

    monkeypatch.setattr(FL2, "look", lambda *_: probs)
    monkeypatch.setattr(fl2, "consistency_term", spy)
    FL2(radius=0.3, consistency=0.5).client_train(Task(0, {"model": hub(here).new_weights()}), {}, me)
    assert len(seen["label"]) == len(probs) - 1  # the first one is not accepted
    assert seen["label"][0] == 1
    assert seen["strict"].tolist() == [False] + [True] * (len(probs) - 2)
    assert (seen["radius"], seen["weight"]) == (0.3, 0.5)


def test_consistency_is_an_option() -> None:
    """Without it, and without the other two parts, (FL)² is SemiFL without mix-up: the same bits."""
    here = world()
    task = Task(0, {"model": hub(here).new_weights()})
    plain = FL2(threshold=0.2, adaptive=False, consistency=0.0).client_train(task, {}, client(here))
    semifl = SemiFL(threshold=0.2, mix=0.0).client_train(task, {}, client(here))
    pushed = FL2(threshold=0.2, adaptive=False).client_train(task, {}, client(here))
    ours, theirs = weights_in(plain.send, "model"), weights_in(semifl.send, "model")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(weights_in(pushed.send, "model")["fc.weight"], theirs["fc.weight"])


# The merge


def moved(weights: Weights, by: float) -> Weights:
    return {name: t + by if t.is_floating_point() else t for name, t in weights.items()}


def test_the_less_sure_count_more() -> None:
    """Statuses .9 and .6: weights .2 and .8. A client that learned nothing does not count."""
    here = world("clients")
    old = hub(here).new_weights()
    replies = [
        Reply(send={"model": moved(old, 1.0), "status": 0.9}, examples=30),
        Reply(send={"model": moved(old, 2.0), "status": 0.6}, examples=10),
        Reply(send={"model": moved(old, 99.0), "status": 0.1}, examples=0),
    ]
    assert FL2().client_weights(replies[:2]) == pytest.approx([0.2, 0.8])
    after = weights_in(FL2().server_merge({"model": old}, replies, hub(here)), "model")
    assert torch.allclose(after["fc.bias"], old["fc.bias"] + 0.2 * 1.0 + 0.8 * 2.0, atol=1e-5)
    assert FL2(status_aware=False).client_weights(replies[:2]) == [0.5, 0.5]
    assert FL2(status_aware=False, weigh="accepted").client_weights(replies[:2]) == [0.75, 0.25]


def test_entirely_sure_clients_count_alike() -> None:
    here = world("clients")
    old = hub(here).new_weights()
    replies = [Reply(send={"model": moved(old, by), "status": 1.0}, examples=5) for by in (1.0, 3.0)]
    after = weights_in(FL2().server_merge({"model": old}, replies, hub(here)), "model")
    assert torch.allclose(after["fc.bias"], old["fc.bias"] + 2.0, atol=1e-5)


# Whole runs


@pytest.mark.parametrize("bn", ["static", "average"])
def test_with_batch_norm_in_every_placement(tiny: Tiny, bn: str) -> None:
    for placement in ("server", "clients", "some-clients"):
        run = tiny("fl2", placement, name=placement, rounds=1, net__norm="bn", net__bn=bn)
        assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())
        assert not any(record["refused"] for record in run.records)
        assert all(0 < status <= 1 for status in run.records[-1]["client_metrics"]["status"].values())


def test_presets() -> None:
    paper = resolve({"method.name": "fl2"})
    assert build_method(paper) == FL2()
    assert (paper.train.batch, paper.train.epochs, paper.train.schedule, paper.net.bn) == (32, 5, "cosine", "static")
    assert (FL2().radius, FL2().threshold, FL2().server_momentum, FL2().mix) == (0.1, 0.95, 0.5, 0.0)
    released = resolve({"method.name": "fl2", "method.preset": "released"})
    assert (released.train.clip, released.train.schedule, released.views.strong) == (1.0, "constant", "ssl")
    assert build_method(released) == FL2(warmup=10, keep_momentum=True)


def test_the_recipes_name_its_row_of_bsemifls_table() -> None:
    from tacit.config.recipes import load_recipe

    for data, shards, accuracy in (("cifar10", 2, 60.63), ("svhn", 8, 87.59), ("cifar100", 4, 28.47)):
        experiment = resolve(load_recipe(f"bsemifl/table1/{data}-shards{shards}-fl2"))
        assert (experiment.paper.accuracy, experiment.data.shards) == (accuracy, shards)
        assert build_method(experiment) == FL2(radius=1.0 if data == "cifar100" else 0.1)
