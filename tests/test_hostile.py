"""Clients that do what they must not, on every backend: the same result, or the same refusal, everywhere.

And replies drawn at random for every method: none of them ends a run or leaves a model that is none.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from test_sites import Here

from runs import digest
from tacit.backends import LocalBackend
from tacit.backends.base import unsendable
from tacit.config.resolve import resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import RoundInfo
from tacit.core import payload
from tacit.core.payload import Payload
from tacit.core.settings import Experiment
from tacit.data.federation import Federation
from tacit.engine.loop import Engine
from tacit.engine.run import run_experiment
from tacit.methods import find_method, known_methods
from tacit.pieces.train import weights_of
from tacit.runs.folder import Run
from tacit.runs.memory import ClientMemory
from tacit.runs.plan import prepare
from tacit.runs.watchers import NullWatcher
from tacit.runs.writer import OpenRun
from tacit.sites.jobs import Job
from tacit.sites.rehearse import write_parties
from tacit.sites.server import run_at_sites
from tacit.sites.site import Settings, Site

HOSTILE = '''
"""FedAvg with clients that do what they must not: which harm is done is the client's number."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tacit.contract.method import Reply
from tacit.methods.fedavg import FedAvg
from tacit.core.payload import weights_in

HARM = [
    "honest", "change the task", "alias", "send the task", "send the net", "gradients",
    "views", "name", "list", "str", "None", "object", "complex", "sparse", "meta", "bool", "huge int", "deep",
    "inner name", "no dict", "examples", "examples text", "examples true", "metric", "metrics", "missing", "float64",
]
ALIAS = []


@dataclass(frozen=True)
class Hostile(FedAvg):
    client_sends: ClassVar = {"model": "weights", "extra?": "any"}

    def client_train(self, task, memory, me):
        harm = HARM[me.number]
        model = weights_in(task.send, "model")
        net = me.model(model)
        if harm == "change the task":
            for tensor in model.values():
                tensor.zero_()
            task.send["more"] = 1
        if harm == "alias" and ALIAS:  # of the round before
            for tensor in ALIAS.pop().values():
                tensor.fill_(1000)
        if harm == "send the net":
            return Reply(send={"model": net.state_dict()}, examples=len(me.shard.labeled))
        if harm == "send the task":
            return Reply(send=task.send, examples=len(me.shard.labeled))
        reply = super().client_train(task, memory, me)
        sent = dict(weights_in(reply.send, "model"))
        if harm == "alias":
            ALIAS.append(sent)
        if harm == "gradients":
            sent = {name: t.requires_grad_(t.is_floating_point()) for name, t in sent.items()}
        if harm == "views":  # all of one storage, with strides
            sent = {name: torch.stack([t, t], dim=-1)[..., 0] for name, t in sent.items()}
        if harm == "missing":
            sent.popitem()
        if harm == "float64":
            sent = {name: t.double() for name, t in sent.items()}
        if harm == "no dict":
            return replace(reply, send=[1, 2])
        if harm == "examples":
            return replace(reply, examples=1e300)
        if harm == "examples text":
            return replace(reply, examples="many")
        if harm == "examples true":
            return replace(reply, examples=torch.ones(3))
        if harm == "metric":
            return replace(reply, metrics={"loss": "low"})
        if harm == "metrics":
            return replace(reply, metrics={"loss": 10**400})
        odd = {
            "list": [1, 2], "str": "x", "None": None, "object": object(), "complex": torch.tensor([1j]),
            "sparse": torch.eye(3).to_sparse(), "meta": torch.zeros(2, device="meta"), "huge int": 10**400,
            "deep": {"a": {"b": torch.zeros(1)}}, "bool": torch.ones(3, dtype=torch.bool),
            "inner name": {7: torch.zeros(1)},
        }
        if harm in odd:
            return replace(reply, send={"model": sent, "extra": odd[harm]})
        if harm == "name":
            return replace(reply, send={"model": sent, "undeclared": 1})
        return replace(reply, send={"model": sent})
