"""The loop: stages, rounds, and in each round one straight line from the server's state to its next one."""

import logging
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

import tacit
from tacit.backends import Backend, LocalBackend, Outcome, PoolBackend
from tacit.backends.base import one_thread
from tacit.backends.pool import default_workers
from tacit.contract import kinds
from tacit.contract.kinds import Party
from tacit.contract.method import Method, Reply, Stage, Task
from tacit.contract.parties import Hub, Moment, Setup, Workbench
from tacit.core import payload, seeds
from tacit.core.errors import TacitError
from tacit.core.machine import change_of_type, cpu_type
from tacit.core.payload import Payload, Weights
from tacit.core.settings import Experiment
from tacit.core.text import safe
from tacit.data.dataset import Dataset
from tacit.data.federation import Federation, load_dataset, make_setup
from tacit.data.split import Split, load_split, make_split, warnings
from tacit.evaluation.scores import accuracies, score, sum_up
from tacit.inference.handover import handover
from tacit.pieces.train import predict
from tacit.runs.checks import check_run, check_settings
from tacit.runs.folder import OpenRun, Run, check_same, saved_split
from tacit.runs.memory import Kept

log = logging.getLogger("tacit")

LARGEST_COUNT = 2.0**31  # images of a client of which nothing is known
MOST_SUSPECTS = 32  # replies that are left out, one at a time, to find the one that makes a merge fail


