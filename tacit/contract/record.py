"""The record of a round: every key that the engine writes, with its title and unit, in one place.

The engine writes it, `hub.note` may not stand in its place, the report titles its figures by it, trackers count by it,
and records of older versions are read through `upgraded`. What a method notes (`hub.note`) is added under its own name.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Unit = Literal["share", "number", "bytes", "seconds", ""]  # "": not a figure


class Key(NamedTuple):
    """What is written under a key."""

    title: str
    unit: Unit = ""
    section: str = ""  # of the report
    in_summary: bool = False  # the reporting rule (best, last, last-10) is applied to it


KEYS: dict[str, Key] = {
    "stage": Key("the stage's name"),
    "round": Key("the round within its stage, from 0"),
    "step": Key("the round within the run, from 0"),
    # On the test images.
    "accuracy": Key("Accuracy on the test images", "share", "result", True),
    "auc": Key("AUC on the test images", "share", "result", True),
    "loss": Key("Loss on the test images", "number", "more", True),
    "macro_f1": Key("Macro F1", "share", "more", True),
    "balanced_accuracy": Key("Balanced accuracy on the test images", "share", "result", True),
    "ece": Key("Calibration error (ECE)", "share", "more", True),
    "largest_class": Key("Always naming the largest class", "share", "more", True),
    "per_class": Key("Accuracy by class", "share", "classes"),
    "clients_accuracy": Key("Accuracy of what each client sent", "share", "classes"),
    "clients_per_class": Key("Accuracy of what each client sent, by class", "share", "classes"),
    # On the labelled images that parties keep back (`data.validation`).
    "validation_accuracy": Key("Accuracy on the images kept back", "share", "more", True),
    "validation_balanced_accuracy": Key("Balanced accuracy on the images kept back", "share", "more", True),
    "validation_loss": Key("Loss on the images kept back", "number", "more", True),
    "validation_images": Key("Images kept back that were asked", "number"),
    # Of the guard, on the same images.
    "guard_method": Key("The method's model on the images kept back", "share", "more"),
    "guard_twin": Key("The labels alone on the images kept back", "share", "more"),
    "guard_average": Key("The average of the two on the images kept back", "share", "more"),
    "guard": Key("which of them would be shipped, and by how much each is ahead of the labels alone"),
    # Of pseudo-labels, compared with the truth where that is known: in simulations.
    "pseudo_accuracy": Key("Accepted pseudo-labels that are right", "share", "labels", True),
    "accepted_ratio": Key("Pseudo-labels accepted", "share", "labels", True),
    "pseudo_accuracy_by_class": Key("Accepted pseudo-labels that are right, by class given", "share", "classes"),
    "accepted_ratio_by_class": Key("Pseudo-labels accepted, by class given", "share", "classes"),
    "accepted_by_class": Key("How many are accepted, by class given", "number", "classes"),
    "pseudo_accuracy_by_epoch": Key("accepted pseudo-labels that are right, by local epoch, where there are several"),
    "clients_pseudo_accuracy_by_epoch": Key("the same, by client"),
    "pseudo_confusion": Key("Accepted pseudo-labels, by true class, then by class given", "number", "classes"),
    # Who took part.
    "asked": Key("Clients asked", "number", "travel"),
    "answered": Key("Clients whose reply was used", "number", "travel"),
    "refused": Key("whose reply was refused, and why"),
    "clipped": Key("whose reply was cut to its bounds, and why"),
    "update_norms": Key("how far each client moved from what was sent to it, as it came, refused ones included"),
    "norm_limit": Key("Largest norm of an update that is taken as it is", "number", "travel"),
    "chosen": Key("whose models multi-Krum chose"),
    "robust": Key("what took the place of the robust mean, and why"),
    "attackers": Key("whose reply was made bad on purpose"),
    "epsilon": Key("Privacy spent (epsilon)", "number", "more"),
    "privacy": Key("of what the spent privacy is made: clients, asked on average, noise of the sum"),
    "skipped": Key("why the model stays as it was"),
    "client_metrics": Key("what clients reported, by name, then by client"),
    # Of secure aggregation: the server sees sums alone.
    "secure_clipped": Key("Weights beyond privacy.range, clipped before the sum", "share", "travel"),
    "secure_error": Key("Error of a weight by fixed-point numbers, at most", "number", "travel"),
    # What it cost.
    "bytes_up": Key("Sent up, by all clients", "bytes", "travel"),
    "bytes_down": Key("Sent down, to all clients", "bytes", "travel"),
    "memory_bytes": Key("On the clients' disks", "bytes", "travel"),
    "seconds": Key("Seconds in a round", "seconds", "time"),
    "cpu_seconds": Key("CPU seconds in a round, all parties, evaluation aside", "seconds", "time"),
    "phases": Key("seconds by phase"),
    "cpu": Key("the type of CPU of the server's process"),
}

IN_SUMMARY = tuple(name for name, key in KEYS.items() if key.in_summary)
CLIENT_LISTS = ("asked", "answered", "refused")  # their length is the figure

# What earlier versions called them, in rounds.jsonl and summary.json. Runs are read for ever.
OLD_NAMES = {
    "kept_ratio": "accepted_ratio",
    "kept_ratio_std": "accepted_ratio_std",
    "kept_by_class": "accepted_by_class",
    "kept_ratio_by_class": "accepted_ratio_by_class",
    "kept_bytes": "memory_bytes",
}


def upgraded(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record or a summary with today's names, whichever version wrote it.

    >>> upgraded({"round": 3, "kept_ratio": 0.5, "app_u": [1.0]})
    {'round': 3, 'accepted_ratio': 0.5, 'app_u': [1.0]}
    """
    return {OLD_NAMES.get(name, name): value for name, value in record.items()}
