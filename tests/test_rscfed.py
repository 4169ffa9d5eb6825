"""RSCFed by hand: the teacher, distances, groups; and a client's tasks in several groups of one round, in order."""

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import pytest
import test_cbafed as by_hand
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runs import TINY, digest, timeless
from tacit.config.resolve import resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, NetPool, RoundInfo
from tacit.core.payload import Payload, tensors, weights_in
from tacit.core.settings import Participation
from tacit.engine.run import run_experiment
from tacit.methods.rscfed import RSCFed, distance_shares, model_distance
from tacit.nets.optimizer import sgd
from tacit.pieces.consistency import TwoViews
from tacit.pieces.teacher import early_decay, follow, learn_with_teacher, sharpen, squared_error
from tacit.pieces.train import weights_of
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


def test_sharpening_is_image_by_image() -> None:
    probs = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
    expected = torch.tensor([[0.36, 0.09, 0.01], [0.04, 0.04, 0.36]]) / torch.tensor([[0.46], [0.44]])
    assert torch.allclose(sharpen(probs, 0.5), expected)
    assert torch.allclose(sharpen(probs, 0.5).sum(dim=1), torch.ones(2))
    certain = sharpen(torch.tensor([[1.0, 0.0]]), 0.5)
    assert torch.equal(certain, torch.tensor([[1.0, 0.0]]))  # no NaN from log 0


def test_the_squared_error_is_summed_over_classes() -> None:
    """F.mse_loss would divide by K as well."""
    generator = torch.Generator().manual_seed(0)
    probs, target = (torch.rand(6, 10, generator=generator).softmax(dim=1) for _ in range(2))
    assert squared_error(probs, target).item() == pytest.approx(10 * F.mse_loss(probs, target).item(), rel=1e-5)


def test_an_early_teacher_is_the_mean_of_its_students() -> None:
    teacher, student = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    for step, value in enumerate([2.0, 4.0, 9.0]):
        student.weight.data.fill_(value)
        follow(teacher, student, early_decay(step, 0.999))
    assert teacher.weight.item() == pytest.approx(5.0)
    assert early_decay(10_000, 0.9) == 0.9


@pytest.mark.parametrize("statistics", [True, False])
def test_a_teacher_s_bn_statistics(statistics: bool) -> None:
    """They are the student's, unmixed and of their own types; without `statistics` they stay as they were."""
    teacher, student = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
    student(torch.randn(8, 2, 3, 3, generator=torch.Generator().manual_seed(0)) + 5)
    student.weight.data.fill_(3.0)
    follow(teacher, student, 0.5, statistics)
    assert teacher.weight.tolist() == [2.0, 2.0]
    source = student if statistics else nn.BatchNorm2d(2)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(teacher, name), getattr(source, name))
    assert teacher.num_batches_tracked.dtype == torch.int64


def test_the_teacher_looks_and_the_student_learns() -> None:
    """Each its own view; no gradient reaches the teacher; one decay a step; the teacher's look leaves BN alone."""
    model, teacher = (nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2)) for _ in range(2))
    teacher.load_state_dict(model.state_dict())
    batch = TwoViews(torch.tensor([4, 2]), torch.tensor([[100.0], [200.0]]), torch.tensor([[1.0], [2.0]]))
    first = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 2))
    first.load_state_dict(model.state_dict())
    seen: list[tuple[list[int], list[list[float]], Tensor]] = []

    def loss_of(which: Tensor, views: Tensor, target: Tensor) -> Tensor:
        seen.append((which.tolist(), views.tolist(), target))
        assert not target.requires_grad
        return squared_error(model(views).softmax(dim=1), target)

    optimizer = sgd(model, lr=0.5, momentum=0.0)
    _, steps = learn_with_teacher(model, teacher, [batch] * 3, loss_of, optimizer=optimizer, clip=0, decays=repeat(1.0))
    assert steps == 3
    assert seen[0][:2] == ([4, 2], [[1.0], [2.0]])
    assert torch.allclose(seen[0][2], first.eval()(batch.shown).softmax(dim=1))
    assert torch.equal(teacher[1].weight, first[1].weight)  # decay 1: it never moved
    assert not torch.equal(model[1].weight, first[1].weight)
    # After three looks at 1.5 on average, with momentum .1; had the teacher's 150 been seen, it would be far higher.
    assert teacher[0].running_mean.item() == pytest.approx(1.5 * (1 - 0.9**3), abs=1e-5)
    assert torch.equal(teacher[0].running_mean, model[0].running_mean)
    with pytest.raises(StopIteration):
        learn_with_teacher(model, teacher, [batch] * 2, loss_of, optimizer=optimizer, clip=0, decays=iter([0.5]))


