"""Fed-Consist: batch-wise pseudo-labels at unlabelled clients, and half of the weight for the labelled ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from tacit.contract.method import Experiment, Reply, Share
from tacit.contract.parties import Client, Hub
from tacit.core.payload import Payload, weights_in
from tacit.methods.fixmatch import Accept, FixMatch
from tacit.pieces.aggregate import labeled_shares, shares
from tacit.pieces.train import View


@dataclass(frozen=True)
class FedConsist(FixMatch):
    """Unlabelled clients learn, batch by batch, what a weak view was surely seen as; labelled ones get half the weight.

    A server that holds labels is one more labelled party. With `plus` (Fed-Consist+ of the papers) labels are given
    once a round, on fixed weak views, and every party counts by what it trained on.
    """

    view: Annotated[Literal["strong", "weak"], "on which a pseudo-label is learned batch-wise"] = "strong"
    labeled_share: Annotated[Share, "least weight of the labelled parties together"] = 0.5
    plus: Annotated[bool, "Fed-Consist+: fixed pseudo-labels, no extra weight for labelled parties"] = False

    citation: ClassVar[str] = (
        "Yang et al., Federated semi-supervised learning for COVID region segmentation in chest CT using "
        "multi-national data from China, Italy, Japan, Medical Image Analysis 2021; as a baseline and +: Li et al., "
        "Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning, CVPR 2023"
    )

    merges_sums: ClassVar = {"model": "mean"}

    def needs_each(self, experiment: Experiment) -> str:
        if self.plus or experiment.data.placement != "some-clients":
            return ""
        return (
            "it weighs the labelled clients together (method.labeled_share), which needs a sum over them alone; write "
            "method.plus = true"
        )

    @property
    def fixed(self) -> bool:
        return self.plus or self.labels == "round"

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        parties, labeled = list(replies), [reply.client in hub.labeled_clients for reply in replies]
        if len(hub.shard.labeled):
            own = hub.finetune(weights_in(state, "model"))
            parties.append(Reply(send={"model": own}, examples=len(hub.shard.labeled)))
            labeled.append(True)
        examples = [party.examples for party in parties]
        weights = shares(examples) if self.plus else labeled_shares(examples, labeled, self.labeled_share)
        hub.note(party_weights=weights)
        old = weights_in(state, "model")
        return {"model": hub.mean_model(old, parties, weights)} if any(weights) else state

    def learned_view(self, me: Client) -> View:
        return me.views.strong_view if self.view == "strong" else me.views.weak_view

    def learn_fixed(self, model: nn.Module, accept: Accept, me: Client) -> tuple[int, float]:
        """One weak view of each image, labelled once by the model that came, and learned as it is."""
        images, labeled, generator = me.shard.unlabeled, me.shard.labeled, me.rng("unlabeled views")
        views = me.views.raw_weak(images, generator)
        label, accepted = accept(torch.arange(len(images)), me.predict(model, views))
        fixed = torch.cat([views[accepted], me.views.raw_weak(labeled.images, generator)])
        labels = torch.cat([label[accepted], labeled.labels])
        optimizer, as_it_is = me.optimizer(model, self.rate(me)), me.views.plain_view
        return len(labels), me.fit(model, fixed, labels, view=as_it_is, optimizer=optimizer, generator=generator)
