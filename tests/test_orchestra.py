"""Orchestra: clusters of equal size at clients, global ones at the server, and what keeps features from collapsing."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from runs import World, hub, world_of
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, NetPool, RoundInfo
from tacit.core.payload import Payload, tensor_in, weights_in
from tacit.methods.orchestra import Orchestra, OrchestraFeatures, quarter_turns
from tacit.pieces.cluster import balanced, equal_clusters, global_clusters

SMALL = OrchestraFeatures(
    hidden=32, projection=16, local_clusters=4, global_clusters=8, global_steps=40, projections=24
)


def seeded(number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def sphere(count: int, size: int = 8, number: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(count, size, generator=seeded(number)), dim=1)


@pytest.fixture(scope="module")
def world() -> World:
    return world_of("orchestra", "server", train__batch=16)


def trained(stage: OrchestraFeatures, state: Payload, memory: Payload, world: World, number: int = 0) -> Reply:
    plan, federation = world
    me = Client(
        plan.setup, federation.client_shard(number), RoundInfo("features", 1, 9, 1), number, 0, NetPool(plan.setup)
    )
    return stage.client_train(Task(number, {**state}), memory, me)


def test_balanced_assignments_are_of_equal_size() -> None:
    share = balanced(sphere(60) @ sphere(5, number=1).T, 200)
    assert torch.allclose(share.sum(dim=1), torch.ones(60), atol=1e-5)
    assert torch.allclose(share.sum(dim=0), torch.full((5,), 12.0), atol=0.05)


def test_equal_clusters_do_not_follow_the_majority() -> None:
    """Forty points in one place and ten in another: two clusters of plain k-means would be the two places."""
    here, there = F.normalize(torch.tensor([1.0, 0.0]), dim=0), F.normalize(torch.tensor([0.0, 1.0]), dim=0)
    points = F.normalize(torch.cat([here.repeat(40, 1), there.repeat(10, 1)]) + 0.05 * sphere(50, 2), dim=1)
    centroids = equal_clusters(points, 2, seeded())
    sizes = balanced(points @ centroids.T).argmax(dim=1).bincount(minlength=2)
    assert sizes.min() >= 20
    assert torch.allclose(centroids.norm(dim=1), torch.ones(2), atol=1e-5)
    assert equal_clusters(points[:3], 16, seeded()).shape == (3, 2)  # no more clusters than points
    assert equal_clusters(points[:0], 16, seeded()).shape == (0, 2)


def test_global_clusters_are_used_evenly() -> None:
    """Centroids that all lie on one side of the points spread out over them."""
    points = sphere(64, 4)
    start = F.normalize(torch.tensor([1.0, 0, 0, 0]) + 0.05 * sphere(4, 4, 3), dim=1)

    moved = global_clusters(points, start, 0.1, 500)
    before, after = ((points @ centroids.T / 0.1).softmax(dim=1) for centroids in (start, moved))
    assert before.amax(dim=1).mean() < 0.4  # all centroids are about as far from any point
    assert after.amax(dim=1).mean() > 0.8
    assert after.argmax(dim=1).bincount(minlength=4).min() >= 8  # of 16 if all were alike
    assert torch.allclose(moved.norm(dim=1), torch.ones(4), atol=1e-5)


def test_in_the_first_round_clients_cluster_and_nothing_else(world: World) -> None:
    state = SMALL.server_start(hub(world), {})
    assert "centroids" not in state
    reply = trained(SMALL, state, {}, world)
    assert torch.equal(reply.weights("model")["conv1.weight"], weights_in(state, "model")["conv1.weight"])
    assert "loss" not in reply.metrics
    local, seen = reply.tensor("local"), tensor_in(reply.keep, "projections")
    assert (local.shape, seen.shape) == ((4, 16), (24, 16))
    assert "projections" not in reply.send  # a client's projections never leave it: clusters of them do
    merged = SMALL.server_merge(state, [reply], hub(world))
    assert tensor_in(merged, "centroids").shape == (8, 16)


def test_then_they_train_towards_the_global_clusters(world: World) -> None:
    state = SMALL.server_start(hub(world), {})
    first = trained(SMALL, state, {}, world)
    state = SMALL.server_merge(state, [first], hub(world))
    second = trained(SMALL, state, first.keep, world)
    for name in ("model", "projector", "rotation", "target"):
        before, after = weights_in(state, name), second.weights(name)
        assert any(not torch.equal(before[key], after[key]) for key in before), name
    assert torch.equal(second.weights("model")["fc.weight"], weights_in(state, "model")["fc.weight"])
    moved = (second.weights("target")["conv1.weight"] - weights_in(state, "target")["conv1.weight"]).norm()
    online = (second.weights("model")["conv1.weight"] - weights_in(state, "model")["conv1.weight"]).norm()
    assert moved < 0.1 * online  # the target follows slowly
    seen = tensor_in(second.keep, "projections")
    assert seen.shape == (24, 16)
    assert not torch.equal(seen, tensor_in(first.keep, "projections"))
    assert torch.allclose(seen.norm(dim=1), torch.ones(24), atol=1e-5)
    other = trained(dataclasses.replace(SMALL, degeneracy=0.0), state, first.keep, world)
    assert torch.equal(other.weights("rotation")["weight"], weights_in(state, "rotation")["weight"])


def test_centroids_that_are_none_are_left_out(world: World) -> None:
    state = SMALL.server_start(hub(world), {})
    reply = trained(SMALL, state, {}, world)
    good = SMALL.server_merge(state, [reply], hub(world))
    bad = [torch.zeros(4, 15), torch.zeros(16), torch.zeros(5, 16), torch.full((4, 16), 1e9), torch.zeros(0, 16), 3.0]
    for local in bad:
        odd = dataclasses.replace(reply, send={**reply.send, "local": local})
        assert "centroids" not in SMALL.server_merge(state, [odd], hub(world))
        both = SMALL.server_merge(state, [reply, odd], hub(world))
        assert torch.equal(tensor_in(both, "centroids"), tensor_in(good, "centroids"))


def test_quarter_turns_are_those_that_are_told() -> None:
    views = torch.randn(8, 3, 5, 5, generator=seeded())
    turns = torch.arange(8) % 4
    for view, turned, quarters in zip(views, quarter_turns(views, turns), turns.tolist(), strict=True):
        assert torch.equal(turned, torch.rot90(view, quarters, dims=(1, 2)))


def test_the_stage_has_the_options_of_the_method() -> None:
    (stage,) = Orchestra(projection=5, local_clusters=3, feature_rounds=4).before()
    assert stage.rounds == 4
    assert stage.method == OrchestraFeatures(projection=5, local_clusters=3)
