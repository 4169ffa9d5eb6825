"""Whether batch norm folded into the convolutions before it pays when a global model is evaluated, in batches of 256.

Folded weights are made anew for each evaluation, because the model has changed; that is in the time. In a ResNet every
norm follows a convolution and can be folded; in a wide residual net only the one in the middle of each block; in the
small CNN none, as pooling lies between. Beside it: the plain net, without live taps or channels last. CPU time.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_eval

from benchmarks.reference import plain_net
from benchmarks.timing import Row, interleaved, ratio, single_thread
from tacit.data.federation import Federation
from tacit.engine import prepare
from tacit.experiment import resolve
from tacit.nets import wrn
from tacit.nets.layers import Net
from tacit.nets.live_taps import LARGEST, convolve
from tacit.nets.resnet import Block, ResNet18
from tacit.pieces.train import predict

TITLE = "Evaluation"

SETTINGS: dict[str, Any] = {"data.placement": "clients", "data.labels": 0, "net.norm": "bn", "device": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "ResNet-18, 28×28": {"data.name": "fashion-mnist", "net.name": "resnet18", "data.test_subset": 2048},
    "WRN-28-2, 32×32": {"data.name": "cifar10", "net.name": "wrn-28-2", "data.test_subset": 512},
}


def folded(net: Net) -> nn.Module:
    """A copy of a net, to be evaluated only, in which as many norms as possible are part of a convolution."""
    net = copy.deepcopy(net).eval()
    if isinstance(net, ResNet18):
        return FoldedResNet18(net)
    for block in [module for module in net.modules() if isinstance(module, wrn.Block)]:
        block.conv1 = fused(block.conv1, block.bn2)
        block.bn2 = nn.Identity()
    return net


def fused(layer: nn.Module, norm: nn.Module) -> nn.Conv2d:
    """One convolution for two layers, its weights as they lay in memory before (multiplying keeps no layout)."""
    assert isinstance(layer, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    channels_last = layer.weight.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    result: nn.Conv2d = fuse_conv_bn_eval(layer, norm).to(memory_format=layout)  # type: ignore[call-overload]
    return result


class FoldedResNet18(nn.Module):
    """ResNet-18 without norms: live taps as in tacit's own, and a bias after each product."""

    def __init__(self, net: ResNet18) -> None:
        super().__init__()
        self.net = net
        net.conv1 = fused(net.conv1, net.bn1)
        for block in self.blocks():
            block.conv1 = fused(block.conv1, block.bn1)
            block.conv2 = fused(block.conv2, block.bn2)
            block.bn1 = block.bn2 = nn.Identity()
            if block.downsample is not None:
                projection, norm = block.downsample
                block.downsample = nn.Sequential(fused(projection, norm))

    def blocks(self) -> list[Block]:
        return [module for module in self.net.modules() if isinstance(module, Block)]

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        x = net.activation(net.conv1(x))
        if net.stem == "imagenet":
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = net.layer2(net.layer1(x))
        if max(x.shape[2:]) > LARGEST:
            return net.fc(net.layer4(net.layer3(x)).mean(dim=(2, 3)))
        x = x.permute(2, 3, 0, 1).contiguous()
        for block in (*net.layer3, *net.layer4):
            x = on_few_pixels(block, x)
        return net.fc(x.mean(dim=(0, 1)))


def on_few_pixels(block: Block, x: Tensor) -> Tensor:
    def product(layer: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(layer.bias, Tensor)
        return convolve(layer, x).add_(layer.bias)

    change = product(block.conv2, block.activation(product(block.conv1, x)))
    shortcut = x if block.downsample is None else product(block.downsample[0], x)
    return block.activation(change.add_(shortcut))


def with_statistics(net: Net) -> Net:
    """Norms with statistics as after training, so that folding them does something."""
    generator = torch.Generator().manual_seed(1)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_(0, 0.1, generator=generator)
            layer.running_var.uniform_(0.5, 1.5, generator=generator)
    return net


def measure(cases: Mapping[str, Mapping[str, Any]] = CASES, times: int = 5) -> list[Row]:
    with single_thread():
        return [row for name, settings in cases.items() for row in measure_case(name, settings, times)]


def measure_case(name: str, settings: Mapping[str, Any], times: int) -> list[Row]:
    plan = prepare(resolve(SETTINGS, settings))
    images = Federation(plan.dataset, plan.split, plan.setup.device).test().images
    net, view = with_statistics(plan.setup.build(torch.Generator().manual_seed(0))), plan.setup.views.plain  # type: ignore[arg-type]
    far = (predict(net, images[:256], view) - predict(folded(net), images[:256], view)).abs().max()
    if far > 1e-4:
        raise RuntimeError(f"{name}: the folded net gives other probabilities, by {float(far):.1e}")
    plain = plain_net(plan)
    works = {
        "ours": lambda: predict(net, images, view),
        "folded": lambda: predict(folded(net), images, view),
        "plain": lambda: predict(plain, images, view),
    }
    spent = interleaved(works, times)
    rate = f"{len(images) / sorted(one.cpu for one in spent['ours'])[times // 2]:,.0f} images a CPU-second"
    return [
        ratio(f"{name}: as it is / with BN folded", spent["ours"], spent["folded"], note=rate),
        ratio(f"{name}: plain net / as it is", spent["plain"], spent["ours"], note=rate),
    ]
