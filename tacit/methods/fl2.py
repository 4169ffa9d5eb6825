"""(FL)²: SemiFL for very few labels: thresholds that follow each client, and predictions that withstand a push."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from tacit.method import Count, NotNegative, Positive, Reply, Share, Stage, Task
from tacit.methods.fixmatch import WarmUp
from tacit.methods.semifl import SemiFL
from tacit.payload import Payload
from tacit.pieces.aggregate import status_shares
from tacit.pieces.debias import average_prediction, debias
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.sharpness import consistency_term
from tacit.pieces.threshold import learning_status, self_adaptive_thresholds
from tacit.sides import Client


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
    warmup: Annotated[Count, "rounds of training on the labels alone before"] = 0

    citation: ClassVar[str] = (
        "Lee et al., (FL)²: Overcoming Few Labels in Federated Semi-Supervised Learning, NeurIPS 2024"
    )
    client_sends: ClassVar = {"model": "weights", "status": "share"}
    presets: ClassVar = {
        "paper": {"train.batch": 32, "train.epochs": 5, "train.nesterov": True, "train.schedule": "cosine"}
        | {"train.clip": 0.0, "net.norm": "bn", "net.bn": "static"},
        "released": {"warmup": 10, "keep_momentum": True, "train.clip": 1.0, "train.schedule": "constant"}
        | {"views.strong": "ssl", "views.flip": "yes"},
        "smoke": {"threshold": 0.5, "warmup": 1, "server_momentum": 0.1, "keep_momentum": True, "train.lr": 0.1}
        | {"train.clip": 5.0, "train.schedule": "constant"},
    }

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", WarmUp(), self.warmup),) if self.warmup else ()

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        model = me.model(task.weights("model"))
        if not len(me.shard.unlabeled):
            status = float(learning_status(self.look(model, me.shard.labeled.images, me)))
            return with_status(super().client_train(task, kept, me), status)
        probs = self.look(model, me.shard.unlabeled, me)
        found = self.believe(probs)
        strict = found.kept & confident(probs, self.threshold).kept
        accepted = found.label[found.kept], strict[found.kept]
        push = consistency_term(model, *accepted, radius=self.radius, weight=self.consistency)
        reply = self.learn(model, found, kept, me, push if self.consistency > 0 else None)
        return with_status(reply, float(learning_status(probs)))  # τ_k, by the model as it came (Eq. 7)

    def believe(self, probs: Tensor) -> PseudoLabels:
        if not (self.adaptive and len(probs)):
            return super().believe(probs)
        fair = debias(probs, average_prediction(probs)) if self.debias else probs
        return confident(fair, self_adaptive_thresholds(learning_status(fair), average_prediction(fair)))  # Eq. 8, 9

    def client_weights(self, parties: Sequence[Reply]) -> list[float]:
        if not self.status_aware:
            return super().client_weights(parties)
        return status_shares([reply.number("status") for reply in parties])  # Eq. 15


def with_status(reply: Reply, status: float) -> Reply:
    """A reply that also tells how sure the client is; the record has it, too."""
    return dataclasses.replace(
        reply, send={**reply.send, "status": status}, metrics={**reply.metrics, "status": status}
    )
