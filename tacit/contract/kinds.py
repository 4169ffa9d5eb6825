"""What methods declare of the things that travel, in words such as "weights", "counts[K]" or "share".

A declaration is one string: `[DTYPE ]KIND[SHAPE][ if labeled| if unlabeled]`.

| kind | what it is | what else must hold |
|---|---|---|
| `weights` | a group of tensors, as it was sent down | names, shapes and types as sent; finite and not huge |
| `[K]`, `[K,K]`, `[3]` … | a tensor of this shape | finite and not huge |
| `counts[K]` | how many images, by class | not negative; together no more than the party holds |
| `distribution[K]` | shares of a whole | not negative, summing to one |
| `distributions[K,K]` | a distribution in each row | the same, row by row; a row of zeros: nothing is known |
| `number` | a number | finite and not huge |
| `share` | a number | from 0 to 1 |
| `count` | how many images | whole, not negative, no more than the party holds |
| `any` | whatever a payload may hold | finite |

Tensors are float32 unless a type is named: "int64 [K]". "weights if labeled" is due from clients that hold labels, and
from nobody else; "if unlabeled" from those that hold unlabelled images. K is the number of classes.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tacit.core.errors import TacitError, nearest
from tacit.core.payload import TENSORS, Value, difference
from tacit.core.text import safe

# Bounds that hold for every reply. No training that still learns anything comes near to them, and sums and squares of
# what is within them stay finite.
LARGEST_WEIGHT = 1e6
LARGEST_VARIANCE = 1e12  # of batch norm's running variances: the square of that
LARGEST_NUMBER = 2.0**53  # whole numbers up to here are exact
SUMS_TO_ONE = 1e-3  # how far a distribution may be off: means over many images in float32
ROUNDING = 1e-4  # by what share counts may be too large: sums of probabilities over many images in float32

_FORM = re.compile(r"(?:(?P<dtype>\w+) )?(?P<word>[a-z]*)(?:\[(?P<shape>[^\]]*)\])?(?: if (?P<due>labeled|unlabeled))?")
GROUPS, NUMBERS = ("weights", "any"), ("number", "share", "count")
SHAPED = ("", "counts", "distribution", "distributions")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TENSORS}


@dataclass(frozen=True)
class Registration:
    """What is known of a client before it answers."""

    most: float = math.inf  # examples: no more than this can have been trained on
    labeled: bool | None = None  # does it hold labels? None: not known
    unlabeled: bool | None = None  # does it hold unlabelled images?


@dataclass(frozen=True)
class Kind:
    """A declaration, taken apart."""

    word: str  # "" for a tensor of which only the shape is declared
    shape: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32
    due: str = ""  # only from clients that hold "labeled" or "unlabeled" images

    def sizes(self, classes: int) -> list[int]:
        return [classes if part == "K" else int(part) for part in self.shape]

    def nbytes(self, weights: int, classes: int) -> int | None:
        """Its size, if the kind tells; `weights`: that of the model.

        >>> [parse(text).nbytes(1000, 10) for text in ("distributions[K,K]", "int64 [2]", "share", "weights", "any")]
        [400, 16, 8, 1000, None]
        """
        if self.word in SHAPED:
            return math.prod(self.sizes(classes)) * self.dtype.itemsize
        return {"weights": weights, "any": None}.get(self.word, 8)


@cache
def parse(text: str) -> Kind:
    """A declaration taken apart, or a TacitError that says what one looks like.

    >>> parse("distribution[K]"), parse("weights if labeled").due, parse("int64 [K,3]").sizes(10)
    (Kind(word='distribution', shape=('K',), dtype=torch.float32, due=''), 'labeled', [10, 3])
    >>> parse("wieghts")
    Traceback (most recent call last):
    tacit.core.errors.TacitError: A method declares 'wieghts', ... Did you mean 'weights'? ...
    """
    form = _FORM.fullmatch(text)
    words = [*GROUPS, *NUMBERS, *SHAPED]
    if form is not None:
        word, dtype, shape = form["word"], form["dtype"], form["shape"]
        parts = tuple(part.strip() for part in shape.split(",")) if shape is not None else ()
        known = word in words and (word in SHAPED) == (shape is not None) and (dtype is None or word in SHAPED)
        if known and (dtype or "float32") in _DTYPES and all(part == "K" or part.isdecimal() for part in parts):
            return Kind(word, parts, _DTYPES[dtype or "float32"], form["due"] or "")
    raise TacitError(
        f"A method declares '{safe(text)}', which is no kind of thing that travels.{nearest(text, words)} Write "
        "weights, number, share, count, any, [K], counts[K], distribution[K] or distributions[K,K] "
        "(tacit/contract/kinds.py)."
    )


def is_due(kind: Kind, party: Registration) -> bool | None:
    """Whether this party must send it (True), must not (False), or may (None)."""
    holds = {"labeled": party.labeled, "unlabeled": party.unlabeled}
    return holds[kind.due] if kind.due else True


def invalid_reason(kind: Kind, name: str, value: Value, like: object, party: Registration, classes: int) -> str:
    """Why a value that was sent under this name is not what was declared; '' if it is.

    `like` is what was sent down under that name, if it was. The value is a payload's already.
    """
    if kind.word == "weights":
        return _invalid_weights(name, value, like)
    if kind.word in NUMBERS:
        return _invalid_number(kind, name, value, party)
    if kind.word in SHAPED:
        return _invalid_tensor(kind, name, value, party, classes)
    return _not_finite(name, value)


def _invalid_weights(name: str, value: Value, like: object) -> str:
    if not isinstance(value, Mapping):
        return f"'{name}' is not a group of tensors"
    if isinstance(like, Mapping) and (wrong := difference(value, like)):
        return f"{name}: {wrong}"
    for inner, tensor in value.items():
        low, high = _range(tensor)
        where = f"{name}/{safe(inner)}"
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"'{where}' holds NaN or infinity"
        most = LARGEST_WEIGHT if tensor.is_floating_point() else LARGEST_NUMBER
        if inner.endswith("running_var"):
            most = LARGEST_VARIANCE
        if inner.endswith(("running_var", "num_batches_tracked")) and low < 0:
            return f"'{where}' is {low:g}, but never below 0"
        if max(-low, high) > most:
            return f"'{where}' holds {high if high > most else low:g}, more than {most:g} at most"
    return ""


def _invalid_number(kind: Kind, name: str, value: Value, party: Registration) -> str:
    if not isinstance(value, int | float):
        return f"'{name}' is not a number"
    if not (math.isfinite(value) and abs(value) <= LARGEST_NUMBER):
        return f"'{name}' is {value:g}, not a number up to {LARGEST_NUMBER:g}"
    if kind.word == "share" and not 0 <= value <= 1 + 1e-6:  # a mean of probabilities may be off by a rounding
        return f"'{name}' is {value:g}, expected a share from 0 to 1"
    if kind.word == "count" and not (0 <= value <= party.most and value == int(value)):
        return f"'{name}' is {value:g}, expected a whole number from 0 to {party.most:g}"
    return ""


def _invalid_tensor(kind: Kind, name: str, value: Value, party: Registration, classes: int) -> str:
    expected = kind.sizes(classes)
    if not isinstance(value, Tensor) or list(value.shape) != expected:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        return f"'{name}' is {got}, expected {expected}"
    if value.dtype != kind.dtype:
        return f"'{name}' is {value.dtype}, expected {kind.dtype}"
    low, high = _range(value)
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"'{name}' holds NaN or infinity"
    if max(-low, high) > LARGEST_NUMBER:
        return f"'{name}' holds {high if high > LARGEST_NUMBER else low:g}, more than {LARGEST_NUMBER:g} at most"
    if kind.word and low < 0:
        return f"'{name}' holds {low:g}, but {kind.word} are never below 0"
    sums = value.double().sum(dim=-1).flatten()
    if kind.word == "counts" and float(sums.sum()) > party.most * (1 + ROUNDING):
        return f"'{name}' counts {float(sums.sum()):g} images, at most {party.most:g} are possible"
    if kind.word.startswith("distribution"):
        off = (sums - 1).abs() > SUMS_TO_ONE
        if kind.word == "distributions":
            off &= sums != 0
        if bool(off.any()):
            return f"'{name}' sums to {float(sums[off][0]):g}, expected 1"
    return ""


def _not_finite(name: str, value: Value) -> str:
    tensors = value.values() if isinstance(value, Mapping) else [value]
    for entry in tensors:
        low, high = _range(entry) if isinstance(entry, Tensor) else (float(entry), float(entry))
        if not (math.isfinite(low) and math.isfinite(high)):
            return f"'{name}' holds NaN or infinity"
    return ""


def _range(tensor: Tensor) -> tuple[float, float]:
    """The lowest and the highest number; NaN if one is NaN. Looks at each number once."""
    if not tensor.numel():
        return 0.0, 0.0
    low, high = tensor.aminmax()
    return float(low), float(high)
