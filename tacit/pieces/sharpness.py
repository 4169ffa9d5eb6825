"""Sharpness-aware consistency of (FL)²: a prediction should not change when the weights move where it hurts most."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.statistics import still_statistics

ETA = 0.01  # ASAM's: so that weights near zero can move, too


def asam_perturbation(
    weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], radius: float
) -> dict[str, Tensor]:
    """The step within a ball that raises the loss most, each weight by its own scale (ASAM; (FL)² Eq. 12).

    ε = ρ · T²g / ‖Tg‖₂, the norm over all parameters together; T = |w| + 0.01, and 1 for biases. No gradient, no step.

    >>> weights = {"fc.weight": torch.tensor([0.99, -1.99]), "fc.bias": torch.tensor([5.0])}
    >>> gradients = {"fc.weight": torch.tensor([2.0, 0.0]), "fc.bias": torch.tensor([0.0])}     # Tg = 2, 0, 0
    >>> asam_perturbation(weights, gradients, radius=0.1)
    {'fc.weight': tensor([0.1000, 0.0000]), 'fc.bias': tensor([0.])}
    """
    scale = {n: torch.ones_like(w) if n.endswith("bias") else w.detach().abs() + ETA for n, w in weights.items()}
    scaled = {name: scale[name] * gradients[name] for name in weights}
    norm = torch.stack([part.norm() for part in scaled.values()]).norm()
    if norm == 0:
        return {name: torch.zeros_like(part) for name, part in scaled.items()}
    return {name: scale[name] * part * (radius / norm) for name, part in scaled.items()}


def masked_divergence(target: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
    """(1/N) Σ 1[chosen] KL(target ‖ softmax(logits)): the mean over *all* N samples ((FL)² Eq. 13).

    >>> target = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0986]])                      # ½ and ½; ¼ and ¾
    >>> masked_divergence(target, logits, torch.tensor([True, True]))           # (0 + ½ ln 2 + ½ ln ⅔)/2
    tensor(0.0719)
    """
    each = F.kl_div(logits.log_softmax(dim=1), target, reduction="none").sum(dim=1)
    return (each * chosen).sum() / max(len(logits), 1)


def sharpness_consistency(
    model: nn.Module, views: Tensor, logits: Tensor, label: Tensor, strict: Tensor, radius: float
) -> Tensor:
    """How much the predictions of surely labelled views change at the perturbed weights ((FL)² Eq. 11 to 13).

    `logits` are the model's for these views, with their graph: the perturbation raises the loss of the strict ones.
    The net is then run *with* the perturbed weights, w + ε with a constant ε, but never set to them: the gradient of
    the result reaches w as at w + ε, and there is nothing to undo. BN's running statistics stay, too.
    """
    if not bool(strict.any()):
        return logits.new_zeros(())
    weights = dict(model.named_parameters())
    loss = masked_cross_entropy(logits, label, strict)
    slopes = torch.autograd.grad(loss, list(weights.values()), retain_graph=True)
    step = asam_perturbation(weights, dict(zip(weights, slopes, strict=True)), radius)
    with still_statistics(model):
        moved = torch.func.functional_call(model, {name: w + step[name] for name, w in weights.items()}, (views,))
    return masked_divergence(logits.detach().softmax(dim=1), moved, strict)


def consistency_term(
    model: nn.Module, label: Tensor, strict: Tensor, radius: float, weight: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The term for a training loop: from (which images, their strong views, the logits of these) to a loss."""

    def term(which: Tensor, views: Tensor, logits: Tensor) -> Tensor:
        return weight * sharpness_consistency(model, views, logits, label[which], strict[which], radius)

    return term
