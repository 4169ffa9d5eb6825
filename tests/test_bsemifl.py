"""BSemiFL: labels of two models together, a memory that stays at the client, and what the record tells of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from runs import TINY
from tacit.config.resolve import build_method, resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, Labelling, NetPool, RoundInfo
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.payload import Payload, tensor_in, weights_in
from tacit.data.federation import Federation
from tacit.engine.run import run_experiment
from tacit.evaluation.scores import audit, sum_up
from tacit.methods.bsemifl import BSemiFL, Strategy, closeness, ensemble, share_by_closeness
from tacit.methods.semifl import SemiFL
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, prepare

Tiny = Callable[..., Run]
World = tuple[Plan, Federation]


def world(**settings: Any) -> World:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    layers = {"method.name": "bsemifl", "method.preset": "smoke", "data.placement": "server"}
    plan = prepare(resolve(layers, TINY, changes))
    return plan, Federation(plan.dataset, plan.split, plan.setup.device)


def client(here: World, number: int = 0, round: int = 1) -> Client:
    plan, federation = here
    round_info = RoundInfo("main", round, 400, round)
    return Client(plan.setup, federation.client_shard(number), round_info, number, 0, NetPool(plan.setup))


def hub(here: World, round: int = 0) -> Hub:
    plan, federation = here
    return Hub(plan.setup, federation.server_shard(), RoundInfo("main", round, 400, round), NetPool(plan.setup))


@pytest.fixture(scope="module")
def here() -> World:
    return world(train__server_epochs=10)


@pytest.fixture(scope="module")
def task(here: World) -> Task:
    """What client 0 is sent in the first round."""
    method = BSemiFL(warmup=0, threshold=0.3)
    return Task(0, method.server_send(method.server_start(hub(here), {}), hub(here))[0].send)


@pytest.fixture(scope="module")
def memory(here: World, task: Task) -> Payload:
    """What client 0 keeps after its first time."""
    return BSemiFL(warmup=0, threshold=0.3).client_train(task, {}, client(here)).keep


def predictions(here: World, task: Task, memory: Payload) -> tuple[Tensor, Tensor]:
    me = client(here)
    return (
        me.predict(me.model(task.weights("model")), me.shard.unlabeled),
        me.predict(me.model(weights_in(memory, "local")), me.shard.unlabeled),
    )


def test_the_server_tells_its_sums_and_its_prior(here: World, task: Task) -> None:
    server = hub(here)
    labeled = server.shard.labeled
    probs = server.predict(server.model(task.weights("model")), labeled.images)
    sums, prior = task.tensor("sums"), task.tensor("prior")
    assert torch.allclose(sums, probs.sum(dim=0))
    assert sums.shape == prior.shape == (10,)
    assert sums.sum().item() == pytest.approx(len(labeled), rel=1e-4)
    assert prior.tolist() == pytest.approx([float((labeled.labels == k).float().mean()) for k in range(10)])
    assert (probs.argmax(dim=1) == labeled.labels).float().mean() > 0.3  # trained on the labels before it was sent


def test_the_first_time_the_global_model_labels_alone(here: World, task: Task) -> None:
    me = client(here)
    reply = BSemiFL(warmup=0, threshold=0.3).client_train(task, {}, me)
    probs = me.predict(me.model(task.weights("model")), me.shard.unlabeled)
    assert reply.metrics["global_weight"] == 1.0
    assert torch.equal(me.labelling.label[0], probs.argmax(dim=1))
    assert torch.equal(me.labelling.accepted[0], probs.max(dim=1).values >= 0.3)
    assert reply.examples == int(me.labelling.accepted[0].sum())
    assert set(me.labelling.named) == {"global"}


def test_what_is_kept_is_the_trained_model_and_its_sums_over_the_accepted(here: World, task: Task) -> None:
    me = client(here)
    reply = BSemiFL(warmup=0, threshold=0.3).client_train(task, {}, me)
    assert set(reply.keep) == {"local", "sums", "prior"}
    label, accepted = me.labelling.label[0], me.labelling.accepted[0]
    probs = me.predict(me.model(weights_in(reply.keep, "local")), me.shard.unlabeled[accepted])
    assert torch.allclose(tensor_in(reply.keep, "sums"), probs.sum(dim=0), rtol=1e-4)
    histogram = torch.bincount(label[accepted], minlength=10) / accepted.sum()
    assert torch.allclose(tensor_in(reply.keep, "prior"), histogram)
    sent, local = reply.weights("model"), weights_in(reply.keep, "local")
    assert all(torch.equal(sent[name], local[name]) for name in sent)
    assert all(sent[name].untyped_storage().data_ptr() != local[name].untyped_storage().data_ptr() for name in sent)
    soft = BSemiFL(warmup=0, threshold=0.3, local_prior="predictions").client_train(task, {}, client(here))
    assert torch.allclose(tensor_in(soft.keep, "prior"), probs.mean(dim=0), rtol=1e-4)


@pytest.mark.parametrize("formula", ["equation-13", "algorithm-1"])
def test_the_second_time_both_models_label(formula: str, here: World, task: Task, memory: Payload) -> None:
    me = client(here)
    method = BSemiFL(warmup=0, threshold=0.3, local_closeness=formula)  # type: ignore[arg-type]
    reply = method.client_train(task, memory, me)
    f, g = predictions(here, task, memory)
    near_f = closeness(f, task.tensor("sums"), task.tensor("prior"))
    near_g = closeness(g, tensor_in(memory, "sums"), tensor_in(memory, "prior"), formula == "equation-13")
    share = share_by_closeness(near_f, near_g)
    joined = ensemble(f, g, share)
    assert reply.metrics["global_weight"] == pytest.approx(float(share.mean()), rel=1e-5)
    assert 0.05 < float(share.mean()) < 0.95
    assert torch.equal(me.labelling.label[0], joined.argmax(dim=1))
    assert torch.equal(me.labelling.accepted[0], joined.max(dim=1).values >= 0.3)
    assert torch.equal(me.labelling.named["global"].label[0], f.argmax(dim=1))
    assert torch.equal(me.labelling.named["local"].label[0], g.argmax(dim=1))
    assert me.labelling.named["local"].accepted[0].all()


def test_in_the_warm_up_the_global_model_labels_alone(here: World, task: Task, memory: Payload) -> None:
    method = BSemiFL(warmup=5, threshold=0.3)
    early, late = client(here, round=4), client(here, round=5)
    assert method.client_train(task, memory, early).metrics["global_weight"] == 1.0
    assert method.client_train(task, memory, late).metrics["global_weight"] < 1.0
    assert "local" in early.labelling.named  # how good it would be is told all the same


@pytest.mark.parametrize("strategy", get_args(Strategy))
def test_strategies_label_as_they_say(strategy: Strategy, here: World, task: Task, memory: Payload) -> None:
    me = client(here)
    reply = BSemiFL(warmup=0, threshold=0.3, strategy=strategy).client_train(task, memory, me)
    f, g = predictions(here, task, memory)
    label, sure = me.labelling.label[0], me.labelling.accepted[0]
    assert reply.examples == int(sure.sum()) > 0
    if strategy == "global":
        assert torch.equal(label, f.argmax(dim=1))
    elif strategy == "local":
        assert torch.equal(label, g.argmax(dim=1))
        assert reply.metrics["global_weight"] == 0.0
    elif strategy in ("average", "vote"):
        mean = (f + g) / 2
        same = f.argmax(dim=1) == g.argmax(dim=1)
        assert 0 < same.sum() < len(same)
        assert torch.equal(label, mean.argmax(dim=1))
        assert torch.equal(sure, (mean.max(dim=1).values >= 0.3) & (same if strategy == "vote" else same | True))


def test_vote_needs_agreement_even_without_a_threshold(here: World, task: Task, memory: Payload) -> None:
    me = client(here)
    reply = BSemiFL(warmup=0, threshold=0.0, strategy="vote", debias=True).client_train(task, memory, me)
    f, g = predictions(here, task, memory)
    assert reply.examples == int((f.argmax(dim=1) == g.argmax(dim=1)).sum()) < len(f)


def test_a_client_that_accepts_nothing_keeps_what_it_had(here: World, task: Task, memory: Payload) -> None:
    reply = BSemiFL(warmup=0, threshold=1.0).client_train(task, memory, client(here))
    assert (reply.examples, reply.keep) == (0, {})


def test_clients_count_by_accepted_labels() -> None:
    """With a rate of next to nothing the server's own training changes nothing."""
    here = world(train__lr=1e-12, train__weight_decay=0.0)
    old = hub(here).new_weights()

    def moved(by: float) -> payload.Weights:
        return {name: tensor + by for name, tensor in old.items()}

    replies = [
        Reply(send={"model": moved(4.0)}, examples=30),
        Reply(send={"model": moved(8.0)}, examples=10),
        Reply(send={"model": moved(99.0)}, examples=0),
    ]
    after = weights_in(BSemiFL().server_merge({"model": old}, replies, hub(here)), "model")
    assert torch.allclose(after["fc.bias"], old["fc.bias"] + 5.0, atol=1e-5)


