"""DDRFed: generated images for everybody, dynamic class-balanced thresholds, learning what unclear images are not."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from tacit.contract.method import (
    UNKNOWN,
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
from tacit.methods.ddrfed.gdgm import generator_stages, mean_figure
from tacit.methods.ddrfed.generator import GDGM
from tacit.nets.optimizer import live_taps_only, optimizer_step
from tacit.pieces.aggregate import labeled_shares, shares
from tacit.pieces.consistency import paired_batches
from tacit.pieces.label import PseudoLabels, class_counts, confident
from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.threshold import class_shares
from tacit.pieces.train import View, batches
from tacit.views.dsa import DSA_OPERATIONS, dsa

Weak = Literal["dsa", "views"]

HIGHEST_THRESHOLD = 0.999  # thresholds stay between 1/K and this
AGREEMENT = 0.999  # "accuracy at least 99.9 %" (Eq. 22)
HIGHEST_PROBABILITY = 1 - 1e-6  # of a probability p in log(1 − p), which has no end at p = 1


@dataclass(frozen=True)
class DDRFed(GDGM, Method):
    """Clients share generated images, learn what they are sure of, and of the rest what it is not.

    First a diffusion model is trained by all clients, and what it draws is dealt to them (GDGM). How sure a client
    must be follows its model's confidence and, class by class, what all clients learned in the round before (DCBT).
    Images of low confidence teach the classes they are not (RNL). A server that holds labels is one more party.
    """

    gdgm: Annotated[bool, "train a generator first and deal its images to the clients (needs tacit[diffusion])"] = True
    dcbt: Annotated[bool, "dynamic class-balanced thresholds; without, `threshold` for all classes"] = True
    rnl: Annotated[bool, "negative learning from images of low confidence"] = True
    alpha: Annotated[Share, "what the running means of the confidence keep, by batch"] = 0.999
    threshold: Annotated[Share, "confidence a pseudo-label needs, without dcbt"] = 0.95
    view: Annotated[Literal["strong", "weak"], "on which a pseudo-label is learned (Algorithm 2, or Eq. 11)"] = "strong"
    weak: Annotated[Weak, "weak views in all stages: DSA, one operation a batch; or those of views.weak"] = "dsa"
    rnl_top: Annotated[Count, "classes that are never negative (0: found by agreement of the views)"] = 0
    rnl_change: Annotated[bool, "the strong view judges and the weak one learns"] = False
    labeled_share: Annotated[Share, "least weight of the labelled parties together (where phi is 0)"] = 0.5
    phi: Annotated[NotNegative, "instead: labelled parties' examples weigh so many times (0: labeled_share)"] = 0.0
    warmup: Annotated[Rounds, "rounds of labelled parties alone before"] = 200
    warmup_epochs: Annotated[Epochs, "epochs in a round of the warm-up (0: train.epochs)"] = 0
    unlabeled_lr: Annotated[Positive, "learning rate where there are no labels"] = 0.02

    citation: ClassVar[str] = (
        "Wang et al., Dynamic class-balanced threshold federated semi-supervised learning by exploring diffusion "
        "model and all unlabeled data, Future Generation Computer Systems 2025"
    )
    placements: ClassVar = ("some-clients", "clients", "server")
    needs_pixels: ClassVar = True  # DSA and the diffusion model
    server_sends: ClassVar = {"model": "weights", "shares": "[K]"}
    client_sends: ClassVar = {"model": "weights", "counts": "counts[K]"}
    merges_sums: ClassVar = {"model": "mean", "counts": "sum"}
    client_keeps: ClassVar = {"dema?": "any", "generated?": "any"}
    presets: ClassVar = {  # what the paper sets otherwise (SGD, rate, batch) are tacit's defaults
        "paper": {"rounds": 500, "net.name": "resnet18", "net.norm": "bn", "views.strong": "ddrfed"},
        "smoke": {
            "alpha": 0.5,
            "warmup": 1,
            "warmup_epochs": 3,
            "train.lr": 0.1,
            "unlabeled_lr": 0.1,
            "psi": 0.5,
            "diffusion_rounds": 2,
            "diffusion_epochs": 1,
            "diffusion_batch": 32,
            "diffusion_lr": 2e-3,
            "blocks": 1,
            "width": 8,
            "halvings": 1,
            "generation_rounds": 2,
            "sampler": "ddim",
            "sampling_steps": 4,
        },
    }

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return held.label_passes(epochs), epochs

    def before(self) -> tuple[Stage, ...]:
        alone = LabelsAlone(epochs=self.warmup_epochs, weak=self.weak)
        warm_up = (Stage("warm-up", alone, self.warmup),) if self.warmup else ()
        return (*generator_stages(self), *warm_up) if self.gdgm else warm_up

    def needs_each(self, experiment: Experiment) -> str:
        if self.phi or experiment.data.placement != "some-clients":
            return ""
        return (
            "it weighs the labelled clients together (method.labeled_share), which needs a sum over them alone; write "
            "method.phi = 6, say"
        )

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        return reply.examples * (self.phi if self.phi and labeled else 1.0)

    def most_sum_weight(self, most: float) -> float:
        return most * max(self.phi, 1.0)

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        counts = past.get("warm-up", {}).get("counts", torch.zeros(hub.classes))
        return {**super().server_start(hub, past), "counts": counts}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        share = class_shares(tensor_in(state, "counts"), times_tenth=False)  # Eq. 14, 15
        return [Task(client, {"model": state["model"], "shares": share}) for client in hub.sample_clients()]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        model, own = me.model(task.weights("model")), me.shard.labeled
        generated = [tensor_in(memory, "generated").to(me.device)] if "generated" in memory else []
        images, generator = torch.cat([me.shard.unlabeled, *generated]), me.rng("views")
        weak = weak_view(self.weak, me)  # Ω of the paper
        rate, steps = None if len(own) else me.scheduled(self.unlabeled_lr), me.steps(max(len(images), len(own)))
        optimizer = me.optimizer(model, rate, steps=steps)
        share, statistics, tally = task.tensor("shares"), self.recall(memory, me), Tally(me, len(images))

        def accept(probs: Tensor) -> PseudoLabels:
            return self.accept(probs, share, statistics)

        for _ in range(me.epochs):
            with live_taps_only(model, optimizer):
                for which, labeled in paired_batches(len(images), len(own), me.train.batch, generator):
                    loss = torch.zeros((), device=me.device)
                    if len(labeled):  # Eq. 10
                        loss = me.label_loss(model(weak(own.images[labeled], generator)), own.labels[labeled])
                    if len(which):
                        shown, strong = weak(images[which], generator), me.views.strong_view(images[which], generator)
                        loss = loss + self.unlabeled_loss(model, which, shown, strong, accept, tally)
                    optimizer_step(model, optimizer, loss, me.train.clip)
                    tally.figure("loss", float(loss.detach()))
        if self.dcbt and len(images):
            tally.figure("level", float(dema(statistics["dema"], me.classes)))  # the last one
        labels = torch.cat([tally.accepted, own.labels.cpu()])
        return Reply(
            send={"model": me.weights(model), "counts": class_counts(labels, me.classes)},  # Eq. 12, 13
            examples=len(labels),
            keep={name: tensor.detach().cpu().clone() for name, tensor in statistics.items()},
            metrics=tally.means,
        )

    def unlabeled_loss(
        self,
        model: nn.Module,
        which: Tensor,
        weak: Tensor,
        strong: Tensor,
        accept: Callable[[Tensor], PseudoLabels],
        tally: "Tally",
    ) -> Tensor:
        """Towards what is surely seen in the weak views (Eq. 11), away from what the unsure rest is not (Eq. 25)."""
        with torch.set_grad_enabled(self.view == "weak" or self.rnl_change):
            weak_logits = model(weak)
        strong_logits = model(strong)
        seen_weak, seen_strong = weak_logits.softmax(dim=1), strong_logits.softmax(dim=1)
        label, accepted = accept(seen_weak.detach())
        tally.labels(which, label, accepted)
        loss = masked_cross_entropy(weak_logits if self.view == "weak" else strong_logits, label, accepted)
        if not self.rnl or bool(accepted.all()):
            return loss
        judge, learner = (seen_strong, seen_weak) if self.rnl_change else (seen_weak, seen_strong)
        judge = judge.detach()
        top = self.rnl_top or agreeing_top(judge[~accepted], learner.detach()[~accepted])
        tally.figure("top", top)
        return loss + negative_loss(judge, learner, ~accepted, top)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties, labeled = list(replies), [reply.client in hub.labeled_clients for reply in replies]
        if len(hub.shard.labeled):
            parties.append(learn_labels(weights_in(state, "model"), hub, self.weak))
            labeled.append(True)
        examples = [party.examples for party in parties]
        boosted = [self.phi * n if has else n for n, has in zip(examples, labeled, strict=True)]
        weights = shares(boosted) if self.phi else labeled_shares(examples, labeled, self.labeled_share)  # Eq. 26, 27
        used = class_shares(tensor_in(state, "counts"), times_tenth=False)
        level, high = torch.tensor(mean_figure(replies, "level")), mean_figure(replies, "high")
        thresholds = dynamic_thresholds(level, used) if self.dcbt else torch.full((hub.classes,), self.threshold)
        hub.note(party_weights=weights, thresholds=thresholds, class_shares=used)  # Fig. 7, at the server
        hub.note(high=high, low=1 - high, top=mean_figure(replies, "top"))
        if not any(weights):
            return state
        counts = torch.stack([party.tensor("counts") for party in parties]).sum(dim=0)  # Eq. 14
        return {"model": hub.mean_model(weights_in(state, "model"), parties, weights), "counts": counts}

    def recall(self, memory: Payload, me: Client) -> Weights:
        """The running means of this client's confidence: they begin at 1/K and stay with it (DCBT alone)."""
        start = tensor_in(memory, "dema") if "dema" in memory else torch.full((2,), 1.0 / me.classes)
        return {"dema": start} if self.dcbt else {}

    def accept(self, probs: Tensor, shares: Tensor, statistics: Weights) -> PseudoLabels:
        """DCBT: the batch is taken into the running means of the confidence (Eq. 17, 18), then they decide (Eq. 20).

        >>> memory, probs = {"dema": torch.tensor([0.5, 0.5])}, torch.tensor([[0.9, 0.1], [0.4, 0.6]])
        >>> method = DDRFed(alpha=0.5)
        >>> method.accept(probs, torch.tensor([0.5, 0.5]), memory)              # DEMA 2 · 0.625 − 0.5625
        PseudoLabels(label=tensor([0, 1]), accepted=tensor([False, False]))
        >>> dema(memory["dema"], classes=2), memory["dema"]                                # and + 0.5 − 0 is too much
        (tensor(0.6875), tensor([0.6250, 0.5625]))
        """
        if not self.dcbt:
            return confident(probs, self.threshold)
        first, second = statistics["dema"].to(probs).unbind()
        statistics["dema"] = torch.stack(double_ema(first, second, probs.max(dim=1).values.mean(), self.alpha))
        return confident(probs, dynamic_thresholds(dema(statistics["dema"], len(shares)), shares.to(probs)))


