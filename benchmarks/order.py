"""The order of methods: points over the labels alone, method by placement and data set, and what they cost.

It is made of the parts that say `order_of_methods = true`. Their rows are called `PLACE: METHOD`, with `PLACE: lower`
for the labels alone, and have one training, one split and about as much computing.
"""

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tacit.compare.results import Result
from tacit.core.formatting import clock
from tacit.papers.feddb_figures import pyplot

BOUNDS = ("lower", "upper")


class Column(NamedTuple):
    """One problem: who holds the labels, of which data."""

    place: str
    data: str


class Cell(NamedTuple):
    """How a method came out in a problem: points over the labels alone by seed, and CPU seconds of a run."""

    points: tuple[float, ...]
    seconds: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.points)

    def __str__(self) -> str:
        """
        >>> print(Cell((1.0, 2.0), 60.0), Cell((-1.0,), 60.0))
        +1.5 (+1.0 … +2.0) -1.0 (one seed)
        """
        spread = f"{min(self.points):+.1f} … {max(self.points):+.1f}" if len(self.points) > 1 else "one seed"
        return f"{self.mean:+.1f} ({spread})"


Order = dict[str, dict[Column, Cell]]  # by method


def order(parts: Iterable[tuple[Mapping[str, Any], Mapping[str, Result], Mapping[str, float]]], score: str) -> Order:
    """What came out, by method and problem; the method that gains most on average first.

    Of each part: what it is, its results by label, and the CPU seconds of a run by label.
    """
    found: Order = {}
    for part, lines, seconds in parts:
        if not part.get("order_of_methods"):
            continue
        for label, one in lines.items():
            place, _, method = label.partition(": ")
            lower = lines.get(f"{place}: lower")
            if method in BOUNDS or lower is None or not (seeds := sorted(set(one.runs) & set(lower.runs))):
                continue
            points = tuple(100 * (one.runs[seed][score] - lower.runs[seed][score]) for seed in seeds)
            column = Column(place, part["shared"]["data"]["name"])
            found.setdefault(method, {})[column] = Cell(points, seconds[label])
    return dict(sorted(found.items(), key=lambda pair: -statistics.fmean(cell.mean for cell in pair[1].values())))


def columns_of(found: Order) -> list[Column]:
    """All problems, by placement, in the order in which they were met."""
    met = list(dict.fromkeys(column for cells in found.values() for column in cells))
    places = list(dict.fromkeys(column.place for column in met))
    return sorted(met, key=lambda column: places.index(column.place))


def table(found: Order) -> list[str]:
    """A row a method, a column a problem: the mean over seeds, and the worst and the best of them."""
    columns = columns_of(found)
    heads = ["method", *(f"{column.place}, {column.data}" for column in columns), "CPU time of a run"]
    text = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for method, cells in found.items():
        shown = [str(cells[column]) if column in cells else "–" for column in columns]
        cost = clock(statistics.median(cell.seconds for cell in cells.values()))
        text.append("| " + " | ".join([method, *shown, cost]) + " |")
    return text


def advice(found: Order) -> list[str]:
    """Who should use what: a sentence for each placement."""
    text = []
    for place in dict.fromkeys(column.place for column in columns_of(found)):
        here = {
            method: mine
            for method, cells in found.items()
            if (mine := [cell for column, cell in cells.items() if column.place == place])
        }
        ranked = sorted(here, key=lambda method: -statistics.fmean(cell.mean for cell in here[method]))
        safe = [method for method in ranked if all(min(cell.points) > 0 for cell in here[method])]
        losing = [method for method in ranked if all(max(cell.points) < 0 for cell in here[method])]
        best = statistics.fmean(cell.mean for cell in here[ranked[0]])
        sentence = f"- **{place}**: {ranked[0]} gains most, {best:+.1f} points on average."
        sentence += f" Above the labels alone in every seed and data set: {', '.join(safe) or 'none'}."
        if losing:
            sentence += f" Below them in every one: {', '.join(losing)}."
        text.append(sentence)
    return text


def draw(found: Order, path: Path) -> None:
    """The heat map."""
    columns, methods = columns_of(found), list(found)
    means = [[found[m][c].mean if c in found[m] else float("nan") for c in columns] for m in methods]
    plot = pyplot()
    figure, axis = plot.subplots(figsize=(1.6 + 1.25 * len(columns), 1.4 + 0.34 * len(methods)))
    shown = axis.imshow(means, cmap="RdBu", vmin=-15, vmax=15, aspect="auto")
    axis.set_xticks(range(len(columns)), [f"{column.place}\n{column.data}" for column in columns], fontsize=8)
    axis.set_yticks(range(len(methods)), methods, fontsize=8)
    for row, method in enumerate(methods):
        for place, column in enumerate(columns):
            if column in found[method]:
                cell = found[method][column]
                sure = min(cell.points) > 0 or max(cell.points) < 0
                style = {"fontsize": 8, "fontweight": "bold" if sure and len(cell.points) > 1 else "normal"}
                colour = "white" if abs(cell.mean) > 9 else "black"
                axis.text(place, row, f"{cell.mean:+.1f}", ha="center", va="center", color=colour, **style)
    figure.colorbar(shown, label="points over the labels alone", extend="both")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plot.close(figure)
