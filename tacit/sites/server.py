"""A run over real sites: the same engine and the same methods, with Flower as the backend.

`tacit site run` leaves a job in the server's folder; Flower starts the server app, which calls `run_job` here. What
happens is written line by line beside the job, and the results into a normal run folder.
"""

import json
import os
import secrets
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tacit.backends.base import Backend
from tacit.config.resolve import resolve
from tacit.contract.method import Method
from tacit.contract.parties import RoundInfo
from tacit.core.errors import TacitError
from tacit.core.payload import write_atomically
from tacit.core.settings import Experiment
from tacit.data.dataset import Dataset
from tacit.data.federation import Federation
from tacit.data.groups import group_warnings
from tacit.data.party import FACTS, Facts, PartyData, coloured, facts_of, load_party, server_parts
from tacit.data.placement import keep_back
from tacit.data.split import Part, Split, validation_generator
from tacit.engine.run import run_plan
from tacit.nets.weights import PRETRAINED
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, about_weights, stages_of
from tacit.runs.watchers import Watcher
from tacit.runs.writer import OpenRun, check_same, roll_back
from tacit.sites.accept import method_file
from tacit.sites.backend import Federated, FlowerBackend, Grid, Transport, say_hello
from tacit.sites.jobs import HOME, Job, JobLog, job_path
from tacit.sites.site import site_setup
from tacit.sites.wire import SharedFacts

SITES = "sites.json"  # in the run folder: the run's name, who is which client, who was left out
OTHER_SITES = (
    "Nobody can see whether a site trains on a patient (or lesion) that the server tests with: images stay at home. "
    "Agree on that with the sites; else the figures flatter."
)


@dataclass(frozen=True)
class Roster:
    """Who takes part in a run at sites, as it is saved with the run. Numbers never change: a client is a place in
    `sites`, also when that site was left out."""

    run: str
    sites: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    labeled: tuple[int, ...] = ()  # the clients that hold labels
    images: tuple[int, ...] | None = None  # how many each registered; None: of a run before this was asked

    @property
    def asked(self) -> tuple[str, ...]:
        return tuple(name for name in self.sites if name not in self.left_out)

    def without(self, names: Sequence[str]) -> "Roster":
        """These sites are never asked again."""
        if unknown := [name for name in names if name not in self.sites]:
            raise TacitError(
                f"--without {', '.join(unknown)}: this run has no such site. It has: {', '.join(self.sites)}."
            )
        fewer = replace(self, left_out=tuple(dict.fromkeys((*self.left_out, *names))))
        if not fewer.asked:
            raise TacitError("--without leaves no site that could be asked.")
        return fewer

    def save(self, folder: Path) -> None:
        write_atomically(folder / SITES, (json.dumps(asdict(self)) + "\n").encode())


