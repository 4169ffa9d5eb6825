"""Would more labels help more, or more unlabelled images? From learning curves of a finished run with a guard.

Labels: the labels alone are trained with a quarter, a half and all of the run's labels, several times. The error falls
as a power of the number of labels (Hestness et al., Deep Learning Scaling is Predictable, Empirically, 2017, §2), so
what twice as many would give can be read off. Unlabelled images: the guard compared the method with the labels alone,
on the same images; that is what those of this run gave. If returns diminish, twice as many give no more than that
again.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tacit.compare.results import bounds_of
from tacit.compare.t_test import quantile
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.seeds import numpy_generator
from tacit.core.settings import Experiment
from tacit.data.federation import make_setup
from tacit.data.split import Part, Split
from tacit.engine.run import backend_of, run_plan
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, prepare
from tacit.runs.watchers import NullWatcher

SHARES = (1.0, 0.5, 0.25)  # of the labels; the whole first, so that the first run tells how long one takes
MOST_REPEATS = 5
Told = Callable[[str], None]


@dataclass(frozen=True)
class Gain:
    """A gain with its 95 % interval, as shares."""

    points: float
    low: float
    high: float

    def __str__(self) -> str:
        """
        >>> print(Gain(0.031, 0.012, 0.05))
        +3.1 points (95 % interval +1.2 to +5.0)
        """
        return f"{100 * self.points:+.1f} points (95 % interval {100 * self.low:+.1f} to {100 * self.high:+.1f})"


def exponent(labels: Sequence[float], errors: Sequence[float]) -> float:
    """β of error = c · labels^−β, by least squares in logarithms.

    >>> round(exponent([25, 50, 100], [0.4, 0.2, 0.1]), 6)                      # twice the labels, half the error
    1.0
    """
    x, y = [math.log(n) for n in labels], [math.log(error) for error in errors]
    return -statistics.linear_regression(x, y).slope


def doubling(shares: Sequence[float], figures: Sequence[float], least: float) -> float:
    """What twice the labels would add to a figure, by its values with shares of them: the last error · (1 − 2^−β).

    `least`: the smallest error that can be told from none.

    >>> round(doubling([0.25, 0.5, 1.0], [0.6, 0.8, 0.9], least=0.001), 6)      # errors .4, .2, .1: then .05
    0.05
    """
    errors = [max(1 - figure, least) for figure in figures]
    whole = errors[shares.index(1.0)]
    return whole * (1 - 2 ** -exponent(shares, errors))


def mean_gain(gains: Sequence[float]) -> Gain | None:
    """Their mean and its interval by Student's t; None with fewer than two.

    >>> print(mean_gain([0.02, 0.03, 0.04]))                                    # 3 ± 4.303 · 1/√3
    +3.0 points (95 % interval +0.5 to +5.5)
    """
    if len(gains) < 2:
        return None
    mean = statistics.fmean(gains)
    reach = quantile(0.05, len(gains) - 1) * statistics.stdev(gains) / math.sqrt(len(gains))
    return Gain(mean, mean - reach, mean + reach)


def check_curves(run: Run) -> Gain:
    """What the unlabelled images gave in this run; refuses a run that cannot tell."""
    found = (run.summary or {}).get("guard")
    if found is None or "method" not in found.get("against_twin", {}):
        raise TacitError(
            f"{run.folder} is no finished run with a guard, so what its unlabelled images gave is not known. Run it "
            "with --set guard=true --set data.validation=0.2 (docs/guard.md)."
        )
    if run.experiment.backend.name == "flower":
        raise TacitError(
            f"{run.folder} ran at real sites, and curves are runs of their own. Simulate it on the data of one site."
        )
    if (run.summary or {}).get(found["by"]) is None:
        raise TacitError(f"{run.folder} has no test images, and curves are measured on them.")
    pair = found["against_twin"]["method"]
    return Gain(pair["difference"], pair["low"], pair["high"])


def with_share(experiment: Experiment, share: float, repeat: int) -> Plan:
    """The labels alone with a share of the labels that this experiment learns from, in as many steps as with all."""
    lower = bounds_of(experiment, as_many=True)[0]
    changes = {
        "train.epochs": round(lower.train.epochs / share),
        "train.server_epochs": round(lower.train.server_epochs / share),
        "evaluate_every": lower.rounds,
        "seed": lower.seed + repeat,
        "title": f"the labels alone, {share:g} of them",
    }
    plan = prepare(resolve(lower.to_dict(), changes))
    split = thinned(plan.split, np.asarray(plan.dataset.train_labels), share)
    held = tuple(len(part.labeled) + len(part.unlabeled) for part in split.clients)
    setup = make_setup(plan.experiment, plan.dataset, split)
    return replace(plan, split=split, setup=setup, registered=held)


def thinned(split: Split, labels: np.ndarray, share: float) -> Split:
    """A split with a share of its labels, of each class over all parties, one at least; smaller shares are parts of
    larger ones."""
    everybody = np.concatenate([split.server, *(part.labeled for part in split.clients)])
    kept = []
    for one in np.unique(labels[everybody]):
        own = np.sort(everybody[labels[everybody] == one])
        order = numpy_generator(split.seed, "curves", int(one)).permutation(own)
        kept.append(order[: math.ceil(share * len(own))])
    chosen = np.concatenate(kept)
    clients = tuple(Part(part.labeled[np.isin(part.labeled, chosen)], part.unlabeled) for part in split.clients)
    return replace(split, server=split.server[np.isin(split.server, chosen)], clients=clients)


def label_curves(run: Run, out: Path, minutes: float, tell: Told) -> list[list[float]]:
    """The figure of the labels alone with each of `SHARES`, once for each repeat that fits into the time.

    Each is a run in a folder of its own in `out`, so that what is finished is found again. The first repeat is made
    whatever it takes.
    """
    by = (run.summary or {})["guard"]["by"]
    end, found = time.monotonic() + 60 * minutes, list[list[float]]()
    for repeat in range(MOST_REPEATS):
        started, figures = time.monotonic(), list[float]()
        for share in SHARES:
            folder = out / f"labels-{share:g}-repeat{repeat}"
            one = run_plan(with_share(run.experiment, share, repeat), folder, backend_of, True, NullWatcher())
            figures.append((one.summary or {})[by])
        found.append(figures)
        tell(f"repeat {repeat + 1}: " + ", ".join(f"{s:g} of the labels {100 * f:.1f} %" for s, f in _pairs(figures)))
        if time.monotonic() + (time.monotonic() - started) > end:  # another one would not fit
            break
    return found


def _pairs(figures: Sequence[float]) -> list[tuple[float, float]]:
    return sorted(zip(SHARES, figures, strict=True))


def labels_gain(curves: Sequence[Sequence[float]], test_images: int) -> Gain | None:
    """What twice the labels would give, over the repeats; None: there are too few for an interval."""
    least = 0.5 / max(test_images, 1)
    return mean_gain([doubling(SHARES, figures, least) for figures in curves])


def conclusion(labels: Gain | None, unlabeled: Gain, by: str) -> list[str]:
    """Which of the two would help more, in words; nothing is concluded where the intervals overlap.

    >>> sure = conclusion(Gain(0.06, 0.04, 0.08), Gain(0.01, -0.02, 0.03), "accuracy")
    >>> print(sure[-1][:38])
    More labels would help more: their int
    >>> conclusion(Gain(0.06, 0.01, 0.08), Gain(0.01, -0.02, 0.03), "accuracy")[-1][:32]
    'Which of the two would help more'
    """
    figure = by.replace("_", " ")
    lines = [f"What the unlabelled images gave in this run, in {figure}: {unlabeled}."]
    if labels is None:
        return [*lines, "One repeat gives no interval, so nothing is concluded: allow more --minutes."]
    lines.append(f"What twice the labels would give to the labels alone, by the curve: {labels}.")
    if labels.low > max(unlabeled.high, 0):
        return [
            *lines,
            "More labels would help more: their interval lies above all that the unlabelled images gave, and twice as "
            "many of those give no more than that again, if returns diminish.",
        ]
    if unlabeled.low > max(labels.high, 0):
        return [
            *lines,
            "The unlabelled images gave more than twice the labels would. More of them is the better guess, but how "
            "much that gives is not known: at most as much again, if returns diminish.",
        ]
    return [
        *lines,
        "Which of the two would help more cannot be told: the intervals overlap. More images kept back "
        "(data.validation) and more repeats (--minutes) make them narrower.",
    ]
