"""Denoising diffusion (DDRFed Sec. 3.2.1, after DDPM): how noise is put in, and how it is taken out again.

Images are float [N, C, H, W] from −1 to 1. The share of the image that is left after t steps of noise is ᾱ_t, in
variance: x_t = √ᾱ_t · x_0 + √(1 − ᾱ_t) · ε. A net predicts ε from x_t and t.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Sampler = Literal["ddpm", "ddim"]
Denoiser = Callable[[Tensor, Tensor], Tensor]  # noisy images and their times → the noise in them

STEPS = 1000  # T, and β_t from first to last: DDPM's, which the paper builds on
FIRST_BETA, LAST_BETA = 1e-4, 0.02


def image_shares(steps: int = STEPS) -> Tensor:
    """ᾱ_t = Π (1 − β_i), the β_i rising evenly (Eq. 3): float64 [T].

    >>> [round(float(share), 4) for share in image_shares()[[0, 499, 999]]]
    [0.9999, 0.0786, 0.0]
    """
    betas = torch.linspace(FIRST_BETA, LAST_BETA, steps, dtype=torch.float64)
    return (1 - betas).cumprod(dim=0)


def add_noise(images: Tensor, noise: Tensor, share: Tensor) -> Tensor:
    """x_t = √ᾱ_t · x_0 + √(1 − ᾱ_t) · ε (Eq. 7), with a share for each image [N].

    >>> add_noise(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), 2.0), torch.tensor([0.64])).item()   # 0.8 + 0.6 · 2
    2.0
    """
    share = share.to(images).view(-1, 1, 1, 1)
    return share.sqrt() * images + (1 - share).sqrt() * noise


def denoising_loss(net: Denoiser, images: Tensor, generator: torch.Generator) -> Tensor:
    """‖ε − ε_ω(x_t, t)‖² as a mean over pixels (Eq. 8), at a random time for each image.

    >>> blind = lambda noisy, times: torch.zeros_like(noisy)           # sees no noise: the loss is ε's variance
    >>> loss = denoising_loss(blind, torch.zeros(500, 1, 4, 4), torch.Generator().manual_seed(0))
    >>> abs(float(loss) - 1) < 0.05
    True
    """
    times = torch.randint(STEPS, (len(images),), generator=generator)
    noise = torch.randn(images.shape, generator=generator).to(images)
    noisy = add_noise(images, noise, image_shares()[times])
    return F.mse_loss(net(noisy, times.to(images.device)), noise)


def first_image(noisy: Tensor, noise: Tensor, share: float) -> Tensor:
    """x_0 as Eq. 7 gives it from x_t and the predicted noise, kept within −1 … 1.

    >>> first_image(torch.tensor([1.6, 5.0]), torch.tensor([2.0, 2.0]), 0.64)                  # (1.6 − 0.6 · 2) / 0.8
    tensor([0.5000, 1.0000])
    """
    return ((noisy - math.sqrt(1 - share) * noise) / math.sqrt(share)).clamp(-1, 1)


def ddpm_step(noisy: Tensor, noise: Tensor, share: float, before: float, fresh: Tensor) -> Tensor:
    """One step back with fresh noise (Eq. 5, 6), from a share ᾱ to the higher one `before`.

    The mean is Eq. 6 written with x_0, as DDPM does: x_0 can then be kept in range, and steps may be left out.

    >>> ddpm_step(torch.tensor([0.5]), torch.tensor([0.3]), 0.5, 1.0, torch.tensor([9.0]))     # the last step: x_0
    tensor([0.4071])
    """
    kept = share / before  # α_t, or the product of those of the steps that are left out
    guess = first_image(noisy, noise, share)
    mean = (math.sqrt(before) * (1 - kept) * guess + math.sqrt(kept) * (1 - before) * noisy) / (1 - share)
    return mean + math.sqrt((1 - before) / (1 - share) * (1 - kept)) * fresh


def ddim_step(noisy: Tensor, noise: Tensor, share: float, before: float) -> Tensor:
    """One step back without chance (DDIM, η = 0): x_0 with as much of the predicted noise as belongs there.

    >>> ddim_step(torch.tensor([0.5]), torch.tensor([0.3]), 0.5, 1.0)
    tensor([0.4071])
    """
    return math.sqrt(before) * first_image(noisy, noise, share) + math.sqrt(1 - before) * noise


def times_back(count: int, steps: int = STEPS) -> list[int]:
    """`count` of the times T−1 … 0, evenly, the noisiest first.

    >>> times_back(4), len(times_back(1000)), times_back(1000)[-1]
    ([999, 749, 499, 249], 1000, 0)
    """
    return [round(steps - i * steps / count) - 1 for i in range(count)]


@torch.inference_mode()
def sample(net: Denoiser, shape: tuple[int, ...], sampler: Sampler, count: int, generator: torch.Generator) -> Tensor:
    """Images of this shape [N, C, H, W] out of pure noise in `count` steps, as uint8.

    >>> def knows(noisy, times):                                        # a net that knows: all images are grey 0.5
    ...     share = image_shares()[times[0]]
    ...     return (noisy - 0.5 * share.sqrt()) / (1 - share).sqrt()
    >>> sample(knows, (1, 1, 1, 2), "ddim", 10, torch.Generator().manual_seed(0))      # 127.5 · 1.5
    tensor([[[[191, 191]]]], dtype=torch.uint8)
    """
    shares, times = image_shares(), times_back(count)
    images = torch.randn(shape, generator=generator)
    for time, earlier in zip(times, [*times[1:], -1], strict=True):
        share, before = float(shares[time]), float(shares[earlier]) if earlier >= 0 else 1.0
        noise = net(images, torch.full((len(images),), time)).cpu()
        if sampler == "ddim":
            images = ddim_step(images, noise, share, before)
        else:
            images = ddpm_step(images, noise, share, before, torch.randn(shape, generator=generator))
    return to_bytes(images)


def to_bytes(images: Tensor) -> Tensor:
    """From −1 … 1 to 0 … 255, as images are kept.

    >>> to_bytes(torch.tensor([-1.0, 0.0, 1.0, 1.2]))
    tensor([  0, 128, 255, 255], dtype=torch.uint8)
    """
    return images.add(1).mul(127.5).round().clamp(0, 255).to(torch.uint8)


def from_bytes(images: Tensor) -> Tensor:
    """From 0 … 255 to −1 … 1.

    >>> from_bytes(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([-1.,  1.])
    """
    return images.float().div(127.5).sub(1)


def ema_decay(decay: float, round_number: int) -> float:
    """The decay of a running mean that begins young: min(decay, (1 + r) / (10 + r)), so that first models fade soon.

    >>> ema_decay(0.9, 0), ema_decay(0.9, 8), ema_decay(0.9, 200)
    (0.1, 0.5, 0.9)
    """
    return min(decay, (1 + round_number) / (10 + round_number))
