"""Every part of `make bench` runs with a tiny setting and compares like with like. Nothing here asserts a time."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import (
    buffers,
    clients,
    engine,
    head,
    inference,
    private,
    reference,
    round,
    secure,
    simulation,
    timing,
    views,
    workers,
)
from benchmarks.timing import Row, Spent
from tacit.config.resolve import resolve
from tacit.data.federation import Federation
from tacit.pieces import train
from tacit.runs.plan import prepare

DIGITS: dict[str, Any] = {"data.name": "digits", "data.clients": 3, "data.subset": 60, "train.batch": 8}
NARROW = {**DIGITS, "net.name": "cnn-4"}
TINY = round.Case("tiny", {**NARROW, "method.labeled_epochs": 2}, bare=1.0, reference=1.0)


def sane(rows: list[Row]) -> dict[str, Row]:
    """All rows are finite, within their own spread, and have names of their own."""
    for row in rows:
        assert math.isfinite(row.value), row
        assert row.value > 0, row
        assert row.low is None or row.low <= row.value <= row.high, row
        assert all(isinstance(cell, str) for cell in row.cells())
    found = {row.what: row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_round_takes_the_same_steps_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: dict[str, int] = {"ours": 0, "reference": 0, "bare": 0}
    optimizer_step, backward = train.optimizer_step, torch.Tensor.backward
    where = ["bare"]

    def counted(*arguments: Any, **more: Any) -> None:
        where.append("ours")
        optimizer_step(*arguments, **more)
        where.pop()

    def counted_backward(self: torch.Tensor, *arguments: Any, **more: Any) -> None:
        steps[where[-1]] += 1
        backward(self, *arguments, **more)

    def in_reference(self: reference.Reference, work: Any = reference.Reference.round) -> None:
        where.append("reference")
        work(self)
        where.pop()

    monkeypatch.setattr(train, "optimizer_step", counted)
    monkeypatch.setattr(torch.Tensor, "backward", counted_backward)
    monkeypatch.setattr(reference.Reference, "round", in_reference)
    rows = sane(round.measure([TINY], times=1))
    assert list(rows) == [
        "tiny: round / bare passes",
        "tiny: round / bare passes of tacit's own net",
        "tiny: plain implementation / round",
        "tiny: plain implementation / bare passes",
    ]
    # 20 images a client are 3 steps: 2 epochs of one client and 1 of two others. Bare: the plain net and the own one.
    assert steps == {"ours": 12, "reference": 12, "bare": 2 * 12}
    assert "80 images a round" in rows["tiny: round / bare passes"].note


def test_sides_that_do_not_do_the_same_work_are_refused() -> None:
    wary = round.Case("wary", {**TINY.settings, "method.base": 1.0, "method.ceiling": 1.0, "method.tail": 0.0})
    with pytest.raises(RuntimeError, match="did not train on the same number of images"):
        round.measure([wary], times=1)


@pytest.mark.parametrize("size", [28, 32])
def test_the_plain_net_and_the_folded_net_are_the_net(size: int) -> None:
    for name in ("resnet18-4", "wrn-10-1"):
        settings = {**DIGITS, "net.name": name, "data.image_size": size}
        plan = prepare(resolve(round.SHARED, settings, {"net.norm": "bn"}))
        images = Federation(plan.dataset, plan.split, plan.setup.device).test().images
        net = inference.with_statistics(plan.setup.build(torch.Generator().manual_seed(0)))
        plain = reference.plain_net(plan)
        getattr(plain, "net", plain).load_state_dict(net.state_dict())
        x = plan.setup.views.plain(images)
        with torch.no_grad():
            torch.testing.assert_close(plain.eval()(x), net.eval()(x), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(inference.folded(net)(x), net.eval()(x), rtol=1e-3, atol=1e-4)
        assert isinstance(plain, reference.PlainResNet18) == (name == "resnet18-4")
        assert all(p.is_contiguous() for p in plain.parameters()), "the usual memory layout"


def test_views_engine_buffers_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "BATCH", 32)
    monkeypatch.setattr(views, "PIL_BATCH", 16)
    assert len(sane(views.measure(times=1))) == len(views.CASES)
    rows = engine.measure({**NARROW, "data.labeled_clients": 3, "data.test_subset": 20}, times=1)
    assert [row.at_most for row in rows] == [3.0, None, 1.0, 1.0]
    assert rows[0].value > 0
    assert len(sane(buffers.measure("resnet18-4", models=3, calls=1, times=1))) == 6
    tiny = {"tiny": {**DIGITS, "net.name": "wrn-10-1", "data.test_subset": 20}}
    assert len(sane(inference.measure(tiny, times=1))) == 2


def test_two_workers_come_to_the_same_bits() -> None:
    rows = sane(workers.measure({**NARROW, "method.labeled_epochs": 2}, times=1))
    assert rows["the same bits"].reached is True


def test_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "RUNS", tmp_path)
    alone, small = clients.alone, {"data.name": "digits", "net.name": "cnn-4"}

    def once_alone(settings: dict[str, Any], rounds: int) -> dict[str, Any]:  # a process takes seconds to start
        if settings["data.clients"] == 20:
            return alone(settings, rounds)
        with tempfile.TemporaryDirectory() as folder:
            return clients.child(settings, rounds, Path(folder, "run"))

    monkeypatch.setattr(clients, "alone", once_alone)
    rows = sane(clients.measure(numbers=[20], active=5, changes=small, rounds=2))
    assert rows["20 clients: a round"].note == "10 active"
    assert "5 active clients, ResNet-18: peak memory above start-up" in rows
    assert 50 < rows["20 clients: peak memory"].value < 5000, "megabytes of a process with torch in it"
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_backends_against_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray, Flower and new processes are slow to start: here `local` stands for them, and runs are in this process."""

    def here(backend: str, settings: dict[str, Any], folder: Path, done: list[int]) -> None:
        done.append(len(done))
        simulation.main(backend, settings, folder / f"{backend}-{done[-1]}")

    monkeypatch.setattr(simulation, "alone", here)
    rows = sane(simulation.measure(["local"], {**NARROW, "data.test_subset": 20, "rounds": 2}, times=1))
    assert rows["local and pool: the same model"].reached is True


