"""Running statistics of BN layers made anew from data (the `static` BN policy, as in SemiFL)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tacit.core.errors import TacitError

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of everything seen so far, per channel, in float64.

    Two parts of n and m values with means a and b pool to the mean a + (b − a)·m/(n + m); their squared
    deviations add up, plus (b − a)²·n·m/(n + m) for the distance between the parts.

    >>> moments = Moments()
    >>> moments.add(torch.tensor([[1.0], [3.0]]))
    >>> moments.add(torch.tensor([[8.0]]))
    >>> moments.mean.item()                               # (1 + 3 + 8) / 3
    4.0
    >>> moments.unbiased_variance().item()                # (9 + 1 + 16) / 2
    13.0
    """

    count: int = 0
    batches: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))

    def add(self, x: Tensor) -> None:
        """Take in activations [N, C, …]."""
        others = [axis for axis in range(x.dim()) if axis != 1]
        new_count = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x, dim=others, correction=0)
        distance = mean.double() - self.mean.to(x.device)
        total = self.count + new_count
        self.mean = self.mean.to(x.device) + distance * (new_count / total)
        between = distance.square() * (self.count * new_count / total)
        self.squares = self.squares.to(x.device) + variance.double() * new_count + between
        self.count, self.batches = total, self.batches + 1

    def unbiased_variance(self) -> Tensor:
        """What PyTorch keeps as `running_var`: divided by one less than the count."""
        return self.squares / max(1, self.count - 1)


def recompute_statistics(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set every BN layer's running mean and variance to those of its inputs over all the batches.

    One pass. Each layer's mean and variance are exactly those of all activations that it received, pooled
    over images and positions, so a small last batch counts by its size and the spread *between* batches
    counts too (a mean of per-batch variances would lose it). What a deeper layer receives was normalised
    by the earlier layers with the statistics of its own batch, as in training: one pass cannot know the
    final statistics of the layers before, so for deeper layers larger batches come closer to them.

    Only the running statistics change: parameters, momentum and training flags are as before (during the
    pass BN layers are in training mode and everything else, such as dropout, in evaluation mode). Nothing
    happens to a model without running statistics (GN, or the BN policy `batch`), not even a pass. Batches
    of a single image are left out, since on a 1×1 map they have no variance to be normalised by.
    """
    layers = [m for m in model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
    layers = [layer for layer in layers if not getattr(layer, "frozen", False)]
    if not layers:
        return
    seen = {layer: Moments() for layer in layers}
    with _listening(model, layers, seen), torch.no_grad():
        for batch in batches:
            if len(batch) > 1:
                model(batch)
    if all(moments.batches == 0 for moments in seen.values()):
        raise TacitError("BN statistics need at least one batch of two or more images, and there was none.")
    for layer, moments in seen.items():
        if moments.batches > 0:
            keep(layer, moments)


@contextmanager
def _listening(model: nn.Module, layers: Sequence[BatchNorm], seen: dict[BatchNorm, Moments]) -> Iterator[None]:
    """BN layers in training mode, each with its own batch's statistics, and all that they receive is counted."""
    training = {module: module.training for module in model.modules()}
    tracking = {layer: layer.track_running_stats for layer in layers}
    hooks = [layer.register_forward_pre_hook(lambda layer, inputs: seen[layer].add(inputs[0])) for layer in layers]
    try:
        model.eval()
        for layer in layers:
            layer.train()
            layer.track_running_stats = False  # or the pass itself would move them
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, flag in training.items():
            module.training = flag
        for layer, flag in tracking.items():
            layer.track_running_stats = flag


def pooled_statistics(models: Iterable[dict[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """The running statistics of all parties together, from each party's own: no image needs to travel.

    The mean of parts with means a and b is their weighted mean; their variance is the weighted mean of the parts'
    variances *plus* the spread of the parts' means around it, which a plain mean of variances would lose.

    >>> one = {"bn.running_mean": torch.tensor([1.0]), "bn.running_var": torch.tensor([2.0]), "w": torch.ones(1)}
    >>> two = {"bn.running_mean": torch.tensor([5.0]), "bn.running_var": torch.tensor([2.0]), "w": torch.ones(1)}
    >>> pooled_statistics([one, two], [0.5, 0.5])                            # 2 + (1 − 3)²/2 + (5 − 3)²/2
    {'bn.running_mean': tensor([3.]), 'bn.running_var': tensor([6.])}
    """
    first: dict[str, Tensor] = {}
    second: dict[str, Tensor] = {}
    for model, weight in zip(models, weights, strict=True):
        for name in (name for name in model if name.endswith("running_mean")):
            layer = name.removesuffix("running_mean")
            mean, variance = model[name].double(), model[f"{layer}running_var"].double()
            first[layer] = first.get(layer, 0) + weight * mean
            second[layer] = second.get(layer, 0) + weight * (variance + mean.square())
    pooled = {}
    for layer, mean in first.items():
        pooled[f"{layer}running_mean"] = mean.float()
        pooled[f"{layer}running_var"] = (second[layer] - mean.square()).clamp(min=0).float()
    return pooled


@contextmanager
def still_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, passes in training mode use the batch's statistics as ever, but leave the running ones alone.

    For a further pass over a batch that was counted already.

    >>> net = nn.BatchNorm1d(1)
    >>> with still_statistics(net):
    ...     _ = net(torch.tensor([[0.0], [10.0]]))
    >>> net.running_mean, net.num_batches_tracked
    (tensor([0.]), tensor(0))
    """
    layers = [m for m in model.modules() if isinstance(m, BatchNorm) and m.training and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True


def keep(layer: BatchNorm, moments: Moments) -> None:
    """Write into the layer's own buffers, in place: they may be views of one flat buffer."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    layer.running_mean.copy_(moments.mean)
    layer.running_var.copy_(moments.unbiased_variance())
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.fill_(moments.batches)
