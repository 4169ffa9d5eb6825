"""What a finished run leaves beside its weights: how to use the model, how good it is, and its card."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tacit.card import card
from tacit.card.document import Document
from tacit.core.files import read_bytes
from tacit.inference.measure import calibrated, measure
from tacit.inference.membership import Audit
from tacit.inference.model import DESCRIPTION, describe, read_description
from tacit.runs.folder import Run
from tacit.runs.plan import Plan

EVALUATION = "evaluation.json"


def handover(
    plan: Plan,
    summary: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    probs: Tensor | None,
    labels: Tensor,
    audit: Audit | None = None,
) -> dict[str, bytes]:
    """The files to write beside the weights, by name. `probs`: the final model's on the test images, if it has one;
    `audit`: what `tacit audit` found of this very model, if it was there before."""
    if probs is None:
        return {}
    description = calibrated(describe(plan), probs, labels)
    groups = plan.dataset.test_groups
    figures = measure(probs, labels, None if groups is None else groups[plan.split.test])
    page = card(plan, summary, records, figures, description, audit)
    texts = {DESCRIPTION: description.to_json(), EVALUATION: json.dumps(figures, indent=2) + "\n", **_files(page)}
    return {name: text.encode() for name, text in texts.items()}


def _files(page: Document) -> dict[str, str]:
    return {"card.md": page.markdown(), "card.html": page.html(), **page.pictures}


def card_again(run: Run, plan: Plan, audit: Audit) -> None:
    """Make the card of a finished run anew, with what an audit found; nothing where the run has no card."""
    description, path = read_description(run.folder), run.folder / EVALUATION
    if description is None or run.summary is None or not path.is_file():
        return
    figures = json.loads(read_bytes(path))
    page = card(plan, run.summary, run.records, figures, description, audit)
    run.replace_results({name: text.encode() for name, text in _files(page).items()})
