"""What a site accepts from a server, and what the two may make each other do. No Flower here: messages are handed over
in this process."""

import copy
import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runs import TINY, digest
from tacit.config.resolve import build_method, resolve
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.data.party import facts_of
from tacit.engine.run import run_experiment
from tacit.methods import find_method, known_methods
from tacit.runs.folder import Run
from tacit.runs.memory import ClientMemory
from tacit.runs.plan import Plan, prepare
from tacit.runs.watchers import NullWatcher
from tacit.sites.accept import Refusal, experiment_from_wire, for_sites, method_file
from tacit.sites.backend import LEFT_OUT, PING, Federated, Grid, NoResponse, say_hello
from tacit.sites.jobs import Job
from tacit.sites.rehearse import write_parties
from tacit.sites.server import SITES, Roster, roster_of, run_at_sites
from tacit.sites.site import Settings, Site
from tacit.sites.wire import MARK, WHO, Request, Response, SharedFacts, pack, unpack

FEDAVG = {"method.name": "fedavg", "method.preset": "smoke", "data.placement": "clients", "data.clients": 3, **TINY}
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
OWN = """
from dataclasses import dataclass
from typing import ClassVar
from tacit.methods.fedavg import FedAvg
from tacit.contract.method import Method

@dataclass(frozen=True)
class Own(FedAvg):
    word: str = "plain"
    presets: ClassVar = {"paper": {}, "smoke": {}}
    def client_train(self, task, memory, me):
        return super().client_train(task, memory, me)
"""


