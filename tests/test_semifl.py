"""SemiFL: fix and mix sets, alternate training, momentum on both sides, static BN without pooled data."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runs import TINY
from tacit.config.resolve import build_method, resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, NetPool, RoundInfo
from tacit.core.payload import Weights, weights_in
from tacit.data.federation import Federation
from tacit.methods import semifl
from tacit.methods.semifl import SemiFL, beta_share, fit_fix_and_mix, mix_set
from tacit.nets.optimizer import give_momentum, momentum_of, sgd
from tacit.nets.statistics import pooled_statistics, recompute_statistics
from tacit.pieces.label import PseudoLabels
from tacit.pieces.train import weights_of
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, prepare

Tiny = Callable[..., Run]


def world(placement: str = "server", **settings: Any) -> tuple[Plan, Federation]:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    layers = {"method.name": "semifl", "method.preset": "smoke", "data.placement": placement}
    plan = prepare(resolve(layers, TINY, changes))
    return plan, Federation(plan.dataset, plan.split, plan.setup.device)


def client(world: tuple[Plan, Federation], number: int = 0, round: int = 1) -> Client:
    plan, federation = world
    round_info = RoundInfo("main", round, 4, round)
    return Client(plan.setup, federation.client_shard(number), round_info, number, 0, NetPool(plan.setup))


def hub(world: tuple[Plan, Federation], round: int = 0) -> Hub:
    plan, federation = world
    return Hub(plan.setup, federation.server_shard(), RoundInfo("main", round, 4, round), NetPool(plan.setup))


def shifted(weights: Weights, by: float) -> Weights:
    return {name: t + by if t.is_floating_point() else t for name, t in weights.items()}


def test_the_share_of_a_blend_is_beta_distributed() -> None:
    generator = torch.Generator().manual_seed(0)
    shares = torch.tensor([beta_share(0.75, generator) for _ in range(4000)])
    assert shares.mean().item() == pytest.approx(0.5, abs=0.02)
    assert shares.var().item() == pytest.approx(1 / (4 * (2 * 0.75 + 1)), abs=0.006)  # a²/((2a)²(2a+1)) = 0.1
    assert shares.min() < 0.05
    assert shares.max() > 0.95  # not symmetrised: a share may be small as well as large


def test_the_mix_set_is_drawn_from_all_images() -> None:
    images, labels = torch.arange(10.0).view(10, 1, 1, 1), torch.arange(10)
    drawn, drawn_labels = mix_set(images, labels, 300, torch.Generator().manual_seed(0))
    assert torch.equal(drawn.flatten().long(), drawn_labels)
    assert set(drawn_labels.tolist()) == set(range(10))


class Sum(nn.Module):
    """Two classes; the logit of the second is the sum of the image. Remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.shown: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shown.append(x.detach())
        total = x.flatten(1).sum(dim=1) * self.weight
        return torch.stack([torch.zeros_like(total), total], dim=1)


def fitted(weight: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Sum, float, list[float]]:
    """Fix images of value 1 (label 1), mix images of value 3 (label 0); strong views are ten times the image."""
    shares: list[float] = []
    monkeypatch.setattr(semifl, "beta_share", lambda shape, generator: shares.append(0.75) or 0.75)
    model = Sum()
    loss = fit_fix_and_mix(
        model,
        (torch.ones(5, 1, 1, 1), torch.ones(5, dtype=torch.int64)),
        (torch.full((5, 1, 1, 1), 3.0), torch.zeros(5, dtype=torch.int64)),
        strong=lambda x, generator: 10 * x,
        weak=lambda x, generator: x,
        weight=weight,
        shape=0.75,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        epochs=2,
        batch=2,
        clip=0.0,
        generator=torch.Generator().manual_seed(0),
    )
    return model, loss, shares


