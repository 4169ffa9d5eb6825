"""FedAvg on the labels that exist: the lower bound, the upper bound (`data.reveal = "all"`), FedAvg+, SCAFFOLD."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from tacit.contract.method import UNKNOWN, AtLeastOne, Count, Held, Method, Reply, Share, Task, mean_model
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.nets.optimizer import give_correction
from tacit.pieces.aggregate import residual
from tacit.pieces.train import pull_back


@dataclass(frozen=True)
class FedAvg(Method):
    """Every party that holds labels trains on them; the new model is their mean by number of labels.

    A server that holds labels is one more such party. With `plus`, the residual weight connection of CBAFed pulls
    both the clients' training and the global model back towards where they were: the papers' FedAvg+. With `scaffold`,
    control variates turn each client's steps into the direction of all.
    """

    plus: Annotated[bool, "FedAvg+: residual weight connection"] = False
    residual_client: Annotated[Share, "FedAvg+: share of the weights some epochs ago"] = 0.8
    residual_server: Annotated[Share, "FedAvg+: share of the model some rounds ago"] = 0.5
    residual_every: Annotated[AtLeastOne, "FedAvg+: after so many epochs, and so many rounds"] = 5
    scaffold: Annotated[bool, "SCAFFOLD: control variates against client drift; they travel, too"] = False

    citation: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017; "
        "FedAvg+: Li et al., Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning, CVPR "
        "2023; scaffold: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML "
        "2020"
    )
    merges_sums: ClassVar = {"model": "mean"}
    asks_labeled: ClassVar = True
    presets: ClassVar = {"paper": {}, "smoke": {"train.lr": 0.1}}

    def __post_init__(self) -> None:
        if self.scaffold and self.plus:
            raise ValueError(
                "plus and scaffold do not go together: a client that is pulled back does not go where its gradients "
                "led; write plus = false or scaffold = false"
            )
        if self.scaffold:  # what travels then, instead of what the class says
            for name in ("server_sends", "client_sends"):
                object.__setattr__(self, name, {"model": "weights", "control": "weights"})
            object.__setattr__(self, "client_keeps", {"control": "weights"})
            object.__setattr__(self, "means", "nobody")  # control variates are averaged beside the model
            object.__setattr__(self, "merges_sums", {"model": "mean", "control": "mean"})

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return epochs, 0

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        state = super().server_start(hub, past)
        if not self.scaffold:
            return state
        trained = hub.model(weights_in(state, "model")).named_parameters()
        return {**state, "control": {name: torch.zeros(parameter.shape) for name, parameter in trained}}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        asked = hub.sample_clients(hub.labeled_clients) if hub.labeled_clients else []
        down: Payload = {name: state[name] for name in ("model", *(["control"] if self.scaffold else []))}
        return [Task(client, {**down}) for client in asked]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        return self._learn(task.send, memory, me)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        memory: Payload = {"control": state["own_control"]} if "own_control" in state else {}
        own: list[Reply] = []
        if len(hub.shard.labeled):
            side = hub.in_turn() if replies and self.in_parts else hub  # alone, it has nobody to meet
            own = [self._learn(state, memory, side)]
        parties = [*replies, *own]
        if not any(party.examples for party in parties):
            return state
        model = hub.mean_model(weights_in(state, "model"), parties)
        if self.scaffold:
            kept: Payload = {"own_control": own[0].keep["control"]} if own else {}
            return {"model": model, "control": self._next_control(weights_in(state, "control"), parties, hub), **kept}
        if not self.plus:
            return {"model": model}
        anchor = weights_in(state, "anchor") if "anchor" in state else model  # the first model that learned anything
        if hub.round and hub.round % self.residual_every == 0:
            model = anchor = residual(anchor, model, self.residual_server)  # CBAFed Eq. 21
        return {"model": model, "anchor": anchor}

    def _learn(self, down: Payload, memory: Payload, side: Client | Hub) -> Reply:
        weights = weights_in(down, "model")
        if self.scaffold:
            return self._train_controlled(weights, weights_in(down, "control"), memory, side)
        return self._train(weights, side)

    def _train(self, weights: Weights, side: Client | Hub) -> Reply:
        model = side.model(weights)
        pull = pull_back(model, self.residual_every, self.residual_client if self.plus else 0.0)
        loss = side.fit_labeled(model, after_epoch=pull)
        return Reply(send={"model": side.weights(model)}, examples=len(side.shard.labeled), metrics={"loss": loss})

    def _train_controlled(self, weights: Weights, control: Weights, memory: Payload, side: Client | Hub) -> Reply:
        """A party's round with control variates; it keeps its new one, and sends by how much that changed."""
        model = side.model(weights)
        none = {name: torch.zeros_like(tensor) for name, tensor in control.items()}
        own, optimizer = weights_in(memory, "control", missing=none), side.optimizer(model)
        give_correction(model, optimizer, minus(control, own))  # Eq. 3: g + c − c_i
        loss = side.fit_labeled(model, optimizer=optimizer)
        trained = side.weights(model)
        new = next_variate(own, control, weights, trained, optimizer.reach)  # Eq. 4
        send: Payload = {"model": trained, "control": minus(new, own)}
        return Reply(send=send, examples=len(side.shard.labeled), keep={"control": new}, metrics={"loss": loss})

    def _next_control(self, control: Weights, parties: Sequence[Reply], hub: Hub) -> Weights:
        """c ← c + |S|/N · mean of the changes (Eq. 5), which count as the models do: equal parties as published."""
        share = sum(party.parties for party in parties) / (len(hub.labeled_clients) + (len(hub.shard.labeled) > 0))
        change = mean_model(parties, name="control")
        return {name: tensor + share * change[name] for name, tensor in control.items()}


