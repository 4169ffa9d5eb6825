"""3×3 convolutions on maps of a few pixels, computed on the taps that touch pixels.

A ResNet-18 with the ImageNet stem sees 28- and 32-pixel images as 2×2 and 1×1 maps in its last two stages: most of
a 3×3 window is padding there, and a general convolution multiplies it all the same. Here each tap that touches
pixels is one matrix product. The mathematics, the weights and their names are those of the plain net.

Maps are [H, W, N, C]: then the pixels that meet a tap lie in few blocks. Weights are [O, I, 3, 3] as ever, but in
memory channels are last, or each tap's matrix [O, I] lies for itself.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LARGEST = 4  # maps with more pixels a side are faster as ordinary convolutions (measured on a CPU)


class Span(NamedTuple):
    """Along one side: the inputs that meet a tap, and the outputs that they meet it for."""

    inputs: slice
    outputs: slice


class Tap(NamedTuple):
    """A tap of the kernel and the rectangles that it joins."""

    row: int
    column: int
    inputs: tuple[slice, slice]
    outputs: tuple[slice, slice]


def outputs_of(size: int, stride: int) -> int:
    """The side of the map after a 3×3 convolution with padding 1.

    >>> [outputs_of(size, 2) for size in (1, 2, 4, 7)]
    [1, 1, 2, 4]
    """
    return (size - 1) // stride + 1


def spans(size: int, stride: int) -> list[Span | None]:
    """For each of the three taps along a side; None for one that only ever touches padding.

    >>> spans(1, 1)                                              # one pixel: the middle tap alone
    [None, Span(inputs=slice(0, 1, 1), outputs=slice(0, 1, None)), None]
    >>> [span is not None for span in spans(2, 2)]
    [False, True, True]
    """
    result: list[Span | None] = []
    for tap in range(3):
        met = [place for place in range(outputs_of(size, stride)) if 0 <= place * stride + tap - 1 < size]
        if met:
            first, last = (place * stride + tap - 1 for place in (met[0], met[-1]))
            result.append(Span(slice(first, last + 1, stride), slice(met[0], met[-1] + 1)))
        else:
            result.append(None)
    return result


@lru_cache(maxsize=64)
def live_taps(height: int, width: int, stride: int) -> tuple[Tap, ...]:
    """The taps that touch pixels of such a map.

    >>> len(live_taps(4, 4, 1)), len(live_taps(2, 2, 1)), len(live_taps(2, 2, 2)), len(live_taps(1, 1, 1))
    (9, 9, 4, 1)
    """
    return tuple(
        Tap(a, b, (rows.inputs, columns.inputs), (rows.outputs, columns.outputs))
        for a, rows in enumerate(spans(height, stride))
        for b, columns in enumerate(spans(width, stride))
        if rows is not None and columns is not None
    )


def add_product(total: Tensor, x: Tensor, matrix: Tensor) -> None:
    """total [h, w, N, O] += x [h, w, N, I] · matrix [I, O], in place, in the largest pieces that lie together."""
    for into, row in zip(total, x, strict=True):
        if into.is_contiguous() and row.is_contiguous():
            into.view(-1, into.shape[-1]).addmm_(row.view(-1, row.shape[-1]), matrix)
        else:
            for pixel, source in zip(into, row, strict=True):
                pixel.addmm_(source, matrix)


def products(x: Tensor, stride: int, matrices: Sequence[Tensor]) -> Tensor:
    """The convolution of maps by a matrix [O, I] for each live tap."""
    height, width, count, _ = x.shape
    result = x.new_zeros(outputs_of(height, stride), outputs_of(width, stride), count, len(matrices[0]))
    for tap, matrix in zip(live_taps(height, width, stride), matrices, strict=True):
        add_product(result[tap.outputs], x[tap.inputs], matrix.t())
    return result


def gradient_of_input(gradient: Tensor, x: Tensor, stride: int, matrices: Sequence[Tensor]) -> Tensor:
    result = torch.zeros_like(x)
    for tap, matrix in zip(live_taps(*x.shape[:2], stride), matrices, strict=True):
        add_product(result[tap.inputs], gradient[tap.outputs], matrix)
    return result


def pairs_at(gradient: Tensor, x: Tensor, tap: Tap) -> tuple[Tensor, Tensor]:
    """What meets at a tap: gradients [O, pairs] and inputs [pairs, I], whose product is the gradient of its matrix."""
    return gradient[tap.outputs].reshape(-1, gradient.shape[-1]).t(), x[tap.inputs].reshape(-1, x.shape[-1])


def matrices_of(weight: Tensor, taps: Sequence[Tap]) -> list[Tensor]:
    return [weight[:, :, tap.row, tap.column] for tap in taps]


class LiveConvolution(torch.autograd.Function):
    """The convolution and its gradient: one product a live tap, nothing for the others (their gradient is zero)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return products(x, stride, matrices_of(weight, live_taps(*x.shape[:2], stride)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        gradient, taps = gradient.contiguous(), live_taps(*x.shape[:2], ctx.stride)
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = gradient_of_input(gradient, x, ctx.stride, matrices_of(weight, taps))
        if ctx.needs_input_grad[1]:
            to_weight = (torch.empty_like if len(taps) == 9 else torch.zeros_like)(weight)  # in the weight's layout
            for tap, matrix in zip(taps, matrices_of(to_weight, taps), strict=True):
                matrix.addmm_(*pairs_at(gradient, x, tap), beta=0.0)
        return to_x, to_weight, None


class TapConvolution(torch.autograd.Function):
    """The same by its matrices: whoever trains these alone need not carry gradients of taps that have none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int, *matrices: Tensor) -> Tensor:
        ctx.save_for_backward(x, *matrices)
        ctx.stride = stride
        return products(x, stride, matrices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        gradient = gradient.contiguous()
        to_x = gradient_of_input(gradient, x, ctx.stride, matrices) if ctx.needs_input_grad[0] else None
        to_taps = [torch.mm(*pairs_at(gradient, x, tap)) for tap in live_taps(*x.shape[:2], ctx.stride)]
        return to_x, None, *to_taps


class TappedConv2d(nn.Conv2d):
    """A 3×3 convolution that knows which of its taps touch pixels, once its net is arranged for images of a size."""

    live: tuple[Tap, ...] = ()  # not known yet
    leaves: tuple[nn.Parameter, ...] = ()  # while the live taps are trained alone: their matrices, views of the weight

    def expect(self, size: int, few: bool) -> int:
        """Get ready for maps of so many pixels a side (few: computed here); returns the side of what comes out.

        Where some taps are dead, each tap lies in one block of memory; else channels are last.
        """
        stride = int(self.stride[0])
        self.live = live_taps(size, size, stride) if few else ()
        if self.has_dead_taps:
            self.weight.data = self.weight.data.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
        elif self.live:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return outputs_of(size, stride)

    @property
    def has_dead_taps(self) -> bool:
        return 0 < len(self.live) < 9

    @property
    def dead(self) -> list[tuple[int, int]]:
        """Row and column of the taps that only ever touch padding."""
        known = {(tap.row, tap.column) for tap in self.live}
        return [(row, column) for row in range(3) for column in range(3) if (row, column) not in known]

    def forward(self, x: Tensor) -> Tensor:
        assert not self.leaves, "while live taps are trained alone, the others must not be asked"
        return super().forward(x)


def convolve(layer: nn.Module, x: Tensor) -> Tensor:
    """What the layer does to maps [N, C, H, W], done to [H, W, N, C]: 3×3 with padding 1, or 1×1 without."""
    assert isinstance(layer, nn.Conv2d)
    stride = int(layer.stride[0])
    if layer.kernel_size == (1, 1):
        result: Tensor = x[::stride, ::stride] @ layer.weight[:, :, 0, 0].t()
    elif isinstance(layer, TappedConv2d) and layer.leaves:
        result = TapConvolution.apply(x, stride, *layer.leaves)
    else:
        result = LiveConvolution.apply(x, layer.weight, stride)
    return result if layer.bias is None else result + layer.bias


def normalise(layer: nn.Module, x: Tensor) -> Tensor:
    """What a norm layer does to maps [N, C, H, W], done to [H, W, N, C]."""
    if isinstance(layer, nn.BatchNorm2d):  # it asks for no more than which numbers belong to a channel
        flat: Tensor = layer(x.reshape(-1, x.shape[-1], 1, 1))
        return flat.view(x.shape)
    if isinstance(layer, nn.Identity):  # folded into the convolution
        return x
    result: Tensor = layer(x.permute(2, 3, 0, 1).contiguous())
    return result.permute(2, 3, 0, 1).contiguous()
