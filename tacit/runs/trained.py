"""Which images a run learned from, as digests of their pixels: so that a test on them can be told from a real one.

Of own data only. A digest is of what the net sees (uint8, at its size), so that a copy under another name, at another
place or in another format without loss is recognised, too. Eight bytes an image; no name, no path, no pixel.
"""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from tacit.data.sources import is_own
from tacit.runs.plan import Plan

FILE = "trained.npz"
MOST_IMAGES = 4_000_000  # 32 MB of digests; of more nothing is noted


@dataclass(frozen=True)
class Trained:
    """Digests of the images that were trained on: with their labels, and without."""

    labeled: frozenset[int]
    unlabeled: frozenset[int]


def digest_of(image: np.ndarray | Tensor) -> int:
    """Equal for equal pixels [C, S, S].

    >>> grey = np.zeros((1, 8, 8), np.uint8)
    >>> digest_of(grey) == digest_of(grey.copy()), digest_of(grey) == digest_of(grey + 1)
    (True, False)
    """
    pixels = np.ascontiguousarray(image.numpy() if isinstance(image, Tensor) else image)
    whole = hashlib.blake2b(f"{pixels.shape};".encode() + pixels.tobytes(), digest_size=8).digest()
    return int.from_bytes(whole, "little")


def trained_file(plan: Plan) -> bytes | None:
    """The digests of all parties' training images; None where the data is not somebody's own."""
    data, images = plan.experiment.data, plan.dataset.train_images
    if plan.experiment.backend.name == "flower" or not (data.sites or is_own(data.name)):
        return None  # what real sites hold is not here
    parts = {
        "labeled": [plan.split.server, *(part.labeled for part in plan.split.clients)],
        "unlabeled": [part.unlabeled for part in plan.split.clients],
    }
    indices = {name: np.unique(np.concatenate(lists)) for name, lists in parts.items()}
    if sum(map(len, indices.values())) > MOST_IMAGES:
        return None
    digests = {
        name: np.unique(np.array([digest_of(images[i]) for i in index], np.uint64)) for name, index in indices.items()
    }
    file = io.BytesIO()
    np.savez(file, **digests)  # type: ignore[arg-type]  # digests do not compress
    return file.getvalue()


def load_trained(folder: Path) -> Trained | None:
    """What a run learned from; None where it did not note it, or the file is damaged."""
    try:
        with np.load(folder / FILE, allow_pickle=False) as file:
            parts = [frozenset(file[name].astype(np.uint64).tolist()) for name in ("labeled", "unlabeled")]
    except Exception:  # there is no end to what the readers of a damaged zip can raise
        return None
    return Trained(*parts)