class Watch:
    """Everything that crosses the wall, in order, with what each client had kept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[Task, Payload, Reply]] = []
        original = BSemiFL.client_train

        def watched(method: BSemiFL, task: Task, memory: Payload, me: Client) -> Reply:
            reply = original(method, task, memory, me)
            self.seen.append((task, memory, reply))
            return reply

        monkeypatch.setattr(BSemiFL, "client_train", watched)


def vectors(parts: Sequence[tuple[str, Tensor]]) -> set[bytes]:
    """Tensors by their bytes, those aside that are too small to tell anything."""
    return {tensor.contiguous().numpy().tobytes() for _, tensor in parts if tensor.numel() > 5}


def test_a_kept_model_is_in_no_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client sends the model it has just trained, once. What it keeps of it is in nothing that travels later, up
    or down, by value and by memory; its sums and its prior never are.
    """
    watch = Watch(monkeypatch)
    settings = {"method.name": "bsemifl", "method.preset": "smoke", "data.placement": "server"}
    run_experiment(resolve(settings, TINY, {"rounds": 4}), tmp_path / "run")
    assert sum("local" in memory for _, memory, _ in watch.seen) >= 8
    remembered: set[bytes] = set()
    for task, memory, reply in watch.seen:
        remembered |= vectors(list(payload.tensors(memory)))
        travelled = vectors([*payload.tensors(task.send), *payload.tensors(reply.send)])
        assert not travelled & remembered
        statistics = {name: value for name, value in reply.keep.items() if name != "local"}
        assert not travelled & vectors(list(payload.tensors(statistics)))
        assert set(reply.send) == {"model"}


