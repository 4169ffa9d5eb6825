"""Several methods side by side: what is missing is run, what is not comparable is said, and the table is right."""

import csv
import io
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from typer.testing import CliRunner

from pictures import write_sites
from runs import TINY, digest, timeless
from tacit.cli.app import complete
from tacit.compare import tables
from tacit.compare.convergence import RULE, Convergence
from tacit.compare.recalls import mean_recall
from tacit.compare.results import (
    Result,
    blocks_of,
    bound_of,
    bounds_of,
    budget_of,
    can_reveal,
    differs,
    holdings,
    label_passes_a_round,
    notes,
    results,
    survey,
    with_bounds,
)
from tacit.compare.rows import PendingRun, Row, identity, make_rows
from tacit.compare.t_test import paired_test, two_sided
from tacit.compare.verdicts import unsettled, verdicts
from tacit.config.recipes import known_recipes, load_recipe
from tacit.config.resolve import resolve
from tacit.config.scale import lengths, scaled
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.data.sources import load
from tacit.engine.run import run_experiment
from tacit.pieces.loss import LabelLoss
from tacit.report.collect import collect
from tacit.runs.folder import Run
from tacit.runs.plan import prepare

APP = complete()
SMOKE = {"method.preset": "smoke", "data.placement": "clients", "data.cover": 0, "rounds": 2, **TINY}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, **changes: Any) -> str:
    """An experiment of seconds as a TOML file."""
    settings = {**SMOKE, "method.name": name, **{key.replace("__", "."): value for key, value in changes.items()}}
    path = Path(f"{changes.get('title', name)}.toml")
    path.write_text(resolve(settings).to_toml())
    return str(path)


