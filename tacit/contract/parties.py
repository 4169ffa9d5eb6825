"""What each side may see: its own shard, the settings, the moment, its own randomness; nothing else.

`Hub` is all that server code is given, `Client` is all that client code is given. Neither holds a reference to
the other parties' data or to the true labels of unlabelled images.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from tacit import nets
from tacit.contract.bank import MOST_NUMBERS, Bank, Body, Source, banked
from tacit.contract.messages import Reply
from tacit.contract.parts import Turn, shard_in_turn
from tacit.contract.record import KEYS
from tacit.contract.shard import Labeled as Labeled
from tacit.contract.shard import Shard as Shard
from tacit.core import seeds
from tacit.core.errors import TacitError
from tacit.core.payload import Copied, Weights, content_digest
from tacit.core.safeguards import Privacy, Robust
from tacit.core.settings import Faults, Net, Participation, Server, Train
from tacit.nets.folding import folded
from tacit.nets.optimizer import SGD, Pace, give_momentum, reach, sgd
from tacit.nets.statistics import recompute_statistics
from tacit.nets.weights import first_weights
from tacit.pieces.aggregate import normalized_shares, shares, weighted_mean
from tacit.pieces.loss import LabelLoss, label_loss
from tacit.pieces.robust import robust_mean
from tacit.pieces.schedule import Schedule
from tacit.pieces.server_optimizer import Memory, ServerOptimizer
from tacit.pieces.train import View, batch_count, fit, predict, weights_of
from tacit.views import Views


@dataclass(frozen=True)
class Setup:
    """What everybody knows before the first round."""

    seed: int
    classes: tuple[str, ...]
    channels: int
    size: int
    clients: int
    labeled_clients: tuple[int, ...]
    net: Net
    train: Train
    views: Views
    participation: Participation
    device: torch.device
    server: Server = field(default_factory=Server)
    robust: Robust = field(default_factory=Robust)
    privacy: Privacy = field(default_factory=Privacy)
    faults: Faults = field(default_factory=Faults)
    real_sites: bool = False  # no simulation: noise comes from the operating system

    def build(self, generator: torch.Generator | None = None) -> nets.Net:
        """The net of the experiment: with fresh weights from a generator, or empty, to be loaded."""
        return self._build(generator).train_only(self.net.train)

    def _build(self, generator: torch.Generator | None) -> nets.Net:
        net = nets.build(
            classes=len(self.classes),
            channels=self.channels,
            size=self.size,
            generator=generator,
            **self.net.architecture,
        )
        return net.arrange(self.device, self.size)

    def first_weights(self) -> tuple[Weights, list[str]]:
        """The weights that a run begins with, random or learned elsewhere, and what is to be told about them."""
        fresh = weights_of(self._build(seeds.generator(self.seed, "net")))
        return first_weights(self.net.name, self.net.weights, fresh, self.classes, self.channels, self.size)

    @cached_property
    def frozen(self) -> Weights:
        """The part of the first weights that nobody trains: every party has it, and nobody sends it."""
        if self.net.train == "all":
            return {}
        names = self.build().frozen_names
        return {name: tensor for name, tensor in self.first_weights()[0].items() if name in names}

    @property
    def frozen_sha256(self) -> str:
        """The digest of what nobody trains, by which two parties know that they have the same; '' if all learns."""
        return content_digest({"model": self.frozen}) if self.frozen else ""

    @cached_property
    def taken(self) -> tuple[int, ...]:
        """The shape of what the net takes for one image: its pixels, or with `net.views` what the frozen part makes of
        them."""
        shape = (self.channels, self.size, self.size)
        if not self.net.views:
            return shape
        with torch.no_grad():
            made: Tensor = self.build().to("meta").eval().frozen_part()(torch.empty(1, *shape, device="meta"))
        if made.numel() > MOST_NUMBERS:
            raise TacitError(
                f"net.views = {self.net.views} would keep {made.numel():,} numbers of every view of an image, more "
                f'than {MOST_NUMBERS:,}: net.train = "{self.net.train}" leaves too little frozen at {self.size} '
                "pixels. Train fewer blocks, take smaller images (data.image_size), or write net.views = 0."
            )
        return tuple(made.shape[1:])

    @cached_property
    def features(self) -> Source | None:
        """Who makes features of images, where a bank of them is wanted (`net.views`)."""
        if not self.net.views:
            return None
        net = repr((sorted(self.net.architecture.items()), self.net.train))
        return Source(self.views, self.net.views, self.taken, self.frozen_sha256, net, self._body, self.device)

    def _body(self) -> Body:
        net = self.build()
        net.load_state_dict(self.frozen, strict=False)
        whole = folded(net.eval())
        assert isinstance(whole, nets.Net)
        return whole.frozen_part()


@dataclass(frozen=True)
class RoundInfo:
    """When something happens: the stage, the round within it, and the count of all rounds of the run so far."""

    stage: str
    round: int
    rounds: int
    step: int


class NetPool:
    """The nets of one process, used again for every client: building one costs more than loading weights into it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._nets: list[nets.Net] = []
        self._taken = 0

    def clear(self) -> None:
        """Everything may be handed out again: the next client starts."""
        self._taken = 0

    def take(self, weights: Weights) -> nn.Module:
        """A net with exactly these weights, its own until `clear`."""
        if self._taken == len(self._nets):
            self._nets.append(self._made())
        net = self._nets[self._taken]
        self._taken += 1
        net.load_state_dict(weights)
        net.learn()
        net.zero_grad(set_to_none=True)
        return net.train()

    def _made(self) -> nets.Net:
        net = self.setup.build()
        if self.setup.net.views:
            return net.without_frozen()  # the frozen part has done its work already
        net.load_state_dict(self.setup.frozen, strict=False)
        return net


