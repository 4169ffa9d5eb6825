"""The search for a training recipe: on the bounds, by labels kept back, resumable; what a comparison makes of it."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runs import TINY
from tacit.cli.app import complete
from tacit.cli.tune import begin
from tacit.compare import tune
from tacit.compare.results import notes, survey
from tacit.compare.rows import PendingRun, make_rows
from tacit.compare.tune import Search, Trial
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.engine.run import run_experiment

SMALL = {**TINY, "rounds": 4, "data.labels": 100, "net.name": "cnn-4", "backend.name": "local"}


def problem(**more: object):
    return resolve({"method.name": "fixmatch", "method.preset": "smoke", **SMALL, **more})


def run(job: PendingRun, label: str) -> None:
    run_experiment(job.experiment, job.folder, resume=True)


def test_every_candidate_gets_the_same_passes_and_no_test_image() -> None:
    experiment = problem(**{"train.epochs": 2})
    for settings in tune.candidates(12, seed=0):
        for share in tune.RUNGS:
            lower, upper = tune.trials_of(experiment, settings, share)
            bound = tune.bounds_of(experiment)[0]
            wanted = share * bound.rounds * bound.train.passes
            assert wanted - 1e-9 <= lower.rounds * lower.train.passes < wanted + lower.train.passes
            assert upper.rounds == lower.rounds
            assert upper.data.reveal == "all"
            assert lower.method["name"] == "fedavg"
            assert lower.data.validation == upper.data.validation == 0.2
            assert lower.data.test_subset == 10  # one a class; nobody looks at it


def test_candidates_differ_and_are_the_same_again() -> None:
    first = tune.candidates(30, seed=3)
    assert first == tune.candidates(30, seed=3) != tune.candidates(30, seed=4)
    assert len({str(sorted(settings.items())) for settings in first}) == 30


def test_the_better_half_goes_on_and_a_stopped_search_is_the_same(tmp_path: Path) -> None:
    tried = ({}, {"train.lr": 1e-6}, {"train.lr": 0.1, "server.name": "momentum", "server.momentum": 0.5})
    plan, done = Search(tried, (0.5, 1.0), "loss", 1.0), []

    def stop_after(job: PendingRun, label: str) -> None:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job.folder)
        run(job, label)

    with pytest.raises(KeyboardInterrupt):
        list(tune.search(problem(), plan, tmp_path, stop_after))
    again: list[Path] = []
    rungs = list(
        tune.search(problem(), plan, tmp_path, lambda job, label: (again.append(job.folder), run(job, label))[1])
    )
    assert not set(done) & set(again)  # what was finished is not run again
    assert [len(trials) for trials in rungs] == [3, 2]
    assert [trial.candidate for trial in rungs[0]][-1] == 1  # who hardly moves is the worst
    assert {trial.candidate for trial in rungs[1]} == {0, 2}
    assert rungs[1][0].figure >= rungs[1][1].figure
    judged = [tune.Run(folder).records[-1]["validation_images"] for folder in done + again]
    assert len(set(judged)) == 1
    assert judged[0] > 0


def test_a_trial_that_diverged_is_the_worst(tmp_path: Path) -> None:
    class Diverged:
        records = ({"validation_accuracy": None},)

    class Fine:
        records = ({"validation_accuracy": 0.1},)

    assert tune.figure_of([Fine(), Diverged()], "accuracy") < tune.figure_of([Fine(), Fine()], "accuracy") == 0.1


def test_too_little_time_is_refused_before_the_search() -> None:
    with pytest.raises(TacitError, match=r"about 25 minutes here .* Give --minutes 25 or more"):
        tune.fitting(5, full=10.0)


def test_a_trial_that_was_timed_before_is_not_taken_for_a_quick_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a refusal for want of time: the second time the trial is there, and takes none."""
    timed: list[float] = []

    def refuse(minutes: float, full: float) -> int:
        timed.append(full)
        raise TacitError("too little time")

    monkeypatch.setattr(tune, "fitting", refuse)
    for _ in range(2):
        with pytest.raises(TacitError, match="too little time"):
            begin(problem(), 5.0, "accuracy", tmp_path)
    assert timed[0] == timed[1] > 0


def test_the_command_writes_a_file_that_a_comparison_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    problem_file = tmp_path / "photos.toml"
    experiment = problem()
    problem_file.write_text(experiment.to_toml())
    folder = tune.search_folder(Path("runs/tune"), "photos", experiment, "accuracy")
    tried = ({}, {**tune.ALWAYS, "train.lr": 0.2, "train.batch": 16, "server.name": "momentum"})
    folder.mkdir(parents=True)
    tune.save_plan(Search(tried, (1.0,), "accuracy", 3.0), folder)
    said = CliRunner().invoke(complete(), ["tune", "photos.toml", "--minutes", "3"], catch_exceptions=False)
    assert said.exit_code == 0, said.output
    assert "photos-tuned.toml" in said.output
    tuned = tomllib.loads((tmp_path / "photos-tuned.toml").read_text())
    assert "2 ways to train were tried within 3 minutes on the bounds" in tuned["tuned"]
    assert resolve(tuned).rounds == 4
    refused = CliRunner().invoke(complete(), ["tune", "photos.toml"])
    assert isinstance(refused.exception, TacitError)
    assert "is there already" in str(refused.exception)
    from tacit.cli.compare import training_in

    settings = training_in(Path("photos-tuned.toml"))
    rows = make_rows(["photos.toml"], settings, runs=tmp_path / "compare")
    assert rows[0].experiment.train == resolve(tuned).train
    (note,) = notes([rows], survey(rows))
    assert note.startswith("One training recipe for all rows: 2 ways to train were tried")


def test_rows_that_train_otherwise_are_told(tmp_path: Path) -> None:
    for name, rate in (("a", 0.1), ("b", 0.2)):
        (tmp_path / f"{name}.toml").write_text(problem(**{"train.lr": rate, "tuned": f"by {name}"}).to_toml())
    rows = make_rows([str(tmp_path / "a.toml"), str(tmp_path / "b.toml")], runs=tmp_path)
    (told,) = notes([rows], survey(rows))
    assert told.startswith("Rows have training recipes of their own: a: by a; b: by b")


def test_a_winner_that_chance_may_have_made_is_told() -> None:
    clear = [[Trial(1, 1.0, 0.9), Trial(0, 1.0, 0.5)]]
    assert tune.doubt(clear, 1000) == ""
    close = [Trial(1, 0.5, 0.51), Trial(0, 0.5, 0.5)]
    assert "either may be the better" in tune.doubt([close], 100)
    assert "With 50 % of the passes" in tune.doubt([close, [Trial(1, 1.0, 0.6)]], 100)  # the winner was alone at last
