"""Any model of timm by its name, where timm is installed: `timm:vit_tiny_patch16_224`.

Thin on purpose: timm builds the body (its head left away), tacit puts `fc` behind it. Tested against a stand-in with
timm's interface (tests/test_timm.py); timm itself needs torchvision.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tacit.core.errors import TacitError
from tacit.core.payload import Weights
from tacit.core.text import safe
from tacit.nets.layers import Net

PREFIX = "timm:"


@dataclass(frozen=True)
class About:
    """What a model of timm says of the images that its weights were trained on."""

    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def installed() -> bool:
    return importlib.util.find_spec("timm") is not None


def library() -> Any:
    """timm itself; an error that says what to install where it is missing or cannot be imported."""
    try:
        return importlib.import_module("timm")
    except ImportError as error:
        raise TacitError(
            f"Nets called '{PREFIX}…' need timm, which could not be imported ({safe(error, 200)}). "
            "Install it: pip install timm (it brings torchvision)."
        ) from None


def model_of(name: str, channels: int, size: int, pretrained: bool = False) -> nn.Module:
    """timm's model without its head. Some models are made for one size, and are told; others take any."""
    timm, called = library(), name.removeprefix(PREFIX)
    settings = {"pretrained": pretrained, "num_classes": 0, "in_chans": channels}
    try:
        try:
            model: nn.Module = timm.create_model(called, img_size=size, **settings)
        except TypeError:  # a net that takes images of any size has no such option
            model = timm.create_model(called, **settings)
    except Exception as error:  # of whatever kind: an unknown name, no network, a size that does not divide
        raise TacitError(f"timm could not make '{safe(called, 80)}' ({safe(error, 300)}). {HINT}") from None
    return model


HINT = "timm.list_models() tells the names that it knows; weights are downloaded by timm, so they need the network."


def about(name: str) -> About | None:
    """The size and normalisation that belong to a model's weights; None where timm is not there to tell."""
    if not installed():
        return None
    config = library().create_model(name.removeprefix(PREFIX), pretrained=False, num_classes=0).default_cfg
    return About(int(config["input_size"][-1]), tuple(config["mean"]), tuple(config["std"]))


def pretrained(name: str, channels: int, size: int) -> Weights:
    """timm's own weights, under the names that they have in a `TimmNet`; there is no head among them."""
    with torch.random.fork_rng(devices=[]):  # it draws weights before it loads them
        torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
        body = model_of(name, channels, size, pretrained=True)
    return {f"body.{key}": tensor.detach().clone() for key, tensor in body.state_dict().items()}


class TimmNet(Net):
    """A body made by timm, and a head. Norms and their policy are timm's; `norm` and `bn` have no effect."""

    channels_last = False

    def __init__(self, name: str, classes: int, channels: int, size: int) -> None:
        super().__init__()
        self.body = model_of(name, channels, size)
        self.fc = nn.Linear(int(self.body.num_features), classes)  # type: ignore[arg-type]

    def steps(self) -> list[tuple[nn.Module, ...]]:
        blocks = getattr(self.body, "blocks", None) or getattr(self.body, "stages", None)
        if blocks is None:
            raise TacitError('This model of timm shows no blocks to count: write net.train = "all" or "head".')
        *others, last = blocks.children()
        norm = getattr(self.body, "norm", None)
        return [*((block,) for block in others), (last, norm) if isinstance(norm, nn.Module) else (last,)]

    def parts(self) -> list[Callable[[Tensor], Tensor]]:
        raise TacitError(
            "A model of timm cannot be cut between its blocks: with net.views write net.train = 'head', or net.views = "
            "0."
        )

    def features(self, x: Tensor) -> Tensor:
        result: Tensor = self.body(x)
        return result


def drawn(name: str, classes: int, channels: int, size: int, generator: torch.Generator | None) -> TimmNet:
    """The net with first weights as timm draws them, from a generator that only this uses."""
    generator = generator or torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):  # timm draws from torch's global generator
        torch.set_rng_state(generator.get_state())
        return TimmNet(name, classes, channels, size)
