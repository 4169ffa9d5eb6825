"""The nets by name: `build("wrn-28-2", classes=10, channels=3, size=32)`; the options are in docs/nets.md."""

import re
from collections.abc import Iterable
from typing import get_args

import torch

from tacit.core.errors import TacitError, nearest
from tacit.core.memory_bounds import check_memory
from tacit.core.text import safe
from tacit.nets.cnn import ConvolutionalNet
from tacit.nets.layers import (
    Activation,
    BatchNormPolicy,
    Layers,
    Net,
    Norm,
    Stem,
    initialise,
    parameter_count,
)
from tacit.nets.lite import SCALES, EfficientNetLite
from tacit.nets.resnet import ResNet18
from tacit.nets.timm_nets import PREFIX, drawn
from tacit.nets.vit import VisionTransformer
from tacit.nets.wrn import WideResNet

__all__ = ["Net", "build", "known", "outline", "parameter_count"]

WIDTHS = {"cnn": 32, "resnet18": 64}  # where a name has none
USUAL = {"cnn": "cnn", "wrn": "wrn-28-2", "resnet18": "resnet18", "vit-tiny": "vit-tiny"} | dict.fromkeys(
    SCALES, "lite0"
)
TIMM_NAME = PREFIX + r"[A-Za-z0-9][A-Za-z0-9_.-]{0,90}"
WIDE = 4096  # beyond it, memory is told from the square of the width
DEEP = 1000  # layers of a wide residual net


def known() -> list[tuple[str, str]]:
    """Every name that `build` takes, with a line about it."""
    return [
        ("cnn", "three 3×3 convolutions, 0.1 M parameters, for quick runs; cnn-W starts with W channels, not 32"),
        (
            "wrn-D-W",
            "wide residual net of depth D (6n + 4) and width W: wrn-28-2 (1.5 M), wrn-28-8 (23 M), …",
        ),
        (
            "resnet18",
            "ResNet-18, 11.2 M parameters; stem = imagenet (as in CBAFed, DDRFed) or cifar; resnet18-W starts with W "
            "channels, not 64",
        ),
        ("vit-tiny", "small vision transformer, 5.4 M parameters; LayerNorm, so norm and bn have no effect"),
        (
            "lite0 … lite4",
            'EfficientNet-Lite, 3.4 to 11.8 M parameters; net.weights = "pretrained" begins with ImageNet\'s (0 to 2)',
        ),
        ("timm:NAME", "any model of timm, where timm is installed: timm:vit_tiny_patch16_224"),
    ]


def build(
    name: str,
    *,
    classes: int,
    channels: int,
    size: int,
    norm: Norm = "gn",
    bn: BatchNormPolicy = "average",
    stem: Stem = "imagenet",
    activation: Activation = "relu",
    generator: torch.Generator | None = None,
) -> Net:
    """A net for images [channels, size, size], its first weights drawn from the generator.

    Without a generator all weights are zero, to be loaded. Options that a net does not have (the stem of
    a WRN, the norm of a ViT) change nothing.

    >>> net = build("wrn-28-2", classes=10, channels=3, size=32, norm="bn")
    >>> parameter_count(net)
    1467610
    >>> net(torch.zeros(5, 3, 32, 32)).shape, net.features(torch.zeros(5, 3, 32, 32)).shape
    (torch.Size([5, 10]), torch.Size([5, 128]))
    """
    net = outline(
        name, classes=classes, channels=channels, size=size, norm=norm, bn=bn, stem=stem, activation=activation
    )
    if name.startswith(PREFIX):  # made whole, since it may hold what no state_dict has
        return drawn(name, classes, channels, size, generator)
    net.to_empty(device="cpu")
    if generator is None:
        with torch.no_grad():
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.zero_()
    else:
        initialise(net, generator)
    return net


def outline(
    name: str,
    *,
    classes: int,
    channels: int,
    size: int,
    norm: Norm = "gn",
    bn: BatchNormPolicy = "average",
    stem: Stem = "imagenet",
    activation: Activation = "relu",
) -> Net:
    """The net without weights, which costs next to nothing; one that does not fit the images or the memory is refused.

    >>> outline("cnn-99999999999", classes=10, channels=1, size=28)
    Traceback (most recent call last):
    tacit.core.errors.TacitError: The weights of net 'cnn-99999999999' would take ... EB of memory; ...
    """
    check_choice("norm", norm, get_args(Norm))
    check_choice("bn", bn, get_args(BatchNormPolicy))
    check_choice("stem", stem, get_args(Stem))
    check_choice("activation", activation, get_args(Activation))
    check_least("classes", classes, 2)
    check_least("channels", channels, 1)
    check_least("size", size, 8)
    if name.startswith(PREFIX):
        check_timm_name(name)
        return drawn(name, classes, channels, size, None)
    layers = Layers(norm, bn, activation)
    kind, depth, width = parts_of(name)
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced at once
        for tried in (min(width, WIDE), width):  # torch cannot even name the shapes of the widest
            net = construct(kind, depth, tried, classes, channels, size, stem, layers)
            check_memory(
                4 * parameter_count(net) * width**2 // tried**2,
                f"The weights of net '{name}'",
                f"Write a narrower one, such as net.name = '{USUAL[kind]}'.",
            )
            if tried == width:
                break
    return net


