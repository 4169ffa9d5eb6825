"""ViT-Tiny (Dosovitskiy et al. 2021, Touvron et al. 2021) for small images; CBAFed's Table 2 uses one."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.nets.layers import Net


def patch_size(size: int) -> int:
    """The patch that cuts the image into about 8×8 patches, and at most the usual 16 pixels.

    >>> [patch_size(size) for size in (8, 28, 32, 64, 224)]
    [1, 4, 4, 8, 16]
    """
    return min(16, (size + 4) // 8)


class Attention(nn.Module):
    """Every patch looks at every patch, with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, patches, width = x.shape
        parts = self.qkv(x).view(count, patches, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.proj(mixed.transpose(1, 2).reshape(count, patches, width))
        return result


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each on the normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class VisionTransformer(Net):
    """Patches, a class token, learnt positions, `depth` blocks; the features are the class token's."""

    channels_last = False

    def __init__(
        self, classes: int, channels: int, size: int, width: int = 192, depth: int = 12, heads: int = 3
    ) -> None:
        super().__init__()
        patch = patch_size(size)
        self.padding = -size % patch  # an image that does not divide evenly gets a black edge
        patches = ((size + self.padding) // patch) ** 2
        self.patch_embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, patches + 1, width))
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.fc = nn.Linear(width, classes)

    def initialise(self, generator: torch.Generator) -> None:
        for parameter in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(parameter, std=0.02, generator=generator)

    def steps(self) -> list[tuple[nn.Module, ...]]:
        *blocks, last = self.blocks
        return [(self.patch_embed,), *((block,) for block in blocks), (last, self.norm)]  # token, positions: with "all"

    def parts(self) -> list[Callable[[Tensor], Tensor]]:
        *blocks, last = self.blocks
        return [self._patches, *blocks, lambda x: self.norm(last(x))[:, 0]]

    def _patches(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, self.padding, 0, self.padding))
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
