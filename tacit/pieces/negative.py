"""Residual class negative learning (DDRFed Sec. 3.3.2): learn what an image is not, where that is unclear."""

import torch
from torch import Tensor

AGREEMENT = 0.999  # "accuracy at least 99.9 %" (Eq. 22)
HIGHEST = 1 - 1e-6  # of a probability p in log(1 − p), which has no end at p = 1


def ranks(probs: Tensor) -> Tensor:
    """The place of each class in its row, 1 for the likeliest; among equals the lower class first: [N, K] → [N, K].

    >>> ranks(torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]]))
    tensor([[3, 1, 2],
            [1, 3, 2]])
    """
    order = probs.argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1) + 1


def agreeing_top(judge: Tensor, other: Tensor, share: float = AGREEMENT) -> int:
    """The smallest n: the judge's first class is among the other's first n, for `share` of the rows (Eq. 21 to 23).

    Both are probabilities of the same images [N, K]. No rows: n = K, from which nothing can be learned.

    >>> weak = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.5, 0.4]])                 # first: 0 and 1
    >>> agreeing_top(weak, torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.3, 0.3]]))     # 0 is the first, 1 the second
    2
    >>> agreeing_top(weak, torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.3, 0.3]]), share=0.5)
    1
    """
    classes = judge.shape[1]
    if not len(judge):
        return classes
    place = ranks(other).gather(1, judge.argmax(dim=1, keepdim=True))  # [N, 1]
    agree = (place <= torch.arange(1, classes + 1, device=place.device)).double().mean(dim=0)
    return int((agree >= share).nonzero()[0]) + 1


def negative_loss(judge: Tensor, learner: Tensor, low: Tensor, top: int) -> Tensor:
    """−(1/B) Σ over `low` rows Σ over classes that the judge ranks below `top` of log(1 − p) (Eq. 24, 25).

    B counts all rows, `low` or not. `judge` and `learner` are probabilities [B, K]; gradients go to the learner. With
    top = K there is no such class: the loss and its gradient are zero.

    >>> judge = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.5, 0.4]])
    >>> learner = torch.tensor([[0.3, 0.2, 0.5], [0.2, 0.2, 0.6]])
    >>> negative_loss(judge, learner, torch.tensor([True, False]), top=2)        # class 2 of row 0: −ln(1 − 0.5) / 2
    tensor(0.3466)
    >>> negative_loss(judge, learner, torch.tensor([True, True]), top=3)
    tensor(0.)
    """
    negative = (ranks(judge) > top) & low.unsqueeze(1)
    suppressed = torch.log1p(-learner.clamp(max=HIGHEST))
    return (suppressed * negative).sum().neg().add(0.0) / max(len(judge), 1)