def test_the_distance_is_over_what_is_learned() -> None:
    net = by_hand.setup("bn").build(torch.Generator().manual_seed(0))
    one = weights_of(net)
    other = {name: tensor.clone() for name, tensor in one.items()}
    for name, tensor in other.items():
        if "running" in name or "tracked" in name:
            tensor += 1000
    assert model_distance(one, other) == 0.0
    other["fc.weight"] += 0.5
    other["fc.bias"] += 2.0
    big, small = 0.5 * math.sqrt(one["fc.weight"].numel()), 2.0 * math.sqrt(one["fc.bias"].numel())
    assert model_distance(one, other) == pytest.approx(math.hypot(big, small))
    assert model_distance(one, other, by_tensor=True) == pytest.approx(big + small)


numbers = st.floats(0.1, 50.0)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=6), st.floats(0.0, 20.0))
def test_distance_shares_against_the_formula(parties: list[tuple[float, float]], scale: float) -> None:
    examples, distances = [10 + n for n, _ in parties], [d / 10 for _, d in parties]
    plain = [n * math.exp(-scale * d / n) for n, d in zip(examples, distances, strict=True)]
    expected = [value / sum(plain) for value in plain]
    assert distance_shares(examples, examples, distances, scale) == pytest.approx(expected, rel=1e-6)


def test_distance_shares_where_the_plain_formula_is_zero_over_zero() -> None:
    """β = 10,000, few images, large distances: exp gives 0 for all of them. The nearest still counts."""
    assert math.exp(-10_000 * 8.0 / 60) == 0.0
    weights = distance_shares([60, 60, 60], [60, 60, 60], [8.0, 8.0, 9.0], 10_000)
    assert weights == pytest.approx([0.5, 0.5, 0.0])
    assert distance_shares([0.0, 0.0], [0.0, 0.0], [1.0, 2.0], 10.0) == [0.0, 0.0]
    assert distance_shares([], [], [], 10.0) == []


def reply(client: int, group: int, value: float, examples: float, steps: int = 0) -> Reply:
    model = {"w": torch.tensor([value]), "bn.num_batches_tracked": torch.tensor(steps)}
    return Reply(send={"model": model}, examples=examples, client=client, group=group)


STATE: Payload = {"model": {"w": torch.tensor([0.0]), "bn.num_batches_tracked": torch.tensor(0)}}
# Group 0: clients 0 (labelled, θ = 0, 10 images) and 1 (θ = 4, 10). Group 1: clients 1 (θ = 2, 10) and 2 (θ = 5, 20).
REPLIES = [reply(0, 0, 0.0, 10, 10), reply(1, 0, 4.0, 10, 31), reply(1, 1, 2.0, 10, 50), reply(2, 1, 5.0, 20, 80)]


