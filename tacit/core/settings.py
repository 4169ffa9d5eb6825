"""An experiment: what is written in TOML, checked before any work, and saved resolved with every run."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from tacit.core.errors import TacitError, nearest
from tacit.core.safeguards import Privacy, Robust
from tacit.core.section import Section as Section
from tacit.core.section import not_a_number as not_a_number
from tacit.core.section import shown as shown
from tacit.core.text import safe

Placement = Literal["server", "clients", "some-clients"]
Partition = Literal["iid", "dirichlet", "dirichlet-client", "shards", "quantity", "sites"]

# Bounds that no sensible experiment reaches: beyond them a number is a slip, and is refused with the bound.
MOST_TOML = 1_000_000  # bytes of an experiment file
MOST_SEED = 2**63 - 1
MANY = 1_000_000  # rounds, clients, images in a batch
IMAGES = 1_000_000_000
EPOCHS = 10_000
WORKERS = 1024
Share = Annotated[float, Field(ge=0, le=1)]


# How own files are read: true on one machine, and for one set of files.
INTAKE = (
    *("sites", "tests", "layout", "spellings", "siteless", "depth"),
    *("path_column", "label_column", "group_column", "site_column", "split_column"),
)


class Data(Section):
    """Which images, who holds them, who holds labels."""

    name: str = Field("digits", description="a source (`tacit data list`), or the path of your own data")
    sites: tuple[str, ...] = Field((), description="own data, a path for each site; `name` is then for people only")
    tests: tuple[str, ...] = Field((), description="own data: test images that all sites share, by their paths")
    layout: Literal["auto", "classes", "sites", "table"] = Field(
        "auto", description="own data: what the folders inside are (auto: what only one reading allows)"
    )
    spellings: Literal["ask", "merge", "keep"] = Field(
        "ask", description="own data: classes spelt in two ways, as Mel and mel, are one, or are two"
    )
    path_column: str = Field("", description="own table: the column of paths or ids (empty: by its name or contents)")
    label_column: str = Field("", description="own table: the column of labels; one-hot: columns of 0 and 1")
    group_column: str = Field("", description="own table: the column of what belongs together, as a patient")
    site_column: str = Field("", description="own table: the column of who holds the image")
    split_column: str = Field("", description="own table: the column that says train or test")
    siteless: str = Field("", description="own table: the site of rows that name none; leave-out: they are not read")
    depth: Literal[0, 8, 10, 12, 14, 16] = Field(0, description="own 16-bit files: bits that are used (0: as found)")
    partition: Partition = Field("dirichlet", description="how images are dealt to the clients; sites: as they lie")
    alpha: Annotated[float, Field(ge=1e-6, le=1e6, description="Dirichlet or quantity skew: small is skewed")] = 0.3
    shards: Annotated[int, Field(ge=1, le=IMAGES, description="shards a client holds (partition = shards)")] = 2
    min_size: Annotated[int, Field(ge=1, le=IMAGES, description="the least images a client must get")] = 10
    clients: Annotated[int, Field(ge=1, le=MANY, description="number of clients")] = 10
    placement: Placement = Field("server", description="who holds labels")
    labels: Annotated[int, Field(ge=0, le=IMAGES, description="labelled images in all (server, clients; 0: all)")] = 50
    labeled_clients: Annotated[int, Field(ge=1, le=MANY, description="fully labelled clients (some-clients)")] = 1
    cover: Annotated[int, Field(ge=0, le=IMAGES, description="redraw until each class has this many labels")] = 0
    validation: Annotated[
        float, Field(ge=0, le=0.9, description="share of its labels that a party keeps back to judge by")
    ] = 0.0
    reveal: Literal["none", "all"] = Field("none", description="all: every label is given, the upper bound")
    subset: Annotated[int, Field(ge=0, le=IMAGES, description="use only so many training images (0: all)")] = 0
    test_subset: Annotated[int, Field(ge=0, le=IMAGES, description="use only so many test images (0: all)")] = 0
    imbalance: Annotated[
        float, Field(ge=1, le=1e4, description="a long tail: the first class has so many times the last one's images")
    ] = 1.0
    image_size: Annotated[int, Field(ge=0, le=MANY, description="resize to this many pixels (0: as they are)")] = 0
    rgb: bool = Field(False, description="turn grey images into three equal channels")
    mean: tuple[Share, ...] = Field((), description="of each channel, from 0 to 1 (empty: from the data)")
    std: tuple[Share, ...] = Field((), description="likewise; both come with pretrained weights")
    skip_unreadable: bool = Field(False, description="own data: go on without the bad files")
    groups: Literal["found", "given"] = Field("found", description="own data: look for groups, or a column's alone")
    split: str = Field("", description="a saved split to use, or a published one (cbafed-svhn)")

    @model_validator(mode="after")
    def _mean_and_std_fit(self) -> "Data":
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, 1, 3) or not all(self.std):
            raise ValueError(
                f"mean has {len(self.mean)} numbers and std {len(self.std)}; each needs one for every channel (1 or "
                "3), or none at all, and a std above 0"
            )
        return self

    @model_validator(mode="after")
    def _labeled_clients_exist(self) -> "Data":
        if self.placement == "some-clients" and self.labeled_clients > self.clients:
            raise ValueError(
                f"labeled_clients is {self.labeled_clients}, but there are only {self.clients} clients; write "
                f"labeled_clients = {self.clients} or fewer, or raise clients"
            )
        return self


class Net(Section):
    """The model that is trained."""

    name: str = Field(
        "cnn", description="cnn (cnn-16: narrower), resnet18, wrn-28-2 (any depth and width), vit-tiny, lite0, timm:…"
    )
    norm: Literal["bn", "gn"] = Field("gn", description="batch or group norm")
    bn: Literal["average", "static", "batch", "frozen"] = Field(
        "average", description="what becomes of BN's statistics"
    )
    stem: Literal["imagenet", "cifar"] = Field("imagenet", description="resnet18: 7x7/2 and max-pool, or 3x3")
    activation: Literal["relu", "leaky"] = Field("relu", description="wrn: leaky as in SSL suites")
    weights: str = Field("", description="first weights: random (empty), pretrained, a .safetensors or a run's folder")
    weights_digest: str = Field("", description="SHA-256 of the file of these weights; filled in")
    train: str = Field("all", description="what learns: all, head, or last-N (so many blocks and the head)")

    views: Annotated[
        int, Field(ge=0, le=64, description="frozen parts see so many weak and strong views of an image once (0: off)")
    ] = 0

    @model_validator(mode="after")
    def _views_of_what_is_frozen(self) -> "Net":
        if self.views and self.train == "all":
            raise ValueError(
                f"views = {self.views} keeps what the frozen part of a net makes of images, but nothing is frozen: "
                'write train = "head" or train = "last-3" beside it, or views = 0'
            )
        if self.views and self.norm == "bn" and self.bn == "batch":
            raise ValueError(
                f'views = {self.views} keeps what the net makes of an image, which with bn = "batch" depends on the '
                "images beside it: write another bn, or views = 0"
            )
        return self

    @field_validator("train")
    @classmethod
    def _a_part(cls, given: str) -> str:
        if not re.fullmatch(r"all|head|last-[1-9][0-9]{0,3}", given):
            raise ValueError(f"it is {shown(given)}; write all, head, or last-N with the number of blocks, as last-3")
        return given

    @property
    def architecture(self) -> dict[str, Any]:
        """What `nets.build` asks for: the net without what becomes of it."""
        return self.model_dump(exclude={"weights", "weights_digest", "train", "views"})


class Train(Section):
    """How a side trains. Methods may add rates of their own."""

    batch: Annotated[int, Field(ge=1, le=MANY, description="images a step")] = 64
    lr: Annotated[float, Field(gt=0, le=1e6, description="learning rate")] = 0.03
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    nesterov: bool = False
    weight_decay: Annotated[float, Field(ge=0, le=1e6)] = 5e-4
    epochs: Annotated[int, Field(ge=1, le=EPOCHS, description="local epochs a round")] = 1
    parts: Annotated[
        int, Field(ge=1, le=1000, description="a round is about one of so many parts of a client's images, in turn")
    ] = 1
    server_epochs: Annotated[int, Field(ge=0, le=EPOCHS, description="on the server's labels (0: as epochs)")] = 0
    clip: Annotated[float, Field(ge=0, le=1e9, description="largest norm of a gradient (0: no limit)")] = 5.0
    schedule: Literal["constant", "cosine", "linear"] = Field("constant", description="of the rate over the stage")
    schedule_by: Literal["round", "step"] = Field("round", description="one rate a round, or one a step")
    warmup: Annotated[float, Field(ge=0, lt=1, description="share of the stage in which the rate rises")] = 0.0
    end: Annotated[float, Field(ge=0, le=1, description="share of the rate at the end of linear or cosine")] = 0.0
    hold: Annotated[float, Field(ge=0, lt=1, description="share of the stage, its last, with the rate of `end`")] = 0.0
    label_smoothing: Annotated[
        float, Field(ge=0, lt=1, description="share of a label that is spread over all classes")
    ] = 0.0
    proximal: Annotated[
        float, Field(ge=0, le=1e6, description="clients: pull towards the model that came (FedProx's mu)")
    ] = 0.0
    layer_decay: Annotated[
        float, Field(gt=0, le=1, description="rate of a block: lr times this, for each step away from the head")
    ] = 1.0
    class_weights: Literal["none", "balanced"] = Field(
        "none", description="balanced: rare classes count more, by party"
    )
    logit_adjustment: Annotated[
        float, Field(ge=0, le=10, description="margin for rare classes, by the log of their share (0: none)")
    ] = 0.0

    @property
    def passes(self) -> float:
        """Passes of a client over all its images, in a round.

        >>> Train(epochs=3).passes, Train(parts=4).passes
        (3.0, 0.25)
        """
        return self.epochs / self.parts

    @model_validator(mode="after")
    def _fits_together(self) -> "Train":
        if self.warmup + self.hold >= 1:
            raise ValueError(
                f"warmup = {self.warmup} and hold = {self.hold} are shares of one stage that leave nothing "
                "between them; together they must be below 1, as warmup = 0.05 and hold = 0.4"
            )
        if self.hold and self.schedule == "constant":
            raise ValueError(
                'hold is for a rate that falls: write schedule = "linear" or "cosine" beside it, or hold = 0'
            )
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov = true looks ahead along the momentum, and momentum is 0 (by itself, or as the method's "
                "paper has it): write momentum = 0.9 beside it, or nesterov = false"
            )
        return self


class Pretrain(Section):
    """A stage before all others that learns features from images alone, so that any method can start from them."""

    method: Literal["none", "fedu", "fedema", "orchestra"] = Field("none", description="that learns them")
    rounds: Annotated[int, Field(ge=0, le=MANY, description="rounds in which it does")] = 0
    options: dict[str, Any] = Field(default_factory=dict, description="options of that method")

    @model_validator(mode="after")
    def _all_or_nothing(self) -> "Pretrain":
        if self.on and not self.rounds:
            raise ValueError(f'method = "{self.method}" needs a number of rounds: write rounds = 20 beside it')
        if not self.on and (self.rounds or self.options):
            raise ValueError('rounds and options are for a method: write method = "fedema" beside them, or none of it')
        return self

    @property
    def on(self) -> bool:
        return self.method != "none"


class Guard(Section):
    """Never worse than the labels alone: a twin that learns from them alone, and labels kept back that choose."""

    on: bool = Field(False, description="ship what data.validation finds better: the method's model or its twin's")
    every: Annotated[int, Field(ge=1, le=MANY, description="compare each so many rounds, and at the end")] = 5
    epochs: Annotated[
        int, Field(ge=0, le=EPOCHS, description="the twin's passes over labels in a round (0: as the stages tell)")
    ] = 0
    lead: Annotated[
        float, Field(ge=-0.5, le=10, description="standard errors by which the method must lead its twin to be shipped")
    ] = 0.0


class Server(Section):
    """What the server makes of its clients' mean, and which model is the answer."""

    name: Literal["mean", "momentum", "adam", "yogi"] = Field("mean", description="the server's optimiser")
    lr: Annotated[float, Field(ge=0, le=1e6, description="of the step to the mean (0: 1, of adam and yogi 0.01)")] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1, description="of momentum; beta1 of adam and yogi")] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1, description="of adam and yogi")] = 0.99
    tau: Annotated[float, Field(gt=0, le=1e6, description="of adam and yogi: the larger, the less they adapt")] = 1e-3
    normalize: bool = Field(False, description="a model counts the less the farther its party's steps reach (FedNova)")
    answer: Literal["last", "mean", "ema"] = Field("last", description="evaluated and shipped: of which rounds")
    answer_rounds: Annotated[int, Field(ge=1, le=1000, description="answer = mean: over so many last rounds")] = 5
    answer_decay: Annotated[
        float, Field(ge=0, lt=1, description="answer = ema: how much a round counts beside the next one")
    ] = 0.8

    @property
    def takes_the_mean(self) -> bool:
        """Whether the new model is the clients' mean itself."""
        return self.name == "mean" and self.lr in (0, 1)