def test_a_client_that_comes_back_finds_its_local_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    settings = {"method.name": "bsemifl", "method.preset": "smoke", "data.placement": "server"}
    changes = {"rounds": 14, "data.clients": 6, "participation.number": 1, "train.server_epochs": 1}
    run_experiment(resolve(settings, TINY, changes), tmp_path / "run")
    last: dict[int, tuple[int, Reply]] = {}
    gaps = []
    for round, (task, memory, reply) in enumerate(watch.seen):
        if task.client in last:
            before, earlier = last[task.client]
            gaps.append(round - before)
            sent, local = weights_in(earlier.send, "model"), weights_in(memory, "local")
            assert all(torch.equal(sent[name], local[name]) for name in sent)
        else:
            assert memory == {}
        if reply.examples:
            last[task.client] = (round, reply)
    assert max(gaps) > 3


def test_the_record_tells_shares_and_accuracies(tiny: Tiny) -> None:
    run = tiny("bsemifl", "server", rounds=3)
    first, last = run.records[0], run.records[-1]
    assert first["client_metrics"]["global_weight"] == {"0": 1.0, "1": 1.0, "2": 1.0, "3": 1.0}
    assert all(0 < share < 1 for share in last["client_metrics"]["global_weight"].values())
    assert "local_label_accuracy" not in first
    for name in ("pseudo_accuracy", "global_label_accuracy", "local_label_accuracy"):
        by_client = last["client_metrics"][name]
        assert set(by_client) == {"0", "1", "2", "3"}
        assert min(by_client.values()) - 1e-9 <= last[name] <= max(by_client.values()) + 1e-9
    assert run["global_label_accuracy"].shape == (3,)


