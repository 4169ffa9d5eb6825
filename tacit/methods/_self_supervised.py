"""What FedU, FedEMA and Orchestra share: features are learned from images alone, then a classifier from the labels."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from tacit.contract.method import UNKNOWN, AtLeastOne, Held, Length, Method, Reply, Stage, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.nets import Net
from tacit.nets.optimizer import optimizer_step
from tacit.pieces.loss import LabelLoss
from tacit.pieces.train import View, viewed_batches


@dataclass(frozen=True)
class SelfSupervised(Method):
    """The main stage: every party that holds labels trains a classifier on the features of the stage before.

    `linear` trains the head alone, on features as they are; `finetuned` trains the whole net. The new model is the
    parties' mean by number of labels, as in FedAvg; a server that holds labels is one of them.
    """

    feature_rounds: Annotated[AtLeastOne, Length(), "rounds in which features are learned without labels"] = 100
    head: Annotated[Literal["linear", "finetuned"], "the labels train the head alone, or the whole net"] = "linear"

    merges_sums: ClassVar = {"model": "mean"}
    asks_labeled: ClassVar = True
    needs_pixels: ClassVar = True  # its first stage has views of its own

    def features(self) -> Method:
        """The stage that learns features."""
        raise NotImplementedError

    def before(self) -> tuple[Stage, ...]:
        return (Stage("features", self.features(), self.feature_rounds),)

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return epochs, 0

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        first = weights_in(super().server_start(hub, past), "model")
        return {"model": hub.weights(hub.model(first))}  # with static BN: the statistics of the mean of the encoders

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        asked = hub.sample_clients(hub.labeled_clients) if hub.labeled_clients else []
        return [Task(client, {"model": state["model"]}) for client in asked]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        return self._classify(task.weights("model"), me)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        before = weights_in(state, "model")
        own = [self._classify(before, hub)] if len(hub.shard.labeled) else []
        parties = [*replies, *own]
        return {"model": hub.mean_model(before, parties)} if any(party.examples for party in parties) else state

    def _classify(self, weights: Weights, side: Client | Hub) -> Reply:
        model, labeled = side.model(weights), side.shard.labeled
        if self.head == "finetuned":
            loss = side.fit_labeled(model)
        else:
            assert isinstance(model, Net)
            loss = fit_head(
                model,
                labeled.images,
                labeled.labels,
                view=side.views.weak_view,
                optimizer=side.optimizer(model.head, steps=side.steps(len(labeled))),
                epochs=side.epochs,
                batch=side.train.batch,
                clip=side.train.clip,
                generator=side.rng("labeled views"),
                label_loss=side.label_loss,
            )
        return Reply(send={"model": side.weights(model)}, examples=len(labeled), metrics={"loss": loss})


@dataclass(frozen=True)
class FeatureStage(Method):
    """A stage that learns the net's features, and never its head: the state has a `model`, but no classifier yet.

    So any method can start from it: the head is still that of the first weights.
    """

    merges_sums: ClassVar = {"model": "mean"}
    averaged: ClassVar[tuple[str, ...]] = ("model",)  # groups of weights that travel, and whose mean goes on

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return 0, 2 * epochs  # two views of each image

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return [Task(client, {**state}) for client in hub.sample_clients()]

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        if not any(reply.examples > 0 for reply in replies):
            return state
        nets = {name: hub.mean_model(weights_in(state, name), replies, name=name) for name in self.averaged}
        return {**state, **nets}

    def server_answer(self, state: Payload, hub: Hub) -> None:
        return None  # no classifier yet


def options_for(stage: type[Method], method: Method) -> dict[str, Any]:
    """The options of a method that its stage has, too."""
    return {option.name: getattr(method, option.name) for option in dataclasses.fields(stage)}


def fit_head(
    model: Net,
    images: Tensor,
    labels: Tensor,
    *,
    view: View,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    batch: int,
    clip: float,
    generator: torch.Generator,
    label_loss: LabelLoss,
) -> float:
    """Train the head on features as the net would be used (eval mode): BN's statistics must not drift meanwhile.

    Returns the last epoch's mean loss.
    """
    model.eval()
    mean = math.nan
    for _ in range(epochs):
        total, seen = 0.0, 0
        for which, views in viewed_batches(images, batch, view, generator):
            with torch.no_grad():
                features = model.features(views)
            loss = label_loss(model.head(features), labels[which])
            optimizer_step(model.head, optimizer, loss, clip)
            total, seen = total + float(loss.detach()) * len(which), seen + len(which)
        mean = total / seen if seen else math.nan
    return mean
