"""FedDB: measure what a model tends to say, divide it out of pseudo-labels, weigh clients so that it cancels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from tacit.method import Count, Method, NotNegative, Reply, Share, Task, mean_model
from tacit.payload import Payload, Weights, weights_in
from tacit.pieces.aggregate import server_momentum
from tacit.pieces.debias import average_prediction, debias, moving_prediction
from tacit.pieces.descent import give_momentum, momentum_of
from tacit.pieces.full_batch import cross_entropy_parts, descend_in_parts, needs_whole_batch, paired_batches
from tacit.pieces.label import confident
from tacit.pieces.simplex import balancing_weights, imbalance, uniform_weights
from tacit.pieces.train import predict
from tacit.sides import Client, Hub


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

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        model = me.model(task.weights("model"))
        labeled, unlabeled = me.shard.labeled, me.shard.unlabeled
        images = unlabeled if len(unlabeled) else labeled.images
        plain_weak = partial(me.views.weak_view, generator=me.rng("app-u views"))
        probs = self._predict(model, images, me, plain_weak)
        before = app_u = average_prediction(probs)  # Eq. 8
        if self.debias:
            probs = debias(probs, app_u)  # Eq. 14
        label, sure = confident(probs[: len(unlabeled)], self.threshold)  # fixed for the whole round
        me.audit(torch.arange(len(unlabeled)), label, sure)
        believed, guess = unlabeled[sure], label[sure]
        watched = believed if len(unlabeled) and self.app_over == "kept" else images

        optimizer, order = me.optimizer(model), me.rng("order")
        give_momentum(model, optimizer, weights_in(kept, "momentum") if "momentum" in kept else {})
        weak = partial(me.views.weak_view, generator=me.rng("labeled views"))
        strong = partial(me.views.strong_view, generator=me.rng("unlabeled views"))
        chunk = 0 if needs_whole_batch(model) else self.chunk
        size = self.batch if len(believed) else self.batch_without_kept or self.batch
        share = 1.0 if self.loss_over == "kept" else len(believed) / max(len(unlabeled), 1)
        losses: list[float] = []
        for _ in range(me.epochs):  # Algorithm 3, lines 11 to 16
            app_u = moving_prediction(app_u, self._predict(model, watched, me, plain_weak), self.app_momentum)
            for i, j in paired_batches(len(labeled), len(believed), size, order):
                known = cross_entropy_parts(model, labeled.images[i], labeled.labels[i], weak, chunk)  # Eq. 2
                guessed = cross_entropy_parts(model, believed[j], guess[j], strong, chunk, self.weight * share)  # Eq. 4
                losses.append(descend_in_parts(model, optimizer, chain(known, guessed), me.train.clip))  # Eq. 6

        momentum = momentum_of(model, optimizer) if self.keep_momentum else {}
        traced = {"app_u_before": before.cpu()} if self.trace else {}
        return Reply(
            send={"model": me.weights(model), "app_u": app_u.cpu(), **traced},
            keep={"momentum": momentum} if momentum else {},
            examples=len(labeled) + len(believed),
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
            state = self._step(state, mean_model(replies, weights.tolist()))  # Eq. 17
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