def test_the_loss_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, shares = fitted(0.5, monkeypatch)
    blended = 0.75 * 1 + 0.25 * 3  # the logit of class 1 for the blend of both images
    strong_loss = math.log1p(math.exp(-10))
    mix_loss = 0.75 * math.log1p(math.exp(-blended)) + 0.25 * math.log1p(math.exp(blended))
    assert loss == pytest.approx(strong_loss + 0.5 * mix_loss, rel=1e-5)
    assert (
        len(shares) == 4
    )  # five images in batches of two and three (one may not stay alone), two epochs: one share each
    values = {round(float(value), 4) for shown in model.shown for value in shown.unique()}
    assert values == {10.0, blended}


def test_without_weight_there_is_no_mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss, shares = fitted(0.0, monkeypatch)
    assert shares == []
    assert {float(value) for shown in model.shown for value in shown.unique()} == {10.0}
    assert loss == pytest.approx(math.log1p(math.exp(-10)), rel=1e-3)


def test_fix_is_what_is_confident_and_mix_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    here = world()
    me = client(here)
    images = me.shard.unlabeled
    probs = torch.full((len(images), 10), 0.02)
    probs[:, 3] = 0.82
    probs[:30] = 0.002
    probs[:30, 7] = 0.982
    seen: dict[str, Any] = {}

    def spy(model: nn.Module, fix: tuple, mix: tuple, **settings: Any) -> float:
        seen.update(fix=fix, mix=mix, **settings)
        return 0.0

    monkeypatch.setattr(semifl, "fit_fix_and_mix", spy)
    method = SemiFL()
    reply = method.learn(me.model(hub(here).new_weights()), method.accept(probs), {}, me)
    assert reply.examples == 30
    assert torch.equal(seen["fix"][0], images[:30])
    assert seen["fix"][1].tolist() == [7] * 30
    assert len(seen["mix"][0]) == 30
    assert set(seen["mix"][1].tolist()) == {3, 7}  # also labels that nobody believes
    assert seen["also"] is None  # this client holds no labels
    assert (me.labelling.accepted[0].sum(), len(me.labelling.label[0])) == (30, len(images))


def test_a_client_sure_of_nothing_drops_out() -> None:
    here = world()
    me, first = client(here), hub(here).new_weights()
    reply = SemiFL(threshold=1.0).client_train(Task(0, {"model": first}), {}, me)
    assert reply.examples == 0
    assert all(torch.equal(reply.weights("model")[name], first[name]) for name in first)
    assert reply.keep == {}


def test_labels_of_a_client_join_in() -> None:
    here = world("clients")
    me, weights = client(here), hub(here).new_weights()
    labels, images = len(me.shard.labeled), len(me.shard.unlabeled)
    assert labels > 0
    every = SemiFL(threshold=0.0).client_train(Task(0, {"model": weights}), {}, me)
    none = SemiFL(threshold=1.0).client_train(Task(0, {"model": weights}), {}, client(here))
    assert every.examples == images + labels
    assert none.examples == labels
    assert not torch.equal(weights_in(none.send, "model")["fc.weight"], weights["fc.weight"])


def merged(method: SemiFL, replies: list[Reply], state: dict, **settings: Any) -> dict:
    """A merge at a server that holds no labels: nothing but the mean and its momentum."""
    return method.server_merge(state, replies, hub(world("clients", **settings)))


def test_clients_count_alike_and_the_server_has_momentum() -> None:
    old = hub(world("clients")).new_weights()
    replies = [
        Reply(send={"model": shifted(old, -2.0)}, examples=30),
        Reply(send={"model": shifted(old, -4.0)}, examples=10),
    ]
    alike = merged(SemiFL(), replies, {"model": old})
    accepted = merged(SemiFL(weigh="accepted"), replies, {"model": old})
    assert torch.allclose(alike["model"]["fc.bias"], old["fc.bias"] - 3.0, atol=1e-5)
    assert torch.allclose(accepted["model"]["fc.bias"], old["fc.bias"] - 2.5, atol=1e-5)
    # The second time both clients stay where the model is: it goes on by half of its last step of 3.
    still = [Reply(send={"model": alike["model"]}, examples=5)]
    after = merged(SemiFL(), still, alike)
    assert torch.allclose(after["model"]["fc.bias"], alike["model"]["fc.bias"] - 1.5, atol=1e-4)
    assert "velocity" not in merged(SemiFL(server_momentum=0.0), replies, {"model": old})


