"""Pruning of channels by the scale of the norm behind them (network slimming), as a mask on weights of full size."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

NORMS = (nn.GroupNorm, nn.BatchNorm2d, nn.LayerNorm)
Norm = nn.GroupNorm | nn.BatchNorm2d | nn.LayerNorm


def norms_of(model: nn.Module) -> dict[str, Norm]:
    """The norms with a scale for each channel, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, NORMS)}


def kept_channels(model: nn.Module) -> dict[str, Tensor]:
    """For each norm which channels are still there: a pruned one has scale and shift 0.

    >>> net = nn.Sequential(nn.GroupNorm(1, 2))
    >>> with torch.no_grad(): _ = net[0].weight.copy_(torch.tensor([0.0, 0.5]))
    >>> kept_channels(net)
    {'0': tensor([False,  True])}
    """
    return {name: (norm.weight != 0) | (norm.bias != 0) for name, norm in norms_of(model).items()}


@torch.no_grad()
def prune_channels(model: nn.Module, share: float) -> int:
    """Prune this share of the channels that are left, those of the smallest scale in the whole net; how many it was.

    Every norm keeps its strongest channel, or nothing could pass it.

    >>> net = nn.Sequential(nn.GroupNorm(1, 2), nn.GroupNorm(1, 2))
    >>> for norm, scales in zip(net, ([0.1, -0.9], [0.2, 0.3])): _ = norm.weight.data.copy_(torch.tensor(scales))
    >>> prune_channels(net, 0.5), net[0].weight.data, net[1].weight.data
    (2, tensor([ 0.0000, -0.9000]), tensor([0.0000, 0.3000]))
    """
    norms, kept = norms_of(model), kept_channels(model)
    weakest = torch.cat([norm.weight[kept[name]].abs() for name, norm in norms.items()]).sort().values
    count = math.floor(round(share * len(weakest), 9))  # rounded first: .07 · 100 is 7.000000000000001 in floats
    if not count:
        return 0
    limit, pruned = weakest[count - 1], 0
    for name, norm in norms.items():
        weak = kept[name] & (norm.weight.abs() <= limit)
        weak[norm.weight.abs().argmax()] = False
        norm.weight[weak], norm.bias[weak] = 0.0, 0.0
        pruned += int(weak.sum())
    return pruned


@contextmanager
def pruned_training(model: nn.Module, sparsity: float = 0.0) -> Iterator[None]:
    """Inside, pruned channels stay pruned whatever the gradient says, and scales are drawn to 0 by an L1 penalty."""
    handles = []
    for name, alive in kept_channels(model).items():
        norm = model.get_submodule(name)
        for parameter, pull in ((norm.weight, sparsity), (norm.bias, 0.0)):
            assert isinstance(parameter, nn.Parameter)
            handles.append(parameter.register_hook(_masked(parameter, alive, pull)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _masked(parameter: nn.Parameter, alive: Tensor, pull: float) -> Callable[[Tensor], Tensor]:
    return lambda gradient: (gradient + pull * parameter.detach().sign()) * alive


def mask_similarity(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The cosine of two masks: how many channels both kept, of how many each did.

    >>> a, b = {"n": torch.tensor([True, True])}, {"n": torch.tensor([True, False])}
    >>> mask_similarity(a, a), round(mask_similarity(a, b), 4)               # 1 / √2
    (1.0, 0.7071)
    """
    first, second = (torch.cat([mask[name] for name in one]).double() for mask in (one, other))
    lengths = float(first.sum() * second.sum()) ** 0.5
    return float(first @ second) / lengths if lengths else 0.0
