"""Two models label one image: how close is each of them to it, and how much is each believed (BSemiFL).

A model stands for the data it was trained on. Bayes' rule turns its predictions on those data into the probability
with which they would bring forth a given image: its closeness. The nearer model has the larger say.
"""

from typing import Literal

import torch
from torch import Tensor

Strategy = Literal["bayes", "average", "vote", "random", "global", "local"]
TINY = 1e-12


def closeness(probs: Tensor, sums: Tensor, prior: Tensor, with_sample: bool = True) -> Tensor:
    """How close a model is to each image: Σ_k prior(k) · f(k)/(f(k) + Q(k)) (BSemiFL Eq. 11–13), [N, K] → [N].

    `sums` [K] is Q: the model's predictions, summed over the data that it was trained on. Without the sample, the
    denominator is Q(k) alone, as Algorithm 1 prints it for the local model.

    >>> probs, sums, prior = torch.tensor([[0.5, 0.5]]), torch.tensor([1.5, 4.5]), torch.tensor([0.8, 0.2])
    >>> closeness(probs, sums, prior)                                        # 0.8 · 0.5/2 + 0.2 · 0.5/5
    tensor([0.2200])
    >>> closeness(probs, sums, prior, with_sample=False)                     # 0.8 · 0.5/1.5 + 0.2 · 0.5/4.5
    tensor([0.2889])
    """
    sums, prior = sums.to(probs), prior.to(probs)
    below = probs + sums if with_sample else sums.expand_as(probs)
    return (prior * probs / below.clamp(min=TINY)).sum(dim=1)


def share_by_closeness(global_closeness: Tensor, local_closeness: Tensor) -> Tensor:
    """The global model's share α of a label (BSemiFL Eq. 14); a half where neither model is close at all.

    >>> share_by_closeness(torch.tensor([0.3, 0.3, 0.0]), torch.tensor([0.1, 0.0, 0.0]))
    tensor([0.7500, 1.0000, 0.5000])
    """
    both = global_closeness + local_closeness
    return torch.where(both > 0, global_closeness / both.clamp(min=torch.finfo(both.dtype).tiny), 0.5)


def share_by_strategy(
    strategy: Strategy, global_closeness: Tensor, local_closeness: Tensor, generator: torch.Generator
) -> Tensor:
    """The global model's share of each image's label by one of the strategies that BSemiFL compares (Fig. 5a).

    >>> near, far = torch.tensor([0.3]), torch.tensor([0.1])
    >>> [share_by_strategy(s, near, far, torch.Generator()).item() for s in ("bayes", "average", "global", "local")]
    [0.75, 0.5, 1.0, 0.0]
    """
    if strategy == "bayes":
        return share_by_closeness(global_closeness, local_closeness)
    if strategy == "random":
        return torch.rand(len(global_closeness), generator=generator).to(global_closeness)
    fixed = {"average": 0.5, "vote": 0.5, "global": 1.0, "local": 0.0}
    return torch.full_like(global_closeness, fixed[strategy])


def ensemble(global_probs: Tensor, local_probs: Tensor, share: Tensor) -> Tensor:
    """α f_global + (1 − α) f_local, α for each image (BSemiFL Eq. 15).

    >>> ensemble(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([0.75]))
    tensor([[0.7500, 0.2500]])
    """
    return share[:, None] * global_probs + (1.0 - share[:, None]) * local_probs


def agree(global_probs: Tensor, local_probs: Tensor) -> Tensor:
    """Where both models name the same class: `vote` labels those images only.

    >>> agree(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([[0.6, 0.4], [0.4, 0.6]]))
    tensor([ True, False])
    """
    return global_probs.argmax(dim=1) == local_probs.argmax(dim=1)