class ViewChoice(Section):
    """What is done to an image before the net sees it."""

    weak: Literal["crop", "resize-crop", "none"] = Field("crop", description="the light augmentation")
    resize: Annotated[int, Field(ge=0, le=MANY, description="resize-crop: to so many pixels (0: a quarter more)")] = 0
    strong: Literal["fixmatch", "ssl", "semifl-legacy", "ddrfed"] = Field(
        "fixmatch", description="the heavy one's pool"
    )
    flip: Literal["auto", "yes", "no"] = Field("auto", description="mirror images (auto: not for digits)")


class Participation(Section):
    """Who takes part in a round."""

    fraction: Annotated[float, Field(gt=0, le=1, description="share of the clients in a round")] = 1.0
    number: Annotated[int, Field(ge=0, le=MANY, description="instead: so many clients (0: by fraction)")] = 0
    quorum: Annotated[int, Field(ge=1, le=MANY, description="fewer usable replies leave the model as it was")] = 1

    def count(self, clients: int) -> int:
        """How many of so many clients are asked.

        >>> Participation(fraction=0.1).count(25), Participation(number=40).count(25)
        (3, 25)
        >>> Participation(fraction=0.07).count(100)
        7
        """
        if self.number:
            return min(self.number, clients)
        # Rounded before the ceiling: .07 · 100 is 7.000000000000001 in floats.
        return min(clients, max(1, math.ceil(round(self.fraction * clients, 9))))


