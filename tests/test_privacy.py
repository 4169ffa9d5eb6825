"""[privacy]: the epsilon of dp-accounting, noise of the right size, nothing of one client beside it, a budget."""

import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_sites import Here, at_sites, simulated

from runs import TINY, digest, hub, timeless, world_of
from tacit.backends.protect import ASKED, protected
from tacit.config.resolve import resolve
from tacit.contract.method import Method, Reply, Task
from tacit.contract.parties import Hub, RoundInfo, Setup
from tacit.core import payload
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.payload import Payload
from tacit.core.safeguards import Privacy
from tacit.core.settings import Experiment
from tacit.data.party import FACTS
from tacit.engine.accounting import Release, combined_noise, epsilon, noise_for
from tacit.engine.private import PrivateRound, noised_mean
from tacit.engine.run import run_experiment
from tacit.methods.cbafed import CBAFed
from tacit.report.collect import collect
from tacit.runs.plan import stages_of
from tacit.runs.watchers import NullWatcher
from tacit.sites.preview import preview_site
from tacit.sites.server import run_at_sites
from tacit.sites.wire import Response, unpack
from tacit.testing.trial import Interruptions

accounting = pytest.importorskip("dp_accounting")
rdp = pytest.importorskip("dp_accounting.rdp")
REPLACE, ADD = accounting.NeighboringRelation.REPLACE_ONE, accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
ON = {"privacy.clip": 1.0, "privacy.noise": 0.8, "privacy.statistics_noise": 5.0}
FIXED = {"privacy.sampling": "fixed"}
AT_CLIENTS = {**FIXED, "privacy.where": "clients"}


def tiny_of(method: str, placement: str, *layers: dict[str, Any], **more: object) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in more.items()}
    first = {"method.name": method, "method.preset": "smoke", "data.placement": placement}
    return resolve(first, TINY, *layers, changes)


# --- Epsilon, beside dp-accounting's own -----------------------------------------------------------------------------


def directly(relation: Any, delta: float, *events: Any) -> float:
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    for event in events:
        accountant.compose(event)
    return float(accountant.get_epsilon(delta))


def test_poisson_sampling_with_statistics_is_one_composed_event() -> None:
    settings = Privacy(clip=2.0, noise=1.2, statistics_noise=4.0, delta=1e-3)
    release = Release(100, 10, combined_noise(1.2, 4.0, 2))
    gaussians = [accounting.GaussianDpEvent(noise) for noise in (1.2, 4.0, 4.0)]
    round_ = accounting.PoissonSampledDpEvent(0.1, accounting.ComposedDpEvent(gaussians))
    assert epsilon(settings, [release] * 5) == pytest.approx(directly(ADD, 1e-3, *[round_] * 5), rel=1e-9)
    everybody = accounting.GaussianDpEvent(3.0)
    both = directly(ADD, 1e-3, round_, everybody, everybody)
    assert epsilon(settings, [Release(7, 7, 3.0), release, Release(7, 7, 3.0)]) == pytest.approx(both, rel=1e-9)


def test_a_fixed_number_is_sampled_without_replacement_and_a_client_moves_the_sum_twice_as_far() -> None:
    settings = Privacy(clip=2.0, noise=6.0, delta=1e-3, sampling="fixed")
    half = accounting.GaussianDpEvent(3.0)  # one client's data replaced: 2 · clip, so the noise is half of it
    round_ = accounting.SampledWithoutReplacementDpEvent(100, 10, half)
    assert epsilon(settings, [Release(100, 10, 6.0)] * 3) == pytest.approx(directly(REPLACE, 1e-3, *[round_] * 3))
    assert epsilon(settings, [Release(100, 100, 6.0)] * 3) == pytest.approx(directly(REPLACE, 1e-3, *[half] * 3))
    # Where nearly everybody is asked, that bound is above the one without any gain from chance, which holds as well.
    assert epsilon(settings, [Release(100, 90, 6.0)]) == pytest.approx(directly(REPLACE, 1e-3, half))


