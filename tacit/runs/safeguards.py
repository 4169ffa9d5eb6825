"""Which methods [robust] and [privacy] go with: told from what a method declares, before any work."""

from collections.abc import Sequence

from tacit.contract.kinds import parse
from tacit.contract.method import Method, Stage
from tacit.contract.statistics import UNBOUNDED, statistics_of
from tacit.core.errors import TacitError
from tacit.core.safeguards import Privacy
from tacit.core.settings import Experiment

WHY = {
    "groups": "it makes means of groups first, so that no mean is of clients",
    "nobody": "what clients send does not go into one mean",
}


def check_safeguards(experiment: Experiment, stages: Sequence[Stage]) -> None:
    """Refuse a safeguard where it would do nothing, or not what it says."""
    robust, privacy = experiment.robust, experiment.privacy
    for stage in stages:
        method = stage.method
        if method.means != "clients" and (robust.mean != "mean" or privacy.on):
            what = f'robust.mean = "{robust.mean}"' if robust.mean != "mean" else "[privacy]"
            raise TacitError(
                f"{what} is for methods that make one mean of all clients' models; {_name(method)} does not: "
                f"{WHY[method.means]}. Choose another method or option, or leave it out."
            )
        if experiment.server.normalize:
            _check_normalized(method, privacy)
        if privacy.on:
            _check_private(method, privacy)


def _check_normalized(method: Method, privacy: Privacy) -> None:
    """Refuse normalised averaging where the server does not see each client's model beside its number of examples."""
    why = WHY[method.means] if method.means != "clients" else ""
    if privacy.on or privacy.secure_aggregation:
        why = "with [privacy] it does not learn each client's number of examples"
    if why:
        raise TacitError(
            f"server.normalize = true divides each client's weight by its steps, which {_name(method)}'s server cannot "
            f"do here: {why}. Leave server.normalize out."
        )


def _check_private(method: Method, privacy: Privacy) -> None:
    """Refuse what noise cannot cover: things without a bound, weights that only some clients send."""
    for name, text in method.client_sends.items():
        kind = parse(text)
        if kind.word in UNBOUNDED and not name.endswith("?"):
            raise TacitError(
                f"[privacy]: {_name(method)} sends '{name}' as \"{text}\", of which nobody can say how large it gets, "
                "so that no noise covers it. Declare it as a share, a distribution or counts, or choose another method."
            )
        if kind.word == "weights" and (kind.due or name.endswith("?")):
            raise TacitError(
                f"[privacy]: {_name(method)} sends '{name}' from some clients only ({text}), so that their mean has no "
                "fixed denominator. Choose another method, or leave [privacy] out."
            )
    statistics = list(statistics_of(method.client_sends))
    if statistics and privacy.noise and not privacy.statistics_noise:
        raise TacitError(
            f"[privacy]: {_name(method)} sends {', '.join(statistics)} beside the model, and they would be told "
            "without noise: write statistics_noise = 10.0 (in multiples of their bound) beside noise."
        )


def _name(method: Method) -> str:
    return type(method).__name__
