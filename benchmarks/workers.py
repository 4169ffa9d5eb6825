"""From one worker to two: the same rounds, in wall time, and whether they end with the same bits.

CBAFed with ResNet-18 and two labelled clients of ten, so that the work can be shared evenly between two: 11 + 11 epochs
of labelled clients and eight times one, 256 images each. `backend.workers = 1` means no pool at all, everything in one
process; that is what two workers are compared with, so what the pool itself costs counts against it. Two cores share
their memory and their caches: how much two processes that have nothing to do with each other get done is measured
beside it (alone, then together, two rounds each); not much more can be hoped for. Needs two free cores.
"""

import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.round import SHARED
from benchmarks.running import Rounds, open_rounds
from benchmarks.timing import Row, interleaved, ratio, single_thread, timed
from tacit.config.resolve import resolve
from tacit.core import payload
from tacit.runs.plan import prepare

TITLE = "Two workers"

SETTINGS = {
    "data.name": "fashion-mnist",
    "data.clients": 10,
    "data.subset": 2560,
    "data.labeled_clients": 2,
    "net.name": "resnet18",
    "train.batch": 64,
    "backend.name": "pool",
}


def measure(changes: Mapping[str, Any] | None = None, times: int = 5) -> list[Row]:
    layers = (SHARED, SETTINGS, changes or {})
    plans = [prepare(resolve(*layers, {"backend.workers": workers})) for workers in (1, 2)]
    with (
        single_thread(),
        tempfile.TemporaryDirectory(prefix="tacit-bench-") as folder,
        open_rounds(plans[0], Path(folder, "one")) as one,
        open_rounds(plans[1], Path(folder, "two")) as two,
    ):
        spent = interleaved({"one": one.next, "two": two.next}, times)  # the warm-up starts the processes
        equal = same(one, two)
    most = two_strangers(plans[0].experiment.to_dict(), rounds=max(times // 2, 1))
    return [
        ratio("one worker / two workers", spent["one"], spent["two"], clock="wall", at_least=1.7, note="wall time"),
        Row("two strangers: work done / by one alone", most, note="two processes with a run each"),
        Row("the same bits", float(equal), "yes", at_least=1.0, note=f"the server's state after {times + 1} rounds"),
    ]


def two_strangers(settings: Mapping[str, Any], rounds: int) -> float:
    """How much more two processes do, that know nothing of each other, than one alone."""
    alone, together = (in_processes(settings, rounds, number) for number in (1, 2))
    return 2 * statistics.median(alone) / statistics.median(together)


def in_processes(settings: Mapping[str, Any], rounds: int, number: int) -> list[float]:
    """Seconds of rounds in so many processes at once, each with the whole experiment for itself."""
    context = multiprocessing.get_context("spawn")
    start, seconds = context.Barrier(number, timeout=600), context.Queue()
    own = (settings, rounds, start, seconds)
    processes = [context.Process(target=stranger, args=own, daemon=True) for _ in range(number)]
    for process in processes:
        process.start()
    return [seconds.get(timeout=600) for _ in range(number * rounds)]


def stranger(settings: Mapping[str, Any], rounds: int, start: Any, seconds: Any) -> None:
    """In a process of its own: rounds that begin when those of all others do."""
    with (
        single_thread(),
        tempfile.TemporaryDirectory(prefix="tacit-bench-") as folder,
        open_rounds(prepare(resolve(settings)), Path(folder, "run")) as run,
    ):
        run.next()
        for _ in range(rounds):
            start.wait()
            seconds.put(timed(run.next).wall)


def same(one: Rounds, two: Rounds) -> bool:
    """Whether both runs have come to the same state, bit for bit."""
    first, second = dict(payload.tensors(one.state)), dict(payload.tensors(two.state))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
