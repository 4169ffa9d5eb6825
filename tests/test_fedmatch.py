"""FedMatch: two parts of the weights, helpers by their answers to noise, agreed labels, one payload a client."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runs import TINY
from tacit.config.recipes import known_recipes, load_recipe
from tacit.config.resolve import build_method, resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, NetPool, RoundInfo
from tacit.core.payload import Payload, Weights, tensor_in, weights_in
from tacit.data.federation import Federation
from tacit.methods.fedmatch import (
    Decomposed,
    FedMatch,
    advice_of,
    agreed_labels,
    cut_small,
    disjoint_batches,
    disjoint_penalty,
    helpers_of,
    inter_client_consistency,
    joined,
    nearest_rows,
    noise_image,
    refreshed,
)
from tacit.nets.optimizer import optimizer_step, sgd
from tacit.pieces.aggregate import stacked
from tacit.pieces.debias import debiasing
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, prepare

Tiny = Callable[..., Run]


class World:
    """A small federation of digits, with the method's smoke settings, without an engine around it."""

    def __init__(self, placement: str = "clients", **changes: Any) -> None:
        layers = {"method.name": "fedmatch", "method.preset": "smoke", "data.placement": placement}
        dotted = {key.replace("__", "."): value for key, value in changes.items()}
        self.plan: Plan = prepare(resolve(layers, TINY, dotted))
        self.federation = Federation(self.plan.dataset, self.plan.split, self.plan.setup.device)
        self.method: FedMatch = self.plan.stages[-1].method  # type: ignore[assignment]

    def client(self, number: int = 0, round: int = 0) -> Client:
        round_info = RoundInfo("main", round, 4, round)
        shard = self.federation.client_shard(number)
        return Client(self.plan.setup, shard, round_info, number, 0, NetPool(self.plan.setup))

    def hub(self, round: int = 0) -> Hub:
        round_info = RoundInfo("main", round, 4, round)
        return Hub(self.plan.setup, self.federation.server_shard(), round_info, NetPool(self.plan.setup))

    def start(self) -> Payload:
        return self.method.server_start(self.hub(-1), {})


def same(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the formulas, by hand ---


def test_consistency_points_from_helper_to_model_and_takes_both_means() -> None:
    """KL(helper ‖ model): a helper that is sure where the model is not. The other direction would be infinite."""
    logits = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log().requires_grad_()
    sure, same_as_model = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.5, 0.5], [0.75, 0.25]])
    loss = inter_client_consistency(logits, torch.stack([sure, same_as_model]))
    assert loss.item() == pytest.approx((math.log(2) + math.log(4 / 3) + 0 + 0) / 4)
    loss.backward()
    # d/dz of KL(q ‖ softmax z) is p − q, here over two helpers and two images
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5], [-0.25, 0.25]]) / 4)


def test_votes_are_counted_image_by_image() -> None:
    """As many images as voters: counting over the wrong axis would have the right shape."""
    votes = torch.tensor([[0, 1, 2], [1, 1, 2], [1, 0, 0]])
    assert agreed_labels(votes, 3).tolist() == [1, 1, 2]
    nobody_agrees = torch.tensor([[2], [1], [0]])
    assert agreed_labels(nobody_agrees, 3).tolist() == [2]
    assert agreed_labels(nobody_agrees, 3, "lowest").tolist() == [0]
    assert agreed_labels(torch.tensor([[4, 3]]), 5).tolist() == [4, 3]  # no helpers: the model's own


@given(st.integers(1, 5), st.integers(1, 6), st.integers(2, 5), st.integers(0, 10**6))
@settings(deadline=None)
def test_a_strict_majority_wins_whoever_casts_it(voters: int, images: int, classes: int, seed: int) -> None:
    votes = torch.randint(classes, (voters, images), generator=torch.Generator().manual_seed(seed))
    for ties in ("local", "lowest"):
        for image, label in enumerate(agreed_labels(votes, classes, ties).tolist()):
            counts = torch.bincount(votes[:, image], minlength=classes)
            assert counts[label] == counts.max()
            if ties == "local" and counts[votes[0, image]] == counts.max():
                assert label == votes[0, image]


def test_penalty_is_a_sum_and_moves_only_what_learns() -> None:
    sigma = {"weight": torch.tensor([[1.0, 2.0]])}
    model = Decomposed(nn.Linear(2, 1, bias=False), sigma, {"weight": torch.tensor([[3.0, -1.0]])})
    loss = disjoint_penalty(model.sigma, model.learning("psi").psi, pull=0.5, sparsity=0.1)
    assert loss.item() == pytest.approx(0.5 * (4 + 9) + 0.1 * 4)
    loss.backward()
    assert model.sigma[0].grad is None
    torch.testing.assert_close(model.psi[0].grad, torch.tensor([[2 * 0.5 * 2 + 0.1, -2 * 0.5 * 3 - 0.1]]))