def test_no_noise_no_bound_and_no_release_no_cost() -> None:
    settings = Privacy(clip=1.0)
    assert epsilon(settings, [Release(10, 10, 0.0)]) is None
    assert epsilon(settings, []) == 0.0
    assert combined_noise(1.0, 0.0, 2) == 0.0


def test_noise_for_a_budget_is_enough_and_hardly_more() -> None:
    settings = Privacy(clip=1.0, noise=1.0, delta=1e-3)
    noise = noise_for(settings, 3.0, among=100, asked=10, rounds=20)
    enough, less = (epsilon(settings, [Release(100, 10, z)] * 20) for z in (noise, 0.99 * noise))
    assert enough is not None
    assert less is not None
    assert enough <= 3.0 < less


# --- What a merge is handed ------------------------------------------------------------------------------------------


BASE = {"w": torch.ones(200, 100), "n": torch.tensor(4)}
STATE: Payload = {"model": BASE}


def setup_of(**privacy: Any) -> Setup:
    plan = world_of("fedavg", "clients")[0]
    return dataclasses.replace(plan.setup, privacy=Privacy(**privacy))


def reply_at(distance: float, direction: int, client: int = 0, **more: Any) -> Reply:
    moved = BASE["w"].clone()
    moved[direction, direction] += distance
    return Reply(send={"model": {"w": moved, "n": torch.tensor(900)}, **more}, examples=7, client=client)


def mean_of(setup: Setup, method: Method, replies: Sequence[Reply], asked: int, seed: int = 0) -> Payload:
    tasks = [Task(k, STATE) for k in range(len(replies))]
    return noised_mean(setup, method, STATE, tasks, replies, asked, torch.Generator().manual_seed(seed))


def test_updates_are_clipped_and_the_denominator_is_fixed() -> None:
    setup = setup_of(clip=2.0)
    mean = payload.weights_in(mean_of(setup, Method(), [reply_at(10.0, 0), reply_at(1.0, 1)], asked=4), "model")
    change = mean["w"] - 1.0
    assert float(change[0, 0]) == pytest.approx(2.0 / 4)
    assert float(change[1, 1]) == pytest.approx(1.0 / 4)
    assert int(change.count_nonzero()) == 2
    assert int(mean["n"]) == 4  # what is not learned stays as it was sent


@pytest.mark.parametrize("far", [0.1, 1.0, 1e5])
def test_one_client_moves_the_sum_by_no_more_than_its_bounds(far: float) -> None:
    setup = setup_of(clip=2.0, examples=50)
    others = [reply_at(1.0, k, counts=torch.full((10,), 3.0)) for k in range(3)]
    extra = reply_at(far, 5, counts=torch.full((10,), far))
    with_it, without = (mean_of(setup, CBAFed(), replies, 1) for replies in ([*others, extra], others))
    weights, before = (payload.weights_in(mean, "model")["w"].double() for mean in (with_it, without))
    assert float((weights - before).norm()) <= 2.0 * (1 + 1e-5)
    counts, fewer = (payload.tensor_in(mean, "counts").double() for mean in (with_it, without))
    assert float((counts - fewer).norm()) <= 50.0 * (1 + 1e-5)


