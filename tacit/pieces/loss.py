"""Losses that methods share."""

import torch.nn.functional as F
from torch import Tensor


def masked_cross_entropy(logits: Tensor, label: Tensor, accepted: Tensor) -> Tensor:
    """(1/N) Σ 1[kept] CE(logits, label): the mean over *all* N samples (FixMatch Eq. 4), not over the kept ones.

    >>> import torch
    >>> logits = torch.zeros(4, 2)                                  # CE of each sample: ln 2
    >>> masked_cross_entropy(logits, torch.zeros(4, dtype=torch.int64), torch.tensor([True, False, False, False]))
    tensor(0.1733)
    """
    return (F.cross_entropy(logits, label, reduction="none") * accepted).sum() / max(len(label), 1)
