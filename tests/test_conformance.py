"""What every method must do, in every placement it names. A new file in tacit/methods is tested by being there."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import TINY, digest, timeless
from tacit.config.resolve import build_method, resolve
from tacit.contract.method import PLACEMENTS, Method, Reply, Stage, Task
from tacit.contract.parties import Client, Hub
from tacit.contract.sums import why_not
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.payload import Payload
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.methods import find_method, known_methods
from tacit.runs.folder import Run
from tacit.runs.plan import stages_of
from tacit.runs.watchers import NullWatcher
from tacit.testing.sums import apart
from tacit.testing.trial import Interruptions

PAIRS = [(name, place) for name in known_methods() for place in find_method(name).placements]
every_method = pytest.mark.parametrize("name", known_methods())


def smoke(name: str, placement: str, **settings: object) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    return resolve({"method.name": name, "method.preset": "smoke", "data.placement": placement}, TINY, changes)


def copy(parts: Payload) -> Payload:
    return payload.from_bytes(payload.to_bytes(parts))


class Spy:
    """A method's own client_train and server_merge, with everything that crosses the wall written down."""

    def __init__(self) -> None:
        self.seen: list[tuple[Task, Payload, Reply]] = []
        self.merges: list[tuple[Payload, list[Reply], Hub]] = []  # copies of what each merge was given

    def on(self, monkeypatch: pytest.MonkeyPatch, stages: tuple[Stage, ...]) -> None:
        for kind in {type(stage.method) for stage in stages}:
            train, merge = kind.client_train, kind.server_merge

            def watched_train(method: Method, task: Task, kept: Payload, me: Client, train: Callable = train) -> Reply:
                reply = train(method, task, kept, me)
                self.seen.append((task, kept, reply))
                return reply

            def watched_merge(
                method: Method, state: Payload, replies: list[Reply], hub: Hub, merge: Callable = merge
            ) -> Payload:
                copies = [dataclasses.replace(reply, send=copy(reply.send)) for reply in replies]
                self.merges.append((copy(state), copies, hub))
                return merge(method, state, replies, hub)

            monkeypatch.setattr(kind, "client_train", watched_train)
            monkeypatch.setattr(kind, "server_merge", watched_merge)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A run of the smoke preset from its beginning to its end, and what was seen of it."""

    experiment: Experiment
    run: Run
    spy: Spy


@pytest.fixture(scope="module", params=PAIRS, ids=[f"{name}-{placement}" for name, placement in PAIRS])
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A method and a placement. Of the whole module, so that pytest runs all tests of a pair one after the other."""
    return request.param


