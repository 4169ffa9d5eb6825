"""A smaller version of an experiment: the same protocol on less data, in fewer rounds, with a narrower net.

With a fraction f (a tenth: f = .1)

- data: f of the training images and f of the labels, so their ratio stays; the least size of a client likewise;
- rounds: f of the rounds, of those between two evaluations (or looks of the guard) and of those whose mean is the
  answer; what lasts some
  rounds shrinks as well (a warm-up, a ramp): f of its rounds, or of its epochs where it is one long round. Which
  options of a method are lengths is told by their types: `Rounds`, `Epochs`, or any type with a `Length` in it;
- width: √f of the net's channels, so about f of its parameters.

Everything else stays: partition and its skew, number of clients, who holds labels, participation, local epochs, batch,
rates, stages, the whole test set. Counts are rounded up and never reach 0. All of it together is far less than f of
the work: about f² with a net that has no width to shrink, f³ with one that has.
"""

import math
import typing
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tacit import nets
from tacit.config.resolve import resolve
from tacit.contract.method import Length
from tacit.core.errors import TacitError, nearest
from tacit.core.settings import Data, Experiment, flatten
from tacit.data.catalogue import SOURCES
from tacit.data.federation import load_dataset
from tacit.data.published import PUBLISHED
from tacit.methods import find_method

NAMED = {"full": 1.0, "half": 0.5, "quarter": 0.25, "tenth": 0.1, "hundredth": 0.01}


class Scaled(NamedTuple):
    """A smaller experiment, and what was done to it in words ('' at full scale)."""

    experiment: Experiment
    reduction: str


def fraction_of(scale: str) -> float:
    """A scale by its name or as a number.

    >>> fraction_of("tenth"), fraction_of("0.2")
    (0.1, 0.2)
    >>> fraction_of("tent")
    Traceback (most recent call last):
    tacit.core.errors.TacitError: --scale 'tent' is not a scale. Did you mean 'tenth'? Write one of full, ...
    """
    try:
        fraction = NAMED[scale] if scale in NAMED else float(scale)
        if not 0 < fraction <= 1:
            raise ValueError
    except ValueError:
        raise TacitError(
            f"--scale '{scale}' is not a scale.{nearest(scale, NAMED)} Write one of {', '.join(NAMED)}, or a number "
            "above 0, up to 1."
        ) from None
    return fraction


def part(count: int, fraction: float) -> int:
    """So much of a count, rounded up; what is 0 stays 0.

    >>> part(501, 0.1), part(3, 0.1), part(0, 0.1), part(500, 0.1)
    (51, 1, 0, 50)
    """
    return math.ceil(round(count * fraction, 9))  # rounded first: .1 · 3000 is 300.00000000000006 in floats


def scaled(experiment: Experiment, scale: str, fixed: Collection[str] = ()) -> Scaled:
    """The experiment at a scale; settings in `fixed` (those of --set) stay as they are.

    >>> small, reduction = scaled(resolve({"data.name": "cifar10", "net.name": "wrn-28-8", "rounds": 800}), "tenth")
    >>> small.data.subset, small.data.labels, small.rounds, small.net.name
    (5000, 10, 80, 'wrn-28-3')
    >>> reduction
    'scale 0.1: 5,000 of 50,000 training images, 10 of 50 labels (one a class at least), 80 of 800 rounds,
    wrn-28-3 for wrn-28-8'
    """
    fraction = fraction_of(scale)
    if fraction == 1:
        return Scaled(experiment, "")
    data, method = experiment.data, experiment.method
    if data.split and data.split not in PUBLISHED:
        raise TacitError(f"--scale cannot shrink a saved split (data.split = '{data.split}'). Leave one of them out.")
    whole, classes = size_of(data)
    images, labels = data.subset or whole, part(data.labels, fraction)
    learned = experiment.pretrain.rounds
    narrow = nets.narrowed(experiment.net.name, math.sqrt(fraction))
    at_least = " (one a class at least)" if labels < classes else ""
    smaller = {  # the setting: what it becomes, and in words what that is of
        "data.subset": (max(classes, part(images, fraction)), f"of {images:,} training images"),
        "data.labels": (max(classes, labels), f"of {data.labels:,} labels{at_least}"),
        "rounds": (part(experiment.rounds, fraction), f"of {experiment.rounds} rounds"),
        **{f"method.{name}": (part(count, fraction), f"of {count} {name}") for name, count in lengths(method).items()},
        "pretrain.rounds": (part(learned, fraction), f"of {learned} rounds of pretraining"),
        "net.name": (narrow, f"for {experiment.net.name}"),
        "data.min_size": (max(1, math.floor(data.min_size * fraction)), ""),
        "evaluate_every": (part(experiment.evaluate_every, fraction), ""),
        "server.answer_rounds": (part(experiment.server.answer_rounds, fraction), ""),
        "guard.every": (part(experiment.guard.every, fraction), ""),
    }
    if not experiment.guard.on:
        del smaller["guard.every"]
    if experiment.server.answer != "mean":
        del smaller["server.answer_rounds"]
    if data.placement == "some-clients":  # there the labels are those of the labelled clients' images
        del smaller["data.labels"]
    before = {"pretrain.rounds": 0, **flatten(experiment.to_dict()), "data.subset": images}
    changed = {key: pair for key, pair in smaller.items() if key not in fixed and pair[0] != before[key]}
    reduction = [f"{new if isinstance(new, str) else format(new, ',')} {of}" for new, of in changed.values() if of]
    text = f"scale {fraction:g}: {', '.join(reduction)}"
    described = {"title": f"{experiment.title} [{text}]".strip()}
    if experiment.paper.source:  # the published number must not be taken for one at this scale
        theirs = f"at full scale: {images:,} images, {experiment.rounds} rounds, {experiment.net.name}"
        described["paper.source"] = f"{experiment.paper.source}, {theirs}"
    return Scaled(resolve(experiment.to_dict(), {key: new for key, (new, _) in changed.items()}, described), text)


def lengths(method: Mapping[str, Any]) -> dict[str, int]:
    """The options of a method that say how long something lasts, by their types.

    Epochs are left out where the rounds that they are a part of shrink already.

    >>> lengths({"name": "fedirm", "ramp": 30, "warmup": 20, "warmup_epochs": 5, "labeled_epochs": 11})
    {'ramp': 30, 'warmup': 20}
    >>> lengths({"name": "fedirm", "ramp": 30, "warmup": 1, "warmup_epochs": 501, "labeled_epochs": 11})
    {'ramp': 30, 'warmup_epochs': 501}
    """
    hints = typing.get_type_hints(find_method(method["name"]), include_extras=True)
    marks = {
        name: [mark for mark in getattr(hints.get(name), "__metadata__", ()) if isinstance(mark, Length)]
        for name in method
    }
    return {
        name: value
        for name, value in method.items()
        if marks[name] and type(value) is int and value > 1 and method.get(marks[name][-1].of, 1) <= 1
    }


def size_of(data: Data) -> tuple[int, int]:
    """Training images and classes: from the catalogue, so that nothing need be fetched, or from one's own data."""
    if data.name in SOURCES:
        return SOURCES[data.name].images[0], len(SOURCES[data.name].classes)
    dataset = load_dataset(data)
    return len(dataset.train_labels), len(dataset.classes)
