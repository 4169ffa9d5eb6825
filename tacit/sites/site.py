"""What a site does with a message: look whether it may, train, keep its memory on its own disk, answer."""

import dataclasses
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tacit.backends.base import Worker, one_thread
from tacit.contract.fixed_point import Ring
from tacit.contract.method import Method, Reply, Stage, Task
from tacit.contract.parties import Labeled, RoundInfo, Setup, Shard
from tacit.core import payload
from tacit.core.chain import Entry
from tacit.core.errors import TacitError
from tacit.core.formatting import size_text
from tacit.core.machine import pick_device
from tacit.core.payload import Limits
from tacit.core.safeguards import Privacy
from tacit.core.settings import Experiment
from tacit.core.text import safe, safe_lines
from tacit.data.federation import setup_of
from tacit.data.party import Facts, PartyData, load_party
from tacit.data.placement import keep_back
from tacit.data.split import validation_generator
from tacit.nets.weights import check_available
from tacit.runs.memory import ClientMemory
from tacit.runs.plan import stages_of
from tacit.sites import policy as rules
from tacit.sites.accept import Refusal, allowed_methods, experiment_from_wire, find_allowed
from tacit.sites.approval import Approval, SiteJob, Waiting, job_of, new_job, permission
from tacit.sites.judges import MOST_COMPARED
from tacit.sites.ledger import Ledger
from tacit.sites.masking import Desk, whole_numbers
from tacit.sites.policy import Policy
from tacit.sites.trail import TALK, Trail, contents_of
from tacit.sites.wire import LARGEST_WHY, SECURE, WHO, Request, Response, pack, unpack
from tacit.version import __version__

log = logging.getLogger("tacit.site")


