"""Several runs side by side, on the same split and budget."""

from tacit.engine import stages_of
from tacit.experiment import Experiment, resolve


def gap_closed(method: float | None, lower: float | None, upper: float | None) -> float | None:
    """How much of the way from the lower to the upper bound a method goes: (method − lower) / (upper − lower).

    Below 0: worse than the labels alone. None where a figure is missing or the bounds leave no gap.

    >>> gap_closed(0.9, 0.8, 1.0)
    0.5
    >>> gap_closed(0.9, 0.8, 0.8) is None
    True
    """
    if method is None or lower is None or upper is None or upper - lower < 1e-9:
        return None
    return round((method - lower) / (upper - lower), 12)


def bounds_of(experiment: Experiment) -> tuple[Experiment, Experiment]:
    """The lower and the upper bound of an experiment: FedAvg on the labels that exist, and on all of them.

    Data, split, net, training and seed stay, whatever set them; the bounds get as many rounds as all stages of the
    method together.

    >>> lower, upper = bounds_of(resolve({"method": {"name": "fixmatch", "warmup": 5}, "rounds": 20}))
    >>> lower.method["name"], lower.rounds, upper.data.reveal
    ('fedavg', 25, 'all')
    """
    rounds = sum(stage.rounds for stage in stages_of(experiment))
    lower = resolve({**experiment.to_dict(), "method": {"name": "fedavg"}, "rounds": rounds})
    return lower, resolve(lower.to_dict(), {"data.reveal": "all"})