@pytest.mark.parametrize("where", ["server", "clients"])
def test_the_noise_has_the_size_that_is_accounted_for(where: str) -> None:
    setup = setup_of(clip=2.0, noise=3.0, statistics_noise=4.0, examples=50, where=where, sampling="fixed")
    method, asked = CBAFed(), 9
    replies = [reply_at(1.0, k, k, counts=torch.zeros(10)) for k in range(asked)]
    if where == "clients":
        tasks = [Task(k, {**STATE, ASKED: asked}) for k in range(asked)]
        replies = [
            protected(reply, method, task, setup, RoundInfo("main", 0, 1, 0))
            for reply, task in zip(replies, tasks, strict=True)
        ]
        alone = (replies[0].weights("model")["w"] - 1.0).std()
        assert float(alone) == pytest.approx(3.0 * 2.0 / math.sqrt(asked), rel=0.03)  # a share of it
        told = torch.cat([reply.tensor("counts") for reply in replies])
        assert float(told.std()) == pytest.approx(4.0 * 50 / math.sqrt(asked), rel=0.2)
    mean = mean_of(setup, method, replies, asked)
    noise = payload.weights_in(mean, "model")["w"] - 1.0
    assert float(noise.std()) == pytest.approx(3.0 * 2.0 / asked, rel=0.03)
    counts = torch.cat(
        [payload.tensor_in(mean_of(setup, method, replies, asked, seed), "counts") for seed in range(200)]
    )
    if where == "server":  # what is below zero was cut: of a normal distribution, half
        assert float(counts.square().mean().sqrt()) == pytest.approx(4.0 * 50 / asked * math.sqrt(0.5), rel=0.06)


def test_a_merge_sees_the_noised_mean_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[list[Reply]] = []
    server_merge = CBAFed.server_merge

    def watch(self: CBAFed, state: Payload, replies: Sequence[Reply], one: Hub) -> Payload:
        merged.append(list(replies))
        return server_merge(self, state, replies, one)

    monkeypatch.setattr(CBAFed, "server_merge", watch)
    run = run_experiment(tiny_of("cbafed", "some-clients", ON), tmp_path / "run")
    assert len(merged) == len(run.records)
    for replies in merged:
        assert {(reply.examples, reply.client) for reply in replies} == {(100.0, -1)}
        assert all(reply.send is replies[0].send for reply in replies)
    assert all(record["client_metrics"] == {} for record in run.records)


def test_neither_examples_nor_figures_leave_a_site(tmp_path: Path) -> None:
    job, sites = at_sites(simulated("cbafed", "some-clients", **ON), tmp_path)
    here = Here(sites)
    run_at_sites(job, here, NullWatcher())
    answers = [unpack(response, Response)[0] for _, response in here.seen]
    trained = [answer for answer in answers if answer.kind == "train"]
    assert trained
    assert {(answer.examples, len(answer.metrics)) for answer in trained} == {(1.0, 0)}


# --- Whole runs ------------------------------------------------------------------------------------------------------


METHODS = [
    ("fedavg", "clients"),
    ("semifl", "server"),
    ("cbafed", "some-clients"),
    ("feddb", "clients"),
    ("fedirm", "some-clients"),
    ("fl2", "server"),
]


@pytest.mark.parametrize(("method", "placement"), METHODS)
def test_every_round_tells_what_was_spent(method: str, placement: str, tmp_path: Path) -> None:
    run = run_experiment(tiny_of(method, placement, ON), tmp_path / "run")
    spent = [record["epsilon"] for record in run.records]
    assert spent == sorted(spent)
    assert spent[-1] > 0
    assert not any(record["refused"] or record["skipped"] for record in run.records)
    assert run.summary is not None
    assert run.summary["privacy"]["epsilon"] == pytest.approx(spent[-1])
    statistics = {"cbafed": 1, "feddb": 1, "fedirm": 1, "fl2": 1}.get(method, 0)
    told = [record["privacy"] for record in run.records if "privacy" in record]
    assert told[-1]["noise"] == pytest.approx(combined_noise(0.8, 5.0, statistics))
    settings = run.experiment.privacy
    assert spent[-1] == pytest.approx(epsilon(settings, [Release(**one) for one in told]))


