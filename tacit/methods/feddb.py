"""FedDB: measure what a model tends to say, divide it out of pseudo-labels, weigh clients so that it cancels."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from tacit.contract.method import Count, Experiment, Method, NotNegative, Reply, Share, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.nets.optimizer import clip_gradient, give_momentum, momentum_of, trained_by
from tacit.pieces.aggregate import server_momentum
from tacit.pieces.debias import average_prediction, debias, moving_prediction
from tacit.pieces.label import confident
from tacit.pieces.loss import PLAIN, LabelLoss
from tacit.pieces.train import batches, predict

BALANCED = 1e-7  # an imbalance below this is rounding: APP-Us travel as float32
Rule = Literal["paper", "released", "exact", "none"]


@dataclass(frozen=True)
class FedDB(Method):
    """A client's average prediction on its unlabelled images (APP-U) tells its model's bias. Predictions are divided by
    it before they become pseudo-labels (DPL); the server weighs clients so that their APP-Us mix to uniform (DMA).

    A client without unlabelled images measures APP-U on its labelled ones; one that learned nothing does not count. A
    server that holds labels trains on them after each merge. With `debias` and `dma` off it is the paper's FixMatch.
    """

    threshold: Annotated[Share, "confidence that a debiased pseudo-label needs"] = 0.95
    weight: Annotated[NotNegative, "of the unlabelled loss"] = 1.0
    debias: Annotated[bool, "DPL: divide predictions by APP-U"] = True
    dma: Annotated[Literal["paper", "released", "exact", "none"], "how clients are weighed (none: all alike)"] = "paper"
    pull: Annotated[NotNegative, "dma = exact: pull towards equal weights"] = 0.0
    app_momentum: Annotated[Share, "share of the old APP-U in the moving one"] = 0.5
    app_over: Annotated[Literal["all", "kept"], "images of the moving APP-U"] = "all"
    loss_over: Annotated[Literal["all", "kept"], "images that the unlabelled loss is a mean over"] = "all"
    batch: Annotated[Count, "images a step, of each kind (0: all at once, as published)"] = 0
    batch_without_kept: Annotated[Count, "the same when no pseudo-label was kept (0: as batch)"] = 0
    chunk: Annotated[Count, "images in memory at once, same gradient (0: all; with BN always all of a step)"] = 256
    keep_momentum: Annotated[bool, "clients keep the optimiser's momentum between rounds"] = False
    server_momentum: Annotated[Share, "momentum of the global model's steps"] = 0.0
    trace: Annotated[bool, "for the record: also send the APP-U of the model as it came"] = False

    citation: ClassVar[str] = (
        "Zhu et al., Estimating before Debiasing: A Bayesian Approach to Detaching Prior Bias in Federated "
        "Semi-Supervised Learning, IJCAI 2024"
    )
    client_sends: ClassVar = {"model": "weights", "app_u": "distribution[K]", "app_u_before?": "distribution[K]"}
    client_keeps: ClassVar = {"momentum?": "weights"}
    merges_sums: ClassVar = {"model": "mean", "app_u": "mean"}
    presets: ClassVar = {
        "paper": {"train.epochs": 5, "train.weight_decay": 0.0, "train.clip": 0.0},
        "released": {
            "dma": "released",
            "app_over": "kept",
            "loss_over": "kept",
            "batch_without_kept": 64,
            "keep_momentum": True,
            "server_momentum": 0.5,
            "train.nesterov": True,
            "train.weight_decay": 5e-4,
            "train.clip": 1.0,
            "train.schedule": "cosine",
            "net.norm": "bn",
            "net.bn": "batch",
            "views.strong": "semifl-legacy",
        },
        "smoke": {
            "threshold": 0.6,
            "batch": 32,
            "chunk": 16,
            "keep_momentum": True,
            "server_momentum": 0.1,
            "train.lr": 0.1,
        },
    }

    def needs_each(self, experiment: Experiment) -> str:
        if self.dma == "none":
            return ""
        return (
            "it weighs each client by its own APP-U, and in steps of which each would need another sum (DMA); write "
            'method.dma = "none"'
        )

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        return float(reply.examples > 0)

    def most_sum_weight(self, most: float) -> float:
        return 1.0

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        model = me.model(task.weights("model"))
        labeled, unlabeled = me.shard.labeled, me.shard.unlabeled
        images = unlabeled if len(unlabeled) else labeled.images
        plain_weak = partial(me.views.weak_view, generator=me.rng("app-u views"))
        probs = self._predict(model, images, me, plain_weak)
        before = app_u = average_prediction(probs)  # Eq. 8
        if self.debias:
            probs = debias(probs, app_u)  # Eq. 14
        label, accepted = confident(probs[: len(unlabeled)], self.threshold)  # fixed for the whole round
        me.audit(torch.arange(len(unlabeled)), label, accepted)
        accepted_images, guess = unlabeled[accepted], label[accepted]
        watched = accepted_images if len(unlabeled) and self.app_over == "kept" else images

        optimizer, order = me.optimizer(model), me.rng("order")
        give_momentum(model, optimizer, weights_in(memory, "momentum") if "momentum" in memory else {})
        weak = partial(me.views.weak_view, generator=me.rng("labeled views"))
        strong = partial(me.views.strong_view, generator=me.rng("unlabeled views"))
        chunk = 0 if needs_whole_batch(model) else self.chunk
        size = self.batch if len(accepted_images) else self.batch_without_kept or self.batch
        share = 1.0 if self.loss_over == "kept" else len(accepted_images) / max(len(unlabeled), 1)
        optimizer.expect(max(me.steps(count, size or count) for count in (len(labeled), len(accepted_images))))
        losses: list[float] = []
        for _ in range(me.epochs):  # Algorithm 3, lines 11 to 16
            app_u = moving_prediction(app_u, self._predict(model, watched, me, plain_weak), self.app_momentum)
            for i, j in parallel_batches(len(labeled), len(accepted_images), size, order):
                known = cross_entropy_parts(
                    model, labeled.images[i], labeled.labels[i], weak, chunk, label_loss=me.label_loss
                )  # Eq. 2
                guessed = cross_entropy_parts(
                    model, accepted_images[j], guess[j], strong, chunk, self.weight * share
                )  # Eq. 4
                losses.append(optimizer_step_in_parts(model, optimizer, chain(known, guessed), me.train.clip))  # Eq. 6

        momentum = momentum_of(model, optimizer) if self.keep_momentum else {}
        traced = {"app_u_before": before.cpu()} if self.trace else {}
        return Reply(
            send={"model": me.weights(model), "app_u": app_u.cpu(), **traced},
            keep={"momentum": momentum} if momentum else {},
            examples=len(labeled) + len(accepted_images),
            metrics={"loss": sum(losses) / len(losses) if losses else math.nan},
        )

    def _predict(self, model: nn.Module, images: Tensor, me: Client, view: Callable[[Tensor], Tensor]) -> Tensor:
        return predict(model, images, view).reshape(len(images), me.classes)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        app_u = torch.stack([reply.tensor("app_u") for reply in replies])
        weights = torch.zeros(len(replies), dtype=torch.float64)
        trained = torch.tensor([reply.examples > 0 for reply in replies])
        if trained.any():
            weights[trained] = balancing_weights(app_u[trained], self.dma, self.pull)  # Eq. 16
            mean = hub.mean_model(weights_in(state, "model"), replies, weights.tolist())  # Eq. 17
            state = self._step(state, mean)
            equal = uniform_weights(app_u[trained])
            hub.note(imbalance=imbalance(app_u, weights), imbalance_if_equal=imbalance(app_u[trained], equal))
        hub.note(client_weights=weights, app_u=app_u)
        if self.trace:
            before = [reply.tensor("app_u_before") for reply in replies if "app_u_before" in reply.send]
            hub.note(app_u_before=torch.stack(before) if len(before) == len(replies) else math.nan)
        return {**state, "model": hub.finetune(weights_in(state, "model"))}

    def _step(self, state: Payload, mean: Weights) -> Payload:
        if self.server_momentum == 0:
            return {"model": mean}
        velocity = weights_in(state, "velocity") if "velocity" in state else {}
        model, velocity = server_momentum(weights_in(state, "model"), mean, velocity, self.server_momentum)
        return {"model": model, "velocity": velocity}


# --- A whole data set as one batch, in parts that fit into memory and give the same gradient -------------------------


def needs_whole_batch(model: nn.Module) -> bool:
    """Whether images see each other: batch norm's statistics in pieces would be others than of the whole.

    >>> needs_whole_batch(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))), needs_whole_batch(nn.GroupNorm(1, 2))
    (True, False)
    """
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def parallel_batches(first: int, second: int, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch over two sets side by side, in random order; the one with fewer batches begins again.

    Size 0: everything at once.

    >>> [(len(a), len(b)) for a, b in parallel_batches(3, 8, 0, torch.Generator())]
    [(3, 8)]
    >>> [(len(a), len(b)) for a, b in parallel_batches(3, 8, 4, torch.Generator())]
    [(3, 4), (3, 4)]
    >>> [(len(a), len(b)) for a, b in parallel_batches(3, 0, 2, torch.Generator())]
    [(3, 0)]
    >>> list(parallel_batches(0, 0, 2, torch.Generator()))
    []
    """
    nothing = [torch.zeros(0, dtype=torch.int64)]
    one, other = (list(batches(count, size or count, generator)) for count in (first, second))
    steps = max(len(one), len(other))
    one, other = one or nothing, other or nothing
    for step in range(steps):
        yield one[step % len(one)], other[step % len(other)]