def minus(one: Weights, other: Weights) -> Weights:
    """one − other, tensor by tensor.

    >>> minus({"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])})
    {'w': tensor([2.])}
    """
    return {name: tensor - other[name] for name, tensor in one.items()}


def next_variate(own: Weights, control: Weights, before: Weights, after: Weights, reach: float) -> Weights:
    """A party's control variate after its round (SCAFFOLD Eq. 4, option II): c_i − c + (x − y) / (K·η).

    That is the mean of its own gradients on the way. With momentum, or rates that change, K·η is `SGD.reach`: what the
    same steps do to a weight of constant gradient; so it is a mean of the gradients still, and not a multiple of it.

    >>> own, control, x, y = ({"w": torch.tensor([value])} for value in (1.0, 2.0, 5.0, 3.0))
    >>> next_variate(own, control, x, y, reach=0.5)                             # 1 − 2 + (5 − 3) / 0.5
    {'w': tensor([3.])}
    """
    if reach == 0:  # no step was taken
        return own
    return {name: own[name] - c + (before[name] - after[name]) / reach for name, c in control.items()}


@dataclass(frozen=True)
class WarmUp(FedAvg):
    """The stage before many methods: FedAvg on the labels, with a number of epochs of its own."""

    in_parts: ClassVar = False
    epochs: Annotated[Count, "on the labels in a round (0: train.epochs)"] = 0

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return self.epochs or epochs, 0

    def _train(self, weights: Weights, side: Client | Hub) -> Reply:
        model = side.model(weights)
        loss = side.fit_labeled(model, epochs=self.epochs or None)
        return Reply(send={"model": side.weights(model)}, examples=len(side.shard.labeled), metrics={"loss": loss})


@dataclass(frozen=True)
class Twin(WarmUp):
    """The labels alone beside any method (`[guard]`): as often over them as the method, at the server no less often
    than the experiment says."""

    def _train(self, weights: Weights, side: Client | Hub) -> Reply:
        model = side.model(weights)
        loss = side.fit_labeled(model, epochs=max(self.epochs, math.ceil(side.epochs / side.train.parts)))
        return Reply(send={"model": side.weights(model)}, examples=len(side.shard.labeled), metrics={"loss": loss})
