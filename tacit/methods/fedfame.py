"""FedFAME: no augmentation; clients stay near the global model's features, leave their own old ones, and distil."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.contract.method import UNKNOWN, Held, Method, NotNegative, Positive, Reply, Task
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, weights_in
from tacit.nets import Net
from tacit.pieces.consistency import endless_batches, learn_by_batch, two_view_batches


@dataclass(frozen=True)
class FedFAME(Method):
    """Nobody augments images. A client's features are drawn to those that the global model has of the same image, and
    pushed away from those of its own last model (model-contrastive learning); its predictions follow the global model's
    (distillation). The server averages, and trains on its labels for a few epochs.

    A client that holds labels adds their loss to each step; a server without labels only averages.
    """

    contrast: Annotated[NotNegative, "weight of the model-contrastive loss"] = 1.0
    contrast_temperature: Annotated[Positive, "of the model-contrastive loss"] = 0.5
    distillation: Annotated[NotNegative, "weight of the distillation from the global model"] = 1.0
    distillation_temperature: Annotated[Positive, "of both models' predictions, there"] = 2.0

    citation: ClassVar[str] = (
        "Malaviya et al., FedFAME: A Data Augmentation Free Framework based on Model Contrastive Learning for "
        "Federated Semi-Supervised Learning, SAC 2023"
    )
    client_keeps: ClassVar = {"past": "weights"}
    merges_sums: ClassVar = {"model": "mean"}
    presets: ClassVar = {"paper": {}, "smoke": {"train.lr": 0.1}}

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return held.label_passes(epochs), epochs

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        first = weights_in(super().server_start(hub, past), "model")
        return {"model": self._supervise(first, hub)}  # a model that knows no class has nothing to distil

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        weights = task.weights("model")
        model, images = me.model(weights), me.shard.unlabeled
        if len(images):
            loss = self._learn(model, weights, weights_in(memory, "past") if "past" in memory else None, me)
        else:
            loss = self._fit_plain(model, me)
        sent = me.weights(model)
        past = {name: tensor.clone() for name, tensor in sent.items()}
        return Reply(send={"model": sent}, examples=me.shard.held, keep={"past": past}, metrics={"loss": loss})

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        merged = super().server_merge(state, replies, hub)
        return {"model": self._supervise(weights_in(merged, "model"), hub)}

    def _learn(self, model: torch.nn.Module, came: Weights, past: Weights | None, me: Client) -> float:
        """Local training on images without labels, and on this client's labels if it has any. The last loss."""
        teacher = me.model(came)
        former = None if past is None else me.model(past)
        assert isinstance(model, Net)
        assert isinstance(teacher, Net)
        assert former is None or isinstance(former, Net)
        model.train()
        teacher.eval()
        if former is not None:
            former.eval()

        def unlabeled_loss(which: Tensor, views: Tensor, same: Tensor) -> Tensor:
            with torch.no_grad():
                near = teacher.features(views)
                told, far = teacher.head(near), None if former is None else former.features(views)
            features = model.features(views)
            loss = self.distillation * distillation_loss(model.head(features), told, self.distillation_temperature)
            if far is None:  # asked for the first time: there is nothing to leave behind
                return loss
            return loss + self.contrast * model_contrastive_loss(features, near, far, self.contrast_temperature)

        plain, size, loss = me.views.plain_view, me.train.batch, 0.0
        own = endless_batches(me.shard.labeled.images, me.shard.labeled.labels, size, plain, me.rng("labeled views"))
        optimizer = me.optimizer(model, steps=me.steps(len(me.shard.unlabeled)))
        chance = me.rng("unlabeled views")
        for _ in range(me.epochs):
            epoch = two_view_batches(me.shard.unlabeled, size, plain, None, chance)
            loss = learn_by_batch(
                model, epoch, own, unlabeled_loss, optimizer=optimizer, clip=me.train.clip, label_loss=me.label_loss
            )
        return loss

    def _supervise(self, weights: Weights, hub: Hub) -> Weights:
        """The model after training on the server's labels, images as they are; as it was if the server has none."""
        if not len(hub.shard.labeled):
            return weights
        model = hub.model(weights)
        self._fit_plain(model, hub)
        return hub.weights(model)

    def _fit_plain(self, model: torch.nn.Module, side: Client | Hub) -> float:
        optimizer, chance, labeled = side.optimizer(model), side.rng("labeled views"), side.shard.labeled
        plain = side.views.plain_view
        return side.fit(model, labeled.images, labeled.labels, view=plain, optimizer=optimizer, generator=chance)


# --- What a client learns from models --------------------------------------------------------------------------------


def model_contrastive_loss(features: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    """−log e^{cos(z, near)/T} / (e^{cos(z, near)/T} + e^{cos(z, far)/T}), the mean (MOON Eq. 3).

    `near`: features of the same images by the global model; `far`: by the client's own last one.

    >>> one, other = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]])
    >>> round(model_contrastive_loss(one, one, other, 0.5).item(), 4)        # log(1 + e^{(0 − 1)/0.5})
    0.1269
    >>> round(model_contrastive_loss(one, other, other, 0.5).item(), 4)      # log 2: it cannot tell them apart
    0.6931
    """
    closer = F.cosine_similarity(features, near, dim=1) - F.cosine_similarity(features, far, dim=1)
    return F.softplus(-closer / temperature).mean()


def distillation_loss(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T² · KL(softmax(teacher / T) ‖ softmax(logits / T)), the mean over the images (Hinton et al. 2015).

    >>> sure, unsure = torch.tensor([[2 * 1.0986, 0.0]]), torch.zeros(1, 2)  # at T = 2: (¾, ¼) and (½, ½)
    >>> round(distillation_loss(unsure, sure, 2.0).item(), 4)                # 4 · (¾ ln 1.5 + ¼ ln 0.5)
    0.5232
    """
    told = (teacher / temperature).softmax(dim=1)
    apart = F.kl_div((logits / temperature).log_softmax(dim=1), told, reduction="batchmean")
    return temperature**2 * apart