def double_ema(first: Tensor, second: Tensor, value: Tensor, decay: float) -> tuple[Tensor, Tensor]:
    """The running mean of a value and the running mean of that (Eq. 17, 18): [], [] → [], [].

    >>> double_ema(torch.tensor(0.2), torch.tensor(0.2), torch.tensor(0.6), decay=0.5)     # (.2 + .6)/2, (.2 + .4)/2
    (tensor(0.4000), tensor(0.3000))
    """
    first = first.lerp(value, 1 - decay)
    return first, second.lerp(first, 1 - decay)


def dema(means: Tensor, classes: int) -> Tensor:
    """DEMA, 2·EMA − EMA(EMA) (Eq. 19): it lags less than the mean itself; kept within 1/K … 0.999: [2] → [].

    >>> dema(torch.tensor([0.4, 0.3]), classes=10), dema(torch.tensor([0.1, 0.3]), classes=10)
    (tensor(0.5000), tensor(0.1000))
    """
    first, second = means.unbind()
    return (2 * first - second).clamp(1 / classes, HIGHEST_THRESHOLD)


def dynamic_thresholds(level: Tensor, shares: Tensor) -> Tensor:
    """Thresholds by class: level + share − std(shares), kept within 1/K … 0.999 (Eq. 16, 20): [], [K] → [K].

    Shares are the plain ones (Eq. 15, no K/10), the standard deviation is the unbiased one.

    >>> dynamic_thresholds(torch.tensor(0.8), torch.tensor([0.7, 0.1, 0.1, 0.1]))                   # std: 0.3
    tensor([0.9990, 0.6000, 0.6000, 0.6000])
    """
    return (level + shares - shares.std(correction=1)).clamp(1 / len(shares), HIGHEST_THRESHOLD)


