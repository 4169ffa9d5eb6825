"""Orchestra: features are learned without labels; clients' clusters are clustered at the server, for all alike."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.contract.method import AtLeastOne, Method, Positive, Reply, Share, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, tensor_in, weights_in
from tacit.methods._byol import Units
from tacit.methods._self_supervised import FeatureStage, SelfSupervised, options_for
from tacit.nets.heads import feature_size, head, head_bytes
from tacit.nets.layers import initialise
from tacit.nets.optimizer import optimizer_step
from tacit.pieces.cluster import equal_clusters, global_clusters
from tacit.pieces.siamese import Siamese
from tacit.pieces.teacher import follow
from tacit.pieces.train import View, batches, weights_of

TURNS = 4  # quarter turns that are told apart


@dataclass(frozen=True)
class Clustering:
    """Orchestra's options."""

    temperature: Annotated[Positive, "of assignments to global clusters (T)"] = 0.1
    target_decay: Annotated[Share, "the target keeps so much of itself in a step"] = 0.996
    projections: Annotated[AtLeastOne, "last projections that a client remembers and clusters"] = 128
    local_clusters: Annotated[AtLeastOne, "clusters of a client's projections, of equal size (L)"] = 16
    global_clusters: Annotated[AtLeastOne, "clusters of all clients' clusters (G)"] = 128
    global_steps: Annotated[AtLeastOne, "steps in which the server moves the global centroids"] = 500
    degeneracy: Annotated[Share, "weight of the prediction of quarter turns"] = 1.0
    hidden: Annotated[Units, "units in the middle of the projector"] = 512
    projection: Annotated[Units, "numbers that the projector makes of an image"] = 128
    view: Annotated[Literal["siamese", "strong", "weak"], "what the nets see of an image"] = "siamese"


@dataclass(frozen=True)
class Orchestra(Clustering, SelfSupervised):
    """First, without labels: clients cluster what their nets make of their images into clusters of equal size, and the
    server clusters all clients' centroids. Clients then learn that two views of an image belong to the same global
    cluster, and to tell quarter turns of an image, lest all images end in one point. Then every party that holds labels
    trains a classifier on these features, the head alone or the whole net.
    """

    citation: ClassVar[str] = (
        "Lubana et al., Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, ICML 2022"
    )
    presets: ClassVar = {
        "paper": {
            "projection": 512,
            "net.name": "resnet18",
            "net.norm": "bn",
            "train.batch": 16,
            "train.epochs": 10,
            "train.lr": 0.003,
            "train.weight_decay": 1e-4,
        },
        "smoke": {
            "hidden": 32,
            "projection": 16,
            "local_clusters": 4,
            "global_clusters": 8,
            "global_steps": 20,
            "feature_rounds": 3,
            "train.lr": 0.1,
        },
    }

    def features(self) -> Method:
        return OrchestraFeatures(**options_for(OrchestraFeatures, self))


