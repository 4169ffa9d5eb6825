"""DDRFed: generated images for everybody, dynamic class-balanced thresholds, learning what unclear images are not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.method import Count, Method, NotNegative, Positive, Reply, Share, Stage, Task, mean_model
from tacit.methods._diffusion import generator_stages
from tacit.methods._generator import GDGM
from tacit.methods._pseudo import Tally, dsa_view, mean_figure
from tacit.methods.cbafed import WarmUp
from tacit.payload import Payload, tensor_in, weights_in
from tacit.pieces.aggregate import labeled_shares, shares
from tacit.pieces.consistency import DynamicBalanced, FixedThreshold, Rule, paired_batches
from tacit.pieces.descent import descend, live_taps_only
from tacit.pieces.label import class_counts
from tacit.pieces.loss import masked_cross_entropy
from tacit.pieces.negative import agreeing_top, negative_loss
from tacit.pieces.threshold import class_shares, dynamic_thresholds
from tacit.sides import Client, Hub


@dataclass(frozen=True)
class DDRFed(GDGM, Method):
    """Clients share generated images, learn what they are sure of, and of the rest what it is not.

    First a diffusion model is trained by all clients, and what it draws is dealt to them (GDGM). How sure a client
    must be follows its model's confidence and, class by class, what all clients learned in the round before (DCBT).
    Images of low confidence teach the classes they are not (RNL). A server that holds labels is one more party.
    """

    gdgm: Annotated[bool, "train a generator first and deal its images to the clients (needs tacit[diffusion])"] = True
    dcbt: Annotated[bool, "dynamic class-balanced thresholds; without, `threshold` for all classes"] = True
    rnl: Annotated[bool, "negative learning from images of low confidence"] = True
    alpha: Annotated[Share, "what the running means of the confidence keep, by batch"] = 0.999
    threshold: Annotated[Share, "confidence a pseudo-label needs, without dcbt"] = 0.95
    view: Annotated[Literal["strong", "weak"], "on which a pseudo-label is learned (Algorithm 2, or Eq. 11)"] = "strong"
    weak: Annotated[Literal["dsa", "views"], "weak views: DSA, one operation a batch; or those of views.weak"] = "dsa"
    rnl_top: Annotated[Count, "classes that are never negative (0: found by agreement of the views)"] = 0
    rnl_change: Annotated[bool, "the strong view judges and the weak one learns"] = False
    labeled_share: Annotated[Share, "of the weight, for the labelled parties together (where phi is 0)"] = 0.5
    phi: Annotated[NotNegative, "instead: labelled parties' examples weigh so many times (0: labeled_share)"] = 0.0
    warmup: Annotated[Count, "rounds of labelled parties alone before"] = 200
    warmup_epochs: Annotated[Count, "epochs in a round of the warm-up (0: train.epochs)"] = 0
    unlabeled_lr: Annotated[Positive, "learning rate where there are no labels"] = 0.02

    citation: ClassVar[str] = (
        "Wang et al., Dynamic class-balanced threshold federated semi-supervised learning by exploring diffusion "
        "model and all unlabeled data, Future Generation Computer Systems 2025"
    )
    placements: ClassVar = ("some-clients", "clients", "server")
    server_sends: ClassVar = {"model": "weights", "shares": "[K]"}
    client_sends: ClassVar = {"model": "weights", "counts": "counts[K]"}
    client_keeps: ClassVar = {"dema?": "any", "generated?": "any"}
    presets: ClassVar = {  # what the paper sets otherwise (SGD, rate, batch) are tacit's defaults
        "paper": {"rounds": 500, "net.name": "resnet18", "net.norm": "bn", "views.strong": "ssl"},
        "smoke": {"alpha": 0.5, "warmup": 1, "warmup_epochs": 3, "train.lr": 0.1, "unlabeled_lr": 0.1, "psi": 0.5}
        | {"diffusion_rounds": 2, "diffusion_epochs": 1, "diffusion_batch": 32, "diffusion_lr": 2e-3, "blocks": 1}
        | {"width": 8, "halvings": 1, "generation_rounds": 2, "sampler": "ddim", "sampling_steps": 4},
    }

    def before(self) -> tuple[Stage, ...]:
        alone = WarmUp(labeled_epochs=self.warmup_epochs, residual_client=0.0, residual_server=0.0, warmup=0)
        warm_up = (Stage("warm-up", alone, self.warmup),) if self.warmup else ()
        return (*generator_stages(self), *warm_up) if self.gdgm else warm_up

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        counts = past.get("warm-up", {}).get("counts", torch.zeros(hub.classes))
        return {**super().server_start(hub, past), "counts": counts}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        share = class_shares(tensor_in(state, "counts"), times_tenth=False)  # Eq. 14, 15
        return [Task(client, {"model": state["model"], "shares": share}) for client in hub.sample_clients()]

    def client_train(self, task: Task, kept: Payload, me: Client) -> Reply:
        model, own = me.model(task.weights("model")), me.shard.labeled
        generated = [tensor_in(kept, "generated").to(me.device)] if "generated" in kept else []
        images, generator = torch.cat([me.shard.unlabeled, *generated]), me.rng("views")
        weak = dsa_view(me) if self.weak == "dsa" else me.views.weak_view  # Ω of the paper
        optimizer = me.optimizer(model, None if len(own) else me.scheduled(self.unlabeled_lr))
        rule, tally = self.rule(task.tensor("shares"), kept, me), Tally(me, len(images))
        for _ in range(me.epochs):
            with live_taps_only(model, optimizer):
                for which, labeled in paired_batches(len(images), len(own), me.train.batch, generator):
                    loss = torch.zeros((), device=me.device)
                    if len(labeled):  # Eq. 10
                        loss = F.cross_entropy(model(weak(own.images[labeled], generator)), own.labels[labeled])
                    if len(which):
                        shown, strong = weak(images[which], generator), me.views.strong_view(images[which], generator)
                        loss = loss + self.unlabeled_loss(model, which, shown, strong, rule, tally)
                    descend(model, optimizer, loss, me.train.clip)
                    tally.figure("loss", float(loss.detach()))
        labels = torch.cat([tally.believed, own.labels.cpu()])
        return Reply(
            send={"model": me.weights(model), "counts": class_counts(labels, me.classes)},  # Eq. 12, 13
            examples=len(labels),
            keep={**rule.memory()},
            metrics=tally.means,
        )

    def unlabeled_loss(
        self, model: nn.Module, which: Tensor, weak: Tensor, strong: Tensor, rule: Rule, tally: Tally
    ) -> Tensor:
        """Towards what is surely seen in the weak views (Eq. 11), away from what the unsure rest is not (Eq. 25)."""
        with torch.set_grad_enabled(self.view == "weak" or self.rnl_change):
            weak_logits = model(weak)
        strong_logits = model(strong)
        seen_weak, seen_strong = weak_logits.softmax(dim=1), strong_logits.softmax(dim=1)
        label, high = rule.believe(which, seen_weak.detach())
        tally.labels(which, label, high)
        if isinstance(rule, DynamicBalanced):
            tally.figures["level"] = [float(rule.level)]  # the last one
        loss = masked_cross_entropy(weak_logits if self.view == "weak" else strong_logits, label, high)
        if not self.rnl or bool(high.all()):
            return loss
        judge, learner = (seen_strong, seen_weak) if self.rnl_change else (seen_weak, seen_strong)
        judge = judge.detach()
        top = self.rnl_top or agreeing_top(judge[~high], learner.detach()[~high])
        tally.figure("top", top)
        return loss + negative_loss(judge, learner, ~high, top)

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties, labeled = list(replies), [reply.client in hub.labeled_clients for reply in replies]
        if len(hub.shard.labeled):
            own, model = class_counts(hub.shard.labeled.labels, hub.classes), hub.finetune(weights_in(state, "model"))
            parties.append(Reply(send={"model": model, "counts": own}, examples=float(own.sum())))
            labeled.append(True)
        examples = [party.examples for party in parties]
        boosted = [self.phi * n if has else n for n, has in zip(examples, labeled, strict=True)]
        weights = shares(boosted) if self.phi else labeled_shares(examples, labeled, self.labeled_share)  # Eq. 26, 27
        used = class_shares(tensor_in(state, "counts"), times_tenth=False)
        level, high = torch.tensor(mean_figure(replies, "level")), mean_figure(replies, "high")
        thresholds = dynamic_thresholds(level, used) if self.dcbt else torch.full((hub.classes,), self.threshold)
        hub.note(party_weights=weights, thresholds=thresholds, class_shares=used)  # Fig. 7, at the server
        hub.note(high=high, low=1 - high, top=mean_figure(replies, "top"))
        if not any(weights):
            return state
        counts = torch.stack([party.tensor("counts") for party in parties]).sum(dim=0)  # Eq. 14
        return {"model": mean_model(parties, weights), "counts": counts}

    def rule(self, share: Tensor, kept: Payload, me: Client) -> Rule:
        """Which predictions are believed; a client's running means begin at 1/K and stay with it."""
        means = tensor_in(kept, "dema") if "dema" in kept else torch.full((2,), 1.0 / me.classes)
        return DynamicBalanced(means, share, self.alpha) if self.dcbt else FixedThreshold(self.threshold)
