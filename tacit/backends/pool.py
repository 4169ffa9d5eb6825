"""Clients on several processes of this machine, one thread each. Their number changes nothing but the time."""

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from tacit.backends.base import Inbox, Outcome, Worker, one_thread, waves
from tacit.contract.method import Reply, Stage, Task
from tacit.contract.parties import RoundInfo
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.files import sweep
from tacit.core.payload import Parcel, Weights, Written, at_hand, pack
from tacit.core.settings import Experiment
from tacit.data.federation import Federation, make_setup
from tacit.data.shared import SharedDataset, share
from tacit.data.split import load_split
from tacit.evaluation.scores import PREDICT_BATCH
from tacit.runs.memory import ClientMemory, MemoryIndex

T = TypeVar("T")
MOST_DEATHS = 4  # in a row, before a run ends

_worker: Worker
_stages: dict[str, Stage]


def _context() -> BaseContext:
    """Workers are forked from a small server that has imported torch once and started nothing else.

    torch._dynamo is among it: the first optimiser imports it, which takes each worker a second otherwise.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tacit.backends.pool", "tacit.engine.loop", "torch._dynamo"])
    return context


def _start(settings: dict[str, object], shared: SharedDataset, split: Path, memory: Path) -> None:
    """In a new process: map the engine's images and load the saved split."""
    global _worker, _stages
    from tacit.runs.plan import stages_of

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine; it ends its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    one_thread()
    experiment = Experiment.model_validate(settings)
    dataset, saved = shared.open(), load_split(split)
    setup = make_setup(experiment, dataset, saved)
    if setup.device.type == "cuda" and setup.device.index is None:
        spread = multiprocessing.current_process()._identity[0] % torch.cuda.device_count()
        setup = replace(setup, device=torch.device("cuda", spread))
    _worker = Worker(setup, Federation(dataset, saved, setup.device), ClientMemory(memory, experiment.keep))
    _stages = {stage.name: stage for stage in stages_of(experiment)}


