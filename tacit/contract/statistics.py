"""What clients send beside weights, as vectors with a bound: so that it can be clipped, averaged and noised.

The bound on a statistic's norm follows from what it was declared to be (contract/kinds.py).
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from tacit.contract.kinds import Kind, parse
from tacit.core.payload import Value
from tacit.pieces.privacy import as_distribution

UNBOUNDED = ("", "number", "any")  # of these nobody can say how large they get


def statistics_of(sends: Mapping[str, str]) -> dict[str, Kind]:
    """What always goes up beside weights, by name. What may be missing ("?") is not among it: nobody gets to see it.

    >>> list(statistics_of({"model": "weights", "counts": "counts[K]", "trace?": "share"}))
    ['counts']
    """
    parsed = {name: parse(text) for name, text in sends.items() if not name.endswith("?")}
    return {name: kind for name, kind in parsed.items() if kind.word != "weights"}


def norm_bound(kind: Kind, classes: int, examples: int) -> float:
    """The largest Euclidean norm that a statistic can have: of shares by what they are, of counts by `examples`.

    >>> [round(norm_bound(parse(text), 4, 100), 3) for text in ("share", "distribution[K]", "distributions[K,K]")]
    [1.0, 1.0, 2.0]
    >>> norm_bound(parse("counts[K]"), 4, 100), norm_bound(parse("number"), 4, 100)
    (100.0, inf)
    """
    if kind.word in UNBOUNDED:
        return math.inf
    if kind.word == "distributions":
        return math.sqrt(math.prod(kind.sizes(classes)[:-1]))  # one for each row
    return float(examples) if kind.word in ("count", "counts") else 1.0


def as_vector(value: Value | None, kind: Kind, classes: int) -> Tensor:
    """A statistic in double precision; zeros where a client has none ("if labeled")."""
    shape = kind.sizes(classes)
    if value is None:
        return torch.zeros(shape, dtype=torch.float64)
    return value.double() if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)  # type: ignore[arg-type]


def as_declared(vector: Tensor, kind: Kind) -> Value:
    """A noisy statistic made what was declared again: nothing negative, shares that sum to one.

    >>> as_declared(torch.tensor([-1.0, 3.0]), parse("counts[K]")), as_declared(torch.tensor(1.4), parse("share"))
    (tensor([0., 3.]), 1.0)
    """
    if kind.word == "share":
        return float(vector.clamp(0.0, 1.0))
    if kind.word == "count":
        return int(vector.clamp(min=0.0).round())
    whole = as_distribution(vector) if kind.word.startswith("distribution") else vector.clamp(min=0.0)
    return (whole if kind.dtype.is_floating_point else whole.round()).to(kind.dtype)


def loosened(sends: Mapping[str, str]) -> dict[str, str]:
    """What arrives where clients added noise themselves: the same names and shapes, any values.

    >>> loosened({"model": "weights", "counts": "counts[K] if labeled", "status": "share"})
    {'model': 'weights', 'counts': 'float64 [K]', 'status': 'number'}
    """
    loose = {}
    for name, text in sends.items():
        kind = parse(text)
        bounded = kind.word not in (*UNBOUNDED, "weights") and not name.endswith("?")
        loose[name] = (f"float64 [{','.join(kind.shape)}]" if kind.shape else "number") if bounded else text
    return loose
