"""CBAFed: fixed pseudo-labels, class-balanced thresholds, discovery of tail classes, residual weight connection."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from tacit.method import Count, Method, NotNegative, Positive, Reply, Share, Stage, Task, mean_model
from tacit.methods._pseudo import as_it_is, debiased, learn_batches, learn_fixed, optimizer_with
from tacit.payload import Payload, Weights, tensor_in, weights_in
from tacit.pieces.aggregate import residual, shares
from tacit.pieces.consistency import ClassBalanced, Rule
from tacit.pieces.descent import SGD, momentum_of
from tacit.pieces.label import class_counts
from tacit.pieces.threshold import balanced_thresholds, class_shares, tail_classes
from tacit.pieces.train import pull_back
from tacit.sides import Client, Hub, Side


@dataclass(frozen=True)
class CBAFed(Method):
    """Unlabelled clients learn labels that are fixed for the round, above thresholds that balance the classes.

    The server counts what every party trained on, class by class: a common class needs more confidence, and a rare
    one is sought among second guesses. Labelled parties train longer, pulled back to their earlier weights every few
    epochs; so is the global model every few rounds. A server that holds labels is one more labelled party.
    """

    base: Annotated[Share, "a class's threshold before its share moves it (tau)"] = 0.84
    ceiling: Annotated[Share, "highest threshold of a class (tau_h)"] = 0.95
    balanced: Annotated[bool, "thresholds by class; without, all classes need the ceiling"] = True
    times_tenth: Annotated[bool, "class shares times K/10 (Eq. 13)"] = True
    tail: Annotated[NotNegative, "a class with less than tail/K is sought among second guesses (0: none)"] = 0.3
    tail_plain: Annotated[bool, "which class is rare is told by plain shares, not by those times K/10"] = False
    labels: Annotated[Literal["round", "epoch", "batch"], "fixed for a round or an epoch, or batch-wise"] = "round"
    count: Annotated[Literal["trained", "held"], "a party weighs what it trained on, or all it holds"] = "trained"
    labeled_boost: Annotated[Positive, "labelled images weigh so many times"] = 1.0
    residual_client: Annotated[Share, "share of the weights some epochs ago (0: off)"] = 0.8
    residual_server: Annotated[Share, "share of the global model some rounds ago (0: off)"] = 0.5
    residual_every: Annotated[Count, "after so many epochs, and so many rounds (0: never)"] = 5
    warmup: Annotated[Count, "rounds of labelled parties alone before"] = 1
    warmup_epochs: Annotated[Count, "epochs in a round of the warm-up (0: train.epochs)"] = 501
    labeled_epochs: Annotated[Count, "epochs on labels alone in a round (0: train.epochs)"] = 11
    unlabeled_lr: Annotated[Positive, "learning rate where there are unlabelled images"] = 0.02
    keep_momentum: Annotated[bool, "clients keep their momentum from round to round"] = False
    debias: Annotated[bool, "divide the model's mean prediction on the client's images out first (FedDB)"] = False

    citation: ClassVar[str] = (
        "Li et al., Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning, CVPR 2023"
    )
    placements: ClassVar = ("some-clients", "clients", "server")
    server_sends: ClassVar = {"model": "weights", "thresholds?": "[K]", "shares?": "[K]"}
    client_sends: ClassVar = {"model": "weights", "counts": "counts[K]"}
    client_keeps: ClassVar = {"momentum?": "any"}
    presets: ClassVar = {  # what the paper sets otherwise (SGD, rate, batch, clip) are tacit's defaults
        "paper": {"rounds": 500, "net.name": "resnet18", "net.norm": "bn", "views.weak": "resize-crop"},
        "released": {"rounds": 501, "keep_momentum": True, "tail_plain": True, "views.flip": "yes"},
        "several": {"warmup": 50, "warmup_epochs": 11},  # several labelled parties: they must meet now and then
        "smoke": {"warmup": 2, "warmup_epochs": 3, "labeled_epochs": 3, "residual_every": 1, "train.lr": 0.1}
        | {"unlabeled_lr": 0.1, "base": 0.6, "tail": 0.8, "keep_momentum": True},
    }

    def effort(self, epochs: int) -> tuple[int, int]:
        return self.labeled_epochs or epochs, epochs

    def most_examples(self, images: int, largest: int) -> float:
        return images * max(1.0, self.labeled_boost)

    def before(self) -> tuple[Stage, ...]:
        changes = {"labeled_epochs": self.warmup_epochs, "residual_server": self.residual_client, "warmup": 0}  # Eq. 3
        warm_up = WarmUp(**{**dataclasses.asdict(self), **changes})
        return (Stage("warm-up", warm_up, self.warmup),) if self.warmup else ()

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        state: Payload = {**super().server_start(hub, past), "counts": torch.zeros(hub.classes)}
        return {**state, **past["warm-up"], "anchor": state["model"]} if "warm-up" in past else state

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        share = class_shares(tensor_in(state, "counts"), self.times_tenth)
        even = torch.full((hub.classes,), self.ceiling)
        thresholds = balanced_thresholds(share, self.base, self.ceiling) if self.balanced else even
        hub.note(thresholds=thresholds, class_shares=share, tail=self._tail(share).nonzero().flatten())
        send: Payload = {"model": state["model"], "thresholds": thresholds, "shares": share}
        return [Task(client, send) for client in hub.sample_clients()]

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        weights = task.weights("model")
        if not len(me.shard.unlabeled):
            return self.learn_labels(weights, kept, me)
        model = me.model(weights)
        optimizer = optimizer_with(kept, model, me, me.scheduled(self.unlabeled_lr))
        rule: Rule = ClassBalanced(task.tensor("thresholds"), self._tail(task.tensor("shares")))
        if self.debias:
            rule = debiased(rule, model, me)
        if self.labels == "batch":
            labels, loss = learn_batches(model, rule, optimizer, me, learned=None)
        else:  # the kept views are fixed: what was labelled is what is learned
            shown, learned = me.views.raw_weak, as_it_is(me.views.normalise)
            labels, loss = learn_fixed(model, rule, optimizer, me, shown, learned, again=self.labels == "epoch")
        return self._reply(model, optimizer, labels, loss, me)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties = list(replies)
        if len(hub.shard.labeled):
            parties.append(self.learn_labels(weights_in(state, "model"), {}, hub))
        weights = shares([party.examples for party in parties])
        hub.note(party_weights=weights)
        if not any(weights):
            return state
        model = mean_model(parties, weights)
        anchor = weights_in(state, "anchor") if "anchor" in state else model  # no warm-up: the first model
        counts = torch.stack([party.tensor("counts") for party in parties]).sum(dim=0)
        if self.residual_server and self.residual_every and hub.round and hub.round % self.residual_every == 0:
            model = anchor = residual(anchor, model, self.residual_server)
        return {"model": model, "anchor": anchor, "counts": counts}

    def learn_labels(self, weights: Weights, kept: Payload, side: Client | Hub) -> Reply:
        """A labelled party's round: cross-entropy on weak views, pulled back every few epochs (Eq. 1, 2)."""
        model = side.model(weights)
        optimizer = optimizer_with(kept, model, side, side.learning_rate)
        pull = pull_back(model, self.residual_every, self.residual_client if self.residual_every else 0.0)
        loss = side.fit_labeled(model, self.labeled_epochs or side.epochs, after_epoch=pull, optimizer=optimizer)
        return self._reply(model, optimizer, side.shard.labeled.labels, loss, side)

    def _reply(self, model: nn.Module, optimizer: SGD, labels: Tensor, loss: float, side: Side) -> Reply:
        held = len(side.shard.labeled) + len(side.shard.unlabeled)
        examples = len(labels) if self.count == "trained" else held
        return Reply(
            send={"model": side.weights(model), "counts": class_counts(labels, side.classes)},
            examples=examples + (self.labeled_boost - 1.0) * len(side.shard.labeled),
            keep={"momentum": momentum_of(model, optimizer)} if self.keep_momentum else {},
            metrics={"loss": loss, "trained_on": len(labels)},
        )

    def _tail(self, share: Tensor) -> Tensor:
        plain = self.tail_plain and self.times_tenth
        return tail_classes(share * 10 / len(share) if plain else share, self.tail)


@dataclass(frozen=True)
class WarmUp(CBAFed):
    """The stage before: the labelled parties alone, on their labels."""

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        asked = hub.sample_clients(hub.labeled_clients) if hub.labeled_clients else []
        return [Task(client, {"model": state["model"]}) for client in asked]

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        return self.learn_labels(task.weights("model"), kept, me)
