"""Run folders as data, and the data as a page: nothing hidden, nothing invented, nothing that breaks out."""

import fcntl
import json
import re
import shutil
import statistics
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from pictures import SITES, write_sites
from runs import TINY
from tacit.cli.app import app
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.data.sources import load
from tacit.data.split import class_table, load_split
from tacit.engine.run import run_experiment
from tacit.report import thumbnails
from tacit.report.collect import Collector, collect, find_runs
from tacit.report.figures import read_figures
from tacit.report.groups import group
from tacit.report.page import FILES, SCRIPTS, build
from tacit.report.serve import PageServer
from tacit.runs.folder import Run, is_in_use
from tacit.runs.plan import prepare
from tacit.runs.writer import OpenRun

NASTY = '</script><img src=x onerror="document.title=1">{{style}} & <b>'


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four real runs: a method with two seeds, one with class thresholds, one with a matrix by round."""
    root = tmp_path_factory.mktemp("runs")
    for name, method, placement, changes in (
        ("fixmatch-0", "fixmatch", "server", {"seed": 0}),
        ("fixmatch-1", "fixmatch", "server", {"seed": 1, "backend.workers": 1, "title": "another"}),
        ("cbafed", "cbafed", "some-clients", {"rounds": 3}),
        ("feddb", "feddb", "clients", {}),
    ):
        settings = {"method.name": method, "method.preset": "smoke", "data.placement": placement, **changes}
        run_experiment(resolve(settings, TINY), root / name)
    return root


@pytest.fixture
def some(runs: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a run, to be spoilt."""

    def copy(name: str = "copy", of: str = "fixmatch-0") -> Path:
        return Path(shutil.copytree(runs / of, tmp_path / "all" / name))

    return copy


def by_name(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in data["runs"]}


# --- What is collected ------------------------------------------------------------------------------------


def test_figures_are_those_of_the_records(runs: Path) -> None:
    run = by_name(collect([runs]))["cbafed"]
    records = Run(runs / "cbafed").records
    figures = run["figures"]
    assert figures["steps"] == [record["step"] for record in records]
    np.testing.assert_allclose(figures["series"]["accuracy"], [r["accuracy"] for r in records], rtol=1e-3)
    grid = figures["grids"]["thresholds"]
    there = [r for r in records if "thresholds" in r]
    assert (grid["axis"], len(grid["rows"]), grid["steps"]) == ("class", 10, [r["step"] for r in there])
    np.testing.assert_allclose(np.array(grid["values"]).T, [r["thresholds"] for r in there], rtol=1e-3)
    tail = np.array(figures["grids"]["tail"]["values"])  # a list of classes: which are in it, by round
    assert [np.flatnonzero(column).tolist() for column in tail.T] == [r["tail"] for r in there]
    assert figures["grids"]["party_weights"]["rows"][0] == "client 0"
    assert "client_metrics.trained_on" in figures["grids"]
    assert figures["stages"][0]["name"] == "warm-up"
    assert set(figures["phases"]) == {"send", "train", "merge", "evaluate"}


def test_a_matrix_by_round_is_by_client_and_class(runs: Path) -> None:
    cube = by_name(collect([runs]))["feddb"]["figures"]["cubes"]["app_u"]
    records = [r for r in Run(runs / "feddb").records if "app_u" in r]
    assert (cube["axis"], cube["across"], cube["rows"][:2]) == ("client", "class", ["client 0", "client 1"])
    np.testing.assert_allclose(cube["values"], [r["app_u"] for r in records], rtol=1e-3)


def test_clients_that_did_not_answer_have_no_value() -> None:
    """Entries stand beside the client that they are of, not beside the one with that number in the list."""
    rounds = [
        {"stage": "main", "round": 0, "step": 0, "answered": [0, 2], "client_weights": [0.3, 0.7]},
        {"stage": "main", "round": 1, "step": 1, "answered": [1], "client_weights": [1.0]},
    ]
    grid = read_figures(rounds, ())["grids"]["client_weights"]
    assert grid["rows"] == ["client 0", "client 1", "client 2"]
    assert grid["values"] == [[0.3, None], [None, 1], [0.7, None]]