def cross_entropy_parts(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    view: Callable[[Tensor], Tensor],
    chunk: int,
    scale: float = 1.0,
    label_loss: LabelLoss = PLAIN,
) -> Iterator[Tensor]:
    """scale · mean cross-entropy of all images, as terms that add up to it: `chunk` images at a time (0: all at once).

    A view that draws its chances image by image gives the same sum for every chunk. Nothing to learn, no terms.

    >>> images, labels = torch.zeros(3, 1, 1, 2), torch.tensor([0, 1, 0])       # cross-entropy of each: ln 2
    >>> terms = cross_entropy_parts(nn.Flatten(), images, labels, lambda part: part, chunk=2, scale=0.5)
    >>> [round(float(term), 4) for term in terms]                               # ½ · 2/3 ln 2, ½ · 1/3 ln 2
    [0.231, 0.1155]
    """
    if len(labels):
        for part in torch.arange(len(labels)).split(chunk or len(labels)):
            logits = model(view(images[part]))
            yield label_loss(logits, labels[part], reduction="sum") * (scale / len(labels))


def optimizer_step_in_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterable[Tensor], clip: float = 0.0
) -> float:
    """One step down the gradient of a sum of losses, each dropped before the next is made. Returns the sum.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = net.weight.data.fill_(1.0)
    >>> optimizer_step_in_parts(net, torch.optim.SGD(net.parameters(), lr=0.1), (net.weight.sum() * k for k in (1, 2)))
    3.0
    >>> round(net.weight.item(), 4)                                             # 1 − 0.1 · (1 + 2)
    0.7
    """
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for loss in losses:
        loss.backward()
        total += float(loss.detach())
    clip_gradient(trained_by(optimizer), clip)
    optimizer.step()
    return total


