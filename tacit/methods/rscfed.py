"""RSCFed: several random groups of clients in a round, a consensus in each, and the mean of the consensus models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from tacit.contract.method import (
    UNKNOWN,
    AtLeastOne,
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
    mean_model,
)
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.methods.fedavg import WarmUp
from tacit.nets.optimizer import momentum_of
from tacit.pieces.aggregate import shares
from tacit.pieces.consistency import endless_loss, two_view_batches
from tacit.pieces.teacher import early_decay, learn_with_teacher, sharpen, squared_error
from tacit.pieces.train import weights_of


@dataclass(frozen=True)
class RSCFed(Method):
    """Each round draws groups of clients; a client may be in several and is trained in each, from the same model.

    Labelled clients learn their labels, unlabelled ones what their own slow teacher sees in another view. Inside a
    group, models far from the group's mean count less and labelled ones more. Our own construction: a server that
    holds labels is one more labelled member of every group; a client with both kinds adds both losses.
    """

    groups: Annotated[AtLeastOne, "groups a round (M)"] = 3
    group_size: Annotated[AtLeastOne, "clients in a group, drawn without replacement (K)"] = 5
    weight: Annotated[NotNegative, "of the unlabelled loss"] = 0.02
    temperature: Annotated[Positive, "of the teacher's predictions: below 1 sharpens"] = 0.5
    decay: Annotated[Share, "highest decay of the teacher"] = 0.999
    teacher_statistics: Annotated[Literal["student", "first"], "whose BN statistics the teacher has"] = "student"
    scale: Annotated[NotNegative, "of distances, in groups without a labelled member (beta)"] = 10_000.0
    labeled_scale: Annotated[NotNegative, "of distances, in groups with one"] = 100.0
    distance: Annotated[Literal["whole", "by-tensor"], "one norm, or a sum of norms by tensor"] = "whole"
    labeled_boost: Annotated[Positive, "labelled images weigh so many times"] = 6.0
    boost_twice: Annotated[bool, "labelled members are boosted again after the distances"] = False
    unlabeled_lr: Annotated[Positive, "learning rate where there are unlabelled images"] = 0.021
    labeled_epochs: Annotated[Count, "epochs on labels alone in a round (0: train.epochs)"] = 0
    keep_momentum: Annotated[bool, "clients keep their momentum from task to task"] = False
    warmup: Annotated[Rounds, "rounds of FedAvg on the labels before"] = 7
    warmup_epochs: Annotated[Epochs, "epochs in a round of the warm-up (0: train.epochs)"] = 0

    citation: ClassVar[str] = (
        "Liang et al., RSCFed: Random Sampling Consensus Federated Semi-supervised Learning, CVPR 2022"
    )
    means: ClassVar = "groups"
    placements: ClassVar = ("some-clients", "clients", "server")
    merges_each: ClassVar = "it weighs each client by how far its own model is from that of its group"
    client_keeps: ClassVar = {"teacher?": "weights", "step?": "number", "momentum?": "any"}
    presets: ClassVar = {
        "paper": {"rounds": 1000, "net.name": "resnet18", "net.norm": "bn", "views.weak": "resize-crop"},
        "released": {
            "keep_momentum": True,
            "distance": "by-tensor",
            "boost_twice": True,
            "teacher_statistics": "first",
            "views.flip": "yes",
        },
        "smoke": {
            "group_size": 3,
            "warmup": 1,
            "keep_momentum": True,
            "scale": 100.0,
            "unlabeled_lr": 0.07,
            "weight": 0.5,
            "train.lr": 0.1,
            "views.weak": "crop",
        },
    }

    def estimated_tasks(self, asked: int) -> int:
        return self.groups * min(self.group_size, asked)

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        both = held.labeled and held.unlabeled
        return held.label_passes(epochs) if both else self.labeled_epochs or epochs, epochs

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", WarmUp(epochs=self.warmup_epochs), self.warmup),) if self.warmup else ()

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        pool, chance = hub.sample_clients(), hub.rng("groups")
        drawn = [torch.randperm(len(pool), generator=chance)[: self.group_size] for _ in range(self.groups)]
        groups = [sorted(pool[place] for place in places.tolist()) for places in drawn]
        return [Task(who, {"model": state["model"]}, number) for number, group in enumerate(groups) for who in group]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        weights = task.weights("model")
        model = me.model(weights)
        unlabeled = len(me.shard.unlabeled) > 0
        rate = me.scheduled(self.unlabeled_lr) if unlabeled else me.learning_rate
        steps = me.steps(len(me.shard.unlabeled))
        optimizer = me.optimizer(model, rate, weights_in(memory, "momentum", missing={}), steps)
        keep: Payload = {}
        if unlabeled:  # the teacher is this client's own, from its first task on: no model of the server resets it
            teacher = me.model(weights_in(memory, "teacher") if "teacher" in memory else weights)
            step = memory.get("step", 0)
            assert isinstance(step, int)
            loss, step = self.learn(model, teacher, optimizer, step, me)
            keep = {"teacher": weights_of(teacher), "step": step}
        else:
            loss = me.fit_labeled(model, epochs=self.labeled_epochs or None, optimizer=optimizer)
        if self.keep_momentum:
            keep["momentum"] = momentum_of(model, optimizer)
        return Reply(send={"model": me.weights(model)}, examples=me.shard.held, keep=keep, metrics={"loss": loss})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        own: list[Reply] = []
        if len(hub.shard.labeled):
            trained = hub.finetune(weights_in(state, "model"))
            own = [Reply(send={"model": trained}, examples=len(hub.shard.labeled))]
        models: list[Weights] = []
        noted: list[float] = []
        for group in sorted({reply.group for reply in replies}):
            members = [reply for reply in replies if reply.group == group]
            labeled = [member.client in hub.labeled_clients for member in members] + [True] * len(own)
            members += own
            weights = self.consensus_weights(members, labeled)
            noted += weights
            if any(weights):
                models.append(mean_model(members, weights))
        hub.note(party_weights=noted)  # group by group, as they answered; a server with labels is last in each
        agreed = [Reply(send={"model": model}, examples=1) for model in models]
        return {"model": hub.mean_model(weights_in(state, "model"), agreed)} if agreed else state

    def consensus_weights(self, members: Sequence[Reply], labeled: Sequence[bool]) -> list[float]:
        """Distance-reweighted aggregation (DMA): w_i ∝ n_i · exp(−scale · ‖θ_i − θ̄‖ / n_i), labelled ones boosted."""
        boost = [self.labeled_boost if has else 1.0 for has in labeled]
        examples = [member.examples for member in members]
        prior = shares([n * more for n, more in zip(examples, boost, strict=True)])
        if not any(prior):
            return prior
        mean = mean_model(members, prior)
        distances = [model_distance(m.weights("model"), mean, self.distance == "by-tensor") for m in members]
        if self.boost_twice:
            prior = [share * more for share, more in zip(prior, boost, strict=True)]
        return distance_shares(prior, examples, distances, self.labeled_scale if any(labeled) else self.scale)

    def learn(
        self, model: nn.Module, teacher: nn.Module, optimizer: torch.optim.SGD, step: int, me: Client
    ) -> tuple[float, int]:
        """Mean teacher: the student comes near to the teacher's sharpened prediction for another weak view."""
        labeled, weak, generator = me.shard.labeled, me.views.weak_view, me.rng("unlabeled views")
        own = (labeled.images, labeled.labels), me.train.batch, weak, me.rng("labeled views"), me.label_loss
        label_loss = endless_loss(model, *own) if len(labeled) else None

        def loss_of(which: Tensor, views: Tensor, target: Tensor) -> Tensor:
            me.audit(which, target.argmax(dim=1), torch.ones(len(which), dtype=torch.bool))
            loss = self.weight * squared_error(model(views).softmax(dim=1), sharpen(target, self.temperature))
            return loss + label_loss() if label_loss is not None else loss

        epochs = (two_view_batches(me.shard.unlabeled, me.train.batch, weak, weak, generator) for _ in range(me.epochs))
        loss, steps = learn_with_teacher(
            model,
            teacher,
            chain.from_iterable(epochs),
            loss_of,
            optimizer=optimizer,
            clip=me.train.clip,
            decays=(early_decay(number, self.decay) for number in count(step)),
            statistics=self.teacher_statistics == "student",
        )
        return loss, step + steps