class Here:
    """A transport without a network. It notes who was asked what, and for how long it would have waited."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = dict(sites)
        self.away: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []
        self.waited = 0.0

    def request(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | NoResponse]:
        responses: dict[str, bytes | NoResponse] = {}
        for name, envelope in envelopes.items():
            self.asked.append((name, "who" if envelope == WHO else unpack(envelope, Request)[0].kind))
            responses[name] = NoResponse(self.away[name]) if name in self.away else self.sites[name].respond(envelope)
            done(name)
        self.waited += patience * any(name in self.away for name in envelopes)
        return responses


@pytest.fixture(scope="module")
def parties(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parties") / "parties"
    write_parties(prepare(resolve(FEDAVG)), folder)
    return folder


def make_sites(parties: Path, memory: Path, **more: Any) -> dict[str, Site]:
    return {f"site-{k}": make_site(parties, memory, f"site-{k}", **more) for k in range(3)}


def make_site(parties: Path, memory: Path, name: str = "site-0", **more: Any) -> Site:
    said: list[str] = more.pop("said", [])
    return Site(Settings(name, parties / name, memory / f"memory-{name}", **more), said.append)


def job_of(parties: Path, folder: Path, **changes: Any) -> Job:
    own = {"data.name": str(parties / "server"), "backend.name": "flower", **changes}
    return Job(resolve(FEDAVG, own).to_dict(), str(folder / "run"), ("site-0", "site-1", "site-2"), wait=0.0)


def federated_of(parties: Path) -> Federated:
    return Federated("r1", ("site-0", "site-1", "site-2"), SharedFacts(**asdict(facts_of(parties / "server"))))


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A Python file in the folder in which the site runs. It leaves a mark when it is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "canary.py"
    path.write_text(f"open({str(tmp_path / 'sings')!r}, 'w').close()\n" + OWN.replace("Own", "Canary"))
    yield path
    sys.modules.pop("tacit_own_canary", None)


def sings(canary: Path) -> bool:
    return (canary.parent / "sings").exists()


# --- One form of an experiment ----------------------------------------------------------------------------


def test_the_canary_sings_where_people_may_name_files(canary: Path) -> None:
    """The control: what a site must never do is what `resolve` does for people, in any of these spellings."""
    for spelling in ({"method.name": str(canary)}, {"method": "./canary.py"}, {"method": {"name": "~/canary.py"}}):
        resolve(spelling)
        assert sings(canary)
        (canary.parent / "sings").unlink()


@pytest.mark.parametrize("name", known_methods())
def test_every_method_travels_in_its_one_form(name: str) -> None:
    method = find_method(name)
    for placement in method.placements:
        for preset in method.presets:
            sent = resolve({"method.name": name, "method.preset": preset, "data.placement": placement, **TINY})
            wire = json.loads(json.dumps(for_sites(sent)))
            used, kind = experiment_from_wire(wire, find_method)
            assert kind is method
            assert build_method(used) == build_method(sent)
            same = {"seed", "rounds", "net", "train", "views", "participation", "keep", "method"}
            assert used.model_dump(include=same) == sent.model_dump(include=same)


def test_nothing_of_the_servers_machine_is_in_it(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    for_people = {"data.sites": [str(tmp_path)], "data.split": str(tmp_path), "title": "secret", "paper.source": "here"}
    far = {"backend.address": "ray://secret:1", "device": "cpu", "data.name": str(tmp_path)}
    text = json.dumps(for_sites(resolve({"method.name": str(own), **for_people, **far})))
    assert str(tmp_path) not in text
    assert "secret" not in text
    assert '"name": "own.py"' in text


LOOK_ALIKES = str.maketrans({"a": "а", "e": "е", "o": "о", "m": "ｍ", "d": "ⅾ", ".": "․", "/": "∕"})


def hostile_words(canary: Path) -> list[str]:
    path = str(canary)
    return [
        path,
        "canary.py",
        "./canary.py",
        "~/canary.py",
        "canary",
        f"file://{path}",
        f"{path}\0",
        path.translate(LOOK_ALIKES),
        "../" * 20 + path,
        "fedavg.py",
        "fedavg\n",
        "ｆedavg",
        "fеdavg",
        "_pseudo",
        "tacit.methods.fedavg",
        "\x1b]0;PWN\x07[/red]",
        "\u202egva",
        "x" * 100_000,
        "\ud800",
    ]


def paths_in(settings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        way
        for key, value in settings.items()
        for way in [(key,), *((key, inner) for inner in (value if isinstance(value, dict) else ()))]
    ]


def put(settings: dict[str, Any], way: tuple[str, ...], value: Any) -> None:
    for key in way[:-1]:
        settings = settings[key] if isinstance(settings.get(key), dict) else settings.setdefault(f"{key}_", {})
    settings[way[-1]] = value


def deep(depth: int) -> Any:
    value: Any = "canary.py"
    for number in range(depth):
        value = [value] if number % 2 else {"name": value}
    return value


@st.composite
def mutations(draw: st.DrawFn, honest: dict[str, Any], words: list[str]) -> dict[str, Any]:
    """An honest experiment with one to three things wrong with it: in a value, or beside it in another spelling."""
    mutant = copy.deepcopy(honest)
    values = st.one_of(
        st.sampled_from(words),
        st.text(max_size=20),
        st.sampled_from([None, True, -1, 0, 1.0, 10**400, -(10**30), 1e308, float("nan"), float("inf"), [], {}]),
        st.builds(deep, st.sampled_from([1, 3, 5, 200])),
        st.lists(st.sampled_from(words), max_size=3),
        st.dictionaries(
            st.sampled_from(["name", "preset", "", "a.b", "__class__"]), st.sampled_from(words), max_size=3
        ),
    )
    for _ in range(draw(st.integers(1, 3))):
        way, value = draw(st.sampled_from(paths_in(honest))), draw(values)
        spelling = draw(st.sampled_from(["same", "dotted", "short", "look-alike", "case", "unknown", "dotted inside"]))
        key = ".".join(way)
        if spelling == "same":
            put(mutant, way, value)
        elif spelling == "dotted":
            mutant[key] = value
        elif spelling == "short":
            mutant[way[0]] = value
        elif spelling == "look-alike":
            put(mutant, (*way[:-1], way[-1].translate(LOOK_ALIKES)), value)
        elif spelling == "case":
            put(mutant, (*way[:-1], way[-1].upper()), value)
        elif spelling == "unknown":
            put(mutant, (*way[:-1], draw(st.text(max_size=10))), value)
        else:
            put(mutant, ("method", key), value)
    return mutant


def test_a_site_never_runs_a_file_and_answers_with_a_refusal(canary: Path, parties: Path) -> None:
    """Aliases, duplicates, dotted keys, look-alikes, paths, depth and size in every field of an experiment."""
    said: list[str] = []
    site = make_site(parties, canary.parent, said=said)
    honest = for_sites(resolve(FEDAVG))
    request = federated_of(parties).request(resolve(FEDAVG), 0, "hello").model_dump()
    assert unpack(site.respond(envelope(request)), Response)[0].kind == "hello"

    @QUICK
    @given(mutations(honest, hostile_words(canary)))
    @example({**honest, "method.name": str(canary)})  # the door that stood open
    @example({**honest, "method": str(canary)})
    @example({**honest, "method": {**honest["method"], "name": str(canary)}})
    @example({**honest, "method": {**honest["method"], "name": "canary.py"}})
    @example({**honest, "data": {**honest["data"], "sites": [str(canary)]}})
    def feed(mutant: dict[str, Any]) -> None:
        response, _ = unpack(site.respond(envelope({**request, "experiment": mutant})), Response)
        assert not sings(canary)
        assert "tacit_own_canary" not in sys.modules
        if response.kind != "refused":  # then it is another honest experiment, in its one form
            used, _ = experiment_from_wire(mutant, find_method)
            assert json.dumps(for_sites(used)) == json.dumps(mutant)
        assert response.why.isprintable()
        assert "its work failed" not in response.why  # refused on purpose, not by accident
        assert all(line.isprintable() and len(line) <= 2000 for line in said)
        said.clear()

    feed()


def envelope(header: Mapping[str, Any], content: bytes = b"") -> bytes:
    """An envelope as somebody writes it who does not use `pack`."""
    text = json.dumps(header).encode()
    return MARK + struct.pack("<I", len(text)) + text + content


def test_no_key_twice_and_no_other_spelling_of_a_header(canary: Path, parties: Path) -> None:
    site = make_site(parties, canary.parent)
    text = json.dumps(federated_of(parties).request(resolve(FEDAVG), 0, "hello").model_dump())
    twice = text.replace('"method": {', f'"method": {{"name": "{canary}", "preset": "paper"}}, "method": {{', 1)
    for other in (twice, text.replace(": ", ":"), text.replace('"seed": 0', '"seed": 0.0'), text + " "):
        assert other != text
        data = other.encode()
        response, _ = unpack(site.respond(MARK + struct.pack("<I", len(data)) + data), Response)
        assert response.kind == "refused"
        assert not sings(canary)


# --- Method files, by digest ------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "own.py"
    path.parent.mkdir()
    path.write_text(OWN)
    return path


def test_an_allowed_file_is_run_and_gives_the_model_of_the_simulation(own: Path, parties: Path, tmp_path: Path) -> None:
    there = tmp_path / "server" / "own.py"
    there.parent.mkdir()
    there.write_bytes(own.read_bytes())
    local = run_experiment(resolve(FEDAVG, {"method.name": str(own)}), tmp_path / "local")
    job = job_of(parties, tmp_path, **{"method.name": str(there)})
    run = run_at_sites(job, Here(make_sites(parties, tmp_path, methods=(own,))), NullWatcher())
    assert digest(run) == digest(local)


def test_another_version_of_a_file_is_refused(own: Path, parties: Path, tmp_path: Path) -> None:
    there = tmp_path / "server" / "own.py"
    there.parent.mkdir()
    there.write_bytes(own.read_bytes() + b"# another version\n")
    job = job_of(parties, tmp_path, **{"method.name": str(there)})
    with pytest.raises(TacitError, match=r"its own\.py is not the server's: it has the digest [0-9a-f]{16}…"):
        run_at_sites(job, Here(make_sites(parties, tmp_path, methods=(own,))), NullWatcher())
    with pytest.raises(TacitError, match=r"it has no method 'own\.py'"):
        run_at_sites(job, Here(make_sites(parties, tmp_path)), NullWatcher())


def test_a_file_that_was_changed_since_the_join_is_refused_and_not_run(
    own: Path, parties: Path, tmp_path: Path
) -> None:
    site = make_site(parties, tmp_path, methods=(own,))
    experiment = resolve(FEDAVG, {"method.name": str(own)})
    before = own.read_bytes()

    def hello() -> Response:
        request = replace(federated_of(parties), method_sha256=sha256).request(experiment, 0, "hello")
        return unpack(site.respond(pack(request)), Response)[0]

    file = method_file(experiment)
    assert file is not None
    sha256 = file.sha256
    assert hello().kind == "hello"
    own.write_bytes(before + f"open({str(tmp_path / 'sings')!r}, 'w').close()\n".encode())
    assert "own.py was changed since it joined" in hello().why
    changed = method_file(experiment)
    assert changed is not None
    sha256 = changed.sha256  # the server has the new file, too: the site's people allowed the old one
    assert "its own.py is not the server's" in hello().why
    own.unlink()
    sha256 = file.sha256
    assert "was changed since it joined" in hello().why
    own.write_bytes(before)
    assert hello().kind == "hello"
    assert not (tmp_path / "sings").exists()


def test_what_is_executed_is_what_was_digested(own: Path, parties: Path, tmp_path: Path) -> None:
    """Between the look at the file and its use the file changes: the old bytes are used."""
    site = make_site(parties, tmp_path, methods=(own,))
    allowed = site.methods["own.py"]
    own.write_text("raise SystemExit")
    assert allowed.kind.__name__ == "Own"
    assert allowed.file.load().__name__ == "Own"  # from its bytes, not from the disk


def test_method_files_that_cannot_be_asked_for_are_told_at_the_join(own: Path, parties: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "own.py"
    other.parent.mkdir()
    other.write_text(OWN)
    odd = tmp_path / "my method.py"
    odd.write_text(OWN)
    for files, why in (
        ((own, other), "Two method files have the name own.py"),
        ((odd,), "cannot be asked for by that name"),
        ((tmp_path / "none.py",), "There is no method file"),
    ):
        with pytest.raises(TacitError, match=why):
            make_site(parties, tmp_path, methods=files)


# --- Messages that would end the process ------------------------------------------------------------------


def test_no_message_ends_a_site(parties: Path, tmp_path: Path) -> None:
    """Mutated envelopes, in the header and in the payload: always an answer that the server can read."""
    said: list[str] = []
    site = make_site(parties, tmp_path, said=said)
    experiment = resolve(FEDAVG, {"net.name": "cnn-2", "data.subset": 100})
    federated = federated_of(parties)
    model = payload.to_bytes({"model": prepare(experiment).setup.build().state_dict()})
    train = federated.request(experiment, 0, "train", stage="main", round=0, rounds=2)
    honest = [pack(federated.request(experiment, 0, "hello")), pack(train, model)]
    assert [unpack(site.respond(data), Response)[0].kind for data in honest] == ["hello", "train"]
    words = ["", "x" * 1000, "\x1b[2J", "\u202e", "../..", "main\n", "canary.py"]
    values = st.one_of(
        st.sampled_from([None, True, -1, 2**31, 10**400, 1e400, [], {}, [[]], deep(900)]), st.sampled_from(words)
    )

    @st.composite
    def mutants(draw: st.DrawFn) -> bytes:
        header, content = train.model_dump(), bytearray(model)
        what = draw(st.sampled_from(["header", "facts", "bytes", "cut", "content"]))
        if what == "header":
            header[draw(st.sampled_from([*header, "extra"]))] = draw(values)
        elif what == "facts":
            header["facts"][draw(st.sampled_from([*header["facts"], "extra"]))] = draw(values)
        data = bytearray(envelope(header, bytes(content)))
        if what == "bytes":
            for place in draw(st.lists(st.integers(0, 3000), min_size=1, max_size=5)):
                data[place] = draw(st.integers(0, 255))
        elif what == "cut":
            del data[draw(st.integers(0, len(data))) :]
        elif what == "content":
            start = len(data) - len(content)
            for place in draw(st.lists(st.integers(start, len(data) - 1), min_size=1, max_size=5)):
                data[place] = draw(st.integers(0, 255))
        return bytes(data)

    @settings(QUICK, max_examples=150)
    @given(mutants())
    @example(envelope({**train.model_dump(), "stage": "x\x1b]0;PWN\x07"}, model))
    @example(envelope({**train.model_dump(), "stage": "none"}, model))
    @example(pack(train, payload.to_bytes({"model": {"a" * 9: torch.zeros(2)}}).replace(b"a" * 9, rb"\u001b[2J")))
    @example(pack(train, payload.to_bytes({})))
    def feed(data: bytes) -> None:
        response, _ = unpack(site.respond(data), Response)
        assert response.kind in ("refused", "train", "hello")
        assert response.why.isprintable()
        assert all(line.isprintable() and len(line) <= 2000 for line in said)
        said.clear()

    feed()


def test_a_method_that_exits_and_a_terminal_that_is_gone_do_not_end_a_site(parties: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN.replace("return super", "raise SystemExit\n        return super"))
    experiment = resolve(FEDAVG, {"method.name": str(path)})
    file = method_file(experiment)
    assert file is not None
    federated = replace(federated_of(parties), method_sha256=file.sha256)

    def say(text: str) -> None:
        raise BrokenPipeError

    site = Site(Settings("site-0", parties / "site-0", tmp_path, (path,)), say)
    train = federated.request(experiment, 0, "train", stage="main", round=0, rounds=2)
    response, _ = unpack(site.respond(pack(train, payload.to_bytes({}))), Response)
    assert "its work failed (SystemExit)" in response.why
    assert unpack(site.respond(pack(federated.request(experiment, 0, "hello"))), Response)[0].kind == "hello"


def test_too_large_a_message_is_not_looked_at(parties: Path, tmp_path: Path) -> None:
    said: list[str] = []
    site = make_site(parties, tmp_path, said=said, largest=5000)
    response, _ = unpack(site.respond(pack(Response(kind="hello"), b"x" * 6000)), Response)
    assert response.kind == "refused"
    assert "at most 5000 were expected" in said[0]


# --- What a site says -------------------------------------------------------------------------------------


HOSTILE_TEXT = "\x1b]0;PWN\x07[/red]\u202e" * 40


def test_what_a_site_says_is_bounded_and_printable_at_the_server(parties: Path, tmp_path: Path) -> None:
    class Liar(Site):
        def respond(self, data: bytes) -> bytes:
            return pack(Response(kind="refused", why=HOSTILE_TEXT))

    sites = make_sites(parties, tmp_path)
    liar = Liar(sites["site-1"].settings)
    with pytest.raises(TacitError) as caught:
        run_at_sites(job_of(parties, tmp_path), Here({**sites, "site-1": liar}), NullWatcher())
    lines = str(caught.value).splitlines()
    assert len(lines) == 2
    assert all(line.isprintable() and len(line) < 500 for line in lines)
    assert "site-1: " in lines[1]

    here = Here(sites)

    class Later(NullWatcher):
        def start(self, plan: Plan, done: int) -> None:
            here.sites["site-1"] = liar

    run = run_at_sites(job_of(parties, tmp_path), here, Later())
    for record in run.records:
        (refused,) = record["refused"]
        assert refused["why"].startswith("site-1: refused: ")
        assert refused["why"].isprintable()
        assert len(refused["why"]) < 500


def test_odd_keys_of_an_answer_are_named_shortly() -> None:
    for header in ({"kind": "hello", "x" * 900_000: 1}, {"kind": "train", "metrics": {"\x1b[2J": 1.0}}):
        with pytest.raises(TacitError) as caught:
            unpack(envelope(header), Response)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 400


# --- A silent site ----------------------------------------------------------------------------------------


def silent_run(parties: Path, tmp_path: Path, back: int | None, rounds: int = 5) -> tuple[Run, Here]:
    """Site-1 gives no answer in the second round, and is heard of again after the round `back`."""
    here = Here(make_sites(parties, tmp_path))

    class Away(NullWatcher):
        def round_done(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 0:
                here.away["site-1"] = "no answer within 3600 s"
            if record["round"] == back:
                here.away.clear()

    return run_at_sites(job_of(parties, tmp_path, rounds=rounds), here, Away()), here


def test_a_silent_site_costs_its_patience_once(parties: Path, tmp_path: Path) -> None:
    run, here = silent_run(parties, tmp_path, back=None)
    why = [[refused["why"] for refused in record["refused"]] for record in run.records]
    assert why[0] == []
    assert why[1] == ["site-1: no answer within 3600 s"]
    skipped = "site-1: not asked: silent since main round 2 (no answer within 3600 s), and not heard of again"
    assert why[2:] == [[skipped]] * 3
    assert [kind for name, kind in here.asked if name == "site-1"] == ["hello", "train", "train", "who", "who", "who"]
    assert here.waited == 3600 + 3 * PING
    assert all(record["answered"] == [0, 2] for record in run.records[1:])


def test_a_site_that_is_heard_of_again_is_asked_again(parties: Path, tmp_path: Path) -> None:
    run, _ = silent_run(parties, tmp_path, back=2)
    assert [record["answered"] for record in run.records] == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]


def test_a_site_that_says_another_name_was_not_heard_of(parties: Path, tmp_path: Path) -> None:
    here = Here(make_sites(parties, tmp_path))

    class Swapped(NullWatcher):
        def round_done(self, record: Mapping[str, Any]) -> None:
            here.away = {"site-1": "gone"} if record["round"] == 0 else {}
            if record["round"] == 1:
                here.sites["site-1"] = here.sites["site-2"]

    run = run_at_sites(job_of(parties, tmp_path, rounds=3), here, Swapped())
    assert [record["answered"] for record in run.records] == [[0, 1, 2], [0, 2], [0, 2]]
    assert "not heard of again" in run.records[2]["refused"][0]["why"]


class BusyGrid:
    """Flower's grid with one node, on a machine that is so busy that the first pushes fail."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.since = "12:00"
        self.pushed: list[Any] = []

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(node_id=7, name="site-0", status="online", last_activated_at=self.since)]

    def push_messages(self, messages: list[Any]) -> list[str]:
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

        self.failures -= 1
        if self.failures >= 0:
            raise ObjectPushError("o", 1, "s")
        self.pushed += messages
        return [f"message-{number}" for number in range(len(messages))]

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        about = SimpleNamespace(reply_to_message_id=numbers[0])
        return [SimpleNamespace(metadata=about, has_error=lambda: False, content=self.pushed[0].content)]


