"""How sure a model must be of a class: thresholds that more than one method uses."""

import torch
from torch import Tensor


def class_shares(counts: Tensor, times_tenth: bool = True) -> Tensor:
    """Each class's share of all training samples (CBAFed Eq. 8), times K/10 (Eq. 13): [K] → [K].

    With K = 10 the factor is 1; with more classes it keeps shares at a size that moves a threshold. Where nothing
    was counted, nothing is known: all classes are equal.

    >>> class_shares(torch.tensor([120.0, 60.0, 18.0, 2.0]), times_tenth=False)
    tensor([0.6000, 0.3000, 0.0900, 0.0100])
    >>> class_shares(torch.tensor([120.0, 60.0, 18.0, 2.0]))                    # the same times 4/10
    tensor([0.2400, 0.1200, 0.0360, 0.0040])
    """
    known = counts if counts.sum() > 0 else torch.ones_like(counts)
    share = known / known.sum()
    return share * len(counts) / 10 if times_tenth else share


def self_adaptive_thresholds(confidence: Tensor, mean_prediction: Tensor) -> Tensor:
    """FreeMatch's thresholds by class (its Eq. 7): the model's usual confidence, times p̃(c) / max p̃: [], [K] → [K].

    >>> self_adaptive_thresholds(torch.tensor(0.8), torch.tensor([0.5, 0.25, 0.25]))
    tensor([0.8000, 0.4000, 0.4000])
    """
    return confidence * mean_prediction / mean_prediction.max()
