"""Real Flower processes on this machine, with TLS and keys, started by the commands that people use.

Slow for a test (Flower starts a process for every message), so all runs go on at once where they can.
"""

import json
import shutil
from collections.abc import Iterator

import pytest
from site_world import World, until

from runs import TINY, digest
from tacit.engine import run_experiment
from tacit.experiment import resolve
from tacit.record import Run
from tacit.sites.home import init_server

pytest.importorskip("flwr")

SPLIT = {"data.placement": "server", "data.clients": 3, **TINY}
METHODS = {
    "cbafed": {"method.warmup": 1},
    "feddb": {},
    "bsemifl": {},
}
# One file name, and what each party has under it. Sites run their own: a hostile site simply has other code.
ODD = """
import torch
from dataclasses import dataclass
from typing import ClassVar
from tacit.method import Method, Reply
from tacit.payload import weights_in

@dataclass(frozen=True)
class Odd(Method):
    presets: ClassVar = {"paper": {}, "smoke": {}}
    def client_train(self, task, kept, me):
        model = {name: tensor + 1 for name, tensor in task.weights("model").items()}
        WHAT
        return Reply(send={"model": model}, examples=1)
"""
HONEST = "pass"
NAN = "model = {name: tensor * float('nan') for name, tensor in model.items()}"
LARGE = "model = {name: torch.zeros(100 * tensor.numel()) for name, tensor in model.items()}"
# Counts its visits in what it keeps; the busy one takes its time, the patient one waits while a file says so.
SLOW = """
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from tacit.method import Method, Reply

@dataclass(frozen=True)
class Slow(Method):
    client_sends: ClassVar = {"model": "weights", "visits": "number"}
    client_keeps: ClassVar = {"visits": "number"}
    presets: ClassVar = {"paper": {}, "smoke": {}}
    def client_train(self, task, kept, me):
        here = Path(__file__)
        visits = int(kept.get("visits", 0)) + 1
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
        (code / "odd.py").write_text(ODD.replace("WHAT", (HONEST, NAN, LARGE, HONEST)[number]))
        if number < 3:  # the fourth is never registered
            shutil.copy(folder / name / f"{name}.pub", world.home / "sites")
    for name in ("odd", "slow", "absent"):
        text = (SLOW if name == "slow" else ODD.replace("WHAT", HONEST)).replace("Odd", name.title())
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
    assert {name.split("/")[0] for line in lines for name in line["send"]} <= {"model", "counts", "app_u"}


def test_strangers_are_refused_and_told_why(world: World) -> None:
    fooled, unknown = world.sites["fooled"], world.sites["site-3"]
    assert fooled.end(60) == 2
    assert "is not the one that ca.crt belongs to" in fooled.said()
    unknown.wait_for("does not know this site's key", 60)
    assert "Joined" not in unknown.said()
    world.server.wait_for("a key that is not registered tried to join", 60)
    unknown.stop()
    assert "site-3" not in world.once("site", "status", "--home", world.home)


def test_a_killed_site_comes_back_and_a_killed_server_goes_on(world: World) -> None:
    out, rounds = world.folder / "slow", 5
    words = ["--data", world.folder / "parties" / "server", "--patience", "400"]
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
    assert "site-2: gone or failed" in first[1]["refused"][0]["why"]
    assert first[3]["answered"] == [0, 1, 2]
    assert first[3]["visits"][2] == first[3]["visits"][0] - len([r for r in first[:3] if 2 not in r["answered"]])

    world.server.kill()
    assert run.end(120) == 2
    assert "--resume" in run.said()
    world.serve()
    world.server.wait_for("The server listens", 240, times=2)
    again = world.run(out, *words, "--resume", "--wait", "240")
    assert again.end(400) == 0, again.said()
    records = Run(out).records
    assert [record["step"] for record in records] == list(range(rounds))
    assert records[:4] == first[:4]  # nothing lost, nothing done twice
    assert records[4]["answered"] == [0, 1, 2]
    assert records[4]["visits"] == [visits + 1 for visits in records[3]["visits"]]
