"""The page of evidence says what the records say, and a run is made once."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import evidence, order, page, safeguards, shelf
from runs import TINY
from tacit.compare.rows import PendingRun, identity
from tacit.core.console import SafeConsole
from tacit.data.sources import load
from tacit.engine.accounting import Release, epsilon
from tacit.runs.folder import Run

ROOT = Path(__file__).parent.parent
Tiny = Callable[..., Run]


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty shelf in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_and_the_tables_of_methods_are_those_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody typed a number: `make evidence PART=page` changes nothing."""
    monkeypatch.chdir(ROOT)
    parts = evidence.all_rows()
    assert page.PAGE.read_text() == page.page(parts), "run: make evidence PART=page"
    for path in page.METHODS.glob("*.md"):
        assert page.with_table(path.read_text(), page.method_table(path.stem, parts)) == path.read_text(), path


def test_claims_are_about_rows_that_exist() -> None:
    for name, part in evidence.parts().items():
        for claim in part.get("claims", ()):
            assert claim["says"], name
            assert claim["source"], name
            if "untestable" not in claim:
                assert {claim["better"], claim["than"]} <= set(part["rows"]), (name, claim)


def test_the_order_of_methods_by_hand(tmp_path: Path) -> None:
    """Against the labels alone of the same seed and placement; bounds are no methods, other parts do not count."""

    def line(*accuracies: float) -> Any:
        return SimpleNamespace(runs={seed: {"last_five": value} for seed, value in enumerate(accuracies)})

    lines = {
        "server: lower": line(0.50, 0.60),
        "server: upper": line(0.90, 0.90),
        "server: even": line(0.61, 0.58),
        "server: good": line(0.53, 0.64, 0.99),
        "server: bad": line(0.40, 0.40),
    }
    seconds = dict.fromkeys(lines, 60.0)
    part = {"order_of_methods": True, "shared": {"data": {"name": "digits"}}}
    found = order.order([(part, lines, seconds), ({}, {"server: other": line(1.0)}, {})], "last_five")
    assert list(found) == ["even", "good", "bad"]
    cell = found["good"][order.Column("server", "digits")]
    assert cell.points == pytest.approx((3.0, 4.0)), "a seed that the labels alone do not have says nothing"
    assert order.advice(found) == [
        "- **server**: even gains most, +4.5 points on average. Above the labels alone in every seed and data set: "
        "good. Below them in every one: bad."
    ]
    assert order.table(found)[-1] == "| bad | -15.0 (-20.0 … -10.0) | 1:00 min |"
    order.draw(found, tmp_path / "order.png")
    assert (tmp_path / "order.png").stat().st_size > 1000


def test_a_kept_run_is_small_and_tells_the_same(tiny: Tiny, apart: Path) -> None:
    run = tiny("fixmatch", "clients", rounds=3)
    place = shelf.place_of(run.experiment, {})
    shelf.put_away(PendingRun(run.experiment, run.folder), place)
    kept = Run(place)
    assert identity(kept.experiment) == identity(run.experiment)
    assert kept.summary == run.summary
    assert [r["accuracy"] for r in kept.records] == pytest.approx([r["accuracy"] for r in run.records], abs=1e-5)
    assert all(record["work"] > 0 for record in kept.records)
    assert sum(file.stat().st_size for file in place.iterdir()) < 8_000
    assert shelf.on_the_shelf() == {identity(run.experiment): place}