@dataclasses.dataclass(frozen=True, eq=False)
class OwnShard:
    """The one shard of this site; nobody knows the true labels of its unlabelled images."""

    shard: Shard
    kept_back: Labeled

    def client_shard(self, client: int) -> Shard:
        return self.shard

    def truth(self, client: int) -> Tensor:
        return torch.full((len(self.shard.unlabeled),), -1)

    def test(self) -> Labeled:
        raise TacitError("A site has no test set.")

    def validation(self, client: int) -> Labeled:
        return self.kept_back


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the people at a site decide."""

    name: str
    data: Path
    memory: Path  # a folder for what methods keep and for the list of what was sent
    methods: tuple[Path, ...] = ()  # method files that the server may ask for, as they are when the site starts
    ignore_labels: bool = False
    largest: int = 1 << 32  # bytes of one message from the server
    policy: Policy = dataclasses.field(default_factory=Policy)
    ask: bool = False  # whether each new job waits for a yes


class Work(NamedTuple):
    """What a site has ready for one experiment."""

    stages: tuple[Stage, ...]
    worker: Worker
    privacy: Privacy


# What a site says in its own log of each step of secure aggregation.
SAID = {
    "keys": "two public keys",
    "shares": "sealed shares of its secrets",
    "masked": "its reply under masks",
    "unmask": "shares that open the sum",
}


class Site:
    """Answers messages, one after the other. It imports nothing of Flower.

    `on_new_job` is told of a job that waits for a yes, once; it must not wait itself.
    """

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None] = lambda text: None,
        on_new_job: Callable[[SiteJob], None] = lambda job: None,
    ) -> None:
        self.settings = settings
        self.say = say
        self.on_new_job = on_new_job
        self.methods = allowed_methods(settings.methods)
        self.trail = Trail(settings.memory)
        self.approval = Approval(settings.memory)
        self._announced: set[str] = set()
        self._parties: dict[Facts, PartyData] = {}
        self._work: dict[str, Work] = {}
        self.desk = Desk()
        one_thread()

    def respond(self, data: bytes) -> bytes:
        """The envelope that goes back. Whatever goes wrong, the details stay in this site's own log."""
        request = None
        if data == WHO:
            return self._leave(None, self.settings.name.encode(), "", {"kind": "who"})
        try:
            request, content = unpack(data, Request, self.settings.largest)
            envelope, line = self._answer(request, content)
            told = contents_of(envelope)
            self._check_exit(request, told, len(envelope))
            return self._leave(request, envelope, line, told)
        except Waiting as waiting:
            envelope, line = _refused(str(waiting), "waiting"), f"waits: {waiting}"
        except Refusal as refusal:
            envelope, line = _refused(str(refusal)), f"refused: {refusal}"
        except TacitError as error:
            envelope, line = _refused("it could not do this; its own log says why"), f"failed: {error}"
        except (Exception, SystemExit) as error:  # no message may end this process
            log.error("The work failed.\n%s", safe_lines(traceback.format_exc(), 20_000))
            envelope = _refused(f"its work failed ({type(error).__name__}); its own log says where")
            line = f"failed: {type(error).__name__}: {error}"
        return self._leave(request, envelope, line, contents_of(envelope))

    def _leave(self, request: Request | None, message: bytes, line: str, told: Entry) -> bytes:
        """The message, once it is written down in the audit trail; without that, only that it could not be."""
        asked: Entry = {"run": "", "job": "", "asked": told["kind"] if told["kind"] == "who" else ""}
        if request is not None:
            asked = {"run": request.run, "job": job_of(request), "asked": request.kind}
            if request.stage:
                asked |= {"stage": request.stage, "round": request.round, "wave": request.wave}
        try:
            self.trail.append(message, {**asked, **told})
        except TacitError as error:
            self._log(f"nothing was sent: {error}")
            return _refused("it could not write down what would leave it, so nothing does; its own log says why")
        if line:
            self._log(line)
        return message

    def _check_exit(self, request: Request, told: Entry, size: int) -> None:
        """What the policy says about a message that is about to leave."""
        if told["kind"] not in TALK:
            rules.check_message(self.settings.policy, told, size, self.trail.counts(job_of(request)))

    def _log(self, line: str) -> None:
        """A line for the people here, with words from elsewhere in it. A terminal that is gone is no reason to stop."""
        try:
            self.say(safe(line, 2000))
        except Exception:
            log.warning("A line could not be shown.")

    def _answer(self, request: Request, content: bytes) -> tuple[bytes, str]:
        self._permit(request)
        if request.kind == "hello":
            return self._hello(request)
        if request.kind in SECURE:
            return self._secure(request, content)
        if self._worker(request).privacy.secure_aggregation:
            raise Refusal("the experiment has secure aggregation: nothing leaves it but masked")
        work = {"train": self._train, "judge": self._judge, "compare": self._compare}
        return work[request.kind](request, content)

    def _hello(self, request: Request) -> tuple[bytes, str]:
        experiment, _, own = self._look(request)
        shard = own.shard
        memory = self._kept(request, experiment)
        memory.go_back(request.step)
        answered = self._check_memory(memory, request.step)
        held = f"{len(shard.labeled)} labelled and {len(shard.unlabeled)} unlabelled images"
        line = f"run {request.run}: {experiment.method['name']}, this site is client {request.client} with {held}"
        return pack(hello_of(shard, request.client, answered)), line

    def _train(self, request: Request, content: bytes) -> tuple[bytes, str]:
        task = Task(request.client, payload.from_bytes(content, Limits(total=self.settings.largest)), request.group)
        reply = self._reply(request, task)
        data = sent(reply)
        names = ", ".join(f"{name} {size}" for name, size in content_of(reply).items())
        return data, f"{_moment(request)}: sent {names} ({size_text(len(data))} in all)"

    def _secure(self, request: Request, content: bytes) -> tuple[bytes, str]:
        """One step towards a sum of which the server sees nothing but the whole."""
        work = self._worker(request)
        if not work.privacy.secure_aggregation:
            raise Refusal("the experiment has no secure aggregation")

        def numbers(given: payload.Payload, asked: int, most: float) -> Ring:
            task = Task(request.client, given, request.group)
            reply, method = self._reply(request, task), self._stage(request).method
            return whole_numbers(method, task, reply, work.worker, work.privacy, asked, most)

        given = payload.from_bytes(content, Limits(total=self.settings.largest))
        reply = Reply(send=self.desk.answer(request, given, work.privacy, numbers), examples=0, client=request.client)
        data = sent(reply, request.kind)
        return data, f"{_moment(request)}: sent {SAID[request.kind]} ({size_text(len(data))})"

    def _stage(self, request: Request) -> Stage:
        stage = next((stage for stage in self._worker(request).stages if stage.name == request.stage), None)
        if stage is None:
            raise Refusal(f"the method has no stage '{request.stage}'")
        return stage

    def _reply(self, request: Request, task: Task) -> Reply:
        """The work of a round: train, keep, and write down what is kept."""
        stage, worker = self._stage(request), self._worker(request).worker
        round_info = RoundInfo(request.stage, request.round, request.rounds, request.step)
        if request.wave == 0:
            worker.memory.go_back(request.step)  # of this round or later: the server went back, and they are run again
            self._check_memory(worker.memory, request.step)
            worker.memory.forget(request.step)
        outcome = worker.run(stage, round_info, request.wave, task)
        if outcome.fault:
            raise Refusal(outcome.fault)
        Ledger(worker.memory).write(request.client, request.step)
        return outcome.reply

    def _judge(self, request: Request, content: bytes) -> tuple[bytes, str]:
        """Three numbers a class about a model on what this site keeps back; nothing is learned or remembered."""
        worker = self._worker(request).worker
        model = payload.weights_in(payload.from_bytes(content, Limits(total=self.settings.largest)), "model")
        kept = worker.validate(model, [request.client])
        reply = Reply(send={"tally": kept}, examples=float(kept[0].sum()), client=request.client)
        data = sent(reply, "judge")
        return data, f"judged the model by {kept[0].sum():g} images, sent how many of each class it named rightly"

    def _compare(self, request: Request, content: bytes) -> tuple[bytes, str]:
        """How many images of each class that this site keeps back are named rightly by which of some models."""
        worker = self._worker(request).worker
        given = payload.from_bytes(content, Limits(total=self.settings.largest))
        if not 1 <= len(given) <= MOST_COMPARED:
            raise Refusal(f"it compares up to {MOST_COMPARED} models, and was sent {len(given)}")
        found = worker.compare([payload.weights_in(given, name) for name in sorted(given)], [request.client])
        reply = Reply(send={"patterns": found}, examples=float(found.sum()), client=request.client)
        data = sent(reply, "compare")
        return data, f"compared {len(given)} models by {found.sum():g} images, sent on how many which of them is right"

    # --- What it is asked to do, looked at before it is done -----------------------------------------------

    def _look(self, request: Request) -> tuple[Experiment, type[Method], OwnShard]:
        if request.version != __version__:
            raise Refusal(
                f"it runs tacit {__version__}, the server {request.version}: install the same version on both sides"
            )
        if request.site != self.settings.name:
            raise Refusal(f"the server takes it for '{request.site}', but it is '{self.settings.name}'")
        experiment, method = experiment_from_wire(
            request.experiment, lambda name: find_allowed(name, request.method_sha256, self.methods)
        )
        rules.check_job(self.settings.policy, experiment, stages_of(experiment, method))
        shard = self._shard(request, experiment)
        rules.check_images(self.settings.policy, shard.shard.held)
        _check_frozen(request, experiment)
        return experiment, method, shard

    def _permit(self, request: Request) -> None:
        """Refuse a job that the people here denied, have not said yes to, or that has had its share."""
        job = job_of(request)
        found = self.approval.find(job)
        if found is None:
            experiment, method, _ = self._look(request)
            setup = site_setup(experiment, Facts(**request.facts.model_dump()), request.clients, ())
            found = new_job(request, experiment, stages_of(experiment, method), setup, self.settings.ask)
            self.approval.note(found)
        elif self.settings.ask and found.state == "not asked":  # from a time when nobody wanted to be asked
            found = dataclasses.replace(found, state="waiting")
            self.approval.note(found)
        try:
            permission(found, self.settings.ask)
        except Waiting:
            if job not in self._announced:
                self._announced.add(job)
                self.on_new_job(found)
            raise
        jobs = len(self.trail.jobs() | {job})
        so_far = self.trail.counts(job)
        rules.check_counts(self.settings.policy, so_far, jobs, request.kind, new_round=request.wave == 0)

    def _kept(self, request: Request, experiment: Experiment) -> ClientMemory:
        return ClientMemory(self.settings.memory / "kept" / request.run, experiment.keep)

    def _check_memory(self, memory: ClientMemory, step: int) -> int:
        """How many rounds were done when this site answered last; what it kept then must be there."""
        ledger = Ledger(memory)
        try:
            ledger.check(step)
            return ledger.read().rounds
        except TacitError as error:
            self._log(str(error))
            raise Refusal("what it kept in earlier rounds is missing or damaged; its own log says what to do") from None

    def _shard(self, request: Request, experiment: Experiment) -> OwnShard:
        party, placement = self._party(request), experiment.data.placement
        labeled = party.labels >= 0
        if placement == "server" and labeled.any():
            raise Refusal(
                "it holds labels, but the recipe has them at the server alone: join with --ignore-labels, or choose "
                "another data.placement"
            )
        if placement == "clients" and not labeled.any():
            raise Refusal("it holds no labels, but the recipe has labels at every site: use placement some-clients")
        kept_back = np.zeros_like(labeled)
        if experiment.data.validation:
            chance = validation_generator(experiment.seed, request.client)
            groups = None if party.known_groups is None else party.known_groups[labeled]
            kept_back[labeled] = keep_back(party.labels[labeled], groups, experiment.data.validation, chance)
        # As in a simulation: where every client has a few labels, those images count as unlabelled data, too.
        unlabeled = ~kept_back if placement == "clients" else ~labeled
        device = _device(experiment)

        def part(mask: np.ndarray) -> Labeled:
            return Labeled(
                torch.from_numpy(party.images[mask]).to(device), torch.from_numpy(party.labels[mask]).to(device)
            )

        learned = part(labeled & ~kept_back)
        repeated = len(learned) if placement == "clients" else 0
        return OwnShard(Shard(learned, part(unlabeled).images, repeated), part(kept_back))

    def _party(self, request: Request) -> PartyData:
        facts = Facts(**request.facts.model_dump())
        if facts not in self._parties:
            try:
                party = load_party(self.settings.data, facts)
            except TacitError as error:  # the text may name files: it stays here
                self._log(f"the data does not fit: {error}")
                raise Refusal(
                    "its data does not fit the federation's classes or images; its own log says why"
                ) from None
            party = party.without_labels() if self.settings.ignore_labels else party
            self._parties = {facts: self._without_small_classes(party, facts)}
        return self._parties[facts]

    def _without_small_classes(self, party: PartyData, facts: Facts) -> PartyData:
        """Without the labelled images of classes of which the policy says that they are too few."""
        kept, small = party.without_small_classes(self.settings.policy.min_images_per_class)
        if small:
            names = ", ".join(facts.classes[number] for number in small)
            self._log(f"left out by the policy (min_images_per_class), with all their labelled images: {names}")
        return kept

    def _worker(self, request: Request) -> "Work":
        about_the_moment = {"kind", "stage", "round", "rounds", "step", "wave", "group"}
        same = json.dumps(request.model_dump(exclude=about_the_moment))
        if same not in self._work:
            experiment, method, shard = self._look(request)
            setup = site_setup(
                experiment, Facts(**request.facts.model_dump()), request.clients, request.labeled_clients
            )
            worker = Worker(setup, shard, self._kept(request, experiment))
            self._work = {same: Work(stages_of(experiment, method), worker, experiment.privacy)}
        return self._work[same]


