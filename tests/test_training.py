"""The training recipe as settings: schedules by step, FedProx, smoothing, the server's optimiser, averaged answers."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import runs
from runs import TINY, digest, timeless
from tacit.config.resolve import resolve
from tacit.contract.method import Reply
from tacit.contract.parties import Hub, NetPool, RoundInfo
from tacit.core.errors import TacitError
from tacit.core.payload import weights_in
from tacit.core.settings import Experiment, Server
from tacit.engine.run import run_experiment
from tacit.nets import build
from tacit.nets.optimizer import live_taps_only, optimizer_step, sgd
from tacit.pieces.aggregate import weighted_mean
from tacit.pieces.schedule import Schedule
from tacit.pieces.train import batch_count, batches, fit
from tacit.runs.folder import Run
from tacit.runs.plan import stages_of
from tacit.testing.trial import Interruptions, Stopped

Tiny = Callable[..., Run]
RECIPE: dict[str, Any] = {
    "train.schedule": "linear",
    "train.schedule_by": "step",
    "train.warmup": 0.25,
    "train.end": 0.02,
    "train.nesterov": True,
    "train.label_smoothing": 0.1,
    "train.proximal": 0.01,
    "server.name": "adam",
    "server.lr": 0.03,
    "server.answer": "ema",
}


def recipe_run(method: str, placement: str, **settings: Any) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    layers = {"method.name": method, "method.preset": "smoke", "data.placement": placement}
    return resolve(layers, TINY, RECIPE, changes)


# --- The schedule ----------------------------------------------------------------------------------------------------


def test_as_many_batches_as_are_counted() -> None:
    for count in range(12):
        for size in range(6):
            assert len(list(batches(count, size, torch.Generator()))) == batch_count(count, size), (count, size)


def test_a_round_has_a_rate_for_each_step() -> None:
    """Client 0 in round 1 of 4: a quarter of the stage is over, and the last step is one step before the half."""
    by_step = {"train__schedule": "linear", "train__schedule_by": "step", "train__end": 0.2, "train__batch": 8}
    world = runs.world_of("fedavg", "clients", **by_step)
    me = runs.client(world)
    model = me.model(runs.hub(world).new_weights())
    optimizer = me.optimizer(model)
    me.fit_labeled(model, epochs=3, optimizer=optimizer)
    steps = 3 * batch_count(len(me.shard.labeled), me.train.batch)
    schedule = Schedule("linear", end=0.2)
    assert optimizer.rates == pytest.approx([schedule.rate(0.1, (1 + k / steps) / 4) for k in range(steps)])
    assert len(set(optimizer.rates)) == steps > 3
    rate = me.scheduled(0.5)  # a method's own rate changes alike
    own = me.optimizer(model, rate, steps=2)
    for _ in range(3):
        optimizer_step(model, own, model(me.views.plain(me.shard.labeled.images[:4])).sum())
    assert own.rates == pytest.approx([0.5 * 0.8, 0.5 * 0.7, 0.5 * 0.7]), "a step too many is at the last rate"
    unknown = me.optimizer(model)
    optimizer_step(model, unknown, model(me.views.plain(me.shard.labeled.images[:4])).sum())
    assert unknown.rates == [me.learning_rate], "who knows no number of steps has the round's rate"


@pytest.mark.parametrize("method", ["fixmatch", "semifl", "rscfed", "fedirm", "ddrfed", "feddb", "fedmatch", "pdcfed"])
def test_loops_of_methods_take_as_many_steps_as_they_expect(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    world = runs.world_of(method, "clients", train__schedule="cosine", train__schedule_by="step", train__epochs=2)
    me, main = runs.client(world), world[0].stages[-1].method
    make = me.optimizer
    monkeypatch.setattr(me, "optimizer", lambda *a, **k: made.append(make(*a, **k)) or made[-1])
    state = main.server_start(runs.hub(world), {})
    main.client_train(main.server_send(state, runs.hub(world))[0], {}, me)
    (optimizer,) = made
    assert optimizer.steps == optimizer.expected > 1
    assert optimizer.rates == sorted(optimizer.rates, reverse=True)
    assert len(set(optimizer.rates)) == optimizer.steps


def test_dead_taps_decay_by_rates_that_change() -> None:
    """An epoch of ResNet-18 without them, and one with them: the same weights."""
    x, labels = torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(1)).double(), torch.arange(8) % 3
    ends = []
    for nesterov in (False, True):
        for spared in (True, False):
            net = build(
                "resnet18-4", classes=3, channels=1, size=28, norm="gn", generator=torch.Generator().manual_seed(0)
            ).arrange(torch.device("cpu"), 28)
            net = net.double().train()
            optimizer = sgd(net, lr=0.1, momentum=0.9, weight_decay=0.05, nesterov=nesterov)
            optimizer.pace = lambda done, width: 0.1 * (1 - done)
            optimizer.expect(5)

            def learn(net=net, optimizer=optimizer) -> None:
                for _ in range(5):
                    optimizer_step(net, optimizer, F.cross_entropy(net(x), labels))

            if spared:
                with live_taps_only(net, optimizer):
                    learn()
            else:
                learn()
            ends.append({name: value.clone() for name, value in net.state_dict().items()})
    for one, other in (ends[:2], ends[2:]):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-7, atol=1e-9)


# --- FedProx and label smoothing -------------------------------------------------------------------------------------


def test_clients_stay_near_and_the_server_does_not() -> None:
    """The term is that of the loss: training with μ/2 ‖w − w₀‖² by hand ends in the same weights."""
    world = runs.world_of("fedavg", "clients", train__proximal=0.5, train__clip=0.0)
    me, start = runs.client(world), runs.hub(world).new_weights()
    model = me.model(start)
    me.fit_labeled(model, epochs=2)
    ours = {name: tensor.clone() for name, tensor in me.weights(model).items()}

    other = me.model(start)
    anchors = [p.detach().clone() for p in other.parameters()]
    optimizer = sgd(other, me.train.lr, me.train.momentum, me.train.weight_decay)
    labeled = me.shard.labeled

    class Near:
        def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            apart = sum((p - a).square().sum() for p, a in zip(other.parameters(), anchors, strict=True))
            return F.cross_entropy(logits, labels) + 0.25 * apart

    settings = {"epochs": 2, "batch": me.train.batch, "clip": 0.0, "generator": me.rng("labeled views")}
    fit(
        other,
        labeled.images,
        labeled.labels,
        view=me.views.weak_view,
        optimizer=optimizer,
        label_loss=Near(),  # type: ignore[arg-type]
        **settings,
    )
    for name, tensor in me.weights(other).items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-6)
    assert runs.hub(world).optimizer(other).moved_by_loss_alone
    assert not me.optimizer(other).moved_by_loss_alone


def test_labels_are_smoothed_where_a_party_holds_some() -> None:
    world = runs.world_of("fedavg", "some-clients", train__label_smoothing=0.1)
    logits, labels = torch.randn(4, 10, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3])
    loss = runs.client(world).label_loss(logits, labels)
    assert loss == F.cross_entropy(logits, labels, label_smoothing=0.1)
    own = runs.client(world).label_loss(logits, labels, label_smoothing=0.3)
    assert own == F.cross_entropy(logits, labels, label_smoothing=0.3), "a method's own comes first"


# --- The server's optimiser ------------------------------------------------------------------------------------------


def hub_with(server: Server, **memory: Any) -> Hub:
    plan, federation = runs.world_of("fedavg", "clients")
    setup = dataclasses.replace(plan.setup, server=server)
    return Hub(setup, federation.server_shard(), RoundInfo("main", 0, 4, 0), NetPool(setup), memory)


def one(value: float, examples: float = 1) -> Reply:
    model = {"w": torch.tensor([value]), "bn.running_var": torch.tensor([value]), "n": torch.tensor(int(value))}
    return Reply(send={"model": model}, examples=examples)


def test_two_rounds_of_adam_by_hand() -> None:
    """β₁ = ½, β₂ = ¾, τ = 1, η = 1; Δ = 4 and then 2. Statistics and counters are the mean's."""
    server = Server(name="adam", lr=1.0, momentum=0.5, beta2=0.75, tau=1.0)
    hub = hub_with(server)
    old = {"w": torch.tensor([0.0]), "bn.running_var": torch.tensor([9.0]), "n": torch.tensor(0)}
    new = hub.mean_model(old, [one(2, 1), one(6, 1)])
    first = 2.0 / (4.75**0.5 + 1.0)  # m = ½ · 4; v = ¾ · 1 + ¼ · 16
    assert new["w"].item() == pytest.approx(first)
    assert new["bn.running_var"].item() == 4.0
    assert new["n"].item() == 4
    hub = hub_with(server, **hub.next_memory)
    again = {**new, "w": torch.tensor([0.0])}
    both = [hub.mean_model(again, [one(2)])["w"].item() for _ in range(2)]
    assert both == pytest.approx([2.0 / (4.5625**0.5 + 1.0)] * 2), "m = ½ · 2 + ½ · 2; v = ¾ · 4.75 + ¼ · 4; once"