def test_a_client_without_a_model_has_an_empty_row() -> None:
    per_class = [[0.1, 0.9], None, [0.2, 0.8]]
    record = {"stage": "main", "round": 0, "step": 0, "answered": [1, 4, 5], "per_class": [0.5, 0.5]}
    found = read_figures([{**record, "clients_per_class": per_class, "clients_accuracy": [0.5, None, 0.5]}], ("a", "b"))
    cube = found["cubes"]["clients_per_class"]
    assert (cube["rows"], cube["columns"]) == (["client 1", "client 4", "client 5"], ["a", "b"])
    assert cube["values"] == [[[0.1, 0.9], [None, None], [0.2, 0.8]]]
    assert found["grids"]["clients_accuracy"]["rows"] == ["client 1", "client 4", "client 5"]


def test_nothing_that_is_not_finite_gets_through(some: Callable[..., Path]) -> None:
    folder = some()
    record = Run(folder).records[-1]
    record |= {"round": 9, "step": record["step"] + 1, "accuracy": float("nan"), "loss": float("inf"), "strange": ["a"]}
    record["per_class"] = [None, float("nan"), *record["per_class"][2:]]
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    (run,) = collect([folder])["runs"]
    assert run["figures"]["series"]["accuracy"][-1] is None
    assert run["figures"]["grids"]["per_class"]["values"][1][-1] is None
    assert "strange" in run["figures"]["left_out"]
    json.dumps(run, allow_nan=False)


def test_large_runs_stay_small() -> None:
    """500 rounds × 100 classes: lines keep every round, heat maps fewer, and the last round is always there."""
    vector = np.random.default_rng(0).random(100).tolist()
    rounds = [
        {"stage": "main", "round": i, "step": i, "accuracy": 0.5, "per_class": vector, "answered": [1]}
        for i in range(500)
    ]
    figures = read_figures(rounds, ())
    assert len(figures["series"]["accuracy"]) == 500
    grid = figures["grids"]["per_class"]
    assert len(grid["rows"]) == 100
    assert 20 < len(grid["steps"]) <= 60
    assert grid["steps"][-1] == 499
    assert len(json.dumps(figures)) < 100_000
    more = read_figures([{**rounds[0], "step": i} for i in range(5001)], ())
    assert 300 < len(more["steps"]) <= 601
    assert more["steps"][-1] == 5000


def test_the_split_is_the_one_of_the_run(runs: Path) -> None:
    data = collect([runs / "cbafed"])
    shown = data["splits"][data["runs"][0]["split"]]
    dataset = prepare(Run(runs / "cbafed").experiment).dataset
    split = load_split(runs / "cbafed" / "split.npz")
    labeled, unlabeled = class_table(split, np.asarray(dataset.train_labels), 10)
    assert shown["labeled"] == labeled[1:].tolist()  # the server holds nothing, and has no row
    assert shown["unlabeled"] == unlabeled[1:].tolist()
    assert shown["columns"] == list(dataset.classes)