def test_a_round_by_hand() -> None:
    """Boost 3. Group 0: mean (3·0 + 1·4)/4 = 1, distances 1 and 3. Group 1: mean (2 + 2·5)/3 = 4, distances 2 and 1."""
    ln2 = math.log(2)
    method = RSCFed(labeled_boost=3.0, labeled_scale=10 * ln2, scale=20 * ln2)
    state = method.server_merge(STATE, REPLIES, side := by_hand.hub(0))
    # Group 0, the labelled scale: 3·10·2^−1 : 10·2^−3 = 12 : 1.  Group 1, the other: 10·2^−4 : 20·2^−1 = 1 : 16.
    assert side.notes["party_weights"] == pytest.approx([12 / 13, 1 / 13, 1 / 17, 16 / 17])
    first, second = 4 / 13, (2 + 16 * 5) / 17
    assert weights_in(state, "model")["w"].item() == pytest.approx((first + second) / 2)  # groups count alike
    counter = weights_in(state, "model")["bn.num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert counter.item() == round((round(12 / 13 * 10 + 31 / 13) + round(50 / 17 + 16 * 80 / 17)) / 2)


def test_boosted_twice_is_boosted_in_the_mean_and_after_the_distances() -> None:
    method = RSCFed(labeled_boost=3.0, labeled_scale=0.0, scale=0.0, boost_twice=True)
    method.server_merge(STATE, REPLIES, side := by_hand.hub(0))
    assert side.notes["party_weights"] == pytest.approx([9 / 10, 1 / 10, 1 / 3, 2 / 3])
    once = dataclasses.replace(method, boost_twice=False)
    once.server_merge(STATE, REPLIES, side := by_hand.hub(0))
    assert side.notes["party_weights"] == pytest.approx([3 / 4, 1 / 4, 1 / 3, 2 / 3])


def test_members_that_learned_nothing_count_nothing() -> None:
    """A group of such members has no say; if there is no other, the model stays."""
    empty = [dataclasses.replace(one, examples=0) if one.group == 1 else one for one in REPLIES]
    state = RSCFed(labeled_boost=1.0, labeled_scale=0.0).server_merge(STATE, empty, by_hand.hub(0))
    assert weights_in(state, "model")["w"].item() == pytest.approx(2.0)  # group 0 alone: (0 + 4)/2
    nobody = [dataclasses.replace(one, examples=0) for one in REPLIES]
    assert RSCFed().server_merge(STATE, nobody, by_hand.hub(0)) is STATE


def hub_of(clients: int, round_number: int, participation: Participation | None = None) -> Hub:
    changes: dict[str, Any] = {"clients": clients, "participation": participation or Participation()}
    world = dataclasses.replace(by_hand.setup(), **changes)
    round_info = RoundInfo("main", round_number, 20, round_number)
    return Hub(world, by_hand.shard([], 0), round_info, NetPool(world))


def test_groups_are_drawn_without_replacement_and_anew() -> None:
    rounds = [RSCFed().server_send(STATE, hub_of(10, number)) for number in range(30)]
    for tasks in rounds:
        members = [[task.client for task in tasks if task.group == group] for group in range(3)]
        assert [len(set(group)) for group in members] == [5, 5, 5]
        assert all(group == sorted(group) for group in members)
        assert len(tasks) == RSCFed().estimated_tasks(10) == 15
    drawn = {tuple(task.client for task in tasks) for tasks in rounds}
    assert len(drawn) == 30
    without = sum(all(task.client != 0 for task in tasks) for tasks in rounds)
    assert 0 < without < 15  # (1/2)³ of the rounds: the labelled client may be absent, as published
    again = RSCFed().server_send(STATE, hub_of(10, 7))
    assert [(task.client, task.group) for task in again] == [(task.client, task.group) for task in rounds[7]]


def test_small_federations_and_partial_participation() -> None:
    few = RSCFed().server_send(STATE, hub_of(3, 0))
    assert [(task.client, task.group) for task in few] == [(c, g) for g in range(3) for c in range(3)]
    tasks = RSCFed(group_size=2).server_send(STATE, hub_of(10, 0, Participation(number=4)))
    assert len({task.client for task in tasks}) <= 4


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Task, Payload, Reply, int]]:
    """What crosses the wall in each task of the main stage, in the order in which they ran."""
    original, seen = RSCFed.client_train, list[tuple[Task, Payload, Reply, int]]()

    def train(self: RSCFed, task: Task, memory: Payload, me: Client) -> Reply:
        result = original(self, task, memory, me)
        seen.append((task, memory, result, me.round))
        return result

    monkeypatch.setattr(RSCFed, "client_train", train)
    return seen


