"""FedIRM: unlabelled clients follow a teacher, and relate classes to each other as the labelled clients do."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.contract.method import (
    UNKNOWN,
    AtLeastOne,
    Count,
    Epochs,
    Experiment,
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
from tacit.nets.layers import Net
from tacit.pieces.aggregate import labeled_shares, shares
from tacit.pieces.consistency import two_view_batches
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.loss import PLAIN, LabelLoss
from tacit.pieces.teacher import learn_with_teacher, ramp_up, squared_error
from tacit.pieces.train import View, optimizer_step, weights_of


@dataclass(frozen=True)
class FedIRM(Method):
    """Labelled parties send, with the model, how it relates the classes (K×K); unlabelled clients match the mean of it.

    They also stay near to their own slow teacher. Both terms ramp up over the rounds. Our own construction: a server
    that holds labels is one more labelled party; a client with both kinds of images adds both losses.
    """

    weight: Annotated[NotNegative, "of the unlabelled loss, after the ramp (lambda)"] = 15.0
    ramp: Annotated[Rounds, "rounds until the unlabelled loss has its full weight (0: at once)"] = 30
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
    warmup: Annotated[Rounds, "rounds of labelled parties alone before"] = 20
    warmup_epochs: Annotated[Epochs, "epochs in a round of the warm-up (0: train.epochs)"] = 0

    citation: ClassVar[str] = (
        "Liu et al., Federated Semi-supervised Medical Image Classification via Inter-client Relation Matching, "
        "MICCAI 2021"
    )
    placements: ClassVar = ("some-clients", "clients", "server")
    server_sends: ClassVar = {"model": "weights", "relation": "[K,K]"}
    client_sends: ClassVar = {"model": "weights", "relation": "distributions[K,K] if labeled"}
    client_keeps: ClassVar = {"teacher?": "weights"}
    merges_sums: ClassVar = {"model": "mean", "relation": "rows"}
    presets: ClassVar = {
        "paper": {"rounds": 180, "net.name": "resnet18", "net.norm": "bn"},
        "released": {"uncertainty_nats": 2.0},
        "smoke": {"warmup": 1, "ramp": 2, "train.lr": 0.1, "unlabeled_lr": 0.05, "weight": 2.0},
    }

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        both = held.labeled and held.unlabeled
        return held.label_passes(epochs) if both else self.labeled_epochs or epochs, epochs

    def before(self) -> tuple[Stage, ...]:
        warm_up = FedIRMWarmUp(**{**asdict(self), "labeled_epochs": self.warmup_epochs, "warmup": 0})
        return (Stage("warm-up", warm_up, self.warmup),) if self.warmup else ()

    def needs_each(self, experiment: Experiment) -> str:
        if self.weigh != "half" or experiment.data.placement != "some-clients":
            return ""
        return (
            'it weighs the labelled clients together (method.weigh = "half"), which needs a sum over them alone; write '
            'method.weigh = "alike" or "examples"'
        )

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        return float(reply.examples > 0) if self.weigh == "alike" else reply.examples

    def most_sum_weight(self, most: float) -> float:
        return 1.0 if self.weigh == "alike" else most

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        unknown = mean_relation([], hub.classes)
        return {"relation": unknown, **past.get("warm-up", {}), **super().server_start(hub, past)}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return [Task(client, {**state}) for client in hub.sample_clients()]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        weights = task.weights("model")
        if not len(me.shard.unlabeled):
            return self.learn_labels(weights, me)
        teacher = (
            weights_in(memory, "teacher") if "teacher" in memory else weights
        )  # its own, never reset by the server
        return self.learn(weights, teacher, task.tensor("relation").to(me.device), me)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties, labeled = list(replies), [reply.client in hub.labeled_clients for reply in replies]
        if len(hub.shard.labeled):
            parties.append(self.learn_labels(weights_in(state, "model"), hub))
            labeled.append(True)
        examples = [party.examples for party in parties]
        alike = shares([float(party.examples > 0) * party.parties for party in parties])
        ways = {"alike": alike, "half": labeled_shares(examples, labeled, 0.5), "examples": shares(examples)}
        relations = [party.tensor("relation") for party in parties if "relation" in party.send]
        relation = mean_relation(relations, hub.classes)  # labelled parties alike, class by class
        known = known_rows(relation)[:, None]  # of a class that nobody told about now, what was told last stays
        relation = torch.where(known, relation, tensor_in(state, "relation"))
        hub.note(party_weights=ways[self.weigh], relation_diagonal=relation.diagonal())
        model = weights_in(state, "model")
        model = hub.mean_model(model, parties, ways[self.weigh]) if any(examples) else model
        return {"model": model, "relation": relation}

    def learn_labels(self, weights: Weights, side: Client | Hub) -> Reply:
        """A labelled party's round: cross-entropy on two views, and on the way the relation of the classes."""
        model, own = side.model(weights), self._labels(side)
        epochs, losses = self.labeled_epochs or side.epochs, list[float]()
        optimizer = side.optimizer(model, steps=side.steps(len(own.labels), epochs=epochs))
        for loss in own.losses(model, epochs):
            optimizer_step(model, optimizer, loss, side.train.clip)
            losses.append(float(loss.detach()))
        send: Payload = {"model": side.weights(model), "relation": own.relation(side.classes)}
        return Reply(send=send, examples=len(own.labels), metrics={"loss": sum(losses) / max(len(losses), 1)})

    def learn(self, weights: Weights, teacher: Weights, relation: Tensor, me: Client) -> Reply:
        """An unlabelled client's round: near to its teacher, and classes related as at the labelled parties."""
        model, slow, own, weak = me.model(weights), me.model(teacher), self._labels(me), me.views.weak_view
        assert isinstance(model, Net)
        images, chance, thinning = me.shard.unlabeled, me.rng("unlabeled views"), me.rng("dropout")
        strength, label_losses = self.weight * ramp_up(me.round, self.ramp), own.losses(model)
        limit = entropy_limit(me.classes, self.uncertainty, self.uncertainty_nats)

        def loss_of(which: Tensor, views: Tensor, target: Tensor) -> Tensor:
            features = model.features(views)
            logits = model.head(features)
            probs = logits.softmax(dim=1)
            entropy = dropout_entropy(features, model.head, self.dropout, self.passes, thinning)
            label, accepted = reliable(probs.detach(), entropy, self.confidence, limit)
            me.audit(which, label, accepted)
            local = relation_matrix(logits, label, self.temperature, accepted)
            loss = squared_error(probs, target) + self.relation_weight * relation_loss(local, relation)
            return strength * loss + (next(label_losses) if len(own.labels) else 0.0)

        epochs = (two_view_batches(images, me.train.batch, weak, weak, chance) for _ in range(me.epochs))
        rate, clip = me.scheduled(self.unlabeled_lr), me.train.clip
        optimizer = me.optimizer(model, rate, steps=me.steps(len(images)))
        loss, _ = learn_with_teacher(
            model, slow, chain.from_iterable(epochs), loss_of, optimizer=optimizer, clip=clip, decays=repeat(self.decay)
        )
        send: Payload = {"relation": own.relation(me.classes)} if len(own.labels) else {}
        send = {"model": me.weights(model), **send}
        return Reply(send=send, examples=me.shard.held, keep={"teacher": weights_of(slow)}, metrics={"loss": loss})

    def _labels(self, side: Party) -> "RelatedLabels":
        mine, view, chance = side.shard.labeled, side.views.weak_view, side.rng("labeled views")
        settings = side.train.batch, view, chance, self.temperature, self.smoothing
        return RelatedLabels(mine.images, mine.labels, *settings, side.label_loss)