# Residual class negative learning (Sec. 3.3.2): learn what an image is not, where what it is is unclear.


def ranks(probs: Tensor) -> Tensor:
    """The place of each class in its row, 1 for the likeliest; among equals the lower class first: [N, K] → [N, K].

    >>> ranks(torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.2, 0.4]]))
    tensor([[3, 1, 2],
            [1, 3, 2]])
    """
    order = probs.argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1) + 1


def agreeing_top(judge: Tensor, other: Tensor, share: float = AGREEMENT) -> int:
    """The smallest n: the judge's first class is among the other's first n, for `share` of the rows (Eq. 21 to 23).

    Both are probabilities of the same images [N, K]. No rows: n = K, from which nothing can be learned.

    >>> weak = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.5, 0.4]])                 # first: 0 and 1
    >>> agreeing_top(weak, torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.3, 0.3]]))     # 0 is the first, 1 the second
    2
    >>> agreeing_top(weak, torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.3, 0.3]]), share=0.5)
    1
    """
    classes = judge.shape[1]
    if not len(judge):
        return classes
    place = ranks(other).gather(1, judge.argmax(dim=1, keepdim=True))  # [N, 1]
    agree = (place <= torch.arange(1, classes + 1, device=place.device)).double().mean(dim=0)
    return int((agree >= share).nonzero()[0]) + 1


