"""`tacit site join --ask` with real Flower processes on this machine: nothing begins before somebody says yes."""

from pathlib import Path

import pytest
from site_world import World, until

from runs import TINY
from tacit.sites.approval import Approval
from tacit.sites.trail import names_in, problems, read_trail

pytest.importorskip("flwr")

SETTINGS = {"method.name": "fedavg", "method.preset": "smoke", "data.placement": "clients", "rounds": 1, **TINY}


def sets(settings: dict[str, object]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def test_a_job_waits_for_a_yes_while_the_server_asks_again(tmp_path: Path) -> None:
    world, home = World(tmp_path), tmp_path / "site-0"
    try:
        world.once("site", "rehearse", *sets({**SETTINGS, "data.clients": 2}), "--out", tmp_path / "parties")
        world.once("site", "init-server", "--insecure", "--port", world.port, "--home", world.home)
        server = f"127.0.0.1:{world.port}"
        world.once("site", "init-client", "site-0", "--server", server, "--insecure", "--home", home)
        (home / "policy.toml").write_text('methods = ["fedavg"]\nnames = ["model"]\nmax_rounds = 1\n')
        world.serve()
        site = world.join("site-0", tmp_path / "parties" / "site-0", "--ask")
        words = ["--data", tmp_path / "parties" / "server", "--sites", "site-0", "--wait", "400", *sets(SETTINGS)]
        run = world.run(tmp_path / "run", *words)
        until(lambda: Approval(home).all(), 240, "a job")
        (job,) = Approval(home).all()
        run.wait_for("site-0: its people are asked whether it may take part", 120)
        assert "waiting" in world.once("site", "jobs", "--home", home)
        assert {entry["kind"] for entry in read_trail(home)} <= {"who", "waiting"}
        world.once("site", "allow", job.job[:8], "--home", home)
        assert run.end(400) == 0, run.said()
        assert "sent model" in site.said()
        (reply,) = [entry for entry in read_trail(home) if entry["kind"] == "train"]
        assert (names_in(reply), reply["job"]) == (["model"], job.job)
        assert problems(home) == []
        again = world.run(tmp_path / "again", *words)  # the same job under another name: its one round is used up
        assert again.end(400) == 0
        assert "it took part in the 1 rounds that its policy allows for a job (max_rounds)" in again.said()
    finally:
        world.close()
