"""Means that a few bad clients cannot move far, and how long an update is.

Median and trimmed mean: Yin et al., Byzantine-Robust Distributed Learning, ICML 2018, Definitions 1 and 2. Multi-Krum:
Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NeurIPS 2017, Section 4.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from tacit.pieces.aggregate import Weights, is_learned, shares, weighted_mean

Models = Sequence[Mapping[str, Tensor]]


def update_norm(sent: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> float:
    """‖θ − base‖₂ over all that is learned: how far a client moved from the weights that were sent to it.

    Counters and BN's running statistics are not learned. What has no base is measured from zero.

    >>> base = {"w": torch.tensor([1.0, 1.0]), "bn.num_batches_tracked": torch.tensor(0)}
    >>> update_norm({"w": torch.tensor([4.0, 5.0]), "bn.num_batches_tracked": torch.tensor(900)}, base)
    5.0
    """
    norms = [
        float(torch.linalg.vector_norm(tensor.double() - (base[name].double() if name in base else 0.0)))
        for name, tensor in sent.items()
        if is_learned(name, tensor)
    ]
    return math.hypot(*norms)


def shortened(sent: Mapping[str, Tensor], base: Mapping[str, Tensor], factor: float) -> Weights:
    """base + factor · (θ − base) of all that is learned; the rest stays as it was sent.

    >>> shortened({"w": torch.tensor([4.0, 5.0])}, {"w": torch.tensor([1.0, 1.0])}, 0.5)
    {'w': tensor([2.5000, 3.0000])}
    """
    moved = {}
    for name, tensor in sent.items():
        start = base[name] if name in base else torch.zeros_like(tensor)
        moved[name] = start + factor * (tensor - start) if is_learned(name, tensor) else tensor
    return moved


def coordinate_median(models: Models) -> Weights:
    """The median of each number by itself; of an even count the mean of the middle two.

    >>> coordinate_median([{"w": torch.tensor([1.0, 9.0])}, {"w": torch.tensor([2.0, 0.0])}])
    {'w': tensor([1.5000, 4.5000])}
    >>> coordinate_median([{"w": torch.tensor([w])} for w in (1.0, 2.0, 1000.0)])
    {'w': tensor([2.])}
    """
    return _by_tensor(models, lambda stack: _middle(stack, (len(models) - 1) // 2))


def trimmed_mean(models: Models, trim: float) -> Weights:
    """The mean of each number by itself without the lowest and the highest ⌊trim · n⌋.

    >>> trimmed_mean([{"w": torch.tensor([w])} for w in (-1000.0, 1.0, 2.0, 3.0, 9.0)], 0.2)
    {'w': tensor([2.])}
    """
    return _by_tensor(models, lambda stack: _middle(stack, int(trim * len(models))))


def _middle(stack: Tensor, cut: int) -> Tensor:
    """The mean over the first axis without so many at each end."""
    ordered = stack.sort(dim=0).values
    return ordered[cut : len(stack) - cut].mean(dim=0)


def _by_tensor(models: Models, rule: Callable[[Tensor], Tensor]) -> Weights:
    """A rule over the first axis, one tensor of all models at a time; whole numbers are rounded and keep their type."""
    result = {}
    for name, first in models[0].items():
        stack = torch.stack([model[name] for model in models])
        whole = not first.is_floating_point()
        value = rule(stack.double() if whole else stack)
        result[name] = value.round().to(first.dtype) if whole else value
    return result


def krum_scores(models: Models, byzantine: int) -> list[float]:
    """Of each model, the sum of its squared distances to the n − f − 2 models nearest to it (Krum's score).

    >>> krum_scores([{"w": torch.tensor([w])} for w in (0.0, 1.0, 2.0, 4.0, 100.0)], 1)        # two neighbours each
    [5.0, 2.0, 5.0, 13.0, 18820.0]
    """
    count = len(models)
    squares = torch.zeros(count, count, dtype=torch.float64)
    for name, first in models[0].items():
        if is_learned(name, first):
            stack = torch.stack([model[name].double().flatten() for model in models])
            for number, row in enumerate(stack):
                squares[number] += (stack - row).square().sum(dim=1)
    near = squares.sort(dim=1).values[:, 1 : max(1, count - byzantine - 2) + 1]  # the first is the model itself
    return [float(score) for score in near.sum(dim=1)]


def multi_krum(models: Models, byzantine: int) -> list[int]:
    """Which n − f models have the lowest scores, in their own order; the mean of these goes on.

    >>> multi_krum([{"w": torch.tensor([w])} for w in (0.0, 1.0, 100.0, 2.0, 4.0)], 1)
    [0, 1, 3, 4]
    """
    scores = krum_scores(models, byzantine)
    return sorted(sorted(range(len(models)), key=lambda number: scores[number])[: len(models) - byzantine])


def robust_mean(
    kind: str, models: Models, weights: Sequence[float], trim: float = 0.0, byzantine: int = 0
) -> tuple[Weights, list[int], str]:
    """A mean of clients' models by its name, whose models are in it, and what is to be told of it.

    A model of weight zero is left out. Median and trimmed mean count all others alike; multi-Krum weighs those it
    chose as it was told to. Where there are too few models for multi-Krum (2f + 3), it is the median.

    >>> models = [{"w": torch.tensor([w])} for w in (0.0, 1.0, 2.0, 4.0, 100.0)]
    >>> robust_mean("multi-krum", models, [0.25, 0.25, 0.25, 0.125, 0.125], byzantine=1)    # (0 + 1 + 2 + ½ · 4) / 3.5
    ({'w': tensor([1.4286])}, [0, 1, 2, 3], '')
    >>> robust_mean("multi-krum", models[:3], [0.5, 0.5, 0.0], byzantine=1)
    ({'w': tensor([0.5000])}, [0, 1], 'multi-krum needs 5 replies, there were 2: their median was taken')
    """
    counted = [number for number, weight in enumerate(weights) if weight != 0]
    chosen = [models[number] for number in counted]
    if not chosen:
        raise ValueError("the mean of no models: every weight is zero")
    if kind == "trimmed-mean":
        return trimmed_mean(chosen, trim), counted, ""
    if kind == "median":
        return coordinate_median(chosen), counted, ""
    if len(chosen) < (needed := 2 * byzantine + 3):
        told = f"multi-krum needs {needed} replies, there were {len(chosen)}: their median was taken"
        return coordinate_median(chosen), counted, told
    kept = [counted[place] for place in multi_krum(chosen, byzantine)]
    return weighted_mean([dict(models[n]) for n in kept], shares([weights[n] for n in kept])), kept, ""
