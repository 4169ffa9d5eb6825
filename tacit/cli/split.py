"""`tacit split`: who would hold what, as a table on the screen and as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tacit.core.console import SafeConsole, noted
from tacit.core.errors import TacitError
from tacit.core.paths import check_file
from tacit.core.text import as_word, safe, safe_lines
from tacit.data.dataset import Dataset
from tacit.data.draw import draw_split
from tacit.data.split import Split, class_table, load_split, party_names, title, warnings

MOST_ROWS = 40  # more clients, or more classes, are summarised


def show_split(split: Split, dataset: Dataset, out: Path | None, console: SafeConsole) -> None:
    """Print parties × classes and what to beware of; with `out`, draw the PNG and save the split beside it."""
    picture, saved = (None, None) if out is None else targets(out)
    labeled, unlabeled = class_table(split, np.asarray(dataset.train_labels), len(dataset.classes))
    console.print(Text(f"{safe_lines(title(split))}\n", "bold"))
    if len(split.clients) > MOST_ROWS:
        console.print(_by_class(dataset, labeled, unlabeled), "")
        console.print(_sizes(split, labeled, unlabeled), "")
    else:
        table = _parties_by_classes(split, dataset, labeled, unlabeled, console.width)
        console.print(table or _parties(split, dataset, labeled, unlabeled), "")
    tested = len(split.test)
    console.print(f"Tested on {tested:,} of {len(dataset.test_labels):,} test images.")
    if kept := sum(map(len, split.validation)):
        console.print(f"{kept:,} labelled images are kept back by their holders, to judge models by (data.validation).")
    for warning in warnings(split, dataset):
        console.print(noted(warning))
    if picture is not None and saved is not None:
        draw_split(split, dataset, picture)
        split.save(saved)
        console.print(f"Drawn in {picture}, saved as {saved} (use it with data.split).")


def targets(out: Path) -> tuple[Path, Path]:
    """The picture's and the split's file; never writes over an .npz that is something else."""
    if out.suffix not in ("", ".png", ".npz"):
        raise TacitError(f"--out {out}: the picture is a PNG file. Write --out {as_word(out.with_suffix('.png'))}.")
    check_file(out)
    picture, saved = out.with_suffix(".png"), out.with_suffix(".npz")
    for path in (picture, saved):
        check_file(path)
    if saved.exists():
        try:
            load_split(saved)
        except TacitError as error:
            raise TacitError(
                f"{saved} exists and is not a split, so nothing was written. Choose another --out."
            ) from error
    return picture, saved


def _cell(labeled: int, unlabeled: int) -> str:
    """Labelled with a star, unlabelled below; what is not there is not shown.

    >>> _cell(5, 0), _cell(0, 40), _cell(5, 40), _cell(0, 0)
    ('5*', '40', '5*\\n40', '·')
    """
    texts = [f"{labeled}*"] if labeled else []
    texts += [str(unlabeled)] if unlabeled else []
    return "\n".join(texts) or "·"


def _coloured(cell: str) -> Text:
    lines = [Text(line, "bold orange3" if line.endswith("*") else "") for line in cell.split("\n")]
    return Text("\n").join(lines)


def _table(heads: Sequence[str], gap: int = 2) -> Table:
    """A table without a frame; the first column holds names, the others numbers, and none is ever cut."""
    table = Table(box=SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), show_edge=False, pad_edge=False)
    for number, head in enumerate(heads):
        least = len(head) if number else len("client 99")
        table.add_column(head, justify="right" if number else "left", no_wrap=True, min_width=least)
    return table


def _party_names(split: Split) -> list[str]:
    return ["server", *map(safe, party_names(split))]


def _totals(split: Split) -> list[tuple[int, int]]:
    """Labelled and unlabelled images of each party; unlike the class table, with unknown labels."""
    return [(len(split.server), 0), *((len(part.labeled), len(part.unlabeled)) for part in split.clients)]


def _parties_by_classes(
    split: Split, dataset: Dataset, labeled: np.ndarray, unlabeled: np.ndarray, screen_width: int
) -> Table | None:
    """The whole table, with names cut short if need be; None if even its numbers are too wide for the screen."""
    totals = _totals(split)
    counts = [*zip(labeled, unlabeled, strict=True), (labeled.sum(axis=0), unlabeled.sum(axis=0))]
    sums = [*totals, (sum(a for a, _ in totals), sum(b for _, b in totals))]
    rows = [
        [party, *(_cell(int(a), int(b)) for a, b in zip(*both, strict=True)), _cell(*total)]
        for party, both, total in zip([*_party_names(split), "all"], counts, sums, strict=True)
        if sum(total)  # the server may hold nothing
    ]
    widths = [max(len(line) for row in rows for line in row[column].split("\n")) for column in range(len(rows[0]))]
    names = ["", *map(safe, dataset.classes), "in all"]
    widths[-1] = max(widths[-1], len("in all"))
    gap = 2 if sum(widths) + 2 * len(widths) <= screen_width else 1
    spare = screen_width - sum(widths) - gap * len(widths)
    if spare < 0:
        return None
    wishes = [max(len(name) - width, 0) for name, width in zip(names, widths, strict=True)]
    extra = max(wishes) if sum(wishes) <= spare else spare // len(names)
    table = _table([], gap)
    for name, width in zip(names, widths, strict=True):
        shown = min(len(name), width + extra)
        head = name if shown == len(name) else name[: shown - 1] + "…"
        table.add_column(head, justify="right" if name else "left", no_wrap=True)
    for row in rows[:-1]:
        table.add_row(*map(_coloured, row))
    table.add_section()
    table.add_row(*map(_coloured, rows[-1]))
    table.caption, table.caption_justify = "* labelled; the others unlabelled", "left"
    return table


def _parties(split: Split, dataset: Dataset, labeled: np.ndarray, unlabeled: np.ndarray) -> Table:
    """One line a party, for many classes or a narrow screen."""
    table = _table(["", "labelled", "unlabelled", "classes"])
    table.add_column("most of", overflow="ellipsis", no_wrap=True)
    for row, (party, total) in enumerate(zip(_party_names(split), _totals(split), strict=True)):
        if row == 0 and not total[0]:
            continue
        held = np.maximum(labeled[row], unlabeled[row])
        most = [which for which in np.argsort(-held, kind="stable")[:3] if held[which]]
        largest = ", ".join(f"{safe(dataset.classes[which])} {held[which]}" for which in most)
        numbers = (str(total[0]), str(total[1]), str(int((held > 0).sum())))
        table.add_row(party, *numbers, largest)
    return table


def _by_class(dataset: Dataset, labeled: np.ndarray, unlabeled: np.ndarray) -> Table:
    """One line a class, those with the fewest labels first if there are too many to show."""
    classes = np.arange(len(dataset.classes))
    caption = ""
    if len(classes) > MOST_ROWS:
        classes = np.argsort(labeled.sum(axis=0), kind="stable")[:MOST_ROWS]
        caption = f"the {MOST_ROWS} of {len(dataset.classes)} classes with the fewest labels"
    held = np.maximum(labeled, unlabeled)[1:]
    table = _table(["class", "labelled", "unlabelled", "clients that hold it", "most at one client"])
    table.caption = caption or None
    for which in classes:
        counts = (
            labeled[:, which].sum(),
            unlabeled[:, which].sum(),
            (held[:, which] > 0).sum(),
            held[:, which].max(initial=0),
        )
        table.add_row(safe(dataset.classes[which]), *(str(int(count)) for count in counts))
    return table


def _sizes(split: Split, labeled: np.ndarray, unlabeled: np.ndarray) -> Table:
    """Least, median and most over the clients."""
    totals = np.array(_totals(split))[1:]
    held_classes = (np.maximum(labeled, unlabeled)[1:] > 0).sum(axis=1)
    table = _table(["of a client", "least", "median", "most"])

    def add(name: str, numbers: Sequence[int] | np.ndarray) -> None:
        values = (np.min(numbers), np.median(numbers), np.max(numbers))
        table.add_row(name, *(f"{float(value):g}" for value in values))

    add("labelled images", totals[:, 0])
    add("unlabelled images", totals[:, 1])
    add("classes", held_classes)
    return table