def test_one_optimiser_moves_one_part_at_a_time() -> None:
    """Momentum of the part that rests must not move it, nor may its old gradient shorten the other's step."""
    model = Decomposed(nn.Linear(1, 1, bias=False), {"weight": torch.ones(1, 1)}, {"weight": torch.ones(1, 1)})
    optimizer = sgd(model, lr=0.1, momentum=0.9)
    x = torch.ones(1, 1)
    optimizer_step(model, optimizer, 100 * model.learning("psi")(x).sum(), clip=1.0)
    assert [model.part("sigma")["weight"].item(), model.part("psi")["weight"].item()] == pytest.approx([1.0, 0.9])
    optimizer_step(model, optimizer, model.learning("sigma")(x).sum(), clip=1.0)
    assert [model.part("sigma")["weight"].item(), model.part("psi")["weight"].item()] == pytest.approx([0.9, 0.9])
    assert model.merged().weight.item() == pytest.approx(1.8)


def test_what_is_cut_and_what_stays() -> None:
    psi = {"w": torch.tensor([1e-6, -5e-6, 6e-6, -1.0])}
    assert cut_small(psi, 5e-6)["w"].tolist() == pytest.approx([0.0, 0.0, 6e-6, -1.0])


@given(st.integers(0, 40), st.integers(0, 90), st.integers(1, 16))
@settings(deadline=None)
def test_an_epoch_sees_everything_once(labeled: int, unlabeled: int, size: int) -> None:
    pairs = list(disjoint_batches(labeled, unlabeled, size, torch.Generator().manual_seed(0)))
    for place, count in enumerate((labeled, unlabeled)):
        seen = [pair[place] for pair in pairs if pair[place] is not None]
        numbers = torch.cat(seen).tolist() if seen else []
        assert sorted(set(numbers)) == list(range(count))
        assert count == 1 or len(numbers) == count  # a single image is seen twice at once
    if labeled > 1 and unlabeled > 1:
        assert len(pairs) <= max(1, -(-labeled // max(size, 2)))


def test_noise_is_an_image_of_its_own_and_always_the_same() -> None:
    one, again = (noise_image(3, 16, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, again)
    assert one.double().std() > 50


def test_a_client_is_never_its_own_helper() -> None:
    outputs = torch.tensor([[0.5, 0.5], [0.5, 0.5], [0.9, 0.1]])
    assert [nearest_rows(outputs, own, 1) for own in range(3)] == [[1], [0], [0]]
    assert nearest_rows(outputs[:1], 0, 2) == []
    alone = {"client": torch.tensor([4]), "output": outputs[:1], "w": torch.ones(1, 2)}
    assert helpers_of(4, alone, 2) == {}


def test_memory_replaces_by_client_and_forgets_the_oldest() -> None:
    def rows(*clients: int) -> Weights:
        return {"client": torch.tensor(clients), "w": torch.tensor([[10.0 * c] for c in clients])}

    memory = refreshed(refreshed({}, rows(1, 2, 3), 3), rows(2, 5), 3)
    assert memory["client"].tolist() == [3, 2, 5]
    assert memory["w"].flatten().tolist() == [30.0, 20.0, 50.0]


def test_debiasing_is_each_models_own() -> None:
    """The own model leans to class 0, the helper to class 1: with one prior for both, the helper would vote wrongly."""
    own = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    helper = torch.tensor([[[0.4, 0.6], [0.1, 0.9]]])
    plain = advice_of(helper, 0.7)
    debiased = advice_of(helper, 0.7, debiasing(lambda: own, at_once=False, moving=False))
    both = torch.arange(2)
    assert plain.votes.tolist() == [[1, 1]]
    assert debiased.votes.tolist() == [[0, 1]]  # .4/.25 > .6/.75
    assert plain.label(both, own).accepted.tolist() == [True, False]
    assert debiased.label(both, own).accepted.tolist() == [True, False]  # .9/.75 : .1/.25 = 3 : 1
    assert plain.accept(own).label.tolist() == [0, 0]
    assert debiased.accept(own).label.tolist() == [0, 1]
    assert torch.equal(debiased.probs, helper)  # what consistency looks at stays as it is


# --- the method on real shards ---


def test_labels_move_sigma_alone_and_images_psi_alone() -> None:
    world = World("clients", method__cut=0.0)
    state = world.start()
    sigma, psi = weights_in(state, "sigma"), weights_in(state, "psi")
    trained = world.method._learn_labels(sigma, psi, world.client())
    assert not same(trained, sigma)
    server = World("server", method__cut=0.0)
    down = server.start()
    reply = server.method.client_train(Task(0, {"sigma": down["sigma"], "psi": down["psi"]}), {}, server.client())
    assert set(reply.send) == {"psi"}  # sigma stays where its labels are
    assert not same(reply.weights("psi"), weights_in(down, "psi"))


def test_clients_with_labels_send_both_parts() -> None:
    world = World("clients")
    state = world.start()
    reply = world.method.client_train(Task(0, {"sigma": state["sigma"], "psi": state["psi"]}), {}, world.client())
    assert set(reply.send) == {"sigma", "psi"}
    assert not same(reply.weights("sigma"), weights_in(state, "sigma"))


def test_first_psi_is_a_fifth_of_sigma_and_the_answer_is_the_sum() -> None:
    world = World("clients")
    state = world.start()
    sigma, psi = weights_in(state, "sigma"), weights_in(state, "psi")
    assert same(sigma, world.hub().new_weights())
    answer = world.method.server_answer(state, world.hub())
    for name, tensor in psi.items():
        torch.testing.assert_close(tensor, 0.2 * sigma[name])
        torch.testing.assert_close(answer[name], 1.2 * sigma[name])


def test_each_part_is_the_plain_mean_of_those_who_sent_it() -> None:
    world = World("some-clients")
    state = world.start()
    sigma, psi = weights_in(state, "sigma"), weights_in(state, "psi")

    def moved(weights: Weights, by: float) -> Weights:
        return {name: tensor + by for name, tensor in weights.items()}

    replies = [
        Reply(send={"sigma": moved(sigma, 1.0)}, examples=500, client=0),
        Reply(send={"psi": moved(psi, 2.0)}, examples=10, client=1),
        Reply(send={"psi": moved(psi, 4.0)}, examples=90, client=2),  # as much as the other, whatever it holds
        Reply(send={"psi": moved(psi, 100.0)}, examples=0, client=3),
    ]
    after = world.method.server_merge(state, replies, world.hub())
    for name, tensor in psi.items():
        torch.testing.assert_close(weights_in(after, "sigma")[name], sigma[name] + 1.0)
        torch.testing.assert_close(weights_in(after, "psi")[name], tensor + 3.0)
    memory = weights_in(after, "memory")
    assert memory["client"].tolist() == [1, 2]  # who sent no psi, or learned nothing, helps nobody
    net = world.hub().model(joined(sigma, moved(psi, 2.0)))
    expected = world.hub().predict(net, tensor_in(state, "noise"))
    torch.testing.assert_close(memory["output"][:1], expected)
    assert torch.equal(tensor_in(after, "noise"), tensor_in(state, "noise"))


def remembered(state: Payload, outputs: Tensor) -> Payload:
    """A state in which clients 0, 1, 2 … were met; each has a psi full of its own number."""
    psi = weights_in(state, "psi")
    rows = stacked(
        [{name: torch.full_like(tensor, float(c)) for name, tensor in psi.items()} for c in range(len(outputs))]
    )
    return {**state, "memory": {"client": torch.arange(len(outputs)), "output": outputs, **rows}}


def test_helpers_come_every_so_many_rounds_and_each_client_gets_its_own() -> None:
    world = World("clients", method__helper_every=3, method__helpers=1)
    outputs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.2, 0.8]])
    state = remembered(world.start(), outputs)
    for round in range(6):
        tasks = world.method.server_send(state, world.hub(round))
        assert all(("helpers" in task.send) == (round in (2, 5)) for task in tasks)
        if round in (2, 5):
            got = {task.client: task.weights("helpers")["fc.weight"].unique().tolist() for task in tasks}
            assert got == {0: [1.0], 1: [0.0], 2: [3.0], 3: [2.0]}
    assert world.method.server_send(world.start(), world.hub(2))[0].send.keys() == {"sigma", "psi"}  # nobody known


