"""The only code that sees true labels: how good is the model, and how right were the pseudo-labels."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tacit.contract.parties import Labelling
from tacit.evaluation import metrics

MOST_CLASSES = 20  # of a confusion of pseudo-labels that is recorded each round
PREDICT_BATCH = 256  # test images are predicted in fixed batches, so that BN policy `batch` gives one answer


def score(probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """The figures of one model on the test set; NaN (a class without test images) becomes None for JSON."""
    return {name: _plain(value) for name, value in metrics.summary(probs, labels).items()}


def tally(probs: Tensor, labels: Tensor, classes: int) -> Tensor:
    """What parties tell of a model on the images that they keep back, by true class [3, K]: how many there are, how
    many are named rightly, and the sum of their cross-entropies. Tallies of several parties are added up.

    >>> tally(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([1, 1]), 2)
    tensor([[0.0000, 2.0000],
            [0.0000, 1.0000],
            [0.0000, 0.9808]], dtype=torch.float64)
    """
    counts = torch.zeros(3, classes, dtype=torch.float64)
    if len(labels):
        chosen = probs.double().gather(1, labels[:, None]).squeeze(1).clamp(min=1e-12)
        right = (probs.argmax(dim=1) == labels).double()
        counts.index_add_(1, labels, torch.stack([torch.ones_like(chosen), right, -chosen.log()]))
    return counts


def validation_figures(counts: Tensor) -> dict[str, float]:
    """The figures of a model on the images that all parties keep back, from the sum of their tallies.

    >>> validation_figures(torch.tensor([[8.0, 2.0, 0.0], [8.0, 1.0, 0.0], [1.0, 4.0, 0.0]]))
    {'validation_images': 10.0, 'validation_accuracy': 0.9, 'validation_balanced_accuracy': 0.75,
    'validation_loss': 0.5}
    """
    images, right, loss = counts.double()
    if not images.sum() > 0:
        return {}
    present = images > 0
    return {
        "validation_images": float(images.sum()),
        "validation_accuracy": float(right.sum() / images.sum()),
        "validation_balanced_accuracy": float((right[present] / images[present]).mean()),
        "validation_loss": float(loss.sum() / images.sum()),
    }


def _plain(value: float | list[float]) -> float | list[float | None] | None:
    if isinstance(value, list):
        return [None if math.isnan(v) else v for v in value]
    return None if math.isnan(value) else value


def audit(labelling: Labelling, truth: Tensor, classes: int) -> dict[str, list[float]] | None:
    """Compare the pseudo-labels that a client told of with the truth: counts [K] by the class that was given.

    >>> labelling = Labelling([torch.tensor([0, 1, 2])], [torch.tensor([1, 1, 0])], [torch.tensor([True, True, False])])
    >>> audit(labelling, torch.tensor([1, 0, 0]), 2)
    {'seen': [1.0, 2.0], 'accepted': [0.0, 2.0], 'right': [0.0, 1.0], 'known': [0.0, 2.0],
    'mixed': [0.0, 1.0, 0.0, 1.0]}
    >>> sorted(audit(Labelling(named={"local": labelling}), torch.tensor([1, 0, 0]), 2))
    ['local:accepted', 'local:known', 'local:right', 'local:seen']
    """
    counts = {**_counts(labelling, truth, classes), **_by_epoch(labelling, truth)}
    if counts and classes <= MOST_CLASSES:
        counts["mixed"] = _mixed(labelling, truth, classes)
    for name, named in labelling.named.items():
        counts |= {f"{name}:{what}": count for what, count in _counts(named, truth, classes).items()}
    return counts or None


def _counts(labelling: Labelling, truth: Tensor, classes: int) -> dict[str, list[float]]:
    if not labelling.index:
        return {}
    index, label, accepted = (torch.cat(part) for part in (labelling.index, labelling.label, labelling.accepted))
    true = truth[index]

    def count(which: Tensor) -> list[float]:
        counts: list[float] = torch.bincount(label[which], minlength=classes).double().tolist()
        return counts

    return {
        "seen": count(torch.ones_like(accepted)),
        "accepted": count(accepted),
        "right": count(accepted & (label == true)),
        "known": count(accepted & (true >= 0)),
    }


def _by_epoch(labelling: Labelling, truth: Tensor) -> dict[str, list[float]]:
    """Of a client that labels its images more than once in a round: how many were accepted, and right, each time.

    An image is labelled once in a local epoch, so the time is the epoch.

    >>> twice = Labelling([torch.tensor([0, 1]), torch.tensor([1, 0])], [torch.tensor([1, 1])] * 2)
    >>> twice.accepted.extend([torch.tensor([True, True]), torch.tensor([True, False])])
    >>> _by_epoch(twice, torch.tensor([1, 0]))
    {'right_by_epoch': [1.0, 0.0], 'known_by_epoch': [2.0, 1.0]}
    """
    if not labelling.index:
        return {}
    index, label, accepted = (torch.cat(part) for part in (labelling.index, labelling.label, labelling.accepted))
    order = torch.argsort(index, stable=True)
    ranked = index[order]
    epoch = torch.empty_like(index)
    epoch[order] = torch.arange(len(index)) - torch.searchsorted(ranked, ranked)  # how often it was there before
    epochs = int(epoch.max()) + 1 if len(index) else 0
    if epochs < 2:
        return {}
    true = truth[index]
    which = {"right_by_epoch": accepted & (label == true), "known_by_epoch": accepted & (true >= 0)}
    return {name: torch.bincount(epoch[these], minlength=epochs).double().tolist() for name, these in which.items()}


def epoch_accuracies(audits: Sequence[Mapping[str, Sequence[float]]]) -> list[float | None]:
    """The share of right labels among the accepted ones, by local epoch; empty where nobody labelled twice.

    >>> epoch_accuracies([{"right_by_epoch": [1.0, 0.0], "known_by_epoch": [2.0, 0.0]}, {"seen": [3.0]}])
    [0.5, None]
    """
    told = [audit for audit in audits if "known_by_epoch" in audit]
    epochs = max((len(audit["known_by_epoch"]) for audit in told), default=0)

    def total(name: str, epoch: int) -> float:
        return sum(audit[name][epoch] for audit in told if epoch < len(audit[name]))

    pairs = [(total("right_by_epoch", epoch), total("known_by_epoch", epoch)) for epoch in range(epochs)]
    return [right / known if known else None for right, known in pairs]


def _mixed(labelling: Labelling, truth: Tensor, classes: int) -> list[float]:
    """Accepted labels by true class, then by the class that was given, in a row: counts [K · K]."""
    index, label, accepted = (torch.cat(part) for part in (labelling.index, labelling.label, labelling.accepted))
    true = truth[index]
    which = accepted & (true >= 0)
    counts: list[float] = torch.bincount(true[which] * classes + label[which], minlength=classes**2).double().tolist()
    return counts


def accuracies(counts: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The share of right labels, of those that were learned and of those that were told under a name.

    >>> accuracies({"right": [1.0, 2.0], "known": [2.0, 2.0], "local:right": [1.0, 0.0], "local:known": [4.0, 0.0]})
    {'pseudo_accuracy': 0.75, 'local_label_accuracy': 0.25}
    """
    result = {}
    for key in (key for key in counts if key.endswith("known") and sum(counts[key]) > 0):
        name = key.removesuffix("known")
        figure = f"{name.removesuffix(':')}_label_accuracy" if name else "pseudo_accuracy"
        result[figure] = sum(counts[f"{name}right"]) / sum(counts[key])
    return result


