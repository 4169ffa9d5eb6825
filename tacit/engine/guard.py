"""The guard: which model is shipped, the method's, that of the labels alone (its twin), or their average.

Labelled images that parties keep back, and that nobody learns, decide. The rule stands in `evaluation.paired`: the
method's model is shipped if it leads its twin by `guard.lead` standard errors of the paired difference or more; with
the default of 0, unless the twin was right more often.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from tacit.core.payload import Weights
from tacit.evaluation.paired import Judgement
from tacit.pieces.aggregate import weighted_mean

TWIN, METHOD, AVERAGE = "twin", "method", "average"
FEW_IMAGES = 50  # kept back: below this only large differences can be told


def candidates(method: Weights | None, twin: Weights) -> dict[str, Weights]:
    """The models to choose from, the one to fall back on first; a method without a model leaves the twin alone.

    >>> import torch
    >>> candidates({"w": torch.tensor(1.0)}, {"w": torch.tensor(3.0)})["average"]
    {'w': tensor(2.)}
    """
    if method is None:
        return {TWIN: twin}
    models = {TWIN: twin, METHOD: method}
    alike = {name: tensor.shape for name, tensor in method.items()} == {n: t.shape for n, t in twin.items()}
    return {**models, AVERAGE: weighted_mean([method, twin], [0.5, 0.5])} if alike else models


def judged(names: Sequence[str], counts: Tensor, lead: float) -> dict[str, Any]:
    """A comparison as the round's record has it: the figures of all, and which would be shipped now, with its interval.

    >>> import torch
    >>> record = judged(["twin", "method"], torch.tensor([[30.0], [2.0], [7.0], [11.0]]), lead=0.3)
    >>> record["guard_twin"], record["guard_method"], record["guard"]["ships"]
    (0.26, 0.36, 'method')
    >>> record["guard"]["against_twin"]["method"]
    {'difference': 0.1, 'low': -0.0201, 'high': 0.2124, 'errors': 1.6667}
    """
    found = Judgement(counts)
    against = {name: found.pairs(number, 0) for number, name in enumerate(names) if number}
    return {
        **{f"guard_{name}": found.figure(number) for number, name in enumerate(names)},
        "guard": {
            "ships": names[found.best(lead)],
            "by": "balanced_accuracy" if found.balanced else "accuracy",
            "images": found.images,
            "against_twin": {
                name: {
                    "difference": round(pairs.difference, 4),
                    "low": round(pairs.interval[0], 4),
                    "high": round(pairs.interval[1], 4),
                    "errors": round(pairs.errors, 4),
                }
                for name, pairs in against.items()
            },
        },
    }


def verdict(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the last comparison of a run said, with the test figures of the method and its twin beside it, for the
    summary. {}: there was none."""
    compared = [record for record in records if "guard" in record]
    if not compared:
        return {}
    last = compared[-1]
    figures = {name: last.get(f"guard_{name}") for name in (METHOD, TWIN, AVERAGE)}
    tested = {TWIN: TWIN, METHOD: "main"}
    found = {**last["guard"], "figures": figures, "round": last["round"], "tested": _tested(records, tested)}
    return {**found, "sentence": sentence(found)}


def _tested(records: Sequence[Mapping[str, Any]], stages: Mapping[str, str]) -> dict[str, float | None]:
    """Test accuracy of the last evaluated round of these stages, by what they train."""
    last = {record["stage"]: record["accuracy"] for record in records if record.get("accuracy") is not None}
    return {name: last.get(stage) for name, stage in stages.items()}


def sentence(found: Mapping[str, Any]) -> str:
    """What was shipped, and on what grounds, in words.

    >>> method = {"difference": 0.1, "low": -0.0201, "high": 0.2124, "errors": 1.6667}
    >>> told = {"ships": "method", "by": "accuracy", "images": 50, "against_twin": {"method": method}}
    >>> print(sentence(told))
    Shipped: the method's model. On 50 labelled images that nobody learned, it is ahead of the labels alone by 10.0
    points of accuracy (95 % interval -2.0 to +21.2): chance could have made that.
    >>> print(sentence({**told, "ships": "twin"})[:57])
    Shipped: the model of the labels alone (the guard's twin)
    """
    images, by = found["images"], found["by"].replace("_", " ")
    if not images:
        return (
            "Shipped: the model of the labels alone (the guard's twin). No party judged by the labelled images that it "
            "keeps back, so nothing speaks for the method's."
        )
    name = found["ships"] if found["ships"] != TWIN else METHOD
    pair = found["against_twin"].get(name)
    if pair is None:
        return "Shipped: the model of the labels alone (the guard's twin). The method made no model."
    low, high, lead = 100 * pair["low"], 100 * pair["high"], pair["difference"]
    points = f"{abs(100 * lead):.1f} points of {by} (95 % interval {low:+.1f} to {high:+.1f})"
    how = f"ahead of the labels alone by {points}" if lead > 0 else f"behind the labels alone by {points}"
    if not lead:
        how = f"right as often as the labels alone (95 % interval of the difference {low:+.1f} to {high:+.1f} points)"
    sure = "no difference is seen" if not lead else "chance could have made that"
    if low > 0 or high < 0:
        sure = "that is more than chance makes"
    few = f" With fewer than {FEW_IMAGES} such images only large differences can be told." * (images < FEW_IMAGES)
    shipped, what = {
        TWIN: ("the model of the labels alone (the guard's twin)", "the method's model"),
        METHOD: ("the method's model", "it"),
        AVERAGE: ("the average of the method's model and that of the labels alone", "it"),
    }[found["ships"]]
    return f"Shipped: {shipped}. On {images:,} labelled images that nobody learned, {what} is {how}: {sure}.{few}"
