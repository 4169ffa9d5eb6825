"""The loop: stages, rounds, and in each round one straight line from the server's state to its next one."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tacit.backends import Backend, Outcome
from tacit.backends.attack import attacking
from tacit.contract.bank import Banks
from tacit.contract.kinds import Registration
from tacit.contract.method import Reply, Stage, Task
from tacit.contract.parties import Hub, NetPool, RoundInfo
from tacit.core import payload, seeds
from tacit.core.errors import TacitError
from tacit.core.machine import cpu_type
from tacit.core.payload import Payload, Weights
from tacit.core.text import safe
from tacit.data.federation import Federation
from tacit.engine import aside, guard
from tacit.engine.bounds import bounded, check_defended
from tacit.engine.handover import handover
from tacit.engine.private import BudgetSpent, PrivateRound, declared, needs_secret, private_summary
from tacit.engine.secure import Heard, Unseeing, add_up_here, heard_of, most_examples, rule_for, worth_telling
from tacit.engine.summary import by_client, by_epoch, cpu_seconds_of, run_summary
from tacit.engine.validation import refusal_reason
from tacit.evaluation.scores import score, sum_up, validation_figures
from tacit.inference.membership import saved_audit
from tacit.pieces.train import predict
from tacit.runs.plan import Plan
from tacit.runs.watchers import Watcher
from tacit.runs.writer import OpenRun

log = logging.getLogger("tacit")

MOST_SUSPECTS = 32  # replies that are left out, one at a time, to find the one that makes a merge fail


LONGEST_REASON = 500  # characters of why a reply was refused


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
        self.net_pool = NetPool(plan.setup)
        self.banks = Banks(plan.setup.features)
        self.twin: Weights | None = None  # what the labels alone gave, where [guard] wants it
        self.ended = ""  # why the run ended before its last round: the privacy budget is spent
        self.told: set[str | tuple[str, str]] = set()  # stages of which it was told that the server's optimiser does
        # nothing, and other things that are told once

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
            first = end
            if stage.apart:
                self.twin = self._answer(stage, state, self._hub(RoundInfo(stage.name, -1, stage.rounds, first)))
            else:
                past[stage.name] = aside.methods_part(state)
        last = self.plan.stages[-1]
        end_of_run = RoundInfo(last.name, last.rounds - 1, last.rounds, first - 1)
        found = guard.verdict(self.folder.records)
        weights = self._candidates(last, state, self._hub(end_of_run)).get(found.get("ships", guard.METHOD))
        tested = weights is not None and len(self.test_labels) > 0
        probs = self.backend.predict_test(weights) if weights is not None and tested else None
        shipped = {"guard": found, **(score(probs, self.test_labels) if probs is not None else {})} if found else {}
        summary = run_summary(self.plan, self.folder.records, time.perf_counter() - started, shipped)
        summary |= private_summary(self.plan.experiment.privacy, self.folder.records, self.ended)
        if weights is not None:
            weights = {**self.plan.setup.frozen, **weights}  # a model for others is whole
        audit = (
            None if weights is None else saved_audit(self.folder.folder, weights)
        )  # of the same run, finished before
        records = self.folder.records
        self.folder.finish(weights, summary, handover(self.plan, summary, records, probs, self.test_labels, audit))
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
            state = stage.method.server_start(self._hub(RoundInfo(stage.name, -1, stage.rounds, first)), past)
            aside.check_names(state)
            state = aside.with_secret(state) if needs_secret(self.plan.setup) else state
        for number in range(max(done - first, 0), stage.rounds if not self.ended else 0):
            try:
                state = self._run_round(stage, RoundInfo(stage.name, number, stage.rounds, first + number), state)
            except BudgetSpent as spent:
                self.ended = f"{spent}; it ended before round {number + 1} of {stage.rounds} of stage '{stage.name}'"
                log.warning("%s.", self.ended)
                break
        return state

    def _hub(self, round_info: RoundInfo, state: Payload | None = None) -> Hub:
        self.net_pool.clear()
        memory, secret = aside.memory_in(state or {}), aside.secret_in(state or {})
        shard = self.banks.of("server", lambda: self.server_shard)
        return Hub(self.plan.setup, shard, round_info, self.net_pool, memory, secret)

    def _run_round(self, stage: Stage, round_info: RoundInfo, state: Payload) -> Payload:
        """One round, a straight line: send, train, check, merge, evaluate, record."""
        clock = Clock()
        hub = self._hub(round_info, state)
        tasks = stage.method.server_send(aside.methods_part(state), hub)
        past = self.folder.records if self.plan.setup.privacy.on else ()  # read from disk
        private = PrivateRound.of(self.plan.setup, stage.method, hub, tasks, past)
        tasks = private.shared_out(tasks)
        reached = [task for task in tasks if not self._strikes(round_info, task, "dropout")]
        clock.lap("send")
        heard = self._hear(stage, round_info, state, tasks, reached)
        clock.lap("train")
        self._tell(stage, worth_telling(heard.figures, self.plan.experiment.privacy))
        bounds = bounded(self.plan.experiment.robust, stage.method, state, reached, heard.usable)
        usable, refused = bounds.used, heard.refused + bounds.refused
        needed = self.plan.experiment.participation.quorum
        needed = min(needed, len(tasks))  # a stage may ask fewer clients than the quorum
        count = len(_answered(usable))
        skipped = heard.skipped or (
            f"{count} usable replies, {needed} needed: the model stays" if count < needed else ""
        )
        before = state
        if not skipped:
            handed = private.handed(round_info, state, reached, usable, hub.secret)
            merge = self._merge(stage, round_info, state, handed, private.needed(needed), hub)
            state, hub, skipped, refused = merge.state, merge.hub, merge.skipped, refused + merge.refused
            usable = private.answered(usable, merge.used)
        if state is not before:
            state = self._taken_in(stage, state, merge.used, hub)
        clock.lap("merge")
        scores = self._evaluate(stage, round_info, state, hub) if self._is_evaluated(round_info) else {}
        if state is not before and "loss" in scores and scores["loss"] is None:
            skipped, state = "the merged model's loss is not a number: the model stays", before
            scores = self._evaluate(stage, round_info, state, hub)
        state = self._with_best(stage, state, hub, scores)
        scores |= self._compare(stage, round_info, state, hub)
        if self.plan.experiment.evaluate_clients and scores:
            scores |= self._evaluate_clients([outcome.reply for outcome in usable])
        state = aside.with_norms(state, bounds.norms, self.plan.experiment.robust.norm_rounds)
        clock.lap("evaluate")
        record = {
            "stage": round_info.stage,
            "round": round_info.round,
            "step": round_info.step,
            **scores,
            **sum_up([outcome.audit for outcome in usable if outcome.audit is not None]),
            **by_epoch(usable),
            "asked": [task.client for task in tasks],
            "answered": _answered(usable),
            "refused": refused,
            **bounds.record,
            **attacking(self.plan.setup, [outcome.reply.client for outcome in usable]),
            "skipped": skipped,
            "bytes_down": sum(payload.nbytes(task.send) for task in reached),
            "bytes_up": heard.bytes_up,
            "memory_bytes": self.backend.memory_bytes(),
            "client_metrics": by_client([outcome for outcome in usable if not outcome.clients]),
            **heard.figures,
            "cpu": cpu_type(),
            **private.record,
            **hub.notes,
        }
        computing = cpu_seconds_of(heard.cpu, clock.cpu["send"] + clock.cpu["merge"])
        timed = {**record, "seconds": clock.total(), "cpu_seconds": computing, "phases": clock.laps}
        self.folder.finish_round(round_info.step, timed, state, hub.pictures)
        self.watcher.round_done(timed)
        return state

    def _hear(
        self, stage: Stage, round_info: RoundInfo, state: Payload, tasks: Sequence[Task], reached: Sequence[Task]
    ) -> Heard:
        """Let clients train: what of their replies may reach the merge; with secure aggregation only their sum."""

        def done(count: int) -> None:
            self.watcher.client_done(round_info, count, len(reached))

        if self.plan.experiment.privacy.secure_aggregation and tasks:
            late = {task.client for task in reached if self._strikes(round_info, task, "straggler")}
            rule = rule_for(self.plan, stage, tasks)
            if isinstance(self.backend, Unseeing):
                least = self.plan.experiment.privacy.least(len(tasks))
                return heard_of(self.backend.add_up(stage, round_info, reached, rule, least, late, done), rule)
            outcomes = self.backend.run(stage, round_info, reached, done)
            usable, refused = self._usable(stage, round_info, state, reached, outcomes)
            return heard_of(add_up_here(self.plan, rule, len(tasks), outcomes, usable, refused), rule)
        outcomes = self.backend.run(stage, round_info, reached, done)
        usable, refused = self._usable(stage, round_info, state, reached, outcomes)
        up = sum(payload.nbytes(outcome.reply.send) for outcome in outcomes)
        return Heard(usable, refused, up, [outcome.cpu for outcome in outcomes])

    def _tell(self, stage: Stage, lines: Sequence[str]) -> None:
        """What is worth a warning, once in a stage."""
        for line in lines:
            if (mark := (stage.name, line.rpartition(":")[2])) not in self.told:  # the figures in it may differ
                self.told.add(mark)
                log.warning("Stage '%s': %s.", stage.name, line)

    def _strikes(self, round_info: RoundInfo, task: Task, fault: str) -> bool:
        """Whether this fault befalls this client now: seeded, so that a resumed run has the same bad luck."""
        chance = getattr(self.plan.experiment.faults, fault)
        name = (self.plan.setup.seed, round_info.stage, round_info.round, f"client-{task.client}/{task.group}", fault)
        return chance > 0 and float(torch.rand((), generator=seeds.generator(*name))) < chance

    def _usable(
        self, stage: Stage, round_info: RoundInfo, state: Payload, tasks: Sequence[Task], outcomes: Sequence[Outcome]
    ) -> tuple[list[Outcome], list[dict[str, Any]]]:
        """The replies that may reach the mean, and why the others may not."""
        usable, refused = [], []
        for task, outcome in zip(tasks, outcomes, strict=True):
            why = outcome.fault or ("came too late" if self._strikes(round_info, task, "straggler") else "")
            party = self._party(stage, task.client)
            why = why or refusal_reason(
                declared(self.plan.setup, stage.method),
                task,
                outcome.reply,
                state,
                len(self.plan.setup.classes),
                party,
            )
            why = safe(why, LONGEST_REASON)  # it may quote names of a client's own making
            if why:
                refused.append({"client": task.client, "why": why})
            else:
                usable.append(outcome)
        return usable, refused

    def _party(self, stage: Stage, client: int) -> Registration:
        """What is known of a client before it answers: in a simulation all of it, of a real site what it told."""
        setup, most = self.plan.setup, most_examples(self.plan, stage, client)
        labeled, part = client in setup.labeled_clients, self.plan.split.clients[client]
        if len(part.labeled) or len(part.unlabeled):
            return Registration(most, labeled, len(part.unlabeled) > 0)
        # A site whose labelled images may be all that it holds; with labels everywhere they count as both kinds.
        both = self.plan.experiment.data.placement == "clients"
        return Registration(most, labeled, True if both or not labeled else None)

    def _merge(
        self, stage: Stage, round_info: RoundInfo, state: Payload, usable: list[Outcome], needed: int, hub: Hub
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
            again = self._hub(round_info, state)
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
        log.error("Round %d of stage '%s': %s", round_info.round, round_info.stage, why, exc_info=error)
        everybody = [{"client": outcome.reply.client, "why": why} for outcome in usable]
        return Merge(state, [], hub, everybody, f"{why}: the model stays")

    def _try_merge(
        self, stage: Stage, state: Payload, outcomes: Sequence[Outcome], hub: Hub
    ) -> tuple[Payload, str, Exception | None]:
        """The merged state; or why it cannot be used, and the exception if it was one."""
        self.net_pool.clear()
        own = aside.methods_part(state)
        try:
            merged = stage.method.server_merge(own, [outcome.reply for outcome in outcomes], hub)
            payload.check(merged)
            aside.check_names(merged)
            answered = merged
            merged = state if merged is own else aside.with_memory(merged, state, hub.next_memory)
            if where := payload.first_not_finite(merged):
                return merged, f"the server's '{where}' holds NaN or infinity after the merge", None
            self.net_pool.clear()
            weights = stage.method.server_answer(answered, hub)
            if weights is not None and not torch.isfinite(self._look(weights)).all():
                return merged, "the model predicts NaN after the merge", None
        except (TacitError, OSError, MemoryError, torch.OutOfMemoryError):
            raise  # the server's own trouble, and no reply's
        except Exception as error:
            return state, f"the merge failed: {type(error).__name__}: {safe(error)}", error
        return merged, "", None

    def _taken_in(self, stage: Stage, state: Payload, used: Sequence[Outcome], hub: Hub) -> Payload:
        """A merged state with its answer added to those of earlier rounds, where an average of them is wanted."""
        settings = self.plan.experiment.server
        learned = any(outcome.reply.examples > 0 for outcome in used)
        if learned and not hub.next_memory and stage.method.client_sends:
            check_defended(self.plan.experiment.robust, stage)
        if learned and not hub.next_memory and not settings.takes_the_mean and stage.name not in self.told:
            self.told.add(stage.name)
            log.warning(
                "Stage '%s' makes its model without hub.mean_model, so that server.name = '%s' is without effect. In a "
                "method of your own, write hub.mean_model(old, replies) for mean_model(replies).",
                stage.name,
                settings.name,
            )
        if settings.answer == "last":
            return state
        return aside.with_answer(settings, state, stage.method.server_answer(aside.methods_part(state), hub))

    def _look(self, weights: Weights) -> torch.Tensor:
        """What a model makes of two images of noise: cheap, and NaN if no number comes out at the end."""
        setup, chance = self.plan.setup, seeds.generator(self.plan.setup.seed, "noise")
        if setup.net.views:  # of what the frozen part would make of them
            noise = torch.randn(2, *setup.taken, generator=chance)
            return predict(self.net_pool.take(weights), noise.to(setup.device), lambda features: features)
        noise = torch.randint(256, (2, *setup.taken), dtype=torch.uint8, generator=chance)
        return predict(self.net_pool.take(weights), noise.to(setup.device), setup.views.plain)

    def _is_evaluated(self, round_info: RoundInfo) -> bool:
        last = round_info.round == round_info.rounds - 1
        return last or (round_info.round + 1) % self.plan.experiment.evaluate_every == 0

    def _answer(self, stage: Stage, state: Payload, hub: Hub) -> Weights | None:
        """The model that is evaluated and shipped: the method's, or its average over rounds (`server.answer`)."""
        weights = aside.averaged_answer(state)
        return stage.method.server_answer(aside.methods_part(state), hub) if weights is None else weights

    def _evaluate(self, stage: Stage, round_info: RoundInfo, state: Payload, hub: Hub) -> dict[str, Any]:
        self.net_pool.clear()
        weights = self._answer(stage, state, hub)
        if weights is None:
            return {}
        scores = score(self.backend.predict_test(weights), self.test_labels) if len(self.test_labels) else {}
        if self.plan.split.validation:
            scores |= validation_figures(self.backend.validate(weights))
        return scores

    def _with_best(self, stage: Stage, state: Payload, hub: Hub, scores: Mapping[str, Any]) -> Payload:
        """The state, with the answer beside it that is the best one so far on the images kept back (`best_by`)."""
        best_by = self.plan.experiment.best_by
        if best_by == "test" or stage is not self.plan.stages[-1] or not scores.get("validation_images"):
            return state
        self.net_pool.clear()
        answer = self._answer(stage, state, hub)
        figure = scores[f"validation_{best_by}"] * (-1 if best_by == "loss" else 1)
        return aside.with_best(state, answer, figure, scores["validation_images"]) if answer is not None else state

    def _candidates(self, stage: Stage, state: Payload, hub: Hub) -> dict[str, Weights]:
        """The models that may be shipped, by name: the method's alone, or those between which the guard chooses."""
        self.net_pool.clear()
        answer = aside.best_answer(state) or self._answer(stage, state, hub)
        if self.twin is None:
            return {guard.METHOD: answer} if answer is not None else {}
        return guard.candidates(answer, self.twin)

    def _compare(self, stage: Stage, round_info: RoundInfo, state: Payload, hub: Hub) -> dict[str, Any]:
        """What the images that parties keep back say of these models, in the rounds in which the guard looks."""
        settings = self.plan.experiment.guard
        last = round_info.round == round_info.rounds - 1
        due = last or (round_info.round + 1) % settings.every == 0
        if self.twin is None or stage is not self.plan.stages[-1] or not due:
            return {}
        models = self._candidates(stage, state, hub)
        return guard.judged(list(models), self.backend.compare(list(models.values())), settings.lead)

    def _evaluate_clients(self, replies: Sequence[Reply]) -> dict[str, Any]:
        """How good each client's model was before the merge, in the order of `answered`. None: it sent no model."""
        local: list[dict[str, Any]] = []
        for reply in replies:
            is_model = isinstance(reply.send.get("model"), Mapping)
            probs = self.backend.predict_test(reply.weights("model")) if is_model else None
            local.append(score(probs, self.test_labels) if probs is not None else {})
        return {f"clients_{name}": [scores.get(name) for scores in local] for name in ("accuracy", "per_class")}


def _answered(usable: Sequence[Outcome]) -> list[int]:
    """The clients whose replies are used."""
    return [client for outcome in usable for client in outcome.parties]


@dataclass(frozen=True)
class Merge:
    """What came of a merge: the next state, whose replies are in it, and who was refused for making it fail."""

    state: Payload
    used: list[Outcome]
    hub: Hub
    refused: list[dict[str, Any]] = field(default_factory=list)
    skipped: str = ""


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
