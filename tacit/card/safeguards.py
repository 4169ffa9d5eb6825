"""What a model card says of [privacy], [robust] and attackers: what was promised, and what it does not cover."""

from collections.abc import Mapping, Sequence
from typing import Any

from tacit.core.settings import Experiment
from tacit.runs.plan import Plan

NO_NOISE = "tacit adds no noise and no encryption of its own"


def travel_sentence(experiment: Experiment) -> str:
    """What goes with a reply, and what weights tell."""
    secret = "Weights are no secret: something about the training images can be computed from them"
    if not experiment.privacy.on:
        figures = "With each reply go the number of examples and the method's own figures. Nothing else was sent"
        return f"{figures}: a reply with anything that is not in this table is refused. {secret}; {NO_NOISE}."
    figures = "Nothing else was sent, neither examples nor figures: a reply with anything else is refused"
    who = "each client added its share of the noise" if experiment.privacy.where == "clients" else "the server did so"
    noise = f"the model that came of them is noised ({who}, see below)" if experiment.privacy.noise else NO_NOISE
    return f"{figures}. {secret}; {noise}."


def safeguard_sentences(plan: Plan, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on what was bounded, defended and noised; none where nothing of it was on."""
    return [
        *_privacy(plan.experiment, summary),
        *_robust(plan.experiment, records),
        *_attackers(plan.experiment),
    ]


def _privacy(experiment: Experiment, summary: Mapping[str, Any]) -> list[str]:
    settings, told = experiment.privacy, summary.get("privacy")
    if not settings.on or told is None:
        return []
    if told["epsilon"] is None:
        return [f"Updates were clipped to norm {settings.clip:g}, but no noise was added: **no privacy is promised**."]
    lines = [
        f"**Differential privacy for clients: ε = {told['epsilon']:.3g} at δ = {settings.delta:g}** (neighbours: "
        f"{told['neighbours']}). Updates were clipped to norm {settings.clip:g}; the sum got Gaussian noise of "
        f"{settings.noise:g} times that"
        + (f", statistics {settings.statistics_noise:g} times their bound" if settings.statistics_noise else "")
        + ".",
        "It covers whoever sees the model, of every round or the last one. It does not cover the server, which saw "
        "each update"
        + (" with a share of the noise" if settings.where == "clients" else "")
        + ", nor the run's own folder: "
        "its record names who was asked.",
    ]
    if experiment.backend.name != "flower" and settings.randomness != "system":
        lines.append(
            "In this simulation the noise follows from the seed: it shows what noise costs, and hides nothing."
        )
    if told["ended"]:
        lines.append(f"The run ended early: {told['ended']}.")
    return lines


def _robust(experiment: Experiment, records: Sequence[Mapping[str, Any]]) -> list[str]:
    settings, lines = experiment.robust, []
    if settings.mean != "mean":
        how = {"trimmed-mean": f" (trim {settings.trim:g})", "multi-krum": f" (byzantine {settings.byzantine})"}
        lines.append(
            f"Clients' models were joined by {settings.mean}{how.get(settings.mean, '')}, not by a plain mean."
        )
    if settings.bounds:
        cut = sum(len(record.get("clipped", ())) for record in records)
        lines.append(f"What clients sent was bounded: {cut:,} replies were cut to their bounds.")
    return lines


def _attackers(experiment: Experiment) -> list[str]:
    faults = experiment.faults
    if not faults.attackers:
        return []
    return [
        f"**{faults.attackers} clients attacked on purpose** ({faults.attack}): this is a test of defences, no model."
    ]
