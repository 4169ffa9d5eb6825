"""DDRFed by hand: thresholds, what is negative, who weighs what, and what a client learns from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tacit.config.recipes import known_recipes, load_recipe
from tacit.config.resolve import resolve
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Client, Hub, Labeled, NetPool, RoundInfo, Setup, Shard
from tacit.core.payload import Payload, tensor_in, weights_in
from tacit.core.settings import Net, Participation, Train
from tacit.methods.ddrfed.ddrfed import (
    DDRFed,
    Tally,
    agreeing_top,
    dema,
    double_ema,
    dynamic_thresholds,
    negative_loss,
    ranks,
)
from tacit.pieces.consistency import paired_batches
from tacit.pieces.label import confident
from tacit.pieces.threshold import class_shares
from tacit.pieces.train import weights_of
from tacit.runs.folder import Run
from tacit.views import Views

Tiny = Callable[..., Run]
CLASSES = 4

# Thresholds


def test_dema_over_two_batches() -> None:
    """α = .9 from 1/4: e1 = .9·.25 + .1·.65 = .29, e2 = .9·.25 + .1·.29 = .254; then with .85: .346 and .2632."""
    first, second = double_ema(torch.tensor(0.25), torch.tensor(0.25), torch.tensor(0.65), 0.9)
    assert (first.item(), second.item()) == pytest.approx((0.29, 0.254))
    assert dema(torch.stack([first, second]), CLASSES).item() == pytest.approx(2 * 0.29 - 0.254)
    first, second = double_ema(first, second, torch.tensor(0.85), 0.9)
    assert (first.item(), second.item()) == pytest.approx((0.346, 0.2632))
    assert dema(torch.stack([first, second]), CLASSES).item() == pytest.approx(0.4288)


def test_thresholds_by_class() -> None:
    """Shares .4 .3 .2 .1: unbiased std √(.05/3) = .1291; .5 + share − std."""
    shares = class_shares(torch.tensor([40.0, 30.0, 20.0, 10.0]), times_tenth=False)
    expected = [0.5 + share - 0.12910 for share in (0.4, 0.3, 0.2, 0.1)]
    assert dynamic_thresholds(torch.tensor(0.5), shares).tolist() == pytest.approx(expected, abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(
    counts=st.lists(st.integers(0, 1000), min_size=2, max_size=30),
    confidences=st.lists(st.floats(0, 1), max_size=30),
    decay=st.sampled_from([0.0, 0.5, 0.9, 0.999]),
)
def test_thresholds_stay_in_range(counts: list[int], confidences: list[float], decay: float) -> None:
    classes = len(counts)
    first = second = torch.tensor(1.0 / classes)
    for value in confidences:
        first, second = double_ema(first, second, torch.tensor(value), decay)
    thresholds = dynamic_thresholds(
        dema(torch.stack([first, second]), classes), class_shares(torch.tensor(counts).float(), False)
    )
    assert thresholds.shape == (classes,)
    assert float(thresholds.min()) >= 1 / classes - 1e-6
    assert float(thresholds.max()) <= 0.999 + 1e-6


def test_confidence_is_the_mean_of_each_rows_highest_probability() -> None:
    """Not the highest of the mean prediction (.5 here), and the threshold is that of the class predicted."""
    memory, shares = {"dema": torch.tensor([0.25, 0.25])}, torch.tensor([0.7, 0.1, 0.1, 0.1])
    probs = torch.tensor([[0.9, 0.1, 0.0, 0.0], [0.1, 0.9, 0.0, 0.0]])
    label, kept = DDRFed(alpha=0.0).accept(probs, shares, memory)
    assert dema(memory["dema"], 4).item() == pytest.approx(0.9)
    assert label.tolist() == [0, 1]
    assert kept.tolist() == [False, True]  # .9 + .7 − .3 → .999 for class 0, .9 + .1 − .3 = .7 for class 1


# Negative learning


def test_the_smallest_top_that_nearly_all_agree_on() -> None:
    """One of 1000 may disagree (99.9 %), two may not."""
    weak = F.one_hot(torch.zeros(1000, dtype=torch.int64), 3).float()
    strong = weak.clone()
    strong[0] = torch.tensor([0.1, 0.3, 0.6])  # class 0 is the last
    assert agreeing_top(weak, strong) == 1
    strong[1] = torch.tensor([0.3, 0.6, 0.1])  # class 0 is the second
    assert agreeing_top(weak, strong) == 2
    strong[2] = strong[0]
    assert agreeing_top(weak, strong) == 3
    assert agreeing_top(weak[:0], strong[:0]) == 3


def test_the_place_is_sought_for_the_weak_views_class() -> None:
    weak, strong = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.5, 0.3]])
    assert agreeing_top(weak, strong) == 3  # class 0 is third in the strong view
    assert agreeing_top(strong, weak) == 2  # `change`: class 1 is second in the weak view


def test_negative_loss_by_hand() -> None:
    """Classes that the *weak* view ranks below 2, probabilities of the *strong* view, mean over all three rows."""
    weak = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.97, 0.01, 0.01, 0.01]])
    strong = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25]])
    low = torch.tensor([True, True, False])
    logs = torch.log(1 - torch.tensor([0.3, 0.4, 0.4, 0.3]))  # row 0: classes 2, 3; row 1: classes 0, 1
    assert negative_loss(weak, strong, low, 2).item() == pytest.approx(-logs.sum().item() / 3)


def test_top_k_gives_no_loss_and_no_gradient() -> None:
    logits = torch.randn(6, CLASSES, requires_grad=True)
    weak = torch.randn(6, CLASSES).softmax(dim=1)
    loss = negative_loss(weak, logits.softmax(dim=1), torch.ones(6, dtype=torch.bool), CLASSES)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not bool(logits.grad.any())


def test_a_sure_negative_class_gives_a_finite_gradient() -> None:
    logits = torch.tensor([[-100.0, 100.0]], requires_grad=True)
    negative_loss(torch.tensor([[0.9, 0.1]]), logits.softmax(dim=1), torch.tensor([True]), 1).backward()
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())


def test_equal_probabilities_have_one_order() -> None:
    assert ranks(torch.full((1, 4), 0.25)).tolist() == [[1, 2, 3, 4]]


# One client's losses


class Table(nn.Module):
    """A net that looks its logits up: by the number that an image holds."""

    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.tensor(rows))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.rows[numbers]


ROWS = [
    [3.0, 0.0, 0.0, 0.0],
    [0.4, 0.3, 0.2, 0.1],
    [0.1, 1.0, 0.0, 0.5],
    [0.9, 0.8, 0.1, 0.3],
]  # 0, 1 weak; 2, 3 strong


def loss_of(**options: Any) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Two images; the first is surely class 0 (.87), the second is not (.29): loss, gradient by row, figures."""
    world = setup()
    net, tally = Table(ROWS), Tally(client(world, [], 2), 2)
    method = DDRFed(**{"gdgm": False, "dcbt": False, "threshold": 0.8, **options})
    weak, strong = torch.tensor([0, 1]), torch.tensor([2, 3])
    loss = method.unlabeled_loss(net, torch.arange(2), weak, strong, lambda probs: confident(probs, 0.8), tally)
    loss.backward()
    assert net.rows.grad is not None
    return float(loss.detach()), net.rows.grad.abs().sum(dim=1) > 0, tally.means


