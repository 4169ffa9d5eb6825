"""Client-level differential privacy: an update is clipped, many are summed, Gaussian noise is added to the sum.

McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018, Algorithm 1 with the estimator of
fixed denominator (Eq. 1 there: f̂_f) and equal weights.
"""

import math

import torch
from torch import Tensor


def clip_factor(norm: float, most: float) -> float:
    """By how much a vector of this norm is multiplied, so that it is no longer than `most`: min(1, most / norm).

    >>> clip_factor(5.0, 2.0), clip_factor(1.0, 2.0), clip_factor(0.0, 2.0)
    (0.4, 1.0, 1.0)
    """
    return min(1.0, most / norm) if norm > 0 else 1.0


def clipped(vector: Tensor, most: float) -> Tensor:
    """A vector cut to the norm `most`, in double precision.

    >>> clipped(torch.tensor([3.0, 4.0]), 1.0)
    tensor([0.6000, 0.8000], dtype=torch.float64)
    """
    wide = vector.double()
    return wide * clip_factor(float(torch.linalg.vector_norm(wide)), most)


def noise_share(deviation: float, parties: int) -> float:
    """The standard deviation of each party's noise, so that the sum over all of them has this one: σ / √n.

    >>> noise_share(6.0, 9)
    2.0
    """
    return deviation / math.sqrt(parties)


def gaussian(like: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Independent Gaussian noise of this standard deviation, in the shape of a tensor, in double precision.

    >>> noise = gaussian(torch.zeros(100_000), 3.0, torch.Generator().manual_seed(0))
    >>> round(float(noise.std()), 1), abs(float(noise.mean())) < 0.05
    (3.0, True)
    """
    return deviation * torch.randn(like.shape, generator=generator, dtype=torch.float64)


def as_distribution(values: Tensor) -> Tensor:
    """Noisy shares made shares again: what is negative is nothing, the rest sums to one; all nothing: all alike.

    >>> as_distribution(torch.tensor([[-0.5, 1.0, 1.0], [-1.0, -1.0, -1.0]]))
    tensor([[0.0000, 0.5000, 0.5000],
            [0.3333, 0.3333, 0.3333]])
    """
    least = values.clamp(min=0.0)
    total = least.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, least / total.clamp(min=torch.finfo(values.dtype).tiny), 1.0 / values.shape[-1])
