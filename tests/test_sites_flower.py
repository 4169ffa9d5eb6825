"""Real Flower processes on this machine, with TLS and keys, started by the commands that people use.

Slow for a test (Flower starts a process for every message), so all runs go on at once where they can.
"""

import json
import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from site_world import World, command_of, listening, memory_of, until

from benchmarks.machine import descendants
from runs import TINY, digest
from tacit.config.resolve import resolve
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run
from tacit.sites.control import Control
from tacit.sites.guard import signature_headers
from tacit.sites.home import init_server, server_home
from tacit.sites.process import own_app, own_bundle

pytest.importorskip("flwr")
from flwr.cli.build import build_fab_from_files

SPLIT = {"data.placement": "server", "data.clients": 3, **TINY}
METHODS = {
    "cbafed": {"method.warmup": 1},
    "feddb": {},
    "bsemifl": {},
}
# The same file everywhere, as sites and server demand; beside it lies what a hostile site makes of its model.
ODD = """
import torch
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from tacit.contract.method import Method, Reply

@dataclass(frozen=True)
class Odd(Method):
    presets: ClassVar = {"paper": {}, "smoke": {}}
    def client_train(self, task, memory, me):
        model = {name: tensor + 1 for name, tensor in task.weights("model").items()}
        lie = Path(__file__).with_name("lie")
        if lie.exists():
            model = eval(lie.read_text(), {"torch": torch, "model": model})
        return Reply(send={"model": model}, examples=1)
"""
NAN = "{name: tensor * float('nan') for name, tensor in model.items()}"
LARGE = "{name: torch.zeros(100 * tensor.numel()) for name, tensor in model.items()}"
# Counts its visits in what it keeps; the busy one takes its time, the patient one waits while a file says so.
SLOW = """
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from tacit.contract.method import Method, Reply

@dataclass(frozen=True)
class Slow(Method):
    client_sends: ClassVar = {"model": "weights", "visits": "number"}
    client_keeps: ClassVar = {"visits": "number"}
    presets: ClassVar = {"paper": {}, "smoke": {}}
    def client_train(self, task, memory, me):
        here = Path(__file__)
        visits = int(memory.get("visits", 0)) + 1
        (here.parent / "busy").write_text(str(me.round))
        time.sleep(1)
        for _ in range(1200):
            if not (here.parent / "hold").exists():
                break
            time.sleep(0.1)
        return Reply(send={"model": task.send["model"], "visits": visits}, keep={"visits": visits}, examples=1)
    def server_merge(self, state, replies, hub):
        hub.note(visits=[r.send["visits"] for r in replies])
        return state
"""


def sets(settings: dict) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("sites")
    world = World(folder)
    try:
        build(world)
        yield world
    finally:
        world.close()


def build(world: World) -> None:
    folder = world.folder
    said = world.once("site", "init-server", "--host", "localhost", "--bind", "127.0.0.1", "--port", world.port,
                      "--home", world.home)  # fmt: skip
    assert "ca.crt" in said
    assert "Never send ca.key" in said
    settings = {"method.name": "fedavg", "method.preset": "smoke", **SPLIT}
    world.once("site", "rehearse", *sets(settings), "--out", folder / "parties")
    for number in range(4):
        name = f"site-{number}"
        said = world.once("site", "init-client", name, "--server", f"localhost:{world.port}", "--home", folder / name)
        assert f"{name}.pub" in said
        shutil.copy(world.home / "ca.crt", folder / name)
        code = folder / "code" / name
        code.mkdir(parents=True)
        (code / "slow.py").write_text(SLOW)
        (code / "odd.py").write_text(ODD)
        if number in (1, 2):
            (code / "lie").write_text({1: NAN, 2: LARGE}[number])
        if number < 3:  # the fourth is never registered
            shutil.copy(folder / name / f"{name}.pub", world.home / "sites")
    for name in ("odd", "slow", "absent"):
        text = (SLOW if name == "slow" else ODD).replace("Odd", name.title())
        (folder / f"{name}.py").write_text(text)
    world.serve()
    for number in range(3):
        start_site(world, number)
    world.join("site-3", folder / "parties" / "site-0")
    init_server(folder / "other", (), "127.0.0.1", world.port, insecure=False)
    shutil.copytree(folder / "site-0", folder / "fooled")
    shutil.copy(folder / "other" / "ca.crt", folder / "fooled")
    world.join("fooled", folder / "parties" / "site-0", home=folder / "fooled")
    for number in range(3):
        world.sites[f"site-{number}"].wait_for("Joined", 240)