@pytest.mark.parametrize("server", ["momentum", "yogi"])
@pytest.mark.parametrize("method", ["fedavg", "fedrgd", "rscfed", "fedmatch"])
def test_it_reaches_every_kind_of_merge(method: str, server: str, tiny: Tiny) -> None:
    """The first step of momentum is the mean itself; the second is not."""
    runs_of = {
        n: tiny(method, "some-clients", name=n, server__name=n, data__labeled_clients=2) for n in ("mean", server)
    }
    plain, moved = (run.state() for run in runs_of.values())
    names = {name for name in moved if name.startswith("tacit:")}
    part = "sigma" if method == "fedmatch" else "model"
    assert f"tacit:optimizer:velocity:{part}" in names
    assert digest(runs_of["mean"]) != digest(runs_of[server])
    assert not any(name.startswith("tacit:") for name in plain)


def test_one_party_that_trains_alone_is_not_carried_further(tiny: Tiny) -> None:
    """A server's momentum on top of its own; with two labelled parties it is used."""
    settings = {"rounds": 3, "data__labeled_clients": 1}
    mean, moved = (tiny("fedavg", "some-clients", name=n, server__name=n, **settings) for n in ("mean", "momentum"))
    assert digest(mean) == digest(moved)
    assert moved.rounds()[-1]["server"].startswith("one party trains alone")
    settings["data__labeled_clients"] = 2
    mean, moved = (
        tiny("fedavg", "some-clients", name=f"{n}2", server__name=n, **settings) for n in ("mean", "momentum")
    )
    assert digest(mean) != digest(moved)


