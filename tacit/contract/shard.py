"""What one party holds: images, and the labels of some of them."""

from dataclasses import dataclass

from torch import Tensor

from tacit.views import Views


@dataclass(frozen=True)
class Labeled:
    """Images with their labels."""

    images: Tensor  # uint8 [n, C, H, W]; with net.views tickets of a bank, int64 [n, 2]
    labels: Tensor  # int64 [n]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Shard:
    """What one party holds. Either part may be empty."""

    labeled: Labeled
    unlabeled: Tensor  # uint8 [m, C, H, W]: images only; with net.views tickets, int64 [m, 2]
    repeated: int = 0  # labelled images that are among the unlabelled ones, too (placement `clients`)
    views: Views | None = None  # who makes views of tickets; None: these are images, and any Views will do

    @property
    def held(self) -> int:
        """How many images it holds; one that is labelled and unlabelled data counts once.

        >>> import torch
        >>> Shard(Labeled(torch.zeros(27, 1, 8, 8), torch.zeros(27)), torch.zeros(97, 1, 8, 8), repeated=27).held
        97
        """
        return len(self.labeled) + len(self.unlabeled) - self.repeated

    @property
    def images(self) -> Tensor:
        """All that a party holds, each once: where it has both kinds, its labelled images are among the others."""
        return self.unlabeled if len(self.unlabeled) else self.labeled.images
