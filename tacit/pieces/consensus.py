"""RSCFed's distance-reweighted mean: inside a group, a model far from the group's mean counts less."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tacit.pieces.aggregate import Weights, shares


def model_distance(one: Weights, other: Weights, by_tensor: bool = False) -> float:
    """‖θ − θ'‖₂ over all that is learned; `by_tensor`: the sum of the norms tensor by tensor, as RSCFed's code has it.

    BN's running statistics and step counters are not learned: a counter alone, off by a hundred steps, would outweigh
    every weight.

    >>> one = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "bn.num_batches_tracked": torch.tensor(900)}
    >>> other = {"w": torch.zeros(2), "b": torch.zeros(1), "bn.num_batches_tracked": torch.tensor(0)}
    >>> model_distance(one, other), model_distance(one, other, by_tensor=True)
    (5.0, 7.0)
    """
    norms = [
        float(torch.linalg.vector_norm(tensor.double() - other[name].double()))
        for name, tensor in one.items()
        if _learned(name, tensor)
    ]
    return math.fsum(norms) if by_tensor else math.hypot(*norms)


def _learned(name: str, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not name.endswith(("running_mean", "running_var"))


def distance_shares(
    prior: Sequence[float], examples: Sequence[float], distances: Sequence[float], scale: float
) -> list[float]:
    """w_i ∝ prior_i · exp(−scale · d_i / n_i), summing to 1 (RSCFed's DMA; prior: n_i, or more for labelled clients).

    A party without examples counts nothing. Only differences of the exponents matter, so the largest is taken off
    first: with scale 10,000 all of them would otherwise be 0 in floats.

    >>> [round(w, 4) for w in distance_shares([10, 10], [10, 10], [0.0, 1.0], 10 * math.log(3))]       # 1 : 1/3
    [0.75, 0.25]
    >>> distance_shares([10, 10, 0], [10, 10, 0], [5.0, 5.0, 9.0], 10_000)
    [0.5, 0.5, 0.0]
    """
    exponents = [
        math.log(p) - scale * d / n if p > 0 and n > 0 else -math.inf
        for p, n, d in zip(prior, examples, distances, strict=True)
    ]
    top = max(exponents, default=-math.inf)
    return shares([math.exp(e - top) if e > -math.inf else 0.0 for e in exponents])