@pytest.fixture(scope="module")
def whole(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run that the tests of a pair compare theirs with."""
    experiment, spy = smoke(*pair), Spy()
    with pytest.MonkeyPatch.context() as monkeypatch:
        spy.on(monkeypatch, stages_of(experiment))
        run = run_experiment(experiment, tmp_path_factory.mktemp("whole") / "run")
    return Whole(experiment, run, spy)


def test_two_rounds_and_the_walls(whole: Whole) -> None:
    """It runs; what it sends and keeps is what it declares; payloads survive bytes; what is kept is no alias."""
    stages = stages_of(whole.experiment)
    assert len(whole.run.records) == sum(stage.rounds for stage in stages)
    assert not any(record["refused"] or record["skipped"] for record in whole.run.records)
    declared_down = {key.removesuffix("?") for stage in stages for key in stage.method.server_sends}
    declared_kept = {key.removesuffix("?") for stage in stages for key in stage.method.client_keeps}
    kept_tensors: dict[int, torch.Tensor] = {}
    for task, kept, reply in whole.spy.seen:
        assert set(task.send) <= declared_down
        assert set(reply.keep) <= declared_kept
        for parts in (task.send, reply.send, reply.keep):
            assert [n for n, _ in payload.tensors(copy(parts))] == [n for n, _ in payload.tensors(parts)]
        kept_tensors.update({t.untyped_storage().data_ptr(): t for _, t in payload.tensors(reply.keep)})
        kept_tensors.update({t.untyped_storage().data_ptr(): t for _, t in payload.tensors(kept)})
        for _, tensor in payload.tensors(reply.send):
            assert tensor.untyped_storage().data_ptr() not in kept_tensors or tensor.numel() == 0


def test_resumed_is_uninterrupted(whole: Whole, tmp_path: Path) -> None:
    """Stopped in the middle of each round and after it, and resumed each time, it ends with the same bytes."""
    stages = stages_of(whole.experiment)
    interruptions, resumed = Interruptions(stages), None
    while resumed is None:
        try:
            resumed = run_experiment(whole.experiment, tmp_path / "run", resume=True, watcher=interruptions)
        except KeyboardInterrupt:
            assert Run(tmp_path / "run").summary is None
    asked = {record["step"] for record in whole.run.records if record["asked"]}
    assert {step for step, where in interruptions.happened if where == "middle"} == asked
    ends = sum(stage.rounds for stage in stages) - len(stages[:-1])
    assert sum(where == "end" for _, where in interruptions.happened) == ends
    assert digest(resumed) == digest(whole.run)
    assert timeless(resumed) == timeless(whole.run)


def test_pool_is_local(whole: Whole, pair: tuple[str, str], tmp_path: Path) -> None:
    """The same bytes from one process and from two."""
    assert whole.experiment.backend.name == "local"
    pool = run_experiment(smoke(*pair, backend__name="pool", backend__workers=2), tmp_path / "pool")
    assert digest(pool) == digest(whole.run)
    assert timeless(pool) == timeless(whole.run)


class Learned(Exception):
    """It is far better than guessing: no need to go on."""


class Examiner(NullWatcher):
    def round_done(self, record: Mapping[str, Any]) -> None:
        if record["stage"] == "main" and record["accuracy"] > 0.4:
            raise Learned


def test_learns_above_chance(pair: tuple[str, str], tmp_path: Path) -> None:
    """With a little more time than smoke takes, it is far better than guessing (10 classes), with its main stage."""
    experiment = smoke(
        *pair,
        rounds=4,
        data__subset=0,
        data__test_subset=0,
        data__labels=300,
        data__partition="iid",
        train__epochs=3,
        train__server_epochs=15,
    )
    try:
        run = run_experiment(experiment, tmp_path / "run", watcher=Examiner())
    except Learned:
        return
    pytest.fail(f"no round of the main stage reached 40 %: {run['accuracy']}")


@pytest.mark.parametrize("answered", ["one", "zero"])
def test_one_reply_and_replies_of_weight_zero(whole: Whole, answered: str) -> None:
    """A single reply is enough; clients that learned nothing leave a finite model."""
    first = [merge for merge in whole.spy.merges if (merge[2].stage, merge[2].round) == ("main", 0)]
    state, replies, hub = first[0]
    assert [reply.client for reply in replies] == whole.run.records[-whole.experiment.rounds]["answered"]
    few = replies[:1] if answered == "one" else [dataclasses.replace(reply, examples=0) for reply in replies]
    after = stages_of(whole.experiment)[-1].method.server_merge(copy(state), few, hub)
    assert payload.first_not_finite(after) == ""


def test_sums_are_enough_for_the_merge_where_that_is_declared(whole: Whole) -> None:
    """Secure aggregation: merged from sums alone, the state is the same. Other methods are refused with a reason."""
    methods = {stage.name: stage.method for stage in stages_of(whole.experiment)}
    for state, replies, hub in whole.spy.merges:
        method = methods[hub.stage]
        if why := why_not(method) or method.needs_each(whole.experiment):
            assert len(why) > 20
        elif replies:
            assert apart(method, state, replies, hub, state, hub.labeled_clients) == ""


@every_method
def test_class_weights_and_margins_reach_what_is_learned_from_labels(name: str, tmp_path: Path) -> None:
    """`train.class_weights` and `train.logit_adjustment` are settings of the engine: no method may forget them."""
    settings = {"rounds": 1, "data__labels": 95}  # not as many of each class
    placement = "clients" if "clients" in find_method(name).placements else "server"
    more = {"train__class_weights": "balanced", "train__logit_adjustment": 1.0}  # one loss carries both
    plain, weighted = smoke(name, placement, **settings), smoke(name, placement, **settings, **more)
    assert digest(run_experiment(plain, tmp_path / "a")) != digest(run_experiment(weighted, tmp_path / "b"))


def test_nobody_answers(pair: tuple[str, str], tmp_path: Path) -> None:
    """Every client drops out of every round: the run ends, the model stays, the record says so."""
    experiment = smoke(*pair, faults__dropout=0.999999)
    run = run_experiment(experiment, tmp_path / "run")
    before: dict | None = None
    for record in run.records:
        assert record["answered"] == []
        assert bool(record["skipped"]) == bool(record["asked"])
        scores = {key: record.get(key) for key in ("loss", "accuracy", "per_class")}
        if record["skipped"] and before is not None:
            assert scores == before  # the very same model was evaluated again
        before = scores if scores["loss"] is not None else None  # a stage may have no classifier yet


def test_a_class_without_labels_and_nothing_confident(pair: tuple[str, str], tmp_path: Path) -> None:
    """A very skewed split in which parties lack classes, and a start at which nothing is confident yet."""
    experiment = smoke(*pair, rounds=1, data__alpha=0.05, data__min_size=1, data__clients=6, data__labels=20)
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
            assert build_method(experiment) == build_method(resolve(experiment.to_dict()))
    assert method.citation
    assert method.__doc__
    page = Path(__file__).parent.parent / "docs" / "methods" / f"{name}.md"
    assert page.is_file(), f"docs/methods/{name}.md is missing"


def test_a_frozen_method_cannot_remember() -> None:
    for name in known_methods():
        with pytest.raises(dataclasses.FrozenInstanceError):
            find_method(name)().secret = 1  # type: ignore[attr-defined]


def test_runs_are_found_again(tmp_path: Path) -> None:
    run = run_experiment(smoke(known_methods()[0], "server"), tmp_path / "run")
    assert Run(run.folder).summary == run.summary


@pytest.mark.parametrize(("name", "placement"), PAIRS)
def test_rounds_over_a_part_of_the_images(name: str, placement: str, tmp_path: Path) -> None:
    """`train.parts`: nobody's reply is refused, and no round is lost, by a client's having a part of its images."""
    run = run_experiment(smoke(name, placement, train__parts=2, rounds=2), tmp_path / "run")
    assert not [record["refused"] for record in run.records if record["refused"]]
    assert not any(record["skipped"] for record in run.records)
