"""How good a model is on labelled images of any origin."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tacit.core.errors import TacitError
from tacit.data import own
from tacit.data.download import Progress, silent
from tacit.data.federation import adapt
from tacit.data.sources import is_own, load
from tacit.evaluation import metrics
from tacit.inference.calibrate import fit_temperature
from tacit.inference.measure import ENOUGH_LABELS, measure
from tacit.inference.model import Model, save_description
from tacit.inference.predict import predict_items
from tacit.runs.folder import Run
from tacit.runs.plan import prepare


@dataclass
class Assessment:
    """The figures of a model on some labelled images, and what could not be used."""

    data: str
    probs: Tensor  # [N, K], calibrated
    labels: Tensor  # [N]
    classes: tuple[str, ...]
    left_out: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        further = {
            "auc": metrics.macro_auc(self.probs, self.labels),
            "balanced_accuracy": metrics.balanced_accuracy(self.probs, self.labels),
            "macro_f1": metrics.macro_f1(self.probs, self.labels),
        }
        plain = {name: None if value != value else value for name, value in further.items()}
        return {"data": self.data, "classes": self.classes, **measure(self.probs, self.labels), **plain}


def assess(model: Model, data: str, progress: Progress = silent) -> Assessment:
    """The model on labelled images: the run's own test set (''), your own data by its path, or a named set's test set.

    Of own data the test part is taken where there is one, else every labelled image.
    """
    if not data:
        return _own_test(model)
    if is_own(data):
        return _labeled_at(model, Path(data).expanduser(), progress)
    dataset = adapt(load(data, progress=progress), model.description.size, model.description.channels == 3)
    if dataset.classes != model.description.classes or dataset.channels != model.description.channels:
        raise TacitError(
            f"The model knows {_few(model.description.classes)}, but '{data}' has {_few(dataset.classes)} "
            f"({dataset.channels} channels): it cannot be tested on that."
        )
    labels = torch.from_numpy(dataset.test_labels.copy())
    images = torch.from_numpy(dataset.test_images.copy())
    return Assessment(data, model.probabilities(images), labels, model.description.classes)


def _own_test(model: Model) -> Assessment:
    if not model.place.is_dir():
        raise TacitError(f"{model.place} is an exported model without test images: say on which, with --data.")
    run = Run(model.place)
    plan = prepare(run.experiment, run.split_path)
    images = torch.from_numpy(plan.dataset.test_images[plan.split.test])
    labels = torch.from_numpy(plan.dataset.test_labels[plan.split.test])
    return Assessment(f"the test images of {model.place}", model.probabilities(images), labels, plan.dataset.classes)


def _labeled_at(model: Model, path: Path, progress: Progress) -> Assessment:
    report = own.inspect(path, progress, known=model.description.classes)
    known = {name: number for number, name in enumerate(model.description.classes)}
    part = [item for item in report.items if item.label and (item.part == "test" or not report.has_test)]
    strange = [item for item in part if item.label not in known]
    items = [item for item in part if item.label in known]
    left_out = [f"{path.name} ({why})" for path, why in report.unreadable]
    if strange:
        names = sorted({item.label for item in strange})
        left_out.append(f"{len(strange)} images of classes that the model does not know: {_few(tuple(names))}")
    if not items:
        raise TacitError(
            f"{path} has no labelled image of the classes that the model knows ({_few(model.description.classes)}). "
            "Expected a folder for each class by these names, or a table with the columns path and label."
        )
    found = predict_items(model, items, progress=progress)
    labels = torch.tensor([known[item.label] for item in items])
    return Assessment(str(path), torch.from_numpy(found.probabilities), labels, model.description.classes, left_out)


def recalibrate(model: Model, found: Assessment) -> float:
    """Fit the temperature on these labels and save it with the run; returns it. Temperatures multiply."""
    if len(found.labels) < ENOUGH_LABELS:
        raise TacitError(f"{len(found.labels)} labels are too few for a temperature; {ENOUGH_LABELS} are needed.")
    if not model.place.is_dir():
        raise TacitError(f"{model.place} is an exported file. Calibrate the run, and export it again.")
    fitted = round(model.description.temperature * fit_temperature(found.probs, found.labels), 4)
    changed = replace(model.description, temperature=fitted, calibrated_on=len(found.labels))
    save_description(model.place, changed)
    return fitted


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