class Party:
    """What both sides have in common."""

    def __init__(self, setup: Setup, shard: Shard, round_info: RoundInfo, who: str, net_pool: NetPool) -> None:
        if setup.features and shard.views is None:
            shard = banked(Bank(setup.features, torch.cat([shard.labeled.images, shard.unlabeled])), shard)
        self.shard = shard
        self.whole = shard  # all that this side holds, where `shard` is the part of it that the round is about
        self.train: Train = setup.train
        self.views: Views = shard.views or setup.views
        self.classes = len(setup.classes)
        self.channels, self.size = setup.channels, setup.size
        self.stage = round_info.stage
        self.round = round_info.round
        self.rounds = round_info.rounds
        self.device = setup.device
        self._name = (setup.seed, round_info.stage, round_info.round, who)
        self._setup = setup
        self._net_pool = net_pool

    def rng(self, purpose: str) -> torch.Generator:
        """A generator for one purpose of this side in this round; the same one however often it is asked for."""
        return seeds.generator(*self._name, purpose)

    def model(self, weights: Weights) -> nn.Module:
        """A net with these weights on this side's device, ready to be trained."""
        return self._net_pool.take(weights)

    def weights(self, model: nn.Module) -> Weights:
        """A copy of the model's weights, to send or to keep.

        With BN policy `static` the statistics are first recomputed on this side's own images.
        """
        own = self.shard.images
        if self._setup.net.norm == "bn" and self._setup.net.bn == "static" and len(own) > 1:
            recompute_statistics(model, (self.views.plain(part) for part in own.split(256)))
        return Copied(weights_of(model))

    def holding(self, which: Tensor) -> Self:
        """This side as if it held only these of its labelled images (a mask, or their places)."""
        party, own = copy.copy(self), self.shard.labeled
        party.shard = replace(self.shard, labeled=Labeled(own.images[which], own.labels[which]))
        return party

    @property
    def learning_rate(self) -> float:
        """`train.lr`, by the schedule over the rounds of this stage."""
        return self.scheduled(self.train.lr)

    def scheduled(self, rate: float) -> float:
        """A method's own learning rate in this round: it changes as `train.lr` does, by `train.schedule`."""
        return self._schedule.rate(rate, self._done(0.0), self._done_by_a_round)

    @property
    def _schedule(self) -> Schedule:
        return Schedule(self.train.schedule, self.train.warmup, self.train.end, self.train.hold)

    @property
    def _done_by_a_round(self) -> float:
        return 1.0 / max(self.rounds, 1)

    def _done(self, of_round: float) -> float:
        """The share of the stage that is over when this share of the round is."""
        return (max(self.round, 0) + of_round) / max(self.rounds, 1)  # round -1: before the first

    def _pace(self, rate: float) -> Pace:
        """How the rate of this round changes from step to step: as the schedule does from here on."""
        schedule, of_stage = self._schedule, self._done_by_a_round
        now = schedule.rate(1.0, self._done(0.0), of_stage)
        return lambda done, width: rate * schedule.rate(1.0, self._done(done), width * of_stage) / now

    def steps(self, images: int, batch: int | None = None, epochs: int | None = None) -> int:
        """Steps of a round over so many images, with a step for each batch."""
        count = batch_count(images, self.train.batch if batch is None else batch)
        return count * (self.epochs if epochs is None else epochs)

    def optimizer(
        self, model: nn.Module, lr: float | None = None, momentum: Weights | None = None, steps: int = 0
    ) -> SGD:
        """SGD as the experiment says, at this round's learning rate unless another is given (`me.scheduled(rate)`).

        `momentum`: by parameter name, to go on with (`momentum_of`); nothing there, nothing to go on with. `steps`: so
        many there will be in this round, for `train.schedule_by = "step"`; who trains with `fit` or `fit_labeled` need
        not say it, and where it is not known the rate is that of the round.
        """
        settings = self.train
        rate = self.learning_rate if lr is None else lr
        how = settings.momentum, settings.weight_decay, settings.nesterov, settings.layer_decay
        optimizer = sgd(model, rate, *how)
        give_momentum(model, optimizer, momentum or {})
        if settings.schedule_by == "step":
            optimizer.pace = self._pace(rate)
            optimizer.expect(steps)
        optimizer.stay_near(self._proximal)
        return optimizer

    @property
    def _proximal(self) -> float:
        """FedProx holds clients back from drifting apart; the server's own training is not pulled."""
        return 0.0

    @cached_property
    def label_loss(self) -> LabelLoss:
        """Cross-entropy of this party's labelled images, corrected for its own skew where the experiment says so: for
        that of all its labels, also where the round is about a part of them (`train.parts`), whose skew is chance."""
        settings = self.train
        balanced = settings.class_weights == "balanced"
        corrected = balanced, settings.logit_adjustment, settings.label_smoothing
        return label_loss(self.whole.labeled.labels, self.classes, *corrected)

    @property
    def epochs(self) -> int:
        """Passes over this side's own images in a round."""
        return self.train.epochs

    def fit_labeled(
        self,
        model: nn.Module,
        epochs: int | None = None,
        lr: float | None = None,
        after_epoch: Callable[[int], None] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        batch: int = 0,
        label_loss: LabelLoss | None = None,
    ) -> float:
        """Train on this side's labelled images: cross-entropy on weak views. Returns the last epoch's loss.

        `label_loss`: another one than `self.label_loss`.
        """
        labeled = self.shard.labeled
        optimizer = self.optimizer(model, lr) if optimizer is None else optimizer
        epochs = self.epochs if epochs is None else epochs
        if isinstance(optimizer, SGD):
            optimizer.expect(self.steps(len(labeled), batch or None, epochs))
        return fit(
            model,
            labeled.images,
            labeled.labels,
            view=self.views.weak_view,
            optimizer=optimizer,
            epochs=epochs,
            batch=batch or self.train.batch,
            clip=self.train.clip,
            generator=self.rng("labeled views"),
            after_epoch=after_epoch,
            label_loss=label_loss or self.label_loss,
        )

    def fit(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        *,
        view: View,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
        epochs: int | None = None,
    ) -> float:
        """Train on any labelled images, such as those with pseudo-labels, at the experiment's batch size and clip.

        Who calls it for each epoch by itself is taken to do so `me.epochs` times.
        """
        if isinstance(optimizer, SGD):
            optimizer.expect(self.steps(len(images)))
        return fit(
            model,
            images,
            labels,
            view=view,
            optimizer=optimizer,
            epochs=self.epochs if epochs is None else epochs,
            batch=self.train.batch,
            clip=self.train.clip,
            generator=generator,
            label_loss=self.label_loss,
        )

    def predict(self, model: nn.Module, images: Tensor) -> Tensor:
        """Class probabilities of images as they are, without augmentation."""
        return predict(model, images, self.views.plain)


