"""What travels between the server and a site: a small header that is checked word for word, and one payload.

An envelope is a mark, the header's length, the header as JSON, and the payload as in `tacit.payload`. Whatever is
not exactly that is refused; nothing in it is ever executed.
"""

import json
import struct
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tacit.errors import TacitError
from tacit.text import safe

MARK = b"tacit-site-1\n"
WHO = b"tacit-who\n"  # only without keys, on one machine: what is your name?
LARGEST_HEADER = 1 << 20
Word = Annotated[str, Field(max_length=100)]
RunName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,60}$")]  # becomes the name of a folder at the site
Number = Annotated[int, Field(ge=0, lt=2**31)]


class Header(BaseModel):
    """Frozen, and with no room for anything that is not named."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SharedFacts(Header):
    """What the site must know about the federation; see `tacit.data.party.Facts`."""

    classes: Annotated[tuple[Word, ...], Field(strict=False, min_length=2, max_length=10_000)]
    channels: Literal[1, 3]
    size: Annotated[int, Field(ge=1, le=4096)]
    mean: Annotated[tuple[float, ...], Field(strict=False, max_length=3)]
    std: Annotated[tuple[float, ...], Field(strict=False, max_length=3)]
    mirror: bool


class Ask(Header):
    """What the server wants. `hello`: can you take part? `train`: do this round (the payload is the task's)."""

    kind: Literal["hello", "train"]
    version: Word
    run: RunName
    experiment: dict[str, object]
    facts: SharedFacts
    site: Word
    client: Number
    clients: Annotated[int, Field(ge=1, lt=2**31)]
    labeled_clients: Annotated[tuple[Number, ...], Field(strict=False)] = ()
    stage: Word = ""
    round: Number = 0
    rounds: Number = 0
    step: Number = 0
    wave: Number = 0
    group: Number = 0


class Answer(Header):
    """What a site says. Beside the payload (`Reply.send`) these few words are all that leaves it."""

    kind: Literal["hello", "train", "refused"]
    client: Number = 0
    group: Number = 0
    why: Annotated[str, Field(max_length=1000)] = ""  # refused
    labeled: bool = False  # hello: does this site hold labels?
    examples: float = 0.0
    metrics: Annotated[dict[Word, float], Field(max_length=100)] = {}


H = TypeVar("H", bound=Header)


def pack(header: Header, payload: bytes = b"") -> bytes:
    """One envelope.

    >>> header, payload = unpack(pack(Answer(kind="hello", labeled=True), b"..."), Answer)
    >>> header.labeled, payload
    (True, b'...')
    """
    text = json.dumps(header.model_dump()).encode()
    return MARK + struct.pack("<I", len(text)) + text + payload


def unpack(data: bytes, kind: type[H], largest: int = 1 << 34) -> tuple[H, bytes]:
    """The header and the payload's bytes of an envelope; anything else is refused with what is wrong with it."""
    if len(data) > largest:
        raise TacitError(f"an answer of {len(data)} bytes, at most {largest} were expected")
    start = len(MARK) + 4
    if len(data) < start or not data.startswith(MARK):
        raise TacitError("these bytes are no message of tacit")
    (length,) = struct.unpack("<I", data[len(MARK) : start])
    if length > min(LARGEST_HEADER, len(data) - start):
        raise TacitError(f"a header of {length} bytes, which is not there or too long")
    try:
        return kind.model_validate(json.loads(data[start : start + length])), data[start + length :]
    except ValidationError as error:
        first = error.errors()[0]
        where = safe(".".join(str(part) for part in first["loc"]))
        raise TacitError(f"a header that no tacit writes ({where}: {first['msg'].lower()})") from None
    except (ValueError, RecursionError) as error:
        raise TacitError(f"a header that cannot be read ({type(error).__name__})") from None