def test_the_view_that_is_learned() -> None:
    logs = torch.tensor(ROWS).log_softmax(dim=1)
    loss, touched, _ = loss_of(rnl=False)
    assert loss == pytest.approx(-logs[2, 0].item() / 2)  # Algorithm 2: strong, over both images
    assert touched.tolist() == [False, False, True, False]
    loss, touched, figures = loss_of(rnl=False, view="weak")
    assert loss == pytest.approx(-logs[0, 0].item() / 2)  # Eq. 11
    assert touched.tolist() == [True, False, False, False]
    assert figures["high"] == 0.5


def test_what_the_unsure_image_is_not() -> None:
    """Its weak first class, 0, is the strong view's first: n = 1, so classes 1, 2, 3 are negative."""
    probs, cross = torch.tensor(ROWS).softmax(dim=1), -torch.tensor(ROWS).log_softmax(dim=1)[2, 0]
    loss, touched, figures = loss_of()
    expected = (cross - torch.log(1 - probs[3, 1:]).sum()) / 2
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert figures["top"] == 1
    assert touched.tolist() == [False, False, True, True]
    loss, _, figures = loss_of(rnl_top=3)  # n is fixed: only the weak view's last class, 3
    assert loss == pytest.approx(((cross - torch.log(1 - probs[3, 3])) / 2).item(), rel=1e-5)
    loss, touched, figures = loss_of(rnl_change=True)  # the strong view judges, the weak one learns
    assert loss == pytest.approx(((cross - torch.log(1 - probs[1, 1:]).sum()) / 2).item(), rel=1e-5)
    assert touched.tolist() == [False, True, True, False]


