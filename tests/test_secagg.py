"""The protocol of secure aggregation without a network: masks cancel, dropouts are survived, and sites say no."""

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")
from test_sites import Here, at_sites, simulated

from runs import digest
from tacit.contract.fixed_point import Ring
from tacit.core import payload
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.data.party import FACTS
from tacit.engine.run import run_experiment, run_plan
from tacit.runs.folder import Run
from tacit.runs.plan import prepare
from tacit.runs.watchers import NullWatcher
from tacit.sites.backend import NoResponse
from tacit.sites.preview import preview_site
from tacit.sites.secagg import Assembly, Participant, Shares, circle_of
from tacit.sites.server import run_at_sites
from tacit.sites.site import Site
from tacit.sites.unseen import unpacked_bytes
from tacit.sites.wire import SECURE, Request, Response, pack, unpack
from tacit.testing.trial import local_backend

ON = {"privacy.secure_aggregation": True}


class Circle:
    """Sites and a server that hand each other what they must, in this process; each step may lose some sites."""

    def __init__(self, count: int, threshold: int, neighbours: int = 0, bits: int = 32) -> None:
        self.sites = {number: Participant(number, b"run/0") for number in range(count)}
        self.kind, self.threshold = np.uint32 if bits == 32 else np.uint64, threshold
        self.vectors = {k: np.frombuffer(os.urandom(8 * 50), self.kind)[:50].copy() for k in self.sites}
        self.keys = {number: site.keys for number, site in self.sites.items()}
        self.circles = {number: circle_of(list(self.sites), number, neighbours) for number in self.sites}

    def share(self, gone: set[int]) -> None:
        sealed = {
            number: site.share({other: self.keys[other] for other in self.circles[number]}, self.threshold)
            for number, site in self.sites.items()
            if number not in gone
        }
        self.shared = tuple(sealed)
        for number in sealed:
            mine = {other: each[number] for other, each in sealed.items() if number in each}
            self.sites[number].take(mine)

    def masked(self, gone: set[int]) -> dict[int, Ring]:
        return {number: self.sites[number].mask(self.vectors[number]) for number in self.shared if number not in gone}

    def open(self, masked: Mapping[int, Ring], gone: set[int]) -> Ring:
        assembly = Assembly(b"run/0", self.threshold, self.keys, self.circles, self.shared)
        alive, lost = sorted(masked), assembly.gone(masked)
        answers: dict[int, Shares] = {
            number: self.sites[number].open(
                [other for other in alive if other in self.circles[number]],
                [other for other in lost if other in self.circles[number]],
            )
            for number in alive
            if number not in gone
        }
        return assembly.open(sum(masked.values(), np.zeros(50, self.kind)), alive, answers)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from([32, 64]), st.integers(3, 7), st.data())
def test_masked_sums_are_plain_sums_whoever_drops_out(bits: int, count: int, data: st.DataObject) -> None:
    """At most as many as may be missing, each at any step: before shares, before its vector, before its answer."""
    threshold = count // 2 + 1
    missing = data.draw(st.lists(st.integers(0, count - 1), max_size=count - threshold, unique=True))
    steps = {who: data.draw(st.sampled_from(["shares", "masked", "unmask"])) for who in missing}

    def gone(step: str) -> set[int]:
        return {who for who, when in steps.items() if when == step}

    circle = Circle(count, threshold, bits=bits)
    circle.share(gone("shares"))
    masked = circle.masked(gone("masked"))
    for number, vector in masked.items():
        assert (vector != circle.vectors[number]).mean() > 0.9  # nothing of it is to be seen
    expected = sum((circle.vectors[number] for number in masked), np.zeros(50, circle.kind))
    assert (circle.open(masked, gone("unmask")) == expected).all()


