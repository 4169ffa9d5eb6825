"""What the methods do where an audit found them beside the papers: weights, rates, priors, views."""

import dataclasses
from typing import Any

import pytest
import test_cbafed as by_hand
import torch
from torch import Tensor

from runs import world_of
from tacit.contract.method import Method, Reply, Task
from tacit.contract.parties import Client, Party, RoundInfo
from tacit.methods.cbafed import CBAFed
from tacit.methods.ddrfed.ddrfed import DDRFed, LabelsAlone
from tacit.methods.fed_consist import FedConsist
from tacit.methods.fedirm import FedIRM
from tacit.methods.fedmatch import FedMatch
from tacit.methods.fixmatch import FixMatch
from tacit.methods.pdcfed import PDCFed
from tacit.methods.rscfed import RSCFed
from tacit.pieces import debias as debias_pieces
from tacit.pieces.aggregate import labeled_shares, shares

MODEL = "model"


def ask(method: Method, me: Client, **more: Any) -> Reply:
    weights = by_hand.fresh(me._setup)
    return method.client_train(Task(me.number, {MODEL: weights, **more}), {}, me)


@pytest.mark.parametrize("labels", [[0, 1, 2, 3], []])
@pytest.mark.parametrize("kind", [FixMatch, PDCFed, RSCFed, FedIRM])
def test_a_labelled_image_counts_once(kind: type[Method], labels: list[int]) -> None:
    """Four labelled images among twenty unlabelled ones are twenty images; apart from them, twenty-four."""
    world = by_hand.setup()
    held = by_hand.shard(labels, 20)
    more = {"relation": torch.zeros(4, 4)} if kind is FedIRM else {}
    among = dataclasses.replace(held, repeated=len(labels))
    assert ask(kind(), by_hand.client(world, among), **more).examples == 20
    assert ask(kind(), by_hand.client(world, held), **more).examples == 20 + len(labels)


def test_shards_of_a_simulation_know_what_is_in_both_parts() -> None:
    """In placement `clients` a client's labelled images are in its unlabelled set; elsewhere nothing is in both."""
    plan, federation = world_of("fixmatch", "clients")
    for number, part in enumerate(plan.split.clients):
        shard = federation.client_shard(number)
        assert shard.repeated == len(part.labeled) > 0
        assert shard.held == len(set(part.labeled) | set(part.unlabeled)) == len(part.unlabeled)
    _, federation = world_of("fixmatch", "some-clients")
    assert [federation.client_shard(number).repeated for number in range(4)] == [0] * 4
    _, revealed = world_of("fixmatch", "some-clients", data__reveal="all")
    assert revealed.client_shard(1).repeated == revealed.client_size(1) / 2


def test_labelled_parties_never_weigh_less_than_by_their_images() -> None:
    """DDRFed Sec. 3.3.3 raises their weight: with five of ten labelled, phi was .67 to .97."""
    examples, labeled = [900.0, 700.0, 800.0, 400.0, 200.0, 100.0], [True] * 3 + [False] * 3
    weights = labeled_shares(examples, labeled, 0.5)
    assert weights == pytest.approx(shares(examples))
    assert sum(weights[:3]) == pytest.approx(2400 / 3100)
    few = labeled_shares([100.0, 900.0, 800.0], [True, False, False], 0.5)
    assert few == pytest.approx([0.5, 9 / 34, 8 / 34])


