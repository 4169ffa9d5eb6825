"""What the engine adds to a round: the same training with and without it, interleaved, on ResNet-18 and Fashion-MNIST.

The bare round is a loop over the same clients with the same images, views and steps, and the same evaluation; it
copies no weights out, folds nothing, checks nothing, writes nothing. The engine's round is a real one, with its
checkpoint on disk.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tacit.backends import LocalBackend
from tacit.backends.base import one_thread
from tacit.data.federation import Federation
from tacit.engine import Engine, Plan, Silence, prepare
from tacit.experiment import resolve
from tacit.kept import Kept
from tacit.pieces.train import fit, predict
from tacit.record import OpenRun
from tacit.sides import Moment

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


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(rounds: int = 3) -> dict[str, float]:
    """The engine's share of a round, in per cent, by wall clock and by CPU time; medians over interleaved rounds."""
    threads = one_thread()
    plan = prepare(resolve(SETTINGS))
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    net = plan.setup.build(torch.Generator().manual_seed(0))
    folder = Path(tempfile.mkdtemp(prefix="tacit-bench-"))
    opened = OpenRun(folder / "run", plan.experiment, resume=False)
    try:
        opened.rewind()
        engine = Engine(plan, opened, LocalBackend(plan.setup, federation, Kept(folder / "kept")), Silence())
        stage = plan.stages[-1]
        state = stage.method.server_start(engine._hub(Moment(stage.name, -1, rounds, 0)), {})
        bare, ours = [], []
        for number in range(rounds):
            moment = Moment(stage.name, number, rounds, number)
            bare.append(timed(lambda: bare_round(plan, federation, net)))
            ours.append(timed(lambda moment=moment: engine._run_round(stage, moment, state)))  # type: ignore[misc]
    finally:
        opened.close()
        shutil.rmtree(folder, ignore_errors=True)
        torch.set_num_threads(threads)
    shares = [
        [100 * (1 - b / o) for b, o in zip(pair_b, pair_o, strict=True)]
        for pair_b, pair_o in zip(bare, ours, strict=True)
    ]
    return {
        "wall_percent": statistics.median(share[0] for share in shares),
        "cpu_percent": statistics.median(share[1] for share in shares),
        "cpu_lowest": min(share[1] for share in shares),
        "cpu_highest": max(share[1] for share in shares),
        "seconds_a_round": statistics.median(o[0] for o in ours),
    }
