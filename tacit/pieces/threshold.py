"""How sure a model must be of a class: class-balanced (CBAFed), flexible (FlexMatch), self-adaptive (FreeMatch),
dynamic (DDRFed)."""

import torch
from torch import Tensor

from tacit.pieces.label import PseudoLabels


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


def balanced_thresholds(shares: Tensor, base: float, ceiling: float) -> Tensor:
    """Class-balanced adaptive thresholds: min(share + base − std(shares), ceiling) (CBAFed Eq. 9 to 11): [K] → [K].

    A class that was trained on more needs more confidence. The standard deviation is the unbiased one.

    >>> balanced_thresholds(torch.tensor([0.3, 0.1, 0.1, 0.1]), base=0.84, ceiling=0.95)    # std: 0.1
    tensor([0.9500, 0.8400, 0.8400, 0.8400])
    """
    return (shares + base - shares.std(correction=1)).clamp(max=ceiling)


def tail_classes(shares: Tensor, limit: float) -> Tensor:
    """Which classes are so rare that they are sought among second guesses: share < limit / K (CBAFed Eq. 16).

    >>> tail_classes(torch.tensor([0.6, 0.3, 0.09, 0.01]), limit=0.3)           # 0.3 / 4 = 0.075
    tensor([False, False, False,  True])
    """
    return shares < limit / len(shares)


def balanced_labels(probs: Tensor, thresholds: Tensor, tail: Tensor) -> PseudoLabels:
    """The likeliest class where it is *above* its threshold; else the second one if that is a tail class.

    CBAFed Eq. 14 to 17. What is neither is not kept, and told with its likeliest class.

    >>> probs = torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.1, 0.2], [0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])
    >>> balanced_labels(probs, torch.tensor([0.8, 0.8, 0.6]), tail=torch.tensor([False, False, True]))
    PseudoLabels(label=tensor([0, 2, 0, 2]), kept=tensor([ True,  True, False,  True]))
    """
    best, order = probs.topk(2, dim=1)
    first, second = order[:, 0], order[:, 1]
    sure = best[:, 0] > thresholds[first]
    found = ~sure & tail[second]
    return PseudoLabels(torch.where(found, second, first), sure | found)


def flexible_thresholds(last_sure: Tensor, classes: int, threshold: float) -> Tensor:
    """FlexMatch's thresholds by class from what each image was last surely seen as (−1: never): [N] → [K].

    threshold · b/(2 − b), where b is the class's count over the largest of all counts, that of −1 included: until
    most images have been learned, the threshold of every class is low.

    >>> flexible_thresholds(torch.tensor([0, 0, 1, -1]), classes=3, threshold=0.9)      # b: 1, 1/2, 0
    tensor([0.9000, 0.3000, 0.0000])
    >>> flexible_thresholds(torch.tensor([0, -1, -1, -1]), classes=2, threshold=0.9)    # b: 1/3, 0
    tensor([0.1800, 0.0000])
    """
    counts = torch.bincount(last_sure + 1, minlength=classes + 1).float()
    learned = counts[1:] / counts.max().clamp(min=1.0)
    return threshold * learned / (2.0 - learned)


def self_adaptive_thresholds(confidence: Tensor, mean_prediction: Tensor) -> Tensor:
    """FreeMatch's thresholds by class (its Eq. 7): the model's usual confidence, times p̃(c) / max p̃: [], [K] → [K].

    >>> self_adaptive_thresholds(torch.tensor(0.8), torch.tensor([0.5, 0.25, 0.25]))
    tensor([0.8000, 0.4000, 0.4000])
    """
    return confidence * mean_prediction / mean_prediction.max()


def learning_status(probs: Tensor) -> Tensor:
    """A client's threshold τ_k ((FL)² Eq. 7): the mean of the highest probabilities of its images: [N, K] → [].

    >>> learning_status(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    tensor(0.8000)
    """
    return probs.max(dim=1).values.mean()


def self_adaptive_fairness(logits: Tensor, kept: Tensor, mean_prediction: Tensor, histogram: Tensor) -> Tensor:
    """FreeMatch's self-adaptive fairness: Σ_c a(c) · log b(c), to be minimised; 0 where nothing is kept.

    a is the running mean prediction over the running histogram of predicted classes; b the same of the kept strong
    views in this batch; both normalised to sum to 1, and 0 for a class that was never predicted. Both even: it is
    log(1/K). (−Σ a log b is their cross-entropy; the paper and its released code subtract it.)

    >>> even, logits = torch.tensor([0.5, 0.5]), torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    >>> self_adaptive_fairness(logits, torch.tensor([True, True]), even, even)          # log(1/2)
    tensor(-0.6931)
    >>> self_adaptive_fairness(logits, torch.tensor([False, False]), even, even)
    tensor(0.)
    """
    if not bool(kept.any()):
        return logits.new_zeros(())
    probs = logits[kept].softmax(dim=1)
    predicted = torch.bincount(probs.argmax(dim=1), minlength=probs.shape[1]) / len(probs)
    target = _over(mean_prediction, histogram)
    here = _over(probs.mean(dim=0), predicted)
    return (target * (here + 1e-12).log()).sum()


def _over(mean: Tensor, histogram: Tensor) -> Tensor:
    """mean / histogram, 0 where the histogram is 0, normalised to sum to 1."""
    ratio = torch.where(histogram > 0, mean / histogram.clamp(min=1e-12), torch.zeros_like(mean))
    return ratio / ratio.sum()


HIGHEST = 0.999  # DDRFed's thresholds stay between 1/K and this


def double_ema(first: Tensor, second: Tensor, value: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The running mean of a value and the running mean of that (DDRFed Eq. 17, 18): [], [] → [], [].

    >>> double_ema(torch.tensor(0.2), torch.tensor(0.2), torch.tensor(0.6), decay=0.5)     # (.2 + .6)/2, (.2 + .4)/2
    (tensor(0.4000), tensor(0.3000))
    """
    first = first.lerp(value, 1 - decay)
    return first, second.lerp(first, 1 - decay)


def dema(first: Tensor, second: Tensor, classes: int) -> Tensor:
    """DEMA, 2·EMA − EMA(EMA) (DDRFed Eq. 19): it lags less than the mean itself; kept within 1/K … 0.999: [], [] → [].

    >>> dema(torch.tensor(0.4), torch.tensor(0.3), classes=10), dema(torch.tensor(0.1), torch.tensor(0.3), classes=10)
    (tensor(0.5000), tensor(0.1000))
    """
    return (2 * first - second).clamp(1 / classes, HIGHEST)


def dynamic_thresholds(level: Tensor, shares: Tensor) -> Tensor:
    """DDRFed's thresholds by class: level + share − std(shares), kept within 1/K … 0.999 (Eq. 16, 20): [], [K] → [K].

    Shares are the plain ones (Eq. 15, no K/10), the standard deviation is the unbiased one.

    >>> dynamic_thresholds(torch.tensor(0.8), torch.tensor([0.7, 0.1, 0.1, 0.1]))                   # std: 0.3
    tensor([0.9990, 0.6000, 0.6000, 0.6000])
    """
    return (level + shares - shares.std(correction=1)).clamp(1 / len(shares), HIGHEST)