def test_a_client_of_weight_zero_does_not_count() -> None:
    old = hub(world("clients")).new_weights()
    replies = [
        Reply(send={"model": shifted(old, -2.0)}, examples=3),
        Reply(send={"model": shifted(old, 100.0)}, examples=0),
    ]
    after = merged(SemiFL(), replies, {"model": old})
    assert torch.allclose(after["model"]["fc.bias"], old["fc.bias"] - 2.0, atol=1e-5)


def test_in_parallel_the_server_has_half_of_the_weight() -> None:
    """With a rate of next to nothing the server's own training changes nothing."""
    here = world(train__lr=1e-12, train__weight_decay=0.0)
    old = hub(here).new_weights()
    replies = [
        Reply(send={"model": shifted(old, -2.0)}, examples=30),
        Reply(send={"model": shifted(old, -4.0)}, examples=10),
    ]
    after = SemiFL(alternate=False).server_merge({"model": old}, replies, hub(here))
    assert torch.allclose(after["model"]["fc.bias"], old["fc.bias"] - 1.5, atol=1e-5)
    alone = SemiFL(alternate=False).server_merge({"model": old}, [], hub(here))
    assert torch.allclose(alone["model"]["fc.bias"], old["fc.bias"], atol=1e-5)


def test_the_server_trains_after_the_merge() -> None:
    here = world()
    old = hub(here).new_weights()
    away = Reply(send={"model": shifted(old, 0.01)}, examples=10)
    after = SemiFL().server_merge({"model": old}, [away], hub(here))
    twin = hub(here)
    model = twin.model(shifted(old, 0.01))
    twin.fit_labeled(model)
    expected = weights_of(model)
    assert torch.allclose(after["model"]["fc.weight"], expected["fc.weight"], atol=1e-6)


def test_momentum_is_kept_and_used() -> None:
    here = world()
    weights = hub(here).new_weights()
    method = SemiFL(threshold=0.0, keep_momentum=True)
    first = method.client_train(Task(0, {"model": weights}), {}, client(here))
    assert set(weights_in(first.keep, "momentum")) == {name for name in weights if "running" not in name}
    fresh = method.client_train(Task(0, {"model": weights}), {}, client(here))
    going_on = method.client_train(Task(0, {"model": weights}), first.keep, client(here))
    assert torch.equal(weights_in(fresh.send, "model")["fc.weight"], weights_in(first.send, "model")["fc.weight"])
    assert not torch.equal(
        weights_in(going_on.send, "model")["fc.weight"], weights_in(fresh.send, "model")["fc.weight"]
    )
    state = method.server_merge({"model": weights}, [first], hub(here))
    assert "momentum" in state
    assert "momentum" not in SemiFL().server_merge({"model": weights}, [first], hub(here))


