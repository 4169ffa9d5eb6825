"""Between which bounds a share lies: for figures that rest on few images."""

import math
from collections.abc import Sequence

from tacit.core.text import safe

MOST_NAMED = 10  # classes in one line


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share, by Wilson (1927): also right for few images and shares near 0 or 1.

    >>> [round(bound, 3) for bound in wilson_interval(8, 10)]
    [0.49, 0.943]
    >>> wilson_interval(0, 0)
    (0.0, 1.0)
    """
    if not count:
        return 0.0, 1.0
    z, share = 1.959964, hits / count
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def interval_text(hits: int, count: int) -> str:
    """Wilson's interval in words.

    >>> interval_text(8, 10), interval_text(0, 0)
    ('49 to 94 %', '–')
    """
    return " to ".join(f"{100 * bound:.0f}" for bound in wilson_interval(hits, count)) + " %" if count else "–"


def recall_text(confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """How many images of each class were recognised, with intervals, the worst class first; '' where nothing is known.

    >>> recall_text([[9, 1], [3, 1]], ["nv", "mel"])
    'mel 25 % (5 to 70 %), nv 90 % (60 to 98 %)'
    """
    counts = [(row[number], sum(row), name) for number, (row, name) in enumerate(zip(confusion, classes, strict=True))]
    tested = sorted((one for one in counts if one[1]), key=lambda one: one[0] / one[1])
    shown = [f"{safe(n, 40)} {100 * hits / own:.0f} % ({interval_text(hits, own)})" for hits, own, n in tested]
    more = [f"… ({len(shown) - MOST_NAMED} more)"] if len(shown) > MOST_NAMED else []
    return ", ".join([*shown[:MOST_NAMED], *more])
