"""FixMatch inside FedAvg: accept what the model is sure of on a weak view, learn it on a strong view."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from tacit.contract.method import (
    UNKNOWN,
    Count,
    Epochs,
    Held,
    Method,
    NotNegative,
    Positive,
    Reply,
    Rounds,
    Share,
    Stage,
    Task,
)
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.methods.fedavg import WarmUp
from tacit.pieces.consistency import endless_batches, learn_by_batch, two_view_batches
from tacit.pieces.debias import debiasing
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.train import View, predict


@dataclass(frozen=True)
class FixMatch(Method):
    """Labelled images: cross-entropy on weak views. Unlabelled ones: cross-entropy on strong views, towards the
    class that the weak view got with enough confidence.

    With labels at the server only, clients learn from pseudo-labels and the server trains on its labels after each
    merge. `labels = "round"` gives pseudo-labels once a round, by the model that the server sent.
    """

    threshold: Annotated[Share, "confidence that a pseudo-label needs"] = 0.95
    weight: Annotated[NotNegative, "of the unlabelled loss"] = 1.0
    ratio: Annotated[Positive, "unlabelled images a step for each labelled one"] = 1.0
    labels: Annotated[Literal["batch", "round"], "given anew each batch, or fixed for the round"] = "batch"
    warmup: Annotated[Rounds, "rounds of FedAvg on the labels before"] = 0
    warmup_epochs: Annotated[Epochs, "epochs in a round of the warm-up (0: train.epochs)"] = 0
    labeled_epochs: Annotated[Count, "epochs on labels alone in a round (0: train.epochs)"] = 0
    unlabeled_lr: Annotated[NotNegative, "learning rate of clients without labels (0: train.lr)"] = 0.0
    debias: Annotated[bool, "divide the model's mean prediction on the client's images out first (FedDB)"] = False
    debias_prior: Annotated[Literal["fixed", "moving"], "batch-wise, that mean stays for the round, or follows"] = (
        "fixed"
    )

    citation: ClassVar[str] = (
        "Sohn et al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence, NeurIPS 2020"
    )
    merges_sums: ClassVar = {"model": "mean"}
    presets: ClassVar = {"paper": {}, "smoke": {"warmup": 1, "threshold": 0.6, "train.lr": 0.1}}

    @property
    def fixed(self) -> bool:
        """Whether pseudo-labels stay for the round."""
        return self.labels == "round"

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        if not (held.labeled and held.unlabeled):
            return self.labeled_epochs or epochs, epochs
        return epochs if self.fixed else held.label_passes(epochs, self.ratio), epochs

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", WarmUp(epochs=self.warmup_epochs), self.warmup),) if self.warmup else ()

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        model = me.model(task.weights("model"))
        images, labeled = me.shard.unlabeled, me.shard.labeled
        if not len(images):
            loss = me.fit_labeled(model, epochs=self.labeled_epochs or None)
            return Reply(send={"model": me.weights(model)}, examples=len(labeled), metrics={"loss": loss})
        statistics = self.recall(memory, me)
        look = partial(predict, model, images, partial(me.views.weak_view, generator=me.rng("prior views")))
        moving = self.debias_prior == "moving"
        debiased = debiasing(look, at_once=self.fixed, moving=moving) if self.debias else None

        def accept(index: Tensor, probs: Tensor) -> PseudoLabels:
            label, accepted = self.accept(
                me.part[index.cpu()], probs if debiased is None else debiased(probs), statistics
            )
            me.audit(index, label, accepted)
            return PseudoLabels(label, accepted)

        if self.fixed:
            trained_on, loss = self.learn_fixed(model, accept, me)
        else:
            trained_on, loss = me.shard.held, self.learn_by_batch(model, accept, statistics, me)
        keep = {name: tensor.detach().cpu().clone() for name, tensor in statistics.items()}
        return Reply(send={"model": me.weights(model)}, examples=trained_on, keep={**keep}, metrics={"loss": loss})

    def learn_by_batch(self, model: nn.Module, accept: "Accept", statistics: Weights, me: Client) -> float:
        """Each step labels a batch on its weak views, and learns what it accepts on strong views. The last loss."""

        def unlabeled_loss(index: Tensor, weak: Tensor, strong: Tensor) -> Tensor:
            with torch.no_grad():
                probs = model(weak).softmax(dim=1)
            logits = model(strong)
            label, accepted = accept(index, probs)
            loss = self.weight * masked_cross_entropy(logits, label, accepted)  # Eq. 4
            return loss + self.extra_loss(logits, accepted, statistics)

        images, labeled, weak = me.shard.unlabeled, me.shard.labeled, me.views.weak_view
        own = endless_batches(labeled.images, labeled.labels, me.train.batch, weak, me.rng("labeled views"))
        generator, size = me.rng("unlabeled views"), round(me.train.batch * self.ratio)
        optimizer = me.optimizer(model, self.rate(me), steps=me.steps(len(images), size))
        loss = 0.0
        for _ in range(me.epochs):
            epoch = two_view_batches(images, size, weak, self.learned_view(me), generator)
            loss = learn_by_batch(
                model, epoch, own, unlabeled_loss, optimizer=optimizer, clip=me.train.clip, label_loss=me.label_loss
            )
        return loss

    def learn_fixed(self, model: nn.Module, accept: "Accept", me: Client) -> tuple[int, float]:
        """Labels are given once, to the images as they are, by the model that came; learned on strong views."""
        images, labeled = me.shard.unlabeled, me.shard.labeled
        label, accepted = accept(torch.arange(len(images)), me.predict(model, images))
        chosen, labels = torch.cat([images[accepted], labeled.images]), torch.cat([label[accepted], labeled.labels])
        optimizer, generator = me.optimizer(model, self.rate(me)), me.rng("unlabeled views")
        loss = me.fit(model, chosen, labels, view=me.views.strong_view, optimizer=optimizer, generator=generator)
        return len(labels), loss

    def rate(self, me: Client) -> float | None:
        """The learning rate of a client without labels, where that is another one; None: `train.lr`."""
        return me.scheduled(self.unlabeled_lr) if self.unlabeled_lr and not len(me.shard.labeled) else None

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        merged = super().server_merge(state, replies, hub)
        return {"model": hub.finetune(weights_in(merged, "model"))}

    # --- What FlexMatch, FreeMatch and Fed-Consist change -------------------------------------------------------

    def recall(self, memory: Payload, me: Client) -> Weights:
        """What `accept` remembers from batch to batch and from round to round, as this client kept it."""
        return {}

    def accept(self, index: Tensor, probs: Tensor, statistics: Weights) -> PseudoLabels:
        """The pseudo-labels of the images with these numbers, from their class probabilities."""
        return confident(probs, self.threshold)

    def extra_loss(self, logits: Tensor, accepted: Tensor, statistics: Weights) -> Tensor | float:
        """A term of the loss beside the cross-entropy, from the predictions for the views that are learned."""
        return 0.0

    def learned_view(self, me: Client) -> View:
        """On which a pseudo-label is learned, batch-wise."""
        return me.views.strong_view


Accept = Callable[[Tensor, Tensor], PseudoLabels]  # from the images' numbers and their class probabilities
