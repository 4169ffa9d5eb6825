"""pFedKnow: clients have pruned models of their own; the server passes knowledge between them on its labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.contract.method import (
    UNKNOWN,
    AtLeastOne,
    Count,
    Held,
    Length,
    Method,
    NotNegative,
    Positive,
    Reply,
    Share,
    Stage,
    Task,
)
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, Weights, number_in, weights_in
from tacit.methods.fedavg import WarmUp
from tacit.nets.optimizer import optimizer_step
from tacit.pieces.aggregate import shares, weighted_mean
from tacit.pieces.prune import kept_channels, mask_similarity, norms_of, prune_channels, pruned_training
from tacit.pieces.train import viewed_batches

Masks = dict[str, Tensor]


@dataclass(frozen=True)
class PFedKnow(Method):
    """The server first learns a model from its labels (the prior). Each client has a model of its own, at first the
    prior: it labels its images with it, learns them, prunes channels, and learns again what it was certain of. The
    server trains each of these models on its labels, towards the other clients' models, the more alike their masks the
    more, and towards the prior.

    The global model, which the paper has no need of, is the mean of the personal ones.
    """

    warmup: Annotated[AtLeastOne, Length(), "rounds on the server's labels before: they make the prior"] = 20
    label_epochs: Annotated[Count, "on all images with the labels they got, before pruning"] = 1
    sparsity: Annotated[NotNegative, "weight of the L1 norm of the norms' scales in these epochs"] = 1e-4
    prune: Annotated[Share, "share of its channels that a client prunes at a time"] = 0.1
    prune_times: Annotated[Count, "that a client prunes, at most"] = 2
    uncertainty: Annotated[Share, "images above it are left out after pruning"] = 0.7
    distillation: Annotated[NotNegative, "weight of each teacher at the server (λ)"] = 1.0
    temperature: Annotated[Positive, "of all predictions in the distillation"] = 2.0

    citation: ClassVar[str] = (
        "Wang et al., Knowledge-Enhanced Semi-Supervised Federated Learning for Aggregating Heterogeneous Lightweight "
        "Clients in IoT, SDM 2023"
    )
    means: ClassVar = "nobody"  # personal models
    placements: ClassVar = ("server",)  # models are distilled on the server's labels
    client_keeps: ClassVar = {"pruned": "number"}
    merges_each: ClassVar = "each client has a model of its own, which the server trains"
    trains_parts: ClassVar = False  # channels are pruned all over the net
    presets: ClassVar = {
        "paper": {"train.lr": 0.01, "train.momentum": 0.0, "train.weight_decay": 0.0, "train.epochs": 3},
        "smoke": {"warmup": 1, "train.lr": 0.1, "train.momentum": 0.9},
    }

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int]:
        return 0, self.label_epochs + epochs

    def before(self) -> tuple[Stage, ...]:
        return (Stage("warm-up", WarmUp(), self.warmup),)

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        prior = weights_in(super().server_start(hub, past), "model")
        return {"model": prior, "prior": prior}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        return [Task(client, {"model": state.get(personal(client), state["prior"])}) for client in hub.sample_clients()]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        model, images, view = me.model(task.weights("model")), me.shard.images, me.views.weak_view
        times = int(number_in(memory, "pruned")) if "pruned" in memory else 0
        if not len(images):
            return Reply(send={"model": me.weights(model)}, examples=0, keep={"pruned": times})
        logits = predict_logits(model, images, me)
        label, certain = logits.argmax(dim=1), evidential_uncertainty(logits) < self.uncertainty
        me.audit(torch.arange(len(images)), label, certain)
        with pruned_training(model, self.sparsity):
            optimizer, chance, epochs = me.optimizer(model), me.rng("all images"), self.label_epochs
            me.fit(model, images, label, view=view, optimizer=optimizer, generator=chance, epochs=epochs)
        if times < self.prune_times:
            prune_channels(model, self.prune)
            times += 1
        chosen = certain if certain.any() else torch.ones_like(certain)
        with pruned_training(model):
            optimizer, chance = me.optimizer(model), me.rng("certain images")
            loss = me.fit(model, images[chosen], label[chosen], view=view, optimizer=optimizer, generator=chance)
        left = torch.cat([*kept_channels(model).values()]).float().mean()
        figures = {"loss": loss, "channels_kept": float(left)}
        send: Payload = {"model": me.weights(model)}
        return Reply(send=send, examples=len(images), keep={"pruned": times}, metrics=figures)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties = [reply for reply in replies if reply.examples > 0]
        if not parties:
            return state
        net, images = hub.model(weights_in(state, "prior")), hub.shard.labeled.images
        prior = self._soft(net, images, hub)
        told, masks = list[Tensor](), list[Masks]()
        for party in parties:
            net.load_state_dict(party.weights("model"))
            told.append(self._soft(net, images, hub))
            masks.append(kept_channels(net))
        trained: list[Weights] = []
        for number, party in enumerate(parties):
            net.load_state_dict(party.weights("model"))
            alike = [
                0.0 if other == number else mask_similarity(masks[number], mask) for other, mask in enumerate(masks)
            ]
            weights = shares(alike)
            others = sum((w * t for w, t in zip(weights, told, strict=True)), torch.zeros_like(prior))
            self._distil(net, [prior, others] if any(weights) else [prior], f"distil {party.client}", hub)
            trained.append(hub.weights(net))
        own = {personal(party.client): weights for party, weights in zip(parties, trained, strict=True)}
        examples = shares([party.examples for party in parties])
        return {**state, **own, "model": mean_of_pruned(trained, masks, examples, [*norms_of(net)])}

    def _soft(self, net: nn.Module, images: Tensor, hub: Hub) -> Tensor:
        """Softened predictions for the server's images as they are."""
        return (predict_logits(net, images, hub) / self.temperature).softmax(dim=1)

    def _distil(self, net: nn.Module, teachers: Sequence[Tensor], purpose: str, hub: Hub) -> None:
        """Train on the server's labels, and towards what each of the teachers says; pruned channels stay pruned."""
        labeled, chance = hub.shard.labeled, hub.rng(purpose)
        optimizer = hub.optimizer(net, steps=hub.steps(len(labeled)))
        net.train()
        with pruned_training(net):
            for _ in range(hub.epochs):
                for which, views in viewed_batches(labeled.images, hub.train.batch, hub.views.weak_view, chance):
                    logits = net(views)
                    soft = (logits / self.temperature).log_softmax(dim=1)
                    loss = hub.label_loss(logits, labeled.labels[which])
                    for teacher in teachers:
                        loss = loss + self.distillation * F.kl_div(soft, teacher[which], reduction="batchmean")
                    optimizer_step(net, optimizer, loss, hub.train.clip)


