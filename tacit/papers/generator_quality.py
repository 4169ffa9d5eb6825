"""How good generated images are, without any download: figures in the feature space of a small net trained here.

They are no FID: the features are those of our own classifier of the data at hand, so figures compare sets of images
of one data set, scored by one net, with one number of images; nothing else. The net's name says what it learned.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit import nets
from tacit.core import seeds
from tacit.core.errors import TacitError
from tacit.nets import Net
from tacit.nets.optimizer import sgd
from tacit.pieces.train import fit
from tacit.views import Views


def frechet_distance(real: Tensor, made: Tensor) -> float:
    """|μ₁ − μ₂|² + tr(C₁ + C₂ − 2·√(C₁C₂)) of two sets of features [N, D], each taken as a Gaussian; 0 if alike.

    >>> real = torch.tensor([[-1.0], [1.0]])                        # mean 0, variance 2
    >>> frechet_distance(real, real + 3), round(frechet_distance(real, 2 * real), 4)        # 3², (√2 − √8)²
    (9.0, 2.0)
    """
    _check(real, made)
    (first, one), (second, two) = _gaussian(real), _gaussian(made)
    values, vectors = torch.linalg.eigh(one)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    # The traces of √(C₁C₂) and of √(√C₁·C₂·√C₁) are equal, and the latter is symmetric.
    cross = torch.linalg.eigvalsh(root @ two @ root).clamp(min=0).sqrt().sum()
    apart = (first - second).square().sum() + one.trace() + two.trace() - 2 * cross
    return max(float(apart), 0.0)


def _gaussian(features: Tensor) -> tuple[Tensor, Tensor]:
    wide = features.double()
    return wide.mean(dim=0), wide.T.cov().reshape(wide.shape[1], wide.shape[1])


def precision_recall(real: Tensor, made: Tensor, neighbours: int = 3) -> tuple[float, float]:
    """(precision, recall): the share of made images that lie among real ones, and of real ones among made ones.

    Among: nearer to one of them than that one's k-th neighbour of its own kind (Kynkäänniemi et al. 2019).

    >>> real = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0], [12.0]])
    >>> precision_recall(real, torch.tensor([[0.5], [0.6], [1.4]]), neighbours=1)   # all look real; a third of the real
    (1.0, 0.3333333333333333)
    """
    _check(real, made, neighbours + 1)
    return _among(made, real, neighbours), _among(real, made, neighbours)


def _among(some: Tensor, others: Tensor, neighbours: int) -> float:
    some, others = some.double(), others.double()
    radius = torch.cdist(others, others).kthvalue(neighbours + 1, dim=1).values  # the nearest one is itself
    return float((torch.cdist(some, others) <= radius).any(dim=1).double().mean())


def _check(real: Tensor, made: Tensor, least: int = 2) -> None:
    if real.dim() != 2 or made.dim() != 2 or real.shape[1] != made.shape[1] or min(len(real), len(made)) < least:
        raise TacitError(
            f"Quality needs features [N, D] of two sets with at least {least} images each, got {list(real.shape)} and "
            f"{list(made.shape)}. Generate more images (--count)."
        )


@dataclass(frozen=True)
class FeatureSpace:
    """A net that was trained here, and what it learned: the space in which images are compared."""

    net: Net
    views: Views
    name: str

    @torch.inference_mode()
    def features(self, images: Tensor) -> Tensor:
        """What the net sees in uint8 images, before its last layer: [N, D]."""
        self.net.eval()
        return torch.cat([self.net.features(self.views.plain(part)) for part in images.split(256)]).clone()

    def score(self, real: Tensor, made: Tensor) -> dict[str, float]:
        """Fréchet distance (low is good), precision and recall (high is good) of made images against real ones."""
        seen, drawn = self.features(real), self.features(made)
        precision, recall = precision_recall(seen, drawn)
        return {"frechet": frechet_distance(seen, drawn), "precision": precision, "recall": recall}


def learn_features(
    images: Tensor, labels: Tensor, views: Views, *, epochs: int = 3, net: str = "cnn-16", seed: int = 0
) -> FeatureSpace:
    """Train a small classifier on labelled images; its features are the space. Labels of −1 are left out."""
    images, labels = images[labels >= 0], labels[labels >= 0]
    if len(labels.unique()) < 2:
        raise TacitError("A feature space needs labelled images of at least two classes.")
    classes, (channels, size) = int(labels.max()) + 1, images.shape[1:3]
    model = nets.build(net, classes=classes, channels=channels, size=size, generator=seeds.generator(seed, "features"))
    fit(
        model,
        images,
        labels,
        view=views.weak_view,
        optimizer=sgd(model, lr=0.05),
        epochs=epochs,
        batch=64,
        clip=5.0,
        generator=seeds.generator(seed, "features", "views"),
    )
    return FeatureSpace(model, views, f"features of a {net} trained here, {epochs} epochs on {len(labels):,} labels")
