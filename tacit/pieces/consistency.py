"""Batches for consistency training: what is seen in one view of an image is learned on another."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit.nets.optimizer import live_taps_only, optimizer_step
from tacit.pieces.loss import PLAIN, LabelLoss
from tacit.pieces.train import View, batches, viewed_batches


class TwoViews(NamedTuple):
    """A batch of unlabelled images: their numbers, the views to be labelled, and the views to be learned."""

    which: Tensor
    shown: Tensor
    learned: Tensor


def two_view_batches(
    images: Tensor, size: int, shown: View, learned: View | None, generator: torch.Generator
) -> Iterator[TwoViews]:
    """One epoch of unlabelled batches; without a view to learn, the very view that was labelled is learned."""
    for index in batches(len(images), size, generator):
        first = shown(images[index], generator)
        yield TwoViews(index, first, first if learned is None else learned(images[index], generator))


def endless_batches(
    images: Tensor, labels: Tensor, size: int, view: View, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]] | None:
    """Labelled batches (views, labels), epoch after epoch without end; None where there are no labels."""
    if not len(labels):
        return None
    epochs = (viewed_batches(images, size, view, generator) for _ in repeat(None))
    return ((views, labels[which]) for which, views in chain.from_iterable(epochs))


def endless_loss(
    model: nn.Module,
    labeled: tuple[Tensor, Tensor],
    batch: int,
    view: View,
    generator: torch.Generator,
    label_loss: LabelLoss = PLAIN,
) -> Callable[[], Tensor]:
    """At each call the cross-entropy of the next batch of labelled images, epoch after epoch without end.

    >>> uniform = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> _ = [nn.init.zeros_(p) for p in uniform.parameters()]
    >>> images, labels = torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1])
    >>> loss = endless_loss(uniform, (images, labels), 2, lambda part, chance: part, torch.Generator())
    >>> [round(loss().item(), 4) for _ in range(5)] == [round(0.693147, 4)] * 5
    True
    """
    images, labels = labeled
    epochs = (viewed_batches(images, batch, view, generator) for _ in repeat(None))
    parts = chain.from_iterable(epochs)

    def loss() -> Tensor:
        which, views = next(parts)
        return label_loss(model(views), labels[which])

    return loss


def paired_batches(first: int, second: int, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch over two lists in step: the longer one once, the shorter one again and again.

    Where a list is empty, so are its batches.

    >>> [(len(a), len(b)) for a, b in paired_batches(5, 2, 2, torch.Generator().manual_seed(0))]
    [(2, 2), (3, 2)]
    >>> [(len(a), len(b)) for a, b in paired_batches(0, 2, 2, torch.Generator().manual_seed(0))]
    [(0, 2)]
    """
    shorter = min(first, second)
    nothing = torch.zeros(0, dtype=torch.int64)
    again = chain.from_iterable(batches(shorter, size, generator) if shorter else [nothing] for _ in repeat(None))
    for once in batches(max(first, second), size, generator):
        yield (once, next(again)) if first >= second else (next(again), once)


def learn_by_batch(
    model: nn.Module,
    unlabeled: Iterable[TwoViews],
    labeled: Iterator[tuple[Tensor, Tensor]] | None,
    unlabeled_loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    optimizer: torch.optim.Optimizer,
    clip: float,
    label_loss: LabelLoss = PLAIN,
) -> float:
    """One epoch: a step for each unlabelled batch, with a labelled one beside it if there are any. The mean loss.

    loss = unlabeled_loss(images' numbers, views to label, views to learn) + cross-entropy of the labelled batch
    """
    total, steps = 0.0, 0
    with live_taps_only(model, optimizer):
        for index, shown, learned in unlabeled:
            loss = unlabeled_loss(index, shown, learned)
            if labeled is not None:
                views, truth = next(labeled)
                loss = loss + label_loss(model(views), truth)
            optimizer_step(model, optimizer, loss, clip)
            total, steps = total + float(loss.detach()), steps + 1
    return total / max(steps, 1)
