"""Clients that are bad on purpose (`faults.attackers`), in simulations alone: to see what a defence is worth.

sign-flip: the update turned round. scale: the update made longer. label-flip: all of the client's images are learned
with a wrong label, that of class K − 1 − y instead of y.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from tacit.contract.method import Reply, Task
from tacit.contract.parties import Labeled, Setup, Shard
from tacit.core import seeds
from tacit.core.payload import Payload
from tacit.pieces.robust import shortened


def attackers(setup: Setup) -> frozenset[int]:
    """Who attacks: the same clients in every round, drawn by the seed; at real sites nobody."""
    if not setup.faults.attackers or setup.real_sites:
        return frozenset()
    order = torch.randperm(setup.clients, generator=seeds.generator(setup.seed, "attackers"))
    return frozenset(order[: setup.faults.attackers].tolist())


def attacking_shard(shard: Shard, truth: Tensor, client: int, setup: Setup) -> Shard:
    """What this client learns from: with label-flip, all its images with a wrong label."""
    if setup.faults.attack != "label-flip" or client not in attackers(setup):
        return shard
    return mislabeled(shard, truth, len(setup.classes))


def mislabeled(shard: Shard, truth: Tensor, classes: int) -> Shard:
    """All images of a shard, each once, with the label K − 1 − y; those whose class nobody knows are left out.

    >>> shard = Shard(Labeled(torch.zeros(1, 1, 8, 8), torch.tensor([0])), torch.ones(3, 1, 8, 8))
    >>> mislabeled(shard, torch.tensor([2, -1, 1]), classes=3).labeled.labels
    tensor([2, 0, 1])
    """
    known = truth >= 0
    images, labels = shard.unlabeled[known.to(shard.unlabeled.device)], truth[known].to(shard.labeled.labels.device)
    if not shard.repeated:  # else its labelled images are among the others already
        images, labels = torch.cat([shard.labeled.images, images]), torch.cat([shard.labeled.labels, labels])
    return Shard(Labeled(images, classes - 1 - labels), shard.unlabeled[:0], views=shard.views)


def attacked(reply: Reply, task: Task, setup: Setup) -> Reply:
    """What an attacker sends instead of what it learned; everybody else's reply as it is."""
    faults = setup.faults
    if faults.attack == "label-flip" or task.client not in attackers(setup):
        return reply
    factor = faults.attack_scale * (-1.0 if faults.attack == "sign-flip" else 1.0)
    send: Payload = dict(reply.send)
    for name, value in reply.send.items():
        if isinstance(value, Mapping):
            base = task.weights(name) if name in task.send else {}
            send[name] = shortened(reply.weights(name), base, factor)
    return dataclasses.replace(reply, send=send)


def attacking(setup: Setup, clients: Iterable[int]) -> dict[str, list[int]]:
    """For the record: which of the clients that answered are bad; nothing where nobody attacks."""
    bad = attackers(setup)
    return {"attackers": [client for client in clients if client in bad]} if bad else {}
