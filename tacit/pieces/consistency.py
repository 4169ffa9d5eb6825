"""Learning from pseudo-labels: what CBAFed, DDRFed, FixMatch, FlexMatch, FreeMatch and Fed-Consist share.

A rule decides which predictions are believed. It may remember (FlexMatch: what each image was last seen as) and
add a term to the loss (FreeMatch: fairness). The batch-wise training loop is the same for all.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.pieces.debias import debias, moving_prediction
from tacit.pieces.descent import descend, live_taps_only
from tacit.pieces.label import PseudoLabels, confident
from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.threshold import (
    balanced_labels,
    dema,
    double_ema,
    dynamic_thresholds,
    flexible_thresholds,
    self_adaptive_fairness,
    self_adaptive_thresholds,
)
from tacit.pieces.train import View, batches, viewed_batches


class Rule:
    """Which predictions are believed. The simplest one remembers nothing and adds nothing to the loss."""

    def believe(self, index: Tensor, probs: Tensor) -> PseudoLabels:
        """Labels for the images with these numbers, from their class probabilities."""
        raise NotImplementedError

    def believe_pair(self, index: Tensor, shown: Tensor, learned: Tensor) -> PseudoLabels:
        """The same, for a rule that also asks what the view to be learned is seen as (PDCFed); most do not."""
        return self.believe(index, shown)

    def label_loss(self, logits: Tensor, label: Tensor, kept: Tensor) -> Tensor:
        """What is learned of the labels, from the predictions for the views that are learned."""
        return masked_cross_entropy(logits, label, kept)

    def extra_loss(self, logits: Tensor, kept: Tensor) -> Tensor | float:
        """A term of the loss beside the cross-entropy, from the predictions for the views that are learned."""
        return 0.0

    def memory(self) -> dict[str, Tensor]:
        """What must be kept for the next round."""
        return {}


@dataclass(frozen=True)
class FixedThreshold(Rule):
    """FixMatch: one threshold for all classes and all times."""

    threshold: float

    def believe(self, index: Tensor, probs: Tensor) -> PseudoLabels:
        return confident(probs, self.threshold)


@dataclass(frozen=True)
class ClassBalanced(Rule):
    """CBAFed: the server's threshold for each class, and second guesses for tail classes."""

    thresholds: Tensor  # [K]
    tail: Tensor  # bool [K]

    def believe(self, index: Tensor, probs: Tensor) -> PseudoLabels:
        return balanced_labels(probs, self.thresholds.to(probs.device), self.tail.to(probs.device))


@dataclass
class Flexible(Rule):
    """FlexMatch: a class's threshold follows how many images were ever surely seen as that class.

    The thresholds are those from before the batch; then the batch is remembered.

    >>> rule = Flexible(0.9, last_sure=torch.tensor([0, 0, 1, -1]), classes=2)      # thresholds 0.9 and 0.3
    >>> rule.believe(torch.tensor([2, 3]), torch.tensor([[0.6, 0.4], [0.05, 0.95]]))
    PseudoLabels(label=tensor([0, 1]), kept=tensor([False,  True]))
    >>> rule.last_sure
    tensor([0, 0, 1, 1])
    """

    threshold: float
    last_sure: Tensor  # int64 [N], -1: never
    classes: int

    def believe(self, index: Tensor, probs: Tensor) -> PseudoLabels:
        thresholds = flexible_thresholds(self.last_sure, self.classes, self.threshold)
        believed = confident(probs, thresholds.to(probs.device))
        label, sure = (part.cpu() for part in confident(probs, self.threshold))
        self.last_sure[index.cpu()[sure]] = label[sure]
        return believed

    def memory(self) -> dict[str, Tensor]:
        return {"last_sure": self.last_sure}


