"""EfficientNet-Lite 0 to 4 (Tan & Le 2019, and Google's Lite variants of 2020): no squeeze-excite, ReLU6, fixed stem.

Written from the published settings of the blocks; exact against the published weights (tests/test_lite.py). What is
left out: drop-connect and dropout, which only training from scratch on ImageNet asks for.
"""

import math
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from tacit.nets.layers import Layers, Net, pooled

# Width, depth, and the side of the images that the published weights were trained on.
SCALES = {
    "lite0": (1.0, 1.0, 224),
    "lite1": (1.0, 1.1, 240),
    "lite2": (1.1, 1.2, 260),
    "lite3": (1.2, 1.4, 280),
    "lite4": (1.4, 1.8, 300),
}
# Blocks in a stage, kernel, stride of the first, expansion, channels; lite0's, before scaling.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, FEATURES = 32, 1280  # channels that are never scaled
MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3  # of the published weights: (pixel − 127) / 128
BN = {"eps": 1e-3, "momentum": 0.01}


def scaled_width(channels: int, width: float) -> int:
    """Channels times the width, to the nearest multiple of 8, but never more than a tenth below.

    >>> [scaled_width(channels, 1.1) for channels in (16, 24, 40, 320)], scaled_width(24, 1.4)
    ([16, 24, 48, 352], 32)
    """
    wanted = channels * width
    rounded = max(8, int(wanted + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * wanted else rounded + 8


def stages(kind: str) -> list[tuple[int, int, int, int, int]]:
    """The stages of a net, scaled; the first and the last keep their number of blocks.

    >>> [blocks for blocks, *_ in stages("lite0")], [blocks for blocks, *_ in stages("lite4")]
    ([1, 2, 2, 3, 3, 4, 1], [1, 4, 4, 6, 6, 8, 1])
    """
    width, depth, _ = SCALES[kind]
    last = len(STAGES) - 1
    return [
        (blocks if place in (0, last) else math.ceil(blocks * depth), kernel, stride, expand, scaled_width(out, width))
        for place, (blocks, kernel, stride, expand, out) in enumerate(STAGES)
    ]


class SameConv2d(nn.Conv2d):
    """A convolution that keeps size / stride, rounded up; an odd row of padding goes below and to the right.

    That is TensorFlow's rule, which the published weights were trained with.
    """

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        if kernel == 1:
            return super().forward(x)
        down, right = (max(0, (math.ceil(side / stride) - 1) * stride + kernel - side) for side in x.shape[2:])
        if down == right and down % 2 == 0:
            return F.conv2d(x, self.weight, self.bias, stride, down // 2, groups=self.groups)
        x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        return F.conv2d(x, self.weight, self.bias, stride, groups=self.groups)


def convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)


class Block(nn.Module):
    """Widen, look around in each channel by itself, narrow; the input is added where the shape is the same."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int, layers: Layers) -> None:
        super().__init__()
        inner = inputs * expand
        self.widen: nn.Module | None = None
        if expand != 1:
            self.widen, self.norm0 = convolution(inputs, inner), layers.norm(inner, **BN)
        self.depthwise, self.norm1 = convolution(inner, inner, kernel, stride, groups=inner), layers.norm(inner, **BN)
        self.narrow, self.norm2 = convolution(inner, outputs), layers.norm(outputs, **BN)
        self.activation = nn.ReLU6(inplace=True)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        inner = x if self.widen is None else self.activation(self.norm0(self.widen(x)))
        inner = self.activation(self.norm1(self.depthwise(inner)))
        result: Tensor = self.norm2(self.narrow(inner))
        return result + x if self.adds else result


class EfficientNetLite(Net):
    """A 3×3 stem with stride 2, seven stages of blocks (16 in lite0), 1280 features of the pooled last map."""

    def __init__(self, kind: str, classes: int, channels: int, layers: Layers) -> None:
        super().__init__()
        self.stem, self.stem_norm = convolution(channels, STEM, 3, 2), layers.norm(STEM, **BN)
        self.blocks = nn.Sequential()
        inputs = STEM
        for blocks, kernel, stride, expand, outputs in stages(kind):
            for place in range(blocks):
                first = place == 0
                self.blocks.append(Block(inputs, outputs, kernel, stride if first else 1, expand, layers))
                inputs = outputs
        self.last, self.last_norm = convolution(inputs, FEATURES), layers.norm(FEATURES, **BN)
        self.activation = nn.ReLU6(inplace=True)
        self.fc = nn.Linear(FEATURES, classes)

    def parts(self) -> list[Callable[[Tensor], Tensor]]:
        return [
            lambda x: self.activation(self.stem_norm(self.stem(x))),
            *self.blocks,
            lambda x: pooled(self.activation(self.last_norm(self.last(x)))),
        ]

    def steps(self) -> list[tuple[nn.Module, ...]]:
        return [(self.stem, self.stem_norm), *((block,) for block in self.blocks), (self.last, self.last_norm)]

    def norms_to_fold(self) -> list[tuple[nn.Module, str, str]]:
        pairs: list[tuple[nn.Module, str, str]] = [(self, "stem", "stem_norm"), (self, "last", "last_norm")]
        for block in (module for module in self.blocks if isinstance(module, Block)):
            pairs += [(block, "widen", "norm0")] if block.widen is not None else []
            pairs += [(block, "depthwise", "norm1"), (block, "narrow", "norm2")]
        return pairs


def own_name(published: str) -> str:
    """The name in this net of a tensor in the published files.

    >>> own_name("_blocks.3._bn1.running_var"), own_name("_conv_head.weight"), own_name("_fc.bias")
    ('blocks.3.norm1.running_var', 'last.weight', 'fc.bias')
    """
    in_block = {"_expand_conv": "widen", "_depthwise_conv": "depthwise", "_project_conv": "narrow"}
    in_block |= {"_bn0": "norm0", "_bn1": "norm1", "_bn2": "norm2"}
    outside = {"_conv_stem": "stem", "_bn0": "stem_norm", "_conv_head": "last", "_bn1": "last_norm", "_fc": "fc"}
    parts = published.split(".")
    if parts[0] == "_blocks" and len(parts) == 4 and parts[2] in in_block:
        return f"blocks.{parts[1]}.{in_block[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in outside:
        return f"{outside[parts[0]]}.{parts[1]}"
    return published
