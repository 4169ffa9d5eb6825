"""How a party learns from labels and pseudo-labels, batch-wise or fixed: for CBAFed, DDRFed, FixMatch and kin."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tacit.method import Reply
from tacit.payload import Payload, weights_in
from tacit.pieces.augment_dsa import DSA_OPERATIONS, dsa
from tacit.pieces.consistency import Debiased, Rule, endless_batches, learn_by_batch, two_view_batches
from tacit.pieces.debias import average_prediction
from tacit.pieces.descent import SGD, give_momentum
from tacit.pieces.train import View, fit
from tacit.sides import Client, Side


def optimizer_with(kept: Payload, model: nn.Module, side: Side, rate: float) -> SGD:
    """The optimiser of the experiment at this rate, going on with the momentum that was kept, if any was."""
    optimizer = side.optimizer(model, rate)
    if "momentum" in kept:
        give_momentum(model, optimizer, weights_in(kept, "momentum"))
    return optimizer


def learn_batches(
    model: nn.Module,
    rule: Rule,
    optimizer: torch.optim.Optimizer,
    me: Client,
    learned: View | None,
    ratio: float = 1.0,
    weight: float = 1.0,
) -> tuple[Tensor, float]:
    """Every step labels its own batch of weak views, and learns what it believes (and the client's labels, if any).

    `learned` makes the views that are learned; None: the very views that were labelled. Returns the labels that
    were learned in the last epoch, the client's own ones included, and the last epoch's loss.
    """
    images, labeled, generator = me.shard.unlabeled, me.shard.labeled, me.rng("unlabeled views")
    weak, size = me.views.weak_view, round(me.train.batch * ratio)
    own = endless_batches(labeled.images, labeled.labels, me.train.batch, weak, me.rng("labeled views"))
    believed: list[Tensor] = []
    loss = math.nan

    def tell(index: Tensor, label: Tensor, kept: Tensor) -> None:
        me.audit(index, label, kept)
        believed.append(label[kept])

    for _ in range(me.epochs):
        believed.clear()
        epoch = two_view_batches(images, size, weak, learned, generator)
        loss = learn_by_batch(
            model, epoch, own, rule, optimizer=optimizer, weight=weight, clip=me.train.clip, tell=tell
        )
    return torch.cat([*believed, labeled.labels]), loss


def learn_fixed(
    model: nn.Module,
    rule: Rule,
    optimizer: torch.optim.Optimizer,
    me: Client,
    shown: View,
    learned: View,
    again: bool = False,
) -> tuple[Tensor, float]:
    """Labels are given once, by the model as it came; what is believed is learned together with the client's labels.

    `shown` makes the raw views that are labelled and stay fixed, `learned` what the net is then shown of them.
    `again`: views and labels are made anew for each epoch. Returns as `learn_batches`.
    """
    images, labeled, generator = me.shard.unlabeled, me.shard.labeled, me.rng("unlabeled views")
    times, epochs = (me.epochs, 1) if again else (1, me.epochs)
    labels, loss = labeled.labels, math.nan
    for _ in range(times):
        fixed, index = shown(images, generator), torch.arange(len(images))
        label, kept = rule.believe(index, me.predict(model, fixed))
        me.audit(index, label, kept)
        labels = torch.cat([label[kept], labeled.labels])
        loss = fit(
            model,
            torch.cat([fixed[kept], shown(labeled.images, generator)]),
            labels,
            view=learned,
            optimizer=optimizer,
            epochs=epochs,
            batch=me.train.batch,
            clip=me.train.clip,
            generator=generator,
        )
    return labels, loss


def debiased(rule: Rule, model: nn.Module, me: Client) -> Rule:
    """The rule behind FedDB's DPL: the model's mean prediction on the client's images is divided out first."""
    images = me.shard.unlabeled
    return Debiased(rule, average_prediction(me.predict(model, images)), len(images))


def as_it_is(look: Callable[[Tensor], Tensor]) -> View:
    """A way to look at images as a view without chance."""
    return lambda images, _: look(images)


class Tally:
    """What a client's batches come to: what each image was last believed to be, and means of figures.

    The client's own unlabelled images come first; others, whose truth nobody knows, follow, and are not audited.
    """

    def __init__(self, me: Client, images: int) -> None:
        self.me = me
        self.last = torch.full((images,), -1)  # -1: not believed
        self.figures: dict[str, list[float]] = {}

    def labels(self, index: Tensor, label: Tensor, kept: Tensor) -> None:
        """Take a batch's labels in, and tell the auditor."""
        label, kept = label.cpu(), kept.cpu()
        own = index < len(self.me.shard.unlabeled)
        self.me.audit(index[own], label[own], kept[own])
        self.last[index] = label.where(kept, torch.tensor(-1))
        self.figures.setdefault("high", []).extend(kept.double().tolist())

    def figure(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    @property
    def believed(self) -> Tensor:
        """The labels of the images that were believed when last seen, in their order."""
        return self.last[self.last >= 0]

    @property
    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.figures.items()}


def mean_figure(replies: Sequence[Reply], name: str) -> float:
    """The mean of a figure over the clients that have it; NaN where none has."""
    values = [reply.metrics[name] for reply in replies if name in reply.metrics]
    return sum(values) / len(values) if values else math.nan


def dsa_view(side: Side) -> View:
    """DSA on the images as they are, one operation for each batch; no flips where they would change the class."""
    operations = [name for name in DSA_OPERATIONS if name != "flip" or side.views.flip]
    return lambda images, generator: dsa(side.views.plain(images), generator, operations)
