"""Texts and paths that users give: what could not be used is refused with a reason, before any work."""

import os
import unicodedata
from pathlib import Path

from tacit.core.errors import TacitError
from tacit.core.text import safe

MOST_TEXT = 4096  # characters; the longest path that Linux takes
MOST_NAME = 255  # bytes of a name in a folder
SPARE = 15  # bytes by which the file is longer that is written first and then renamed
INSIDE = 200  # bytes of the longest path inside a run's folder


def invalid_text(text: str) -> str:
    """Why a text cannot be a name, a path or a title; '' if it can.

    >>> invalid_text("my images"), invalid_text("a" * 5000)
    ('', 'has 5,000 characters; at most 4,096 are allowed')
    >>> invalid_text("a" + chr(0)), invalid_text(chr(27) + "[31m")
    ('holds the control character U+0000', 'holds the control character U+001B')
    """
    if len(text) > MOST_TEXT:
        return f"has {len(text):,} characters; at most {MOST_TEXT:,} are allowed"
    for character in text:
        kind = unicodedata.category(character)
        if kind in ("Cc", "Zl", "Zp"):
            return f"holds the control character U+{ord(character):04X}"
        if kind == "Cs":  # what Python makes of bytes that are not UTF-8: it cannot be written to a file again
            return "is not valid UTF-8"
    return ""


def user_path(text: str, what: str = "") -> Path:
    """The path that a user wrote, with ~ filled in, if the system can look at it at all; `what` names it in errors."""
    named = f"{what} = '{safe(text)}'" if what else f"'{safe(text)}'"
    if why := invalid_text(text):
        raise TacitError(f"{named} {why}.")
    try:
        path = Path(text).expanduser()
        path.exists()  # too long a name, a folder that may not be entered
        path.resolve()  # links in a circle
    except OSError as error:
        raise TacitError(f"{named} cannot be looked at ({error.strerror}). Give another path.") from None
    except RuntimeError as error:  # ~name, where there is no such user, or links that lead in a circle
        raise TacitError(f"{named} leads nowhere ({safe(error)}). Give another path.") from None
    return path


def data_root() -> Path:
    """The folder of all data and of converted weights: TACIT_DATA, else `tacit` in the user's cache folder."""
    if chosen := os.environ.get("TACIT_DATA"):
        return Path(chosen).expanduser()
    if caches := os.environ.get("XDG_CACHE_HOME"):
        return Path(caches) / "tacit"
    return Path.home() / ".cache" / "tacit"


def check_folder(path: Path, option: str = "--out") -> None:
    """Refuse a folder that could not be made or written to. Nothing is made yet."""
    _check_place(path, option, spare=0, inside=INSIDE)
    if path.exists() and not path.is_dir():
        raise TacitError(f"{option} '{safe(path)}' is a file, but a folder is needed. Choose another {option}.")


def check_file(path: Path, option: str = "--out") -> None:
    """Refuse a file that could not be written. Nothing is written yet."""
    _check_place(path, option, spare=SPARE, inside=0)
    if path.is_dir():
        raise TacitError(f"{option} '{safe(path)}' is a folder, but a file is needed. Choose another {option}.")


def _check_place(path: Path, option: str, spare: int, inside: int) -> None:
    named = f"{option} '{safe(path)}'"
    if why := invalid_text(str(path)):
        raise TacitError(f"{named} {why}. Choose another {option}.")
    whole = path.absolute()
    longest = max((len(os.fsencode(part)) for part in whole.parts), default=0)
    if longest + spare > MOST_NAME:
        raise TacitError(
            f"{named} has a name of {longest} bytes; at most {MOST_NAME - spare} are possible. "
            f"Choose a shorter {option}."
        )
    if len(os.fsencode(whole)) + spare + inside >= MOST_TEXT:
        raise TacitError(
            f"{named} is a path of {len(os.fsencode(whole)):,} bytes; at most {MOST_TEXT - spare - inside - 1:,} are "
            f"possible. Choose a shorter {option}."
        )
    try:
        there = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
        if not there.exists():
            raise TacitError(
                f"{named}: {safe(there)} is a link to nothing. Remove the link, or choose another {option}."
            )
        if there != whole and not there.is_dir():
            raise TacitError(f"{named}: {safe(there)} is not a folder. Choose another {option}.")
        if not os.access(there, os.W_OK | (os.X_OK if there.is_dir() else 0)):
            raise TacitError(f"{named}: {safe(there)} cannot be written to. Choose another {option}.")
    except OSError as error:
        raise TacitError(f"{named} cannot be written ({error.strerror}). Choose another {option}.") from None
