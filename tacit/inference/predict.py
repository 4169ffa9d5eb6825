"""Predictions of many images: in batches, with what could not be read told and not fatal."""

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tacit.core.errors import TacitError
from tacit.core.paths import check_file
from tacit.core.payload import write_atomically
from tacit.core.text import as_bytes, as_word, csv_text
from tacit.data.download import Progress, silent
from tacit.data.folder_report import Item
from tacit.inference.images import read
from tacit.inference.model import BATCH, Model

ENDINGS = (".csv", ".parquet", ".jsonl")


@dataclass(frozen=True)
class Predictions:
    """The answers in the order of the images. Where an image could not be read, its probabilities are NaN."""

    names: tuple[str, ...]  # of the images
    classes: tuple[str, ...]
    probabilities: np.ndarray  # float32 [N, K], calibrated
    faults: tuple[str, ...]  # why an image could not be read; '' if it could
    abstain: float = 0.0  # below this confidence no class is named

    def __len__(self) -> int:
        return len(self.names)

    @property
    def confidence(self) -> np.ndarray:
        """The highest probability of each image [N]."""
        return self.probabilities.max(axis=1)

    @property
    def labels(self) -> list[str]:
        """The class of each image by name; '' where it abstains or the image could not be read."""
        return [
            "" if fault or sure < self.abstain else self.classes[best]
            for fault, sure, best in zip(self.faults, self.confidence, self._best, strict=True)
        ]

    @property
    def _best(self) -> np.ndarray:
        return np.nan_to_num(self.probabilities, nan=0.0).argmax(axis=1)

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row an image: path, prediction, confidence, a probability for each class, and what went wrong."""
        answers = zip(self.names, self.labels, self.confidence, self.probabilities, self.faults, strict=True)
        for name, label, sure, probs, fault in answers:
            numbers = [None] * len(probs) if fault else [round(float(p), 6) for p in probs]
            yield {
                "path": name,
                "prediction": label,
                "confidence": None if fault else round(float(sure), 6),
                **{f"p_{one}": p for one, p in zip(self.classes, numbers, strict=True)},
                "problem": fault or ("" if label else "not sure enough"),
            }

    def to_pandas(self) -> Any:
        """The rows as a DataFrame."""
        try:
            import pandas
        except ImportError:
            raise TacitError("A DataFrame needs pandas: pip install 'tacit[notebook]'") from None
        return pandas.DataFrame(list(self.rows()))

    def save(self, path: Path) -> None:
        """A .csv, .parquet or .jsonl with one row an image."""
        check_output(path)
        write_atomically(path, {".csv": _csv, ".jsonl": _jsonl, ".parquet": _parquet}[path.suffix.lower()](self))


def check_output(path: Path) -> None:
    """Refuse what could not be written, before any work."""
    check_file(path)
    if path.suffix.lower() not in ENDINGS:
        raise TacitError(
            f"{path}: predictions are written as {', '.join(ENDINGS)}. Write -o {as_word(path.with_suffix('.csv'))}."
        )
    if path.suffix.lower() == ".parquet":
        _pyarrow()
    if not path.absolute().parent.is_dir():
        raise TacitError(f"{path} cannot be written: {path.absolute().parent} must be a folder, {path} a file.")


def _csv(found: Predictions) -> bytes:
    return as_bytes(csv_text([_columns(found), *([row[name] for name in _columns(found)] for row in found.rows())]))


def _jsonl(found: Predictions) -> bytes:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows())
    return "".join(lines).encode("utf-8", "backslashreplace")  # a lone surrogate becomes JSON's own escape


def _parquet(found: Predictions) -> bytes:
    arrow, parquet = _pyarrow()
    kinds = [
        (name, arrow.float64() if name[:2] == "p_" or name == "confidence" else arrow.string())
        for name in _columns(found)
    ]
    file = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(list(found.rows()), schema=arrow.schema(kinds)), file)
    return file.getvalue()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise TacitError("Parquet files need pyarrow: pip install 'tacit[tables]'") from None
    return pyarrow, parquet


def _columns(found: Predictions) -> list[str]:
    return ["path", "prediction", "confidence", *(f"p_{one}" for one in found.classes), "problem"]


def predict_items(
    model: Model,
    items: Sequence[Item],
    abstain: float = 0.0,
    progress: Progress = silent,
    seen: Callable[[Tensor], None] | None = None,
) -> Predictions:
    """Read and predict a batch at a time: any number of images needs the memory of one batch and of the answers.

    `seen` is shown each image as the net sees it, in order.
    """
    if not 0 <= abstain <= 1:
        raise TacitError(f"abstain = {abstain:g}, but a confidence lies between 0 and 1. Write 0.8, for example.")
    probs = np.full((len(items), len(model.description.classes)), np.nan, np.float32)
    faults: list[str] = []
    for start in range(0, len(items), BATCH):
        part = items[start : start + BATCH]
        images, wrong = read(part, model.description)
        good = [number for number, fault in enumerate(wrong) if not fault]
        probs[[start + number for number in good]] = model.probabilities(images[good]).numpy()
        faults += wrong
        if seen is not None:
            for image in images:
                seen(image)
        progress("predicting", start + len(part), len(items))
    names = tuple(str(item.path) for item in items)
    return Predictions(names, model.description.classes, probs, tuple(faults), abstain)
