"""FedIRM by hand: the relation of classes, which classes are known, which predictions are reliable."""

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import test_cbafed as by_hand
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runs import digest
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client
from tacit.core.payload import Payload, first_not_finite, tensor_in, tensors, weights_in
from tacit.methods.fedirm import (
    FedIRM,
    FedIRMWarmUp,
    RelatedLabels,
    dropout_entropy,
    entropy_limit,
    known_rows,
    mean_relation,
    relation_loss,
    relation_matrix,
    reliable,
    two_view_loss,
)
from tacit.pieces.teacher import ramp_up
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 12), st.floats(0.5, 4.0))
def test_the_relation_matrix_against_a_plain_loop(seed: int, count: int, temperature: float) -> None:
    generator, classes = seeded(seed), 4
    logits = torch.randn(count, classes, generator=generator) * 3
    label = torch.randint(classes, (count,), generator=generator)
    kept = torch.rand(count, generator=generator) < 0.6
    matrix = relation_matrix(logits, label, temperature, kept)
    for c in range(classes):
        rows = [logits[i] for i in range(count) if kept[i] and label[i] == c]
        if rows:
            expected = (torch.stack(rows).mean(dim=0) / temperature).softmax(dim=0)
            assert torch.allclose(matrix[c], expected, atol=1e-6)
        else:
            assert matrix[c].tolist() == [0.0] * classes
    assert torch.equal(known_rows(matrix), torch.tensor([bool((kept & (label == c)).any()) for c in range(classes)]))


def test_a_class_that_is_not_there_does_not_look_even() -> None:
    """Mean logits of nothing are zeros, and their softmax is even: averaged in, it would blur what others know."""
    one = relation_matrix(torch.tensor([[6.0, 0.0]]), torch.tensor([0]), 2.0)
    two = relation_matrix(torch.tensor([[0.0, 6.0]]), torch.tensor([1]), 2.0)
    sharp = math.exp(3) / (math.exp(3) + 1)
    mean = mean_relation([one, two], 2)
    assert torch.allclose(mean, torch.tensor([[sharp, 1 - sharp], [1 - sharp, sharp]]), atol=1e-6)
    assert torch.allclose(mean.sum(dim=1), torch.ones(2))


def test_the_relation_loss_is_both_divergences() -> None:
    generator = seeded()
    local, target = (torch.randn(3, 3, generator=generator).softmax(dim=1) for _ in range(2))
    forth = F.kl_div(local.log(), target, reduction="sum")
    back = F.kl_div(target.log(), local, reduction="sum")
    assert relation_loss(local, target).item() == pytest.approx((forth + back).item() / 3, rel=1e-5)
    assert relation_loss(target, target).item() == 0.0
    missing = local * torch.tensor([[1.0], [0.0], [1.0]])
    rows = [
        F.kl_div(local[c].log(), target[c], reduction="sum") + F.kl_div(target[c].log(), local[c], reduction="sum")
        for c in (0, 2)
    ]
    assert relation_loss(missing, target).item() == pytest.approx(float(sum(rows)) / 3, rel=1e-5)
    assert relation_loss(target, missing).item() == pytest.approx(float(sum(rows)) / 3, rel=1e-5)


@pytest.mark.parametrize("known", [True, False])
def test_the_gradient_is_finite_for_wild_logits_and_for_nothing_known(known: bool) -> None:
    logits = torch.tensor([[500.0, -500.0, 0.0], [0.0, 1.0, 2.0]], requires_grad=True)
    kept = torch.tensor([True, known])
    target = torch.eye(3) if known else torch.zeros(3, 3)
    loss = relation_loss(relation_matrix(logits, torch.tensor([0, 2]), 2.0, kept), target)
    loss.backward()
    assert math.isfinite(loss.item())
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert bool(logits.grad[1].any()) == known  # what is not reliable has no part in the relation


def even_head(classes: int) -> nn.Linear:
    head = nn.Linear(6, classes)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@pytest.mark.parametrize(("classes", "published_rejects"), [(5, False), (7, False), (8, True), (10, True)])
