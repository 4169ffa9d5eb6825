"""Models compared on the same images: who is right where another is wrong, and is the difference more than chance?

Two models that were trained on much the same are right, or wrong, on much the same images. Those tell nothing; the
others tell which of the two is better. So a paired comparison is far sharper than two accuracies with an interval each.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.core.formatting import MAJORITY

Z95 = 1.959964  # standard errors on either side of a 95 % interval


def right_patterns(probs: Sequence[Tensor], labels: Tensor, classes: int) -> Tensor:
    """How many images of each class are named rightly by which of M models: counts [2^M, K], added up over parties.

    Row 5 = 1 + 4 holds those that models 0 and 2 are right about, and no other.

    >>> one, other = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[0.3, 0.7], [0.4, 0.6]])
    >>> right_patterns([one, other], torch.tensor([0, 1]), 2)       # image 0: model 0 alone; image 1: both
    tensor([[0., 0.],
            [1., 0.],
            [0., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    counts = torch.zeros(2 ** len(probs), classes, dtype=torch.float64)
    pattern = torch.zeros_like(labels)
    for number, each in enumerate(probs):
        pattern += (each.argmax(dim=1) == labels).to(labels.dtype) << number
    return counts.index_put_((pattern, labels), torch.ones(len(labels), dtype=torch.float64), accumulate=True)


@dataclass(frozen=True)
class Pairs:
    """Two models on the same images, by stratum: how many images, who was right alone. All strata count alike."""

    images: tuple[float, ...]
    won: tuple[float, ...]  # the first model was right, the second wrong
    lost: tuple[float, ...]

    @property
    def difference(self) -> float:
        """By how much the first model is more often right.

        >>> Pairs((50.0,), (7.0,), (2.0,)).difference
        0.1
        """
        return sum(w * (b - c) for w, b, c in zip(self._weights(), self.won, self.lost, strict=True))

    @property
    def errors(self) -> float:
        """The difference in standard errors, as chance alone would have them (McNemar 1947): (b − c) / √(b + c).

        >>> round(Pairs((50.0,), (7.0,), (2.0,)).errors, 3), Pairs((50.0,), (0.0,), (0.0,)).errors     # 5 / √9
        (1.667, 0.0)
        >>> round(Pairs((40.0, 10.0), (4.0, 0.0), (0.0, 1.0)).errors, 3)    # (4/40 − 1/10) / 2: the classes weigh alike
        0.0
        """
        cells = zip(self._weights(), self.won, self.lost, strict=True)
        spread = math.sqrt(sum(w * w * (b + c) for w, b, c in cells))
        return self.difference / spread if spread else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference (Agresti and Min 2005): half an image more in each of the four cells,
        then d ± 1.96 √(b + c − (b − c)²/n) / n. With several strata the two images are shared out by their sizes.

        >>> low, high = Pairs((50.0,), (7.0,), (2.0,)).interval     # b, c, n = 7.5, 2.5, 52: .096 ± 1.96 · .0593
        >>> round(low, 3), round(high, 3)
        (-0.02, 0.212)
        >>> Pairs((), (), ()).interval
        (-1.0, 1.0)
        """
        total, strata = sum(self.images), len(self.images)
        if not total:
            return -1.0, 1.0
        centre = variance = 0.0
        for n, b, c in zip(self.images, self.won, self.lost, strict=True):
            more, size = n / total, n * (1 + 2 / total)
            centre += (b - c) / size / strata
            variance += (b + c + more - (b - c) ** 2 / size) / (size * strata) ** 2
        reach = Z95 * math.sqrt(variance)
        return max(-1.0, centre - reach), min(1.0, centre + reach)

    def _weights(self) -> list[float]:
        return [1 / (n * len(self.images)) for n in self.images]


class Judgement:
    """What the images that all parties keep back say of several models, from the sum of their `right_patterns`.

    Where one class has more than half of the images, classes weigh alike (balanced accuracy), as in every headline.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts.double()
        self.models = len(counts).bit_length() - 1
        images = self.counts.sum(dim=0)
        self.images = int(images.sum())
        self.balanced = bool(self.images and images.max() > MAJORITY * images.sum())

    def _by_stratum(self, rows: Sequence[int]) -> tuple[float, ...]:
        """How many images these patterns have: by class where classes weigh alike, else all together."""
        found = self.counts[list(rows)].sum(dim=0)
        if not self.images:
            return ()
        present = self.counts.sum(dim=0) > 0
        return tuple(found[present].tolist()) if self.balanced else (float(found.sum()),)

    def pairs(self, one: int, other: int) -> Pairs:
        """Two of the models, by their numbers.

        >>> judgement = Judgement(torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0], [4.0, 5.0]]))
        >>> judgement.pairs(0, 1)
        Pairs(images=(16.0,), won=(3.0,), lost=(1.0,))
        """
        rows = range(len(self.counts))
        won = [row for row in rows if row >> one & 1 and not row >> other & 1]
        lost = [row for row in rows if row >> other & 1 and not row >> one & 1]
        return Pairs(self._by_stratum(rows), self._by_stratum(won), self._by_stratum(lost))

    def figure(self, model: int) -> float | None:
        """Accuracy, or balanced accuracy where that leads; None without images.

        >>> Judgement(torch.tensor([[2.0, 1.0], [6.0, 1.0]])).figure(0)     # 8 of one class, 2 of the other: balanced
        0.625
        """
        rows = range(len(self.counts))
        right, images = self._by_stratum([row for row in rows if row >> model & 1]), self._by_stratum(rows)
        shares = [hits / n for hits, n in zip(right, images, strict=True)]
        return sum(shares) / len(shares) if shares else None

    def best(self, lead: float) -> int:
        """The model to ship: the first, or one after it that leads the best so far by `lead` standard errors or more.

        After the second, each needs one standard error more than the one before it: every further try is one that
        chance may win. With a lead of 0 the second is shipped where it was right as often as the first, or more often.
        Where there are no images, the first is.

        >>> def of(won: float, lost: float) -> Judgement:                       # model 1 against model 0, 100 images
        ...     return Judgement(torch.tensor([[30.0], [lost], [won], [70.0 - won - lost]]))
        >>> cases = ((0, 0), (4, 5), (1, 0), (8, 7), (9, 7))
        >>> [of(*case).best(lead=0.0) for case in cases], [of(*case).best(lead=0.3) for case in cases]
        ([1, 0, 1, 1, 1], [0, 0, 1, 0, 1])
        >>> def third(won: float) -> Judgement:                                 # model 2 alone is right about so many
        ...     return Judgement(torch.tensor([[0.0], [0.0], [0.0], [0.0], [won], [0.0], [0.0], [40.0]]))
        >>> [third(won).best(lead=0.3) for won in (1.0, 2.0)]                   # √1 and √2 standard errors, of 1.3
        [0, 2]
        """
        chosen = 0
        for model in range(1, self.models if self.images else 1):
            if self.pairs(model, chosen).errors >= lead + model - 1:
                chosen = model
        return chosen
