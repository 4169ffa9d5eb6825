"""The bank of features: the frozen part of a net sees each view once, and nobody can tell the difference."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_sites import Here, at_sites, simulated
from test_walls import reachable

from runs import TINY, client, digest, hub, same, timeless, world_of
from tacit.cli.preview import preview
from tacit.config.resolve import resolve
from tacit.contract import bank as bank_room
from tacit.contract.bank import BATCH, Bank, Banks, BankViews, Source, in_batches
from tacit.contract.parties import Client, NetPool, RoundInfo
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.engine.run import run_experiment
from tacit.inference.model import load_model
from tacit.methods import find_method, known_methods
from tacit.nets import build
from tacit.nets.folding import folded
from tacit.runs.folder import Run
from tacit.runs.watchers import NullWatcher

SMALL = {"net__name": "cnn-4", "net__norm": "bn", "data__clients": 2, "rounds": 2, "net__views": 2}
CUTS = [
    ("cnn", 28, ("head", "last-1", "last-2", "last-3")),
    ("wrn-10-1", 16, ("head", "last-1", "last-3")),
    ("resnet18-8", 96, ("head", "last-1", "last-4", "last-7")),
    ("resnet18-8", 32, ("head", "last-1", "last-4", "last-5")),  # the last stages see few pixels
    ("vit-tiny", 16, ("head", "last-1", "last-12")),
    ("lite0", 32, ("head", "last-1", "last-6")),
]


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TACIT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.mark.parametrize(("name", "size", "parts"), CUTS, ids=[f"{name}-{size}" for name, size, _ in CUTS])
def test_both_parts_of_a_net_are_the_net(name: str, size: int, parts: tuple[str, ...]) -> None:
    for norm in ("bn", "gn"):
        for part in parts:

            def made(part: str = part, norm: str = norm) -> torch.nn.Module:
                generator = torch.Generator().manual_seed(1)
                net = build(name, classes=4, channels=3, size=size, norm=norm, generator=generator)  # type: ignore[arg-type]
                return net.arrange(torch.device("cpu"), size).train_only(part)

            whole, rest = made(), made().without_frozen()
            moving = set(whole.state_dict()) - whole.frozen_names
            assert set(rest.state_dict()) - rest.frozen_names == moving
            images = torch.rand(5, 3, size, size, generator=torch.Generator().manual_seed(2))
            with torch.no_grad():
                features = whole.eval().frozen_part()(images)
                torch.testing.assert_close(folded(whole).frozen_part()(images), features, atol=1e-5, rtol=1e-4)
                for half in (rest.eval(), folded(rest)):
                    torch.testing.assert_close(half(features), whole(images), atol=1e-4, rtol=1e-3)
            rest.train()(features).sum().backward()
            assert all(p.grad is not None for key, p in rest.named_parameters() if key in moving)


def test_what_is_made_of_an_image_does_not_depend_on_those_beside_it() -> None:
    net = build("lite0", classes=4, channels=3, size=32, norm="bn", generator=torch.Generator().manual_seed(1))
    body = folded(net.train_only("head").eval()).frozen_part()
    images = torch.rand(3 * BATCH + 1, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    all_of_them, order = in_batches(body, images), torch.randperm(len(images), generator=torch.Generator())
    assert torch.equal(in_batches(body, images[order]), all_of_them[order])
    assert torch.equal(in_batches(body, images[7:9]), all_of_them[7:9])


WILLING = [name for name in known_methods() if find_method(name).trains_parts and not find_method(name).needs_pixels]


def test_nearly_every_method_can_do_without_pixels() -> None:
    assert set(known_methods()) - set(WILLING) == {"ddrfed", "fedema", "fedmatch", "fedu", "orchestra", "pfedknow"}


@pytest.mark.parametrize("method", WILLING)
def test_every_method_trains_from_the_bank_and_its_model_works_on_pixels(
    method: str, tiny: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    made_of = Source.made_of

    def counted(self: Source, kind: str, images: torch.Tensor, keys: list[bytes]) -> Iterator:
        asked.append((kind, len(images)))
        return made_of(self, kind, images, keys)

    monkeypatch.setattr(Source, "made_of", counted)
    part = {"net__train": "last-1"} if method in ("semifl", "cbafed") else {"net__train": "head"}
    run = tiny(method, find_method(method).placements[0], **SMALL, **part)
    assert {kind for kind, _ in asked} <= {"plain", "weak", "strong"}
    plan = world_of(method, find_method(method).placements[0], **SMALL, **part)[0]
    held = len(plan.dataset.train_images)
    for kind in ("weak", "strong"):
        assert sum(count for made, count in asked if made == kind) <= held  # each image once, in both rounds together
    test = torch.from_numpy(np.array(plan.dataset.test_images[plan.split.test]))
    truth = torch.from_numpy(plan.dataset.test_labels[plan.split.test])
    found = load_model(run.folder).probabilities(test).argmax(dim=1)
    assert run.records[-1]["accuracy"] == pytest.approx(float((found == truth).double().mean()), abs=0.011)


def smoke(method: str, placement: str, **more: object) -> Experiment:
    changes = {key.replace("__", "."): value for key, value in {**SMALL, **more}.items()}
    return resolve({"method.name": method, "method.preset": "smoke", "data.placement": placement}, TINY, changes)


@pytest.mark.parametrize(
    ("method", "placement", "part"), [("fixmatch", "clients", "last-2"), ("cbafed", "some-clients", "head")]
)
def test_the_same_numbers_on_all_backends_and_after_a_stop(
    method: str, placement: str, part: str, tmp_path: Path
) -> None:
    settings = {"net__train": part, "data__clients": 3, "data__validation": 0.2, "data__labels": 60}
    settings |= {"train__parts": 2} if method == "fixmatch" else {}  # a round is about a part of the tickets
    local = run_experiment(smoke(method, placement, **settings, backend__name="local"), tmp_path / "local")
    pool = smoke(method, placement, **settings, backend__name="pool", backend__workers=2)

    class Stop(NullWatcher):
        def client_done(self, round_info: object, done: int, asked: int) -> None:
            if round_info.step == 1 and done == 1:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_experiment(pool, tmp_path / "pool", watcher=Stop())
    shutil.rmtree(tmp_path / "data")  # a bank may be deleted at any time
    resumed = run_experiment(pool, tmp_path / "pool", resume=True)
    assert digest(resumed) == digest(local)
    assert timeless(resumed) == timeless(local)
    assert "validation_accuracy" in local.records[-1]


def test_sites_have_banks_of_their_own_and_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = simulated("fixmatch", "clients", **{"net.train": "head", "net.views": 2, "rounds": 2})
    local = run_experiment(experiment, tmp_path / "local")
    monkeypatch.setenv("TACIT_DATA", str(tmp_path / "elsewhere"))
    from tacit.sites.server import run_at_sites

    job, sites = at_sites(experiment, tmp_path)
    run = run_at_sites(job, Here(sites), NullWatcher())
    assert digest(run) == digest(local)
    assert list((tmp_path / "elsewhere" / "features").rglob("*-strong.npy"))


def test_ray_has_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    local = run_experiment(smoke("semifl", "server", net__train="head", backend__name="local"), tmp_path / "local")
    on_ray = smoke("semifl", "server", net__train="head", backend__name="ray", backend__workers=1)
    assert digest(run_experiment(on_ray, tmp_path / "ray")) == digest(local)


@pytest.fixture
def place() -> tuple:
    return world_of("fixmatch", "clients", **SMALL, net__train="head")


def test_views_are_chosen_from_those_that_are_there(place: tuple) -> None:
    me = client(place)
    images = me.shard.unlabeled[:1].repeat(200, 1)
    chance = torch.Generator().manual_seed(3)
    weak, strong = me.views.weak_view(images, chance), me.views.strong_view(images, chance)
    assert [len(views.unique(dim=0)) for views in (weak, strong)] == [2, 2]
    assert torch.equal(me.views.plain(images[:1]), me.views.plain_view(images[:1], chance))
    chosen = me.views.raw_weak(me.shard.unlabeled, chance)
    assert set(chosen[:, 1].tolist()) == {1, 2}
    mixed = torch.cat([chosen, me.shard.labeled.images, me.views.raw_strong(me.shard.unlabeled, chance)])
    each = torch.cat([me.views.plain(ticket[None]) for ticket in mixed])
    assert torch.equal(me.views.plain(mixed), each)
    assert me.views.plain(mixed[:0]).shape == (0, *place[0].setup.taken)
    assert torch.equal(me.views.normalise(mixed), each)


def test_the_bank_holds_what_the_frozen_part_makes_of_the_images_own_views(place: tuple) -> None:
    plan, federation = place
    shard = federation.client_shard(0)
    source = plan.setup.features
    whole = plan.setup.build().eval()
    whole.load_state_dict(plan.setup.frozen, strict=False)
    bank = Bank(source, shard.unlabeled)
    chances = [bank_room.seeds.generator("bank", "strong", 1, key.hex()) for key in bank.keys]
    with torch.no_grad():
        second = whole.features(plan.setup.views.drawn("strong", shard.unlabeled, chances))
        torch.testing.assert_close(bank.rows("strong")[:, 1], second, atol=1e-5, rtol=1e-4)
        plain = whole.features(plan.setup.views.plain(shard.unlabeled))
        torch.testing.assert_close(bank.rows("plain")[:, 0], plain, atol=1e-5, rtol=1e-4)


def test_what_was_made_once_is_not_made_again_whoever_holds_it(
    place: tuple, monkeypatch: pytest.MonkeyPatch, data_folder: Path
) -> None:
    plan, federation = place
    images = torch.cat([federation.client_shard(k).unlabeled for k in range(2)])
    first = Bank(plan.setup.features, images).rows("weak")
    (file,) = data_folder.rglob("*-weak.npy")
    assert file.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(Source, "made_of", lambda *_: pytest.fail("made again"))
    assert torch.equal(Bank(plan.setup.features, images).rows("weak"), first)
    order = torch.randperm(len(images), generator=torch.Generator())[:50]
    assert torch.equal(Bank(plan.setup.features, images[order]).rows("weak"), first[order])  # another split's party
    twice = Bank(plan.setup.features, torch.cat([images[:3], images[:3]])).rows("weak")
    assert torch.equal(twice, torch.cat([first[:3], first[:3]]))


def test_a_damaged_bank_is_made_anew_and_one_without_room_is_in_memory(
    place: tuple, monkeypatch: pytest.MonkeyPatch, data_folder: Path
) -> None:
    plan, federation = place
    images = federation.client_shard(0).unlabeled
    first = Bank(plan.setup.features, images).rows("plain").clone()
    (file,) = data_folder.rglob("*-plain.npy")
    file.write_bytes(file.read_bytes()[:-100])
    again = Bank(plan.setup.features, images)
    assert torch.equal(again.rows("plain"), first)
    assert again.nbytes == images.nbytes
    shutil.rmtree(data_folder)
    monkeypatch.setattr(bank_room, "SPARE", 1 << 60)
    third = Bank(plan.setup.features, images)
    assert torch.equal(third.rows("plain"), first)
    assert third.nbytes == images.nbytes + first.nbytes
    assert not data_folder.exists()


def test_other_weights_views_and_counts_have_banks_of_their_own(place: tuple) -> None:
    source = place[0].setup.features
    views = dataclasses.replace(source.views, strong="ssl")
    others = [dataclasses.replace(source, frozen="0" * 64), dataclasses.replace(source, views=views)]
    others += [dataclasses.replace(source, count=3), dataclasses.replace(source, net="another")]
    assert len({one.folder for one in (source, *others)}) == 5


def test_a_client_reaches_its_own_images_and_features_only(place: tuple) -> None:
    plan, federation = place
    banks = Banks(plan.setup.features)
    shards = [banks.of(k, lambda k=k: federation.client_shard(k)) for k in range(2)]
    for shard in shards:
        assert shard.views is not None
        for kind in ("plain", "weak", "strong"):
            shard.views.bank.rows(kind)  # type: ignore[attr-defined]
    me = Client(plan.setup, shards[0], RoundInfo("main", 0, 1, 0), 0, 0, NetPool(plan.setup))
    own = federation.client_shard(0)
    held = len(own.labeled) + len(own.unlabeled)
    arrays = [torch.as_tensor(np.asarray(array)) for array in reachable(me)]
    pixels = [array for array in arrays if array.dtype == torch.uint8]
    assert max(len(array) for array in pixels) == held
    wide = plan.setup.taken[0]
    features = [array for array in arrays if array.dtype == torch.float32 and array.shape[-1:] == (wide,)]
    assert {len(array) for array in features if array.dim() == 3} == {held}


def test_tickets_that_a_client_spoils_are_whole_in_its_next_task(place: tuple) -> None:
    plan, federation = place
    banks = Banks(plan.setup.features)
    first = banks.of(0, lambda: federation.client_shard(0))
    expected = first.unlabeled.clone()
    first.unlabeled.zero_()
    first.labeled.labels.zero_()
    again = banks.of(0, lambda: pytest.fail("copied out again"))
    assert torch.equal(again.unlabeled, expected)
    assert torch.equal(again.labeled.labels, federation.client_shard(0).labeled.labels)


def test_a_process_lets_go_of_banks_that_are_too_large_together(place: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, federation = place
    monkeypatch.setattr(bank_room, "HELD", 1000)
    banks = Banks(plan.setup.features)
    asked: list[int] = []

    def shard(k: int) -> object:
        asked.append(k)
        return federation.client_shard(k)

    for k in (0, 0, 1, 0):
        banks.of(k, lambda k=k: shard(k))  # type: ignore[arg-type]
    assert asked == [0, 1, 0]


def test_mistakes_are_told_before_any_work() -> None:
    with pytest.raises(TacitError, match=r"nothing is frozen: write train = \"head\""):
        resolve({"net.views": 4})
    with pytest.raises(TacitError, match="depends on the images beside it"):
        resolve({"net.views": 4, "net.train": "head", "net.norm": "bn", "net.bn": "batch"})
    for method in ("ddrfed", "fedu", "fedema", "orchestra"):
        with pytest.raises(TacitError, match=f"'{method}' needs the images themselves.*net.views = 0"):
            resolve({"method.name": method, "net.views": 4, "net.train": "head"})
    with pytest.raises(TacitError, match="'fedema' needs the images themselves"):
        resolve({"pretrain": {"method": "fedema", "rounds": 2}, "net.views": 4, "net.train": "head"})
    with pytest.raises(TacitError, match="would keep 100,352 numbers of every view"):
        world_of("fedavg", "clients", net__train="last-2", net__views=2, net__name="cnn-32", data__image_size=112)


def test_a_method_that_hands_over_images_of_its_own_is_told(place: tuple) -> None:
    me = client(place)
    assert isinstance(me.views, BankViews)
    with pytest.raises(TacitError, match=r"views are made of tickets.*needs_pixels = True"):
        me.views.weak_view(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.Generator())
    with pytest.raises(TacitError, match="none for self-supervised learning"):
        me.views.siamese_view(me.shard.unlabeled, torch.Generator())


def test_what_is_off_is_not_in_an_experiment_and_what_is_on_is() -> None:
    assert "views" not in resolve({}).to_dict()["net"]
    on = resolve({"net.views": 4, "net.train": "head"})
    assert on.to_dict()["net"]["views"] == 4
    assert resolve(on.to_dict()) == on


def test_the_frozen_part_never_travels_and_the_model_is_whole(tiny: Callable[..., Run]) -> None:
    start = tiny("fedavg", "clients", name="start", net__name="cnn-4", net__norm="bn", data__clients=2, rounds=1)
    run = tiny("fixmatch", "clients", name="next", **SMALL, net__weights=str(start.folder), net__train="head")
    before, after = (load_file(r.folder / "model.safetensors") for r in (start, run))
    assert sorted(name for name in before if not torch.equal(before[name], after[name])) == ["fc.bias", "fc.weight"]
    assert run.records[-1]["bytes_up"] < start.records[-1]["bytes_up"]


def test_a_hub_has_a_bank_and_so_has_a_party_that_nobody_prepared() -> None:
    place = world_of("semifl", "server", **SMALL, net__train="head")
    server = hub(place)
    assert server.shard.labeled.images.shape == (len(place[0].split.server), 2)
    first = server.new_weights()
    assert set(first) == {"fc.weight", "fc.bias"}
    assert not same(server.finetune(first), first)


def test_a_dry_run_tells_what_the_bank_takes(capsys: pytest.CaptureFixture) -> None:
    preview(smoke("fixmatch", "clients", net__train="head"), SafeConsole(width=300))
    told = " ".join(capsys.readouterr().out.split())
    assert "The frozen part of the net sees each view once" in told
    assert "is kept: at most" in told
