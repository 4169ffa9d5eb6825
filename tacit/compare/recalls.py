"""What the means of a comparison hide: recall by class where one class has most images, and how few were tested."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tacit.compare.rows import Row
from tacit.core.errors import TacitError
from tacit.evaluation.headline import leads
from tacit.evaluation.interval import recall_text
from tacit.inference.model import read_description
from tacit.runs.folder import Run

FEW_TEST_IMAGES = 200  # as on a card


def recall_notes(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row whose test images are one-sided: the share of each class that the last models recognise.

    The share is the mean over the seeds; the interval is that of one test set, for the seeds share their images.
    """
    found = []
    for row in rows:
        done = [job.folder for job in row.jobs if job.finished]
        one_sided = [folder for folder in done if leads(Run(folder).summary or {}) == "balanced_accuracy"]
        if text := mean_recall(one_sided):
            found.append(f"Recall by class of {row.label} (95 % intervals of one test set): {text}.")
    return found


def few_tests(rows: Sequence[Row]) -> list[str]:
    """A sentence where the seeds are judged on few images: over seeds alone an interval is too narrow there."""
    done = [job.folder for row in rows for job in row.jobs if job.finished]
    least = min((count for folder in done if (count := _tested(folder))), default=FEW_TEST_IMAGES)
    if least >= FEW_TEST_IMAGES:
        return []
    return [
        f"Judged on {least:,} test images only. Intervals over seeds do not know that, and are narrower than the "
        "truth: label more to test on before you decide."
    ]


def _tested(folder: Path) -> int:
    try:
        return int(json.loads((folder / "evaluation.json").read_text())["images"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def mean_recall(folders: Sequence[Path]) -> str:
    """In words; '' where a run has no figures, or the runs have other classes."""
    if not folders:
        return ""
    try:
        confusions = [json.loads((folder / "evaluation.json").read_text())["confusion"] for folder in folders]
        names = {tuple(about.classes) for folder in folders if (about := read_description(folder)) is not None}
        mean = np.rint(np.mean(np.array(confusions, float), axis=0)).astype(int).tolist()
        return recall_text(mean, *names) if len(names) == 1 else ""
    except (OSError, ValueError, TypeError, KeyError, IndexError, TacitError):
        return ""
