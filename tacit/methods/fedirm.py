"""FedIRM: unlabelled clients follow a teacher, and relate classes to each other as the labelled clients do."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from tacit.method import AtLeastOne, Count, Method, NotNegative, Positive, Reply, Share, Stage, Task, mean_model
from tacit.nets.layers import Net
from tacit.payload import Payload, Weights, tensor_in, weights_in
from tacit.pieces import relation as irm
from tacit.pieces.aggregate import labeled_shares, shares
from tacit.pieces.consistency import two_view_batches
from tacit.pieces.teacher import learn_with_teacher, ramp_up, squared_error
from tacit.pieces.train import descend, weights_of
from tacit.sides import Client, Hub, Side


@dataclass(frozen=True)
class FedIRM(Method):
    """Labelled parties send, with the model, how it relates the classes (K×K); unlabelled clients match the mean of it.

    They also stay near to their own slow teacher. Both terms ramp up over the rounds. Our own construction: a server
    that holds labels is one more labelled party; a client with both kinds of images adds both losses.
    """

    weight: Annotated[NotNegative, "of the unlabelled loss, after the ramp (lambda)"] = 15.0
    ramp: Annotated[Count, "rounds until the unlabelled loss has its full weight (0: at once)"] = 30
    relation_weight: Annotated[NotNegative, "of the relation term beside the teacher's (0: teacher alone)"] = 1.0
    decay: Annotated[Share, "of the teacher"] = 0.99
    temperature: Annotated[Positive, "of a class's mean logits in the relation matrix (tau)"] = 2.0
    smoothing: Annotated[Share, "of labels"] = 0.1
    confidence: Annotated[Share, "that a pseudo-label needs to enter the relation matrix"] = 0.3
    uncertainty: Annotated[Share, "entropy below which a pseudo-label is reliable, as a share of ln K"] = 0.75
    uncertainty_nats: Annotated[NotNegative, "that entropy as a number instead (0: by share)"] = 0.0
    dropout: Annotated[Share, "on the head's inputs, to measure that entropy"] = 0.2
    passes: Annotated[AtLeastOne, "with dropout"] = 11
    weigh: Annotated[Literal["alike", "half", "examples"], "all alike; labelled half; by images"] = "alike"
    unlabeled_lr: Annotated[Positive, "learning rate where there are unlabelled images"] = 0.02
    labeled_epochs: Annotated[Count, "epochs on labels alone in a round (0: train.epochs)"] = 0
    warmup: Annotated[Count, "rounds of labelled parties alone before"] = 20
    warmup_epochs: Annotated[Count, "epochs in a round of the warm-up (0: train.epochs)"] = 0

    citation: ClassVar[str] = (
        "Liu et al., Federated Semi-supervised Medical Image Classification via Inter-client Relation Matching, "
        "MICCAI 2021"
    )
    placements: ClassVar = ("some-clients", "clients", "server")
    server_sends: ClassVar = {"model": "weights", "relation": "[K,K]"}
    client_sends: ClassVar = {"model": "weights", "relation": "distributions[K,K] if labeled"}
    client_keeps: ClassVar = {"teacher?": "weights"}
    presets: ClassVar = {
        "paper": {"rounds": 180, "net.name": "resnet18", "net.norm": "bn"},
        "released": {"uncertainty_nats": 2.0},
        "smoke": {"warmup": 1, "ramp": 2, "train.lr": 0.1, "unlabeled_lr": 0.05, "weight": 2.0},
    }

    def effort(self, epochs: int) -> tuple[int, int]:
        return self.labeled_epochs or epochs, epochs

    def before(self) -> tuple[Stage, ...]:
        warm_up = WarmUp(**{**asdict(self), "labeled_epochs": self.warmup_epochs, "warmup": 0})
        return (Stage("warm-up", warm_up, self.warmup),) if self.warmup else ()

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        unknown = irm.mean_relation([], hub.classes)
        return {"relation": unknown, **past.get("warm-up", {}), **super().server_start(hub, past)}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return [Task(client, {**state}) for client in hub.sample_clients()]

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        weights = task.weights("model")
        if not len(me.shard.unlabeled):
            return self.learn_labels(weights, me)
        teacher = weights_in(kept, "teacher") if "teacher" in kept else weights  # its own, never reset by the server
        return self.learn(weights, teacher, task.tensor("relation").to(me.device), me)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties, labeled = list(replies), [reply.client in hub.labeled_clients for reply in replies]
        if len(hub.shard.labeled):
            parties.append(self.learn_labels(weights_in(state, "model"), hub))
            labeled.append(True)
        examples = [party.examples for party in parties]
        alike = shares([float(n > 0) for n in examples])
        ways = {"alike": alike, "half": labeled_shares(examples, labeled, 0.5), "examples": shares(examples)}
        told = [party.tensor("relation") for party in parties if "relation" in party.send]
        relation = irm.mean_relation(told, hub.classes)  # labelled parties alike, class by class
        known = irm.known_rows(relation)[:, None]  # of a class that nobody told about now, what was told last stays
        relation = torch.where(known, relation, tensor_in(state, "relation"))
        hub.note(party_weights=ways[self.weigh], relation_diagonal=relation.diagonal())
        model = mean_model(parties, ways[self.weigh]) if any(examples) else state["model"]
        return {"model": model, "relation": relation}

    def learn_labels(self, weights: Weights, side: Client | Hub) -> Reply:
        """A labelled party's round: cross-entropy on two views, and on the way the relation of the classes."""
        model, own = side.model(weights), self._labels(side)
        optimizer, losses = side.optimizer(model), list[float]()
        for loss in own.losses(model, self.labeled_epochs or side.epochs):
            descend(model, optimizer, loss, side.train.clip)
            losses.append(float(loss.detach()))
        told: Payload = {"model": side.weights(model), "relation": own.relation(side.classes)}
        return Reply(send=told, examples=len(own.labels), metrics={"loss": sum(losses) / max(len(losses), 1)})

    def learn(self, weights: Weights, teacher: Weights, relation: Tensor, me: Client) -> Reply:
        """An unlabelled client's round: near to its teacher, and classes related as at the labelled parties."""
        model, slow, own, weak = me.model(weights), me.model(teacher), self._labels(me), me.views.weak_view
        assert isinstance(model, Net)
        images, chance, thinning = me.shard.unlabeled, me.rng("unlabeled views"), me.rng("dropout")
        strength, label_losses = self.weight * ramp_up(me.round, self.ramp), own.losses(model)
        limit = irm.entropy_limit(me.classes, self.uncertainty, self.uncertainty_nats)

        def loss_of(which: Tensor, views: Tensor, target: Tensor) -> Tensor:
            features = model.features(views)
            logits = model.head(features)
            probs = logits.softmax(dim=1)
            entropy = irm.dropout_entropy(features, model.head, self.dropout, self.passes, thinning)
            label, kept = irm.reliable(probs.detach(), entropy, self.confidence, limit)
            me.audit(which, label, kept)
            local = irm.relation_matrix(logits, label, self.temperature, kept)
            loss = squared_error(probs, target) + self.relation_weight * irm.relation_loss(local, relation)
            return strength * loss + (next(label_losses) if len(own.labels) else 0.0)

        epochs = (two_view_batches(images, me.train.batch, weak, weak, chance) for _ in range(me.epochs))
        optimizer, clip = me.optimizer(model, me.scheduled(self.unlabeled_lr)), me.train.clip
        loss, _ = learn_with_teacher(
            model, slow, chain.from_iterable(epochs), loss_of, optimizer=optimizer, clip=clip, decays=repeat(self.decay)
        )
        told: Payload = {"relation": own.relation(me.classes)} if len(own.labels) else {}
        send, held = {"model": me.weights(model), **told}, len(own.labels) + len(images)
        return Reply(send=send, examples=held, keep={"teacher": weights_of(slow)}, metrics={"loss": loss})

    def _labels(self, side: Side) -> irm.RelatedLabels:
        mine, view, chance = side.shard.labeled, side.views.weak_view, side.rng("labeled views")
        settings = side.train.batch, view, chance, self.temperature, self.smoothing
        return irm.RelatedLabels(mine.images, mine.labels, *settings)


@dataclass(frozen=True)
class WarmUp(FedIRM):
    """The stage before: the labelled parties alone, on their labels."""

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return [Task(client, {**state}) for client in hub.sample_clients(hub.labeled_clients)]

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        return self.learn_labels(task.weights("model"), me)
