"""The figures of a round over all clients, and of a run over all rounds."""

import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tacit.backends import Outcome
from tacit.contract.record import IN_SUMMARY
from tacit.evaluation.scores import accuracies, epoch_accuracies
from tacit.runs.plan import Plan
from tacit.version import __version__


def run_summary(
    plan: Plan, records: Sequence[Mapping[str, Any]], seconds: float, shipped: Mapping[str, Any]
) -> dict[str, Any]:
    """What summary.json holds; `seconds` are those of this session.

    `shipped`: of a run with a guard, its verdict and the test figures of the model that it chose; they count then,
    whichever rounds the method's own are reported of.
    """
    experiment = plan.experiment
    main = [r for r in records if r["stage"] == "main" and r.get("accuracy") is not None]
    return {
        "method": experiment.method["name"],
        "preset": experiment.method["preset"],
        "placement": experiment.data.placement,
        "reveal": experiment.data.reveal,
        "data": plan.dataset.name,
        "data_note": plan.dataset.note,
        "seed": experiment.seed,
        "reporting": experiment.reporting,
        **({"best_by": experiment.best_by} if experiment.reporting == "best" else {}),
        **with_shipped(summarize(main, experiment.reporting, experiment.best_by), shipped),
        "rounds": len(records),
        "parameters": sum(p.numel() for p in plan.setup.build().parameters()),
        "bytes_up": sum(r["bytes_up"] for r in records),
        "bytes_down": sum(r["bytes_down"] for r in records),
        "bytes_by_stage": {
            stage.name: sum(r["bytes_up"] + r["bytes_down"] for r in records if r["stage"] == stage.name)
            for stage in plan.stages
        },
        "memory_bytes": max([r.get("memory_bytes", 0) for r in records], default=0),  # the most at any time
        "seconds": sum(r["seconds"] for r in records),
        "seconds_this_session": seconds,
        "warnings": list(plan.warnings),
        "paper": experiment.paper.model_dump(exclude_none=True),
        "device": str(plan.setup.device),
        "cpu": list(dict.fromkeys(r["cpu"] for r in records if "cpu" in r)),  # of the server's process
        "versions": {
            "tacit": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }


def with_shipped(method: Mapping[str, Any], shipped: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the method's rounds, or those of the model that the guard chose in their place.

    On the images kept back the guard's verdict has them.

    >>> with_shipped({"accuracy": 0.5, "validation_accuracy": 0.6}, {"accuracy": 0.7, "per_class": [1], "guard": {}})
    {'accuracy': 0.7, 'guard': {}}
    """
    if not shipped:
        return dict(method)
    own = {name: value for name, value in method.items() if not name.startswith("validation_")}
    return {**own, **{name: shipped[name] for name in shipped if name in (*IN_SUMMARY, "guard")}}


def summarize(records: Sequence[Mapping[str, Any]], rule: str, best_by: str = "test") -> dict[str, Any]:
    """The result of a run by its reporting rule: the best round, the last one, or the last ten with their spread.

    The best round is found by its test accuracy, or by a figure of the images that parties keep back.

    >>> rounds = [{"round": 0, "accuracy": 0.5}, {"round": 1, "accuracy": 0.8}, {"round": 2, "accuracy": 0.7}]
    >>> summarize(rounds, "best")["accuracy"], summarize(rounds, "last")["accuracy"]
    (0.8, 0.7)
    >>> round(summarize(rounds, "last-10")["accuracy"], 4), round(summarize(rounds, "last-10")["accuracy_std"], 4)
    (0.6667, 0.1247)
    """
    if not records:
        return {"accuracy": None}
    if rule == "best":
        chosen = [best_round(records, best_by)]
    else:
        chosen = list(records[-10:] if rule == "last-10" else records[-1:])
    result: dict[str, Any] = {}
    for name in IN_SUMMARY:
        values = [record[name] for record in chosen if record.get(name) is not None]
        if values:
            result[name] = sum(values) / len(values)
            if rule == "last-10":
                result[f"{name}_std"] = float(np.std(values))
    result["reported_rounds"] = [record["round"] for record in chosen]
    return result


def best_round(records: Sequence[Mapping[str, Any]], best_by: str) -> Mapping[str, Any]:
    """The round with the best figure, the first of equals; where some judges were away, a round does not count.

    >>> rounds = [
    ...     {"round": 0, "accuracy": 0.9, "validation_loss": 0.5, "validation_images": 8.0},
    ...     {"round": 1, "accuracy": 0.8, "validation_loss": 0.4, "validation_images": 8.0},
    ...     {"round": 2, "accuracy": 0.7, "validation_loss": 0.1, "validation_images": 3.0},
    ... ]
    >>> best_round(rounds, "test")["round"], best_round(rounds, "loss")["round"]
    (0, 1)
    """
    if best_by == "test":
        return max(records, key=lambda record: record["accuracy"])
    key, sign = f"validation_{best_by}", -1 if best_by == "loss" else 1
    most = max(record.get("validation_images", 0.0) for record in records)
    judged = [r for r in records if r.get(key) is not None and r["validation_images"] == most]
    return max(judged, key=lambda record: sign * record[key]) if judged else records[-1]


def by_client(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    """Metrics and the audit's accuracies by name, then by client; what is not finite has no place in JSON.

    A client that had several tasks (one a group) tells their mean.

    >>> from tacit.contract.method import Reply
    >>> values = [(3, 1.0), (3, 2.0), (4, math.nan), (5, math.inf), (5, -math.inf), (6, 1e308), (6, 1e308)]
    >>> replies = [Reply(send={}, examples=1, metrics={"loss": loss}, client=client) for client, loss in values]
    >>> by_client([Outcome(reply, None, 0.0) for reply in replies])
    {'loss': {'3': 1.5, '4': None, '5': None, '6': None}}
    """
    values: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        for name, value in {**outcome.reply.metrics, **accuracies(outcome.audit or {})}.items():
            values.setdefault(name, {}).setdefault(str(outcome.reply.client), []).append(float(value))
    means = {name: {who: sum(all_) / len(all_) for who, all_ in each.items()} for name, each in values.items()}
    return {name: {who: x if math.isfinite(x) else None for who, x in each.items()} for name, each in means.items()}


def by_epoch(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """How right the accepted pseudo-labels were by local epoch: of all clients, and of each that has several epochs.

    Nothing where labels are given once a round, so that such records stay as they are.
    """
    audits: dict[str, list[dict[str, list[float]]]] = {}
    for outcome in outcomes:
        if outcome.audit is not None and "known_by_epoch" in outcome.audit:
            audits.setdefault(str(outcome.reply.client), []).append(outcome.audit)
    if not audits:
        return {}
    return {
        "pseudo_accuracy_by_epoch": epoch_accuracies([audit for each in audits.values() for audit in each]),
        "clients_pseudo_accuracy_by_epoch": {client: epoch_accuracies(each) for client, each in audits.items()},
    }


def cpu_seconds_of(clients: Sequence[float | None], server: float) -> float | None:
    """CPU seconds of all parties; None where somebody's are not known.

    >>> cpu_seconds_of([1.0, 2.0], 0.5), cpu_seconds_of([1.0, None], 0.5)
    (3.5, None)
    """
    known = [seconds for seconds in clients if seconds is not None]
    return round(sum(known) + server, 4) if len(known) == len(clients) else None
