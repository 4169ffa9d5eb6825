"""The U-Net that draws: from noisy images, the time and a label of what was done to them, to the noise in them.

It is diffusers' `UNet2DModel`, laid out as in DDPM (Ho et al. 2020), with one thing added: an embedding of the
augmentation label joins the embedding of the time. diffusers is loaded when a U-Net is built, not before.
"""

import importlib.util
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tacit.core.errors import TacitError


def require_diffusers() -> None:
    """Say what to install, before any work, where the library is missing."""
    if importlib.util.find_spec("diffusers") is None:
        raise TacitError(
            "Generating images (GDGM) needs the library diffusers, which is not installed: "
            "pip install 'tacit[diffusion]'. Or go without generated images: --set method.gdgm=false."
        )


class UNet(nn.Module):
    """Predicts the noise in images [N, C, S, S] at times [N], given augmentation labels [N, L].

    Widths by resolution are 1, 2, 2, … times `width`, with attention at the second resolution. Images whose side
    cannot be halved so often are padded at the edges, and the answer is cut back.
    """

    def __init__(self, channels: int, labels: int, width: int, halvings: int, blocks: int) -> None:
        from diffusers import UNet2DModel

        super().__init__()
        down = ["DownBlock2D", "AttnDownBlock2D", *["DownBlock2D"] * (halvings - 1)]
        self.multiple = 2**halvings
        # No bias: a label of zeros has the embedding zero, so that it means "nothing was done".
        self.label_embedding = nn.Linear(labels, 4 * width, bias=False)
        self.unet = UNet2DModel(
            in_channels=channels,
            out_channels=channels,
            block_out_channels=(width, *[2 * width] * halvings),
            down_block_types=tuple(down),
            up_block_types=tuple(name.replace("Down", "Up") for name in reversed(down)),
            layers_per_block=blocks,
            attention_head_dim=None,  # one head, as in DDPM
            norm_num_groups=math.gcd(32, width // 4),
            class_embed_type="identity",  # what joins the time embedding comes embedded already
        )

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        height, width = images.shape[2:]
        below, right = -height % self.multiple, -width % self.multiple
        padded = F.pad(images, (0, right, 0, below), mode="replicate")
        noise: Tensor = self.unet(padded, times, class_labels=self.label_embedding(labels)).sample
        return noise[:, :, :height, :width]


def build_unet(
    *, channels: int, labels: int, width: int, halvings: int, blocks: int, generator: torch.Generator | None = None
) -> UNet:
    """A U-Net with first weights from the generator; without one, on no device and without weights.

    The library draws from torch's global generator; that is put aside meanwhile and restored.
    """
    require_diffusers()
    shape = (channels, labels, width, halvings, blocks)
    if generator is None:
        with torch.device("meta"):
            return UNet(*shape)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        return UNet(*shape)
