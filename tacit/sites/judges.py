"""What sites tell of models on the images that they keep back: counts, looked at before they count."""

import torch
from torch import Tensor

from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.payload import Limits
from tacit.sites.wire import Response, unpack

ROOM = 1 << 20  # bytes: no answer of this kind is larger
MOST_COMPARED = 4  # models in one request


def read_tally(response: bytes, client: int, classes: int, most: float) -> Tensor:
    """The tally in an envelope from a site that can have kept so many images back; zeros where it cannot be one."""
    nothing = torch.zeros(3, classes, dtype=torch.float64)
    told = _counts_in(response, client, "judge", "tally", (3, classes))
    if told is None:
        return nothing
    return told if (told[1] <= told[0]).all() and told[0].sum() <= most else nothing


def read_patterns(response: bytes, client: int, shape: tuple[int, ...], most: float) -> Tensor:
    """Likewise how many images were named rightly by which of several models: whole numbers."""
    nothing = torch.zeros(shape, dtype=torch.float64)
    told = _counts_in(response, client, "compare", "patterns", shape)
    if told is None:
        return nothing
    return told if (told == told.round()).all() and told.sum() <= most else nothing


def _counts_in(response: bytes, client: int, kind: str, name: str, shape: tuple[int, ...]) -> Tensor | None:
    """The counts of this shape in an answer of this kind by this client; None where there are none."""
    try:
        header, content = unpack(response, Response, ROOM)
        told = payload.tensor_in(payload.from_bytes(content, Limits(total=ROOM)), name).double()
    except (TacitError, KeyError, TypeError, ValueError):
        return None
    fits = header.kind == kind and header.client == client and tuple(told.shape) == shape
    return told if fits and torch.isfinite(told).all() and (told >= 0).all() else None
