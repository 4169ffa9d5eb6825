"""What travels between the server and a site: a small header that is checked word for word, and one payload.

An envelope is a mark, the header's length, the header as JSON, and the payload as in `tacit.core.payload`. Whatever is
not exactly that is refused; nothing in it is ever executed. A header has one spelling, that of `pack`: no key twice, no
other order, no number written in another way.
"""

import json
import struct
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tacit.core.errors import TacitError
from tacit.core.text import safe

MARK = b"tacit-site-1\n"
WHO = b"tacit-who\n"  # what is your name? Without keys, on one machine; and to hear whether a silent site is back
LARGEST_HEADER = 1 << 20
SECURE = ("keys", "shares", "masked", "unmask")  # the questions of secure aggregation, in their order
LARGEST_WHY = 1000  # characters of a refusal


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds characters that cannot be shown")
    return text


Word = Annotated[str, Field(max_length=100), AfterValidator(_printable)]
RunName = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,60}$")]  # becomes the name of a folder at the site
Number = Annotated[int, Field(ge=0, lt=2**31)]


class Header(BaseModel):
    """Frozen, and with no room for anything that is not named."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SharedFacts(Header):
    """What the site must know about the federation; see `tacit.data.party.Facts`."""

    model_config = ConfigDict(allow_inf_nan=False)

    classes: Annotated[
        tuple[Annotated[str, Field(max_length=100)], ...], Field(strict=False, min_length=2, max_length=10_000)
    ]
    channels: Literal[1, 3]
    size: Annotated[int, Field(ge=1, le=4096)]
    mean: Annotated[tuple[float, ...], Field(strict=False, max_length=3)]
    std: Annotated[tuple[float, ...], Field(strict=False, max_length=3)]
    mirror: bool
    depth: Annotated[int, Field(ge=8, le=16)] = 16

    @model_validator(mode="after")
    def _one_for_each_channel(self) -> "SharedFacts":
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError("mean and std need one number for each channel")
        return self


class Request(Header):
    """What the server wants. `hello`: can you take part? `train`: do this round (the payload is the task's). `judge`:
    how good is this model on what you keep back (`data.validation`)? `compare`: on how many of those images is which of
    these models right (`[guard]`)? With secure aggregation, instead of `train`, the four questions of
    `tacit.sites.unseen`.

    In a hello, `step` is how many rounds are done: what the site kept in later ones, which are run again, is forgotten.
    """

    kind: Literal["hello", "train", "judge", "compare", "keys", "shares", "masked", "unmask"]
    version: Word
    run: RunName
    experiment: dict[str, object]  # in the one form of `tacit.sites.accept`
    method_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]  # of the method's file, if it is none of tacit's
    frozen_sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]  # of what net.train freezes: it is not sent
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

    @model_validator(mode="after")
    def _numbers_fit(self) -> "Request":
        if max((self.client, *self.labeled_clients)) >= self.clients:
            raise ValueError("there are fewer clients")
        if self.kind in ("train", *SECURE) and self.round >= self.rounds:
            raise ValueError("there are fewer rounds")
        return self


class Response(Header):
    """What a site says. Beside the payload (`Reply.send`) these few words are all that leaves it."""

    kind: Literal["hello", "train", "judge", "compare", "keys", "shares", "masked", "unmask", "refused", "waiting"]
    client: Number = 0
    group: Number = 0
    why: Annotated[str, Field(max_length=LARGEST_WHY)] = ""  # refused, waiting
    labeled: bool = False  # hello: does this site hold labels?
    images: Number = 0  # hello: how many images it takes part with, labelled and unlabelled
    answered: Number = 0  # hello: how many rounds of this run were done when it answered last
    examples: float = 0.0
    metrics: Annotated[dict[Word, float], Field(max_length=100)] = {}


H = TypeVar("H", bound=Header)


def pack(header: Header, payload: bytes = b"") -> bytes:
    """One envelope.

    >>> header, payload = unpack(pack(Response(kind="hello", labeled=True), b"..."), Response)
    >>> header.labeled, payload
    (True, b'...')
    """
    text = _text(header)
    return MARK + struct.pack("<I", len(text)) + text + payload


def _text(header: Header) -> bytes:
    return json.dumps(header.model_dump()).encode()


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
    text = data[start : start + length]
    try:
        header = kind.model_validate(json.loads(text))
        if _text(header) != text:
            raise TacitError("a header that no tacit writes (it has another spelling)")
        return header, data[start + length :]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = safe(".".join(str(part) for part in first["loc"]), 60)
        raise TacitError(f"a header that no tacit writes ({where}: {safe(first['msg'].lower(), 200)})") from None
    except (ValueError, RecursionError) as error:
        raise TacitError(f"a header that cannot be read ({type(error).__name__})") from None
