"""Prediction bias of a model: measured without labels, divided out of pseudo-labels (FedDB).

A plug-in for any method that gives pseudo-labels: `debias(probs, average_prediction(probs))` goes between its
predictions and its threshold, and turns X into X-FedDPL.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FLOOR = 1e-6  # softmax may underflow to 0 in a class; nobody should be divided by that


def average_prediction(probs: Tensor) -> Tensor:
    """The average prediction probability of unlabelled images, APP-U (FedDB Eq. 8): [N, K] → [K], sums to 1.

    What the model tends to say, whatever it is shown. No image, no tendency: then it is uniform.

    >>> average_prediction(torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.9, 0.1]]))
    tensor([0.8000, 0.2000])
    >>> average_prediction(torch.zeros(0, 4))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    if not len(probs):
        return torch.full(probs.shape[1:], 1.0 / probs.shape[1], dtype=probs.dtype, device=probs.device)
    return probs.mean(dim=0)


def debias(probs: Tensor, prior: Tensor, floor: float = FLOOR) -> Tensor:
    """Debiased predictions, DPL (FedDB Eq. 14): each class divided by its prior, each row scaled to sum to 1.

    `probs` is [N, K], `prior` is [K], usually APP-U. A uniform prior changes nothing.

    >>> debias(torch.tensor([[0.6, 0.4]]), torch.tensor([0.5, 0.5]))
    tensor([[0.6000, 0.4000]])
    >>> debias(torch.tensor([[0.6, 0.4]]), torch.tensor([0.8, 0.2]))           # 0.75 and 2, of 2.75
    tensor([[0.2727, 0.7273]])
    """
    raised = probs / prior.to(probs).clamp(min=floor)
    return raised / raised.sum(dim=1, keepdim=True)


def moving_prediction(average: Tensor, probs: Tensor, momentum: float) -> Tensor:
    """APP-U while a model trains (FedDB Algorithm 3, lines 12 and 16): γ · average + (1 − γ) · mean of new predictions.

    No new prediction leaves it as it is.

    >>> moving_prediction(torch.tensor([0.5, 0.5]), torch.tensor([[0.8, 0.2], [1.0, 0.0]]), momentum=0.5)
    tensor([0.7000, 0.3000])
    """
    if not len(probs):
        return average
    return momentum * average + (1.0 - momentum) * average_prediction(probs)


def debiasing(look: Callable[[], Tensor], *, at_once: bool, moving: bool) -> Callable[[Tensor], Tensor]:
    """Debiasing as a plug-in: a function that divides the model's bias out of predictions.

    Where all images are predicted `at_once`, the bias is the mean of that prediction. Batch by batch it is the mean of
    what the model sees in weak views of all the client's images when the round begins (Eq. 8), which `look` tells; it
    stays for the round (Algorithm 1). `moving`, it follows the model: each new prediction counts as one of the images.

    >>> seen, batch = torch.tensor([[0.8, 0.2]] * 4), torch.tensor([[0.6, 0.4], [0.6, 0.4]])
    >>> debiasing(lambda: seen, at_once=False, moving=False)(batch)[0]      # 0.6/0.8 to 0.4/0.2
    tensor([0.2727, 0.7273])
    >>> debiasing(lambda: seen, at_once=False, moving=True)(batch)[0]       # prior now 0.7, 0.3: 0.6/0.7 to 0.4/0.3
    tensor([0.3913, 0.6087])
    """
    if at_once:
        return lambda probs: debias(probs, average_prediction(probs))
    seen = look()
    prior, images = average_prediction(seen), len(seen)

    def debiased(probs: Tensor) -> Tensor:
        nonlocal prior
        if moving:
            stale = max(0.0, 1.0 - len(probs) / max(images, 1))
            prior = moving_prediction(prior.to(probs), probs, momentum=stale)
        return debias(probs, prior)

    return debiased


def bias_of(per_class_accuracy: Tensor) -> Tensor:
    """The "ground truth bias" of a model (FedDB §4.2): its class-wise accuracies on balanced test data, as shares.

    For evaluation only: it needs true labels. Compare it with APP-U and with a label distribution by
    `tacit.metrics.jensen_shannon` (Fig. 3). Classes without test images (nan) count as 0; a model that
    recognises nothing has no bias.

    >>> bias_of(torch.tensor([0.9, 0.3, 0.0]))
    tensor([0.7500, 0.2500, 0.0000])
    >>> bias_of(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """
    known = per_class_accuracy.nan_to_num(nan=0.0)
    total = known.sum()
    return known / total if total > 0 else torch.full_like(known, 1.0 / len(known))
