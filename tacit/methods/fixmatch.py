"""FixMatch inside FedAvg: believe what the model is sure of on a weak view, learn it on a strong view."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from torch import Tensor, nn

from tacit.method import Count, Method, NotNegative, Positive, Reply, Share, Stage, Task
from tacit.methods._pseudo import as_it_is, debiased, learn_batches, learn_fixed
from tacit.methods.fedavg import FedAvg
from tacit.payload import Payload, Weights, weights_in
from tacit.pieces.consistency import FixedThreshold, Rule
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
    warmup_epochs: Annotated[Count, "epochs in a round of the warm-up (0: train.epochs)"] = 0
    debias: Annotated[bool, "divide the model's mean prediction on the client's images out first (FedDB)"] = False

    citation: ClassVar[str] = (
        "Sohn et al., FixMatch: Simplifying Semi-Supervised Learning with Consistency and Confidence, NeurIPS 2020"
    )
    presets: ClassVar = {"paper": {}, "smoke": {"warmup": 1, "threshold": 0.6, "train.lr": 0.1}}

    @property
    def fixed(self) -> bool:
        """Whether pseudo-labels stay for the round."""
        return self.labels == "round"

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", WarmUp(epochs=self.warmup_epochs), self.warmup),) if self.warmup else ()

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        model = me.model(task.weights("model"))
        if not len(me.shard.unlabeled):
            loss = me.fit_labeled(model)
            return Reply(send={"model": me.weights(model)}, examples=len(me.shard.labeled), metrics={"loss": loss})
        rule = self.rule(kept, me)
        if self.debias:
            rule = debiased(rule, model, me)
        labels, loss = self.learn(model, rule, me)
        examples = len(labels) if self.fixed else len(me.shard.labeled) + len(me.shard.unlabeled)
        return Reply(
            send={"model": me.weights(model)}, examples=examples, keep={**rule.memory()}, metrics={"loss": loss}
        )

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        merged = super().server_merge(state, replies, hub)
        return {"model": hub.finetune(weights_in(merged, "model"))}

    def rule(self, kept: Payload, me: Client) -> Rule:
        """Which predictions are believed: what FlexMatch and FreeMatch change."""
        return FixedThreshold(self.threshold)

    def learn(self, model: nn.Module, rule: Rule, me: Client) -> tuple[Tensor, float]:
        """Each batch's own confident predictions, as published; or those on the images as they are, fixed."""
        optimizer, strong = me.optimizer(model), me.views.strong_view
        if self.fixed:
            return learn_fixed(model, rule, optimizer, me, shown=as_it_is(lambda images: images), learned=strong)
        return learn_batches(model, rule, optimizer, me, learned=strong, ratio=self.ratio, weight=self.weight)


@dataclass(frozen=True)
class WarmUp(FedAvg):
    """FedAvg on the labels, with a number of epochs of its own."""

    epochs: Annotated[Count, "on the labels in a round (0: train.epochs)"] = 0

    def effort(self, epochs: int) -> tuple[int, int]:
        return self.epochs or epochs, 0

    def _train(self, weights: Weights, side: Client | Hub) -> Reply:
        model = side.model(weights)
        loss = side.fit_labeled(model, epochs=self.epochs or None)
        return Reply(send={"model": side.weights(model)}, examples=len(side.shard.labeled), metrics={"loss": loss})
