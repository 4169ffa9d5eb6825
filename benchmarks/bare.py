"""The forward and backward passes that a round cannot do without, on tensors that are ready, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.contract.parties import Shard
from tacit.evaluation.scores import PREDICT_BATCH
from tacit.pieces.train import batches
from tacit.runs.plan import Plan


def epochs_of(plan: Plan) -> tuple[int, int]:
    """Passes over a client's images in a round: where they are labelled, and where they are not."""
    epochs = plan.stages[-1].method.estimated_passes(plan.setup.train.epochs)
    assert epochs is not None
    return epochs


@dataclass
class Bare:
    """A net and the batches of all clients: those that are only looked at (for labels), and those that are learned."""

    net: nn.Module
    plan: Plan
    shards: Sequence[Shard]
    labelling: list[list[Tensor]] = field(init=False)  # for each client, the batches that are only looked at
    training: list[list[tuple[Tensor, Tensor]]] = field(init=False)  # and those of an epoch, with labels
    epochs: list[int] = field(init=False)

    def __post_init__(self) -> None:
        setup, epochs = self.plan.setup, epochs_of(self.plan)
        self.labelling, self.training, self.epochs = [], [], []
        generator = torch.Generator().manual_seed(0)
        for shard in self.shards:
            labeled = len(shard.labeled) > 0
            x = setup.views.plain(shard.labeled.images if labeled else shard.unlabeled)
            y = shard.labeled.labels if labeled else torch.zeros(len(x), dtype=torch.int64)
            self.labelling.append([] if labeled else list(x.split(PREDICT_BATCH)))
            self.training.append([(x[which], y[which]) for which in batches(len(x), setup.train.batch, generator)])
            self.epochs.append(epochs[0] if labeled else epochs[1])

    @property
    def trained_on(self) -> int:
        return sum(
            epochs * sum(len(x) for x, _ in epoch) for epochs, epoch in zip(self.epochs, self.training, strict=True)
        )

    def round(self) -> None:
        for looks, epoch, epochs in zip(self.labelling, self.training, self.epochs, strict=True):
            if looks:
                self.net.eval()
                with torch.inference_mode():
                    for x in looks:
                        self.net(x)
            self.net.train()
            for x, y in epoch * epochs:
                self.net.zero_grad(set_to_none=True)
                F.cross_entropy(self.net(x), y).backward()