@dataclass(frozen=True)
class OrchestraFeatures(Clustering, FeatureStage):
    """Orchestra's stage without labels. In its first round clients cluster only, so that there are global centroids."""

    averaged: ClassVar = ("model", "projector", "rotation", "target", "target_projector")
    server_sends: ClassVar = {**dict.fromkeys(averaged, "weights"), "centroids?": "any"}
    client_sends: ClassVar = {**dict.fromkeys(averaged, "weights"), "local": "any"}
    client_keeps: ClassVar = {"projections": "any"}
    merges_sums: ClassVar = {}
    merges_each: ClassVar = "its server clusters the centroids of each client"

    def estimated_weights_bytes(self, classifier: int, channels: int, features: int = 0) -> int:
        rotation = 4 * TURNS * (self.projection + 1)
        return (2 * classifier + 2 * head_bytes(features, self.hidden, self.projection) + rotation) // 5

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        model = weights_in(super().server_start(hub, past), "model")
        projector = weights_of(self._projector(model, hub.rng("projector")))
        rotation = nn.Linear(self.projection, TURNS)
        initialise(rotation, hub.rng("rotation"))
        nets = {"model": model, "projector": projector, "rotation": weights_of(rotation)}
        return {**nets, "target": model, "target_projector": projector}

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        nets = {name: task.weights(name) for name in self.averaged}
        online = self._siamese(nets["model"], nets["projector"], me)
        target = self._siamese(nets["target"], nets["target_projector"], me)
        rotation = nn.Linear(self.projection, TURNS).to(me.device)
        rotation.load_state_dict(nets["rotation"])
        images, view, figures = me.shard.images, getattr(me.views, f"{self.view}_view"), dict[str, float]()
        if "centroids" in task.send:
            remembered = [tensor_in(memory, "projections")] if "projections" in memory else []
            centroids = task.tensor("centroids").to(me.device)
            figures["loss"] = self._learn(online, target, rotation, centroids, remembered, view, me)
        else:
            remembered = list(first_projections(target, images, view, self.projections, me))
        seen = torch.cat([torch.zeros(0, self.projection), *remembered])[-self.projections :].clone()
        local = equal_clusters(seen, self.local_clusters, me.rng("clusters"))
        trained: Payload = {
            "model": me.weights(online.encoder),
            "projector": weights_of(online.projector),
            "rotation": weights_of(rotation),
            "target": weights_of(target.encoder),
            "target_projector": weights_of(target.projector),
        }
        return Reply(
            send={**trained, "local": local}, examples=len(images), keep={"projections": seen}, metrics=figures
        )

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        merged = super().server_merge(state, replies, hub)
        found = [local for reply in replies if (local := self._local_centroids(reply)) is not None]
        if not found:
            return merged
        first = torch.randn(self.global_clusters, self.projection, generator=hub.rng("centroids"))
        centroids = tensor_in(state, "centroids") if "centroids" in state else F.normalize(first, dim=1)
        points = F.normalize(torch.cat(found), dim=1)
        return {**merged, "centroids": global_clusters(points, centroids, self.temperature, self.global_steps)}

    def _learn(
        self,
        online: Siamese,
        target: Siamese,
        rotation: nn.Linear,
        centroids: Tensor,
        remembered: list[Tensor],
        view: View,
        me: Client,
    ) -> float:
        """Local training; what the target makes of first views is put to what is remembered. The mean loss."""
        images, chance = me.shard.images, me.rng("views")
        optimizer = me.optimizer(nn.ModuleList([online, rotation]), steps=me.steps(len(images)))
        total, steps = 0.0, 0
        online.train()
        target.train()
        for _ in range(me.epochs):
            for which in batches(len(images), me.train.batch, chance):
                part = images[which.to(images.device)]
                first, second = view(part, chance), view(part, chance)
                follow(target.encoder, online.encoder, self.target_decay, statistics=False)
                follow(target.projector, online.projector, self.target_decay, statistics=False)
                with torch.no_grad():
                    seen = F.normalize(target(first), dim=1)
                loss = assignment_loss(F.normalize(online(second), dim=1), seen, centroids, self.temperature)
                if self.degeneracy > 0:
                    turns = torch.randint(TURNS, (len(part),), generator=chance).to(part.device)
                    turned = quarter_turns(view(part, chance), turns)
                    loss = loss + self.degeneracy * F.cross_entropy(rotation(online(turned)), turns)
                optimizer_step(online, optimizer, loss, me.train.clip)
                remembered.append(seen.cpu())
                total, steps = total + float(loss.detach()), steps + 1
        return total / max(steps, 1)

    def _projector(self, model: Weights, generator: torch.Generator | None = None) -> nn.Sequential:
        return head(feature_size(model), self.hidden, self.projection, generator, last_norm=True)

    def _siamese(self, model: Weights, projector: Weights, me: Client) -> Siamese:
        project = self._projector(model)
        project.load_state_dict(projector)
        return Siamese(me.model(model), project).to(me.device)

    def _local_centroids(self, reply: Reply) -> Tensor | None:
        """What a client sent as its centroids, if that is what it is: the declaration cannot tell its size."""
        local = reply.send["local"]
        if not isinstance(local, Tensor) or local.dtype != torch.float32 or local.dim() != 2:
            return None
        fits = local.shape[1] == self.projection and 0 < len(local) <= self.local_clusters
        return local if fits and float(local.abs().max()) <= 1.001 else None


# --- Clusters, turns -------------------------------------------------------------------------------------------------


@torch.no_grad()
def first_projections(target: Siamese, images: Tensor, view: View, count: int, me: Client) -> Iterator[Tensor]:
    """Projections of so many images, in batches: what a client clusters before anybody has trained."""
    target.train()
    chance = me.rng("views")
    some = images[torch.randperm(len(images), generator=chance)[:count].to(images.device)]
    for which in batches(len(some), me.train.batch, chance):
        yield F.normalize(target(view(some[which.to(images.device)], chance)), dim=1).cpu()


def assignment_loss(online: Tensor, target: Tensor, centroids: Tensor, temperature: float) -> Tensor:
    """−Σ_g p_g(target) log p_g(online), p = softmax(c·z / T): both views belong to the same global cluster.

    >>> centroids, view = torch.eye(2), torch.tensor([[1.0, 0.0]])
    >>> [round(assignment_loss(online, view, centroids, 0.1).item(), 2) for online in (view, view.flip(1))]
    [0.0, 10.0]
    >>> round(assignment_loss(view, view, centroids, 1.0).item(), 4)          # p = (e, 1) / (e + 1): its entropy
    0.5822
    """
    wanted = (target @ centroids.T / temperature).softmax(dim=1).detach()
    return F.cross_entropy(online @ centroids.T / temperature, wanted)


def quarter_turns(views: Tensor, turns: Tensor) -> Tensor:
    """Each image turned anticlockwise by so many quarters.

    >>> image = torch.tensor([[[[1, 2], [3, 4]]]]).expand(3, 1, 2, 2)
    >>> quarter_turns(image, torch.tensor([0, 1, 2])).flatten(1).tolist()
    [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1]]
    """
    result = views.clone()
    for quarters in range(1, TURNS):
        chosen = turns == quarters
        result[chosen] = views[chosen].rot90(quarters, dims=(2, 3))
    return result
