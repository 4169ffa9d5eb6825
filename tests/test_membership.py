"""The audit of a model: what is known of its figures, and that it finds what is there and nothing where nothing is."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve
from typer.testing import CliRunner

from tacit.cli.app import complete
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.seeds import numpy_generator
from tacit.engine.run import run_experiment
from tacit.evaluation.membership import auc, hits_at, separation
from tacit.inference.membership import (
    against_others,
    audit_model,
    audit_text,
    same_shares,
    saved_audit,
    trained_on,
)
from tacit.inference.model import Model, load_model
from tacit.runs.folder import Run
from tacit.runs.integrity import check_run
from tacit.runs.plan import Plan, prepare

FEW_LABELS = {
    "method.name": "fedavg",
    "method.preset": "smoke",
    "data.placement": "server",
    "data.labels": 100,
    "data.clients": 2,
    "train.server_epochs": 1,
    "net.name": "cnn-16",
    "net.norm": "gn",
    "views.weak": "none",
}


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A net that has seen a hundred digits a hundred times."""
    settings = {**FEW_LABELS, "rounds": 1, "train.server_epochs": 100, "train.lr": 0.05}
    return run_experiment(resolve(settings), tmp_path_factory.mktemp("run") / "run")


def plan_of(run: Run) -> Plan:
    return prepare(run.experiment, run.split_path)


def test_a_net_that_knows_its_images_by_heart_gives_them_away(overfitted: Run) -> None:
    found = audit_model(load_model(overfitted.folder), plan_of(overfitted), overfitted.records)
    assert found.labeled is not None
    assert found.labeled.members == 100
    assert found.labeled.others % 100 == 0
    for attack in (found.labeled.loss, found.labeled.lira):
        assert attack.auc > 0.65
        assert attack.auc_interval[0] > 0.55
        assert attack.auc_interval[0] < attack.auc < attack.auc_interval[1]
        assert attack.hits is not None
        assert attack.hits_interval is not None
        assert attack.hits_interval[0] <= attack.hits <= attack.hits_interval[1]
    assert found.unlabeled is None
    assert "no pseudo-labels" in found.remarks[0]


def test_an_untrained_net_gives_nothing_away(overfitted: Run) -> None:
    trained, plan = load_model(overfitted.folder), plan_of(overfitted)
    for seed in range(3):
        fresh = replace(plan.setup, seed=seed).first_weights()[0]
        found = audit_model(Model(trained.description, fresh, trained.place), plan, overfitted.records)
        assert found.labeled is not None
        for attack in (found.labeled.loss, found.labeled.lira):
            assert 0.4 < attack.auc < 0.6
            assert attack.auc_interval[0] < 0.5 < attack.auc_interval[1]


def test_the_same_numbers_again(overfitted: Run) -> None:
    first, again = (
        audit_model(load_model(overfitted.folder), plan_of(overfitted), overfitted.records) for _ in range(2)
    )
    assert first == again


def test_pseudo_labelled_images_are_a_group_of_their_own(tiny: Callable[..., Run]) -> None:
    run = tiny("fixmatch", "server")
    plan = plan_of(run)
    found = audit_model(load_model(run.folder), plan, run.records)
    labeled, unlabeled = trained_on(plan, run.records)
    assert set(labeled) == set(plan.split.server)
    assert not set(unlabeled) & set(labeled)
    assert found.labeled is not None
    assert found.unlabeled is not None
    assert found.unlabeled.members <= len(unlabeled)
    assert found.remarks == ()


def test_who_never_answered_was_not_learned_from(tiny: Callable[..., Run]) -> None:
    run = tiny("fedavg", "clients")
    plan = plan_of(run)
    away = [{**record, "answered": [0]} for record in run.records]
    assert set(trained_on(plan, away)[0]) == set(plan.split.clients[0].labeled)


# --- Figures ------------------------------------------------------------------------------------------------


