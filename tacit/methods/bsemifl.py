"""BSemiFL: the global model and the client's own last one label together; the one closer to an image says more."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from tacit.contract.method import NotNegative, Reply, Rounds, Share, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, tensor_in, weights_in
from tacit.methods.semifl import SemiFL
from tacit.pieces.label import PseudoLabels, class_counts

Strategy = Literal["bayes", "average", "vote", "random", "global", "local"]
TINY = 1e-12


@dataclass(frozen=True)
class BSemiFL(SemiFL):
    """SemiFL with another way of labelling: each image's label is a mean of the global model's and the local one's,
    weighed by how close each model is to the image (Bayes' rule); clients count by their accepted labels.

    The local model is the one this client trained when it was last asked. It stays on the client's disk, with what
    its closeness needs. A client without one labels with the global model alone, and so do all in the warm-up.
    """

    threshold: Annotated[Share, "confidence that a pseudo-label needs"] = 0.7
    mix: Annotated[NotNegative, "weight of SemiFL's mix-up term"] = 0.0
    weigh: Annotated[Literal["alike", "accepted"], "clients in the mean: all alike, or by accepted labels"] = "accepted"
    server_momentum: Annotated[Share, "momentum of the global model's steps"] = 0.0
    strategy: Annotated[Strategy, "how the two models' predictions are joined"] = "bayes"
    warmup: Annotated[Rounds, "first rounds, in which the global model labels alone"] = 20
    local_closeness: Annotated[
        Literal["equation-13", "algorithm-1"], "f/(f + Q), or f/Q as the algorithm box prints it"
    ] = "equation-13"
    local_prior: Annotated[
        Literal["labels", "predictions"], "class prior of the local model: accepted labels, or mean prediction on them"
    ] = "labels"

    citation: ClassVar[str] = (
        "Wang et al., BSemiFL: Semi-supervised Federated Learning via a Bayesian Approach, ICML 2025"
    )
    placements: ClassVar = ("server",)  # the global model's closeness is measured on the server's labels
    server_sends: ClassVar = {"model": "weights", "sums": "[K]", "prior": "[K]"}
    client_keeps: ClassVar = {"local": "weights", "sums": "[K]", "prior": "[K]", "momentum?": "weights"}
    presets: ClassVar = {
        "paper": {"train.batch": 10, "train.epochs": 5, "train.clip": 0.0, "net.norm": "bn", "net.bn": "static"},
        "semifl-base": {
            "mix": 1.0,
            "server_momentum": 0.5,
            "train.nesterov": True,
            "train.clip": 1.0,
            "train.schedule": "cosine",
        },
        "smoke": {"threshold": 0.5, "warmup": 1, "mix": 0.5, "train.clip": 5.0, "train.lr": 0.1},
    }

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        state = super().server_start(hub, past)
        return self.server_merge(state, [], hub)  # line 2 of the algorithm: the first model, trained on the labels

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        labeled = hub.shard.labeled
        probs = hub.predict(hub.model(weights_in(state, "model")), labeled.images)
        prior = class_counts(labeled.labels, hub.classes) / max(len(labeled), 1)
        down: Payload = {"model": state["model"], "sums": probs.sum(dim=0).cpu(), "prior": prior}  # Q_s, p_s (Eq. 11)
        return [Task(client, down) for client in hub.sample_clients()]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        if not len(me.shard.unlabeled):
            return super().client_train(task, memory, me)
        model = me.model(task.weights("model"))
        found, share = self._label(model, task, memory, me)
        reply = self.learn(model, found, memory, me)
        reply.metrics["global_weight"] = float(share.mean())  # Fig. 6
        if not found.accepted.any():  # nothing was learned from these images: the old local model stays
            return reply
        probs = me.predict(model, me.shard.unlabeled[found.accepted])
        counts = class_counts(found.label[found.accepted], me.classes)
        prior = counts / counts.sum() if self.local_prior == "labels" else probs.mean(dim=0).cpu()
        local = {name: tensor.clone() for name, tensor in reply.weights("model").items()}
        keep: Payload = {"local": local, "sums": probs.sum(dim=0).cpu(), "prior": prior}  # w_m, Q_m, p_m
        return dataclasses.replace(reply, keep={**reply.keep, **keep})

    def _label(self, model: nn.Module, task: Task, memory: Payload, me: Client) -> tuple[PseudoLabels, Tensor]:
        """The pseudo-labels of this client's images, and the global model's share α in each of them."""
        images = me.shard.unlabeled
        number, every = torch.arange(len(images)), torch.ones(len(images), dtype=torch.bool)
        probs = me.predict(model, images)
        me.audit(number, probs.argmax(dim=1), every, name="global")  # Fig. 2: how good would each alone be?
        if "local" not in memory:
            return self.accept(probs), every.float()
        local = me.predict(me.model(weights_in(memory, "local")), images)
        me.audit(number, local.argmax(dim=1), every, name="local")
        if me.round < self.warmup:
            return self.accept(probs), every.float()
        with_sample = self.local_closeness == "equation-13"
        near_global = closeness(probs, task.tensor("sums"), task.tensor("prior"))
        near_local = closeness(local, tensor_in(memory, "sums"), tensor_in(memory, "prior"), with_sample)
        share = share_by_strategy(self.strategy, near_global, near_local, me.rng("shares"))  # Eq. 14
        label, accepted = self.accept(ensemble(probs, local, share))  # Eq. 15, Eq. 2
        return PseudoLabels(label, accepted & agree(probs, local) if self.strategy == "vote" else accepted), share


# --- Closeness and the ensemble of the two models --------------------------------------------------------------------


def closeness(probs: Tensor, sums: Tensor, prior: Tensor, with_sample: bool = True) -> Tensor:
    """How close a model is to each image: Σ_k prior(k) · f(k)/(f(k) + Q(k)) (BSemiFL Eq. 11–13), [N, K] → [N].

    `sums` [K] is Q: the model's predictions, summed over the data that it was trained on. Without the sample, the
    denominator is Q(k) alone, as Algorithm 1 prints it for the local model.

    >>> probs, sums, prior = torch.tensor([[0.5, 0.5]]), torch.tensor([1.5, 4.5]), torch.tensor([0.8, 0.2])
    >>> closeness(probs, sums, prior)                                        # 0.8 · 0.5/2 + 0.2 · 0.5/5
    tensor([0.2200])
    >>> closeness(probs, sums, prior, with_sample=False)                     # 0.8 · 0.5/1.5 + 0.2 · 0.5/4.5
    tensor([0.2889])
    """
    sums, prior = sums.to(probs), prior.to(probs)
    below = probs + sums if with_sample else sums.expand_as(probs)
    return (prior * probs / below.clamp(min=TINY)).sum(dim=1)


def share_by_closeness(global_closeness: Tensor, local_closeness: Tensor) -> Tensor:
    """The global model's share α of a label (BSemiFL Eq. 14); a half where neither model is close at all.

    >>> share_by_closeness(torch.tensor([0.3, 0.3, 0.0]), torch.tensor([0.1, 0.0, 0.0]))
    tensor([0.7500, 1.0000, 0.5000])
    """
    both = global_closeness + local_closeness
    return torch.where(both > 0, global_closeness / both.clamp(min=torch.finfo(both.dtype).tiny), 0.5)


def share_by_strategy(
    strategy: Strategy, global_closeness: Tensor, local_closeness: Tensor, generator: torch.Generator
) -> Tensor:
    """The global model's share of each image's label by one of the strategies that BSemiFL compares (Fig. 5a).

    >>> near, far = torch.tensor([0.3]), torch.tensor([0.1])
    >>> [share_by_strategy(s, near, far, torch.Generator()).item() for s in ("bayes", "average", "global", "local")]
    [0.75, 0.5, 1.0, 0.0]
    """
    if strategy == "bayes":
        return share_by_closeness(global_closeness, local_closeness)
    if strategy == "random":
        return torch.rand(len(global_closeness), generator=generator).to(global_closeness)
    fixed = {"average": 0.5, "vote": 0.5, "global": 1.0, "local": 0.0}
    return torch.full_like(global_closeness, fixed[strategy])


def ensemble(global_probs: Tensor, local_probs: Tensor, share: Tensor) -> Tensor:
    """α f_global + (1 − α) f_local, α for each image (BSemiFL Eq. 15).

    >>> ensemble(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), torch.tensor([0.75]))
    tensor([[0.7500, 0.2500]])
    """
    return share[:, None] * global_probs + (1.0 - share[:, None]) * local_probs


def agree(global_probs: Tensor, local_probs: Tensor) -> Tensor:
    """Where both models name the same class: `vote` labels those images only.

    >>> agree(torch.tensor([[0.9, 0.1], [0.9, 0.1]]), torch.tensor([[0.6, 0.4], [0.4, 0.6]]))
    tensor([ True, False])
    """
    return global_probs.argmax(dim=1) == local_probs.argmax(dim=1)
