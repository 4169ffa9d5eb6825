"""Clusters of equal size, by optimal transport (Orchestra)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TINY = 1e-30
SHARPNESS = 25.0  # of the assignments before they are balanced: the public code's


def balanced(scores: Tensor, iterations: int = 100, sharpness: float = SHARPNESS) -> Tensor:
    """Soft assignments [N, C] from similarities, by Sinkhorn-Knopp: each row sums to 1, each column to about N/C.

    >>> scores = torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.8], [0.0, 1.0]])
    >>> scores.argmax(dim=1), balanced(scores).argmax(dim=1)                  # three and one; two and two
    (tensor([0, 0, 0, 1]), tensor([0, 0, 1, 1]))
    >>> balanced(scores).sum(dim=0).round(decimals=1), balanced(scores).sum(dim=1)
    (tensor([2., 2.]), tensor([1., 1., 1., 1.]))
    """
    share = (sharpness * scores.double()).softmax(dim=1)
    for _ in range(iterations):
        share = share * (len(share) / share.shape[1]) / share.sum(dim=0).clamp(min=TINY)
        share = share / share.sum(dim=1, keepdim=True).clamp(min=TINY)
    return share.to(scores)


def equal_clusters(points: Tensor, clusters: int, generator: torch.Generator, steps: int = 5) -> Tensor:
    """Centroids [C, D] of points [N, D] on the sphere, in clusters of about equal size: k-means, balanced.

    There are no more clusters than points. A cluster that nobody is in gets a point by chance.

    >>> corners = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]))
    >>> found = equal_clusters(corners, 2, torch.Generator().manual_seed(1))
    >>> found[found[:, 0].argsort()].round(decimals=2)
    tensor([[0.0500, 1.0000],
            [1.0000, 0.0500]])
    """
    clusters = min(clusters, len(points))
    centroids = points[torch.randperm(len(points), generator=generator)[:clusters]].clone()
    for _ in range(steps if clusters else 0):
        nearest = balanced(points @ centroids.T, 10).argmax(dim=1)
        for number in range(clusters):
            inside = points[nearest == number]
            if not len(inside):
                inside = points[torch.randint(len(points), (1,), generator=generator)]
            centroids[number] = F.normalize(inside.mean(dim=0), dim=0)
    return centroids


def global_clusters(points: Tensor, centroids: Tensor, temperature: float, steps: int) -> Tensor:
    """Centroids [G, D] moved so that points fall on them evenly: their assignments approach the balanced ones.

    Each step raises the cosine between softmax(c·z / T) and the Sinkhorn-Knopp assignments, then puts the centroids
    back onto the sphere (Genevay et al. 2019, as Orchestra's public code has it).
    """
    moving = nn.Parameter(centroids.clone())
    optimizer = torch.optim.SGD([moving], lr=0.01, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        scores = points @ moving.T
        wanted = balanced(scores.detach(), 10)
        loss = -F.cosine_similarity((scores / temperature).softmax(dim=1), wanted, dim=1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            moving.copy_(F.normalize(moving, dim=1))
    return moving.detach()
