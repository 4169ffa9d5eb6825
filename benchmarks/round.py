"""A CBAFed round over the bare forward and backward passes, and against a plain implementation (reference.py).

The same work everywhere. One labelled client trains its 11 epochs; three others label their images and learn them for
an epoch. Few clients with hundreds of images each, because what a client costs whatever it holds (its weights in and
out) should weigh no more than in real use, where it holds thousands. So that the number of images does not depend on
how sure a model is, thresholds are 0: every label is believed. How many images each side trained on is counted and
compared, not assumed.

*Bare*: forward, loss and backward of the plain net (ordinary convolutions, usual memory layout) on ready-made float
tensors, in the same batches, and the forward passes for labelling in batches of 256. No views, no optimiser, no mean.
*Own net*: the same passes with tacit's net (live taps, channels last), so that what the net gains and what the rest
costs can be told apart.

What can be won over a plain implementation depends on what it wastes: where it takes 1.2 times its own bare passes, a
round that is twice as fast must have faster passes. ResNet-18 with the ImageNet stem has them, because most of what is
computed there is padding. The small CNN has not: with real images, on the processor below, channels last gains it next
to nothing, and views, optimiser and checkpoint cost it a tenth.

Evaluation on test images is left out on all sides. tacit's round contains its checks, its record and its checkpoint on
disk. All in CPU time, on one thread.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.bare import Bare, epochs_of
from benchmarks.reference import Reference, plain_net
from benchmarks.running import UNEVALUATED, Rounds, open_rounds
from benchmarks.timing import Row, Work, interleaved, ratio, single_thread
from benchmarks.views import PIL_WEAK
from tacit.config.resolve import resolve
from tacit.data.federation import Federation
from tacit.runs.plan import prepare

TITLE = "A round of CBAFed"

SHARED = {
    "method": "cbafed",
    "method.warmup": 0,
    "method.base": 0.0,
    "method.ceiling": 0.0,  # every confidence is above it
    "data.placement": "some-clients",
    "data.partition": "iid",
    "data.clients": 4,
    "data.labeled_clients": 1,
    "device": "cpu",
    "backend.name": "local",
    **UNEVALUATED,
}


@dataclass(frozen=True)
class Case:
    """A net and a slice of data, and what is to be reached on them (None: no such goal)."""

    name: str
    settings: Mapping[str, Any]
    bare: float | None = None  # the round over the bare passes, at most
    reference: float | None = None  # the plain implementation over the round, at least


RESNET = {"data.name": "fashion-mnist", "data.subset": 1536, "net.name": "resnet18", "train.batch": 64}
CASES = (
    Case(
        "ResNet-18, 28×28, B64",
        RESNET,
        bare=0.55,
        reference=2.5,
    ),
    Case(
        "ResNet-18, 28×28, B64, 10 clients with 192 images",
        {**RESNET, "data.subset": 1920, "data.clients": 10},
        bare=0.55,
    ),
    Case(
        "small CNN, 28×28, B10",
        {"data.name": "fashion-mnist", "data.subset": 640, "net.name": "cnn", "train.batch": 10},
        bare=1.0,
        reference=1.9,
    ),
    Case(
        "WRN-28-2, 32×32, B10",
        {"data.name": "cifar10", "data.subset": 160, "net.name": "wrn-28-2", "train.batch": 10},
        bare=1.05,
    ),
)


def trained_on(rounds: Rounds) -> int:
    """How many images tacit's last round took a step on, epochs counted, by its record."""
    plan = rounds.engine.plan
    epochs = epochs_of(plan)
    learned: dict[str, float] = rounds.record["client_metrics"]["trained_on"]
    return sum(int(n) * epochs[int(client) not in plan.setup.labeled_clients] for client, n in learned.items())


def measure(cases: Sequence[Case] = CASES, times: int = 3) -> list[Row]:
    with single_thread():
        return [row for case in cases for row in measure_case(case, times)]


def measure_case(case: Case, times: int) -> list[Row]:
    plan = prepare(resolve(SHARED, case.settings))
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    shards = [federation.client_shard(client) for client in range(plan.setup.clients)]
    bare = Bare(plain_net(plan), plan, shards)
    own = Bare(plan.setup.build(torch.Generator().manual_seed(0)), plan, shards)
    view = PIL_WEAK[plan.setup.views.weak]
    reference = Reference(plan, view, shards, plain_net(plan)) if case.reference is not None else None
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as folder, open_rounds(plan, Path(folder)) as rounds:
        works: dict[str, Work] = {"bare": bare.round, "ours": rounds.next, "own": own.round}
        if reference is not None:
            works["reference"] = reference.round
        spent = interleaved(works, times, warm_up=False)  # each takes seconds
        counts = {"bare": bare.trained_on, "own": own.trained_on, "ours": trained_on(rounds)}
        if reference is not None:
            counts["reference"] = reference.trained_on
    if len(set(counts.values())) > 1:
        raise RuntimeError(f"{case.name}: the sides did not train on the same number of images: {counts}")
    images = f"{counts['ours']:,} images a round"
    rows = [
        ratio(f"{case.name}: round / bare passes", spent["ours"], spent["bare"], at_most=case.bare, note=images),
        ratio(f"{case.name}: round / bare passes of tacit's own net", spent["ours"], spent["own"], note=images),
    ]
    if reference is not None:
        what, theirs = f"{case.name}: plain implementation", spent["reference"]
        rows.append(ratio(f"{what} / round", theirs, spent["ours"], at_least=case.reference, note=images))
        rows.append(ratio(f"{what} / bare passes", theirs, spent["bare"], note=images))
    return rows
