"""Tiny real experiments, and how to compare their outcomes."""

import hashlib
from typing import Any

from tacit.record import Run

TINY = {"data.subset": 400, "data.test_subset": 200}


def digest(run: Run) -> str:
    """The model of a run, as a hash of its bytes."""
    return hashlib.sha256((run.folder / "model.safetensors").read_bytes()).hexdigest()


def timeless(run: Run) -> list[dict[str, Any]]:
    """The records of a run without what a clock says."""
    return [{k: v for k, v in record.items() if k not in ("seconds", "phases")} for record in run.records]
