"""FlexMatch inside FedAvg: FixMatch with a threshold for each class that rises as the class is learned."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from tacit.methods.fixmatch import FixMatch
from tacit.payload import Payload, tensor_in
from tacit.pieces.consistency import Flexible, Rule
from tacit.sides import Client


@dataclass(frozen=True)
class FlexMatch(FixMatch):
    """FixMatch with curriculum pseudo-labels: a class that few images were surely seen as needs less confidence.

    Each client remembers what each of its images was last seen as with confidence `threshold`, and counts. That
    memory stays with the client from round to round; nothing but the model travels.
    """

    citation: ClassVar[str] = (
        "Zhang et al., FlexMatch: Boosting Semi-Supervised Learning with Curriculum Pseudo Labeling, NeurIPS 2021"
    )
    client_keeps: ClassVar = {"last_sure?": "any"}

    def rule(self, kept: Payload, me: Client) -> Rule:
        never = torch.full((len(me.shard.unlabeled),), -1)
        last = tensor_in(kept, "last_sure").clone() if "last_sure" in kept else never
        return Flexible(self.threshold, last, me.classes)
