"""The four papers: every table and figure is covered or explained, and the recipes have the papers' values."""

from pathlib import Path

import pytest
from test_cli import quick

from benchmarks import protocols
from tacit.config.recipes import known_recipes, load_recipe
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment, flatten, same_but_for_seed
from tacit.engine.run import run_experiment
from tacit.papers.cost import core_hours, key_of, measured, work_of
from tacit.papers.coverage import PaperContents, gaps, matches, papers
from tacit.runs.costs import Speed

TABLES = {"feddb": 4, "cbafed": 4, "bsemifl": 1, "ddrfed": 6}
FIGURES = {"feddb": 7, "cbafed": 4, "bsemifl": 6, "ddrfed": 8}


# --- Coverage ---------------------------------------------------------------------------------------------


def test_every_table_and_figure_has_a_recipe_or_a_reason() -> None:
    for key, contents in papers().items():
        assert not gaps(contents)
        listed = {" ".join(item.name.split()[:2]) for item in contents.items}  # "Fig. 3 left" is of Fig. 3
        tables = {f"Table {number}" for number in range(1, TABLES[key] + 1)}
        assert listed == tables | {f"Fig. {number}" for number in range(1, FIGURES[key] + 1)}


@pytest.mark.parametrize(
    ("item", "missing"),
    [
        ({}, "neither a recipe nor a reason"),
        ({"recipes": ["feddb/table9/*"]}, "no recipe is called 'feddb/table9/*'"),
        ({"recipes": ["feddb/table1/*"], "cells": 31}, "31 cells, but 30 recipes and 0 explained"),
        ({"recipes": ["feddb/table1/*"], "cells": 31, "missing": 1}, "1 cells are missing without a reason"),
    ],
)
def test_what_is_neither_covered_nor_explained_is_told(item: dict[str, object], missing: str) -> None:
    contents = PaperContents.model_validate(
        {"name": "X", "title": "", "venue": "", "items": [{"name": "Table 9", "shows": "", **item}]}
    )
    assert missing in " ".join(gaps(contents))


def test_every_recipe_of_a_paper_belongs_to_a_table_or_figure() -> None:
    for key, contents in papers().items():
        patterns = [*contents.ours, *(one for item in contents.items for one in (*item.recipes, *item.variants))]
        lost = [name for name in known_recipes() if name.startswith(f"{key}/") and not matches(name, patterns)]
        assert not lost


def test_numbers_of_a_cell_say_which_table_they_are_of() -> None:
    """A cell's number is the paper's: each recipe of a table has one, and names its table."""
    for contents in papers().values():
        for item in (item for item in contents.items if item.cells):
            for name in item.covered_by(known_recipes()):
                paper = resolve(load_recipe(name)).paper
                assert paper.accuracy is not None, name
                assert item.name in paper.source, name


# --- Protocols --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, protocols.Facts]]:
    return {key: protocols.recipes_of(contents) for key, contents in papers().items()}


def test_the_recipes_have_the_papers_values_or_a_reason(found: dict[str, dict[str, protocols.Facts]]) -> None:
    wrong = {
        f"{key}, {row.what}: {protocols.spread(found[key][name][row.setting] for name in names)}": names[:3]
        for key, protocol in protocols.protocols().items()
        for row in protocol.rows
        if (names := protocols.unexplained(row, found[key]))
    }
    assert not wrong


def test_every_row_is_about_some_recipe_and_every_reason_is_needed(
    found: dict[str, dict[str, protocols.Facts]],
) -> None:
    for key, protocol in protocols.protocols().items():
        for row in protocol.rows:
            assert protocols.about(row, found[key]), (key, row.what)
            used = {protocols.reason_for(row, name, found[key][name]) for name in protocols.differing(row, found[key])}
            assert {one.reason for one in row.differs} == used - {None}, (key, row.what)


def test_a_wrong_value_is_seen(found: dict[str, dict[str, protocols.Facts]]) -> None:
    row = next(row for row in protocols.protocols()["feddb"].rows if row.what == "rounds")
    name = "feddb/table1/cifar10-feddb"
    changed = {**found["feddb"], name: {**found["feddb"][name], "rounds": 799}}
    assert protocols.unexplained(row, changed) == [name]
    assert protocols.mark(row, changed) == "**≠**"
    assert protocols.mark(row, found["feddb"]) == "="


def test_the_page_is_that_of_the_recipes(found: dict[str, dict[str, protocols.Facts]]) -> None:
    assert protocols.PAGE.read_text() == protocols.page(found), "run: make protocols"


def apart(one: str, other: str) -> set[str]:
    """The settings in which two recipes differ."""
    first, second = (flatten(same_but_for_seed(resolve(load_recipe(name)).to_dict())) for name in (one, other))
    return {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}


def test_figure_4_of_bsemifl_is_table_1_but_for_the_partition() -> None:
    names = [name for name in known_recipes() if name.startswith("bsemifl/fig4/")]
    assert len(names) == 81
    for name in names:
        data, _, method = name.rpartition("/")[2].split("-")
        assert apart(name, f"bsemifl/table1/{data}-shards2-{method}") <= {"data.partition", "data.alpha"}


