"""Secure aggregation with real Flower processes on this machine: a site is killed while it trains, the sum opens."""

import shutil
from collections.abc import Iterator

import pytest
from site_world import World, until

from tacit.runs.folder import Run

pytest.importorskip("flwr")

# Each client sends its number as every weight, so that whoever knows who is in a sum knows the mean.
NUMBERS = """
import time
import torch
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from tacit.contract.method import Method, Reply

@dataclass(frozen=True)
class Numbers(Method):
    merges_sums: ClassVar = {"model": "mean"}
    presets: ClassVar = {"paper": {}, "smoke": {}}
    def client_train(self, task, memory, me):
        here = Path(__file__).parent
        (here / "busy").write_text(str(me.round))
        for _ in range(1200):
            if not (here / "hold").exists():
                break
            time.sleep(0.1)
        model = {name: torch.full_like(tensor, me.number + 1) for name, tensor in task.weights("model").items()}
        return Reply(send={"model": model}, examples=1)
"""
RECIPE = {"method.preset": "smoke", "data.placement": "server", "data.subset": 200, "data.test_subset": 50}


def sets(settings: dict[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def world(tmp_path: object) -> Iterator[World]:
    world = World(tmp_path)  # type: ignore[arg-type]
    try:
        world.once("site", "init-server", "--host", "localhost", "--bind", "127.0.0.1", "--port", world.port,
                   "--home", world.home)  # fmt: skip
        fedavg = {"method.name": "fedavg", "data.clients": 3, **RECIPE}
        world.once("site", "rehearse", *sets(fedavg), "--out", world.folder / "parties")
        (world.folder / "numbers.py").write_text(NUMBERS)
        for number in range(3):
            name, code = f"site-{number}", world.folder / "code" / f"site-{number}"
            server = f"localhost:{world.port}"
            world.once("site", "init-client", name, "--server", server, "--home", world.folder / name)
            shutil.copy(world.home / "ca.crt", world.folder / name)
            shutil.copy(world.folder / name / f"{name}.pub", world.home / "sites")
            code.mkdir(parents=True)
            (code / "numbers.py").write_text(NUMBERS)
        world.serve()
        for number in range(3):
            name = f"site-{number}"
            code = world.folder / "code" / name / "numbers.py"
            world.join(name, world.folder / "parties" / name, "--method", code)
        yield world
    finally:
        world.close()


def test_a_site_killed_in_the_middle_of_a_round_is_not_in_the_sum(world: World) -> None:
    code = world.folder / "code"
    (code / "site-2" / "hold").touch()  # it trains until it is killed
    settings = {"method.name": world.folder / "numbers.py", "rounds": 1, "privacy.secure_aggregation": "true"}
    for name in ("site-0", "site-1", "site-2"):
        world.sites[name].wait_for("Joined", 240)
    data = world.folder / "parties" / "server"
    run = world.run(
        world.folder / "run", "--data", data, "--patience", "400", "--wait", "240", *sets({**RECIPE, **settings})
    )
    until(lambda: (code / "site-2" / "busy").is_file(), 240, run.said())
    world.sites["site-2"].kill()  # its shares are with the others, and its masks in their vectors
    assert run.end(400) == 0, run.said()
    there = Run(world.folder / "run")
    (record,) = there.records
    assert record["answered"] == [0, 1]
    assert [refused["client"] for refused in record["refused"]] == [2]
    assert record["refused"][0]["why"].startswith("site-2: ")
    assert all((tensor == 1.5).all() for tensor in there.weights.values())  # (1 + 2) / 2, without a trace of a mask
    for number in (0, 1):
        said = world.sites[f"site-{number}"].said()
        for words in ("two public keys", "sealed shares", "its reply under masks", "shares that open the sum"):
            assert f"sent {words}" in said
