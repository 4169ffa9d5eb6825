"""What a finished run leaves beside its weights: how to use the model, how good it is, and its card."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tacit.card import card
from tacit.inference.measure import calibrated, measure
from tacit.inference.model import DESCRIPTION, describe
from tacit.runs.plan import Plan


def handover(
    plan: Plan,
    summary: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    probs: Tensor | None,
    labels: Tensor,
) -> dict[str, bytes]:
    """The files to write beside the weights, by name. `probs`: the final model's on the test images, if it has one."""
    if probs is None:
        return {}
    description = calibrated(describe(plan), probs, labels)
    groups = plan.dataset.test_groups
    figures = measure(probs, labels, None if groups is None else groups[plan.split.test])
    page = card(plan, summary, records, figures, description)
    texts = {
        DESCRIPTION: description.to_json(),
        "evaluation.json": json.dumps(figures, indent=2) + "\n",
        "card.md": page.markdown(),
        "card.html": page.html(),
        **page.pictures,
    }
    return {name: text.encode() for name, text in texts.items()}