class RestartedGrid(BusyGrid):
    """The node takes the message, is killed, and is back before anybody looked: no answer ever comes."""

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        self.since = "12:01"
        return []


def test_a_site_that_was_restarted_meanwhile_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)
    monkeypatch.setattr("tacit.sites.backend.LOOK", 0.0)
    found = Grid(RestartedGrid(0)).request({"site-0": b"work"}, 300.0, lambda name: None)
    assert found == {"site-0": NoResponse("restarted in the middle of the round")}


def test_a_push_that_flower_gave_up_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity  # Flower's own processes set it
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)
    assert Grid(BusyGrid(2)).request({"site-0": b"hello"}, 5.0, lambda name: None) == {"site-0": b"hello"}
    with pytest.raises(TacitError, match="did not take the messages"):
        Grid(BusyGrid(9)).request({"site-0": b"hello"}, 5.0, lambda name: None)


# --- Who takes part, and with how many images -------------------------------------------------------------


def test_sites_register_their_images_once(parties: Path, tmp_path: Path) -> None:
    seen: list[Plan] = []

    class Look(NullWatcher):
        def start(self, plan: Plan, done: int) -> None:
            seen.append(plan)

    sites = make_sites(parties, tmp_path)
    run = run_at_sites(job_of(parties, tmp_path), Here(sites), Look())
    split = prepare(resolve(FEDAVG)).split
    sizes = tuple(len(part.labeled) + len(part.unlabeled) for part in split.clients)
    assert seen[0].registered == sizes  # as in a simulation on the same data
    roster = roster_of(run.folder)
    assert (roster.images, roster.labeled, roster.left_out) == (sizes, (0, 1, 2), ())


