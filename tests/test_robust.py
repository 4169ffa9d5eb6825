"""[robust] and attackers: bounds, robust means beside Flower's own, who is refused, the same on every backend."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_sites import Here, at_sites, simulated

from runs import TINY, digest, hub, timeless, world_of
from tacit.backends.attack import attacked, attackers
from tacit.backends.base import Outcome, Worker
from tacit.config.resolve import resolve
from tacit.contract.method import Method, Reply, Task
from tacit.contract.parties import Hub, RoundInfo
from tacit.core.errors import TacitError
from tacit.core.payload import Weights
from tacit.core.safeguards import Robust
from tacit.core.settings import Experiment
from tacit.engine.bounds import bounded
from tacit.engine.loop import Engine
from tacit.engine.run import run_experiment
from tacit.methods import find_method, known_methods
from tacit.methods.cbafed import CBAFed
from tacit.pieces.robust import coordinate_median, multi_krum, robust_mean, trimmed_mean
from tacit.runs.memory import ClientMemory
from tacit.runs.plan import prepare, stages_of
from tacit.runs.watchers import NullWatcher
from tacit.sites.server import run_at_sites
from tacit.testing.trial import Interruptions


def tiny_of(method: str, placement: str, **more: object) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in more.items()}
    return resolve({"method.name": method, "method.preset": "smoke", "data.placement": placement}, TINY, changes)


def some_models(count: int) -> list[Weights]:
    chance = torch.Generator().manual_seed(7)
    return [
        {"w": torch.randn(4, 5, generator=chance), "b": torch.randn(6, generator=chance) * (1 + 5 * (k == 2))}
        for k in range(count)
    ]


# --- Means, beside Flower's ------------------------------------------------------------------------------------------


def flowers(models: list[Weights]) -> list[tuple[list[np.ndarray], int]]:
    return [([model["w"].numpy(), model["b"].numpy()], 10) for model in models]


@pytest.mark.parametrize("count", [7, 10])
def test_means_are_those_of_flower(count: int) -> None:
    aggregate = pytest.importorskip("flwr.server.strategy.aggregate")
    models = some_models(count)
    theirs = [
        (aggregate.aggregate_median(flowers(models)), coordinate_median(models)),
        (aggregate.aggregate_trimmed_avg(flowers(models), 0.2), trimmed_mean(models, 0.2)),
        (
            aggregate.aggregate_krum(flowers(models), 2, count - 2),
            robust_mean("multi-krum", models, [1 / count] * count, byzantine=2)[0],
        ),
    ]
    for (w, b), ours in theirs:
        np.testing.assert_allclose(ours["w"].numpy(), w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(ours["b"].numpy(), b, rtol=1e-5, atol=1e-6)
    best = aggregate.aggregate_krum(flowers(models), 2, 0)  # Krum itself: the one with the lowest score
    assert any(np.array_equal(models[k]["w"].numpy(), best[0]) for k in multi_krum(models, 2))


def test_a_model_without_weight_and_whole_numbers() -> None:
    models = [{"n": torch.tensor(k), "w": torch.tensor([float(k)])} for k in (0, 1, 5, 1000)]
    mean, counted, _ = robust_mean("median", models, [0.3, 0.3, 0.4, 0.0])
    assert counted == [0, 1, 2]
    assert (int(mean["n"]), mean["n"].dtype, float(mean["w"])) == (1, torch.int64, 1.0)


def test_what_the_server_trained_keeps_its_weight() -> None:
    one = hub(world_of("fedavg", "clients", robust__mean="median"))
    old = {"w": torch.zeros(1)}
    replies = [
        Reply(send={"model": {"w": torch.tensor([float(w)])}}, examples=1, client=k)
        for k, w in enumerate((1, 2, 900.0))
    ]
    assert float(one.mean_model(old, replies)["w"]) == 2.0
    own = Reply(send={"model": {"w": torch.tensor([10.0])}}, examples=1)
    assert float(one.mean_model(old, [*replies, own])["w"]) == 0.75 * 2.0 + 0.25 * 10.0
    assert float(one.mean_model(old, [own])["w"]) == 10.0


def test_multi_krum_tells_whom_it_chose_and_what_it_does_with_few() -> None:
    one = hub(world_of("fedavg", "clients", robust__mean="multi-krum", robust__byzantine=1, data__clients=5))
    replies = [
        Reply(send={"model": {"w": torch.tensor([float(w)])}}, examples=1, client=k)
        for k, w in enumerate((1, 2, 900.0, 3, 4))
    ]
    assert float(one.mean_model({"w": torch.zeros(1)}, replies)["w"]) == 2.5
    assert one.notes["chosen"] == [0, 1, 3, 4]
    assert float(one.mean_model({"w": torch.zeros(1)}, replies[:3])["w"]) == 2.0
    assert one.notes["robust"] == "multi-krum needs 5 replies, there were 3: their median was taken"


# --- Bounds ----------------------------------------------------------------------------------------------------------


def reply_of(client: int, far: float, examples: float = 10, **more: Any) -> Outcome:
    model = {"w": torch.tensor([3.0 * far, 4.0 * far]), "bn.running_mean": torch.tensor([9.0])}
    return Outcome(Reply(send={"model": model, **more}, examples=examples, client=client), None, 0.0)


STATE: dict[str, Any] = {"model": {"w": torch.zeros(2), "bn.running_mean": torch.zeros(1)}}
TASKS = [Task(k, STATE) for k in range(4)]


@pytest.mark.parametrize("rule", ["clip", "refuse"])
def test_an_update_that_is_too_long(rule: str) -> None:
    found = bounded(Robust(max_norm=10.0, out_of_bounds=rule), Method(), STATE, TASKS, [reply_of(0, 1), reply_of(3, 4)])
    named = found.refused if rule == "refuse" else found.record["clipped"]
    assert named == [{"client": 3, "why": "its update has the norm 20, at most 10 is taken as it is"}]
    assert found.record["update_norms"] == [5.0, 20.0]
    assert found.record["norm_limit"] == 10.0
    assert torch.equal(found.used[0].reply.weights("model")["w"], torch.tensor([3.0, 4.0]))
    if rule == "clip":
        cut = found.used[1].reply.weights("model")
        assert torch.equal(cut["w"], torch.tensor([6.0, 8.0]))
        assert float(cut["bn.running_mean"]) == 9.0  # not learned: not a part of the norm
    assert len(found.used) == (2 if rule == "clip" else 1)


@pytest.mark.parametrize("rule", ["clip", "refuse"])
def test_too_many_examples_and_counts(rule: str) -> None:
    settings = Robust(max_examples=100, out_of_bounds=rule)
    counts = torch.tensor([300.0, 100.0])
    found = bounded(settings, CBAFed(), STATE, TASKS, [reply_of(0, 1, 400, counts=counts), reply_of(1, 1, 50)])
    why = (
        "its number of examples is 400, at most 100 count (robust.max_examples); its 'counts' counts 400 images, at "
        "most 100 count (robust.max_examples)"
    )
    assert (found.refused if rule == "refuse" else found.record["clipped"]) == [{"client": 0, "why": why}]
    if rule == "clip":
        assert found.used[0].reply.examples == 100
        assert torch.equal(found.used[0].reply.tensor("counts"), torch.tensor([75.0, 25.0]))
    assert found.used[-1].reply.examples == 50


BOUNDS = {"robust__norm_quantile": 0.5, "robust__norm_rounds": 2, "robust__norm_factor": 0.9, "rounds": 4}


def test_recent_norms_bound_the_next_ones_and_a_resumed_run_remembers_them(tmp_path: Path) -> None:
    experiment = tiny_of("fixmatch", "clients", **BOUNDS)
    whole = run_experiment(experiment, tmp_path / "whole")
    main = [record for record in whole.records if record["stage"] == "main"]
    norms = [record["update_norms"] for record in main]
    for number in range(1, 4):
        recent = [norm for each in norms[max(0, number - 2) : number] for norm in each]
        assert main[number]["norm_limit"] == pytest.approx(0.9 * float(np.quantile(recent, 0.5)), rel=1e-5)
    assert all(record["clipped"] for record in main[1:2])
    interruptions, resumed = Interruptions(stages_of(experiment)), None
    while resumed is None:
        try:
            resumed = run_experiment(experiment, tmp_path / "run", resume=True, watcher=interruptions)
        except KeyboardInterrupt:
            continue
    assert len(interruptions.happened) > 2
    assert digest(resumed) == digest(whole)
    assert timeless(resumed) == timeless(whole)


def test_bounds_and_means_are_the_same_on_all_backends_and_at_sites(tmp_path: Path) -> None:
    settings = {"robust.mean": "median", "robust.max_norm": 0.5, "robust.max_examples": 20}
    experiment = simulated("cbafed", "some-clients", **settings)
    local = run_experiment(experiment, tmp_path / "local")
    assert any(record["clipped"] for record in local.records)
    assert digest(local) != digest(run_experiment(simulated("cbafed", "some-clients"), tmp_path / "plain"))
    pool = run_experiment(
        resolve(experiment.to_dict(), {"backend.name": "pool", "backend.workers": 2}), tmp_path / "pool"
    )
    assert (digest(pool), timeless(pool)) == (digest(local), timeless(local))
    job, sites = at_sites(experiment, tmp_path)
    at_home = run_at_sites(job, Here(sites), NullWatcher())
    assert digest(at_home) == digest(local)
    assert [r["clipped"] for r in at_home.records] == [r["clipped"] for r in local.records]


# --- Attackers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attack", "scale", "factor"), [("sign-flip", 1.0, -1.0), ("sign-flip", 3.0, -3.0), ("scale", 10.0, 10.0)]
)
def test_an_attacker_sends_another_update(attack: str, scale: float, factor: float) -> None:
    more = {"faults__attackers": 1, "faults__attack": attack, "faults__attack_scale": scale}
    setup = world_of("fedavg", "clients", **more)[0].setup
    (bad,) = attackers(setup)
    base, sent = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([2.0, 4.0])}
    reply = Reply(send={"model": sent, "share": 0.5}, examples=3)
    changed = attacked(reply, Task(bad, {"model": base}), setup)
    assert torch.equal(changed.weights("model")["w"], torch.tensor([1.0 + factor, 2.0 + 2 * factor]))
    assert (changed.send["share"], changed.examples) == (0.5, 3)
    assert attacked(reply, Task(1 - bad if bad < 2 else 0, {"model": base}), setup) is reply


def test_a_label_flipper_learns_all_its_images_wrongly(tmp_path: Path) -> None:
    plan, federation = world_of("fixmatch", "clients", faults__attackers=1, faults__attack="label-flip")
    (bad,) = attackers(plan.setup)
    seen: list[Any] = []

    @dataclasses.dataclass(frozen=True)
    class Looking(Method):
        def client_train(self, task: Task, memory: Any, me: Any) -> Reply:
            seen.append(me.shard)
            return Reply(send={"model": task.weights("model")}, examples=1)

    worker = Worker(plan.setup, federation, ClientMemory(tmp_path))
    stage = dataclasses.replace(plan.stages[-1], method=Looking())
    for client in (bad, (bad + 1) % plan.setup.clients):
        worker.run(stage, RoundInfo("main", 0, 1, 0), 0, Task(client, {"model": {"w": torch.zeros(1)}}))
    held = federation.client_shard(bad)
    assert len(seen[0].labeled) == held.held
    assert not len(seen[0].unlabeled)
    assert torch.equal(seen[0].labeled.labels, 9 - federation.truth(bad))
    assert len(seen[1].unlabeled) > 0


def test_attackers_are_recorded_and_a_median_resists_them(tmp_path: Path) -> None:
    attack = {"faults__attackers": 1, "faults__attack": "scale", "faults__attack_scale": 500.0, "data__clients": 5}
    clean, plain, median = (
        run_experiment(tiny_of("fedavg", "clients", rounds=6, **more), tmp_path / name)  # type: ignore[arg-type]
        for name, more in {
            "clean": {"data__clients": 5},
            "plain": attack,
            "median": {**attack, "robust__mean": "median"},
        }.items()
    )
    assert all(len(record["attackers"]) == 1 for record in plain.records)
    assert "attackers" not in clean.records[0]
    accuracy = {run.folder.name: run.records[-1]["accuracy"] for run in (clean, plain, median)}
    assert accuracy["plain"] < 0.2 < accuracy["median"]
    pool = resolve(plain.experiment.to_dict(), {"backend.name": "pool", "backend.workers": 2})
    assert digest(run_experiment(pool, tmp_path / "pool")) == digest(plain)


# --- What goes with what ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_methods())
def test_a_method_declares_whose_models_are_in_the_mean(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `means` says is seen in a real run: each client that learned goes into hub.mean_model by itself, or not."""
    merges: list[tuple[Method, set[int], set[int]]] = []
    averaged: set[int] = set()
    mean_model, try_merge = Hub.mean_model, Engine._try_merge

    def watch_mean(self: Hub, old: Any, replies: Any, *rest: Any, **named: Any) -> Weights:
        averaged.update(reply.client for reply in replies)
        return mean_model(self, old, replies, *rest, **named)

    def watch_merge(self: Engine, stage: Any, state: Any, outcomes: Any, one: Hub) -> Any:
        averaged.clear()
        result = try_merge(self, stage, state, outcomes, one)
        learned = {outcome.reply.client for outcome in outcomes if outcome.reply.examples > 0}
        if learned and stage.method.client_sends:
            merges.append((stage.method, learned, set(averaged)))
        return result

    monkeypatch.setattr(Hub, "mean_model", watch_mean)
    monkeypatch.setattr(Engine, "_try_merge", watch_merge)
    run_experiment(tiny_of(name, find_method(name).placements[0]), tmp_path / "run")
    for method, learned, seen in merges:
        assert (learned <= seen) == (method.means == "clients"), (type(method), learned, seen)


