"""What the guard's rule costs and keeps, exactly: `python -m benchmarks.guard_rule` prints the table of docs/guard.md.

Two models disagree on a share of the images; of two labels-only models of the same data that is often about a third.
The one is truly better by some points. How often does the rule ship it, and what does that cost on average?
"""

import math
from functools import cache

import torch

from tacit.evaluation.paired import Judgement

DISAGREE = 0.3
LEAD = 0.0  # the default of guard.lead
DIFFERENCES = (-0.2, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2)


@cache
def takes_the_place(won: int, lost: int, lead: float) -> bool:
    """Whether a model that was right alone so often, and the twin so often, is shipped."""
    return Judgement(torch.tensor([[0.0], [float(lost)], [float(won)], [1.0]])).best(lead) == 1


def shipped(images: int, difference: float, lead: float = LEAD, disagree: float = DISAGREE) -> float:
    """The chance that a model which is better by `difference` (or worse, below 0) takes the twin's place.

    >>> shipped(1, 0.0)                                             # one image: the twin is right alone, or it is not
    0.85
    """
    disagree = max(disagree, abs(difference))
    won, lost = (disagree + difference) / 2, (disagree - difference) / 2
    total = 0.0
    for b in range(images + 1):
        for c in range(images + 1 - b):
            if takes_the_place(b, c, lead):
                rest = images - b - c
                ways = math.comb(images, b) * math.comb(images - b, c)
                total += ways * won**b * lost**c * (1 - disagree) ** rest
    return round(total, 12)


def table() -> str:
    """Rows: images kept back. Cells: how often the method's model is shipped, and the points that this costs."""
    head = "| images kept back | " + " | ".join(f"{100 * d:+.0f}" for d in DIFFERENCES) + " |"
    lines = [head, "|---|" + "---|" * len(DIFFERENCES)]
    for images in (20, 50, 100, 200):
        cells = []
        for difference in DIFFERENCES:
            chance = shipped(images, difference)
            cost = 100 * abs(difference) * (chance if difference < 0 else 1 - chance)
            cells.append(f"{100 * chance:.0f} % ({cost:.1f})")
        lines.append(f"| {images} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
