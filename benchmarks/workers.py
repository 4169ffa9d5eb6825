"""From one worker to two: the same rounds, in wall time, and whether they end with the same bits.

CBAFed with ResNet-18 and two labelled clients of ten, so that the work can be shared evenly between two: 11 + 11 epochs
of labelled clients and eight times one. `backend.workers = 1` means no pool at all, everything in one process; that is
what two workers are compared with, so what the pool itself costs counts against it. Needs two free cores.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.round import SHARED
from benchmarks.running import Rounds, open_rounds
from benchmarks.timing import Row, interleaved, ratio, single_thread
from tacit import payload
from tacit.engine import prepare
from tacit.experiment import resolve

TITLE = "Two workers"

SETTINGS = {
    "data.name": "fashion-mnist",
    "data.clients": 10,
    "data.subset": 1280,
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
    return [
        ratio("one worker / two workers", spent["one"], spent["two"], clock="wall", at_least=1.7, note="wall time"),
        Row("the same bits", float(equal), "yes", at_least=1.0, note=f"the server's state after {times + 1} rounds"),
    ]


def same(one: Rounds, two: Rounds) -> bool:
    """Whether both runs have come to the same state, bit for bit."""
    first, second = dict(payload.tensors(one.state)), dict(payload.tensors(two.state))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
