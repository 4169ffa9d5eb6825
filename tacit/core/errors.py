"""The one kind of error that a user can fix: it says what was wrong, what was expected, what to do."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


class TacitError(Exception):
    """A mistake in the input or the surroundings; the command line shows its text without a traceback."""


@dataclass(frozen=True)
class Answer:
    """One way to settle what somebody's data leaves open."""

    words: str  # what it would mean
    option: str  # of `tacit init`
    settings: Mapping[str, str]  # the same under [data]


class Question(TacitError):
    """What data leaves open and nobody may guess: asked on a terminal, an error where nobody can answer."""

    def __init__(self, what: str, answers: Sequence[Answer], advice: str = "") -> None:
        lines = [what, *(f"  {answer.option}: {answer.words}" for answer in answers)]
        if answers:
            keys = [", ".join(f'{key} = "{value}"' for key, value in one.settings.items()) for one in answers]
            lines.append(
                "Nothing was guessed. Add one of these options to `tacit init` (in a file, under [data]: "
                f"{' or '.join(keys)})."
            )
        super().__init__("\n".join([*lines, *([advice] if advice else [])]))
        self.what, self.answers = what, tuple(answers)


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the closest known name, or nothing.

    >>> nearest("fixmach", ["fedavg", "fixmatch"])
    " Did you mean 'fixmatch'?"
    >>> nearest("zzz", ["fedavg", "fixmatch"])
    ''
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
