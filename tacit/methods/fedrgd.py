"""FedRGD: clients are averaged in groups, each with a replica of the server's model, and then the groups."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from tacit.contract.method import AtLeastOne, Reply, Task, mean_model
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.methods.fixmatch import FixMatch
from tacit.pieces.aggregate import gradient_diversity, group_mean, stacked, unstacked


@dataclass(frozen=True)
class FedRGD(FixMatch):
    """Clients learn confident pseudo-labels as in FixMatch, the server its labels, at the same time. Clients are dealt
    into groups; each group is averaged with a replica of the server's model, and the mean of the groups goes on.

    So the labels weigh more than one client, and models that moved apart meet in smaller circles first. Nets have
    group norm. Where some clients are fully labelled, their mean takes the server's place; where clients hold a few
    labels each, the groups have no replica (both our own construction).
    """

    groups: Annotated[AtLeastOne, "into which the clients of a round are dealt (S)"] = 2
    start: Annotated[
        Literal["global", "group"], "clients go on from the global model, or always from that of the same group"
    ] = "global"

    citation: ClassVar[str] = (
        "Zhang et al., Improving Semi-supervised Federated Learning by Reducing the Gradient Diversity of Models, "
        "IEEE Big Data 2021"
    )
    means: ClassVar = "groups"
    client_sends: ClassVar = {"model": "weights", "unlabeled": "count"}  # 0: a fully labelled client
    merges_sums: ClassVar = {}
    merges_each: ClassVar = "it averages clients in groups and measures how far apart each of their steps is"
    presets: ClassVar = {
        "paper": {"net.norm": "gn"},
        "released": {
            "start": "group",
            "train.nesterov": True,
            "train.weight_decay": 1e-4,
            "train.schedule": "cosine",
            "train.lr": 0.165,
            "train.batch": 64,
        },
        "smoke": {"warmup": 1, "threshold": 0.6, "train.lr": 0.1},
    }

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        clients = hub.sample_clients()
        starts = self._group_models(state)
        if self.start == "group":
            groups = [client % self.groups for client in clients]
        else:  # dealt like cards: sizes differ by one at most
            groups = (torch.randperm(len(clients), generator=hub.rng("groups")) % self.groups).tolist()
        return [Task(client, {"model": starts[g]}, group=g) for client, g in zip(clients, groups, strict=True)]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        reply = super().client_train(task, memory, me)
        return dataclasses.replace(reply, send={**reply.send, "unlabeled": len(me.shard.unlabeled)})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        before = weights_in(state, "model")
        members, replica = self._replica(before, [reply for reply in replies if reply.examples > 0], hub)
        models = self._group_models(state)
        used = sorted({member.group for member in members})
        for group in used:
            inside = (member.weights("model") for member in members if member.group == group)
            models[group] = group_mean(inside, replica)
        if self.start == "global":
            moved = [*(member.weights("model") for member in members), *([replica] if replica else [])]
            hub.note(diversity=gradient_diversity(before, moved))
        if not used:
            return {**state, "model": replica or before}
        groups: Payload = {"groups": stacked(models)} if self.start == "group" else {}
        circles = [Reply(send={"model": models[group]}, examples=1) for group in used]
        return {"model": hub.mean_model(before, circles), **groups}

    def _replica(self, before: Weights, replies: list[Reply], hub: Hub) -> tuple[list[Reply], Weights | None]:
        """Who is dealt into groups, and the labelled party's model that joins each of them, if there is one."""
        if len(hub.shard.labeled):
            return replies, hub.finetune(before)
        labeled = [reply for reply in replies if not reply.send["unlabeled"]]
        others = [reply for reply in replies if reply.send["unlabeled"]]
        return (others, mean_model(labeled)) if labeled and others else (replies, None)

    def _group_models(self, state: Payload) -> list[Weights]:
        """Where each group stands."""
        if "groups" in state:
            return unstacked(weights_in(state, "groups"))
        return [weights_in(state, "model")] * self.groups
