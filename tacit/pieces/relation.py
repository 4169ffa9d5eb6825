"""FedIRM's relation between classes: what a model makes of each class's images on average, as a K×K matrix.

Row c is a distribution over the classes. A class of which nothing is known has a row of zeros, in every function here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.pieces.consistency import two_view_batches
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.train import View


def relation_matrix(logits: Tensor, label: Tensor, temperature: float, kept: Tensor | None = None) -> Tensor:
    """Row c: softmax of (the mean logits of class c's images) / T: [N, K], [N] → [K, K].

    `kept` says which images count; a class without any has a row of zeros (not the even row that zero logits give).

    >>> logits = torch.tensor([[4.0, 0.0, 0.0], [2.0, 2.0, 0.0], [0.0, 9.0, 0.0]])
    >>> relation_matrix(logits, torch.tensor([0, 0, 1]), 1.0, torch.tensor([True, True, False]))  # softmax of 3, 1, 0
    tensor([[0.8438, 0.1142, 0.0420],
            [0.0000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    member = F.one_hot(label, logits.shape[1]).to(logits)
    if kept is not None:
        member = member * kept[:, None]
    count = member.sum(dim=0)
    means = member.T @ logits / count.clamp(min=1.0)[:, None]
    return (means / temperature).softmax(dim=1) * (count > 0)[:, None]


def known_rows(relation: Tensor) -> Tensor:
    """Which classes a relation matrix tells about: [..., K, K] → bool [..., K].

    >>> known_rows(torch.tensor([[0.9, 0.1], [0.0, 0.0]]))
    tensor([ True, False])
    """
    return relation.sum(dim=-1) > 0


def mean_relation(relations: Sequence[Tensor], classes: int) -> Tensor:
    """The mean of relation matrices, row by row over those that know the class; unknown to all: zeros.

    >>> one, two = torch.tensor([[0.8, 0.2], [0.0, 0.0]]), torch.tensor([[0.6, 0.4], [0.1, 0.9]])
    >>> mean_relation([one, two], 2)
    tensor([[0.7000, 0.3000],
            [0.1000, 0.9000]])
    >>> mean_relation([], 2)
    tensor([[0., 0.],
            [0., 0.]])
    """
    if not relations:
        return torch.zeros(classes, classes)
    every = torch.stack(list(relations))
    return every.sum(dim=0) / known_rows(every).sum(dim=0).clamp(min=1)[:, None]


def relation_loss(local: Tensor, target: Tensor) -> Tensor:
    """L_IRM = (1/K) Σ_c [KL(target_c ‖ local_c) + KL(local_c ‖ target_c)], over the classes that both know.

    Both divergences together are Σ (a − b)(ln a − ln b).

    >>> local, target = torch.tensor([[0.5, 0.5], [0.0, 0.0]]), torch.tensor([[0.75, 0.25], [0.1, 0.9]])
    >>> relation_loss(local, target)                                            # ½ · ¼ ln 3
    tensor(0.1373)
    """
    both = known_rows(local) & known_rows(target)
    a, b = local[both].clamp(min=1e-12), target[both].clamp(min=1e-12)
    return ((a - b) * (a.log() - b.log())).sum() / len(local)


@torch.no_grad()
def dropout_entropy(features: Tensor, head: nn.Module, rate: float, passes: int, generator: torch.Generator) -> Tensor:
    """How unsure a model is of each image: −Σ p̄ ln p̄, p̄ the mean prediction over passes with dropout: [N, D] → [N].

    Dropout acts on what the head is given, so only the head is computed several times. From 0 to ln K.

    >>> head = nn.Linear(2, 2, bias=False)
    >>> _ = head.weight.data.copy_(torch.eye(2))
    >>> features = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])               # predictions ½ : ½ and ¾ : ¼
    >>> dropout_entropy(features, head, 0.0, 3, torch.Generator())
    tensor([0.6931, 0.5623])
    """
    total = torch.zeros(())
    for _ in range(passes):
        chance = torch.rand(features.shape, generator=generator).to(features.device)
        thinned = features * (chance >= rate) / max(1.0 - rate, 1e-12)
        total = total.to(features.device) + head(thinned).softmax(dim=1)
    mean = total / passes
    return -(mean * mean.clamp(min=1e-12).log()).sum(dim=1)


def entropy_limit(classes: int, share: float, nats: float = 0.0) -> float:
    """The entropy below which a prediction is believed: a share of ln K, the most there can be; or nats, if given.

    FedIRM's code has 2 nats for K = 5 classes: more than ln 5 = 1.61, so that nothing was ever rejected.

    >>> round(entropy_limit(5, 0.75), 4), round(entropy_limit(10, 0.75), 4), entropy_limit(5, 0.75, nats=2.0)
    (1.2071, 1.7269, 2.0)
    """
    return nats if nats > 0 else share * math.log(classes)


def reliable(probs: Tensor, entropy: Tensor, confidence: float, limit: float) -> PseudoLabels:
    """The likeliest class, believed where its probability reaches `confidence` and the entropy is *below* `limit`.

    >>> probs = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4]])
    >>> reliable(probs, torch.tensor([0.3, 0.6, 0.3]), confidence=0.7, limit=0.5)
    PseudoLabels(label=tensor([0, 0, 0]), kept=tensor([ True, False, False]))
    """
    label, sure = confident(probs, confidence)
    return PseudoLabels(label, sure & (entropy < limit))


def two_view_loss(first: Tensor, second: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The sum of the cross-entropies of two views' logits, with smoothed labels.

    >>> even = torch.zeros(3, 2)                                                # ln 2 each
    >>> two_view_loss(even, even, torch.tensor([0, 1, 1]), 0.1)
    tensor(1.3863)
    """
    one, other = (F.cross_entropy(logits, labels, label_smoothing=smoothing) for logits in (first, second))
    return one + other


@dataclass
class RelatedLabels:
    """What a party learns from its labels, batch by batch, and the relation of the classes that shows on the way."""

    images: Tensor
    labels: Tensor
    batch: int
    view: View
    generator: torch.Generator
    temperature: float
    smoothing: float
    seen: list[Tensor] = field(default_factory=list)  # a relation matrix for each batch so far

    def losses(self, model: nn.Module, epochs: int | None = None) -> Iterator[Tensor]:
        """The loss of one batch after the other, on two views of the same images; by default without end."""
        for _ in repeat(None) if epochs is None else range(epochs):
            for which, one, other in two_view_batches(self.images, self.batch, self.view, self.view, self.generator):
                labels, logits = self.labels[which], model(one)
                self.seen.append(relation_matrix(logits.detach(), labels, self.temperature))
                yield two_view_loss(logits, model(other), labels, self.smoothing)

    def relation(self, classes: int) -> Tensor:
        """The mean over all batches seen; zeros for classes of which this party has no label."""
        return mean_relation(self.seen, classes).cpu()
