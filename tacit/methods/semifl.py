"""SemiFL: the server's labels and the clients' confident pseudo-labels train one model in turn."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.contract.method import Count, Experiment, Method, NotNegative, Positive, Reply, Share, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.nets.optimizer import give_momentum, live_taps_only, momentum_of, optimizer_step
from tacit.nets.statistics import pooled_statistics
from tacit.pieces.aggregate import server_momentum, shares
from tacit.pieces.consistency import endless_loss
from tacit.pieces.debias import average_prediction, debias
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.train import View, predict, viewed_batches, weights_of

LabeledImages = tuple[Tensor, Tensor]
StrongTerm = Callable[[Tensor, Tensor, Tensor], Tensor]  # which images, their strong views, the logits of these → loss


@dataclass(frozen=True)
class SemiFL(Method):
    """Clients label their images once a round, with the global model, and train on what is confident (fix set), also
    blended with any of their images (mix set); the server moves towards their mean, then trains on its labels.

    A client that holds labels adds their loss to each step; a server without labels only averages.
    """

    threshold: Annotated[Share, "confidence that a pseudo-label needs"] = 0.95
    mix: Annotated[NotNegative, "weight of the mix-up term"] = 1.0
    mix_shape: Annotated[Positive, "a of Beta(a, a), from which a batch's share is drawn"] = 0.75
    debias: Annotated[bool, "FedDPL: divide predictions by their mean before the threshold"] = False
    weigh: Annotated[Literal["alike", "accepted"], "clients in the mean: all alike, or by accepted labels"] = "alike"
    server_momentum: Annotated[Share, "momentum of the global model's steps"] = 0.5
    keep_momentum: Annotated[bool, "clients and server keep their optimiser's momentum between rounds"] = False
    alternate: Annotated[bool, "server trains after the merge (off: in parallel, with half of the weight)"] = True
    server_batch: Annotated[Count, "images a step on the server's labels (0: train.batch)"] = 0
    statistics: Annotated[Literal["server", "clients"], "net.bn = static: whose images make BN's statistics"] = "server"

    citation: ClassVar[str] = (
        "Diao et al., SemiFL: Semi-Supervised Federated Learning for Unlabeled Clients with Alternate Training, "
        "NeurIPS 2022"
    )
    client_keeps: ClassVar = {"momentum?": "weights"}
    merges_sums: ClassVar = {"model": "mean"}
    presets: ClassVar = {
        "paper": {"train.batch": 10, "train.epochs": 5, "net.norm": "bn", "net.bn": "static"},
        "released": {
            "keep_momentum": True,
            "train.nesterov": True,
            "train.clip": 1.0,
            "train.schedule": "cosine",
            "views.strong": "semifl-legacy",
        },
        "smoke": {"threshold": 0.5, "keep_momentum": True, "server_momentum": 0.1, "train.lr": 0.1},
    }

    def needs_each(self, experiment: Experiment) -> str:
        net, at_server = experiment.net, experiment.data.placement == "server"
        if net.norm != "bn" or net.bn == "batch" or (at_server and self.statistics == "server"):
            return ""
        return (
            "it pools BN's statistics of the clients, and the spread between them is no sum of what they send; write "
            'net.norm = "gn" or net.bn = "batch", or let the server hold the labels (method.statistics = "server")'
        )

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        return reply.examples if self.weigh == "accepted" else float(reply.examples > 0)

    def most_sum_weight(self, most: float) -> float:
        return most if self.weigh == "accepted" else 1.0

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        first = weights_in(super().server_start(hub, past), "model")
        return {"model": hub.weights(hub.model(first))}  # with static BN: the statistics of the first weights

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        model = me.model(task.weights("model"))
        return self.learn(model, self.accept(self.look(model, me.shard.unlabeled, me)), memory, me)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        model, velocity, momentum = (group(state, name) for name in ("model", "velocity", "momentum"))
        parties = [reply for reply in replies if reply.examples > 0]
        weights = self.client_weights(parties)
        labels = len(hub.shard.labeled)
        statistics: Weights = {}
        if self.statistics == "clients" or not labels:
            statistics = pooled_statistics((reply.weights("model") for reply in parties), weights)
        if labels and not self.alternate:
            trained, momentum = self.finetune(model, momentum, hub)
            weights = [0.5, *(weight / 2 for weight in weights)] if parties else [1.0]
            parties = [Reply(send={"model": trained}, examples=labels), *parties]
        if parties:
            mean = hub.mean_model(model, parties, weights)
            model, velocity = server_momentum(model, mean, velocity, self.server_momentum)
        if labels and self.alternate:
            model, momentum = self.finetune(model, momentum, hub)
        model = {**hub.weights(hub.model(model)), **statistics}  # with static BN: the server's, unless from clients
        memory = {"velocity": velocity if self.server_momentum else {}, "momentum": momentum}
        return {"model": model, **{name: tensors for name, tensors in memory.items() if tensors}}

    def client_weights(self, parties: Sequence[Reply]) -> list[float]:
        """How much each client that learned anything counts in the mean."""
        return shares([reply.examples if self.weigh == "accepted" else 1.0 for reply in parties])

    def finetune(self, weights: Weights, momentum: Weights, hub: Hub) -> tuple[Weights, Weights]:
        """The model after training on the server's labels, and the momentum to go on with."""
        model = hub.model(weights)
        optimizer = hub.optimizer(model)
        give_momentum(model, optimizer, momentum)
        hub.fit_labeled(model, optimizer=optimizer, batch=self.server_batch)
        return weights_of(model), momentum_of(model, optimizer) if self.keep_momentum else {}

    def look(self, model: nn.Module, images: Tensor, me: Client) -> Tensor:
        """The label pass: class probabilities of one weak view of each image, by the model as it came."""
        return predict(model, images, partial(me.views.weak_view, generator=me.rng("label views")))

    def accept(self, probs: Tensor) -> PseudoLabels:
        """The pseudo-labels of this client's unlabelled images, and which of them are believed."""
        if not len(probs):
            return PseudoLabels(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.bool))
        return confident(debias(probs, average_prediction(probs)) if self.debias else probs, self.threshold)

    def learn(
        self, model: nn.Module, found: PseudoLabels, memory: Payload, me: Client, strong_term: StrongTerm | None = None
    ) -> Reply:
        """Local training on the fix and the mix set, and on this client's own labels if it has any."""
        images, labeled, accepted = me.shard.unlabeled, me.shard.labeled, int(found.accepted.sum())
        me.audit(torch.arange(len(images)), *found)
        if not accepted and not len(labeled):
            return Reply(send={"model": weights_of(model)}, examples=0)
        optimizer, weak_view = me.optimizer(model), me.views.weak_view
        give_momentum(model, optimizer, group(memory, "momentum"))
        if accepted:
            optimizer.expect(me.steps(accepted))
            own = (labeled.images, labeled.labels), me.train.batch, weak_view, me.rng("labeled views"), me.label_loss
            loss = fit_fix_and_mix(
                model,
                (images[found.accepted], found.label[found.accepted]),
                mix_set(images, found.label, accepted, me.rng("mix set")),
                strong=me.views.strong_view,
                weak=weak_view,
                weight=self.mix,
                shape=self.mix_shape,
                optimizer=optimizer,
                epochs=me.epochs,
                batch=me.train.batch,
                clip=me.train.clip,
                generator=me.rng("unlabeled views"),
                also=endless_loss(model, *own) if len(labeled) else None,
                strong_term=strong_term,
            )
        else:
            loss = me.fit_labeled(model, optimizer=optimizer)
        keep: Payload = {"momentum": momentum_of(model, optimizer)} if self.keep_momentum else {}
        return Reply(
            send={"model": me.weights(model)}, examples=accepted + len(labeled), keep=keep, metrics={"loss": loss}
        )


