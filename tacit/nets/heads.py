"""Small nets on top of another net's features: the projectors and predictors of self-supervised learning."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tacit.nets.layers import initialise


def head(
    inputs: int, hidden: int, outputs: int, generator: torch.Generator | None = None, last_norm: bool = False
) -> nn.Sequential:
    """Linear, batch norm, ReLU, linear: BYOL's head, with first weights from a generator, or to be loaded.

    `last_norm`: then one more batch norm without scale and shift, as Orchestra has it. The norms have no running
    statistics: such heads are used while training only, and always on whole batches.

    >>> [name for name, _ in head(8, 4, 2).named_parameters()]
    ['0.weight', '0.bias', '1.weight', '1.bias', '3.weight', '3.bias']
    >>> head(8, 4, 2, torch.Generator())(torch.randn(5, 8)).shape
    torch.Size([5, 2])
    """
    with torch.device("meta"):  # no random numbers for weights that are replaced at once
        norm = nn.BatchNorm1d(hidden, track_running_stats=False)
        net = nn.Sequential(nn.Linear(inputs, hidden), norm, nn.ReLU(inplace=True), nn.Linear(hidden, outputs))
        if last_norm:
            net.append(nn.BatchNorm1d(outputs, affine=False, track_running_stats=False))
    net.to_empty(device="cpu")
    if generator is not None:
        initialise(net, generator)
    return net


def feature_size(weights: Mapping[str, Tensor]) -> int:
    """How many numbers a net with these weights makes of an image: what goes into its head `fc`.

    >>> feature_size({"fc.weight": torch.zeros(10, 64)})
    64
    """
    return weights["fc.weight"].shape[1]


def head_bytes(inputs: int, hidden: int, outputs: int) -> int:
    """What a head weighs when it travels.

    >>> head_bytes(8, 4, 2) == sum(4 * tensor.numel() for tensor in head(8, 4, 2).state_dict().values())
    True
    """
    return 4 * (inputs * hidden + 3 * hidden + hidden * outputs + outputs)
