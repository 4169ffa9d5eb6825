"""The rules that a method keeps in every placement it names, each with the sentence that it demands.

`loads` comes first and stands in a file of its own; the others are asked of a `Trial`, in the order of `RULES`.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tacit.contract import kinds
from tacit.contract.kinds import Registration
from tacit.contract.method import Method, Reply
from tacit.core import payload
from tacit.core.payload import seal
from tacit.core.text import safe
from tacit.data.federation import make_setup
from tacit.data.split import Part
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run
from tacit.runs.plan import Plan
from tacit.runs.watchers import NullWatcher
from tacit.testing.bad_replies import HONEST, Attack, Attacked, at_the_edge, harms_of, wide_entries
from tacit.testing.findings import Problem, Verdict, judged, sentence
from tacit.testing.observe import Crossing
from tacit.testing.sums import sums
from tacit.testing.trial import Interruptions, Stopped, Trial, digest, parting

NAMED = 'Draw from me.rng("purpose") at clients and hub.rng("purpose") at the server, and from nothing else'
NO_MEMORY = (
    "Keep nothing on the class, in a module or in a file: what the server remembers belongs into its state, what a "
    "client remembers into Reply(keep=…)"
)
RANDOM_TOO = "Random numbers come from me.rng and hub.rng alone."


@dataclass(frozen=True)
class Rule:
    """A rule: what it demands, who asks for it, and which others it builds on."""

    name: str
    demands: str
    check: Callable[[Trial], Verdict]
    after: tuple[str, ...] = ()  # where one of these failed it is not asked
    at_once: bool = False  # it looks at nothing but the run that all rules look at


# --- runs, declared: what one whole run shows ----------------------------------------------------------------------


def runs(trial: Trial) -> Verdict:
    """An exception of the run itself is caught by who asks."""
    whole, problems = trial.whole, []
    for crossing in whole.notebook.crossings:
        if where := _not_finite(crossing.reply):
            problems.append(
                Problem(
                    f"{crossing.where.capitalize()} answers with NaN or infinity ({where}).",
                    "Look for means of nothing, divisions by a count that may be 0, logarithms of 0, and for a "
                    "learning rate in the preset that is too high.",
                )
            )
            break
    for record in whole.run.records:
        blamed = record["refused"] and "not without it" in record["refused"][0]["why"]
        reason = record["refused"][0]["why"] if blamed else record["skipped"]
        if reason and "usable replies" not in reason:  # too few of them: told where they were refused
            why = f"In round {record['round']} of stage '{record['stage']}' {safe(reason, 300)}."
            remedy = "Look at server_merge: shares that sum to zero, a mean of nothing, a step that is too large."
            problems.append(Problem(why, remedy))
            break
    if not (whole.run.folder / "model.safetensors").is_file():
        remedy = 'Let server_answer give the model that is evaluated and shipped: weights_in(state, "model").'
        problems.append(Problem("It ends without a model: server_answer gives None in the main stage.", remedy))
    return judged(problems)


def _not_finite(reply: Reply) -> str:
    """The entry of a reply that is NaN or infinite; '' if there is none, or if it cannot be told."""
    if isinstance(reply.examples, float) and not math.isfinite(reply.examples):
        return "examples"
    try:
        payload.check(reply.send)
    except TypeError:
        return ""
    return payload.first_not_finite(reply.send)


def declared(trial: Trial) -> Verdict:
    whole = trial.whole
    classes = len(whole.plan.setup.classes)
    problems = [*_undeclared(whole.notebook.crossings, classes)]
    problems += _refused(whole.run, whole.notebook.crossings, classes)
    for stage in whole.plan.stages:
        crossings = [crossing for crossing in whole.notebook.crossings if crossing.stage == stage.name]
        if not crossings:
            continue  # nobody is asked in this placement
        ways = {
            "server_sends": ([set(crossing.sent) for crossing in crossings], "sent in no task"),
            "client_keeps": ([set(crossing.reply.keep) for crossing in crossings], "kept by no client"),
        }
        for attribute, (names, never) in ways.items():
            for name, text in getattr(stage.method, attribute).items():
                if not name.endswith("?") and not kinds.parse(text).due and not any(name in some for some in names):
                    why = f"{attribute} declares '{name}', which is {never}."
                    problems.append(Problem(why, f"Take it out, or write '{name}?' if it may be missing."))
    return judged(problems)


def _undeclared(crossings: list[Crossing], classes: int) -> Iterator[Problem]:
    """What goes down or is kept without being declared, or is not what was declared; each name once."""
    keeps = {name.removesuffix("?"): text for one in crossings for name, text in one.method.client_keeps.items()}
    told: set[tuple[str, str]] = set()
    for crossing in crossings:
        sends = {name.removesuffix("?"): text for name, text in crossing.method.server_sends.items()}
        for attribute, known, parts, verb in (
            ("server_sends", sends, crossing.sent, "is sent to"),
            ("client_keeps", keeps, crossing.reply.keep, "is kept by"),
        ):
            for name, value in parts.items():
                if (attribute, name) in told:
                    continue
                what = f"'{safe(name)}' {verb} {crossing.where}"
                if name not in known:
                    told.add((attribute, name))
                    remedy = f'Write "{safe(name)}": "{likely_kind(value, classes)}" into {attribute}.'
                    yield Problem(f"{what}, but {attribute} does not declare it.", remedy)
                elif why := kinds.invalid_reason(kinds.parse(known[name]), name, value, None, Registration(), classes):
                    told.add((attribute, name))
                    remedy = f'Declare what it is ("{likely_kind(value, classes)}"?), or make it what is declared.'
                    yield Problem(f'{what}; {attribute} says "{known[name]}", but {why}.', remedy)


def _refused(run: Run, crossings: list[Crossing], classes: int) -> list[Problem]:
    """Replies of honest clients that the engine refused, those that are NaN aside."""
    answers = {(one.stage, one.round, one.client): one for one in crossings}
    for record in run.records:
        for refusal in record["refused"]:
            crossing = answers.get((record["stage"], record["round"], refusal["client"]))
            if crossing is None or "not without it" in refusal["why"] or _not_finite(crossing.reply):
                continue
            why = f"The reply of {crossing.where} is refused: {refusal['why']}."
            return [Problem(why, _remedy(refusal["why"], crossing, classes))]
    return []


def _remedy(why: str, crossing: Crossing, classes: int) -> str:
    known = {name.removesuffix("?") for name in crossing.method.client_sends}
    extra = next((name for name in crossing.reply.send if name not in known), None)
    if extra is not None:
        kind = likely_kind(crossing.reply.send[extra], classes)
        return f'Write "{safe(extra)}": "{kind}" into client_sends, or do not send it.'
    if "examples" in why:
        return "Let examples be how many images were trained on; if it counts otherwise, say so in most_examples."
    if "is missing" in why:
        return 'Send it, take it out of client_sends, write its name with "?", or declare it "… if labeled".'
    return "Send what client_sends declares, or declare what is sent (docs/adding-a-method.md has the table of kinds)."


def likely_kind(value: object, classes: int) -> str:
    """What one would declare of a value.

    >>> likely_kind({"w": torch.zeros(1)}, 10), likely_kind(0.5, 10), likely_kind(torch.zeros(10, 3), 10)
    ('weights', 'number', '[K,3]')
    >>> likely_kind(torch.tensor([1, 2]), 10), likely_kind("text", 10)
    ('int64 [2]', 'any')
    """
    if isinstance(value, Mapping):
        return "weights"
    if isinstance(value, Tensor):
        dtype = "" if value.dtype == torch.float32 else str(value.dtype).removeprefix("torch.") + " "
        return f"{dtype}[{','.join('K' if size == classes else str(size) for size in value.shape)}]"
    return "number" if isinstance(value, int | float) else "any"


# --- deterministic, pool, resume: the same bytes again -------------------------------------------------------------


def deterministic(trial: Trial) -> Verdict:
    problems = []
    if where := parting(trial.whole.run, trial.local(trial.plan())):
        why = f"Two runs with the same seed differ; {where}."
        remedy = f"{NAMED}: torch.rand, numpy and random without a generator of their own give other numbers each time."
        problems.append(Problem(why, remedy))
    elif digest(trial.whole.run) == digest(trial.local(trial.plan({"seed": trial.whole.plan.experiment.seed + 1}))):
        remedy = f"Begin with hub.new_weights(). {NAMED}; set no seed of your own."
        problems.append(Problem("Another seed gives the very same model.", remedy))
    return judged(problems)


def pool(trial: Trial) -> Verdict:
    changes = {"backend.name": "pool", "backend.workers": 2}
    where = parting(trial.whole.run, run_experiment(trial.experiment(changes), trial.out()))
    why = f"One process and two give different runs; {where}."
    remedy = f"{NO_MEMORY}; any worker may train any client. {RANDOM_TOO}"
    return judged([Problem(why, remedy)] if where else [])


def resume(trial: Trial) -> Verdict:
    interruptions, out, resumed = Interruptions(trial.whole.plan.stages), trial.out(), None
    experiment = trial.experiment()
    while resumed is None:
        try:
            resumed = run_experiment(experiment, out, resume=True, watcher=interruptions)
        except Stopped:
            continue
    where = parting(trial.whole.run, resumed)
    why = f"Stopped at every moment and resumed, it does not end as it does without a stop; {where}."
    return judged([Problem(why, f"{NO_MEMORY}; a resumed run loads the file anew. {RANDOM_TOO}")] if where else [])


# --- isolated: nobody changes what belongs to another --------------------------------------------------------------


def isolated(trial: Trial) -> Verdict:
    """What the server changes is a failure: the engine goes back to the state before a merge, and merges replies again.

    What a client changes is a warning: on every backend it works with copies, so that nobody notices.
    """
    notebook = trial.whole.notebook
    problems = [
        Problem(
            f"{what} it was given (in '{safe(name)}').",
            "Make new tensors and a new dict: the engine may go back to what it gave, and merge these replies again.",
        )
        for what, name in notebook.changes.items()
        if what.startswith("server")
    ]
    if problems:
        return judged(problems)
    warnings = [f"{what} (in '{safe(name)}')" for what, name in notebook.changes.items()]
    if name := notebook.changed_after_sending:
        warnings.append(f"what a client sent changes afterwards (in '{safe(name)}')")
    if not warnings:
        return Verdict(True)
    why = "; ".join(warnings)
    return Verdict(
        True,
        f"{why[0].upper()}{why[1:]}. Every backend copies what crosses the wall, so nobody notices.",
        "Copy before changing, and send me.weights(model) rather than the net's own tensors: it is a trap for whoever "
        "reads or moves the code.",
    )


# --- silent-clients: who does not answer, who holds less than others -----------------------------------------------

EVERYBODY = {"participation.fraction": 1.0, "participation.number": 0, "participation.quorum": 1}
# The faults of this seed: of four clients three answer, then one, then nobody.
DROPPED = {**EVERYBODY, "rounds": 3, "seed": 87, "data.clients": 4, "faults.dropout": 0.6}
SKEWED = {**EVERYBODY, "rounds": 1, "data.alpha": 0.05, "data.min_size": 1, "data.clients": 6, "data.labels": 20}


def silent_clients(trial: Trial) -> Verdict:
    problems: list[Problem] = []
    few = "Let server_merge take the replies that are there: any number of them, from any clients."
    poor = "Either part of me.shard may be empty: ask len(me.shard.labeled) and len(me.shard.unlabeled) first."
    for plan, situation, remedy in (
        (trial.plan(DROPPED), "When clients drop out", few),
        (poor_clients(trial.plan(SKEWED)), "With clients that hold few images, or none of one kind,", poor),
    ):
        if why := _trouble(trial, plan):
            problems.append(Problem(sentence(f"{situation} {why}"), remedy))
    for merging in trial.whole.notebook.merges:
        if merging.hub.stage != "main" or not merging.replies:
            continue
        for replies, situation, remedy in (
            (merging.replies[:1], "With a single reply", few),
            (
                tuple(replace(reply, examples=0.0) for reply in merging.replies),
                "When no client learned from any example",
                "Give back the state as it is where all weights are zero.",
            ),
        ):
            try:
                merged = merging.method.server_merge(seal(merging.state), list(replies), merging.hub)
                payload.check(merged)
                where = payload.first_not_finite(merged)
                why = f"the merged '{where}' holds NaN or infinity" if where else ""
            except Exception as error:
                why = f"the merge fails: {trial.told(error)}"
            if why:
                problems.append(Problem(sentence(f"{situation} {why}"), remedy))
        break
    return judged(problems)


def _trouble(trial: Trial, plan: Plan) -> str:
    """What goes wrong in a run in which nothing should; '' if nothing does."""
    try:
        run = trial.local(plan)
    except (Exception, SystemExit) as error:
        return f"it fails: {trial.told(error)}"
    for record in run.records:
        if record["refused"]:
            refusal = record["refused"][0]
            return f"the reply of client {refusal['client']} is refused: {refusal['why']}"
        if record["skipped"] and not record["skipped"].startswith("0 usable replies"):
            return record["skipped"]
    return ""


def poor_clients(plan: Plan) -> Plan:
    """The same plan; with labels at clients, one of them has none, and the one with most has nothing else.

    With labels at the server no client has any, and with some labelled clients those have nothing else, as it is.
    """
    if plan.experiment.data.placement != "clients":
        return plan
    parts = list(plan.split.clients)
    rich, *_, poor = sorted(range(len(parts)), key=lambda client: -len(parts[client].labeled))
    parts[rich] = replace(parts[rich], unlabeled=parts[rich].unlabeled[:0])
    nothing = parts[poor].labeled[:0]
    parts[poor] = Part(nothing, parts[poor].unlabeled)
    split = replace(plan.split, clients=tuple(parts))
    held = tuple(len(part.labeled) + len(part.unlabeled) for part in parts)
    return replace(plan, split=split, setup=make_setup(plan.experiment, plan.dataset, split), registered=held)


# --- learns --------------------------------------------------------------------------------------------------------

LESSON = {
    "rounds": 4,
    "data.subset": 0,
    "data.test_subset": 0,
    "data.labels": 300,
    "data.partition": "iid",
    "train.epochs": 3,
    "train.server_epochs": 15,
}


class Learned(Exception):
    """It is better than was asked for: no need to go on."""


class Examiner(NullWatcher):
    """Watches the accuracy of the main stage, and ends the run when it is good enough."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.best, self.rounds = threshold, 0.0, 0

    def round_done(self, record: Mapping[str, Any]) -> None:
        if record["stage"] == "main":
            self.best, self.rounds = max(self.best, record.get("accuracy") or 0.0), self.rounds + 1
            if self.best >= self.threshold:
                raise Learned