def negative_loss(judge: Tensor, learner: Tensor, low: Tensor, top: int) -> Tensor:
    """−(1/B) Σ over `low` rows Σ over classes that the judge ranks below `top` of log(1 − p) (Eq. 24, 25).

    B counts all rows, `low` or not. `judge` and `learner` are probabilities [B, K]; gradients go to the learner. With
    top = K there is no such class: the loss and its gradient are zero.

    >>> judge = torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.5, 0.4]])
    >>> learner = torch.tensor([[0.3, 0.2, 0.5], [0.2, 0.2, 0.6]])
    >>> negative_loss(judge, learner, torch.tensor([True, False]), top=2)        # class 2 of row 0: −ln(1 − 0.5) / 2
    tensor(0.3466)
    >>> negative_loss(judge, learner, torch.tensor([True, True]), top=3)
    tensor(0.)
    """
    negative = (ranks(judge) > top) & low.unsqueeze(1)
    suppressed = torch.log1p(-learner.clamp(max=HIGHEST_PROBABILITY))
    return (suppressed * negative).sum().neg().add(0.0) / max(len(judge), 1)


@dataclass(frozen=True)
class LabelsAlone(Method):
    """The stage before: the labelled parties alone, on the same views as in the main stage, and their class counts."""

    epochs: Annotated[Count, "on the labels in a round (0: train.epochs)"] = 0
    weak: Annotated[Weak, "DSA, or the views of views.weak"] = "dsa"

    client_sends: ClassVar = {"model": "weights", "counts": "counts[K]"}
    merges_sums: ClassVar = {"model": "mean", "counts": "sum"}
    asks_labeled: ClassVar = True
    in_parts: ClassVar = False

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return self.epochs or epochs, 0

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        asked = hub.sample_clients(hub.labeled_clients) if hub.labeled_clients else []
        return [Task(client, {"model": state["model"]}) for client in asked]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        return learn_labels(task.weights("model"), me, self.weak, self.epochs)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties = list(replies)
        if len(hub.shard.labeled):
            parties.append(learn_labels(weights_in(state, "model"), hub, self.weak, self.epochs))
        weights = shares([party.examples for party in parties])
        hub.note(party_weights=weights)
        if not any(weights):
            return state
        counts = torch.stack([party.tensor("counts") for party in parties]).sum(dim=0)
        return {"model": hub.mean_model(weights_in(state, "model"), parties, weights), "counts": counts}