@pytest.mark.parametrize("method", ["fixmatch", "cbafed", "fedirm", "ddrfed", "provenance"])
@pytest.mark.parametrize("placement", ["some-clients", "server"])
def test_nor_is_it_in_the_warm_up_of_any_method(method: str, placement: str, tiny: Tiny) -> None:
    """Whoever warms up, in a stage of its own making or FedAvg's: else methods begin with different models."""
    options = {"method__gdgm": False} if method == "ddrfed" else {}
    own = {"data__labeled_clients": 1, "server__name": "momentum", "method__warmup": 2, **options}
    run = tiny(method, placement, rounds=1, **own)
    warm_up = [record for record in run.rounds() if record["stage"] == "warm-up"]
    assert len(warm_up) == 2
    assert all(record["server"].startswith("one party trains alone") for record in warm_up)


def test_a_methods_own_server_momentum_stands_alone() -> None:
    with pytest.raises(TacitError, match=r"method\.server_momentum = 0\.5 and server\.name = 'adam' are two ways"):
        resolve({"method": "semifl", "server": "adam"})
    assert resolve({"method": "semifl", "server": "adam", "method.server_momentum": 0}).server.name == "adam"


OWN = '''"""A method that makes its mean by itself."""

from dataclasses import dataclass
from typing import ClassVar

from tacit import mean_model
from tacit.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Own(FedAvg):
    """FedAvg, the old way."""

    citation: ClassVar[str] = "nobody"

    def server_merge(self, state, replies, hub):
        return {"model": mean_model(replies)}
'''