def compare(*words: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(APP, ["compare", *words])
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def figures(path: Path) -> list[dict[str, Any]]:
    """The table as figures, without what a clock says."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in json.loads(path.read_text())]


# --- The test over seeds ----------------------------------------------------------------------------------


def test_the_paired_test_by_hand_and_by_scipy() -> None:
    # Differences 1, 2, 3: mean 2, standard deviation 1, t = 2√3, two degrees: p = 1 - t/√(2 + t²) = 1 - √(12/14).
    found = paired_test([2, 4, 6], [1, 2, 3])
    assert found is not None
    assert found.p is not None
    assert found.difference == 2
    assert found.p == pytest.approx(1 - math.sqrt(12 / 14))
    generator = np.random.default_rng(0)
    for count in range(2, 12):
        ours, theirs = generator.normal(size=count), generator.normal(size=count)
        mine = paired_test(list(ours), list(theirs))
        assert mine is not None
        assert mine.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue, abs=1e-12)
    for degrees in range(1, 30):
        for t in (0.0, 0.3, 1.0, 2.5, 7.0, -2.0):
            assert two_sided(t, degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), abs=1e-12)


def test_pairs_matter_and_too_few_have_no_p() -> None:
    """Seeds move both rows far, but the difference is steady: an unpaired test would see nothing."""
    ours, theirs = [0.50, 0.71, 0.90], [0.48, 0.70, 0.88]
    found = paired_test(ours, theirs)
    assert found is not None
    assert found.p is not None
    low, high = stats.ttest_rel(ours, theirs).confidence_interval(0.95)
    assert found.half_width == pytest.approx((high - low) / 2)
    assert found.p < 0.05 < stats.ttest_ind(ours, theirs).pvalue
    assert paired_test([0.5], [0.4]) == (0.1, None, None)
    assert paired_test([], []) is None
    assert paired_test([0.5, 0.6], [0.5, 0.6]) == (0.0, 1.0, 0.0)


# --- Who takes part ---------------------------------------------------------------------------------------


def test_names_stand_for_recipes_folders_files_and_runs() -> None:
    table1 = [row.label for row in make_rows(["cbafed/table1"])]
    assert table1 == [row.label for row in make_rows(["recipes/cbafed/table1"])]  # also far from the checkout
    assert len(table1) == sum(name.startswith("cbafed/table1/") for name in known_recipes())
    own, recipe = make_rows([write("fedavg"), "demo"])
    assert (own.label, recipe.label) == ("fedavg", "demo")
    assert recipe.experiment == resolve(load_recipe("demo"))


def test_only_chooses_by_part_of_the_name_or_by_pattern() -> None:
    rows = make_rows(["cbafed/table1"], only=["fashion-mnist"])
    assert {row.experiment.data.name for row in rows} == {"fashion-mnist"}
    assert [row.label for row in make_rows(["cbafed/table1"], only=["svhn-l*", "*/cifar10-u*"])] == [
        "cifar10-upper",
        "svhn-lower",
    ]
    with pytest.raises(TacitError, match=r"--only nothing leaves nothing of \d+ experiments: cbafed/table1/cif"):
        make_rows(["cbafed/table1"], only=["nothing"])
    with pytest.raises(TacitError, match="neither a recipe nor a file"):
        make_rows(["no-such-thing"])
    Path("empty").mkdir()
    with pytest.raises(TacitError, match="neither runs of tacit nor recipes"):
        make_rows(["empty"])


def test_seeds_share_a_row_and_settings_have_their_own_folder() -> None:
    name = write("fedavg")
    row, *others = make_rows([name, name], seeds=3)
    assert others == []  # given twice, compared once
    assert [job.experiment.seed for job in row.jobs] == [0, 1, 2]
    assert len({job.folder for job in row.jobs}) == 3
    (changed,) = make_rows([name], {"train.lr": 0.07}, seeds=3)
    assert not {job.folder for job in changed.jobs} & {job.folder for job in row.jobs}
    (retitled,) = make_rows([name], {"title": "x", "backend.workers": 1}, seeds=3)  # nothing that changes the outcome
    assert [job.folder for job in retitled.jobs] == [job.folder for job in row.jobs]


def test_runs_that_differ_in_the_seed_only_are_one_row() -> None:
    experiment = resolve(SMOKE, {"method.name": "fedavg"})
    for seed in (4, 5):
        one = experiment.model_copy(update={"seed": seed})
        run_experiment(one, Path(f"mine/a-seed{seed}"))
    (row,) = make_rows(["mine"])
    assert row.label == "a"
    assert [(job.experiment.seed, job.finished) for job in row.jobs] == [(4, True), (5, True)]
    (more,) = make_rows(["mine"], seeds=3)
    assert [(job.experiment.seed, job.finished) for job in more.jobs] == [(4, True), (5, True), (6, False)]
    with pytest.raises(TacitError, match=r"is a run already.*\n.*train.lr.*\n.*experiment.toml"):
        make_rows(["mine/a-seed4"], {"train.lr": 0.5})
    with pytest.raises(TacitError, match="is a run already"):
        make_rows(["mine/a-seed4"], scale="tenth")


# --- Are they comparable? ---------------------------------------------------------------------------------


def rows_of(*experiments: Experiment) -> list[Row]:
    return [Row(f"row{k}", (PendingRun(one, Path(f"r{k}")),)) for k, one in enumerate(experiments)]


def words(*experiments: Experiment) -> list[list[str]]:
    rows = rows_of(*experiments)
    seen = survey(rows)
    return [differs(row, rows[0], seen) for row in rows]


def test_what_is_not_on_a_par_is_said() -> None:
    def one(**changes: Any) -> Experiment:
        settings = {key.replace("__", "."): value for key, value in changes.items()}
        return resolve(SMOKE, {"method.name": "fedavg"}, settings)

    fair = [one(), one(method__name="fixmatch", method__warmup=0), one(data__reveal="all"), one(train__lr=0.5)]
    assert words(*fair) == [[], [], [], []]
    assert notes(blocks_of(rows_of(*fair)), survey(rows_of(*fair))) == []
    assert words(one(), one(rounds=3))[1] == ["budget"]
    assert words(one(), one(train__epochs=2))[1] == ["budget"]
    assert words(one(), one(participation__number=2))[1] == ["budget"]
    assert words(one(), one(method__name="fixmatch", method__warmup=1))[1] == ["budget"]  # the warm-up counts
    long = one(method__name="fixmatch", method__warmup=1, method__warmup_epochs=50)
    assert budget_of(long).on_labels == 50 + 2  # one long round of warm-up, then two rounds
    assert words(one(), one(net__name="cnn-8"))[1] == ["net"]
    assert words(one(), one(reporting="best"))[1] == ["reporting"]
    assert words(one(), one(seed=1))[1] == ["seeds"]
    rows = rows_of(one(), one(rounds=3))
    assert "Not the same budget. 2 rounds × 4 clients, 2 passes over labelled images" in " ".join(
        notes(blocks_of(rows), survey(rows))
    )


def test_the_split_is_compared_itself_not_its_settings(tmp_path: Path) -> None:
    plan = prepare(resolve(SMOKE, {"method.name": "fedavg"}))
    plan.split.save(tmp_path / "same.npz")
    prepare(resolve(SMOKE, {"method.name": "fedavg", "seed": 7})).split.save(tmp_path / "other.npz")
    drawn = resolve(SMOKE, {"method.name": "fedavg"})
    same, other = (
        resolve(drawn.to_dict(), {"data.split": str(tmp_path / f"{name}.npz")}) for name in ("same", "other")
    )
    assert words(drawn, same, other) == [[], [], ["split"]]
    revealed = prepare(resolve(drawn.to_dict(), {"data.reveal": "all"})).split
    assert holdings(revealed).parties == holdings(plan.split).parties
    assert holdings(revealed).labels != holdings(plan.split).labels


def test_different_problems_are_blocks_of_their_own() -> None:
    skewed, even = (resolve(SMOKE, {"method.name": "fedavg", "data.alpha": alpha}) for alpha in (0.3, 10.0))
    rows = rows_of(skewed, even, resolve(skewed.to_dict(), {"data.reveal": "all"}))
    blocks = blocks_of(rows)
    assert [[row.label for row in block] for block in blocks] == [["row0", "row2"], ["row1"]]
    (note, *_) = notes(blocks, survey(rows))
    assert "2 different problems (they differ in data.alpha)" in note
    assert [bound_of(row.experiment) for row in rows] == ["lower", "lower", "upper"]
    plus = resolve(SMOKE, {"method.name": "fedavg", "method.plus": True})
    assert bound_of(plus) == ""  # FedAvg+ is a method, not the bound


# --- The table --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """A method between its bounds, two seeds, with published numbers."""
    folder = tmp_path_factory.mktemp("finished")
    paper = {"paper.source": "A & B, Table 1"}
    rows = []
    for label, changes in {
        "fix_match": {"method.name": "fixmatch", "method.warmup": 0, "paper.accuracy": 80.0},
        "lower": {"method.name": "fedavg", "paper.accuracy": 70.0},
        "upper": {"method.name": "fedavg", "data.reveal": "all", "paper.accuracy": 90.0},
    }.items():
        experiments = [resolve(SMOKE, changes, paper, {"seed": seed}) for seed in (0, 1)]
        rows.append(Row(label, tuple(PendingRun(one, folder / f"{label}-seed{one.seed}") for one in experiments)))
    for row in rows:
        for job in row.jobs:
            run_experiment(job.experiment, job.folder)
    return rows


@pytest.fixture
def converged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the bounds of tests, which have two rounds, had converged."""
    monkeypatch.setattr("tacit.compare.results.of_runs", lambda records, figure: Convergence(0.0))


def test_no_gap_between_bounds_that_have_not_converged(finished: list[Row]) -> None:
    blocks = results(finished, survey(finished))
    assert [line.gap for line in blocks[0]] == [None, None, None]
    (why,) = unsettled(blocks)
    assert why.startswith("No gap is shown. Whether the lower bound has converged cannot be told")
    assert RULE in why
    for left_out in ("", "upper"):  # nobody would ask for one
        assert unsettled([[line for line in blocks[0] if line.bound != left_out]]) == []


@pytest.mark.usefixtures("converged")
def test_the_figures_are_those_of_the_runs(finished: list[Row]) -> None:
    ((method, lower, upper),) = results(finished, survey(finished))
    by_hand = {row.label: [Run(job.folder).summary["accuracy"] for job in row.jobs] for row in finished}
    means = {label: statistics.fmean(values) for label, values in by_hand.items()}
    assert method.mean("accuracy") == pytest.approx(means["fix_match"])
    assert method.spread("accuracy") == pytest.approx(statistics.stdev(by_hand["fix_match"]))
    gap = (means["fix_match"] - means["lower"]) / (means["upper"] - means["lower"])
    assert method.gap == pytest.approx(gap)
    assert (lower.gap, upper.gap) == (None, None)
    assert method.paper_gap == pytest.approx(0.5)  # 80 lies half-way from 70 to 90
    assert method.against_first is None
    test = stats.ttest_rel(by_hand["lower"], by_hand["fix_match"])
    assert lower.against_first is not None
    assert lower.against_first.difference == pytest.approx(means["lower"] - means["fix_match"])
    assert lower.against_first.p == pytest.approx(test.pvalue)
    records = Run(finished[0].jobs[0].folder).records
    assert method.runs[0]["bytes"] == sum(record["bytes_up"] + record["bytes_down"] for record in records)
    assert method.images == TINY["data.subset"]


def test_one_seed_has_no_spread_and_no_p(finished: list[Row]) -> None:
    single = [Row(row.label, row.jobs[:1]) for row in finished]
    ((method, lower, _),) = results(single, survey(single))
    assert method.spread("accuracy") is None
    assert lower.against_first is not None
    assert lower.against_first.p is None
    sheet = tables.sheet([[method, lower]])
    assert "p" not in sheet.heads
    assert "±" not in sheet.sections[0][1][0][sheet.heads.index("accuracy")]


def test_forms(finished: list[Row]) -> None:
    blocks = results(finished, survey(finished))
    sheet = tables.sheet(blocks, title="50 % & more", notes=["beware"])
    markdown = tables.markdown(sheet)
    assert "| paper |" in markdown
    assert "| our scale |" in markdown
    assert "400 images, 2 rounds, cnn-16 | 80.00 | 50 % |" in markdown
    assert "- Paper: A & B, Table 1. Ours is at 'our scale'." in markdown
    assert "- beware" in markdown
    assert len({line.count("|") for line in markdown.splitlines() if line.startswith("|")}) == 1
    latex = tables.latex(sheet)
    assert r"\caption{50 \% \& more}" in latex
    assert r"fix\_match" in latex
    assert r"A \& B" in latex
    assert "±" not in latex
    body = [line for line in latex.splitlines() if line.endswith(r"\\")]
    assert {line.replace(r"\&", "").count("&") for line in body} == {len(sheet.heads) - 1}
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(tables.records(blocks)))))
    assert [row["row"] for row in rows] == ["fix_match", "lower", "upper"]
    assert float(rows[0]["accuracy_mean"]) == blocks[0][0].mean("accuracy")
    assert rows[1]["test"] == "paired t-test over seeds, two-sided"
    assert json.loads(tables.json_text(tables.records(blocks)))[0]["paper_gap_closed"] == pytest.approx(0.5)


