"""Losses that methods share."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class LabelLoss:
    """Cross-entropy of labelled images, as `train.class_weights`, `logit_adjustment` and `label_smoothing` want it."""

    weights: Tensor | None = None  # [K]: how much an image of each class counts
    offsets: Tensor | None = None  # [K]: added to the logits while training, so that rare classes need a larger margin
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
        if self.offsets is not None:
            logits = logits + self.offsets
        smoothing = self.smoothing if label_smoothing is None else label_smoothing
        return F.cross_entropy(logits, labels, weight=self.weights, reduction=reduction, label_smoothing=smoothing)


PLAIN = LabelLoss()


def label_loss(
    labels: Tensor, classes: int, balanced: bool = False, adjustment: float = 0.0, smoothing: float = 0.0
) -> LabelLoss:
    """The loss for a party with these labels. Each party corrects its own skew: nobody's counts travel.

    Balanced: an image of class c weighs n / (K' · n_c), where K' classes occur; those that do not occur weigh 0.
    Adjusted: adjustment · log(n_c / n) is added to the logits (Menon et al., 2021, Eq. 10), of a class that does not
    occur as if it had one label.

    >>> label_loss(torch.tensor([0, 0, 0, 1]), 3, balanced=True).weights
    tensor([0.6667, 2.0000, 0.0000])
    >>> label_loss(torch.tensor([0, 0, 0, 1]), 2, adjustment=1.0).offsets.exp()
    tensor([0.7500, 0.2500])
    >>> label_loss(torch.tensor([0, 1]), 2) == PLAIN
    True
    """
    if not len(labels) or not (balanced or adjustment):
        return LabelLoss(smoothing=smoothing)
    counts = torch.bincount(labels, minlength=classes).float()
    present = counts > 0
    weights = torch.where(present, len(labels) / (present.sum() * counts.clamp(min=1)), 0.0) if balanced else None
    offsets = adjustment * (counts.clamp(min=1) / len(labels)).log() if adjustment else None
    return LabelLoss(weights, offsets, smoothing)


def masked_cross_entropy(logits: Tensor, label: Tensor, accepted: Tensor) -> Tensor:
    """(1/N) Σ 1[accepted] CE(logits, label): the mean over *all* N samples (FixMatch Eq. 4), not over the accepted.

    >>> logits = torch.zeros(4, 2)                                  # CE of each sample: ln 2
    >>> masked_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), torch.tensor([True, False, False, False]))
    tensor(0.1733)
    """
    return (F.cross_entropy(logits, label, reduction="none") * accepted).sum() / max(len(label), 1)