@pytest.mark.parametrize("layer", [{}, FIXED, AT_CLIENTS], ids=["poisson", "fixed", "at-clients"])
def test_the_same_on_all_backends_and_at_sites(layer: dict[str, object], tmp_path: Path) -> None:
    some = {**ON, **layer, "privacy.randomness": "seed", "participation.number": 2, "rounds": 3}
    experiment = simulated("cbafed", "some-clients", **some)
    local = run_experiment(experiment, tmp_path / "local")
    pool = run_experiment(
        resolve(experiment.to_dict(), {"backend.name": "pool", "backend.workers": 2}), tmp_path / "pool"
    )
    assert (digest(pool), timeless(pool)) == (digest(local), timeless(local))
    job, sites = at_sites(experiment, tmp_path)
    at_home = run_at_sites(job, Here(sites), NullWatcher())
    assert digest(at_home) == digest(local)
    assert [r["epsilon"] for r in at_home.records] == [r["epsilon"] for r in local.records]
    assert not any(record["refused"] for record in at_home.records)


@pytest.mark.parametrize("layer", [{}, AT_CLIENTS], ids=["server", "at-clients"])
def test_at_real_sites_the_noise_does_not_follow_from_the_seed(layer: dict[str, object], tmp_path: Path) -> None:
    experiment = simulated("fedavg", "clients", **{**ON, **layer, "rounds": 1, "privacy.statistics_noise": 0.0})
    runs = []
    for name in ("one", "other"):
        job, sites = at_sites(experiment, tmp_path / name)
        runs.append(run_at_sites(job, Here(sites), NullWatcher()))
    assert digest(runs[0]) != digest(runs[1])
    simulation = run_experiment(experiment, tmp_path / "a"), run_experiment(experiment, tmp_path / "b")
    assert digest(simulation[0]) == digest(simulation[1])


def test_a_run_at_real_sites_that_is_resumed_keeps_its_secret(tmp_path: Path) -> None:
    """The server's noise is drawn from a number that lies in the checkpoint: a round done again has the same."""
    job, sites = at_sites(
        simulated("fedavg", "clients", **{**ON, "privacy.statistics_noise": 0.0, "rounds": 3}), tmp_path
    )

    class Stop(NullWatcher):
        def round_done(self, record: Any) -> None:
            if record["round"] == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_at_sites(job, Here(sites), Stop())
    kept = payload.read(next(iter(sorted((tmp_path / "run" / "checkpoint").glob("*.safetensors")))))
    assert isinstance(kept["tacit:secret"], int)
    run = run_at_sites(dataclasses.replace(job, resume=True), Here(sites), NullWatcher())
    assert len(run.records) == 3
    assert run.records[-1]["epsilon"] > run.records[-2]["epsilon"]


BUDGET = {**ON, "privacy.statistics_noise": 0.0, "privacy.noise": 2.0, "privacy.epsilon": 4.0}


def test_a_budget_ends_the_run_cleanly_and_a_resumed_run_ends_alike(tmp_path: Path) -> None:
    experiment = tiny_of("fedavg", "clients", BUDGET, rounds=20)
    whole = run_experiment(experiment, tmp_path / "whole")
    assert 1 < len(whole.records) < 20
    assert whole.records[-1]["epsilon"] <= 4.0
    settings = experiment.privacy
    one_more = epsilon(settings, [Release(**record["privacy"]) for record in [*whole.records, whole.records[-1]]])
    assert one_more is not None
    assert one_more > 4.0
    assert whole.summary is not None
    assert whole.summary["privacy"]["ended"].startswith("the privacy budget is spent: epsilon is ")
    assert (whole.folder / "card.md").is_file()
    interruptions, resumed = Interruptions(stages_of(experiment)), None
    while resumed is None:
        try:
            resumed = run_experiment(experiment, tmp_path / "run", resume=True, watcher=interruptions)
        except KeyboardInterrupt:
            continue
    assert interruptions.happened
    assert (digest(resumed), timeless(resumed)) == (digest(whole), timeless(whole))
    assert len(run_experiment(experiment, tmp_path / "run", resume=True).records) == len(whole.records)


