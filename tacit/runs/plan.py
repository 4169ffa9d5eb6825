"""All that is known before the first round: the stages, the data, who holds what."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tacit.config.resolve import build_method, build_pretraining
from tacit.contract import kinds
from tacit.contract.method import UNKNOWN, Held, Method, Stage
from tacit.contract.parties import Setup
from tacit.contract.secure import check_secure
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment, Train
from tacit.data.dataset import Dataset
from tacit.data.federation import load_dataset, make_setup
from tacit.data.split import Split, load_split, make_split, warnings
from tacit.methods.fedavg import Twin
from tacit.runs.checks import check_settings
from tacit.runs.safeguards import check_safeguards
from tacit.views import Views
from tacit.views.augment import enlarged

WORTH_TELLING = 1.15  # training images shown so much larger than test images


@dataclass(frozen=True)
class Plan:
    """All that is known before the first round: nothing has been trained or written yet."""

    experiment: Experiment
    stages: tuple[Stage, ...]
    dataset: Dataset
    split: Split
    setup: Setup
    warnings: tuple[str, ...]
    # Of each client, how many images it holds: labelled plus unlabelled, as its shard has them, so that one that is
    # both counts twice. At real sites what they registered; None: not known.
    registered: tuple[int, ...] | None = None

    @property
    def steps(self) -> int:
        """Rounds in all stages together."""
        return sum(stage.rounds for stage in self.stages)


def stages_of(experiment: Experiment, kind: type[Method] | None = None) -> tuple[Stage, ...]:
    """The stages of an experiment: [guard]'s twin, [pretrain], what its method wants before, then the method itself (of
    this class)."""
    method = build_method(experiment, kind)
    if why := method.refuses(experiment):
        raise TacitError(why)
    stages = (*build_pretraining(experiment), *method.before(), Stage("main", method, experiment.rounds))
    stages = (*twin_of(experiment, stages), *stages)
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise TacitError(f"{type(method).__name__} has two stages of one name: {', '.join(names)}.")
    for stage in stages:
        for declared in stage.method.client_sends.values():
            kinds.parse(declared)  # what cannot be checked is told before any work
    check_safeguards(experiment, stages)
    check_secure(experiment, stages)
    return stages


def twin_of(experiment: Experiment, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stage that [guard] puts first: FedAvg on the labels alone, for as many rounds as all others together.

    All of it is known from the settings, so that every site knows it, too.
    """
    guard = experiment.guard
    if not guard.on:
        return ()
    epochs = guard.epochs or label_passes(stages, experiment.train)
    twin = Twin(epochs=math.ceil(epochs / experiment.train.parts))  # its rounds pass over all labels
    return (Stage("twin", twin, sum(stage.rounds for stage in stages), apart=True),)


def label_passes(stages: Sequence[Stage], train: Train, held: Held = UNKNOWN) -> int:
    """Passes of a client over its labels in a round of a method, the mean over all its stages, rounded up; with
    `train.parts` over those of a part.

    >>> from tacit.methods.fedavg import FedAvg, WarmUp
    >>> stages = [Stage("warm-up", WarmUp(epochs=20), 5), Stage("main", FedAvg(), 22)]
    >>> label_passes(stages, Train(epochs=1)), label_passes(stages, Train(epochs=1, parts=2))      # 122 / 27, 222 / 27
    (5, 9)
    """
    each = [(stage, stage.method.estimated_passes(train.epochs, held)) for stage in stages if not stage.apart]
    known = [(s.rounds, found[0] * (1 if s.method.in_parts else train.parts)) for s, found in each if found is not None]
    return math.ceil(sum(rounds * count for rounds, count in known) / max(1, sum(rounds for rounds, _ in known)))


def about_twin(experiment: Experiment, stages: Sequence[Stage], split: Split) -> tuple[str, ...]:
    """Whether the guard's twin sees its labels less often than the method does, by what clients really hold."""
    if not experiment.guard.on:
        return ()
    passes = label_passes(stages, experiment.train, typical_client(split, experiment.train.batch))
    epochs, needed = getattr(stages[0].method, "epochs", 0), math.ceil(passes / experiment.train.parts)
    if epochs >= needed:
        return ()
    return (
        f"The guard's twin makes {epochs} passes over the labels in a round, the method about {needed}. For a twin "
        f"that is as well trained, write guard.epochs = {passes}.",
    )


def about_weights(experiment: Experiment, setup: Setup) -> tuple[str, ...]:
    """What is to be told of first weights that come from elsewhere; weights that do not fit are refused."""
    if not experiment.net.weights:
        return ()
    _, told = setup.first_weights()
    mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (setup.views.mean, setup.views.std))
    told.append(
        f"Images are shown to it in {setup.channels} channel(s) of {setup.size}×{setup.size} pixels, less mean {mean}, "
        f"over std {std} (data.image_size, data.rgb, data.mean, data.std)."
    )
    if experiment.net.norm == "bn" and experiment.net.bn == "frozen":
        told.append('BN keeps the statistics that came with the weights (net.bn = "frozen").')
    if not experiment.train.clip and experiment.net.train != "head":
        told.append(
            "Gradients are not cut (train.clip = 0): from pretrained weights FedDB and BSemiFL, whose papers cut none, "
            "fell to chance. Write clip = 5 in [train]."
        )
    return tuple(told)


def about_views(views: Views, size: int) -> tuple[str, ...]:
    """That training images are shown larger than test images, which costs small nets accuracy (docs/views.md).

    >>> about_views(Views((0.5,), (0.2,), weak="crop"), 28)
    ()
    >>> about_views(Views((0.5,), (0.2,), weak="resize-crop", resize=240), 224)
    ()
    >>> about_views(Views((0.5,), (0.2,), weak="resize-crop"), 32)[0][:60]
    'views.weak = "resize-crop" shows training images at 1.25 tim'
    """
    times = (views.resize or enlarged(size)) / size
    if views.weak != "resize-crop" or times <= WORTH_TELLING:
        return ()
    return (
        f'views.weak = "resize-crop" shows training images at {times:.2f} times the size at which test images are '
        'seen, as CBAFed\'s code does. A small net lost ten points by it (docs/views.md); "crop" does not enlarge.',
    )


def prepare(experiment: Experiment, saved_split: Path | None = None, fetch: bool = True) -> Plan:
    """Load the data, draw (or load) the split, and check everything that can be checked before work."""
    stages = stages_of(experiment)
    check_settings(experiment, saved_split)
    dataset = load_dataset(experiment.data, fetch)
    if saved_split is not None and saved_split.is_file():
        split = load_split(saved_split)
        split.check_against(dataset)
    else:
        split = make_split(dataset, experiment.data, experiment.seed)
    setup = make_setup(experiment, dataset, split)
    setup.build()  # a net that does not fit the images says so now
    _ = setup.taken  # and so does a bank of features that is too large
    told = () if saved_split is not None and saved_split.is_file() else about_weights(experiment, setup)
    held = tuple(len(part.labeled) + len(part.unlabeled) for part in split.clients)
    shown = about_views(setup.views, setup.size)
    told = (*told, *shown, *warnings(split, dataset), *about_twin(experiment, stages, split))
    return Plan(experiment, stages, dataset, split, setup, told, held)


def typical_client(split: Split, batch: int) -> Held:
    """What a client with labels holds on average (any client, where none has labels): for estimates."""
    both = [part for part in split.clients if len(part.labeled)] or list(split.clients)
    labeled, unlabeled = (
        round(sum(len(getattr(part, name)) for part in both) / len(both)) for name in ("labeled", "unlabeled")
    )
    return Held(labeled, unlabeled, batch)
