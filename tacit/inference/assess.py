"""How good a model is on labelled images of any origin."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.core.errors import TacitError
from tacit.data import own
from tacit.data.download import Progress, silent
from tacit.data.federation import adapt
from tacit.data.sources import is_own, load
from tacit.evaluation import metrics
from tacit.inference.calibrate import at_temperature, fit_temperature
from tacit.inference.measure import ENOUGH_LABELS, cross_calibrated, measure
from tacit.inference.model import Model, save_description
from tacit.inference.predict import predict_items
from tacit.runs.folder import Run
from tacit.runs.plan import prepare
from tacit.runs.trained import digest_of, load_trained

OWN_TEST = "the test images of"


@dataclass
class Assessment:
    """The figures of a model on some labelled images, and what could not be used."""

    data: str
    probs: Tensor  # [N, K], calibrated
    labels: Tensor  # [N]
    classes: tuple[str, ...]
    left_out: list[str] = field(default_factory=list)
    sites: tuple[str, ...] = ()  # [N], where the images lie in one folder for each site
    labeled: Tensor | None = None  # [N]: the run trained on this image, with a label; None: nobody knows
    unlabeled: Tensor | None = None  # [N]: without one
    remark: str = ""  # why nobody knows
    groups: np.ndarray | None = None  # [N]: images that belong together
    fitted: float = 0.0  # the model's temperature, where it was fitted on these very labels

    @property
    def seen(self) -> Tensor | None:
        """[N]: the run trained on this image; None: nobody knows."""
        return None if self.labeled is None or self.unlabeled is None else self.labeled | self.unlabeled

    @property
    def judged(self) -> Tensor:
        """The probabilities that figures are made of. A temperature that was fitted on these labels would make them too
        good: then each half of the images has the other half's, or, where there are too few, the net's own."""
        if not self.fitted:
            return self.probs
        plain = at_temperature(self.probs, 1 / self.fitted)
        crossed = cross_calibrated(plain, self.labels, self.groups)
        return plain if crossed is None else crossed

    @property
    def figures(self) -> dict[str, Any]:
        """Everything as plain numbers, ready for JSON."""
        found = {"data": self.data, "classes": self.classes, **self._measured()}
        if self.labeled is not None and (seen := self.seen) is not None:
            found["trained_on"] = {"labeled": int(self.labeled.sum()), "unlabeled": int((seen & ~self.labeled).sum())}
            if 0 < int(seen.sum()) < len(seen):
                found["not_trained_on"] = self._measured(~seen)
        if self.sites:
            names = dict.fromkeys(self.sites)
            found["sites"] = {name: self._measured(torch.tensor([s == name for s in self.sites])) for name in names}
        return found

    def _measured(self, which: Tensor | None = None) -> dict[str, Any]:
        chosen = torch.ones_like(self.labels, dtype=torch.bool) if which is None else which
        probs, labels = self.judged[chosen], self.labels[chosen]
        groups = None if self.groups is None else self.groups[chosen.numpy()]
        further = {
            "auc": metrics.macro_auc(probs, labels),
            "balanced_accuracy": metrics.balanced_accuracy(probs, labels),
            "macro_f1": metrics.macro_f1(probs, labels),
            "largest_class": metrics.largest_class(labels),
        }
        return {
            **measure(probs, labels, groups),
            **{name: None if value != value else value for name, value in further.items()},
        }


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
    found = Assessment(f"{OWN_TEST} {model.place}", model.probabilities(images), labels, plan.dataset.classes)
    groups, about = plan.dataset.test_groups, model.description
    found.groups = None if groups is None else groups[plan.split.test]
    found.fitted = about.temperature if about.calibrated_on and not about.calibrated_later else 0.0
    return found


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
            "Expected a folder for each class by these names (or one such folder for each site), or a table with the "
            "columns path and label."
        )
    digests: list[int] = []
    found = predict_items(model, items, progress=progress, seen=lambda image: digests.append(digest_of(image)))
    labels = torch.tensor([known[item.label] for item in items])
    named = tuple(item.site for item in items) if len({item.site for item in items}) > 1 else ()
    result = Assessment(str(path), torch.from_numpy(found.probabilities), labels, model.description.classes, left_out)
    return _with_trained(replace(result, sites=named), model, digests)


def _with_trained(found: Assessment, model: Model, digests: list[int]) -> Assessment:
    """Which of the images the run learned from, by what it noted then."""
    if not model.place.is_dir():
        return replace(found, remark="an exported model does not know which images it was trained on.")
    trained = load_trained(model.place)
    if trained is None:
        own = is_own_run(model.place)
        return replace(found, remark="this run did not note which images it was trained on." if own else "")
    labeled, unlabeled = (
        torch.tensor([one in part for one in digests], dtype=torch.bool)
        for part in (trained.labeled, trained.unlabeled)
    )
    return replace(found, labeled=labeled, unlabeled=unlabeled)


def is_own_run(folder: Path) -> bool:
    """Whether a run trained on somebody's own images (what a named set holds for training is no secret)."""
    data = Run(folder).experiment.data
    return bool(data.sites) or is_own(data.name)


def recalibrate(model: Model, found: Assessment) -> tuple[float, int]:
    """Fit the temperature on these labels and save it with the run; returns it and on how many. Temperatures multiply.

    Images that were trained on are left out: there the model is surer than it may be.
    """
    fresh = ~found.seen if found.seen is not None else torch.ones_like(found.labels, dtype=torch.bool)
    probs, labels = found.probs[fresh], found.labels[fresh]
    if len(labels) < ENOUGH_LABELS:
        among = f" (of {len(found.labels)}; the others were trained on)" if len(labels) < len(found.labels) else ""
        raise TacitError(f"{len(labels)} labels{among} are too few for a temperature; {ENOUGH_LABELS} are needed.")
    if not model.place.is_dir():
        raise TacitError(f"{model.place} is an exported file. Calibrate the run, and export it again.")
    fitted = round(model.description.temperature * fit_temperature(probs, labels), 4)
    later = not found.data.startswith(OWN_TEST)
    changed = replace(model.description, temperature=fitted, calibrated_on=len(labels), calibrated_later=later)
    save_description(model.place, changed)
    return fitted, len(labels)


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
