"""What every method must do, in every placement it names. A new file in tacit/methods is tested by being there."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from runs import TINY, digest, timeless
from tacit import payload
from tacit.backends import LocalBackend
from tacit.data.federation import Federation
from tacit.engine import Engine, prepare, run_experiment, stages_of
from tacit.errors import TacitError
from tacit.experiment import Experiment, resolve
from tacit.kept import Kept
from tacit.method import PLACEMENTS, Method, Reply, Stage, Task, find_method, known_methods
from tacit.record import OpenRun, Run
from tacit.sides import Client

PAIRS = [(name, place) for name in known_methods() for place in find_method(name).placements]
everywhere = pytest.mark.parametrize(("name", "placement"), PAIRS, ids=[f"{n}-{p}" for n, p in PAIRS])
every_method = pytest.mark.parametrize("name", known_methods())


def smoke(name: str, placement: str, **settings: object) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return resolve({"method.name": name, "method.preset": "smoke", "data.placement": placement}, TINY, changes)


class Spy:
    """A method's own client_train, with everything that crosses the wall written down."""

    def __init__(self) -> None:
        self.seen: list[tuple[Task, payload.Payload, Reply]] = []

    def on(self, monkeypatch: pytest.MonkeyPatch, stages: tuple[Stage, ...]) -> None:
        for kind in {type(stage.method) for stage in stages}:
            original = kind.client_train

            def watched(
                method: Method, task: Task, kept: payload.Payload, me: Client, original: Callable = original
            ) -> Reply:
                reply = original(method, task, kept, me)
                self.seen.append((task, kept, reply))
                return reply

            monkeypatch.setattr(kind, "client_train", watched)