def test_semifl_in_feddbs_tables_is_as_its_fixmatch_row() -> None:
    own = {"net", "data", "participation", "views"}
    for table in (1, 2, 3):
        for data in ("cifar10", "svhn", "cifar100"):
            semifl, debiased = (f"feddb/table{table}/{data}-{row}" for row in ("semifl", "semifl-feddpl"))
            assert apart(semifl, debiased) == {"method.debias"}
            other = apart(semifl, f"feddb/table{table}/{data}-fixmatch")
            assert not {key for key in other if key.partition(".")[0] in own}
            assert {key for key in other if key.startswith("train.")} == {"train.batch"}  # FedDB's is its own option


# --- Figures that need a record of their own ----------------------------------------------------------------


DIGITS = {
    "data.name": "digits",
    "data.clients": 4,
    "data.subset": 400,
    "data.test_subset": 100,
    "data.cover": 0,
    "net.name": "cnn-16",
    "net.norm": "gn",
    "backend.name": "local",
    "views.weak": "crop",
}


@pytest.mark.parametrize("name", ["svhn-2-batch-5-epochs", "svhn-5-fixed-each-of-5-epochs", "svhn-4-fixed-5-epochs"])
def test_pseudo_labels_are_judged_by_local_epoch(name: str, tmp_path: Path) -> None:
    """CBAFed, Fig. 3 right: five epochs, five figures of each client; labels that are fixed for the round have one."""
    short = {"rounds": 1, "method.warmup": 1, "method.warmup_epochs": 8, "method.ceiling": 0.3, "train.lr": 0.1}
    run = run_experiment(resolve(load_recipe(f"cbafed/fig3/{name}"), DIGITS, short), tmp_path / "run")
    record = run.records[-1]
    if "fixed-5" in name:
        assert "pseudo_accuracy_by_epoch" not in record
        return
    assert len(record["pseudo_accuracy_by_epoch"]) == 5
    each = record["clients_pseudo_accuracy_by_epoch"]
    assert len(each) == 3  # the unlabelled ones
    assert len({len(values) for values in each.values()}) == 1
    assert all(0 <= value <= 1 for values in each.values() for value in values if value is not None)
    assert len(set(record["pseudo_accuracy_by_epoch"])) > 1


def test_semifl_of_feddbs_tables_learns_where_labels_are_at_clients(tmp_path: Path) -> None:
    short = {"rounds": 2, "data.labels": 80, "participation.fraction": 0.5, "method.threshold": 0.2, "train.lr": 0.1}
    run = run_experiment(resolve(load_recipe("feddb/table2/cifar10-semifl-feddpl"), DIGITS, short), tmp_path / "run")
    assert run.records[-1]["accepted_ratio"] > 0
    assert not run.records[-1]["refused"]


# --- What it costs ----------------------------------------------------------------------------------------


def speeds_of(experiment: Experiment, speed: Speed) -> dict[str, Speed]:
    return {key_of(work.kind): speed for work in work_of(experiment)}


def test_costs_are_images_times_passes_times_rounds() -> None:
    lower = resolve(load_recipe("cbafed/table1/cifar10-lower"), {"rounds": 10, "train.epochs": 3})
    hours = core_hours(lower, speeds_of(lower, Speed(0.01, 0.001)))
    assert hours == pytest.approx(10 * (5000 * 3 * 0.01 + 10_000 * 0.001) / 3600)  # one client of ten; all test images
    assert core_hours(lower, {}) is None
    generator = resolve(load_recipe("ddrfed/fig5/cifar10"), {"method.psi": 0.5, "method.sampling_steps": 20})
    diffusion, generation = work_of(generator)[:2]
    assert diffusion.trained == 40 * 10 * 50_000
    assert generation.predicted == 0.5 * 50_000 * 20


def test_recipes_are_listed_by_paper_with_their_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TACIT_DATA", str(tmp_path))
    before = quick("recipes", "--papers")
    for word in ("FedDB (IJCAI 2024)", "Table 3", "30 of 30", "81 of 81", "a drawing of the framework", "--measure"):
        assert word in before
    assert "core" not in before
    assert not list(tmp_path.iterdir())
    after = quick("recipes", "demo-digits", "--measure")
    assert "one core of this machine" in after
    assert "IJCAI" not in after
    assert len(measured()) == 1
    cost = next(line for line in quick("recipes", "demo-digits").splitlines() if "demo-digits" in line)
    assert " min " in cost


def test_a_folder_that_is_not_there_is_told() -> None:
    with pytest.raises(TacitError, match=r"no folder of recipes 'feddb/tabel1'. Did you mean 'feddb/table1'?"):
        quick("recipes", "feddb/tabel1")


def test_a_file_of_speeds_that_cannot_be_read_is_as_none(tmp_path: Path) -> None:
    assert measured(tmp_path) == {}
    (tmp_path / "speed.json").write_text('{"cpu": "Cray X-MP", "seconds": {"a": [1, 2]}}')
    assert measured(tmp_path) == {}
    (tmp_path / "speed.json").write_text("[1, ")
    assert measured(tmp_path) == {}