class Watcher(Protocol):
    """Someone who looks on: a progress bar, a log, a test. It is told what happens and changes nothing."""

    def start(self, plan: "Plan", done: int) -> None: ...

    def client_done(self, moment: Moment, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class Silence:
    """The watcher that says nothing."""

    def start(self, plan: "Plan", done: int) -> None: ...

    def client_done(self, moment: Moment, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


LONGEST_REASON = 500  # characters of why a reply was refused


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
    """The stages of an experiment: what its method wants before, then the method itself (of this class, if given)."""
    method = experiment.build_method(kind)
    stages = (*method.before(), Stage("main", method, experiment.rounds))
    names = [stage.name for stage in stages]
    if len(set(names)) < len(names):
        raise TacitError(f"{type(method).__name__} has two stages of one name: {', '.join(names)}.")
    for stage in stages:
        for declared in stage.method.client_sends.values():
            kinds.parse(declared)  # what cannot be checked is told before any work
    return stages


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
    held = tuple(len(part.labeled) + len(part.unlabeled) for part in split.clients)
    return Plan(experiment, stages, dataset, split, setup, tuple(warnings(split, dataset)), held)


def run_experiment(experiment: Experiment, out: Path, *, resume: bool = False, watcher: Watcher | None = None) -> Run:
    """Run an experiment into a folder, or go on with the run that is there. Returns the finished run."""
    watcher = watcher or Silence()
    check_run(experiment, out)
    if resume:
        check_same(out, experiment)  # before any data is loaded
    return run_plan(prepare(experiment, saved_split(out) if resume else None), out, _backend, resume, watcher)


def run_plan(
    plan: Plan, out: Path, make_backend: Callable[[Plan, OpenRun], Backend], resume: bool, watcher: Watcher
) -> Run:
    """Run what was prepared, on the backend that is made for it, into a folder or on with the run that is there."""
    if not (out / "summary.json").is_file():  # a finished run is only read
        for stage in plan.stages:
            stage.method.check_installed()
    folder = OpenRun(out, plan.experiment, resume)
    try:
        folder.recover(plan.split)
        if folder.finished:
            return Run(out)
        if other := change_of_type(folder.records[-1].get("cpu", "") if folder.records else ""):
            plan = replace(plan, warnings=(*plan.warnings, other))
        threads = one_thread()
        backend = make_backend(plan, folder)
        try:
            watcher.start(replace(plan, warnings=(*folder.notes, *plan.warnings)), folder.done)
            summary = Engine(plan, folder, backend, watcher).run()
        finally:
            backend.close()
            torch.set_num_threads(threads)
        watcher.finish(summary)
        return Run(out)
    finally:
        folder.close()


def _backend(plan: Plan, folder: OpenRun) -> Backend:
    settings = plan.experiment.backend
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    workers = settings.workers or default_workers()
    if settings.name == "ray":
        from tacit.backends.ray import RayBackend  # an extra of its own

        return RayBackend(plan.experiment, federation, folder.kept_folder)
    if settings.name == "pool" and workers > 1 and plan.setup.device.type != "mps":
        return PoolBackend(plan.experiment, federation, folder.split_path, folder.kept_folder, workers)
    return LocalBackend(plan.setup, federation, Kept(folder.kept_folder, plan.experiment.keep))


class Engine:
    """Drives one run. There is nothing here that knows a method."""

    def __init__(self, plan: Plan, folder: OpenRun, backend: Backend, watcher: Watcher) -> None:
        self.plan = plan
        self.folder = folder
        self.backend = backend
        self.watcher = watcher
        federation = Federation(plan.dataset, plan.split, plan.setup.device)
        self.server_shard = federation.server_shard()
        self.test_labels = federation.test().labels
        self.bench = Workbench(plan.setup)

    def run(self) -> dict[str, Any]:
        started = time.perf_counter()
        past: dict[str, Payload] = {}
        first = 0  # the step at which the stage begins
        state: Payload = {}
        for number, stage in enumerate(self.plan.stages):
            end = first + stage.rounds
            finished = self.folder.stage_state(number)
            state = self._run_stage(stage, first, past) if finished is None else finished
            if finished is None and number < len(self.plan.stages) - 1:
                self.folder.finish_stage(number, state)
            past[stage.name] = state
            first = end
        last = self.plan.stages[-1]
        end_of_run = Moment(last.name, last.rounds - 1, last.rounds, first - 1)
        weights = last.method.server_answer(state, self._hub(end_of_run))
        summary = self._summary(time.perf_counter() - started)
        tested = weights is not None and len(self.test_labels) > 0
        probs = self.backend.predict_test(weights) if weights is not None and tested else None
        self.folder.finish(weights, summary, handover(self.plan, summary, self.folder.records, probs, self.test_labels))
        return summary

    def _run_stage(self, stage: Stage, first: int, past: Mapping[str, Payload]) -> Payload:
        done = self.folder.done
        if done > first + stage.rounds:  # and yet its state is not there
            raise TacitError(
                f"The state of the finished stage '{stage.name}' is missing in {self.folder.folder / 'checkpoint'}. "
                "Put it back from a copy, or start anew in another folder with --out."
            )
        if done > first:
            state = self.folder.state()
        else:
            state = stage.method.server_start(self._hub(Moment(stage.name, -1, stage.rounds, first)), past)
        for number in range(max(done - first, 0), stage.rounds):
            state = self._run_round(stage, Moment(stage.name, number, stage.rounds, first + number), state)
        return state

    def _hub(self, moment: Moment) -> Hub:
        self.bench.clear()
        return Hub(self.plan.setup, self.server_shard, moment, self.bench)

    def _run_round(self, stage: Stage, moment: Moment, state: Payload) -> Payload:
        """One round, a straight line: send, train, check, merge, evaluate, record."""
        clock = Clock()
        hub = self._hub(moment)
        tasks = stage.method.server_send(state, hub)
        reached = [task for task in tasks if not self._strikes(moment, task, "dropout")]
        clock.lap("send")
        outcomes = self.backend.run(
            stage, moment, reached, lambda done: self.watcher.client_done(moment, done, len(reached))
        )
        clock.lap("train")
        usable, refused = self._usable(stage, moment, state, reached, outcomes)
        needed = self.plan.experiment.participation.quorum
        needed = min(needed, len(tasks))  # a stage may ask fewer clients than the quorum
        skipped = f"{len(usable)} usable replies, {needed} needed: the model stays" if len(usable) < needed else ""
        before = state
        if not skipped:
            merge = self._merge(stage, moment, state, usable, needed, hub)
            state, usable, hub, skipped = merge.state, merge.used, merge.hub, merge.skipped
            refused += merge.refused
        clock.lap("merge")
        scores = self._evaluate(stage, moment, state, hub) if self._is_evaluated(moment) else {}
        if state is not before and scores and scores["loss"] is None:
            skipped, state = "the merged model's loss is not a number: the model stays", before
            scores = self._evaluate(stage, moment, state, hub)
        if self.plan.experiment.evaluate_clients and scores:
            scores |= self._evaluate_clients([outcome.reply for outcome in usable])
        clock.lap("evaluate")
        record = {
            "stage": moment.stage,
            "round": moment.round,
            "step": moment.step,
            **scores,
            **sum_up([outcome.audit for outcome in usable if outcome.audit is not None]),
            "asked": [task.client for task in tasks],
            "answered": [outcome.reply.client for outcome in usable],
            "refused": refused,
            "skipped": skipped,
            "bytes_down": sum(payload.nbytes(task.send) for task in reached),
            "bytes_up": sum(payload.nbytes(outcome.reply.send) for outcome in outcomes),
            "kept_bytes": self.backend.kept_bytes(),
            "client_metrics": _by_client(usable),
            "cpu": cpu_type(),
            **hub.notes,
        }
        computing = _together([outcome.cpu for outcome in outcomes], clock.cpu["send"] + clock.cpu["merge"])
        timed = {**record, "seconds": clock.total(), "cpu_seconds": computing, "phases": clock.laps}
        self.folder.finish_round(moment.step, timed, state, hub.pictures)
        self.watcher.round_done(timed)
        return state

    def _strikes(self, moment: Moment, task: Task, fault: str) -> bool:
        """Whether this fault befalls this client now: seeded, so that a resumed run has the same bad luck."""
        chance = getattr(self.plan.experiment.faults, fault)
        name = (self.plan.setup.seed, moment.stage, moment.round, f"client-{task.client}/{task.group}", fault)
        return chance > 0 and float(torch.rand((), generator=seeds.generator(*name))) < chance

    def _usable(
        self, stage: Stage, moment: Moment, state: Payload, tasks: Sequence[Task], outcomes: Sequence[Outcome]
    ) -> tuple[list[Outcome], list[dict[str, Any]]]:
        """The replies that may reach the mean, and why the others may not."""
        usable, refused = [], []
        for task, outcome in zip(tasks, outcomes, strict=True):
            why = outcome.fault or ("came too late" if self._strikes(moment, task, "straggler") else "")
            party = self._party(stage, task.client)
            why = why or flaw(
                stage.method.client_sends, task, outcome.reply, state, len(self.plan.setup.classes), party
            )
            why = safe(why, LONGEST_REASON)  # it may quote names of a client's own making
            if why:
                refused.append({"client": task.client, "why": why})
            else:
                usable.append(outcome)
        return usable, refused

    def _party(self, stage: Stage, client: int) -> Party:
        """What is known of a client before it answers: in a simulation all of it, of a real site what it told."""
        registered, setup = self.plan.registered, self.plan.setup
        most = stage.method.most_examples(registered[client], max(registered)) if registered else LARGEST_COUNT
        labeled, part = client in setup.labeled_clients, self.plan.split.clients[client]
        if len(part.labeled) or len(part.unlabeled):
            return Party(most, labeled, len(part.unlabeled) > 0)
        # A site whose labelled images may be all that it holds; with labels everywhere they count as both kinds.
        both = self.plan.experiment.data.placement == "clients"
        return Party(most, labeled, True if both or not labeled else None)

    def _merge(
        self, stage: Stage, moment: Moment, state: Payload, usable: list[Outcome], needed: int, hub: Hub
    ) -> "Merge":
        """The new state; where the merge fails with one reply and succeeds without it, that one is refused.

        Where no single reply is to blame the model stays. An exception then ends a simulation, whose author wants to
        see it; at real sites it is logged, all replies are refused, and the run goes on.
        """
        notes, pictures = dict(hub.notes), dict(hub.pictures)  # of `server_send`
        merged, why, error = self._try_merge(stage, state, usable, hub)
        if not why:
            return Merge(merged, usable, hub)
        for suspect in usable[:MOST_SUSPECTS] if len(usable) > max(needed, 1) else ():
            again = self._hub(moment)
            again.notes, again.pictures = dict(notes), dict(pictures)
            rest = [outcome for outcome in usable if outcome is not suspect]
            merged, still, _ = self._try_merge(stage, state, rest, again)
            if not still:
                return Merge(
                    merged, rest, again, [{"client": suspect.reply.client, "why": f"{why}, but not without it"}]
                )
        hub.notes, hub.pictures = notes, pictures
        if error is None:
            return Merge(state, usable, hub, skipped=f"{why}: the model stays")
        if self.plan.experiment.backend.name != "flower":
            raise error
        log.error("Round %d of stage '%s': %s", moment.round, moment.stage, why, exc_info=error)
        everybody = [{"client": outcome.reply.client, "why": why} for outcome in usable]
        return Merge(state, [], hub, everybody, f"{why}: the model stays")

    def _try_merge(
        self, stage: Stage, state: Payload, outcomes: Sequence[Outcome], hub: Hub
    ) -> tuple[Payload, str, Exception | None]:
        """The merged state; or why it cannot be used, and the exception if it was one."""
        self.bench.clear()
        try:
            merged = stage.method.server_merge(state, [outcome.reply for outcome in outcomes], hub)
            payload.check(merged)
            if where := payload.first_not_finite(merged):
                return merged, f"the server's '{where}' holds NaN or infinity after the merge", None
            self.bench.clear()
            weights = stage.method.server_answer(merged, hub)
            if weights is not None and not torch.isfinite(self._look(weights)).all():
                return merged, "the model predicts NaN after the merge", None
        except (TacitError, OSError, MemoryError, torch.OutOfMemoryError):
            raise  # the server's own trouble, and no reply's
        except Exception as error:
            return state, f"the merge failed: {type(error).__name__}: {safe(error)}", error
        return merged, "", None

    def _look(self, weights: Weights) -> torch.Tensor:
        """What a model makes of two images of noise: cheap, and NaN if no number comes out at the end."""
        setup = self.plan.setup
        shape = (2, setup.channels, setup.size, setup.size)
        noise = torch.randint(256, shape, dtype=torch.uint8, generator=seeds.generator(setup.seed, "noise"))
        return predict(self.bench.take(weights), noise.to(setup.device), setup.views.plain)

    def _is_evaluated(self, moment: Moment) -> bool:
        last = moment.round == moment.rounds - 1
        return last or (moment.round + 1) % self.plan.experiment.evaluate_every == 0

    def _evaluate(self, stage: Stage, moment: Moment, state: Payload, hub: Hub) -> dict[str, Any]:
        self.bench.clear()
        weights = stage.method.server_answer(state, hub)
        if weights is None or not len(self.test_labels):
            return {}
        return score(self.backend.predict_test(weights), self.test_labels)

    def _evaluate_clients(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """How good each client's model was before the merge, in the order of `answered`. None: it sent no model."""
        local: list[dict[str, Any]] = []
        for reply in replies:
            is_model = isinstance(reply.send.get("model"), Mapping)
            probs = self.backend.predict_test(reply.weights("model")) if is_model else None
            local.append(score(probs, self.test_labels) if probs is not None else {})
        return {f"clients_{name}": [scores.get(name) for scores in local] for name in ("accuracy", "per_class")}

    def _summary(self, seconds: float) -> dict[str, Any]:
        experiment = self.plan.experiment
        records = self.folder.records
        main = [r for r in records if r["stage"] == "main" and r.get("accuracy") is not None]
        return {
            "method": experiment.method["name"],
            "preset": experiment.method["preset"],
            "placement": experiment.data.placement,
            "reveal": experiment.data.reveal,
            "data": self.plan.dataset.name,
            "data_note": self.plan.dataset.note,
            "seed": experiment.seed,
            "reporting": experiment.reporting,
            **report(main, experiment.reporting),
            "rounds": len(records),
            "parameters": sum(p.numel() for p in self.plan.setup.build().parameters()),
            "bytes_up": sum(r["bytes_up"] for r in records),
            "bytes_down": sum(r["bytes_down"] for r in records),
            "bytes_by_stage": {
                stage.name: sum(r["bytes_up"] + r["bytes_down"] for r in records if r["stage"] == stage.name)
                for stage in self.plan.stages
            },
            "kept_bytes": max([r.get("kept_bytes", 0) for r in records], default=0),  # the most at any time
            "seconds": sum(r["seconds"] for r in records),
            "seconds_this_session": seconds,
            "warnings": list(self.plan.warnings),
            "paper": experiment.paper.model_dump(exclude_none=True),
            "device": str(self.plan.setup.device),
            "cpu": list(dict.fromkeys(r["cpu"] for r in records if "cpu" in r)),  # of the server's process
            "versions": {
                "tacit": tacit.__version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }


REPORTED = ("accuracy", "auc", "loss", "macro_f1", "balanced_accuracy", "ece", "pseudo_accuracy", "kept_ratio")


def report(records: Sequence[Mapping[str, Any]], rule: str) -> dict[str, Any]:
    """The result of a run by its reporting rule: the best round, the last one, or the last ten with their spread.

    >>> rounds = [{"round": 0, "accuracy": 0.5}, {"round": 1, "accuracy": 0.8}, {"round": 2, "accuracy": 0.7}]
    >>> report(rounds, "best")["accuracy"], report(rounds, "last")["accuracy"]
    (0.8, 0.7)
    >>> round(report(rounds, "last-10")["accuracy"], 4), round(report(rounds, "last-10")["accuracy_std"], 4)
    (0.6667, 0.1247)
    """
    if not records:
        return {"accuracy": None}
    if rule == "best":
        chosen = [max(records, key=lambda record: record["accuracy"])]
    else:
        chosen = list(records[-10:] if rule == "last-10" else records[-1:])
    result: dict[str, Any] = {}
    for name in REPORTED:
        values = [record[name] for record in chosen if record.get(name) is not None]
        if values:
            result[name] = sum(values) / len(values)
            if rule == "last-10":
                result[f"{name}_std"] = float(np.std(values))
    result["reported_rounds"] = [record["round"] for record in chosen]
    return result


@dataclass(frozen=True)
class Merge:
    """What came of a merge: the next state, whose replies are in it, and who was refused for making it fail."""

    state: Payload
    used: list[Outcome]
    hub: Hub
    refused: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""


def flaw(
    expected: Mapping[str, str], task: Task, reply: Reply, state: Payload, classes: int, party: Party | None = None
) -> str:
    """Why a reply must not reach the mean; '' if it may."""
    party = party or Party()
    known = {name.removesuffix("?") for name in expected}
    for name in reply.send:
        if name not in known:
            return f"'{safe(name)}' was not expected"
    for name, declared in expected.items():
        bare, kind = name.removesuffix("?"), kinds.parse(declared)
        due = None if name != bare else kinds.is_due(kind, party)
        if bare not in reply.send:
            if due:
                return f"'{bare}' is missing"
            continue
        if due is False:
            return f"'{bare}' was not expected of a client without {kind.due} images"
        like = task.send.get(bare, state.get(bare))
        if why := kinds.invalid_reason(kind, bare, reply.send[bare], like, party, classes):
            return why
    if not (math.isfinite(reply.examples) and reply.examples >= 0):
        return f"its number of examples is {reply.examples}"
    if reply.examples > party.most:
        return f"its number of examples is {reply.examples:g}, more than the {party.most:g} that it can have"
    return ""


def _by_client(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    """Metrics and the audit's accuracies by name, then by client; what is not finite has no place in JSON.

    A client that had several tasks (one a group) tells their mean.

    >>> told = [(3, 1.0), (3, 2.0), (4, math.nan), (5, math.inf), (5, -math.inf), (6, 1e308), (6, 1e308)]
    >>> replies = [Reply(send={}, examples=1, metrics={"loss": loss}, client=client) for client, loss in told]
    >>> _by_client([Outcome(reply, None, 0.0) for reply in replies])
    {'loss': {'3': 1.5, '4': None, '5': None, '6': None}}
    """
    told: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        for name, value in {**outcome.reply.metrics, **accuracies(outcome.audit or {})}.items():
            told.setdefault(name, {}).setdefault(str(outcome.reply.client), []).append(float(value))
    means = {name: {who: sum(all_) / len(all_) for who, all_ in each.items()} for name, each in told.items()}
    return {name: {who: x if math.isfinite(x) else None for who, x in each.items()} for name, each in means.items()}


def _together(clients: Sequence[float | None], server: float) -> float | None:
    """CPU seconds of all parties; None where somebody's are not known.

    >>> _together([1.0, 2.0], 0.5), _together([1.0, None], 0.5)
    (3.5, None)
    """
    known = [seconds for seconds in clients if seconds is not None]
    return round(sum(known) + server, 4) if len(known) == len(clients) else None


class Clock:
    """Seconds by phase, and those in which this process was computing."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._last = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> None:
        now = time.perf_counter(), time.process_time()
        self.laps[name], self.cpu[name] = (round(new - old, 4) for new, old in zip(now, self._last, strict=True))
        self._last = now

    def total(self) -> float:
        return round(sum(self.laps.values()), 4)