@dataclass
class Labelling:
    """What a client told the auditor: which label it gave which unlabelled image, and whether it believed it."""

    index: list[Tensor] = field(default_factory=list)
    label: list[Tensor] = field(default_factory=list)
    accepted: list[Tensor] = field(default_factory=list)
    named: dict[str, "Labelling"] = field(default_factory=dict)  # what it told under a name


class Client(Party):
    """All that client code may see."""

    def __init__(
        self,
        setup: Setup,
        shard: Shard,
        round_info: RoundInfo,
        number: int,
        group: int,
        net_pool: NetPool,
        turn: Turn | None = None,
    ) -> None:
        super().__init__(setup, shard, round_info, f"client-{number}/{group}", net_pool)
        self.number = number
        self._turn = turn
        if turn is not None:
            self.shard = turn.shard
        self.labelling = Labelling()

    @property
    def part(self) -> Tensor:
        """Which of all its unlabelled images the round is about, by their place among them."""
        return torch.arange(len(self.whole.unlabeled)) if self._turn is None else self._turn.which

    @property
    def _proximal(self) -> float:
        return self.train.proximal

    def audit(self, index: Tensor, label: Tensor, accepted: Tensor, name: str = "") -> None:
        """Report which pseudo-labels were given. Write-only: a method cannot read it back.

        In a simulation the evaluator compares them with the truth, for the record; nothing comes back. Labels told
        under a name were not learned: they give a figure of their own (`local` → `local_label_accuracy`).
        """
        labelling = self.labelling.named.setdefault(name, Labelling()) if name else self.labelling
        labelling.index.append(index.detach().cpu())
        labelling.label.append(label.detach().cpu())
        labelling.accepted.append(accepted.detach().cpu())


