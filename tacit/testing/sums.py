"""Whether a merge gives the same from sums alone as from each client's reply: what `merges_sums` declares."""

import copy
import math
from collections.abc import Container, Sequence

from torch import Tensor

from tacit.contract.kinds import parse
from tacit.contract.method import Method, Reply
from tacit.contract.parties import Hub, Labeled, Shard
from tacit.contract.sums import said_of_this_merge, summation, summed, why_not
from tacit.core.payload import Payload, seal
from tacit.core.safeguards import Privacy
from tacit.testing.findings import Problem, Verdict, judged, sentence
from tacit.testing.observe import entries
from tacit.testing.trial import Trial

# Fine steps and a wide range: what is looked at is the merge, not the rounding.
FINE = Privacy(secure_aggregation=True, bits=64, range=1000.0)
CLOSE = 1e-5  # float32 adds up in another order
TRAINED = 1e-3  # a server that trains after the merge makes more of a difference in the last digit


def sums(trial: Trial) -> Verdict:
    """Every merge of the run that all rules look at, made again from sums."""
    whole, problems, looked = trial.whole, list[Problem](), 0
    setup = whole.plan.setup
    for merging in whole.notebook.merges:
        method, hub = merging.method, merging.hub
        declares = method.merges_sums and said_of_this_merge(method)
        if not merging.replies or not declares or method.needs_each(whole.plan.experiment):
            continue
        if any(parse(kind).word == "any" for kind in method.client_sends.values()):
            continue  # the rule on bad replies tells of it
        remedy = (
            "Let server_merge use replies only through means by sum_weight and through sums; or take merges_sums out, "
            "and say in merges_each why it needs each reply."
        )
        if why := why_not(method):
            problems.append(Problem(sentence(f"Stage '{hub.stage}': {why}"), "Declare it beside server_merge, or not."))
            break
        moment = (hub.stage, hub.round)
        sent = next(one.sent for one in whole.notebook.crossings if (one.stage, one.round) == moment)
        try:
            why = apart(method, merging.state, merging.replies, hub, sent, setup.labeled_clients)
        except Exception as error:
            why = f"it fails: {trial.told(error)}"
        looked += 1
        if why:
            where = f"In round {hub.round} of stage '{hub.stage}' the merge differs if it is given sums alone"
            problems.append(Problem(sentence(f"{where}: {why}"), remedy))
            break
    return judged(problems, f"{looked} merges from sums alone" if looked else "it declares none (merges_sums)")


def apart(
    method: Method, state: Payload, replies: Sequence[Reply], hub: Hub, sent: Payload, labeled: Container[int]
) -> str:
    """The first entry of the state that differs between both ways to merge, and by how much; '' if none does.

    Once with a server that has no images, so that nothing is trained after the merge, and once as it is.
    """
    most = max([1.0, *(reply.examples for reply in replies)])
    rule = summation(method, sent, hub.classes, FINE, len(replies), most)
    mean = rule.decode(summed(rule, replies, labeled), len(replies)).reply
    for server, tolerance in ((without_images(hub), CLOSE), (hub, TRAINED)):
        usual = dict(entries(method.server_merge(seal(state), list(replies), server)))
        unseen = dict(entries(method.server_merge(seal(state), [mean], server)))
        for name in {**usual, **unseen}:
            if name not in usual or name not in unseen:
                return f"'{name}' is {'missing' if name in usual else 'there in addition'}"
            if not (far := distance(usual[name], unseen[name])) <= tolerance:
                return f"'{name}' is off by {far:.3g}"
    return ""


def without_images(hub: Hub) -> Hub:
    """A server that holds nothing."""
    server, own = copy.copy(hub), hub.shard.labeled
    server.shard = Shard(Labeled(own.images[:0], own.labels[:0]), hub.shard.unlabeled[:0])
    return server


def distance(one: object, other: object) -> float:
    """By how much two entries differ, as a share of the largest number in them where that is above 1.

    >>> import torch
    >>> distance(torch.tensor([1.0, 200.0]), torch.tensor([1.0, 201.0])), distance(1, torch.ones(1))
    (0.005, inf)
    """
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype:
        if not one.numel():
            return 0.0
        return float((one.double() - other.double()).abs().max()) / max(1.0, float(one.double().abs().max()))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other) / max(1.0, abs(one))
    return math.inf