def roster_of(out: Path) -> Roster:
    """Who takes part in the run that is there."""
    try:
        saved = json.loads((out / SITES).read_text())
        images = saved.get("images")
        return Roster(
            str(saved["run"]),
            tuple(str(name) for name in saved["sites"]),
            tuple(str(name) for name in saved.get("left_out", ())),
            tuple(int(client) for client in saved.get("labeled", ())),
            None if images is None else tuple(int(number) for number in images),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TacitError(f"{out} is no run at sites that can be gone on with ({SITES}: {error}).") from error


def roster_for(job: Job) -> Roster:
    """Who takes part in a job: as in the run that is gone on with, or as the job says."""
    out = Path(job.out)
    if not (job.resume and (out / "experiment.toml").is_file()):
        if job.without or job.from_round is not None:
            raise TacitError(
                f"--without and --from-round are for going on with a run (--resume), but there is none in {out}. A new "
                "run has the sites that --sites names."
            )
        return Roster(secrets.token_hex(8), job.sites)
    roster = roster_of(out).without(job.without)
    if roster.asked != tuple(name for name in job.sites if name not in roster.left_out):
        raise TacitError(
            f"The run in {out} has the sites {', '.join(roster.asked)}, but now it is {', '.join(job.sites)}. To go on "
            "without a site, use --without."
        )
    return roster


class JobLogWatcher:
    """A watcher that writes into the diary."""

    def __init__(self, job_log: JobLog) -> None:
        self.job_log = job_log

    def start(self, plan: Plan, done: int) -> None:
        self.job_log.write(say=f"{done} of {plan.steps} rounds are done" if done else f"{plan.steps} rounds begin")
        for warning in plan.warnings:
            self.job_log.write(say=warning)

    def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None:
        self.job_log.write(
            round={key: record.get(key) for key in ("stage", "round", "accuracy", "refused", "skipped", "seconds")}
        )

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.job_log.write(say="all rounds are done")


def run_job(name: str, grid: Any) -> None:
    """The server app: everything that Flower starts on the server's side."""
    home = Path(os.environ[HOME])
    job_log = JobLog(job_path(home, name).with_suffix(".jsonl"))
    job_log.write(process=os.getpid())
    try:
        given = json.loads(job_path(home, name).read_text())
        job = Job(**{**given, "sites": tuple(given["sites"]), "without": tuple(given.get("without", ()))})
        transport = Grid(grid, job.insecure)
        wait_for(transport, roster_for(job).asked, job.wait, job_log)
        run_at_sites(job, transport, JobLogWatcher(job_log), lambda text: job_log.write(say=text))
        job_log.write(done=True)
    except TacitError as error:
        job_log.write(error=str(error))
        raise
    except Exception:
        job_log.write(error=traceback.format_exc())
        raise


def wait_for(grid: Grid, sites: Sequence[str], wait: float, job_log: JobLog) -> None:
    """Until every site is there; whom it waits for is told."""
    end, announced = time.monotonic() + wait, ""
    while missing := sorted(set(sites) - grid.online().keys(), key=sites.index):
        text = f"waiting for {', '.join(missing)}"
        if text != announced:
            job_log.write(say=text)
            announced = text
        if time.monotonic() > end:
            raise TacitError(
                f"The run did not start: {', '.join(missing)} did not join within {wait:g} s. Let them run `tacit "
                "site join`, wait longer (--wait), or leave them out (--sites; of a run that has begun: --without)."
            )
        time.sleep(0.5)


def run_at_sites(
    job: Job, transport: Transport, watcher: Watcher, say: Callable[[str], None] = lambda text: None
) -> Run:
    """The run itself, from the first hello to the last record. Any transport will do."""
    experiment, out = resolve(job.experiment), Path(job.out)
    for_sites_only(experiment)
    roster, records = roster_for(job), ()
    if job.resume and (out / "experiment.toml").is_file():
        check_same(out, experiment)
        if job.from_round is not None:
            roll_back(out, job.from_round)
        records = tuple(Run(out).records)
    path = Path(experiment.data.name)
    facts = coloured(facts_of(path, experiment.data.image_size), experiment.data.rgb)
    file = method_file(experiment)
    federated = Federated(
        roster.run,
        roster.sites,
        SharedFacts(**asdict(facts)),
        roster.labeled,
        roster.images,
        roster.left_out,
        method_sha256=file.sha256 if file else "",
        frozen_sha256=site_setup(experiment, facts, len(roster.sites), ()).frozen_sha256,
        patience=job.patience,
        largest_reply=job.largest_reply,
    )
    federated = say_hello(experiment, federated, transport, min(job.patience, 600.0), job.wait, len(records), say)
    party = server_party(path, facts, experiment.data.groups == "found")
    plan = plan_for(experiment, facts, party, federated, file.load() if file else None)
    plan = replace(plan, warnings=(*plan.warnings, *_other_sizes(roster, federated), *_forgetful(federated, records)))

    def make_backend(plan: Plan, folder: OpenRun) -> Backend:
        replace(roster, labeled=federated.labeled, images=federated.images).save(folder.folder)
        own = Federation(plan.dataset, plan.split, plan.setup.device)
        return FlowerBackend(experiment, plan.setup, own.test(), federated, transport, own.validation(-1))

    return run_plan(plan, out, make_backend, job.resume, watcher)


def _other_sizes(roster: Roster, federated: Federated) -> list[str]:
    """Sites whose number of images is another than when the run began."""
    announced = zip(roster.sites, roster.images or (), federated.images or (), strict=False)
    return [f"{name} registered {old} images at first, and {new} now" for name, old, new in announced if old != new]


def _forgetful(federated: Federated, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sites that answered in this run and know nothing of it any more."""
    before = {client for record in records for client in record.get("answered", ())}
    return [
        f"{name} answered in this run before, but has no memory of it now: it goes on as if it were new. If its folder "
        "was moved, stop this run, let the site put it back, and resume"
        for client, name in enumerate(federated.sites)
        if client in before and name not in federated.left_out and not federated.answered[client]
    ]


def for_sites_only(experiment: Experiment) -> None:
    """Refuse settings that only a simulation can keep."""
    if experiment.data.reveal == "all":
        raise TacitError("data.reveal = 'all' gives labels that nobody has: it works in simulations only.")
    if experiment.net.train != "all" and experiment.net.weights not in ("", PRETRAINED):
        raise TacitError(
            f'net.train = "{experiment.net.train}" leaves what is frozen out of what is sent, and sites do not have '
            f'the file {experiment.net.weights}. Write net.train = "all", or net.weights = "{PRETRAINED}".'
        )
    if experiment.keep.latest:
        raise TacitError(
            "keep.latest forgets other clients' memory, but each site has its own disk. Write keep.latest=0."
        )


def server_party(path: Path, facts: Facts, guess_groups: bool = True) -> PartyData:
    """The server's own images; none, where its folder holds the facts alone."""
    if path.is_dir() and [entry.name for entry in path.iterdir() if not entry.name.startswith(".")] == [FACTS]:
        none = np.zeros((0, facts.channels, facts.size, facts.size), np.uint8)
        return PartyData(none, np.zeros(0, np.int64), none, np.zeros(0, np.int64))
    return load_party(path, facts, guess_groups)


def plan_for(
    experiment: Experiment, facts: Facts, party: PartyData, federated: Federated, kind: type[Method] | None
) -> Plan:
    """What the engine needs to know: the server's images and, of the clients, how many there are and how many images
    each of them registered. `kind` is the class of a method that came from a file."""
    at_server = experiment.data.placement == "server"
    train, test = np.flatnonzero(party.labels >= 0) if at_server else np.zeros(0, np.int64), party.test_labels
    images, labels, groups = party.test_images, test, party.test_groups
    if not len(test):
        train, held_out = server_parts(party, at_server)
        images, labels = party.images[held_out], party.labels[held_out]
        groups = None if party.groups is None else party.groups[held_out]
    if at_server and not len(train):
        raise TacitError(
            "The recipe has the labels at the server, but the server's data holds no labelled training image. Give "
            "it some (--data), or write data.placement = 'clients' or 'some-clients'."
        )
    left = [client for client in federated.labeled if federated.sites[client] not in federated.left_out]
    if not at_server and not left:
        raise TacitError("No site holds labels, and the recipe has none at the server: nothing could be learned.")
    known = party.known_groups
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
        depth=facts.depth,
        train_groups=None if known is None else known[train],
        test_groups=None if known is None else groups,
        note=f"real sites: {', '.join(federated.sites)}; {party.about_groups}",
    )
    nothing = np.zeros(0, np.int64)
    recipe = {
        **experiment.data.model_dump(mode="json", exclude={"split"}),
        "train_images": len(train),
        "test_images": len(labels),
        "sites": list(federated.sites),
    }
    clients = tuple(Part(nothing, nothing) for _ in federated.sites)
    own, kept_back = np.arange(len(train)), tuple[np.ndarray, ...]()
    if experiment.data.validation:
        chance = validation_generator(experiment.seed, -1)
        chosen = keep_back(dataset.train_labels, dataset.train_groups, experiment.data.validation, chance)
        own, kept_back = np.flatnonzero(~chosen), (np.flatnonzero(chosen), *(nothing for _ in clients))
    split = Split(own, clients, np.arange(len(labels)), recipe, experiment.seed, "", kept_back)
    setup = site_setup(experiment, facts, len(federated.sites), federated.labeled)
    setup.build()  # a net that does not fit the images says so now
    _ = setup.taken  # and so does a bank of features that is too large
    told = (*about_weights(experiment, setup), *((OTHER_SITES, *group_warnings(dataset)) if len(labels) else ()))
    return Plan(experiment, stages_of(experiment, kind), dataset, split, setup, told, federated.images)
