"""FedMatch: weights σ + ψ, one part for labels and one for the rest; clients that think alike advise each other."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.func import functional_call

from tacit.contract.method import AtLeastOne, Count, Experiment, Method, NotNegative, Reply, Share, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, tensor_in, weights_in
from tacit.pieces.aggregate import shares, stacked, unstacked
from tacit.pieces.debias import average_prediction, debias, debiasing
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.train import batch_count, batches, optimizer_step, predict

Ties = Literal["local", "lowest"]


Part = Literal["sigma", "psi"]


@dataclass(frozen=True)
class FedMatch(Method):
    """Labels move only σ, unlabelled images only ψ; whoever learned a part sends it, and each part is averaged.

    Every few rounds a client also gets the ψ of those clients whose models answer a fixed noise image most like its
    own. With its own σ they are its helpers: it stays close to their predictions, and a pseudo-label is what the
    majority says. Labels may be at the clients or at the server; at some clients only is our own construction.
    """

    threshold: Annotated[Share, "confidence that a pseudo-label needs"] = 0.75
    labeled_weight: Annotated[NotNegative, "of the cross-entropy on labels (lambda_s)"] = 10.0
    consistency: Annotated[NotNegative, "weight of the helpers' predictions and agreed labels (lambda_ICCS)"] = 0.01
    pull: Annotated[NotNegative, "of psi towards sigma (lambda_L2)"] = 10.0
    sparsity: Annotated[NotNegative, "weight of the L1 norm of psi (lambda_L1)"] = 1e-4
    cut: Annotated[NotNegative, "entries of psi up to this size are sent as 0"] = 5e-6
    psi_start: Annotated[NotNegative, "psi at the start, as a multiple of sigma"] = 0.2
    helpers: Annotated[Count, "clients that advise another (H)"] = 2
    helper_every: Annotated[AtLeastOne, "helpers come every so many rounds"] = 10
    remember: Annotated[Count, "the server remembers the psi of so many clients, the latest (0: of all)"] = 0
    ties: Annotated[Ties, "without a majority: the local model's class, or the lowest number"] = "local"
    debias: Annotated[bool, "FedDPL: divide each model's predictions by their mean before threshold and vote"] = False
    debias_prior: Annotated[Literal["fixed", "moving"], "the client's own mean stays for the round, or follows"] = (
        "fixed"
    )

    citation: ClassVar[str] = (
        "Jeong et al., Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint Learning, ICLR 2021"
    )
    trains_parts: ClassVar = False  # σ + ψ is drawn for every parameter
    server_sends: ClassVar = {"sigma": "weights", "psi": "weights", "helpers?": "any"}
    client_sends: ClassVar = {"sigma": "weights if labeled", "psi": "weights if unlabeled"}
    merges_sums: ClassVar = {"sigma": "mean", "psi": "mean"}
    presets: ClassVar = {
        "paper": {
            "train.lr": 1e-3,
            "train.momentum": 0.0,
            "train.weight_decay": 1e-4,
            "train.clip": 0.0,
            "train.batch": 10,
            "train.epochs": 1,
            "views.weak": "none",
        },
        "released": {"ties": "lowest"},
        "smoke": {
            "threshold": 0.5,
            "labeled_weight": 1.0,
            "consistency": 0.5,
            "pull": 0.01,
            "helper_every": 2,
            "remember": 3,
            "train.lr": 0.1,
            "train.momentum": 0.9,
            "train.clip": 5.0,
        },
    }

    def needs_each(self, experiment: Experiment) -> str:
        if not self.helpers:
            return ""
        return "it sends each client's psi to those who think alike (helpers); write method.helpers = 0"

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        return float(reply.examples > 0)

    def most_sum_weight(self, most: float) -> float:
        return 1.0

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        sigma = weights_in(super().server_start(hub, past), "model")
        psi = {name: self.psi_start * sigma[name] for name, _ in hub.model(sigma).named_parameters()}
        channels, size, _ = hub.shard.labeled.images.shape[1:]
        noise = noise_image(channels, size, hub.rng("noise"))  # the same one for all clients and rounds
        return {"sigma": self._learn_labels(sigma, psi, hub), "psi": psi, "noise": noise, "memory": {}}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        down: Payload = {"sigma": state["sigma"], "psi": state["psi"]}
        memory = weights_in(state, "memory") if (hub.round + 1) % self.helper_every == 0 else {}
        each = [(client, helpers_of(client, memory, self.helpers)) for client in hub.sample_clients()]
        return [Task(client, {**down, "helpers": helpers} if helpers else down) for client, helpers in each]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        sigma, psi = task.weights("sigma"), task.weights("psi")
        labels, images = len(me.shard.labeled), len(me.shard.unlabeled)
        if not images:
            return Reply(send={"sigma": self._learn_labels(sigma, psi, me)}, examples=labels)
        model = Decomposed(me.model(sigma), sigma, psi)
        steps = me.steps(labels) + me.steps(images, unlabeled_batch(labels, images, me.train.batch))
        optimizer, order, chance = me.optimizer(model, steps=steps), me.rng("order"), me.rng("views")
        advice = self._ask(model, task, me)
        for _ in range(me.epochs):
            for known, unknown in disjoint_batches(labels, images, me.train.batch, order):
                if known is not None:
                    optimizer_step(model, optimizer, self._label_loss(model, known, me, chance), me.train.clip)
                if unknown is not None:
                    optimizer_step(
                        model, optimizer, self._image_loss(model, unknown, advice, me, chance), me.train.clip
                    )
        send: Payload = {"psi": cut_small(model.part("psi"), self.cut)}
        if labels:
            send["sigma"] = {**me.weights(model.merged()), **model.part("sigma")}  # a net's buffers go with sigma
        return Reply(send=send, examples=labels + images, metrics={"helpers": len(advice.probs)})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parts = {name: weights_in(state, name) for name in ("sigma", "psi")}
        for name in parts:
            parties = [reply for reply in replies if name in reply.send and reply.examples > 0]
            if parties:
                parts[name] = hub.mean_model(parts[name], parties, shares([1.0] * len(parties)), name)
        memory = self._remember(state, replies, hub)
        return {**state, "sigma": self._learn_labels(**parts, side=hub), "psi": parts["psi"], "memory": memory}

    def server_answer(self, state: Payload, hub: Hub) -> Weights:
        return joined(weights_in(state, "sigma"), weights_in(state, "psi"))

    def _label_loss(self, model: "Decomposed", which: Tensor, side: Client | Hub, chance: Generator) -> Tensor:
        """What sigma learns: cross-entropy on labels."""
        labeled = side.shard.labeled
        logits = model.learning("sigma")(side.views.weak_view(labeled.images[which], chance))
        return self.labeled_weight * side.label_loss(logits, labeled.labels[which])

    def _image_loss(
        self, model: "Decomposed", which: Tensor, advice: "Advice", me: Client, chance: Generator
    ) -> Tensor:
        """What psi learns: consistency with the helpers and agreed labels, both where sure, and the penalty."""
        images = me.shard.unlabeled[which]
        loss = disjoint_penalty(model.sigma, model.learning("psi").psi, self.pull, self.sparsity)
        with torch.set_grad_enabled(len(advice.probs) > 0):
            logits = model(me.views.plain(images))
        label, sure = advice.label(which, logits.detach().softmax(dim=1), self.ties)
        me.audit(which, label, sure)
        if not sure.any():
            return loss
        strong = model(me.views.strong_view(images, chance))
        apart = inter_client_consistency(logits[sure], advice.probs[:, which][:, sure])
        return loss + self.consistency * (apart + F.cross_entropy(strong[sure], label[sure]))

    def _ask(self, model: "Decomposed", task: Task, me: Client) -> "Advice":
        """What the helpers say of this client's images, with this client's sigma and their psi; fixed for the round."""
        sigma, images = task.weights("sigma"), me.shard.unlabeled
        others = unstacked(task.weights("helpers")) if "helpers" in task.send else []
        predictions = [me.predict(me.model(joined(sigma, psi)), images) for psi in others]
        helpers = torch.stack(predictions) if predictions else torch.zeros(0, len(images), me.classes, device=me.device)
        look = partial(predict, model, images, partial(me.views.weak_view, generator=me.rng("prior views")))
        moving = self.debias_prior == "moving"
        return advice_of(
            helpers, self.threshold, debiasing(look, at_once=False, moving=moving) if self.debias else None
        )

    def _learn_labels(self, sigma: Weights, psi: Weights, side: Client | Hub) -> Weights:
        """Sigma after training on this side's labels alone; as it was where there are none."""
        if not len(side.shard.labeled):
            return sigma
        model = Decomposed(side.model(sigma), sigma, psi)
        optimizer = side.optimizer(model, steps=side.steps(len(side.shard.labeled)))
        order, chance = side.rng("order"), side.rng("views")
        for _ in range(side.epochs):
            for which in batches(len(side.shard.labeled), side.train.batch, order):
                optimizer_step(model, optimizer, self._label_loss(model, which, side, chance), side.train.clip)
        return {**side.weights(model.merged()), **model.part("sigma")}

    def _remember(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Weights:
        """For each client its last psi, and what its model answers to the noise."""
        fresh = [reply for reply in replies if "psi" in reply.send and reply.examples > 0]
        if not fresh or not self.helpers:
            return weights_in(state, "memory")
        net, answers = hub.model(weights_in(state, "sigma")), []
        for reply in fresh:
            sigma = weights_in(reply.send if "sigma" in reply.send else state, "sigma")
            net.load_state_dict(joined(sigma, reply.weights("psi")))
            answers.append(hub.predict(net, tensor_in(state, "noise").to(hub.device)).cpu())
        who = {"client": torch.tensor([reply.client for reply in fresh]), "output": torch.cat(answers)}
        psis = stacked([reply.weights("psi") for reply in fresh])
        return refreshed(weights_in(state, "memory"), {**who, **psis}, self.remember)


# --- Decomposed weights: sigma + psi ---------------------------------------------------------------------------------


def joined(sigma: Weights, psi: Weights) -> Weights:
    """The weights θ = σ + ψ. What has no ψ (the buffers of a net) is as σ has it.

    >>> joined({"w": torch.tensor([1.0]), "steps": torch.tensor(3)}, {"w": torch.tensor([0.5])})
    {'w': tensor([1.5000]), 'steps': tensor(3)}
    """
    return {name: tensor + psi[name] if name in psi else tensor for name, tensor in sigma.items()}


class Decomposed(nn.Module):
    """A net whose every parameter is σ + ψ. A loss moves the part that is learning; the other one stands still.

    One optimiser over `parameters()` serves both: it passes over what has no gradient. The net's own parameters are
    not used until `merged`; its buffers are.

    >>> model = Decomposed(nn.Linear(1, 1, bias=False), {"weight": torch.tensor([[2.0]])}, {"weight": torch.ones(1, 1)})
    >>> loss = model.learning("psi")(torch.ones(1, 1)).sum()
    >>> loss.item()                                                             # (2 + 1) · 1
    3.0
    >>> loss.backward()
    >>> [p.grad for p in model.sigma], [p.grad for p in model.psi]
    ([None], [tensor([[1.]])])
    """

    def __init__(self, net: nn.Module, sigma: Weights, psi: Weights) -> None:
        super().__init__()
        self.net = net.requires_grad_(False)
        self.names = [name for name, _ in net.named_parameters()]
        # In the parameters' own memory layout, which the fused optimiser needs.
        self.sigma = nn.ParameterList(torch.empty_like(p).copy_(sigma[name]) for name, p in net.named_parameters())
        self.psi = nn.ParameterList(torch.empty_like(p).copy_(psi[name]) for name, p in net.named_parameters())

    def learning(self, part: Part) -> Self:
        """From now on only this part learns."""
        self.sigma.requires_grad_(part == "sigma")
        self.psi.requires_grad_(part == "psi")
        return self

    def forward(self, x: Tensor) -> Tensor:
        theta = {name: s + p for name, s, p in zip(self.names, self.sigma, self.psi, strict=True)}
        logits: Tensor = functional_call(self.net, theta, (x,))
        return logits

    def part(self, which: Part) -> Weights:
        """A copy of the parameters of one part, by name."""
        tensors = self.sigma if which == "sigma" else self.psi
        return {name: t.detach().cpu().clone() for name, t in zip(self.names, tensors, strict=True)}

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """The plain net with the weights σ + ψ."""
        for parameter, s, p in zip(self.net.parameters(), self.sigma, self.psi, strict=True):
            parameter.copy_(s + p)
        return self.net


def disjoint_penalty(sigma: Iterable[Tensor], psi: Iterable[Tensor], pull: float, sparsity: float) -> Tensor:
    """pull · ‖σ − ψ‖² + sparsity · ‖ψ‖₁: what FedMatch adds to the loss that ψ learns. Sums, not means.

    >>> disjoint_penalty([torch.tensor([1.0, 2.0])], [torch.tensor([0.0, -1.0])], pull=10.0, sparsity=0.5)
    tensor(100.5000)
    """
    pairs = list(zip(sigma, psi, strict=True))
    apart = torch.stack([(s - p).square().sum() for s, p in pairs]).sum()
    size = torch.stack([p.abs().sum() for _, p in pairs]).sum()
    return pull * apart + sparsity * size


def cut_small(psi: Weights, limit: float) -> Weights:
    """Entries no larger than the limit become 0: what FedMatch need not send. The limit itself is cut, too.

    >>> cut_small({"w": torch.tensor([0.25, -0.5, 0.75])}, 0.5)
    {'w': tensor([0.0000, 0.0000, 0.7500])}
    """
    return {name: torch.where(tensor.abs() > limit, tensor, 0.0) for name, tensor in psi.items()}


def unlabeled_batch(labeled: int, unlabeled: int, size: int) -> int:
    """How many unlabelled images stand beside a labelled batch, so that both sets are seen once; `size` without labels.

    >>> unlabeled_batch(20, 90, 10), unlabeled_batch(0, 20, 10)
    (45, 10)
    """
    known = batch_count(labeled, size)
    return -(-unlabeled // known) if known else size


def disjoint_batches(
    labeled: int, unlabeled: int, size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """One epoch: for each labelled batch, an equal part of the unlabelled images, so that both sets are seen once.

    Without labels, the unlabelled images come in batches of `size`.

    >>> shapes = lambda *counts: [
    ...     tuple(0 if part is None else len(part) for part in pair)
    ...     for pair in disjoint_batches(*counts, torch.Generator())
    ... ]
    >>> shapes(20, 90, 10), shapes(0, 20, 10), shapes(20, 0, 10), shapes(0, 0, 10)
    ([(10, 45), (10, 45)], [(0, 10), (0, 10)], [(10, 0), (10, 0)], [])
    """
    known = list(batches(labeled, size, generator))
    yield from zip_longest(known, batches(unlabeled, unlabeled_batch(labeled, unlabeled, size), generator))


# --- Helpers: who is like me, how far are we apart, what do we agree on ----------------------------------------------


def noise_image(channels: int, size: int, generator: torch.Generator) -> Tensor:
    """One image of Gaussian noise (mean 125, deviation 125, drawn again outside of 0 … 255): uint8 [1, C, S, S].

    >>> image = noise_image(3, 32, torch.Generator().manual_seed(0))
    >>> image.dtype, image.shape, 100 < image.double().mean() < 150
    (torch.uint8, torch.Size([1, 3, 32, 32]), tensor(True))
    """
    values = torch.full((1, channels, size, size), -1.0)
    while bool((outside := (values < 0) | (values > 255)).any()):
        values[outside] = 125 + 125 * torch.randn(int(outside.sum()), generator=generator)
    return values.to(torch.uint8)


def nearest_rows(outputs: Tensor, own: int, count: int) -> list[int]:
    """The rows of `outputs` [M, K] closest to row `own` by Euclidean distance, the closest first, never `own` itself.

    >>> outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.8, 0.2], [0.9, 0.1]])
    >>> nearest_rows(outputs, 0, 2), nearest_rows(outputs, 1, 9)
    ([3, 2], [2, 0, 3])
    """
    distance = (outputs - outputs[own]).square().sum(dim=1)
    distance[own] = torch.inf
    order: list[int] = distance.argsort(stable=True).tolist()
    return order[: min(count, len(outputs) - 1)]


def inter_client_consistency(logits: Tensor, advice: Tensor) -> Tensor:
    """(1/H) Σ_h KL(p_h ‖ p): logits [N, K] of the model that learns, advice [H, N, K] of H helpers; mean over images.

    The helpers are fixed: only the learning model has a gradient. No helper, no loss.

    >>> logits = torch.tensor([[0.5, 0.5], [0.2, 0.8]]).log()
    >>> advice = torch.tensor([[[1.0, 0.0], [0.2, 0.8]]])                       # ln 2 and 0
    >>> inter_client_consistency(logits, advice), inter_client_consistency(logits, advice[:0])
    (tensor(0.3466), tensor(0.))
    """
    if not len(advice):
        return logits.new_zeros(())
    apart = F.kl_div(logits.log_softmax(dim=1).expand_as(advice), advice, reduction="none").sum(dim=2)
    return apart.mean()


def agreed_labels(votes: Tensor, classes: int, ties: Ties = "local") -> Tensor:
    """The class with most votes: int64 [V, N] → [N]. Row 0 is the local model's vote, the others the helpers'.

    Ties go to the local model's class; `lowest`: to the class with the smallest number, as in the public code.

    >>> votes = torch.tensor([[2, 2, 2], [1, 1, 2], [1, 0, 0]])
    >>> agreed_labels(votes, 3), agreed_labels(votes, 3, ties="lowest")
    (tensor([1, 2, 2]), tensor([1, 0, 2]))
    """
    ballots = F.one_hot(votes, classes).to(torch.float32)
    if ties == "local":
        ballots[0] *= 1.5  # more than any other single vote, less than two
    return ballots.sum(dim=0).argmax(dim=1)


def refreshed(memory: dict[str, Tensor], news: dict[str, Tensor], limit: int = 0) -> dict[str, Tensor]:
    """A memory with one row for each client, numbered by its tensor "client": new rows replace that client's old one.

    The latest come last, and only so many stay (0: all).

    >>> memory = {"client": torch.tensor([3, 5]), "x": torch.tensor([0.3, 0.5])}
    >>> news = {"client": torch.tensor([3, 7]), "x": torch.tensor([0.4, 0.7])}
    >>> refreshed(memory, news)
    {'client': tensor([5, 3, 7]), 'x': tensor([0.5000, 0.4000, 0.7000])}
    >>> refreshed(memory, news, limit=1), refreshed({}, news)["client"]
    ({'client': tensor([7]), 'x': tensor([0.7000])}, tensor([3, 7]))
    """
    every = {name: torch.cat([memory[name], rows]) if memory else rows for name, rows in news.items()}
    last = {client: row for row, client in enumerate(every["client"].tolist())}
    rows = sorted(last.values())[-limit if limit else 0 :]
    return {name: tensor[rows] for name, tensor in every.items()}


def helpers_of(client: int, memory: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The rows of the clients most like this one, by the memory's "output", without its "client" and "output".

    A client that is not in the memory has no helpers yet, and one that is alone in it neither.

    >>> outputs = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]])
    >>> memory = {"client": torch.tensor([5, 3, 7]), "output": outputs, "w": torch.tensor([50.0, 30.0, 70.0])}
    >>> helpers_of(5, memory, 1), helpers_of(4, memory, 1), helpers_of(4, {}, 1)
    ({'w': tensor([70.])}, {}, {})
    """
    known = memory["client"].tolist() if memory else []
    if client not in known or len(known) < 2 or not count:
        return {}
    near = nearest_rows(memory["output"], known.index(client), count)
    return {name: rows[near] for name, rows in memory.items() if name not in ("client", "output")}


class Advice(NamedTuple):
    """Which of its own model's predictions a client accepts, and what helpers say of its images."""

    accept: Callable[[Tensor], PseudoLabels]
    probs: Tensor  # [H, N, K]
    votes: Tensor  # int64 [H, N]

    def label(self, which: Tensor, own: Tensor, ties: Ties = "local") -> PseudoLabels:
        """Agreed labels for the images with these numbers; accepted where the own model [n, K] is sure enough."""
        label, sure = self.accept(own)
        votes = torch.cat([label[None], self.votes[:, which]])
        return PseudoLabels(agreed_labels(votes, own.shape[1], ties), sure)


def advice_of(helpers: Tensor, threshold: float, debiased: Callable[[Tensor], Tensor] | None = None) -> Advice:
    """Advice from the helpers' predictions [H, N, K] for all images of a client. H may be 0.

    With a function that debiases the client's own predictions everybody is debiased (FedDPL): each model's mean
    prediction is divided out before it is accepted, or votes. The helpers' probabilities stay as they are.

    >>> helper = torch.tensor([[0.9, 0.1], [0.7, 0.3]])                                     # mean 0.8 and 0.2
    >>> advice_of(helper[None], 0.5).votes, advice_of(helper[None], 0.5, lambda probs: probs).votes
    (tensor([[0, 0]]), tensor([[0, 1]]))
    """
    if debiased is None:
        return Advice(lambda probs: confident(probs, threshold), helpers, helpers.argmax(dim=2))
    fair = torch.cat([debias(probs, average_prediction(probs))[None] for probs in helpers] or [helpers])
    return Advice(lambda probs: confident(debiased(probs), threshold), helpers, fair.argmax(dim=2))
