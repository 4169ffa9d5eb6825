"""[guard]: never worse than the labels alone. A twin learns from them alone, and labels kept back choose."""

import json
import math
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from test_sites import Here, at_sites, simulated

from benchmarks.guard_rule import shipped, table
from runs import TINY, digest, same, timeless
from tacit.compare.results import bound_of, bounds_of, budget_of
from tacit.config.resolve import resolve
from tacit.config.scale import scaled
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment, Train
from tacit.data.federation import Federation
from tacit.engine.guard import candidates, judged, sentence, verdict
from tacit.engine.run import run_experiment
from tacit.evaluation.paired import Judgement, Pairs
from tacit.pieces.train import predict
from tacit.runs.folder import Run
from tacit.runs.plan import label_passes, prepare, stages_of
from tacit.runs.watchers import NullWatcher
from tacit.sites.judges import read_patterns
from tacit.sites.server import run_at_sites
from tacit.sites.wire import Request, Response, pack, unpack
from tacit.testing.trial import Interruptions, Stopped

GUARD = {"guard.on": True, "guard.every": 2, "data.validation": 0.3, "data.labels": 100}

RUIN = '''
"""A method that learns for a while, and then ruins its model."""
from dataclasses import dataclass
from tacit import Method, Reply


@dataclass(frozen=True)
class Ruin(Method):
    presets = {"paper": {}, "smoke": {"train.lr": 0.1}}

    def client_train(self, task, memory, me):
        model = me.model(task.weights("model"))
        loss = me.fit_labeled(model)
        weights = me.weights(model)
        if me.round > 1:
            weights = {name: -tensor for name, tensor in weights.items()}
        return Reply(send={"model": weights}, examples=max(1, len(me.shard.labeled)), metrics={"loss": loss})
'''

HELP = '''
"""A method that has the twin's labels, and learns from them far longer than the twin may."""
from dataclasses import dataclass
from tacit import Method, Reply


@dataclass(frozen=True)
class Help(Method):
    presets = {"paper": {}, "smoke": {"train.lr": 0.1}}

    def client_train(self, task, memory, me):
        model = me.model(task.weights("model"))
        loss = me.fit_labeled(model, epochs=12)
        return Reply(send={"model": me.weights(model)}, examples=len(me.shard.labeled), metrics={"loss": loss})
'''


def guarded(method: str = "fixmatch", placement: str = "clients", **more: object) -> Experiment:
    layers = {"method.name": method, "method.preset": "smoke", "data.placement": placement, "rounds": 4}
    return resolve(layers, TINY, GUARD, {key.replace("__", "."): value for key, value in more.items()})


def own(code: str, name: str, folder: Path, **more: object) -> Experiment:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(code)
    return guarded(str(folder / f"{name}.py"), **more)


# --- The rule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [20, 50, 100])
def test_what_the_rule_costs_and_keeps(images: int) -> None:
    """The expected loss against the labels alone is at most a quarter of a standard error, that of gains a sixth."""
    error = math.sqrt(0.3 / images)
    for difference in (0.01, 0.02, 0.05, 0.1, 0.2):
        assert shipped(images, -difference) * difference < error / 4
        assert (1 - shipped(images, difference)) * difference < error / 6
    assert shipped(images, -0.2) < 0.07  # what fixmatch loses where one client of ten is labelled
    assert 0.5 < shipped(images, 0.0) < 0.6  # where there is nothing to choose, a little more often the method


def test_the_exact_rates_are_those_of_a_simulation() -> None:
    drawn = np.random.default_rng(0).multinomial(50, [0.175, 0.125, 0.7], size=4000)
    counts = (torch.tensor([[float(rest)], [float(c)], [float(b)], [0.0]]) for b, c, rest in drawn)
    chosen = sum(Judgement(each).best(0.0) for each in counts) / 4000
    assert chosen == pytest.approx(shipped(50, 0.05), abs=0.025)


