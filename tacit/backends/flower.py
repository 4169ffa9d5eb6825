"""Clients at real sites. Flower carries the messages; what is in them, and what is made of them, is tacit's.

`Grid` is the only thing here that knows Flower; the backend itself needs something that asks sites and gives back
what they answered (tests give it sites in the same process).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

import tacit
from tacit import payload
from tacit.backends.base import Outcome, waves
from tacit.errors import TacitError
from tacit.evaluate import PREDICT_BATCH
from tacit.experiment import Experiment
from tacit.method import Reply, Stage, Task
from tacit.payload import Limits, Weights
from tacit.pieces.train import predict
from tacit.sides import Labeled, Moment, Setup, Workbench
from tacit.sites.envelope import from_record, to_record
from tacit.sites.wire import WHO, Answer, Ask, SharedFacts, pack, unpack
from tacit.text import safe

ROOM = 1 << 20  # a reply may be this much larger than four times what was sent down


@dataclass(frozen=True)
class Silent:
    """A site that gave no answer, and why."""

    why: str


class Transport(Protocol):
    """Asks sites by name; each gives bytes back, or is silent for a reason."""

    def ask(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | Silent]: ...


@dataclass(frozen=True)
class Federated:
    """What a run at sites knows: its name (under which sites keep their memory), who is which client, the facts."""

    run: str
    sites: tuple[str, ...]  # the place in this list is the client's number
    facts: SharedFacts
    labeled: tuple[int, ...] = ()
    patience: float = 3600.0  # seconds that a round waits for its last reply
    largest_reply: int = 0  # bytes (0: four times what was sent down, and a megabyte)

    def ask(self, experiment: Experiment, client: int, kind: str, **moment: Any) -> Ask:
        return Ask.model_validate(
            {
                "kind": kind,
                "version": tacit.__version__,
                "run": self.run,
                "experiment": for_sites(experiment),
                "facts": self.facts,
                "site": self.sites[client],
                "client": client,
                "clients": len(self.sites),
                "labeled_clients": self.labeled,
                **moment,
            }
        )


def for_sites(experiment: Experiment) -> dict[str, object]:
    """The experiment without what is only true on the server's machine: its paths."""
    settings = experiment.to_dict()
    settings["data"] |= {"name": "own", "split": ""}
    settings["method"] |= {"name": settings["method"]["name"].rsplit("/", 1)[-1]}
    settings["title"], settings["paper"] = "", {}
    return settings


class FlowerBackend:
    """Sends tasks to sites, takes what comes back if it is a reply, and evaluates here."""

    def __init__(
        self, experiment: Experiment, setup: Setup, test: Labeled, federated: Federated, transport: Transport
    ) -> None:
        self.experiment = experiment
        self.setup = setup
        self.test = test
        self.federated = federated
        self.transport = transport
        self.bench = Workbench(setup)

    def run(self, stage: Stage, moment: Moment, tasks: Sequence[Task], done: Callable[[int], None]) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        for number, wave in enumerate(waves(tasks)):
            places = {self.federated.sites[task.client]: (place, task) for place, task in wave}
            envelopes = {name: self._envelope(stage, moment, number, task) for name, (_, task) in places.items()}
            answered: list[str] = []

            def count(name: str, before: int = len(outcomes), answered: list[str] = answered) -> None:
                answered.append(name)
                done(before + len(answered))

            answers = self.transport.ask(envelopes, self.federated.patience, count)
            for name, (place, task) in places.items():
                outcomes[place] = self._outcome(task, answers.get(name, Silent("it did not answer")))
        return [outcomes[place] for place in range(len(tasks))]

    def _envelope(self, stage: Stage, moment: Moment, wave: int, task: Task) -> bytes:
        when = {"stage": moment.stage, "round": moment.round, "rounds": moment.rounds, "step": moment.step}
        ask = self.federated.ask(self.experiment, task.client, "train", **when, wave=wave, group=task.group)
        return pack(ask, payload.to_bytes(task.send))

    def _outcome(self, task: Task, answer: bytes | Silent) -> Outcome:
        nothing = Reply(send={}, examples=0, client=task.client, group=task.group)
        name = self.federated.sites[task.client]
        if isinstance(answer, Silent):
            return Outcome(nothing, None, 0.0, fault=f"{name}: {answer.why}")
        largest = self.federated.largest_reply or 4 * payload.nbytes(task.send) + ROOM
        try:
            reply = read_reply(answer, task, largest)
        except TacitError as error:
            return Outcome(nothing, None, 0.0, fault=f"{name}: {error}")
        return Outcome(reply, None, 0.0)

    def predict_test(self, weights: Weights) -> Tensor:
        self.bench.clear()
        return predict(self.bench.take(weights), self.test.images, self.setup.views.plain, PREDICT_BATCH).cpu()

    def kept_bytes(self) -> int:
        return 0  # it lies on the sites' own disks, where the server cannot look

    def close(self) -> None:
        pass


