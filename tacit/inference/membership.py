"""What a finished model gives away about its training images: two attacks of membership inference on it.

An attacker holds the model, an image and its label, and guesses whether the model learned from it. Members here are
training images, others are test images; both sides have the same share of each class, so that the class tells nothing.

- **loss** (Yeom et al., Privacy Risk in Machine Learning, CSF 2018): the lower the loss, the more likely a member.
- **lira** (after Carlini et al., IEEE S&P 2022): the logit of the label's probability, φ = log(p / (1 − p)), averaged
  over the image and weak views of it, against a Gaussian of its class that is fitted on others. Theirs is fitted for
  each image on shadow models that did not learn from it; this one has no shadow models, and is weaker. So what is
  found is a lower bound: it is given away at least that much.

Images that were learned from without labels are a group of their own: there the model's own prediction is the label.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tacit.core import seeds
from tacit.core.errors import TacitError
from tacit.core.payload import Weights, content_digest
from tacit.evaluation.membership import Separation, separation
from tacit.inference.model import BATCH, Model
from tacit.runs.plan import Plan

FILE = "audit.json"
VIEWS = 4  # weak views of each image, beside the image itself
MOST = 5000  # images on either side
LEAST = 20  # members below which nothing is told
FEW = 10  # others of a class below which it has no Gaussian of its own
ATTACKS = ("loss", "lira")


@dataclass(frozen=True)
class Group:
    """The attacks on one kind of training images."""

    members: int
    others: int
    loss: Separation
    lira: Separation

    @property
    def strongest(self) -> str:
        return max(ATTACKS, key=lambda name: getattr(self, name).auc)


@dataclass(frozen=True)
class Audit:
    """What was found. A group is None where it could not be looked at, and `remarks` say why."""

    labeled: Group | None
    unlabeled: Group | None
    remarks: tuple[str, ...]
    model: str  # the digest of the weights


def audit_model(model: Model, plan: Plan, records: Sequence[Mapping[str, Any]], most: int = MOST) -> Audit:
    """Attack a run's model with its own training and test images, which must be here: so many of either at most."""
    if plan.experiment.backend.name == "flower":
        raise TacitError(
            "This run was trained at real sites: its training images are there and not here, so nobody here can audit "
            "it. Rehearse it as a simulation (tacit site rehearse), and audit that."
        )
    if not len(plan.split.test):
        raise TacitError(
            "This run has no test images. An audit compares training images with images that the model has not seen: "
            "give the data a test set, or let a part of it be held out, and train again."
        )
    labeled, unlabeled = trained_on(plan, records)
    with_labels = _attack(model, plan, labeled, "labeled", most)
    remarks = [] if with_labels else [f"Fewer than {LEAST} images with labels can be looked at."]
    without = None
    if any(record.get("accepted_ratio") is not None for record in records):
        without = _attack(model, plan, unlabeled, "unlabeled", most)
        remarks += [] if without else [f"Fewer than {LEAST} images without labels can be looked at."]
    else:
        remarks.append("The method told of no pseudo-labels, so images without labels are not looked at.")
    if with_labels is None and without is None:
        raise TacitError("Nothing can be audited. " + " ".join(remarks))
    return Audit(with_labels, without, tuple(remarks), digest_of_weights(model.weights))


