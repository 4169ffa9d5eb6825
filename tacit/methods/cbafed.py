"""CBAFed: fixed pseudo-labels, class-balanced thresholds, discovery of tail classes, residual weight connection."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
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
from tacit.contract.parties import Client, Hub, Party
from tacit.core.payload import Payload, Weights, tensor_in, weights_in
from tacit.methods.fixmatch import Accept
from tacit.nets.optimizer import SGD, momentum_of
from tacit.pieces.aggregate import residual, shares
from tacit.pieces.consistency import endless_batches, learn_by_batch, two_view_batches
from tacit.pieces.debias import debiasing
from tacit.pieces.label import PseudoLabels, class_counts
from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.threshold import class_shares
from tacit.pieces.train import predict, pull_back


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
    warmup: Annotated[Rounds, "rounds of labelled parties alone before"] = 1
    warmup_epochs: Annotated[Epochs, "epochs in a round of the warm-up (0: train.epochs)"] = 501
    labeled_epochs: Annotated[Count, "epochs on labels alone in a round (0: train.epochs)"] = 11
    unlabeled_lr: Annotated[Positive, "learning rate where there are unlabelled images"] = 0.02
    keep_momentum: Annotated[bool, "clients keep their momentum from round to round"] = False
    debias: Annotated[bool, "divide the model's mean prediction on the client's images out first (FedDB)"] = False
    debias_prior: Annotated[Literal["fixed", "moving"], "batch-wise, that mean stays for the round, or follows"] = (
        "fixed"
    )

    citation: ClassVar[str] = (
        "Li et al., Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning, CVPR 2023"
    )
    placements: ClassVar = ("some-clients", "clients", "server")
    server_sends: ClassVar = {"model": "weights", "thresholds?": "[K]", "shares?": "[K]"}
    client_sends: ClassVar = {"model": "weights", "counts": "counts[K]"}
    client_keeps: ClassVar = {"momentum?": "any"}
    merges_sums: ClassVar = {"model": "mean", "counts": "sum"}
    # What the paper sets otherwise (SGD, rate, batch, clip) are tacit's defaults. Rounds are counted from 0 and merged
    # at 5, 10, …: of 501, as in the released code, the last one ends with a merge.
    presets: ClassVar = {
        "paper": {"rounds": 501, "net.name": "resnet18", "net.norm": "bn", "views.weak": "resize-crop"},
        "released": {"keep_momentum": True, "tail_plain": True, "views.flip": "yes"},
        "several": {"warmup": 51, "warmup_epochs": 11},  # several labelled parties: they must meet now and then
        "smoke": {
            "warmup": 2,
            "warmup_epochs": 3,
            "labeled_epochs": 3,
            "residual_every": 1,
            "train.lr": 0.1,
            "unlabeled_lr": 0.1,
            "base": 0.6,
            "tail": 0.8,
            "keep_momentum": True,
        },
    }

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        if held.labeled and held.unlabeled:
            return held.label_passes(epochs) if self.labels == "batch" else epochs, epochs
        return self.labeled_epochs or epochs, epochs

    def most_examples(self, images: int, largest: int) -> float:
        return images * max(1.0, self.labeled_boost)

    def before(self) -> tuple[Stage, ...]:
        changes = {"labeled_epochs": self.warmup_epochs, "residual_server": self.residual_client, "warmup": 0}  # Eq. 3
        warm_up = CBAFedWarmUp(**{**dataclasses.asdict(self), **changes})
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

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        weights = task.weights("model")
        if not len(me.shard.unlabeled):
            return self.learn_labels(weights, memory, me)
        model, images = me.model(weights), me.shard.unlabeled
        momentum, steps = weights_in(memory, "momentum", missing={}), me.steps(len(images))
        known = steps if self.labels == "batch" else 0  # fixed labels: only when it is known how many were accepted
        optimizer = me.optimizer(model, me.scheduled(self.unlabeled_lr), momentum, known)
        thresholds, tail = task.tensor("thresholds").to(me.device), self._tail(task.tensor("shares")).to(me.device)
        look = partial(predict, model, images, partial(me.views.weak_view, generator=me.rng("prior views")))
        moving = self.debias_prior == "moving"
        debiased = debiasing(look, at_once=self.labels != "batch", moving=moving) if self.debias else None

        def accept(index: Tensor, probs: Tensor) -> PseudoLabels:
            label, accepted = balanced_labels(probs if debiased is None else debiased(probs), thresholds, tail)
            me.audit(index, label, accepted)
            return PseudoLabels(label, accepted)

        learn = self.learn_by_batch if self.labels == "batch" else self.learn_fixed
        labels, loss = learn(model, accept, optimizer, me)
        return self._reply(model, optimizer, labels, loss, me)

    def learn_fixed(self, model: nn.Module, accept: Accept, optimizer: SGD, me: Client) -> tuple[Tensor, float]:
        """One weak view of each image is labelled by the model as it is now; what is accepted stays fixed, and is
        learned with the client's own labels: for the round, or anew for each epoch. Returns the labels and the loss.
        """
        images, labeled, generator = me.shard.unlabeled, me.shard.labeled, me.rng("unlabeled views")
        times, epochs = (me.epochs, 1) if self.labels == "epoch" else (1, me.epochs)
        labels, loss = labeled.labels, math.nan
        for _ in range(times):
            views = me.views.raw_weak(images, generator)
            label, accepted = accept(torch.arange(len(images)), me.predict(model, views))
            labels = torch.cat([label[accepted], labeled.labels])
            fixed, as_it_is = (
                torch.cat([views[accepted], me.views.raw_weak(labeled.images, generator)]),
                me.views.plain_view,
            )
            loss = me.fit(model, fixed, labels, view=as_it_is, optimizer=optimizer, epochs=epochs, generator=generator)
        return labels, loss

    def learn_by_batch(self, model: nn.Module, accept: Accept, optimizer: SGD, me: Client) -> tuple[Tensor, float]:
        """The ablation: each step labels its own batch, and learns on the very same views. Returns the last epoch's."""
        images, labeled, weak = me.shard.unlabeled, me.shard.labeled, me.views.weak_view
        own = endless_batches(labeled.images, labeled.labels, me.train.batch, weak, me.rng("labeled views"))
        generator, learned, loss = me.rng("unlabeled views"), list[Tensor](), math.nan

        def unlabeled_loss(index: Tensor, shown: Tensor, same: Tensor) -> Tensor:
            with torch.no_grad():
                probs = model(shown).softmax(dim=1)
            logits = model(same)
            label, accepted = accept(index, probs)
            learned.append(label[accepted])
            return masked_cross_entropy(logits, label, accepted)

        for _ in range(me.epochs):
            learned.clear()
            epoch = two_view_batches(images, me.train.batch, weak, None, generator)
            loss = learn_by_batch(
                model, epoch, own, unlabeled_loss, optimizer=optimizer, clip=me.train.clip, label_loss=me.label_loss
            )
        return torch.cat([*learned, labeled.labels]), loss

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties = list(replies)
        if len(hub.shard.labeled):
            parties.append(self.learn_labels(weights_in(state, "model"), {}, hub))
        weights = shares([party.examples for party in parties])
        hub.note(party_weights=weights)
        if not any(weights):
            return state
        model = hub.mean_model(weights_in(state, "model"), parties, weights)
        anchor = weights_in(state, "anchor") if "anchor" in state else model  # no warm-up: the first model
        counts = torch.stack([party.tensor("counts") for party in parties]).sum(dim=0)
        if self.residual_server and self.residual_every and hub.round and hub.round % self.residual_every == 0:
            model = anchor = residual(anchor, model, self.residual_server)
        return {"model": model, "anchor": anchor, "counts": counts}

    def learn_labels(self, weights: Weights, memory: Payload, side: Client | Hub) -> Reply:
        """A labelled party's round: cross-entropy on weak views, pulled back every few epochs (Eq. 1, 2)."""
        model = side.model(weights)
        optimizer = side.optimizer(model, momentum=weights_in(memory, "momentum", missing={}))
        pull = pull_back(model, self.residual_every, self.residual_client if self.residual_every else 0.0)
        loss = side.fit_labeled(model, self.labeled_epochs or side.epochs, after_epoch=pull, optimizer=optimizer)
        return self._reply(model, optimizer, side.shard.labeled.labels, loss, side)

    def _reply(self, model: nn.Module, optimizer: SGD, labels: Tensor, loss: float, side: Party) -> Reply:
        examples = len(labels) if self.count == "trained" else side.shard.held
        return Reply(
            send={"model": side.weights(model), "counts": class_counts(labels, side.classes)},
            examples=examples + (self.labeled_boost - 1.0) * len(side.shard.labeled),
            keep={"momentum": momentum_of(model, optimizer)} if self.keep_momentum else {},
            metrics={"loss": loss, "trained_on": len(labels)},
        )

    def _tail(self, share: Tensor) -> Tensor:
        plain = self.tail_plain and self.times_tenth
        return tail_classes(share * 10 / len(share) if plain else share, self.tail)


