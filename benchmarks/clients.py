"""Many clients: 10 to 10,000 of them with ten active in a round, and 1,000 active ones with ResNet-18.

Each measurement is a process of its own, because the most memory that a process ever had cannot be taken back. A
client holds six images and learns them for an epoch, whatever the number of clients: a round is the same work. The
data set is the same file, mapped, in all of them; memory without mapped files is told, too. Start-up is everything
from reading the experiment to the state before the first round; importing torch is not counted.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.running import UNEVALUATED, open_rounds
from benchmarks.timing import Row, single_thread, spread, timed
from tacit.config.resolve import resolve
from tacit.core import payload
from tacit.runs.plan import prepare

TITLE = "Many clients"

SHARED = {
    "method": "fedavg",
    "data.name": "fashion-mnist",
    "data.placement": "some-clients",  # and all of them are labelled
    "data.partition": "iid",
    "data.min_size": 1,
    "train.batch": 10,
    "device": "cpu",
    "backend.name": "local",
    **UNEVALUATED,
}
MB = 1e6
RUNS = Path("runs")
RESNET_BYTES = 45 * MB


def many(clients: int, images: int, active: int, **changes: Any) -> dict[str, Any]:
    """The settings of so many clients with so many images each."""
    return {
        "data.clients": clients,
        "data.labeled_clients": clients,
        "data.subset": clients * images,
        "participation.number": active,
        **changes,
    }


def memory(name: str) -> int:
    """Bytes of this process: VmHWM, the most it ever had; VmRSS, now; RssFile, of these in mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> None:
    """From now on VmHWM is the most that this process had since now."""
    Path("/proc/self/clear_refs").write_text("5")


def child(settings: Mapping[str, Any], rounds: int, folder: Path) -> dict[str, Any]:
    """In a process of its own: start-up, some rounds, and what they took."""
    started = time.perf_counter()
    plan = prepare(resolve(SHARED, settings))
    with single_thread(), open_rounds(plan, folder) as run:
        start_up, before, start_peak = time.perf_counter() - started, memory("VmRSS"), memory("VmHWM")
        forget_peak()
        spent = [timed(run.next) for _ in range(rounds)]
        peak = memory("VmHWM")
        return {
            "start_up": start_up,
            "seconds": [one.wall for one in spent],
            "cpu": [one.cpu for one in spent],
            "answered": len(run.record["answered"]),
            "above_start": peak - before,
            "peak": max(peak, start_peak),
            "files": memory("RssFile"),
            "images": plan.dataset.train_images.nbytes + plan.dataset.test_images.nbytes,
            "model": payload.nbytes({"model": payload.weights_in(run.state, "model")}),
        }


def alone(settings: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """`child` in a new process. Its folder is under runs/: /tmp may lie in memory, and replies may go to disk."""
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=RUNS) as folder:
        words = [sys.executable, "-m", "benchmarks.clients", json.dumps(settings), str(rounds), f"{folder}/run"]
        done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[1:])} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(
    numbers: Sequence[int] = (10, 100, 1000, 10_000),
    active: int = 1000,
    changes: Mapping[str, Any] | None = None,
    rounds: int = 40,
) -> list[Row]:
    if not Path("/proc/self/clear_refs").exists():
        return [Row("many clients", 0, "", note="left out: peaks of memory are read from /proc, which is not here")]
    rows, results = [], []
    for clients in numbers:
        found = alone({**many(clients, 6, 10), "net.name": "cnn", **(changes or {})}, rounds)
        results.append(found)
        name, asked = f"{clients:,} clients", f"{found['answered']} active"
        rows.append(Row(f"{name}: start-up", found["start_up"], "s", note=asked))
        rows.append(spread(f"{name}: a round", found["seconds"][1:], "s", note=asked))
        mapped, images = found["files"] / MB, found["images"] / MB
        files = f"{mapped:.0f} MB of it mapped files (libraries, images); all images are {images:.0f} MB"
        rows.append(Row(f"{name}: peak memory", found["peak"] / MB, "MB", note=files))
    some = min(1, len(numbers) - 1)
    first, last = results[some], results[-1]
    growth = f"{numbers[-1]:,} clients / {numbers[some]:,}"
    times = median(last["cpu"][1:]) / median(first["cpu"][1:])
    rows.append(Row(f"{growth}: start-up", last["start_up"] / first["start_up"]))
    rows.append(Row(f"{growth}: a round", times, at_most=1.1, note="CPU time"))
    rows.append(Row(f"{growth}: peak memory", last["peak"] / first["peak"], at_most=1.1))
    return [*rows, *measure_active(active, changes or {})]


def measure_active(active: int, changes: Mapping[str, Any]) -> list[Row]:
    """A round in which very many ResNet-18s come back, two images each; fewer where the disk could not hold them."""
    RUNS.mkdir(exist_ok=True)
    room = int(0.8 * shutil.disk_usage(RUNS).free / RESNET_BYTES)
    asked = min(active, room)
    fewer = f"; {active:,} do not fit on this disk" if asked < active else ""
    found = alone({**many(asked, 2, asked), "net.name": "resnet18", "net.norm": "bn", **changes}, rounds=1)
    name = f"{found['answered']:,} active clients, ResNet-18"
    above = f"{found['above_start'] / MB:,.0f} MB; one model is {found['model'] / MB:.1f} MB{fewer}"
    return [
        Row(f"{name}: peak memory above start-up", found["above_start"] / found["model"], "models", note=above),
        Row(f"{name}: the round", found["seconds"][0], "s", note=f"two images a client{fewer}"),
    ]


if __name__ == "__main__":
    print(json.dumps(child(json.loads(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))))