def group(payload: Payload, name: str) -> Weights:
    """A group of tensors that may be missing, and is then empty."""
    return weights_in(payload, name) if name in payload else {}


# --- Fix set and mix set ---------------------------------------------------------------------------------------------


def beta_share(shape: float, generator: torch.Generator) -> float:
    """A share drawn from Beta(shape, shape): below 1 mostly near 0 or 1, at 1 uniform, above 1 mostly near ½.

    >>> 0 <= beta_share(0.75, torch.Generator().manual_seed(0)) <= 1
    True
    """
    first, second = torch._standard_gamma(torch.full((2,), shape, dtype=torch.float64), generator).tolist()
    return first / (first + second) if first + second > 0 else 0.5


def blend(first: Tensor, second: Tensor, share: float) -> Tensor:
    """share · first + (1 − share) · second.

    >>> blend(torch.tensor([1.0]), torch.tensor([5.0]), 0.75)
    tensor([2.])
    """
    return share * first + (1.0 - share) * second


def blended_cross_entropy(logits: Tensor, first: Tensor, second: Tensor, share: float) -> Tensor:
    """share · CE(logits, first) + (1 − share) · CE(logits, second): the loss of images that were blended so.

    >>> logits = torch.tensor([[0.0, math.log(3.0)]])                        # probabilities ¼ and ¾
    >>> loss = blended_cross_entropy(logits, torch.tensor([0]), torch.tensor([1]), 0.75)
    >>> round(loss.item(), 4), round(0.75 * math.log(4) + 0.25 * math.log(4 / 3), 4)
    (1.1116, 1.1116)
    """
    return share * F.cross_entropy(logits, first) + (1.0 - share) * F.cross_entropy(logits, second)