def test_ddrfed_s_labelled_clients_keep_what_they_hold() -> None:
    side = by_hand.hub(1)
    side.labeled_clients = (0, 1)
    model = by_hand.fresh(by_hand.setup())

    def reply(number: int, examples: int) -> Reply:
        return Reply(send={MODEL: model, "counts": torch.ones(4)}, examples=examples, client=number)

    state = {MODEL: model, "counts": torch.ones(4)}
    DDRFed(gdgm=False).server_merge(state, [reply(0, 60), reply(1, 20), reply(2, 20)], side)
    assert side.notes["party_weights"] == pytest.approx([0.6, 0.2, 0.2])
    DDRFed(gdgm=False).server_merge(state, [reply(0, 10), reply(1, 10), reply(2, 60)], side)
    assert side.notes["party_weights"] == pytest.approx([0.25, 0.25, 0.5])


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rate of every optimiser that is made."""
    seen: list[float] = []
    original = Party.optimizer

    def watched(me: Party, *given: Any, **named: Any) -> Any:
        optimizer = original(me, *given, **named)
        seen.append(optimizer.param_groups[0]["lr"])
        return optimizer

    monkeypatch.setattr(Party, "optimizer", watched)
    return seen


def at_round(world: Any, held: Any, number: int) -> Client:
    from tacit.contract.parties import NetPool

    return Client(world, held, RoundInfo("main", number, 20, number), 1, 0, NetPool(world))


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (PDCFed(unlabeled_lr=0.02), {}),
        (RSCFed(unlabeled_lr=0.02), {}),
        (FedIRM(unlabeled_lr=0.02), {"relation": torch.zeros(4, 4)}),
        (FixMatch(unlabeled_lr=0.02), {}),
        (FixMatch(unlabeled_lr=0.02, labels="round", threshold=0.0), {}),
        (FedConsist(unlabeled_lr=0.02), {}),
        (FedConsist(unlabeled_lr=0.02, plus=True, threshold=0.0), {}),
        (DDRFed(unlabeled_lr=0.02, gdgm=False), {"shares": torch.full((4,), 0.25)}),
        (CBAFed(unlabeled_lr=0.02), {"thresholds": torch.zeros(4), "shares": torch.full((4,), 0.25)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_the_rate_without_labels_follows_the_schedule(method: Method, more: dict, rates: list[float]) -> None:
    """.02 at first, half of it half-way through a cosine; constant otherwise."""
    for schedule, expected in (("cosine", 0.01), ("constant", 0.02)):
        world = by_hand.setup(schedule=schedule)
        rates.clear()
        ask(method, at_round(world, by_hand.shard([], 12), 10), **more)
        assert rates == pytest.approx([expected])


def test_without_a_rate_of_its_own_an_unlabelled_client_has_the_usual_one(rates: list[float]) -> None:
    world = by_hand.setup(lr=0.05)
    ask(FixMatch(), by_hand.client(world, by_hand.shard([], 12)))
    ask(FixMatch(unlabeled_lr=0.02), by_hand.client(world, by_hand.shard([0, 1, 2], 0)))
    ask(FixMatch(unlabeled_lr=0.02), by_hand.client(world, by_hand.shard([0, 1, 2], 12)))  # it has labels, too
    assert rates == [0.05, 0.05, 0.05]


@pytest.mark.parametrize("kind", [FixMatch, FedConsist, RSCFed])
def test_labelled_clients_have_epochs_of_their_own(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int | None] = []
    original = Client.fit_labeled
    monkeypatch.setattr(
        Client,
        "fit_labeled",
        lambda me, model, epochs=None, **rest: passes.append(epochs) or original(me, model, epochs, **rest),
    )
    world = by_hand.setup()
    for method in (kind(), kind(labeled_epochs=11)):
        ask(method, by_hand.client(world, by_hand.shard([0, 1, 2], 0)))
    assert passes == [None, 11]
    assert kind(labeled_epochs=11).estimated_passes(1) == (11, 1)


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (FixMatch(debias=True), {}),
        (CBAFed(debias=True, labels="batch"), {"thresholds": torch.zeros(4), "shares": torch.full((4,), 0.25)}),
    ],
    ids=["fixmatch", "cbafed"],
)
def test_batch_wise_debiasing_divides_by_one_prior_of_weak_views(
    method: Any, more: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedDB Eq. 8 and Algorithm 1: what the model that came sees in weak views of all images, for the whole round."""
    world, shown = by_hand.setup(), list[Tensor]()
    me = by_hand.client(world, by_hand.shard([], 30))
    priors: list[Tensor] = []
    original = debias_pieces.debias
    monkeypatch.setattr(debias_pieces, "debias", lambda probs, prior: priors.append(prior) or original(probs, prior))
    weak_view = type(me.views).weak_view
    monkeypatch.setattr(
        type(me.views), "weak_view", lambda views, *a, **k: (made := weak_view(views, *a, **k), shown.append(made))[0]
    )
    model = me.model(by_hand.fresh(world))
    ask(method, me, **more)
    assert len(priors) > 3  # one for each batch
    assert all(torch.equal(prior, priors[0]) for prior in priors)
    model.load_state_dict(by_hand.fresh(world))
    with torch.no_grad():
        expected = model.eval()(shown[0]).softmax(dim=1).mean(dim=0)
    assert len(shown[0]) == 30
    assert priors[0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    priors.clear()
    ask(dataclasses.replace(method, debias_prior="moving"), me, **more)
    assert not torch.equal(priors[0], priors[-1])


def test_fedmatch_divides_by_a_prior_of_weak_views_that_stays() -> None:
    """Its own labels are given to plain images, its prior is of weak views; helpers keep the mean of what they say."""
    from tacit.methods.fedmatch import advice_of

    seen = torch.tensor([[0.8, 0.2]] * 10)
    fixed = debias_pieces.debiasing(lambda: seen, at_once=False, moving=False)
    advice = advice_of(torch.zeros(0, 10, 2), 0.5, fixed)
    drifted = torch.tensor([[0.4, 0.6]] * 10)
    first, again = advice.accept(drifted), advice.accept(drifted)
    assert torch.equal(first.label, again.label)
    assert first.label.tolist() == [1] * 10
    assert FedMatch().debias_prior == "fixed"


@pytest.mark.parametrize("weak", ["dsa", "views"])
def test_ddrfed_s_warm_up_shows_the_views_of_its_main_stage(weak: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tacit.methods.ddrfed import ddrfed

    batches: list[int] = []
    original = ddrfed.dsa
    monkeypatch.setattr(ddrfed, "dsa", lambda images, *rest: batches.append(len(images)) or original(images, *rest))
    (stage,) = DDRFed(gdgm=False, weak=weak, warmup=3).before()  # type: ignore[arg-type]
    assert isinstance(stage.method, LabelsAlone)
    world = by_hand.setup()
    me = by_hand.client(world, by_hand.shard([0, 1, 2, 3] * 6, 0), number=0)
    reply = ask(stage.method, me)
    assert batches == ([8, 8, 8] if weak == "dsa" else [])  # DSA: one operation for each step's images
    assert reply.examples == 24
    assert reply.tensor("counts").tolist() == [6, 6, 6, 6]
    ask(DDRFed(gdgm=False, weak=weak), me, shares=torch.full((4,), 0.25))  # type: ignore[arg-type]
    assert batches == ([8] * 6 if weak == "dsa" else [])
