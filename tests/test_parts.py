"""`train.parts`: a round is about a part of a client's images."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runs import hub, world_of
from tacit.compare.results import budget_of
from tacit.config.resolve import resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, NetPool, RoundInfo
from tacit.contract.parts import part_in_turn, shard_in_turn
from tacit.contract.shard import Labeled, Shard
from tacit.core.errors import TacitError
from tacit.core.payload import Weights, tensor_in, weights_in
from tacit.engine.run import run_experiment
from tacit.methods import find_method
from tacit.methods.fedavg import FedAvg, Twin, WarmUp
from tacit.pieces.loss import LabelLoss
from tacit.runs.folder import Run
from tacit.runs.plan import stages_of

SMALL = {
    "data": {"name": "digits", "subset": 240, "test_subset": 60, "placement": "clients", "labels": 80, "clients": 3},
    "net": {"name": "cnn-8"},
    "rounds": 4,
    "train": {"batch": 8, "parts": 2},
    "method": {"name": "fixmatch", "threshold": 0.3},
    "backend": {"name": "local"},
}


def test_in_as_many_rounds_as_parts_every_image_comes_once_and_then_in_another_order() -> None:
    rounds = [part_in_turn(11, 4, turn, 0, "client-3") for turn in range(8)]
    first, second = torch.cat(rounds[:4]), torch.cat(rounds[4:])
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(11))
    assert first.tolist() != second.tolist()


def test_a_client_has_labels_in_each_round_even_if_they_are_fewer_than_parts() -> None:
    shard = Shard(Labeled(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])), torch.arange(9.0).reshape(9, 1, 1, 1))
    for turn in range(5):
        part, which = shard_in_turn(shard, 5, turn, 0, 7)
        assert len(part.labeled) == 1
        assert torch.equal(part.unlabeled, shard.unlabeled[which])


def test_audited_labels_are_compared_with_the_truth_of_the_same_images(tmp_path: Path) -> None:
    """All labels are accepted and the model has learned: many must be right; by other numbers one in ten would be."""
    settings = {**SMALL, "rounds": 12, "train": {"batch": 8, "parts": 2, "epochs": 5, "lr": 0.1}}
    run_experiment(
        resolve({**settings, "method": {"name": "fixmatch", "threshold": 0.0, "warmup": 8}}), tmp_path / "run"
    )
    assert Run(tmp_path / "run").records[-1]["pseudo_accuracy"] > 0.35


def test_a_round_costs_its_part_and_the_pool_gives_the_same(tmp_path: Path) -> None:
    run_experiment(resolve(SMALL), tmp_path / "local")
    run_experiment(resolve(SMALL, {"backend.name": "pool", "backend.workers": 2}), tmp_path / "pool")
    model = (tmp_path / "local" / "model.safetensors").read_bytes()
    assert model == (tmp_path / "pool" / "model.safetensors").read_bytes()
    whole = resolve(SMALL, {"train.parts": 1})
    assert (budget_of(whole).on_the_rest, budget_of(resolve(SMALL)).on_the_rest) == (4, 2)


def test_a_method_that_remembers_images_finds_each_of_them_again() -> None:
    """By hand: FlexMatch, whose memory is by image; the classic mistake counts within the part of the round."""
    world = world_of("flexmatch", "clients", train__parts=2, method__threshold=0.0)  # of every image it is sure
    plan, federation = world
    shard = federation.client_shard(0)
    method = find_method("flexmatch")(threshold=0.0)
    memory: dict[str, Any] = {}
    for turn in range(2):
        part = shard_in_turn(shard, 2, turn, 0)
        me = Client(plan.setup, shard, RoundInfo("main", turn, 2, turn), 0, 0, NetPool(plan.setup), part)
        weights = weights_in(method.server_start(hub(world), {}), "model")
        memory = dict(method.client_train(Task(0, {"model": weights}), memory, me).keep)
        seen = tensor_in(memory, "last_sure") >= 0
        assert len(seen) == len(shard.unlabeled)
        assert seen[part.which].all()
        assert seen.all() == (turn == 1)


@pytest.mark.parametrize(("reveal", "labels"), [("all", [40] * 4), ("none", [80] * 4)])
def test_a_server_beside_clients_has_a_part_of_its_labels_and_alone_all_of_them(
    reveal: str, labels: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, train = [], FedAvg._train

    def watched(self: FedAvg, weights: Weights, side: Client | Hub) -> Reply:
        reply = train(self, weights, side)
        if isinstance(side, Hub):
            seen.append(reply.examples)
        return reply

    monkeypatch.setattr(FedAvg, "_train", watched)
    data = {**SMALL["data"], "placement": "server", "reveal": reveal}
    run_experiment(resolve({**SMALL, "data": data, "method": {"name": "fedavg"}}), tmp_path / "run")
    assert seen == labels


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"schedule": "linear", "warmup": 0.6, "hold": 0.5}, "together they must be below 1"),
        ({"hold": 0.3}, "hold is for a rate that falls"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov = true looks ahead along the momentum"),
    ],
)
def test_training_that_does_not_fit_together_is_refused(train: dict, said: str) -> None:
    with pytest.raises(TacitError, match=said):
        resolve({"train": train})


@pytest.mark.parametrize("method", ["fixmatch", "cbafed", "ddrfed", "provenance"])
def test_stages_on_the_labels_alone_pass_over_all_of_them(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard's twin and every warm-up. The classic mistake: as many passes as the method makes, over the few labels
    of a part, and a twin that anything beats; or a party alone whose momentum begins anew every other step."""
    seen: dict[str, set[bool]] = {}
    original = Client.optimizer

    def watched(self: Client, *given: Any, **more: Any) -> Any:
        seen.setdefault(self.stage, set()).add(len(self.shard.labeled) == len(self.whole.labeled))
        return original(self, *given, **more)

    monkeypatch.setattr(Client, "optimizer", watched)
    options = {"name": method, "preset": "smoke", "warmup": 1} | ({"gdgm": False} if method == "ddrfed" else {})
    data = {**SMALL["data"], "validation": 0.2}
    settings = {**SMALL, "data": data, "method": options, "rounds": 1, "guard": {"on": True}}
    run_experiment(resolve(settings), tmp_path / "run")
    assert seen["twin"] == seen["warm-up"] == {True}
    assert seen["main"] == {False}


