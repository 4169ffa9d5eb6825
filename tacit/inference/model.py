"""A model with all that one needs to use it: its classes, what it does to pixels, its temperature."""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from tacit import nets
from tacit.core.errors import TacitError
from tacit.core.payload import Weights, difference, write_atomically
from tacit.core.text import as_word, safe
from tacit.data.arrays import check_class_names
from tacit.data.images import RULE
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, prepare

DESCRIPTION = "model.json"  # in a run's folder
BATCH = 256
LARGEST_SIDE = 4096  # pixels, as at real sites (tacit.sites.wire)
ANOTHER_COPY = (
    "Nothing was predicted or written. Take another copy of the file; in a run's folder, remove summary.json and "
    "`tacit resume` writes model.safetensors and model.json again."
)
T = TypeVar("T")


@dataclass(frozen=True)
class Description:
    """What a file of weights does not say. Saved with every run, and inside every export."""

    classes: tuple[str, ...]
    channels: int  # 1: grey, 3: red, green, blue
    size: int  # images are squares of so many pixels
    mean: tuple[float, ...]  # per channel, of values scaled to 0..1
    std: tuple[float, ...]
    net: dict[str, Any]
    temperature: float = 1.0
    calibrated_on: int = 0  # held-out labels that the temperature was fitted on; 0: none
    calibrated_later: bool = False  # on other labels than those of the run's own test images
    data: str = ""
    method: str = ""
    depth: int = 16  # bits that are used of 16-bit files

    @property
    def rule(self) -> str:
        """How an image of any size becomes what the net sees, in words."""
        colours = "grey" if self.channels == 1 else "RGB"
        deep = f"; of 16-bit files the upper 8 of {self.depth} bits" if self.depth < 16 else ""
        return f"{colours}; {RULE.format(size=self.size)}; unsigned bytes{deep}"

    @property
    def depends_on_batch(self) -> bool:
        """Whether a prediction changes with the other images of its batch (BN policy `batch`)."""
        return self.net["norm"] == "bn" and self.net["bn"] == "batch" and not self.net["name"].startswith("vit")

    def to_json(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "preprocessing": self.rule}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: Path | str = "") -> "Description":
        """The description in a text; a TacitError that names the file where it is none."""
        try:
            stored = json.loads(text)
            known = [field.name for field in dataclasses.fields(cls)]
            given: dict[str, Any] = {
                name: tuple(v) if isinstance(v, list) else v for name, v in stored.items() if name in known
            }
            found = cls(**given)
            found._check()
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise TacitError(
                f"{where or 'This'} does not describe a model of tacit ({safe(f'{type(error).__name__}: {error}')}). "
                f"{ANOTHER_COPY}"
            ) from error
        return found

    def _check(self) -> None:
        """Raise a ValueError where a figure makes no sense, before a net is built after it."""
        if not all(isinstance(name, str) for name in self.classes) or not isinstance(self.classes, tuple):
            raise ValueError("classes must be a list of names")
        check_class_names(self.classes, "it")
        if self.channels not in (1, 3) or type(self.size) is not int or not 1 <= self.size <= LARGEST_SIDE:
            raise ValueError(f"channels must be 1 or 3, and size a number from 1 to {LARGEST_SIDE}")
        if self.depth not in range(8, 17):
            raise ValueError("depth must be a number of bits from 8 to 16")
        numbers = [*self.mean, *self.std, self.temperature]
        if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            raise ValueError("mean, std and temperature must be numbers")
        if len(self.mean) != self.channels or len(self.std) != self.channels or self.temperature <= 0:
            raise ValueError("mean and std need a number for each channel, and the temperature must be above 0")
        if not isinstance(self.net, dict) or not {"name", "norm", "bn"} <= set(self.net):
            raise ValueError("net must have a name, a norm and a bn")


def describe(plan: Plan) -> Description:
    """The description of the model that a plan trains."""
    return Description(
        classes=plan.dataset.classes,
        channels=plan.dataset.channels,
        size=plan.dataset.size,
        mean=plan.setup.views.mean,
        std=plan.setup.views.std,
        net=plan.experiment.net.model_dump(),
        data=plan.dataset.name,
        method=Path(plan.experiment.method["name"]).stem,
        depth=plan.dataset.depth,
    )