def test_a_site_with_other_data_than_before_is_named(parties: Path, tmp_path: Path) -> None:
    job = job_of(parties, tmp_path, rounds=3)
    stop_after(1, job, Here(make_sites(parties, tmp_path)))
    roster = roster_of(Path(job.out))
    assert roster.images is not None
    replace(roster, images=(roster.images[0] + 7, *roster.images[1:])).save(Path(job.out))
    run = run_at_sites(replace(job, resume=True), Here(make_sites(parties, tmp_path)), NullWatcher())
    assert run.summary is not None
    told = f"site-0 registered {roster.images[0] + 7} images at first, and {roster.images[0]} now"
    assert told in run.summary["warnings"]
    assert roster_of(run.folder).images == roster.images


def stop_after(rounds: int, job: Job, here: Here) -> None:
    class Stop(NullWatcher):
        def round_done(self, record: Mapping[str, Any]) -> None:
            if record["round"] == rounds - 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_at_sites(job, here, Stop())


def test_a_site_is_left_out_for_good_and_numbers_stay(parties: Path, tmp_path: Path) -> None:
    job = job_of(parties, tmp_path, rounds=4)
    stop_after(1, job, Here(make_sites(parties, tmp_path)))
    here = Here(make_sites(parties, tmp_path))
    stop_after(3, replace(job, resume=True, without=("site-1",)), here)
    assert "site-1" not in {name for name, _ in here.asked}  # not even for a hello
    saved = json.loads((tmp_path / "run" / SITES).read_text())
    assert saved["left_out"] == ["site-1"]
    assert saved["sites"] == ["site-0", "site-1", "site-2"]
    again = Here(make_sites(parties, tmp_path))
    fewer = replace(job, resume=True, sites=("site-0", "site-2"))  # its key was removed, too
    run = run_at_sites(fewer, again, NullWatcher())  # the run remembers
    assert "site-1" not in {name for name, _ in again.asked}
    assert [record["answered"] for record in run.records] == [[0, 1, 2], [0, 2], [0, 2], [0, 2]]
    assert [record["asked"] for record in run.records] == [[0, 1, 2]] * 4
    for record in run.records[1:]:
        assert record["refused"] == [{"client": 1, "why": f"site-1: {LEFT_OUT}"}]
    assert roster_of(run.folder).labeled == (0, 1, 2)  # what it said earlier stays


