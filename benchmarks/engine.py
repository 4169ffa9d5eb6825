"""What the engine adds to a round of ResNet-18 on Fashion-MNIST, measured in two ways, interleaved.

*By idling*: a real round in which no client trains and ten images are evaluated. What is left is the engine: weights
in and out of each client, checks, the mean, the checkpoint on disk.
*By difference*: a real round against a bare one, a loop over the same clients with the same images, views and steps
and the same evaluation, which copies no weights out, folds nothing, checks nothing and writes nothing. Honest, but
the noise of the machine is larger than what is measured.
*The digests*: what the same real rounds spend on the digest of the checkpoint and on the line in the manifest.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.running import open_rounds
from benchmarks.timing import Row, interleaved, single_thread, spread
from tacit import payload
from tacit.data.federation import Federation
from tacit.engine import Plan, prepare
from tacit.experiment import resolve
from tacit.kept import Kept
from tacit.manifest import Manifest
from tacit.method import Reply, Task
from tacit.methods.fedavg import FedAvg
from tacit.payload import Payload, weights_in
from tacit.pieces.descent import sgd
from tacit.pieces.train import fit, predict
from tacit.sides import Client

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

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        model = me.model(weights_in(task.send, "model"))
        return Reply(send={"model": me.weights(model)}, examples=1)


@contextmanager
def timed_digests(spent: list[float]) -> Iterator[None]:
    """Add up the seconds of all that the manifest costs a round: digests, the look at what clients kept, the line."""

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def with_clock(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*given, **named)
            finally:
                spent[-1] += time.perf_counter() - started

        return with_clock

    spent.append(0.0)
    with (
        mock.patch.object(payload, "_digest", timed(payload._digest)),
        mock.patch.object(Kept, "written", timed(Kept.written)),
        mock.patch.object(Manifest, "append", timed(Manifest.append)),
    ):
        yield


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
        digests: list[float] = []

        def ours() -> None:
            with timed_digests(digests):
                rounds.next()

        works = {"bare": lambda: bare_round(plan, federation, net), "ours": ours, "idle": idle.next}
        idle.next()  # the first one builds the net
        spent = interleaved(works, times, warm_up=False)
    seconds = sorted(one.wall for one in spent["ours"])[times // 2]
    idling = [100 * i.wall / o.wall for i, o in zip(spent["idle"], spent["ours"], strict=True)]
    digesting = [100 * d / o.wall for d, o in zip(digests, spent["ours"], strict=True)]
    differences = [100 * (1 - b.cpu / o.cpu) for b, o in zip(spent["bare"], spent["ours"], strict=True)]
    what = f"{len(federation.split.clients)} clients, FedAvg, {seconds:.1f} s a round"
    return [
        spread("share of a round that is the engine's, wall, by idling", idling, "%", at_most=3.0, note=what),
        spread("share of a round for digests and the manifest, wall", digesting, "%", at_most=1.0, note=what),
        spread("the engine's share in CPU time, by difference from bare training", differences, "%", note=what),
    ]
