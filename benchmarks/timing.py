"""What all parts share: works done in turn, what they took as ratios with their spread, and a row of the result."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import torch

from tacit.backends.base import one_thread

Work = Callable[[], object]


@dataclass(frozen=True)
class Spent:
    """Seconds."""

    wall: float
    cpu: float  # of this process, all its threads


@dataclass(frozen=True)
class Row:
    """One measured figure: a median with its lowest and highest value, and what it should be."""

    what: str
    value: float
    unit: str = "×"  # "yes": 1 is yes, 0 is no; "": there is no figure, and the note says why
    low: float | None = None
    high: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def goal(self) -> str:
        if self.at_most is not None:
            return f"≤ {figure(self.at_most, self.unit)}"
        if self.at_least is not None:
            return "yes" if self.unit == "yes" else f"≥ {figure(self.at_least, self.unit)}"
        return ""

    @property
    def reached(self) -> bool | None:
        """None where there is no goal."""
        if self.at_most is None and self.at_least is None:
            return None
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def cells(self) -> tuple[str, str, str, str, str, str]:
        """As a table shows it: what, the figure, its spread, the goal, whether it was reached, the note."""
        spread = ""
        if self.low is not None and self.high is not None:
            spread = f"{figure(self.low, self.unit)} … {figure(self.high, self.unit)}"
        reached = {None: "", True: "yes", False: "no"}[self.reached]
        return self.what, figure(self.value, self.unit), spread, self.goal, reached, self.note

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "goal": self.goal, "reached": self.reached}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """The row that was recorded.

        >>> row = Row("a / b", 2.0, at_least=1.5)
        >>> Row.of(row.record()) == row
        True
        """
        return cls(**{one.name: record[one.name] for one in fields(cls)})


def figure(value: float, unit: str) -> str:
    """A number with its unit.

    >>> figure(0.548, "×"), figure(1234.5, "MB"), figure(1.0, "yes"), figure(0.0, "")
    ('0.55×', '1,234 MB', 'yes', '–')
    """
    if unit == "yes":
        return "yes" if value else "no"
    if not unit:
        return "–"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) >= 100 else f"{value:.2f}"
    return f"{number}×" if unit == "×" else f"{number} {unit}"


def timed(work: Work) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def interleaved(works: Mapping[str, Work], times: int, warm_up: bool = True) -> dict[str, list[Spent]]:
    """Each work in turn, so many times over, so that a busy or throttled machine slows all of them alike.

    Every other turn goes backwards, so that none always follows the same other one. `warm_up`: each once before,
    not counted.

    >>> order = []
    >>> spent = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, warm_up=False)
    >>> order, len(spent["a"]), len(spent["b"])
    (['a', 'b', 'b', 'a'], 2, 2)
    """
    if warm_up:
        for work in works.values():
            work()
    spent: dict[str, list[Spent]] = {name: [] for name in works}
    for turn in range(times):
        for name in list(works) if turn % 2 == 0 else reversed(list(works)):
            spent[name].append(timed(works[name]))
    return spent


def ratio(what: str, of: Sequence[Spent], to: Sequence[Spent], *, clock: str = "cpu", **more: Any) -> Row:
    """A row: what one work took over what the other took in the same turn; the median of the turns and their range.

    >>> twos, ones = [Spent(2, 2), Spent(4, 4), Spent(9, 9)], [Spent(1, 1)] * 3
    >>> row = ratio("a over b", twos, ones, at_most=5)
    >>> row.value, row.low, row.high, row.goal, row.reached
    (4.0, 2.0, 9.0, '≤ 5.00×', True)
    """
    ratios = [getattr(a, clock) / max(getattr(b, clock), 1e-9) for a, b in zip(of, to, strict=True)]
    return spread(what, ratios, "×", **more)


def spread(what: str, values: Sequence[float], unit: str, **more: Any) -> Row:
    """A row: the median of some values and their range."""
    return Row(what, statistics.median(values), unit, min(values), max(values), **more)


@contextmanager
def single_thread() -> Iterator[None]:
    """One intra-op thread, as in every run of tacit."""
    before = one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(before)
