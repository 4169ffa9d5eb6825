"""Sites without Flower: the same code, with the messages handed over in this process. Flower itself is in
test_sites_flower.py."""

import io
import json
import shutil
import socket
import ssl
import struct
import threading
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from runs import TINY, digest
from tacit.config.resolve import resolve
from tacit.contract.method import Task
from tacit.core import payload
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.payload import Limits
from tacit.core.settings import Experiment
from tacit.data.party import FACTS, Facts, facts_of, load_party, read_facts
from tacit.engine.run import run_experiment
from tacit.methods import find_method, known_methods
from tacit.report.collect import collect
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, prepare
from tacit.runs.watchers import NullWatcher
from tacit.sites import process
from tacit.sites.backend import NoResponse, read_reply
from tacit.sites.home import init_server, init_site, read_home, site_home
from tacit.sites.jobs import Job
from tacit.sites.keeper import check_certificate
from tacit.sites.preview import preview_site, replies
from tacit.sites.rehearse import write_parties
from tacit.sites.relay import SOCKET, RelayServer, send_request
from tacit.sites.server import run_at_sites
from tacit.sites.site import Settings, Site, sent
from tacit.sites.wire import MARK, Request, Response, pack, unpack

SMOKE = {"method.preset": "smoke", "data.clients": 3, **TINY}