def mix_set(images: Tensor, labels: Tensor, size: int, generator: torch.Generator) -> LabeledImages:
    """So many images with their labels, drawn with replacement from all of them, believed or not.

    >>> mix_set(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 2]), 5, torch.Generator())[1].shape
    torch.Size([5])
    """
    drawn = torch.randint(len(images), (size,), generator=generator).to(images.device)
    return images[drawn], labels[drawn]


def fit_fix_and_mix(
    model: nn.Module,
    fix: LabeledImages,
    mix: LabeledImages,
    *,
    strong: View,
    weak: View,
    weight: float,
    shape: float,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    batch: int,
    clip: float,
    generator: torch.Generator,
    also: Callable[[], Tensor] | None = None,
    strong_term: StrongTerm | None = None,
) -> float:
    """CE on strong views of the fix set, plus `weight` times the mix-up term, plus what `also` adds to each step.
    `strong_term` is a further loss of the strong views ((FL)²: their consistency).

    The mix-up term blends weak views of the fix set with weak views of the mix set (which is as large), by one share
    from Beta(shape, shape) for the whole batch. Returns the last epoch's mean loss, without what `also` added.
    """
    (images, labels), (others, other_labels) = fix, mix
    if len(images) != len(others):
        raise ValueError(f"the mix set has {len(others)} images, the fix set {len(images)}: they must be as large")

    def both(part: Tensor, chance: torch.Generator) -> Tensor:
        return torch.cat([strong(part, chance), weak(part, chance)], dim=1)

    model.train()
    mean = math.nan
    alone = also is None and strong_term is None  # who else adds a loss may look at the weights
    for _ in range(epochs):
        total, seen = torch.zeros((), device=images.device), 0
        ours = viewed_batches(images, batch, both if weight > 0 else strong, generator)
        partners = viewed_batches(others, batch, weak, generator) if weight > 0 else None
        with live_taps_only(model, optimizer) if alone else nullcontext():
            for which, views in ours:
                mixed: Tensor | float = 0.0
                if partners is not None:
                    views, weak_views = views.chunk(2, dim=1)
                    partner, partner_views = next(partners)
                    share = beta_share(shape, generator)
                    logits = model(blend(weak_views, partner_views, share))
                    mixed = weight * blended_cross_entropy(logits, labels[which], other_labels[partner], share)
                logits = model(views)
                loss = F.cross_entropy(logits, labels[which]) + mixed
                if strong_term is not None:
                    loss = loss + strong_term(which, views, logits)
                optimizer_step(model, optimizer, loss if also is None else loss + also(), clip)
                total, seen = total + loss.detach() * len(which), seen + len(which)
        mean = float(total) / seen
    return mean
