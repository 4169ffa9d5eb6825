"""Temperature scaling: probabilities that are as often right as they say (Guo et al., On Calibration of Modern Neural
Networks, ICML 2017)."""

import torch
from torch import Tensor

LOWEST, HIGHEST = 0.25, 10.0  # temperatures beyond this say more about the few images than about the model


def at_temperature(probs: Tensor, temperature: float) -> Tensor:
    """softmax(logits / T) from softmax(logits) [N, K], Eq. 9: the order of the classes stays.

    >>> at_temperature(torch.tensor([[0.8, 0.2]]), 0.5)           # 0.8² : 0.2² = 16 : 1
    tensor([[0.9412, 0.0588]])
    """
    return (_logs(probs) / temperature).softmax(dim=1).to(probs.dtype)


def fit_temperature(probs: Tensor, labels: Tensor) -> float:
    """The T whose probabilities have the smallest cross-entropy on these labels, between .25 and 10.

    In 1/T the cross-entropy is convex, and its slope is the mean of (expected logit − logit of the true class): halving
    finds where that is 0. A model that says 90 % and is right three times in four should say 75 %; log 9 / T = log 3:

    >>> probs = torch.tensor([[0.9, 0.1]]).expand(4, 2)
    >>> round(fit_temperature(probs, torch.tensor([0, 0, 0, 1])), 4)
    2.0
    """
    logits = _logs(probs)
    own = logits.gather(1, labels[:, None]).squeeze(1)
    low, high = 1 / HIGHEST, 1 / LOWEST
    for _ in range(50):
        middle = (low + high) / 2
        slope = (((logits * middle).softmax(dim=1) * logits).sum(dim=1) - own).mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return 2 / (low + high)


def _logs(probs: Tensor) -> Tensor:
    return probs.double().clamp(min=torch.finfo(torch.float32).tiny).log()
