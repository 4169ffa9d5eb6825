"""What a check found: one finding for each rule and placement, and all of them together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Verdict(NamedTuple):
    """What one rule says of a method. Passed, but with a remedy: a warning."""

    passed: bool
    why: str = ""
    remedy: str = ""


class Problem(NamedTuple):
    """One thing that is wrong, in a sentence, and what to do, in another."""

    why: str
    remedy: str


def sentence(text: str) -> str:
    """With one full stop at its end.

    >>> sentence("It fails: no such file."), sentence("It fails")
    ('It fails: no such file.', 'It fails.')
    """
    return text.rstrip(". ") + "."


MOST_PROBLEMS = 4  # of one rule that are told at once


def judged(problems: list[Problem], otherwise: str = "") -> Verdict:
    """Passed if there is no problem; `otherwise` then tells what was seen.

    >>> judged([], "reached 50 %")
    Verdict(passed=True, why='reached 50 %', remedy='')
    >>> judged([Problem("A is red.", "Paint it."), Problem("B is red.", "Paint it.")])
    Verdict(passed=False, why='A is red. B is red.', remedy='Paint it.')
    """
    if not problems:
        return Verdict(True, otherwise)
    told = problems[:MOST_PROBLEMS]
    more = f" And {len(problems) - len(told)} more of the kind." if len(problems) > len(told) else ""
    whys, remedies = (dict.fromkeys(part) for part in zip(*told, strict=True))
    return Verdict(False, " ".join(whys) + more, " ".join(remedies))


@dataclass(frozen=True)
class Finding:
    """What a rule said of a method in one placement ('': the rule does not depend on it)."""

    rule: str
    placement: str
    passed: bool
    why: str  # what was wrong, or what was seen
    remedy: str  # what to do; with `passed`, it is a warning
    seconds: float

    @property
    def is_warning(self) -> bool:
        return self.passed and bool(self.remedy)


def told_once(findings: Iterable[Finding]) -> list[tuple[str, str, str]]:
    """(title, why, remedy) of each finding; what holds in several placements alike is told once.

    >>> wrong = [Finding("isolated", place, False, "Why.", "Do.", 0.5) for place in ("server", "clients")]
    >>> told_once(wrong)
    [('isolated, labels at server or clients', 'Why.', 'Do.')]
    """
    places: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        places.setdefault((finding.rule, finding.why, finding.remedy), []).append(finding.placement)
    return [
        (f"{rule}, labels at {' or '.join(where)}" if any(where) else rule, why, remedy)
        for (rule, why, remedy), where in places.items()
    ]


class Skip(NamedTuple):
    """A rule that was not asked, because another one failed that it builds on."""

    rule: str
    placement: str
    because: str


@dataclass(frozen=True)
class Report:
    """All that a check of a method found."""

    method: str
    findings: tuple[Finding, ...]
    skipped: tuple[Skip, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.passed]

    @property
    def warnings(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_warning]

    @property
    def seconds(self) -> float:
        return sum(finding.seconds for finding in self.findings)

    def raise_for_failures(self) -> None:
        """Raise a CheckFailed that tells every failure and what to do; nothing if there is none.

        >>> Report("fedavg", (Finding("loads", "", True, "", "", 0.1),)).raise_for_failures()
        >>> Report("mine.py", (Finding("loads", "", False, "No.", "Yes.", 0.1),)).raise_for_failures()
        Traceback (most recent call last):
        tacit.testing.findings.CheckFailed: mine.py fails 1 of 1 check.
        loads: No.
          What to do: Yes.
        """
        if failures := self.failures:
            checks = len(self.findings)
            head = f"{self.method} fails {len(failures)} of {checks} check{'s' if checks > 1 else ''}."
            told = [f"{title}: {why}\n  What to do: {remedy}" for title, why, remedy in told_once(failures)]
            raise CheckFailed("\n".join([head, *told]))


class CheckFailed(AssertionError):
    """A method breaks rules; the text tells which, and what to do."""