'''
HARM: list[str] = eval(HOSTILE.split("HARM = ")[1].split("\nALIAS")[0])
TAKEN = {"honest", "change the task", "alias", "send the task", "send the net", "gradients", "views", "bool"}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A client for each harm, and two rounds. Training is short: what is tested is what travels."""
    file = tmp_path_factory.mktemp("method") / "hostile.py"
    file.write_text(HOSTILE)
    small = {"data.subset": 400, "data.test_subset": 40, "data.min_size": 1, "train.epochs": 1, "data.partition": "iid"}
    more = {"data.placement": "clients", "rounds": 2, "data.clients": len(HARM), "data.labels": 100}
    return resolve({"method.name": str(file), "method.preset": "smoke"}, more, small)


@pytest.fixture(scope="module")
def local(hostile: Experiment, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_experiment(hostile, tmp_path_factory.mktemp("local") / "run")


def outcome(run: Run) -> list[tuple[list[int], list[tuple[int, str]], float]]:
    """Who answered, who was refused and why, and how good the model was then: by round."""
    return [
        (
            record["answered"],
            [(one["client"], one["why"].split("refused: ")[-1].split(", more than")[0]) for one in record["refused"]],
            record["loss"],
        )
        for record in run.records
    ]


def test_a_bad_reply_is_refused_and_named_and_the_run_goes_on(local: Run) -> None:
    for record in local.records:
        assert {HARM[client] for client in record["answered"]} == TAKEN
        assert {HARM[one["client"]] for one in record["refused"]} == set(HARM) - TAKEN
        assert record["skipped"] == ""
    assert all(torch.isfinite(tensor).all() for tensor in local.weights.values())


def copies(parts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in payload.tensors(parts)}


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_what_a_client_changes_reaches_neither_the_server_nor_earlier_replies(
    hostile: Experiment, tmp_path: Path
) -> None:
    plan = prepare(hostile)
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    backend = LocalBackend(plan.setup, federation, ClientMemory(tmp_path / "kept"))
    state: Payload = {"model": weights_of(plan.setup.build(torch.Generator().manual_seed(0)))}
    first, replies = copies(state), []
    for number in range(2):
        tasks = [
            Task(HARM.index(harm), state) for harm in ("change the task", "alias", "send the task", "send the net")
        ]
        outcomes = backend.run(plan.stages[0], RoundInfo("main", number, 2, number), tasks, lambda done: None)
        assert not any(one.fault for one in outcomes)
        replies += [(one.reply.send, copies(one.reply.send)) for one in outcomes]
        assert list(state) == ["model"]
        assert same(copies(state), first)
    assert all(same(copies(send), then) for send, then in replies)
    for number in (2, 6):  # of the task that was sent back, nothing but what came back
        assert same(replies[number][1], first)


def test_the_pool_says_the_same(local: Run, hostile: Experiment, tmp_path: Path) -> None:
    pool = run_experiment(resolve(hostile.to_dict(), {"backend.name": "pool", "backend.workers": 2}), tmp_path / "run")
    assert outcome(pool) == outcome(local)
    assert digest(pool) == digest(local)


def test_ray_says_the_same(local: Run, hostile: Experiment, tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        changes = {"backend.name": "ray", "backend.workers": 1}
        assert outcome(run_experiment(resolve(hostile.to_dict(), changes), tmp_path / "run")) == outcome(local)
    finally:
        ray.shutdown()


def test_sites_say_the_same(local: Run, hostile: Experiment, tmp_path: Path) -> None:
    write_parties(prepare(hostile), tmp_path / "parties")
    own = (Path(hostile.method["name"]),)
    names = [f"site-{client}" for client in range(len(HARM))]
    sites = {name: Site(Settings(name, tmp_path / "parties" / name, tmp_path / name, own)) for name in names}
    changes = {"data.name": str(tmp_path / "parties" / "server"), "backend.name": "flower"}
    job = Job(resolve(hostile.to_dict(), changes).to_dict(), str(tmp_path / "run"), tuple(sites))
    assert outcome(run_at_sites(job, Here(sites), NullWatcher())) == outcome(local)


# --- Replies drawn at random, for every method from its declaration ------------------------------------------------

EXTREME = [0.0, -1.0, 1e-40, 0.5, 1.0, 1e6, 1e7, 1e30, 3e38, math.inf, -math.inf, math.nan]
NUMBERS = [*EXTREME, 5e-324, 1.7e308, 2**53, 2**62, 10**400, -(10**400), True]
TYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool]


def harmed(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, with something changed: all of it, one number, its type, its sign or its shape."""
    how, value = draw(st.sampled_from(["all", "one", "type", "minus", "shape"])), draw(st.sampled_from(EXTREME))
    if how == "type":
        return tensor.to(draw(st.sampled_from(TYPES)))
    if how == "shape":
        return tensor.flatten()[:-1]
    if how == "minus":
        return -tensor
    changed = tensor.double().flatten()
    changed[slice(None) if how == "all" else slice(0, 1)] = value
    return changed.reshape(tensor.shape).to(tensor.dtype)


@st.composite
def hostile_replies(draw: st.DrawFn, honest: Reply) -> Reply:
    send: dict[str, Any] = dict(honest.send)
    for name in draw(st.lists(st.sampled_from([*send, "more"]), max_size=2)):
        value = send.get(name)
        how = draw(st.sampled_from(["harm", "harm", "number", "missing", "list"]))
        if how == "missing":
            send.pop(name, None)
        elif how == "list" or name == "more":
            send[name] = [1.0]
        elif how == "harm" and isinstance(value, dict):
            entry = draw(st.sampled_from(list(value)))
            send[name] = {**value, entry: harmed(draw, value[entry])}
        elif how == "harm" and isinstance(value, torch.Tensor):
            send[name] = harmed(draw, value)
        else:
            send[name] = draw(st.sampled_from(NUMBERS))
    examples = draw(st.sampled_from([honest.examples, honest.examples, *NUMBERS]))
    metrics = draw(
        st.sampled_from([honest.metrics, {}, {name: draw(st.sampled_from(EXTREME)) for name in honest.metrics}])
    )
    return dataclasses.replace(honest, send=send, examples=examples, metrics=metrics)


@pytest.mark.parametrize("name", known_methods())
def test_no_reply_ends_a_run_or_leaves_a_model_that_is_none(name: str, tmp_path: Path) -> None:
    placement = "clients" if "clients" in find_method(name).placements else "server"
    layers = {"method.name": name, "method.preset": "smoke", "data.placement": placement}
    plan = prepare(resolve(layers, {"data.subset": 200, "data.test_subset": 20, "data.clients": 3}))
    folder = OpenRun(tmp_path / "run", plan.experiment, resume=False)
    try:
        plan.split.save(folder.split_path)
        federation = Federation(plan.dataset, plan.split, plan.setup.device)
        backend = LocalBackend(plan.setup, federation, ClientMemory(folder.memory_folder))
        engine, stage, round_info = (
            Engine(plan, folder, backend, NullWatcher()),
            plan.stages[-1],
            RoundInfo("main", 0, 2, 0),
        )
        state = stage.method.server_start(engine._hub(RoundInfo("main", -1, 2, 0)), {})
        hub = engine._hub(round_info)
        tasks = stage.method.server_send(state, hub)
        honest = backend.run(stage, round_info, tasks, lambda done: None)
        assert engine._usable(stage, round_info, state, tasks, honest)[1] == []
        if not honest:
            return

        @settings(max_examples=20, deadline=None, derandomize=True, database=None)
        @given(st.data())
        def never_ends(data: st.DataObject) -> None:
            outcomes = list(honest)
            for place in data.draw(st.lists(st.integers(0, len(outcomes) - 1), min_size=1, max_size=2)):
                reply = data.draw(hostile_replies(honest[place].reply))
                fault = unsendable(stage.method, reply)
                outcomes[place] = dataclasses.replace(
                    honest[place], reply=reply if not fault else Reply(send={}, examples=0), fault=fault
                )
            usable, refused = engine._usable(stage, round_info, state, tasks, outcomes)
            assert len(usable) + len(refused) == len(tasks)
            merged = (
                engine._merge(stage, round_info, state, usable, 1, engine._hub(round_info)).state if usable else state
            )
            payload.check(merged)
            assert payload.first_not_finite(merged) == ""

        never_ends()
    finally:
        folder.close()
