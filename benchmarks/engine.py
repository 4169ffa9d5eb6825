"""What the engine adds to a round of ResNet-18 on Fashion-MNIST, measured in two ways, interleaved.

*By difference*: a real round against a bare one, a loop over the same clients with the same images, views and steps
and the same evaluation, which copies no weights out, folds nothing, checks nothing and writes nothing. Honest, but
the noise of the machine is larger than what is measured.
*By idling*: a real round in which no client trains and ten images are evaluated. What is left is the engine: weights
in and out of each client, checks, the mean, the checkpoint on disk.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tacit.backends import LocalBackend
from tacit.backends.base import one_thread
from tacit.data.federation import Federation
from tacit.engine import Engine, Plan, Silence, prepare
from tacit.experiment import resolve
from tacit.kept import Kept
from tacit.method import Reply, Task
from tacit.methods.fedavg import FedAvg
from tacit.payload import Payload, weights_in
from tacit.pieces.train import fit, predict
from tacit.record import OpenRun
from tacit.sides import Client, Moment

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
            optimizer=torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4, fused=True),
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


def idle_rounds(rounds: int, folder: Path) -> list[tuple[float, float]]:
    """Seconds of rounds that do nothing but be rounds."""
    plan = prepare(resolve(SETTINGS, {"data.test_subset": 10}))
    with open_engine(plan, folder) as engine:
        stage = replace(plan.stages[-1], method=Idle())
        state = stage.method.server_start(engine._hub(Moment(stage.name, -1, rounds, 0)), {})
        moments = [Moment(stage.name, number, rounds, number) for number in range(rounds)]
        return [timed(lambda moment=moment: engine._run_round(stage, moment, state)) for moment in moments]  # type: ignore[misc]


@contextmanager
def open_engine(plan: Plan, folder: Path) -> Iterator[Engine]:
    """An engine on a folder of its own."""
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    opened = OpenRun(folder, plan.experiment, resume=False)
    opened.rewind()
    try:
        yield Engine(plan, opened, LocalBackend(plan.setup, federation, Kept(folder / "kept")), Silence())
    finally:
        opened.close()


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(rounds: int = 3) -> dict[str, float]:
    """The engine's share of a round, in per cent; medians."""
    threads = one_thread()
    folder = Path(tempfile.mkdtemp(prefix="tacit-bench-"))
    plan = prepare(resolve(SETTINGS))
    net = plan.setup.build(torch.Generator().manual_seed(0))
    stage = plan.stages[-1]
    bare, ours = [], []
    try:
        idle = idle_rounds(2 * rounds, folder / "idle")[1:]
        with open_engine(plan, folder / "run") as engine:
            federation = Federation(plan.dataset, plan.split, plan.setup.device)
            state = stage.method.server_start(engine._hub(Moment(stage.name, -1, rounds, 0)), {})
            for number in range(rounds):
                moment = Moment(stage.name, number, rounds, number)
                bare.append(timed(lambda: bare_round(plan, federation, net)))
                ours.append(timed(lambda moment=moment: engine._run_round(stage, moment, state)))  # type: ignore[misc]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        torch.set_num_threads(threads)
    shares = [100 * (1 - b[1] / o[1]) for b, o in zip(bare, ours, strict=True)]
    whole = statistics.median(o[0] for o in ours)
    return {
        "idle_percent": 100 * statistics.median(i[0] for i in idle) / whole,
        "difference_percent": statistics.median(shares),
        "difference_lowest": min(shares),
        "difference_highest": max(shares),
        "seconds_a_round": whole,
    }