def test_named_audits_stand_beside_the_main_one() -> None:
    """Two clients, of whom one has a local model; a truth that nobody knows (-1) is not counted."""
    index, every = torch.arange(4), torch.ones(4, dtype=torch.bool)
    truth = torch.tensor([0, 1, 1, -1])
    told = Labelling([index], [torch.tensor([0, 1, 0, 0])], [torch.tensor([True, True, False, True])])
    told.named["local"] = Labelling([index], [torch.tensor([0, 0, 0, 0])], [every])
    other = Labelling([index], [torch.tensor([1, 1, 1, 1])], [every])
    counts = [audit(told, truth, 2), audit(other, truth, 2)]
    summed = sum_up([count for count in counts if count is not None])
    assert summed["pseudo_accuracy"] == pytest.approx((2 + 2) / (2 + 3))
    assert summed["accepted_ratio"] == pytest.approx(7 / 8)
    assert summed["local_label_accuracy"] == pytest.approx(1 / 3)
    assert audit(Labelling(), truth, 2) is None
    assert sum_up([]) == {}
    only_named = audit(Labelling(named={"local": told.named["local"]}), truth, 2)
    assert only_named is not None
    assert sum_up([only_named]) == {"local_label_accuracy": pytest.approx(1 / 3)}


def test_static_bn_keeps_each_model_its_own_statistics(tmp_path: Path) -> None:
    here = world(net__norm="bn", net__bn="static")
    method = BSemiFL(warmup=0, threshold=0.2)
    task = Task(0, method.server_send(method.server_start(hub(here), {}), hub(here))[0].send)
    replies = [method.client_train(task, {}, client(here, number)) for number in (0, 1)]
    means = [weights_in(reply.keep, "local")["norm1.running_mean"] for reply in replies]
    assert not torch.allclose(means[0], means[1])
    assert not torch.allclose(means[0], task.weights("model")["norm1.running_mean"])


def test_presets_and_placement() -> None:
    paper = resolve({"method.name": "bsemifl"})
    assert build_method(paper) == BSemiFL()
    assert (paper.train.batch, paper.train.epochs, paper.train.lr, paper.train.momentum) == (10, 5, 0.03, 0.9)
    assert (BSemiFL().threshold, BSemiFL().warmup, BSemiFL().weigh, BSemiFL().mix) == (0.7, 20, "accepted", 0.0)
    base = build_method(resolve({"method.name": "bsemifl", "method.preset": "semifl-base"}))
    assert (base.mix, base.mix_shape, base.server_momentum) == (1.0, SemiFL().mix_shape, SemiFL().server_momentum)
    with pytest.raises(TacitError, match=r'It needs "server"'):
        resolve({"method.name": "bsemifl", "data.placement": "clients"})


def test_all_labels_revealed_is_plain_training(tiny: Tiny) -> None:
    run = tiny("bsemifl", "server", data__reveal="all", train__server_epochs=10)
    assert not any(record["refused"] for record in run.records)
    assert run["accuracy"][-1] > 0.3