def test_a_sum_needs_no_more_than_a_circle_of_neighbours() -> None:
    circle = Circle(9, threshold=3, neighbours=4)
    assert circle.circles[0] == [0, 1, 2, 7, 8]
    circle.share(set())
    masked = circle.masked({4, 8})
    expected = sum((circle.vectors[number] for number in masked), np.zeros(50, circle.kind))
    assert (circle.open(masked, {1}) == expected).all()


def test_fewer_shares_than_needed_open_nothing() -> None:
    circle = Circle(4, threshold=3)
    circle.share(set())
    masked = circle.masked(set())
    with pytest.raises(TacitError, match="2 shares of a secret were handed out, 3 are needed"):
        circle.open(masked, {0, 1})


def test_a_site_says_no_to_what_would_bare_another() -> None:
    circle = Circle(4, threshold=3)
    circle.share(set())
    site = circle.sites[0]
    with pytest.raises(TacitError, match="once in a round"):
        site.open([0, 1, 2], [3])  # before its own vector is in the sum
    circle.masked(set())
    with pytest.raises(TacitError, match="masked once in a round"):
        site.mask(circle.vectors[0])  # the same masks under another vector would show the difference
    with pytest.raises(TacitError, match="for one of its secrets"):
        site.open([0, 1, 2, 3], [3])  # both secrets of one site
    with pytest.raises(TacitError, match="a sum over 2 sites, 3 are needed"):
        site.open([0, 1], [2, 3])
    with pytest.raises(TacitError, match="this one among them"):
        site.open([1, 2, 3], [0])
    site.open([0, 1, 2], [3])
    with pytest.raises(TacitError, match="once in a round"):
        site.open([0, 1, 3], [2])  # a second sum, over others


def test_a_site_looks_at_keys_and_shares() -> None:
    one, two, three = (Participant(number, b"run/0") for number in range(3))
    keys = {0: one.keys, 1: two.keys, 2: three.keys}
    with pytest.raises(TacitError, match="one pair for each site"):
        one.share({**keys, 2: two.keys}, 2)
    with pytest.raises(TacitError, match="one pair for each site"):
        one.share({1: two.keys, 2: three.keys}, 2)
    with pytest.raises(TacitError, match="1 of 3 sites cannot be"):
        one.share(keys, 1)
    sealed = two.share(keys, 2)
    one.share(keys, 2)
    with pytest.raises(TacitError, match="not for this site and this round"):
        one.take({1: sealed[2]})
    later = Participant(0, b"run/1")
    later.share({**keys, 0: later.keys}, 2)
    with pytest.raises(TacitError, match="not for this site and this round"):
        later.take({1: sealed[0]})
    with pytest.raises(TacitError, match="1 sites are left in the circle, 2 are needed"):
        one.take({})
    one.take({1: sealed[0]})


# --- At sites, in this process --------------------------------------------------------------------------------------


class Losing(Here):
    """A transport over which some sites do not answer some questions, from a round on or in it alone."""

    def __init__(self, sites: Mapping[str, Site], lost: Mapping[tuple[int, str], set[str]]) -> None:
        super().__init__(sites)
        self.lost = lost
        self.kinds: list[str] = []

    def request(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | NoResponse]:
        responses = super().request(envelopes, patience, done)
        for name, envelope in envelopes.items():
            if envelope.startswith(b"tacit-site"):
                header, _ = unpack(envelope, Request)
                self.kinds.append(header.kind)
                if name in self.lost.get((header.step, header.kind), ()):
                    responses[name] = NoResponse("gone in the middle of the round")
        return responses


def without_faults(experiment: Experiment, folder: Path, clients: tuple[int, ...]) -> Run:
    """The simulation in which only these clients answer."""

    class Few:
        def __init__(self, inner: object) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def run(self, *arguments: object) -> object:
            outcomes = self.inner.run(*arguments)  # type: ignore[attr-defined]
            return [o if o.reply.client in clients else replace(o, fault="gone") for o in outcomes]

    return run_plan(prepare(experiment), folder, lambda plan, run: Few(local_backend(plan, run)), False, NullWatcher())  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("bits", [32, 64])
