"""Clients at real sites. Flower carries the messages; what is in them, and what is made of them, is tacit's.

`Grid` is the only thing here that knows Flower; the backend itself needs something that asks sites and gives back
what they answered (tests give it sites in the same process).
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tacit.backends.base import Outcome, waves
from tacit.contract.bank import Banks
from tacit.contract.method import Reply, Stage, Task
from tacit.contract.parties import Labeled, NetPool, RoundInfo, Setup
from tacit.contract.sums import Summation
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.payload import Limits, Payload, Weights
from tacit.core.settings import Experiment
from tacit.core.text import safe
from tacit.engine.secure import Total
from tacit.evaluation.paired import right_patterns
from tacit.evaluation.scores import PREDICT_BATCH, tally
from tacit.pieces.train import predict
from tacit.sites.accept import for_sites
from tacit.sites.envelope import from_record, to_record
from tacit.sites.judges import read_patterns, read_tally
from tacit.sites.unseen import Round, add_up, context_of
from tacit.sites.wire import WHO, Request, Response, SharedFacts, pack, unpack
from tacit.version import __version__

ROOM = 1 << 20  # a reply may be this much larger than four times what was sent down
PING = 30.0  # seconds that a site which was silent has to say its name, before it is asked for work again
ASK_AGAIN = 5.0  # seconds until a site whose people have not decided is asked again
LONGEST_FAULT = 400  # characters of what a site says that go into the record
LEFT_OUT = "left out by the server's operator"


@dataclass(frozen=True)
class NoResponse:
    """A site that gave no answer, and why."""

    why: str


class Transport(Protocol):
    """Asks sites by name; each gives bytes back, or is silent for a reason."""

    def request(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | NoResponse]: ...


@dataclass(frozen=True)
class Federated:
    """What a run at sites knows: its name (under which sites keep their memory), who is which client, the facts."""

    run: str
    sites: tuple[str, ...]  # the place in this list is the client's number
    facts: SharedFacts
    labeled: tuple[int, ...] = ()
    images: tuple[int, ...] | None = None  # how many images each site registered; None: nobody was asked yet
    left_out: tuple[str, ...] = ()  # sites that are never asked again; their numbers stay theirs
    method_sha256: str = ""  # of the method's file, if it is none of tacit's own
    frozen_sha256: str = ""  # of the part of the net that nobody trains, and nobody sends
    patience: float = 3600.0  # seconds that a round waits for its last reply
    largest_reply: int = 0  # bytes (0: four times what was sent down, and a megabyte)
    answered: tuple[int, ...] = ()  # how many rounds were done when each site answered last, as it says itself

    def request(self, experiment: Experiment, client: int, kind: str, **round_info: Any) -> Request:
        return Request.model_validate(
            {
                "kind": kind,
                "version": __version__,
                "run": self.run,
                "experiment": for_sites(experiment),
                "method_sha256": self.method_sha256,
                "frozen_sha256": self.frozen_sha256,
                "facts": self.facts,
                "site": self.sites[client],
                "client": client,
                "clients": len(self.sites),
                "labeled_clients": self.labeled,
                **round_info,
            }
        )


class FlowerBackend:
    """Sends tasks to sites, takes what comes back if it is a reply, and evaluates here."""

    def __init__(
        self,
        experiment: Experiment,
        setup: Setup,
        test: Labeled,
        federated: Federated,
        transport: Transport,
        kept_back: Labeled | None = None,
    ) -> None:
        self.experiment = experiment
        self.setup = setup
        self.test = test
        self.kept_back = kept_back  # by the server itself, to judge models by
        self.federated = federated
        self.transport = transport
        self.net_pool = NetPool(setup)
        self.banks = Banks(setup.features)
        self._silent: dict[str, str] = {}  # sites that did not answer when they were last asked: when, and why

    def run(
        self, stage: Stage, round_info: RoundInfo, tasks: Sequence[Task], done: Callable[[int], None]
    ) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        self._listen({self.federated.sites[task.client] for task in tasks})
        for number, wave in enumerate(waves(tasks)):
            places = {self.federated.sites[task.client]: (place, task) for place, task in wave}
            skipped = {name: why for name in places if (why := self._why_not(name))}
            envelopes = {
                name: self.packed("train", round_info, task, task.send, number)
                for name, (_, task) in places.items()
                if name not in skipped
            }
            answered: list[str] = []

            def count(name: str, before: int = len(outcomes), answered: list[str] = answered) -> None:
                answered.append(name)
                done(before + len(answered))

            responses = self.transport.request(envelopes, self.federated.patience, count) if envelopes else {}
            for name, (place, task) in places.items():
                response = responses.get(name, NoResponse(skipped.get(name, "it did not answer")))
                outcomes[place] = self._outcome(task, response)
                if isinstance(response, NoResponse) and name not in skipped:
                    self.note_silent(name, round_info, response.why)
        return [outcomes[place] for place in range(len(tasks))]

    def _why_not(self, name: str) -> str:
        """Why a site is not asked; '' if it is."""
        if name in self.federated.left_out:
            return LEFT_OUT
        return f"not asked: silent {self._silent[name]}, and not heard of again" if name in self._silent else ""

    def _listen(self, names: set[str]) -> None:
        """Sites that were silent are asked for their names first: waiting for them once more would cost all the
        patience of a round, and the next one's, too."""
        silent = [name for name in self._silent if name in names and name not in self.federated.left_out]
        if silent:
            patience = min(PING, self.federated.patience)
            responses = self.transport.request(dict.fromkeys(silent, WHO), patience, lambda name: None)
            for name in silent:
                if responses.get(name) == name.encode():
                    del self._silent[name]

    def packed(self, kind: str, round_info: RoundInfo, task: Task, content: Payload, wave: int = 0) -> bytes:
        """A question to a client in a round."""
        when = {
            "stage": round_info.stage,
            "round": round_info.round,
            "rounds": round_info.rounds,
            "step": round_info.step,
        }
        request = self.federated.request(self.experiment, task.client, kind, **when, wave=wave, group=task.group)
        return pack(request, payload.to_bytes(content))

    def add_up(
        self,
        stage: Stage,
        round_info: RoundInfo,
        tasks: Sequence[Task],
        rule: Summation,
        least: int,
        late: Collection[int],
        done: Callable[[int], None],
    ) -> Total:
        """Secure aggregation: the sum of what the sites answer, and of no site what it answers itself."""
        names = {task.client: self.federated.sites[task.client] for task in tasks}
        self._listen(set(names.values()))
        reached = {task.client: task for task in tasks if not self._why_not(names[task.client])}

        def asking(kind: str, contents: Mapping[int, Payload], done: Callable[[int], None]) -> dict[int, bytes | str]:
            return self._ask(kind, round_info, {client: reached[client] for client in contents}, contents, done)

        context = context_of(self.federated.run, round_info.step)
        current = Round(asking, context, self.federated.sites, reached, rule, least)
        for client, name in names.items():
            if client not in reached:
                current.leave_out(client, self._why_not(name))
        return add_up(current, late, self.experiment.privacy.neighbours, done)

    def _ask(
        self,
        kind: str,
        round_info: RoundInfo,
        tasks: Mapping[int, Task],
        contents: Mapping[int, Payload],
        done: Callable[[int], None],
    ) -> dict[int, bytes | str]:
        """A question to several clients: of each its answer, or why there is none."""
        names = {self.federated.sites[client]: client for client in tasks}
        envelopes = {
            name: self.packed(kind, round_info, tasks[client], contents[client]) for name, client in names.items()
        }
        answered: list[str] = []

        def count(name: str) -> None:
            answered.append(name)
            done(len(answered))

        responses = self.transport.request(envelopes, self.federated.patience, count) if envelopes else {}
        found: dict[int, bytes | str] = {}
        for name, client in names.items():
            response = responses.get(name, NoResponse("it did not answer"))
            if isinstance(response, NoResponse):
                self.note_silent(name, round_info, response.why)
            found[client] = response if isinstance(response, bytes) else response.why
        return found

    def note_silent(self, name: str, round_info: RoundInfo, why: str) -> None:
        """It is asked for its name first from now on."""
        self._silent[name] = f"since {round_info.stage} round {round_info.round + 1} ({why})"

    def _outcome(self, task: Task, response: bytes | NoResponse) -> Outcome:
        nothing = Reply(send={}, examples=0, client=task.client, group=task.group)
        name = self.federated.sites[task.client]
        if isinstance(response, NoResponse):
            return Outcome(nothing, None, 0.0, fault=f"{name}: {safe(response.why, LONGEST_FAULT)}")
        largest = self.federated.largest_reply or 4 * payload.nbytes(task.send) + ROOM
        try:
            reply = read_reply(response, task, largest)
        except TacitError as error:
            return Outcome(nothing, None, 0.0, fault=f"{name}: {safe(error, LONGEST_FAULT)}")
        return Outcome(reply, None, 0.0)

    def predict_test(self, weights: Weights) -> Tensor:
        return self._predict(weights, "test", self.test.images)

    def _predict(self, weights: Weights, who: str, images: Tensor) -> Tensor:
        self.net_pool.clear()
        shown = self.banks.of_images(who, lambda: images)
        views = shown.views or self.setup.views
        return predict(self.net_pool.take(weights), shown.unlabeled, views.plain, PREDICT_BATCH).cpu()

    def validate(self, weights: Weights) -> Tensor:
        """The server's own tally, and those of the labelled sites that answer; what cannot be one is left out."""
        classes = len(self.setup.classes)
        counts = torch.zeros(3, classes, dtype=torch.float64)
        if self.kept_back is not None and len(self.kept_back):
            counts += tally(
                self._predict(weights, "kept back", self.kept_back.images), self.kept_back.labels.cpu(), classes
            )
        for client, response in self._ask_judges("judge", {"model": weights}):
            counts += read_tally(response, client, classes, self._most_kept(client))
        return counts

    def compare(self, models: Sequence[Weights]) -> Tensor:
        """The same of several models at once: only counts of right answers come back."""
        classes = len(self.setup.classes)
        counts = torch.zeros(2 ** len(models), classes, dtype=torch.float64)
        if self.kept_back is not None and len(self.kept_back):
            probs = [self._predict(weights, "kept back", self.kept_back.images) for weights in models]
            counts += right_patterns(probs, self.kept_back.labels.cpu(), classes)
        sent: Payload = {f"model-{number}": weights for number, weights in enumerate(models)}
        for client, response in self._ask_judges("compare", sent):
            counts += read_patterns(response, client, tuple(counts.shape), self._most_kept(client))
        return counts

    def _ask_judges(self, kind: str, send: Payload) -> Iterator[tuple[int, bytes]]:
        """What the labelled sites answer, in their order, whoever answered first: a sum depends on it."""
        names = {self.federated.sites[client]: client for client in self.federated.labeled}
        self._listen(set(names))
        content = payload.to_bytes(send)
        envelopes = {
            name: pack(self.federated.request(self.experiment, client, kind), content)
            for name, client in names.items()
            if not self._why_not(name)
        }
        responses = self.transport.request(envelopes, self.federated.patience, lambda name: None) if envelopes else {}
        for name, client in names.items():
            response = responses.get(name)
            if isinstance(response, bytes):
                yield client, response
            elif response is not None:  # it is asked for its name first from now on: nobody waits for it twice
                self._silent[name] = f"since it was asked to judge a model ({response.why})"

    def _most_kept(self, client: int) -> float:
        """How many images a site can have kept back, if it takes part with as many as it registered."""
        share, images = self.experiment.data.validation, (self.federated.images or {client: 0})[client]
        return share / (1 - share) * images + 1

    def memory_bytes(self) -> int:
        return 0  # it lies on the sites' own disks, where the server cannot look

    def close(self) -> None:
        pass