def test_a_split_without_its_data_tells_sizes(some: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> Any:
        raise TacitError("The data is not here.")

    thumbnails._labels_of.cache_clear()
    monkeypatch.setattr(thumbnails, "load_dataset", gone)
    folder = some()
    (folder / "parties.json").unlink()  # a run of an earlier version
    data = collect([folder])
    (shown,) = data["splits"].values()
    assert shown["columns"] == ["all classes"]
    assert shown["labeled"][0] == [100]
    assert "The data is not here." in shown["note"]
    assert data["runs"][0]["state"] == "finished"


def test_sites_and_classes_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_sites(load("digits"), tmp_path / "my photos", labeled=4, unlabeled=10)
    for path in sorted(photos.glob("*/[0-9]"), reverse=True):
        path.rename(path.with_name(f"class {path.name}"))
    settings = {
        "method": {"name": "fixmatch", "preset": "smoke"},
        "data": {"name": "photos", "sites": [str(photos / site) for site in SITES], "partition": "sites", "clients": 3},
        "data.placement": "clients",
    }
    folder = run_experiment(resolve(settings), tmp_path / "a run").folder
    classes, whole = [f"class {number}" for number in range(10)], collect([folder])
    for data in (whole, _without(folder / "parties.json", lambda: collect([folder]))):  # as written; from the images
        (run,), (split,) = data["runs"], data["splits"].values()
        assert split["rows"] == list(SITES)
        assert split["columns"] == [*classes, "(unknown)"]
        assert split["unlabeled"] == [[0] * 10 + [10]] * 3
        assert run["figures"]["grids"]["per_class"]["rows"] == classes
        assert run["figures"]["grids"]["client_metrics.loss"]["rows"] == list(SITES)
    (run,) = whole["runs"]
    assert [one["class"] for one in run["recall"]] == classes
    assert all(one["interval"][0] <= one["recall"] <= one["interval"][1] for one in run["recall"])
    assert sum(one["images"] for one in run["recall"]) == whole["splits"][run["split"]]["test"]
    monkeypatch.setattr(thumbnails, "load_dataset", lambda *_, **__: pytest.fail("the images were read"))
    assert collect([folder])["splits"] == whole["splits"]
    assert "tacit report '" in run["reproduce"][-1]["command"]
    (folder / "parties.json").write_text('{"classes": 3}')
    thumbnails._labels_of.cache_clear()
    with pytest.raises(pytest.fail.Exception):  # what is damaged is not believed
        collect([folder])


def _without(path: Path, look: Callable[[], Any]) -> Any:
    kept = path.read_bytes()
    path.unlink()
    try:
        return look()
    finally:
        path.write_bytes(kept)


def test_pictures_of_the_run_are_put_in(some: Callable[..., Path]) -> None:
    folder = some()
    Image.new("RGB", (8, 4), "red").save(folder / "generated.png")
    Image.new("RGB", (3000, 10)).save(folder / "wide.png")
    (folder / "half.png").write_bytes((folder / "generated.png").read_bytes()[:40])
    (run,) = collect([folder])["runs"]
    assert [(one["name"], one["width"]) for one in run["pictures"]] == [("generated.png", 8), ("wide.png", 3000)]
    assert all(one["source"].startswith("data:image/png;base64,") for one in run["pictures"])
    assert "half.png" in " ".join(run["remarks"])
    assert run["state"] == "finished"


# --- Groups -----------------------------------------------------------------------------------------------


def test_runs_that_differ_only_in_seed_are_one_group(runs: Path) -> None:
    data = collect([runs])
    groups = {one["label"]: one for one in data["groups"]}
    assert set(groups) == {"fixmatch", "cbafed", "feddb"}
    both = groups["fixmatch"]
    assert both["seeds"] == [0, 1]
    accuracies = [Run(runs / name).summary["accuracy"] for name in ("fixmatch-0", "fixmatch-1")]
    assert both["results"]["accuracy"]["mean"] == pytest.approx(statistics.fmean(accuracies))
    assert both["results"]["accuracy"]["std"] == pytest.approx(statistics.stdev(accuracies))
    by_round = np.array([Run(runs / name)["accuracy"] for name in ("fixmatch-0", "fixmatch-1")])
    band = both["bands"]["accuracy"]
    np.testing.assert_allclose(band["mean"], by_round.mean(axis=0), rtol=1e-3)
    np.testing.assert_allclose(band["std"], by_round.std(axis=0, ddof=1), rtol=1e-2, atol=1e-6)
    assert "bands" not in groups["cbafed"]


def test_groups_of_one_method_are_told_apart_by_what_differs(some: Callable[..., Path], runs: Path) -> None:
    folder = some("sharp")
    text = (folder / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(re.sub(r"(?m)^threshold = .*$", "threshold = 0.5", text))
    labels = [one["label"] for one in collect([runs / "fixmatch-0", folder])["groups"]]
    assert labels[1] == "fixmatch (threshold=0.5)"
    assert labels[0].startswith("fixmatch (threshold=")
    assert labels[0] != labels[1]


def test_a_seed_that_is_behind_counts_only_where_it_has_got() -> None:
    def run(name: str, values: list[float]) -> dict[str, Any]:
        figures = {"steps": list(range(len(values))), "stride": 1, "series": {"accuracy": values}}
        settings = {"method": {"name": "m"}, "seed": len(values)}
        return {
            "id": name,
            "name": name,
            "method": "m",
            "seed": 0,
            "settings": settings,
            "figures": figures,
            "results": {},
        }

    (both,) = group([run("a", [0.2, 0.4, 0.6]), run("b", [0.4])])
    assert both["bands"]["accuracy"] == {"mean": [0.3, 0.4, 0.6], "std": [0.1414, None, None], "n": [2, 1, 1]}


# --- Finished, running, stopped, broken -------------------------------------------------------------------


def test_each_state_is_said(some: Callable[..., Path], tmp_path: Path) -> None:
    some("finished")
    for name in ("running", "stopped", "stopped-sites"):
        (some(name) / "summary.json").unlink()
    settings = tmp_path / "all" / "stopped-sites" / "experiment.toml"
    settings.write_text(re.sub(r'(\[backend\]\nname = )"\w+"', r'\1"flower"', settings.read_text()))
    lines = (some("cut") / "rounds.jsonl").read_text().splitlines()
    (tmp_path / "all" / "cut" / "summary.json").unlink()
    (tmp_path / "all" / "cut" / "rounds.jsonl").write_text(lines[0] + "\n" + lines[1][:30])
    (some("no-experiment") / "experiment.toml").unlink()
    (some("bad-experiment") / "experiment.toml").write_text("rounds = = 3")
    (some("bad-middle") / "rounds.jsonl").write_text(lines[0] + "\n{oops\n" + lines[1] + "\n")
    (some("out-of-order") / "rounds.jsonl").write_text(lines[1] + "\n")
    (some("bytes") / "rounds.jsonl").write_bytes(b"\xff\xfe\x00")
    (some("bad-summary") / "summary.json").write_text('{"accuracy": 0.')
    (some("bad-split") / "split.npz").write_bytes(b"PK nonsense")
    with (tmp_path / "all" / "running" / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = collect([tmp_path / "all"])
    told = {name: (run["state"], " ".join([run["says"], *run["problems"]])) for name, run in by_name(data).items()}
    expected = {
        "finished": ("finished", "Finished: 3 rounds."),
        "running": ("running", "Running: 3 of 3 rounds done."),
        "stopped": ("stopped", "can go on"),
        "stopped-sites": ("stopped", "can go on"),
        "cut": ("stopped", "Stopped: 1 of 3 rounds done."),
        "no-experiment": ("broken", "experiment.toml is missing"),
        "bad-experiment": ("broken", "is not valid TOML"),
        "bad-middle": ("broken", "rounds.jsonl is damaged in line 2; 1 later lines are not shown."),
        "out-of-order": ("broken", "line 1 is not the record of round 0"),
        "bytes": ("broken", "rounds.jsonl cannot be read"),
        "bad-summary": ("broken", "summary.json is damaged"),
        "bad-split": ("broken", "is damaged or is not a split"),
    }
    assert set(told) == set(expected)
    for name, (state, words) in expected.items():
        assert told[name][0] == state, (name, told[name])
        assert words in told[name][1]
    assert by_name(data)["stopped"]["reproduce"][0]["command"].startswith("tacit resume ")
    on, again = (way["command"] for way in by_name(data)["stopped-sites"]["reproduce"][:2])
    assert on.startswith("tacit site run --home HOME --sites NAMES ")
    assert on.endswith("stopped-sites --resume")
    assert again.startswith("tacit site run ")
    assert again.endswith("--out runs/again")
    page = build(data)
    for run in data["runs"]:
        assert run["says"] in page


def test_looking_does_not_disturb_a_run_that_starts(some: Callable[..., Path]) -> None:
    """Who looks holds the lock for a moment; a run that starts just then waits, and does not give up."""
    folder = some()
    (folder / "summary.json").unlink()
    experiment = Run(folder).experiment
    assert not is_in_use(folder)
    with (folder / "run.lock").open() as look:
        fcntl.flock(look, fcntl.LOCK_SH)  # as is_in_use does, only longer
        letting_go = threading.Timer(0.1, fcntl.flock, (look, fcntl.LOCK_UN))
        letting_go.start()
        opened = OpenRun(folder, experiment, resume=True)
        letting_go.join()
    assert is_in_use(folder)
    opened.close()
    assert not is_in_use(folder)


def test_a_method_that_is_gone_does_not_hide_a_finished_run(some: Callable[..., Path]) -> None:
    folder = some()
    text = (folder / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(text.replace('name = "fixmatch"', 'name = "/gone/own.py"'))
    assert collect([folder])["runs"][0]["state"] == "finished"
    (folder / "summary.json").unlink()
    (run,) = collect([folder])["runs"]
    assert run["state"] == "stopped"
    assert "own.py" in " ".join(run["remarks"])


def test_runs_are_found_once_and_named_briefly(runs: Path, some: Callable[..., Path]) -> None:
    assert [path.name for path in find_runs([runs, runs / "cbafed"])] == ["cbafed", "feddb", "fixmatch-0", "fixmatch-1"]
    assert [run["name"] for run in collect([runs / "cbafed"])["runs"]] == ["cbafed"]
    other = some("deep/down")
    names = [run["name"] for run in collect([runs / "cbafed", other.parent])["runs"]]
    assert names[0].endswith("cbafed")
    assert names[1].endswith("deep/down")


def test_what_did_not_change_is_not_read_again(some: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.report import collect as module

    folder = some()
    read: list[Path] = []
    original = module.collect_run
    monkeypatch.setattr(module, "collect_run", lambda path, *rest: read.append(path) or original(path, *rest))
    collector = Collector([folder])
    assert collector.collect()["runs"] == collector.collect()["runs"]
    assert len(read) == 1
    (folder / "summary.json").unlink()
    assert collector.collect()["runs"][0]["state"] == "stopped"
    assert len(read) == 2


# --- The page ---------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """The start tags of a page, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


def test_nothing_breaks_out_of_the_page(some: Callable[..., Path]) -> None:
    folder = some("<i>name&")
    text = (folder / "experiment.toml").read_text()
    (folder / "experiment.toml").write_text(text.replace('title = ""', f"title = {json.dumps(NASTY)}"))
    records = Run(folder).records
    records[0] |= {NASTY: [0.5] * 10, "skipped": NASTY}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = Elements(build(collect([folder])))
    names = [tag for tag, _ in page.tags]
    assert "img" not in names
    assert "i" not in names
    assert names.count("script") == 2
    data = json.loads(page.scripts[0])
    assert data["runs"][0]["title"] == NASTY
    assert NASTY in data["runs"][0]["figures"]["grids"]
    assert data["runs"][0]["events"][0]["what"] == NASTY


def test_the_page_needs_nothing_from_elsewhere(runs: Path) -> None:
    page = build(collect([runs]))
    elements = Elements(page)
    for tag, attributes in elements.tags:
        assert tag not in ("iframe", "object", "embed")
        for name in ("src", "href"):
            assert str(attributes.get(name) or "data:").startswith(("data:", "#"))
    code = "".join((FILES / name).read_text() for name in SCRIPTS)
    assert set(re.findall(r"https?://[^\"\s]+", page.replace(elements.scripts[0], ""))) == {
        "http://www.w3.org/2000/svg"
    }
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "document.write"):
        assert unsafe not in code
    assert {path.name for path in FILES.glob("*.js")} == set(SCRIPTS)
    assert len(page) < 400_000


def test_the_command_writes_a_file_and_says_what_is_wrong(some: Callable[..., Path], tmp_path: Path) -> None:
    some("good")
    (some("bad") / "experiment.toml").unlink()
    out = tmp_path / "report.html"
    told = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["report", str(tmp_path / "all"), "-o", str(out)])
    assert told.exit_code == 0, told.output
    assert "bad: Broken: 3 of 3 rounds can be read. experiment.toml is missing" in told.output
    assert "2 runs" in told.output
    assert out.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "There is no folder nowhere"),
        (["report", "."], "There is no run in ."),
        (["report", ".", "-o", "missing/report.html"], "in a folder that exists"),
    ],
)
def test_mistakes_are_told(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed = CliRunner().invoke(app, words)
    assert isinstance(failed.exception, TacitError)
    assert message in str(failed.exception)
    assert list(tmp_path.iterdir()) == []


# --- The server -------------------------------------------------------------------------------------------


@pytest.fixture
def server(some: Callable[..., Path]) -> Iterator[PageServer]:
    one = PageServer([some("watched")], "127.0.0.1", 0)
    thread = threading.Thread(target=one.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield one
    one.shutdown()
    one.server_close()
    thread.join()


def ask(server: PageServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(server.address.rstrip("/") + path, headers=names)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_the_server_gives_the_page_and_newer_data(server: PageServer, tmp_path: Path) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    status, _, page = ask(server, "/")
    assert (status, b'data-live="true"' in page) == (200, True)
    status, headers, body = ask(server, "/data.json")
    assert json.loads(body)["runs"][0]["state"] == "finished"
    assert ask(server, "/data.json", If_None_Match=headers["ETag"])[0] == 304
    (tmp_path / "all" / "watched" / "summary.json").unlink()
    status, _, body = ask(server, "/data.json", If_None_Match=headers["ETag"])
    assert (status, json.loads(body)["runs"][0]["state"]) == (200, "stopped")
    assert ask(server, "/../experiment.toml")[0] == 404


def test_a_foreign_name_for_this_machine_is_refused(server: PageServer) -> None:
    assert ask(server, "/data.json", Host="evil.example:80")[0] == 403
    assert ask(server, "/data.json", Host="localhost:80")[0] == 200


def test_a_port_that_is_taken(server: PageServer, tmp_path: Path) -> None:
    taken = int(server.server_address[1])
    with pytest.raises(TacitError, match="Choose another --port"):
        PageServer([tmp_path], "127.0.0.1", taken)