def test_a_method_that_makes_its_mean_by_itself_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "own.py").write_text(OWN)
    chosen = {"method.name": str(tmp_path / "own.py"), "method.preset": "smoke", "data.placement": "clients"}
    for server, told in (("mean", 0), ("adam", 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="tacit"):
            run_experiment(resolve(chosen, TINY, {"server.name": server}), tmp_path / server)
        assert sum("without hub.mean_model" in line for line in caplog.messages) == told


def test_a_reply_that_is_left_out_leaves_no_trace_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge fails with one reply and is made again without it: the optimiser remembers the second one alone."""
    from tacit.methods.fedavg import FedAvg

    merge, tries = FedAvg.server_merge, list[int]()

    def failing(method: FedAvg, state: Any, replies: Any, hub: Hub) -> Any:
        merged = merge(method, state, replies, hub)
        tries.append(len(replies))
        if hub.round == 0 and any(reply.client == 0 for reply in replies):
            raise ArithmeticError("client 0")
        return merged

    experiment = recipe_run("fedavg", "clients", rounds=1)
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "server_merge", failing)
        run = run_experiment(experiment, tmp_path / "failing")
    assert tries == [4, 3]
    assert [line["client"] for line in run.records[0]["refused"]] == [0]
    velocity = weights_in(run.state(), "tacit:optimizer:velocity:model")
    start = runs.hub(runs.world_of("fedavg", "clients")).new_weights()
    model = weights_in(run.state(), "model")
    square = weights_in(run.state(), "tacit:optimizer:square:model")
    for name, tensor in start.items():
        stepped = tensor + 0.03 * velocity[name] / (square[name].sqrt() + 1e-3)
        torch.testing.assert_close(model[name], stepped)
        delta = velocity[name] / 0.1  # m = (1 − β₁) Δ: one step, from nothing
        torch.testing.assert_close(square[name], 0.99 * 1e-6 + 0.01 * delta.square())


# --- The answer ------------------------------------------------------------------------------------------------------


def test_the_mean_of_the_last_rounds_is_shipped_and_training_goes_on_as_before(tiny: Tiny) -> None:
    last = [tiny("fedavg", "clients", name=f"last{n}", rounds=n) for n in (2, 3)]
    mean = tiny("fedavg", "clients", name="mean", rounds=3, server__answer="mean", server__answer_rounds=2)
    models = [weights_in(run.state(), "model") for run in last]
    for name, tensor in weights_in(mean.state(), "model").items():
        assert torch.equal(tensor, models[1][name]), "the rounds themselves are the same"
    expected = weighted_mean(models, [0.5, 0.5])
    shipped = mean.weights
    assert all(torch.equal(shipped[name], tensor) for name, tensor in expected.items())
    assert mean.records[0]["accuracy"] == last[1].records[0]["accuracy"]
    assert mean.records[-1]["loss"] != last[1].records[-1]["loss"]


# --- All of it together ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "placement"), [("fedavg", "clients"), ("fedmatch", "server")])
def test_stopped_and_resumed_or_in_two_processes_it_ends_the_same(method: str, placement: str, tmp_path: Path) -> None:
    experiment = recipe_run(method, placement, rounds=3)
    whole = run_experiment(experiment, tmp_path / "whole")
    stops, folder = Interruptions(stages_of(experiment)), tmp_path / "stopped"
    resumed = None
    while resumed is None:
        try:
            resumed = run_experiment(experiment, folder, resume=folder.exists(), watcher=stops)
        except Stopped:
            continue
    assert len(stops.happened) >= 5
    two = {"backend.name": "pool", "backend.workers": 2}
    pooled = run_experiment(resolve(experiment.to_dict(), two), tmp_path / "pool")
    assert digest(whole) == digest(resumed) == digest(pooled)
    assert timeless(whole) == timeless(resumed) == timeless(pooled)
    assert {"tacit:answer", "tacit:answers"} < set(whole.state())
