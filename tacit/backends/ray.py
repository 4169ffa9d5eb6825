"""Clients on the workers of a Ray cluster: this machine's cores, or many machines. The numbers stay the same.

Payloads travel as in `core.payload`. Ray itself moves its calls with pickle between machines that trust each other:
this backend is for simulations on your own cluster, never for sites of other people (those use Flower).
"""

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tacit.backends.base import Inbox, Outcome, Worker, one_thread, waves
from tacit.contract.method import Stage, Task
from tacit.contract.parties import RoundInfo
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.payload import Weights
from tacit.core.settings import Experiment
from tacit.data.dataset import Dataset
from tacit.data.federation import Federation, make_setup
from tacit.data.split import Split
from tacit.evaluation.scores import PREDICT_BATCH
from tacit.runs.memory import ClientMemory, MemoryIndex


def connect(address: str) -> Any:
    if not address and "ray" not in sys.modules:  # it reads this once
        _own_token()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise TacitError("backend.name = 'ray' needs Ray: pip install 'tacit[ray]'") from None
    return ray


def _own_token() -> None:
    """Ray started here listens on all addresses of this machine and runs what it is told: only with this token.

    Ray before 2.52 knows no tokens.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token":
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


class RayWorker:
    """Lives in a Ray actor. It has the data, but no disk: what a client keeps comes with its task and goes back."""

    def __init__(self, settings: dict[str, object], dataset: Dataset, split: Split) -> None:
        from tacit.runs.plan import stages_of

        one_thread()
        experiment = Experiment.model_validate(settings)
        setup = make_setup(experiment, dataset, split)
        nowhere = ClientMemory(Path(os.devnull))  # never read or written: the driver has the clients' disks
        self.worker = Worker(setup, Federation(dataset, split, setup.device), nowhere)
        self.stages = {stage.name: stage for stage in stages_of(experiment)}

    def run(
        self, round_info: RoundInfo, client: int, group: int, send: bytes, memory: bytes
    ) -> tuple[bytes, bytes, Outcome]:
        task = Task(client, payload.from_bytes(send), group)
        outcome, keep = self.worker.train(self.stages[round_info.stage], round_info, task, payload.from_bytes(memory))
        bare = replace(outcome, reply=replace(outcome.reply, send={}))
        return payload.to_bytes(outcome.reply.send), payload.to_bytes(keep), bare

    def predict(self, send: bytes, start: int, end: int) -> bytes:
        weights = payload.weights_in(payload.from_bytes(send), "model")
        return payload.to_bytes({"probs": self.worker.predict_test(weights, slice(start, end))})

    def validate(self, send: bytes, clients: Sequence[int]) -> bytes:
        weights = payload.weights_in(payload.from_bytes(send), "model")
        return payload.to_bytes({"tally": self.worker.validate(weights, clients)})

    def compare(self, sends: Sequence[bytes], clients: Sequence[int]) -> bytes:
        models = [payload.weights_in(payload.from_bytes(send), "model") for send in sends]
        return payload.to_bytes({"patterns": self.worker.compare(models, clients)})


class RayBackend:
    """Starts a Ray cluster here, or joins the one at `backend.address`, and keeps its workers for the whole run."""

    def __init__(self, experiment: Experiment, federation: Federation, memory: Path) -> None:
        self.ray = ray = connect(experiment.backend.address)
        self.federation = federation
        self.memory = ClientMemory(memory, experiment.keep)
        self.memory_index = MemoryIndex(self.memory)
        self.inbox = Inbox(memory.with_name("replies"))
        settings = experiment.backend
        self.started_here = not ray.is_initialized()
        if self.started_here:
            self._start(settings.address, settings.workers)
        gpus = settings.gpus
        self._check_room(gpus)
        room = ray.cluster_resources()
        fitting = int(room.get("GPU", 0.0) / gpus) if gpus else int(room.get("CPU", 1.0))
        count = min(settings.workers or fitting, fitting) or 1
        actor = ray.remote(num_cpus=1, num_gpus=gpus)(RayWorker)
        dataset, split = ray.put(federation.dataset), ray.put(federation.split)  # one copy a machine, mapped
        self.workers = [actor.remote(experiment.to_dict(), dataset, split) for _ in range(count)]

    def _start(self, address: str, workers: int) -> None:
        """Ray in this process; warnings and logs of its own stay out of the way."""
        quiet = {"log_to_driver": False, "configure_logging": False}
        try:
            if address:
                self.ray.init(address=address, **quiet)
            else:
                self.ray.init(num_cpus=workers or None, include_dashboard=False, **quiet)
        except (ConnectionError, RuntimeError) as error:
            where = f"There is no Ray cluster at '{address}'" if address else "Ray could not start here"
            raise TacitError(f"{where} ({error}). Start one with `ray start --head`, or use the pool.") from error

    def _check_room(self, gpus: float) -> None:
        there = self.ray.cluster_resources().get("GPU", 0.0)
        if gpus > there:
            self.close()
            raise TacitError(f"backend.gpus is {gpus:g} a worker, but the cluster has {there:g} GPUs in all.")

    def run(
        self, stage: Stage, round_info: RoundInfo, tasks: Sequence[Task], done: Callable[[int], None]
    ) -> list[Outcome]:
        self.memory_index.forget(round_info.step)
        self.inbox.open(len(tasks))
        for number, wave in enumerate(waves(tasks)):
            waiting = list(wave)
            idle = list(self.workers)
            busy: dict[Any, tuple[int, Task, Any]] = {}
            while waiting or busy:
                while waiting and idle:
                    place, task = waiting.pop(0)
                    worker = idle.pop()
                    memory = payload.to_bytes(self.memory.read(task.client, round_info.step, number))
                    send = payload.to_bytes(task.send)
                    busy[worker.run.remote(round_info, task.client, task.group, send, memory)] = (place, task, worker)
                (ready,), _ = self.ray.wait(list(busy), num_returns=1)
                place, task, worker = busy.pop(ready)
                idle.append(worker)
                up, keep, bare = self._result(ready)
                self.memory.write(task.client, round_info.step, number, payload.from_bytes(keep))
                self.inbox.put(place, replace(bare, reply=replace(bare.reply, send=payload.from_bytes(up))))
                done(len(self.inbox))
        self.memory_index.look(task.client for task in tasks)
        return self.inbox.in_order()

    def predict_test(self, weights: Weights) -> Tensor:
        count = len(self.federation.split.test)
        send = self.ray.put(payload.to_bytes({"model": weights}))
        step = max(PREDICT_BATCH, -(-count // (len(self.workers) * PREDICT_BATCH)) * PREDICT_BATCH)
        parts = [
            worker.predict.remote(send, start, start + step)
            for worker, start in zip(self.workers, range(0, count, step), strict=False)
        ]
        return torch.cat([payload.tensor_in(payload.from_bytes(self._result(part)), "probs") for part in parts])

    def validate(self, weights: Weights) -> Tensor:
        send, judges = payload.to_bytes({"model": weights}), self.federation.judges()
        return payload.tensor_in(
            payload.from_bytes(self._result(self.workers[0].validate.remote(send, judges))), "tally"
        )

    def compare(self, models: Sequence[Weights]) -> Tensor:
        sends, judges = [payload.to_bytes({"model": weights}) for weights in models], self.federation.judges()
        found = payload.from_bytes(self._result(self.workers[0].compare.remote(sends, judges)))
        return payload.tensor_in(found, "patterns")

    def _result(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            raise TacitError(
                f"A Ray worker died ({error}). What was finished is saved: go on with --resume, with fewer workers if "
                "memory is short (backend.workers=1)."
            ) from None
        except self.ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def memory_bytes(self) -> int:
        return self.memory_index.nbytes()

    def close(self) -> None:
        for worker in getattr(self, "workers", []):
            self.ray.kill(worker)
        if self.started_here:
            self.ray.shutdown()
        self.inbox.clear()
