"""`check_method`: every rule, in every placement of a method."""

import math
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tacit.contract.method import PLACEMENTS, Method
from tacit.core.errors import TacitError, nearest
from tacit.core.text import safe
from tacit.testing.findings import Finding, Problem, Report, Skip, Verdict, judged, sentence
from tacit.testing.loads import find_subject, loads
from tacit.testing.rules import RULES, RUNS, Rule, runs
from tacit.testing.trial import Trial

LOADS = "loads"
LOADS_DEMANDS = "the file defines a frozen dataclass of its name, with typed options and the presets paper and smoke"
RULE_NAMES = (LOADS, *(rule.name for rule in RULES))
THRESHOLD = 0.25  # accuracy on ten classes; guessing gives 0.1

Tell = Callable[[Finding | Skip], None]


def check_method(
    method: str | Path | type[Method],
    *,
    placements: Iterable[str] | None = None,
    preset: str = "smoke",
    threshold: float | None = None,
    only: Iterable[str] | None = None,
    tell: Tell | None = None,
) -> Report:
    """Check a method by the rules of docs/adding-a-method.md, on the embedded digits, in a minute or less.

    `method` is a file (`"mine.py"`), a name that tacit knows, or a class that stands in a file of its name.
    `placements`: some of those that it names. `threshold`: the accuracy that the rule `learns` asks for (0.25).
    `only`: some of the rules (`RULE_NAMES`). `tell` is given each finding as soon as it is there. Nothing is written
    but into a temporary folder. In a test of your own: `check_method("mine.py").raise_for_failures()`.
    """
    wanted = _threshold(threshold)
    chosen = _rules(only)
    subject = find_subject(method)
    started = time.perf_counter()
    kind, verdict = loads(subject)
    book = _Book(subject.shown, tell)
    if not verdict.passed or LOADS in chosen:
        book.write(LOADS, "", verdict, time.perf_counter() - started)
    if kind is not None and chosen != {LOADS}:
        places = _placements(placements, kind)
        if preset not in kind.presets:
            known = ", ".join(kind.presets)
            raise TacitError(f"{kind.__name__} has no preset '{safe(preset)}'. It has: {known}.")
        with tempfile.TemporaryDirectory(prefix="tacit-check-") as folder:
            for place in places:
                trial = Trial(subject.name, kind, subject.file, place, preset, wanted, Path(folder))
                _check_placement(trial, chosen, book)
    return book.report()


class _Book:
    """The findings so far."""

    def __init__(self, method: str, tell: Tell | None) -> None:
        self.method, self.tell = method, tell or (lambda _: None)
        self.findings: list[Finding] = []
        self.skipped: list[Skip] = []

    def write(self, rule: str, placement: str, verdict: Verdict, seconds: float) -> None:
        self.findings.append(Finding(rule, placement, *verdict, round(seconds, 2)))
        self.tell(self.findings[-1])

    def skip(self, rule: str, placement: str, because: str) -> None:
        self.skipped.append(Skip(rule, placement, because))
        self.tell(self.skipped[-1])

    def report(self) -> Report:
        return Report(self.method, tuple(self.findings), tuple(self.skipped))


def _check_placement(trial: Trial, chosen: set[str], book: _Book) -> None:
    """Ask the chosen rules of one placement, and those that the chosen ones build on if that costs nothing."""
    started = time.perf_counter()
    try:
        finished = (trial.whole.run.folder / "model.safetensors").is_file()
        crash = None if finished else runs(trial)
    except (Exception, SystemExit) as error:
        crash = _exception(trial, error)
    if crash is not None:  # all rules look at this run
        book.write(RUNS, trial.placement, crash, time.perf_counter() - started)
        for rule in RULES:
            if rule.name in chosen - {RUNS}:
                book.skip(rule.name, trial.placement, RUNS)
        return
    built_on = {name for rule in RULES if rule.name in chosen for name in rule.after}
    failed: set[str] = set()
    for rule in RULES:
        if rule.name not in chosen and not (rule.at_once and rule.name in built_on):
            continue
        if because := next((name for name in rule.after if name in failed), ""):
            book.skip(rule.name, trial.placement, because)
            continue
        verdict = _asked(rule, trial)
        if not verdict.passed:
            failed.add(rule.name)
        if rule.name in chosen or not verdict.passed:
            book.write(rule.name, trial.placement, verdict, time.perf_counter() - started)
        started = time.perf_counter()


def _asked(rule: Rule, trial: Trial) -> Verdict:
    try:
        return rule.check(trial)
    except (Exception, SystemExit) as error:
        return _exception(trial, error)


def _exception(trial: Trial, error: BaseException) -> Verdict:
    why = sentence(f"It fails: {trial.told(error)}")
    return judged([Problem(why, "Mend what the message names; the traceback is what `tacit run` shows.")])


def _threshold(given: float | None) -> float:
    if given is None:
        return THRESHOLD
    if not (isinstance(given, int | float) and math.isfinite(given) and 0 <= given <= 1):
        raise TacitError(f"The threshold is {given}, but an accuracy lies between 0 and 1. Write 0.25, for example.")
    return float(given)


def _rules(only: Iterable[str] | None) -> set[str]:
    names = list(RULE_NAMES if only is None else [only] if isinstance(only, str) else only)
    for name in names:
        if name not in RULE_NAMES:
            hint = nearest(name, RULE_NAMES)
            raise TacitError(f"There is no rule '{safe(name)}'.{hint} The rules are: {', '.join(RULE_NAMES)}.")
    if not names:
        raise TacitError(f"No rule is asked for. The rules are: {', '.join(RULE_NAMES)}.")
    return set(names)


def _placements(given: Iterable[str] | None, kind: type[Method]) -> list[str]:
    named = ", ".join(kind.placements)
    places = list(kind.placements if given is None else [given] if isinstance(given, str) else given)
    for place in places:
        if place not in PLACEMENTS:
            hint = nearest(place, PLACEMENTS)
            raise TacitError(f"There is no placement '{safe(place)}'.{hint} Labels are at: {', '.join(PLACEMENTS)}.")
        if place not in kind.placements:
            raise TacitError(f"{kind.__name__} does not say that it works with labels at {place}. It names: {named}.")
    if not places:
        raise TacitError(f"No placement is asked for. {kind.__name__} names: {named}.")
    return list(dict.fromkeys(places))


def explained() -> dict[str, str]:
    """What each rule demands, by its name."""
    return {LOADS: LOADS_DEMANDS, **{rule.name: rule.demands for rule in RULES}}
