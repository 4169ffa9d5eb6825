"""Provenance, tacit's own method: where an image comes from says much about what it shows.

Sites see some classes often and others hardly ever. Methods fight that skew; here it labels. A model that knows the
labels alone gives every image class probabilities; each client finds out, from its own images only, how often it sees
each class, and turns the probabilities into what they are for an image *of this client*. All parties then learn
from these labels, and what they have learned labels for the next generation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.contract.method import (
    UNKNOWN,
    AtLeastOne,
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
from tacit.core.payload import Payload, number_in, tensor_in, weights_in
from tacit.nets.optimizer import live_taps_only, optimizer_step
from tacit.pieces.aggregate import labeled_shares
from tacit.pieces.consistency import paired_batches
from tacit.pieces.loss import LEAST_SHARE, LabelLoss, adjusting, label_loss

EM_STEPS = 30  # more change nothing that matters
LEAST_STEP = 0.01  # of the tilt: below it stays as it is
FOLDS = 2  # of the labels
RARELY = 0.01  # a class that is named less often counts as named so often
HELD_BY = 5.0  # images of a fold, by which its tilt is held at 1
ALIKE = 0.2  # in total variation: a client this near to all others sees what they see

View = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class Provenance(Method):
    """A stage on the labels alone makes the first labeller, which two others, each without a fold of the labels,
    calibrate. Then come generations, each a stage with a schedule of its own, of which each is labelled by the model
    that the one before ended with.

    A client asks the labeller about all its images once a generation, and keeps the answers. A round: it learns its own
    class prior by expectation-maximisation (Saerens et al., 2002), and trains on the posteriors as soft labels, and on
    its own labels if it has any. The next model is the mean, in which labelled parties together have at least
    `labeled_share`. The server tilts the answers until the classes of all clients together are as often as is likely.

    Within a generation the labeller stays as it is: one that follows a model in the making is worse than both.
    """

    warmup: Annotated[Rounds, "passes over the labels, a round each: the first labeller (0: net.weights is it)"] = 100
    held_out: Annotated[bool, "folds of the labels calibrate the first labeller (false: the ablation)"] = True
    generations: Annotated[AtLeastOne, "labellers, one after the other: the first knows the labels alone"] = 5
    generation_rounds: Annotated[Rounds, "of each generation but the last, which has the main rounds"] = 80
    prior: Annotated[bool, "each client's own class prior turns its labels (false: the ablation)"] = True
    doubt: Annotated[NotNegative, "images of each class that a client is taken to have seen before it looks"] = 1.0
    align: Annotated[Share, "the tilt's first step, as a power of what is likely over what was counted (0: none)"] = 0.5
    hard: Annotated[bool, "the most probable class as the label, instead of all probabilities"] = False
    view: Annotated[
        Literal["auto", "weak", "strong"], "of unlabelled images (auto: strong at clients that see what all see)"
    ] = "auto"
    labeled_share: Annotated[Share, "of the mean, that labelled parties have at least"] = 0.2

    labels_for_others: ClassVar[bool] = False  # whether another generation learns from what this one ends with
    citation: ClassVar[str] = (
        "tacit's own. The prior by expectation-maximisation: Saerens, Latinne and Decaestecker, Adjusting the Outputs "
        "of a Classifier to New a Priori Probabilities: A Simple Procedure, Neural Computation 2002. That it needs "
        "calibration, and by what: Alexandari, Kundaje and Shrikumar, Maximum Likelihood with Bias-Corrected "
        "Calibration is Hard-To-Beat at Label Shift Adaptation, ICML 2020"
    )
    server_sends: ClassVar = {
        "model": "weights",
        "labeller": "weights",
        "generation": "number",
        "temper": "number",
        "tilt": "[K]",
        "target": "distribution[K]",
        "label_shares": "distribution[K]",
    }
    client_sends: ClassVar = {"model": "weights", "classes": "counts[K]"}
    client_keeps: ClassVar = {"answers?": "any", "generation?": "number"}
    merges_sums: ClassVar = {"model": "mean", "classes": "sum"}
    presets: ClassVar = {
        "paper": {},
        "smoke": {"warmup": 10, "generations": 2, "generation_rounds": 1, "train.lr": 0.1},
    }

    def refuses(self, experiment: Experiment) -> str:
        if self.warmup or experiment.net.weights not in ("", "pretrained"):  # those know other classes, or none
            return ""
        return (
            "method.warmup = 0 leaves the labels to a net that has learned nothing. Write method.warmup = 100 (rounds "
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
        folds = [Stage(f"fold {n + 1}", HeldOut(n), self.warmup) for n in range(FOLDS if self.held_out else 0)]
        first = Stage("warm-up", FirstLabeller(), self.warmup)
        return tuple(stage for stage in (*folds, first, *earlier) if stage.rounds)

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        state = super().server_start(hub, past)
        earlier = [found for found in past.values() if "labeller" in found]
        # Who learned without a fold learned as the first labeller did; a later one learns from all images.
        folds = [found for found in past.values() if "temper" in found] if not earlier else []
        temper, tilt = temper_and_tilt(folds, hub.classes)
        even = torch.full((hub.classes,), 1.0 / hub.classes)
        known: Payload = next((found for found in reversed([*past.values()]) if "label_shares" in found), {})
        state = {**state, "labeller": state["model"], "generation": 1 + len(earlier), "temper": temper, "tilt": tilt}
        state |= {"label_shares": known.get("label_shares", even), "labels": known.get("labels", 0.0)}
        state |= {"target": earlier[-1]["target"] if earlier else even, "classes": torch.zeros(hub.classes)}
        return {**state, "best_tilt": tilt, "best_mean": torch.zeros(hub.classes), "step": self.align}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        down: Payload = {name: state[name] for name in self.server_sends}
        return [Task(client, {**down}) for client in hub.sample_clients()]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        images, own = me.shard.unlabeled, me.shard.labeled
        answers, keep = self.ask(task, memory, me)
        labels = by_prior(answers, task.tensor("tilt"))
        known = self.doubt + torch.bincount(me.whole.labeled.labels.cpu(), minlength=me.classes)
        prior = own_prior(labels, known)
        if self.prior:
            labels = by_prior(labels, prior)
        classes, labels = labels.sum(0), labels[me.part]
        me.audit(torch.arange(len(images)), labels.argmax(1), torch.ones(len(images), dtype=torch.bool))
        if self.hard:
            labels = F.one_hot(labels.argmax(1), me.classes).to(labels)
        model = me.model(task.weights("model"))
        loss = self.learn(model, labels.to(me.device), self.view_for(prior, task, me), task, me)
        send: Payload = {"model": me.weights(model), "classes": classes}
        # In a step there is a batch of each: it counts by the longer, which is also how far its steps reach.
        return Reply(send=send, examples=max(len(images), len(own)), keep=keep, metrics={"loss": loss})

    def ask(self, task: Task, memory: Payload, me: Client) -> tuple[Tensor, Payload]:
        """This generation's labeller's answers for all unlabelled images, and what is to be kept of them."""
        generation = task.number("generation")
        if "generation" in memory and number_in(memory, "generation") == generation:
            return tensor_in(memory, "answers"), {}
        images = me.whole.unlabeled
        if not len(images):
            return torch.zeros(0, me.classes), {}
        answers = me.predict(me.model(task.weights("labeller")), images).cpu()
        answers = tempered(answers, task.number("temper"))
        return answers, {"answers": answers, "generation": generation}

    def view_for(self, prior: Tensor, task: Task, me: Client) -> View:
        """How unlabelled images are shown. Where a client sees what all see, the labels say nothing that the labeller
        does not know, and only strong views can teach more; where it does not, the labels can, and weak views will do.
        """
        alike = apart(prior, task.tensor("target")) < ALIKE
        return me.views.strong_view if self.view == "strong" or (self.view == "auto" and alike) else me.views.weak_view

    def learn(self, model: nn.Module, labels: Tensor, view: View, task: Task, me: Client) -> float:
        """Cross-entropy with the labels of the unlabelled images, and with the true ones beside it. The mean loss."""
        images, own, views = me.shard.unlabeled, me.shard.labeled, me.rng("views")
        optimizer = me.optimizer(model, steps=me.steps(max(len(images), len(own))))
        loss_of_own = loss_of_labels(task.tensor("label_shares"), self.adjustment(me), me)
        # To who asks this generation for priors, smoothed answers would pass for doubt.
        smoothing = 0.0 if self.labels_for_others else me.train.label_smoothing
        offsets = adjusting(task.tensor("target"), self.adjustment(me), smoothing).to(me.device)
        losses: list[Tensor] = []
        model.train()
        for _ in range(me.epochs):
            with live_taps_only(model, optimizer):
                for some, labeled in paired_batches(len(images), len(own), me.train.batch, views):
                    loss = torch.zeros((), device=me.device)
                    if len(labeled):
                        logits = model(me.views.weak_view(own.images[labeled], views))
                        loss = loss + loss_of_own(logits, own.labels[labeled])
                    if len(some):
                        logits = model(view(images[some], views)) + offsets
                        loss = loss + F.cross_entropy(logits, labels[some], label_smoothing=smoothing)
                    optimizer_step(model, optimizer, loss, me.train.clip)
                    losses.append(loss.detach())
        return float(torch.stack(losses).mean()) if losses else 0.0

    def adjustment(self, side: Client | Hub) -> float:
        """Who labels for others gives probabilities that hold where all classes are alike, of which priors are made;
        the last generation does as the experiment says."""
        return 1.0 if self.labels_for_others else side.train.logit_adjustment

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties = [reply for reply in replies if reply.examples > 0]
        labeled = [reply.client in hub.labeled_clients for reply in parties]
        model = weights_in(state, "model")
        if len(hub.shard.labeled):  # the server is one more party
            side = hub.in_turn()
            own = side.model(model)
            loss = loss_of_labels(tensor_in(state, "label_shares"), self.adjustment(side), side)
            side.fit_labeled(own, label_loss=loss)
            parties.append(Reply(send={"model": side.weights(own)}, examples=len(side.shard.labeled)))
            labeled.append(True)
        if parties:
            weights = labeled_shares([reply.examples for reply in parties], labeled, self.labeled_share)
            model = hub.mean_model(model, parties, weights)
        return {**state, "model": model, **self.tilted(state, replies, hub)}

    def tilted(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        """How often all clients together see each class, and the tilt by which that may come nearer to what is likely.

        What is likely is settled once, when the first generation's clients have been asked about once each, and before
        any other tilt than that of the folds: later labellers count what earlier ones taught them. Priors answer to a
        tilt more than in proportion, the more so the weaker the labeller: the best tilt so far is what the next one
        starts from, by a smaller step whenever one led away from the target.
        """
        fades = 1.0 - hub.asked_share  # clients that were not asked now were asked before
        classes = fades * tensor_in(state, "classes") + sum(reply.tensor("classes") for reply in replies)
        asked = (hub.round + 1) * hub.asked_share  # how often each client was, about
        if classes.sum() <= 0 or asked < 1.0 - 1e-9:
            return {"classes": classes}
        mean, target = (classes / classes.sum()).clamp(min=LEAST_SHARE), tensor_in(state, "target")
        tilt, best, step = tensor_in(state, "tilt"), tensor_in(state, "best_tilt"), number_in(state, "step")
        best_mean = tensor_in(state, "best_mean")
        if number_in(state, "generation") == 1 and asked - hub.asked_share < 1.0 - 1e-9:
            target = likely_shares(mean, number_in(state, "labels"))
        if best_mean.sum() == 0 or apart(mean, target) < apart(best_mean, target):
            best, best_mean = tilt, mean
        else:
            step /= 2
        tilt = best * (target / best_mean) ** (step * hub.asked_share) if step > LEAST_STEP else best
        after: Payload = {"classes": classes, "target": target, "tilt": tilt}
        return {**after, "best_tilt": best, "best_mean": best_mean, "step": step}


@dataclass(frozen=True)
class EarlierGeneration(Provenance):
    """A generation whose model labels for the next one."""

    labels_for_others: ClassVar[bool] = True


@dataclass(frozen=True)
class FirstLabeller(Method):
    """FedAvg on the labels.

    Its probabilities are to hold where all classes are alike. What is corrected is the skew of all labels together:
    that of a party among many is corrected by the others, and correcting it twice costs.
    """

    server_sends: ClassVar = {"model": "weights", "label_shares": "distribution[K]"}
    client_sends: ClassVar = {"model": "weights", "labels": "counts[K]"}
    merges_sums: ClassVar = {"model": "mean", "labels": "sum"}
    asks_labeled: ClassVar = True
    in_parts: ClassVar = False

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return 1, 0

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        others = {name: state for name, state in past.items() if "temper" not in state}  # nobody begins with a fold's
        even = torch.full((hub.classes,), 1.0 / hub.classes)
        return {**super().server_start(hub, others), "label_shares": even, "labels": 0.0}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        asked = hub.sample_clients(hub.labeled_clients) if hub.labeled_clients else []
        return [Task(client, {name: state[name] for name in self.server_sends}) for client in asked]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        return self.learn(task.send, me)

    def learn(self, sent: Payload, side: Client | Hub) -> Reply:
        model, labels = side.model(weights_in(sent, "model")), side.shard.labeled.labels
        loss = side.fit_labeled(model, epochs=1, label_loss=loss_of_labels(tensor_in(sent, "label_shares"), 1.0, side))
        counts = torch.bincount(labels.cpu(), minlength=side.classes).float()
        send: Payload = {"model": side.weights(model), "labels": counts}
        return Reply(send=send, examples=len(labels), metrics={"loss": loss})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        # The server, if it has labels, is one more party.
        parties = [*replies, *([self.learn(state, hub)] if len(hub.shard.labeled) else [])]
        return self.merged(state, parties, hub) if any(party.examples for party in parties) else state

    def merged(self, state: Payload, parties: Sequence[Reply], hub: Hub) -> Payload:
        counts = torch.stack([party.tensor("labels") for party in parties]).sum(0).clamp(min=1)
        model = hub.mean_model(weights_in(state, "model"), parties)
        labels = float(counts.sum()) / asked_share(parties, hub)
        return {"model": model, "label_shares": counts / counts.sum(), "labels": labels}


@dataclass(frozen=True)
class HeldOut(FirstLabeller):
    """A labeller that learns without one fold of each party's labels, and in every round is asked about these images.

    What it learned it gets right, but here it shows how sure it may be, and which classes are its favourites: so they
    are calibrated, a power of its probabilities (the temper) times a number a class (the tilt), where images of all
    classes count alike (Alexandari et al., 2020: bias-corrected temperature scaling).
    """

    fold: int = 0

    server_sends: ClassVar = {**FirstLabeller.server_sends, "temper": "number", "tilt": "[K]"}
    client_sends: ClassVar = {**FirstLabeller.client_sends, "confusion": "counts[K,K]", "slope": "[K,2]"}
    merges_sums: ClassVar = {**FirstLabeller.merges_sums, "confusion": "sum", "slope": "sum"}

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        return {**super().server_start(hub, past), "temper": 1.0, "tilt": torch.ones(hub.classes)}

    def learn(self, sent: Payload, side: Client | Hub) -> Reply:
        own = side.shard.labeled
        held_out = in_fold(own.labels, self.fold)
        confusion, slope = torch.zeros(side.classes, side.classes), torch.zeros(side.classes, 2)
        if held_out.any():
            answers = side.predict(side.model(weights_in(sent, "model")), own.images[held_out]).cpu()
            labels = own.labels[held_out].cpu()
            calibrated = by_prior(tempered(answers, number_in(sent, "temper")), tensor_in(sent, "tilt"))
            confusion.index_add_(0, labels, calibrated)
            slope.index_add_(0, labels, slope_of_temper(answers, calibrated, labels))
        reply = super().learn(sent, side.holding(~held_out))
        return replace(reply, send={**reply.send, "confusion": confusion, "slope": slope})

    def merged(self, state: Payload, parties: Sequence[Reply], hub: Hub) -> Payload:
        confusion = torch.stack([party.tensor("confusion") for party in parties]).sum(0)
        slope = torch.stack([party.tensor("slope") for party in parties]).sum(0)
        now = number_in(state, "temper"), tensor_in(state, "tilt")
        temper, tilt = calibrated_step(*now, confusion, slope, asked_share(parties, hub))
        return {**super().merged(state, parties, hub), "temper": temper, "tilt": tilt}


def asked_share(parties: Sequence[Reply], hub: Hub) -> float:
    """The share of those who hold labels that a round asked."""
    return sum(party.parties for party in parties) / (len(hub.labeled_clients) + bool(len(hub.shard.labeled)))


def loss_of_labels(shares: Tensor, adjustment: float, side: Client | Hub) -> LabelLoss:
    """Cross-entropy of labelled images, adjusted by the classes' shares in the labels of all parties.

    With `train.class_weights = "balanced"` a party's labels count as if classes were alike: nothing is left to adjust.
    """
    balanced, smoothing = side.train.class_weights == "balanced", side.train.label_smoothing
    loss = label_loss(side.whole.labeled.labels, side.classes, balanced, smoothing=smoothing)
    return loss if balanced else replace(loss, shares=shares.to(side.device), adjustment=adjustment)


def by_prior(probs: Tensor, prior: Tensor) -> Tensor:
    """Bayes' rule: probabilities that hold where all classes are alike, for images from where they have this prior.

    >>> by_prior(torch.tensor([[0.75, 0.25]]), torch.tensor([0.25, 0.75]))
    tensor([[0.5000, 0.5000]])
    """
    joint = probs * prior
    return joint / joint.sum(dim=1, keepdim=True).clamp(min=1e-12)


def in_fold(labels: Tensor, fold: int) -> Tensor:
    """Which of a party's labelled images are in this fold: of each class every so manieth, as they lie.

    >>> in_fold(torch.tensor([1, 0, 1, 0, 0, 1]), 0), in_fold(torch.tensor([2]), 1)
    (tensor([False,  True,  True, False,  True, False]), tensor([False]))
    """
    places = torch.empty_like(labels)
    order = labels.argsort(stable=True)
    places[order] = torch.arange(len(labels), device=labels.device)
    return places % FOLDS == fold


def tempered(probs: Tensor, temper: float) -> Tensor:
    """Probabilities to a power: below 1 they doubt more.

    >>> tempered(torch.tensor([[0.9, 0.1]]), 0.5)                           # 3 : 1 instead of 9 : 1
    tensor([[0.7500, 0.2500]])
    """
    powers = probs**temper
    return powers / powers.sum(dim=1, keepdim=True)


def slope_of_temper(answers: Tensor, calibrated: Tensor, labels: Tensor) -> Tensor:
    """How the log-likelihood of each label rises with the temper, and how that slope falls: [n, 2].

    >>> half, sure = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.8, 0.2]])
    >>> slope_of_temper(sure, half, torch.tensor([0]))                      # right: log 4 apart, by half; (log 4)² / 4
    tensor([[0.6931, 0.4805]])
    """
    logs = answers.clamp(min=1e-8).log()
    mean = (calibrated * logs).sum(1, keepdim=True)
    return torch.cat(
        [logs.gather(1, labels[:, None]) - mean, (calibrated * (logs - mean) ** 2).sum(1, keepdim=True)], 1
    )


def calibrated_step(
    temper: float, tilt: Tensor, confusion: Tensor, slope: Tensor, asked: float = 1.0
) -> tuple[float, Tensor]:
    """Half a step to the likeliest temper and tilt; less where only a share of the parties was asked.

    `confusion`: Σ of calibrated answers [true, named]. Where classes count alike each is to be named alike; one that
    was not seen keeps its tilt. Few images may be chance, hence a normal prior of the tilt's logarithm.

    >>> many = 1e6 * torch.tensor([[1.0, 0.0], [0.6, 0.4]])
    >>> temper, tilt = calibrated_step(1.0, torch.ones(2), many, torch.zeros(2, 2))
    >>> temper, (tilt**2)                                                   # named .8 and .2 of the time, not half
    (1.0, tensor([0.5000, 2.0000]))
    """
    images = confusion.sum(1)
    seen = images > 0
    if not seen.any():
        return temper, tilt
    named = (confusion[seen] / images[seen, None]).mean(0).clamp(min=RARELY)
    against = torch.where(seen, (named[seen].log().mean().exp() / named).log(), 0.0)
    held = 1.0 + asked * len(tilt) * HELD_BY * asked / float(images.sum())
    rises, falls = (slope[seen] / images[seen, None]).mean(0).tolist()
    temper += asked / 2 * rises / (falls + 1e-3)
    return min(max(temper, 0.2), 5.0), ((tilt.log() + asked / 2 * against) / held).exp()


def temper_and_tilt(folds: Sequence[Payload], classes: int) -> tuple[float, Tensor]:
    """The geometric means of what folds found; as it is where there are none."""
    if not folds:
        return 1.0, torch.ones(classes)
    tempers, tilts = ([torch.as_tensor(fold[name]) for fold in folds] for name in ("temper", "tilt"))
    return float(torch.stack(tempers).log().mean().exp()), torch.stack(tilts).log().mean(0).exp()


def own_prior(probs: Tensor, known: Tensor, steps: int = EM_STEPS) -> Tensor:
    """The class prior of the place that images come from, by expectation-maximisation (Saerens et al., 2002).

    `known`: counts of what is known to have been seen there before. Each step takes the mean of these and of the
    images' posteriors by the prior so far: Σ_x p(x) · π / (p(x) · π), class by class.

    >>> probs = torch.tensor([[0.8, 0.2], [0.8, 0.2]])                      # unsure, but always the same
    >>> own_prior(probs, torch.tensor([1.0, 1.0]), steps=1)                 # (1 + 2 · 0.8) / 4
    tensor([0.6500, 0.3500])
    >>> bool(own_prior(probs, torch.tensor([1.0, 1.0]))[0] > 0.69)          # a count of one each holds it back
    True
    """
    prior = known / known.sum() if known.sum() > 0 else torch.full_like(known, 1.0 / len(known))
    for _ in range(steps if len(probs) else 0):
        posteriors = prior * (probs.T @ (1.0 / (probs @ prior).clamp(min=1e-12)))  # their sum over images
        prior = (posteriors + known) / (len(probs) + known.sum())
    return prior


def apart(one: Tensor, other: Tensor) -> float:
    """How far two distributions are apart, in total variation.

    >>> apart(torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5]))
    0.25
    """
    return float((one - other).abs().sum()) / 2


def likely_shares(mean: Tensor, labels: float) -> Tensor:
    """How often each class is, all clients together, by a labeller's count of it.

    Who learned from few labels counts wrong: from n labels of K classes by some ⅔ √(K / n) in total variation. What is
    further from even shares than that is taken to be so, by a positive-part James–Stein rule (James and Stein, 1961)
    for the logarithms of the shares; and no share is less than what chance leaves open of each. Of a labeller from
    elsewhere (0 labels) the count is taken as it is.

    >>> likely_shares(torch.tensor([0.6, 0.4]), labels=50)                  # .1 from even, where .13 may be chance
    tensor([0.5000, 0.5000])
    >>> odds = likely_shares(torch.tensor([0.9, 0.1]), labels=50)           # .4 from even: 1 − (.13 / .4)² = .89 of it
    >>> round(float(odds[0] / odds[1]), 2), round(9**0.8889, 2)
    (7.05, 7.05)
    """
    distance = apart(mean, torch.full_like(mean, 1.0 / len(mean)))
    chance = 2 / 3 * math.sqrt(len(mean) / labels) if labels else 0.0
    trust = max(0.0, 1.0 - (chance / distance) ** 2) if distance > 0 else 0.0
    shares = (trust * mean.log()).softmax(0).clamp(min=chance / len(mean))
    return shares / shares.sum()
