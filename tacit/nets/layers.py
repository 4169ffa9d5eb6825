"""What the nets share: their outer shape, the choice of norm layer and activation, the first weights."""

import math
from dataclasses import dataclass
from typing import Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Literal["bn", "gn"]
BatchNormPolicy = Literal["average", "static", "batch"]
Stem = Literal["imagenet", "cifar"]
Activation = Literal["relu", "leaky"]


class Net(nn.Module):
    """An image classifier in two parts: `features` (images to vectors) and `head` (vectors to logits).

    The head's weights are called `fc.*` in every state_dict; to put in another head, assign to `fc`.
    """

    channels_last: bool = True  # the memory layout in which this net trains faster on a CPU
    fc: nn.Linear

    @property
    def head(self) -> nn.Linear:
        return self.fc

    def arrange(self, device: torch.device, size: int) -> Self:
        """Move to a device, in the memory layout in which this net is fastest there for images of this size."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return self.to(device, memory_format=layout)  # type: ignore[call-overload]

    def norms_to_fold(self) -> list[tuple[nn.Module, str, str]]:
        """Norms that see nothing but a convolution's result: whose they are, the convolution's name and theirs."""
        return []

    def features(self, x: Tensor) -> Tensor:
        """Images [N, C, S, S], already normalised, to vectors [N, D]."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x))
        return logits


def group_count(channels: int) -> int:
    """Groups of a GroupNorm: the largest divisor of `channels` up to 32 that leaves two channels a group.

    A group of one channel would forget how strong that channel is (and on a 1×1 map everything).

    >>> [group_count(channels) for channels in (16, 32, 64, 128, 512)]
    [8, 16, 32, 32, 32]
    >>> [group_count(channels) for channels in (1, 7, 24, 160)]
    [1, 1, 12, 32]
    """
    return max(groups for groups in range(1, 33) if channels % groups == 0 and groups <= max(1, channels // 2))


class StaticBatchNorm2d(nn.BatchNorm2d):
    """Trains with the batch's statistics and leaves the running ones alone; evaluates with the running ones.

    They are 0 and 1 until `tacit.pieces.statistics.recompute_statistics` sets them.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return super().forward(x)


@dataclass(frozen=True)
class Layers:
    """Makes the layers whose kind is an option, so that a net asks for `layers.norm(64)` and no more."""

    norm_kind: Norm = "gn"
    bn: BatchNormPolicy = "average"
    activation_kind: Activation = "relu"

    def norm(self, channels: int) -> nn.Module:
        if self.norm_kind == "gn":
            return nn.GroupNorm(group_count(channels), channels)
        # The SSL suites that use a leaky activation also have slow, well-padded running statistics.
        eps, momentum = (1e-3, 0.001) if self.activation_kind == "leaky" else (1e-5, 0.1)
        if self.bn == "static":
            return StaticBatchNorm2d(channels, eps=eps, momentum=momentum)
        return nn.BatchNorm2d(channels, eps=eps, momentum=momentum, track_running_stats=self.bn == "average")

    def activation(self) -> nn.Module:
        if self.activation_kind == "leaky":
            return nn.LeakyReLU(0.1, inplace=True)
        return nn.ReLU(inplace=True)


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias (a norm follows or precedes it) that keeps size / stride."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def pooled(x: Tensor) -> Tensor:
    """Global average pooling: [N, C, H, W] to [N, C]."""
    return x.mean(dim=(2, 3))


@runtime_checkable
class Initialisable(Protocol):
    """A module with parameters of its own, outside of any standard layer, says how they start."""

    def initialise(self, generator: torch.Generator) -> None: ...


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """First weights, all drawn from the generator, in the order in which the modules are defined.

    Convolutions: normal, variance 2 / fan-out. Linear layers: uniform within ±1/√inputs. Biases: 0.
    Norms: scale 1, shift 0, running mean 0 and variance 1.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Linear):
            limit = 1 / math.sqrt(module.in_features)
            module.weight.uniform_(-limit, limit, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, (nn.GroupNorm, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d)):
            module.reset_parameters()  # constants only, nothing is drawn
        elif isinstance(module, Initialisable):
            module.initialise(generator)
        elif [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            raise TypeError(f"{name} ({type(module).__name__}) has weights but no rule for their first values")


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers in the model (running statistics are not counted).

    >>> parameter_count(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters())
