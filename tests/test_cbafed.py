"""CBAFed by hand: three clients, four classes; what is fixed, what is counted, what is pulled back."""

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume import SETTINGS, rounds_done, start, wait_for

from runs import TINY, digest, timeless
from tacit.config.resolve import resolve
from tacit.contract import parties
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, Labeled, NetPool, RoundInfo, Setup, Shard
from tacit.core.payload import tensor_in, weights_in
from tacit.core.settings import Net, Participation, Train
from tacit.methods.cbafed import CBAFed, CBAFedWarmUp
from tacit.pieces.train import weights_of
from tacit.runs.folder import Run
from tacit.views import Views

Tiny = Callable[..., Run]
CLASSES = 4


def setup(norm: str = "gn", **train: Any) -> Setup:
    return Setup(
        seed=0,
        classes=tuple("abcd"),
        channels=1,
        size=8,
        clients=3,
        labeled_clients=(0,),
        net=Net(name="cnn-16", norm=norm),
        train=Train(batch=8, **train),
        views=Views(mean=(0.5,), std=(0.25,), weak="resize-crop"),
        participation=Participation(),
        device=torch.device("cpu"),
    )


def images(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)


def shard(labels: list[int], unlabeled: int) -> Shard:
    return Shard(Labeled(images(len(labels), 1), torch.tensor(labels, dtype=torch.int64)), images(unlabeled, 2))


def hub(round_number: int, labels: list[int] | None = None) -> Hub:
    world = setup()
    return Hub(world, shard(labels or [], 0), RoundInfo("main", round_number, 20, round_number), NetPool(world))


def client(world: Setup, held: Shard, number: int = 1) -> Client:
    return Client(world, held, RoundInfo("main", 0, 20, 0), number, 0, NetPool(world))


def fresh(world: Setup) -> dict[str, torch.Tensor]:
    return weights_of(world.build(torch.Generator().manual_seed(3)))


def task(world: Setup, threshold: float, share: list[float] | None = None) -> Task:
    shares = torch.tensor(share or [0.1] * CLASSES)
    return Task(1, {"model": fresh(world), "thresholds": torch.full((CLASSES,), threshold), "shares": shares})


# Client 0 is labelled and trained on 100 images, clients 1 and 2 kept 40 and 60.
COUNTS = ([50, 30, 18, 2], [30, 10, 0, 0], [40, 20, 0, 0])
MODELS = (1.0, 2.0, 3.0)


def replies() -> list[Reply]:
    return [
        Reply(
            send={
                "model": {"w": torch.tensor([w]), "steps": torch.tensor(10 * k)},
                "counts": torch.tensor(counts).float(),
            },
            examples=sum(counts),
            client=k,
        )
        for k, (w, counts) in enumerate(zip(MODELS, COUNTS, strict=True))
    ]


STATE = {
    "model": {"w": torch.tensor([0.0]), "steps": torch.tensor(0)},
    "anchor": {"w": torch.tensor([1.0]), "steps": torch.tensor(3)},
    "counts": torch.tensor([50.0, 30.0, 18.0, 2.0]),
}


def test_the_example_by_hand() -> None:
    """Counts 120, 60, 18, 2 of 200: shares .6 .3 .09 .01, times 4/10; weights .5 .2 .3; the mean 1.8."""
    method = CBAFed()
    state = method.server_merge(STATE, replies(), side := hub(1))
    assert side.notes["party_weights"] == pytest.approx([0.5, 0.2, 0.3])
    assert weights_in(state, "model")["w"].tolist() == pytest.approx([1.8])  # 0.5·1 + 0.2·2 + 0.3·3
    assert weights_in(state, "model")["steps"].tolist() == 8  # 0.2·10 + 0.3·20: whole numbers stay whole
    assert weights_in(state, "model")["steps"].dtype == torch.int64
    assert tensor_in(state, "counts").tolist() == [120, 60, 18, 2]

    tasks = method.server_send(state, side := hub(2))
    assert [t.client for t in tasks] == [0, 1, 2]
    assert tensor_in(tasks[0].send, "shares").tolist() == pytest.approx([0.24, 0.12, 0.036, 0.004])
    # std: the deviations from .1 are .14, .02, −.064, −.096; sqrt(.033312 / 3) = .105376
    expected = [0.95, 0.12 + 0.84 - 0.105376, 0.036 + 0.84 - 0.105376, 0.004 + 0.84 - 0.105376]
    assert tensor_in(tasks[0].send, "thresholds").tolist() == pytest.approx(expected, abs=1e-5)
    assert side.notes["thresholds"] == pytest.approx(expected, abs=1e-5)
    assert side.notes["class_shares"] == pytest.approx([0.24, 0.12, 0.036, 0.004])
    assert side.notes["tail"] == [2, 3]  # below .3/4 = .075


