"""What a recipe costs on this machine, without its data: images × passes × rounds × the time of an image in its net.

Rough on purpose: a second view of an image and what the engine does are not in it, and all unlabelled images count as
if they were trained on, so that a method that accepts few of them takes less. Half or twice as much is no surprise.
The time of an image is measured once (`tacit recipes --measure`) and kept beside the data sets.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tacit import nets
from tacit.contract.method import Held, Stage
from tacit.core.errors import TacitError
from tacit.core.files import write_atomically
from tacit.core.machine import cpu_type
from tacit.core.settings import Experiment
from tacit.data.cache import data_root, writable
from tacit.data.catalogue import SOURCES
from tacit.methods.ddrfed.diffusion import denoising_loss
from tacit.methods.ddrfed.gdgm import Diffusion, Generation
from tacit.methods.ddrfed.generator import GDGM
from tacit.nets.optimizer import optimizer_step, sgd
from tacit.runs.costs import Speed, time_both, time_net
from tacit.runs.plan import stages_of
from tacit.views.pipe import PIPE_LABEL

TIMED = 64  # images in a batch that is timed, at most; of large images fewer
TIMED_PIXELS = TIMED * 32 * 32
FILE = "speed.json"


@dataclass(frozen=True)
class Classifier:
    """A net as it is timed: what of an experiment decides how long an image takes in it."""

    name: str
    norm: str
    stem: str
    channels: int
    size: int
    batch: int

    def time(self) -> Speed:
        generator = torch.Generator().manual_seed(0)
        chosen = {"norm": self.norm, "stem": self.stem, "generator": generator}
        net = nets.build(self.name, classes=10, channels=self.channels, size=self.size, **chosen)  # type: ignore[arg-type]
        images = torch.rand(self.batch, self.channels, self.size, self.size, generator=generator)
        return time_net(net, images, timer=time.process_time)


@dataclass(frozen=True)
class Denoiser:
    """A generator's U-Net as it is timed."""

    width: int
    halvings: int
    blocks: int
    channels: int
    size: int
    batch: int

    def time(self) -> Speed:
        generator = torch.Generator().manual_seed(0)
        options = GDGM(width=self.width, halvings=self.halvings, blocks=self.blocks)
        net = options.new_unet(self.channels, generator)
        images = torch.rand(self.batch, self.channels, self.size, self.size, generator=generator)
        labels = torch.zeros(self.batch, len(PIPE_LABEL))
        optimizer = sgd(net, lr=1e-6)

        def denoise(noisy: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = net(noisy, times, labels)
            return found

        def infer() -> None:
            with torch.no_grad():
                denoising_loss(denoise, images, generator)

        def train() -> None:
            optimizer_step(net, optimizer, denoising_loss(denoise, images, generator))

        return time_both(train, infer, self.batch, 1, time.process_time)


Kind = Classifier | Denoiser
Speeds = Mapping[str, Speed]  # by the key of a kind


class Work(NamedTuple):
    """Images through one kind of net, in a whole run."""

    kind: Kind
    trained: float
    predicted: float


def key_of(kind: Kind) -> str:
    """A kind of net in one line, for the file.

    >>> key_of(Classifier("resnet18", "bn", "imagenet", 3, 32, 64))
    'Classifier resnet18 bn imagenet 3 32 64'
    """
    return " ".join(map(str, (type(kind).__name__, *astuple(kind))))


class Holdings(NamedTuple):
    """How many images whom: of all clients together, of the server, and for the test."""

    labeled: int
    unlabeled: int
    server: int
    test: int


def holdings_of(experiment: Experiment) -> Holdings:
    """Who holds how many images, by the catalogue and the settings alone: no data is loaded.

    >>> from tacit.config.resolve import resolve
    >>> data = {"data.name": "cifar10", "data.labels": 4000, "method.name": "fixmatch"}
    >>> holdings_of(resolve(data, {"data.placement": "server"}))
    Holdings(labeled=0, unlabeled=46000, server=4000, test=10000)
    >>> holdings_of(resolve(data, {"data.placement": "clients"}))               # labelled ones are unlabelled, too
    Holdings(labeled=4000, unlabeled=50000, server=0, test=10000)
    >>> holdings_of(resolve(data, {"data.placement": "some-clients"}))          # one of ten
    Holdings(labeled=5000, unlabeled=45000, server=0, test=10000)
    """
    data = experiment.data
    whole, test = SOURCES[data.name].images
    images, test = data.subset or whole, min(test, data.test_subset or test)
    if data.reveal == "all":
        return Holdings(images, 0, 0, test)
    labels = data.labels or images
    if data.placement == "server":
        return Holdings(0, images - labels, labels, test)
    if data.placement == "clients":
        return Holdings(labels, images, 0, test)
    labeled = images * data.labeled_clients // data.clients
    return Holdings(labeled, images - labeled, 0, test)


def work_of(experiment: Experiment) -> list[Work]:
    """The images that go through each net, stage by stage."""
    return [stage_work(experiment, stage, holdings_of(experiment)) for stage in stages_of(experiment)]


def stage_work(experiment: Experiment, stage: Stage, holds: Holdings) -> Work:
    """The images that go through the net of one stage."""
    method, train, clients = stage.method, experiment.train, experiment.data.clients
    images = holds.labeled + holds.unlabeled
    if isinstance(method, Diffusion):
        return Work(denoiser_of(experiment, method), stage.rounds * method.diffusion_epochs * images, 0)
    if isinstance(method, Generation):
        return Work(denoiser_of(experiment, method), 0, method.psi * images * method.sampling_steps)
    both = experiment.data.placement == "clients"
    held = Held(holds.labeled // clients, holds.unlabeled // clients, train.batch) if both else Held()
    on_labels, on_the_rest = method.estimated_passes(train.epochs, held) or (0, 0)
    given = getattr(method, "psi", 0.0) * images if getattr(method, "gdgm", False) else 0.0  # generated images
    unlabeled = holds.unlabeled + given
    share = method.estimated_tasks(experiment.participation.count(clients)) / clients / train.parts
    trained = share * (holds.labeled * on_labels + unlabeled * on_the_rest)
    trained += holds.server * (train.server_epochs or train.epochs)
    predicted = (share * unlabeled if on_the_rest else 0) + holds.test / experiment.evaluate_every
    return Work(classifier_of(experiment), stage.rounds * trained, stage.rounds * predicted)


def classifier_of(experiment: Experiment) -> Classifier:
    source, net = SOURCES[experiment.data.name], experiment.net
    size = experiment.data.image_size or source.shape[1]
    channels = 3 if experiment.data.rgb else source.shape[0]
    return Classifier(net.name, net.norm, net.stem, channels, size, timed_batch(experiment.train.batch, size))


def denoiser_of(experiment: Experiment, options: GDGM) -> Denoiser:
    source = SOURCES[experiment.data.name]
    size = experiment.data.image_size or source.shape[1]
    return Denoiser(options.width, options.halvings, options.blocks, source.shape[0], size, timed_batch(4, size))


def timed_batch(batch: int, size: int) -> int:
    """How many images are timed at once.

    >>> timed_batch(10, 32), timed_batch(10000, 32), timed_batch(64, 224)
    (10, 64, 2)
    """
    return max(2, min(batch, TIMED, TIMED_PIXELS // size**2))


def core_hours(experiment: Experiment, speeds: Speeds) -> float | None:
    """Hours of one core for one run; None where a net was not timed here."""
    total = 0.0
    for work in work_of(experiment):
        speed = speeds.get(key_of(work.kind))
        if speed is None:
            return None
        total += work.trained * speed.training + work.predicted * speed.inference
    return total / 3600


# --- What was measured here ------------------------------------------------------------------------------------------


def measured(root: Path | None = None) -> dict[str, Speed]:
    """What was measured on this type of CPU before; empty where nothing was, or the file cannot be read."""
    try:
        found = json.loads(((root or data_root()) / FILE).read_text())
        return {key: Speed(*pair) for key, pair in found["seconds"].items()} if found["cpu"] == cpu_type() else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def measure(
    experiments: Iterable[Experiment], tell: Callable[[str], Any], root: Path | None = None
) -> dict[str, Speed]:
    """Time every kind of net that the experiments have, and keep the result for later."""
    folder = root or data_root()
    if not writable(folder):
        raise TacitError(
            f"{folder} cannot be written, so what is measured could not be kept. Set TACIT_DATA elsewhere."
        )
    kinds = {key_of(work.kind): work.kind for experiment in experiments for work in work_of(experiment)}
    found = measured(root)
    for key, kind in kinds.items():
        found[key] = kind.time()
        training, inference = (1000 * seconds for seconds in found[key])
        tell(f"{key}: {training:.2f} ms to train on an image, {inference:.2f} ms to predict")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"cpu": cpu_type(), "seconds": found}, indent=1)
    write_atomically(folder / FILE, text.encode())
    return found