# --- Distance-reweighted mean: a model far from the group's mean counts less -----------------------------------------


def model_distance(one: Weights, other: Weights, by_tensor: bool = False) -> float:
    """‖θ − θ'‖₂ over all that is learned; `by_tensor`: the sum of the norms tensor by tensor, as RSCFed's code has it.

    BN's running statistics and step counters are not learned: a counter alone, off by a hundred steps, would outweigh
    every weight.

    >>> one = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "bn.num_batches_tracked": torch.tensor(900)}
    >>> other = {"w": torch.zeros(2), "b": torch.zeros(1), "bn.num_batches_tracked": torch.tensor(0)}
    >>> model_distance(one, other), model_distance(one, other, by_tensor=True)
    (5.0, 7.0)
    """
    norms = [
        float(torch.linalg.vector_norm(tensor.double() - other[name].double()))
        for name, tensor in one.items()
        if _learned(name, tensor)
    ]
    return math.fsum(norms) if by_tensor else math.hypot(*norms)


def _learned(name: str, tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not name.endswith(("running_mean", "running_var"))


def distance_shares(
    prior: Sequence[float], examples: Sequence[float], distances: Sequence[float], scale: float
) -> list[float]:
    """w_i ∝ prior_i · exp(−scale · d_i / n_i), summing to 1 (RSCFed's DMA; prior: n_i, or more for labelled clients).

    A party without examples counts nothing. Only differences of the exponents matter, so the largest is taken off
    first: with scale 10,000 all of them would otherwise be 0 in floats.

    >>> [round(w, 4) for w in distance_shares([10, 10], [10, 10], [0.0, 1.0], 10 * math.log(3))]       # 1 : 1/3
    [0.75, 0.25]
    >>> distance_shares([10, 10, 0], [10, 10, 0], [5.0, 5.0, 9.0], 10_000)
    [0.5, 0.5, 0.0]
    """
    exponents = [
        math.log(p) - scale * d / n if p > 0 and n > 0 else -math.inf
        for p, n, d in zip(prior, examples, distances, strict=True)
    ]
    top = max(exponents, default=-math.inf)
    return shares([math.exp(e - top) if e > -math.inf else 0.0 for e in exponents])