def test_the_example_with_other_settings() -> None:
    state = CBAFed().server_merge(STATE, replies(), hub(1))

    def notes(**options: Any) -> dict[str, Any]:
        CBAFed(**options).server_send(state, side := hub(2))
        return side.notes

    assert notes(tail_plain=True)["tail"] == [3]  # plain shares: .09 is not below .075
    assert notes(tail=0.0)["tail"] == []
    assert notes(balanced=False)["thresholds"] == pytest.approx([0.95] * 4)
    plain = notes(times_tenth=False)
    assert plain["class_shares"] == pytest.approx([0.6, 0.3, 0.09, 0.01])
    assert plain["thresholds"][3] == pytest.approx(0.01 + 0.84 - 0.26344, abs=1e-5)  # the std is 2.5 times as large
    assert plain["tail"] == [3]


def test_residual_merge_by_hand() -> None:
    """Every five rounds half of the anchor: 0.5·1 + 0.5·1.8, and that is the next anchor."""
    method = CBAFed()
    for round_number in (0, 1, 4, 6):
        after = method.server_merge(STATE, replies(), hub(round_number))
        assert weights_in(after, "model")["w"].item() == pytest.approx(1.8)
        assert weights_in(after, "anchor")["w"].item() == 1.0
    after = method.server_merge(STATE, replies(), hub(5))
    assert weights_in(after, "model")["w"].item() == pytest.approx(1.4)
    assert weights_in(after, "anchor")["w"].item() == pytest.approx(1.4)
    assert weights_in(after, "model")["steps"].tolist() == 6  # 0.5·3 + 0.5·8 = 5.5, rounded to even
    for off in ({"residual_server": 0.0}, {"residual_every": 0}):
        after = CBAFed(**off).server_merge(STATE, replies(), hub(5))
        assert weights_in(after, "model")["w"].item() == pytest.approx(1.8)


def test_without_a_warm_up_the_first_model_is_the_anchor() -> None:
    start = {key: value for key, value in STATE.items() if key != "anchor"}
    after = CBAFed(warmup=0).server_merge(start, replies(), hub(0))
    assert weights_in(after, "anchor")["w"].item() == pytest.approx(1.8)


def test_the_warm_up_hands_over_model_anchor_and_counts() -> None:
    past = {"warm-up": {"model": {"w": torch.tensor([7.0])}, "counts": torch.tensor([1.0, 2.0, 3.0, 4.0])}}
    state = CBAFed().server_start(hub(-1), past)
    assert weights_in(state, "anchor")["w"].item() == weights_in(state, "model")["w"].item() == 7.0
    assert tensor_in(state, "counts").tolist() == [1, 2, 3, 4]
    (stage,) = CBAFed().before()
    assert isinstance(stage.method, CBAFedWarmUp)
    assert (stage.rounds, stage.method.labeled_epochs, stage.method.residual_server) == (1, 501, 0.8)  # Eq. 3: alpha_1
    assert [t.client for t in stage.method.server_send({"model": {}}, hub(0))] == [0]


def test_a_client_that_keeps_nothing_changes_nothing() -> None:
    """It sends the model as it came (BN's running statistics too: labelling is done in eval mode) and weight 0."""
    world = setup("bn")
    for labels in ("round", "epoch"):
        reply = CBAFed(labels=labels).client_train(task(world, 1.0), {}, client(world, shard([], 30)))
        assert reply.examples == 0
        assert reply.tensor("counts").tolist() == [0] * CLASSES
        for name, tensor in fresh(world).items():
            assert torch.equal(reply.weights("model")[name], tensor), name
    nothing = {"model": {"w": torch.tensor([99.0]), "steps": torch.tensor(9)}, "counts": torch.zeros(4)}
    idle = Reply(send=nothing, examples=0)
    without = CBAFed().server_merge(STATE, replies(), hub(5))
    with_idle = CBAFed().server_merge(STATE, [*replies(), idle], hub(5))
    assert torch.equal(weights_in(with_idle, "model")["w"], weights_in(without, "model")["w"])
    assert torch.equal(tensor_in(with_idle, "counts"), tensor_in(without, "counts"))
    assert CBAFed().server_merge(STATE, [idle, idle], hub(5)) == STATE  # nobody kept anything: the model stays


