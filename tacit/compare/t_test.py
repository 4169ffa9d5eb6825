"""Is a difference over a few seeds more than luck? The paired t-test, without a statistics library.

Two methods run with the same seed share the split and the first weights, so their results go up and down together;
the test therefore looks at the difference within each seed. Why the t-test: the exact test by flipping signs makes no
assumption about the shape of the differences, but with three seeds it can never say less than p = .25. The t-test can,
at the price of assuming roughly normal differences, which means over thousands of test images usually are.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

TEST = "paired t-test over seeds, two-sided"


class Paired(NamedTuple):
    """The mean difference of pairs, and how often chance alone would give as large a one (p)."""

    difference: float
    p: float | None  # None: fewer than two pairs
    half_width: float | None = None  # the 95 % interval reaches so far to both sides of the difference


def paired_test(ours: Sequence[float], theirs: Sequence[float]) -> Paired | None:
    """The paired t-test of two equally long rows of numbers; None without a pair.

    >>> paired_test([0.8, 0.9], [0.7, 0.7]).difference  # by hand: differences .1 and .2, mean .15
    0.15
    >>> round(paired_test([0.8, 0.9], [0.7, 0.7]).p, 4)  # t = .15 / (.0707/√2) = 3, one degree: 1 - 2/π·atan 3
    0.2048
    >>> paired_test([0.8], [0.7])
    Paired(difference=0.1, p=None, half_width=None)
    """
    differences = [one - other for one, other in zip(ours, theirs, strict=True)]
    if not differences:
        return None
    mean = round(statistics.fmean(differences), 12)
    if len(differences) < 2:
        return Paired(mean, None)
    spread = statistics.stdev(differences)
    if spread < 1e-12:  # the same difference each time: no doubt if there is one, nothing to see if there is none
        return Paired(mean, 0.0 if mean else 1.0, 0.0)
    error, degrees = spread / math.sqrt(len(differences)), len(differences) - 1
    return Paired(mean, two_sided(mean / error, degrees), quantile(0.05, degrees) * error)


def quantile(p: float, degrees: int) -> float:
    """How far from 0 Student's t is with this chance, either way: the inverse of `two_sided`.

    >>> round(quantile(0.05, 2), 3), round(quantile(0.05, 9), 3)  # as in every table
    (4.303, 2.262)
    """
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, degrees) > p else (low, middle)
    return high


def two_sided(t: float, degrees: int) -> float:
    """The chance that Student's t is at least this far from 0, either way.

    With a whole number of degrees its distribution is a finite sum in the angle θ = atan(t/√ν) (Abramowitz and Stegun,
    26.7.3 and 26.7.4), so nothing is approximated.

    >>> round(two_sided(1.0, 1), 6)  # ν = 1 is Cauchy's distribution: half of it lies beyond ±1
    0.5
    >>> round(two_sided(math.sqrt(2), 2), 6)  # ν = 2: 1 - t/√(2 + t²) = 1 - 1/√2
    0.292893
    """
    angle = math.atan(abs(t) / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    total, term = 0.0, cosine if odd else 1.0
    for step in range(degrees // 2):
        total += term
        term *= cosine**2 * ((2 * step + 2) / (2 * step + 3) if odd else (2 * step + 1) / (2 * step + 2))
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1 - within))