def test_a_run_goes_back_and_on_without_the_site_that_poisoned_it(parties: Path, tmp_path: Path) -> None:
    """As if the site had been left out from that round on: the same model, though it took part in the meantime."""
    job = job_of(parties, tmp_path / "one", rounds=4)
    stop_after(1, job, Here(make_sites(parties, tmp_path / "one")))
    clean = run_at_sites(
        replace(job, resume=True, without=("site-1",)), Here(make_sites(parties, tmp_path / "one")), NullWatcher()
    )
    job = job_of(parties, tmp_path / "two", rounds=4)
    stop_after(2, job, Here(make_sites(parties, tmp_path / "two")))
    assert Run(tmp_path / "two" / "run").records[1]["answered"] == [0, 1, 2]
    with pytest.raises(TacitError, match="cannot go back to round 9"):
        run_at_sites(
            replace(job, resume=True, from_round=9), Here(make_sites(parties, tmp_path / "two")), NullWatcher()
        )
    back = replace(job, resume=True, from_round=1, without=("site-1",))
    again = run_at_sites(back, Here(make_sites(parties, tmp_path / "two")), NullWatcher())
    assert [record["answered"] for record in again.records] == [[0, 1, 2], [0, 2], [0, 2], [0, 2]]
    assert all(torch.equal(tensor, clean.weights[name]) for name, tensor in again.weights.items())


