"""Clients on several processes of this machine, one thread each. Their number changes nothing but the time."""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from tacit import payload
from tacit.backends.base import Inbox, Outcome, Worker, one_thread, waves
from tacit.data.federation import Federation, make_setup
from tacit.data.shared import SharedDataset, share
from tacit.data.split import load_split
from tacit.errors import TacitError
from tacit.evaluate import PREDICT_BATCH
from tacit.experiment import Experiment
from tacit.kept import Census, Kept
from tacit.method import Reply, Stage, Task
from tacit.payload import Parcel, Weights, Written, at_hand, pack
from tacit.sides import Moment

T = TypeVar("T")

_worker: Worker
_stages: dict[str, Stage]


def _context() -> BaseContext:
    """Workers are forked from a small server that has imported torch once and started nothing else.

    torch._dynamo is among it: the first optimiser imports it, which takes each worker a second otherwise.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tacit.backends.pool", "tacit.engine", "torch._dynamo"])
    return context


def _start(settings: dict[str, object], shared: SharedDataset, split: Path, kept: Path) -> None:
    """In a new process: map the engine's images and load the saved split."""
    global _worker, _stages
    from tacit.engine import stages_of

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine; it ends its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    one_thread()
    experiment = Experiment.model_validate(settings)
    dataset, saved = shared.open(), load_split(split)
    setup = make_setup(experiment, dataset, saved)
    if setup.device.type == "cuda" and setup.device.index is None:
        spread = multiprocessing.current_process()._identity[0] % torch.cuda.device_count()
        setup = replace(setup, device=torch.device("cuda", spread))
    _worker = Worker(setup, Federation(dataset, saved, setup.device), Kept(kept, experiment.keep))
    _stages = {stage.name: stage for stage in stages_of(experiment)}


def _end_with_parent() -> None:
    """A worker whose engine was killed must not live on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(moment: Moment, wave: int, client: int, group: int, send: Parcel, answer: Path) -> tuple[Parcel, Outcome]:
    task = Task(client, at_hand(send.open()), group)
    outcome = _worker.run(_stages[moment.stage], moment, wave, task)
    bare = replace(outcome, reply=replace(outcome.reply, send={}))
    return pack(outcome.reply.send, answer), bare


def _predict(send: Parcel, start: int, end: int) -> Tensor:
    return _worker.predict_test(payload.weights_in(send.open(), "model"), slice(start, end))


@contextmanager
def _no_main() -> Iterator[None]:
    """Workers start without the user's script, which would run again in each of them; they need nothing of it."""
    main = sys.modules["__main__"]
    hidden: dict[str, object] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__dict__["__spec__"] = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


class PoolBackend:
    """Starts its processes once and keeps them for the whole run."""

    def __init__(self, experiment: Experiment, federation: Federation, split: Path, kept: Path, workers: int) -> None:
        self.federation = federation
        self.census = Census(Kept(kept, experiment.keep))
        self.inbox = Inbox(kept.with_name("replies"))
        self.images = split.parent / "images"  # only while the pool lives, and only if they lie in no file yet
        self.workers = workers
        self.seconds: dict[int, float] = {}  # how long each client took last time: the longest start first
        self.executor = ProcessPoolExecutor(
            workers,
            mp_context=_context(),
            initializer=_start,
            initargs=(experiment.to_dict(), share(federation.dataset, self.images), split, kept),
        )

    def run(self, stage: Stage, moment: Moment, tasks: Sequence[Task], done: Callable[[int], None]) -> list[Outcome]:
        self.census.forget(moment.step)
        self.inbox.open(len(tasks))
        written: Written = {}  # what many clients are sent alike is written once
        for number, wave in enumerate(waves(tasks)):
            futures: dict[Future[tuple[Parcel, Outcome]], int] = {}
            for place, task in sorted(wave, key=lambda pair: -self._expected(pair[1].client)):
                send, answer = pack(task.send, self.inbox.path(f"task-{place}"), written), self.inbox.path(place)
                future = self._submit(_run, moment, number, task.client, task.group, send, answer)
                futures[future] = place
            waiting = set(futures)
            while waiting:
                ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ready:
                    sent, bare = self._result(future)
                    reply: Reply = replace(bare.reply, send=sent.open())
                    self.inbox.put(futures.pop(future), replace(bare, reply=reply))  # no future holds on to it
                    self.seconds[reply.client] = bare.seconds
                    done(len(self.inbox))
        self.census.look(task.client for task in tasks)
        return self.inbox.in_order()

    def predict_test(self, weights: Weights) -> Tensor:
        count = len(self.federation.split.test)
        send = pack({"model": weights}, self.inbox.path("test"))
        step = max(PREDICT_BATCH, -(-count // (self.workers * PREDICT_BATCH)) * PREDICT_BATCH)
        parts = [self._submit(_predict, send, start, start + step) for start in range(0, count, step)]
        return torch.cat([self._result(part) for part in parts])

    def kept_bytes(self) -> int:
        return self.census.nbytes()

    def _expected(self, client: int) -> float:
        return self.seconds.get(client, float(self.federation.client_size(client)))

    def _submit(self, work: Callable[..., T], *arguments: object) -> "Future[T]":
        with _no_main():  # a process may be started by any submit
            return self.executor.submit(work, *arguments)

    def _result(self, future: "Future[T]") -> T:
        try:
            return future.result()
        except BrokenProcessPool:
            raise TacitError(
                "A worker process died or could not start (killed, out of memory, or the error printed above). What "
                "was finished is saved: go on with --resume, with fewer workers if memory is short (backend.workers=1)."
            ) from None

    def close(self) -> None:
        for process in list((self.executor._processes or {}).values()):
            process.kill()  # nothing is lost: what matters is on disk already
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.inbox.clear()
        shutil.rmtree(self.images, ignore_errors=True)


def default_workers() -> int:
    """One a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
