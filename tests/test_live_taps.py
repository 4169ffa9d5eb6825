"""The specialised ResNet-18 is the plain one, computed otherwise: outputs, gradients, and hundreds of steps."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.methods import semifl
from tacit.methods.semifl import fit_fix_and_mix
from tacit.nets import Net, build, resnet
from tacit.nets.layers import Layers, initialise
from tacit.nets.live_taps import LiveConvolution, TappedConv2d, convolve, live_taps, normalise
from tacit.nets.optimizer import give_momentum, live_taps_only, momentum_of, optimizer_step, sgd
from tacit.nets.resnet import Block
from tacit.nets.statistics import recompute_statistics
from tacit.pieces import consistency
from tacit.pieces.consistency import TwoViews, learn_by_batch
from tacit.pieces.label import confident
from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.train import weights_of

CPU = torch.device("cpu")


def net_for(size: int, norm: str = "bn", bn: str = "average") -> Net:
    net = build("resnet18", classes=10, channels=1, size=size, norm=norm, bn=bn, generator=seeded(0))
    return net.arrange(CPU, size)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch):
    """Run something as the plain net does."""

    def run(work):
        with monkeypatch.context() as patch:
            patch.setattr(resnet, "LARGEST", 0)
            return work()

    return run


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(1, 1), (2, 2), (3, 3), (4, 4), (2, 3), (1, 4)])
def test_a_convolution_and_its_gradients(size: tuple[int, int], stride: int) -> None:
    x = torch.randn(5, 3, *size, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 3, 3, 3, generator=seeded(2), dtype=torch.float64, requires_grad=True)
    expected = F.conv2d(x, weight, stride=stride, padding=1)
    signal = torch.randn(expected.shape, generator=seeded(3), dtype=torch.float64)
    to_x, to_weight = torch.autograd.grad(expected, (x, weight), signal)
    for layout in (torch.contiguous_format, torch.channels_last):
        own_x = x.detach().permute(2, 3, 0, 1).contiguous().requires_grad_()
        own_weight = weight.detach().clone(memory_format=layout).requires_grad_()
        result = LiveConvolution.apply(own_x, own_weight, stride)
        torch.testing.assert_close(result.permute(2, 3, 0, 1), expected)
        got_x, got_weight = torch.autograd.grad(result, (own_x, own_weight), signal.permute(2, 3, 0, 1))
        torch.testing.assert_close(got_x.permute(2, 3, 0, 1), to_x)
        torch.testing.assert_close(got_weight, to_weight)
        assert got_weight.stride() == own_weight.stride(), "or each step would copy it"


def test_only_taps_that_touch_pixels_are_computed() -> None:
    assert [(tap.row, tap.column) for tap in live_taps(1, 1, 1)] == [(1, 1)]
    assert [(tap.row, tap.column) for tap in live_taps(2, 2, 2)] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    rows = sum(
        (tap.outputs[0].stop - tap.outputs[0].start) * (tap.outputs[1].stop - tap.outputs[1].start)
        for tap in live_taps(2, 2, 1)
    )
    assert rows == 16, "each of four pixels meets each of four"


@pytest.mark.parametrize("layer", [nn.BatchNorm2d(6), nn.GroupNorm(3, 6)])
def test_norms(layer: nn.Module) -> None:
    x = torch.randn(5, 6, 2, 2, generator=seeded(1))
    torch.testing.assert_close(normalise(layer, x.permute(2, 3, 0, 1)).permute(2, 3, 0, 1), layer(x))


def test_the_shortcut() -> None:
    layer = nn.Conv2d(3, 4, 1, stride=2, bias=False)
    x = torch.randn(5, 3, 4, 4, generator=seeded(1))
    torch.testing.assert_close(convolve(layer, x.permute(2, 3, 0, 1)).permute(2, 3, 0, 1), layer(x))


@pytest.mark.parametrize("norm", ["bn", "gn"])
@pytest.mark.parametrize("size", [28, 32, 8, 36])
def test_one_batch_of_the_whole_net(size: int, norm: str, plainly) -> None:
    net, x = net_for(size, norm).double(), torch.randn(6, 1, size, size, generator=seeded(1), dtype=torch.float64)

    def outcome() -> list[Tensor]:
        net.zero_grad()
        logits = net.train()(x)
        F.cross_entropy(logits, torch.arange(6)).backward()
        evaluated = net.eval()(x)
        return [logits, evaluated, *(p.grad for p in net.parameters() if p.grad is not None)]

    state = {name: value.clone() for name, value in net.state_dict().items()}
    plain = plainly(outcome)
    net.load_state_dict(state)
    for ours, theirs in zip(outcome(), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def trajectory(model: nn.Module, steps: int, classes: int, size: tuple[int, ...]) -> list[float]:
    """Losses of a model that learns 64 random images by heart, four at a time, with momentum, decay and clipping."""
    x = torch.randn(64, *size, generator=seeded(1), dtype=torch.float64)
    y = torch.randint(classes, (64,), generator=seeded(2))
    optimizer, losses = sgd(model, lr=0.02, weight_decay=5e-3), []
    for step in range(steps):
        which = torch.arange(8) + 8 * (step % 8)
        loss = F.cross_entropy(model(x[which]), y[which])
        optimizer_step(model, optimizer, loss, clip=5.0)
        losses.append(loss.item())
    return losses


class LastStages(nn.Module):
    """The two stages that are computed otherwise, with few channels, on 4×4 maps."""

    def __init__(self, live: bool) -> None:
        super().__init__()
        self.live, layers, few = live, Layers("bn"), 6
        self.blocks = nn.ModuleList(
            Block(a * few, b * few, stride, layers) for a, b, stride in ((1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1))
        )
        self.fc = nn.Linear(4 * few, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(2, 3, 0, 1).contiguous() if self.live else x
        for block in self.blocks:
            x = block.on_few_pixels(x) if self.live else block(x)
        return self.fc(x.mean(dim=(0, 1) if self.live else (2, 3)))


def test_hundreds_of_steps_end_in_the_same_checkpoint() -> None:
    """Float64, so that rounding cannot hide a difference or grow into one. Weight decay shrinks the dead taps, too."""
    plain, live = LastStages(live=False).double(), LastStages(live=True).double()
    initialise(plain, seeded(0))
    live.load_state_dict(plain.state_dict())
    first = plain.blocks[3].conv2.weight[:, :, 0, 0].detach().clone()
    losses = [trajectory(model, 300, 5, (6, 4, 4)) for model in (plain, live)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6, abs=1e-9)
    assert sum(losses[1][-8:]) < 0.5 * sum(losses[1][:8]), "it learned"
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(live.state_dict()[name], value, rtol=1e-6, atol=1e-9)
    shrunk = live.blocks[3].conv2.weight[:, :, 0, 0] / first
    assert shrunk.max() - shrunk.min() < 1e-9
    assert 0.5 < shrunk.mean() < 0.9, "a tap that never touched a pixel was decayed all the same"


def test_a_few_steps_of_the_whole_net(plainly) -> None:
    plain, live = net_for(28).double(), net_for(28).double()
    losses = plainly(lambda: trajectory(plain, 6, 10, (1, 28, 28))), trajectory(live, 6, 10, (1, 28, 28))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(live.state_dict()[name], value, rtol=1e-8, atol=1e-10)


def test_statistics_can_be_recomputed(plainly) -> None:
    x = torch.randn(40, 1, 28, 28, generator=seeded(1))

    def statistics() -> dict[str, Tensor]:
        net = net_for(28, bn="static")
        recompute_statistics(net, x.split(20))
        return {name: value.clone() for name, value in net.state_dict().items() if "running" in name}

    plain, live = plainly(statistics), statistics()
    for name, value in plain.items():
        torch.testing.assert_close(live[name], value, rtol=1e-3, atol=1e-5)
    assert live["layer4.1.bn2.running_mean"].abs().sum() > 0


def test_layouts_are_chosen_by_the_net() -> None:
    small, large = net_for(28), net_for(64)
    assert small.layer4[0].conv2.weight[:, :, 1, 1].is_contiguous(), "a tap lies for itself where others are dead"
    assert small.layer3[1].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert small.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert large.layer1[0].conv1.weight.is_contiguous()
    assert large.layer4[0].conv1.weight.is_contiguous()
    large.load_state_dict(small.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), large.parameters(), strict=True))
    small.load_state_dict(large.state_dict())
    assert small.layer4[0].conv2.weight[:, :, 1, 1].is_contiguous()


def test_a_net_knows_its_dead_taps() -> None:
    """28 pixels: 2×2 maps in the third stage, one pixel in the fourth; at 32 pixels the same; at 64 none is dead."""
    for size, counts in ((28, [9, 9, 9, 9, 4, 1, 1, 1]), (32, [9, 9, 9, 9, 4, 1, 1, 1]), (64, [0] * 8)):
        net = net_for(size)
        convolutions = [layer for block in (*net.layer3, *net.layer4) for layer in (block.conv1, block.conv2)]
        assert [len(layer.live) for layer in convolutions] == counts
    layers = [layer for layer in net_for(28).modules() if isinstance(layer, TappedConv2d) and layer.has_dead_taps]
    assert [len(layer.dead) for layer in layers] == [5, 8, 8, 8]


@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"momentum": 0.0}, {"weight_decay": 0.0}])
@pytest.mark.parametrize("kept", [False, True])
def test_training_live_taps_alone_is_training_all(options: dict[str, float], kept: bool) -> None:
    """Epochs of `fit` with and without: losses, weights (also those of dead taps) and momentum, float64."""
    x = torch.randn(24, 1, 28, 28, generator=seeded(1), dtype=torch.float64)
    y = torch.randint(10, (24,), generator=seeded(2))

    def outcome(alone: bool) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], Tensor]:
        net = net_for(28).double().arrange(CPU, 28)
        first = net.layer4[1].conv1.weight[:, :, 0, 0].detach().clone()
        optimizer = sgd(net, **{"lr": 0.05, "weight_decay": 5e-2, **options})
        if kept and options.get("momentum", 0.9):
            given = {name: torch.full_like(p, 1e-3) for name, p in net.named_parameters()}
            give_momentum(net, optimizer, given)
        losses = []
        for _ in range(2):
            with live_taps_only(net, optimizer) if alone else nullcontext():
                for which in torch.arange(24).split(8):
                    loss = F.cross_entropy(net(x[which]), y[which])
                    optimizer_step(net, optimizer, loss, clip=1.0)
                    losses.append(loss.item())
        dead = net.layer4[1].conv1.weight[:, :, 0, 0].detach() / first
        return losses, weights_of(net), momentum_of(net, optimizer), dead

    ours, theirs = outcome(True), outcome(False)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9)
    for mine, its in zip(ours[1:3], theirs[1:3], strict=True):
        assert mine.keys() == its.keys()
        for name in its:
            torch.testing.assert_close(mine[name], its[name], rtol=1e-8, atol=1e-11)
    if not options and not kept:
        assert ours[3].mean() < 0.99, "dead taps were decayed"


def test_nobody_may_ask_the_whole_layer_meanwhile() -> None:
    net = net_for(28)
    with live_taps_only(net, sgd(net, lr=0.1)), pytest.raises(AssertionError, match="trained alone"):
        net.layer4[0].conv2(torch.zeros(1, 512, 1, 1))
    assert not any(layer.leaves for layer in net.modules() if isinstance(layer, TappedConv2d))


def batch_wise(net: Net, x: Tensor, y: Tensor) -> float:
    views = iter([TwoViews(which, x[which], x[which] + 0.1) for which in torch.arange(24).split(8)])
    known = ((x[which], y[which]) for which in torch.arange(24).split(8))

    def unlabeled_loss(index: Tensor, shown: Tensor, learned: Tensor) -> Tensor:
        with torch.no_grad():
            label, accepted = confident(net(shown).softmax(dim=1), 0.1)
        return masked_cross_entropy(net(learned), label, accepted)

    optimizer = sgd(net, lr=0.05, weight_decay=5e-2)
    return learn_by_batch(net, views, known, unlabeled_loss, optimizer=optimizer, clip=1.0)


def fix_and_mix(net: Net, x: Tensor, y: Tensor) -> float:
    optimizer, views = sgd(net, lr=0.05, weight_decay=5e-2), {"strong": lambda x, _: x, "weak": lambda x, _: x + 0.1}
    sizes = {"epochs": 1, "batch": 8, "clip": 1.0, "weight": 1.0, "shape": 0.75}
    return fit_fix_and_mix(
        net, (x, y), (x.flip(0), y.flip(0)), optimizer=optimizer, **views, **sizes, generator=seeded(3)
    )


def test_who_else_adds_a_loss_may_look_at_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(semifl, "live_taps_only", lambda *_: pytest.fail("live taps alone"))
    net = net_for(28).train()
    x, y = torch.randn(4, 1, 28, 28, generator=seeded(1)), torch.arange(4)
    settings = {"strong": lambda x, _: x, "weak": lambda x, _: x, "weight": 0.0, "shape": 0.75, "clip": 1.0}
    for also in ({"also": lambda: net.layer4[0].conv1.weight.sum()}, {"strong_term": lambda *_: net.fc.bias.sum()}):
        own = {"optimizer": sgd(net, lr=0.01), "epochs": 1, "batch": 4, "generator": seeded(3)}
        assert fit_fix_and_mix(net, (x, y), (x, y), **settings, **own, **also) > 0


@pytest.mark.parametrize(("module", "train"), [(consistency, batch_wise), (semifl, fix_and_mix)])
def test_loops_of_several_passes_a_step_may_train_live_taps_alone(
    module: ModuleType, train: Callable[[Net, Tensor, Tensor], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(24, 1, 28, 28, generator=seeded(1), dtype=torch.float64)
    y = torch.randint(10, (24,), generator=seeded(2))
    entered = []

    def outcome(context: Callable[..., AbstractContextManager[None]]) -> tuple[float, dict[str, Tensor]]:
        monkeypatch.setattr(module, "live_taps_only", lambda *both: (entered.append(1), context(*both))[1])
        net = net_for(28).double().arrange(CPU, 28).train()
        return train(net, x, y), weights_of(net)

    ours, theirs = outcome(live_taps_only), outcome(lambda *_: nullcontext())
    assert len(entered) == 2
    assert ours[0] == pytest.approx(theirs[0], rel=1e-9)
    for name in theirs[1]:
        torch.testing.assert_close(ours[1][name], theirs[1][name], rtol=1e-8, atol=1e-11)
