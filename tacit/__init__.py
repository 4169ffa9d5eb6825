"""tacit: federated semi-supervised learning as real software.

import tacit
run = tacit.run("demo", out="runs/first")
run["accuracy"]                       # by round, as an array
run.records                           # all rounds, as a DataFrame if pandas is there
run.predict("new-images/").labels     # the class of each image, by name
run.plot()                            # the figures by round (needs matplotlib)

The author of a method needs two lines:

from tacit import Client, Hub, Method, Payload, Reply, Task, Weights, mean_model
from tacit.pieces import aggregate, train   # and whatever else is there to build with
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tacit.version import __version__

# Where each public name lives. They are imported when they are asked for: `tacit --help` need not wait for torch.
_HOMES = {
    "tacit.api": ("load", "run"),
    "tacit.config.resolve": ("resolve",),
    "tacit.contract.method": (
        "AtLeastOne",
        "Count",
        "Epochs",
        "Length",
        "Method",
        "NotNegative",
        "Positive",
        "Reply",
        "Rounds",
        "Share",
        "Stage",
        "Task",
        "mean_model",
    ),
    "tacit.contract.parties": ("Client", "Hub", "Labeled", "Party", "Shard"),
    "tacit.core.errors": ("TacitError",),
    "tacit.core.payload": ("Payload", "Weights", "number_in", "tensor_in", "weights_in"),
    "tacit.core.settings": ("Experiment",),
    "tacit.inference.model": ("Model", "load_model"),
    "tacit.inference.notebook": ("NotebookRun",),
    "tacit.inference.predict": ("Predictions",),
    "tacit.methods": ("find_method", "known_methods"),
}

if TYPE_CHECKING:
    from tacit.api import load, run
    from tacit.config.resolve import resolve
    from tacit.contract.method import (
        AtLeastOne,
        Count,
        Epochs,
        Length,
        Method,
        NotNegative,
        Positive,
        Reply,
        Rounds,
        Share,
        Stage,
        Task,
        mean_model,
    )
    from tacit.contract.parties import Client, Hub, Labeled, Party, Shard
    from tacit.core.errors import TacitError
    from tacit.core.payload import Payload, Weights, number_in, tensor_in, weights_in
    from tacit.core.settings import Experiment
    from tacit.inference.model import Model, load_model
    from tacit.inference.notebook import NotebookRun
    from tacit.inference.predict import Predictions
    from tacit.methods import find_method, known_methods

__all__ = [
    "AtLeastOne",
    "Client",
    "Count",
    "Epochs",
    "Experiment",
    "Hub",
    "Labeled",
    "Length",
    "Method",
    "Model",
    "NotNegative",
    "NotebookRun",
    "Party",
    "Payload",
    "Positive",
    "Predictions",
    "Reply",
    "Rounds",
    "Shard",
    "Share",
    "Stage",
    "TacitError",
    "Task",
    "Weights",
    "__version__",
    "find_method",
    "known_methods",
    "load",
    "load_model",
    "mean_model",
    "number_in",
    "resolve",
    "run",
    "tensor_in",
    "weights_in",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'tacit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
