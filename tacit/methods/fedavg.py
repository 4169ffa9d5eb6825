"""FedAvg on the labels that exist: the lower bound, the upper bound (`data.reveal = "all"`), and FedAvg+."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from tacit.contract.method import UNKNOWN, AtLeastOne, Count, Held, Method, Reply, Share, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.pieces.aggregate import residual
from tacit.pieces.train import pull_back


@dataclass(frozen=True)
class FedAvg(Method):
    """Every party that holds labels trains on them; the new model is their mean by number of labels.

    A server that holds labels is one more such party. With `plus`, the residual weight connection of CBAFed pulls
    both the clients' training and the global model back towards where they were: the papers' FedAvg+.
    """

    plus: Annotated[bool, "FedAvg+: residual weight connection"] = False
    residual_client: Annotated[Share, "FedAvg+: share of the weights some epochs ago"] = 0.8
    residual_server: Annotated[Share, "FedAvg+: share of the model some rounds ago"] = 0.5
    residual_every: Annotated[AtLeastOne, "FedAvg+: after so many epochs, and so many rounds"] = 5

    citation: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017; "
        "FedAvg+: Li et al., Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning, CVPR 2023"
    )
    presets: ClassVar = {"paper": {}, "smoke": {"train.lr": 0.1}}

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return epochs, 0

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        asked = hub.sample_clients(hub.labeled_clients) if hub.labeled_clients else []
        return [Task(client, {"model": state["model"]}) for client in asked]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        return self._train(task.weights("model"), me)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        own = [self._train(weights_in(state, "model"), hub)] if len(hub.shard.labeled) else []
        parties = [*replies, *own]
        if not any(party.examples for party in parties):
            return state
        model = hub.mean_model(weights_in(state, "model"), parties)
        if not self.plus:
            return {"model": model}
        anchor = weights_in(state, "anchor") if "anchor" in state else model  # the first model that learned anything
        if hub.round and hub.round % self.residual_every == 0:
            model = anchor = residual(anchor, model, self.residual_server)  # CBAFed Eq. 21
        return {"model": model, "anchor": anchor}

    def _train(self, weights: Weights, side: Client | Hub) -> Reply:
        model = side.model(weights)
        pull = pull_back(model, self.residual_every, self.residual_client if self.plus else 0.0)
        loss = side.fit_labeled(model, after_epoch=pull)
        return Reply(send={"model": side.weights(model)}, examples=len(side.shard.labeled), metrics={"loss": loss})


@dataclass(frozen=True)
class WarmUp(FedAvg):
    """The stage before many methods: FedAvg on the labels, with a number of epochs of its own."""

    epochs: Annotated[Count, "on the labels in a round (0: train.epochs)"] = 0

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return self.epochs or epochs, 0

    def _train(self, weights: Weights, side: Client | Hub) -> Reply:
        model = side.model(weights)
        loss = side.fit_labeled(model, epochs=self.epochs or None)
        return Reply(send={"model": side.weights(model)}, examples=len(side.shard.labeled), metrics={"loss": loss})