def learns(trial: Trial) -> Verdict:
    examiner = Examiner(trial.threshold)
    with contextlib.suppress(Learned):
        trial.local(trial.plan(LESSON), watcher=examiner)
    rounds = f"{examiner.rounds} of {LESSON['rounds']} rounds"
    seen = f"accuracy {examiner.best:.2f} after {rounds}, {trial.threshold:.2f} wanted"
    if examiner.best >= trial.threshold:
        return Verdict(True, seen)
    return Verdict(
        False,
        f"It learns too little on the digits (10 classes, 300 labels): {seen}.",
        "See whether training changes what is sent, and whether the learning rate of the preset fits; if the method "
        "needs longer, ask for less with --threshold (threshold= in Python).",
    )


# --- bad-replies ---------------------------------------------------------------------------------------------------


def bad_replies(trial: Trial) -> Verdict:
    main = trial.whole.plan.stages[-1]
    crossings = [crossing for crossing in trial.whole.notebook.crossings if crossing.stage == main.name]
    if not crossings:
        return Verdict(True, "no client is asked in this placement")
    wide = {name for one in crossings for name in wide_entries(main.method.client_sends, one.sent, one.reply)}
    if wide:
        why = "client_sends declares '{}' as \"any\": replies of other shapes and sizes would reach the merge."
        remedy = 'Declare it "weights": it has the names and shapes of what was sent down.'
        return judged([Problem(why.format(safe(name)), remedy) for name in sorted(wide)])
    attack = Attack(harms_of(main.method.client_sends))
    enough = len(attack.harms) + HONEST
    some = trial.placement == "some-clients"  # where a method may ask the labelled ones alone
    plan = trial.plan(
        {
            "rounds": 1,
            "data.clients": enough + enough // 2 if some else enough,
            "data.labeled_clients": enough,
            "data.partition": "iid",
            "data.min_size": 1,
            **EVERYBODY,
        }
    )
    attacked = replace(main, method=Attacked(plan.stages[-1].method, attack), rounds=1)
    try:
        run = trial.local(replace(plan, stages=(*plan.stages[:-1], attacked)))
    except (Exception, SystemExit) as error:
        remedy = "Declare what clients send as narrowly as it is, and raise no TacitError over a reply in server_merge."
        return judged([Problem(sentence(f"A bad reply ends the run: {trial.told(error)}"), remedy)])
    problems = _taken(run, attack, main.method)
    problems += _edge(trial)
    return judged(problems, f"{len(attack.chosen)} kinds of bad replies refused")


