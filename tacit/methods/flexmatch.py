"""FlexMatch inside FedAvg: FixMatch with a threshold for each class that rises as the class is learned."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tacit.contract.parties import Client
from tacit.core.payload import Payload, Weights, tensor_in
from tacit.methods.fixmatch import FixMatch
from tacit.pieces.label import PseudoLabels, confident


@dataclass(frozen=True)
class FlexMatch(FixMatch):
    """FixMatch with curriculum pseudo-labels: a class that few images were surely seen as needs less confidence.

    Each client remembers what each of its images was last seen as with confidence `threshold`, and counts. That
    memory stays with the client from round to round; nothing but the model travels.

    >>> memory = {"last_sure": torch.tensor([0, 0, 1, -1])}                             # thresholds 0.9 and 0.3
    >>> probs = torch.tensor([[0.6, 0.4], [0.05, 0.95]])
    >>> FlexMatch(threshold=0.9).accept(torch.tensor([2, 3]), probs, memory)
    PseudoLabels(label=tensor([0, 1]), accepted=tensor([False,  True]))
    >>> memory["last_sure"]
    tensor([0, 0, 1, 1])
    """

    citation: ClassVar[str] = (
        "Zhang et al., FlexMatch: Boosting Semi-Supervised Learning with Curriculum Pseudo Labeling, NeurIPS 2021"
    )
    client_keeps: ClassVar = {"last_sure?": "any"}

    def recall(self, memory: Payload, me: Client) -> Weights:
        never = torch.full((len(me.whole.unlabeled),), -1)
        return {"last_sure": tensor_in(memory, "last_sure").clone() if "last_sure" in memory else never}

    def accept(self, index: Tensor, probs: Tensor, statistics: Weights) -> PseudoLabels:
        """By the thresholds from before this batch; then the batch is remembered."""
        last_sure = statistics["last_sure"]
        thresholds = flexible_thresholds(last_sure, probs.shape[1], self.threshold)
        accepted = confident(probs, thresholds.to(probs.device))
        label, sure = (part.cpu() for part in confident(probs, self.threshold))
        last_sure[index.cpu()[sure]] = label[sure]
        return accepted


def flexible_thresholds(last_sure: Tensor, classes: int, threshold: float) -> Tensor:
    """The thresholds by class from what each image was last surely seen as (−1: never): [N] → [K].

    threshold · b/(2 − b), where b is the class's count over the largest of all counts, that of −1 included: until
    most images have been learned, the threshold of every class is low.

    >>> flexible_thresholds(torch.tensor([0, 0, 1, -1]), classes=3, threshold=0.9)      # b: 1, 1/2, 0
    tensor([0.9000, 0.3000, 0.0000])
    >>> flexible_thresholds(torch.tensor([0, -1, -1, -1]), classes=2, threshold=0.9)    # b: 1/3, 0
    tensor([0.1800, 0.0000])
    """
    counts = torch.bincount(last_sure + 1, minlength=classes + 1).float()
    learned = counts[1:] / counts.max().clamp(min=1.0)
    return threshold * learned / (2.0 - learned)