def plain(value: Any) -> Any:
    """Numbers and lists of them as JSON has them: what is not finite becomes None.

    >>> plain(torch.tensor([1.5, float("nan")])), plain([torch.tensor(2), 3.0])
    ([1.5, None], [2, 3.0])
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


class Sample(NamedTuple):
    """That so many clients were drawn from so many (on average, with Poisson sampling)."""

    among: int
    asked: int


class Hub(Party):
    """All that server code may see."""

    def __init__(
        self,
        setup: Setup,
        shard: Shard,
        round_info: RoundInfo,
        net_pool: NetPool,
        memory: Mapping[str, Memory] | None = None,
        secret: int = 0,
    ) -> None:
        super().__init__(setup, shard, round_info, "server", net_pool)
        # Of the server's optimiser, by the name of what is averaged: the engine's, who keeps it with the state.
        self.memory: Mapping[str, Memory] = memory or {}
        self.next_memory: dict[str, Memory] = {}
        self.secret = secret  # at real sites with [privacy]: the seed is known to all, who is asked must not be
        self.samples: list[Sample] = []
        self.clients = setup.clients
        self.labeled_clients = setup.labeled_clients
        self.notes: dict[str, Any] = {}
        self.pictures: dict[str, Tensor] = {}

    @property
    def epochs(self) -> int:
        return self.train.server_epochs or self.train.epochs

    def mean_model(
        self,
        old: Weights,
        replies: Sequence[Reply],
        weights: Sequence[float] | None = None,
        name: str = "model",
    ) -> Weights:
        """The next global model: from the old one, a step of the server's optimiser towards the mean of the replies.

        Replies count by their examples or by given weights, with `server.normalize` over their steps' reach. All that
        parties trained and that goes on as the global model passes through here, under the name by which it was sent.
        By default (`server.name = "mean"`) the step goes to the mean itself; so it does where the one party that holds
        labels trains alone, because the server's momentum would be added to that party's own and carry it too far.
        The record says so.
        """
        if weights is None:
            weights = shares([reply.examples for reply in replies])
        settings = self._setup.server
        if settings.normalize:
            weights = normalized_shares(weights, [self._reach(reply) for reply in replies])
        if self._setup.robust.mean == "mean":
            # One reply at a time is looked at: the sequence may fetch them from disk.
            mean = weighted_mean((reply.weights(name) for reply in replies), weights)
        else:
            mean = self._robust_mean(replies, weights, name)
        # What is remembered is as it was before the merge, however often a method asks: it advances once a round.
        if not settings.takes_the_mean and self._from_the_only_holder(replies):
            self.notes["server"] = "one party trains alone: its model as it is"
            self.next_memory[name] = self.memory.get(name, {})
            return mean
        optimizer = ServerOptimizer(settings.name, settings.lr, settings.momentum, settings.beta2, settings.tau)
        model, self.next_memory[name] = optimizer.step(old, mean, self.memory.get(name, {}))
        return model

    def _reach(self, reply: Reply) -> float:
        """How far a party's steps of this round reach: one for each batch of its examples, in each of its passes."""
        epochs = self.epochs if reply.client < 0 else self.train.epochs
        steps = max(self.steps(math.ceil(reply.examples), epochs=epochs), 1)
        return reach([1.0] * steps, self.train.momentum, self.train.nesterov)

    def _from_the_only_holder(self, replies: Sequence[Reply]) -> bool:
        """Whether all that came is the model of the one party that holds labels: there is nothing to average."""
        at_server = [-1] if len(self.whole.labeled) else []
        return len(replies) == 1 and [*self.labeled_clients, *at_server] == [replies[0].client]

    def _robust_mean(self, replies: Sequence[Reply], weights: Sequence[float], name: str) -> Weights:
        """The robust mean of the clients' models by `[robust]`; what the server trained itself keeps its weight."""
        settings = self._setup.robust
        own = [number for number, reply in enumerate(replies) if reply.client < 0]
        others = [number for number, reply in enumerate(replies) if reply.client >= 0]
        theirs = [weights[number] for number in others]
        if len(own) > 1:
            raise TacitError(
                f'robust.mean = "{settings.mean}" was given {len(own)} models that no client sent, such as means of '
                'groups. In a method of your own, write means = "groups", so that it is refused before any work.'
            )
        if not any(theirs):
            return weighted_mean((reply.weights(name) for reply in replies), weights)
        models = [replies[number].weights(name) for number in others]
        mean, chosen, told = robust_mean(settings.mean, models, theirs, settings.trim, settings.byzantine)
        if told:
            self.notes["robust"] = told
        if settings.mean == "multi-krum":
            self.notes["chosen"] = [replies[others[number]].client for number in chosen]
        if not any(weights[number] for number in own):
            return mean
        trusted = [replies[number].weights(name) for number in own]
        return weighted_mean([mean, *trusted], [sum(theirs), *(weights[number] for number in own)])

    def in_turn(self) -> "Hub":
        """This side as clients are in a round: with a part of its labels (`train.parts`), all of them in turn."""
        if self.train.parts == 1:
            return self
        party = copy.copy(self)
        name = (self._setup.seed, "server", self.stage)
        party.shard = shard_in_turn(self.whole, self.train.parts, self.round, *name).shard
        return party

    def finetune(self, weights: Weights) -> Weights:
        """The model after training on the server's labels; as it was if the server has none."""
        if not len(self.shard.labeled):
            return weights
        model = self.model(weights)
        self.fit_labeled(model)
        return self.weights(model)

    def new_weights(self) -> Weights:
        """The first weights of the run: they depend on the seed, the net and its `weights`, on nothing else."""
        first, frozen = self._setup.first_weights()[0], self._setup.frozen
        return {name: tensor for name, tensor in first.items() if name not in frozen}

    @property
    def asked_share(self) -> float:
        """The share of all clients that a round asks."""
        return self._setup.participation.count(self.clients) / self.clients

    def sample_clients(self, among: Sequence[int] | None = None) -> list[int]:
        """The clients of this round, in order: all of them, a number or a fraction, as the experiment says.

        With `privacy.sampling = "poisson"` each of them by chance, so many on average.
        """
        pool = list(range(self.clients)) if among is None else sorted(among)
        count = self._setup.participation.count(len(pool))
        self.samples.append(Sample(len(pool), count))
        chance = seeds.generator(*self._name, "clients", self.secret) if self.secret else self.rng("clients")
        if self._setup.privacy.on and self._setup.privacy.sampling == "poisson" and count < len(pool):
            drawn = torch.rand(len(pool), generator=chance) < count / len(pool)
            return [client for client, asked in zip(pool, drawn.tolist(), strict=True) if asked]
        chosen = torch.randperm(len(pool), generator=chance)[:count]
        return sorted(pool[i] for i in chosen.tolist())

    def note(self, **values: float | Tensor | Sequence[float]) -> None:
        """Put figures into this round's record (a threshold per class, an aggregation weight per client)."""
        for name, value in values.items():
            if name in KEYS:
                raise ValueError(f"hub.note cannot use the name '{name}': every record has that already")
            self.notes[name] = plain(value)

    def draw(self, name: str, images: Tensor) -> None:
        """Save images (uint8 [N, C, H, W]) with the run, side by side: pictures/NAME.png."""
        self.pictures[name] = images
