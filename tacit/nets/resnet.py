"""ResNet-18 (He et al. 2016), with the parameter names that everybody's PyTorch checkpoints have."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.nets.layers import Layers, Net, Stem, convolution, pooled
from tacit.nets.live_taps import LARGEST, TappedConv2d, convolve, normalise, outputs_of


class Block(nn.Module):
    """conv, norm, activation, conv, norm, plus the input, activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, layers: Layers) -> None:
        super().__init__()
        self.conv1 = TappedConv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = layers.norm(outputs)
        self.conv2 = TappedConv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = layers.norm(outputs)
        self.activation = layers.activation()
        self.downsample: nn.Sequential | None = None
        if inputs != outputs or stride != 1:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride), layers.norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        change = self.bn2(self.conv2(self.activation(self.bn1(self.conv1(x)))))
        shortcut = x if self.downsample is None else self.downsample(x)
        result: Tensor = self.activation(change + shortcut)
        return result

    def on_few_pixels(self, x: Tensor) -> Tensor:
        """The same for maps [H, W, N, C] of few pixels."""
        change = normalise(self.bn1, convolve(self.conv1, x))
        change = normalise(self.bn2, convolve(self.conv2, self.activation(change)))
        shortcut = x
        if self.downsample is not None:
            projection, norm = self.downsample
            shortcut = normalise(norm, convolve(projection, x))
        result: Tensor = self.activation(change + shortcut)
        return result


class ResNet18(Net):
    """Stem, then four stages of two blocks with 64, 128, 256, 512 channels (width 64), strides 1, 2, 2, 2.

    `imagenet` stem: 7×7 convolution with stride 2 and 3×3 max-pooling with stride 2, so that small images
    arrive at the stages four times smaller (CBAFed and DDRFed mean this one). `cifar` stem: a 3×3
    convolution, no pooling: many times slower and more accurate on 32×32 images.

    With the `imagenet` stem, images up to 32 pixels are maps of 4×4 pixels and fewer from the third stage on. On a
    CPU these stages then skip the padding (see live_taps.py): the same results, in about half the time.
    """

    channels_last = False  # but where the last stages see few pixels: a seventh faster there, slower elsewhere (a CPU)

    def __init__(self, classes: int, channels: int, width: int, stem: Stem, layers: Layers) -> None:
        super().__init__()
        self.stem = stem
        one, two, four, eight = width, 2 * width, 4 * width, 8 * width
        self.conv1 = convolution(channels, one, 7, stride=2) if stem == "imagenet" else convolution(channels, one, 3)
        self.bn1 = layers.norm(one)
        self.activation = layers.activation()
        self.layer1 = nn.Sequential(Block(one, one, 1, layers), Block(one, one, 1, layers))
        self.layer2 = nn.Sequential(Block(one, two, 2, layers), Block(two, two, 1, layers))
        self.layer3 = nn.Sequential(Block(two, four, 2, layers), Block(four, four, 1, layers))
        self.layer4 = nn.Sequential(Block(four, eight, 2, layers), Block(eight, eight, 1, layers))
        self.fc = nn.Linear(eight, classes)

    def steps(self) -> list[tuple[nn.Module, ...]]:
        return [(self.conv1, self.bn1), *((block,) for block in self._blocks())]

    def _blocks(self) -> list[nn.Module]:
        return [*self.layer1, *self.layer2, *self.layer3, *self.layer4]

    def parts(self) -> list[Callable[[Tensor], Tensor]]:
        *blocks, last = self._blocks()
        return [self._stem, *blocks, lambda x: pooled(last(x))]

    def _stem(self, x: Tensor) -> Tensor:
        x = self.activation(self.bn1(self.conv1(x)))
        return F.max_pool2d(x, 3, stride=2, padding=1) if self.stem == "imagenet" else x

    def features(self, x: Tensor) -> Tensor:
        parts, third = self.parts(), 1 + len(self.layer1) + len(self.layer2)  # where the third stage begins
        for part in parts[self.first : third]:
            x = part(x)
        start = max(self.first, third)
        few = self.channels_last if start > third else max(x.shape[2:]) <= LARGEST  # as `arrange` had it
        if not few or x.device.type != "cpu" or torch.compiler.is_compiling():
            for part in parts[start:]:
                x = part(x)
            return x
        x = x.permute(2, 3, 0, 1).contiguous()
        for block in self._blocks()[start - 1 :]:
            assert isinstance(block, Block)
            x = block.on_few_pixels(x)
        return x.mean(dim=(0, 1))

    def arrange(self, device: torch.device, size: int) -> Self:
        side = outputs_of(outputs_of(size, 2), 2) if self.stem == "imagenet" else size  # 7×7 and pooling: each halves
        side = outputs_of(side, 2)  # the second stage
        few = device.type == "cpu" and side <= LARGEST
        self.channels_last = few
        super().arrange(device, size)
        for block in [block for stage in (self.layer3, self.layer4) for block in stage if isinstance(block, Block)]:
            side = block.conv2.expect(block.conv1.expect(side, few), few)
        return self

    def norms_to_fold(self) -> list[tuple[nn.Module, str, str]]:
        if self.channels_last:  # there a norm costs next to nothing
            return []
        pairs: list[tuple[nn.Module, str, str]] = [(self, "conv1", "bn1")]
        for block in (module for module in self.modules() if isinstance(module, Block)):
            pairs += [(block, "conv1", "bn1"), (block, "conv2", "bn2")]
            pairs += [(block.downsample, "0", "1")] if block.downsample is not None else []
        return pairs