class Faults(Section):
    """What goes wrong on purpose, seeded like everything else."""

    dropout: Annotated[float, Field(ge=0, lt=1, description="chance that a client never gets the task")] = 0.0
    straggler: Annotated[float, Field(ge=0, lt=1, description="chance that a reply comes too late")] = 0.0
    attackers: Annotated[int, Field(ge=0, le=MANY, description="clients that send bad updates (simulations)")] = 0
    attack: Literal["sign-flip", "scale", "label-flip"] = Field("sign-flip", description="what they do")
    attack_scale: Annotated[
        float, Field(gt=0, le=1e6, description="sign-flip, scale: their updates are so many times as long")
    ] = 1.0

    @model_validator(mode="after")
    def _an_attack_has_attackers(self) -> "Faults":
        if not self.attackers and (self.attack, self.attack_scale) != ("sign-flip", 1.0):
            raise ValueError(
                "attack and attack_scale are for attackers: write attackers = 1 beside them, or none of it"
            )
        if self.attackers and self.attack == "scale" and self.attack_scale == 1:
            raise ValueError('attack = "scale" needs a factor that changes something: write attack_scale = 10')
        if self.attackers and self.attack == "label-flip" and self.attack_scale != 1:
            raise ValueError('attack = "label-flip" has no attack_scale: leave it out')
        return self


