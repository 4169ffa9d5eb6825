"""SemiFL's local training: confident images (the fix set), also blended with any others (the mix set)."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.pieces.descent import descend, live_taps_only
from tacit.pieces.train import View, viewed_batches

LabeledImages = tuple[Tensor, Tensor]
StrongTerm = Callable[[Tensor, Tensor, Tensor], Tensor]  # which images, their strong views, the logits of these → loss


def beta_share(shape: float, generator: torch.Generator) -> float:
    """A share drawn from Beta(shape, shape): below 1 mostly near 0 or 1, at 1 uniform, above 1 mostly near ½.

    >>> 0 <= beta_share(0.75, torch.Generator().manual_seed(0)) <= 1
    True
    """
    first, second = torch._standard_gamma(torch.full((2,), shape, dtype=torch.float64), generator).tolist()
    return first / (first + second) if first + second > 0 else 0.5


def blend(first: Tensor, second: Tensor, share: float) -> Tensor:
    """share · first + (1 − share) · second.

    >>> blend(torch.tensor([1.0]), torch.tensor([5.0]), 0.75)
    tensor([2.])
    """
    return share * first + (1.0 - share) * second


def blended_cross_entropy(logits: Tensor, first: Tensor, second: Tensor, share: float) -> Tensor:
    """share · CE(logits, first) + (1 − share) · CE(logits, second): the loss of images that were blended so.

    >>> logits = torch.tensor([[0.0, math.log(3.0)]])                        # probabilities ¼ and ¾
    >>> loss = blended_cross_entropy(logits, torch.tensor([0]), torch.tensor([1]), 0.75)
    >>> round(loss.item(), 4), round(0.75 * math.log(4) + 0.25 * math.log(4 / 3), 4)
    (1.1116, 1.1116)
    """
    return share * F.cross_entropy(logits, first) + (1.0 - share) * F.cross_entropy(logits, second)


def mix_set(images: Tensor, labels: Tensor, size: int, generator: torch.Generator) -> LabeledImages:
    """So many images with their labels, drawn with replacement from all of them, believed or not.

    >>> mix_set(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 2]), 5, torch.Generator())[1].shape
    torch.Size([5])
    """
    drawn = torch.randint(len(images), (size,), generator=generator).to(images.device)
    return images[drawn], labels[drawn]


def endless_loss(
    model: nn.Module, labeled: LabeledImages, batch: int, view: View, generator: torch.Generator
) -> Callable[[], Tensor]:
    """At each call the cross-entropy of the next batch of labelled images, epoch after epoch without end.

    >>> uniform = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> _ = [nn.init.zeros_(p) for p in uniform.parameters()]
    >>> images, labels = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1])
    >>> loss = endless_loss(uniform, (images, labels), 2, lambda part, chance: part, torch.Generator())
    >>> [round(loss().item(), 4) for _ in range(5)] == [round(math.log(2), 4)] * 5
    True
    """
    images, labels = labeled
    epochs = (viewed_batches(images, batch, view, generator) for _ in repeat(None))
    batches = chain.from_iterable(epochs)

    def loss() -> Tensor:
        which, views = next(batches)
        return F.cross_entropy(model(views), labels[which])

    return loss


def fit_fix_and_mix(
    model: nn.Module,
    fix: LabeledImages,
    mix: LabeledImages,
    *,
    strong: View,
    weak: View,
    weight: float,
    shape: float,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    batch: int,
    clip: float,
    generator: torch.Generator,
    also: Callable[[], Tensor] | None = None,
    strong_term: StrongTerm | None = None,
) -> float:
    """CE on strong views of the fix set, plus `weight` times the mix-up term, plus what `also` adds to each step.
    `strong_term` is a further loss of the strong views ((FL)²: their consistency).

    The mix-up term blends weak views of the fix set with weak views of the mix set (which is as large), by one share
    from Beta(shape, shape) for the whole batch. Returns the last epoch's mean loss, without what `also` added.
    """
    (images, labels), (others, other_labels) = fix, mix
    if len(images) != len(others):
        raise ValueError(f"the mix set has {len(others)} images, the fix set {len(images)}: they must be as large")

    def both(part: Tensor, chance: torch.Generator) -> Tensor:
        return torch.cat([strong(part, chance), weak(part, chance)], dim=1)

    model.train()
    mean = math.nan
    alone = also is None and strong_term is None  # who else adds a loss may look at the weights
    for _ in range(epochs):
        total, seen = torch.zeros((), device=images.device), 0
        ours = viewed_batches(images, batch, both if weight > 0 else strong, generator)
        partners = viewed_batches(others, batch, weak, generator) if weight > 0 else None
        with live_taps_only(model, optimizer) if alone else nullcontext():
            for which, views in ours:
                mixed: Tensor | float = 0.0
                if partners is not None:
                    views, weak_views = views.chunk(2, dim=1)
                    partner, partner_views = next(partners)
                    share = beta_share(shape, generator)
                    logits = model(blend(weak_views, partner_views, share))
                    mixed = weight * blended_cross_entropy(logits, labels[which], other_labels[partner], share)
                logits = model(views)
                loss = F.cross_entropy(logits, labels[which]) + mixed
                if strong_term is not None:
                    loss = loss + strong_term(which, views, logits)
                descend(model, optimizer, loss if also is None else loss + also(), clip)
                total, seen = total + loss.detach() * len(which), seen + len(which)
        mean = float(total) / seen
    return mean