def test_a_budget_that_is_spent_in_the_warm_up_still_ends_with_a_model(tmp_path: Path) -> None:
    changes = {**BUDGET, "privacy.statistics_noise": 9.0, "method.warmup": 9}
    run = run_experiment(tiny_of("cbafed", "some-clients", changes, rounds=2), tmp_path / "run")
    assert {record["stage"] for record in run.records} == {"warm-up"}
    assert run.summary is not None
    assert "of stage 'warm-up'" in run.summary["privacy"]["ended"]
    assert (run.folder / "model.safetensors").is_file() or list(run.folder.glob("*.safetensors"))


def test_clients_that_are_away_take_their_share_of_the_noise_along(tmp_path: Path) -> None:
    more = {**ON, **AT_CLIENTS, "faults.dropout": 0.5, "rounds": 4, "privacy.statistics_noise": 0.0}
    run = run_experiment(tiny_of("fedavg", "clients", more), tmp_path / "run")
    for record in run.records:
        if "privacy" in record:
            share = len(record["answered"]) / len(record["asked"])
            assert record["privacy"]["noise"] == pytest.approx(0.8 * math.sqrt(share))
    assert any("privacy" in record and len(record["answered"]) < len(record["asked"]) for record in run.records)


def test_poisson_sampling_asks_so_many_on_average_and_an_empty_round_is_noised(tmp_path: Path) -> None:
    more = {**ON, "privacy.statistics_noise": 0.0, "participation.number": 1, "rounds": 12}
    run = run_experiment(tiny_of("fedavg", "clients", more), tmp_path / "run")
    asked = [len(record["asked"]) for record in run.records]
    assert 0 in asked
    assert max(asked) > 1
    assert all(record["privacy"]["asked"] == 1 for record in run.records)
    assert not any(record["skipped"] for record in run.records)
    empty = asked.index(0)
    assert run.records[empty]["loss"] != run.records[empty - 1]["loss"]


# --- Who is told -----------------------------------------------------------------------------------------------------


def test_card_report_and_summary_tell_it(tmp_path: Path) -> None:
    run = run_experiment(tiny_of("cbafed", "some-clients", ON), tmp_path / "run")
    assert run.summary is not None
    spent = run.summary["privacy"]["epsilon"]
    card = (run.folder / "card.md").read_text()
    assert f"**Differential privacy for clients: ε = {spent:.3g} at δ = 1e-05**" in card
    assert "it shows what noise costs, and hides nothing" in card
    assert "rounds answered" not in card
    assert "tacit adds no noise" not in card
    (shown,) = collect([run.folder])["runs"]
    assert any(f"Privacy spent: epsilon {spent:.3g}" in remark for remark in shown["remarks"])
    assert "epsilon" in json.dumps(shown["figures"])
    plain = run_experiment(tiny_of("cbafed", "some-clients"), tmp_path / "plain")
    assert "tacit adds no noise" in (plain.folder / "card.md").read_text()


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        ({**ON}, "what leaves this site has no noise in it"),
        ({**ON, **AT_CLIENTS}, "share of the noise in it"),
        ({**ON, **AT_CLIENTS, "privacy.randomness": "seed"}, "can take this noise off"),
        ({"robust.mean": "median"}, "compares the updates of single sites"),
        ({"robust.max_norm": 1.0}, "What leaves is the same"),
    ],
)
def test_a_preview_says_what_changes(layer: dict[str, object], told: str, tmp_path: Path) -> None:
    experiment = simulated("cbafed", "some-clients", **layer)
    job, sites = at_sites(experiment, tmp_path)
    shown = io.StringIO()
    facts = tmp_path / "parties" / "server" / FACTS
    preview_site(
        sites["site-0"], resolve(job.experiment), facts if facts.is_file() else None, SafeConsole(file=shown, width=300)
    )
    assert told in shown.getvalue()


