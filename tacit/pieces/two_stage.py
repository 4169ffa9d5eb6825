"""PDCFed's two-stage selection: what the weak view is sure of, and what the strong view does not contradict.

The paper's text was not at hand: the formulas are those of the authors' public code, so they carry no equation number.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tacit.pieces.consistency import Rule
from tacit.pieces.label import PseudoLabels
from tacit.pieces.loss import masked_cross_entropy

PEAK, LEFT, RIGHT = 0.999, 4.0, 9.0  # of the Gaussian: its height; by how much each side is narrower than the variance
TINY = 1e-12


def rising_share(weak: Tensor, strong: Tensor) -> Tensor:
    """The share of classes that become likelier from the weak to the strong view: [N, K], [N, K] → [N].

    >>> rising_share(torch.tensor([[0.7, 0.2, 0.1, 0.0]]), torch.tensor([[0.4, 0.3, 0.1, 0.2]]))    # two of four
    tensor([0.5000])
    """
    return (strong > weak).to(weak).mean(dim=1)


def usualness(rising: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """How usual a rising share is: a Gaussian around the usual one, steeper above it than below: [N] → [N].

    0.999 · exp(−(f − mean)² / (2 · variance / d)), d = 4 up to the mean and 9 above it.

    >>> usualness(torch.tensor([0.3, 0.5, 0.7]), torch.tensor(0.5), torch.tensor(0.04))     # exp(−2), 1, exp(−4.5)
    tensor([0.1352, 0.9990, 0.0111])
    """
    narrower = torch.where(rising <= mean, LEFT, RIGHT)
    return PEAK * torch.exp(-(rising - mean).square() * narrower / (2.0 * variance.clamp(min=TINY)))


def agreement(weak: Tensor, strong: Tensor, usual: Tensor) -> Tensor:
    """How well two views' predictions agree: exp(−‖p_weak − p_strong‖₂ / usualness), between 0 and 1: → [N].

    >>> weak, strong = torch.tensor([[0.7, 0.3], [0.9, 0.1]]), torch.tensor([[0.7, 0.3], [0.6, 0.5]])
    >>> agreement(weak, strong, torch.tensor([0.5, 0.5]))                                   # exp(0), exp(−0.5/0.5)
    tensor([1.0000, 0.3679])
    """
    return torch.exp(-(weak - strong).norm(dim=1) / usual.clamp(min=TINY))


def two_stage_labels(weak: Tensor, agreeing: Tensor, upper: float, lower: float) -> PseudoLabels:
    """The weak view's class: believed from `upper` on; strictly between `lower` and `upper` where the views agree.

    >>> weak = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.3, 0.7], [0.6, 0.4]])
    >>> two_stage_labels(weak, torch.tensor([False, True, False, True]), upper=0.8, lower=0.6)
    PseudoLabels(label=tensor([0, 0, 1, 0]), kept=tensor([ True,  True, False, False]))
    """
    highest, label = weak.max(dim=1)
    return PseudoLabels(label, (highest >= upper) | ((highest > lower) & agreeing))


def masked_entropy(logits: Tensor, chosen: Tensor, temperature: float) -> Tensor:
    """(1/N) Σ 1[chosen] H(softmax(logits / temperature)): the mean over *all* N samples, as the pseudo-label loss.

    >>> logits = torch.zeros(4, 2)                                                          # H of each sample: ln 2
    >>> masked_entropy(logits, torch.tensor([True, False, False, False]), temperature=0.9)
    tensor(0.1733)
    """
    log_probs = (logits / temperature).log_softmax(dim=1)
    entropy = -(log_probs.exp() * log_probs).sum(dim=1)
    return (entropy * chosen).sum() / max(len(logits), 1)


@dataclass
class TwoStage(Rule):
    """PDCFed: sure on the weak view, or fairly sure and in agreement with the strong view.

    The batch's rising shares are taken into the running mean and variance first; then these decide.

    >>> rule = TwoStage(torch.tensor(0.5), torch.tensor(1.0), 0.5, upper=0.8, lower=0.5, least=0.6)
    >>> weak = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    >>> strong = torch.tensor([[0.2, 0.8], [0.7, 0.3], [0.1, 0.9]])
    >>> rule.believe_pair(torch.arange(3), weak, strong)
    PseudoLabels(label=tensor([0, 0, 0]), kept=tensor([ True,  True, False]))
    >>> rule.mean, rule.variance                                    # each share ½; (½ + ½)/2, (1 + 0)/2
    (tensor(0.5000), tensor(0.5000))
    """

    mean: Tensor  # [], running mean of the rising shares
    variance: Tensor  # [], running mean of their variance in a batch
    decay: float
    upper: float
    lower: float
    least: float  # agreement that is enough
    entropy: float = 0.0
    temperature: float = 0.9
    double_softmax: bool = False
    _certain: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))  # of the batch just believed

    def believe_pair(self, index: Tensor, weak: Tensor, strong: Tensor) -> PseudoLabels:
        rising = rising_share(weak, strong)
        self.mean = self.mean.to(weak).lerp(rising.mean(), 1 - self.decay)
        self.variance = self.variance.to(weak).lerp(rising.var(correction=1), 1 - self.decay)
        agreeing = agreement(weak, strong, usualness(rising, self.mean, self.variance)) >= self.least
        self._certain = agreeing & (weak.max(dim=1).values > self.lower)
        return two_stage_labels(weak, agreeing, self.upper, self.lower)

    def label_loss(self, logits: Tensor, label: Tensor, kept: Tensor) -> Tensor:
        """The cross-entropy; as released, of probabilities taken for logits, which is never far from ln K."""
        return masked_cross_entropy(logits.softmax(dim=1) if self.double_softmax else logits, label, kept)

    def extra_loss(self, logits: Tensor, kept: Tensor) -> Tensor | float:
        """The entropy of views that agree with a fairly sure weak view, also those that stage one has accepted."""
        if self.entropy == 0:
            return 0.0
        return self.entropy * masked_entropy(logits, self._certain, self.temperature)

    def memory(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).detach().cpu().clone() for name in ("mean", "variance")}
