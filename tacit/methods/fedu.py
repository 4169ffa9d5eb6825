"""FedU: features are learned without labels, by BYOL at all clients; the predictor comes along if models are close."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from tacit.contract.method import Method, NotNegative
from tacit.contract.parties import Client
from tacit.core.payload import Payload
from tacit.methods._byol import Byol, ByolStage, Online, Start
from tacit.methods._self_supervised import SelfSupervised, options_for
from tacit.pieces.siamese import divergence


@dataclass(frozen=True)
class FedU(Byol, SelfSupervised):
    """First, without labels: clients learn features by BYOL; the server averages the online nets. Then every party
    that holds labels trains a classifier on these features, the head alone or the whole net.

    A client always goes on from the server's encoder. It takes the server's predictor over only where the server's
    encoder is close to its own last one (the divergence-aware predictor update); its target stays its own.
    """

    threshold: Annotated[NotNegative, "the predictor is taken over where encoders are less apart than this (μ)"] = 0.4

    citation: ClassVar[str] = (
        "Zhuang et al., Collaborative Unsupervised Visual Representation Learning from Decentralized Data, ICCV 2021"
    )
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
        "smoke": {"hidden": 32, "projection": 16, "feature_rounds": 2, "train.lr": 0.1},
    }

    def features(self) -> Method:
        return FedUFeatures(**options_for(FedUFeatures, self))


@dataclass(frozen=True)
class FedUFeatures(ByolStage):
    """FedU's stage without labels."""

    threshold: float = 0.4

    def begin(self, came: Online, own: Online, memory: Payload, me: Client) -> Start:
        apart = divergence(own.model, came.model)
        close = apart < self.threshold
        online = Online(came.model, came.projector, came.predictor if close else own.predictor)
        return Start(online, figures={"divergence": apart, "predictor_taken_over": float(close)})
