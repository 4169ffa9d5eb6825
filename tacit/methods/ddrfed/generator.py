"""The generator of DDRFed's GDGM: its options, its U-Net, and how images are drawn with it."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from tacit.contract.method import AtLeastOne, Length, NotNegative, Positive, Share
from tacit.core.payload import Weights
from tacit.methods.ddrfed.diffusion import STEPS, Sampler, sample
from tacit.nets.unet import UNet, build_unet
from tacit.views.pipe import PIPE_LABEL

SAMPLE_BATCH = 128  # images drawn at once; fixed, so that the same images come out whatever the memory


@dataclass(frozen=True)
class GDGM:
    """What the generator is, how it is trained and how much it draws: options that the stages share."""

    psi: Annotated[NotNegative, "generated images for each real one"] = 1.0
    diffusion_rounds: Annotated[AtLeastOne, Length(), "rounds in which the generator is trained"] = 40
    diffusion_epochs: Annotated[AtLeastOne, "local epochs in such a round"] = 10
    diffusion_batch: Annotated[AtLeastOne, "images a step"] = 128
    diffusion_lr: Annotated[Positive, "learning rate of the generator (Adam)"] = 2e-4
    ema: Annotated[Share, "the server's running mean of the generator keeps so much a round"] = 0.9
    augment: Annotated[Share, "chance of each operation of the augmentation that the label tells of"] = 0.12
    width: Annotated[int, Field(ge=4, le=4096, multiple_of=4), "channels of the U-Net at full size"] = 128
    halvings: Annotated[int, Field(ge=1, le=10), "times the U-Net halves the image and doubles it again"] = 3
    blocks: Annotated[int, Field(ge=1, le=100), "residual blocks of the U-Net at each size"] = 2
    generation_rounds: Annotated[AtLeastOne, Length(), "parts in which images are drawn and dealt"] = 50
    sampler: Annotated[Sampler, "ddpm as published, or ddim: fewer steps will do"] = "ddpm"
    sampling_steps: Annotated[int, Field(ge=1, le=STEPS), "steps from noise to an image"] = STEPS

    def most_examples(self, images: int, largest: int) -> float:
        """The generated images that it is dealt count too, ψ for each that the clients hold on average."""
        return images + math.ceil(self.psi * largest)

    def unet(self, channels: int, weights: Weights) -> UNet:
        """The U-Net with these weights, its own copy."""
        net = self.new_unet(channels).to_empty(device="cpu")
        net.load_state_dict(weights)
        return net

    def new_unet(self, channels: int, generator: torch.Generator | None = None) -> UNet:
        """The U-Net with first weights from a generator; without one, without weights and on no device."""
        shape = {"width": self.width, "halvings": self.halvings, "blocks": self.blocks}
        return build_unet(channels=channels, labels=len(PIPE_LABEL), generator=generator, **shape)

    def generate(
        self, weights: Weights, shape: tuple[int, int, int, int], generator: torch.Generator, device: torch.device
    ) -> Tensor:
        """Images uint8 of this shape [N, C, S, S], by the U-Net with these weights; the augmentation label is zero."""
        net = self.unet(shape[1], weights).to(device).eval()

        def denoise(noisy: Tensor, times: Tensor) -> Tensor:
            nothing_done: Tensor = torch.zeros(len(noisy), len(PIPE_LABEL), device=device)
            noise: Tensor = net(noisy.to(device), times.to(device), nothing_done)
            return noise

        drawn = [torch.zeros(0, *shape[1:], dtype=torch.uint8)]
        for start in range(0, shape[0], SAMPLE_BATCH):
            part = (min(SAMPLE_BATCH, shape[0] - start), *shape[1:])
            drawn.append(sample(denoise, part, self.sampler, self.sampling_steps, generator).clone())
        return torch.cat(drawn)
