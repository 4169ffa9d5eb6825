"""Learning without labels from two views of an image: BYOL, and how far two models are apart."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.nets import Net
from tacit.nets.optimizer import optimizer_step
from tacit.pieces.aggregate import Weights
from tacit.pieces.teacher import follow
from tacit.pieces.train import View, batches


class Siamese(nn.Module):
    """An encoder (the features of a net, without its head) with a projector and, online, a predictor."""

    def __init__(self, encoder: nn.Module, projector: nn.Module, predictor: nn.Module | None = None) -> None:
        super().__init__()
        assert isinstance(encoder, Net)
        self.encoder, self.projector, self.predictor = encoder, projector, predictor

    def forward(self, views: Tensor) -> Tensor:
        projection: Tensor = self.projector(self.encoder.features(views))
        return projection if self.predictor is None else self.predictor(projection)


def similarity_loss(prediction: Tensor, target: Tensor) -> Tensor:
    """‖p̄ − z̄‖² = 2 − 2 cos(p, z), the mean over the images (BYOL Eq. 2). No gradient goes to the target.

    >>> similarity_loss(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]]))   # (0 + 2) / 2
    tensor(1.)
    """
    return (2 - 2 * F.cosine_similarity(prediction, target.detach(), dim=1)).mean()


def learn_siamese(
    online: Siamese,
    target: Siamese,
    images: Tensor,
    *,
    view: View,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    batch: int,
    clip: float,
    decay: float,
    generator: torch.Generator,
) -> float:
    """BYOL: the online net predicts what the target makes of the other view, both ways; then the target follows.

    Both see batch statistics, where they have batch norm. The mean loss of all steps.
    """
    online.train()
    target.train()
    total, steps = 0.0, 0
    for first, second in view_pairs(images, view, epochs, batch, generator):
        with torch.no_grad():
            seen_first, seen_second = target(first), target(second)
        loss = similarity_loss(online(first), seen_second) + similarity_loss(online(second), seen_first)
        optimizer_step(online, optimizer, loss, clip)
        follow(target.encoder, online.encoder, decay, statistics=False)  # its statistics are of its own batches
        follow(target.projector, online.projector, decay, statistics=False)
        total, steps = total + float(loss.detach()), steps + 1
    return total / max(steps, 1)


def view_pairs(
    images: Tensor, view: View, epochs: int, batch: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Epochs of batches: two views of the same images, each with its own chance.

    >>> shift = lambda part, chance: part + torch.rand(len(part), 1, generator=chance)
    >>> pairs = list(view_pairs(torch.zeros(5, 1), shift, 2, 3, torch.Generator().manual_seed(0)))
    >>> [len(first) for first, _ in pairs], any(torch.equal(first, second) for first, second in pairs)
    ([3, 2, 3, 2], False)
    """
    for _ in range(epochs):
        for which in batches(len(images), batch, generator):
            part = images[which.to(images.device)]
            yield view(part, generator), view(part, generator)


def divergence(one: Weights, other: Weights) -> float:
    """How far two encoders are apart: the mean over their convolutions (else matrices) of ‖W − W'‖₂.

    The head `fc`, norms and biases do not count: as measured in the public code of FedU and FedEMA.

    >>> one = {"conv1.weight": torch.zeros(1, 1, 1, 2), "bn1.weight": torch.zeros(2), "fc.weight": torch.zeros(1, 2)}
    >>> moved = torch.tensor([[[[3.0, 4.0]]]])
    >>> divergence(one, {"conv1.weight": moved, "bn1.weight": torch.ones(2), "fc.weight": torch.ones(1, 2)})
    5.0
    """
    body = [name for name, tensor in one.items() if tensor.dim() >= 2 and not name.startswith("fc.")]
    chosen = [name for name in body if one[name].dim() == 4] or body
    distances = [float(torch.linalg.vector_norm((one[name] - other[name]).double())) for name in chosen]
    return sum(distances) / max(len(distances), 1)
