"""A run over real sites: the same engine and the same methods, with Flower as the backend.

`tacit site run` leaves a job in the server's folder; Flower starts the server app, which calls `run_job` here. What
happens is written line by line beside the job, and the results into a normal run folder.
"""

import json
import os
import secrets
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tacit.backends.base import Backend
from tacit.backends.flower import Federated, FlowerBackend, Grid, Transport, say_hello
from tacit.data.dataset import Dataset
from tacit.data.federation import Federation
from tacit.data.party import FACTS, Facts, Party, facts_of, load_party, server_parts
from tacit.data.split import Part, Split
from tacit.engine import Plan, Watcher, run_plan, stages_of
from tacit.errors import TacitError
from tacit.experiment import Experiment, resolve
from tacit.payload import write_atomically
from tacit.record import OpenRun, Run, check_same
from tacit.sides import Moment
from tacit.sites.jobs import HOME, Diary, Job, job_path
from tacit.sites.site import site_setup
from tacit.sites.wire import SharedFacts

SITES = "sites.json"  # in the run folder: the run's name and who is which client


class Scribe:
    """A watcher that writes into the diary."""

    def __init__(self, diary: Diary) -> None:
        self.diary = diary

    def start(self, plan: Plan, done: int) -> None:
        self.diary.write(say=f"{done} of {plan.steps} rounds are done" if done else f"{plan.steps} rounds begin")

    def client_done(self, moment: Moment, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None:
        self.diary.write(
            round={key: record.get(key) for key in ("stage", "round", "accuracy", "refused", "skipped", "seconds")}
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.diary.write(say="all rounds are done")


def run_job(name: str, grid: Any) -> None:
    """The server app: everything that Flower starts on the server's side."""
    home = Path(os.environ[HOME])
    diary = Diary(job_path(home, name).with_suffix(".jsonl"))
    diary.write(process=os.getpid())
    try:
        given = json.loads(job_path(home, name).read_text())
        job = Job(**{**given, "sites": tuple(given["sites"])})
        transport = Grid(grid, job.insecure)
        wait_for(transport, job, diary)
        run_at_sites(job, transport, Scribe(diary))
        diary.write(done=True)
    except TacitError as error:
        diary.write(error=str(error))
        raise
    except Exception:
        diary.write(error=traceback.format_exc())
        raise


def wait_for(grid: Grid, job: Job, diary: Diary) -> None:
    """Until every site is there; whom it waits for is told."""
    end, told = time.monotonic() + job.wait, ""
    while missing := [name for name in job.sites if name not in grid.online()]:
        text = f"waiting for {', '.join(missing)}"
        if text != told:
            diary.write(say=text)
            told = text
        if time.monotonic() > end:
            raise TacitError(
                f"The run did not start: {', '.join(missing)} did not join within {job.wait:g} s. Let them run `tacit "
                "site join`, wait longer (--wait), or leave them out (--sites)."
            )
        time.sleep(0.5)


def run_at_sites(job: Job, transport: Transport, watcher: Watcher) -> Run:
    """The run itself, from the first hello to the last record. Any transport will do."""
    experiment, out = resolve(job.experiment), Path(job.out)
    for_sites_only(experiment)
    name, sites = secrets.token_hex(8), job.sites
    if job.resume and (out / "experiment.toml").is_file():
        check_same(out, experiment)
        name, sites = _saved(out)
        if sites != job.sites:
            raise TacitError(
                f"The run in {out} has the sites {', '.join(sites)}, but now it is {', '.join(job.sites)}."
            )
    path = Path(experiment.data.name)
    facts = facts_of(path, experiment.data.image_size)
    shared = SharedFacts(**asdict(facts))
    federated = Federated(name, sites, shared, patience=job.patience, largest_reply=job.largest_reply)
    federated = say_hello(experiment, federated, transport, min(job.patience, 600.0), job.wait)
    plan = plan_for(experiment, facts, server_party(path, facts), federated)

    def make_backend(plan: Plan, folder: OpenRun) -> Backend:
        saved = json.dumps({"run": name, "sites": sites}) + "\n"
        write_atomically(folder.folder / SITES, saved.encode())
        test = Federation(plan.dataset, plan.split, plan.setup.device).test()
        return FlowerBackend(experiment, plan.setup, test, federated, transport)

    return run_plan(plan, out, make_backend, job.resume, watcher)


def _saved(out: Path) -> tuple[str, tuple[str, ...]]:
    try:
        saved = json.loads((out / SITES).read_text())
        return str(saved["run"]), tuple(str(name) for name in saved["sites"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TacitError(f"{out} is no run at sites that can be gone on with ({SITES}: {error}).") from error


def for_sites_only(experiment: Experiment) -> None:
    """Refuse settings that only a simulation can keep."""
    if experiment.data.reveal == "all":
        raise TacitError("data.reveal = 'all' gives labels that nobody has: it works in simulations only.")
    if experiment.keep.latest:
        raise TacitError(
            "keep.latest forgets other clients' memory, but each site has its own disk. Write keep.latest=0."
        )


def server_party(path: Path, facts: Facts) -> Party:
    """The server's own images; none, where its folder holds the facts alone."""
    if path.is_dir() and [entry.name for entry in path.iterdir() if not entry.name.startswith(".")] == [FACTS]:
        none = np.zeros((0, facts.channels, facts.size, facts.size), np.uint8)
        return Party(none, np.zeros(0, np.int64), none, np.zeros(0, np.int64))
    return load_party(path, facts)


def plan_for(experiment: Experiment, facts: Facts, party: Party, federated: Federated) -> Plan:
    """What the engine needs to know: the server's images and, of the clients, only how many there are."""
    at_server = experiment.data.placement == "server"
    train, test = np.flatnonzero(party.labels >= 0) if at_server else np.zeros(0, np.int64), party.test_labels
    images, labels = party.test_images, test
    if not len(test):
        train, held_out = server_parts(party, at_server)
        images, labels = party.images[held_out], party.labels[held_out]
    if at_server and not len(train):
        raise TacitError(
            "The recipe has the labels at the server, but the server's data holds no labelled training image. Give "
            "it some (--data), or write data.placement = 'clients' or 'some-clients'."
        )
    if not at_server and not federated.labeled:
        raise TacitError("No site holds labels, and the recipe has none at the server: nothing could be learned.")
    dataset = Dataset(
        name="sites",
        train_images=party.images[train],
        train_labels=party.labels[train],
        test_images=images,
        test_labels=labels,
        classes=facts.classes,
        mean=facts.mean,
        std=facts.std,
        mirror=facts.mirror,
        note=f"real sites: {', '.join(federated.sites)}",
    )
    nothing = np.zeros(0, np.int64)
    recipe = {
        **experiment.data.model_dump(mode="json", exclude={"split"}),
        "train_images": len(train),
        "test_images": len(labels),
        "sites": list(federated.sites),
    }
    clients = tuple(Part(nothing, nothing) for _ in federated.sites)
    split = Split(np.arange(len(train)), clients, np.arange(len(labels)), recipe, experiment.seed, "")
    setup = site_setup(experiment, facts, len(federated.sites), federated.labeled)
    setup.build()  # a net that does not fit the images says so now
    return Plan(experiment, stages_of(experiment), dataset, split, setup, ())
