"""A CBAFed round as one would write it down first: what `round.py` compares tacit's with.

A deep copy of the model for each client, a DataLoader whose views are made by PIL image by image, plain SGD, labels in
a pass of a DataLoader, and a mean over state_dicts. The net is plain, too: no other memory layout, no live taps. It
makes the same number of views, forward passes and steps as tacit's round, in batches of the same size. It checks
nothing and writes nothing to disk, which tacit's round does.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.views import normalised
from tacit.contract.parties import Shard
from tacit.evaluation.scores import PREDICT_BATCH
from tacit.methods.cbafed import CBAFed
from tacit.nets.layers import pooled
from tacit.nets.resnet import ResNet18
from tacit.runs.plan import Plan

State = dict[str, Tensor]


class PlainResNet18(nn.Module):
    """The layers of a ResNet-18, one after the other, as ordinary convolutions."""

    def __init__(self, net: ResNet18) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        x = net.activation(net.bn1(net.conv1(x)))
        if net.stem == "imagenet":
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        logits: Tensor = net.fc(pooled(net.layer4(net.layer3(net.layer2(net.layer1(x))))))
        return logits


def plain_net(plan: Plan) -> nn.Module:
    """The experiment's net as a plain module, in the usual memory layout."""
    net = plan.setup.build(torch.Generator().manual_seed(0))
    for parameter in net.parameters():
        parameter.data = parameter.data.contiguous()
    return PlainResNet18(net) if isinstance(net, ResNet18) else net


class PilViews(Dataset[tuple[Tensor, int]]):
    """Images with labels; asked for one, it makes a new view of it."""

    def __init__(self, images: Tensor, labels: Tensor, view: Callable[[Image.Image], Image.Image], plan: Plan) -> None:
        arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
        self.arrays = arrays[..., 0] if images.shape[1] == 1 else arrays
        self.labels = labels.tolist()
        self.view = view
        self.mean = np.array(plan.setup.views.mean, dtype=np.float32)
        self.std = np.array(plan.setup.views.std, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        view = self.view(Image.fromarray(self.arrays[index]))
        return normalised(view, self.mean, self.std), self.labels[index]


@dataclass
class Reference:
    """The server of the plain implementation: its model, and how many images it has trained on in the last round."""

    plan: Plan
    view: Callable[[Image.Image], Image.Image]
    shards: Sequence[Shard]
    model: nn.Module
    trained_on: int = 0

    def round(self) -> None:
        self.trained_on = 0
        states, counts = [], []
        for shard in self.shards:
            model = copy.deepcopy(self.model)
            labeled = len(shard.labeled) > 0
            counts.append(self._learn_labels(model, shard) if labeled else self._learn_own_labels(model, shard))
            states.append(model.state_dict())
        self.model.load_state_dict(mean_of(states, counts))

    def _learn_labels(self, model: nn.Module, shard: Shard) -> int:
        method: CBAFed = self.plan.stages[-1].method  # type: ignore[assignment]
        data = PilViews(shard.labeled.images, shard.labeled.labels, self.view, self.plan)
        optimizer = self._sgd(model, self.plan.setup.train.lr)
        remembered: State = {}
        for epoch in range(method.estimated_passes(self.plan.setup.train.epochs)[0]):
            self._epoch(model, optimizer, data)
            if epoch % method.residual_every == 0:
                if remembered:
                    share = method.residual_client
                    model.load_state_dict(mean_of([remembered, model.state_dict()], [share, 1 - share]))
                remembered = copy.deepcopy(model.state_dict())
        return len(data)

    def _learn_own_labels(self, model: nn.Module, shard: Shard) -> int:
        """Labels for one view of each image, which is then what is learned; all are believed (see round.py)."""
        method: CBAFed = self.plan.stages[-1].method  # type: ignore[assignment]
        unknown = torch.zeros(len(shard.unlabeled), dtype=torch.int64)
        views, labels = [], []
        model.eval()
        with torch.no_grad():
            for x, _ in DataLoader(PilViews(shard.unlabeled, unknown, self.view, self.plan), batch_size=PREDICT_BATCH):
                confidence, label = model(x).softmax(dim=1).max(dim=1)
                kept = confidence > method.ceiling
                views.append(x[kept])
                labels.append(label[kept])
        model.train()
        data = TensorDataset(torch.cat(views), torch.cat(labels))
        optimizer = self._sgd(model, method.unlabeled_lr)
        for _ in range(self.plan.setup.train.epochs):
            self._epoch(model, optimizer, data)
        return len(data)

    def _epoch(self, model: nn.Module, optimizer: torch.optim.Optimizer, data: Dataset) -> None:
        train = self.plan.setup.train
        for x, y in DataLoader(data, batch_size=train.batch, shuffle=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if train.clip > 0:
                nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.step()
            self.trained_on += len(x)

    def _sgd(self, model: nn.Module, rate: float) -> torch.optim.SGD:
        train = self.plan.setup.train
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=train.momentum, weight_decay=train.weight_decay)


def mean_of(states: Sequence[State], weights: Sequence[float]) -> State:
    """The weighted mean, name by name.

    >>> mean_of([{"w": torch.tensor([1.0])}, {"w": torch.tensor([5.0])}], [3, 1])
    {'w': tensor([2.])}
    """
    total = sum(weights)
    return {
        name: sum(state[name] * (weight / total) for state, weight in zip(states, weights, strict=True))  # type: ignore[misc]
        for name in states[0]
    }
