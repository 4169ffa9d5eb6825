"""Figures of merit: plain functions of predicted probabilities [N, K] and true labels [N].

All arithmetic is in float64. A figure that is undefined (no images, a class that never occurs) is nan.
"""

import math

import torch
from torch import Tensor

from tacit.core.errors import TacitError


def check(probs: Tensor, labels: Tensor) -> None:
    """Refuse shapes and labels that do not belong together."""
    if probs.dim() != 2 or labels.shape != probs.shape[:1]:
        raise TacitError(
            f"Metrics need probabilities [N, K] and labels [N], got {list(probs.shape)} and {list(labels.shape)}."
        )
    if labels.dtype != torch.int64:
        raise TacitError(f"Metrics need labels of type int64, got {labels.dtype}. Convert them with .long().")
    if len(labels) and (labels.min() < 0 or labels.max() >= probs.shape[1]):
        raise TacitError(
            f"Metrics need labels from 0 to {probs.shape[1] - 1}, got {int(labels.min())} to "
            f"{int(labels.max())}. Leave out images whose label is not known (-1)."
        )


def confusion(probs: Tensor, labels: Tensor) -> Tensor:
    """Counts [K, K]: row = true class, column = predicted class (the most probable one).

    >>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8]])
    >>> confusion(probs, torch.tensor([0, 0, 1])).tolist()
    [[1, 1], [0, 1]]
    """
    check(probs, labels)
    classes = probs.shape[1]
    pairs = labels * classes + probs.argmax(dim=1)
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes)