def same(one: Payload, other: Payload) -> bool:
    left, right = dict(tensors(one)), dict(tensors(other))
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_a_client_s_tasks_run_in_order_and_its_memory_goes_on(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each task starts from the global model; teacher, step and momentum go on from where the last task left them."""
    seen = watched(monkeypatch)
    tiny("rscfed", "some-clients", method__group_size=4)  # everybody in each of three groups, two rounds
    for number in range(1, 4):
        mine = [entry for entry in seen if entry[0].client == number]
        assert [(task.group, when) for task, _, _, when in mine] == [(g, r) for r in (0, 1) for g in range(3)]
        models = [task.weights("model") for task, _, _, _ in mine]
        for when in (0, 1):
            one, two, three = models[3 * when : 3 * when + 3]
            assert same({"model": one}, {"model": two})
            assert same({"model": one}, {"model": three})
        assert mine[0][1] == {}
        for (_, _, before, _), (_, kept, after, _) in pairwise(mine):
            assert same(kept, before.keep)
            assert kept["step"] == before.keep["step"]
            assert after.keep["step"] == before.keep["step"] + mine[0][2].keep["step"]
            assert not same({"t": kept["teacher"]}, {"t": after.keep["teacher"]})
            assert not same({"m": before.send["model"]}, {"m": after.send["model"]})  # other views, another memory
    labelled = [entry for entry in seen if entry[0].client == 0]
    assert set(labelled[0][2].keep) == {"momentum"}  # it has labels alone, so no teacher
    assert all(set(entry[2].send) == {"model"} for entry in seen)


def test_the_first_teacher_is_the_model_that_came(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """With decay 1 after the first step it stays there, whatever the server sends later."""
    seen = watched(monkeypatch)
    monkeypatch.setattr("tacit.methods.rscfed.early_decay", lambda step, highest: 1.0)
    tiny("rscfed", "some-clients", method__group_size=4, method__teacher_statistics="first")
    mine = [entry for entry in seen if entry[0].client == 1]
    for _, _, result, _ in mine:
        assert same({"t": result.keep["teacher"]}, {"t": mine[0][0].send["model"]})
    assert not same({"t": mine[-1][0].send["model"]}, {"t": mine[0][0].send["model"]})


def test_every_backend_gives_the_same(tmp_path: Path) -> None:
    """Clients in several groups, their teachers, their momentum and BN's statistics: one process, two and three."""
    runs = []
    for name, workers in (("local", 1), ("pool", 2), ("pool", 3)):
        experiment = resolve(
            {"method.name": "rscfed", "method.preset": "smoke", "data.placement": "some-clients"},
            TINY,
            {"backend.name": name, "backend.workers": workers, "net.norm": "bn", "data.clients": 5},
        )
        runs.append(run_experiment(experiment, tmp_path / f"{name}-{workers}"))
    assert any(len(set(record["asked"])) < len(record["asked"]) for record in runs[0].records)
    for other in runs[1:]:
        assert digest(other) == digest(runs[0])
        assert timeless(other) == timeless(runs[0])


def test_a_server_with_labels_is_a_labelled_member_of_every_group(tiny: Tiny) -> None:
    weights = tiny("rscfed", "server", method__scale=0.0, method__labeled_scale=0.0).records[-1]["party_weights"]
    assert len(weights) == 3 * (3 + 1)
    for group in (weights[0:4], weights[4:8], weights[8:12]):
        assert sum(group) == pytest.approx(1.0)
        assert group[-1] > 3 * max(group[:3])  # 100 labels count six times, a client has about 100 images


def test_settings_have_an_effect(tiny: Tiny) -> None:
    plain = {"rounds": 1}
    changes: list[dict[str, Any]] = [
        {},
        {"method__weight": 0.1},
        {"method__temperature": 1.0, "method__decay": 0.3},
        {"method__unlabeled_lr": 0.03},
        {"method__scale": 0.0},
        {"method__distance": "by-tensor"},
        {"method__labeled_boost": 2.0},
        {"method__groups": 2},
    ]
    models = {digest(tiny("rscfed", "some-clients", name=f"run-{k}", **plain, **c)) for k, c in enumerate(changes)}
    assert len(models) == len(changes)
