"""The papers' figures, from the records of runs: first as plain numbers, then as pictures (extra `plot`).

Nothing here trains or evaluates anything: what is drawn is what the run wrote down.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tacit.core.errors import TacitError
from tacit.core.paths import check_file
from tacit.core.text import safe
from tacit.data.federation import load_dataset
from tacit.data.split import class_table, load_split
from tacit.evaluation.metrics import jensen_shannon
from tacit.pieces.debias import bias_of
from tacit.runs.folder import Run

ENDINGS = (".png", ".svg", ".pdf")


class Spread(NamedTuple):
    """Mean, least and most over the clients of a round, as FedDB's Fig. 3 draws them."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(sum(values) / len(values), min(values), max(values))


class Tracking(NamedTuple):
    """How far the bias of one kind of model was from APP-U and from the label distribution, in one round."""

    round: int
    to_app_u: Spread
    to_labels: Spread


def label_distributions(run: Run) -> list[Tensor]:
    """The class counts [K] of each client's labelled images. Only a simulation knows them."""
    split, dataset = load_split(run.split_path), load_dataset(run.experiment.data)
    labeled, _ = class_table(split, dataset.train_labels, len(dataset.classes))
    return list(torch.from_numpy(labeled[1:]))  # the first row is the server's


def bias_tracking(run: Run) -> dict[str, list[Tracking]]:
    """FedDB's Fig. 3: Jensen-Shannon divergence of the true bias to APP-U and to the label distribution.

    `local`: each client's own model after training. `global`: the model that the round's clients were sent, as each
    client's images see it. The true bias is the class-wise accuracy on the test set, as shares (§4.2).
    """
    records = [record for record in run.records if record["stage"] == "main"]
    for needed, how in (
        ("app_u", "method.name=feddb"),
        ("app_u_before", "method.trace=true"),
        ("clients_per_class", "evaluate_clients=true"),
    ):
        if not any(needed in record for record in records):
            raise TacitError(f"{run.folder}: its record has no '{needed}'. Run it again with --set {how}.")
    labels = label_distributions(run)
    result: dict[str, list[Tracking]] = {"local": [], "global": []}
    for record in records:
        biases = [bias_of(_vector(per_class)) for per_class in record.get("clients_per_class") or []]
        if biases:
            result["local"].append(_tracking(record, biases, record["app_u"], labels))
    for before, record in pairwise(records):
        if "per_class" in before and record.get("app_u_before"):
            biases = [bias_of(_vector(before["per_class"]))] * len(record["answered"])
            result["global"].append(_tracking(record, biases, record["app_u_before"], labels))
    return result


def _vector(figures: Sequence[float | None]) -> Tensor:
    return torch.tensor([float("nan") if figure is None else figure for figure in figures])


def _tracking(
    record: Mapping[str, Any], biases: Sequence[Tensor], app_us: Sequence[Sequence[float]], labels: Sequence[Tensor]
) -> Tracking:
    own = [labels[client] for client in record["answered"]]
    to_app_u = [jensen_shannon(bias, torch.tensor(app_u)) for bias, app_u in zip(biases, app_us, strict=True)]
    to_labels = [jensen_shannon(bias, counts) for bias, counts in zip(biases, own, strict=True) if counts.sum() > 0]
    return Tracking(record["round"], Spread.of(to_app_u), Spread.of(to_labels))


def draw_bias(run: Run, path: Path) -> dict[str, list[Tracking]]:
    """FedDB's Fig. 3 as a picture; returns what was drawn."""
    check_picture(path)
    plt = pyplot()
    tracked = bias_tracking(run)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, (kind, rounds) in zip(axes, tracked.items(), strict=True):
        for label, spreads in (
            ("to the label distribution", [one.to_labels for one in rounds]),
            ("to APP-U", [one.to_app_u for one in rounds]),
        ):
            numbers = [one.round + 1 for one in rounds]
            (line,) = axis.plot(numbers, [spread.mean for spread in spreads], label=label)
            low, high = [spread.least for spread in spreads], [spread.most for spread in spreads]
            axis.fill_between(numbers, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axis.set(title=f"{kind} model", xlabel="round")
    axes[0].set_ylabel("JS divergence of the true bias")
    axes[0].legend()
    _write(figure, path)
    return tracked


def draw_labels(runs: Mapping[str, Run], path: Path) -> None:
    """FedDB's Figs. 6 and 7: how right the accepted pseudo-labels were, and how many were accepted, by round."""
    check_picture(path)
    figure, axes = pyplot().subplots(1, 2, figsize=(9, 3.4))
    drawn = (("pseudo_accuracy", "accepted pseudo-labels that are right"), ("accepted_ratio", "share accepted"))
    for axis, (name, title) in zip(axes, drawn, strict=True):
        for label, run in runs.items():
            points = [(record["step"] + 1, record[name]) for record in run.records if record.get(name) is not None]
            if points:
                shown = safe(label, 40).replace("$", r"\$")  # $ would be mathematics
                axis.plot(*zip(*points, strict=True), label=shown)
        axis.set(title=title, xlabel="round", ylim=(0, 1.02))
    axes[0].legend()
    _write(figure, path)


def draw_classes(run: Run, path: Path, round: int = -1, most: int = 6) -> None:
    """FedDB's Fig. 1: class-wise accuracy of local models and the global one, over each client's label distribution."""
    check_picture(path)
    records = [record for record in run.records if record.get("clients_per_class")]
    if not records:
        raise TacitError(f"{run.folder}: clients' models were not evaluated. Run it with --set evaluate_clients=true.")
    record = records[-1] if round < 0 else next((r for r in records if r["round"] == round), records[-1])
    labels = label_distributions(run)
    clients = record["answered"][:most]
    figure, axes = pyplot().subplots(len(clients), 1, figsize=(7, 1.5 * len(clients)), sharex=True, squeeze=False)
    for axis, client, per_class in zip(axes[:, 0], clients, record["clients_per_class"], strict=False):
        classes = range(len(per_class))
        axis.bar(classes, (labels[client] / labels[client].sum().clamp(min=1)).tolist(), color="0.8", label="labels")
        axis.plot(classes, _vector(per_class).tolist(), "o-", label="local model")
        axis.plot(classes, _vector(record["per_class"]).tolist(), "s--", label="global model")
        axis.set(ylim=(0, 1.05), ylabel=f"client {client}")
    axes[0, 0].set_title(f"accuracy by class, round {record['round'] + 1} (bars: share of the client's labels)")
    axes[-1, 0].legend(ncols=3, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.4))
    axes[-1, 0].set_xlabel("class")
    _write(figure, path)


def pyplot() -> ModuleType:
    """Matplotlib without a screen, or a word on how to get it."""
    try:
        import matplotlib
    except ImportError:
        raise TacitError("Pictures need matplotlib. Install it with: pip install 'tacit[plot]'") from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def check_picture(path: Path) -> None:
    """Refuse what could not be written as a picture, before anything is drawn."""
    check_file(path)
    if path.suffix not in ENDINGS:
        raise TacitError(f"--out {safe(path)}: pictures are written as {', '.join(ENDINGS)}. Write --out figure.png.")


def _write(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot().close(figure)
