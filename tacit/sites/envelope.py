"""An envelope as Flower's content: one array of bytes. No torch here: Flower's processes at sites import this."""

from typing import Any

from tacit.core.errors import TacitError

RECORD, ENTRY = "tacit", "envelope"


def to_record(envelope: bytes) -> Any:
    """Flower cuts a long array into pieces by itself; it does not look into the bytes."""
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({RECORD: ArrayRecord({ENTRY: Array("uint8", (len(envelope),), "tacit", envelope)})})


def from_record(content: Any) -> bytes:
    """The bytes as they are; nothing is decoded here."""
    try:
        data = content[RECORD][ENTRY].data
    except (KeyError, TypeError, AttributeError):
        data = None
    if not isinstance(data, bytes):
        raise TacitError("these bytes are no message of tacit")
    return data