@dataclass
class SelfAdaptive(Rule):
    """FreeMatch: the threshold follows the model's own confidence, class by class, as running means (its Eq. 5 to 7).

    The batch is taken into the running means first; then they decide.

    >>> rule = SelfAdaptive(torch.tensor(0.5), torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]), 0.5, fairness=0.0)
    >>> rule.believe(torch.tensor([0, 1]), torch.tensor([[0.9, 0.1], [0.4, 0.6]]))          # 0.625 and 0.462
    PseudoLabels(label=tensor([0, 1]), kept=tensor([True, True]))
    >>> rule.confidence, rule.mean_prediction
    (tensor(0.6250), tensor([0.5750, 0.4250]))
    """

    confidence: Tensor  # [], running mean of the highest probability
    mean_prediction: Tensor  # [K], running mean of the probabilities
    histogram: Tensor  # [K], running mean of the shares of predicted classes
    decay: float
    fairness: float

    def believe(self, index: Tensor, probs: Tensor) -> PseudoLabels:
        highest, label = probs.max(dim=1)
        predicted = torch.bincount(label, minlength=probs.shape[1]) / max(len(label), 1)
        self.confidence = self.confidence.to(probs).lerp(highest.mean(), 1 - self.decay)
        self.mean_prediction = self.mean_prediction.to(probs).lerp(probs.mean(dim=0), 1 - self.decay)
        self.histogram = self.histogram.to(probs).lerp(predicted.to(probs), 1 - self.decay)
        return confident(probs, self_adaptive_thresholds(self.confidence, self.mean_prediction))

    def extra_loss(self, logits: Tensor, kept: Tensor) -> Tensor | float:
        if self.fairness == 0:
            return 0.0
        return self.fairness * self_adaptive_fairness(logits, kept, self.mean_prediction, self.histogram)

    def memory(self) -> dict[str, Tensor]:
        names = ("confidence", "mean_prediction", "histogram")
        return {name: getattr(self, name).detach().cpu().clone() for name in names}


@dataclass
class DynamicBalanced(Rule):
    """DDRFed's DCBT: the model's own confidence as DEMA, moved for each class by its share of what all clients learn.

    The batch is taken into the running means first; then they decide.

    >>> rule = DynamicBalanced(torch.tensor([0.5, 0.5]), shares=torch.tensor([0.5, 0.5]), decay=0.5)
    >>> rule.believe(torch.tensor([0, 1]), torch.tensor([[0.9, 0.1], [0.4, 0.6]]))    # DEMA 2 · 0.625 − 0.5625
    PseudoLabels(label=tensor([0, 1]), kept=tensor([False, False]))
    >>> rule.level, rule.means                                                         # and + 0.5 − 0 is too much
    (tensor(0.6875), tensor([0.6250, 0.5625]))
    """

    means: Tensor  # [2]: the running mean of the highest probability, and the running mean of that
    shares: Tensor  # [K]
    decay: float

    @property
    def level(self) -> Tensor:
        """The threshold before shares move it: []."""
        return dema(self.means[0], self.means[1], len(self.shares))

    def believe(self, index: Tensor, probs: Tensor) -> PseudoLabels:
        first, second = self.means.to(probs).unbind()
        self.means = torch.stack(double_ema(first, second, probs.max(dim=1).values.mean(), self.decay))
        return confident(probs, dynamic_thresholds(self.level, self.shares.to(probs)))

    def memory(self) -> dict[str, Tensor]:
        return {"dema": self.means.detach().cpu().clone()}


