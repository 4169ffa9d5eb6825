"""[pretrain]: a stage without labels before any method, on every backend and at sites."""

from pathlib import Path

import pytest
import torch
from test_sites import Here, at_sites, simulated

from runs import TINY, digest, hub, timeless, world_of
from tacit.compare.results import bound_of, bounds_of
from tacit.config.resolve import resolve
from tacit.config.scale import scaled
from tacit.core.errors import TacitError
from tacit.core.payload import weights_in
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.methods import find_method, known_methods
from tacit.runs.plan import prepare, stages_of
from tacit.runs.watchers import NullWatcher
from tacit.sites.server import run_at_sites
from tacit.testing.trial import Interruptions

SMALL = {"pretrain.options.hidden": 16, "pretrain.options.projection": 8}
PRETRAIN = {"pretrain.method": "fedema", "pretrain.rounds": 2, **SMALL}


def pretrained(method: str = "semifl", placement: str = "server", **more: object) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in more.items()}
    layers = {"method.name": method, "method.preset": "smoke", "data.placement": placement}
    return resolve(layers, TINY, PRETRAIN, changes)


def test_without_it_an_experiment_is_written_as_before() -> None:
    plain = resolve({"method.name": "semifl"})
    assert "pretrain" not in plain.to_dict()
    assert plain == resolve(plain.to_dict(), {"pretrain": {"method": "none"}})
    assert [stage.name for stage in stages_of(plain)] == ["main"]


def test_it_is_a_stage_before_all_others_with_options_of_its_own() -> None:
    experiment = pretrained("fixmatch", pretrain__options__tau=0.5)
    stages = stages_of(experiment)
    assert [(stage.name, stage.rounds) for stage in stages] == [("pretrain", 2), ("warm-up", 1), ("main", 2)]
    assert (stages[0].method.tau, stages[0].method.hidden) == (0.5, 16)  # type: ignore[attr-defined]
    assert resolve(experiment.to_dict()) == experiment


@pytest.mark.parametrize("name", known_methods())
def test_every_method_starts_from_the_features(name: str) -> None:
    """No method may forget what was learned before: its first model has the encoder of the stage."""
    placement = find_method(name).placements[0]
    world = world_of(name, placement)
    first = hub(world).new_weights()
    learned = {key: tensor + 0.01 if tensor.is_floating_point() else tensor for key, tensor in first.items()}
    stage = stages_of(world[0].experiment)
    beginning = next(one for one in stage if one.name not in ("diffusion", "generation")).method
    state = beginning.server_start(hub(world), {"pretrain": {"model": learned}})
    begun = weights_in(state, "sigma" if "sigma" in state else "model")
    if name in ("bsemifl", "fedmatch", "fedfame"):  # they train on the server's labels at once
        without = beginning.server_start(hub(world), {})
        assert not torch.equal(begun["conv1.weight"], weights_in(without, next(iter(state)))["conv1.weight"])
    else:
        assert torch.equal(begun["conv1.weight"], learned["conv1.weight"])


@pytest.mark.parametrize(
    ("method", "placement"), [("semifl", "server"), ("cbafed", "some-clients"), ("feddb", "clients")]
)
def test_all_backends_and_sites_give_the_same_bytes(method: str, placement: str, tmp_path: Path) -> None:
    experiment = resolve(simulated(method, placement).to_dict(), PRETRAIN)
    local = run_experiment(experiment, tmp_path / "local")
    assert [record["stage"] for record in local.records[:2]] == ["pretrain", "pretrain"]
    assert all("accuracy" not in record for record in local.records[:2])
    plain = run_experiment(simulated(method, placement), tmp_path / "plain")
    assert digest(plain) != digest(local)
    pool = run_experiment(
        resolve(experiment.to_dict(), {"backend.name": "pool", "backend.workers": 2}), tmp_path / "pool"
    )
    assert digest(pool) == digest(local)
    assert timeless(pool) == timeless(local)
    job, sites = at_sites(experiment, tmp_path)
    at_home = run_at_sites(job, Here(sites), NullWatcher())
    assert digest(at_home) == digest(local)
    assert not any(record["refused"] for record in at_home.records)


def test_stopped_and_resumed_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    experiment = pretrained()
    whole = run_experiment(experiment, tmp_path / "whole")
    interruptions, resumed = Interruptions(stages_of(experiment)), None
    while resumed is None:
        try:
            resumed = run_experiment(experiment, tmp_path / "run", resume=True, watcher=interruptions)
        except KeyboardInterrupt:
            continue
    assert len(interruptions.happened) > 2
    assert digest(resumed) == digest(whole)


def test_the_card_says_so(tmp_path: Path) -> None:
    run = run_experiment(pretrained(rounds=1), tmp_path / "run")
    assert "features that fedema learned without labels" in (run.folder / "card.md").read_text()


def test_it_shrinks_with_the_rest_and_is_no_part_of_the_bounds() -> None:
    experiment = pretrained(pretrain__rounds=30, rounds=50, data__subset=0)
    small, told = scaled(experiment, "tenth")
    assert small.pretrain.rounds == 3
    assert "3 of 30 rounds of pretraining" in told
    lower, upper = bounds_of(experiment)
    assert (lower.rounds, lower.pretrain.method, upper.pretrain.method) == (80, "none", "none")
    with_features = resolve(lower.to_dict(), PRETRAIN)
    assert (bound_of(lower), bound_of(with_features)) == ("lower", "")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"pretrain.method": "fedema"}, r"\[pretrain\] method = \"fedema\" needs a number of rounds"),
        ({"pretrain.rounds": 5}, "rounds and options are for a method"),
        ({"pretrain.method": "fedma", "pretrain.rounds": 5}, "Did you mean 'fedema'"),
        ({**PRETRAIN, "pretrain.options.tua": 0.5}, r"no option 'pretrain\.options\.tua'\. Did you mean 'tau'"),
        ({**PRETRAIN, "pretrain.options.tau": 1.5}, r"pretrain\.options\.tau = 1\.5"),
        ({**PRETRAIN, "pretrain.options.tau": "x"}, r"pretrain\.options\.tau = 'x' is not a number"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict, why: str) -> None:
    with pytest.raises(TacitError, match=why):
        resolve(settings)


@pytest.mark.parametrize("method", ["fedu", "fedema", "orchestra"])
def test_what_would_travel_is_estimated_with_the_heads(method: str, tmp_path: Path) -> None:
    """As many bytes as the first round really sends up; Orchestra's centroids come on top."""
    experiment = pretrained(pretrain__method=method, pretrain__rounds=2, rounds=1)
    run = run_experiment(experiment, tmp_path / "run")
    net = prepare(experiment).setup.build()
    classifier = sum(t.numel() * t.element_size() for t in net.state_dict().values())
    stage = stages_of(experiment)[0].method
    each = stage.estimated_weights_bytes(classifier, 1, net.fc.in_features)  # type: ignore[union-attr, arg-type]
    groups = sum(kind == "weights" for kind in stage.client_sends.values())
    first = run.records[0]
    sent = first["bytes_up"] / len(first["answered"])
    assert sent - 16 * 8 * 4 - groups <= groups * each <= sent
