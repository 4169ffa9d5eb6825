"""Who held how much of which class: a small table that is written with a run, so that a report needs no images."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tacit.data.dataset import Dataset
from tacit.data.draw import rows_of
from tacit.data.split import Split

FILE = "parties.json"
MOST_PARTIES = 100  # rows; beyond, a row is the mean of several clients
LARGEST_FILE = 20_000_000  # bytes


def holdings(split: Split, dataset: Dataset) -> dict[str, Any]:
    """Parties by class, labelled and unlabelled, as plain data; sites by their names."""
    rows = rows_of(split, dataset, MOST_PARTIES)
    return {
        "classes": list(dataset.classes),
        "columns": [*dataset.classes, *(["(unknown)"] if rows.unknown else [])],
        "rows": rows.names,
        "labeled": _plain(rows.labeled),
        "unlabeled": _plain(rows.unlabeled),
        "note": f"A row is the mean of {rows.merged} clients." if rows.merged > 1 else "",
    }


def _plain(table: np.ndarray) -> list[list[float | int]]:
    return [[int(v) if float(v).is_integer() else round(float(v), 1) for v in row] for row in table]


def read_holdings(path: Path) -> dict[str, Any] | None:
    """What a run wrote; None where there is none, or something else (a report then asks the data itself)."""
    try:
        if path.stat().st_size > LARGEST_FILE:
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        wide = len(found["columns"])
        names = [*found["classes"], *found["columns"], *found["rows"], found["note"]]
        tables = (found["labeled"], found["unlabeled"])
        fits = all(len(table) == len(found["rows"]) and all(len(row) == wide for row in table) for table in tables)
        numbers = all(isinstance(v, int | float) for table in tables for row in table for v in row)
        if not fits or not numbers or not all(isinstance(name, str) for name in names):
            return None
        return {key: found[key] for key in ("classes", "columns", "rows", "labeled", "unlabeled", "note")}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
