"""How well scores tell members (images that a model learned from) from others: AUC, and hits at few false alarms.

The area under the curve is an average over all thresholds. An attack that names a few members for certain and knows
nothing of the rest has an area near one half, so the share of members found at 1 % false alarms is told beside it
(Carlini et al., Membership Inference Attacks From First Principles, IEEE S&P 2022).
"""

from dataclasses import dataclass

import numpy as np

FALSE_ALARMS = 0.01
TIMES = 1000  # samples of the bootstrap
AT_ONCE = 50  # of them in memory


@dataclass(frozen=True)
class Separation:
    """How well an attack's scores separate, with 95 % intervals. `hits` is None where there are too few others."""

    auc: float
    auc_interval: tuple[float, float]
    hits: float | None  # the share of members found at 1 % false alarms
    hits_interval: tuple[float, float] | None


def auc(members: np.ndarray, others: np.ndarray) -> float:
    """The share of (member, other) pairs in which the member has the higher score; a tie counts one half.

    >>> auc(np.array([3.0, 2.0, 0.0]), np.array([1.0, 0.0]))   # of 6 pairs 4 are right, 1 is a tie: 4.5 / 6
    0.75
    """
    own, rest = _counts(members, others)
    return float(_areas(own[None], rest[None])[0])


def hits_at(members: np.ndarray, others: np.ndarray, false_alarms: float = FALSE_ALARMS) -> float:
    """The share of members whose score is at least t, for the lowest t that at most 1 % of the others reach.

    >>> others = np.arange(1.0, 201.0)                          # 1 … 200: two of them may be taken for members
    >>> hits_at(np.array([200.5, 199.5, 199.0, 3.0]), others)   # t = 199, reached by 199 and 200: 3 of 4 are found
    0.75
    >>> hits_at(np.array([200.0, 200.0]), np.full(50, 200.0))   # no t is reached by members alone
    0.0
    """
    own, rest = _counts(members, others)
    return float(_hits(own[None], rest[None], false_alarms)[0])


def separation(members: np.ndarray, others: np.ndarray, chance: np.random.Generator) -> Separation:
    """Both figures, with intervals from a bootstrap of members and of others (percentiles, Efron 1979)."""
    enough = len(others) * FALSE_ALARMS >= 1
    of_members, of_others = _counts(members, others)
    areas, hits = list[np.ndarray](), list[np.ndarray]()
    for _ in range(0, TIMES, AT_ONCE):
        drawn = [chance.multinomial(c.sum(), c / c.sum(), size=AT_ONCE) for c in (of_members, of_others)]
        areas.append(_areas(drawn[0], drawn[1]))
        hits.append(_hits(drawn[0], drawn[1], FALSE_ALARMS))
    return Separation(
        auc(members, others),
        _middle(np.concatenate(areas)),
        hits_at(members, others) if enough else None,
        _middle(np.concatenate(hits)) if enough else None,
    )


def _counts(members: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many members and how many others have each score that occurs, the lowest first."""
    values, place = np.unique(np.concatenate([members, others]), return_inverse=True)
    own, rest = place[: len(members)], place[len(members) :]
    return np.bincount(own, minlength=len(values)), np.bincount(rest, minlength=len(values))


def _areas(members: np.ndarray, others: np.ndarray) -> np.ndarray:
    """One area for each row of counts."""
    below = others.cumsum(axis=1) - others
    pairs = members.sum(axis=1) * others.sum(axis=1)
    areas: np.ndarray = (members * (below + others / 2)).sum(axis=1) / pairs
    return areas


def _hits(members: np.ndarray, others: np.ndarray, false_alarms: float) -> np.ndarray:
    """One share for each row of counts."""
    found, alarms = (counts[:, ::-1].cumsum(axis=1) for counts in (members, others))
    allowed = np.floor(false_alarms * others.sum(axis=1) + 1e-9)
    best = np.where(alarms <= allowed[:, None], found, 0).max(axis=1)
    shares: np.ndarray = best / members.sum(axis=1)
    return shares


def _middle(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