def _end_with_parent() -> None:
    """A worker whose engine was killed must not live on."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(
    round_info: RoundInfo, wave: int, client: int, group: int, send: Parcel, answer: Path
) -> tuple[Parcel, Outcome]:
    task = Task(client, at_hand(send.open()), group)
    outcome = _worker.run(_stages[round_info.stage], round_info, wave, task)
    bare = replace(outcome, reply=replace(outcome.reply, send={}))
    return pack(outcome.reply.send, answer), bare


def _predict(send: Parcel, start: int, end: int) -> Tensor:
    return _worker.predict_test(payload.weights_in(send.open(), "model"), slice(start, end))


def _validate(send: Parcel, clients: Sequence[int]) -> Tensor:
    return _worker.validate(payload.weights_in(send.open(), "model"), clients)


def _compare(sends: Sequence[Parcel], clients: Sequence[int]) -> Tensor:
    return _worker.compare([payload.weights_in(send.open(), "model") for send in sends], clients)


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

    def __init__(self, experiment: Experiment, federation: Federation, split: Path, memory: Path, workers: int) -> None:
        self.federation = federation
        self.memory_index = MemoryIndex(ClientMemory(memory, experiment.keep))
        self.inbox = Inbox(memory.with_name("replies"))
        self.images = split.parent / "images"  # only while the pool lives, and only if they lie in no file yet
        self.workers = workers
        self.seconds: dict[int, float] = {}  # how long each client took last time: the longest start first
        self.start_with = (experiment.to_dict(), share(federation.dataset, self.images), split, memory)
        self.executor = self._start()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.workers, mp_context=_context(), initializer=_start, initargs=self.start_with)

    def run(
        self, stage: Stage, round_info: RoundInfo, tasks: Sequence[Task], done: Callable[[int], None]
    ) -> list[Outcome]:
        self.memory_index.forget(round_info.step)
        self.inbox.open(len(tasks))
        written: Written = {}  # what many clients are sent alike is written once
        for number, wave in enumerate(waves(tasks)):
            jobs: dict[int, tuple[object, ...]] = {}
            for place, task in sorted(wave, key=lambda pair: -self._expected(pair[1].client)):
                send, answer = pack(task.send, self.inbox.path(f"task-{place}"), written), self.inbox.path(place)
                jobs[place] = (round_info, number, task.client, task.group, send, answer)
            for place, (sent, bare) in self._results(_run, jobs):
                reply: Reply = replace(bare.reply, send=sent.open())
                self.inbox.put(place, replace(bare, reply=reply))
                self.seconds[reply.client] = bare.seconds
                done(len(self.inbox))
        self.memory_index.look(task.client for task in tasks)
        return self.inbox.in_order()

    def predict_test(self, weights: Weights) -> Tensor:
        count = len(self.federation.split.test)
        send = pack({"model": weights}, self.inbox.path("test"))
        step = max(PREDICT_BATCH, -(-count // (self.workers * PREDICT_BATCH)) * PREDICT_BATCH)
        parts = dict(self._results(_predict, {start: (send, start, start + step) for start in range(0, count, step)}))
        return torch.cat([parts[start] for start in sorted(parts)])

    def validate(self, weights: Weights) -> Tensor:
        send = pack({"model": weights}, self.inbox.path("validation"))
        return dict(self._results(_validate, {0: (send, self.federation.judges())}))[0]

    def compare(self, models: Sequence[Weights]) -> Tensor:
        sends = [pack({"model": one}, self.inbox.path(f"compared-{number}")) for number, one in enumerate(models)]
        return dict(self._results(_compare, {0: (sends, self.federation.judges())}))[0]

    def memory_bytes(self) -> int:
        return self.memory_index.nbytes()

    def _expected(self, client: int) -> float:
        return self.seconds.get(client, float(self.federation.client_size(client)))

    def _results(self, work: Callable[..., T], jobs: Mapping[int, tuple[object, ...]]) -> Iterator[tuple[int, T]]:
        """What each job gives, with its key, as they get ready.

        A worker that dies takes the whole pool with it. What is not answered is then done again by a new one, with
        the same result: a client finds what it had kept before its task. Only who dies again and again ends the run:
        the server that starts workers may itself be dying, which a new pool notices a moment later.
        """
        left, died = dict(jobs), 0
        while left:
            try:
                for key, result in self._attempt(work, left):
                    died = 0
                    yield key, result
            except BrokenProcessPool:
                died += 1
                if died == MOST_DEATHS:
                    raise TacitError(
                        f"A worker process died or could not start, {died} times in a row (killed, out of memory, or "
                        "the error printed above). What was finished is saved: go on with --resume, with fewer workers "
                        "if memory is short (backend.workers=1)."
                    ) from None
                self._stop()
                time.sleep(0.2 * died)
                sweep(self.memory_index.memory.folder)  # what it was writing
                self.executor = self._start()

    def _attempt(self, work: Callable[..., T], left: dict[int, tuple[object, ...]]) -> Iterator[tuple[int, T]]:
        """Try to do all that is left; what was answered is taken out of it."""
        futures = {self._submit(work, *arguments): key for key, arguments in left.items()}
        waiting = set(futures)
        while waiting:
            ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            while ready:  # no future holds on to a result
                future = ready.pop()
                key, result = futures.pop(future), future.result()
                del left[key], future
                yield key, result

    def _submit(self, work: Callable[..., T], *arguments: object) -> "Future[T]":
        try:
            with _no_main():  # a process may be started by any submit
                return self.executor.submit(work, *arguments)
        except (EOFError, OSError) as error:  # the server that starts workers was killed
            raise BrokenProcessPool(str(error)) from error

    def _stop(self) -> None:
        for process in list((self.executor._processes or {}).values()):
            process.kill()  # nothing is lost: what matters is on disk already
        _forget_dead_tracker()
        self.executor.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        self._stop()
        self.inbox.clear()
        shutil.rmtree(self.images, ignore_errors=True)


def _forget_dead_tracker() -> None:
    """Where Python's tracker of semaphores was killed, do not ask a new one to forget what it never knew.

    It would answer each time with a traceback on the screen. Nothing is left behind: who made a semaphore removes it.
    """
    module: Any = resource_tracker
    tracker = module._resource_tracker
    if tracker._fd is not None and not tracker._check_alive():
        module.unregister = lambda name, kind: None


def default_workers() -> int:
    """One a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
