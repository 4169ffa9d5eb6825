"""Rates by depth (`train.layer_decay`): the further from the head, the slower."""

import pytest
import torch
from torch import nn

from runs import client, hub, world_of
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.nets import build
from tacit.nets.optimizer import SGD, depth_factors, give_momentum, momentum_of, sgd


def test_every_step_away_from_the_head_has_its_factor() -> None:
    factors = depth_factors(build("cnn-4", classes=3, channels=1, size=8), 0.5)
    by_module = {name.split(".")[0]: factor for name, factor in factors.items()}
    assert by_module == {
        "fc": 1.0,
        "conv3": 0.5,
        "norm3": 0.5,
        "conv2": 0.25,
        "norm2": 0.25,
        "conv1": 0.125,
        "norm1": 0.125,
    }
    vit = depth_factors(build("vit-tiny", classes=3, channels=1, size=8), 0.5)
    assert vit["norm.weight"] == 0.5
    assert vit["patch_embed.weight"] == 0.5**13
    assert vit["pos_embed"] == 0.5**14


def test_what_is_built_on_a_net_has_the_heads_rate() -> None:
    net = build("cnn-4", classes=3, channels=1, size=8)
    on_top = nn.ModuleDict({"encoder": net, "projector": nn.Linear(4, 2)})
    factors = depth_factors(on_top, 0.5)
    assert factors["projector.weight"] == 1
    assert factors["encoder.conv3.weight"] == 0.5


@pytest.mark.parametrize("part", ["all", "last-2"])
def test_steps_are_those_of_optimisers_with_each_blocks_own_rate(part: str) -> None:
    def made() -> nn.Module:
        return build("cnn-4", classes=3, channels=1, size=8, generator=torch.Generator().manual_seed(1)).train_only(
            part
        )

    net, twin = made(), made()
    optimizer = sgd(net, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True, layer_decay=0.5)
    factors = depth_factors(twin, 0.5)
    others = {
        name: torch.optim.SGD([p], lr=0.1 * factors[name], momentum=0.9, weight_decay=0.01, nesterov=True)
        for name, p in twin.named_parameters()
        if p.requires_grad
    }
    images = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        for model in (net, twin):
            model.zero_grad(set_to_none=True)
            model(images).square().sum().backward()
        optimizer.step()
        for other in others.values():
            other.step()
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, twin.state_dict()[name])
    kept = momentum_of(net, optimizer)
    assert set(kept) == set(others)
    again = sgd(net, 0.1, layer_decay=0.5)
    give_momentum(net, again, kept)
    assert all(torch.equal(kept[name], tensor) for name, tensor in momentum_of(net, again).items())


def test_a_rate_that_changes_from_step_to_step_changes_for_all() -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = SGD(weights, lr=1.0, factors=(1.0, 0.5))
    optimizer.pace = lambda done, width: 1.0 - done
    optimizer.expect(2)
    for _ in range(2):  # rates 1 and 0.5
        for weight in weights:
            weight.grad = torch.tensor([-1.0])
        optimizer.step()
    assert [weight.item() for weight in weights] == [1.5, 0.75]
    assert optimizer.rates == [1.0, 0.5]


def test_a_party_trains_deep_blocks_slowly() -> None:
    place = world_of("fedavg", "clients", net__name="cnn-4", train__layer_decay=0.01)
    first, me = hub(place).new_weights(), client(place)
    model = me.model(first)
    me.fit_labeled(model)
    moved = {
        name: float((tensor - first[name]).abs().mean() / first[name].abs().mean())
        for name, tensor in me.weights(model).items()
        if name in ("fc.weight", "conv3.weight", "conv1.weight")
    }
    assert moved["fc.weight"] > 5 * moved["conv3.weight"] > 25 * moved["conv1.weight"] > 0


def test_one_is_off_and_not_in_an_experiment() -> None:
    assert "layer_decay" not in resolve({}).to_dict()["train"]
    on = resolve({"train.layer_decay": 0.7})
    assert on.to_dict()["train"]["layer_decay"] == 0.7
    assert resolve(on.to_dict()) == on


def test_methods_that_need_one_rate_refuse_it() -> None:
    with pytest.raises(TacitError, match="has control variates for one rate"):
        resolve({"method": {"name": "fedavg", "scaffold": True}, "train.layer_decay": 0.7})
    with pytest.raises(TacitError, match="trains all of a net alike"):
        resolve({"method.name": "fedmatch", "train.layer_decay": 0.7})
    with pytest.raises(TacitError, match="layer_decay"):
        resolve({"train.layer_decay": 0})