@pytest.fixture
def lessons(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.Tensor, Any]]:
    """What the model was asked to label, and what it was then taught."""
    seen: list[tuple[str, torch.Tensor, Any]] = []
    predict, fit = Client.predict, parties.fit

    def watched_predict(self: Client, model: torch.nn.Module, views: torch.Tensor) -> torch.Tensor:
        probs = predict(self, model, views)
        seen.append(("labelled", views, probs))
        return probs

    def watched_fit(model: torch.nn.Module, views: torch.Tensor, labels: torch.Tensor, **more: Any) -> float:
        seen.append(("learned", views, {**more, "labels": labels}))
        return fit(model, views, labels, **more)

    monkeypatch.setattr(Client, "predict", watched_predict)
    monkeypatch.setattr(parties, "fit", watched_fit)
    return seen


def test_the_kept_views_are_fixed(lessons: list) -> None:
    """The very views that were labelled are learned, for all epochs, without another augmentation."""
    world = setup(epochs=5)
    me = client(world, shard([], 30))
    reply = CBAFed().client_train(task(world, 0.3), {}, me)
    (_, views, probs), (_, learned, more) = lessons
    label, kept = probs.argmax(dim=1), probs.max(dim=1).values > 0.3
    assert 0 < kept.sum() < 30
    assert torch.equal(learned, views[kept])
    assert torch.equal(more["labels"], label[kept])
    assert more["epochs"] == 5
    assert not torch.equal(views, me.shard.unlabeled)  # weak views, not the images themselves
    assert torch.equal(more["view"](learned, torch.Generator()), world.views.plain(learned))
    assert more["optimizer"].param_groups[0]["lr"] == 0.02
    assert reply.examples == int(kept.sum())
    assert reply.tensor("counts").tolist() == torch.bincount(label[kept], minlength=4).tolist()
    told = me.labelling
    assert torch.equal(torch.cat(told.accepted), kept)


def test_tail_labels_are_learned_and_counted(lessons: list) -> None:
    world = setup()
    share = [0.3, 0.3, 0.3, 0.01]  # class 3 is rare
    reply = CBAFed().client_train(task(world, 1.0, share), {}, client(world, shard([], 60)))
    probs = lessons[0][2]
    second_is_rare = probs.topk(2, dim=1).indices[:, 1] == 3
    assert second_is_rare.any()
    assert reply.tensor("counts").tolist() == [0, 0, 0, int(second_is_rare.sum())]
    assert reply.examples == int(second_is_rare.sum())


def test_labels_made_anew_each_epoch(lessons: list) -> None:
    world = setup(epochs=3)
    CBAFed(labels="epoch").client_train(task(world, 0.3), {}, client(world, shard([], 30)))
    assert [what for what, *_ in lessons] == ["labelled", "learned"] * 3
    assert not torch.equal(lessons[0][1], lessons[2][1])  # new views
    assert not torch.equal(lessons[0][2], lessons[2][2])  # by the model as it is then
    assert {more["epochs"] for what, _, more in lessons if what == "learned"} == {1}


def test_a_client_with_both_learns_labels_and_pseudo_labels_together(lessons: list) -> None:
    world = setup()
    held = shard([0, 1, 2, 3, 3], 30)
    reply = CBAFed(labeled_boost=3.0).client_train(task(world, 0.3), {}, client(world, held))
    probs = lessons[0][2]
    assert not torch.equal(
        lessons[1][1][-5:], held.labeled.images
    )  # its labelled images are learned on weak views, too
    kept = int((probs.max(dim=1).values > 0.3).sum())
    assert len(lessons[1][1]) == kept + 5
    assert lessons[1][2]["labels"][-5:].tolist() == [0, 1, 2, 3, 3]
    assert reply.examples == kept + 3 * 5
    assert CBAFed(count="held").client_train(task(world, 0.3), {}, client(world, held)).examples == 35


