"""Provenance: the prior of a place, labels by it, a labeller that stays, and the merge."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runs import client, hub, same, world_of
from tacit.config.resolve import resolve
from tacit.contract.method import Reply, Task
from tacit.core.errors import TacitError
from tacit.core.payload import tensor_in, weights_in
from tacit.methods.provenance import Provenance, by_prior, own_prior, towards_even
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


def test_the_tilt_makes_the_mean_answer_even() -> None:
    mean = torch.tensor([0.6, 0.3, 0.1])
    tilted = mean * towards_even(10 * mean, 1.0)
    assert tilted.tolist() == pytest.approx([1 / 3] * 3)


def reply(value: float, examples: float, who: int, said: tuple[float, ...]) -> Reply:
    send: Any = {"model": {"w": torch.tensor([value])}, "answers": torch.tensor(said)}
    return Reply(send=send, examples=examples, client=who)


def test_the_merge_by_hand() -> None:
    """One labelled client of two: 10 of 100 images, but a fifth of the mean. The tilt goes half of the way."""
    world = world_of("provenance", "some-clients")
    here = hub(world)
    labeled = here.labeled_clients[0]
    other = next(number for number in range(10) if number not in here.labeled_clients)
    even = (10.0,) * here.classes
    skewed = (10.0 * here.classes,) + (0.0,) * (here.classes - 1)
    state: Any = {"model": {"w": torch.tensor([0.0])}, "labeller": {"w": torch.tensor([7.0])}}
    state["tilt"] = torch.ones(here.classes)
    method = Provenance(align=1.0, labeled_share=0.2)
    merged = method.server_merge(state, [reply(5.0, 10, labeled, even), reply(1.0, 90, other, skewed)], here)
    assert weights_in(merged, "model")["w"].item() == pytest.approx(0.2 * 5.0 + 0.8 * 1.0)
    assert weights_in(merged, "labeller")["w"].item() == 7.0
    first = (10.0 + 10.0 * here.classes) / (20.0 * here.classes)  # the mean answer's share of class 0
    assert tensor_in(merged, "tilt")[0].item() == pytest.approx(0.5 * (1 + 1 / here.classes / first))


def test_a_client_remembers_its_classes_and_sends_the_plain_answers() -> None:
    world = world_of("provenance", "server")
    me, here = client(world, 0), hub(world)
    method = Provenance()
    state = method.server_start(here, {})
    first = method.client_train(Task(0, {**state}), {}, me)
    again = method.client_train(Task(0, {**state}), first.keep, me)
    count = len(me.shard.unlabeled)
    assert tensor_in(first.keep, "seen").sum().item() == pytest.approx(0.75 * count, rel=1e-4)
    assert tensor_in(again.keep, "seen").sum().item() == pytest.approx(0.75 * 1.75 * count, rel=1e-4)
    assert set(first.send) == {"model", "answers"}
    plain = Provenance(prior=False).client_train(Task(0, {**state}), {}, me)
    assert torch.equal(tensor_in(plain.send, "answers"), tensor_in(first.send, "answers")), "as the labeller said it"


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
        ("warm-up", 5),
        ("generation 1", 7),
        ("generation 2", 7),
    ]
    here = hub(world_of("provenance", "server"))
    parent = {name: weight + 1 for name, weight in weights_in(Provenance().server_start(here, {}), "model").items()}
    began = Provenance().server_start(here, {"generation 2": {"model": parent, "labeller": {}, "tilt": torch.zeros(1)}})
    assert same(weights_in(began, "model"), parent)
    assert same(weights_in(began, "labeller"), parent)
    assert tensor_in(began, "tilt").tolist() == [1.0] * here.classes


def test_who_labels_for_others_learns_without_smoothing() -> None:
    """The classic mistake: smoothed answers pass for doubt, and the prior eats it up, generation by generation."""
    (_, earlier) = Provenance(generations=2).before()

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
