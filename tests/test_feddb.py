"""FedDB on real shards: the local round, the gradient in pieces, APP-U, the merge and what is recorded."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tacit.config.resolve import build_method, resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, NetPool, RoundInfo
from tacit.core.payload import tensor_in, weights_in
from tacit.data.federation import Federation
from tacit.engine.run import run_experiment
from tacit.methods.feddb import FedDB, cross_entropy_parts, optimizer_step_in_parts, parallel_batches
from tacit.nets.optimizer import sgd
from tacit.pieces.aggregate import server_momentum
from tacit.pieces.debias import average_prediction, debias
from tacit.pieces.label import confident
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, prepare

Tiny = Callable[..., Run]
MOMENT = RoundInfo("main", 0, 10, 0)


class World:
    """One client and the server of a small federation of digits, without an engine around them."""

    def __init__(self, placement: str = "clients", **settings: Any) -> None:
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        common = {
            "method": "feddb",
            "data.placement": placement,
            "data.subset": 300,
            "data.labels": 80,
            "data.clients": 3,
            "data.alpha": 1.0,
            "train.epochs": 1,
            "train.momentum": 0.0,
            "views.weak": "none",
            "backend.name": "local",
        }
        self.plan: Plan = prepare(resolve(common, changes))
        self.federation = Federation(self.plan.dataset, self.plan.split, self.plan.setup.device)
        self.weights = self.server().new_weights()

    def client(self, number: int = 0) -> Client:
        shard = self.federation.client_shard(number)
        return Client(self.plan.setup, shard, MOMENT, number, 0, NetPool(self.plan.setup))

    def server(self) -> Hub:
        return Hub(self.plan.setup, self.federation.server_shard(), MOMENT, NetPool(self.plan.setup))

    def train(self, method: FedDB, number: int = 0, kept: dict | None = None) -> tuple[Reply, Client]:
        me = self.client(number)
        reply = method.client_train(Task(number, {"model": self.weights}), kept or {}, me)
        return dataclasses.replace(reply, client=number), me

    def probs(self, images: Tensor, weights: dict[str, Tensor] | None = None) -> Tensor:
        me = self.client()
        return me.predict(me.model(weights or self.weights), images)

    def learn(self, steps: int = 40) -> "World":
        """A model that knows a little, so that some pseudo-labels are sure and some are not."""
        me = self.client()
        model = me.model(self.weights)
        me.fit_labeled(model, epochs=steps, lr=0.1)
        self.weights = me.weights(model)
        return self


@pytest.fixture(scope="module")
def world() -> World:
    return World().learn()


def moved(reply: Reply, world: World) -> Tensor:
    after = reply.weights("model")
    return torch.cat([(after[name] - tensor).flatten() for name, tensor in world.weights.items()])


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The sizes of the batches that go through the net to be learned from."""
    sizes: list[int] = []
    original = nn.Linear.forward

    def watched(layer: nn.Linear, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            sizes.append(len(x))
        return original(layer, x)

    monkeypatch.setattr(nn.Linear, "forward", watched)
    return sizes


# The local round


def test_pseudo_labels_are_debiased_and_given_once(world: World) -> None:
    method = FedDB(threshold=0.8)
    reply, me = world.train(method)
    raw = world.probs(me.shard.unlabeled)
    expected = confident(debias(raw, average_prediction(raw)), 0.8)
    assert len(me.labelling.label) == 1
    assert torch.equal(me.labelling.label[0], expected.label)
    assert torch.equal(me.labelling.accepted[0], expected.accepted)
    assert 0 < int(expected.accepted.sum()) < len(expected.accepted)
    assert not torch.equal(expected.label, confident(raw, 0.8).label)
    assert reply.examples == len(me.shard.labeled) + int(expected.accepted.sum())
    plain = world.train(dataclasses.replace(method, debias=False))[1].labelling
    assert torch.equal(plain.label[0], confident(raw, 0.8).label)
    assert torch.equal(plain.accepted[0], confident(raw, 0.8).accepted)


def test_the_uploaded_app_u_moves_with_the_model(world: World) -> None:
    """γ = ½, one epoch and no augmentation: the first model twice. A second epoch adds the model after one step.

    The mean is of the predictions as they are, not of the debiased ones.
    """
    method = FedDB(threshold=0.8)
    one, me = world.train(method)
    start = average_prediction(world.probs(me.shard.unlabeled))
    torch.testing.assert_close(tensor_in(one.send, "app_u"), start)
    longer = World(train__epochs=2)
    longer.weights = world.weights
    two, _ = longer.train(method)
    after_one = average_prediction(world.probs(me.shard.unlabeled, weights_in(one.send, "model")))
    torch.testing.assert_close(tensor_in(two.send, "app_u"), (start + after_one) / 2)
    assert not torch.allclose(start, after_one, atol=1e-4)


def test_app_u_over_the_kept_only(world: World) -> None:
    reply, me = world.train(FedDB(threshold=0.8, app_over="kept", app_momentum=0.25, trace=True))
    raw = world.probs(me.shard.unlabeled)
    start = average_prediction(raw)
    expected = 0.25 * start + 0.75 * raw[me.labelling.accepted[0]].mean(dim=0)
    torch.testing.assert_close(reply.tensor("app_u"), expected)
    torch.testing.assert_close(reply.tensor("app_u_before"), start)
    nothing, _ = world.train(FedDB(threshold=1.0, app_over="kept"))
    torch.testing.assert_close(tensor_in(nothing.send, "app_u"), start)


def test_the_unlabelled_loss_is_a_mean_over_all_or_over_the_kept() -> None:
    """Without labels, one plain step: over all N images it is kept/N times as long as over the kept ones."""
    world = World("server", train__weight_decay=0.0)
    world.weights = World().learn().weights
    over_all, me = world.train(FedDB(threshold=0.8))
    over_kept, _ = world.train(FedDB(threshold=0.8, loss_over="kept"))
    share = float(me.labelling.accepted[0].float().mean())
    assert 0.05 < share < 0.95
    torch.testing.assert_close(moved(over_all, world), share * moved(over_kept, world), rtol=1e-3, atol=1e-6)
    half, _ = world.train(FedDB(threshold=0.8, weight=0.5))
    torch.testing.assert_close(moved(half, world), 0.5 * moved(over_all, world), rtol=1e-3, atol=1e-6)


def test_one_step_by_hand() -> None:
    """Weak views of the labelled, strong views of the believed images, plain gradient descent at λ = 2."""
    world = World(views__weak="crop", train__weight_decay=0.0).learn()
    reply, me = world.train(FedDB(threshold=0.8, weight=2.0))
    sure, label = me.labelling.accepted[0], me.labelling.label[0]
    believed, guess, labeled = me.shard.unlabeled[sure], label[sure], me.shard.labeled
    first, second = next(parallel_batches(len(labeled), len(believed), 0, me.rng("order")))
    net = me.model(world.weights)
    weak = me.views.weak_view(labeled.images[first], me.rng("labeled views"))
    strong = me.views.strong_view(believed[second], me.rng("unlabeled views"))
    unlabeled_loss = nn.functional.cross_entropy(net(strong), guess[second], reduction="sum") / len(me.shard.unlabeled)
    (nn.functional.cross_entropy(net(weak), labeled.labels[first]) + 2.0 * unlabeled_loss).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        expected = world.weights[name] - me.train.lr * parameter.grad
        torch.testing.assert_close(reply.weights("model")[name], expected, rtol=1e-4, atol=1e-6)


def test_an_epoch_is_one_step_with_everything(world: World, forwards: list[int]) -> None:
    _, me = world.train(FedDB(threshold=0.8, chunk=0))
    assert forwards == [len(me.shard.labeled), int(me.labelling.accepted[0].sum())]


def test_mini_batches(world: World, forwards: list[int]) -> None:
    """Both sets in batches of 8; the shorter one begins again."""
    _, me = world.train(FedDB(threshold=0.8, batch=8))
    assert max(forwards) <= 9
    longest = max(len(me.shard.labeled), int(me.labelling.accepted[0].sum()))
    assert len(forwards) in (2 * (longest // 8), 2 * (-(-longest // 8)))


def test_nothing_kept_trains_on_labels_alone(world: World, forwards: list[int]) -> None:
    """As published all labels at once; as released in batches (of 16 here, because there are few)."""
    never = FedDB(threshold=1.0)
    reply, me = world.train(never)
    assert forwards == [len(me.shard.labeled)]
    assert reply.examples == len(me.shard.labeled)
    forwards.clear()
    world.train(dataclasses.replace(never, batch_without_kept=16))
    assert sum(forwards) == len(me.shard.labeled)
    assert len(forwards) > 1


# The gradient in pieces


def test_chunks_give_the_same_round(world: World, forwards: list[int]) -> None:
    """With augmentation, too: views are drawn image by image."""
    bright = World(views__weak="crop", train__epochs=3, train__momentum=0.9, train__clip=1.0)
    bright.weights = world.weights
    method = FedDB(threshold=0.8, chunk=0)
    whole, _ = bright.train(method)
    steps = len(forwards)
    pieces, _ = bright.train(dataclasses.replace(method, chunk=7))
    assert max(forwards[steps:]) == 7
    torch.testing.assert_close(moved(pieces, bright), moved(whole, bright), rtol=1e-3, atol=2e-5)
    assert float(moved(whole, bright).abs().max()) > 0.01


def test_with_batch_norm_a_step_is_never_cut(forwards: list[int]) -> None:
    world = World(net__norm="bn", net__bn="batch")
    whole, me = world.train(FedDB(threshold=0.2, chunk=0))
    sizes = [len(me.shard.labeled), int(me.labelling.accepted[0].sum())]
    assert forwards == sizes
    pieces, _ = world.train(FedDB(threshold=0.2, chunk=7))
    assert forwards == sizes * 2
    assert torch.equal(moved(pieces, world), moved(whole, world))


@pytest.mark.parametrize("chunk", [1, 3, 10, 11])
def test_the_gradient_of_parts_is_the_gradient_of_the_whole(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(10, 1, 4, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (10,), generator=generator)
    nets = [nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    expected = 0.7 * nn.functional.cross_entropy(nets[0](images), labels).item()
    losses = []
    for net, size in zip(nets, (0, chunk), strict=True):
        terms = cross_entropy_parts(net, images, labels, lambda part: part, size, scale=0.7)
        losses.append(optimizer_step_in_parts(net, sgd(net, 0.5), terms, clip=0.1))
    assert losses == pytest.approx([expected, expected])
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_parallel_batches_cover_both_sets() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = list(parallel_batches(5, 23, 8, generator))
    assert sorted(torch.cat([second for _, second in pairs]).tolist()) == list(range(23))
    assert all(sorted(first.tolist()) == list(range(5)) for first, _ in pairs)


# Parties without labels, without unlabelled images, with memory


def test_a_party_with_labels_only_measures_app_u_on_them() -> None:
    world = World("some-clients", data__labeled_clients=1).learn()
    for over in ("all", "kept"):
        reply, me = world.train(FedDB(app_over=over))
        assert not len(me.shard.unlabeled)
        expected = average_prediction(world.probs(me.shard.labeled.images))
        torch.testing.assert_close(reply.tensor("app_u"), expected)
        assert reply.examples == len(me.shard.labeled)


def test_a_party_that_learned_nothing_does_not_count() -> None:
    """No labels and nothing sure: the model goes back as it came, with weight 0, and the mean is of the others."""
    world = World("server")
    empty, _ = world.train(FedDB(threshold=1.0))
    assert empty.examples == 0
    assert float(moved(empty, world).abs().max()) == 0
    assert float(tensor_in(empty.send, "app_u").sum()) == pytest.approx(1, abs=1e-5)
    other = dataclasses.replace(
        empty, examples=5, send={**empty.send, "model": {n: t + 1 for n, t in world.weights.items()}}
    )
    clients_only = World("clients").server()
    after = FedDB().server_merge({"model": world.weights}, [empty, other], clients_only)
    assert torch.equal(weights_in(after, "model")["fc.bias"], world.weights["fc.bias"] + 1)
    assert clients_only.notes["client_weights"] == [0.0, 1.0]
    nobody = FedDB(server_momentum=0.5).server_merge({"model": world.weights}, [empty], World("clients").server())
    assert torch.equal(weights_in(nobody, "model")["fc.bias"], world.weights["fc.bias"])


def test_momentum_stays_with_the_client(world: World) -> None:
    fast = World(train__momentum=0.9)
    fast.weights = world.weights
    forgetful, _ = fast.train(FedDB(threshold=0.8))
    assert forgetful.keep == {}
    first, _ = fast.train(FedDB(threshold=0.8, keep_momentum=True))
    assert set(weights_in(first.keep, "momentum")) == {
        name for name, _ in fast.client().model(fast.weights).named_parameters()
    }
    second, _ = fast.train(FedDB(threshold=0.8, keep_momentum=True), kept=first.keep)
    assert torch.equal(moved(first, fast), moved(forgetful, fast))
    # The same gradient again: with the old one at .9 on top the step is 1.9 times as long.
    torch.testing.assert_close(moved(second, fast), 1.9 * moved(first, fast), rtol=1e-3, atol=1e-6)


# The server


def replies_of(world: World, app_us: list[list[float]]) -> list[Reply]:
    padded = [torch.tensor(app_u + [0.0] * (10 - len(app_u))) for app_u in app_us]
    return [
        Reply(send={"model": {n: t + i for n, t in world.weights.items()}, "app_u": app_u}, examples=1, client=i)
        for i, app_u in enumerate(padded)
    ]


def test_the_merge_weighs_by_balance(world: World) -> None:
    """Two clients say class 0, one class 1: exact weights are ¼, ¼, ½, so the mean is shifted by ¼·1 + ½·2."""
    replies = replies_of(world, [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    hub = world.server()
    after = weights_in(FedDB(dma="exact").server_merge({"model": world.weights}, replies, hub), "model")
    torch.testing.assert_close(after["fc.bias"], world.weights["fc.bias"] + 1.25, rtol=0, atol=1e-4)
    assert hub.notes["client_weights"] == pytest.approx([0.25, 0.25, 0.5], abs=1e-4)
    assert hub.notes["imbalance"] < hub.notes["imbalance_if_equal"]
    assert torch.tensor(hub.notes["app_u"]).shape == (3, 10)
    equal = world.server()
    after = weights_in(FedDB(dma="none").server_merge({"model": world.weights}, replies, equal), "model")
    torch.testing.assert_close(after["fc.bias"], world.weights["fc.bias"] + 1.0)
    assert equal.notes["imbalance"] == equal.notes["imbalance_if_equal"]


def test_server_momentum_is_remembered_in_the_state(world: World) -> None:
    """Each merge pulls by 1: the first step is 1, the second 1 from there plus half of the first."""
    method, hub = FedDB(dma="none", server_momentum=0.5), world.server()
    first = method.server_merge({"model": world.weights}, replies_of(world, [[1.0]] * 3), hub)
    base = weights_in(first, "model")
    torch.testing.assert_close(base["fc.bias"], world.weights["fc.bias"] + 1.0)
    ahead = World()
    ahead.weights = base
    second = method.server_merge(first, replies_of(ahead, [[1.0]] * 3), hub)
    torch.testing.assert_close(weights_in(second, "model")["fc.bias"], world.weights["fc.bias"] + 2.5)


def test_momentum_leaves_running_statistics_alone() -> None:
    """A variance that falls fast would otherwise overshoot below 0."""
    old = {"bn.running_var": torch.tensor([1.0]), "bn.num_batches_tracked": torch.tensor(3)}
    velocity: dict[str, Tensor] = {}
    for variance in (0.2, 0.1, 0.1):
        mean = {"bn.running_var": torch.tensor([variance]), "bn.num_batches_tracked": torch.tensor(4)}
        old, velocity = server_momentum(old, mean, velocity, 0.5)
        assert torch.equal(old["bn.running_var"], mean["bn.running_var"])


# Runs


def test_the_record_holds_what_the_figures_need(tiny: Tiny) -> None:
    """Figs. 1 and 3: class-wise accuracy, APP-Us by client; Figs. 6 and 7: right and kept pseudo-labels."""
    run = tiny("feddb", "clients", method__trace=True, method__dma="exact", method__batch=0, train__lr=0.3)
    for record in run.records:
        assert {"per_class", "app_u", "app_u_before", "client_weights", "imbalance", "accepted_ratio"} <= set(record)
        assert "pseudo_accuracy" in record
        for name in ("app_u", "app_u_before"):
            table = torch.tensor(record[name])
            assert table.shape == (len(record["answered"]), 10)
            torch.testing.assert_close(table.sum(dim=1), torch.ones(len(table)))
        assert sum(record["client_weights"]) == pytest.approx(1)
        assert record["imbalance"] <= record["imbalance_if_equal"] + 1e-9


def test_the_released_preset_runs(tmp_path: Path) -> None:
    """A hundred clients of which ten are active, batch norm by batch statistics, momentum everywhere."""
    settings = {
        "method": {"name": "feddb", "preset": "released", "threshold": 0.5},
        "rounds": 2,
        "data": {"name": "digits", "placement": "clients", "clients": 100, "min_size": 1, "labels": 400, "alpha": 0.3},
        "participation.fraction": 0.1,
        "backend.name": "local",
    }
    experiment = resolve(settings, {"data.test_subset": 100})
    assert (experiment.net.bn, experiment.train.nesterov, experiment.train.schedule) == ("batch", True, "cosine")
    run = run_experiment(experiment, tmp_path / "run")
    for record in run.records:
        assert len(record["answered"]) == 10
        assert not record["refused"]
        assert max(record["client_weights"]) < 0.15
    assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())


@pytest.mark.parametrize("bn", ["average", "static"])
def test_other_batch_norm_policies(tiny: Tiny, bn: str) -> None:
    run = tiny("feddb", "clients", net__norm="bn", net__bn=bn, rounds=3, method__server_momentum=0.5)
    for name, tensor in run.weights.items():
        assert torch.isfinite(tensor).all()
        if name.endswith("running_var"):
            assert (tensor >= 0).all()


def test_the_recipes_name_every_row_of_table_4() -> None:
    """Nothing, DPL, DPL and DMA: three settings of one method, for three data sets and three ways to split."""
    from tacit.config.recipes import known_recipes, load_recipe

    rows = {"fixmatch": (False, "none"), "fixmatch-feddpl": (True, "none"), "feddb": (True, "paper")}
    for table in (1, 2, 3):
        for data in ("cifar10", "svhn", "cifar100"):
            for row, expected in rows.items():
                name = f"feddb/table{table}/{data}-{row}"
                assert name in known_recipes()
                experiment = resolve(load_recipe(name))
                method = build_method(experiment)
                assert (method.debias, method.dma) == expected
                assert experiment.paper.accuracy
                assert experiment.data.name == data
                assert experiment.participation.count(experiment.data.clients) == 10
                assert experiment.train.epochs == 5
                released = resolve(load_recipe(name), {"method.preset": "released"})
                assert (released.net.bn, released.train.clip) == ("batch", 1.0)