@dataclass(frozen=True)
class FedIRMWarmUp(FedIRM):
    """The stage before: the labelled parties alone, on their labels."""

    asks_labeled: ClassVar = True
    in_parts: ClassVar = False

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return self.labeled_epochs or epochs, 0

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return [Task(client, {**state}) for client in hub.sample_clients(hub.labeled_clients)]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        return self.learn_labels(task.weights("model"), me)


# --- Relations between classes ---------------------------------------------------------------------------------------


def relation_matrix(logits: Tensor, label: Tensor, temperature: float, accepted: Tensor | None = None) -> Tensor:
    """Row c: softmax of (the mean logits of class c's images) / T: [N, K], [N] → [K, K].

    `accepted` says which images count; a class without any has a row of zeros (not the even row that zero logits give).

    >>> logits = torch.tensor([[4.0, 0.0, 0.0], [2.0, 2.0, 0.0], [0.0, 9.0, 0.0]])
    >>> relation_matrix(logits, torch.tensor([0, 0, 1]), 1.0, torch.tensor([True, True, False]))  # softmax of 3, 1, 0
    tensor([[0.8438, 0.1142, 0.0420],
            [0.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    member = F.one_hot(label, logits.shape[1]).to(logits)
    if accepted is not None:
        member = member * accepted[:, None]
    count = member.sum(dim=0)
    means = member.T @ logits / count.clamp(min=1.0)[:, None]
    return (means / temperature).softmax(dim=1) * (count > 0)[:, None]


def known_rows(relation: Tensor) -> Tensor:
    """Which classes a relation matrix tells about: [..., K, K] → bool [..., K].

    >>> known_rows(torch.tensor([[0.9, 0.1], [0.0, 0.0]]))
    tensor([ True, False])
    """
    return relation.sum(dim=-1) > 0


def mean_relation(relations: Sequence[Tensor], classes: int) -> Tensor:
    """The mean of relation matrices, row by row over those that know the class; unknown to all: zeros.

    >>> one, two = torch.tensor([[0.8, 0.2], [0.0, 0.0]]), torch.tensor([[0.6, 0.4], [0.1, 0.9]])
    >>> mean_relation([one, two], 2)
    tensor([[0.7000, 0.3000],
            [0.1000, 0.9000]])
    >>> mean_relation([], 2)
    tensor([[0., 0.],
            [0., 0.]])
    """
    if not relations:
        return torch.zeros(classes, classes)
    every = torch.stack(list(relations))
    return every.sum(dim=0) / known_rows(every).sum(dim=0).clamp(min=1)[:, None]


def relation_loss(local: Tensor, target: Tensor) -> Tensor:
    """L_IRM = (1/K) Σ_c [KL(target_c ‖ local_c) + KL(local_c ‖ target_c)], over the classes that both know.

    Both divergences together are Σ (a − b)(ln a − ln b).

    >>> local, target = torch.tensor([[0.5, 0.5], [0.0, 0.0]]), torch.tensor([[0.75, 0.25], [0.1, 0.9]])
    >>> relation_loss(local, target)                                            # ½ · ¼ ln 3
    tensor(0.1373)
    """
    both = known_rows(local) & known_rows(target)
    a, b = local[both].clamp(min=1e-12), target[both].clamp(min=1e-12)
    return ((a - b) * (a.log() - b.log())).sum() / len(local)


@torch.no_grad()
def dropout_entropy(features: Tensor, head: nn.Module, rate: float, passes: int, generator: torch.Generator) -> Tensor:
    """How unsure a model is of each image: −Σ p̄ ln p̄, p̄ the mean prediction over passes with dropout: [N, D] → [N].

    Dropout acts on what the head is given, so only the head is computed several times. From 0 to ln K.

    >>> head = nn.Linear(2, 2, bias=False)
    >>> _ = head.weight.data.copy_(torch.eye(2))
    >>> features = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])               # predictions ½ : ½ and ¾ : ¼
    >>> dropout_entropy(features, head, 0.0, 3, torch.Generator())
    tensor([0.6931, 0.5623])
    """
    total = torch.zeros(())
    for _ in range(passes):
        chance = torch.rand(features.shape, generator=generator).to(features.device)
        thinned = features * (chance >= rate) / max(1.0 - rate, 1e-12)
        total = total.to(features.device) + head(thinned).softmax(dim=1)
    mean = total / passes
    return -(mean * mean.clamp(min=1e-12).log()).sum(dim=1)


def entropy_limit(classes: int, share: float, nats: float = 0.0) -> float:
    """The entropy below which a prediction is believed: a share of ln K, the most there can be; or nats, if given.

    FedIRM's code has 2 nats for K = 5 classes: more than ln 5 = 1.61, so that nothing was ever rejected.

    >>> round(entropy_limit(5, 0.75), 4), round(entropy_limit(10, 0.75), 4), entropy_limit(5, 0.75, nats=2.0)
    (1.2071, 1.7269, 2.0)
    """
    return nats if nats > 0 else share * math.log(classes)


def reliable(probs: Tensor, entropy: Tensor, confidence: float, limit: float) -> PseudoLabels:
    """The likeliest class, believed where its probability reaches `confidence` and the entropy is *below* `limit`.

    >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]])
    >>> reliable(probs, torch.tensor([0.3, 0.6, 0.3]), confidence=0.7, limit=0.5)
    PseudoLabels(label=tensor([0, 0, 0]), accepted=tensor([ True, False, False]))
    """
    label, sure = confident(probs, confidence)
    return PseudoLabels(label, sure & (entropy < limit))


def two_view_loss(
    first: Tensor, second: Tensor, labels: Tensor, smoothing: float, label_loss: LabelLoss = PLAIN
) -> Tensor:
    """The sum of the cross-entropies of two views' logits, with smoothed labels.

    >>> even = torch.zeros(3, 2)                                                # ln 2 each
    >>> two_view_loss(even, even, torch.tensor([0, 1, 1]), 0.1)
    tensor(1.3863)
    """
    one, other = (label_loss(logits, labels, label_smoothing=smoothing) for logits in (first, second))
    return one + other


@dataclass
class RelatedLabels:
    """What a party learns from its labels, batch by batch, and the relation of the classes that shows on the way."""

    images: Tensor
    labels: Tensor
    batch: int
    view: View
    generator: torch.Generator
    temperature: float
    smoothing: float
    label_loss: LabelLoss = PLAIN
    seen: list[Tensor] = field(default_factory=list)  # a relation matrix for each batch so far

    def losses(self, model: nn.Module, epochs: int | None = None) -> Iterator[Tensor]:
        """The loss of one batch after the other, on two views of the same images; by default without end."""
        for _ in repeat(None) if epochs is None else range(epochs):
            for which, one, other in two_view_batches(self.images, self.batch, self.view, self.view, self.generator):
                labels, logits = self.labels[which], model(one)
                self.seen.append(relation_matrix(logits.detach(), labels, self.temperature))
                yield two_view_loss(logits, model(other), labels, self.smoothing, self.label_loss)

    def relation(self, classes: int) -> Tensor:
        """The mean over all batches seen; zeros for classes of which this party has no label."""
        return mean_relation(self.seen, classes).cpu()
