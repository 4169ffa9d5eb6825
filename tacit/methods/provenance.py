"""Provenance, tacit's own method: where an image comes from says much about what it shows.

Sites see some classes often and others hardly ever. Methods fight that skew; here it labels. A model that knows the
labels alone gives every image class probabilities; each client finds out, from its own images only, how often it sees
each class, and turns the probabilities into what they are for an image *of this client*. All parties then learn
from these labels, and what they have learned labels for the next generation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.contract.method import (
    UNKNOWN,
    AtLeastOne,
    Epochs,
    Experiment,
    Held,
    Method,
    NotNegative,
    Reply,
    Rounds,
    Share,
    Stage,
    Task,
)
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, tensor_in, weights_in
from tacit.methods.fedavg import WarmUp
from tacit.nets.optimizer import live_taps_only, optimizer_step
from tacit.pieces.aggregate import labeled_shares
from tacit.pieces.consistency import paired_batches
from tacit.pieces.train import predict

EM_STEPS = 30  # more change nothing that matters
FADES = 0.75  # of what a client remembers of its classes, how much is left a round later


@dataclass(frozen=True)
class Provenance(Method):
    """A stage on the labels alone makes the first labeller. Then come generations, each a stage with a schedule of its
    own, of which each is labelled by the model that the one before ended with.

    A round: each client asks the labeller about its images, learns its own class prior by expectation-maximisation
    (Saerens et al., 2002), and trains on the posteriors as soft labels, and on its own labels if it has any. The next
    model is the mean, in which labelled parties together have at least `labeled_share`.

    Within a generation the labeller stays as it is: one that follows a model in the making is worse than both.
    """

    warmup: Annotated[Rounds, "rounds on the labels alone, which make the first labeller (0: net.weights is it)"] = 60
    warmup_epochs: Annotated[Epochs, "of labelled parties in such a round (0: train.epochs)"] = 4
    generations: Annotated[AtLeastOne, "labellers, one after the other: the first knows the labels alone"] = 3
    generation_rounds: Annotated[Rounds, "of each generation but the last, which has the main rounds"] = 40
    prior: Annotated[bool, "each client's own class prior turns its labels (false: the ablation)"] = True
    doubt: Annotated[NotNegative, "images of each class that a client is taken to have seen before it looks"] = 1.0
    align: Annotated[NotNegative, "how far the labeller's mean answer is pulled to an even one, as a power"] = 1.0
    hard: Annotated[bool, "the most probable class as the label, instead of all probabilities"] = False
    view: Annotated[Literal["weak", "strong"], "of unlabelled images, in training"] = "weak"
    labeled_share: Annotated[Share, "of the mean, that labelled parties have at least"] = 0.2

    labels_for_others: ClassVar[bool] = False  # whether another generation learns from what this one ends with
    citation: ClassVar[str] = (
        "tacit's own. The prior by expectation-maximisation: Saerens, Latinne and Decaestecker, Adjusting the Outputs "
        "of a Classifier to New a Priori Probabilities: A Simple Procedure, Neural Computation 2002"
    )
    server_sends: ClassVar = {"model": "weights", "labeller": "weights", "tilt": "[K]"}
    client_sends: ClassVar = {"model": "weights", "answers": "[K]"}
    client_keeps: ClassVar = {"seen": "[K]"}
    merges_sums: ClassVar = {"model": "mean", "answers": "sum"}
    presets: ClassVar = {"paper": {}, "smoke": {"warmup": 2, "generations": 2, "generation_rounds": 1, "train.lr": 0.1}}

    def refuses(self, experiment: Experiment) -> str:
        if self.warmup or experiment.net.weights not in ("", "pretrained"):  # those know other classes, or none
            return ""
        return (
            "method.warmup = 0 leaves the labels to a net that has learned nothing. Write method.warmup = 60 (rounds "
            "on the labels alone), or net.weights with a model that knows the classes, as a finished run's folder."
        )

    def needs_each(self, experiment: Experiment) -> str:
        if experiment.data.placement != "some-clients":
            return ""
        return "it weighs the labelled clients together (method.labeled_share), which needs a sum over them alone"

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return held.label_passes(epochs), epochs

    def before(self) -> tuple[Stage, ...]:
        one = EarlierGeneration(**asdict(self))
        earlier = [Stage(f"generation {n}", one, self.generation_rounds) for n in range(1, self.generations)]
        first = Stage("warm-up", WarmUp(epochs=self.warmup_epochs), self.warmup)
        return tuple(stage for stage in (first, *earlier) if stage.rounds)

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        state = super().server_start(hub, past)
        return {**state, "labeller": state["model"], "tilt": torch.ones(hub.classes)}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return [Task(client, {**state}) for client in hub.sample_clients()]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        images, own = me.shard.unlabeled, me.shard.labeled
        answers, labels = torch.zeros(me.classes), torch.zeros(0, me.classes, device=me.device)
        seen = tensor_in(memory, "seen") if "seen" in memory else torch.zeros(me.classes)
        if len(images):
            probs = predict(me.model(task.weights("labeller")), images, me.views.plain)
            answers = probs.sum(0).cpu()
            labels = by_prior(probs, task.tensor("tilt").to(probs))
            if self.prior:
                known = self.doubt + seen + torch.bincount(own.labels.cpu(), minlength=me.classes)
                labels = by_prior(labels, own_prior(labels, known.to(labels)))
                seen = FADES * (seen + labels.sum(0).cpu())
            me.audit(torch.arange(len(images)), labels.argmax(1), torch.ones(len(images), dtype=torch.bool))
            if self.hard:
                labels = F.one_hot(labels.argmax(1), me.classes).to(labels)
        model = me.model(task.weights("model"))
        loss = self.learn(model, labels, me)
        send: Payload = {"model": me.weights(model), "answers": answers}
        return Reply(send=send, examples=len(images) + len(own), keep={"seen": seen}, metrics={"loss": loss})

    def learn(self, model: nn.Module, labels: Tensor, me: Client) -> float:
        """Cross-entropy with the labels of the unlabelled images, and with the true ones beside it. The mean loss."""
        images, own, views = me.shard.unlabeled, me.shard.labeled, me.rng("views")
        view = me.views.strong_view if self.view == "strong" else me.views.weak_view
        optimizer = me.optimizer(model, steps=me.steps(max(len(images), len(own))))
        # Smoothing helps who is asked for a class, and spoils probabilities, of which the prior is made.
        smoothing = 0.0 if self.labels_for_others else me.train.label_smoothing
        losses: list[Tensor] = []
        model.train()
        for _ in range(me.epochs):
            with live_taps_only(model, optimizer):
                for some, labeled in paired_batches(len(images), len(own), me.train.batch, views):
                    loss = torch.zeros((), device=me.device)
                    if len(labeled):
                        logits = model(me.views.weak_view(own.images[labeled], views))
                        loss = loss + me.label_loss(logits, own.labels[labeled])
                    if len(some):
                        logits = model(view(images[some], views))
                        loss = loss + F.cross_entropy(logits, labels[some], label_smoothing=smoothing)
                    optimizer_step(model, optimizer, loss, me.train.clip)
                    losses.append(loss.detach())
        return float(torch.stack(losses).mean()) if losses else 0.0

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties = [reply for reply in replies if reply.examples > 0]
        labeled = [reply.client in hub.labeled_clients for reply in parties]
        model = weights_in(state, "model")
        if labels := len(hub.shard.labeled):  # the server is one more party
            parties.append(Reply(send={"model": hub.finetune(model)}, examples=labels))
            labeled.append(True)
        if parties:
            weights = labeled_shares([reply.examples for reply in parties], labeled, self.labeled_share)
            model = hub.mean_model(model, parties, weights)
        answers = sum((reply.tensor("answers") for reply in replies), torch.zeros(hub.classes))
        tilt = tensor_in(state, "tilt")
        if answers.sum() > 0:
            tilt = (tilt + towards_even(answers, self.align)) / 2
        return {**state, "model": model, "tilt": tilt}


@dataclass(frozen=True)
class EarlierGeneration(Provenance):
    """A generation whose model labels for the next one."""

    labels_for_others: ClassVar[bool] = True


def by_prior(probs: Tensor, prior: Tensor) -> Tensor:
    """Bayes' rule: probabilities that hold where all classes are alike, for images from where they have this prior.

    >>> by_prior(torch.tensor([[0.75, 0.25]]), torch.tensor([0.25, 0.75]))
    tensor([[0.5000, 0.5000]])
    """
    joint = probs * prior
    return joint / joint.sum(dim=1, keepdim=True).clamp(min=1e-12)


def own_prior(probs: Tensor, known: Tensor, steps: int = EM_STEPS) -> Tensor:
    """The class prior of the place that images come from, by expectation-maximisation (Saerens et al., 2002).

    `known`: counts of what is known to have been seen there before. Each step takes the mean of these and of the
    images' posteriors by the prior so far.

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2]])                      # unsure, but always the same
    >>> own_prior(probs, torch.tensor([1.0, 1.0]), steps=1)                 # (1 + 2 · 0.8) / 4
    tensor([0.6500, 0.3500])
    >>> bool(own_prior(probs, torch.tensor([1.0, 1.0]))[0] > 0.69)          # a count of one each holds it back
    True
    """
    prior = known / known.sum() if known.sum() > 0 else torch.full_like(known, 1.0 / len(known))
    for _ in range(steps):
        prior = (by_prior(probs, prior).sum(dim=0) + known) / (len(probs) + known.sum())
    return prior


def towards_even(answers: Tensor, power: float) -> Tensor:
    """By what to multiply a labeller's probabilities so that its mean answer over all clients moves to an even one.

    >>> towards_even(torch.tensor([6.0, 2.0]), 1.0), towards_even(torch.tensor([6.0, 2.0]), 0.0)  # ½ : ¾, ½ : ¼
    (tensor([0.6667, 2.0000]), tensor([1., 1.]))
    """
    mean = answers / answers.sum()
    return (1.0 / len(mean) / mean.clamp(min=1e-4)) ** power