def _net(description: Description, weights: Weights) -> nets.Net:
    """The net with its weights; they must be those of such a net."""
    net = nets.build(
        description.net["name"],
        classes=len(description.classes),
        channels=description.channels,
        size=description.size,
        **{name: value for name, value in description.net.items() if name != "name"},
    )
    if wrong := difference(weights, net.state_dict()):
        raise ValueError(f"these are no weights of the net {safe(description.net['name'])}: {wrong}")
    net.load_state_dict(weights)
    return net


class Classifier(nn.Module):
    """From bytes to probabilities: normalise, the net, divide by the temperature, softmax.

    Everything that uses or exports a model goes through this, so that all give the same answer.
    """

    zero: Tensor
    scale: Tensor

    def __init__(self, description: Description, weights: Weights) -> None:
        super().__init__()
        self.net = _net(description, weights)
        self.temperature = description.temperature
        self.register_buffer("zero", torch.tensor(description.mean).mul(255).view(-1, 1, 1))
        self.register_buffer("scale", torch.tensor(description.std).mul(255).reciprocal().view(-1, 1, 1))
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """uint8 [N, C, S, S] to probabilities [N, K]."""
        logits: Tensor = self.net((images.float() - self.zero) * self.scale)
        return (logits / self.temperature).softmax(dim=1)


class Model:
    """A trained classifier, ready to use; `load_model` finds it."""

    def __init__(self, description: Description, weights: Weights, place: Path) -> None:
        self.description = description
        self.weights = weights
        self.place = place  # the run's folder, or the exported file
        self.classifier = Classifier(description, weights)

    @torch.inference_mode()
    def probabilities(self, images: Tensor) -> Tensor:
        """Calibrated probabilities [N, K] of uint8 images [N, C, S, S] that are already of the model's size."""
        expected = (self.description.channels, self.description.size, self.description.size)
        if images.dtype != torch.uint8 or tuple(images.shape[1:]) != expected:
            raise TacitError(
                f"The model takes uint8 images [N, {', '.join(map(str, expected))}]; these are {images.dtype} "
                f"{list(images.shape)}."
            )
        parts = [self.classifier(part) for part in images.split(BATCH)] if len(images) else []
        return torch.cat(parts) if parts else torch.zeros(0, len(self.description.classes))


def load_model(place: Path) -> Model:
    """The model of a finished run, or of a .safetensors that `tacit export` wrote."""
    if place.is_file() and place.suffix == ".safetensors":
        if (place.parent / DESCRIPTION).is_file() and place.name == "model.safetensors":
            return load_model(place.parent)
        text = _opened(place, lambda: _metadata(place)).get("tacit")
        if text is None:
            raise TacitError(f"{place} holds weights only. Give a run's folder, or a file made by `tacit export`.")
        return _model(Description.from_json(text, place), place, place)
    weights = place / "model.safetensors"
    if not (place / "experiment.toml").is_file():
        raise TacitError(
            f"{place} is neither the folder of a run nor a .safetensors made by `tacit export`. `tacit run` makes "
            "runs; they lie in runs/ unless --out said otherwise."
        )
    if not weights.is_file():
        again = f"tacit resume {as_word(place)}"
        raise TacitError(f"The run in {place} is not finished, so it has no model yet. Go on: {again}")
    return _model(read_description(place) or _described_again(place), weights, place)


def read_description(folder: Path) -> Description | None:
    """The description in a run's folder; None where there is none."""
    path = folder / DESCRIPTION
    return Description.from_json(_opened(path, path.read_text), path) if path.exists() else None


def _model(description: Description, file: Path, place: Path) -> Model:
    weights = _opened(file, lambda: load_file(file))
    return _opened(file, lambda: Model(description, weights, place))


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def _opened(path: Path, read: Callable[[], T]) -> T:
    """What is read from a file of a model; an error that names it where it is damaged or something else."""
    try:
        return read()
    except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        raise TacitError(
            f"{path} is cut short, damaged or no model of tacit ({safe(error, 300) or type(error).__name__}). "
            f"{ANOTHER_COPY}"
        ) from error


def save_description(place: Path, description: Description) -> None:
    write_atomically(place / DESCRIPTION, description.to_json().encode())


def _described_again(place: Path) -> Description:
    """For runs of an earlier tacit, which saved no description: from the run's data, which must still be there."""
    run = Run(place)
    return describe(prepare(run.experiment, run.split_path))