def parts_of(name: str) -> tuple[str, int, int]:
    """What a name means: the kind of net, its depth and its width, 0 and 1 where it has none.

    >>> parts_of("cnn"), parts_of("resnet18-20"), parts_of("wrn-28-2"), parts_of("vit-tiny")
    (('cnn', 0, 32), ('resnet18', 0, 20), ('wrn', 28, 2), ('vit-tiny', 0, 1))
    """
    if name == "vit-tiny" or name in SCALES:
        return name, 0, 1
    if found := re.fullmatch(r"(cnn|resnet18)(?:-([0-9]{1,15}))?", name):
        width = int(found[2] or WIDTHS[found[1]])
        if width < 1:
            usual = f"{found[1]}-{WIDTHS[found[1]] // 2}"
            raise TacitError(f"There is no net '{name}': the width must be at least 1. Write '{usual}'.")
        return found[1], 0, width
    if found := re.fullmatch(r"wrn-([0-9]{1,15})-([0-9]{1,15})", name):
        depth, width = int(found[1]), int(found[2])
        check_wide(name, depth, width)
        return "wrn", depth, width
    patterns, names = ", ".join(pattern for pattern, _ in known()), [*USUAL.values(), *SCALES, "wrn-28-8"]
    raise TacitError(f"There is no net '{safe(name, 60)}'; there are {patterns}.{nearest(name, names)}")


def construct(
    kind: str, depth: int, width: int, classes: int, channels: int, size: int, stem: Stem, layers: Layers
) -> Net:
    if kind == "cnn":
        return ConvolutionalNet(classes, channels, size, width, layers)
    if kind == "resnet18":
        return ResNet18(classes, channels, width, stem, layers)
    if kind == "wrn":
        return WideResNet(depth, width, classes, channels, layers)
    if kind in SCALES:
        return EfficientNetLite(kind, classes, channels, layers)
    return VisionTransformer(classes, channels, size)


def narrowed(name: str, factor: float) -> str:
    """The same net with so many times the channels, one at least; a net without a width stays as it is.

    >>> [narrowed(name, 0.316) for name in ("cnn", "cnn-16", "resnet18", "wrn-28-2", "wrn-28-8", "vit-tiny")]
    ['cnn-10', 'cnn-5', 'resnet18-20', 'wrn-28-1', 'wrn-28-3', 'vit-tiny']
    """
    found = re.fullmatch(r"(cnn|resnet18|wrn-\d+)(?:-(\d+))?", name)
    if not found or factor == 1:
        return name
    usual = WIDTHS.get(found[1], 1)
    return f"{found[1]}-{max(1, round(int(found[2] or usual) * factor))}"


def check_wide(name: str, depth: int, width: int) -> None:
    if depth > DEEP:
        raise TacitError(f"There is no net '{name}': the depth is at most {DEEP}. Write 'wrn-28-{max(1, width)}'.")
    if depth < 10 or depth % 6 != 4:
        better = max(10, (depth - 4 + 3) // 6 * 6 + 4)
        raise TacitError(
            f"There is no net '{name}': the depth of a wide residual net is 6n + 4 (10, 16, 22, 28, …). "
            f"Write 'wrn-{better}-{max(1, width)}'."
        )
    if width < 1:
        raise TacitError(f"There is no net '{name}': the width must be at least 1. Write 'wrn-{depth}-2'.")


def check_timm_name(name: str) -> None:
    """Refuse names that timm would not look up in itself (such as addresses of models elsewhere)."""
    if not re.fullmatch(TIMM_NAME, name):
        raise TacitError(f"There is no net '{safe(name, 60)}': write timm: and a name that timm.list_models() tells.")


def check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        expected = ", ".join(choices)
        raise TacitError(f"net.{option} is '{value}'; it must be one of {expected}.{nearest(value, choices)}")


def check_least(what: str, value: int, least: int) -> None:
    if value < least:
        hint = " Enlarge the images with data.image_size." if what == "size" else ""
        raise TacitError(f"A net cannot have {what} = {value}; it must be at least {least}.{hint}")
