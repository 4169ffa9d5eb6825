"""What FedU and FedEMA share: BYOL at every client, on all its images; they differ in what a client begins with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field

from tacit.contract.method import Reply, Share, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.methods._self_supervised import FeatureStage
from tacit.nets.heads import feature_size, head, head_bytes
from tacit.pieces.siamese import Siamese, learn_siamese
from tacit.pieces.train import weights_of

Units = Annotated[int, Field(ge=2, le=65_536)]


class Online(NamedTuple):
    """The weights of an online net: its encoder, projector and predictor."""

    model: Weights
    projector: Weights
    predictor: Weights


@dataclass(frozen=True)
class Start:
    """What a client begins with, what it keeps from then on, and figures for the record."""

    online: Online
    keep: Payload = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Byol:
    """BYOL's options."""

    hidden: Annotated[Units, "units in the middle of projector and predictor"] = 512
    projection: Annotated[Units, "numbers that the projector makes of an image"] = 128
    target_decay: Annotated[Share, "the target keeps so much of itself in a step"] = 0.99
    view: Annotated[Literal["siamese", "strong", "weak"], "what both nets see of an image"] = "siamese"

    def siamese(self, me: Client, model: Weights, projector: Weights, predictor: Weights | None = None) -> Siamese:
        """A net with these weights; a target has no predictor."""
        project = head(feature_size(model), self.hidden, self.projection)
        project.load_state_dict(projector)
        predict = None
        if predictor is not None:
            predict = head(self.projection, self.hidden, self.projection)
            predict.load_state_dict(predictor)
        return Siamese(me.model(model), project, predict).to(me.device)


@dataclass(frozen=True)
class ByolStage(Byol, FeatureStage):
    """BYOL at every client; the server averages the online nets, by number of images.

    A client keeps its target, and its online net as it sent it. One that has none yet begins with the server's net as
    both.
    """

    averaged: ClassVar = Online._fields
    server_sends: ClassVar = dict.fromkeys(Online._fields, "weights")
    client_sends: ClassVar = dict.fromkeys(Online._fields, "weights")
    merges_sums: ClassVar = dict.fromkeys(Online._fields, "mean")
    client_keeps: ClassVar = dict.fromkeys(
        ("online", "projector", "predictor", "target", "target_projector"), "weights"
    )

    def begin(self, came: Online, own: Online, memory: Payload, me: Client) -> Start:
        """What a client begins with that has trained before: `came` is the server's, `own` its own as it left it."""
        raise NotImplementedError

    def begins_anew(self, memory: Payload, me: Client) -> bool:
        return "online" not in memory

    def estimated_weights_bytes(self, classifier: int, channels: int, features: int = 0) -> int:
        projector = head_bytes(features, self.hidden, self.projection)
        return (classifier + projector + head_bytes(self.projection, self.hidden, self.projection)) // 3

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        model = weights_in(super().server_start(hub, past), "model")
        projector = head(feature_size(model), self.hidden, self.projection, hub.rng("projector"))
        predictor = head(self.projection, self.hidden, self.projection, hub.rng("predictor"))
        return {"model": model, "projector": weights_of(projector), "predictor": weights_of(predictor)}

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        came, images = Online(*(task.weights(name) for name in Online._fields)), me.shard.images
        if self.begins_anew(memory, me):
            start, target = Start(came), self.siamese(me, came.model, came.projector)
        else:
            own = Online(*(weights_in(memory, name) for name in ("online", "projector", "predictor")))
            start = self.begin(came, own, memory, me)
            target = self.siamese(me, weights_in(memory, "target"), weights_in(memory, "target_projector"))
        online = self.siamese(me, *start.online)
        loss = learn_siamese(
            online,
            target,
            images,
            view=getattr(me.views, f"{self.view}_view"),
            optimizer=me.optimizer(online, steps=me.steps(len(images))),
            epochs=me.epochs,
            batch=me.train.batch,
            clip=me.train.clip,
            decay=self.target_decay,
            generator=me.rng("views"),
        )
        assert online.predictor is not None
        heads = {"projector": online.projector, "predictor": online.predictor}
        keep: Payload = {
            "online": weights_of(online.encoder),
            **{name: weights_of(net) for name, net in heads.items()},
            "target": weights_of(target.encoder),
            "target_projector": weights_of(target.projector),
        }
        send: Payload = {"model": me.weights(online.encoder), **{name: weights_of(net) for name, net in heads.items()}}
        figures = {"loss": loss, **start.figures}
        return Reply(send=send, examples=len(images), keep={**keep, **start.keep}, metrics=figures)