def _check_frozen(request: Request, experiment: Experiment) -> None:
    """What net.train freezes is not sent: this site must have the same."""
    net = experiment.net
    try:
        if net.train != "all":
            check_available(net.name, net.weights, "")
        own = site_setup(experiment, Facts(**request.facts.model_dump()), request.clients, ()).frozen_sha256
    except TacitError as error:
        raise Refusal(f"it cannot make the part of the net that is not sent: {safe(error, 400)}") from None
    if own != request.frozen_sha256:
        raise Refusal(
            f"the part of the net that is not sent (net.train) is not the server's: it has the digest {own[:16]}…, the "
            f"server's {request.frozen_sha256[:16]}…. Install the same weights (and torch) on both sides"
        )


def site_setup(experiment: Experiment, facts: Facts, clients: int, labeled_clients: tuple[int, ...]) -> Setup:
    """What everybody knows before the first round, the same on the server and at every site."""
    return setup_of(experiment, facts, clients, labeled_clients, _device(experiment))


def _device(experiment: Experiment) -> torch.device:
    """Each site has its own machine: the recipe may say cpu, anything else means the best that is there."""
    return pick_device("cpu" if experiment.device == "cpu" else "auto")


def _refused(why: str, kind: Literal["refused", "waiting"] = "refused") -> bytes:
    return pack(Response(kind=kind, why=safe(why, LARGEST_WHY)))


def hello_of(shard: Shard, client: int, answered: int = 0) -> Response:
    """What a site tells of itself before a run begins or goes on: whether it holds labels, how many images, and how
    many rounds of this run were done when it answered last."""
    images = len(shard.labeled) + len(shard.unlabeled)
    return Response(kind="hello", client=client, labeled=len(shard.labeled) > 0, images=images, answered=answered)


def _moment(request: Request) -> str:
    return f"{request.stage} round {request.round + 1}/{request.rounds}"


def sent(reply: Reply, kind: str = "train") -> bytes:
    """The very bytes that leave a site for a reply."""
    response = Response.model_validate(
        {
            "kind": kind,
            "client": reply.client,
            "group": reply.group,
            "examples": float(reply.examples),
            "metrics": {name: float(value) for name, value in reply.metrics.items()},
        }
    )
    return pack(response, payload.to_bytes(reply.send))


def content_of(reply: Reply) -> dict[str, str]:
    """What is in a reply, by name, in bytes."""
    return {name: size_text(payload.nbytes({name: value})) for name, value in reply.send.items()}