def start_site(world: World, number: int) -> None:
    name = f"site-{number}"
    code = world.folder / "code" / name
    data = world.folder / "parties" / name
    world.join(name, data, "--method", code / "odd.py", "--method", code / "slow.py")


def test_three_methods_end_with_the_very_model_of_the_simulation(world: World) -> None:
    """And beside them: a method that sites do not have, a reply with NaN, a reply that is far too large."""
    server = ["--data", world.folder / "parties" / "server", "--patience", "400"]
    runs = {}
    for name, options in METHODS.items():
        settings = {"method.name": name, "method.preset": "smoke", "data.placement": "server", **options}
        runs[name] = world.run(world.folder / name, *server, *sets(settings))
    for name in ("odd", "absent"):
        settings = {"method.name": world.folder / f"{name}.py", "method.preset": "smoke", "rounds": 1}
        runs[name] = world.run(world.folder / name, *server, *sets(settings))
    local = {
        name: run_experiment(
            resolve({"method.name": name, "method.preset": "smoke", **SPLIT}, options), world.folder / f"local-{name}"
        )
        for name, options in METHODS.items()
    }
    for name in METHODS:
        assert runs[name].end(400) == 0, runs[name].said()
        there = Run(world.folder / name)
        assert digest(there) == digest(local[name])
        assert [r["accuracy"] for r in there.records] == [r["accuracy"] for r in local[name].records]
        assert there.summary is not None

    assert runs["odd"].end(400) == 0, runs["odd"].said()
    (record,) = Run(world.folder / "odd").records
    assert record["answered"] == [0]
    why = {refused["client"]: refused["why"] for refused in record["refused"]}
    assert "NaN" in why[1]
    assert "bytes, at most" in why[2]
    assert "without site-2" in runs["odd"].said()

    assert runs["absent"].end(400) == 2
    for number in range(3):
        assert f"site-{number}: it has no method 'absent.py'" in runs["absent"].said()
        assert "refused: it has no method 'absent.py'" in world.sites[f"site-{number}"].said()
    assert not (world.folder / "absent").exists()
    kept = list((world.folder / "site-0" / "kept").rglob("*.safetensors"))
    assert any(path.name.startswith("local@") for path in kept)  # BSemiFL's memory lies at the site
    assert not (world.folder / "bsemifl" / "kept").exists()
    lines = [json.loads(line) for line in (world.folder / "site-0" / "sent.jsonl").read_text().splitlines()]
    assert {name.split("/")[0] for line in lines for name in line.get("send", ())} == {"model", "counts", "app_u"}
    for number in range(3):
        verified = world.once("site", "log", "--verify", "--home", world.folder / f"site-{number}")
        assert "is as it was written" in verified


def test_strangers_are_refused_and_told_why(world: World) -> None:
    fooled, unknown = world.sites["fooled"], world.sites["site-3"]
    assert fooled.end(60) == 2
    assert "is not the one that ca.crt belongs to" in fooled.said()
    assert not (world.folder / "fooled" / "log").exists()  # told before Flower was started
    unknown.wait_for("does not know this site's key", 60)
    assert "Joined" not in unknown.said()
    world.server.wait_for("a key that is not registered tried to join", 60)
    assert "site-3" not in world.once("site", "status", "--home", world.home)