# --- Refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "placement", "settings", "why"),
    [
        ("fedavg", "clients", {"privacy.noise": 1.0}, "noise without clipping protects nobody"),
        ("fedavg", "clients", {"privacy.epsilon": 1.0}, "noise without clipping"),
        ("fedavg", "clients", {**ON, "privacy.epsilon": 0.0}, "should be greater than 0"),
        ("fedavg", "clients", {**ON, "privacy.epsilon": -1.0}, "should be greater than 0"),
        ("fedavg", "clients", {**ON, "privacy.delta": 0.0}, "should be greater than 0"),
        ("fedavg", "clients", {**ON, "privacy.delta": 1.0}, "should be less than 1"),
        ("fedavg", "clients", {**ON, "privacy.delta": 0.9}, "one of them could be told whole"),
        ("fedavg", "clients", {"privacy.clip": 0.0}, "should be greater than 0"),
        ("fedavg", "clients", {"privacy.clip": 1.0, "privacy.epsilon": 2.0}, "epsilon is a budget for noise"),
        ("fedavg", "clients", {**ON, "privacy.epsilon": 0.1}, "less than one round costs"),
        ("fedavg", "clients", {"privacy.clip": 1.0, "privacy.statistics_noise": 1.0}, "leaves the model unprotected"),
        ("fedavg", "clients", {**ON, "privacy.where": "clients"}, 'needs sampling = "fixed"'),
        ("fedavg", "clients", {**ON, "robust.mean": "median"}, r"\[robust\] does not go with \[privacy\]"),
        ("fedavg", "clients", {**ON, "evaluate_clients": True}, "evaluate_clients tells of each client"),
        ("fedavg", "clients", {**ON, "data.validation": 0.2}, "data.validation tells exact counts"),
        ("fedavg", "clients", {**ON, "net.norm": "bn"}, "that no noise covers"),
        ("fedavg", "clients", {**ON, "method.scaffold": True}, "FedAvg does not"),
        ("cbafed", "some-clients", {**ON, "privacy.statistics_noise": 0.0}, "counts beside the model"),
        ("rscfed", "some-clients", ON, "RSCFed does not"),
        ("fedrgd", "server", ON, "FedRGD does not"),
        ("pfedknow", "server", ON, "PFedKnow does not"),
        ("fedmatch", "server", ON, "sends 'sigma' from some clients only"),
        ("orchestra", "server", ON, "nobody can say how large it gets"),
    ],
)
def test_what_would_not_protect_is_refused_before_any_work(
    method: str, placement: str, settings: dict[str, object], why: str, tmp_path: Path
) -> None:
    layers = {"method.name": method, "method.preset": "smoke", "data.placement": placement}
    with pytest.raises(TacitError, match=why):
        run_experiment(resolve(layers, TINY, settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_client_that_is_asked_twice_is_not_covered() -> None:
    one = hub(world_of("fedavg", "clients", privacy__clip=1.0, privacy__noise=1.0))
    setup = setup_of(clip=1.0, noise=1.0)
    with pytest.raises(TacitError, match="asks a client twice"):
        PrivateRound.of(setup, Method(), one, [Task(0, STATE), Task(0, STATE, 1)], [])
    other = {"model": {"w": torch.zeros(200, 100), "n": torch.tensor(4)}}
    with pytest.raises(TacitError, match="sends different 'model'"):
        noised_mean(setup, Method(), STATE, [Task(0, STATE), Task(1, other)], [], 2, torch.Generator())


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"privacy.clip": 1.0, "privacy.noise": 1.0},
            r"clip \(differential privacy\) and secure_aggregation do not go",
        ),
        ({"robust.mean": "median"}, r"\[robust\] looks at each client's reply, which secure aggregation keeps from"),
        ({"robust.max_norm": 1.0}, r"\[robust\] looks at each client's reply"),
    ],
)
def test_what_needs_single_replies_is_refused_with_secure_aggregation(other: dict[str, Any], said: str) -> None:
    with pytest.raises(TacitError, match=said):
        stages_of(resolve({"method": "fedavg", "privacy.secure_aggregation": True, **other}))