class Here:
    """A transport without a network: sites answer one after the other, the last one first."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = dict(sites)
        self.seen: list[tuple[bytes, bytes]] = []

    def request(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | NoResponse]:
        responses: dict[str, bytes | NoResponse] = {}
        for name, envelope in reversed(list(envelopes.items())):
            response = self.sites[name].respond(envelope)
            self.seen.append((envelope, response))
            responses[name] = response
            done(name)
        return responses


def simulated(method: str, placement: str, **more: object) -> Experiment:
    return resolve({"method.name": method, "data.placement": placement, **SMOKE}, more)


def at_sites(experiment: Experiment, folder: Path, **more: object) -> tuple[Job, dict[str, Site]]:
    """The parties of a simulation as folders, a site for each, and the job of running over them."""
    if not (folder / "parties").exists():
        write_parties(prepare(experiment), folder / "parties")
    sites = {
        f"site-{k}": Site(Settings(f"site-{k}", folder / "parties" / f"site-{k}", folder / f"memory-{k}"))
        for k in range(3)
    }
    changes = {"data.name": str(folder / "parties" / "server"), "backend.name": "flower", **more}
    return Job(resolve(experiment.to_dict(), changes).to_dict(), str(folder / "run"), tuple(sites)), sites


PAIRS = [(name, find_method(name).placements[0]) for name in known_methods()]
PAIRS += [(name, place) for name in ("cbafed", "feddb") for place in find_method(name).placements[1:]]


@pytest.mark.parametrize(("name", "placement"), PAIRS, ids=[f"{n}-{p}" for n, p in PAIRS])
def test_sites_end_with_the_model_of_the_simulation(name: str, placement: str, tmp_path: Path) -> None:
    experiment = simulated(name, placement)
    local = run_experiment(experiment, tmp_path / "local")
    job, sites = at_sites(experiment, tmp_path)
    run = run_at_sites(job, Here(sites), NullWatcher())
    assert digest(run) == digest(local)
    assert [r.get("accuracy") for r in run.records] == [r.get("accuracy") for r in local.records]
    assert not any(record["refused"] for record in run.records)
    assert not run.memory_folder.exists()


def test_what_is_frozen_is_not_sent_and_must_be_the_same_at_a_site(tmp_path: Path) -> None:
    experiment = simulated("fedavg", "clients", **{"net.train": "head", "rounds": 1})
    job, sites = at_sites(experiment, tmp_path)
    here = Here(sites)
    run = run_at_sites(job, here, NullWatcher())
    assert digest(run) == digest(run_experiment(experiment, tmp_path / "simulation"))
    envelope, response = here.seen[-1]
    request, content = unpack(envelope, Request)
    assert set(payload.from_bytes(content)["model"]) == {"fc.weight", "fc.bias"}
    assert set(payload.from_bytes(unpack(response, Response)[1])["model"]) == {"fc.weight", "fc.bias"}
    another = request.model_copy(update={"frozen_sha256": "0" * 64})
    refused, _ = unpack(sites[request.site].respond(pack(another, content)), Response)
    assert refused.kind == "refused"
    assert "is not the server's" in refused.why
    weights = {"net.weights": str(run.folder), "net.weights_digest": ""}
    other = replace(job, experiment=resolve(job.experiment, weights).to_dict())
    with pytest.raises(TacitError, match="sites do not have the file"):
        run_at_sites(other, here, NullWatcher())


def test_stopped_and_gone_on_with_is_the_same(tmp_path: Path) -> None:
    """Stopped in the middle of the second round, when one site has already kept something."""
    experiment = simulated("bsemifl", "server", rounds=3)
    local = run_experiment(experiment, tmp_path / "local")
    job, sites = at_sites(experiment, tmp_path)

    class Stop(NullWatcher):
        def client_done(self, round_info: object, done: int, asked: int) -> None:
            if round_info.round == 1 and done == 2:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_at_sites(job, Here(sites), Stop())
    again = {name: Site(site.settings) for name, site in sites.items()}  # new processes, the same disks
    run = run_at_sites(replace(job, resume=True), Here(again), NullWatcher())
    assert digest(run) == digest(local)
    assert len({path.parent.parent for path in tmp_path.glob("memory-*/kept/*/*/*")}) == 3  # one run each, not two


def test_memory_that_a_site_lost_is_noticed(tmp_path: Path) -> None:
    """One file of it: the site refuses, and says where to look. All of it: the server is told who began anew."""
    job, sites = at_sites(simulated("bsemifl", "server", rounds=2), tmp_path)

    class Stop(NullWatcher):
        def round_done(self, record: Mapping[str, object]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_at_sites(job, Here(sites), Stop())
    lines: list[str] = []
    (lost,) = (tmp_path / "memory-1").glob("kept/*/*/local@*")
    lost.unlink()
    again = sites | {"site-1": Site(sites["site-1"].settings, lines.append)}
    with pytest.raises(TacitError, match="site-1: what it kept in earlier rounds is missing or damaged"):
        run_at_sites(replace(job, resume=True), Here(again), NullWatcher())
    assert lost.name in lines[0]
    (ledger,) = (tmp_path / "memory-1").glob("kept/*.json")
    ledger.write_text("[]")
    with pytest.raises(TacitError, match="site-1: what it kept"):
        run_at_sites(replace(job, resume=True), Here(sites), NullWatcher())
    shutil.rmtree(tmp_path / "memory-1")
    warnings: list[str] = []

    class Listen(NullWatcher):
        def start(self, plan: Plan, done: int) -> None:
            warnings.extend(plan.warnings)

    run = run_at_sites(replace(job, resume=True), Here(sites), Listen())
    assert len(run.records) == 2
    assert [warning.split()[0] for warning in warnings if "no memory of it" in warning] == ["site-1"]


def test_images_that_a_server_asks_for_must_fit_into_a_sites_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint(tmp_path / "party" / "unlabeled" / "a.png", 3)
    monkeypatch.setattr("tacit.core.memory_bounds.machine_memory", lambda: 1 << 20)
    load_party(tmp_path / "party", Facts(("a", "b"), 1, 64, (0.5,), (0.5,)))
    with pytest.raises(TacitError, match="images of 4096×4096 pixels"):
        load_party(tmp_path / "party", Facts(("a", "b"), 1, 4096, (0.5,), (0.5,)))


def test_nothing_but_the_reply_leaves_a_site_and_nothing_of_the_servers_machine_arrives(tmp_path: Path) -> None:
    experiment = simulated("bsemifl", "server", title="secret plan")
    job, sites = at_sites(experiment, tmp_path)
    here = Here(sites)
    run_at_sites(job, here, NullWatcher())
    for envelope, response in here.seen:
        assert str(tmp_path).encode() not in envelope + response
        assert b"secret plan" not in envelope
        header, content = unpack(response, Response)
        assert header.kind == "hello" or set(payload.from_bytes(content)) == {"model"}
        assert len(content) < 110_000  # weights; no image would fit beside them unnoticed


def test_a_site_that_is_away_or_fails_is_named_and_the_round_goes_on(tmp_path: Path) -> None:
    experiment = simulated("fedavg", "clients")
    job, sites = at_sites(experiment, tmp_path)
    here = Here(sites)
    request = here.request

    def broken(envelopes: Mapping[str, bytes], *rest: object) -> dict[str, bytes | NoResponse]:
        hello = not here.seen
        responses = request(envelopes, *rest)  # type: ignore[arg-type]
        return responses if hello else {**responses, "site-1": NoResponse("it is not there")}

    here.request = broken  # type: ignore[method-assign]
    run = run_at_sites(job, here, NullWatcher())
    assert run.records[0]["answered"] == [0, 2]
    assert run.records[0]["refused"] == [{"client": 1, "why": "site-1: it is not there"}]


def test_a_site_that_is_away_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    job, sites = at_sites(simulated("fedavg", "clients"), tmp_path)
    here = Here(sites)
    request, asked = here.request, []

    def late(envelopes: Mapping[str, bytes], *rest: object) -> dict[str, bytes | NoResponse]:
        asked.append(sorted(envelopes))
        responses = request(envelopes, *rest)  # type: ignore[arg-type]
        return responses if len(asked) > 1 else {**responses, "site-1": NoResponse("gone")}

    here.request = late  # type: ignore[method-assign]
    assert run_at_sites(job, here, NullWatcher()).records[0]["answered"] == [0, 1, 2]
    assert asked[:2] == [["site-0", "site-1", "site-2"], ["site-1"]]


# --- What a site refuses ----------------------------------------------------------------------------------


def refusal(job: Job, sites: dict[str, Site]) -> str:
    with pytest.raises(TacitError) as caught:
        run_at_sites(job, Here(sites), NullWatcher())
    assert not Path(job.out).exists()
    return str(caught.value)


def test_sites_say_no_before_the_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = simulated("fedavg", "clients")
    job, sites = at_sites(experiment, tmp_path)
    away = {**sites, "site-1": Site(replace(sites["site-1"].settings, name="somebody"))}
    assert "site-1: the server takes it for 'site-1', but it is 'somebody'" in refusal(job, away)

    at_server = replace(
        job, experiment=simulated("fedavg", "server", **{"data.name": job.experiment["data"]["name"]}).to_dict()
    )
    assert "it holds labels, but the recipe has them at the server alone" in refusal(at_server, sites)

    (tmp_path / "evil.py").write_text("raise SystemExit('this file was run')")
    lie = replace(job, experiment={**job.experiment, "method": {"name": "fedavg", "preset": "smoke"}})
    monkeypatch.setattr(
        "tacit.sites.backend.for_sites", lambda e: {**e.to_dict(), "method": {"name": str(tmp_path / "evil.py")}}
    )
    assert "a site takes no paths from elsewhere" in refusal(lie, sites)  # more in test_site_door.py
    monkeypatch.undo()

    monkeypatch.setattr("tacit.sites.site.__version__", "9.9")
    monkeypatch.setattr("tacit.sites.backend.__version__", "0.0")
    assert "it runs tacit 9.9, the server 0.0: install the same version" in refusal(job, sites)


def test_what_goes_wrong_with_the_data_stays_at_the_site(tmp_path: Path) -> None:
    experiment = simulated("fedavg", "clients")
    job, sites = at_sites(experiment, tmp_path)
    table = tmp_path / "parties" / "site-2" / "images.csv"
    table.write_text(table.read_text().replace("images/", "images/patient-Jane-Doe-"))
    said: list[str] = []
    sites["site-2"] = Site(sites["site-2"].settings, said.append)
    told = refusal(job, sites)
    assert "site-2: its data does not fit" in told
    assert "Jane" not in told
    assert any("Jane" in line for line in said)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"data.reveal": "all"}, "simulations only"), ({"keep.latest": 1}, "each site has its own disk")],
    ids=["reveal", "keep"],
)
def test_what_only_a_simulation_can_do_is_refused(change: dict, why: str, tmp_path: Path) -> None:
    job, sites = at_sites(simulated("fedavg", "clients"), tmp_path, **change)
    assert why in refusal(job, sites)


def test_flower_is_no_backend_of_a_simulation(tmp_path: Path) -> None:
    with pytest.raises(TacitError, match="tacit site run"):
        run_experiment(simulated("fedavg", "clients", **{"backend.name": "flower"}), tmp_path / "run")


# --- Hostile bytes ----------------------------------------------------------------------------------------


def header_of(tensors: dict, order: object, **metadata: str) -> bytes:
    about = {"format": payload.FORMAT, "order": order if isinstance(order, str) else json.dumps(order), **metadata}
    text = json.dumps({"__metadata__": about, **tensors}).encode()
    return struct.pack("<Q", len(text)) + text


def one(dtype: str, shape: list[int], size: int) -> bytes:
    """A payload with one tensor of this type and shape, and this many bytes for it."""
    about = {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}
    return header_of({"t": about}, [["t", "tensor"]]) + b"1" * size


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
DEEP = '{"__metadata__": ' + "[" * 100_000 + "]" * 100_000 + "}"
HOSTILE = {
    "header longer than the file": struct.pack("<Q", 1 << 40) + b"{}",
    "negative length": b"\xff" * 8 + b"{}",
    "deep header": struct.pack("<Q", len(DEEP)) + DEEP.encode(),
    "deep order": header_of({}, "[" * 100_000),
    "huge shape, no data": one("F32", [2**40, 2**20], 0),
    "a shape beyond 64 bits": one("F32", [2**62, 2**62, 0], 4),
    "empty with a huge axis": one("F32", [0, 2**63], 0),
    "overlapping tensors": header_of({"a": F32, "b": F32}, [["a", "tensor"], ["b", "tensor"]]) + b"1234",
    "8-bit floats": one("F8_E4M3", [1], 1),
    "complex numbers": one("C64", [1], 8),
    "many axes": one("U8", [1] * 30, 1),
    "a tensor nobody names": header_of({"t": F32}, []) + b"1234",
    "a name twice": header_of({"t": F32}, [["t", "tensor"], ["t", "int", 1]]) + b"1234",
    "a group in a group": header_of({"t": F32}, [["m", "group", [["t"]]]]) + b"1234",
    "a number that is a list": header_of({}, [["n", "int", [1]]]),
    "a float beyond floats": header_of({}, [["n", "float", "0x1p99999"]]),
    "a name with a slash": header_of({}, [["a/b", "int", 1]]),
    "an unknown kind": header_of({}, [["n", "python/object", "os.system"]]),
    "other safetensors": save({"t": torch.zeros(2)}),
    "a pickle": b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_payloads_are_refused(name: str) -> None:
    with pytest.raises(TacitError, match="not a payload of tacit"):
        payload.from_bytes(HOSTILE[name])
    envelope = pack(Response(kind="train"), HOSTILE[name])
    with pytest.raises(TacitError, match="not a payload of tacit"):
        read_reply(envelope, Task(0, {}), 1 << 20)


def test_limits_hold_before_anything_is_made() -> None:
    data = payload.to_bytes({"model": {f"w{i}": torch.zeros(10) for i in range(20)}})
    assert len(payload.from_bytes(data)["model"]) == 20  # type: ignore[arg-type]
    for limits in (Limits(total=len(data) - 1), Limits(tensors=19), Limits(header=100)):
        with pytest.raises(TacitError, match="at most"):
            payload.from_bytes(data, limits)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hello",
        MARK,
        MARK + struct.pack("<I", 1 << 31) + b"{}",
        MARK + struct.pack("<I", 2) + b"[]",
        MARK + struct.pack("<I", 200_000) + b"[" * 200_000,
        pack(Response(kind="train")).replace(b'"examples": 0.0', b'"examples": "9"'),
        pack(Response(kind="train")).replace(b'"client": 0', b'"client": -1'),
        pack(Response(kind="train", why="x" * 1000)).replace(b"xx", b'x", "extra": "', 1),
    ],
)
def test_hostile_envelopes_are_refused(data: bytes) -> None:
    with pytest.raises(TacitError):
        unpack(data, Response)


def test_a_reply_far_too_large_or_to_another_question_is_refused() -> None:
    task = Task(1, {"model": {"w": torch.zeros(10)}})
    large = pack(Response(kind="train", client=1), b"x" * 5_000)
    with pytest.raises(TacitError, match=r"an answer of \d+ bytes, at most 4000 were expected"):
        read_reply(large, task, 4_000)
    with pytest.raises(TacitError, match="another question"):
        read_reply(pack(Response(kind="train", client=2), payload.to_bytes({})), task, 4_000)


def test_a_site_answers_strange_bytes_without_a_word_of_itself(tmp_path: Path) -> None:
    said: list[str] = []
    site = Site(Settings("a", tmp_path, tmp_path), said.append)
    for data in (b"", b"hello", pack(Response(kind="hello"))):
        header, rest = unpack(site.respond(data), Response)
        assert (header.kind, rest) == ("refused", b"")
    assert len(said) == 3


# --- The doors that Flower leaves open (the guard of the server's port is in test_guard.py) -----------------


def bundle(**changes: bytes) -> bytes:
    files = {**process.own_app(), ".info/CONTENT": b"...", **changes}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return file.getvalue()


def test_a_site_runs_its_own_app_and_no_other() -> None:
    assert process.same_app(bundle())
    client = process.own_app()["tacit_site/client_app.py"]
    pyproject = process.own_app()["pyproject.toml"]
    assert not process.same_app(bundle(**{"tacit_site/client_app.py": client + b"\nimport os"}))
    assert not process.same_app(bundle(**{"tacit/__init__.py": b""}))  # would be imported instead of the real one
    assert not process.same_app(bundle(**{"sitecustomize.py": b""}))
    assert not process.same_app(
        bundle(**{"pyproject.toml": pyproject.replace(b"tacit_site.client_app:app", b"os:system")})
    )
    assert not process.same_app(b"no zip")


def test_flower_builds_the_bundle_that_sites_accept() -> None:
    build = pytest.importorskip("flwr.cli.build")
    assert process.same_app(build.build_fab_from_files(process.own_app())[0])


# --- Folders, keys, commands ------------------------------------------------------------------------------


def test_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography import x509

    init_server(tmp_path / "server", ("hospital.example", "10.1.2.3"), "0.0.0.0", 8443, insecure=False)
    init_site(tmp_path / "site", "north", "hospital.example:8443", insecure=False)
    for name in ("server/ca.key", "server/server.key", "site/key"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    names = x509.load_pem_x509_certificate((tmp_path / "server" / "server.crt").read_bytes()).extensions
    alternative = names.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"hospital.example", "localhost"} <= set(alternative.get_values_for_type(x509.DNSName))
    assert "10.1.2.3" in {str(address) for address in alternative.get_values_for_type(x509.IPAddress)}
    key = (tmp_path / "site" / "key").read_bytes()
    for again in (
        lambda: init_site(tmp_path / "site", "north", "hospital.example:8443", insecure=False),
        lambda: init_server(tmp_path / "server", (), "127.0.0.1", 1, insecure=False),
    ):
        with pytest.raises(TacitError, match="already has"):
            again()
    assert (tmp_path / "site" / "key").read_bytes() == key
    with pytest.raises(TacitError, match=r"copy ca\.crt from the server"):
        site_home(tmp_path / "site")


def test_insecure_is_for_this_machine_alone(tmp_path: Path) -> None:
    with pytest.raises(TacitError, match="no encryption and no keys"):
        init_server(tmp_path / "a", (), "0.0.0.0", 8443, insecure=True)
    with pytest.raises(TacitError, match="no encryption and no keys"):
        init_site(tmp_path / "b", "north", "hospital.example:8443", insecure=True)
    init_server(tmp_path / "c", (), "127.0.0.1", 8443, insecure=True)
    assert read_home(tmp_path / "c").insecure
    assert not (tmp_path / "c" / "ca.key").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--port", "-3"], "--port is '-3'. Expected a port: a whole number from 1 to 65535"),
        (["--port", "0"], "--port is '0'"),
        (["--port", "99999"], "--port is '99999'"),
        (["--port", "9" * 5000], "Expected a port"),
        (["--port", "٨٤٤٣"], "--port is '٨٤٤٣'"),
        (["--port", "1e3"], "--port is '1e3'"),
        (["--host", "a b c"], "--host is 'a b c', which is no name and no address of a machine"),
        (["--host", "hospital.example:8443"], "without a port"),
        (["--host", "https://hospital.example"], "is no name"),
        (["--host", "-a.example"], "is no name"),
        (["--host", "256.1.1.1"], "is no name"),
        (["--host", "bücher.example"], "is no name"),
        (["--host", ""], "is no name"),
        (["--host", "a" * 300], "is no name"),
        (["--bind", "a b c"], "--bind is 'a b c'"),
        (["--bind", "localhost:1"], "--bind is 'localhost:1'"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_anything_is_written(
    words: list[str], why: str, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from tacit.cli.app import complete

    home = tmp_path / "new"
    result = CliRunner().invoke(complete(), ["site", "init-server", *words, "--home", str(home)])
    assert isinstance(result.exception, TacitError)  # what `tacit` shows as a sentence
    assert why in str(result.exception)
    assert len(str(result.exception)) < 500
    assert not home.exists()


@pytest.mark.parametrize(
    "server", ["", "x", ":1", "x:", "x:٨٤٤٣", "x:-3", "x:99999", "a b c:1", "http://x:1", "x:1:2", "[::1]", "x\0:1"]
)
def test_a_server_that_cannot_be_reached_by_that_name_is_refused(server: str, tmp_path: Path) -> None:
    with pytest.raises(TacitError, match="--server is"):
        init_site(tmp_path / "new", "north", server, insecure=False)
    assert not (tmp_path / "new").exists()


def test_a_home_that_is_a_file_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for home in (file, file / "below", tmp_path / "nul\0", tmp_path / ("long" * 100)):
        for make in (
            lambda home: init_site(home, "north", "x:1", insecure=False),
            lambda home: init_server(home, (), "127.0.0.1", 8443, insecure=False),
        ):
            with pytest.raises(TacitError, match=r"--home|cannot be made"):
                make(home)
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "change", ["port = 'x'", "port = true", "port = 0", "bind = 'a b'", "hosts = ['a b']", "largest_reply_mb = 'x'"]
)
def test_settings_that_were_spoilt_are_told(change: str, tmp_path: Path) -> None:
    init_server(tmp_path / "s", ("x",), "127.0.0.1", 8443, insecure=True)
    path = tmp_path / "s" / "server.toml"
    key = change.split()[0]
    path.write_text("\n".join(line for line in path.read_text().splitlines() if not line.startswith(key + " =")))
    text = path.read_text().replace('hosts = [\n    "x",\n]', "") if key == "hosts" else path.read_text()
    path.write_text(change + "\n" + text)
    with pytest.raises(TacitError, match=r"settings in .* cannot be read"):
        read_home(tmp_path / "s")


def test_the_address_of_a_server_on_its_own_machine(tmp_path: Path) -> None:
    for number, (bind, address) in enumerate(
        [("0.0.0.0", "127.0.0.1:1"), ("::", "[::1]:1"), ("::1", "[::1]:1"), ("10.1.2.3", "10.1.2.3:1")]
    ):
        assert init_server(tmp_path / str(number), (), bind, 1, insecure=False).local_address == address


def test_another_server_is_told_at_once(tmp_path: Path) -> None:
    """Two servers with keys of their own: a handshake tells them apart, and both from one that does not encrypt."""
    pytest.importorskip("cryptography")
    for name in ("right", "other"):
        init_server(tmp_path / name, (), "127.0.0.1", 8443, insecure=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "right" / "server.crt", tmp_path / "right" / "server.key")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        home = init_site(tmp_path / "site", "north", f"localhost:{port}", insecure=False)

        def meet(secure: bool) -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                if secure:
                    context.wrap_socket(connection, server_side=True).close()
                else:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        def check(ca: bytes, secure: bool = True) -> None:
            (home.folder / "ca.crt").write_bytes(ca)
            thread = threading.Thread(target=meet, args=(secure,))
            thread.start()
            try:
                check_certificate(home)
            finally:
                thread.join()

        right, other = ((tmp_path / name / "ca.crt").read_bytes() for name in ("right", "other"))
        check(right)
        with pytest.raises(TacitError, match=r"is not the one that ca\.crt belongs to.* Nothing was sent"):
            check(other)
        with pytest.raises(TacitError, match="does not encrypt"):
            check(right, secure=False)
        (home.folder / "ca.crt").write_bytes(b"garbage")
        with pytest.raises(TacitError, match="is no certificate"):
            check_certificate(home)
    (home.folder / "ca.crt").write_bytes(right)
    check_certificate(home)  # nobody listens now: that is no reason to give up


@pytest.mark.parametrize("name", ["", "../x", "a b", ".hidden", "a" * 80])
def test_odd_names_of_sites_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(TacitError, match="no name for a site"):
        init_site(tmp_path / "x", name, "localhost:1", insecure=True)


def test_the_desk_hands_over_large_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = RelayServer(lambda data: data[::-1])
    try:
        monkeypatch.setenv(SOCKET, str(desk.path))
        assert desk.path.parent.stat().st_mode & 0o077 == 0
        message = bytes(range(256)) * 20_000
        assert send_request(message) == message[::-1]
        assert send_request(b"") == b""
    finally:
        desk.close()


def test_preview_shows_the_very_bytes_and_sends_nothing(tmp_path: Path) -> None:
    experiment = simulated("cbafed", "some-clients")
    job, sites = at_sites(experiment, tmp_path)
    site = sites["site-0"]
    facts = tmp_path / "parties" / "server" / FACTS
    screen = SafeConsole(file=io.StringIO(), width=200)
    preview_site(site, experiment, facts, screen)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    found = {stage.name: reply for stage, reply in replies(site, experiment, read_facts(facts))}
    assert set(found) == {"warm-up", "main"}
    assert f"{len(sent(found['main'])):,} bytes in all" in text
    assert "counts" in text
    assert "trained_on" in text
    assert not list(tmp_path.glob("memory-0/**/*.safetensors"))
    assert not (tmp_path / "memory-0" / "sent.jsonl").exists()
    here = Here(sites)
    run_at_sites(job, here, NullWatcher())
    names = {
        n
        for _, response in here.seen
        if len(response) > 1000
        for n in payload.from_bytes(unpack(response, Response)[1])
    }
    assert names == {"model", "counts"} == set(found["main"].send)


# --- A party's own data -----------------------------------------------------------------------------------

GREY = Facts(("cat", "dog", "owl"), 1, 8, (0.5,), (0.25,))


def paint(path: Path, value: int, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (8, 8), value).save(path)


def test_a_party_may_lack_classes_and_labels(tmp_path: Path) -> None:
    paint(tmp_path / "some" / "owl" / "a.png", 1)
    paint(tmp_path / "some" / "unlabeled" / "b.png", 2)
    paint(tmp_path / "loose" / "c.png", 3)
    some, loose = load_party(tmp_path / "some", GREY), load_party(tmp_path / "loose", GREY)
    assert some.labels.tolist() == [2, -1]  # numbered by the federation, not by this folder
    assert some.images[:, 0, 0, 0].tolist() == [1, 2]
    assert loose.labels.tolist() == [-1]
    colour = load_party(tmp_path / "some", replace(GREY, channels=3, mean=(0.5,) * 3, std=(0.2,) * 3))
    assert colour.images.shape == (2, 3, 8, 8)
    paint(tmp_path / "some" / "ufo" / "a.png", 1)
    with pytest.raises(TacitError, match="classes ufo, which this federation does not know"):
        load_party(tmp_path / "some", GREY)


def test_an_npz_of_a_party(tmp_path: Path) -> None:
    images = np.arange(3 * 64, dtype=np.uint8).reshape(3, 8, 8)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=np.array([1, -1, 0]), classes=np.array(["owl", "cat"]))
    party = load_party(tmp_path / "own.npz", GREY)
    assert party.labels.tolist() == [0, -1, 2]  # by the names of the classes
    assert np.array_equal(party.images[:, 0], images)
    np.savez(tmp_path / "bare.npz", x_train=images, y_train=np.array([1, -1, 7]))
    with pytest.raises(TacitError, match="the label 7, but this federation has 3 classes"):
        load_party(tmp_path / "bare.npz", GREY)


def test_facts_come_from_a_file_or_from_the_servers_images(tmp_path: Path) -> None:
    for number, name in enumerate(("cat", "dog")):
        paint(tmp_path / "train" / name / "a.png", 100 * number)
    told = facts_of(tmp_path / "train")
    assert (told.classes, told.channels, told.size, told.mean) == (("cat", "dog"), 1, 8, (50 / 255,))
    GREY.save(tmp_path / "train" / FACTS)
    assert facts_of(tmp_path / "train") == GREY
    assert tomllib.loads((tmp_path / "train" / FACTS).read_text())["classes"] == ["cat", "dog", "owl"]
    (tmp_path / "bad.toml").write_text("classes = ['a', 'b']")
    with pytest.raises(TacitError, match="does not tell the facts"):
        read_facts(tmp_path / "bad.toml")


def test_a_run_at_sites_is_a_normal_run(tmp_path: Path) -> None:
    job, sites = at_sites(simulated("fedavg", "clients"), tmp_path)
    run = run_at_sites(job, Here(sites), NullWatcher())
    again = Run(run.folder)
    assert again.summary is not None
    assert again.summary["accuracy"] == again.records[-1]["accuracy"]
    assert again.experiment.backend.name == "flower"
    assert again.split_path.is_file()
    (told,) = collect([run.folder])["runs"]  # what `tacit report` makes of it
    assert told["state"] == "finished"
    assert not told["problems"]
    assert {p.name for p in run.folder.iterdir()} >= {
        "experiment.toml",
        "rounds.jsonl",
        "model.safetensors",
        "sites.json",
    }
