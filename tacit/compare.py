"""Several runs side by side, on the same split and budget."""

from collections.abc import Mapping
from typing import Any


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


def bounds_of(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The lower and the upper bound of an experiment: FedAvg on the labels that exist, and on all of them.

    Data, split, net, budget and seed stay; only the method and what is revealed change.

    >>> lower, upper = bounds_of({"seed": 1, "method": {"name": "fixmatch", "threshold": 0.9}})
    >>> lower["method"], upper["data"]
    ({'name': 'fedavg'}, {'reveal': 'all'})
    """
    lower = {**settings, "method": {"name": "fedavg"}}
    data = dict(settings.get("data", {}))
    upper = {**lower, "data": {**data, "reveal": "all"}}
    return lower, upper
