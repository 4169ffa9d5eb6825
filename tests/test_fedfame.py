"""FedFAME: no view but the image itself, near the global model, away from the client's own past."""

from unittest.mock import patch

import pytest
import torch

from runs import World, client, hub, world_of
from tacit.contract.method import Task
from tacit.core.payload import Payload, weights_in
from tacit.methods.fedfame import FedFAME, distillation_loss, model_contrastive_loss
from tacit.nets import Net
from tacit.views import Views


@pytest.fixture(scope="module")
def world() -> World:
    return world_of("fedfame", "server", train__epochs=3, train__lr=0.02)


@pytest.fixture(scope="module")
def state(world: World) -> Payload:
    return FedFAME().server_start(hub(world), {})


def moved(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=chance) for name, tensor in model.items()}


def test_nothing_is_augmented(world: World) -> None:
    with (
        patch.object(Views, "weak_view", side_effect=AssertionError),
        patch.object(Views, "strong_view", side_effect=AssertionError),
    ):
        start = FedFAME().server_start(hub(world), {})
        reply = FedFAME().client_train(Task(0, start), {"past": moved(weights_in(start, "model"))}, client(world))
        FedFAME().server_merge(start, [reply], hub(world))


def test_a_client_without_a_past_has_nothing_to_learn_from_the_model_that_it_is(world: World, state: Payload) -> None:
    """The distillation of a model from itself is zero: all comes from what the client was before."""
    reply = FedFAME().client_train(Task(0, state), {}, client(world))
    sent, came = reply.weights("model"), weights_in(state, "model")
    assert reply.metrics["loss"] == pytest.approx(0, abs=1e-3)
    assert torch.allclose(sent["conv1.weight"], came["conv1.weight"], atol=1e-2)  # weight decay only
    assert all(torch.equal(weights_in(reply.keep, "past")[name], tensor) for name, tensor in sent.items())


def test_it_leaves_its_past_and_stays_with_the_global_model(world: World, state: Payload) -> None:
    came = weights_in(state, "model")
    past = moved(came)
    me = client(world)
    images = me.views.plain(me.shard.unlabeled)

    def features(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        net = me.model(weights)
        assert isinstance(net, Net)
        with torch.no_grad():
            return net.eval().features(images)

    def loss(weights: dict[str, torch.Tensor]) -> float:
        return float(model_contrastive_loss(features(weights), features(came), features(past), 0.5))

    sent = FedFAME().client_train(Task(0, state), {"past": past}, me).weights("model")
    only = FedFAME(contrast=0.0).client_train(Task(0, state), {"past": past}, client(world)).weights("model")
    assert loss(sent) < loss(only) - 1e-3

    free = FedFAME(distillation=0.0).client_train(Task(0, state), {"past": past}, client(world)).weights("model")
    with torch.no_grad():
        told, drifted = (me.model(weights).eval()(images) for weights in (came, sent))
        assert distillation_loss(drifted, told, 2.0) < distillation_loss(me.model(free).eval()(images), told, 2.0)


def test_gradients_of_the_contrast() -> None:
    z = torch.tensor([[1.0, 1.0]], requires_grad=True)
    model_contrastive_loss(z, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), 0.5).backward()
    assert z.grad is not None
    assert z.grad[0, 0] < 0 < z.grad[0, 1]  # towards the global model's, away from its own


def test_the_server_learns_its_labels_first_and_after_each_merge(world: World, state: Payload) -> None:
    first = hub(world).new_weights()
    assert not torch.equal(weights_in(state, "model")["fc.weight"], first["fc.weight"])
    merged = weights_in(FedFAME().server_merge(state, [], hub(world)), "model")
    assert not torch.equal(merged["fc.weight"], weights_in(state, "model")["fc.weight"])
    elsewhere = world_of("fedfame", "some-clients")
    start = FedFAME().server_start(hub(elsewhere), {})
    assert torch.equal(weights_in(start, "model")["fc.weight"], hub(elsewhere).new_weights()["fc.weight"])
