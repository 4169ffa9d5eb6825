"""FedEMA: features are learned without labels, by BYOL; clients mix the server's model with their own by divergence."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from tacit.contract.method import Method, Reply, Share, Task
from tacit.contract.parties import Client
from tacit.core.payload import Payload, number_in
from tacit.methods._byol import Byol, ByolStage, Online, Start
from tacit.methods._self_supervised import SelfSupervised, options_for
from tacit.pieces.aggregate import residual
from tacit.pieces.siamese import divergence

TINY = 1e-12


@dataclass(frozen=True)
class FedEMA(Byol, SelfSupervised):
    """First, without labels: clients learn features by BYOL; the server averages the online nets. Then every party
    that holds labels trains a classifier on these features, the head alone or the whole net.

    A client goes on from a mean of the server's online net and its own last one. The farther they are apart, the more
    it keeps of its own: it scales this by itself, so that its own share is `tau` the first time.
    """

    tau: Annotated[Share, "a client's own share when it mixes for the first time (τ)"] = 0.7
    absent: Annotated[
        Literal["mix", "global"], "a client that was not asked in the round before mixes too, or begins anew"
    ] = "mix"

    citation: ClassVar[str] = "Zhuang et al., Divergence-aware Federated Self-Supervised Learning, ICLR 2022"
    presets: ClassVar = {
        "paper": {
            "hidden": 4096,
            "projection": 2048,
            "net.name": "resnet18",
            "net.norm": "bn",
            "train.batch": 128,
            "train.epochs": 5,
            "train.lr": 0.032,
            "train.schedule": "cosine",
        },
        "smoke": {"hidden": 32, "projection": 16, "feature_rounds": 3, "train.lr": 0.1},
    }

    def features(self) -> Method:
        return FedEMAFeatures(**options_for(FedEMAFeatures, self))


@dataclass(frozen=True)
class FedEMAFeatures(ByolStage):
    """FedEMA's stage without labels."""

    tau: float = 0.7
    absent: Literal["mix", "global"] = "mix"

    client_keeps: ClassVar = {**ByolStage.client_keeps, "scaler?": "number", "asked": "number"}

    def begins_anew(self, memory: Payload, me: Client) -> bool:
        if "online" not in memory:
            return True
        return self.absent == "global" and number_in(memory, "asked") < me.round - 1

    def begin(self, came: Online, own: Online, memory: Payload, me: Client) -> Start:
        apart = divergence(own.model, came.model)
        scaler = number_in(memory, "scaler") if "scaler" in memory else autoscaler(self.tau, apart)
        share = own_share(scaler, apart)
        online = Online(*(residual(mine, theirs, share) for mine, theirs in zip(own, came, strict=True)))
        return Start(online, {"scaler": scaler}, {"divergence": apart, "own_share": share})

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        reply = super().client_train(task, memory, me)
        return dataclasses.replace(reply, keep={**reply.keep, "asked": me.round})


# --- How much a client keeps of its own ------------------------------------------------------------------------------


def autoscaler(tau: float, apart: float) -> float:
    """λ = τ / ‖W_global − W_own‖, fixed by each client when both models are there for the first time.

    >>> autoscaler(0.7, 2.0)
    0.35
    """
    return tau / max(apart, TINY)


def own_share(scaler: float, apart: float) -> float:
    """μ = min(λ ‖W_global − W_own‖, 1): W ← μ W_own + (1 − μ) W_global, for encoder, projector and predictor alike.

    >>> own_share(0.35, 2.0), own_share(0.35, 1.0), own_share(0.35, 4.0)      # as far as then, half as far, twice
    (0.7, 0.35, 1.0)
    """
    return min(scaler * apart, 1.0)