def test_the_twin_of_the_guard_makes_the_methods_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, federation = world_of("fixmatch", "clients", train__parts=2)
    shard, seen, original = federation.client_shard(0), [0], LabelLoss.__call__

    def counted(self: LabelLoss, logits: torch.Tensor, labels: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        seen[0] += len(labels)
        return original(self, logits, labels, *rest, **more)

    monkeypatch.setattr(LabelLoss, "__call__", counted)
    me = Client(plan.setup, shard, RoundInfo("twin", 0, 2, 0), 0, 0, NetPool(plan.setup))
    guarded = resolve({**SMALL, "guard": {"on": True, "epochs": 5}, "data.validation": 0.2})
    twin = stages_of(guarded)[0].method
    assert isinstance(twin, Twin)
    reply = twin._train(weights_in(FedAvg().server_start(hub((plan, federation)), {}), "model"), me)
    assert reply.examples == len(shard.labeled)
    assert seen[0] == 3 * len(shard.labeled)  # five passes over a half are three over all, rounded up
    assert twin.estimated_passes(1) == (3, 0)


@pytest.mark.parametrize("side", ["clients", "server"])
def test_a_partys_skew_is_that_of_all_its_labels(side: str) -> None:
    """The classic mistake: a part's class counts, which are chance, weigh and shift what is learned from it."""
    world = world_of("fixmatch", side, train__parts=4, train__logit_adjustment=1.0, train__class_weights="balanced")
    plan, federation = world
    shard = federation.client_shard(0) if side == "clients" else federation.server_shard()
    turn = shard_in_turn(shard, 4, 0, 0)
    part = Client(plan.setup, shard, RoundInfo("main", 0, 4, 0), 0, 0, NetPool(plan.setup), turn)
    me: Client | Hub = part if side == "clients" else hub(world).in_turn()
    assert 0 < len(me.shard.labeled) < len(shard.labeled)
    counts = torch.bincount(shard.labeled.labels, minlength=me.classes)
    shares = counts.clamp(min=1) / len(shard.labeled)
    assert me.label_loss.shares is not None
    assert torch.allclose(me.label_loss.shares, shares)
    assert me.label_loss.weights is not None
    assert torch.equal(me.label_loss.weights > 0, counts > 0)


@pytest.mark.parametrize(("method", "share"), [(FedAvg(), 4), (WarmUp(), 1), (Twin(epochs=1), 1)])
def test_so_does_a_server_beside_labelled_clients(method: FedAvg, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here, seen = hub(world_of("fixmatch", "server", train__parts=4)), []
    original = type(method)._train

    def watched(self: FedAvg, weights: Weights, side: Client | Hub) -> Reply:
        seen.append(len(side.shard.labeled))
        return original(self, weights, side)

    monkeypatch.setattr(type(method), "_train", watched)
    state = method.server_start(here, {})
    method.server_merge(state, [Reply(send={"model": weights_in(state, "model")}, examples=5, client=0)], here)
    assert seen == [pytest.approx(len(here.whole.labeled) / share, abs=1)]
