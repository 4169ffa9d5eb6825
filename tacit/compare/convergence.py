"""Has a bound converged? A gap between bounds that are still rising is a fact about the length of the training.

The rule: the mean of the last fifth of the evaluated rounds is less than half a point above the mean of the fifth
before it. It is a hard one where the rate falls to the end, for the last fifth then gains by that alone.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

POINT = 0.01
MOST_GAIN = 0.5 * POINT  # from the fifth before the last to the last one
FEWEST = 10  # evaluated rounds: two in a fifth
RULE = "the mean of the last fifth of its rounds is less than half a point above that of the fifth before"


@dataclass(frozen=True)
class Convergence:
    """How much the last fifth of a run gained, and about how many more rounds it would take (None: not known)."""

    gain: float | None  # None: too few rounds to tell
    more_rounds: int | None = None

    @property
    def converged(self) -> bool:
        return self.gain is not None and self.gain < MOST_GAIN


def convergence(curve: Sequence[float], rounds: int) -> Convergence:
    """By the figures of a run of so many rounds, one for each evaluated round.

    Gains are taken to shrink from fifth to fifth as they did last.

    >>> convergence([0.5] * 10, 10).converged, convergence([0.5] * 9, 9).gain is None
    (True, True)
    >>> rising = convergence([0.3, 0.3, 0.4, 0.4, 0.5, 0.5, 0.54, 0.54, 0.56, 0.56], rounds=20)    # +10, +10, +4, +2
    >>> round(rising.gain, 4), rising.more_rounds                           # then +1, +.5, +.25: three fifths more
    (0.02, 12)
    """
    if len(curve) < FEWEST:
        return Convergence(None)
    ends = [round(len(curve) * part / 5) for part in range(6)]
    fifths = [statistics.fmean(curve[start:end]) for start, end in pairwise(ends)]
    before, gain = fifths[3] - fifths[2], fifths[4] - fifths[3]
    if gain < MOST_GAIN:
        return Convergence(gain)
    shrinks = gain / before if before > 0 else 1.0
    if shrinks >= 1:
        return Convergence(gain)  # it rises faster and faster: nothing can be foretold
    parts = math.floor(math.log(MOST_GAIN / gain) / math.log(shrinks) + 1e-9) + 1
    return Convergence(gain, math.ceil(parts * rounds / 5))


def of_runs(records: Sequence[Sequence[Mapping[str, Any]]], figure: str) -> Convergence:
    """Of the mean curve of several seeds, over the rounds in which all were evaluated."""
    curves = [[r[figure] for r in run if r.get("stage") == "main" and r.get(figure) is not None] for run in records]
    length = min((len(curve) for curve in curves), default=0)
    mean = [statistics.fmean(values) for values in zip(*(curve[:length] for curve in curves), strict=True)]
    rounds = max((sum(r.get("stage") == "main" for r in run) for run in records), default=0)
    return convergence(mean, rounds)


def sentence(name: str, found: Convergence) -> str:
    """What to say of a bound that has not converged; '' where it has.

    >>> sentence("upper", Convergence(0.02, 12))
    'The upper bound has not converged (+2.0 points in the last fifth of its rounds): about 12 more rounds would do.'
    """
    if found.converged:
        return ""
    if found.gain is None:
        return f"Whether the {name} bound has converged cannot be told: fewer than {FEWEST} rounds were evaluated."
    more = "there is no telling how many more rounds it would take"
    if found.more_rounds is not None:
        more = f"about {found.more_rounds} more rounds would do"
    return (
        f"The {name} bound has not converged (+{100 * found.gain:.1f} points in the last fifth of its rounds): {more}."
    )
