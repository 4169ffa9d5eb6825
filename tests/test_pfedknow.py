"""pFedKnow: what is pruned stays pruned, models of their own, and knowledge that passes through the server's labels."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from runs import World, client, hub, world_of
from tacit.contract.method import Reply, Task
from tacit.core.payload import Payload, number_in, weights_in
from tacit.engine.run import run_experiment
from tacit.methods.pfedknow import PFedKnow, evidential_uncertainty, personal, predict_logits
from tacit.nets import build
from tacit.nets.optimizer import sgd
from tacit.pieces.prune import kept_channels, prune_channels, pruned_training


@pytest.fixture(scope="module", params=["gn", "bn"])
def world(request: pytest.FixtureRequest) -> World:
    return world_of("pfedknow", "server", net__norm=request.param)


@pytest.fixture(scope="module")
def state(world: World) -> Payload:
    return PFedKnow().server_start(hub(world), {})


def kept(world: World, weights: dict[str, torch.Tensor]) -> int:
    net = world[0].setup.build()
    net.load_state_dict(weights)
    return sum(int(mask.sum()) for mask in kept_channels(net).values())


def trained(world: World, state: Payload, number: int = 0, memory: Payload | None = None, **options: object) -> Reply:
    method, me = PFedKnow(**options), client(world, number)  # type: ignore[arg-type]
    reply = method.client_train(Task(number, {"model": state.get(personal(number), state["prior"])}), memory or {}, me)
    return dataclasses.replace(reply, client=number)


def test_pruned_channels_say_nothing_and_never_come_back() -> None:
    net = build("cnn-16", classes=4, channels=1, size=8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.norm1.weight[:5] = 0.01
    assert prune_channels(net, 5 / 112) == 5
    assert kept_channels(net)["norm1"].tolist() == [False] * 5 + [True] * 11
    optimizer = sgd(net, 0.5, momentum=0.9, weight_decay=0.1)
    with pruned_training(net, sparsity=0.1):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(6, 1, 8, 8)).square().sum().backward()
            optimizer.step()
    assert kept_channels(net)["norm1"].tolist() == [False] * 5 + [True] * 11


def test_a_pruned_channel_has_no_gradient_inside_and_one_outside() -> None:
    norm = nn.Sequential(nn.GroupNorm(1, 2))
    with torch.no_grad():
        norm[0].weight[0] = 0.0  # its shift is 0 from the beginning
    image = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    with pruned_training(norm):
        norm(image).sum().backward()
    assert (norm[0].weight.grad != 0).tolist() == [False, True]
    norm.zero_grad()
    norm(image).sum().backward()
    assert (norm[0].weight.grad != 0).tolist() == [True, True]


def test_the_penalty_draws_scales_to_zero_from_either_side() -> None:
    norm = nn.Sequential(nn.GroupNorm(1, 2))
    with torch.no_grad():
        norm[0].weight.copy_(torch.tensor([1.0, -1.0]))
    with pruned_training(norm, sparsity=0.5):
        (norm(torch.zeros(1, 2, 1, 1)) * 0).sum().backward()
    assert norm[0].weight.grad.tolist() == [0.5, -0.5]


def test_no_layer_is_pruned_away() -> None:
    net = build("cnn-16", classes=4, channels=1, size=8, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        prune_channels(net, 0.5)
    assert all(int(mask.sum()) >= 1 for mask in kept_channels(net).values())


def test_a_client_prunes_so_many_times_and_no_more(world: World, state: Payload) -> None:
    whole = kept(world, weights_in(state, "prior"))
    memory: Payload = {}
    left, model = [], {**state}
    for _ in range(3):
        reply = trained(world, model, memory=memory, prune=0.25, prune_times=2)
        memory, model = reply.keep, {"prior": reply.weights("model")}
        left.append(kept(world, reply.weights("model")))
    assert left[0] == pytest.approx(0.75 * whole, abs=3)
    assert left[1] == pytest.approx(0.75 * left[0], abs=3)
    assert left[2] == left[1]
    assert number_in(memory, "pruned") == 2


def test_the_server_gives_each_client_its_own_model_back(world: World, state: Payload) -> None:
    replies = [trained(world, state, number, prune=0.3) for number in (0, 1)]
    method = PFedKnow()
    merged = method.server_merge(state, replies, hub(world))
    tasks = {task.client: task for task in method.server_send(merged, hub(world))}
    for number, reply in enumerate(replies):
        own = tasks[number].weights("model")
        assert torch.equal(own["fc.weight"], weights_in(merged, personal(number))["fc.weight"])
        assert not torch.equal(own["fc.weight"], reply.weights("model")["fc.weight"])  # it was distilled
        assert kept(world, own) == kept(world, reply.weights("model"))  # and is as small as it was
    prior = weights_in(state, "prior")
    assert torch.equal(tasks[2].weights("model")["fc.weight"], prior["fc.weight"])  # it never took part
    assert torch.equal(weights_in(merged, "prior")["fc.weight"], prior["fc.weight"])


def test_the_other_clients_and_the_prior_are_teachers(world: World, state: Payload) -> None:
    replies = [trained(world, state, number) for number in (0, 1)]

    def distilled(options: dict, parties: list[Reply]) -> torch.Tensor:
        merged = PFedKnow(**options).server_merge(state, parties, hub(world))
        return weights_in(merged, personal(0))["fc.weight"]

    both, alone = distilled({}, replies), distilled({}, replies[:1])
    assert not torch.equal(both, alone)
    nobody = {"distillation": 0.0}
    assert torch.equal(distilled(nobody, replies), distilled(nobody, replies[:1]))
    assert not torch.equal(alone, distilled(nobody, replies[:1]))  # the prior


def test_a_channel_that_one_client_kept_is_not_halved_in_the_mean(world: World, state: Payload) -> None:
    replies = [trained(world, state, number, prune=0.3) for number in (0, 1)]
    merged = PFedKnow().server_merge(state, replies, hub(world))
    one, other = (weights_in(merged, personal(number))["norm2.weight"] for number in (0, 1))
    mean, only = weights_in(merged, "model")["norm2.weight"], (one != 0) & (other == 0)
    assert torch.allclose(mean[only], one[only], atol=1e-6)
    assert (mean[(one == 0) & (other == 0)] == 0).all()


def test_images_of_which_it_is_uncertain_are_left_out_of_the_second_training(world: World, state: Payload) -> None:
    me = client(world)
    logits = predict_logits(me.model(weights_in(state, "prior")), me.shard.unlabeled, me)
    middle = float(evidential_uncertainty(logits).median())
    values = (1.0, middle, 0.0)
    replies = [trained(world, state, uncertainty=value, label_epochs=0, prune=0.0) for value in values]
    models = [reply.weights("model")["fc.weight"] for reply in replies]
    assert not torch.equal(models[0], models[1])
    assert torch.equal(models[2], models[0])  # none is certain enough: all of them
    me = client(world)
    PFedKnow(uncertainty=middle).client_train(Task(0, {"model": state["prior"]}), {}, me)
    assert int(me.labelling.accepted[0].sum()) == int((evidential_uncertainty(logits) < middle).sum())


def test_the_prior_is_what_the_warm_up_learned(tmp_path: Path) -> None:
    plan, _ = world_of("pfedknow", "server", method__warmup=2)
    run = run_experiment(plan.experiment, tmp_path / "run")
    assert [record["stage"] for record in run.records] == ["warm-up", "warm-up", "main", "main"]
    left = [min(record["client_metrics"]["channels_kept"].values()) for record in run.records[2:]]
    assert left == pytest.approx([0.9, 0.81], abs=0.02)