def test_the_filter_rejects_at_any_number_of_classes(classes: int, published_rejects: bool) -> None:
    """Predictions that know nothing have entropy ln K. Two nats are more than that for K ≤ 7; a share of ln K never."""
    features = torch.randn(9, 6, generator=seeded())
    entropy = dropout_entropy(features, even_head(classes), 0.2, 11, seeded(1))
    assert entropy.tolist() == pytest.approx([math.log(classes)] * 9, rel=1e-5)
    probs = torch.full((9, classes), 1 / classes)
    ours = reliable(probs, entropy, 0.0, entropy_limit(classes, 0.75))
    published = reliable(probs, entropy, 0.0, entropy_limit(classes, 0.75, nats=2.0))
    assert not ours.accepted.any()
    assert published.accepted.logical_not().all() == published_rejects


def test_a_client_rejects_at_five_classes() -> None:
    """In training: a net that knows nothing gives five classes to nobody, unless the limit is the published one."""
    world = dataclasses.replace(by_hand.setup(lr=1e-9), classes=tuple("abcde"))
    weights = by_hand.fresh(world)
    weights["fc.weight"], weights["fc.bias"] = torch.zeros_like(weights["fc.weight"]), torch.zeros(5)
    task = Task(1, {"model": weights, "relation": torch.eye(5)})
    for preset, reliable_ones in (({}, 0), (FedIRM.presets["released"], 20)):
        me = by_hand.client(world, by_hand.shard([], 20))
        FedIRM(confidence=0.1, unlabeled_lr=1e-9, **preset).client_train(task, {}, me)
        assert int(torch.cat(me.labelling.accepted).sum()) == reliable_ones


def test_the_entropy_under_dropout() -> None:
    """Seeded, between 0 and ln K, from the mean of the passes; without dropout it is the plain entropy."""
    head = nn.Linear(8, 4)
    features = torch.randn(50, 8, generator=seeded()).mul(3).requires_grad_()
    before = torch.random.get_rng_state()
    entropy = dropout_entropy(features, head, 0.5, 11, seeded(1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not entropy.requires_grad
    assert torch.equal(entropy, dropout_entropy(features, head, 0.5, 11, seeded(1)))
    assert not torch.equal(entropy, dropout_entropy(features, head, 0.5, 11, seeded(2)))
    assert entropy.shape == (50,)
    assert float(entropy.min()) >= 0
    assert float(entropy.max()) <= math.log(4) + 1e-6
    probs = head(features).softmax(dim=1)
    plain = dropout_entropy(features, head, 0.0, 2, seeded())
    assert torch.allclose(plain, -(probs * probs.log()).sum(dim=1), atol=1e-5)
    # Concave: the entropy of the mean prediction is at least the mean of the passes' entropies.
    chances = [torch.rand(features.shape, generator=g) for g in [seeded(1)] for _ in range(11)]
    each = [head(features * (chance >= 0.5) / 0.5).softmax(dim=1) for chance in chances]
    mean = torch.stack([-(p * p.log()).sum(dim=1) for p in each]).mean(dim=0)
    assert bool((entropy >= mean - 1e-5).all())


def test_labels_are_smoothed_and_both_views_count() -> None:
    first, second = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.0]])
    log = F.log_softmax(first, dim=1)[0]
    expected = -(0.95 * log[0] + 0.05 * log[1]) + math.log(2)
    assert two_view_loss(first, second, torch.tensor([0]), 0.1).item() == pytest.approx(expected.item(), rel=1e-5)


def test_labelled_batches_tell_the_relation_on_the_way() -> None:
    """The mean over the batches in which a class occurred; class 3 has no label; matrices carry no gradient."""
    labels = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    images = torch.randn(7, 4, generator=seeded())
    model = nn.Linear(4, 4)
    own = RelatedLabels(images, labels, 3, lambda part, chance: part, seeded(), temperature=2.0, smoothing=0.1)
    assert len(list(own.losses(model, epochs=2))) == len(own.seen) == 2 * 2  # batches of 3 and 4, twice
    assert not any(matrix.requires_grad for matrix in own.seen)
    relation = own.relation(4)
    for c in range(3):
        rows = [matrix[c] for matrix in own.seen if matrix[c].sum() > 0]
        assert torch.allclose(relation[c], torch.stack(rows).mean(dim=0), atol=1e-6)
    assert relation[3].tolist() == [0.0] * 4
    endless = own.losses(model)
    assert len([next(endless) for _ in range(9)]) == 9


