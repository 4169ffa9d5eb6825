"""Sites in this process, for tests of what they let out: parties of a tiny simulation, and messages handed over."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runs import TINY
from tacit.config.resolve import resolve
from tacit.core import payload
from tacit.data.party import facts_of
from tacit.runs.plan import prepare
from tacit.sites.backend import Federated, NoResponse
from tacit.sites.jobs import Job
from tacit.sites.rehearse import write_parties
from tacit.sites.site import Settings, Site
from tacit.sites.wire import Request, Response, SharedFacts, pack, unpack

FEDAVG = {"method.name": "fedavg", "method.preset": "smoke", "data.placement": "clients", "data.clients": 3, **TINY}
NAMES = ("site-0", "site-1", "site-2")


class Here:
    """A transport without a network; `seen` holds what left each site, in order."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = dict(sites)
        self.seen: dict[str, list[bytes]] = {name: [] for name in sites}

    def request(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | NoResponse]:
        for name, envelope in envelopes.items():
            self.seen[name].append(self.sites[name].respond(envelope))
            done(name)
        return {name: self.seen[name][-1] for name in envelopes}


def write_all(folder: Path) -> Path:
    """The folders of the server and of three sites."""
    write_parties(prepare(resolve(FEDAVG)), folder)
    return folder


def make_site(parties: Path, memory: Path, name: str = "site-0", **more: Any) -> tuple[Site, list[str]]:
    """A site, and the list of the lines that it says."""
    said: list[str] = []
    known = more.pop("on_new_job", lambda job: None)
    return Site(Settings(name, parties / name, memory / name, **more), said.append, known), said


def make_sites(parties: Path, memory: Path, **more: Any) -> dict[str, Site]:
    return {name: make_site(parties, memory, name, **more)[0] for name in NAMES}


def job_for(parties: Path, out: Path, wait: float = 0.0, **changes: Any) -> Job:
    own = {"data.name": str(parties / "server"), "backend.name": "flower", **changes}
    return Job(resolve(FEDAVG, own).to_dict(), str(out), NAMES, wait=wait)


def ask(parties: Path, site: Site, kind: str = "hello", run: str = "r1", **changes: Any) -> Response:
    """What a site answers to one request of a made-up server."""
    return unpack(site.respond(request_of(parties, kind, run, **changes)), Response)[0]


def request_of(parties: Path, kind: str = "hello", run: str = "r1", **changes: Any) -> bytes:
    when = {key: changes.pop(key) for key in ("round", "wave", "step") if key in changes}
    experiment = resolve(FEDAVG, {key.replace("__", "."): value for key, value in changes.items()})
    federated = Federated(run, NAMES, SharedFacts(**asdict(facts_of(parties / "server"))), labeled=(0, 1, 2))
    if kind == "hello":
        return pack(federated.request(experiment, 0, kind))
    plan = prepare(experiment)
    model = {"model": plan.setup.first_weights()[0]}
    more = {"stage": "main", "rounds": 4, "round": 0, "step": 0, **when} if kind == "train" else {}
    request: Request = federated.request(experiment, 0, kind, **more)
    return pack(request, payload.to_bytes(model))
