"""From a model's predictions to labels for images that have none."""

from typing import NamedTuple

import torch
from torch import Tensor


class PseudoLabels(NamedTuple):
    """For each image: the class it would get, and whether that is believed."""

    label: Tensor  # int64 [N]
    accepted: Tensor  # bool [N]


def confident(probs: Tensor, threshold: float | Tensor) -> PseudoLabels:
    """The likeliest class, believed where its probability reaches the threshold (one for all, or [K] by class).

    >>> probs = torch.tensor([[0.96, 0.04], [0.30, 0.70]])
    >>> confident(probs, 0.95)
    PseudoLabels(label=tensor([0, 1]), accepted=tensor([ True, False]))
    >>> confident(probs, torch.tensor([0.99, 0.60])).accepted       # the threshold of the class that was predicted
    tensor([False,  True])
    """
    highest, label = probs.max(dim=1)
    needed = threshold[label] if isinstance(threshold, Tensor) else torch.full_like(highest, threshold)
    return PseudoLabels(label, highest >= needed)


def class_counts(labels: Tensor, classes: int) -> Tensor:
    """How many samples each class has: the float vector [K] that travels.

    >>> class_counts(torch.tensor([0, 2, 2]), 3)
    tensor([1., 0., 2.])
    """
    return torch.bincount(labels.cpu(), minlength=classes).to(torch.float32)