def test_a_labelled_client_trains_longer_and_is_pulled_back(lessons: list) -> None:
    world = setup()
    me = client(world, shard([0, 1, 2, 3] * 4, 0), number=0)
    pulled = CBAFed().client_train(task(world, 0.9), {}, me)
    assert [what for what, *_ in lessons] == ["learned"]
    assert lessons[0][2]["epochs"] == 11
    assert lessons[0][2]["optimizer"].param_groups[0]["lr"] == 0.03
    assert pulled.examples == 16
    assert tensor_in(pulled.send, "counts").tolist() == [4, 4, 4, 4]
    free = CBAFed(residual_client=0.0).client_train(task(world, 0.9), {}, client(world, me.shard, number=0))
    start, near, far = fresh(world), weights_in(pulled.send, "model"), weights_in(free.send, "model")
    moved = [sum((m[n] - start[n]).norm() for n in start if start[n].is_floating_point()) for m in (near, far)]
    assert moved[0] < 0.7 * moved[1]


def test_momentum_is_kept_if_asked() -> None:
    world = setup()
    held = shard([], 30)
    assert CBAFed().client_train(task(world, 0.3), {}, client(world, held)).keep == {}
    method = CBAFed(keep_momentum=True)
    first = method.client_train(task(world, 0.3), {}, client(world, held))
    again = method.client_train(task(world, 0.3), first.keep, client(world, held))
    forgetful = method.client_train(task(world, 0.3), {}, client(world, held))
    name = next(iter(fresh(world)))
    assert set(weights_in(first.keep, "momentum")) == {n for n, _ in world.build().named_parameters()}
    assert torch.equal(weights_in(forgetful.send, "model")[name], weights_in(first.send, "model")[name])
    assert not torch.equal(weights_in(again.send, "model")[name], weights_in(first.send, "model")[name])


def test_the_server_plays_the_labelled_client() -> None:
    """With labels at the server it is one more party: its images weigh, and count in the thresholds."""
    world = setup()
    side = hub(1, labels=[0, 0, 1, 2])
    model = fresh(world)
    reply = Reply(send={"model": model, "counts": torch.tensor([0.0, 0.0, 0.0, 4.0])}, examples=4, client=1)
    state = {"model": model, "anchor": model, "counts": torch.zeros(4)}
    after = CBAFed(labeled_epochs=1).server_merge(state, [reply], side)
    assert side.notes["party_weights"] == [0.5, 0.5]
    assert tensor_in(after, "counts").tolist() == [2, 1, 1, 4]
    assert any(not torch.equal(weights_in(after, "model")[n], model[n]) for n in model)


def test_debiased_labels_are_others(lessons: list) -> None:
    world = setup()
    CBAFed(debias=True).client_train(task(world, 0.3), {}, client(world, shard([], 30)))
    (_, _, weak), (_, _, more) = lessons
    prior = weak.mean(dim=0)  # all images at once: their own mean, on the views that are labelled
    ratio = weak / prior
    expected = (ratio / ratio.sum(dim=1, keepdim=True)).max(dim=1)
    assert torch.equal(more["labels"], expected.indices[expected.values > 0.3])


LABELLING = {  # Fig. 3
    "batch-wise, 1 epoch": {"method__labels": "batch", "train__epochs": 1},
    "batch-wise, 5 epochs": {"method__labels": "batch", "train__epochs": 5},
    "fixed, 1 epoch": {"method__labels": "round", "train__epochs": 1},
    "fixed, 5 epochs": {"method__labels": "round", "train__epochs": 5},
    "fixed, made anew each epoch": {"method__labels": "epoch", "train__epochs": 5},
}
OFF = {"method__residual_client": 0.0, "method__residual_server": 0.0}
ABLATION = {  # Table 4
    "fixed": {"method__balanced": False, "method__tail": 0.0, **OFF},
    "class-balanced": {"method__tail": 0.0, **OFF},
    "tail classes": OFF,
    "residual weights": {},
}