def test_a_part_runs_what_is_missing_only(apart: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nothing runs; a row that is new runs alone; a page stands beside it each time."""
    from tacit.core.console import SafeConsole

    small = {"method.preset": "smoke", "data.placement": "clients", "rounds": 2, "backend.name": "local"}
    rows = {"lower": {"method.name": "fedavg"}, "fixmatch": {"method.name": "fixmatch"}}
    claim = {"says": "FixMatch helps", "source": "nobody", "better": "fixmatch", "than": "lower"}
    part = {"title": "t", "scale": "tiny", "seeds": 2, "order": 1, "shared": small, "rows": rows, "claims": [claim]}
    monkeypatch.setattr(evidence, "parts", lambda: {"mine": part})
    started: list[str] = []
    real = evidence.run_experiment

    def counted(experiment, folder, **options):  # type: ignore[no-untyped-def]
        started.append(experiment.method["name"])
        return real(experiment, folder, **options)

    monkeypatch.setattr(evidence, "run_experiment", counted)
    Path("docs/methods").mkdir(parents=True)
    Path("docs/methods/fixmatch.md").write_text("# fixmatch\n")
    screen = SafeConsole(quiet=True)
    evidence.run_part("mine", part, 1, False, screen)
    assert started == ["fedavg", "fixmatch"]
    evidence.run_part("mine", part, 2, False, screen)
    assert started[2:] == ["fedavg", "fixmatch"]  # the second seed only
    rows["feddb"] = {"method.name": "feddb"}
    evidence.run_part("mine", part, 2, False, screen)
    assert started[4:] == ["feddb", "feddb"]
    evidence.run_part("mine", part, 3, False, screen)
    assert "| fixmatch | 3 |" in page.PAGE.read_text(), "a seed more than the part asks for is shown, too"
    del started[6:]
    evidence.run_part("mine", part, 1, True, screen)
    assert started[6:] == ["fedavg", "fixmatch", "feddb"]  # from scratch, if asked
    text = page.PAGE.read_text()
    assert "FixMatch helps" in text
    assert "| fixmatch | 3 |" in text
    assert "| fixmatch | 3 |" in Path("docs/methods/fixmatch.md").read_text()


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ([0.7, 0.8], [0.6, 0.7], "holds here"),
        ([0.7, 0.8], [0.6, 0.81], "open"),
        ([0.5, 0.8], [0.6, 0.81], "does not hold here"),
        ([0.5, 0.9], [0.9, 0.6], "does not hold here"),  # the mean decides, not the best seed
    ],
)
def test_verdicts(tiny: Tiny, apart: Path, ours: list[float], theirs: list[float], verdict: str) -> None:
    """Seeds are compared with themselves: the records of two rows, with accuracies that we choose."""
    run = tiny("fedavg", "clients", rounds=1)
    rows = []
    for label, values in (("a", ours), ("b", theirs)):
        jobs = []
        for seed, value in enumerate(values):
            experiment = run.experiment.model_copy(update={"seed": seed})
            place = apart / label / str(seed)
            shelf.put_away(PendingRun(experiment, run.folder), place)
            (place / "rounds.jsonl").write_text(json.dumps({"step": 0, "accuracy": value, "work": 1.0}) + "\n")
            jobs.append(PendingRun(experiment, place))
        rows.append(page.Row(label, tuple(jobs)))
    claim = {"says": "a is better", "source": "", "better": "a", "than": "b"}
    assert page.judge(claim, page.lines_of(rows)).verdict == verdict


def test_the_cost_of_a_point_counts_work_until_three_rounds_reach_it(tiny: Tiny, apart: Path) -> None:
    run = tiny("fedavg", "clients", rounds=1)
    told = [0.9, 0.3, 0.6, 0.6, 0.6, 0.9]
    records = [
        {"stage": "main", "step": k, "accuracy": a, "work": 99.0, "cpu_seconds": 2.0} for k, a in enumerate(told)
    ]
    (run.folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert page.costs(run) == [2.0] * 6
    assert page.seconds_to(run, [2.0] * 6, 0.6) == 6.0  # (.9 + .3 + .6) / 3
    assert page.seconds_to(run, [2.0] * 6, 0.65) == 12.0
    assert page.seconds_to(run, [2.0] * 6, 0.8) is None  # one lucky round is not enough


def test_old_records_without_cpu_time_count_the_usual_round_of_their_stage(
    tiny: Tiny, apart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny("fedavg", "clients", rounds=1)
    work = [("warm-up", 9.0), ("main", 1.0), ("main", 600.0), ("main", 2.0)]  # the machine was stopped meanwhile
    records = [{"stage": stage, "step": k, "work": seconds} for k, (stage, seconds) in enumerate(work)]
    (run.folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for cores, expected in (("1 of 2", [9.0, 2.0, 2.0, 2.0]), ("2 of 2", None)):
        monkeypatch.setattr(page, "made", lambda _, cores=cores: {"machine": f"a processor, {cores} cores"})
        assert page.costs(run) == expected


def test_the_tables_of_safeguards_are_those_of_the_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    page = safeguards.PAGE.read_text()
    assert safeguards.with_tables(page, safeguards.read_sheet()) == page, "run: make evidence PART=page"
    assert page.count("<!-- table: ") == len(safeguards.TABLES)


def test_a_table_of_safeguards_runs_what_is_missing_only(apart: Path) -> None:
    small = {**TINY, "method.name": "fedavg", "data.placement": "clients", "data.clients": 5, "rounds": 2}
    ways = {"mean": {}, "median": {"robust.mean": "median"}}
    cells = [safeguards.Cell("fedavg", name, {**small, **way}) for name, way in ways.items()]
    screen = SafeConsole(quiet=True)
    safeguards.run_table("mine", cells[:1], 1, False, "", screen)
    first = safeguards.SHEET.read_text()
    safeguards.run_table("mine", cells[:1], 1, False, "", screen)
    assert safeguards.SHEET.read_text() == first
    safeguards.run_table("mine", cells, 2, False, "another row", screen)
    assert safeguards.SHEET.read_text() == first
    safeguards.run_table("mine", cells, 2, False, "", screen)
    assert len(safeguards.read_sheet()) == 4
    head, _, row = safeguards.table(cells, safeguards.read_sheet()).splitlines()
    assert head == "|  | mean | median |"
    assert row.count("±") == 2


def test_private_budgets_are_spent_and_not_exceeded() -> None:
    for cell in safeguards.private_cells():
        settings, rounds = cell.experiment().privacy, cell.experiment().rounds
        if cell.column.removeprefix("ε = ").replace(".", "").isdecimal():
            spent = epsilon(settings, [Release(100, 100, settings.noise)] * rounds)
            assert spent == pytest.approx(float(cell.column.removeprefix("ε = ")), rel=0.01)


def test_a_part_whose_data_cannot_be_had_does_not_stop_the_others(
    apart: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (apart / "data").write_text("")  # a file where the folder of all data should be: nothing can be fetched
    monkeypatch.setenv("TACIT_DATA", str(apart / "data"))
    ran = []
    monkeypatch.setattr(evidence, "put_away", lambda *_: None)
    monkeypatch.setattr(page, "write", lambda _: None)
    part = {"seeds": 1, "shared": TINY, "rows": {"one": {"method.name": "fedavg"}}}

    def run(experiment: object, *_: object, **__: object) -> None:
        if experiment.data.name == "svhn":  # type: ignore[attr-defined]
            load("svhn")
        ran.append(experiment)

    monkeypatch.setattr(evidence, "run_experiment", run)
    missing = {"seeds": 1, "shared": {**TINY, "data.name": "svhn"}, "rows": {"one": {"method.name": "fedavg"}}}
    assert evidence.run_parts({"svhn": missing, "digits": part}, {}, SafeConsole()) == ["svhn"]
    assert len(ran) == 1
    assert "set TACIT_DATA to a folder" in capsys.readouterr().out.replace("\n", " ")