class Keep(Section):
    """What stays on disk between rounds: what clients keep (methods with a memory), and how many checkpoints."""

    half: bool = Field(False, description="kept weights in half precision: half the disk")
    latest: Annotated[int, Field(ge=0, le=MANY, description="only so many clients, those who kept last (0: all)")] = 0
    checkpoints: Annotated[int, Field(ge=2, le=MANY, description="so many last rounds that a run can go back to")] = 2


class Backend(Section):
    """Where clients run. It never changes the numbers."""

    name: Literal["local", "pool", "ray", "flower"] = Field(
        "pool", description="in this process, in several, on a Ray cluster, at real sites (tacit site run)"
    )
    workers: Annotated[int, Field(ge=0, le=WORKERS, description="processes of pool or ray (0: one a core)")] = 0
    gpus: Annotated[float, Field(ge=0, le=1024, description="ray: GPUs for one worker, as in 0.25 (0: none)")] = 0.0
    address: str = Field("", description="ray: address of a running cluster (empty: start one here)")


class Paper(Section):
    """A published number beside ours, for recipes: accuracy and AUC in per cent, and where they stand."""

    accuracy: Annotated[float, Field(ge=0, le=100)] | None = None
    auc: Annotated[float, Field(ge=0, le=100)] | None = None
    source: str = ""