def test_kept_momentum_fits_the_memory_layout_of_the_net() -> None:
    """What comes back from disk lies in another order than a channels-last net: the fused step would mix it up."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        net = nn.Conv2d(4, 8, 3).to(memory_format=layout)  # type: ignore[call-overload]
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator.manual_seed(1)))
        optimizer = sgd(net, lr=0.1)
        momentum = torch.randn(net.weight.shape, generator=generator.manual_seed(2))
        give_momentum(net, optimizer, {"weight": momentum, "bias": torch.zeros(8)})
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.allclose(momentum_of(net, optimizer)["weight"], 0.9 * momentum)
        results.append(net.weight.detach().clone())
    assert torch.allclose(results[0], results[1], atol=1e-6)


def test_pooled_statistics_are_those_of_all_images_together() -> None:
    """Two parties with very different images and sizes, against one pass over everything."""
    net = nn.Sequential(nn.BatchNorm2d(3))
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(30, 3, 4, 4, generator=generator), 5 + 2 * torch.randn(10, 3, 4, 4, generator=generator)]
    models = []
    for part in parts:
        recompute_statistics(net, [part])
        models.append(weights_of(net))
    recompute_statistics(net, [torch.cat(parts)])
    everything = weights_of(net)
    pooled = pooled_statistics(models, [0.75, 0.25])
    assert torch.allclose(pooled["0.running_mean"], everything["0.running_mean"], atol=1e-5)
    assert torch.allclose(pooled["0.running_var"], everything["0.running_var"], rtol=2e-3)  # divided by n, not n − 1
    assert set(pooled) == {"0.running_mean", "0.running_var"}


@pytest.mark.parametrize("whose", ["server", "clients"])
def test_static_statistics_come_from_where_the_option_says(whose: str) -> None:
    here = world(net__norm="bn", net__bn="static")
    method = SemiFL(threshold=0.0, statistics=whose)  # type: ignore[arg-type]
    state = method.server_start(hub(here), {})
    start = hub(here)
    model = start.model(weights_in(state, "model"))
    recompute_statistics(model, [start.views.plain(start.shard.labeled.images)])
    assert torch.allclose(weights_of(model)["norm1.running_mean"], state["model"]["norm1.running_mean"])  # type: ignore[index]
    replies = [method.client_train(Task(k, state), {}, client(here, k)) for k in range(2)]
    after = weights_in(method.server_merge(state, replies, hub(here)), "model")
    if whose == "clients":
        expected = pooled_statistics((reply.weights("model") for reply in replies), [0.5, 0.5])
    else:
        model = start.model(after)
        recompute_statistics(model, [start.views.plain(start.shard.labeled.images)])
        expected = weights_of(model)
    assert torch.allclose(after["norm3.running_mean"], expected["norm3.running_mean"], atol=1e-6)
    assert torch.allclose(after["norm3.running_var"], expected["norm3.running_var"], atol=1e-6)
    alone = weights_in(method.server_merge(state, [], hub(here)), "model")  # nobody answered: the server's own
    assert torch.isfinite(alone["norm3.running_var"]).all()
    assert not torch.equal(alone["norm3.running_var"], weights_in(state, "model")["norm3.running_var"])


def test_debiased_labels() -> None:
    """Everything looks like class 0 a little; divided by that, the second half is class 1."""
    probs = torch.tensor([[0.9, 0.1]] * 5 + [[0.6, 0.4]] * 5)
    assert SemiFL(threshold=0.5).accept(probs).label.tolist() == [0] * 10
    assert SemiFL(threshold=0.5, debias=True).accept(probs).label.tolist() == [0] * 5 + [1] * 5
    nothing = SemiFL().accept(torch.zeros(0, 0))
    assert isinstance(nothing, PseudoLabels)
    assert len(nothing.accepted) == 0


def test_presets() -> None:
    paper = resolve({"method.name": "semifl"})
    assert (paper.train.batch, paper.train.epochs, paper.net.norm, paper.net.bn) == (10, 5, "bn", "static")
    assert build_method(paper) == SemiFL()
    released = resolve({"method.name": "semifl", "method.preset": "released"})
    assert (released.train.schedule, released.train.clip, released.train.nesterov) == ("cosine", 1.0, True)
    assert released.views.strong == "semifl-legacy"
    assert build_method(released) == SemiFL(keep_momentum=True)


def test_static_bn_in_every_placement(tiny: Tiny) -> None:
    for placement in ("server", "clients", "some-clients"):
        run = tiny("semifl", placement, name=placement, net__norm="bn", net__bn="static", method__alternate=False)
        assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())
        assert not any(record["refused"] for record in run.records)
