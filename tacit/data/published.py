"""Splits that authors published, had by their name: `data.split = "cbafed-svhn"`."""

import math
from typing import NamedTuple

import numpy as np

from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data import placement


class Published(NamedTuple):
    """What is known of it: how many images of each class the labelled client holds. The rest is drawn."""

    data: str
    clients: int
    labeled: tuple[int, ...]
    source: str


PUBLISHED = {
    # partition_strategy/svhn_beta0.8_sup.pth of the authors' repository holds these ten numbers and nothing else; the
    # file with who holds which image, which their script loads as well, is not there.
    "cbafed-svhn": Published(
        "svhn", 10, (15, 292, 986, 116, 63, 1285, 1352, 1438, 807, 267), "the public code of CBAFed, Dirichlet .8"
    )
}


def check_published(settings: Data) -> None:
    """Refuse settings that the named split does not go with; says what to write.

    >>> check_published(Data(name="cifar10", split="cbafed-svhn", placement="some-clients"))
    Traceback (most recent call last):
    tacit.core.errors.TacitError: data.split = 'cbafed-svhn' is a split with data.name = svhn, but the experiment says
    cifar10. Write data.name = svhn, or leave data.split out.
    """
    split = PUBLISHED[settings.split]
    wanted = {"name": split.data, "clients": split.clients, "placement": "some-clients", "labeled_clients": 1}
    for key, value in wanted.items():
        if getattr(settings, key) != value:
            raise TacitError(
                f"data.split = '{settings.split}' is a split with data.{key} = {value}, but the experiment says "
                f"{getattr(settings, key)}. Write data.{key} = {value}, or leave data.split out."
            )
    if settings.imbalance > 1:
        raise TacitError(f"data.split = '{settings.split}' has its own numbers of each class: write imbalance = 1.")
    if settings.partition == "sites":
        raise TacitError(f"data.split = '{settings.split}' deals images out: write data.partition = dirichlet.")


def place_published(labels: np.ndarray, settings: Data, generator: np.random.Generator) -> placement.Placed:
    """The labelled client gets its published number of each class, which images is drawn; the others the rest, as the
    settings say. With a `subset`, its numbers shrink alike (rounded up).
    """
    check_published(settings)
    split = PUBLISHED[settings.split]
    chosen = placement.stratified(labels, settings.subset, generator) if settings.subset else np.arange(len(labels))
    share = len(chosen) / len(labels)
    wanted = [math.ceil(round(number * share, 9)) for number in split.labeled]
    own = []
    for label, number in enumerate(wanted):
        there = chosen[labels[chosen] == label]
        if len(there) < number:
            raise TacitError(
                f"data.split = '{settings.split}' has {number} images of class {label}, but there are {len(there)} in "
                f"this data. Use the whole of {split.data}, or leave data.split out."
            )
        own.append(generator.permutation(there)[:number])
    labeled = np.sort(np.concatenate(own))
    if settings.cover > min(wanted):
        raise TacitError(
            f"cover = {settings.cover}, but the labelled client of data.split = '{settings.split}' has {min(wanted)} "
            f"images of its rarest class. Write cover = {min(wanted)} or less."
        )
    others = settings.model_copy(update={"clients": split.clients - 1})
    parts = placement.deal(labels, np.setdiff1d(chosen, labeled), others, generator)
    nothing = np.empty(0, np.int64)
    clients = [(labeled, nothing), *((nothing, part) for part in parts)]
    if settings.reveal == "all":
        clients = [placement.reveal(labels, known, rest) for known, rest in clients]
    return placement.Placed(nothing, clients, {})