def read_reply(answer: bytes, task: Task, largest: int) -> Reply:
    """The reply in an envelope from a site, or a TacitError that says why it is none."""
    header, content = unpack(answer, Answer, largest)
    if header.kind == "refused":
        raise TacitError(f"refused: {header.why}")
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
    experiment: Experiment, federated: Federated, transport: Transport, patience: float, wait: float = 0.0
) -> Federated:
    """Ask every site whether it can take part; the federation with what they said, or all their refusals at once.

    A site that is away is asked again for `wait` seconds: a server that was just restarted may believe a site to be
    there whose connection is only being made anew.
    """
    envelopes = {name: pack(federated.ask(experiment, number, "hello")) for number, name in enumerate(federated.sites)}
    end = time.monotonic() + wait
    answers = transport.ask(envelopes, patience, lambda name: None)
    while time.monotonic() < end:
        away = [name for name in envelopes if isinstance(answers.get(name, Silent("")), Silent)]
        if not away:
            break
        time.sleep(1.0)
        answers |= transport.ask({name: envelopes[name] for name in away}, patience, lambda name: None)
    faults, labeled = [], []
    for number, name in enumerate(federated.sites):
        answer = answers.get(name, Silent("it did not answer"))
        try:
            if isinstance(answer, Silent):
                raise TacitError(answer.why)
            header, _ = unpack(answer, Answer, ROOM)
            if header.kind != "hello":
                raise TacitError(header.why or "an answer to another question")
            labeled += [number] if header.labeled else []
        except TacitError as error:
            faults.append(f"  {safe(name)}: {safe(error, 1000)}")
    if faults:
        raise TacitError("The run did not start, because not every site can take part:\n" + "\n".join(faults))
    return replace(federated, labeled=tuple(labeled))


# --- Flower -----------------------------------------------------------------------------------------------

POLL = 0.3  # seconds between looks for replies


class Grid:
    """Flower's grid as a transport: sites by the names under which their keys were registered."""

    def __init__(self, grid: Any, insecure: bool = False) -> None:
        self.grid = grid
        self.insecure = insecure  # no keys, on this machine only: sites are believed who they say they are
        self._told: dict[int, str] = {}

    def online(self) -> dict[str, int]:
        """The node of every site that is there now."""
        nodes = [node for node in self.grid.get_nodes() if node.status in ("", "online")]
        if self.insecure:
            new = [node.node_id for node in nodes if node.node_id not in self._told]
            answers = self._exchange(dict.fromkeys(new, WHO), 30.0, lambda node: None)
            self._told |= {node: data.decode() for node, data in answers.items() if isinstance(data, bytes)}
            return {self._told[node.node_id]: node.node_id for node in nodes if node.node_id in self._told}
        return {node.name: node.node_id for node in nodes if node.name}

    def ask(
        self, envelopes: Mapping[str, bytes], patience: float, done: Callable[[str], None]
    ) -> dict[str, bytes | Silent]:
        nodes = self.online()
        names = {nodes[name]: name for name in envelopes if name in nodes}
        answers = self._exchange(
            {node: envelopes[name] for node, name in names.items()}, patience, lambda node: done(names[node])
        )
        absent: dict[str, bytes | Silent] = {name: Silent("it is not there") for name in envelopes if name not in nodes}
        return absent | {names[node]: answer for node, answer in answers.items()}

    def _exchange(
        self, envelopes: Mapping[int, bytes], patience: float, done: Callable[[int], None]
    ) -> dict[int, bytes | Silent]:
        """Push, then look for replies at our own pace (Flower's own send_and_receive sleeps three seconds)."""
        from flwr.app import Message

        nodes = list(envelopes)
        messages = [
            Message(to_record(envelopes[node]), dst_node_id=node, message_type="query", ttl=patience + 60)
            for node in nodes
        ]
        waiting = dict(zip(self.grid.push_messages(messages), nodes, strict=True)) if messages else {}
        answers: dict[int, bytes | Silent] = {}
        end = time.monotonic() + patience
        while waiting and time.monotonic() < end:
            for message in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(message.metadata.reply_to_message_id, None)
                if node is not None:
                    answers[node] = _answer(message)
                    done(node)
            time.sleep(POLL if waiting else 0)
        return answers | {node: Silent(f"no answer within {patience:g} s") for node in waiting.values()}


def _answer(message: Any) -> bytes | Silent:
    if message.has_error():
        return Silent(f"gone or failed in the middle of the round (Flower's error {message.error.code})")
    try:
        return from_record(message.content)
    except TacitError as error:
        return Silent(str(error))