def sum_up(audits: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """One round's figures over all clients: accuracy of the accepted labels, share accepted, both by class too.

    >>> sum_up([{"seen": [1.0, 4.0], "accepted": [0.0, 2.0], "right": [0.0, 1.0], "known": [0.0, 2.0]}])
    {'pseudo_accuracy': 0.5, 'accepted_ratio': 0.4, 'pseudo_accuracy_by_class': [None, 0.5],
    'accepted_by_class': [0.0, 2.0], 'accepted_ratio_by_class': [0.0, 0.5]}
    """
    collected: dict[str, list[Sequence[float]]] = {}
    for counts in audits:
        for key, count in counts.items():
            if key.endswith("_by_epoch"):  # as many as there were epochs, not as there are classes
                continue
            collected.setdefault(key, []).append(count)
    total = {key: torch.tensor(counts, dtype=torch.float64).sum(dim=0) for key, counts in collected.items()}
    result: dict[str, Any] = {}
    if "seen" in total:
        right, known = total["right"], total["known"]
        seen, accepted = float(total["seen"].sum()), float(total["accepted"].sum())
        result = {
            "pseudo_accuracy": None,
            "accepted_ratio": accepted / seen if seen else None,
            "pseudo_accuracy_by_class": [float(r / n) if n > 0 else None for r, n in zip(right, known, strict=True)],
            "accepted_by_class": total["accepted"].tolist(),
            "accepted_ratio_by_class": [
                float(k / n) if n > 0 else None for k, n in zip(total["accepted"], total["seen"], strict=True)
            ],
        }
        mixed = total.get("mixed")
        if mixed is not None and mixed.sum() > 0:
            result["pseudo_confusion"] = mixed.reshape(len(right), -1).long().tolist()
    return {**result, **accuracies({key: count.tolist() for key, count in total.items()})}