def test_a_stricter_rule_asks_for_more() -> None:
    rates = [shipped(50, 0.05, lead) for lead in (0.0, 0.3, 1.0, 2.0)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.2 < 0.6 < rates[0]


def test_the_docs_have_the_table_of_the_rule() -> None:
    assert table() in (Path(__file__).parent.parent / "docs" / "guard.md").read_text()


def test_the_interval_covers_the_truth() -> None:
    chance, difference, hits = np.random.default_rng(0), 0.1, 0
    for b, c, _ in chance.multinomial(60, [0.2, 0.1, 0.7], size=2000):
        low, high = Pairs((60.0,), (float(b),), (float(c),)).interval
        hits += low <= difference <= high
    assert 0.94 < hits / 2000 < 0.98


def test_where_one_class_has_most_images_classes_weigh_alike() -> None:
    """80 of 90 images are of one class: the model that gives the other up is ahead in accuracy, and is not shipped."""
    counts = torch.tensor([[10.0, 0.0], [0.0, 6.0], [10.0, 0.0], [60.0, 4.0]])
    found = Judgement(counts)
    assert found.balanced
    assert found.pairs(1, 0).difference == pytest.approx((10 / 80 - 6 / 10) / 2)
    assert found.best(0.3) == 0
    assert not Judgement(counts[:, :1].repeat(1, 3)).balanced


def test_of_nobody_nothing_is_told() -> None:
    record = judged(["twin", "method"], torch.zeros(4, 3), 0.3)
    assert record["guard"]["ships"] == "twin"
    assert record["guard_method"] is None
    assert "No party judged" in sentence(record["guard"])
    assert verdict([{"stage": "main"}]) == {}
    assert list(candidates(None, {"w": torch.zeros(1)})) == ["twin"]
    assert list(candidates({"v": torch.zeros(1)}, {"w": torch.zeros(1)})) == ["twin", "method"]  # not to be averaged


# --- Settings ---------------------------------------------------------------------------------------------


def test_without_it_an_experiment_is_written_as_before() -> None:
    plain = resolve({"method.name": "fixmatch"})
    assert "guard" not in plain.to_dict()
    assert plain == resolve(plain.to_dict(), {"guard": False})
    waiting = resolve({"guard": {"on": False, "every": 9}})
    assert "guard" not in waiting.to_dict()
    short = resolve({"guard": True, "data.validation": 0.2})
    assert short.guard.on
    assert resolve(short.to_dict()) == short


def test_the_twin_is_a_stage_before_all_others_and_as_long_as_they() -> None:
    experiment = guarded(method__warmup=3, method__warmup_epochs=9)
    stages = stages_of(experiment)
    assert [(stage.name, stage.rounds, stage.apart) for stage in stages] == [
        ("twin", 7, True),
        ("warm-up", 3, False),
        ("main", 4, False),
    ]
    assert stages[0].method.epochs == math.ceil((3 * 9 + 4) / 7)  # type: ignore[attr-defined]
    assert label_passes(stages, Train(epochs=1)) == 5  # the twin's own are not counted
    fixed = stages_of(guarded(guard__epochs=11))
    assert fixed[0].method.epochs == 11  # type: ignore[attr-defined]


def test_it_is_no_part_of_a_bound_and_of_a_budget() -> None:
    experiment = guarded()
    without = resolve(experiment.to_dict(), {"guard.on": False})
    lower, upper = bounds_of(experiment)
    assert (lower, upper) == bounds_of(without)
    assert not lower.guard.on
    assert budget_of(experiment) == budget_of(without)
    assert bound_of(resolve({"method.name": "fedavg", "guard": True, "data.validation": 0.2})) == ""
    small, _ = scaled(guarded(rounds=40, guard__every=20), "half")
    assert small.guard.every == 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guard.on": True}, r"\[guard\] chooses by labelled images that are kept back: write validation = 0\.2"),
        ({**GUARD, "reporting": "last-10"}, r"\[guard\] ships one model"),
        ({**GUARD, "reporting": "best"}, r"test images must not choose it"),
        ({**GUARD, "guard.every": 0}, r"guard\.every = 0"),
        ({**GUARD, "guard.evry": 2}, r"Did you mean 'guard\.every'"),
        ({**GUARD, "guard.lead": 11}, r"guard\.lead = 11"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(TacitError, match=message):
        resolve(settings)


def test_a_twin_that_is_trained_less_is_told() -> None:
    """FixMatch takes a labelled batch beside each unlabelled one, which the settings alone do not tell."""
    (told,) = [line for line in prepare(guarded()).warnings if "twin" in line]
    passes = int(told.rsplit("= ", 1)[1].rstrip("."))
    assert passes > 1
    assert not [line for line in prepare(guarded(guard__epochs=passes)).warnings if "twin" in line]


# --- Runs -------------------------------------------------------------------------------------------------


def test_a_method_that_ruins_its_model_is_caught(tmp_path: Path) -> None:
    run = run_experiment(own(RUIN, "ruin", tmp_path / "methods"), tmp_path / "run")
    assert run.summary is not None
    found = run.summary["guard"]
    assert found["ships"] == "twin"
    assert found["against_twin"]["method"]["high"] < 0
    assert "that is more than chance makes" in found["sentence"]
    twin = payload.weights_in(payload.read(tmp_path / "run" / "checkpoint" / "stage-0.safetensors"), "model")
    assert same(run.weights, twin)
    last = [record for record in run.records if record["stage"] == "twin"][-1]
    assert run.summary["accuracy"] == last["accuracy"] == found["tested"]["twin"] > found["tested"]["method"]
    assert "the model of the labels alone" in (run.folder / "card.md").read_text()


def test_a_method_that_helps_is_kept(tmp_path: Path) -> None:
    run = run_experiment(own(HELP, "help", tmp_path / "methods", guard__epochs=1), tmp_path / "run")
    assert run.summary is not None
    found = run.summary["guard"]
    assert found["ships"] in ("method", "average")
    assert found["figures"][found["ships"]] > found["figures"]["twin"]
    assert run.summary["accuracy"] > found["tested"]["twin"]


@pytest.mark.parametrize("placement", ["server", "clients", "some-clients"])
def test_the_method_does_not_notice_and_the_figures_are_those_of_the_images(placement: str, tmp_path: Path) -> None:
    asked = guarded(placement=placement, data__labeled_clients=2, guard__lead=0.0)
    run = run_experiment(asked, tmp_path / "guarded")
    alone = run_experiment(resolve(asked.to_dict(), {"guard.on": False}), tmp_path / "alone")
    mine = [record for record in run.records if record["stage"] != "twin"]
    for one, other in zip(mine, alone.records, strict=True):
        assert one["accuracy"] == other["accuracy"]
    assert ["guard" in record for record in mine if record["stage"] == "main"] == [False, True, False, True]
    assert run.summary is not None
    plan = prepare(asked)
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    kept = [federation.validation(client) for client in federation.judges()]
    images, labels = torch.cat([part.images for part in kept]), torch.cat([part.labels for part in kept])
    net = plan.setup.build()
    net.load_state_dict(run.weights)
    right = (predict(net, images, plan.setup.views.plain).argmax(1) == labels).double().mean().item()
    found = run.summary["guard"]
    assert found["images"] == len(labels)
    assert found["figures"][found["ships"]] == pytest.approx(right)


@pytest.mark.parametrize("placement", ["server", "clients"])
def test_local_and_pool_and_a_resumed_run_are_the_same(placement: str, tmp_path: Path) -> None:
    asked = guarded(placement=placement, rounds=3)
    local = run_experiment(resolve(asked.to_dict(), {"backend.name": "local"}), tmp_path / "local")
    pool = run_experiment(resolve(asked.to_dict(), {"backend.name": "pool", "backend.workers": 2}), tmp_path / "pool")
    assert timeless(pool) == timeless(local)
    assert digest(pool) == digest(local)
    watcher = Interruptions(stages_of(asked))
    while not (tmp_path / "stopped" / "summary.json").is_file():
        with suppress(Stopped):
            run_experiment(asked, tmp_path / "stopped", resume=True, watcher=watcher)
    assert len(watcher.happened) > 8  # in the twin's rounds, in the warm-up's, in the last one
    stopped = Run(tmp_path / "stopped")
    assert timeless(stopped) == timeless(local)
    assert digest(stopped) == digest(local)
    assert local.summary is not None
    assert stopped.summary is not None
    assert stopped.summary["guard"] == local.summary["guard"]


def test_the_best_round_by_what_was_kept_back_may_be_the_methods_model(tmp_path: Path) -> None:
    """The rate is so high that the last round is not the best one; the guard compares what would be shipped."""
    more = {"reporting": "best", "best_by": "accuracy", "train.lr": 1.0, "guard.lead": 0.0, "guard.epochs": 1}
    run = run_experiment(resolve(guarded().to_dict(), more), tmp_path / "run")
    last = run.records[-1]
    best = max(r["validation_accuracy"] for r in run.records if r["stage"] == "main")
    assert last["guard_method"] == pytest.approx(best)


# --- At sites ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["server", "clients", "some-clients"])
def test_sites_choose_as_the_simulation_does_and_send_counts_only(placement: str, tmp_path: Path) -> None:
    asked = simulated("fixmatch", placement, **GUARD)
    local = run_experiment(asked, tmp_path / "local")
    job, sites = at_sites(asked, tmp_path)
    here = Here(sites)
    run = run_at_sites(job, here, NullWatcher())
    assert digest(run) == digest(local)
    assert local.summary is not None
    assert run.summary is not None
    assert run.summary["guard"] == local.summary["guard"]
    compared = [answer for ask, answer in here.seen if b'"kind": "compare"' in ask]
    assert bool(compared) == (placement != "server")
    for answer in compared:
        header, content = unpack(answer, Response)
        told = payload.from_bytes(content)
        assert list(told) == ["patterns"]
        assert payload.tensor_in(told, "patterns").shape == (8, 10)
        assert header.metrics == {}
    lines = (tmp_path / "memory-0" / "sent.jsonl").read_text().splitlines()
    noted = [json.loads(line).get("send") for line in lines]  # a hello has none
    assert ({"patterns": [8, 10]} in noted) == (placement != "server")


def test_counts_that_cannot_be_are_left_out() -> None:
    good = torch.tensor([[2.0, 3.0], [1.0, 0.0]], dtype=torch.float64)

    def told(tensor: torch.Tensor, **header: object) -> float:
        answer = pack(Response(**{"kind": "compare", "client": 1, **header}), payload.to_bytes({"patterns": tensor}))
        return float(read_patterns(answer, 1, (2, 2), 6.0).sum())

    assert told(good) == 6.0
    bad = [-good, good * torch.nan, good[:1], good / 2, good * 2]
    assert [told(tensor) for tensor in bad] == [0.0] * len(bad)
    assert told(good, client=0) == told(good, kind="judge") == 0.0
    assert float(read_patterns(b"nothing", 1, (2, 2), 6.0).sum()) == 0.0


def test_too_many_models_are_refused(tmp_path: Path) -> None:
    asked = simulated("fixmatch", "clients", **GUARD)
    job, sites = at_sites(asked, tmp_path)
    here = Here(sites)
    run_at_sites(job, here, NullWatcher())
    ask = next(ask for ask, _ in here.seen if b'"kind": "compare"' in ask)
    request, content = unpack(ask, Request)
    models = payload.from_bytes(content)
    many = {f"model-{number}": models["model-0"] for number in range(5)}
    header, _ = unpack(sites[request.site].respond(pack(request, payload.to_bytes(many))), Response)
    assert (header.kind, "up to 4 models" in header.why) == ("refused", True)
    assert Run(tmp_path / "run").summary is not None
