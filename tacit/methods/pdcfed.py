"""PDCFed: pseudo-labels in two stages, by how the prediction changes from a weak to a strong view."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

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
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, tensor_in, weights_in
from tacit.methods.fedavg import WarmUp
from tacit.nets.optimizer import SGD, momentum_of
from tacit.pieces.aggregate import shares
from tacit.pieces.consistency import endless_batches, learn_by_batch, two_view_batches
from tacit.pieces.label import PseudoLabels
from tacit.pieces.loss import masked_cross_entropy

PEAK, LEFT, RIGHT = 0.999, 4.0, 9.0  # of the Gaussian: its height; by how much each side is narrower than the variance
TINY = 1e-12


@dataclass(frozen=True)
class PDCFed(Method):
    """Unlabelled clients believe, batch by batch, what a weak view is surely seen as, and what it is fairly surely
    seen as where the strong view agrees; an entropy term sharpens what agrees. Labelled clients weigh more.

    A client that holds both trains on both in each step, and a server that holds labels trains on them after each
    merge: both are ours, the paper has clients that hold either.
    """

    threshold: Annotated[Share, "stage one: confidence that is enough by itself (tau_upper)"] = 0.85
    lower: Annotated[Share, "stage two: confidence above which agreement decides (tau_lower)"] = 0.6
    agreement: Annotated[Share, "stage two: agreement of weak and strong view that is enough (sigma)"] = 0.6
    weight: Annotated[NotNegative, "of the pseudo-labels' loss"] = 0.027
    entropy: Annotated[NotNegative, "weight of the entropy term"] = 0.001
    temperature: Annotated[Positive, "of the predictions in the entropy term"] = 0.9
    decay: Annotated[Share, "of the running mean and variance of changes, by batch"] = 0.999
    labeled_epochs: Annotated[Count, "epochs on labels alone in a round (0: train.epochs)"] = 2
    unlabeled_lr: Annotated[Positive, "learning rate where there are unlabelled images"] = 0.007
    labeled_boost: Annotated[Positive, "labelled clients weigh so many times"] = 6.0
    warmup: Annotated[Rounds, "rounds of FedAvg on the labels before"] = 0
    warmup_epochs: Annotated[Epochs, "epochs in a round of the warm-up (0: train.epochs)"] = 0
    keep_momentum: Annotated[bool, "clients keep their momentum from round to round"] = False
    double_softmax: Annotated[bool, "as released: probabilities are taken for logits in the cross-entropy"] = False

    citation: ClassVar[str] = (
        "Zhu, Ma and Sun, Two-stage sampling with predicted distribution changes in federated semi-supervised "
        "learning, Knowledge-Based Systems 295 (2024) 111822"
    )
    placements: ClassVar = ("some-clients", "clients", "server")
    merges_sums: ClassVar = {"model": "mean"}
    client_keeps: ClassVar = {"mean?": "any", "variance?": "any", "momentum?": "any"}
    presets: ClassVar = {  # what the authors set for other data is on the docs page
        "paper": {"participation.fraction": 0.5, "train.batch": 128, "train.lr": 0.01, "rounds": 500},
        "released": {"double_softmax": True, "keep_momentum": True, "views.weak": "resize-crop", "views.flip": "yes"},
        "smoke": {
            "warmup": 1,
            "threshold": 0.6,
            "lower": 0.3,
            "agreement": 0.3,
            "weight": 1.0,
            "decay": 0.8,
            "unlabeled_lr": 0.05,
            "keep_momentum": True,
            "participation.fraction": 1.0,
            "train.lr": 0.1,
        },
    }

    def __post_init__(self) -> None:
        if self.lower > self.threshold:
            raise ValueError(
                f"lower = {self.lower} is above threshold = {self.threshold}, so that nothing would be left for the "
                "second stage; write a lower one (equal ones: one stage only)"
            )

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        both = held.labeled and held.unlabeled
        return held.label_passes(epochs) if both else self.labeled_epochs or epochs, epochs

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", WarmUp(epochs=self.warmup_epochs), self.warmup),) if self.warmup else ()

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        return reply.examples * (self.labeled_boost if labeled else 1.0)

    def most_sum_weight(self, most: float) -> float:
        return most * max(self.labeled_boost, 1.0)

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        model, momentum = me.model(task.weights("model")), weights_in(memory, "momentum", missing={})
        keep: Payload = {}
        if len(me.shard.unlabeled):
            steps, usual = me.steps(len(me.shard.unlabeled)), self.recall(memory, me)
            optimizer = me.optimizer(model, me.scheduled(self.unlabeled_lr), momentum, steps)
            loss = self.learn(model, usual, optimizer, me)
            keep |= {name: tensor.detach().cpu().clone() for name, tensor in usual.items()}
        else:
            optimizer = me.optimizer(model, momentum=momentum)
            loss = me.fit_labeled(model, epochs=self.labeled_epochs or None, optimizer=optimizer)
        if self.keep_momentum:
            keep["momentum"] = momentum_of(model, optimizer)
        return Reply(send={"model": me.weights(model)}, examples=me.shard.held, keep=keep, metrics={"loss": loss})

    def recall(self, memory: Payload, me: Client) -> Weights:
        """The running mean and variance of this client's rising shares; at first 1/K and 1."""
        start: Payload = {"mean": torch.tensor(1.0 / me.classes), "variance": torch.tensor(1.0), **memory}
        return {name: tensor_in(start, name) for name in ("mean", "variance")}

    def learn(self, model: nn.Module, usual: Weights, optimizer: SGD, me: Client) -> float:
        """Batch by batch: label the weak views, look whether the strong views agree, learn on these. The last loss."""
        images, labeled, weak = me.shard.unlabeled, me.shard.labeled, me.views.weak_view
        own = endless_batches(labeled.images, labeled.labels, me.train.batch, weak, me.rng("labeled views"))
        generator, loss = me.rng("unlabeled views"), math.nan

        def unlabeled_loss(index: Tensor, shown: Tensor, learned: Tensor) -> Tensor:
            with torch.no_grad():
                probs = model(shown).softmax(dim=1)
            logits = model(learned)
            (label, accepted), certain = self.select(probs, logits.detach().softmax(dim=1), usual)
            me.audit(index, label, accepted)
            return self.unlabeled_loss(logits, label, accepted, certain)

        for _ in range(me.epochs):
            epoch = two_view_batches(images, me.train.batch, weak, me.views.strong_view, generator)
            loss = learn_by_batch(
                model, epoch, own, unlabeled_loss, optimizer=optimizer, clip=me.train.clip, label_loss=me.label_loss
            )
        return loss

    def select(self, weak: Tensor, strong: Tensor, usual: Weights) -> tuple[PseudoLabels, Tensor]:
        """Two-stage selection, and which images are certain: fairly sure, and the views agree.

        The batch's rising shares are taken into the running mean and variance first; then these decide.

        >>> method = PDCFed(threshold=0.8, lower=0.5, agreement=0.6, decay=0.5)
        >>> usual = {"mean": torch.tensor(0.5), "variance": torch.tensor(1.0)}
        >>> weak = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
        >>> strong = torch.tensor([[0.2, 0.8], [0.7, 0.3], [0.1, 0.9]])
        >>> method.select(weak, strong, usual)[0]
        PseudoLabels(label=tensor([0, 0, 0]), accepted=tensor([ True,  True, False]))
        >>> usual["mean"], usual["variance"]                        # each share ½; (½ + ½)/2, (1 + 0)/2
        (tensor(0.5000), tensor(0.5000))
        """
        rising = rising_share(weak, strong)
        usual["mean"] = usual["mean"].to(weak).lerp(rising.mean(), 1 - self.decay)
        usual["variance"] = usual["variance"].to(weak).lerp(rising.var(correction=1), 1 - self.decay)
        agreeing = agreement(weak, strong, usualness(rising, usual["mean"], usual["variance"])) >= self.agreement
        certain = agreeing & (weak.max(dim=1).values > self.lower)
        return two_stage_labels(weak, agreeing, self.threshold, self.lower), certain

    def unlabeled_loss(self, logits: Tensor, label: Tensor, accepted: Tensor, certain: Tensor) -> Tensor:
        """Cross-entropy of what was accepted, and the entropy of what is certain, stage one's labels among it.

        As released, the cross-entropy takes probabilities for logits, and is never far from ln K.
        """
        scores = logits.softmax(dim=1) if self.double_softmax else logits
        loss = self.weight * masked_cross_entropy(scores, label, accepted)
        return loss + self.entropy * masked_entropy(logits, certain, self.temperature) if self.entropy else loss

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        boosts = [self.labeled_boost if reply.client in hub.labeled_clients else 1.0 for reply in replies]
        weights = shares([reply.examples * boost for reply, boost in zip(replies, boosts, strict=True)])
        hub.note(client_weights=weights)
        model = weights_in(state, "model")
        model = hub.mean_model(model, replies, weights) if any(weights) else model
        return {"model": hub.finetune(model)}