def accuracy(probs: Tensor, labels: Tensor) -> float:
    """The share of images whose most probable class is the true one.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.3, 0.7]]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    check(probs, labels)
    return (probs.argmax(dim=1) == labels).double().mean().item()


def per_class_accuracy(probs: Tensor, labels: Tensor) -> Tensor:
    """For every class the share of its images that are recognised (its recall) [K]; nan if it has none.

    >>> probs = torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.6, 0.0], [0.2, 0.8, 0.0]])
    >>> per_class_accuracy(probs, torch.tensor([0, 0, 1])).tolist()
    [0.5, 1.0, nan]
    """
    counts = confusion(probs, labels).double()
    return counts.diagonal() / counts.sum(dim=1)


def balanced_accuracy(probs: Tensor, labels: Tensor) -> float:
    """The mean of the per-class accuracies of the classes that occur.

    >>> probs = torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.6, 0.0], [0.2, 0.8, 0.0]])
    >>> balanced_accuracy(probs, torch.tensor([0, 0, 1]))               # (1/2 + 1) / 2
    0.75
    """
    return per_class_accuracy(probs, labels).nanmean().item()


def macro_f1(probs: Tensor, labels: Tensor) -> float:
    """The mean F1 of the classes that occur among the labels or the predictions.

    F1 = 2 hits / (images of the class + predictions of the class).

    >>> probs = torch.tensor([[0.9, 0.1, 0.0], [0.4, 0.6, 0.0], [0.2, 0.8, 0.0]])
    >>> round(macro_f1(probs, torch.tensor([0, 0, 1])), 6)              # class 0: 2/3, class 1: 2/3
    0.666667
    """
    counts = confusion(probs, labels).double()
    return (2 * counts.diagonal() / (counts.sum(dim=0) + counts.sum(dim=1))).nanmean().item()


def macro_auc(probs: Tensor, labels: Tensor) -> float:
    """The mean over classes of the one-vs-rest area under the ROC curve.

    A class's area is the share of (its image, other image) pairs in which its image has the higher
    probability of the class; a tie counts one half. Classes without images, or with all of them, are left
    out; nan if none remains, or if a probability is nan.

    >>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.2, 0.8], [0.4, 0.6]])
    >>> macro_auc(probs, torch.tensor([0, 0, 1, 1]))        # pairs: 1, 1, 1 and a tie: 3.5 of 4
    0.875
    """
    check(probs, labels)
    if probs.isnan().any():
        return math.nan
    columns = probs.T.contiguous()
    in_order = columns.sort(dim=1).values
    areas = []
    for one, (column, ordered) in enumerate(zip(columns, in_order, strict=True)):
        own = column[labels == one]
        positives, negatives = len(own), len(labels) - len(own)
        if positives and negatives:
            # A value's mid-rank is the mean of the first and last rank that equal values take.
            below = torch.searchsorted(ordered, own, right=False)
            up_to = torch.searchsorted(ordered, own, right=True)
            rank_sum = (below + up_to + 1).double().sum().item() / 2
            areas.append((rank_sum - positives * (positives + 1) / 2) / (positives * negatives))
    return sum(areas) / len(areas) if areas else math.nan


def negative_log_likelihood(probs: Tensor, labels: Tensor) -> float:
    """The mean of −log (probability of the true class): the cross-entropy loss; 0 counts as 2.2e-16.

    >>> round(negative_log_likelihood(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 0])), 6)
    1.039721
    >>> round(1.5 * math.log(2), 6)                                     # (log 2 + log 4) / 2
    1.039721
    """
    check(probs, labels)
    tiny = torch.finfo(torch.float64).eps
    own = probs.double().gather(1, labels[:, None])
    return -own.clamp(tiny, 1 - tiny).log().mean().item()


def expected_calibration_error(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """How far confidence is from accuracy: the gap in each bin, weighted by the images in it.

    Images go into equally wide bins (0, 1/15], (1/15, 2/15], … by their highest probability.

    >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    >>> labels = torch.tensor([0, 1, 1, 1])
    >>> round(expected_calibration_error(probs, labels), 6)             # (|0.9 − 0.5| + |0.6 − 1|) / 2
    0.4
    """
    check(probs, labels)
    if len(labels) == 0 or probs.isnan().any():
        return math.nan
    confidence, predicted = probs.double().max(dim=1)
    edges = torch.arange(1, bins, dtype=torch.float64, device=probs.device) / bins
    which = torch.bucketize(confidence, edges)
    # |hits − summed confidence| of a bin is its gap times its number of images.
    excess = (predicted == labels).double() - confidence
    return torch.bincount(which, weights=excess, minlength=bins).abs().sum().item() / len(labels)


def reliability(probs: Tensor, labels: Tensor, bins: int = 10) -> list[tuple[int, float, float]]:
    """(images, mean confidence, accuracy) of the images in each of equally wide bins of confidence that is not empty.

    >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    >>> [(n, round(sure, 6), right) for n, sure, right in reliability(probs, torch.tensor([0, 1, 1, 1]))]
    [(2, 0.6, 1.0), (2, 0.9, 0.5)]
    """
    check(probs, labels)
    confidence, predicted = probs.double().max(dim=1)
    edges = torch.arange(1, bins, dtype=torch.float64, device=probs.device) / bins
    which = torch.bucketize(confidence, edges)
    sums = [
        torch.bincount(which, weights=what, minlength=bins) for what in (confidence, (predicted == labels).double())
    ]
    counts = torch.bincount(which, minlength=bins).tolist()
    rows = zip(counts, sums[0].tolist(), sums[1].tolist(), strict=True)
    return [(count, sure / count, right / count) for count, sure, right in rows if count]


def jensen_shannon(p: Tensor, q: Tensor) -> float:
    """The Jensen-Shannon divergence of two class distributions [K], with the natural logarithm.

    JS = KL(p‖m)/2 + KL(q‖m)/2 with m = (p + q)/2: 0 for equal ones, log 2 = 0.693… for disjoint ones. It
    is the divergence, not its root (the distance). Inputs are scaled to sum to 1, so counts will do.

    >>> jensen_shannon(torch.tensor([3, 1]), torch.tensor([0.75, 0.25]))
    0.0
    >>> round(jensen_shannon(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])), 6)
    0.693147
    """
    if p.dim() != 1 or p.shape != q.shape:
        raise TacitError(
            f"Jensen-Shannon needs two distributions over the same classes, got {list(p.shape)} and {list(q.shape)}."
        )
    p, q = p.double() / p.sum(), q.double() / q.sum()
    middle, own_p, own_q = (-torch.special.xlogy(part, part).sum() for part in ((p + q) / 2, p, q))
    # Rounding may leave −1e-17 for equal distributions.
    return (middle - (own_p + own_q) / 2).clamp(min=0).item()


def largest_class(labels: Tensor) -> float:
    """The share of the most frequent class: the accuracy of always naming it.

    >>> largest_class(torch.tensor([0, 1, 1, 1]))
    0.75
    """
    return float(torch.bincount(labels).max()) / len(labels) if len(labels) else math.nan


def summary(probs: Tensor, labels: Tensor) -> dict[str, float | list[float]]:
    """All figures of one evaluation, ready to be recorded.

    >>> figures = summary(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
    >>> figures["accuracy"], figures["auc"], figures["per_class"]
    (1.0, 1.0, [1.0, 1.0])
    """
    return {
        "accuracy": accuracy(probs, labels),
        "auc": macro_auc(probs, labels),
        "loss": negative_log_likelihood(probs, labels),
        "macro_f1": macro_f1(probs, labels),
        "balanced_accuracy": balanced_accuracy(probs, labels),
        "ece": expected_calibration_error(probs, labels),
        "per_class": per_class_accuracy(probs, labels).tolist(),
        "largest_class": largest_class(labels),
    }
