"""What a finished run leaves beside its weights: how to use the model, how good it is, and its card."""

from dataclasses import replace
from typing import Any

from torch import Tensor

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


def measure(probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """All that a card tells about a model on test images, as plain numbers.

    `ece_calibrated` is honest: each half of the images is scaled by the temperature of the other half.
    """
    right = int((probs.argmax(dim=1) == labels).sum())
    enough = len(labels) >= 2 * ENOUGH_LABELS
    return {
        "images": len(labels),
        "accuracy": right / len(labels) if len(labels) else None,
        "interval": list(wilson_interval(right, len(labels))),
        "confusion": metrics.confusion(probs, labels).tolist(),
        "reliability": [list(row) for row in metrics.reliability(probs, labels)],
        "ece": metrics.expected_calibration_error(probs, labels) if len(labels) else None,
        "ece_calibrated": metrics.expected_calibration_error(cross_calibrated(probs, labels), labels)
        if enough
        else None,
    }


def cross_calibrated(probs: Tensor, labels: Tensor) -> Tensor:
    """Every image at the temperature of images that it is not among: the even ones' for the odd ones, and back."""
    scaled = probs.clone()
    for own, other in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        scaled[own] = at_temperature(probs[own], fit_temperature(probs[other], labels[other]))
    return scaled
