"""Learning rates that change while a stage goes on: warm-up, then constant, linear or cosine, then the end."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """From the rate that an experiment names to the rate at a moment of its stage."""

    shape: str = "constant"  # or "linear", "cosine"
    warmup: float = 0.0  # share of the stage in which the rate rises
    end: float = 0.0  # share of the rate that is left at the end of linear and cosine
    hold: float = 0.0  # share of the stage in which the rate stays at that end

    def rate(self, start: float, done: float, width: float = 0.0) -> float:
        """The rate at a moment: `done` of the stage is over, and what comes now (a round, a step) is `width` of it.

        While it warms up, the rate is what the line from 0 reaches at the end of what comes now, so that it never is 0;
        afterwards what the line or the cosine has at its beginning.

        >>> linear = Schedule("linear", warmup=0.5, end=0.2)
        >>> [round(linear.rate(1.0, done / 8, width=1 / 8), 4) for done in range(8)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.6, 0.4]
        >>> Schedule("cosine").rate(0.1, 0.5) == cosine(0.1, 0.5), Schedule().rate(0.1, 0.5)
        (True, 0.1)
        >>> round(Schedule("cosine", end=0.2).rate(0.1, 1.0), 6)
        0.02
        >>> [round(Schedule("linear", end=0.2, hold=0.5).rate(1.0, done / 8), 4) for done in range(8)]
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2]
        """
        if done < self.warmup:
            return start * min(1.0, (done + width) / self.warmup)
        done = min(1.0, (done - self.warmup) / (1.0 - self.warmup - self.hold))
        if self.shape == "cosine":
            return self.end * start + (1.0 - self.end) * cosine(start, done)
        if self.shape == "linear":
            return start * (1.0 - (1.0 - self.end) * done)
        return start


def cosine(start: float, done: float) -> float:
    """The learning rate that falls from `start` to 0 along half a cosine as `done` goes from 0 to 1.

    >>> cosine(0.1, 0.0), round(cosine(0.1, 0.5), 6), round(cosine(0.1, 1.0), 6)
    (0.1, 0.05, 0.0)
    """
    return 0.5 * start * (1.0 + math.cos(math.pi * done))