def test_who_cannot_be_left_out_is_told(parties: Path, tmp_path: Path) -> None:
    job = job_of(parties, tmp_path, rounds=2)
    with pytest.raises(TacitError, match=r"--without and --from-round are for going on with a run"):
        run_at_sites(replace(job, without=("site-1",)), Here({}), NullWatcher())
    stop_after(1, job, Here(make_sites(parties, tmp_path)))
    for without, why in (
        (("site-9",), "no such site. It has: site-0, site-1, site-2"),
        (("site-0", "site-1", "site-2"), "no site that could be asked"),
    ):
        with pytest.raises(TacitError, match=why):
            run_at_sites(replace(job, resume=True, without=without), Here({}), NullWatcher())
    with pytest.raises(TacitError, match="use --without"):
        run_at_sites(replace(job, resume=True, sites=("site-0", "site-2")), Here({}), NullWatcher())


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"run": 1, "sites": 3}', '{"run": "a", "sites": [], "images": [{}]}']
)
def test_a_damaged_list_of_sites_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / SITES).write_text(text)
    with pytest.raises(TacitError, match=r"no run at sites that can be gone on with \(sites\.json"):
        roster_of(tmp_path)


def test_lists_of_sites_of_older_runs_can_be_read(tmp_path: Path) -> None:
    (tmp_path / SITES).write_text('{"run": "a", "sites": ["x", "y"]}\n')
    assert roster_of(tmp_path) == Roster("a", ("x", "y"))


