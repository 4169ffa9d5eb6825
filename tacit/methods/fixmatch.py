"""FixMatch inside FedAvg: believe what the model is sure of on a weak view, learn it on a strong view."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.method import Count, Method, NotNegative, Positive, Reply, Share, Stage, Task
from tacit.methods.fedavg import FedAvg
from tacit.payload import Payload, weights_in
from tacit.pieces.label import confident
from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.train import batches, descend, fit, viewed_batches
from tacit.sides import Client, Hub


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
    warmup: Annotated[Count, "rounds of FedAvg on the labels before"] = 0

    citation: ClassVar[str] = (
        "Sohn et al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence, NeurIPS 2020"
    )
    presets: ClassVar = {"paper": {}, "smoke": {"warmup": 1, "threshold": 0.6, "train.lr": 0.1}}

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", FedAvg(), self.warmup),) if self.warmup else ()

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        model = me.model(weights_in(task.send, "model"))
        if not len(me.shard.unlabeled):
            loss = me.fit_labeled(model)
            examples = len(me.shard.labeled)
        elif self.labels == "round":
            loss, examples = self._learn_fixed(model, me)
        else:
            loss, examples = self._learn_by_batch(model, me)
        return Reply(send={"model": me.weights(model)}, examples=examples, metrics={"loss": loss})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        merged = super().server_merge(state, replies, hub)
        return {"model": hub.finetune(weights_in(merged, "model"))}

    def _learn_by_batch(self, model: nn.Module, me: Client) -> tuple[float, int]:
        """FixMatch as published: each step looks at its own batch's confident predictions."""
        optimizer, generator = me.optimizer(model), me.rng("unlabeled views")
        labeled = self._labeled_batches(me)
        total, steps = 0.0, 0
        for _ in range(me.epochs):
            for index, weak, strong in self._two_views(me, generator):
                with torch.no_grad():
                    label, sure = confident(model(weak).softmax(dim=1), self.threshold)
                loss = self.weight * masked_cross_entropy(model(strong), label, sure)
                if labeled is not None:
                    views, truth = next(labeled)
                    loss = loss + F.cross_entropy(model(views), truth)
                descend(model, optimizer, loss, me.train.clip)
                me.audit(index, label, sure)
                total, steps = total + float(loss.detach()), steps + 1
        return total / max(steps, 1), len(me.shard.labeled) + len(me.shard.unlabeled)

    def _two_views(self, me: Client, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        images = me.shard.unlabeled
        for index in batches(len(images), round(me.train.batch * self.ratio), generator):
            yield index, me.views.weak_view(images[index], generator), me.views.strong_view(images[index], generator)

    def _labeled_batches(self, me: Client) -> Iterator[tuple[Tensor, Tensor]] | None:
        """Labelled batches without end, or None for a client that has no labels."""
        labeled, generator = me.shard.labeled, me.rng("labeled views")
        if not len(labeled):
            return None
        epochs = (viewed_batches(labeled.images, me.train.batch, me.views.weak_view, generator) for _ in repeat(None))
        return ((views, labeled.labels[which]) for which, views in chain.from_iterable(epochs))

    def _learn_fixed(self, model: nn.Module, me: Client) -> tuple[float, int]:
        """Labels once, by the model as it came; then plain training on strong views of what was kept."""
        images = me.shard.unlabeled
        label, sure = confident(me.predict(model, images), self.threshold)
        me.audit(torch.arange(len(images)), label, sure)
        labeled = me.shard.labeled
        loss = fit(
            model,
            torch.cat([images[sure], labeled.images]),
            torch.cat([label[sure], labeled.labels]),
            view=me.views.strong_view,
            optimizer=me.optimizer(model),
            epochs=me.epochs,
            batch=me.train.batch,
            clip=me.train.clip,
            generator=me.rng("unlabeled views"),
        )
        return loss, int(sure.sum()) + len(labeled)