def trained_on(plan: Plan, records: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """The images that parties which took part learned from: with labels, and without."""
    answered = {client for record in records for client in record["answered"]}
    parts = [part for number, part in enumerate(plan.split.clients) if number in answered]
    labeled = np.unique(np.concatenate([plan.split.server, *(part.labeled for part in parts)]))
    others = [np.zeros(0, np.int64), *(part.unlabeled for part in parts)]
    return labeled, np.setdiff1d(np.concatenate(others), labeled)


def _attack(model: Model, plan: Plan, index: np.ndarray, name: str, most: int) -> Group | None:
    """Both attacks on some training images; None where too few are left."""
    data, seed = plan.dataset, plan.experiment.seed
    chance = seeds.numpy_generator(seed, "audit", name)
    own, test = (chance.permutation(part)[: 2 * most] for part in (index, plan.split.test))
    images = np.concatenate([data.train_images[own], data.test_images[test]])
    known = np.concatenate([data.train_labels[own], data.test_labels[test]])
    members = np.arange(len(images)) < len(own)
    if name == "unlabeled" and len(own):
        known = logits_of(model, torch.from_numpy(images), chance).argmax(dim=1).numpy()
    chosen = same_shares(known, members, chance, most)
    if members[chosen].sum() < LEAST:
        return None
    shown, labels, members = torch.from_numpy(images[chosen]), torch.from_numpy(known[chosen]), members[chosen]
    plain = logits_of(model, shown, chance)
    losses = torch.nn.functional.cross_entropy(plain, labels, reduction="none").numpy()
    sure = confidence(plain, labels)
    for number in range(VIEWS if plan.setup.views.weak != "none" else 0):
        view = plan.setup.views.raw_weak(shown, seeds.generator(seed, "audit", name, f"view-{number}"))
        sure += confidence(logits_of(model, view, chance), labels)
    calibrated = against_others(sure.numpy(), labels.numpy(), members, chance)
    scores = {"loss": -losses, "lira": calibrated}
    found = {attack: separation(score[members], score[~members], chance) for attack, score in scores.items()}
    return Group(int(members.sum()), int((~members).sum()), **found)


def same_shares(labels: np.ndarray, is_member: np.ndarray, chance: np.random.Generator, most: int = MOST) -> np.ndarray:
    """A choice of images in which members and others have the same share of every class.

    As many members of a class as it has others at most; for each of them as many others as all classes can give.

    >>> labels, is_member = np.array([0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 2]), np.arange(11) < 3
    >>> chosen = same_shares(labels, is_member, np.random.default_rng(0))   # two others for each of three members
    >>> np.bincount(labels[chosen][:3]).tolist(), np.bincount(labels[chosen][3:]).tolist()
    ([2, 1], [4, 2])
    """
    own, rest = (np.bincount(labels[side], minlength=labels.max() + 1) for side in (is_member, ~is_member))
    members = np.minimum(own, rest)
    members = members * min(most, members.sum()) // max(members.sum(), 1)
    if not members.any():
        return np.zeros(0, np.int64)
    each = int((rest[members > 0] // members[members > 0]).min())
    each = max(1, min(each, most // int(members.sum())))
    chosen = []
    for side, numbers in ((is_member, members), (~is_member, each * members)):
        for label, number in enumerate(numbers):
            there = np.flatnonzero(side & (labels == label))
            chosen.append(np.sort(chance.choice(there, number, replace=False)))
    return np.concatenate(chosen)


@torch.inference_mode()
def logits_of(model: Model, images: Tensor, chance: np.random.Generator) -> Tensor:
    """The net's own logits, double, of uint8 images. Its temperature was fitted on test labels, and has no say here.

    Members and others are mixed in batches: with BN policy `batch` the others of a batch have a say.
    """
    order = torch.from_numpy(chance.permutation(len(images)))
    found = torch.zeros(len(images), len(model.description.classes), dtype=torch.float64)
    classifier = model.classifier
    for part in order.split(BATCH):
        found[part] = classifier.net((images[part].float() - classifier.zero) * classifier.scale).double()
    return found


def confidence(logits: Tensor, labels: Tensor) -> Tensor:
    """φ = log(p / (1 − p)) of the label's probability p, from logits: z_y − log Σ_{j≠y} exp z_j.

    >>> probs = torch.tensor([[0.8, 0.1, 0.1]], dtype=torch.float64)
    >>> round(confidence(probs.log(), torch.tensor([0])).exp().item(), 6)                # 0.8 / 0.2
    4.0
    """
    own = logits.gather(1, labels[:, None])
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return own[:, 0] - others.logsumexp(dim=1)


def against_others(
    sure: np.ndarray, labels: np.ndarray, is_member: np.ndarray, chance: np.random.Generator
) -> np.ndarray:
    """(φ − μ) / σ with the mean and deviation of the class among others.

    Everybody is compared with others that it is not among: all images are dealt into two halves, and each is compared
    with the others of the other half, members as well. So an image that is no member has no advantage.

    >>> sure, labels = np.array([0.0, 2.0] * 40 + [11.0] * 2), np.zeros(82, int)
    >>> found = against_others(sure, labels, np.arange(82) >= 80, np.random.default_rng(0))
    >>> bool((found[80:] > 8).all()), bool((np.abs(found[:80]) < 1.5).all())                 # (11 − 1) / 1
    (True, True)
    """
    half = np.zeros(len(sure), np.int64)
    for kind in (is_member, ~is_member):
        half[kind] = chance.permutation(int(kind.sum())) % 2
    scores = np.zeros(len(sure))
    for side in (0, 1):
        reference = (half != side) & ~is_member
        for label in np.unique(labels):
            same = reference & (labels == label)
            used = sure[same] if same.sum() >= FEW else sure[reference]
            place = (half == side) & (labels == label)
            scores[place] = (sure[place] - used.mean()) / max(float(used.std(ddof=1)), 1e-9)
    return scores


# --- Kept with the run -----------------------------------------------------------------------------------------------


def digest_of_weights(weights: Weights) -> str:
    """By which an audit knows its model, from a file or in memory."""
    return content_digest({"model": {name: weights[name].cpu() for name in sorted(weights)}})


def audit_text(found: Audit) -> str:
    """As it is saved."""
    return json.dumps(asdict(found), indent=2) + "\n"


def saved_audit(folder: Path, weights: Weights) -> Audit | None:
    """What an audit of this very model found; None where there was none, or of another model."""
    try:
        stored = json.loads((folder / FILE).read_text())
        groups = [None if stored[name] is None else _group(stored[name]) for name in ("labeled", "unlabeled")]
        found = Audit(groups[0], groups[1], tuple(stored["remarks"]), stored["model"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if found.model == digest_of_weights(weights) else None


def _group(stored: Mapping[str, Any]) -> Group:
    return Group(int(stored["members"]), int(stored["others"]), *(_separation(stored[name]) for name in ATTACKS))


def _separation(stored: Mapping[str, Any]) -> Separation:
    low, high = stored["auc_interval"]
    hits = stored["hits_interval"]
    return Separation(float(stored["auc"]), (low, high), stored["hits"], None if hits is None else (hits[0], hits[1]))