def test_the_folder_of_keys_is_the_truth_at_once(world: World) -> None:
    """A key that comes is let in, one that goes is refused in a running server, one that comes back is let in again."""
    site, key = world.sites["site-3"], world.folder / "site-3" / "site-3.pub"
    for times in (1, 2):
        shutil.copy(key, world.home / "sites")
        site.wait_for("Joined", 120, times=times)
        before = site.said().count("does not know this site's key")
        assert "site-3 is removed" in world.once("site", "remove", "site-3", "--home", world.home)
        site.wait_for("does not know this site's key", 120, times=before + 1)
        world.server.wait_for("site-3 is no longer registered", 60, times=times)
        assert "site-3" not in world.once("site", "status", "--home", world.home)
    shutil.copy(key, world.home / "sites")  # the next test takes it away while the server is down
    site.wait_for("Joined", 120, times=3)


def test_another_process_of_this_machine_starts_nothing(world: World) -> None:
    """It has ca.crt, which is public, and reaches the port. Then it has the secret, and comes with another app."""
    import httpx
    from flwr.proto.control_pb2 import ListNodesRequest, StartRunRequest
    from flwr.proto.fab_pb2 import Fab
    from flwr.proto.runtime_pb2 import AcquireTaskRequest

    with httpx.Client(verify=str(world.home / "ca.crt"), base_url=f"https://localhost:{world.port}") as client:

        def post(path: str, message: Any, **headers: str) -> httpx.Response:
            headers |= {"content-type": "application/protobuf"}
            return client.post(path, content=message.SerializeToString(), headers=headers)

        start = StartRunRequest(fab=Fab(content=own_bundle()))
        secret = {"tacit-secret": (world.home / "secret").read_text()}
        for headers in ({}, {"tacit-secret": "guess"}):
            assert post("/v1/control/start-run", start, **headers).status_code == 403
            assert post("/v1/control/list-nodes", ListNodesRequest(), **headers).status_code == 403
            assert post("/v1/runtime/acquire-task", AcquireTaskRequest(), **headers).status_code == 403
            assert client.get("/docs", headers=headers).status_code == 405
        other = build_fab_from_files({**own_app(), "tacit_site/server_app.py": b"import os; os.abort()"})[0]
        response = post("/v1/control/start-run", StartRunRequest(fab=Fab(content=other)), **secret)
        assert response.status_code == 403
        assert "the app of its own tacit and no other" in response.text
        assert post("/v1/runtime/create-task", AcquireTaskRequest(), **secret).status_code == 404
        assert post("/v1/control/list-nodes", ListNodesRequest(), **secret).status_code == 200  # it is the secret


