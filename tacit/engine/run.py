"""From an experiment to a finished run in a folder."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from tacit.backends import Backend, LocalBackend, PoolBackend
from tacit.backends.base import one_thread
from tacit.backends.pool import default_workers
from tacit.contract.secure import check_labeled
from tacit.core.machine import change_of_type
from tacit.core.settings import Experiment
from tacit.data.federation import Federation
from tacit.data.holdings import FILE as PARTIES
from tacit.data.holdings import holdings
from tacit.engine.checks import check_budget, check_run
from tacit.engine.loop import Engine
from tacit.runs.folder import Run
from tacit.runs.integrity import saved_split
from tacit.runs.memory import ClientMemory
from tacit.runs.plan import Plan, prepare
from tacit.runs.trained import FILE as TRAINED
from tacit.runs.trained import trained_file
from tacit.runs.watchers import NullWatcher, Watcher
from tacit.runs.writer import OpenRun, check_same


def run_experiment(experiment: Experiment, out: Path, *, resume: bool = False, watcher: Watcher | None = None) -> Run:
    """Run an experiment into a folder, or go on with the run that is there. Returns the finished run."""
    watcher = watcher or NullWatcher()
    check_run(experiment, out)
    if resume:
        check_same(out, experiment)  # before any data is loaded
    return run_plan(prepare(experiment, saved_split(out) if resume else None), out, backend_of, resume, watcher)


def run_plan(
    plan: Plan, out: Path, make_backend: Callable[[Plan, OpenRun], Backend], resume: bool, watcher: Watcher
) -> Run:
    """Run what was prepared, on the backend that is made for it, into a folder or on with the run that is there."""
    if not (out / "summary.json").is_file():  # a finished run is only read
        for stage in plan.stages:
            stage.method.check_installed()
        check_budget(plan.experiment)
        check_labeled(plan.experiment, plan.stages, plan.setup.clients, len(plan.setup.labeled_clients))
    folder = OpenRun(out, plan.experiment, resume)
    try:
        folder.recover(plan.split)
        if folder.manifest.entries:  # of an older version that is finished, nothing is touched
            _note_data(plan, folder)
        if folder.finished:
            return Run(out)
        if other := change_of_type(folder.records[-1].get("cpu", "") if folder.records else ""):
            plan = replace(plan, warnings=(*plan.warnings, other))
        threads = one_thread()
        backend = make_backend(plan, folder)
        try:
            watcher.start(replace(plan, warnings=(*folder.notes, *plan.warnings)), folder.done)
            summary = Engine(plan, folder, backend, watcher).run()
        finally:
            backend.close()
            torch.set_num_threads(threads)
        watcher.finish(summary)
        return Run(out)
    finally:
        folder.close()


def _note_data(plan: Plan, folder: OpenRun) -> None:
    """Who holds what, and of own data which images are learned from: for reports and tests when the images are gone."""
    folder.note(PARTIES, lambda: (json.dumps(holdings(plan.split, plan.dataset)) + "\n").encode())
    folder.note(TRAINED, lambda: trained_file(plan))


def backend_of(plan: Plan, folder: OpenRun) -> Backend:
    """The backend that an experiment asks for."""
    settings = plan.experiment.backend
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    workers = settings.workers or default_workers()
    if settings.name == "ray":
        from tacit.backends.ray import RayBackend  # an extra of its own

        return RayBackend(plan.experiment, federation, folder.memory_folder)
    if settings.name == "pool" and workers > 1 and plan.setup.device.type != "mps":
        return PoolBackend(plan.experiment, federation, folder.split_path, folder.memory_folder, workers)
    return LocalBackend(plan.setup, federation, ClientMemory(folder.memory_folder, plan.experiment.keep))
