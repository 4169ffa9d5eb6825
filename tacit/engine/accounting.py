"""How much privacy was spent: (epsilon, delta) by dp-accounting, from what was released in every round.

Poisson sampling: two federations are neighbours if one has a client more (ADD_OR_REMOVE_ONE); a client moves the sum
by `clip` at most. A fixed number of clients: neighbours differ in one client's data (REPLACE_ONE); it moves the sum by
twice `clip`, so the noise counts half. Rényi accounting in both (Mironov et al. 2019; Wang et al., AISTATS 2019).
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from tacit.core.errors import TacitError
from tacit.core.safeguards import Privacy


class Release(NamedTuple):
    """What was released of clients in a round: how many there are, how many are asked on average, with which noise.

    `noise` is the one of all that was released together, in multiples of what one client can add to the sum.
    """

    among: int
    asked: int
    noise: float


def combined_noise(model: float, statistics: float, count: int) -> float:
    """The noise of one release that tells as much as the model and so many statistics: (1/z² + n/z_s²)^(−½).

    >>> round(combined_noise(1.0, 1.0, 3), 3), combined_noise(2.0, 0.0, 0)
    (0.5, 2.0)
    """
    if not model or (count and not statistics):
        return 0.0
    return float((model**-2 + (count * statistics**-2 if count else 0.0)) ** -0.5)


def epsilon(settings: Privacy, releases: Iterable[Release]) -> float | None:
    """What all these releases together cost at `privacy.delta`; None: there was no noise, so there is no bound."""
    counts: dict[Release, int] = {}
    for release in releases:
        counts[release] = counts.get(release, 0) + 1
    if any(release.noise <= 0 for release in counts):
        return None
    return _epsilon(settings.sampling, settings.delta, tuple(sorted(counts.items()))) if counts else 0.0


@lru_cache(maxsize=256)
def _epsilon(sampling: str, delta: float, counts: tuple[tuple[Release, int], ...]) -> float:
    whole = _composed(sampling, delta, counts, amplified=True)
    if sampling == "poisson":
        return whole
    # The bound for sampling a fixed number is loose where many are asked: both hold, the lower one counts.
    return min(whole, _composed(sampling, delta, counts, amplified=False))


def _composed(sampling: str, delta: float, counts: tuple[tuple[Release, int], ...], amplified: bool) -> float:
    accounting, rdp = _libraries()
    relation = accounting.NeighboringRelation
    poisson = sampling == "poisson"
    accountant = rdp.RdpAccountant(neighboring_relation=relation.ADD_OR_REMOVE_ONE if poisson else relation.REPLACE_ONE)
    with _without_warnings():
        for release, times in counts:
            event = accounting.GaussianDpEvent(release.noise if poisson else release.noise / 2)
            if amplified and release.asked < release.among:
                if poisson:
                    event = accounting.PoissonSampledDpEvent(release.asked / release.among, event)
                else:
                    event = accounting.SampledWithoutReplacementDpEvent(release.among, release.asked, event)
            accountant.compose(event, times)
        return float(accountant.get_epsilon(delta))


def noise_for(settings: Privacy, target: float, among: int, asked: int, rounds: int) -> float:
    """The least noise (to three digits) with which so many rounds cost `target` at most: to choose a setting by."""
    low, high = 0.01, 1.0
    while (spent := epsilon(settings, [Release(among, asked, high)] * rounds)) is None or spent > target:
        low, high = high, high * 2
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        spent = epsilon(settings, [Release(among, asked, middle)] * rounds)
        low, high = (low, middle) if spent is not None and spent <= target else (middle, high)
    return high


def released_in(records: Iterable[Mapping[str, Any]]) -> Iterator[Release]:
    """The releases of the rounds that are recorded."""
    for record in records:
        if told := record.get("privacy"):
            yield Release(int(told["among"]), int(told["asked"]), float(told["noise"]))


def check_installed(settings: Privacy) -> None:
    """Refuse noise that nobody could account for."""
    if settings.on and settings.noise:
        _libraries()


def _libraries() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ImportError:
        raise TacitError(
            "[privacy] needs dp-accounting, which tells how much privacy is spent: pip install 'tacit[privacy]'."
        ) from None
    return dp_accounting, rdp


@contextmanager
def _without_warnings() -> Iterator[None]:
    """dp-accounting tells of each order of its bound that did not converge and was left out; the others suffice."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
