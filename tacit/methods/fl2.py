"""(FL)²: SemiFL for very few labels: thresholds that follow each client, and predictions that withstand a push."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.contract.method import Count, NotNegative, Positive, Reply, Rounds, Share, Stage, Task
from tacit.contract.parties import Client
from tacit.core.payload import Payload
from tacit.methods.fedavg import WarmUp
from tacit.methods.semifl import SemiFL
from tacit.nets.statistics import still_statistics
from tacit.pieces.aggregate import status_shares
from tacit.pieces.debias import average_prediction, debias
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.threshold import self_adaptive_thresholds

ETA = 0.01  # ASAM's: so that weights near zero can move, too


@dataclass(frozen=True)
class FL2(SemiFL):
    """SemiFL's skeleton without mix-up. A client's threshold is its mean confidence, lower for classes it seldom sees;
    predictions of its surest images must stay when the weights move where their loss rises most; and the less sure a
    client is, the more it counts in the mean.

    A client without unlabelled images measures its confidence on the images of its labels: ours, as are the
    placements in which clients hold labels.
    """

    threshold: Annotated[Share, "confidence of images whose predictions must withstand a push (tau_f)"] = 0.95
    adaptive: Annotated[bool, "thresholds follow the client's confidence (off: `threshold` for all labels)"] = True
    consistency: Annotated[NotNegative, "weight of the sharpness-aware consistency"] = 1.0
    radius: Annotated[Positive, "how far ASAM moves the weights (rho)"] = 0.1
    status_aware: Annotated[bool, "the less sure a client is, the more it counts (off: as `weigh` says)"] = True
    mix: Annotated[NotNegative, "weight of SemiFL's mix-up term"] = 0.0
    server_batch: Annotated[Count, "images a step on the server's labels (0: train.batch)"] = 10
    warmup: Annotated[Rounds, "rounds of training on the labels alone before"] = 0

    citation: ClassVar[str] = (
        "Lee et al., (FL)²: Overcoming Few Labels in Federated Semi-Supervised Learning, NeurIPS 2024"
    )
    client_sends: ClassVar = {"model": "weights", "status": "share"}
    merges_sums: ClassVar = {"model": "mean", "status": "mean"}
    presets: ClassVar = {
        "paper": {
            "train.batch": 32,
            "train.epochs": 5,
            "train.nesterov": True,
            "train.schedule": "cosine",
            "train.clip": 0.0,
            "net.norm": "bn",
            "net.bn": "static",
        },
        "released": {
            "warmup": 10,
            "keep_momentum": True,
            "train.clip": 1.0,
            "train.schedule": "constant",
            "views.strong": "ssl",
            "views.flip": "yes",
        },
        "smoke": {
            "threshold": 0.5,
            "warmup": 1,
            "server_momentum": 0.1,
            "keep_momentum": True,
            "train.lr": 0.1,
            "train.clip": 5.0,
            "train.schedule": "constant",
        },
    }

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", WarmUp(), self.warmup),) if self.warmup else ()

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        model = me.model(task.weights("model"))
        if not len(me.shard.unlabeled):
            status = float(learning_status(self.look(model, me.shard.labeled.images, me)))
            return with_status(super().client_train(task, memory, me), status)
        probs = self.look(model, me.shard.unlabeled, me)
        found = self.accept(probs)
        strict = found.accepted & confident(probs, self.threshold).accepted
        accepted = found.label[found.accepted], strict[found.accepted]
        push = consistency_term(model, *accepted, radius=self.radius, weight=self.consistency)
        reply = self.learn(model, found, memory, me, push if self.consistency > 0 else None)
        return with_status(reply, float(learning_status(probs)))  # τ_k, by the model as it came (Eq. 7)

    def accept(self, probs: Tensor) -> PseudoLabels:
        if not (self.adaptive and len(probs)):
            return super().accept(probs)
        fair = debias(probs, average_prediction(probs)) if self.debias else probs
        return confident(fair, self_adaptive_thresholds(learning_status(fair), average_prediction(fair)))  # Eq. 8, 9

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        if not self.status_aware:
            return super().sum_weight(reply, labeled)
        # Who is entirely sure counts a millionth, lest a sum has no weight at all where all are.
        return max(1.0 - reply.number("status"), 1e-6) if reply.examples > 0 else 0.0

    def most_sum_weight(self, most: float) -> float:
        return 1.0 if self.status_aware else super().most_sum_weight(most)

    def client_weights(self, parties: Sequence[Reply]) -> list[float]:
        if not self.status_aware:
            return super().client_weights(parties)
        return status_shares([reply.number("status") for reply in parties])  # Eq. 15


def with_status(reply: Reply, status: float) -> Reply:
    """A reply that also tells how sure the client is; the record has it, too."""
    return dataclasses.replace(
        reply, send={**reply.send, "status": status}, metrics={**reply.metrics, "status": status}
    )


def learning_status(probs: Tensor) -> Tensor:
    """A client's threshold τ_k (Eq. 7): the mean of the highest probabilities of its images: [N, K] → [].

    >>> learning_status(torch.tensor([[0.9, 0.1], [0.3, 0.7]]))
    tensor(0.8000)
    """
    return probs.max(dim=1).values.mean()


# --- Sharpness-aware consistency -------------------------------------------------------------------------------------


def asam_perturbation(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], radius: float
) -> dict[str, Tensor]:
    """The step within a ball that raises the loss most, each weight by its own scale (ASAM; (FL)² Eq. 12).

    ε = ρ · T²g / ‖Tg‖₂, the norm over all parameters together; T = |w| + 0.01, and 1 for biases. No gradient, no step.

    >>> weights = {"fc.weight": torch.tensor([0.99, -1.99]), "fc.bias": torch.tensor([5.0])}
    >>> gradients = {"fc.weight": torch.tensor([2.0, 0.0]), "fc.bias": torch.tensor([0.0])}     # Tg = 2, 0, 0
    >>> asam_perturbation(weights, gradients, radius=0.1)
    {'fc.weight': tensor([0.1000, 0.0000]), 'fc.bias': tensor([0.])}
    """
    scale = {n: torch.ones_like(w) if n.endswith("bias") else w.detach().abs() + ETA for n, w in weights.items()}
    scaled = {name: scale[name] * gradients[name] for name in weights}
    norm = torch.stack([part.norm() for part in scaled.values()]).norm()
    if norm == 0:
        return {name: torch.zeros_like(part) for name, part in scaled.items()}
    return {name: scale[name] * part * (radius / norm) for name, part in scaled.items()}


def masked_divergence(target: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
    """(1/N) Σ 1[chosen] KL(target ‖ softmax(logits)): the mean over *all* N samples ((FL)² Eq. 13).

    >>> target = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0986]])                      # ½ and ½; ¼ and ¾
    >>> masked_divergence(target, logits, torch.tensor([True, True]))           # (0 + ½ ln 2 + ½ ln ⅔)/2
    tensor(0.0719)
    """
    each = F.kl_div(logits.log_softmax(dim=1), target, reduction="none").sum(dim=1)
    return (each * chosen).sum() / max(len(logits), 1)


def sharpness_consistency(
    model: nn.Module, views: Tensor, logits: Tensor, label: Tensor, strict: Tensor, radius: float
) -> Tensor:
    """How much the predictions of surely labelled views change at the perturbed weights ((FL)² Eq. 11 to 13).

    `logits` are the model's for these views, with their graph: the perturbation raises the loss of the strict ones.
    The net is then run *with* the perturbed weights, w + ε with a constant ε, but never set to them: the gradient of
    the result reaches w as at w + ε, and there is nothing to undo. BN's running statistics stay, too.
    """
    if not bool(strict.any()):
        return logits.new_zeros(())
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    loss = masked_cross_entropy(logits, label, strict)
    slopes = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
    step = asam_perturbation(weights, dict(zip(weights, slopes, strict=True)), radius)
    with still_statistics(model):
        moved = torch.func.functional_call(model, {name: w + step[name] for name, w in weights.items()}, (views,))
    return masked_divergence(logits.detach().softmax(dim=1), moved, strict)


def consistency_term(
    model: nn.Module, label: Tensor, strict: Tensor, radius: float, weight: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The term for a training loop: from (which images, their strong views, the logits of these) to a loss."""

    def term(which: Tensor, views: Tensor, logits: Tensor) -> Tensor:
        return weight * sharpness_consistency(model, views, logits, label[which], strict[which], radius)

    return term
