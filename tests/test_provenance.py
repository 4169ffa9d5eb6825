"""Provenance: the prior of a place, labels by it, a labeller that stays, and the merge."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from runs import client, hub, same, world_of
from tacit.config.resolve import resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, NetPool, RoundInfo
from tacit.contract.parts import shard_in_turn
from tacit.contract.shard import Labeled
from tacit.core.errors import TacitError
from tacit.core.payload import tensor_in, weights_in
from tacit.methods.provenance import (
    FirstLabeller,
    HeldOut,
    Provenance,
    by_prior,
    calibrated_step,
    in_fold,
    own_prior,
    slope_of_temper,
    tempered,
)
from tacit.pieces.loss import LabelLoss
from tacit.runs.folder import Run

Tiny = Callable[..., Run]
NOTHING = torch.full((4,), 1e-6)


def answers(truth: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Calibrated answers of a labeller that sees each image's class through noise."""
    seen = torch.nn.functional.one_hot(truth, 4) + 0.8 * torch.randn(len(truth), 4, generator=gen(seed))
    return (seen / 0.8**2).softmax(1)  # Bayes' rule for that noise, all classes alike


def gen(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(prior: list[float], count: int = 2000) -> torch.Tensor:
    return torch.multinomial(torch.tensor(prior), count, replacement=True, generator=gen(1))


@pytest.mark.parametrize("prior", [[0.5, 0.5, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
def test_a_place_learns_its_prior_from_unlabelled_images(prior: list[float]) -> None:
    """Where all are alike it finds that, too: the classic mistake, a prior that feeds on itself, would sharpen it."""
    probs = answers(drawn(prior))
    assert own_prior(probs, NOTHING).tolist() == pytest.approx(prior, abs=0.06)


def test_labels_are_better_by_it_where_classes_are_few() -> None:
    truth = drawn([0.5, 0.5, 0.0, 0.0])
    probs = answers(truth)
    labels = by_prior(probs, own_prior(probs, NOTHING))
    before, after = ((one.argmax(1) == truth).float().mean().item() for one in (probs, labels))
    assert before < 0.75
    assert after > before + 0.08
    assert torch.allclose(labels.sum(1), torch.ones(len(labels)))


def test_what_is_known_counts_as_images_do() -> None:
    """Two images that say nothing, and six that are known: the prior is theirs."""
    probs = torch.full((2, 2), 0.5)
    assert own_prior(probs, torch.tensor([6.0, 0.0]))[0].item() == pytest.approx(1.0)
    assert own_prior(probs, torch.zeros(2)).tolist() == [0.5, 0.5]


def told(classes: int, *first: float) -> torch.Tensor:
    """A count of so many images by class: these, and the rest none."""
    return torch.tensor([*first, *[0.0] * (classes - len(first))])


def reply(value: float, examples: float, who: int, classes: torch.Tensor) -> Reply:
    send: Any = {"model": {"w": torch.tensor([value])}, "classes": classes}
    return Reply(send=send, examples=examples, client=who)


def began(here: Hub) -> Any:
    even = torch.full((here.classes,), 1 / here.classes)
    state: Any = {"model": {"w": torch.tensor([0.0])}, "labeller": {"w": torch.tensor([7.0])}, "generation": 1}
    nothing, ones = torch.zeros(here.classes), torch.ones(here.classes)
    counted: Any = {"target": even, "classes": nothing, "labels": 1000.0}
    return {**state, **counted, "tilt": ones, "best_tilt": ones, "best_mean": nothing, "step": 0.5}


def test_the_merge_by_hand() -> None:
    """One labelled client of two: 10 of 100 images, but a fifth of the mean."""
    here = hub(world_of("provenance", "some-clients"))
    labeled = here.labeled_clients[0]
    other = next(number for number in range(10) if number not in here.labeled_clients)
    said = torch.full((here.classes,), 5.0)
    replies = [reply(5.0, 10, labeled, said), reply(1.0, 90, other, said)]
    merged = Provenance(labeled_share=0.2).server_merge(began(here), replies, here)
    assert weights_in(merged, "model")["w"].item() == pytest.approx(0.2 * 5.0 + 0.8 * 1.0)
    assert weights_in(merged, "labeller")["w"].item() == 7.0


def test_the_tilt_goes_to_even_shares_as_far_as_few_labels_explain_that_they_are_not() -> None:
    """By hand: half of the images are of one class. Who learned from a dozen labels may just like it; who learned from
    a million has counted. The classic mistake, always pulling to even shares, ruins labels where classes are rare."""
    here = hub(world_of("provenance", "some-clients"))
    even = 1.0 / here.classes
    said = 100 * torch.tensor([0.5, *[0.5 / (here.classes - 1)] * (here.classes - 1)])
    few, many = (
        Provenance(align=0.5).tilted({**began(here), "labels": labels}, [reply(0.0, 100, 0, said)], here)
        for labels in (12.0, 1e6)
    )
    assert tensor_in(few, "target").tolist() == pytest.approx([even] * here.classes)
    assert tensor_in(few, "tilt")[0].item() == pytest.approx((even / 0.5) ** 0.5)
    assert tensor_in(many, "target")[0].item() == pytest.approx(0.5, abs=1e-4)
    assert tensor_in(many, "tilt").tolist() == pytest.approx([1.0] * here.classes, abs=1e-4)


def test_smoothed_labels_are_adjusted_by_what_smoothing_leaves_of_the_shares() -> None:
    """The classic mistake, the log of the shares themselves: a class of which there is nothing but what smoothing gives
    every image is then named everywhere. By hand: the loss has no slope where a model says even shares."""
    shares = torch.tensor([0.7, 0.299, 0.001])
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = LabelLoss(shares=shares, adjustment=1.0, smoothing=0.1)
    sum(share * loss(logits, torch.tensor([number])) for number, share in enumerate(shares)).backward()
    assert logits.grad is not None
    assert logits.grad.abs().max().item() < 1e-6


def test_later_generations_keep_the_target_of_the_first() -> None:
    """The classic mistake: each shrinks anew what the one before had shrunk, and the target ends at even shares."""
    here = hub(world_of("provenance", "server"))
    target = torch.tensor([0.6, *[0.4 / (here.classes - 1)] * (here.classes - 1)])
    first = {**Provenance().server_start(here, {}), "target": target}
    second = Provenance().server_start(here, {"generation 1": first})
    said = torch.full((here.classes,), 10.0)
    after = Provenance(align=0.5).tilted(second, [reply(0.0, 100, 0, said)], here)
    assert torch.equal(tensor_in(after, "target"), target)
    assert tensor_in(after, "tilt")[0].item() == pytest.approx((0.6 * here.classes) ** 0.5)


def test_the_target_waits_until_all_were_asked_and_then_stays() -> None:
    world = world_of("provenance", "some-clients", participation__fraction=0.5)
    method, first = Provenance(align=0.5), hub(world)
    skewed, other = told(first.classes, 100.0), told(first.classes, 0.0, 100.0)
    state = {**began(first), **method.tilted(began(first), [reply(0.0, 100, 0, skewed)], first)}
    assert tensor_in(state, "tilt").tolist() == [1.0] * first.classes, "half of the clients say nothing about all"
    second = Hub(world[0].setup, world[1].server_shard(), RoundInfo("main", 1, 4, 1), NetPool(world[0].setup))
    state = {**state, **method.tilted(state, [reply(0.0, 100, 1, other)], second)}
    assert tensor_in(state, "classes")[:2].tolist() == [50.0, 100.0]  # what was said before fades by half
    target = tensor_in(state, "target")
    assert target[:2].tolist() == pytest.approx([1 / 3, 2 / 3], abs=0.04)  # less what 1,000 labels leave open
    third = Hub(world[0].setup, world[1].server_shard(), RoundInfo("main", 2, 4, 2), NetPool(world[0].setup))
    later = method.tilted(state, [reply(0.0, 100, 0, skewed)], third)
    assert torch.equal(tensor_in(later, "target"), target)


def test_a_tilt_that_leads_away_is_taken_back_and_the_step_halved() -> None:
    """The classic mistake: going on from where one is. Priors amplify a tilt, and one class swallows all others."""
    world = world_of("provenance", "some-clients")
    method, classes = Provenance(align=0.5), len(world[0].setup.classes)
    later = [
        Hub(world[0].setup, world[1].server_shard(), RoundInfo("main", n, 9, n), NetPool(world[0].setup))
        for n in range(3)
    ]
    first, further = told(classes, 60.0, 40.0), told(classes, 10.0, 90.0)
    state = {**began(later[0]), **method.tilted(began(later[0]), [reply(0.0, 100, 0, first)], later[0])}
    state = {**state, "target": torch.tensor([0.5, 0.5, *[0.0] * (classes - 2)])}
    better = method.tilted(state, [reply(0.0, 100, 0, told(classes, 52.0, 48.0))], later[1])
    assert torch.equal(tensor_in(better, "best_tilt"), tensor_in(state, "tilt"))
    assert better["step"] == 0.5
    worse = method.tilted(state, [reply(0.0, 100, 0, further)], later[1])
    assert tensor_in(worse, "best_tilt").tolist() == [1.0] * classes
    assert worse["step"] == 0.25
    assert tensor_in(worse, "tilt")[0].item() == pytest.approx((0.5 / 0.6) ** 0.25)


def test_the_labeller_is_asked_once_a_generation_about_all_images_of_a_client() -> None:
    """With parts: the answers of the first round serve all later ones, and are those of a new labeller after it."""
    world = world_of("provenance", "server", train__parts=2)
    plan, federation = world
    shard, method, here = federation.client_shard(0), Provenance(), hub(world)

    def trained(state: Any, memory: Any, turn: int) -> Reply:
        part = shard_in_turn(shard, 2, turn, 0)
        me = Client(plan.setup, shard, RoundInfo("main", turn, 2, turn), 0, 0, NetPool(plan.setup), part)
        return method.client_train(Task(0, {**state}), memory, me)

    state = method.server_start(here, {})
    first = trained(state, {}, 0)
    assert set(first.send) == {"model", "classes"}
    assert tensor_in(first.keep, "answers").shape == (len(shard.unlabeled), here.classes)
    assert tensor_in(first.send, "classes").sum().item() == pytest.approx(len(shard.unlabeled), rel=1e-4)
    labeller = weights_in(state, "labeller")
    noise = {name: torch.randn(weight.shape, generator=gen(3)) for name, weight in labeller.items()}
    second = trained({**state, "labeller": noise}, first.keep, 1)
    assert second.keep == {}
    assert torch.equal(tensor_in(second.send, "classes"), tensor_in(first.send, "classes")), "nobody was asked again"
    later = trained({**state, "labeller": noise, "generation": 2}, first.keep, 1)
    assert later.keep["generation"] == 2
    assert not torch.equal(tensor_in(later.keep, "answers"), tensor_in(first.keep, "answers"))


@pytest.mark.parametrize(("first", "shown"), [(0.25, "strong"), (0.35, "strong"), (0.5, "weak"), (0.0, "weak")])
def test_who_sees_what_all_see_shows_images_strongly(first: float, shown: str) -> None:
    """By the distance from what all clients see, not from even shares."""
    place = world_of("provenance", "server")
    me, count = client(place), client(place).classes
    prior = torch.tensor([first, *[(1 - first) / (count - 1)] * (count - 1)])
    target = torch.tensor([0.25, *[0.75 / (count - 1)] * (count - 1)])

    def view(method: Provenance) -> str:
        found = method.view_for(prior, Task(0, {"target": target}), me)
        return {me.views.strong_view: "strong", me.views.weak_view: "weak"}[found]

    assert view(Provenance()) == shown
    assert view(Provenance(view="weak")) == "weak"
    assert view(Provenance(view="strong")) == "strong"


def test_where_a_class_is_rare_the_model_that_labels_for_others_does_not_know() -> None:
    """Its logits are adjusted by the shares, else the next generation's priors would count them twice."""
    world = world_of("provenance", "server")
    (*_, earlier) = Provenance(generations=2).before()

    def learned(method: Any, first: float) -> Any:
        state = method.server_start(hub(world), {})
        rest = (1 - first) / (len(world[0].setup.classes) - 1)
        target = torch.tensor([first, *[rest] * (len(world[0].setup.classes) - 1)])
        return weights_in(method.client_train(Task(0, {**state, "target": target}), {}, client(world)).send, "model")

    assert not same(learned(earlier.method, 0.9), learned(earlier.method, 0.1))
    assert same(learned(Provenance(), 0.9), learned(Provenance(), 0.1)), "unless train.logit_adjustment says so"


def test_the_labeller_stays_while_the_model_learns(tiny: Tiny) -> None:
    short, long = (tiny("provenance", "clients", name=f"r{n}", rounds=n, train__schedule="constant") for n in (1, 3))
    one, other = short.state(), long.state()
    assert same(weights_in(one, "labeller"), weights_in(other, "labeller"))
    assert not same(weights_in(one, "model"), weights_in(other, "model"))
    assert not same(weights_in(one, "model"), weights_in(one, "labeller"))


def test_each_generation_is_labelled_by_the_model_of_the_one_before() -> None:
    """By hand: the stages, and that a later one starts with its parent's model as model and as labeller."""
    stages = Provenance(warmup=5, generations=3, generation_rounds=7).before()
    assert [(stage.name, stage.rounds) for stage in stages] == [
        ("fold 1", 5),
        ("fold 2", 5),
        ("warm-up", 5),
        ("generation 1", 7),
        ("generation 2", 7),
    ]
    here = hub(world_of("provenance", "server"))
    parent = {name: weight + 1 for name, weight in weights_in(Provenance().server_start(here, {}), "model").items()}
    even = torch.full((here.classes,), 1 / here.classes)
    past: Any = {"warm-up": {"model": {}}, "generation 1": {"model": {}, "labeller": {}, "target": even}}
    start = Provenance().server_start(here, {**past, "generation 2": {"model": parent, "labeller": {}, "target": even}})
    assert same(weights_in(start, "model"), parent)
    assert same(weights_in(start, "labeller"), parent)
    assert start["generation"] == 3
    assert tensor_in(start, "tilt").tolist() == [1.0] * here.classes


def test_a_fold_is_not_learned_and_the_rest_is() -> None:
    """The classic mistake: asking about images that were learned, of which every answer is right."""
    world = world_of("provenance", "server")
    here = hub(world)
    own = here.shard.labeled
    held_out = in_fold(own.labels, 0)
    assert held_out.sum().item() == len(own) / 2
    start = HeldOut(0).server_start(here, {})

    def told(changed: torch.Tensor) -> Reply:
        images = torch.where(changed.view(-1, 1, 1, 1), 255 - own.images, own.images)
        party = hub(world)
        party.shard = party.whole = replace(party.shard, labeled=Labeled(images, own.labels))
        return HeldOut(0).learn(start, party)

    plain, fold, rest = (told(which) for which in (torch.zeros(len(own), dtype=torch.bool), held_out, ~held_out))
    assert same(plain.weights("model"), fold.weights("model"))
    assert not torch.equal(plain.tensor("confusion"), fold.tensor("confusion"))
    assert not same(plain.weights("model"), rest.weights("model"))
    assert torch.equal(plain.tensor("confusion"), rest.tensor("confusion")), "it is asked before it learns"
    assert plain.tensor("confusion").sum(1).tolist() == pytest.approx(torch.bincount(own.labels[held_out]).tolist())
    assert plain.examples == len(own) / 2


def calibrated(probs: torch.Tensor, truth: torch.Tensor, steps: int = 60) -> tuple[float, torch.Tensor]:
    """What rounds of a fold end with, whose labeller does not change."""
    temper, tilt = 1.0, torch.ones(4)
    for _ in range(steps):
        now = by_prior(tempered(probs, temper), tilt)
        confusion = torch.zeros(4, 4).index_add_(0, truth, now)
        slope = torch.zeros(4, 2).index_add_(0, truth, slope_of_temper(probs, now, truth))
        temper, tilt = calibrated_step(temper, tilt, confusion, slope)
    return temper, tilt


def test_favourites_and_overconfidence_are_found_whatever_classes_are_frequent() -> None:
    """A labeller whose odds for class 0 are twice too high and all of them squared; held-out images mostly of class 1.
    Both are taken back. The classic mistake, counting answers alone, would take class 1 for the favourite."""
    truth = drawn([0.1, 0.7, 0.1, 0.1], 8000)
    biased = by_prior(answers(truth), torch.tensor([2.0, 1.0, 1.0, 1.0]))
    assert biased.mean(0).argmax() == 1
    temper, tilt = calibrated(tempered(biased, 2.0), truth)
    assert temper == pytest.approx(0.5, abs=0.05)
    assert (tilt[1:] / tilt[0]).tolist() == pytest.approx([2.0] * 3, rel=0.15)


def test_few_images_say_little_about_favourites() -> None:
    truth = torch.tensor([0, 1, 2, 3])
    biased = by_prior(answers(truth), torch.tensor([9.0, 1.0, 1.0, 1.0]))
    tilts = [calibrated(biased.repeat(times, 1), truth.repeat(times))[1] for times in (1, 250)]
    few, many = ((tilt.max() / tilt.min()).item() for tilt in tilts)
    assert 1.0 < few < 1.5
    assert many > 3


def test_a_class_that_nobody_labelled_is_not_tilted() -> None:
    confusion = torch.tensor([[4.0, 0.0, 4.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    temper, tilt = calibrated_step(1.0, torch.ones(3), confusion, torch.zeros(3, 2))
    assert (temper, tilt.tolist()) == (1.0, [1.0, 1.0, 1.0])


def test_folds_tell_the_first_generation_alone_and_nobody_begins_with_their_models() -> None:
    here = hub(world_of("provenance", "server"))
    fresh = weights_in(Provenance().server_start(here, {}), "model")
    other = {name: weight + 1 for name, weight in fresh.items()}
    shares = torch.full((here.classes,), 1 / here.classes)
    twice = torch.ones(here.classes)
    twice[0] = 4.0
    past: Any = {"fold 1": {"model": other, "label_shares": shares, "temper": 0.25, "tilt": twice}}
    assert same(weights_in(HeldOut(1).server_start(here, past), "model"), fresh)
    past["fold 2"] = {**past["fold 1"], "temper": 1.0, "tilt": torch.ones(here.classes)}
    warm_up = FirstLabeller().server_start(here, past)
    assert same(weights_in(warm_up, "model"), fresh)
    first = Provenance().server_start(here, {**past, "warm-up": {**warm_up, "model": other}})
    assert first["temper"] == pytest.approx(0.5), "the geometric mean of both"
    assert tensor_in(first, "tilt")[:2].tolist() == [2.0, 1.0]
    assert same(weights_in(first, "labeller"), other)
    later = Provenance().server_start(here, {**past, "warm-up": warm_up, "generation 1": first})
    assert (later["temper"], tensor_in(later, "tilt").tolist()) == (1.0, [1.0] * here.classes)
    assert later["generation"] == 2


def test_who_labels_for_others_learns_without_smoothing() -> None:
    """The classic mistake: smoothed answers pass for doubt, and the prior eats it up, generation by generation."""
    (*_, earlier) = Provenance(generations=2).before()

    def learned(method: Any, smoothing: float) -> Any:
        world = world_of("provenance", "server", train__label_smoothing=smoothing)
        state = method.server_start(hub(world), {})
        return weights_in(method.client_train(Task(0, {**state}), {}, client(world)).send, "model")

    assert same(learned(earlier.method, 0.0), learned(earlier.method, 0.5))
    assert not same(learned(Provenance(), 0.0), learned(Provenance(), 0.5))


def test_a_labeller_that_knows_nothing_is_refused(tiny: Tiny) -> None:
    with pytest.raises(TacitError, match=r"method\.warmup = 0 leaves the labels to a net that has learned nothing"):
        tiny("provenance", "server", method__warmup=0)
    known = {"": False, "pretrained": False, "runs/first": True}  # ImageNet's weights come with a head that is new
    for weights, knows in known.items():
        experiment = resolve({"net.weights": weights, "net.name": "lite0"})
        assert (Provenance(warmup=0).refuses(experiment) == "") is knows
