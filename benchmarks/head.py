"""A round that trains all of EfficientNet-Lite0 at 96 pixels over one that trains its head, from a bank of features.

The same method, images, batches and epochs on both sides, and thresholds of 0, so that every label is believed and both
take equally many steps. On one side all of the net learns from new views (`net.train = "all"`); on the other only the
head does, from four weak and four strong views of each image that the frozen part saw once (`net.train = "head"`,
`net.views = 4`). What that first pass takes is a row of its own: a run pays it once, and none that follows on the same
images does. Random weights: what is in them does not change the time. Evaluation is left out on both sides. CPU time.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.running import UNEVALUATED, open_rounds
from benchmarks.timing import Row, Work, interleaved, ratio, single_thread, timed
from tacit.config.resolve import resolve
from tacit.core.paths import data_root
from tacit.runs.plan import prepare

TITLE = "Training the head from a bank of features"

SHARED: dict[str, Any] = {
    "data.name": "cifar10",
    "data.image_size": 96,
    "data.partition": "iid",
    "data.clients": 4,
    "data.labeled_clients": 1,
    "data.subset": 512,
    "data.labels": 128,
    "net.name": "lite0",
    "net.norm": "bn",
    "net.bn": "average",
    "train.batch": 32,
    "train.epochs": 1,
    "device": "cpu",
    "backend.name": "local",
    **UNEVALUATED,
}
METHODS: dict[str, dict[str, Any]] = {
    "labels alone": {"method.name": "fedavg", "data.placement": "clients"},
    "FixMatch": {"method.name": "fixmatch", "method.threshold": 0.0, "data.placement": "server"},
    "CBAFed": {
        "method.name": "cbafed",
        "method.warmup": 0,
        "method.base": 0.0,
        "method.ceiling": 0.0,
        "method.labeled_epochs": 1,
        "data.placement": "some-clients",
    },
    "SemiFL": {"method.name": "semifl", "method.threshold": 0.0, "data.placement": "server"},
    "FedDB": {"method.name": "feddb", "method.threshold": 0.0, "data.placement": "server"},
}


@contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Banks go to a folder that is empty; data sets stay where they are."""
    before, old = os.environ.get("TACIT_DATA"), data_root()
    folder.mkdir(parents=True)
    for there in old.iterdir() if old.is_dir() else ():
        if there.name != "features":
            (folder / there.name).symlink_to(there)
    os.environ["TACIT_DATA"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("TACIT_DATA")
        if before is not None:
            os.environ["TACIT_DATA"] = before


def measure(
    methods: Mapping[str, Mapping[str, Any]] = METHODS, changes: Mapping[str, Any] | None = None, times: int = 3
) -> list[Row]:
    with single_thread():
        return [row for name, one in methods.items() for row in measure_method(name, {**one, **(changes or {})}, times)]


def measure_method(name: str, settings: Mapping[str, Any], times: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as place, own_cache(Path(place) / "data"):
        plans = {
            "all": prepare(resolve(SHARED, settings)),
            "head": prepare(resolve(SHARED, settings, {"net.train": "head", "net.views": 4})),
        }
        with (
            open_rounds(plans["all"], Path(place) / "all") as whole,
            open_rounds(plans["head"], Path(place) / "head") as head,
        ):
            whole.next()
            first = timed(head.next)  # with the frozen part's one pass
            works: dict[str, Work] = {"all": whole.next, "head": head.next}
            spent = interleaved(works, times, warm_up=False)
    return [
        ratio(
            f"{name}: round of all of lite0 / of its head",
            spent["all"],
            spent["head"],
            at_least=50,
            note=f"{1000 * min(one.cpu for one in spent['head']):.0f} ms a round of the head",
        ),
        ratio(f"{name}: first round of the head, with the bank / round of all of lite0", [first], [spent["all"][0]]),
    ]
