"""Differential privacy in the engine: what a merge is handed is the noised mean of all clients, and nothing else.

A merge may look at every reply that it is given. So noise is added before it: each reply that it gets is the same, the
mean of what clients sent, clipped and noised. Whatever a method makes of that costs no more privacy.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tacit.backends import Outcome
from tacit.backends.protect import joint_norm, with_share
from tacit.contract.method import Method, Reply, Task
from tacit.contract.parties import Hub, RoundInfo, Setup
from tacit.contract.statistics import as_declared, as_vector, loosened, norm_bound, statistics_of
from tacit.core import seeds
from tacit.core.errors import TacitError
from tacit.core.payload import Payload, Weights
from tacit.core.safeguards import Privacy
from tacit.engine.accounting import Release, combined_noise, epsilon, released_in
from tacit.engine.bounds import bases_of
from tacit.pieces.aggregate import is_learned
from tacit.pieces.privacy import clip_factor, clipped, gaussian


class BudgetSpent(Exception):
    """The next round would cost more privacy than `privacy.epsilon` allows: the run ends before it."""


@dataclass(frozen=True)
class PrivateRound:
    """The privacy of one round; where there is none, everything goes through it as it is."""

    setup: Setup
    method: Method
    release: Release | None = None  # None: nothing of clients is released, or there is no [privacy]
    spent: list[Release] = field(default_factory=list)  # before this round
    record: dict[str, Any] = field(default_factory=dict)  # what was spent, this round included when it is merged

    @classmethod
    def of(
        cls, setup: Setup, method: Method, hub: Hub, tasks: Sequence[Task], records: Iterable[Mapping[str, Any]]
    ) -> "PrivateRound":
        """What is planned, before anything is sent; BudgetSpent where it would cost too much."""
        if not setup.privacy.on:
            return cls(setup, method)
        release, spent = planned(setup.privacy, method, hub, tasks), list(released_in(records))
        if release is not None:
            within_budget(setup.privacy, spent, release)
        return cls(setup, method, release, spent, {"epsilon": epsilon(setup.privacy, spent)})

    def shared_out(self, tasks: Sequence[Task]) -> list[Task]:
        """Tasks that tell of how many shares a client's noise is one, where clients add it."""
        if self.release is None:
            return list(tasks)
        return [with_share(task, self.setup.privacy, self.release.asked) for task in tasks]

    def handed(
        self, round_info: RoundInfo, state: Payload, tasks: Sequence[Task], outcomes: list[Outcome], secret: int
    ) -> list[Outcome]:
        """What the merge gets: as many replies as clients are asked on average, all of them the noised mean."""
        if self.release is None:
            return outcomes
        release = as_it_came(self.setup.privacy, self.release, len(outcomes))
        after = within_budget(self.setup.privacy, self.spent, release)
        self.record.update(epsilon=after, privacy=release._asdict(), client_metrics={})
        name = (self.setup.seed, round_info.stage, round_info.round, "server", "privacy noise")
        generator = seeds.generator(*name, secret) if secret else seeds.generator(*name)
        replies = [outcome.reply for outcome in outcomes]
        send = noised_mean(self.setup, self.method, state, tasks, replies, release.asked, generator)
        same = Outcome(Reply(send=send, examples=float(self.setup.privacy.examples)), None, 0.0)
        return [same] * release.asked

    def needed(self, quorum: int) -> int:
        """Replies without which no merge is tried; identical ones are not left out one by one to find a bad one."""
        return quorum if self.release is None else self.release.asked

    def answered(self, usable: list[Outcome], used: list[Outcome]) -> list[Outcome]:
        """Whose replies are in the merged model, for the record: clients' figures are none of it."""
        return used if self.release is None else usable


def needs_secret(setup: Setup) -> bool:
    """Whether who is asked and the server's noise must not follow from the seed, which every site knows."""
    by_system = setup.privacy.randomness == "system" or (setup.privacy.randomness == "auto" and setup.real_sites)
    return setup.privacy.on and by_system


def declared(setup: Setup, method: Method) -> Mapping[str, str]:
    """What clients send: as the method says, or with noise in it already."""
    at_clients = setup.privacy.on and setup.privacy.where == "clients"
    return loosened(method.client_sends) if at_clients else method.client_sends


def planned(settings: Privacy, method: Method, hub: Hub, tasks: Sequence[Task]) -> Release | None:
    """What this round would release of its clients; None where it releases nothing.

    A method that does not draw its clients with `hub.sample_clients` has no gain from chance.
    """
    if not method.client_sends:
        return None
    if len({task.client for task in tasks}) < len(tasks):
        raise TacitError(
            f"{type(method).__name__} asks a client twice in a round, which its noise would not cover. Leave [privacy] "
            "out, or choose another method."
        )
    if len(hub.samples) > 1:
        raise TacitError(
            f"{type(method).__name__} draws its clients more than once in a round, so that nobody knows by which "
            "chance a client is asked. Call hub.sample_clients once, or leave [privacy] out."
        )
    among, asked = hub.samples[0] if hub.samples else (len(tasks), len(tasks))
    noise = combined_noise(settings.noise, settings.statistics_noise, len(statistics_of(method.client_sends)))
    return Release(among, asked, noise) if asked else None