def balanced_thresholds(shares: Tensor, base: float, ceiling: float) -> Tensor:
    """Class-balanced adaptive thresholds: min(share + base − std(shares), ceiling) (Eq. 9 to 11): [K] → [K].

    A class that was trained on more needs more confidence. The standard deviation is the unbiased one.

    >>> balanced_thresholds(torch.tensor([0.3, 0.1, 0.1, 0.1]), base=0.84, ceiling=0.95)    # std: 0.1
    tensor([0.9500, 0.8400, 0.8400, 0.8400])
    """
    return (shares + base - shares.std(correction=1)).clamp(max=ceiling)


def tail_classes(shares: Tensor, limit: float) -> Tensor:
    """Which classes are so rare that they are sought among second guesses: share < limit / K (Eq. 16).

    >>> tail_classes(torch.tensor([0.6, 0.3, 0.09, 0.01]), limit=0.3)           # 0.3 / 4 = 0.075
    tensor([False, False, False,  True])
    """
    return shares < limit / len(shares)


def balanced_labels(probs: Tensor, thresholds: Tensor, tail: Tensor) -> PseudoLabels:
    """The likeliest class where it is *above* its threshold; else the second one if that is a tail class.

    Eq. 14 to 17. What is neither is not kept, and told with its likeliest class.

    >>> probs = torch.tensor([[0.9, 0.1, 0.0], [0.7, 0.1, 0.2], [0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])
    >>> balanced_labels(probs, torch.tensor([0.8, 0.8, 0.6]), tail=torch.tensor([False, False, True]))
    PseudoLabels(label=tensor([0, 2, 0, 2]), accepted=tensor([ True,  True, False,  True]))
    """
    best, order = probs.topk(2, dim=1)
    first, second = order[:, 0], order[:, 1]
    sure = best[:, 0] > thresholds[first]
    found = ~sure & tail[second]
    return PseudoLabels(torch.where(found, second, first), sure | found)


@dataclass(frozen=True)
class CBAFedWarmUp(CBAFed):
    """The stage before: the labelled parties alone, on their labels."""

    asks_labeled: ClassVar = True
    in_parts: ClassVar = False

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return self.labeled_epochs or epochs, 0

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        asked = hub.sample_clients(hub.labeled_clients) if hub.labeled_clients else []
        return [Task(client, {"model": state["model"]}) for client in asked]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        return self.learn_labels(task.weights("model"), memory, me)