def test_a_narrow_screen_cuts_nothing_off(finished: list[Row]) -> None:
    from tacit.core.console import SafeConsole

    sheet = tables.sheet(results(finished, survey(finished)))
    screen = SafeConsole(width=60, file=io.StringIO(), record=True)
    shown = tables.for_screen(sheet, 60)
    for table in shown:
        screen.print(table)
    text = screen.export_text()
    assert len(shown) > 1
    assert "…" not in text
    for head in sheet.heads:
        assert head in text


# --- The command ------------------------------------------------------------------------------------------


def test_interrupted_in_the_middle_it_finishes_with_the_same_table(tmp_path: Path) -> None:
    """Three methods, three seeds; Ctrl-C in the middle, then the same words again: the same figures, to the bit."""
    names = [write(name) for name in ("fixmatch", "fedavg", "fed_consist")]
    common = [*names, "--seeds", "3"]
    compare(*common, "--runs", "whole", "-o", "whole.json", "--quiet")
    expected = figures(Path("whole.json"))
    assert [row["seeds"] for row in expected] == ["0 1 2"] * 3

    words = [sys.executable, "-m", "tacit", "compare", *common, "--runs", "cut", "-o", "cut.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    deadline = time.monotonic() + 120
    while len(list(Path("cut").glob("*/summary.json"))) < 4:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 130, output
    assert "Stopped. All finished rounds are saved in" in output
    assert "tacit compare fixmatch.toml fedavg.toml fed_consist.toml --seeds 3" in output
    assert "Traceback" not in output
    assert not Path("cut.json").exists()
    done = {path.parent.name: path.stat().st_mtime_ns for path in Path("cut").glob("*/summary.json")}
    assert 4 <= len(done) < 9

    said = compare(*common, "--runs", "cut", "-o", "cut.json")
    assert f"9 runs: {len(done)} finished, {9 - len(done)} to do." in said
    assert figures(Path("cut.json")) == expected
    assert {name: (Path("cut") / name / "summary.json").stat().st_mtime_ns for name in done} == done  # not run again
    for folder in Path("whole").iterdir():
        assert digest(Run(folder)) == digest(Run(Path("cut") / folder.name))
        assert timeless(Run(folder)) == timeless(Run(Path("cut") / folder.name))
    said = compare(*common, "--runs", "cut")
    assert "9 runs: 9 finished, 0 to do." in said


def test_differences_are_said_before_the_work_and_stay_in_the_table() -> None:
    short, long = write("fedavg", title="short"), write("fedavg", title="long", rounds=3)
    dry = compare(short, long, "--dry-run")
    assert "2 rows, 2 runs: 0 finished, 2 to do." in dry
    assert "Note: Not the same budget." in dry
    assert not Path("runs").exists()  # nothing was run
    table = compare(short, long, "--format", "markdown", "--quiet")
    assert table.startswith("digits: dirichlet")
    assert "| budget |" in table
    assert "- Not the same budget. 2 rounds" in table


def test_impossible_rows_are_refused_before_any_run() -> None:
    good, bad = write("fedavg"), write("fixmatch", data__clients=4, net__name="cnn-16")
    Path(bad).write_text(Path(bad).read_text().replace('name = "cnn-16"', 'name = "cnn-big"'))
    result = CliRunner().invoke(APP, ["compare", good, bad])
    assert isinstance(result.exception, TacitError)
    assert "There is no net 'cnn-big'" in str(result.exception)
    assert not Path("runs").exists()


def test_bounds_can_be_added(finished: list[Row]) -> None:
    rows = with_bounds(finished[:1], Path("b"))
    assert [row.label for row in rows] == ["fix_match", "lower bound", "upper bound"]
    assert [len(row.jobs) for row in rows] == [2, 2, 2]
    assert rows[1].experiment.paper.accuracy is None  # the method's number is not the bound's
    assert all(not differs(row, rows[0], survey(rows)) for row in rows)
    assert len(with_bounds(finished, Path("b"))) == 3  # nothing is missing there


@pytest.mark.usefixtures("converged")
def test_the_demo_shows_a_method_between_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = {**SMOKE, "title": "Tiny", "method.name": "fixmatch"}
    monkeypatch.setattr("tacit.cli.demo.choose_recipe", lambda screen: recipe)
    result = CliRunner(env={"COLUMNS": "120"}).invoke(APP, ["demo", "--out", "demo"], catch_exceptions=False)
    assert result.exit_code == 0
    for label in ("lower bound", "fixmatch", "upper bound"):
        assert re.search(rf"^ {label} +\d+\.\d +\d+\.\d", result.output, flags=re.MULTILINE)
    found = json.loads(Path("demo/comparison.json").read_text())
    low, method, high = (found["runs"][label]["accuracy"] for label in ("lower bound", "fixmatch", "upper bound"))
    assert found["gap_closed"] == pytest.approx((method - low) / (high - low))
    assert Run("demo/fixmatch").summary["gap_closed"] == found["gap_closed"]


# --- Smaller, with the same protocol ----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(known_recipes()))
def test_a_tenth_keeps_the_protocol(name: str) -> None:
    """Every recipe: less data, fewer rounds, a narrower net, and nothing else."""
    whole = resolve(load_recipe(name))
    small, said = scaled(whole, "tenth")
    assert said.startswith("scale 0.1: ")
    assert said in small.title
    before, after = whole.to_dict(), small.to_dict()
    free = {"data": {"subset", "labels", "min_size"}, "net": {"name"}, "paper": {"source"}}
    free["method"] = set(lengths(whole.method))
    for section, values in before.items():
        if isinstance(values, dict):
            kept = set(values) - free.get(section, set())
            assert {key: after[section][key] for key in kept} == {key: values[key] for key in kept}
        elif section not in ("rounds", "evaluate_every", "title"):
            assert after[section] == values
    assert small.rounds == math.ceil(whole.rounds / 10)
    if whole.data.placement != "some-clients" and small.data.labels * 10 == whole.data.labels:
        images = whole.data.subset or {"cifar10": 50000, "cifar100": 50000, "svhn": 73257, "mnist": 60000}.get(
            whole.data.name, small.data.subset * 10
        )
        assert small.data.labels / small.data.subset == pytest.approx(whole.data.labels / images, rel=1e-3)


def test_what_was_set_by_hand_is_not_scaled() -> None:
    experiment = resolve(load_recipe("cbafed/table1/fashion-mnist-cbafed"), {"rounds": 7, "net.name": "cnn"})
    small, said = scaled(experiment, "tenth", fixed=("rounds", "net.name"))
    assert (small.rounds, small.net.name, small.data.subset, small.method["warmup_epochs"]) == (7, "cnn", 6000, 51)
    assert "rounds" not in said
    assert scaled(experiment, "full") == (experiment, "")
    assert identity(scaled(experiment, "1")[0]) == identity(experiment)


def test_the_table_states_the_scale() -> None:
    name = write("fixmatch", rounds=4, method__warmup=2, paper__accuracy=99.0, paper__source="T, Table 9")
    table = compare(name, "--scale", "half", "--format", "markdown", "--quiet")
    assert "| 200 images, 3 rounds, cnn-11 | 99.00 |" in table
    assert "Reduced scale 0.5: 200 of 400 training images, 50 of 100 labels, 2 of 4 rounds, 1 of 2 warmup" in table
    assert "T, Table 9, at full scale: 400 images, 4 rounds, cnn-16" in table


# --- What is one experiment -------------------------------------------------------------------------------


def test_report_and_compare_agree_on_what_is_one_experiment() -> None:
    """Seed, device, backend, title and a paper's number do not make another experiment; anything else does."""
    changes: dict[str, dict[str, Any]] = {
        "first": {},
        "seed": {"seed": 1},
        "device": {"seed": 2, "device": "cpu"},
        "backend": {"seed": 3, "backend.name": "local", "backend.workers": 3},
        "people": {"seed": 4, "title": "another", "paper.accuracy": 50.0, "paper.source": "x"},
        "rate": {"seed": 5, "train.lr": 0.07},
        "device and rate": {"seed": 6, "train.lr": 0.07, "device": "cuda"},
        "reporting": {"seed": 7, "reporting": "best"},
    }
    for name, change in changes.items():
        folder = Path("all") / name
        folder.mkdir(parents=True)
        (folder / "experiment.toml").write_text(resolve(SMOKE, {"method.name": "fedavg"}, change).to_toml())
    expected = {frozenset({0, 1, 2, 3, 4}), frozenset({5, 6}), frozenset({7})}
    rows = make_rows(["all"])
    assert {frozenset(job.experiment.seed for job in row.jobs) for row in rows} == expected
    assert {frozenset(group["seeds"]) for group in collect([Path("all")])["groups"]} == expected
    kept = [job.experiment for row in rows for job in row.jobs]
    assert identity(kept[0]) == identity(kept[0].model_copy(update={"device": "cuda"}))  # the evidence's shelf
    assert len({identity(one) for one in kept}) == len(kept)


def test_a_device_has_a_folder_of_its_own_and_is_kept_on_resume() -> None:
    """A run is not resumed on another device, so a comparison must not find the other device's folder."""
    name = write("fedavg")
    (here,), (there,) = make_rows([name]), make_rows([name], {"device": "cpu"})
    assert here.jobs[0].folder != there.jobs[0].folder
    assert identity(here.experiment) == identity(there.experiment)
    there.jobs[0].folder.mkdir(parents=True)
    (there.jobs[0].folder / "experiment.toml").write_text(there.experiment.to_toml())
    with pytest.raises(TacitError, match="device: 'cpu' in the run, 'auto' now"):
        run_experiment(here.experiment, there.jobs[0].folder, resume=True)


def line(accuracies: list[float], bound: str = "", label: str = "ours") -> Result:
    """A finished row with these accuracies, one a seed."""
    runs = {seed: {"accuracy": value} for seed, value in enumerate(accuracies)}
    experiment = resolve({"method.name": "fixmatch"})
    return Result(label, "", experiment, 0, runs, bound, None, None, None, ())


@pytest.mark.parametrize(
    ("ours", "ends"),
    [
        ([0.80, 0.83, 0.81], "3 seeds): the unlabelled images helped."),
        ([0.60, 0.62, 0.60], "3 seeds): it did harm. Train on the labels alone, or try another method."),
        ([0.65, 0.80, 0.70], "3 seeds): no difference that so many seeds can show."),
        ([0.7, 0.72, 0.71], "in each of 3 seeds, which is no answer: test on more images, or run more seeds."),
        ([0.80], "with one seed, which is no answer: run it with --seeds 3 or more."),
    ],
)
def test_whether_the_unlabelled_images_helped_is_a_sentence(ours: list[float], ends: str) -> None:
    (text,) = verdicts([[line(ours), line([0.70, 0.72, 0.71], "lower", "labels"), line([0.9], "upper", "all")]])
    assert text.startswith("ours against the labels alone: ")
    assert text.endswith(ends)


def test_no_upper_bound_where_nothing_can_be_revealed(tmp_path: Path) -> None:
    """Somebody's own unlabelled images: nobody has their labels."""
    write_sites(load("digits"), tmp_path / "photos", labeled=2, unlabeled=3)
    known = resolve({"method.name": "fixmatch", "data.name": "digits"})
    assert can_reveal(known)
    own = resolve(known.to_dict(), {"data.sites": [str(path) for path in sorted((tmp_path / "photos").iterdir())]})
    assert not can_reveal(own)


# FedIRM shows each labelled batch in two views.
COUNTED = {
    "fedavg": 1,
    "fixmatch": 1,
    "flexmatch": 1,
    "freematch": 1,
    "pdcfed": 1,
    "rscfed": 1,
    "fedirm": 2,
    "provenance": 1,
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_passes_over_labels_are_those_that_a_method_makes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where the loss of labelled images is computed, on every client, against the estimate."""
    seen, original = [0], LabelLoss.__call__

    def counted(self: LabelLoss, logits: torch.Tensor, labels: torch.Tensor, *rest: object, **more: object) -> object:
        seen[0] += len(labels)
        return original(self, logits, labels, *rest, **more)

    monkeypatch.setattr(LabelLoss, "__call__", counted)
    settings = {"data.placement": "clients", "train.batch": 16, "train.epochs": 2, "backend.name": "local"}
    experiment = resolve({"method.name": name, "method.preset": "smoke"}, TINY, settings)
    run_experiment(experiment, tmp_path / "run")
    plan = prepare(experiment)
    held = sum(len(part.labeled) for part in plan.split.clients)
    rounds = sum(stage.rounds * stage.method.estimated_tasks(4) / 4 for stage in plan.stages)
    passes = seen[0] / COUNTED[name] / held / rounds
    estimate = label_passes_a_round(experiment)  # rounded up
    assert estimate == pytest.approx(passes, rel=0.35) or estimate == math.ceil(passes)


def test_the_lower_bound_sees_the_labels_as_often_as_the_method(tmp_path: Path) -> None:
    experiment = resolve({"method.name": "fixmatch", "method.preset": "smoke", "data.placement": "clients"}, TINY)
    once, as_often = (bounds_of(experiment, as_many=as_many)[0] for as_many in (False, True))
    assert once.train.epochs == experiment.train.epochs
    assert as_often.train.epochs == label_passes_a_round(experiment) > 1


def test_recall_is_the_mean_over_seeds_with_the_interval_of_one_test_set(tmp_path: Path) -> None:
    about = resolve({"method": {"name": "fedavg", "preset": "smoke"}}, TINY)
    whole = run_experiment(about, tmp_path / "whole").folder
    for name, hits in (("one", 6), ("two", 10)):
        (tmp_path / name).mkdir()
        description = json.loads((whole / "model.json").read_text()) | {"classes": ["nv", "mel"]}
        (tmp_path / name / "model.json").write_text(json.dumps(description))
        confusion = {"confusion": [[90, 10], [20 - hits, hits]]}
        (tmp_path / name / "evaluation.json").write_text(json.dumps(confusion))
    folders = [tmp_path / "one", tmp_path / "two"]
    assert mean_recall(folders) == "mel 40 % (22 to 61 %), nv 90 % (83 to 94 %)"  # 8 of 20, not 16 of 40
    assert mean_recall([*folders, tmp_path]) == ""
    assert mean_recall([]) == ""
