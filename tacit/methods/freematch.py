"""FreeMatch inside FedAvg: FixMatch with thresholds that follow the model's own confidence."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from tacit.contract.method import NotNegative, Share
from tacit.contract.parties import Client
from tacit.core.payload import Payload, Weights, tensor_in
from tacit.methods.fixmatch import FixMatch
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.threshold import self_adaptive_thresholds


@dataclass(frozen=True)
class FreeMatch(FixMatch):
    """FixMatch with self-adaptive thresholds and fairness: the bar is the model's usual confidence, class by class.

    Each client follows its own model: running means of the highest probability, of the mean prediction and of the
    predicted classes, from 1/K on. They stay with the client from round to round. There is no fixed threshold, so
    `threshold` is without effect.

    >>> even = torch.tensor([0.5, 0.5])
    >>> memory = {"confidence": torch.tensor(0.5), "mean_prediction": even, "histogram": even}
    >>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
    >>> FreeMatch(decay=0.5).accept(torch.tensor([0, 1]), probs, memory)                # 0.625 and 0.462
    PseudoLabels(label=tensor([0, 1]), accepted=tensor([True, True]))
    >>> memory["confidence"], memory["mean_prediction"]
    (tensor(0.6250), tensor([0.5750, 0.4250]))
    """

    decay: Annotated[Share, "of the running means, by batch"] = 0.999
    fairness: Annotated[NotNegative, "weight of the fairness term"] = 0.001

    citation: ClassVar[str] = (
        "Wang et al., FreeMatch: Self-adaptive Thresholding for Semi-supervised Learning, ICLR 2023"
    )
    client_keeps: ClassVar = {"confidence?": "any", "mean_prediction?": "[K]", "histogram?": "[K]"}
    presets: ClassVar = {"paper": {}, "smoke": {"warmup": 1, "decay": 0.8, "train.lr": 0.1}}

    def recall(self, memory: Payload, me: Client) -> Weights:
        even = torch.full((me.classes,), 1.0 / me.classes)
        start: Payload = {"confidence": even.mean(), "mean_prediction": even, "histogram": even, **memory}
        return {name: tensor_in(start, name) for name in ("confidence", "mean_prediction", "histogram")}

    def accept(self, index: Tensor, probs: Tensor, statistics: Weights) -> PseudoLabels:
        """The batch is taken into the running means first (Eq. 5, 6); then they decide (Eq. 7)."""
        highest, label = probs.max(dim=1)
        predicted = torch.bincount(label, minlength=probs.shape[1]) / max(len(label), 1)
        news = {"confidence": highest.mean(), "mean_prediction": probs.mean(dim=0), "histogram": predicted.to(probs)}
        statistics.update(
            {name: statistics[name].to(probs).lerp(value, 1 - self.decay) for name, value in news.items()}
        )
        return confident(probs, self_adaptive_thresholds(statistics["confidence"], statistics["mean_prediction"]))

    def extra_loss(self, logits: Tensor, accepted: Tensor, statistics: Weights) -> Tensor | float:
        if self.fairness == 0:
            return 0.0
        fairness = self_adaptive_fairness(logits, accepted, statistics["mean_prediction"], statistics["histogram"])
        return self.fairness * fairness


def self_adaptive_fairness(logits: Tensor, accepted: Tensor, mean_prediction: Tensor, histogram: Tensor) -> Tensor:
    """Self-adaptive fairness: Σ_c a(c) · log b(c), to be minimised; 0 where nothing is accepted.

    a is the running mean prediction over the running histogram of predicted classes; b the same of the accepted strong
    views in this batch; both normalised to sum to 1, and 0 for a class that was never predicted. Both even: it is
    log(1/K). (−Σ a log b is their cross-entropy; the paper and its released code subtract it.)

    >>> even, logits = torch.tensor([0.5, 0.5]), torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    >>> self_adaptive_fairness(logits, torch.tensor([True, True]), even, even)          # log(1/2)
    tensor(-0.6931)
    >>> self_adaptive_fairness(logits, torch.tensor([False, False]), even, even)
    tensor(0.)
    """
    if not bool(accepted.any()):
        return logits.new_zeros(())
    probs = logits[accepted].softmax(dim=1)
    predicted = torch.bincount(probs.argmax(dim=1), minlength=probs.shape[1]) / len(probs)
    target = _over(mean_prediction, histogram)
    here = _over(probs.mean(dim=0), predicted)
    return (target * (here + 1e-12).log()).sum()


def _over(mean: Tensor, histogram: Tensor) -> Tensor:
    """mean / histogram, 0 where the histogram is 0, normalised to sum to 1."""
    ratio = torch.where(histogram > 0, mean / histogram.clamp(min=1e-12), torch.zeros_like(mean))
    return ratio / ratio.sum()
