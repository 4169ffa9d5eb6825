"""What a model card says: task, result, data by party, method, pseudo-labels, what left the clients, limits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tacit.card.audit import given_away
from tacit.card.document import Bullets, Code, Document, Figure, Heading, Table, Text
from tacit.card.plot import calibration_plot
from tacit.card.safeguards import safeguard_sentences, travel_sentence
from tacit.card.verdict import class_rows, conclusions
from tacit.core.formatting import MAJORITY, size_text
from tacit.core.settings import Experiment
from tacit.core.text import markdown
from tacit.data.groups import NO_GROUPS
from tacit.data.split import class_table, party_names
from tacit.evaluation.interval import interval_text
from tacit.inference.membership import Audit
from tacit.inference.model import Description
from tacit.methods import find_method
from tacit.runs.plan import Plan

MOST_PARTIES = 30  # more are summed up
MOST_CLASSES = 50  # of which pseudo-labels are told one by one
FEW_TEST_IMAGES, FEW_LABELS = 200, 10  # below this a card warns
HOLDERS = {
    "server": "labels at the server, clients hold images without labels",
    "clients": "labels and images at the clients",
    "some-clients": "labels at some clients only",
}


def card(
    plan: Plan,
    summary: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    figures: Mapping[str, Any],
    description: Description,
    audit: Audit | None = None,
) -> Document:
    """The card of a finished run. `figures` is what `tacit.inference.measure.measure` found on the test images."""
    page = Document(f"Model card: {plan.experiment.title or f'{description.method} on {description.data}'}")
    _task(page, plan, summary, description)
    _result(page, plan, summary, figures, description)
    _calibration(page, figures, description)
    _parties(page, plan, records)
    _method(page, plan)
    _pseudo_labels(page, plan, records, figures)
    _travel(page, plan, records)
    if sentences := safeguard_sentences(plan, summary, records):
        page.add(Heading("How clients and model are protected"), *map(Text, sentences))
    if audit is not None:
        page.add(*given_away(audit))
    _limits(page, plan, figures, description)
    _again(page, plan, summary)
    return page


def per_cent(share: float | None, digits: int = 1) -> str:
    """
    >>> per_cent(0.123), per_cent(None)
    ('12.3 %', '–')
    """
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def _task(page: Document, plan: Plan, summary: Mapping[str, Any], description: Description) -> None:
    shown = ", ".join(map(markdown, description.classes[:20])) + (", …" if len(description.classes) > 20 else "")
    page.add(
        Heading("Task"),
        Text(f"Tells {len(description.classes)} classes of images apart: {shown}."),
        Text(
            f"Input: {description.rule}. Output: a probability for each class. Net: {description.net['name']}, "
            f"{summary['parameters']:,} parameters."
        ),
    )


def _result(
    page: Document,
    plan: Plan,
    summary: Mapping[str, Any],
    figures: Mapping[str, Any],
    description: Description,
) -> None:
    low, high = figures["interval"]
    confusion = np.array(figures["confusion"])
    images = confusion.sum(axis=1)
    largest = images.max() / max(images.sum(), 1)
    one_sided = largest > MAJORITY
    recalls = [confusion[k, k] / images[k] for k in range(len(images)) if images[k]]
    balanced = per_cent(float(np.mean(recalls)) if recalls else None)
    # Where one class has more than half of the images, plain accuracy flatters.
    first = f"**Balanced accuracy {balanced}** (the mean of the classes' recalls); a" if one_sided else "**A"
    page.add(
        Heading("How good it is"),
        Text(
            f"{first}ccuracy {per_cent(figures['accuracy'])}{'' if one_sided else '**'} (95 % confidence interval "
            f"{per_cent(low)} to {per_cent(high)}) on {figures['images']:,} test images, by {_which(summary)}. "
            f"Always naming the most frequent class would give {per_cent(float(largest))}."
        ),
    )
    named = {"balanced accuracy": "balanced_accuracy", "AUC": "auc", "macro F1": "macro_f1"}
    further = [f"{name} {per_cent(summary[key])}" for name, key in named.items() if summary.get(key) is not None]
    reported = f"By the reporting rule `{summary['reporting']}`: accuracy {per_cent(summary['accuracy'])}"
    page.add(Text("; ".join([reported, *further]) + "."))
    page.add(*_guard(summary))
    if "held out" in plan.dataset.note:
        page.add(
            Text(
                "**What the figures rest on:** no test set was given, so a part of the labelled images was held out "
                "and never trained on. They come from the same places as the training images; images from elsewhere "
                f"may be harder. {_about_groups(plan)}"
            )
        )
    labeled, _ = class_table(plan.split, np.asarray(plan.dataset.train_labels), len(description.classes))
    rows = []
    for number, name in enumerate(description.classes):
        hits, own, predicted = int(confusion[number, number]), int(images[number]), int(confusion[:, number].sum())
        rows.append(
            (
                markdown(name),
                f"{labeled[:, number].sum():,}",
                f"{own:,}",
                per_cent(hits / own) if own else "–",
                interval_text(hits, own),
                per_cent(hits / predicted) if predicted else "–",
            )
        )
    head = ("class", "labels trained on", "test images", "recognised", "95 % interval", "right when named")
    page.add(Heading("By class", 3), Table(head, rows))
    page.add(*_confused(confusion, description.classes))


def _which(summary: Mapping[str, Any]) -> str:
    return "the model that the guard chose" if "guard" in summary else "the model after the last round"


def _guard(summary: Mapping[str, Any]) -> list[Text | Table]:
    """Which model was shipped, and what the labels that were kept back say of each."""
    found = summary.get("guard")
    if not found:
        return []
    names = {"method": "the method's model", "twin": "the labels alone", "average": "the average of their weights"}
    rows = []
    for name, what in names.items():
        pair = found["against_twin"].get(name)
        span = f"{100 * pair['low']:+.1f} to {100 * pair['high']:+.1f}" if pair else "–"
        chosen = "shipped" if name == found["ships"] else ""
        rows.append((what, per_cent(found["figures"][name]), span, per_cent(found["tested"].get(name)), chosen))
    by = found["by"].replace("_", " ")
    head = ("model", f"{by} on {found['images']:,} images kept back", "points against the labels alone, 95 % interval")
    return [Text(f"**{found['sentence']}**"), Table((*head, "accuracy on the test images", ""), rows)]


def _about_groups(plan: Plan) -> str:
    """What the part that was held out shares with the training images."""
    if NO_GROUPS in plan.dataset.note:
        return "Whether they show patients (or lesions) that were trained on is not known: see the limits below."
    return "Images of one group (one patient, one lesion) were held out together."


def _confused(confusion: np.ndarray, classes: Sequence[str]) -> list[Text]:
    wrong = confusion * (1 - np.eye(len(confusion), dtype=confusion.dtype))
    worst = [divmod(int(place), len(wrong)) for place in np.argsort(-wrong, axis=None, kind="stable")[:3]]
    mistakes = [
        f"{markdown(classes[a])} taken for {markdown(classes[b])} ({wrong[a, b]})" for a, b in worst if wrong[a, b]
    ]
    return [Text(f"Most frequent mistakes: {', '.join(mistakes)}.")] if mistakes else []


def _calibration(page: Document, figures: Mapping[str, Any], description: Description) -> None:
    page.add(Heading("How sure it is"))
    if figures["ece"] is None:
        page.add(Text("There are no test images, so nothing is known."))
        return
    text = (
        f"On average the net's confidence is {100 * figures['ece']:.1f} points from how often it is right (expected "
        "calibration error, 15 bins)."
    )
    if description.calibrated_on:
        text += (
            f" Probabilities are therefore divided by the temperature {description.temperature:.2f}, fitted on the "
            f"{description.calibrated_on:,} held-out labels."
        )
        if figures["ece_calibrated"] is not None:
            text += f" With it the error is {100 * figures['ece_calibrated']:.1f} points (each half of "
            text += "the images by the temperature of the other half, groups kept together)."
    else:
        text += " There are too few held-out labels to fix that: take confidences as a ranking only."
    page.add(
        Text(text),
        Figure("calibration.svg", calibration_plot(figures["reliability"]), "Share of right predictions by confidence"),
        Table(
            ("confidence of the net", "images", "right"),
            [(per_cent(sure, 0), f"{count:,}", per_cent(right, 0)) for count, sure, right in figures["reliability"]],
        ),
    )


def _parties(page: Document, plan: Plan, records: Sequence[Mapping[str, Any]]) -> None:
    split = plan.split
    page.add(Heading("Data by party (counts only)"))
    if plan.experiment.privacy.on:  # how much a client holds, and how often it was asked, is not told
        page.add(Text(f"{len(split.server):,} labelled images at the server; {len(split.clients):,} clients."))
        return
    answers = [sum(number in record["answered"] for record in records) for number in range(len(split.clients))]
    rows = [("server", f"{len(split.server):,}", "0", "–")] if len(split.server) else []
    rows += [
        (markdown(name), f"{len(part.labeled):,}", f"{len(part.unlabeled):,}", f"{count:,} of {len(records):,}")
        for name, part, count in zip(party_names(split), split.clients, answers, strict=True)
    ]
    if len(rows) > MOST_PARTIES:
        sizes = [len(part.unlabeled) for part in split.clients]
        labels = [len(part.labeled) for part in split.clients]
        page.add(
            Text(
                f"{len(split.server):,} labelled images at the server. {len(sizes):,} clients hold {sum(labels):,} "
                f"labelled ({min(labels):,} to {max(labels):,} each) and {sum(sizes):,} unlabelled images "
                f"({min(sizes):,} to {max(sizes):,} each)."
            )
        )
    else:
        page.add(Table(("party", "labelled", "unlabelled", "rounds answered"), rows))
    if plan.dataset.note:
        page.add(Text(f"Of the data: {markdown(plan.dataset.note, 2000)}."))


def _method(page: Document, plan: Plan) -> None:
    experiment = plan.experiment
    method = plan.stages[-1].method
    options = ", ".join(
        f"{name} = {markdown(value)}" for name, value in experiment.method.items() if name not in ("name", "preset")
    )
    stages = ", then ".join(f"{stage.rounds} rounds of {stage.name}" for stage in plan.stages)
    name = markdown(Path(experiment.method["name"]).stem)
    page.add(
        Heading("How it was trained"),
        Text(
            f"Placement `{experiment.data.placement}`: {HOLDERS[experiment.data.placement]}. Partition "
            f"`{experiment.data.partition}`. {stages}; seed {experiment.seed}."
        ),
        Text(f"Method {name} ({options or 'no options'}). {method.citation}."),
    )
    if experiment.pretrain.on:
        learner = experiment.pretrain.method
        page.add(
            Text(f"It began with features that {learner} learned without labels. {find_method(learner).citation}.")
        )
    if experiment.privacy.secure_aggregation:
        seen = (
            "were added up as they are in secure aggregation" if experiment.backend.name != "flower" else "were masked"
        )
        page.add(
            Text(f"Replies of clients {seen}: what the server made the model of are sums over at least two clients.")
        )


def _pseudo_labels(
    page: Document, plan: Plan, records: Sequence[Mapping[str, Any]], figures: Mapping[str, Any]
) -> None:
    page.add(Heading("How pseudo-labels fared"))
    audited = [record for record in records if record.get("accepted_ratio") is not None]
    if not audited:
        page.add(Text("The method gave none, or did not tell."))
        return
    chosen = sorted({0, len(audited) // 4, len(audited) // 2, 3 * len(audited) // 4, len(audited) - 1})
    rows = [
        (
            f"{audited[i]['stage']} {audited[i]['round'] + 1}",
            per_cent(audited[i]["accepted_ratio"]),
            per_cent(_right(audited[i])),
        )
        for i in chosen
    ]
    page.add(Table(("round", "accepted", "right, of those accepted"), rows))
    if all(_right(record) is None for record in audited):
        page.add(Text("How many were right nobody can know: the images have no labels anywhere."))
    last = audited[-1]
    classes = plan.dataset.classes
    if not sum(last.get("accepted_by_class") or ()):
        return
    labeled, _ = class_table(plan.split, np.asarray(plan.dataset.train_labels), len(classes))
    labels = [int(count) for count in labeled.sum(axis=0)]
    if len(classes) <= MOST_CLASSES:
        page.add(Table(*class_rows(classes, labels, last)))
    page.add(*map(Text, conclusions(classes, labels, last, np.array(figures["confusion"]), _remedies(plan))))


def _remedies(plan: Plan) -> list[str]:
    """Settings that help rare classes, of those that this run did not use."""
    train, method = plan.experiment.train, plan.experiment.method
    ways = [] if train.class_weights == "balanced" else ['`train.class_weights = "balanced"`']
    if isinstance(threshold := method.get("threshold"), float) and threshold < 1:
        ways.append(f"a higher `method.threshold` than {threshold:g}")
    return ways


def _right(record: Mapping[str, Any]) -> float | None:
    right: float | None = record.get("pseudo_accuracy")
    return right


def _travel(page: Document, plan: Plan, records: Sequence[Mapping[str, Any]]) -> None:
    page.add(Heading("What left each client"))
    rows = []
    for stage in plan.stages:
        own = [record for record in records if record["stage"] == stage.name]
        replies = sum(len(record["answered"]) + len(record["refused"]) for record in own)
        each = sum(record["bytes_up"] for record in own) / replies if replies else 0
        names = ", ".join(f"{name.removesuffix('?')} ({kind})" for name, kind in stage.method.client_sends.items())
        kept = ", ".join(name.removesuffix("?") for name in stage.method.client_keeps) or "nothing"
        rows.append(
            (stage.name, names if replies else "nothing: no client was asked", size_text(each), f"{replies:,}", kept)
        )
    page.add(
        Table(("stage", "sent up", "each time", "times, all clients", "kept on the client's own disk"), rows),
        Text(travel_sentence(plan.experiment)),
    )
    if plan.experiment.guard.on:
        page.add(
            Text(
                "For the guard, every party that keeps labelled images back told on how many of them, by class, which "
                "of the models were right: counts, and nothing else."
            )
        )


def _limits(page: Document, plan: Plan, figures: Mapping[str, Any], description: Description) -> None:
    lines = [
        f"It knows the {len(description.classes)} classes above and no others: every image gets one of them. "
        "`tacit predict --abstain` leaves out what it is not sure of.",
        f"It sees {description.size}×{description.size} pixels; what is smaller than that in an image is lost.",
        "One run with one seed: another seed gives somewhat other figures.",
        "All parties were simulated on one machine."
        if plan.experiment.data.partition != "sites"
        else "The sites were played on one machine, each with its own folder.",
    ]
    if figures["images"] < FEW_TEST_IMAGES:
        lines.insert(
            0, f"**Only {figures['images']:,} test images**: the interval above is wide. Label more to know more."
        )
    labeled, _ = class_table(plan.split, np.asarray(plan.dataset.train_labels), len(description.classes))
    few = [name for name, count in zip(description.classes, labeled.sum(axis=0), strict=True) if count < FEW_LABELS]
    if few:
        lines.append(f"Fewer than {FEW_LABELS} labels to learn from: {', '.join(map(markdown, few))}.")
    if plan.dataset.train_groups is not None:
        lines.append("Test images of one group are alike, so the intervals are somewhat too narrow.")
    if description.depends_on_batch:
        lines.append("A prediction depends on the other images of its batch (BN policy `batch`).")
    page.add(Heading("Limits"), Bullets([*lines, *(markdown(warning, 2000) for warning in plan.warnings)]))


def _again(page: Document, plan: Plan, summary: Mapping[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    cpus = " and ".join(summary.get("cpu", []))
    types = f" ({cpus}; another type of CPU gives slightly other numbers)" if cpus else ""
    page.add(
        Heading("How to reproduce it"),
        Text(
            "Save this as `experiment.toml` (paths of your own data are shortened here; the run's folder has them in "
            f"full) and run `tacit run experiment.toml`. Made with {versions}, on {summary['device']}{types}. Data "
            f"fingerprint `{plan.dataset.fingerprint}`."
        ),
        Code(shareable(plan.experiment).to_toml()),
    )


def shareable(experiment: Experiment) -> Experiment:
    """The experiment without the folders of the machine it ran on.

    >>> shareable(Experiment(data={"name": "/home/me/photos", "sites": ["/home/me/photos/north"]})).data.sites
    ('north',)
    """
    data, method = experiment.data, experiment.method
    short = data.model_copy(
        update={
            "name": Path(data.name).name if Path(data.name).is_absolute() else data.name,
            "sites": tuple(Path(site).name for site in data.sites),
            "tests": tuple(Path(test).name for test in data.tests),
            "split": Path(data.split).name,
        }
    )
    name = Path(method["name"]).name if Path(method["name"]).is_absolute() else method["name"]
    return experiment.model_copy(update={"data": short, "method": {**method, "name": name}})
