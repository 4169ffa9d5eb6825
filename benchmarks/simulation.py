"""The same experiment on tacit's own pool, on Ray, and on Flower's simulation engine: wall time, and the same result.

*Ray* is tacit's backend of that name. *Flower* is `flwr.simulation.run_simulation`: the server app runs tacit's engine
as at real sites, the client apps, which Flower starts on Ray, answer as sites do, each with its own folder of images.
So the method, the data, the numbers and the work are the same; what differs is who carries them. Each run is a
process of its own, with two workers. A round's seconds are the records' own; the whole run has the start of the
processes in it.
"""

import hashlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import Row, Spent, interleaved, ratio
from tacit.config.resolve import resolve
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run
from tacit.runs.plan import prepare
from tacit.runs.watchers import NullWatcher
from tacit.sites.envelope import from_record, to_record
from tacit.sites.rehearse import write_parties
from tacit.sites.site import Settings, Site

TITLE = "Pool, Ray, Flower's simulation"

SETTINGS = {
    "method": "fedavg",
    "rounds": 8,
    "data.name": "fashion-mnist",
    "data.subset": 1000,
    "data.test_subset": 1000,
    "data.clients": 10,
    "data.labels": 0,
    "data.placement": "clients",
    "data.partition": "iid",
    "net.name": "cnn",
    "train.batch": 10,
    "device": "cpu",
    "backend.workers": 2,
}
PARTIES = "TACIT_BENCH_PARTIES"  # where a client app finds the sites' folders
_sites: dict[str, Site] = {}  # in each of Flower's processes


def run_flower(experiment: Experiment, out: Path) -> None:
    """The experiment over sites that Flower simulates; the images must lie in folders (`PARTIES`)."""
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    from tacit.sites import backend
    from tacit.sites.jobs import Job
    from tacit.sites.server import run_at_sites

    backend.POLL = 0.01  # real sites are looked after every 0.3 s, which here would count against Flower
    parties = Path(os.environ[PARTIES])
    names = tuple(f"site-{k}" for k in range(experiment.data.clients))
    changes = {"data.name": str(parties / "server"), "backend.name": "flower"}
    job = Job(resolve(experiment.to_dict(), changes).to_dict(), str(out), names)
    server, client = ServerApp(), ClientApp()
    client.query()(respond)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        run_at_sites(job, backend.Grid(grid, insecure=True), NullWatcher())

    one_each: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    workers: dict[str, Any] = {"init_args": {"num_cpus": experiment.backend.workers, "include_dashboard": False}}
    run_simulation(server, client, num_supernodes=len(names), backend_config={**one_each, **workers})


def respond(message: Any, context: Any) -> Any:
    """A client app: the site of this number answers."""
    from flwr.app import Message

    name, parties = f"site-{context.node_config['partition-id']}", Path(os.environ[PARTIES])
    if name not in _sites:
        _sites[name] = Site(Settings(name, parties / name, parties / f"memory-{name}"))
    return Message(to_record(_sites[name].respond(from_record(message.content))), reply_to=message)


def missing(backend: str) -> str:
    """Why a backend cannot run here; '' if it can."""
    needed = {"ray": ("ray",), "flower": ("flwr", "ray")}.get(backend, ())
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"left out: {' and '.join(absent)} is not installed" if absent else ""


def alone(backend: str, settings: Mapping[str, Any], folder: Path, times: list[int]) -> None:
    """A whole run in a new process."""
    times.append(len(times))
    words = [sys.executable, "-m", "benchmarks.simulation", backend, json.dumps(settings)]
    out = folder / f"{backend}-{times[-1]}"
    there = {**os.environ, PARTIES: str(folder / "parties"), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([*words, str(out)], capture_output=True, text=True, env=there)
    if done.returncode:
        raise RuntimeError(f"The run on {backend} failed:\n{done.stdout}\n{done.stderr}")


def measure(
    others: Sequence[str] = ("ray", "flower"), changes: Mapping[str, Any] | None = None, times: int = 2
) -> list[Row]:
    settings = {**SETTINGS, **(changes or {})}
    rows = [Row(backend, 0, "", note=why) for backend in others if (why := missing(backend))]
    backends = ["pool", *(backend for backend in others if not missing(backend))]
    with tempfile.TemporaryDirectory(prefix="tacit-bench-") as name:
        folder = Path(name)
        if "flower" in backends:
            write_parties(prepare(resolve(settings)), folder / "parties")
        done: dict[str, list[int]] = {backend: [] for backend in backends}
        works = {one: lambda one=one: alone(one, settings, folder, done[one]) for one in backends}
        whole = interleaved(works, times, warm_up=False)
        runs = {one: [Run(folder / f"{one}-{number}") for number in done[one]] for one in backends}
        models = {one: {digest(run) for run in runs[one]} for one in backends}
        rounds = {one: [Spent(statistics.median(seconds_of(run)), 0) for run in runs[one]] for one in backends}
        accuracy = {one: runs[one][0].summary["accuracy"] for one in backends}  # type: ignore[index]
    for one in backends[1:]:
        took = f"{rounds[one][0].wall:.2f} and {rounds['pool'][0].wall:.2f} s"
        rows.append(ratio(f"{one} / pool: a round", rounds[one], rounds["pool"], clock="wall", note=took))
        took = f"{whole[one][0].wall:.0f} and {whole['pool'][0].wall:.0f} s"
        rows.append(ratio(f"{one} / pool: the whole run", whole[one], whole["pool"], clock="wall", note=took))
        equal, scores = models[one] == models["pool"], f"accuracy {accuracy[one]:.4f} and {accuracy['pool']:.4f}"
        rows.append(Row(f"{one} and pool: the same model", float(equal), "yes", at_least=1.0, note=scores))
    return rows


def digest(run: Run) -> str:
    return hashlib.sha256((run.folder / "model.safetensors").read_bytes()).hexdigest()


def seconds_of(run: Run) -> list[float]:
    """Of all rounds but the first, in which processes start and files are read; of one round if there is no other."""
    seconds = [record["seconds"] for record in run.records]
    return seconds[1:] or seconds


def main(backend: str, settings: Mapping[str, Any], out: Path) -> None:
    if backend == "flower":
        run_flower(resolve(settings), out)
    else:
        run_experiment(resolve(settings, {"backend.name": backend}), out)


if __name__ == "__main__":
    from benchmarks import simulation  # Flower's processes know this file by its name, not as the main one

    simulation.main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