def test_a_helper_is_ones_own_sigma_with_anothers_psi() -> None:
    world = World("server")
    state = world.start()
    sigma, psi = weights_in(state, "sigma"), weights_in(state, "psi")
    other = {name: tensor * 0.5 + 0.01 for name, tensor in psi.items()}
    me = world.client()
    model = Decomposed(me.model(sigma), sigma, psi)
    task = Task(0, {"sigma": sigma, "psi": psi, "helpers": stacked([other, psi])})
    advice = world.method._ask(model, task, me)
    assert advice.probs.shape == (2, len(me.shard.unlabeled), 10)
    torch.testing.assert_close(advice.probs[0], me.predict(me.model(joined(sigma, other)), me.shard.unlabeled))
    torch.testing.assert_close(advice.probs[1], me.predict(model, me.shard.unlabeled))


def test_the_loss_of_images_by_its_parts() -> None:
    """Nothing sure: the penalty alone. All sure: KL to the helper, agreed labels on strong views, and the penalty."""
    options = {"consistency": 0.3, "pull": 0.01, "sparsity": 0.02, "helpers": 1}
    world = World("server")
    state = world.start()
    sigma, psi = weights_in(state, "sigma"), weights_in(state, "psi")
    me = world.client()
    model = Decomposed(me.model(sigma), sigma, psi)
    which, images = torch.arange(8), me.shard.unlabeled[:8]
    helper = torch.randn(1, len(me.shard.unlabeled), 10, generator=torch.Generator().manual_seed(0)).softmax(dim=2)

    def loss(threshold: float) -> Tensor:
        method = FedMatch(threshold=threshold, **options)
        return method._image_loss(model, which, advice_of(helper, threshold), me, me.rng("views"))

    penalty = disjoint_penalty(model.sigma, model.psi, 0.01, 0.02)
    torch.testing.assert_close(loss(1.0), penalty)
    logits = model(me.views.plain(images))
    label = agreed_labels(torch.stack([logits.argmax(dim=1), helper[0, :8].argmax(dim=1)]), 10)
    strong = nn.functional.cross_entropy(model(me.views.strong_view(images, me.rng("views"))), label)
    apart = inter_client_consistency(logits, helper[:, :8])
    torch.testing.assert_close(loss(0.0), penalty + 0.3 * (apart + strong))
    told = me.labelling
    assert torch.equal(told.label[-1], label)
    assert told.accepted[0].sum() == 0
    assert told.accepted[-1].sum() == 8


