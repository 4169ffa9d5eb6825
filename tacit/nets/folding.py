"""Batch norm as part of the convolution before it, for evaluation: the same function, one pass less over each map."""

import copy
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

PAYS_FROM = 1024  # images: below, making the copy costs about what it saves (`make bench ONLY=inference`)


@runtime_checkable
class Foldable(Protocol):
    """A net that knows which of its norms see nothing but a convolution's result."""

    def norms_to_fold(self) -> list[tuple[nn.Module, str, str]]: ...


def for_evaluation(model: nn.Module, images: int) -> nn.Module:
    """The model, or a faster copy of it that gives the same answers, whichever predicts so many images sooner."""
    return folded(model) if isinstance(model, Foldable) and images >= PAYS_FROM else model


def folded(net: nn.Module) -> nn.Module:
    """A copy of a net, for evaluation only, with norms that follow a convolution folded into it.

    Norms without running statistics (BN policy `batch`, group norm) stay as they are; a net without others is
    returned itself.
    """
    assert isinstance(net, Foldable)
    if not any(has_statistics(getattr(owner, norm)) for owner, _, norm in net.norms_to_fold()):
        return net
    net = copy.deepcopy(net).eval()
    assert isinstance(net, Foldable)
    for owner, convolution, norm in net.norms_to_fold():
        if not has_statistics(getattr(owner, norm)):  # of a part that was left away
            continue
        setattr(owner, convolution, fused(getattr(owner, convolution), getattr(owner, norm)))
        setattr(owner, norm, nn.Identity())
    return net


def has_statistics(norm: nn.Module) -> bool:
    return isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None


def fused(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """One convolution for both, its weights as they lay in memory before (multiplying keeps no layout)."""
    result: nn.Conv2d = fuse_conv_bn_eval(convolution, norm)
    result.weight.data = torch.empty_like(convolution.weight.data).copy_(result.weight.data)
    return result
