"""FixMatch, FlexMatch, FreeMatch and Fed-Consist: one loop, different rules."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from runs import digest
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client
from tacit.core.payload import Payload
from tacit.methods.fixmatch import FixMatch
from tacit.methods.flexmatch import FlexMatch
from tacit.methods.freematch import FreeMatch
from tacit.nets.optimizer import sgd
from tacit.pieces.consistency import TwoViews, endless_batches, learn_by_batch, two_view_batches
from tacit.pieces.debias import average_prediction, debias, debiasing
from tacit.pieces.loss import masked_cross_entropy
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


def shifted(by: float) -> Callable[[Tensor, torch.Generator], Tensor]:
    return lambda images, generator: images.float() + by


def numbered(count: int) -> Tensor:
    return torch.arange(count).view(-1, 1)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_two_views_of_the_same_images_each_once() -> None:
    batches = list(two_view_batches(numbered(10), 4, shifted(100), shifted(200), seeded()))
    assert sorted(torch.cat([batch.which for batch in batches]).tolist()) == list(range(10))
    for which, shown, learned in batches:
        assert torch.equal(shown.squeeze(1), which + 100.0)
        assert torch.equal(learned.squeeze(1), which + 200.0)
    for _, shown, learned in two_view_batches(numbered(10), 4, shifted(100), None, seeded()):
        assert learned is shown


def test_labelled_batches_never_end_and_keep_their_labels() -> None:
    assert endless_batches(numbered(0), torch.zeros(0), 4, shifted(0), seeded()) is None
    batches = endless_batches(numbered(6), torch.arange(6) * 10, 4, shifted(0), seeded())
    assert batches is not None
    seen = [next(batches) for _ in range(6)]  # three epochs of two batches
    for views, labels in seen:
        assert torch.equal(views.squeeze(1) * 10, labels.float())
    assert sorted(torch.cat([labels for _, labels in seen]).tolist()) == sorted([0, 10, 20, 30, 40, 50] * 3)


def one_step(weight: float, labeled: Iterator[tuple[Tensor, Tensor]] | None) -> tuple[float, Tensor]:
    """A step in which every second image is accepted as class 1, and 0.5 is added to the loss."""
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.1], [0.3]]))
        model.bias.zero_()

    def unlabeled_loss(index: Tensor, shown: Tensor, learned: Tensor) -> Tensor:
        assert not shown.any()
        label = torch.ones(len(index), dtype=torch.int64)
        return weight * masked_cross_entropy(model(learned), label, index % 2 == 0) + 0.5

    batch = TwoViews(torch.tensor([0, 1, 2, 3]), torch.zeros(4, 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    optimizer = sgd(model, lr=1.0, momentum=0.0)
    loss = learn_by_batch(model, [batch], labeled, unlabeled_loss, optimizer=optimizer, clip=0.0)
    return loss, model.weight.detach()


def test_one_step_by_hand() -> None:
    """The loss is over all four images though two are accepted; labels are weighted 1; the extra term is added."""
    start = torch.tensor([[0.1], [0.3]])
    logits = torch.tensor([[1.0], [3.0]]) @ start.T
    believed = F.cross_entropy(logits, torch.ones(2, dtype=torch.int64), reduction="sum") / 4
    loss, _ = one_step(2.0, None)
    assert loss == pytest.approx(2.0 * believed.item() + 0.5, abs=1e-6)
    own = (torch.tensor([[5.0]]), torch.tensor([0]))
    truth = F.cross_entropy(torch.tensor([[5.0]]) @ start.T, torch.tensor([0])).item()
    with_labels, _ = one_step(2.0, iter([own]))
    assert with_labels == pytest.approx(2.0 * believed.item() + 0.5 + truth, abs=1e-6)
    _, weights = one_step(0.0, None)
    assert torch.allclose(weights, start)  # weight 0: nothing is learned from pseudo-labels


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(0.3, 0.95))
def test_flexmatch_against_a_plain_loop(seed: int, threshold: float) -> None:
    """Thresholds from before the batch; only confidence of the full threshold is remembered."""
    generator, classes, count = seeded(seed), 3, 12
    method, memory = FlexMatch(threshold=threshold), {"last_sure": torch.full((count,), -1)}
    last = [-1] * count
    for _ in range(5):
        index = torch.randperm(count, generator=generator)[:5]
        probs = torch.rand(5, classes, generator=generator).mul(4).softmax(dim=1)
        label, kept = method.accept(index, probs, memory)
        most = max(last.count(value) for value in range(-1, classes))
        learned = [last.count(c) / most for c in range(classes)]
        for place in range(5):
            row = probs[place].tolist()
            best = row.index(max(row))
            needed = threshold * learned[best] / (2 - learned[best])
            assert label[place] == best
            if abs(row[best] - needed) > 1e-6:
                assert bool(kept[place]) == (row[best] >= needed)
        for place, number in enumerate(index.tolist()):
            if float(probs[place].max()) >= torch.tensor(threshold):
                last[number] = int(probs[place].argmax())
        assert memory["last_sure"].tolist() == last


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31 - 1), st.floats(0.0, 0.999))
def test_freematch_against_a_plain_loop(seed: int, decay: float) -> None:
    generator, classes = seeded(seed), 3
    even = torch.full((classes,), 1 / classes)
    method = FreeMatch(decay=decay)
    memory = {"confidence": torch.tensor(1 / classes), "mean_prediction": even, "histogram": even}
    usual, mean, histogram = 1 / classes, [1 / classes] * classes, [1 / classes] * classes
    for _ in range(4):
        probs = torch.rand(6, classes, generator=generator).mul(4).softmax(dim=1)
        label, kept = method.accept(torch.arange(6), probs, memory)
        rows = probs.tolist()
        best = [row.index(max(row)) for row in rows]
        usual = decay * usual + (1 - decay) * sum(max(row) for row in rows) / 6
        mean = [decay * mean[c] + (1 - decay) * sum(row[c] for row in rows) / 6 for c in range(classes)]
        histogram = [decay * histogram[c] + (1 - decay) * best.count(c) / 6 for c in range(classes)]
        for place, row in enumerate(rows):
            needed = usual * mean[best[place]] / max(mean)
            assert label[place] == best[place]
            if abs(max(row) - needed) > 1e-5:
                assert bool(kept[place]) == (max(row) >= needed)
    assert memory["confidence"].item() == pytest.approx(usual, abs=1e-5)
    assert memory["mean_prediction"].tolist() == pytest.approx(mean, abs=1e-5)
    assert memory["histogram"].tolist() == pytest.approx(histogram, abs=1e-5)


def test_the_debias_plug_in_divides_the_moving_prior_out() -> None:
    seen = torch.tensor([[0.81, 0.19]]).expand(21, 2)
    debiased = debiasing(lambda: seen, at_once=False, moving=True)  # the prior becomes .8 and .2
    torch.testing.assert_close(debiased(torch.tensor([[0.6, 0.4]])), torch.tensor([[0.75, 2.0]]) / 2.75)


def test_the_moving_plug_in_follows_the_model_and_the_fixed_one_does_not() -> None:
    """The model drifts towards class 1 while it learns: a prior from the round's start raises class 1 further."""
    seen = torch.tensor([[0.8, 0.2]]).expand(100, 2)
    debiased, stale = (debiasing(lambda: seen, at_once=False, moving=moving) for moving in (True, False))
    drifted = torch.tensor([[0.4, 0.6]]).expand(10, 2)
    for _ in range(60):
        fair = debiased(drifted)
    assert fair.flatten().tolist() == pytest.approx([0.5] * 20, abs=0.01)  # the prior is what the model says
    assert stale(drifted).argmax(dim=1).tolist() == [1] * 10
    assert debiased(torch.tensor([[0.45, 0.55]])).argmax(dim=1).tolist() == [0]  # less of 1 than usual: it is a 0


