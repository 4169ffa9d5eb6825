"""A small convolutional net for quick runs: about 0.1 M parameters, made for speed on a CPU."""

from torch import Tensor, nn
from torch.nn import functional as F

from tacit.nets.layers import Layers, Net, convolution, pooled


class ConvolutionalNet(Net):
    """Three 3×3 convolutions (32, 64, 128 channels), each followed by pooling, norm and activation.

    Pooling comes before the norm: the norm and the activation then work on a quarter of the data, which
    makes training about 1.6 times (GN) or 1.3 times (BN) as fast in the channels-last layout.
    """

    def __init__(self, classes: int, channels: int, layers: Layers) -> None:
        super().__init__()
        self.conv1, self.norm1 = convolution(channels, 32, 3), layers.norm(32)
        self.conv2, self.norm2 = convolution(32, 64, 3), layers.norm(64)
        self.conv3, self.norm3 = convolution(64, 128, 3), layers.norm(128)
        self.activation = layers.activation()
        self.fc = nn.Linear(128, classes)

    def features(self, x: Tensor) -> Tensor:
        x = self.activation(self.norm1(halved(self.conv1(x))))
        x = self.activation(self.norm2(halved(self.conv2(x))))
        x = self.activation(self.norm3(halved(self.conv3(x))))
        return pooled(x)


def halved(x: Tensor) -> Tensor:
    """Max-pooling, but never down to one pixel, on which no norm could work well (8-pixel images get there).

    >>> import torch
    >>> [halved(torch.zeros(1, 1, size, size)).shape[-1] for size in (28, 7, 4, 3, 2)]
    [14, 3, 2, 3, 2]
    """
    return F.max_pool2d(x, 2) if x.shape[-1] >= 4 else x