def test_pairs_of_batches_repeat_the_shorter_list() -> None:
    pairs = list(paired_batches(3, 10, 2, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat([own for _, own in pairs]).tolist()) == list(range(10))
    assert all(len(which) for which, _ in pairs)
    assert list(paired_batches(0, 0, 2, torch.Generator())) == []


# Rounds


def setup() -> Setup:
    return Setup(
        seed=0,
        classes=tuple("abcd"),
        channels=1,
        size=8,
        clients=3,
        labeled_clients=(0,),
        net=Net(name="cnn-16"),
        train=Train(batch=8),
        views=Views(mean=(0.5,), std=(0.25,)),
        participation=Participation(),
        device=torch.device("cpu"),
    )


def images(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=generator)


def client(world: Setup, labels: list[int], unlabeled: int) -> Client:
    held = Shard(Labeled(images(len(labels), 1), torch.tensor(labels, dtype=torch.int64)), images(unlabeled, 2))
    return Client(world, held, RoundInfo("main", 0, 20, 0), 1, 0, NetPool(world))


def task(world: Setup) -> Task:
    model = weights_of(world.build(torch.Generator().manual_seed(3)))
    return Task(1, {"model": model, "shares": torch.full((CLASSES,), 0.25)})


def all_sure(**options: Any) -> DDRFed:
    return DDRFed(**{"dcbt": False, "threshold": 0.0, "gdgm": True, **options})


def test_who_learns_from_what() -> None:
    """Labels, own images and generated ones are learned and counted, each image once; only own ones are audited."""
    world, generated = setup(), {"generated": images(12, 5)}
    for labels, unlabeled, kept, expected in (
        ([0, 1, 2, 3, 0], 0, generated, 17),
        ([0, 1, 2, 3, 0], 0, {}, 5),
        ([], 20, generated, 32),
        ([], 20, {}, 20),
    ):
        me = client(world, labels, unlabeled)
        reply = all_sure().client_train(task(world), dict(kept), me)
        assert reply.examples == expected
        assert float(reply.tensor("counts").sum()) == expected
        told = torch.cat(me.labelling.index) if me.labelling.index else torch.zeros(0)
        assert sorted(told.tolist()) == list(range(unlabeled))
        assert set(reply.send) == {"model", "counts"}


def test_what_is_not_believed_is_not_counted() -> None:
    world = setup()
    reply = all_sure(threshold=1.0).client_train(task(world), {}, client(world, [], 20))
    assert reply.examples == 0
    assert reply.metrics["high"] == 0.0


def test_the_running_means_begin_at_one_over_k_and_stay_with_the_client() -> None:
    world, method = setup(), DDRFed(gdgm=False, alpha=0.9)
    first = method.client_train(task(world), {}, client(world, [], 20))
    second = method.client_train(task(world), first.keep, client(world, [], 20))
    one, two = tensor_in(first.keep, "dema"), tensor_in(second.keep, "dema")
    assert 0.25 < float(one[1]) < float(one[0]) < float(two[0])
    still = DDRFed(gdgm=False, alpha=1.0).client_train(task(world), {}, client(world, [], 20))
    assert tensor_in(still.keep, "dema").tolist() == [0.25, 0.25]


def merged(method: DDRFed, examples: tuple[int, ...]) -> tuple[Payload, dict[str, Any]]:
    world = setup()
    empty = Shard(Labeled(images(0), torch.zeros(0, dtype=torch.int64)), images(0))
    hub = Hub(world, empty, RoundInfo("main", 1, 20, 1), NetPool(world))
    counts = torch.tensor([[10.0, 0, 0, 0], [0, 5, 5, 0], [0, 0, 0, 20]])
    replies = [
        Reply(
            send={"model": {"w": torch.tensor([float(number)])}, "counts": counts[number]},
            examples=held,
            client=number,
            metrics={"high": 0.5, "level": 0.6, "top": 2.0} if number else {},
        )
        for number, held in enumerate(examples)
    ]
    state: Payload = {"model": {"w": torch.zeros(1)}, "counts": torch.tensor([40.0, 30.0, 20.0, 10.0])}
    return method.server_merge(state, replies, hub), hub.notes


def test_labelled_clients_get_half_of_the_weight_or_phi_times_theirs() -> None:
    state, notes = merged(DDRFed(gdgm=False), (10, 10, 30))
    assert notes["party_weights"] == pytest.approx([0.5, 0.125, 0.375])
    assert weights_in(state, "model")["w"].item() == pytest.approx(0.125 + 2 * 0.375)
    assert tensor_in(state, "counts").tolist() == [10, 5, 5, 20]
    _, notes = merged(DDRFed(gdgm=False, phi=2.0), (10, 10, 30))  # 20 : 10 : 30, made to sum to 1
    assert notes["party_weights"] == pytest.approx([1 / 3, 1 / 6, 1 / 2])
    state, _ = merged(DDRFed(gdgm=False), (0, 0, 0))
    assert tensor_in(state, "counts").tolist() == [40, 30, 20, 10]


def test_the_record_of_a_round() -> None:
    """Fig. 7's thresholds belong to the shares that were sent, not to those of the merge."""
    _, notes = merged(DDRFed(gdgm=False), (10, 10, 30))
    assert notes["thresholds"] == pytest.approx([0.6 + share - 0.12910 for share in (0.4, 0.3, 0.2, 0.1)], abs=1e-4)
    assert (notes["high"], notes["low"], notes["top"]) == (0.5, 0.5, 2.0)
    _, notes = merged(DDRFed(gdgm=False, dcbt=False, threshold=0.9), (10, 10, 30))
    assert notes["thresholds"] == pytest.approx([0.9] * 4)


def test_the_first_shares_are_those_of_the_labels(tiny: Tiny) -> None:
    run = tiny("ddrfed", "some-clients", rounds=1, method__gdgm=False)
    main = run.records[-1]
    assert main["stage"] == "main"
    assert max(main["class_shares"]) > min(main["class_shares"])
    assert len(main["thresholds"]) == 10
    assert main["high"] + main["low"] == pytest.approx(1.0)
    assert set(main["client_metrics"]["level"]) == {"1", "2", "3"}  # client 0 has labels and nothing else


@pytest.mark.parametrize("off", [(), ("gdgm",), ("gdgm", "rnl"), ("gdgm", "rnl", "dcbt")])
def test_every_part_can_be_left_out(tiny: Tiny, off: tuple[str, ...]) -> None:
    run = tiny("ddrfed", "some-clients", rounds=1, **{f"method__{part}": False for part in off})
    stages = [record["stage"] for record in run.records]
    assert ("generation" in stages) == ("gdgm" not in off)
    main = run.records[-1]
    assert (main["top"] is None) == ("rnl" in off)
    assert ("level" in main["client_metrics"]) == ("dcbt" not in off)


def test_the_recipes_are_the_papers() -> None:
    """Every recipe of DDRFed's paper resolves; Table 4's rows differ in the parts alone."""
    names = [name for name in known_recipes() if name.startswith("ddrfed/")]
    for name in names:
        experiment = resolve(load_recipe(name))
        assert experiment.data.placement == "some-clients", name
        if "/quick/" not in name and "/fig5/" not in name:  # fig5: the generator alone
            assert "DDRFed" in experiment.paper.source, name
            merged = experiment.method["name"] == "cbafed"  # its last round is to end with a merge
            assert (experiment.net.name, experiment.rounds) == ("resnet18", 501 if merged else 500), name
    parts = {
        "dcbt": (True, False, False),
        "dcbt-rnl": (True, True, False),
        "all": (True, True, True),
    }
    for data in ("cifar10", "fashion-mnist"):
        for row, expected in parts.items():
            method = resolve(load_recipe(f"ddrfed/table4/{data}-{row}")).method
            assert (method["dcbt"], method["rnl"], method["gdgm"]) == expected
