"""The specialised ResNet-18 is the plain one, computed otherwise: outputs, gradients, and hundreds of steps."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.nets import Net, build, resnet
from tacit.nets.layers import Layers, initialise
from tacit.nets.live_taps import LiveConvolution, convolve, live_taps, normalise
from tacit.nets.resnet import Block
from tacit.pieces.statistics import recompute_statistics
from tacit.pieces.train import descend, sgd

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
        descend(model, optimizer, loss, clip=5.0)
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
    channels_last = small.layer4[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert channels_last
    assert small.layer1[0].conv1.weight.is_contiguous()
    assert large.layer4[0].conv1.weight.is_contiguous()
    large.load_state_dict(small.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(small.parameters(), large.parameters(), strict=True))