def test_a_hello_forgets_what_was_kept_in_rounds_that_are_run_again(parties: Path, tmp_path: Path) -> None:
    site = make_site(parties, tmp_path)
    federated, experiment = federated_of(parties), resolve(FEDAVG)
    kept = ClientMemory(site.settings.memory / "kept" / federated.run, experiment.keep)
    for step in (1, 4):
        kept.write(0, step, 0, {f"from-{step}": step})
    say_hello(experiment, replace(federated, sites=("site-0",)), Here({"site-0": site}), 1.0, done=3)
    assert kept.read(0, 9, 0) == {"from-1": 1}


def experiment_for(given: Mapping[str, Any]) -> Experiment:
    return experiment_from_wire(given, find_method)[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"method.name": "fedavg"}, "has the key 'method.name'"),
        ({"extra": 1}, "There is no setting 'extra'"),
        ({"seed": True}, "seed = True"),
        ({"seed": 2**70}, "beyond 64 bits"),
        ({"rounds": 3.0}, r"not in the form in which tacit sends it \(rounds\)"),
        ({"title": "mine"}, r"not in the form in which tacit sends it \(title\)"),
        ({"device": "cuda"}, r"not in the form in which tacit sends it \(device\)"),
        ({"method": "fedavg"}, "does not fit its tacit: method"),
        ({"method": {}}, "names no method"),
        ({"net": {}}, r"not in the form in which tacit sends it \(net\.name\)"),
        ({"paper": None}, "'paper' is neither a number nor a word"),
    ],
    ids=lambda value: json.dumps(value)[:30] if isinstance(value, dict) else "",
)
def test_why_an_experiment_is_refused(change: dict[str, Any], why: str) -> None:
    honest = json.loads(json.dumps(for_sites(resolve(FEDAVG))))
    assert experiment_for(honest)
    with pytest.raises(Refusal, match=why):
        experiment_for({**honest, **change})