def test_the_figures_are_those_of_scikit_learn() -> None:
    chance = np.random.default_rng(0)
    for ties in (3, 0):
        members, others = chance.normal(0.5, 1, 400), chance.normal(0, 1, 700)
        if ties:
            members, others = members.round(1), others.round(1)
        truth, scores = np.r_[np.ones(400), np.zeros(700)], np.r_[members, others]
        assert auc(members, others) == pytest.approx(roc_auc_score(truth, scores))
        alarms, hits, _ = roc_curve(truth, scores, drop_intermediate=False)
        assert hits_at(members, others) == pytest.approx(hits[alarms <= 0.01].max())


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Two Gaussians half a deviation apart: the true area is Φ(0.5 / √2) = 0.638."""
    chance = np.random.default_rng(0)
    covered = 0
    for _ in range(50):
        low, high = separation(chance.normal(0.5, 1, 150), chance.normal(0, 1, 150), chance).auc_interval
        covered += low < 0.6382 < high
    assert 43 <= covered <= 50


def test_few_others_tell_nothing_of_rare_false_alarms() -> None:
    found = separation(np.arange(99.0), np.arange(99.0), np.random.default_rng(0))
    assert (found.hits, found.hits_interval) == (None, None)
    assert found.auc == 0.5


def test_both_sides_have_the_same_share_of_each_class() -> None:
    chance = np.random.default_rng(0)
    labels = np.r_[chance.choice(4, 300, p=[0.7, 0.1, 0.1, 0.1]), chance.choice(4, 900), np.full(50, 4)]
    is_member = np.arange(len(labels)) < 300
    chosen = same_shares(labels, is_member, chance)
    own, rest = (np.bincount(labels[chosen[is_member[chosen] == side]], minlength=5) for side in (True, False))
    assert len(np.unique(chosen)) == len(chosen)
    assert rest.sum() % own.sum() == 0
    assert (rest == own * (rest.sum() // own.sum())).all()
    assert own[4] == 0
    assert same_shares(labels, is_member, chance, most=50).size <= 100


def test_comparing_with_others_favours_nobody() -> None:
    """Members and others of one distribution, classes far apart: an area of one half, on average."""
    areas = []
    for seed in range(40):
        chance = numpy_generator(seed, "fair")
        labels = chance.integers(0, 5, 240)
        scores = against_others(chance.normal(10.0 * labels, 1 + labels), labels, np.arange(240) < 120, chance)
        areas.append(auc(scores[:120], scores[120:]))
    assert np.mean(areas) == pytest.approx(0.5, abs=0.02)


# --- The command, the card, refusals --------------------------------------------------------------------------------


def test_the_command_writes_the_figures_and_the_card_says_them(
    overfitted: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    folder = overfitted.folder
    assert "gives away" not in (folder / "card.md").read_text()
    result = CliRunner().invoke(complete(), ["audit", str(folder)])
    assert result.exit_code == 0, result.output
    stored = json.loads((folder / "audit.json").read_text())
    card = (folder / "card.md").read_text()
    figures = stored["labeled"]["lira"]
    assert "## What it gives away about its training images" in card
    assert (
        "**Who has the model and an image can tell better than by guessing whether the model learned from it**" in card
    )
    assert f"| {figures['auc']:.3f} ({figures['auc_interval'][0]:.3f} to {figures['auc_interval'][1]:.3f}) |" in card
    assert f"{figures['auc']:.3f}" in result.output
    assert "gives away" in (folder / "card.html").read_text()
    assert check_run(folder) == []
    for name in ("card.md", "summary.json"):
        (folder / name).unlink()
    run_experiment(overfitted.experiment, folder, resume=True)
    assert (folder / "card.md").read_text() == card  # made again, with the audit


def test_an_audit_of_another_model_is_none(overfitted: Run) -> None:
    weights = overfitted.weights
    found = audit_model(load_model(overfitted.folder), plan_of(overfitted), overfitted.records)
    (overfitted.folder / "audit.json").write_text(audit_text(found))
    assert saved_audit(overfitted.folder, weights) == found
    other = {name: tensor + 1 for name, tensor in weights.items()}
    assert saved_audit(overfitted.folder, other) is None
    (overfitted.folder / "audit.json").write_text("{")
    assert saved_audit(overfitted.folder, weights) is None


def refusal(run: Run, **changes: object) -> str:
    plan = replace(plan_of(run), **changes)
    with pytest.raises(TacitError) as caught:
        audit_model(load_model(run.folder), plan, run.records)
    return str(caught.value)


def test_what_cannot_be_audited_is_refused(overfitted: Run, tmp_path: Path) -> None:
    plan = plan_of(overfitted)
    at_sites = resolve(overfitted.experiment.to_dict(), {"backend.name": "flower"})
    assert "its training images are there and not here" in refusal(overfitted, experiment=at_sites)
    untested = replace(plan.split, test=plan.split.test[:0])
    assert "This run has no test images" in refusal(overfitted, split=untested)
    few = replace(plan.split, server=plan.split.server[:10])
    assert "Fewer than 20 images with labels" in refusal(overfitted, split=few)
    result = CliRunner().invoke(complete(), ["audit", str(tmp_path)])
    assert isinstance(result.exception, TacitError)