class Experiment(Section):
    """Everything that decides the outcome of a run."""

    seed: Annotated[int, Field(ge=0, le=MOST_SEED)] = 0
    rounds: Annotated[int, Field(ge=1, le=MANY, description="rounds of the main stage")] = 20
    reporting: Literal["best", "last", "last-10"] = Field("last", description="which rounds the result is made of")
    best_by: Literal["test", "accuracy", "balanced_accuracy", "loss"] = Field(
        "test", description="best: by test accuracy, as papers do (it flatters), or by a figure of data.validation"
    )
    evaluate_every: Annotated[int, Field(ge=1, le=MANY, description="evaluate each so many rounds, and at the end")] = 1
    evaluate_clients: bool = Field(False, description="evaluate what each client sent, too (costs a test pass each)")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    title: str = Field("", description="a line for people")
    tuned: str = Field("", description="a line for people: how [train] and [server] were found (tacit tune)")
    data: Data = Data()
    net: Net = Net()
    train: Train = Train()
    server: Server = Server()
    views: ViewChoice = ViewChoice()
    method: dict[str, Any] = Field(default_factory=lambda: {"name": "fedavg", "preset": "paper"})
    pretrain: Pretrain = Pretrain()
    guard: Guard = Guard()
    participation: Participation = Participation()
    faults: Faults = Faults()
    robust: Robust = Robust()
    privacy: Privacy = Privacy()
    keep: Keep = Keep()
    backend: Backend = Backend()
    paper: Paper = Paper()

    @model_validator(mode="after")
    def _best_by_what_is_there(self) -> "Experiment":
        if self.best_by != "test" and self.reporting != "best":
            raise ValueError(f'best_by = "{self.best_by}" is for reporting = "best"; here it is "{self.reporting}"')
        if self.best_by != "test" and not (self.data.validation or self.data.split):
            raise ValueError(
                f'best_by = "{self.best_by}" needs labelled images that are kept back: write validation = 0.2 (a '
                "share of them) under [data]"
            )
        return self

    @model_validator(mode="after")
    def _guard_can_choose(self) -> "Experiment":
        if self.guard.on and not (self.data.validation or self.data.split):
            raise ValueError(
                "[guard] chooses by labelled images that are kept back: write validation = 0.2 (a share of them) under "
                "[data], or on = false under [guard]"
            )
        if self.guard.on and (self.reporting == "last-10" or (self.reporting == "best" and self.best_by == "test")):
            raise ValueError(
                f'[guard] ships one model, and test images must not choose it; reporting = "{self.reporting}" does not '
                'go with that: write reporting = "last", or "best" with best_by = "accuracy"'
            )
        return self

    @model_validator(mode="after")
    def _safeguards_fit(self) -> "Experiment":
        check_private(self)
        check_robust(self)
        if self.faults.attackers > self.data.clients and self.data.partition != "sites":
            raise ValueError(f"[faults] attackers = {self.faults.attackers}, but there are {self.data.clients} clients")
        if self.faults.attackers and self.backend.name == "flower":
            raise ValueError("[faults] attackers are for simulations: no real site is asked to attack. Leave it out")
        return self

    def to_dict(self) -> dict[str, Any]:
        """All settings, without what is off and came later; older runs stay what they were."""
        settings = self.model_dump(exclude_none=True)
        off = {"pretrain": not self.pretrain.on, "guard": not self.guard.on}
        off |= {name: not getattr(self, name).changed for name in ("robust", "privacy")}
        for name in (name for name, is_off in off.items() if is_off):
            del settings[name]
        if not self.faults.attackers:
            settings["faults"] = {key: value for key, value in settings["faults"].items() if "attack" not in key}
        if not self.net.views:
            del settings["net"]["views"]
        if self.train.layer_decay == 1:
            del settings["train"]["layer_decay"]
        return settings

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())


