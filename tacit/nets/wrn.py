"""Wide residual nets (Zagoruyko and Komodakis 2016): FedDB, SemiFL and BSemiFL use WRN-28-2 and 28-8."""

from collections.abc import Callable

from torch import Tensor, nn

from tacit.nets.layers import Layers, Net, convolution, pooled


class Block(nn.Module):
    """norm, activation, conv, norm, activation, conv, plus the input.

    Where the shape changes, the shortcut is a 1×1 convolution of the input *after* its activation.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, layers: Layers) -> None:
        super().__init__()
        self.bn1 = layers.norm(inputs)
        self.conv1 = convolution(inputs, outputs, 3, stride)
        self.bn2 = layers.norm(outputs)
        self.conv2 = convolution(outputs, outputs, 3)
        self.activation = layers.activation()
        same_shape = inputs == outputs and stride == 1
        self.shortcut = None if same_shape else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = self.activation(self.bn1(x))
        change = self.conv2(self.activation(self.bn2(self.conv1(active))))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        return change + shortcut


class WideResNet(Net):
    """A 3×3 stem of 16 channels, three stages of 16, 32, 64 times `width` channels, strides 1, 2, 2."""

    def __init__(self, depth: int, width: int, classes: int, channels: int, layers: Layers) -> None:
        super().__init__()
        blocks = (depth - 4) // 6  # of two convolutions, in three stages; the other 4: stem and shortcuts
        self.conv1 = convolution(channels, 16, 3)
        self.layer1 = stage(16, 16 * width, blocks, 1, layers)
        self.layer2 = stage(16 * width, 32 * width, blocks, 2, layers)
        self.layer3 = stage(32 * width, 64 * width, blocks, 2, layers)
        self.bn1 = layers.norm(64 * width)
        self.activation = layers.activation()
        self.fc = nn.Linear(64 * width, classes)

    def steps(self) -> list[tuple[nn.Module, ...]]:
        blocks = [*self.layer1, *self.layer2, *self.layer3]
        return [(self.conv1,), *((block,) for block in blocks[:-1]), (blocks[-1], self.bn1)]

    def parts(self) -> list[Callable[[Tensor], Tensor]]:
        *blocks, last = [*self.layer1, *self.layer2, *self.layer3]
        return [self.conv1, *blocks, lambda x: pooled(self.activation(self.bn1(last(x))))]

    def norms_to_fold(self) -> list[tuple[nn.Module, str, str]]:
        return [(block, "conv1", "bn2") for block in self.modules() if isinstance(block, Block)]


def stage(inputs: int, outputs: int, blocks: int, stride: int, layers: Layers) -> nn.Sequential:
    first = Block(inputs, outputs, stride, layers)
    return nn.Sequential(first, *[Block(outputs, outputs, 1, layers) for _ in range(blocks - 1)])
