"""Whole data sets as one batch, in pieces that fit into memory and give the same gradient."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.pieces.descent import clip_gradient, trained_by
from tacit.pieces.train import batches


def needs_whole_batch(model: nn.Module) -> bool:
    """Whether images see each other: batch norm's statistics in pieces would be others than of the whole.

    >>> needs_whole_batch(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))), needs_whole_batch(nn.GroupNorm(1, 2))
    (True, False)
    """
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def paired_batches(first: int, second: int, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch over two sets side by side, in random order; the one with fewer batches begins again.

    Size 0: everything at once.

    >>> [(len(a), len(b)) for a, b in paired_batches(3, 8, 0, torch.Generator())]
    [(3, 8)]
    >>> [(len(a), len(b)) for a, b in paired_batches(3, 8, 4, torch.Generator())]
    [(3, 4), (3, 4)]
    >>> [(len(a), len(b)) for a, b in paired_batches(3, 0, 2, torch.Generator())], list(paired_batches(0, 0, 2, None))
    ([(3, 0)], [])
    """
    nothing = [torch.zeros(0, dtype=torch.int64)]
    one, other = (list(batches(count, size or count, generator)) for count in (first, second))
    steps = max(len(one), len(other))
    one, other = one or nothing, other or nothing
    for step in range(steps):
        yield one[step % len(one)], other[step % len(other)]


def cross_entropy_parts(
    model: nn.Module, images: Tensor, labels: Tensor, view: Callable[[Tensor], Tensor], chunk: int, scale: float = 1.0
) -> Iterator[Tensor]:
    """scale · mean cross-entropy of all images, as terms that add up to it: `chunk` images at a time (0: all at once).

    A view that draws its chances image by image gives the same sum for every chunk. Nothing to learn, no terms.

    >>> images, labels = torch.zeros(3, 1, 1, 2), torch.tensor([0, 1, 0])       # cross-entropy of each: ln 2
    >>> terms = cross_entropy_parts(nn.Flatten(), images, labels, lambda part: part, chunk=2, scale=0.5)
    >>> [round(float(term), 4) for term in terms]                               # ½ · 2/3 ln 2, ½ · 1/3 ln 2
    [0.231, 0.1155]
    """
    if len(labels):
        for part in torch.arange(len(labels)).split(chunk or len(labels)):
            logits = model(view(images[part]))
            yield F.cross_entropy(logits, labels[part], reduction="sum") * (scale / len(labels))


def descend_in_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Iterable[Tensor], clip: float = 0.0
) -> float:
    """One step down the gradient of a sum of losses, each dropped before the next is made. Returns the sum.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> _ = net.weight.data.fill_(1.0)
    >>> descend_in_parts(net, torch.optim.SGD(net.parameters(), lr=0.1), (net.weight.sum() * k for k in (1, 2)))
    3.0
    >>> round(net.weight.item(), 4)                                             # 1 − 0.1 · (1 + 2)
    0.7
    """
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for loss in losses:
        loss.backward()
        total += float(loss.detach())
    clip_gradient(trained_by(optimizer), clip)
    optimizer.step()
    return total
