"""A method: a frozen dataclass of hyper-parameters with four verbs, two for each side.

SERVER                         CLIENT k                              SERVER
state → server_send(state) → Task → client_train(task, memory, me) → Reply → server_merge(state, replies) → state'
                                      ↑ kept          keep ↓   (this client's own disk, never sent)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from tacit.contract.messages import Reply as Reply
from tacit.contract.messages import Task as Task
from tacit.contract.parties import Client, Hub
from tacit.core.errors import TacitError
from tacit.core.payload import Payload, Weights, weights_in
from tacit.core.settings import Experiment as Experiment
from tacit.pieces.aggregate import shares, weighted_mean

# Types of options: what is out of range is refused before any work. A text in an Annotated[...] is the help of
# that option: `threshold: Annotated[Share, "confidence a pseudo-label needs"] = 0.95`.
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
AtLeastOne = Annotated[int, Field(ge=1, le=1_000_000)]


@dataclass(frozen=True)
class Length:
    """A mark in the type of an option that says how long something lasts: `--scale` shrinks it with the rounds.

    A length in epochs names the option with the rounds `of` which they are a part: of a stage its rounds shrink, or
    its epochs where it is one long round, never both.
    """

    of: str = ""


Rounds = Annotated[Count, Length()]  # rounds that something lasts: a warm-up, a ramp
Epochs = Annotated[Count, Length(of="warmup")]  # epochs in each of the rounds of the option `warmup`

PLACEMENTS = ("server", "clients", "some-clients")


class Held(NamedTuple):
    """What a typical client holds, for estimates; all zero: not known."""

    labeled: int = 0
    unlabeled: int = 0
    batch: int = 1  # images a step

    def label_passes(self, epochs: int, ratio: float = 1.0) -> int:
        """Passes over the labels where each unlabelled batch (`ratio` times as large) has a labelled one beside it.

        >>> Held(labeled=20, unlabeled=100, batch=10).label_passes(epochs=2)     # 2 · 10 steps of 10 labels
        10
        >>> Held(labeled=20).label_passes(epochs=2), Held().label_passes(epochs=2)
        (2, 2)
        """
        if not (self.labeled and self.unlabeled):
            return epochs
        steps = epochs * math.ceil(self.unlabeled / max(1, round(self.batch * ratio)))
        return math.ceil(steps * min(self.batch, self.labeled) / self.labeled)


UNKNOWN = Held()


@dataclass(frozen=True)
class Stage:
    """A method and for how many rounds it runs."""

    name: str
    method: "Method"
    rounds: int
    apart: bool = False  # no stage begins with what it learned: the guard's twin


@dataclass(frozen=True)
class Method:
    """The base of every method: federated averaging without the training.

    A method file defines one subclass, with the file's name, and overrides what its paper changes. Fields are
    the hyper-parameters; the class attributes below tell users and the engine what to expect.
    """

    citation: ClassVar[str] = ""
    placements: ClassVar[tuple[str, ...]] = PLACEMENTS
    trains_parts: ClassVar[bool] = True  # whether net.train may leave a part of the net as it is
    # Of whose models `hub.mean_model` makes the next one: "clients" (each client's own), "groups" (means of groups), or
    # "nobody" (models are merged in another way, or something else that clients sent is). Robust means and differential
    # privacy ([robust], [privacy]) are for "clients".
    means: ClassVar[Literal["clients", "groups", "nobody"]] = "clients"
    needs_pixels: ClassVar[bool] = False  # whether it does more with images than ask for plain, weak and strong views
    # What travels and what stays, by name, in the words of tacit/contract/kinds.py: "weights" (like the model that was
    # sent), "counts[K]", "share", "weights if labeled" …; a name that ends in "?" may be missing. The engine refuses
    # replies that differ.
    server_sends: ClassVar[dict[str, str]] = {"model": "weights"}
    client_sends: ClassVar[dict[str, str]] = {"model": "weights"}
    client_keeps: ClassVar[dict[str, str]] = {}
    # Secure aggregation: what `server_merge` makes of each name that clients send, if sums over clients are all that it
    # needs: "mean" (by `sum_weight`), "sum", or "rows" (distributions[…]: the mean of the rows that are known). Said of
    # the merge of the same class, and of what inherits that; where it is empty, `merges_each` says why.
    merges_sums: ClassVar[dict[str, str]] = {}
    merges_each: ClassVar[str] = ""
    asks_labeled: ClassVar[bool] = False  # whether it asks no clients but those that hold labels
    in_parts: ClassVar[bool] = True  # whether `train.parts` divides its rounds; warm-ups pass over all labels in each
    # Named settings: a plain key is an option of the method, a dotted one a key of the experiment ("train.lr").
    presets: ClassVar[dict[str, dict[str, Any]]] = {"paper": {}, "smoke": {}}

    def before(self) -> tuple[Stage, ...]:
        """Stages that run first, each itself a method (a warm-up, the training of a generator)."""
        return ()

    def refuses(self, experiment: Experiment) -> str:
        """Why this experiment cannot be with these options, and what to write instead; '' if it can."""
        return ""

    def check_installed(self) -> None:
        """Raise a TacitError where a library that this method trains with is missing; asked before a run begins."""

    def estimated_passes(self, epochs: int, held: Held = UNKNOWN) -> tuple[int, int] | None:
        """For estimates: passes over a client's labelled and over its unlabelled images in a round.

        None: the experiment's net is not what is trained, so nothing is known.
        """
        return epochs, epochs

    def estimated_tasks(self, asked: int) -> int:
        """For estimates: how many tasks a round has when so many clients take part."""
        return asked

    def estimated_weights_bytes(self, classifier: int, channels: int, features: int = 0) -> int:
        """For estimates: the size of what is declared as "weights", on average; by default the experiment's net's.

        `features`: how many numbers that net makes of an image before its head.
        """
        return classifier

    def most_examples(self, images: int, largest: int) -> float:
        """For checks: how many examples a client that holds so many images can tell of, at most.

        An image that is both labelled and unlabelled data counts twice. `largest` is what the largest client holds.
        """
        return images

    def needs_each(self, experiment: Experiment) -> str:
        """Secure aggregation: why the merge must see each client's reply in this experiment; '' if sums are enough."""
        return self.merges_each

    def sum_weight(self, reply: Reply, labeled: bool) -> float:
        """Secure aggregation: how much a client's reply counts in a mean. The client itself works it out.

        It must be what the merge would give it, up to a factor that is the same for all.
        """
        return reply.examples

    def most_sum_weight(self, most: float) -> float:
        """The most that `sum_weight` can be of a client with so many examples at most."""
        return most

    def server_start(self, hub: Hub, past: Mapping[str, Payload]) -> Payload:
        """The state before the first round; `past` holds the last states of the stages before, by name."""
        model = next((weights_in(state, "model") for state in reversed(list(past.values())) if "model" in state), None)
        return {"model": hub.new_weights() if model is None else model}

    def server_send(self, state: Payload, hub: Hub) -> list[Task]:
        """What goes to whom in this round. No task at all means a round on the server alone."""
        return [Task(client, {"model": state["model"]}) for client in hub.sample_clients()]

    def client_train(self, task: Task, memory: Payload, me: Client) -> Reply:
        """The heart of a method: what a client does with what it was sent and what it kept."""
        raise TacitError(f"{type(self).__name__} sends tasks to clients but does not define client_train.")

    def server_merge(self, state: Payload, replies: Sequence[Reply], hub: Hub) -> Payload:
        """The new state. By default the mean of the clients' models, by their number of examples."""
        if not any(reply.examples > 0 for reply in replies):
            return state
        return {**state, "model": hub.mean_model(weights_in(state, "model"), replies)}

    def server_answer(self, state: Payload, hub: Hub) -> Weights | None:
        """The model that is evaluated and shipped (None: this stage has no classifier yet)."""
        return weights_in(state, "model")


def mean_model(replies: Sequence[Reply], weights: Sequence[float] | None = None, name: str = "model") -> Weights:
    """The mean of what clients sent under a name, by their examples or by given weights, in client order.

    For means on the way. What goes on as the global model is made by `hub.mean_model`, where the server's optimiser is.
    """
    if weights is None:
        weights = shares([reply.examples for reply in replies])
    # One reply at a time is looked at: the sequence may fetch them from disk.
    return weighted_mean((reply.weights(name) for reply in replies), weights)
