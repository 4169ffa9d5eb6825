"""FreeMatch inside FedAvg: FixMatch with thresholds that follow the model's own confidence."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from tacit.method import NotNegative, Share
from tacit.methods.fixmatch import FixMatch
from tacit.payload import Payload, tensor_in
from tacit.pieces.consistency import Rule, SelfAdaptive
from tacit.sides import Client


@dataclass(frozen=True)
class FreeMatch(FixMatch):
    """FixMatch with self-adaptive thresholds and fairness: the bar is the model's usual confidence, class by class.

    Each client follows its own model: running means of the highest probability, of the mean prediction and of the
    predicted classes, from 1/K on. They stay with the client from round to round. There is no fixed threshold, so
    `threshold` is without effect.
    """

    decay: Annotated[Share, "of the running means, by batch"] = 0.999
    fairness: Annotated[NotNegative, "weight of the fairness term"] = 0.001

    citation: ClassVar[str] = (
        "Wang et al., FreeMatch: Self-adaptive Thresholding for Semi-supervised Learning, ICLR 2023"
    )
    client_keeps: ClassVar = {"confidence?": "any", "mean_prediction?": "[K]", "histogram?": "[K]"}
    presets: ClassVar = {"paper": {}, "smoke": {"warmup": 1, "decay": 0.8, "train.lr": 0.1}}

    def rule(self, kept: Payload, me: Client) -> Rule:
        even = torch.full((me.classes,), 1.0 / me.classes)
        means: Payload = {"confidence": even.mean(), "mean_prediction": even, "histogram": even, **kept}
        return SelfAdaptive(
            confidence=tensor_in(means, "confidence"),
            mean_prediction=tensor_in(means, "mean_prediction"),
            histogram=tensor_in(means, "histogram"),
            decay=self.decay,
            fairness=self.fairness,
        )