@dataclass
class Debiased(Rule):
    """Any rule, after the model's bias was divided out of the predictions (FedDB's DPL as a plug-in).

    The bias is the mean prediction on the client's images, and moves with the model that learns: each new prediction
    counts as one image of `images`. When all images are labelled at once, it is their mean (Eq. 8) and nothing else.

    >>> rule = Debiased(FixedThreshold(0.7), prior=torch.tensor([0.8, 0.2]), images=4)
    >>> rule.believe(torch.tensor([0, 1]), torch.tensor([[0.6, 0.4], [0.6, 0.4]]))    # 0.6 / 0.7 against 0.4 / 0.3
    PseudoLabels(label=tensor([1, 1]), kept=tensor([False, False]))
    >>> rule.prior
    tensor([0.7000, 0.3000])
    """

    rule: Rule
    prior: Tensor  # [K]
    images: int

    def believe(self, index: Tensor, probs: Tensor) -> PseudoLabels:
        self._follow(probs)
        return self.rule.believe(index, debias(probs, self.prior))

    def believe_pair(self, index: Tensor, shown: Tensor, learned: Tensor) -> PseudoLabels:
        self._follow(shown)
        return self.rule.believe_pair(index, debias(shown, self.prior), debias(learned, self.prior))

    def _follow(self, probs: Tensor) -> None:
        """The bias moves with the model."""
        stale = max(0.0, 1.0 - len(probs) / max(self.images, 1))
        self.prior = moving_prediction(self.prior.to(probs), probs, momentum=stale)

    def label_loss(self, logits: Tensor, label: Tensor, kept: Tensor) -> Tensor:
        return self.rule.label_loss(logits, label, kept)

    def extra_loss(self, logits: Tensor, kept: Tensor) -> Tensor | float:
        return self.rule.extra_loss(logits, kept)

    def memory(self) -> dict[str, Tensor]:
        return self.rule.memory()


class TwoViews(NamedTuple):
    """A batch of unlabelled images: their numbers, the views to be labelled, and the views to be learned."""

    which: Tensor
    shown: Tensor
    learned: Tensor


def two_view_batches(
    images: Tensor, size: int, shown: View, learned: View | None, generator: torch.Generator
) -> Iterator[TwoViews]:
    """One epoch of unlabelled batches; without a view to learn, the very view that was labelled is learned."""
    for index in batches(len(images), size, generator):
        first = shown(images[index], generator)
        yield TwoViews(index, first, first if learned is None else learned(images[index], generator))


def endless_batches(
    images: Tensor, labels: Tensor, size: int, view: View, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]] | None:
    """Labelled batches (views, labels), epoch after epoch without end; None where there are no labels."""
    if not len(labels):
        return None
    epochs = (viewed_batches(images, size, view, generator) for _ in repeat(None))
    return ((views, labels[which]) for which, views in chain.from_iterable(epochs))


def paired_batches(first: int, second: int, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch over two lists in step: the longer one once, the shorter one again and again.

    Where a list is empty, so are its batches.

    >>> [(len(a), len(b)) for a, b in paired_batches(5, 2, 2, torch.Generator().manual_seed(0))]
    [(2, 2), (3, 2)]
    >>> [(len(a), len(b)) for a, b in paired_batches(0, 2, 2, torch.Generator().manual_seed(0))]
    [(0, 2)]
    """
    shorter = min(first, second)
    nothing = torch.zeros(0, dtype=torch.int64)
    again = chain.from_iterable(batches(shorter, size, generator) if shorter else [nothing] for _ in repeat(None))
    for once in batches(max(first, second), size, generator):
        yield (once, next(again)) if first >= second else (next(again), once)


def learn_by_batch(
    model: nn.Module,
    unlabeled: Iterable[TwoViews],
    labeled: Iterator[tuple[Tensor, Tensor]] | None,
    rule: Rule,
    *,
    optimizer: torch.optim.Optimizer,
    weight: float,
    clip: float,
    tell: Callable[[Tensor, Tensor, Tensor], None],
) -> float:
    """Each step labels its own batch with the model as it is now, and learns what the rule believes.

    loss = weight · (1/B) Σ 1[kept] CE(learned view, label) + what the rule adds + CE of a labelled batch, if there
    are any. `tell` is told the labels of each batch. Returns the mean loss.
    """
    total, steps = 0.0, 0
    with live_taps_only(model, optimizer):
        for index, shown, learned in unlabeled:
            with torch.no_grad():
                probs = model(shown).softmax(dim=1)
            logits = model(learned)
            label, kept = rule.believe_pair(index, probs, logits.detach().softmax(dim=1))
            loss = weight * rule.label_loss(logits, label, kept) + rule.extra_loss(logits, kept)
            if labeled is not None:
                views, truth = next(labeled)
                loss = loss + F.cross_entropy(model(views), truth)
            descend(model, optimizer, loss, clip)
            tell(index, label, kept)
            total, steps = total + float(loss.detach()), steps + 1
    return total / max(steps, 1)