def check_private(experiment: Experiment) -> None:
    """Refuse what differential privacy does not go with: whatever would tell of one client without noise."""
    if not (settings := experiment.privacy).on:
        return
    alone = "with [privacy]"
    if experiment.robust.on:
        raise ValueError(f"[robust] does not go {alone}, whose clip bounds every update already: leave one of them out")
    if experiment.evaluate_clients:
        raise ValueError(f"evaluate_clients tells of each client's own model, and does not go {alone}: leave it out")
    if experiment.data.validation:
        raise ValueError(f"data.validation tells exact counts of clients' images, and does not go {alone}: write 0")
    if experiment.net.norm == "bn" and experiment.net.bn in ("average", "static"):
        raise ValueError(
            f'net.bn = "{experiment.net.bn}" makes statistics of clients\' images that no noise covers {alone}: write '
            'net.norm = "gn" (or net.bn = "frozen")'
        )
    if settings.delta * experiment.data.clients > 1:
        raise ValueError(
            f"[privacy] delta = {settings.delta:g} is more than 1 / {experiment.data.clients} clients: one of them "
            f"could be told whole. Write delta = {0.1 / experiment.data.clients:g} or less"
        )


def check_robust(experiment: Experiment) -> None:
    """Refuse a defence that cannot act with so few replies."""
    settings, count = experiment.robust, experiment.participation.count(experiment.data.clients)
    if experiment.data.partition == "sites":  # how many there are is known when they are
        return
    if settings.mean == "multi-krum" and count < (needed := 2 * settings.byzantine + 3):
        raise ValueError(
            f'[robust] mean = "multi-krum" with byzantine = {settings.byzantine} needs {needed} clients in a round '
            f"(2 byzantine + 3), here are {count}: ask more clients, or write a smaller byzantine"
        )
    if settings.mean == "trimmed-mean" and int(settings.trim * count) == 0:
        raise ValueError(
            f"[robust] trim = {settings.trim:g} of {count} clients in a round leaves nobody out: write "
            f"{math.ceil(1000 / count) / 1000:g} or more"
        )


# Does not change the outcome, so a run may be resumed with another value.
FREE_ON_RESUME = (
    "keep.checkpoints",
    "backend.name",
    "backend.workers",
    "backend.gpus",
    "backend.address",
    "title",
    "tuned",
    "paper.accuracy",
    "paper.auc",
    "paper.source",
)

# Does not make another experiment of it: statistics are over runs that differ in nothing else. A GPU changes the last
# digits of a result, as luck does; but a run that was started on one device is not resumed on another.
FREE_IN_STATISTICS = ("seed", "device", *FREE_ON_RESUME)