def test_secure_aggregation_sends_as_many_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    rows = {row.what: row for row in secure.measure({**NARROW, "data.clients": 3}, clients=3, times=1)}
    assert 1.0 < rows["bytes up, 32 bits / plain"].value < 1.6  # keys and shares weigh more beside a small net
    assert 1.5 < rows["bytes up, 64 bits / plain"].value < 2.6
    assert len([name for name in rows if name.startswith("CPU")]) == 6


def test_the_head_against_the_whole_net() -> None:
    small = {**NARROW, "data.image_size": 0, "data.labels": 20, "net.norm": "bn", "data.test_subset": 10}
    rows = sane(head.measure({"FixMatch": head.METHODS["FixMatch"]}, small, times=1))
    assert list(rows) == [
        "FixMatch: round of all of lite0 / of its head",
        "FixMatch: first round of the head, with the bank / round of all of lite0",
    ]


def test_rows_say_whether_the_goal_is_reached() -> None:
    row = timing.ratio("a / b", [Spent(3, 1), Spent(3, 1)], [Spent(1, 1), Spent(2, 1)], clock="wall", at_least=3)
    assert (row.value, row.low, row.high, row.goal, row.reached) == (2.25, 1.5, 3.0, "≥ 3.00×", False)
    assert Row("none", 1.0).reached is None
    assert Row("same", 1.0, "yes", at_least=1.0).cells() == ("same", "yes", "", "yes", "yes", "")


def test_the_page_is_that_of_the_records() -> None:
    assert bench.PAGE.read_text() == bench.markdown(json.loads(bench.RECORD.read_text())), "run: make bench ONLY=page"


def test_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "PARTS", ("views",))
    monkeypatch.setattr(views, "measure", lambda: [Row("a / b", 2.0, at_least=1.5, low=1.9, high=2.1)])
    monkeypatch.setattr("os.getloadavg", lambda: (0.7, 0, 0))
    bench.main([])
    written = json.loads(Path("evidence/bench.json").read_text())
    assert written["views"]["rows"][0]["reached"] is True
    assert written["views"]["machine"]["quiet"] is False
    text = Path("docs/speed.md").read_text()
    assert "| a / b | 2.00× | 1.90× … 2.10× | ≥ 1.50× | yes |  |" in text
    assert "The machine was not quiet" in text
    older = {**written, "engine": written["views"]}
    Path("evidence/bench.json").write_text(json.dumps(older))
    monkeypatch.setattr(bench, "PARTS", ("views", "engine"))
    monkeypatch.setattr(views, "measure", lambda: [Row("a / b", 3.0)])
    bench.main(["views"])
    text = Path("docs/speed.md").read_text()
    assert "| a / b | 3.00× |" in text
    assert "| a / b | 2.00× |" in text, "other parts stay"
    assert "not quiet" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit, match="There is no part 'veiws'"):
        bench.main(["veiws"])


def test_safeguards_are_compared_with_rounds_without_them() -> None:
    rows = sane(private.measure({**NARROW, "data.clients": 10, "data.subset": 200}, times=1))
    assert len(rows) == 2 * len(private.SAFEGUARDS)
    assert rows["median: a round's bytes over one without"].value == 1.0
    assert rows["noise at the server: a round's bytes over one without"].value == 1.0
    told = rows["noise at the clients: a round's bytes over one without"].value
    assert 1.0 < told < 1.01  # how many are asked goes down with each task
