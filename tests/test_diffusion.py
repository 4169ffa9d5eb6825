"""GDGM: the diffusion pieces against diffusers' schedulers, the U-Net, the two stages, and `tacit generate`."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from typer.testing import CliRunner

from runs import TINY
from tacit.cli.app import app
from tacit.config.resolve import resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, Labeled, NetPool, RoundInfo, Setup, Shard
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.payload import tensor_in, weights_in
from tacit.core.settings import Net, Participation, Train
from tacit.engine.run import run_experiment
from tacit.methods.ddrfed.diffusion import add_noise, ddim_step, ddpm_step, image_shares, times_back
from tacit.methods.ddrfed.gdgm import Diffusion, Generation
from tacit.nets.unet import build_unet
from tacit.runs.folder import Run
from tacit.views import Views

Tiny = Callable[..., Run]
SMALL: dict[str, Any] = {"width": 8, "halvings": 1, "blocks": 1, "diffusion_epochs": 1, "diffusion_batch": 8}


def world(clients: int = 3) -> Setup:
    return Setup(
        seed=0,
        classes=tuple("ab"),
        channels=1,
        size=8,
        clients=clients,
        labeled_clients=(0,),
        net=Net(name="cnn-16"),
        train=Train(),
        views=Views(mean=(0.5,), std=(0.25,)),
        participation=Participation(),
        device=torch.device("cpu"),
    )


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def hub(number: int = 0, rounds: int = 4, clients: int = 3) -> Hub:
    setup = world(clients)
    empty = Shard(Labeled(images(0), torch.zeros(0, dtype=torch.int64)), images(0))
    return Hub(setup, empty, RoundInfo("diffusion", number, rounds, number), NetPool(setup))


def client(labels: list[int], unlabeled: int) -> Client:
    setup = world()
    shard = Shard(Labeled(images(len(labels)), torch.tensor(labels, dtype=torch.int64)), images(unlabeled))
    return Client(setup, shard, RoundInfo("diffusion", 0, 4, 0), 0, 0, NetPool(setup))


# The pieces


def test_noise_is_put_in_as_diffusers_does() -> None:
    scheduler = DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02)
    assert torch.allclose(image_shares().float(), scheduler.alphas_cumprod, rtol=1e-4, atol=1e-7)
    generator = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 4, 1, 8, 8, generator=generator)
    times = torch.tensor([0, 10, 500, 999])
    expected = scheduler.add_noise(clean, noise, times)
    assert torch.allclose(add_noise(clean, noise, image_shares()[times]), expected, atol=1e-5)


@pytest.mark.parametrize("count", [1000, 20])
def test_ddpm_takes_it_out_as_diffusers_does(count: int) -> None:
    scheduler = DDPMScheduler(1000, beta_start=1e-4, beta_end=0.02, timestep_spacing="trailing")
    scheduler.set_timesteps(count)
    times, shares = times_back(count), image_shares()
    assert times == scheduler.timesteps.tolist()
    noisy, noise = torch.randn(2, 3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for place in (0, count // 2, count - 2, count - 1):
        before = float(shares[times[place + 1]]) if place + 1 < count else 1.0
        fresh = torch.randn(noisy.shape, generator=torch.Generator().manual_seed(2))
        step = scheduler.step(noise, times[place], noisy, generator=torch.Generator().manual_seed(2))
        ours = ddpm_step(noisy, noise, float(shares[times[place]]), before, fresh)
        assert torch.allclose(ours, step.prev_sample, atol=1e-4), place


def test_ddim_takes_it_out_as_diffusers_does() -> None:
    scheduler = DDIMScheduler(1000, beta_start=1e-4, beta_end=0.02, timestep_spacing="trailing")
    scheduler.set_timesteps(20)
    times, shares = times_back(20), image_shares()
    noisy, noise = torch.randn(2, 3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for place in (0, 10, 19):
        before = float(shares[times[place + 1]]) if place < 19 else 1.0
        ours = ddim_step(noisy, noise, float(shares[times[place]]), before)
        assert torch.allclose(ours, scheduler.step(noise, times[place], noisy).prev_sample, atol=1e-5), place


# The U-Net


def test_the_papers_unet_has_the_size_that_table_6_implies() -> None:
    """10 clients, 40 rounds, up and down: 106.25 GB there, if GB are 2^30 bytes."""
    bytes_each_way = Diffusion().estimated_weights_bytes(0, channels=3)
    assert 10 * 40 * 2 * bytes_each_way / 2**30 == pytest.approx(106.25, rel=0.01)


def test_a_label_of_zeros_adds_nothing_and_another_one_does() -> None:
    net = build_unet(channels=1, labels=9, width=8, halvings=1, blocks=1, generator=torch.Generator().manual_seed(0))
    noisy, times, label = torch.randn(2, 1, 8, 8), torch.tensor([3, 700]), torch.ones(2, 9)
    with torch.no_grad():
        assert not bool(net.label_embedding(torch.zeros(2, 9)).any())
        plain, told = net(noisy, times, torch.zeros(2, 9)), net(noisy, times, label)
        assert not torch.allclose(plain, told)
        net.label_embedding.weight.zero_()
        assert torch.equal(net(noisy, times, label), plain)


def test_first_weights_come_from_the_generator_and_leave_the_global_one_alone() -> None:
    shape = {"channels": 1, "labels": 9, "width": 8, "halvings": 1, "blocks": 1}
    before = torch.get_rng_state()
    one, two, other = (build_unet(**shape, generator=torch.Generator().manual_seed(seed)) for seed in (4, 4, 5))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.unet.conv_in.weight, other.unet.conv_in.weight)


@pytest.mark.parametrize("size", [8, 9, 11])
def test_any_side_can_be_drawn(size: int) -> None:
    net = build_unet(channels=3, labels=9, width=4, halvings=2, blocks=1, generator=torch.Generator().manual_seed(0))
    assert net(torch.zeros(1, 3, size, size), torch.tensor([1]), torch.zeros(1, 9)).shape == (1, 3, size, size)


# The stages


def test_a_client_learns_to_see_noise_from_all_its_images_and_no_label() -> None:
    method = Diffusion(**{**SMALL, "diffusion_epochs": 12, "diffusion_lr": 3e-3})
    task = Task(0, {"unet": method.server_start(hub(), {})["unet"]})
    first, second = (method.client_train(task, {}, client(labels, 0)) for labels in ([0] * 40, [1] * 40))
    bare = method.client_train(task, {}, client([], 40))
    for name, tensor in weights_in(first.send, "unet").items():
        assert torch.equal(tensor, weights_in(second.send, "unet")[name])
        assert torch.equal(tensor, weights_in(bare.send, "unet")[name])
    assert first.examples == 40
    short = dataclasses.replace(method, diffusion_epochs=1).client_train(task, {}, client([], 40))
    assert first.metrics["denoising_loss"] < short.metrics["denoising_loss"]
    assert set(first.send) == {"unet"}


def test_the_server_weighs_by_images_and_its_running_mean_follows() -> None:
    """Eq. 9 by hand: (10·1 + 30·2)/40; then r = 1 keeps 2/11 of the old running mean."""
    method = Diffusion(**SMALL)

    def reply(number: int, value: float, examples: int) -> Reply:
        send: payload.Payload = {"unet": {"w": torch.tensor([value])}}
        return Reply(send=send, examples=examples, metrics={"denoising_loss": 1.0}, client=number)

    start: payload.Payload = {
        "unet": {"w": torch.zeros(1)},
        "ema": {"w": torch.zeros(1)},
        "held": torch.full((3,), -1.0),
    }
    first = method.server_merge(start, [reply(0, 1.0, 10), reply(2, 2.0, 30)], hub(0))
    assert weights_in(first, "unet")["w"].item() == 1.75
    assert weights_in(first, "ema")["w"].item() == 1.75  # not pulled towards the untrained net
    assert tensor_in(first, "held").tolist() == [10, -1, 30]
    second = method.server_merge(first, [reply(1, 4.0, 20)], hub(1))
    assert weights_in(second, "ema")["w"].item() == pytest.approx(1.75 * 2 / 11 + 4.0 * 9 / 11)
    assert tensor_in(second, "held").tolist() == [10, 20, 30]


def test_images_are_dealt_evenly_over_all_rounds() -> None:
    """ψ·|D| = 0.5 · 60 over 3 clients: 10 each, in 4 rounds of 2, 3, 2, 3; a silent client counts as the mean."""
    method = Generation(**SMALL, psi=0.5, sampler="ddim", sampling_steps=2)
    ema = Diffusion(**SMALL).server_start(hub(), {})["ema"]
    for held in ([10.0, 20.0, 30.0], [10.0, -1.0, 30.0]):
        kept: dict[int, payload.Payload] = {0: {}, 1: {}, 2: {}}
        sizes = []
        for number in range(4):
            tasks = method.server_send({"ema": ema, "held": torch.tensor(held)}, hub(number))
            sizes.append([len(task.tensor("images")) for task in tasks])
            for task in tasks:
                reply = method.client_train(task, kept[task.client], client([], 5))
                assert reply.send == {}
                kept[task.client] = reply.keep
        assert sizes == [[2] * 3, [3] * 3, [2] * 3, [3] * 3]
        drawn = [tensor_in(kept[number], "generated") for number in range(3)]
        assert all(own.dtype == torch.uint8 and own.shape == (10, 1, 8, 8) for own in drawn)
        assert len(torch.cat(drawn).flatten(1).unique(dim=0)) == 30  # nobody got another's image
    nothing = method.server_send({"ema": ema, "held": torch.full((3,), -1.0)}, hub())
    assert [len(task.tensor("images")) for task in nothing] == [0, 0, 0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = {"method.name": "ddrfed", "method.preset": "smoke", "data.placement": "some-clients", "rounds": 1}
    return run_experiment(resolve(settings, TINY), tmp_path_factory.mktemp("runs") / "run")


def test_the_stages_are_recorded_and_not_evaluated(finished: Run) -> None:
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for record in finished.records:
        by_stage.setdefault(record["stage"], []).append(record)
    assert list(by_stage) == ["diffusion", "generation", "warm-up", "main"]
    for record in [*by_stage["diffusion"], *by_stage["generation"]]:
        assert "accuracy" not in record
    assert by_stage["diffusion"][1]["denoising_loss"] < by_stage["diffusion"][0]["denoising_loss"]
    sent = sum(record["generated"] for record in by_stage["generation"])
    assert sent == pytest.approx(0.5 * 400, abs=4)
    assert sum(record["bytes_down"] for record in by_stage["generation"]) == sent * 64  # a byte a pixel
    assert sum(record["bytes_up"] for record in by_stage["generation"]) == 0
    summary = finished.summary or {}
    assert sum(summary["bytes_by_stage"].values()) == summary["bytes_up"] + summary["bytes_down"]
    assert summary["bytes_by_stage"]["diffusion"] == 2 * 2 * 4 * Diffusion(**SMALL).estimated_weights_bytes(
        0, channels=1
    )
    for number in range(4):
        (file,) = (finished.memory_folder / f"client-{number}").glob("generated@*.safetensors")
        assert tensor_in(payload.read(file), "kept").dtype == torch.uint8
    assert (finished.folder / "pictures" / "generated.png").read_bytes()[:4] == b"\x89PNG"


# The command


def call(*words: str) -> Any:
    return CliRunner().invoke(app, ["generate", *words])


def test_generate_draws_and_scores(finished: Run, tmp_path: Path) -> None:
    out = tmp_path / "drawn"
    result = call(str(finished.folder), "--count", "12", "--out", str(out), "--score")
    assert result.exit_code == 0, result.output
    assert len(list(out.glob("[0-9]*.png"))) == 12
    assert (out / "sheet.png").is_file()
    for word in ("12 images", "Fréchet", "untrained", "noise", "trained here"):
        assert word in result.output
    again = tmp_path / "again"
    call(str(finished.folder), "--count", "12", "--out", str(again))
    assert (again / "sheet.png").read_bytes() == (out / "sheet.png").read_bytes()  # the same seed, the same images
    other = tmp_path / "other"
    call(str(finished.folder), "--count", "12", "--out", str(other), "--seed", "1")
    assert (other / "sheet.png").read_bytes() != (out / "sheet.png").read_bytes()


def test_generate_refuses_what_it_cannot_do(finished: Run, tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("do not touch")
    result = call(str(finished.folder), "--out", str(tmp_path / "full"))
    assert isinstance(result.exception, TacitError)
    assert "not an empty folder" in str(result.exception)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    plain = tiny("ddrfed", "some-clients", rounds=1, method__gdgm=False, method__warmup=0)
    result = call(str(plain.folder))
    assert "has no generator" in str(result.exception)


# Without the library


def test_without_diffusers_it_says_so_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tiny: Tiny, tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "diffusers" else found(name, *rest)
    )
    with pytest.raises(TacitError, match=r"pip install 'tacit\[diffusion\]'.*method.gdgm=false"):
        tiny("ddrfed", "some-clients")
    assert not (tmp_path / "run").exists()
    run = tiny("ddrfed", "some-clients", method__gdgm=False, rounds=1)
    assert [record["stage"] for record in run.records] == ["warm-up", "main"]


def test_a_finished_run_is_read_without_diffusers(finished: Run, tmp_path: Path) -> None:
    """compare, report, evaluate and predict train nothing: on a machine without the library they work."""
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 8, 8), np.uint8))
    commands = [
        ["compare", finished.folder, "--runs", tmp_path / "runs"],
        ["report", finished.folder, "-o", tmp_path / "report.html"],
        ["evaluate", finished.folder],
        ["predict", finished.folder, tmp_path / "x.npz", "-o", tmp_path / "p.csv"],
        ["resume", finished.folder],
    ]
    script = (
        "import json, sys; sys.modules['diffusers'] = None\n"
        "from tacit.cli.app import complete\n"
        "for words in json.loads(sys.argv[1]): complete()(words, standalone_mode=False)"
    )
    words = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run([sys.executable, "-c", script, words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ddrfed" in done.stdout
    assert (tmp_path / "report.html").is_file()
