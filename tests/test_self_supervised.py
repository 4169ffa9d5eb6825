"""FedU and FedEMA: what a client begins with, what it keeps, and the classifier that follows."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runs import World, client, digest, hub, world_of
from tacit.config.recipes import known_recipes, load_recipe
from tacit.config.resolve import resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, NetPool, RoundInfo
from tacit.core.payload import Payload, number_in, weights_in
from tacit.engine.run import run_experiment
from tacit.methods._byol import ByolStage, Online
from tacit.methods.fedema import FedEMA, FedEMAFeatures
from tacit.methods.fedu import FedU, FedUFeatures
from tacit.nets import Net, build
from tacit.nets.heads import head
from tacit.pieces.siamese import Siamese, divergence, learn_siamese, similarity_loss
from tacit.pieces.train import weights_of
from tacit.views import Views

SMALL = {"hidden": 32, "projection": 16}


@pytest.fixture(scope="module")
def world() -> World:
    return world_of("fedu", "server", net__norm="bn")


def stage_start(stage: ByolStage, world: World) -> Payload:
    return stage.server_start(hub(world), {})


def trained(stage: ByolStage, state: Payload, memory: Payload, world: World, round_number: int = 1) -> Reply:
    plan, federation = world
    info = RoundInfo("features", round_number, 9, round_number)
    me = Client(plan.setup, federation.client_shard(0), info, 0, 0, NetPool(plan.setup))
    return stage.client_train(Task(0, {**state}), memory, me)


def moved(state: Payload, by: float) -> Payload:
    """The state with every weight of every net moved by as much."""
    shift = {
        name: {k: t + by if t.is_floating_point() else t for k, t in weights_in(state, name).items()} for name in state
    }
    return {**shift}


def online(parts: Payload, encoder: str) -> Online:
    return Online(*(weights_in(parts, name) for name in (encoder, "projector", "predictor")))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# --- BYOL ----------------------------------------------------------------------------------------------------------


def siamese(seed: int = 0) -> Siamese:
    chance = torch.Generator().manual_seed(seed)
    net = build("cnn-16", classes=10, channels=1, size=8, norm="bn", generator=chance)
    features = net.fc.in_features
    return Siamese(net, head(features, 8, 4, chance), head(4, 8, 4, chance))


def test_no_gradient_reaches_the_target_and_none_the_classifiers_head() -> None:
    online, target = siamese(), siamese(1)
    views = torch.randn(4, 1, 8, 8)
    similarity_loss(online(views), target(views)).backward()
    assert all(parameter.grad is None for parameter in target.parameters())
    assert all(parameter.grad is None for parameter in online.encoder.fc.parameters())
    assert online.encoder.conv1.weight.grad is not None
    assert online.predictor[0].weight.grad is not None


def test_the_target_follows_the_online_net_and_has_no_step_of_its_own() -> None:
    online, target = siamese(), siamese(1)
    before = weights_of(target)
    learn = {"epochs": 1, "batch": 4, "clip": 0.0, "generator": torch.Generator().manual_seed(0)}
    images = torch.randint(256, (4, 1, 8, 8), dtype=torch.uint8)
    views = Views((0.5,), (0.5,), flip=False)
    optimizer = torch.optim.SGD(online.parameters(), lr=0.1)
    learn_siamese(online, target, images, view=views.siamese_view, optimizer=optimizer, decay=0.75, **learn)
    after = weights_of(online)
    for name in ("encoder.conv1.weight", "projector.0.weight"):
        assert torch.allclose(weights_of(target)[name], 0.75 * before[name] + 0.25 * after[name], atol=1e-6)
    # the predictor is the online net's alone
    assert torch.equal(weights_of(target)["predictor.0.weight"], before["predictor.0.weight"])


def test_divergence_is_the_mean_over_convolutions() -> None:
    one = weights_of(build("cnn-16", classes=10, channels=1, size=8, generator=torch.Generator()))
    other = {name: tensor.clone() for name, tensor in one.items()}
    other["conv2.weight"] += 0.5
    other["fc.weight"] += 9
    norm = 0.5 * one["conv2.weight"].numel() ** 0.5
    assert divergence(one, other) == pytest.approx(norm / 3)
    vit = weights_of(build("vit-tiny", classes=10, channels=1, size=8, generator=torch.Generator()))
    away = {name: tensor + 1.0 for name, tensor in vit.items()}
    assert divergence(vit, away) > 0


# --- FedU ----------------------------------------------------------------------------------------------------------


def test_fedu_takes_the_predictor_over_only_from_a_model_that_is_close(world: World) -> None:
    stage = FedUFeatures(**SMALL)
    state = stage_start(stage, world)
    first = trained(stage, state, {}, world)
    assert "divergence" not in first.metrics
    near = {name: first.send[name] for name in state}
    apart = divergence(weights_in(first.keep, "online"), weights_in(moved(near, 0.1), "model"))
    for threshold, over in ((1.01 * apart, 1.0), (0.99 * apart, 0.0)):
        stage = dataclasses.replace(stage, threshold=threshold)
        came = moved(near, 0.1)
        reply = trained(stage, came, first.keep, world)
        assert reply.metrics["divergence"] == pytest.approx(apart)
        assert reply.metrics["predictor_taken_over"] == over
        start = stage.begin(online(came, "model"), online(first.keep, "online"), first.keep, client(world)).online
        assert same(start.model, weights_in(came, "model"))  # the encoder is the server's in any case
        assert same(start.projector, weights_in(came, "projector"))
        assert same(start.predictor, weights_in(came if over else first.keep, "predictor"))


def test_a_client_keeps_its_own_target_whatever_the_server_sends(world: World) -> None:
    """The classic mistake: a target that is set to the global model in every round forgets the client."""
    for stage in (FedUFeatures(**SMALL, target_decay=1.0), FedEMAFeatures(**SMALL, target_decay=1.0)):
        state = stage_start(stage, world)
        first = trained(stage, state, {}, world)
        body = [name for name in weights_in(state, "model") if name.endswith("weight")]
        target = weights_in(first.keep, "target")
        assert all(torch.equal(target[name], weights_in(state, "model")[name]) for name in body)  # it began with both
        second = trained(stage, moved(state, 1.0), first.keep, world)
        assert all(torch.equal(weights_in(second.keep, "target")[name], target[name]) for name in body)


def test_the_head_of_the_classifier_is_not_touched(world: World) -> None:
    stage = FedUFeatures(**SMALL)
    state = stage_start(stage, world)
    reply = trained(stage, state, {}, world)
    sent, first = reply.weights("model"), weights_in(state, "model")
    assert torch.equal(sent["fc.weight"], first["fc.weight"])
    assert not torch.equal(sent["conv1.weight"], first["conv1.weight"])


# --- FedEMA --------------------------------------------------------------------------------------------------------


def test_fedema_begins_at_tau_and_keeps_its_scale(world: World) -> None:
    stage = FedEMAFeatures(**SMALL, tau=0.7)
    state = stage_start(stage, world)
    first = trained(stage, state, {}, world, 0)
    assert "scaler" not in first.keep  # there is nothing to measure yet
    came = moved({name: first.send[name] for name in state}, 0.01)
    second = trained(stage, came, first.keep, world, 1)
    assert second.metrics["own_share"] == pytest.approx(0.7)
    scaler = number_in(second.keep, "scaler")
    assert scaler == pytest.approx(0.7 / second.metrics["divergence"])
    half = moved({name: second.send[name] for name in state}, 0.005)
    third = trained(stage, half, second.keep, world, 2)
    assert third.metrics["own_share"] == pytest.approx(scaler * third.metrics["divergence"])
    assert third.metrics["own_share"] == pytest.approx(0.35, rel=0.05)  # half as far apart: half of its own
    assert number_in(third.keep, "scaler") == scaler
    far = moved({name: third.send[name] for name in state}, 1.0)
    assert trained(stage, far, third.keep, world, 3).metrics["own_share"] == 1.0


def test_fedema_mixes_encoder_projector_and_predictor(world: World) -> None:
    stage = FedEMAFeatures(**SMALL, tau=0.25)
    state = stage_start(stage, world)
    first = trained(stage, state, {}, world, 0)
    came = moved({name: first.send[name] for name in state}, 0.4)
    own, server = online(first.keep, "online"), online(came, "model")
    mixed = stage.begin(server, own, first.keep, client(world)).online
    for ours, theirs, both in zip(own, server, mixed, strict=True):
        name = next(name for name, tensor in ours.items() if tensor.dim() > 1)
        assert torch.allclose(both[name], 0.25 * ours[name] + 0.75 * theirs[name], atol=1e-6)


def test_a_client_that_was_absent_may_begin_anew(world: World) -> None:
    for absent, anew in (("mix", False), ("global", True)):
        stage = FedEMAFeatures(**SMALL, absent=absent)  # type: ignore[arg-type]
        state = stage_start(stage, world)
        first = trained(stage, state, {}, world, 0)
        assert "own_share" in trained(stage, moved(state, 0.1), first.keep, world, 1).metrics
        assert ("own_share" not in trained(stage, moved(state, 0.1), first.keep, world, 5).metrics) == anew


# --- The classifier ------------------------------------------------------------------------------------------------


def test_a_linear_head_leaves_the_encoder_and_its_statistics_alone(world: World) -> None:
    """The classic mistake: the encoder is frozen, but in train mode, and BN's statistics drift."""
    linear, tuned = FedU(**SMALL), FedU(**SMALL, head="finetuned")
    state = linear.server_start(hub(world), {})
    after = weights_in(linear.server_merge(state, [], hub(world)), "model")
    before = weights_in(state, "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"fc.weight", "fc.bias"}
    whole = weights_in(tuned.server_merge(state, [], hub(world)), "model")
    assert not torch.equal(whole["conv1.weight"], before["conv1.weight"])


def test_with_static_bn_the_classifier_begins_with_statistics_of_the_encoder() -> None:
    world = world_of("fedema", "server", net__norm="bn", net__bn="static")
    plan, federation = world
    stage = FedEMAFeatures(**SMALL)
    reply = trained(stage, stage_start(stage, world), {}, world)
    first = FedEMA(**SMALL).server_start(hub(world), {"features": {"model": reply.weights("model")}})
    net = plan.setup.build()
    assert isinstance(net, Net)
    net.load_state_dict(weights_in(first, "model"))
    images = plan.setup.views.plain(federation.server_shard().labeled.images)
    before_norm = torch.nn.functional.max_pool2d(net.conv1(images), 2)
    assert torch.allclose(net.norm1.running_mean, before_norm.mean(dim=(0, 2, 3)), atol=1e-4)


def test_features_need_no_labels() -> None:
    """With other labels the features are the same: only the classifier sees them."""
    world = world_of("fedu", "some-clients")
    stage = FedUFeatures(**SMALL)
    plan, federation = world
    shard = federation.client_shard(plan.setup.labeled_clients[0])
    assert len(shard.labeled)
    assert not len(shard.unlabeled)
    info, replies = RoundInfo("features", 0, 2, 0), []
    for labels in (shard.labeled.labels, 9 - shard.labeled.labels):
        held = dataclasses.replace(shard, labeled=dataclasses.replace(shard.labeled, labels=labels))
        me = Client(plan.setup, held, info, 0, 0, NetPool(plan.setup))
        replies.append(stage.client_train(Task(0, stage_start(stage, world)), {}, me))
    assert replies[0].examples == len(shard.labeled)
    assert same(replies[0].weights("model"), replies[1].weights("model"))


def test_the_stage_has_the_options_of_the_method() -> None:
    (stage,) = FedEMA(hidden=7, projection=5, tau=0.3, absent="global", view="weak", feature_rounds=4).before()
    assert stage.rounds == 4
    assert stage.method == FedEMAFeatures(hidden=7, projection=5, tau=0.3, absent="global", view="weak")


def test_smoke_runs_are_not_those_of_fedu(tmp_path: Path) -> None:
    """The two methods differ from the second round of features on, in nothing else."""
    runs = {}
    for name in ("fedu", "fedema"):
        plan, _ = world_of(name, "server", method__feature_rounds=2)
        runs[name] = run_experiment(plan.experiment, tmp_path / name)
    losses = {name: [r["client_metrics"]["loss"] for r in run.records[:2]] for name, run in runs.items()}
    assert losses["fedu"][0] == losses["fedema"][0]
    assert losses["fedu"][1] != losses["fedema"][1]
    assert digest(runs["fedu"]) != digest(runs["fedema"])


# --- Recipes -------------------------------------------------------------------------------------------------------


def test_table_1_of_bsemifl_is_complete_and_its_new_rows_have_its_one_sgd() -> None:
    rows = [name for name in known_recipes() if name.startswith("bsemifl/table1/")]
    assert len(rows) == 81
    for name in rows:
        if not name.endswith(("-fedu", "-fedema", "-orchestra", "-fedfame", "-pfedknow")):
            continue
        experiment = resolve(load_recipe(name))
        train, before = experiment.train, experiment.method.get("feature_rounds", experiment.method.get("warmup", 0))
        assert (train.lr, train.momentum, train.weight_decay, train.batch, train.epochs) == (0.03, 0.9, 5e-4, 10, 5)
        assert (train.clip, train.nesterov, train.schedule) == (0.0, False, "constant")
        assert experiment.rounds + before == 800
        assert experiment.paper.accuracy is not None
