"""What the engine adds to a round of ResNet-18 on Fashion-MNIST, measured in two ways, interleaved.

*By idling*: a real round in which no client trains and ten images are evaluated. What is left is the engine: weights
in and out of each client, checks, the mean, the checkpoint on disk.
*By difference*: a real round against a bare one, a loop over the same clients with the same images, views and steps
and the same evaluation, which copies no weights out, folds nothing, checks nothing and writes nothing. Honest, but
the noise of the machine is larger than what is measured.

*The walls*: what it costs that nobody is trusted. Each client's task is copied (`payload.seal`), its reply
handed over (`payload.hand_over`) and looked at number by number (`refusal_reason`); the checkpoint has a digest, and is
read and compared once on resume.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.running import open_rounds
from benchmarks.timing import Row, interleaved, single_thread, spread
from tacit.config.resolve import resolve
from tacit.contract.kinds import Registration
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client
from tacit.core import payload
from tacit.core.payload import Copied, Payload, hand_over, seal, weights_in
from tacit.data.federation import Federation
from tacit.engine.validation import refusal_reason
from tacit.methods.fedavg import FedAvg
from tacit.nets.optimizer import sgd
from tacit.pieces.train import fit, predict, weights_of
from tacit.runs.plan import Plan, prepare

TITLE = "The engine"

SETTINGS = {
    "method": "fedavg",
    "data.name": "fashion-mnist",
    "data.placement": "some-clients",
    "data.labeled_clients": 10,
    "data.partition": "iid",
    "data.subset": 6000,  # a tenth of the data, so that a round takes seconds
    "net.name": "resnet18",
    "net.norm": "bn",
    "train.batch": 64,
    "device": "cpu",
    "backend.name": "local",
}


def bare_round(plan: Plan, federation: Federation, net: torch.nn.Module) -> None:
    setup = plan.setup
    for client in range(setup.clients):
        labeled = federation.client_shard(client).labeled
        fit(
            net,
            labeled.images,
            labeled.labels,
            view=setup.views.weak_view,
            optimizer=sgd(net, lr=1e-3, momentum=0.9, weight_decay=5e-4),
            epochs=1,
            batch=setup.train.batch,
            clip=setup.train.clip,
            generator=torch.Generator().manual_seed(client),
        )
    predict(net, federation.test().images, setup.views.plain)


@dataclass(frozen=True)
class Idle(FedAvg):
    """FedAvg without its training: all that is left is the engine's work."""

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        model = me.model(weights_in(task.send, "model"))
        return Reply(send={"model": me.weights(model)}, examples=1)


def walls(plan: Plan) -> dict[str, float]:
    """CPU seconds a round of checks and copies, and of digests, for as many clients as the plan has."""
    weights = Copied(weights_of(plan.setup.build(torch.Generator().manual_seed(0))))
    state: Payload = {"model": weights}
    task, reply = Task(0, state), Reply(send=state, examples=1)
    party = Registration(most=100.0)

    def checks() -> None:
        for _ in range(plan.setup.clients):
            sent, response = seal(task.send), hand_over(reply.send)
            assert not refusal_reason(FedAvg.client_sends, task, reply, state, len(plan.setup.classes), party)
            del sent, response

    def digests() -> None:
        payload.content_digest(state)

    spent = {}
    for name, work in (("checks", checks), ("digests", digests)):
        work()  # the first one takes memory from the system
        started = time.process_time()
        work()
        spent[name] = time.process_time() - started
    return spent


def measure(changes: Mapping[str, Any] | None = None, times: int = 3) -> list[Row]:
    plan = prepare(resolve(SETTINGS, changes or {}))
    idle_plan = prepare(resolve(SETTINGS, changes or {}, {"data.test_subset": 10}))
    net = plan.setup.build(torch.Generator().manual_seed(0))
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    with (
        single_thread(),
        tempfile.TemporaryDirectory(prefix="tacit-bench-") as folder,
        open_rounds(plan, Path(folder, "run")) as rounds,
        open_rounds(idle_plan, Path(folder, "idle"), Idle()) as idle,
    ):
        works = {"bare": lambda: bare_round(plan, federation, net), "ours": rounds.next, "idle": idle.next}
        idle.next()  # the first one builds the net
        spent = interleaved(works, times, warm_up=False)
    ours = sorted(one.wall for one in spent["ours"])[times // 2]
    idling = [100 * i.wall / o.wall for i, o in zip(spent["idle"], spent["ours"], strict=True)]
    differences = [100 * (1 - b.cpu / o.cpu) for b, o in zip(spent["bare"], spent["ours"], strict=True)]
    what = f"{len(federation.split.clients)} clients, FedAvg, {ours:.1f} s a round"
    computing = sorted(one.cpu for one in spent["ours"])[times // 2]
    with single_thread():
        taken = [walls(plan) for _ in range(times)]
    checks, digests = ([100 * one[name] / computing for one in taken] for name in ("checks", "digests"))
    return [
        spread("share of a round that is the engine's, wall, by idling", idling, "%", at_most=3.0, note=what),
        spread("the same in CPU time, by difference from bare training", differences, "%", note=what),
        spread("of it, CPU time: replies copied and checked", checks, "%", at_most=1.0, note=what),
        spread("of it, CPU time: the checkpoint's digest", digests, "%", at_most=1.0, note=what),
    ]