def read_reply(response: bytes, task: Task, largest: int) -> Reply:
    """The reply in an envelope from a site, or a TacitError that says why it is none."""
    header, content = unpack(response, Response, largest)
    if header.kind in ("refused", "waiting"):
        raise TacitError(f"{header.kind}: {header.why}")
    if header.kind != "train" or (header.client, header.group) != (task.client, task.group):
        raise TacitError("an answer to another question")
    return Reply(
        send=payload.from_bytes(content, Limits(total=largest)),
        examples=header.examples,
        metrics=dict(header.metrics),
        client=task.client,
        group=task.group,
    )


def say_hello(
    experiment: Experiment,
    federated: Federated,
    transport: Transport,
    patience: float,
    wait: float = 0.0,
    done: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Federated:
    """Ask every site whether it can take part; the federation with what they said, or all their refusals at once.

    A site that is away is asked again for `wait` seconds: a server that was just restarted may believe a site to be
    there whose connection is only being made anew. So is one whose people have not said yes yet, which is told. `done`
    is how many rounds are finished. Of a site that is left out, what it said earlier stays as it was.
    """
    numbers = {name: k for k, name in enumerate(federated.sites) if name not in federated.left_out}
    envelopes = {
        name: pack(federated.request(experiment, number, "hello", step=done)) for name, number in numbers.items()
    }
    end = time.monotonic() + wait
    responses = transport.request(envelopes, patience, lambda name: None)
    told: set[str] = set()
    while time.monotonic() < end:
        away = [name for name in envelopes if isinstance(responses.get(name, NoResponse("")), NoResponse)]
        undecided = [name for name in envelopes if (found := responses.get(name)) and _is_waiting(found)]
        if not away and not undecided:
            break
        for name in sorted(set(undecided) - told):
            say(f"{name}: its people are asked whether it may take part")
        told |= set(undecided)
        time.sleep(1.0 if away else min(ASK_AGAIN, wait))
        again = {name: envelopes[name] for name in [*away, *undecided]}
        responses |= transport.request(again, patience, lambda name: None)
    faults = []
    labeled = set(federated.labeled) - set(numbers.values())
    images = list(federated.images or [0] * len(federated.sites))
    answered = [0] * len(federated.sites)
    for name, number in numbers.items():
        try:
            header = _hello_in(responses.get(name, NoResponse("it did not answer")), number)
            images[number], answered[number] = header.images, header.answered
            labeled |= {number} if header.labeled else set()
        except TacitError as error:
            faults.append(f"  {safe(name)}: {safe(error, LONGEST_FAULT)}")
    if faults:
        raise TacitError("The run did not start, because not every site can take part:\n" + "\n".join(faults))
    return replace(federated, labeled=tuple(sorted(labeled)), images=tuple(images), answered=tuple(answered))


def _is_waiting(response: bytes | NoResponse) -> bool:
    """Whether a site said that its people have not decided yet."""
    try:
        return isinstance(response, bytes) and unpack(response, Response, ROOM)[0].kind == "waiting"
    except TacitError:
        return False


def _hello_in(response: bytes | NoResponse, client: int) -> Response:
    if isinstance(response, NoResponse):
        raise TacitError(response.why)
    header, _ = unpack(response, Response, ROOM)
    if header.kind != "hello" or header.client != client:
        raise TacitError(header.why or "an answer to another question")
    return header


# --- Flower -----------------------------------------------------------------------------------------------

POLL = 0.3  # seconds between looks for replies
LOOK = 5.0  # seconds between looks whether a site was restarted
PUSHES = 3  # times that Flower is given the same messages


class Grid:
    """Flower's grid as a transport: sites by the names under which their keys were registered."""

    def __init__(self, grid: Any, insecure: bool = False) -> None:
        self.grid = grid
        self.insecure = insecure  # no keys, on this machine only: sites are believed who they say they are
        self._names: dict[int, str] = {}

    def online(self) -> dict[str, int]:
        """The node of every site that is there now."""
        nodes = [node for node in self.grid.get_nodes() if node.status in ("", "online")]
        if self.insecure:
            new = [node.node_id for node in nodes if node.node_id not in self._names]
            responses = self._exchange(dict.fromkeys(new, WHO), 30.0, lambda node: None)
            self._names |= {node: _name(data) for node, data in responses.items() if isinstance(data, bytes)}
            return {self._names[node.node_id]: node.node_id for node in nodes if node.node_id in self._names}
        return {node.name: node.node_id for node in nodes if node.name}

    def request(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | NoResponse]:
        nodes = self.online()
        names = {nodes[name]: name for name in envelopes if name in nodes}
        responses = self._exchange(
            {node: envelopes[name] for node, name in names.items()}, patience, lambda node: done(names[node])
        )
        absent: dict[str, bytes | NoResponse] = {
            name: NoResponse("it is not there") for name in envelopes if name not in nodes
        }
        return absent | {names[node]: response for node, response in responses.items()}

    def _exchange(
        self, envelopes: Mapping[int, bytes], patience: float, done: Callable[[int], None]
    ) -> dict[int, bytes | NoResponse]:
        """Push, then look for replies at our own pace (Flower's own send_and_receive sleeps three seconds).

        Flower says that a message was lost if it is asked while the site is away. A site that comes back between two
        looks would be waited for in vain: it knows nothing of a message that it took before it was killed.
        """
        before = self._activations() if envelopes else {}
        waiting = self._push(envelopes, patience) if envelopes else {}
        responses: dict[int, bytes | NoResponse] = {}
        end, look_again = time.monotonic() + patience, time.monotonic() + LOOK
        while waiting and time.monotonic() < end:
            for message in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    responses[node] = _answer(message)
                    done(node)
            if waiting and time.monotonic() > look_again:
                now, look_again = self._activations(), time.monotonic() + LOOK
                for number, node in list(waiting.items()):
                    if now.get(node, before.get(node)) != before.get(node):
                        del waiting[number]
                        responses[node] = NoResponse("restarted in the middle of the round")
                        done(node)
            time.sleep(POLL if waiting else 0)
        return responses | {node: NoResponse(f"no answer within {patience:g} s") for node in waiting.values()}

    def _activations(self) -> dict[int, str]:
        """When each node that is there joined last."""
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def _push(self, envelopes: Mapping[int, bytes], patience: float) -> dict[str, int]:
        """The nodes by the numbers of the messages to them.

        On a busy machine Flower repeats a request, takes the repetition for a mistake and gives the push up. Then it is
        pushed anew; a site that got the first message, too, does the same work twice.
        """
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

        for attempt in range(PUSHES):
            messages = [
                Message(to_record(envelope), dst_node_id=node, message_type="query", ttl=patience + 60)
                for node, envelope in envelopes.items()
            ]
            try:
                return dict(zip(self.grid.push_messages(messages), envelopes, strict=True))
            except ObjectPushError:
                time.sleep(POLL * attempt)
        raise TacitError(f"Flower did not take the messages to the sites, {PUSHES} times. See the server's log.")


def _name(response: bytes) -> str:
    """The name that a site gives itself, as far as it is one."""
    return safe(response[:100].decode("ascii", "replace"), 100)


def _answer(message: Any) -> bytes | NoResponse:
    if message.has_error():
        return NoResponse(f"gone or failed in the middle of the round (Flower's error {message.error.code})")
    try:
        return from_record(message.content)
    except TacitError as error:
        return NoResponse(str(error))
