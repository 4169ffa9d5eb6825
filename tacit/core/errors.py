"""The one kind of error that a user can fix: it says what was wrong, what was expected, what to do."""

import difflib
from collections.abc import Iterable


class TacitError(Exception):
    """A mistake in the input or the surroundings; the command line shows its text without a traceback."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean …?' with the closest known name, or nothing.

    >>> nearest("fixmach", ["fedavg", "fixmatch"])
    " Did you mean 'fixmatch'?"
    >>> nearest("zzz", ["fedavg", "fixmatch"])
    ''
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