def learn_labels(weights: Weights, side: Client | Hub, weak: Weak, epochs: int = 0) -> Reply:
    """A labelled party's round on its labels alone (Eq. 10), and how many of each class they are (Eq. 12)."""
    model, own = side.model(weights), side.shard.labeled
    epochs, loss = epochs or side.epochs, math.nan
    if weak == "views":
        loss = side.fit_labeled(model, epochs)
    else:  # batch by batch: one operation of DSA is for the images of one step
        optimizer = side.optimizer(model, steps=side.steps(len(own), epochs=epochs))
        view, generator = weak_view(weak, side), side.rng("labeled views")
        for _ in range(epochs):
            losses: list[float] = []
            with live_taps_only(model, optimizer):
                for which in batches(len(own), side.train.batch, generator):
                    step = side.label_loss(model(view(own.images[which], generator)), own.labels[which])
                    optimizer_step(model, optimizer, step, side.train.clip)
                    losses.append(float(step.detach()))
            loss = sum(losses) / max(len(losses), 1)
    send: Payload = {"model": side.weights(model), "counts": class_counts(own.labels, side.classes)}
    return Reply(send=send, examples=len(own), metrics={"loss": loss})


def weak_view(name: Weak, side: Party) -> View:
    """What is called weak: DSA, or the views of the experiment."""
    return dsa_view(side) if name == "dsa" else side.views.weak_view


def dsa_view(side: Party) -> View:
    """DSA on the images as they are, one operation for each batch; no flips where they would change the class."""
    operations = [name for name in DSA_OPERATIONS if name != "flip" or side.views.flip]
    return lambda images, generator: dsa(side.views.plain(images), generator, operations)


class Tally:
    """What a client's batches come to: the last accepted label of each image, and means of figures.

    The client's own unlabelled images come first; others, whose truth nobody knows, follow, and are not audited.
    """

    def __init__(self, me: Client, images: int) -> None:
        self.me = me
        self.last = torch.full((images,), -1)  # -1: none accepted
        self.figures: dict[str, list[float]] = {}

    def labels(self, index: Tensor, label: Tensor, accepted: Tensor) -> None:
        """Take a batch's labels in, and tell the auditor."""
        label, accepted = label.cpu(), accepted.cpu()
        own = index < len(self.me.shard.unlabeled)
        self.me.audit(index[own], label[own], accepted[own])
        self.last[index] = label.where(accepted, torch.tensor(-1))
        self.figures.setdefault("high", []).extend(accepted.double().tolist())

    def figure(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    @property
    def accepted(self) -> Tensor:
        """The labels of the images whose label was accepted when last seen, in their order."""
        return self.last[self.last >= 0]

    @property
    def means(self) -> dict[str, float]:
        return {name: sum(values) / len(values) for name, values in self.figures.items()}
