"""Label advice: the stated criterion, each client's own images, and a list that stays there."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from pictures import SITES, write_sites
from tacit.cli.app import app
from tacit.compare.curves import Gain, conclusion, doubling, labels_gain, mean_gain, with_share
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.data.sources import load
from tacit.engine.run import run_experiment
from tacit.inference.advice import margins, worth_labelling
from tacit.inference.advise import advise
from tacit.inference.model import load_model
from tacit.runs.folder import Run
from tacit.runs.plan import prepare


def test_the_smallest_margin_first_within_a_class() -> None:
    probs = torch.tensor([[0.7, 0.3], [0.55, 0.45], [0.9, 0.1]])
    assert worth_labelling(probs, torch.zeros(2, dtype=torch.int64), 3).tolist() == [1, 0, 2]


def test_margin_is_not_confidence() -> None:
    """0.45 to 0.05 is a clear lead, 0.5 to 0.49 is none, though the latter is the more confident one."""
    probs = torch.tensor([[0.5, 0.49, 0.01, 0.0], [0.45, 0.05, 0.25, 0.25]])
    assert margins(probs)[0] < margins(probs)[1]
    assert worth_labelling(probs, torch.zeros(4, dtype=torch.int64), 1).tolist() == [0]


def test_classes_with_few_labels_are_served_first() -> None:
    """Class 0 is the most doubtful but has labels already: the list evens the counts out."""
    probs = torch.tensor([[0.51, 0.49]] * 10 + [[0.1, 0.9]] * 4)
    chosen = worth_labelling(probs, torch.tensor([3, 0]), 5)
    assert (chosen >= 10).sum() == 4
    assert sorted((worth_labelling(probs, torch.tensor([0, 0]), 6) >= 10).tolist()) == [False] * 3 + [True] * 3
    assert len(worth_labelling(probs, torch.tensor([0, 0]), 99)) == 14  # all of them, once
    assert len(worth_labelling(probs[:0], torch.tensor([0, 0]), 5)) == 0


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def own_run(tmp_path: Path) -> Run:
    folder = write_sites(load("digits"), tmp_path / "clinics", labeled=4, unlabeled=30)
    twin = next((folder / "north" / "unlabeled").iterdir())
    (folder / "north" / "unlabeled" / "twin.png").write_bytes(twin.read_bytes())
    settings = {
        "method": {"name": "fixmatch", "preset": "smoke"},
        "data": {"name": "clinics", "sites": [str(folder / site) for site in SITES]},
        "data.partition": "sites",
        "data.clients": 3,
        "data.placement": "clients",
    }
    return run_experiment(resolve(settings), tmp_path / "run")


def test_each_client_gets_a_list_of_its_own_unlabelled_files(tmp_path: Path) -> None:
    run = own_run(tmp_path)
    result = CliRunner(env={"COLUMNS": "40"}).invoke(
        app, ["advise", str(run.folder), "-n", "8"], catch_exceptions=False
    )
    assert result.exit_code == 0
    for number, site in enumerate(SITES):  # whole paths, however narrow the screen
        path = (run.memory_folder / f"client-{number}" / "advice.csv").resolve()
        assert f"{site}: {path}\n" in result.output
    assert "smallest margin" in result.output
    assert ".png" not in result.output  # the names stay at the clients
    for number, site in enumerate(SITES):
        rows = rows_of(run.memory_folder / f"client-{number}" / "advice.csv")
        assert [row["rank"] for row in rows] == [str(rank) for rank in range(1, 9)]
        assert len({row["image"] for row in rows}) == 8
        for row in rows:
            assert f"/clinics/{site}/unlabeled/" in row["image"]
            assert Path(row["image"]).is_file()
            assert row["prediction"] != row["second"]
    north = advise(run, 99)[0]
    assert (north.unlabeled, north.listed) == (31, 30)  # the twin is not to be labelled again
    elsewhere = [path for path in run.folder.rglob("*") if path.is_file() and path.name != "advice.csv"]
    names = {Path(row["image"]).name.encode() for row in rows_of(north.file)}
    assert not [path for path in elsewhere for name in names if name in path.read_bytes()]


def test_the_margins_in_the_list_are_those_of_the_model(tmp_path: Path) -> None:
    settings = {"method.name": "fixmatch", "method.preset": "smoke", "data.subset": 400}
    run = run_experiment(resolve(settings), tmp_path / "run")
    advice = advise(run, 5)[2]
    plan = prepare(run.experiment, run.split_path)
    part = plan.split.clients[2]
    for row in rows_of(advice.file):
        index = int(row["image"].rsplit(" ", 1)[1])
        assert index in np.setdiff1d(part.unlabeled, part.labeled)
        image = torch.from_numpy(plan.dataset.train_images[index : index + 1].copy())
        probs = load_model(run.folder).probabilities(image)
        assert abs(float(margins(probs)) - float(row["margin"])) < 1e-3


# --- More labels, or more unlabelled images? --------------------------------------------------------------

GUARDED = {
    "method.name": "fixmatch",
    "method.preset": "smoke",
    "data.placement": "clients",
    "data.subset": 400,
    "data.test_subset": 200,
    "data.validation": 0.2,
    "guard.on": True,
}


def test_curves_use_shares_of_the_labels_and_as_many_steps() -> None:
    experiment = resolve(GUARDED)
    whole, half, quarter = (with_share(experiment, share, 0) for share in (1.0, 0.5, 0.25))
    assert not whole.experiment.guard.on
    for plan, share in ((half, 0.5), (quarter, 0.25)):
        for one, other in zip(whole.split.clients, plan.split.clients, strict=True):
            assert set(other.labeled) <= set(one.labeled)  # fewer of the same
        labels = [sum(len(part.labeled) for part in each.split.clients) for each in (whole, plan)]
        assert labels[1] == pytest.approx(share * labels[0], abs=10)  # each class is rounded up
        assert plan.experiment.train.epochs == round(whole.experiment.train.epochs / share)
        assert len(plan.split.test) == len(whole.split.test)
    assert with_share(experiment, 0.5, 2).experiment.seed == experiment.seed + 2
    assert quarter.setup.labeled_clients == tuple(k for k, p in enumerate(quarter.split.clients) if len(p.labeled))


def test_what_is_told_of_curves_that_follow_a_power_law() -> None:
    chance = np.random.default_rng(0)
    true = 0.3 * (1 - 2**-0.5)  # error .3 with all labels, falling with their square root
    hits = 0
    for _ in range(300):
        curves = [[1 - 0.3 * share**-0.5 + chance.normal(0, 0.01) for share in (1.0, 0.5, 0.25)] for _ in range(4)]
        gain = labels_gain(curves, 1000)
        assert gain is not None
        hits += gain.low <= true <= gain.high
    assert hits > 270  # of 95 % intervals, nearly all; the fit is a little biased
    assert doubling((1.0, 0.5, 0.25), (1.0, 1.0, 1.0), 0.01) == pytest.approx(0.0)  # nothing is left to gain
    assert mean_gain([0.1]) is None


def test_nothing_is_concluded_where_intervals_overlap() -> None:
    unsure = conclusion(Gain(0.05, -0.01, 0.1), Gain(0.02, -0.05, 0.09), "accuracy")
    assert "cannot be told" in unsure[-1]
    assert "More labels would help more" in conclusion(Gain(0.2, 0.15, 0.25), Gain(0.0, -0.1, 0.1), "accuracy")[-1]
    assert "gave more than twice the labels" in conclusion(Gain(0.0, -0.01, 0.01), Gain(0.2, 0.1, 0.3), "accuracy")[-1]
    assert "nothing is concluded" in conclusion(None, Gain(0.2, 0.1, 0.3), "accuracy")[-1]
    assert "cannot be told" in conclusion(Gain(-0.1, -0.2, -0.05), Gain(-0.3, -0.4, -0.25), "accuracy")[-1]


def test_curves_from_the_command_line(tmp_path: Path) -> None:
    run = run_experiment(resolve(GUARDED), tmp_path / "run")
    words = ["advise", str(run.folder), "--curves", "--minutes", "0"]
    for _ in range(2):  # the second time all is found again
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, words, catch_exceptions=False)
        assert "repeat 1: 0.25 of the labels" in result.output
        assert "One repeat gives no interval, so nothing is concluded" in result.output
    assert sorted(path.name for path in (tmp_path / "run-curves").iterdir()) == [
        f"labels-{share}-repeat0" for share in ("0.25", "0.5", "1")
    ]
    plain = run_experiment(resolve(GUARDED, {"guard.on": False, "rounds": 1}), tmp_path / "plain")
    with pytest.raises(TacitError, match="is no finished run with a guard"):
        CliRunner().invoke(app, ["advise", str(plain.folder), "--curves"], catch_exceptions=False)