# The paper's text was not at hand: the formulas are those of the authors' public code, without equation numbers.


def rising_share(weak: Tensor, strong: Tensor) -> Tensor:
    """The share of classes that become likelier from the weak to the strong view: [N, K], [N, K] → [N].

    >>> rising_share(torch.tensor([[0.7, 0.2, 0.1, 0.0]]), torch.tensor([[0.4, 0.3, 0.1, 0.2]]))    # two of four
    tensor([0.5000])
    """
    return (strong > weak).to(weak).mean(dim=1)


def usualness(rising: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """How usual a rising share is: a Gaussian around the usual one, steeper above it than below: [N] → [N].

    0.999 · exp(−(f − mean)² / (2 · variance / d)), d = 4 up to the mean and 9 above it.

    >>> usualness(torch.tensor([0.3, 0.5, 0.7]), torch.tensor(0.5), torch.tensor(0.04))     # exp(−2), 1, exp(−4.5)
    tensor([0.1352, 0.9990, 0.0111])
    """
    narrower = torch.where(rising <= mean, LEFT, RIGHT)
    return PEAK * torch.exp(-(rising - mean).square() * narrower / (2.0 * variance.clamp(min=TINY)))


def agreement(weak: Tensor, strong: Tensor, usual: Tensor) -> Tensor:
    """How well two views' predictions agree: exp(−‖p_weak − p_strong‖₂ / usualness), between 0 and 1: → [N].

    >>> weak, strong = torch.tensor([[0.7, 0.3], [0.9, 0.1]]), torch.tensor([[0.7, 0.3], [0.6, 0.5]])
    >>> agreement(weak, strong, torch.tensor([0.5, 0.5]))                                   # exp(0), exp(−0.5/0.5)
    tensor([1.0000, 0.3679])
    """
    return torch.exp(-(weak - strong).norm(dim=1) / usual.clamp(min=TINY))


def two_stage_labels(weak: Tensor, agreeing: Tensor, upper: float, lower: float) -> PseudoLabels:
    """The weak view's class: believed from `upper` on; strictly between `lower` and `upper` where the views agree.

    >>> weak = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.3, 0.7], [0.6, 0.4]])
    >>> two_stage_labels(weak, torch.tensor([False, True, False, True]), upper=0.8, lower=0.6)
    PseudoLabels(label=tensor([0, 0, 1, 0]), accepted=tensor([ True,  True, False, False]))
    """
    highest, label = weak.max(dim=1)
    return PseudoLabels(label, (highest >= upper) | ((highest > lower) & agreeing))


def masked_entropy(logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """(1/N) Σ 1[chosen] H(softmax(logits / temperature)): the mean over *all* N samples, as the pseudo-label loss.

    >>> logits = torch.zeros(4, 2)                                                          # H of each sample: ln 2
    >>> masked_entropy(logits, torch.tensor([True, False, False, False]), temperature=0.9)
    tensor(0.1733)
    """
    log_probs = (logits / temperature).log_softmax(dim=1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=1)
    return (entropy * chosen).sum() / max(len(logits), 1)