def personal(client: int) -> str:
    """The name in the server's state of a client's own model."""
    return f"personal-{client}"


# --- Certainty, and the mean of pruned models ------------------------------------------------------------------------


@torch.no_grad()
def predict_logits(model: nn.Module, images: Tensor, side: Client | Hub, batch: int = 256) -> Tensor:
    """Logits [N, K] of images as they are, by the model as it would be used (eval mode)."""
    model.eval()
    parts = [model(side.views.plain(part)) for part in images.split(batch)]
    model.train()
    return torch.cat(parts) if parts else torch.zeros(0, side.classes)


def evidential_uncertainty(logits: Tensor) -> Tensor:
    """K / Σ_k (max(logit_k, 0) + 1): 1 where nothing speaks for any class, near 0 where much does.

    >>> evidential_uncertainty(torch.tensor([[0.0, -3.0], [6.0, 0.0]]))      # 2/2, 2/8
    tensor([1.0000, 0.2500])
    """
    return logits.shape[1] / (logits.relu() + 1).sum(dim=1)


def mean_of_pruned(
    models: Sequence[Weights], masks: Sequence[Masks], weights: Sequence[float], norms: Sequence[str]
) -> Weights:
    """Σ w_i θ_i; a norm's scales and shifts are averaged over the models that kept the channel, where any did.

    >>> one, other = {"n.weight": torch.tensor([2.0, 4.0])}, {"n.weight": torch.tensor([3.0, 0.0])}
    >>> masks = [{"n": torch.tensor([True, True])}, {"n": torch.tensor([True, False])}]
    >>> mean_of_pruned([one, other], masks, [0.5, 0.5], ["n"])
    {'n.weight': tensor([2.5000, 4.0000])}
    """
    mean = weighted_mean(models, weights)
    for norm in norms:
        kept = sum((w * mask[norm].float() for w, mask in zip(weights, masks, strict=True)), torch.zeros(1))
        for name in (f"{norm}.weight", f"{norm}.bias"):
            if name in mean:
                mean[name] = mean[name] / torch.where(kept > 0, kept, 1.0).to(mean[name])
    return mean
