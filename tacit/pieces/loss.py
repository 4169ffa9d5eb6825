"""Losses that methods share."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_SHARE = 1e-4  # of a class, where its logarithm is taken


@dataclass(frozen=True)
class LabelLoss:
    """Cross-entropy of labelled images, as `train.class_weights`, `logit_adjustment` and `label_smoothing` want it."""

    weights: Tensor | None = None  # [K]: how much an image of each class counts
    shares: Tensor | None = None  # [K]: of the classes, by which logits are adjusted
    adjustment: float = 0.0  # 0: not at all; 1: as if classes were alike
    smoothing: float = 0.0  # share of a label that is spread evenly over all classes

    def __call__(
        self, logits: Tensor, labels: Tensor, reduction: str = "mean", label_smoothing: float | None = None
    ) -> Tensor:
        """A method that smooths labels by itself says so with `label_smoothing`; else it is as the experiment has it.

        >>> even, labels = torch.zeros(3, 2), torch.tensor([0, 0, 1])           # cross-entropy of each: ln 2
        >>> LabelLoss()(even, labels), LabelLoss(torch.tensor([0.5, 2.0]))(even, labels, reduction="sum")
        (tensor(0.6931), tensor(2.0794))
        >>> sure = torch.tensor([[0.0, -2.0]])                                  # ln(1 + e⁻²) = .1269, and 2 more
        >>> [LabelLoss(smoothing=0.5)(sure, torch.tensor([0]), label_smoothing=own) for own in (None, 0.0)]
        [tensor(0.6269), tensor(0.1269)]
        """
        smoothing = self.smoothing if label_smoothing is None else label_smoothing
        if self.shares is not None and self.adjustment:
            logits = logits + adjusting(self.shares, self.adjustment, smoothing)
        return F.cross_entropy(logits, labels, weight=self.weights, reduction=reduction, label_smoothing=smoothing)


PLAIN = LabelLoss()


def adjusting(shares: Tensor, adjustment: float, smoothing: float = 0.0) -> Tensor:
    """What is added to logits while a model learns from labels in which classes have these shares, so that (adjustment
    1) its probabilities hold where all classes are alike (Menon et al., 2021, Eq. 10): the log of the shares.

    Of smoothed labels it is the log of what smoothing leaves of the shares. A class of one image in a thousand has a
    hundredth of all labels then, and an offset of log .001 would have the model name it everywhere.

    >>> skewed = torch.tensor([0.75, 0.25])
    >>> adjusting(skewed, 1.0).exp(), adjusting(skewed, 0.5).exp(), adjusting(skewed, 1.0, smoothing=0.2).exp()
    (tensor([0.7500, 0.2500]), tensor([0.8660, 0.5000]), tensor([0.7000, 0.3000]))
    """
    return adjustment * ((1.0 - smoothing) * shares.clamp(min=LEAST_SHARE) + smoothing / len(shares)).log()


def label_loss(
    labels: Tensor, classes: int, balanced: bool = False, adjustment: float = 0.0, smoothing: float = 0.0
) -> LabelLoss:
    """The loss for a party with these labels. Each party corrects its own skew: nobody's counts travel.

    Balanced: an image of class c weighs n / (K' · n_c), where K' classes occur; those that do not occur weigh 0.
    Adjusted: adjustment · log(n_c / n) is added to the logits (Menon et al., 2021, Eq. 10), of a class that does not
    occur as if it had one label; smoothed labels are counted as they are (`adjusting`).

    >>> label_loss(torch.tensor([0, 0, 0, 1]), 3, balanced=True).weights
    tensor([0.6667, 2.0000, 0.0000])
    >>> label_loss(torch.tensor([0, 0, 0, 1]), 2, adjustment=1.0).shares
    tensor([0.7500, 0.2500])
    >>> label_loss(torch.tensor([0, 1]), 2) == PLAIN
    True
    """
    if not len(labels) or not (balanced or adjustment):
        return LabelLoss(smoothing=smoothing)
    counts = torch.bincount(labels, minlength=classes).float()
    present = counts > 0
    weights = torch.where(present, len(labels) / (present.sum() * counts.clamp(min=1)), 0.0) if balanced else None
    seen = counts.clamp(min=1) / len(labels) if adjustment else None
    return LabelLoss(weights, seen, adjustment, smoothing)


def masked_cross_entropy(logits: Tensor, label: Tensor, accepted: Tensor) -> Tensor:
    """(1/N) Σ 1[accepted] CE(logits, label): the mean over *all* N samples (FixMatch Eq. 4), not over the accepted.

    >>> logits = torch.zeros(4, 2)                                  # CE of each sample: ln 2
    >>> masked_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), torch.tensor([True, False, False, False]))
    tensor(0.1733)
    """
    return (F.cross_entropy(logits, label, reduction="none") * accepted).sum() / max(len(label), 1)