def _taken(run: Run, attack: Attack, method: Method) -> list[Problem]:
    """Bad replies that were not refused, and honest ones that were."""
    refused: dict[int, list[str]] = {}
    for record in run.records:
        if record["stage"] == "main":
            for refusal in record["refused"]:
                refused.setdefault(refusal["client"], []).append(refusal["why"])
    problems = []
    for client, harm in attack.chosen.items():
        if len(refused.get(client, ())) < attack.spoilt[client]:
            text = next((text for name, text in method.client_sends.items() if name.removesuffix("?") == harm.name), "")
            remedy = (
                f'client_sends declares "{harm.name}": "{text}"; declare it as narrowly as it is ("weights", "share", '
                '"counts[K]" …), so that the engine can refuse it.'
                if harm.name
                else "Let most_examples be a bound: the images that a client holds, times what a boost adds."
            )
            problems.append(Problem(f"A reply in which {harm.what} is not refused.", remedy))
    for client in attack.honest:
        if client in refused:
            remedy = "Let server_merge depend on no reply but those it is given."
            problems.append(
                Problem(f"Beside bad replies an honest one is refused: {safe(refused[client][0], 300)}.", remedy)
            )
    return problems


def _edge(trial: Trial) -> list[Problem]:
    """Replies at the edge of what is declared, of all clients at once: the merge must not raise."""
    for merging in trial.whole.notebook.merges:
        if merging.hub.stage == "main" and merging.replies:
            replies = [at_the_edge(reply, merging.method.client_sends) for reply in merging.replies]
            try:
                merging.method.server_merge(seal(merging.state), replies, merging.hub)
            except Exception as error:
                why = f"Where all clients send 0 for every number and count, the merge fails: {trial.told(error)}"
                return [Problem(sentence(why), "Ask before dividing: what is declared as a share or a count may be 0.")]
            break
    return []


RUNS = "runs"
SOUND = (RUNS, "declared")

RULES = (
    Rule(
        RUNS, "it runs on the digits at smoke scale, ends with a model, and every number is finite", runs, at_once=True
    ),
    Rule("declared", "what travels and is kept is what it declares, by name and kind", declared, at_once=True),
    Rule("deterministic", "the same seed gives the same bytes, another seed another model", deterministic),
    Rule("pool", "two worker processes give the bytes of one process", pool, ("deterministic",)),
    Rule("resume", "stopped and resumed at every moment, it ends with the same bytes", resume, ("deterministic",)),
    Rule("isolated", "the server changes neither the state nor the replies that it is given", isolated, at_once=True),
    Rule(
        "silent-clients",
        "it goes on when clients drop out, hold few images, or lack one kind of them",
        silent_clients,
        SOUND,
    ),
    Rule("learns", "with 300 labelled digits it is better than guessing, by the threshold", learns, SOUND),
    Rule(
        "bad-replies",
        "replies that are NaN, misshapen, huge, negative or missing are refused, and the run goes on",
        bad_replies,
        SOUND,
    ),
    Rule("sums", "where it declares that sums are enough (merges_sums), they are: the merge is the same", sums, SOUND),
)