def test_sites_end_with_the_model_of_the_simulation(bits: int, tmp_path: Path) -> None:
    experiment = simulated("cbafed", "clients", **ON, **{"privacy.bits": bits, "privacy.neighbours": 2})
    local = run_experiment(experiment, tmp_path / "local")
    job, sites = at_sites(experiment, tmp_path)
    run = run_at_sites(job, Here(sites), NullWatcher())
    assert digest(run) == digest(local)
    for record, other in zip(run.records, local.records, strict=True):
        for key in ("accuracy", "answered", "refused", "skipped", "secure_error", "secure_clipped", "client_metrics"):
            assert record[key] == other[key] or (key, record[key]) == ("client_metrics", {})


@pytest.mark.parametrize("kind", ["shares", "masked", "unmask"])
def test_a_site_that_is_gone_in_the_middle_of_a_round_is_survived(kind: str, tmp_path: Path) -> None:
    experiment = simulated("fedavg", "clients", **ON, rounds=1)
    job, sites = at_sites(experiment, tmp_path)
    run = run_at_sites(job, Losing(sites, {(0, kind): {"site-1"}}), NullWatcher())
    (record,) = run.records
    assert record["refused"] == [{"client": 1, "why": "site-1: gone in the middle of the round"}]
    in_sum = (0, 1, 2) if kind == "unmask" else (0, 2)  # its vector had arrived
    assert record["answered"] == list(in_sum)
    assert digest(run) == digest(without_faults(experiment, tmp_path / "local", in_sum))


@pytest.mark.parametrize("kind", SECURE)
def test_with_too_few_sites_the_round_is_skipped_and_the_next_one_counts(kind: str, tmp_path: Path) -> None:
    job, sites = at_sites(simulated("fedavg", "clients", **ON, rounds=2), tmp_path)
    run = run_at_sites(job, Losing(sites, {(0, kind): {"site-0", "site-1"}}), NullWatcher())
    first, second = run.records
    assert first["answered"] == []
    expected = "could not be opened (1 shares" if kind == "unmask" else "1 clients left for a sum, 2 needed"
    assert expected in first["skipped"]
    assert second["answered"] == [0, 1, 2]
    assert not second["skipped"]


def test_a_site_that_was_restarted_in_the_middle_has_lost_its_secrets(tmp_path: Path) -> None:
    job, sites = at_sites(simulated("fedavg", "clients", **ON, rounds=2), tmp_path)

    class Restarting(Losing):
        def request(self, envelopes: Mapping[str, bytes], *rest: object) -> dict[str, bytes | NoResponse]:
            if self.kinds[-3:] == ["shares"] * 3 and "restarted" not in self.kinds:
                self.sites["site-2"] = Site(self.sites["site-2"].settings)
                self.kinds.append("restarted")
            return super().request(envelopes, *rest)  # type: ignore[arg-type]

    run = run_at_sites(job, Restarting(sites, {}), NullWatcher())
    assert run.records[0]["answered"] == [0, 1]
    assert "it knows nothing of this sum" in run.records[0]["refused"][0]["why"]
    assert run.records[1]["answered"] == [0, 1, 2]


def test_stopped_and_gone_on_with_is_the_same(tmp_path: Path) -> None:
    experiment = simulated("fedavg", "clients", **ON, rounds=3)
    local = run_experiment(experiment, tmp_path / "local")
    job, sites = at_sites(experiment, tmp_path)

    class Stop(NullWatcher):
        def client_done(self, round_info: object, done: int, asked: int) -> None:
            if round_info.round == 1 and done == 2:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_at_sites(job, Here(sites), Stop())
    run = run_at_sites(replace(job, resume=True), Here(sites), NullWatcher())  # the same processes: asked anew
    assert digest(run) == digest(local)


