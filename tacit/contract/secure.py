"""Secure aggregation, looked at before any work: whether each stage can merge from sums, and over enough clients."""

from collections.abc import Sequence

from tacit.contract.kinds import parse
from tacit.contract.method import Stage
from tacit.contract.sums import why_not
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment

COARSEST = 2.0**-12  # steps that a sum may have, as a share of its range
OFF = "or switch privacy.secure_aggregation off"


def check_secure(experiment: Experiment, stages: Sequence[Stage]) -> None:
    """Refuse an experiment whose settings alone tell that sums would not be enough, or would be no secret."""
    if not experiment.privacy.secure_aggregation:
        return
    for stage in stages:
        if why := why_not(stage.method) or stage.method.needs_each(experiment):
            where = "" if stage.name == "main" else f" (in its stage '{stage.name}')"
            raise TacitError(
                f"The method '{experiment.method['name']}' cannot merge from sums alone{where}: {why}. Otherwise "
                f"choose another method, {OFF}."
            )
    if experiment.robust.on:
        raise TacitError(
            "[robust] looks at each client's reply, which secure aggregation keeps from the server: leave it out, "
            f"{OFF}."
        )
    if experiment.evaluate_clients:
        raise TacitError(
            "evaluate_clients = true needs each client's model, which secure aggregation keeps from the server: write "
            f"evaluate_clients = false, {OFF}."
        )
    if experiment.data.validation:
        raise TacitError(
            f"data.validation = {experiment.data.validation:g} lets each client tell how a model does on its own "
            f"images, which secure aggregation does not hide: write data.validation = 0, {OFF}."
        )
    if experiment.backend.name != "flower":  # at real sites it is known when they have said who they are
        check_enough(experiment, experiment.participation.count(experiment.data.clients), "a round asks")


def check_enough(experiment: Experiment, asked: int, what: str) -> None:
    """Refuse sums over so few clients that they would be no secret, or over so many that they have no room."""
    privacy = experiment.privacy
    least, circle = privacy.least(asked), privacy.circle(asked)
    if asked < 2:
        raise TacitError(
            f"Secure aggregation adds up what clients send, but {what} {asked}: a sum over one client is that client's "
            f"own. Ask at least two, {OFF}."
        )
    if least > circle:
        raise TacitError(
            f"privacy.threshold = {privacy.threshold} clients are needed to open a sum, but only {circle} share a "
            f"secret ({what} {asked}): no round could count. Write privacy.threshold = {circle} or less, or more "
            "privacy.neighbours."
        )
    if 2 * least <= circle:
        raise TacitError(
            f"privacy.threshold = {privacy.threshold} is half of the {circle} clients that share a secret, or less: a "
            f"server could open one by one half and another by the other. Write at least {circle // 2 + 1}, or 0."
        )
    if asked * 2.0 ** (1 - privacy.bits) > COARSEST:
        raise TacitError(
            f"privacy.bits = {privacy.bits} leaves too few bits to each of {asked} clients. Write privacy.bits = 64."
        )


def check_labeled(experiment: Experiment, stages: Sequence[Stage], clients: int, labeled: int) -> None:
    """Refuse stages in which sums are over labelled clients alone, where there are too few of these."""
    if not experiment.privacy.secure_aggregation:
        return
    check_enough(experiment, experiment.participation.count(clients), "a round asks")
    for stage in stages:
        if not labeled or stage.rounds == 0:
            continue
        if stage.method.asks_labeled:
            asked = experiment.participation.count(labeled)
            check_enough(experiment, asked, f"the stage '{stage.name}' asks labelled clients alone, of which there are")
        some = [name for name, text in stage.method.client_sends.items() if parse(text).due]
        if some and labeled < clients:
            raise TacitError(
                f"Only clients {'with' if parse(stage.method.client_sends[some[0]]).due == 'labeled' else 'without'} "
                f"labels send '{some[0]}', and {labeled} of {clients} hold labels: a sum over few clients may be one "
                f"client's own. Let the server or every client hold labels (data.placement), {OFF}."
            )
