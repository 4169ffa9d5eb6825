"""Who holds what: the shards of the server and of the clients, cut from one data set by a split.

Method code never sees a federation. It gets one shard at a time, copied out, so that there is nothing to reach
from it: not the other parties' images, and not the labels that its owner does not have.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tacit.contract.parties import Labeled, Setup, Shard
from tacit.core.errors import TacitError
from tacit.core.machine import pick_device
from tacit.core.settings import Data, Experiment
from tacit.data.dataset import Dataset
from tacit.data.glance import blank, glancing
from tacit.data.mapped import check_room, made_once
from tacit.data.own import load_sites
from tacit.data.sources import load
from tacit.data.split import Split
from tacit.views import Views


class Federation:
    """A data set and how it is split; hands out shards."""

    def __init__(self, dataset: Dataset, split: Split, device: torch.device) -> None:
        self.dataset = dataset
        self.split = split
        self.device = device

    def server_shard(self) -> Shard:
        return Shard(self._labeled(self.split.server), self._images(np.zeros(0, dtype=np.int64)))

    def client_shard(self, client: int) -> Shard:
        part = self.split.clients[client]
        repeated = len(np.intersect1d(part.labeled, part.unlabeled))
        return Shard(self._labeled(part.labeled), self._images(part.unlabeled), repeated)

    def client_size(self, client: int) -> int:
        part = self.split.clients[client]
        return len(part.labeled) + len(part.unlabeled)

    def test(self) -> Labeled:
        images = torch.from_numpy(self.dataset.test_images[self.split.test])
        labels = torch.from_numpy(self.dataset.test_labels[self.split.test])
        return Labeled(images.to(self.device), labels)

    def validation(self, client: int) -> Labeled:
        """What a client keeps back to judge models by; -1: the server."""
        return self._labeled(self.split.kept_back(client))

    def judges(self) -> list[int]:
        """The parties that keep labelled images back; -1: the server."""
        return [number - 1 for number, kept in enumerate(self.split.validation) if len(kept)]

    def truth(self, client: int) -> Tensor:
        """For the auditor alone: the true labels of a client's unlabelled images (-1 where nobody knows)."""
        return torch.from_numpy(self.dataset.train_labels[self.split.clients[client].unlabeled])

    def _images(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(self.dataset.train_images[index])).to(self.device)

    def _labeled(self, index: np.ndarray) -> Labeled:
        labels = torch.from_numpy(self.dataset.train_labels[index])
        return Labeled(self._images(index), labels.to(self.device))


def load_dataset(settings: Data, fetch: bool = True) -> Dataset:
    """The data of an experiment, at the size and with the channels it asks for."""
    if settings.sites:
        dataset = load_sites([Path(site) for site in settings.sites], settings.name, settings)
    else:
        dataset = load(settings.name, fetch=fetch, how=settings)
    return adapt(dataset, settings.image_size, settings.rgb)


def adapt(dataset: Dataset, size: int, rgb: bool) -> Dataset:
    """The data set resized to `size` pixels (0: as it is) and, if asked, with three channels.

    Many images are made once, and mapped from this machine's cache from then on.
    """
    if glancing():
        return blank(dataset, 3 if rgb else dataset.channels, size or dataset.size)
    size, copies = size or dataset.size, 3 if rgb and dataset.channels == 1 else 1
    if size == dataset.size and copies == 1:
        return dataset
    channels = dataset.channels * copies
    check_room(len(dataset.train_images) + len(dataset.test_images), channels, size)

    def made(name: str, images: np.ndarray) -> np.ndarray:
        key = f"{dataset.fingerprint} {name} {size} {channels}" if dataset.fingerprint else ""
        return made_once(key, (len(images), channels, size, size), partial(_resize, images))

    return dataclasses.replace(
        dataset,
        train_images=made("train", dataset.train_images),
        test_images=made("test", dataset.test_images),
        mean=dataset.mean * copies,
        std=dataset.std * copies,
    )


def _resize(images: np.ndarray, resized: np.ndarray) -> None:
    """Write images at another size, or as they are, into as many channels as there are."""
    size = resized.shape[-1]
    at_once = max(1, min(1024, 2**28 // (resized.shape[1] * size**2)))  # a gigabyte of floats at most
    for start in range(0, len(images), at_once):
        part = torch.from_numpy(images[start : start + at_once].copy())
        if size != images.shape[-1]:
            part = F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True, align_corners=False)
            part = part.round().clamp(0, 255).to(torch.uint8)
        resized[start : start + at_once] = part.numpy()  # one grey channel fills all three


class About(Protocol):
    """What all parties know of the images: a data set tells it, and so do the facts of a federation of real sites."""

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def channels(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def mean(self) -> tuple[float, ...]: ...
    @property
    def std(self) -> tuple[float, ...]: ...
    @property
    def mirror(self) -> bool: ...


def make_setup(experiment: Experiment, dataset: Dataset, split: Split) -> Setup:
    """What everybody knows before the first round of a simulation."""
    labeled = tuple(k for k, part in enumerate(split.clients) if len(part.labeled))
    return setup_of(experiment, dataset, len(split.clients), labeled, pick_device(experiment.device))


def setup_of(
    experiment: Experiment, about: About, clients: int, labeled_clients: tuple[int, ...], device: torch.device
) -> Setup:
    """What everybody knows before the first round."""
    views = experiment.views
    mean, std = experiment.data.mean or about.mean, experiment.data.std or about.std
    if len(mean) != about.channels:
        raise TacitError(
            f"data.mean and data.std have {len(mean)} numbers, but the images have {about.channels} channel(s). Write "
            "one of each for every channel; grey images become coloured ones with data.rgb = true."
        )
    flip = about.mirror if views.flip == "auto" else views.flip == "yes"
    chosen = Views(mean=mean, std=std, weak=views.weak, strong=views.strong, flip=flip, resize=views.resize)
    chosen.check_size(about.size)
    return Setup(
        seed=experiment.seed,
        classes=about.classes,
        channels=about.channels,
        size=about.size,
        clients=clients,
        labeled_clients=labeled_clients,
        net=experiment.net,
        train=experiment.train,
        views=chosen,
        participation=experiment.participation,
        device=device,
        server=experiment.server,
        robust=experiment.robust,
        privacy=experiment.privacy,
        faults=experiment.faults,
        real_sites=experiment.backend.name == "flower",
    )