def test_strategies_and_ablations_are_settings_and_differ(tiny: Tiny) -> None:
    """Fig. 3's five strategies and Table 4's four rows run, and no two of them give the same model."""
    models = {}
    for number, settings in enumerate([*LABELLING.values(), *ABLATION.values()]):
        run = tiny("cbafed", "some-clients", name=str(number), method__warmup_epochs=10, data__subset=300, **settings)
        models[number] = digest(run)
    assert models[2] == models[8]  # "fixed, 1 epoch" with everything on is the last row: the method itself
    assert len(set(models.values())) == 8


@pytest.mark.parametrize("labeled", [1, 2, 3])
def test_one_two_and_more_labelled_clients(labeled: int, tiny: Tiny) -> None:
    run = tiny("cbafed", "some-clients", data__labeled_clients=labeled)
    warm, main = run.records[0], run.records[-1]
    assert (warm["stage"], warm["asked"]) == ("warm-up", list(range(labeled)))
    assert (main["stage"], main["asked"]) == ("main", [0, 1, 2, 3])


def test_the_record_of_a_round(tiny: Tiny) -> None:
    run = tiny("cbafed", "some-clients")
    record = run.records[-1]
    for name in (
        "thresholds",
        "class_shares",
        "pseudo_accuracy_by_class",
        "accepted_by_class",
        "accepted_ratio_by_class",
    ):
        assert len(record[name]) == 10, name
    assert len(record["party_weights"]) == 4
    assert isinstance(record["tail"], list)
    assert sum(record["party_weights"]) == pytest.approx(1.0)
    assert record["client_metrics"]["trained_on"]["0"] > 0
    # What a round trained on decides the next round's thresholds.
    first, second = run.records[-2], run.records[-1]
    labeled = Run(run.folder).records[0]["client_metrics"]["trained_on"]["0"]
    trained = labeled + sum(first["accepted_by_class"])
    assert sum(first["client_metrics"]["trained_on"].values()) == trained
    assert second["class_shares"] != first["class_shares"]
    assert sum(second["class_shares"]) == pytest.approx(1.0)


def test_killed_in_the_warm_up_and_in_the_main_stage_it_goes_on_exactly(tmp_path: Path) -> None:
    changes = {"method.name": "cbafed", "data.placement": "some-clients", "method.warmup": 3, "rounds": 3}
    changes |= {"method.warmup_epochs": 40, "method.labeled_epochs": 40}  # long enough to be hit
    from tacit.engine.run import run_experiment

    whole = run_experiment(resolve({**SETTINGS, **changes}), tmp_path / "whole")
    folder = tmp_path / "run"
    for kill_at in (1, 4):  # records there: in the warm-up, in the main stage
        process = start(folder, "--resume", **changes)
        wait_for((folder / "experiment.toml").is_file, process)
        wait_for(lambda kill_at=kill_at: rounds_done(folder) >= kill_at, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert Run(folder).records[-1]["stage"] == ("warm-up" if kill_at == 1 else "main")
    process = start(folder, "--resume", **changes)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output
    assert digest(Run(folder)) == digest(whole)
    assert timeless(Run(folder)) == timeless(whole)


def test_the_warm_up_is_the_method_with_other_epochs() -> None:
    method = CBAFed(warmup_epochs=7, keep_momentum=True, base=0.5)
    (stage,) = method.before()
    same = dataclasses.asdict(stage.method)
    changed = {k: v for k, v in same.items() if v != getattr(method, k)}
    assert changed == {"labeled_epochs": 7, "residual_server": 0.8, "warmup": 0}
    assert CBAFed(warmup=0).before() == ()


def test_presets_differ_where_the_released_code_does() -> None:
    paper, released = (
        resolve({"method.name": "cbafed", "method.preset": preset, "data.placement": "some-clients"}, TINY)
        for preset in ("paper", "released")
    )
    assert (paper.net.name, paper.net.norm, paper.net.bn, paper.net.stem) == ("resnet18", "bn", "average", "imagenet")
    assert (paper.train.lr, paper.train.batch, paper.train.clip, paper.rounds) == (0.03, 64, 5.0, 501)
    assert (paper.train.momentum, paper.train.weight_decay, paper.views.weak) == (0.9, 5e-4, "resize-crop")
    assert (released.rounds, released.views.flip, released.method["keep_momentum"]) == (501, "yes", True)