def test_a_signature_is_for_one_message_once(world: World) -> None:
    """The call of a real site, made by hand with its key: taken; the same again, and with another body: refused."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
    from flwr.supernode.fleet_http_connection import NodeAuthHttpInterceptor

    key = load_ssh_private_key((world.folder / "site-0" / "key").read_bytes(), None)
    mine = public_key_to_bytes(key.public_key())
    path = "/v1/fleet/send-node-heartbeat"
    (node,) = [site.node for site in Control(server_home(world.home)).sites() if site.public_key == mine]
    beat = SendNodeHeartbeatRequest(node=Node(node_id=node), heartbeat_interval=10)

    with httpx.Client(verify=str(world.home / "ca.crt"), base_url=f"https://localhost:{world.port}") as client:

        class Context:
            request = client.build_request("POST", path, content=beat.SerializeToString())

        plain = NodeAuthHttpInterceptor(key, key.public_key())
        plain.intercept(Context, lambda context: None)
        flowers = {**Context.request.headers, "content-type": "application/protobuf"}
        time = flowers["flwr-timestamp"]

        def send(body: bytes, **more: str) -> int:
            headers = {name: value for name, value in flowers.items() if name.startswith(("flwr", "content-type"))}
            return client.post(path, content=body, headers=headers | more).status_code

        body = beat.SerializeToString()
        assert send(body) == 401  # Flower's own signature, of the time alone, is not enough
        ours = signature_headers(lambda text: sign_message(key, text), "POST", path, time, body)
        assert send(body + body, **ours) == 401
        ours = signature_headers(lambda text: sign_message(key, text), "POST", path, time, body)
        assert send(body, **ours) == 200
        assert send(body, **ours) == 401


@pytest.mark.parametrize("how", ["told", "chunked", "header"])
def test_what_nobody_may_send_is_not_kept_in_memory(world: World, how: str) -> None:
    """300 MB to the port without a key: Flower alone would hold all of it, twice."""
    superlink = next(pid for pid in descendants(world.server.popen.pid) if "superlink" in command_of(pid))
    before = memory_of(superlink)
    trusted = ssl.create_default_context(cafile=str(world.home / "ca.crt"))
    piece = b"x" * (1 << 20)
    with (
        socket.create_connection(("localhost", world.port), timeout=60) as plain,
        trusted.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n"
        head += {"told": b"Content-Length: 314572800\r\n\r\n", "chunked": b"Transfer-Encoding: chunked\r\n\r\n"}.get(
            how, b""
        )
        response = b""
        with suppress(OSError):  # it may hang up
            connection.sendall(head)
            for number in range(300):
                chunk = {"chunked": b"100000\r\n" + piece + b"\r\n", "header": b"x-%d: " % number + piece + b"\r\n"}
                connection.sendall(chunk.get(how, piece))
            response = connection.recv(100)
    assert response.split()[1:2] in ([], [b"401"], [b"400"])  # 400: too many headers, known before there is a call
    assert memory_of(superlink) - before < 100 << 20
    assert world.server.popen.poll() is None


def test_the_server_opens_one_port_and_a_site_none(world: World) -> None:
    assert listening(world.server) == {world.port}
    for name in ("site-0", "site-1", "site-2"):
        assert listening(world.sites[name]) == set()
        assert any("supernode" in command_of(pid) for pid in descendants(world.sites[name].popen.pid))


def test_a_killed_site_comes_back_and_a_killed_server_goes_on(world: World) -> None:
    out, rounds = world.folder / "slow", 5
    words = ["--data", world.folder / "parties" / "server", "--patience", "400", "--sites", "site-0,site-1,site-2"]
    words += sets({"method.name": world.folder / "slow.py", "method.preset": "smoke", "rounds": rounds})
    run = world.run(out, *words)
    code = world.folder / "code"
    until(lambda: (code / "site-2" / "busy").is_file() and (code / "site-2" / "busy").read_text() == "1", 240)
    world.sites["site-2"].kill()  # in the middle of the second round
    (code / "site-0" / "hold").touch()  # the third round waits until it is back
    start_site(world, 2)
    world.sites["site-2"].wait_for("Joined", 240, times=2)
    (code / "site-0" / "hold").unlink()
    until(lambda: len(Run(out).records) >= 4, 240, run.said())
    first = Run(out).records
    assert first[0]["answered"] == [0, 1, 2]
    assert first[1]["answered"] == [0, 1]
    why = first[1]["refused"][0]["why"]  # by what Flower said, or by when it joined last: whichever came first
    assert re.match("site-2: (gone or failed|restarted) in the middle of the round", why), why
    assert first[3]["answered"] == [0, 1, 2]
    assert first[3]["visits"][2] == first[3]["visits"][0] - len([r for r in first[:3] if 2 not in r["answered"]])

    world.server.kill()
    assert run.end(120) == 2
    assert "--resume" in run.said()
    (world.home / "sites" / "site-3.pub").unlink()
    away = world.sites["site-3"].said().count("does not know this site's key")
    world.serve()
    world.server.wait_for("The server listens", 240, times=2)
    world.server.wait_for("site-3 is no longer registered", 60, times=3)
    world.sites["site-3"].wait_for("does not know this site's key", 120, times=away + 1)
    again = world.run(out, *words, "--resume", "--wait", "240")
    assert again.end(400) == 0, again.said()
    records = Run(out).records
    assert [record["step"] for record in records] == list(range(rounds))
    assert records[:4] == first[:4]  # nothing lost, nothing done twice
    assert records[4]["answered"] == [0, 1, 2]
    assert records[4]["visits"] == [visits + 1 for visits in records[3]["visits"]]
