"""Aggregation weights that balance: debiased model aggregation, DMA (FedDB Eq. 15, 16), in three ways.

Each takes the clients' APP-Us [M, K] and gives weights β [M] on the simplex (none below 0, sum 1) for which the
mixture Σ β_m p_m should be near the uniform u = 1/K. All arithmetic is in float64.
"""

from typing import Literal

import torch
from torch import Tensor

BALANCED = 1e-7  # an imbalance below this is rounding: APP-Us travel as float32
Rule = Literal["paper", "released", "exact", "none"]


def balancing_weights(app_u: Tensor, rule: Rule, pull: float = 0.0) -> Tensor:
    """The weights by one of the rules; `none` weighs all clients alike, as FedDB's FixMatch does.

    >>> balancing_weights(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), "none")
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    if rule == "paper":
        return paper_weights(app_u)
    if rule == "released":
        return released_weights(app_u)
    if rule == "exact":
        return exact_weights(app_u, pull)
    return uniform_weights(app_u)


def uniform_weights(app_u: Tensor) -> Tensor:
    """1/M for each of M clients."""
    return torch.full((len(app_u),), 1.0 / len(app_u), dtype=torch.float64)


def away_from_uniform(app_u: Tensor) -> Tensor:
    """p_m − u for each client [M, K]: the mixture of these *is* the distance, because the weights sum to 1."""
    return app_u.double().cpu() - 1.0 / app_u.shape[1]


def imbalance(app_u: Tensor, weights: Tensor) -> float:
    """‖Σ β_m p_m − u‖₂: what DMA makes small (FedDB Eq. 16).

    >>> round(imbalance(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0.5, 0.5])), 6)   # ‖(0.1, −0.1)‖
    0.141421
    """
    mixture = weights.double().cpu() @ app_u.double().cpu()
    return float((mixture - 1.0 / app_u.shape[1]).norm())


def paper_weights(app_u: Tensor, steps: int = 100, rate: float = 1.0) -> Tensor:
    """FedDB Algorithm 2 to the letter: from 1/M, `steps` times β ← softmax(β − rate · ∇‖Σ β_m p_m − u‖₂).

    The softmax inside the loop draws all weights towards each other: they never get far from 1/M. Where the mixture
    is uniform the norm has no gradient, and 0 is taken.

    One step on two clients with p − u = (0.4, −0.4) and (−0.2, 0.2): the mixture is off by (0.1, −0.1), of norm
    √0.02; ∇ = (0.08, −0.04) / √0.02 = (0.5657, −0.2828); softmax(0.5 − ∇) = 1 / (1 + e^(±0.8485)).

    >>> paper_weights(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), steps=1)
    tensor([0.2997, 0.7003], dtype=torch.float64)
    """
    away, weights = away_from_uniform(app_u), uniform_weights(app_u)
    for _ in range(steps):
        off = weights @ away
        norm = off.norm()
        gradient = away @ off / norm if norm > BALANCED else torch.zeros_like(weights)
        weights = (weights - rate * gradient).softmax(dim=0)
    return weights


def released_weights(app_u: Tensor, steps: int = 100) -> Tensor:
    """DMA as the authors' code does it, which ends almost at 1/M.

    The loss is the *mean* squared error over classes, and each step has a new SGD of rate 1, Nesterov momentum .9
    and weight decay .9, whose first step is 1.9 · (gradient + 0.9 · β); then the softmax, as in the paper.

    One step on the clients of `paper_weights`: ∇ = 2/K · (0.08, −0.04) = (0.08, −0.04); β − 1.9 · (∇ + 0.45) differ by
    1.9 · 0.12 = 0.228; softmax = 1 / (1 + e^(±0.228)).

    >>> released_weights(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), steps=1)
    tensor([0.4432, 0.5568], dtype=torch.float64)
    """
    away, weights = away_from_uniform(app_u), uniform_weights(app_u)
    for _ in range(steps):
        gradient = 2.0 / away.shape[1] * (away @ (weights @ away))
        weights = (weights - 1.9 * (gradient + 0.9 * weights)).softmax(dim=0)
    return weights


def to_simplex(point: Tensor) -> Tensor:
    """The point of the simplex that is nearest to a point [M]: all are lowered alike, and those below 0 are cut to 0.

    >>> to_simplex(torch.tensor([0.9, 0.5, -1.0]))                              # lowered by 0.2
    tensor([0.7000, 0.3000, 0.0000])
    """
    ordered = point.sort(descending=True).values
    lowered = (ordered.cumsum(dim=0) - 1.0) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    positive = int((ordered > lowered).sum())  # the largest ones, as many as stay above 0
    return (point - lowered[positive - 1]).clamp(min=0.0)


def exact_weights(app_u: Tensor, pull: float = 0.0, tolerance: float = 1e-12, steps: int = 20_000) -> Tensor:
    """The minimiser of ½‖Σ β_m p_m − u‖² + ½ pull · ‖β − 1/M‖² on the simplex: beyond the paper.

    Projected gradient steps with momentum, which is dropped whenever it points uphill (O'Donoghue and Candès 2015).
    It stops when gradient · β − min gradient, which is never below f(β) − min f, is within the tolerance. Where many
    weights do equally well, the start at 1/M decides, so that clients with equal APP-Us weigh alike.

    >>> exact_weights(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))                   # 0.9 / 3 + 0.3 · 2/3 = 0.5
    tensor([0.3333, 0.6667], dtype=torch.float64)
    """
    away, start = away_from_uniform(app_u), uniform_weights(app_u)
    products = away @ away.T
    steepest = float(torch.linalg.eigvalsh(products)[-1]) + pull
    if steepest <= 0:
        return start  # every client is balanced already
    weights = ahead = start
    speed = 1.0
    for _ in range(steps):
        gradient = products @ weights + pull * (weights - start)
        if float(gradient @ weights - gradient.min()) <= tolerance:
            break
        slope = products @ ahead + pull * (ahead - start)
        moved = to_simplex(ahead - slope / steepest)
        if float((ahead - moved) @ (moved - weights)) > 0:
            speed = 1.0
        faster = (1.0 + (1.0 + 4.0 * speed * speed) ** 0.5) / 2.0
        ahead = moved + (speed - 1.0) / faster * (moved - weights)
        weights, speed = moved, faster
    return weights / weights.sum()