# --- Debiased model aggregation: weights on the simplex --------------------------------------------------------------


def balancing_weights(app_u: Tensor, rule: Rule, pull: float = 0.0) -> Tensor:
    """The weights by one of the rules; `none` weighs all clients alike, as FedDB's FixMatch does.

    >>> balancing_weights(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), "none")
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    if rule == "paper":
        return paper_weights(app_u)
    if rule == "released":
        return released_weights(app_u)
    if rule == "exact":
        return exact_weights(app_u, pull)
    return uniform_weights(app_u)


def uniform_weights(app_u: Tensor) -> Tensor:
    """1/M for each of M clients."""
    return torch.full((len(app_u),), 1.0 / len(app_u), dtype=torch.float64)


def away_from_uniform(app_u: Tensor) -> Tensor:
    """p_m − u for each client [M, K]: the mixture of these *is* the distance, because the weights sum to 1."""
    return app_u.double().cpu() - 1.0 / app_u.shape[1]


def imbalance(app_u: Tensor, weights: Tensor) -> float:
    """‖Σ β_m p_m − u‖₂: what DMA makes small (FedDB Eq. 16).

    >>> round(imbalance(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), torch.tensor([0.5, 0.5])), 6)   # ‖(0.1, −0.1)‖
    0.141421
    """
    mixture = weights.double().cpu() @ app_u.double().cpu()
    return float((mixture - 1.0 / app_u.shape[1]).norm())


def paper_weights(app_u: Tensor, steps: int = 100, rate: float = 1.0) -> Tensor:
    """FedDB Algorithm 2 to the letter: from 1/M, `steps` times β ← softmax(β − rate · ∇‖Σ β_m p_m − u‖₂).

    The softmax inside the loop draws all weights towards each other: they never get far from 1/M. Where the mixture
    is uniform the norm has no gradient, and 0 is taken.

    One step on two clients with p − u = (0.4, −0.4) and (−0.2, 0.2): the mixture is off by (0.1, −0.1), of norm
    √0.02; ∇ = (0.08, −0.04) / √0.02 = (0.5657, −0.2828); softmax(0.5 − ∇) = 1 / (1 + e^(±0.8485)).

    >>> paper_weights(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), steps=1)
    tensor([0.2997, 0.7003], dtype=torch.float64)
    """
    away, weights = away_from_uniform(app_u), uniform_weights(app_u)
    for _ in range(steps):
        off = weights @ away
        norm = off.norm()
        gradient = away @ off / norm if norm > BALANCED else torch.zeros_like(weights)
        weights = (weights - rate * gradient).softmax(dim=0)
    return weights


def released_weights(app_u: Tensor, steps: int = 100) -> Tensor:
    """DMA as the authors' code does it, which ends almost at 1/M.

    The loss is the *mean* squared error over classes, and each step has a new SGD of rate 1, Nesterov momentum .9
    and weight decay .9, whose first step is 1.9 · (gradient + 0.9 · β); then the softmax, as in the paper.

    One step on the clients of `paper_weights`: ∇ = 2/K · (0.08, −0.04) = (0.08, −0.04); β − 1.9 · (∇ + 0.45) differ by
    1.9 · 0.12 = 0.228; softmax = 1 / (1 + e^(±0.228)).

    >>> released_weights(torch.tensor([[0.9, 0.1], [0.3, 0.7]]), steps=1)
    tensor([0.4432, 0.5568], dtype=torch.float64)
    """
    away, weights = away_from_uniform(app_u), uniform_weights(app_u)
    for _ in range(steps):
        gradient = 2.0 / away.shape[1] * (away @ (weights @ away))
        weights = (weights - 1.9 * (gradient + 0.9 * weights)).softmax(dim=0)
    return weights


def to_simplex(point: Tensor) -> Tensor:
    """The point of the simplex that is nearest to a point [M]: all are lowered alike, and those below 0 are cut to 0.

    >>> to_simplex(torch.tensor([0.9, 0.5, -1.0]))                              # lowered by 0.2
    tensor([0.7000, 0.3000, 0.0000])
    """
    ordered = point.sort(descending=True).values
    lowered = (ordered.cumsum(dim=0) - 1.0) / torch.arange(1, len(point) + 1, dtype=point.dtype)
    positive = int((ordered > lowered).sum())  # the largest ones, as many as stay above 0
    return (point - lowered[positive - 1]).clamp(min=0.0)


def exact_weights(app_u: Tensor, pull: float = 0.0, tolerance: float = 1e-12, steps: int = 20_000) -> Tensor:
    """The minimiser of ½‖Σ β_m p_m − u‖² + ½ pull · ‖β − 1/M‖² on the simplex: beyond the paper.

    Projected gradient steps with momentum, which is dropped whenever it points uphill (O'Donoghue and Candès 2015).
    It stops when gradient · β − min gradient, which is never below f(β) − min f, is within the tolerance. Where many
    weights do equally well, the start at 1/M decides, so that clients with equal APP-Us weigh alike.

    >>> exact_weights(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))                   # 0.9 / 3 + 0.3 · 2/3 = 0.5
    tensor([0.3333, 0.6667], dtype=torch.float64)
    """
    away, start = away_from_uniform(app_u), uniform_weights(app_u)
    products = away @ away.T
    steepest = float(torch.linalg.eigvalsh(products)[-1]) + pull
    if steepest <= 0:
        return start  # every client is balanced already
    weights = ahead = start
    speed = 1.0
    for _ in range(steps):
        gradient = products @ weights + pull * (weights - start)
        if float(gradient @ weights - gradient.min()) <= tolerance:
            break
        slope = products @ ahead + pull * (ahead - start)
        moved = to_simplex(ahead - slope / steepest)
        if float((ahead - moved) @ (moved - weights)) > 0:
            speed = 1.0
        faster = (1.0 + (1.0 + 4.0 * speed * speed) ** 0.5) / 2.0
        ahead = moved + (speed - 1.0) / faster * (moved - weights)
        weights, speed = moved, faster
    return weights / weights.sum()