def test_labelling_all_images_at_once_uses_their_own_mean() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.9, 0.1]])
    debiased = debiasing(lambda: pytest.fail("nobody looks before"), at_once=True, moving=False)
    torch.testing.assert_close(debiased(probs), debias(probs, average_prediction(probs)))


@pytest.mark.parametrize(
    ("method", "name"), [("flexmatch", "last_sure"), ("freematch", "confidence"), ("freematch", "mean_prediction")]
)
def test_a_rule_s_memory_stays_with_the_client_and_grows(
    method: str, name: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was kept in one round is where the next one begins; only the model travels."""
    original, seen = FixMatch.client_train, []

    def watched(self: FixMatch, task: Task, memory: Payload, me: Client) -> Reply:
        reply = original(self, task, memory, me)
        if me.number == 0:
            seen.append((memory.get(name), reply.keep[name]))
        assert set(reply.send) == {"model"}
        return reply

    monkeypatch.setattr(FixMatch, "client_train", watched)
    tiny(method, "server", rounds=3)
    (nothing, first), (found, second), (again, _) = seen
    assert nothing is None
    assert torch.equal(found, first)
    assert not torch.equal(first, second)
    assert torch.equal(again, second)


def test_flexmatch_begins_with_everything_and_fixmatch_with_little(tiny: Tiny) -> None:
    settings: dict[str, Any] = {"method__warmup": 0, "method__threshold": 0.95, "rounds": 1, "train__lr": 0.001}
    flex = tiny("flexmatch", "server", name="flex", **settings)
    fix = tiny("fixmatch", "server", name="fix", **settings)
    assert flex.records[0]["accepted_ratio"] > 0.5
    assert fix.records[0]["accepted_ratio"] < 0.05


def test_the_family_differs_only_by_its_rule(tiny: Tiny) -> None:
    """FlexMatch with threshold 0 believes everything, as FixMatch with threshold 0: the same model, bit for bit."""
    for labels in ("batch", "round"):
        settings: dict[str, Any] = {"method__threshold": 0.0, "method__labels": labels, "rounds": 1}
        fix = tiny("fixmatch", "clients", name=f"fix-{labels}", **settings)
        flex = tiny("flexmatch", "clients", name=f"flex-{labels}", **settings)
        assert digest(fix) == digest(flex)


def test_fairness_and_debias_are_switches(tiny: Tiny) -> None:
    models = {
        digest(tiny("freematch", "clients", name=f"free-{value}", rounds=1, method__fairness=value))
        for value in (0.0, 1.0)
    }
    assert len(models) == 2
    for method in ("fixmatch", "flexmatch", "freematch", "fed_consist"):
        runs = [
            tiny(method, "some-clients", name=f"{method}-{on}", rounds=1, method__debias=on) for on in (True, False)
        ]
        assert digest(runs[0]) != digest(runs[1]), method


def test_fed_consist_gives_labelled_parties_half(tiny: Tiny) -> None:
    weights = tiny("fed_consist", "some-clients", name="half").records[-1]["party_weights"]
    assert weights[0] == pytest.approx(0.5)
    assert sum(weights) == pytest.approx(1.0)
    assert len(weights) == 4
    two = tiny("fed_consist", "some-clients", name="two", data__labeled_clients=2, method__labeled_share=0.6)
    assert sum(two.records[-1]["party_weights"][:2]) == pytest.approx(0.6)
    server = tiny("fed_consist", "server", name="server").records[-1]["party_weights"]
    assert (len(server), server[-1]) == (5, pytest.approx(0.5))  # the server is the labelled party


def test_fed_consist_plus_counts_by_what_was_trained_on(tiny: Tiny) -> None:
    run = tiny("fed_consist", "some-clients", method__plus=True, method__threshold=0.5)
    record = run.records[-1]
    kept = sum(record["accepted_by_class"])
    unlabeled = sum(record["party_weights"][1:])
    labeled = kept * record["party_weights"][0] / unlabeled  # weights are in proportion to images
    assert labeled == pytest.approx(round(labeled), abs=1e-6)
    assert round(labeled) > 50
    strong, weak = (tiny("fed_consist", "server", name=view, method__view=view) for view in ("strong", "weak"))
    assert digest(strong) != digest(weak)


def test_the_warm_up_has_rounds_and_epochs_of_its_own(tiny: Tiny) -> None:
    losses = []
    for epochs in (1, 10):
        run = tiny("fixmatch", "server", name=str(epochs), rounds=1, method__warmup=2, method__warmup_epochs=epochs)
        assert [record["stage"] for record in run.records] == ["warm-up", "warm-up", "main"]
        losses.append(run.records[1]["loss"])
    assert losses[1] < losses[0]