def same_but_for_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that make an experiment: runs that agree in them differ in luck only, and belong together.

    The one place that decides this: for rows of a comparison, groups of a report, and the evidence.

    >>> same_but_for_seed({"seed": 3, "rounds": 5, "device": "cuda", "backend": {"workers": 2}})
    {'rounds': 5}
    """
    return {key: value for key, value in flatten(settings).items() if key not in FREE_IN_STATISTICS}


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables to dotted keys.

    >>> flatten({"seed": 1, "data": {"name": "digits"}})
    {'seed': 1, 'data.name': 'digits'}
    """
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys to nested tables.

    >>> nest({"seed": 1, "data.name": "digits"})
    {'seed': 1, 'data': {'name': 'digits'}}
    """
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        table = nested
        for part in path:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise TacitError(f"'{part}' in '{key}' is a value, not a table of settings.")
        table[last] = value
    return nested


def known_keys(model: type[BaseModel] = Experiment, prefix: str = "") -> list[str]:
    """Every key of an experiment, dotted.

    >>> "train.lr" in known_keys()
    True
    """
    keys = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += known_keys(kind, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def suggestion(key: str) -> str:
    """The nearest known key, by its full name or by its last word.

    >>> suggestion("data.alhpa"), suggestion("lr")
    (" Did you mean 'data.alpha'?", " Did you mean 'train.lr'?")
    """
    last = key.split(".")[-1]
    for known in known_keys():
        if known.split(".")[-1] == last:
            return f" Did you mean '{known}'?"
    return nearest(key, known_keys())


def explain(error: ValidationError, prefix: str = "") -> str:
    """A validation error in words: the key, what was given, what is expected, the nearest valid name."""
    lines = []
    for problem in error.errors():
        key = (prefix + ".".join(str(part) for part in problem["loc"])).rstrip(".")
        if problem["type"] == "extra_forbidden":
            lines.append(f"There is no setting '{safe(key, 60)}'.{suggestion(key)}")
        elif problem["type"] == "literal_error":
            expected = problem["ctx"]["expected"].replace(" or ", ", ")
            choices = [choice.strip().strip("'") for choice in expected.split(",")]
            hint = nearest(str(problem["input"]), choices)
            given = shown(problem["input"])
            lines.append(f"{key} = {given} is not a choice.{hint} Write one of: {', '.join(choices)}.")
        elif problem["type"] == "value_error":
            where = f"[{key}] " if key else ""
            lines.append(f"{where}{problem['msg'].removeprefix('Value error, ')}.")
        else:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            lines.append(f"{key} = {shown(problem['input'])}: {message}.")
    return "\n".join(lines)


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file, or an error that names the file and the line."""
    try:
        if (size := path.stat().st_size) > MOST_TOML:
            raise TacitError(f"{path} has {size:,} bytes. An experiment in TOML has less than {MOST_TOML:,}.")
        settings = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TacitError(f"There is no experiment file {path}.") from None
    except OSError as error:
        raise TacitError(f"{path} cannot be read as an experiment ({error.strerror}).") from None
    except ValueError as error:
        raise TacitError(f"{path} is not valid TOML: {error}.") from None
    if not settings:
        raise TacitError(f"{path} holds no settings: it is empty, or cut short.")
    return settings


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; ValueError says what is wrong with it, whatever that is."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_setting(text: str) -> tuple[str, Any]:
    """`key=value` from the command line; the value as TOML would read it, else a text.

    >>> parse_setting("train.lr=.1"), parse_setting("data.name=digits"), parse_setting("train.nesterov=true")
    (('train.lr', 0.1), ('data.name', 'digits'), ('train.nesterov', True))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise TacitError(f"--set takes key=value, for example --set train.lr=0.1; got '{safe(text)}'.")
    key, value = key.strip(), value.strip()
    if "\n" in value or "\r" in value:  # TOML would read what follows as another setting
        raise TacitError(f"--set takes one key=value in one line; got '{safe(text)}'.")
    try:
        return key, parse_toml(f"value = {value}")["value"]
    except ValueError:
        try:
            return key, float(value) if value.isascii() else value  # Python's float takes other scripts' digits, too
        except ValueError:
            return key, value


def differences(old: Experiment, new: Experiment) -> list[str]:
    """The settings in which two experiments differ, those aside that do not change the outcome."""
    before, after = flatten(old.to_dict()), flatten(new.to_dict())
    keys: Iterable[str] = dict.fromkeys([*before, *after])
    return [
        f"{key}: {before.get(key, 'not set')!r} in the run, {after.get(key, 'not set')!r} now"
        for key in keys
        if key not in FREE_ON_RESUME and before.get(key) != after.get(key)
    ]
