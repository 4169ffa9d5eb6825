"""What the nets share: their outer shape, the choice of norm layer and activation, the first weights."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.core.errors import TacitError

Norm = Literal["bn", "gn"]
BatchNormPolicy = Literal["average", "static", "batch", "frozen"]
Stem = Literal["imagenet", "cifar"]
Activation = Literal["relu", "leaky"]


HEAD_ONLY = 1 << 30  # more parts than any net has: all of them are before the one that learns


class Net(nn.Module):
    """An image classifier in two parts: `features` (images to vectors) and `head` (vectors to logits).

    The head's weights are called `fc.*` in every state_dict; to put in another head, assign to `fc`.
    """

    channels_last: bool = True  # the memory layout in which this net trains faster on a CPU
    fc: nn.Linear
    trained: tuple[nn.Module, ...] | None = None  # the parts that learn; None: all of it
    frozen_names: frozenset[str] = frozenset()  # in the state_dict: what never changes, and so never travels
    learns_from: int = 0  # the first of `parts` that learns
    first: int = 0  # the first of `parts` that it has: it takes what those before made of the images

    def train_only(self, part: str) -> Self:
        """Let only a part learn: "all", "head", or "last-N" blocks and the head; norms in the rest keep still."""
        if part != "all":
            steps, last = ([], 0) if part == "head" else (self.steps(), int(part.removeprefix("last-")))
            if last > len(steps):
                raise TacitError(
                    f'net.train = "{part}", but this net has {len(steps)} blocks before its head. Write '
                    f'"last-{len(steps)}" or fewer, or "all".'
                )
            self.learns_from = HEAD_ONLY if part == "head" else len(steps) - last
            self.trained = (self.fc, *(module for step in steps[len(steps) - last :] for module in step))
            learning = {id(module) for part in self.trained for module in part.modules()}
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d) and id(module) not in learning:
                    module.frozen = True  # type: ignore[assignment]
            moving = {
                f"{name}.{inner}"
                for name, module in self.named_modules()
                if any(module is part for part in self.trained)
                for inner in module.state_dict()
            }
            self.frozen_names = frozenset(self.state_dict()) - moving
        return self.learn()

    def frozen_part(self) -> Callable[[Tensor], Tensor]:
        """What nobody trains, as one function: from images to what the first part that learns is given."""
        if self.learns_from == HEAD_ONLY:
            return self.features
        parts = self.parts()[: self.learns_from]

        def made_of(x: Tensor) -> Tensor:
            for part in parts:
                x = part(x)
            return x

        return made_of

    def without_frozen(self) -> "Net":
        """The net without what nobody trains, to be used in its place: it takes what `frozen_part` makes of images."""
        if self.learns_from == HEAD_ONLY:
            return HeadOnly(self.fc)
        self.first = self.learns_from
        gone = {id(module) for step in self.steps()[: self.first] for module in step}
        for owner in list(self.modules()):
            for name, module in list(owner.named_children()):
                if id(module) in gone:
                    setattr(owner, name, nn.Identity())
        self.frozen_names = self.frozen_names & frozenset(self.state_dict())
        return self

    def learn(self) -> Self:
        """Gradients for the parts that learn, and for no other."""
        self.requires_grad_(self.trained is None)
        for module in self.trained or ():
            module.requires_grad_(True)
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ever; what is frozen need not be among the weights, and then stays as it is."""
        if self.frozen_names:
            still = {name: tensor for name, tensor in self.state_dict().items() if name in self.frozen_names}
            state_dict = {**still, **state_dict}
        return super().load_state_dict(state_dict, strict, assign)

    def train(self, mode: bool = True) -> Self:
        """As ever, but what is frozen stays in evaluation mode."""
        super().train(mode)
        for module in self.modules():
            if getattr(module, "frozen", False):
                module.training = False
        return self

    @property
    def head(self) -> nn.Linear:
        return self.fc

    def arrange(self, device: torch.device, size: int) -> Self:
        """Move to a device, in the memory layout in which this net is fastest there for images of this size."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return self.to(device, memory_format=layout)  # type: ignore[call-overload]

    def steps(self) -> list[tuple[nn.Module, ...]]:
        """The parts before the head, from the images on: what `net.train = "last-N"` counts from the end.

        What belongs to no block (a stem's norm, a last norm) goes with its neighbour.
        """
        raise NotImplementedError

    def norms_to_fold(self) -> list[tuple[nn.Module, str, str]]:
        """Norms that see nothing but a convolution's result: whose they are, the convolution's name and theirs."""
        return []

    def parts(self) -> list[Callable[[Tensor], Tensor]]:
        """What is done to images, one function for each of `steps`; the last one ends with vectors."""
        raise NotImplementedError

    def features(self, x: Tensor) -> Tensor:
        """Images [N, C, S, S], already normalised, to vectors [N, D]."""
        for part in self.parts()[self.first :]:
            x = part(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x))
        return logits


class HeadOnly(Net):
    """A head, which takes features for images: so little that to hand it out, switch it and load it costs nothing."""

    def __init__(self, fc: nn.Linear) -> None:
        super().__init__()
        self.fc, self.trained = fc, (fc,)
        self.learns_from = HEAD_ONLY

    def steps(self) -> list[tuple[nn.Module, ...]]:
        return []

    def parts(self) -> list[Callable[[Tensor], Tensor]]:
        return []


def group_count(channels: int) -> int:
    """Groups of a GroupNorm: the largest divisor of `channels` up to 32 that leaves two channels a group.

    A group of one channel would forget how strong that channel is (and on a 1×1 map everything).

    >>> [group_count(channels) for channels in (16, 32, 64, 128, 512)]
    [8, 16, 32, 32, 32]
    >>> [group_count(channels) for channels in (1, 7, 24, 160)]
    [1, 1, 12, 32]
    """
    return max(groups for groups in range(1, 33) if channels % groups == 0 and groups <= max(1, channels // 2))


class GroupNorm(nn.GroupNorm):
    """As PyTorch's, whose backward pass (2.13, CPU) crashes where channels are last in memory and the input needs no
    gradient: behind a frozen part."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.requires_grad or not torch.is_grad_enabled() else x.contiguous())


class StaticBatchNorm2d(nn.BatchNorm2d):
    """Trains with the batch's statistics and leaves the running ones alone; evaluates with the running ones.

    They are 0 and 1 until `tacit.pieces.statistics.recompute_statistics` sets them.
    """

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return super().forward(x)


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Trains and evaluates with the running statistics that came with its weights, and never changes them."""

    frozen = True  # `Net.train` leaves it in evaluation mode


@dataclass(frozen=True)
class Layers:
    """Makes the layers whose kind is an option, so that a net asks for `layers.norm(64)` and no more."""

    norm_kind: Norm = "gn"
    bn: BatchNormPolicy = "average"
    activation_kind: Activation = "relu"

    def norm(self, channels: int, eps: float = 1e-5, momentum: float = 0.1) -> nn.Module:
        if self.norm_kind == "gn":
            return GroupNorm(group_count(channels), channels)
        if self.activation_kind == "leaky":  # the SSL suites that use it have slow, well-padded running statistics
            eps, momentum = 1e-3, 0.001
        if self.bn == "frozen":
            return FrozenBatchNorm2d(channels, eps=eps, momentum=momentum)
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