def test_nothing_leaves_a_site_in_the_clear(tmp_path: Path) -> None:
    """Neither weights nor counts, examples or losses; and a site refuses a server that asks for them."""
    experiment = simulated("cbafed", "clients", **ON, rounds=1)
    job, sites = at_sites(experiment, tmp_path)
    here = Here(sites)
    run_at_sites(job, here, NullWatcher())
    vectors: list[torch.Tensor] = []
    for envelope, response in here.seen:
        (asked, content), (header, answer) = unpack(envelope, Request), unpack(response, Response)
        assert (header.examples, header.metrics) == (0, {})
        if asked.kind == "hello":
            continue
        sent = payload.from_bytes(answer)
        expected = {"keys": {"mask", "seal"}, "shares": {"sealed"}, "masked": {"masked"}, "unmask": {"seeds", "keys"}}
        assert set(sent) == expected[asked.kind]
        if asked.kind == "masked":
            vectors.append(sent["masked"])  # type: ignore[arg-type]
            assert len(unpacked_bytes(payload.from_bytes(content), "tacit:sealed")) == 2
    high = torch.stack(vectors[:3]).double() / 2.0**31
    assert abs(float(high.mean())) < 0.02  # even over the whole range, where weights lie near zero
    assert 0.56 < float(high.std()) < 0.60
    request, content = next((r, c) for r, c in (unpack(e, Request) for e, _ in here.seen) if r.kind == "masked")
    plain = {name: value for name, value in payload.from_bytes(content).items() if not name.startswith("tacit:")}
    for kind in ("train", "judge"):
        asked = request.model_copy(update={"kind": kind})
        said, _ = unpack(sites[request.site].respond(pack(asked, payload.to_bytes(plain))), Response)
        assert (said.kind, said.why) == (
            "refused",
            "the experiment has secure aggregation: nothing leaves it but masked",
        )


def test_what_is_wrong_with_a_sites_own_reply_stays_there(tmp_path: Path) -> None:
    """The server cannot look at it any more, so the site does, and the sum is made without it."""
    job, sites = at_sites(
        simulated(
            "fedavg", "clients", **ON, **{"rounds": 1, "train.lr": 1e6, "train.clip": 0.0, "train.momentum": 0.0}
        ),
        tmp_path,
    )
    lines: dict[str, list[str]] = {name: [] for name in sites}
    for name, site in sites.items():
        site.say = lines[name].append
    run = run_at_sites(job, Here(sites), NullWatcher())
    (record,) = run.records
    assert {refused["why"].split(": ", 1)[1] for refused in record["refused"]} == {
        "refused: it could not do this; its own log says why"
    }
    assert record["answered"] == []
    said = {name for name, own in lines.items() if any("its own reply is not fit for a sum: 'model/" in t for t in own)}
    assert said == {refused["why"].split(":")[0] for refused in record["refused"]}


def test_the_same_question_twice_has_the_same_answer_and_is_worked_on_once(tmp_path: Path) -> None:
    """Flower may deliver a message twice."""
    job, sites = at_sites(simulated("fedavg", "clients", **ON, rounds=1), tmp_path)

    class Twice(Here):
        def request(self, envelopes: Mapping[str, bytes], *rest: object) -> dict[str, bytes | NoResponse]:
            super().request(envelopes, *rest)  # type: ignore[arg-type]
            return super().request(envelopes, *rest)  # type: ignore[arg-type]

    run = run_at_sites(job, Twice(sites), NullWatcher())
    assert run.records[0]["answered"] == [0, 1, 2]
    assert not run.records[0]["refused"]


def test_a_preview_says_what_changes(tmp_path: Path) -> None:
    experiment = simulated("cbafed", "clients", **ON)
    _, sites = at_sites(experiment, tmp_path)
    words = io.StringIO()
    facts = tmp_path / "parties" / "server" / FACTS
    preview_site(sites["site-0"], experiment, facts, SafeConsole(file=words, width=200))
    said = " ".join(words.getvalue().split())
    assert "None of it leaves as it is, and metrics do not leave at all: secure aggregation is on." in said
    assert "model, counts and the number of examples leave as" in said