def within_budget(settings: Privacy, spent: Sequence[Release], release: Release) -> float | None:
    """What will have been spent after this release, or BudgetSpent."""
    after = epsilon(settings, [*spent, release])
    if settings.epsilon is not None and (after is None or after > settings.epsilon):
        now = epsilon(settings, spent)
        raise BudgetSpent(
            f"the privacy budget is spent: epsilon is {now:.3g}, one more round would make it {after or math.inf:.3g}, "
            f"and privacy.epsilon is {settings.epsilon:g}"
        )
    return after


def as_it_came(settings: Privacy, release: Release, used: int) -> Release:
    """The release with the noise that is in it: shares of clients that did not answer are missing.

    >>> as_it_came(Privacy(clip=1, where="clients", sampling="fixed"), Release(9, 4, 2.0), used=1).noise
    1.0
    """
    if settings.where == "server":
        return release
    return release._replace(noise=release.noise * math.sqrt(min(used, release.asked) / release.asked))


def noised_mean(
    setup: Setup,
    method: Method,
    state: Payload,
    tasks: Sequence[Task],
    replies: Sequence[Reply],
    asked: int,
    generator: torch.Generator,
) -> Payload:
    """The mean of all that clients sent, by name: clipped, with a fixed denominator, and noised."""
    settings, classes = setup.privacy, len(setup.classes)
    at_server = settings.where == "server"
    send: Payload = {**_weights(settings, replies, common_bases(method, state, tasks), asked, generator)}
    for name, kind in statistics_of(method.client_sends).items():
        bound = norm_bound(kind, classes, settings.examples)
        total = torch.zeros(kind.sizes(classes), dtype=torch.float64)
        for reply in replies:
            vector = as_vector(reply.send.get(name), kind, classes)
            total += clipped(vector, bound) if at_server else vector
        if at_server:
            total += gaussian(total, settings.statistics_noise * bound, generator)
        send[name] = as_declared(total / asked, kind)
    return send


def common_bases(method: Method, state: Payload, tasks: Sequence[Task]) -> dict[str, Weights]:
    """The weights that all clients were sent; different ones for different clients have no common mean."""
    each = [bases_of(method, task, state) for task in tasks] or [bases_of(method, None, state)]
    for other in each[1:]:
        for name, base in each[0].items():
            if base is not other[name] and not _same(base, other[name]):
                raise TacitError(
                    f"{type(method).__name__} sends different '{name}' to different clients, so that their updates "
                    "have no common mean to be noised. Leave [privacy] out, or choose another method."
                )
    return each[0]


def _same(one: Weights, other: Weights) -> bool:
    return set(one) == set(other) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def _weights(
    settings: Privacy, replies: Sequence[Reply], bases: Mapping[str, Weights], asked: int, generator: torch.Generator
) -> dict[str, Weights]:
    """base + (Σ clipped updates + noise) / asked, of all that is learned; the rest stays as it was sent down."""
    assert settings.clip is not None
    totals: dict[str, dict[str, Tensor]] = {
        name: {inner: torch.zeros(tensor.shape, dtype=torch.float64) for inner, tensor in _learned(base).items()}
        for name, base in bases.items()
    }
    at_server = settings.where == "server"
    for reply in replies:
        groups = {name: reply.weights(name) for name in bases}
        factor = clip_factor(joint_norm(groups, Task(0, dict(bases))), settings.clip) if at_server else 1.0
        for name, total in totals.items():
            for inner, tensor in total.items():
                tensor += factor * (groups[name][inner].double() - bases[name][inner].double())
    deviation = settings.noise * settings.clip if at_server else 0.0
    means: dict[str, Weights] = {}
    for name, base in bases.items():
        means[name] = dict(base)
        for inner, summed in totals[name].items():
            noised = summed + gaussian(summed, deviation, generator) if deviation else summed
            means[name][inner] = (base[inner].double() + noised / asked).to(base[inner].dtype)
    return means


def _learned(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if is_learned(name, tensor)}


def private_summary(settings: Privacy, records: Sequence[Mapping[str, Any]], ended: str) -> dict[str, Any]:
    """What summary.json tells of privacy; nothing where there is none."""
    if not settings.on:
        return {}
    relation = "one client more or less" if settings.sampling == "poisson" else "one client's data replaced"
    spent = epsilon(settings, released_in(records))
    told: dict[str, Any] = {"epsilon": spent, "delta": settings.delta, "neighbours": relation, "where": settings.where}
    return {"privacy": {**told, "budget": settings.epsilon, "ended": ended}}


def privacy_spent(summary: Mapping[str, Any]) -> list[str]:
    """What a summary tells of privacy, in sentences.

    >>> told = {"epsilon": 2.5, "delta": 1e-5, "neighbours": "one client more or less", "ended": ""}
    >>> privacy_spent({"privacy": told})
    ['Privacy spent: epsilon 2.5 at delta 1e-05 (neighbours: one client more or less).']
    """
    told = summary.get("privacy")
    if not isinstance(told, Mapping):
        return []
    if told.get("epsilon") is None:
        return ["Updates were clipped, but no noise was added: no privacy is promised."]
    spent = (
        f"Privacy spent: epsilon {told['epsilon']:.3g} at delta {told['delta']:g} (neighbours: {told['neighbours']})."
    )
    return [spent, f"The run ended early: {told['ended']}."] if told.get("ended") else [spent]