@pytest.mark.parametrize("placement", ["server", "clients"])
@pytest.mark.parametrize("bn", ["average", "static", "batch"])
def test_bn_statistics_go_with_sigma_and_keep_their_types(placement: str, bn: str, tiny: Tiny) -> None:
    run = tiny("fedmatch", placement, net__norm="bn", net__bn=bn)
    assert not any(record["refused"] or record["skipped"] for record in run.records)
    for name, tensor in run.weights.items():
        assert torch.isfinite(tensor.double()).all()
        assert tensor.dtype == (torch.int64 if name.endswith("num_batches_tracked") else torch.float32)
    means = [t for name, t in run.weights.items() if name.endswith("running_mean")]
    assert bool(means) == (bn != "batch")
    assert all(t.abs().sum() > 0 for t in means)


def test_helpers_are_in_the_record_and_in_the_bytes(tiny: Tiny) -> None:
    run = tiny("fedmatch", "clients", rounds=4)
    helped = [record["client_metrics"]["helpers"] for record in run.records]
    assert [set(by_client.values()) for by_client in helped[::2]] == [{0.0}, {0.0}]
    assert max(helped[1].values()) == 2.0
    assert run.records[1]["bytes_down"] > run.records[0]["bytes_down"]
    assert run.records[2]["bytes_down"] == run.records[0]["bytes_down"]


def test_debias_changes_the_outcome_and_helpers_can_be_switched_off(tiny: Tiny) -> None:
    plain = tiny("fedmatch", "clients", name="plain")
    debiased = tiny("fedmatch", "clients", name="debiased", method__debias=True)
    alone = tiny("fedmatch", "clients", name="alone", method__helpers=0)
    assert not same(plain.weights, debiased.weights)
    assert not same(plain.weights, alone.weights)
    assert set(alone.records[-1]["client_metrics"]["helpers"].values()) == {0.0}


def test_the_recipes_name_its_rows() -> None:
    for table in (1, 2, 3):
        for data in ("cifar10", "svhn", "cifar100"):
            for row, debias in (("fedmatch", False), ("fedmatch-feddpl", True)):
                experiment = resolve(load_recipe(f"feddb/table{table}/{data}-{row}"))
                other = resolve(load_recipe(f"feddb/table{table}/{data}-fixmatch"))
                assert build_method(experiment).debias == debias
                assert (experiment.data, experiment.rounds) == (other.data, other.rounds)
                assert (experiment.train.epochs, experiment.train.lr) == (5, 0.03)
                assert experiment.paper.accuracy
    shards = [name for name in known_recipes() if name.startswith("bsemifl/table1") and name.endswith("-fedmatch")]
    assert len(shards) == 9
    for name in shards:
        experiment, other = resolve(load_recipe(name)), resolve(load_recipe(name.replace("fedmatch", "semifl")))
        assert (experiment.data, experiment.net) == (other.data, other.net)
        assert (experiment.train.batch, experiment.train.epochs) == (other.train.batch, other.train.epochs)
        assert 10 < experiment.paper.accuracy < 80