STATE: Payload = {"model": {"w": torch.tensor([0.0]), "steps": torch.tensor(0)}, "relation": torch.zeros(4, 4)}


def reply(client: int, value: float, examples: float, relation: Tensor | None = None) -> Reply:
    send: Payload = {"model": {"w": torch.tensor([value]), "steps": torch.tensor(int(10 * value))}}
    return Reply(send=send if relation is None else {**send, "relation": relation}, examples=examples, client=client)


def rows(**told: list[float]) -> Tensor:
    matrix = torch.zeros(4, 4)
    for name, row in told.items():
        matrix["abcd".index(name)] = torch.tensor(row)
    return matrix


def test_a_merge_by_hand() -> None:
    """Client 0 is labelled. Weights: all alike, by images, or half for the labelled; whole numbers stay whole."""
    replies = [reply(0, 1.0, 100, rows(a=[0.7, 0.1, 0.1, 0.1])), reply(1, 2.0, 300), reply(2, 6.0, 600)]
    for weigh, weights in (("alike", [1 / 3] * 3), ("examples", [0.1, 0.3, 0.6]), ("half", [0.5, 1 / 6, 1 / 3])):
        state = FedIRM(weigh=weigh).server_merge(STATE, replies, side := by_hand.hub(0))
        assert side.notes["party_weights"] == pytest.approx(weights)
        mean = weights[0] + 2 * weights[1] + 6 * weights[2]
        assert weights_in(state, "model")["w"].item() == pytest.approx(mean)
        assert weights_in(state, "model")["steps"].dtype == torch.int64
        assert weights_in(state, "model")["steps"].item() == round(10 * mean)
        assert torch.equal(tensor_in(state, "relation"), rows(a=[0.7, 0.1, 0.1, 0.1]))
        assert side.notes["relation_diagonal"] == pytest.approx([0.7, 0.0, 0.0, 0.0])


def test_the_mean_relation_is_of_those_who_know_and_is_remembered() -> None:
    """Parties count alike, whatever their size; what nobody told this time is what was told last."""
    first = [
        reply(0, 1.0, 10, rows(a=[0.7, 0.1, 0.1, 0.1], b=[0, 1, 0, 0])),
        reply(1, 1.0, 990, rows(a=[0.5, 0.5, 0, 0])),
    ]
    state = FedIRM().server_merge(STATE, first, by_hand.hub(0))
    assert torch.allclose(tensor_in(state, "relation"), rows(a=[0.6, 0.3, 0.05, 0.05], b=[0, 1, 0, 0]))
    state = FedIRM().server_merge(state, [reply(0, 1.0, 10, rows(c=[0, 0, 1, 0]))], by_hand.hub(1))
    expected = rows(a=[0.6, 0.3, 0.05, 0.05], b=[0, 1, 0, 0], c=[0, 0, 1, 0])
    assert torch.allclose(tensor_in(state, "relation"), expected)
    state = FedIRM().server_merge(state, [reply(2, 3.0, 10)], by_hand.hub(2))
    assert torch.allclose(tensor_in(state, "relation"), expected)


def test_a_labelled_client_that_lacks_classes() -> None:
    world = by_hand.setup(lr=0.1)
    me = by_hand.client(world, by_hand.shard([0] * 9 + [2] * 8, 0), number=0)
    task = Task(0, {"model": by_hand.fresh(world), "relation": torch.zeros(4, 4)})
    answer = FedIRM().client_train(task, {}, me)
    relation = tensor_in(answer.send, "relation")
    assert known_rows(relation).tolist() == [True, False, True, False]
    assert relation.sum(dim=1).tolist() == pytest.approx([1.0, 0.0, 1.0, 0.0], abs=1e-6)
    assert first_not_finite(answer.send) == ""
    assert answer.keep == {}


