"""What secure aggregation costs: rounds of FedAvg at sites in one process, with the messages of real ones, without a
network. The same run once in the clear and once with masks, in turn; bytes are all that sites send and are sent, whole
messages with their headers.

*A round* has its training in it: one epoch of ResNet-18 over each site's images, so few that masks weigh more than they
would in earnest. *All but training* is the same with clients that send back what they were sent.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.timing import Row, Spent, interleaved, ratio, single_thread, spread
from tacit.config.resolve import resolve
from tacit.contract.method import Reply
from tacit.contract.parties import Client
from tacit.core.payload import Weights
from tacit.methods.fedavg import FedAvg
from tacit.runs.plan import prepare
from tacit.runs.watchers import NullWatcher
from tacit.sites.backend import NoResponse
from tacit.sites.jobs import Job
from tacit.sites.rehearse import write_parties
from tacit.sites.server import run_at_sites
from tacit.sites.site import Settings, Site

TITLE = "Secure aggregation"

SITES = 10
SETTINGS: dict[str, Any] = {
    "method": "fedavg",
    "data.name": "digits",
    "data.placement": "clients",
    "data.partition": "iid",
    "data.labels": 0,
    "data.test_subset": 20,
    "net.name": "resnet18",
    "net.norm": "gn",
    "train.epochs": 1,
    "rounds": 1,
    "device": "cpu",
    "backend.name": "local",
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "32 bits": {"privacy.secure_aggregation": True},
    "64 bits": {"privacy.secure_aggregation": True, "privacy.bits": 64},
}


@dataclass
class Post:
    """Sites in this process, and the bytes that went up and down."""

    sites: Mapping[str, Site]
    up: int = 0
    down: int = 0
    gone: str = ""  # this one is silent when it is asked to train

    def request(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | NoResponse]:
        responses: dict[str, bytes | NoResponse] = {}
        for name, envelope in envelopes.items():
            if name == self.gone and b'"kind": "masked"' in envelope[:200]:
                responses[name] = NoResponse("gone")
                continue
            response = self.sites[name].respond(envelope)
            self.up, self.down = self.up + len(response), self.down + len(envelope)
            responses[name] = response
            done(name)
        return responses


@dataclass
class Case:
    """One way to run; each run has a folder of its own."""

    folder: Path
    settings: Mapping[str, Any]
    clients: int
    idle: bool = False
    gone: str = ""
    traffic: list[tuple[int, int]] = field(default_factory=list)
    made: int = 0

    def run(self) -> None:
        self.made += 1
        here = self.folder / str(self.made)
        experiment = resolve(self.settings, {"data.clients": self.clients})
        parties = self.folder.parent / "parties"
        if not parties.exists():
            write_parties(prepare(experiment), parties)
        sites = {
            f"site-{k}": Site(Settings(f"site-{k}", parties / f"site-{k}", here / f"memory-{k}"))
            for k in range(self.clients)
        }
        at_sites = resolve(experiment.to_dict(), {"data.name": str(parties / "server"), "backend.name": "flower"})
        post = Post(sites, gone=self.gone)
        train = FedAvg._train
        if self.idle:
            FedAvg._train = _idle  # type: ignore[method-assign]
        try:
            run_at_sites(Job(at_sites.to_dict(), str(here / "run"), tuple(sites)), post, NullWatcher())
        finally:
            FedAvg._train = train  # type: ignore[method-assign]
        self.traffic.append((post.up, post.down))


def _idle(self: FedAvg, weights: Weights, side: Client) -> Reply:
    return Reply(send={"model": weights}, examples=len(side.shard.labeled))


def measure(settings: Mapping[str, Any] | None = None, clients: int = SITES, times: int = 3) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, single_thread():
        whole = {
            name: Case(Path(folder) / name, {**SETTINGS, **(settings or {}), **way}, clients)
            for name, way in WAYS.items()
        }
        idle = {
            name: Case(Path(folder) / f"idle {name}", case.settings, clients, idle=True) for name, case in whole.items()
        }
        idle["one is gone"] = Case(Path(folder) / "gone", idle["32 bits"].settings, clients, idle=True, gone="site-1")
        spent = interleaved({name: case.run for name, case in whole.items()}, times)
        alone = interleaved({name: case.run for name, case in idle.items()}, times)
    return [*_rows(whole, spent, clients), *_alone(alone, clients)]


def _rows(cases: Mapping[str, Case], spent: Mapping[str, list[Spent]], clients: int) -> list[Row]:
    rows = []
    plain_up, plain_down = cases["plain"].traffic[-1]
    for name in ("32 bits", "64 bits"):
        up, down = cases[name].traffic[-1]
        rows.append(Row(f"bytes up, {name} / plain", up / plain_up, note=f"{up / 1e6:.1f} MB from {clients} sites"))
        rows.append(Row(f"bytes down, {name} / plain", down / plain_down))
        rows.append(ratio(f"CPU of a round, {name} / plain", spent[name], spent["plain"]))
    return rows


def _alone(spent: Mapping[str, list[Spent]], clients: int) -> list[Row]:
    rows = []
    for name in ("32 bits", "64 bits", "one is gone"):
        seconds = [(a.cpu - b.cpu) / clients for a, b in zip(spent[name], spent["plain"], strict=True)]
        what = f"CPU that it adds for each site, {name}"
        rows.append(spread(what, seconds, "s", note="with the server's part"))
        if name == "32 bits":
            rows.append(ratio("CPU of all but training, 32 bits / plain", spent[name], spent["plain"]))
    return rows
