"""Label advice: for each client, which of its unlabelled images would help most. The list stays with the client."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tacit.core.payload import write_atomically
from tacit.core.text import as_bytes, csv_text
from tacit.data.split import party_names
from tacit.inference.advice import margins, worth_labelling
from tacit.inference.model import Model, load_model
from tacit.runs.folder import Run
from tacit.runs.plan import prepare

CRITERION = (
    "the smallest margin between the two most probable classes, the class with the fewest labels (known and already "
    "listed) always next"
)


@dataclass(frozen=True)
class Advice:
    """What one client is advised; only the counts leave it."""

    client: str
    unlabeled: int
    listed: int
    margin: float  # the mean over the list
    file: Path  # on the client's own disk


def advise(run: Run, count: int) -> list[Advice]:
    """Write a list of `count` images for each client into that client's own folder."""
    model = load_model(run.folder)
    plan = prepare(run.experiment, run.split_path)
    dataset = plan.dataset
    found = []
    for number, (name, part) in enumerate(zip(party_names(plan.split), plan.split.clients, strict=True)):
        index = np.setdiff1d(part.unlabeled, part.labeled)
        images = torch.from_numpy(np.ascontiguousarray(dataset.train_images[index]))
        labels = torch.from_numpy(np.asarray(dataset.train_labels)[part.labeled])
        files = [dataset.train_files[i] if dataset.train_files else f"{dataset.name} image {i}" for i in index]
        path = run.memory_folder / f"client-{number}" / "advice.csv"
        found.append(advise_client(name, model, images, files, labels, count, path))
    return found


def advise_client(
    name: str, model: Model, images: Tensor, files: list[str], labels: Tensor, count: int, path: Path
) -> Advice:
    """One client's list, from its own images and labels and the model: what a real site runs at home."""
    distinct = _distinct(images)
    probs = model.probabilities(images[distinct])
    known = torch.bincount(labels, minlength=len(model.description.classes))
    chosen = worth_labelling(probs, known, count)
    rows: list[tuple[object, ...]] = [("rank", "image", "margin", "prediction", "confidence", "second")]
    margin = margins(probs)
    for rank, place in enumerate(chosen.tolist(), start=1):
        best = probs[place].topk(2)
        first, second = (model.description.classes[int(one)] for one in best.indices)
        rows.append(
            (rank, files[distinct[place]], f"{float(margin[place]):.4f}", first, f"{float(best.values[0]):.4f}", second)
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, as_bytes(csv_text(rows)))
    mean = float(margin[chosen].mean()) if len(chosen) else 0.0
    return Advice(name, len(images), len(chosen), mean, path)


def _distinct(images: Tensor) -> list[int]:
    """The first of each set of images with equal pixels: nobody should label one picture twice."""
    first: dict[bytes, int] = {}
    for number, image in enumerate(images):
        first.setdefault(image.numpy().tobytes(), number)
    return list(first.values())
