"""A small convolutional net for quick runs: about 0.1 M parameters, made for speed on a CPU."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from tacit.nets.layers import Layers, Net, convolution


class ConvolutionalNet(Net):
    """Three 3×3 convolutions (32, 64, 128 channels), each followed by pooling, norm and activation.

    Pooling comes before the norm: the norm and the activation then work on a quarter of the data, which
    makes training much faster in the channels-last layout. The last map is averaged to 3×3, not to one
    pixel: with so few layers, *where* something was seen matters, all the more when models of clients with different
    classes are averaged.
    """

    def __init__(self, classes: int, channels: int, size: int, width: int, layers: Layers) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(channels, width, 3), layers.norm(width)
        self.conv2, self.norm2 = convolution(width, 2 * width, 3), layers.norm(2 * width)
        self.conv3, self.norm3 = convolution(2 * width, 4 * width, 3), layers.norm(4 * width)
        self.activation = layers.activation()
        self.grid = min(3, halved_size(halved_size(halved_size(size))))
        self.fc = nn.Linear(4 * width * self.grid**2, classes)

    def steps(self) -> list[tuple[nn.Module, ...]]:
        return [(self.conv1, self.norm1), (self.conv2, self.norm2), (self.conv3, self.norm3)]

    def parts(self) -> list[Callable[[Tensor], Tensor]]:
        return [
            lambda x: self.activation(self.norm1(halved(self.conv1(x)))),
            lambda x: self.activation(self.norm2(halved(self.conv2(x)))),
            lambda x: self._on_grid(self.activation(self.norm3(halved(self.conv3(x))))),
        ]

    def _on_grid(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, self.grid).flatten(1)


def halved_size(size: int) -> int:
    """The side of a map after `halved`.

    >>> [halved_size(size) for size in (28, 7, 4, 3, 2)]
    [14, 3, 2, 3, 2]
    """
    return size // 2 if size >= 4 else size


def halved(x: Tensor) -> Tensor:
    """Max-pooling, but never down to one pixel, on which no norm could work well (8-pixel images get there).

    >>> import torch
    >>> [halved(torch.zeros(1, 1, size, size)).shape[-1] for size in (28, 7, 4, 3, 2)]
    [14, 3, 2, 3, 2]
    """
    return F.max_pool2d(x, 2) if halved_size(x.shape[-1]) < x.shape[-1] else x
