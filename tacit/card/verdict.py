"""What a run's pseudo-labels did to its classes, in plain sentences: the conclusion that the card's numbers hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tacit.core.text import markdown
from tacit.evaluation.interval import interval_text

UNEVEN = 3  # times as many labels for one class as for another: worth a sentence
OFTEN = 0.2  # of a class learned as one other: worth a warning
ENOUGH = 10  # images, below which a share is chance
WAYS = "more labels of {rare} (`tacit advise` says which images)"


@dataclass(frozen=True)
class Mistake:
    """Images of one class that were taken for another."""

    true: str
    given: str
    count: int
    of: int

    @property
    def share(self) -> float:
        return self.count / self.of

    @property
    def text(self) -> str:
        """
        >>> Mistake("mel", "nv", 286, 595).text
        '286 of 595 (48 %)'
        """
        return f"{self.count:,} of {self.of:,} ({100 * self.share:.0f} %)"


def worst_mistake(confusion: np.ndarray, classes: Sequence[str]) -> Mistake | None:
    """The class of which the largest share is taken for one other, of those with enough images; rows are the truth.

    >>> worst_mistake(np.array([[90, 10], [12, 8]]), ["nv", "mel"])
    Mistake(true='mel', given='nv', count=12, of=20)
    """
    found = []
    for number, row in enumerate(confusion):
        wrong = np.where(np.arange(len(row)) == number, 0, row)
        if row.sum() >= ENOUGH and wrong.max() > 0:
            found.append(Mistake(classes[number], classes[int(wrong.argmax())], int(wrong.max()), int(row.sum())))
    return max(found, key=lambda mistake: mistake.share, default=None)


def conclusions(
    classes: Sequence[str],
    labels: Sequence[int],
    record: Mapping[str, Any],
    tested: np.ndarray,
    remedies: Sequence[str] = (),
) -> list[str]:
    """What the last round's labels mean for the rare classes.

    `labels` are those trained on, by class; `record` is the round's; `tested` are the confusions on the test images;
    `remedies` are settings that were not used yet.
    """
    given = np.array(record.get("accepted_by_class") or [0] * len(classes))
    mixed = np.array(record["pseudo_confusion"]) if record.get("pseudo_confusion") else None
    found = _uneven(classes, labels, given, record.get("pseudo_accuracy_by_class"))
    mistake = worst_mistake(mixed if mixed is not None else tested, classes)
    if mistake is None or mistake.share < OFTEN:
        if mixed is not None:
            found.append(f"Of no class were more than {100 * OFTEN:.0f} % learned as one other.")
        return found
    true, other = markdown(mistake.true), markdown(mistake.given)
    if mixed is not None:
        found.append(f"**Of the images of {true} that were learned, {mistake.text} were learned as {other}.**")
    elif given.sum():
        found.append(
            f"**Of the test images of {true}, {mistake.text} are taken for {other}.** Nobody can know how many of the "
            f"unlabelled ones were learned as {other}; if they are like the test images, about that share."
        )
    else:
        return found
    number = classes.index(mistake.true)
    hits, own = int(tested[number, number]), int(tested[number].sum())
    recall = f" ({100 * hits / own:.0f} % of {own:,} test images, {interval_text(hits, own)})" if own else ""
    ways = [WAYS.format(rare=true), *remedies]
    found.append(
        f"Each of them teaches the model that {true} looks like {other}. That holds the recall of {true} down{recall}, "
        f"and more rounds of the same repeat it. What can help: {'; '.join(ways)}."
    )
    return found


def _uneven(
    classes: Sequence[str], labels: Sequence[int], given: np.ndarray, right: Sequence[float | None] | None
) -> list[str]:
    """How much more often one class was given than another."""
    if not given.sum() or len(given) < 2:
        return []
    most, least = int(given.argmax()), int(given.argmin())
    top, low = markdown(classes[most]), markdown(classes[least])
    share = right[most] if right else None
    sure = f", {100 * share:.0f} % of them right" if share is not None else ""
    if not given[least]:
        return [f"{low} was never given as a label in the last round; {top} {given[most]:,.0f} times{sure}."]
    times = given[most] / given[least]
    if times < UNEVEN:
        return []
    own = labels[most] / labels[least] if labels[least] else None
    beside = f" (of the labels that people gave, {own:.1f} times)" if own is not None else ""
    return [
        f"Labels kept for {top} are {times:.0f} times those for {low}{beside}: {given[most]:,.0f}{sure}, against "
        f"{given[least]:,.0f}."
    ]


def class_rows(
    classes: Sequence[str], labels: Sequence[int], record: Mapping[str, Any]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A table of the last round by class: labels, pseudo-labels, how often right, what its images were learned as."""
    kept = record.get("accepted_by_class") or []
    right, mixed = record.get("pseudo_accuracy_by_class") or [None] * len(kept), record.get("pseudo_confusion")
    known = any(share is not None for share in right)
    head = ("class", "labels", "given in the last round", *(("right when given",) if known else ()))
    rows: list[tuple[str, ...]] = []
    for number, (name, own, count, share) in enumerate(zip(classes, labels, kept, right, strict=True)):
        cells = [markdown(name), f"{own:,}", f"{count:,.0f}"]
        if known:
            cells.append("–" if share is None else f"{100 * share:.0f} %")
        if mixed:
            line = [0 if other == number else int(n) for other, n in enumerate(mixed[number])]
            worst = max(range(len(line)), key=line.__getitem__)
            taken = f"{line[worst]:,} of {int(sum(mixed[number])):,} as {markdown(classes[worst])}"
            cells.append(taken if line[worst] else "–")
        rows.append(tuple(cells))
    return (*head, *(("its images learned as another",) if mixed else ())), rows
