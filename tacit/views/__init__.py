"""Views: what a net is shown of an image. Raw uint8 in, normalised float out, a fresh random view at each call.

A `Views` belongs to a data set and a recipe; it holds no state, so the same generator gives the same views. Work
goes in pieces of `CHUNK` images to bound memory. All chance is drawn before, a row of numbers for each image, so
neither the piece size nor the other images have a say in what becomes of an image: viewing 8 images equals
viewing 5 and then 3 with the same generator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from tacit.core.errors import TacitError, nearest
from tacit.views.augment import WEAK_NUMBERS, crop_view, draw, resize_crop_view
from tacit.views.randaugment import POOLS, PoolName, randaugment
from tacit.views.siamese import SIAMESE_NUMBERS, siamese_view

CHUNK = 512
MOST_PIXELS = 1 << 23  # numbers in a piece: images of more than 73 pixels come in smaller ones

WeakName = Literal["crop", "resize-crop", "none"]
ViewKind = Literal["plain", "weak", "strong"]
Operation = Callable[[Tensor, Tensor], Tensor]  # images and their rows of random numbers → images


def _refuse_unknown(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise TacitError(
            f"There is no {what} view '{value}'.{nearest(value, known)} Choose one of: {', '.join(known)}."
        )


@dataclass(frozen=True)
class Views:
    """Plain, weak and strong views of uint8 images [N, C, H, W], C = 1 or 3, sides of at least 8 pixels.

    >>> views = Views(mean=(0.5,), std=(0.25,))
    >>> views.plain(torch.tensor([0, 255], dtype=torch.uint8).repeat(32).view(1, 1, 8, 8))[0, 0, 0, :2].tolist()
    [-2.0, 2.0]
    """

    mean: tuple[float, ...]  # per channel, of images scaled to 0 … 1
    std: tuple[float, ...]
    weak: WeakName = "crop"
    strong: PoolName = "fixmatch"
    flip: bool = True  # does a left-right flip keep the class? (not for digits)
    dtype: torch.dtype = torch.float32
    resize: int = 0  # resize-crop: pixels of the side before the crop (0: a quarter more than the image's own)

    def __post_init__(self) -> None:
        _refuse_unknown("weak", self.weak, get_args(WeakName))
        _refuse_unknown("strong", self.strong, get_args(PoolName))
        if len(self.mean) != len(self.std) or any(value <= 0 for value in self.std):
            raise TacitError(
                f"Mean {self.mean} and standard deviation {self.std} do not fit together: give one of each for "
                "every channel, and deviations above 0."
            )
        if self.resize and self.weak != "resize-crop":
            raise TacitError(
                f"views.resize = {self.resize} is the size before the crop of views.weak = 'resize-crop', but "
                f"views.weak is '{self.weak}'. Write views.weak = 'resize-crop', or leave views.resize out."
            )

    def plain(self, images: Tensor) -> Tensor:
        """The images themselves, normalised: for tests, and for labelling without chance."""
        return self._in_pieces(images, lambda piece, _: piece, torch.empty(len(images), 0))

    def normalise(self, images: Tensor) -> Tensor:
        """(value / 255 − mean) / std for each channel: what `plain` does, for raw views."""
        return self.plain(images)

    def plain_view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """As `plain`: a view without chance, for a training loop that wants a view."""
        return self.plain(images)

    def weak_view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """A weak view of each image, normalised."""
        return self._in_pieces(images, self._weaken, draw(len(images), WEAK_NUMBERS, generator))

    def strong_view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """A strong view of each image (weak operations first), normalised."""
        return self._in_pieces(images, self._strengthen, draw(len(images), self._strong_numbers, generator))

    def siamese_view(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """A view for self-supervised learning (SimCLR, BYOL), normalised; `weak` and `strong` have no say in it."""
        numbers = draw(len(images), SIAMESE_NUMBERS, generator)
        return self._in_pieces(images, lambda piece, chance: siamese_view(piece, chance, self.flip), numbers)

    def raw_weak(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """As `weak_view`, but still uint8."""
        return self._in_pieces(images, self._weaken, draw(len(images), WEAK_NUMBERS, generator), raw=True)

    def raw_strong(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """As `strong_view`, but still uint8."""
        numbers = draw(len(images), self._strong_numbers, generator)
        return self._in_pieces(images, self._strengthen, numbers, raw=True)

    def drawn(self, kind: ViewKind, images: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """One view of each image, normalised, whose chance is the image's own: it has a generator for itself.

        >>> views, images = Views(mean=(0.5,), std=(0.25,)), torch.arange(128, dtype=torch.uint8).view(2, 1, 8, 8)
        >>> chance = lambda: [torch.Generator().manual_seed(number) for number in (1, 2)]
        >>> both = views.drawn("weak", images, chance())
        >>> torch.equal(views.drawn("weak", images[1:], chance()[1:]), both[1:])
        True
        """
        operation, count = {
            "plain": (lambda piece, _: piece, 0),
            "weak": (self._weaken, WEAK_NUMBERS),
            "strong": (self._strengthen, self._strong_numbers),
        }[kind]
        numbers = [draw(1, count, generator) for generator in generators]
        return self._in_pieces(images, operation, torch.cat(numbers) if numbers else torch.empty(0, count))

    @property
    def _strong_numbers(self) -> int:
        return WEAK_NUMBERS + POOLS[self.strong].numbers

    def _weaken(self, images: Tensor, numbers: Tensor) -> Tensor:
        if self.weak == "crop":
            return crop_view(images, numbers, self.flip)
        if self.weak == "resize-crop":
            return resize_crop_view(images, numbers, self.flip, self.resize)
        return images

    def _strengthen(self, images: Tensor, numbers: Tensor) -> Tensor:
        weak = self._weaken(images, numbers[:, :WEAK_NUMBERS])
        return randaugment(weak, numbers[:, WEAK_NUMBERS:], POOLS[self.strong])

    def _in_pieces(self, images: Tensor, view: Operation, numbers: Tensor, raw: bool = False) -> Tensor:
        """The view of all images, made `CHUNK` at a time; normalised unless `raw`."""
        images = as_bytes(images)
        self._check(images)
        result = torch.empty(images.shape, dtype=torch.uint8 if raw else torch.float32, device=images.device)
        zero = torch.tensor(self.mean, device=images.device).mul_(255).view(-1, 1, 1)
        scale = torch.tensor(self.std, device=images.device).mul_(255).reciprocal_().view(-1, 1, 1)
        chunk = max(1, min(CHUNK, MOST_PIXELS // max(images[:1].numel(), 1)))
        for start in range(0, len(images), chunk):
            piece = slice(start, start + chunk)
            viewed = view(images[piece], numbers[piece])
            if raw:
                result[piece] = viewed
            else:
                result[piece].copy_(viewed).sub_(zero).mul_(scale)
        return result if raw else result.to(self.dtype)

    def _check(self, images: Tensor) -> None:
        if images.dtype != torch.uint8 or images.dim() != 4:
            raise TacitError(
                f"Views take images as uint8 [N, C, H, W], or as floats from 0 to 1; these are {images.dtype} "
                f"{list(images.shape)}. Keep images raw and let the view normalise them."
            )
        channels, height, width = images.shape[1:]
        if channels not in (1, 3) or channels != len(self.mean) or min(height, width) < 8:
            raise TacitError(
                f"These images have {channels} channel(s) of {height}×{width} pixels; this Views was made for "
                f"{len(self.mean)}. Views need 1 or 3 channels, a mean and a standard deviation for each, and "
                "sides of at least 8 pixels (set data.image_size to enlarge)."
            )
        self.check_size(height)

    def check_size(self, size: int) -> None:
        """Refuse a resize-crop that would have to make images of this size smaller."""
        if 0 < self.resize < size:
            raise TacitError(
                f"views.resize = {self.resize} is below the size of the images, {size} pixels: a crop of that size "
                f"would not fit. Write views.resize = {size} or more (0: a quarter more), or a smaller data.image_size."
            )


def as_bytes(images: Tensor) -> Tensor:
    """Float images from 0 to 1 as uint8, the form in which all operations work; uint8 as they are.

    >>> as_bytes(torch.tensor([0.0, 0.5, 1.0])), as_bytes(torch.tensor([7], dtype=torch.uint8))
    (tensor([  0, 128, 255], dtype=torch.uint8), tensor([7], dtype=torch.uint8))
    """
    if not images.is_floating_point():
        return images
    if len(images) and not (float(images.min()) >= 0 and float(images.max()) <= 1):
        raise TacitError(
            f"Float images must have values from 0 to 1; these go from {float(images.min()):.3g} to "
            f"{float(images.max()):.3g} ({images.dtype}). Give them before they are normalised, or as uint8."
        )
    return images.mul(255).round().to(torch.uint8)
