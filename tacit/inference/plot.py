"""`run.plot()`: how a run went, with matplotlib, which is not needed for anything else."""

from typing import Any

import numpy as np

from tacit.core.errors import TacitError
from tacit.core.text import safe
from tacit.runs.folder import Run

MOST_CLASSES = 12  # more lines than that nobody can tell apart


def plot_run(run: Run) -> Any:
    """A figure with two or three panels: accuracy and AUC, what became of pseudo-labels, accuracy by class."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise TacitError("run.plot() needs matplotlib: pip install 'tacit[plot]'") from None
    rounds = run.rounds()
    if not rounds:
        raise TacitError(f"No round of the run in {run.folder} is finished, so there is nothing to plot.")
    step = np.arange(1, len(rounds) + 1)
    audited = any(record.get("accepted_ratio") is not None for record in rounds)
    figure = Figure(figsize=(4.5 * (2 + audited), 3.6), layout="constrained")
    panels = figure.subplots(1, 2 + audited)
    _lines(panels[0], step, rounds, {"accuracy": "accuracy", "AUC": "auc", "balanced accuracy": "balanced_accuracy"})
    panels[0].set_title("test images")
    if audited:
        _lines(panels[1], step, rounds, {"accepted": "accepted_ratio", "right, of those accepted": "pseudo_accuracy"})
        panels[1].set_title("pseudo-labels")
    _by_class(panels[-1], step, rounds, _class_names(run))
    panels[-1].set_title("recognised, by class")
    for panel in panels:
        panel.set_xlabel("round, all stages")
        panel.set_ylim(0, 100)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("%")
    return figure


def _lines(panel: Any, step: np.ndarray, rounds: list[dict[str, Any]], names: dict[str, str]) -> None:
    for label, key in names.items():
        values = [record.get(key) for record in rounds]
        known = [(x, 100 * value) for x, value in zip(step, values, strict=True) if value is not None]
        if known:
            panel.plot(*zip(*known, strict=True), marker=".", label=label)
    if panel.lines:
        panel.legend()


def _by_class(panel: Any, step: np.ndarray, rounds: list[dict[str, Any]], names: list[str]) -> None:
    tested = [(x, record["per_class"]) for x, record in zip(step, rounds, strict=True) if record.get("per_class")]
    if not tested:
        return
    where = [x for x, _ in tested]
    table = np.array([[np.nan if value is None else 100 * value for value in row] for _, row in tested])
    if table.shape[1] > MOST_CLASSES:
        low, middle, high = np.nanpercentile(table, (0, 50, 100), axis=1)
        panel.fill_between(where, low, high, alpha=0.2, label="worst to best class")
        panel.plot(where, middle, label="median class")
    else:
        for column, values in enumerate(table.T):
            panel.plot(where, values, label=names[column] if names else str(column))
    panel.legend(fontsize="x-small", ncols=2)


def _class_names(run: Run) -> list[str]:
    from tacit.inference.model import read_description

    found = read_description(run.folder)
    return [safe(name, 40).replace("$", r"\$") for name in found.classes] if found else []  # $ would be mathematics