@pytest.mark.parametrize(
    ("method", "placement", "settings", "why"),
    [
        ("rscfed", "some-clients", {"robust.mean": "median"}, "RSCFed does not: it makes means of groups first"),
        ("fedrgd", "server", {"robust.mean": "median"}, "FedRGD does not: it makes means of groups first"),
        ("pfedknow", "server", {"robust.mean": "median"}, "PFedKnow does not: what clients send does not go into one"),
        ("fedavg", "clients", {"robust.mean": "median", "method.scaffold": True}, "FedAvg does not"),
        ("fedavg", "clients", {"robust.mean": "trimmed-mean"}, "write trim = 0.2 beside it"),
        ("fedavg", "clients", {"robust.mean": "trimmed-mean", "robust.trim": 0.1}, "leaves nobody out"),
        ("fedavg", "clients", {"robust.mean": "multi-krum", "robust.byzantine": 4}, r"needs 11 clients"),
        ("fedavg", "clients", {"robust.trim": 0.2}, 'trim is for mean = "trimmed-mean"'),
        ("fedavg", "clients", {"robust.max_norm": 1.0, "robust.norm_quantile": 0.5}, "leave one of them out"),
        ("fedavg", "clients", {"robust.out_of_bounds": "refuse"}, "out_of_bounds needs a bound"),
        ("fedavg", "clients", {"faults.attack": "label-flip"}, "write attackers = 1"),
        ("fedavg", "clients", {"faults.attackers": 99}, "there are 4 clients"),
        ("fedavg", "clients", {"faults.attackers": 1, "backend.name": "flower"}, "no real site is asked to attack"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_work(
    method: str, placement: str, settings: dict[str, object], why: str, tmp_path: Path
) -> None:
    layers = {"method.name": method, "method.preset": "smoke", "data.placement": placement}
    with pytest.raises(TacitError, match=why):
        run_experiment(resolve(layers, TINY, settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_that_are_off_are_not_written() -> None:
    plain = resolve({"method.name": "fedavg"})
    assert not {"robust", "privacy"} & set(plain.to_dict())
    assert "attackers" not in plain.to_dict()["faults"]
    assert resolve(plain.to_dict()) == plain
    on = resolve({"method.name": "fedavg"}, {"robust.mean": "median", "faults.attackers": 1})
    assert resolve(on.to_dict()) == on
    assert prepare(resolve(on.to_dict(), TINY)).setup.robust.mean == "median"


def test_means_of_groups_are_not_taken_for_clients() -> None:
    one = hub(world_of("fedavg", "clients", robust__mean="median"))
    circles = [Reply(send={"model": {"w": torch.zeros(1)}}, examples=1) for _ in range(3)]
    with pytest.raises(TacitError, match="3 models that no client sent"):
        one.mean_model({"w": torch.zeros(1)}, circles)


def test_a_method_that_averages_by_itself_is_not_called_defended(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import dataclass\n"
        "from tacit import Reply, mean_model\n"
        "from tacit.methods.fedavg import FedAvg\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n"
        '    """FedAvg with a mean of its own."""\n\n'
        "    def server_merge(self, state, replies, hub):\n"
        '        return {"model": mean_model(replies)}\n'
    )
    with pytest.raises(TacitError, match="defends nothing"):
        run_experiment(tiny_of(str(mine), "clients", robust__mean="median"), tmp_path / "run")
