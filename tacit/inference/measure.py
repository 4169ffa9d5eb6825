"""What a finished run leaves beside its weights: how to use the model, how good it is, and its card."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.data.groups import halves
from tacit.evaluation import metrics
from tacit.evaluation.interval import wilson_interval
from tacit.inference.calibrate import at_temperature, fit_temperature
from tacit.inference.model import Description

ENOUGH_LABELS = 30  # held-out labels below which a temperature would be chance


def calibrated(description: Description, probs: Tensor, labels: Tensor) -> Description:
    """With a temperature fitted on held-out labels; as it was where there are too few of them.

    `probs` are those of the net itself (temperature 1).
    """
    if len(labels) < ENOUGH_LABELS:
        return description
    return replace(description, temperature=round(fit_temperature(probs, labels), 4), calibrated_on=len(labels))


def measure(probs: Tensor, labels: Tensor, groups: np.ndarray | None = None) -> dict[str, Any]:
    """All that a card tells about a model on test images, as plain numbers.

    `ece_calibrated` is honest: each half of the images is scaled by the temperature of the other half, and no group
    has images in both.
    """
    right = int((probs.argmax(dim=1) == labels).sum())
    crossed = cross_calibrated(probs, labels, groups)
    return {
        "images": len(labels),
        "accuracy": right / len(labels) if len(labels) else None,
        "interval": list(wilson_interval(right, len(labels))),
        "confusion": metrics.confusion(probs, labels).tolist(),
        "reliability": [list(row) for row in metrics.reliability(probs, labels)],
        "ece": metrics.expected_calibration_error(probs, labels) if len(labels) else None,
        "ece_calibrated": None if crossed is None else metrics.expected_calibration_error(crossed, labels),
    }


def cross_calibrated(probs: Tensor, labels: Tensor, groups: np.ndarray | None = None) -> Tensor | None:
    """Every image at the temperature of images that it is not among: one half's for the other, and back. Images of one
    group are in one half. None where a half has too few labels for a temperature.

    >>> sure = torch.tensor([[0.9, 0.1]]).expand(120, 2)
    >>> labels = torch.tensor([0, 0, 0, 1]).repeat(30)                       # says 90 %, is right three times in four
    >>> found = cross_calibrated(sure, labels, np.arange(120) // 4)
    >>> None if found is None else found[0]
    tensor([0.7500, 0.2500])
    >>> cross_calibrated(sure, labels, np.zeros(120)) is None                # one group: there is no other half
    True
    """
    first, second = (torch.from_numpy(half) for half in halves(groups, len(labels)))
    if min(len(first), len(second)) < ENOUGH_LABELS:
        return None
    scaled = probs.clone()
    for own, other in ((first, second), (second, first)):
        scaled[own] = at_temperature(probs[own], fit_temperature(probs[other], labels[other]))
    return scaled