@everywhere
def test_two_rounds_and_the_walls(name: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs; what it sends and keeps is what it declares; payloads survive bytes; what is kept is no alias."""
    experiment = smoke(name, placement)
    spy = Spy()
    spy.on(monkeypatch, stages_of(experiment))
    run = run_experiment(experiment, tmp_path / "run")
    assert len(run.records) == sum(stage.rounds for stage in stages_of(experiment))
    assert not any(record["refused"] or record["skipped"] for record in run.records)
    stage_methods = [stage.method for stage in stages_of(experiment)]
    declared_down = {key.removesuffix("?") for method in stage_methods for key in method.server_sends}
    declared_kept = {key.removesuffix("?") for method in stage_methods for key in method.client_keeps}
    kept_tensors: dict[int, torch.Tensor] = {}
    for task, kept, reply in spy.seen:
        assert set(task.send) <= declared_down
        assert set(reply.keep) <= declared_kept
        for parts in (task.send, reply.send, reply.keep):
            back = payload.from_bytes(payload.to_bytes(parts))
            assert [n for n, _ in payload.tensors(back)] == [n for n, _ in payload.tensors(parts)]
        kept_tensors.update({t.untyped_storage().data_ptr(): t for _, t in payload.tensors(reply.keep)})
        kept_tensors.update({t.untyped_storage().data_ptr(): t for _, t in payload.tensors(kept)})
        for _, tensor in payload.tensors(reply.send):
            assert tensor.untyped_storage().data_ptr() not in kept_tensors or tensor.numel() == 0


@everywhere
def test_resumed_is_uninterrupted(name: str, placement: str, tmp_path: Path) -> None:
    """Stopped after each round and in the middle of each, it ends with the same bytes."""
    experiment = smoke(name, placement)
    whole = run_experiment(experiment, tmp_path / "whole")
    for stop_at in range(len(whole.records)):
        folder = tmp_path / f"stopped-{stop_at}"

        class Stop:
            def start(self, plan: object, done: int) -> None: ...
            def client_done(self, moment: object, done: int, asked: int, stop_at: int = stop_at) -> None:
                if moment.step == stop_at and done == 1:  # type: ignore[attr-defined]
                    raise KeyboardInterrupt

            def round_done(self, record: dict, stop_at: int = stop_at) -> None:
                if record["step"] == stop_at:
                    raise KeyboardInterrupt

            def finish(self, summary: object) -> None: ...

        with pytest.raises(KeyboardInterrupt):
            run_experiment(experiment, folder, watcher=Stop())
        resumed = run_experiment(experiment, folder, resume=True)
        assert digest(resumed) == digest(whole)
        assert timeless(resumed) == timeless(whole)


@everywhere
def test_pool_is_local(name: str, placement: str, tmp_path: Path) -> None:
    """The same bytes from one process and from two."""
    local = run_experiment(smoke(name, placement), tmp_path / "local")
    pool = run_experiment(smoke(name, placement, backend__name="pool", backend__workers=2), tmp_path / "pool")
    assert digest(pool) == digest(local)
    assert timeless(pool) == timeless(local)


@everywhere
def test_learns_above_chance(name: str, placement: str, tmp_path: Path) -> None:
    """With a little more time than smoke takes, it is far better than guessing (10 classes)."""
    experiment = smoke(
        name,
        placement,
        rounds=4,
        data__subset=0,
        data__test_subset=0,
        data__labels=300,
        data__partition="iid",
        train__epochs=3,
        train__server_epochs=15,
    )
    run = run_experiment(experiment, tmp_path / "run")
    assert np.nanmax(run["accuracy"]) > 0.4  # a stage without a classifier has none


def one_round(
    experiment: Experiment, folder: Path, change: Callable[[list[Reply]], list[Reply]]
) -> tuple[payload.Payload, payload.Payload]:
    """The server's state before and after a merge of replies that were tampered with."""
    plan = prepare(experiment)
    stage = plan.stages[-1]
    opened = OpenRun(folder, experiment, resume=False)
    try:
        backend = LocalBackend(plan.setup, Federation(plan.dataset, plan.split, plan.setup.device), Kept(folder / "k"))
        from tacit.engine import Silence
        from tacit.sides import Moment

        engine = Engine(plan, opened, backend, Silence())
        past, first = {}, 0
        for earlier in plan.stages[:-1]:
            past[earlier.name] = engine._run_stage(earlier, first, past)
            first += earlier.rounds
        moment = Moment(stage.name, 0, stage.rounds, first)
        state = stage.method.server_start(engine._hub(moment), past)
        hub = engine._hub(moment)
        tasks = stage.method.server_send(state, hub)
        replies = [outcome.reply for outcome in backend.run(stage, moment, tasks, lambda done: None)]
        return state, stage.method.server_merge(state, change(replies), hub)
    finally:
        opened.close()


@everywhere
def test_one_reply_and_replies_of_weight_zero(name: str, placement: str, tmp_path: Path) -> None:
    """A single reply is enough; clients that learned nothing leave a finite model."""
    experiment = smoke(name, placement)
    changes: dict[str, Callable[[list[Reply]], list[Reply]]] = {
        "one": lambda replies: replies[:1],
        "zero": lambda replies: [dataclasses.replace(reply, examples=0) for reply in replies],
    }
    for label, change in changes.items():
        _, after = one_round(experiment, tmp_path / label, change)
        assert payload.first_not_finite(after) == ""


@everywhere
def test_nobody_answers(name: str, placement: str, tmp_path: Path) -> None:
    """Every client drops out of every round: the run ends, the model stays, the record says so."""
    experiment = smoke(name, placement, faults__dropout=0.999999)
    run = run_experiment(experiment, tmp_path / "run")
    before: dict | None = None
    for record in run.records:
        assert record["answered"] == []
        assert bool(record["skipped"]) == bool(record["asked"])
        scores = {key: record.get(key) for key in ("loss", "accuracy", "per_class")}
        if record["skipped"] and before is not None:
            assert scores == before  # the very same model was evaluated again
        before = scores if scores["loss"] is not None else None  # a stage may have no classifier yet


@everywhere
def test_a_class_without_labels_and_nothing_confident(name: str, placement: str, tmp_path: Path) -> None:
    """A very skewed split in which parties lack classes, and a start at which nothing is confident yet."""
    experiment = smoke(name, placement, rounds=1, data__alpha=0.05, data__min_size=1, data__clients=6, data__labels=20)
    run = run_experiment(experiment, tmp_path / "run")
    assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())


@every_method
def test_wrong_placement_is_refused_with_help(name: str) -> None:
    for placement in set(PLACEMENTS) - set(find_method(name).placements):
        with pytest.raises(TacitError, match=r"does not work with labels at .* It needs"):
            smoke(name, placement)


@every_method
def test_presets_and_papers(name: str) -> None:
    """Every preset resolves in every placement; there is a citation, a docs page and a docstring."""
    method = find_method(name)
    assert {"paper", "smoke"} <= set(method.presets)
    for preset in method.presets:
        for placement in method.placements:
            experiment = resolve({"method.name": name, "method.preset": preset, "data.placement": placement})
            assert experiment.build_method() == resolve(experiment.to_dict()).build_method()
    assert method.citation
    assert method.__doc__
    page = Path(__file__).parent.parent / "docs" / "methods" / f"{name}.md"
    assert page.is_file(), f"docs/methods/{name}.md is missing"


@every_method
def test_one_page_of_code(name: str) -> None:
    path = Path(__file__).parent.parent / "tacit" / "methods" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 150


def test_a_frozen_method_cannot_remember() -> None:
    for name in known_methods():
        with pytest.raises(dataclasses.FrozenInstanceError):
            find_method(name)().secret = 1  # type: ignore[attr-defined]


def test_runs_are_found_again(tmp_path: Path) -> None:
    run = run_experiment(smoke(known_methods()[0], "server"), tmp_path / "run")
    assert Run(run.folder).summary == run.summary