def test_who_tells_what() -> None:
    """Only labels tell a relation; unlabelled images bring a teacher, which stays with the client."""
    world = by_hand.setup(lr=0.1)
    task = Task(1, {"model": by_hand.fresh(world), "relation": torch.zeros(4, 4)})
    unlabelled = FedIRM(ramp=0).client_train(task, {}, by_hand.client(world, by_hand.shard([], 20)))
    both = FedIRM(ramp=0).client_train(task, {}, by_hand.client(world, by_hand.shard([0, 1, 3, 3], 20)))
    assert set(unlabelled.send) == {"model"}
    assert set(both.send) == {"model", "relation"}
    assert known_rows(tensor_in(both.send, "relation")).tolist() == [True, True, False, True]
    assert (unlabelled.examples, both.examples) == (20, 24)
    assert set(unlabelled.keep) == set(both.keep) == {"teacher"}
    warm = FedIRMWarmUp().client_train(task, {}, by_hand.client(world, by_hand.shard([0, 1, 3, 3], 20)))
    assert (set(warm.send), warm.keep, warm.examples) == ({"model", "relation"}, {}, 4)


def test_an_unknown_relation_teaches_nothing() -> None:
    """Where no row is known the relation term is 0: the model is the one that the teacher alone makes."""
    world = by_hand.setup(lr=0.1)
    answers = {}
    for name, weight, relation in (
        ("both", 1.0, torch.zeros(4, 4)),
        ("alone", 0.0, torch.eye(4)),
        ("taught", 1.0, torch.eye(4)),
    ):
        task = Task(1, {"model": by_hand.fresh(world), "relation": relation})
        method = FedIRM(relation_weight=weight, ramp=0, uncertainty=1.0, confidence=0.0)
        answers[name] = method.client_train(task, {}, by_hand.client(world, by_hand.shard([], 20))).send
    assert same(answers["both"], answers["alone"])
    assert not same(answers["taught"], answers["alone"])


def same(one: Payload, other: Payload) -> bool:
    left, right = dict(tensors(one)), dict(tensors(other))
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_teacher_is_private_and_never_reset(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = FedIRM.client_train, list[tuple[Payload, Reply, int]]()

    def train(self: FedIRM, task: Task, memory: Payload, me: Client) -> Reply:
        result = original(self, task, memory, me)
        if me.number == 1:
            seen.append((memory, result, me.round))
            assert "teacher" not in result.send
        return result

    monkeypatch.setattr(FedIRM, "client_train", train)
    tiny("fedirm", "some-clients", rounds=3)
    assert seen[0][0] == {}
    for (_, before, _), (kept, after, _) in pairwise(seen):
        assert same(kept, before.keep)
        assert not same(kept, after.keep)


def test_the_ramp_and_the_warm_up(tiny: Tiny) -> None:
    """The relation of the warm-up is there in the first round; the unlabelled loss grows with the ramp."""
    assert ramp_up(0, 30) == pytest.approx(math.exp(-5))
    run = tiny("fedirm", "some-clients", data__alpha=0.2, data__min_size=5)
    warm_up, first = run.records[0], run.records[1]
    assert warm_up["asked"] == [0]
    assert 0 < sum(value > 0 for value in warm_up["relation_diagonal"]) <= 10
    assert len(first["asked"]) == 4
    stages = FedIRM(warmup=3, warmup_epochs=9, labeled_epochs=2).before()
    assert (stages[0].rounds, stages[0].method.labeled_epochs) == (3, 9)  # type: ignore[attr-defined]


def test_settings_have_an_effect(tiny: Tiny) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"method__weight": 0.5},
        {"method__relation_weight": 0.0},
        {"method__uncertainty": 1.0, "method__confidence": 0.0},
        {"method__smoothing": 0.0},
        {"method__weigh": "half"},
    ]
    models = {digest(tiny("fedirm", "some-clients", name=f"run-{k}", rounds=1, **c)) for k, c in enumerate(changes)}
    assert len(models) == len(changes)
