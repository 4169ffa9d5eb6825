"""Runs that differ only in their seed belong together: one line with a band, one row with mean ± spread."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit.core.settings import same_but_for_seed

RESULTS = (
    "balanced_accuracy",
    "largest_class",
    "accuracy",
    "auc",
    "pseudo_accuracy",
    "accepted_ratio",
    "bytes_up",
    "bytes_down",
    "seconds",
)


def group(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The runs in groups, in the order of their first members. A run without readable settings stands alone."""
    members: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        settings = run["settings"]
        alone = f"broken {run['id']}"
        key = json.dumps(same_but_for_seed(settings), sort_keys=True, default=str) if settings else alone
        members.setdefault(key, []).append(run)
    labels = _labels([some[0] for some in members.values()])
    return [
        {
            "label": label,
            "runs": [run["id"] for run in some],
            "seeds": [run["seed"] for run in some],
            "results": _results(some),
            **(_bands(some) if len(some) > 1 else {}),
        }
        for label, some in zip(labels, members.values(), strict=True)
    ]


def _labels(firsts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The method, and where that does not tell two groups apart, the settings that do."""
    names = [Path(str(run["method"] or run["name"])).stem for run in firsts]
    settings = [same_but_for_seed(run["settings"]) for run in firsts]
    labels = []
    for name, own in zip(names, settings, strict=True):
        rivals = [other for rival, other in zip(names, settings, strict=True) if rival == name]
        differing = [
            f"{key.removesuffix('.name').rpartition('.')[2]}={own.get(key, '–')}" for key in telling_keys(rivals)
        ]
        labels.append(f"{name} ({', '.join(differing)})" if differing else name)
    return [
        label if labels.count(label) == 1 else f"{label} [{run['name']}]"
        for label, run in zip(labels, firsts, strict=True)
    ]


def telling_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Few settings that tell the experiments apart: always the one next that parts them most.

    >>> telling_keys([{"lr": 0.1, "rounds": 5}, {"lr": 0.1, "rounds": 7}])
    ['rounds']
    """
    keys = sorted(
        {key for one in settings for key in one}, key=lambda key: (not key.startswith(("method.", "data.")), key)
    )
    taken: list[str] = []

    def parts(extra: list[str]) -> int:
        return len({json.dumps([one.get(key) for key in [*taken, *extra]], default=str) for one in settings})

    while keys and parts([]) < len(settings):
        best = max(keys, key=lambda key: parts([key]))
        if parts([best]) == parts([]):
            break
        taken.append(best)
    return taken


def _results(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean and spread of each result over the runs that have it."""
    found = {}
    for name in RESULTS:
        values = [run["results"][name] for run in runs if run["results"].get(name) is not None]
        if values:
            found[name] = mean_and_spread(values)
    return found


def mean_and_spread(values: Sequence[float]) -> dict[str, Any]:
    """The mean, the standard deviation (n − 1; None for a single value) and how many there are.

    >>> mean_and_spread([1.0, 3.0])
    {'mean': 2.0, 'std': 1.4142135623730951, 'n': 2}
    """
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "std": spread, "n": len(values)}


def _bands(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each figure by round, as mean and spread over the runs that have got there."""
    from tacit.report.figures import tidy

    stride = max(run["figures"]["stride"] for run in runs)
    ends = {run["figures"]["steps"][-1] for run in runs if run["figures"]["steps"]}
    steps = sorted({step for run in runs for step in run["figures"]["steps"] if step % stride == 0 or step in ends})
    names = dict.fromkeys(name for run in runs for name in run["figures"]["series"])
    bands = {}
    for name in names:
        by_step: dict[int, list[float]] = {}
        for run in runs:
            series = run["figures"]["series"].get(name, ())
            for step, value in zip(run["figures"]["steps"], series, strict=False):
                if value is not None:
                    by_step.setdefault(step, []).append(value)
        points = [mean_and_spread(by_step[step]) if by_step.get(step) else None for step in steps]
        bands[name] = {
            "mean": [tidy(float(point["mean"])) if point else None for point in points],
            "std": [tidy(point["std"]) if point else None for point in points],
            "n": [point["n"] if point else 0 for point in points],
        }
    return {"steps": steps, "bands": bands}
