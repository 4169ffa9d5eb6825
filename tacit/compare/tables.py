"""The one table of results: for the screen, as Markdown, LaTeX, CSV and JSON. Made from finished runs, never typed."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tacit.compare.results import Result, budget_of
from tacit.compare.t_test import TEST
from tacit.core.formatting import clock, size_text
from tacit.core.text import csv_text as as_csv
from tacit.core.text import markdown as in_markdown
from tacit.core.text import safe

NOTHING = "–"
WIDEST = 1000  # characters of a cell or a note


@dataclass(frozen=True)
class Sheet:
    """A table in words: headings, and under the title of each section its rows of cells."""

    title: str
    heads: tuple[str, ...]
    sections: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]
    notes: tuple[str, ...] = ()


def percent(result: Result, name: str) -> str:
    """A share in per cent, with its standard deviation over seeds."""
    mean, spread = result.mean(name), result.spread(name)
    if mean is None:
        return NOTHING
    return f"{100 * mean:.1f}" + (f" ± {100 * spread:.1f}" if spread is not None else "")


def p_text(p: float | None) -> str:
    """A p value.

    >>> p_text(0.0312), p_text(0.00001), p_text(None), p_text(1.0)
    ('.031', '< .001', '–', '1.000')
    """
    if p is None:
        return NOTHING
    return "< .001" if p < 0.001 else f"{p:.3f}".removeprefix("0")


def _gap(gap: float | None) -> str:
    return NOTHING if gap is None else f"{100 * gap:.0f} %"


def _against(result: Result) -> str:
    test = result.against_first
    return NOTHING if test is None else f"{100 * test.difference:+.1f}"


def _paper(result: Result) -> str:
    number = result.experiment.paper.accuracy
    return NOTHING if number is None else f"{number:.2f}"


def scale_text(result: Result) -> str:
    """At which scale our numbers stand."""
    net = result.experiment.net.name
    return f"{result.images:,} images, {budget_of(result.experiment).rounds} rounds, {net}"


# Headings and what stands below them. A column in which no row has anything is left out.
COLUMNS: dict[str, Callable[[Result], str]] = {
    "method": lambda r: f"{r.label} ({r.bound} bound)" if r.bound and r.bound not in r.label else r.label,
    "seeds": lambda r: str(len(r.runs)),
    "balanced": lambda r: percent(r, "balanced_accuracy") if r.leads == "balanced_accuracy" else NOTHING,
    "accuracy": lambda r: percent(r, "accuracy"),
    "last five": lambda r: percent(r, "last_five"),
    "AUC": lambda r: percent(r, "auc"),
    "gap closed": lambda r: _gap(r.gap),
    "vs first": _against,
    "p": lambda r: p_text(r.against_first.p if r.against_first else None),
    "labels right": lambda r: percent(r, "pseudo_accuracy"),
    "accepted": lambda r: percent(r, "accepted_ratio"),
    "sent": lambda r: NOTHING if not r.mean("bytes") else size_text(r.mean("bytes")),
    "time a run": lambda r: NOTHING if r.mean("seconds") is None else clock(r.mean("seconds") or 0),
    "our scale": scale_text,
    "paper": _paper,
    "paper's gap": lambda r: _gap(r.paper_gap),
    "differs in": lambda r: ", ".join(r.differs) or NOTHING,
}
IN_COMPARISONS = tuple(name for name in COLUMNS if name not in ("last five", "labels right", "accepted"))


def sheet(
    blocks: Sequence[Sequence[Result]],
    title: str = "",
    notes: Sequence[str] = (),
    columns: Sequence[str] = IN_COMPARISONS,
) -> Sheet:
    """The table of some results, with what must be known to read it."""
    cells = [[[safe(COLUMNS[name](result), WIDEST) for name in columns] for result in block] for block in blocks]
    used = [k for k in range(len(columns)) if any(row[k] != NOTHING for block in cells for row in block)]
    heads = tuple(columns[k] for k in used)
    sections = tuple(
        (safe(block[0].setting, WIDEST), tuple(tuple(row[k] for k in used) for row in rows))
        for block, rows in zip(blocks, cells, strict=True)
    )
    return Sheet(title, heads, sections, (*legend(blocks, heads), *notes))


def legend(blocks: Sequence[Sequence[Result]], heads: Sequence[str]) -> list[str]:
    """How to read the columns that need it, and where published numbers stand."""
    everything = [result for block in blocks for result in block]
    rules = sorted({result.experiment.reporting for result in everything})
    rule = {"best": "of the best round", "last": "of the last round", "last-10": "mean of the last ten rounds"}
    which = " or ".join(rule[one] for one in rules)
    remarks = [f"Accuracy and AUC in per cent, {which}; mean ± standard deviation over seeds."]
    if "balanced" in heads:
        shares = sorted({round(100 * (r.mean("largest_class") or 0), 1) for r in everything})
        remarks.append(
            f"Balanced: mean of the classes' recalls, which leads here, for always naming the largest class would give "
            f"an accuracy of {' to '.join(f'{share:.1f}' for share in dict.fromkeys((shares[0], shares[-1])))} %. Gap, "
            "differences and p are of balanced accuracy."
        )
    if "gap closed" in heads:
        remarks.append("Gap closed: the way from the lower bound (the labels alone) to the upper one (all labels).")
    if "vs first" in heads:
        say_p = f"; p: {TEST}, not corrected for the number of rows" if "p" in heads else ""
        of = "" if "balanced" in heads else " of accuracy"
        remarks.append(f"Vs first: points{of} against the first row, same seeds and splits{say_p}.")
    sources = dict.fromkeys(result.experiment.paper.source for result in everything if _paper(result) != NOTHING)
    if sources:
        remarks.append(
            f"Paper: {'; '.join(source or 'source not given' for source in sources)}. Ours is at 'our scale'."
        )
    return remarks


# --- Forms ------------------------------------------------------------------------------------------------


def markdown(table: Sheet) -> str:
    """Markdown, as its notes already are. Several sections are told apart by a row with their title."""

    def text(given: str) -> str:
        return in_markdown(given, WIDEST)

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    lines = [f"# {text(table.title)}", ""] if table.title else []
    if len(table.sections) == 1 and table.sections[0][0]:
        lines += [f"{text(table.sections[0][0])}.", ""]
    lines += [line(list(map(text, table.heads))), "|" + "---|" * len(table.heads)]
    for section, rows in table.sections:
        if len(table.sections) > 1:
            lines.append(line([f"**{text(section)}**", *[""] * (len(table.heads) - 1)]))
        lines += [line(list(map(text, row))) for row in rows]
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes)]) + "\n"


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "<": "$<$",
    ">": "$>$",
    "|": "$|$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "τ": r"$\tau$",
    "…": r"\ldots{}",
    "√": r"$\surd$",
}


def latex_text(text: str) -> str:
    r"""Text with everything that LaTeX would take for a command written so that it is printed.

    >>> print(latex_text(r"a_b & 50 % {x} \y ± ~^#$ p < .01"))
    a\_b \& 50 \% \{x\} \textbackslash{}y $\pm$ \textasciitilde{}\textasciicircum{}\#\$ p $<$ .01
    """
    return "".join(LATEX.get(letter, letter) for letter in safe(text, WIDEST))


def latex(table: Sheet) -> str:
    """A LaTeX table (booktabs), its notes below it."""
    width = len(table.heads)

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(latex_text, cells)) + r" \\"

    lines = [r"% needs \usepackage{booktabs}", r"\begin{table}", r"\centering", r"\small"]
    if table.title:
        lines.append(rf"\caption{{{latex_text(table.title)}}}")
    lines += [rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule", line(table.heads)]
    for section, rows in table.sections:
        lines.append(r"\midrule")
        if len(table.sections) > 1:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textbf{{{latex_text(section)}}}}} \\")
        lines += [line(row) for row in rows]
    notes = [rf"\par\smallskip\footnotesize {latex_text(note)}" for note in table.notes]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes, r"\end{table}"]) + "\n"


def for_screen(table: Sheet, width: int) -> list[Table]:
    """The same for the terminal: a table a section, with the columns that have no room in a second one below it."""
    shown = []
    for section, rows in table.sections:
        for part, columns in enumerate(in_widths(table.heads, rows, width)):
            title = section if part == 0 else "continued"
            one = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
            for column in columns:
                words = table.heads[column] in ("method", "our scale", "differs in")
                one.add_column(table.heads[column], justify="left" if words else "right", no_wrap=not words)
            for row in rows:
                one.add_row(*(row[column] for column in columns))
            shown.append(one)
    return shown


def in_widths(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Which columns go side by side in so wide a screen; each part begins with the first column.

    >>> in_widths(["method", "accuracy", "AUC"], [["fixmatch", "90.1 ± 0.3", "99.0 ± 0.1"]], width=25)
    [[0, 1], [0, 2]]
    """
    needs = [3 + max(len(head), *(len(row[k]) for row in rows)) for k, head in enumerate(heads)]
    parts = [[0]]
    for column in range(1, len(heads)):
        if len(parts[-1]) > 1 and sum(needs[k] for k in parts[-1]) + needs[column] > width:
            parts.append([0])
        parts[-1].append(column)
    return parts


def records(blocks: Sequence[Sequence[Result]], notes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The figures of every row, unrounded, for programs: shares from 0 to 1, the paper's numbers in per cent."""
    found = []
    for block in blocks:
        for result in block:
            test, paper, budget = result.against_first, result.experiment.paper, budget_of(result.experiment)
            found.append(
                {
                    "setting": result.setting,
                    "row": result.label,
                    "method": result.experiment.method["name"],
                    "bound": result.bound,
                    "seeds": " ".join(map(str, result.runs)),
                    **{
                        f"{name}_{what}": getattr(result, what)(name)
                        for name in ("accuracy", "last_five", "auc", "pseudo_accuracy", "accepted_ratio")
                        for what in ("mean", "spread")
                    },
                    "accuracy_by_seed": " ".join(str(value) for value in result.values("accuracy")),
                    "gap_closed": result.gap,
                    "first_row": block[0].label,
                    "difference_from_first": test.difference if test else None,
                    "p": test.p if test else None,
                    "test": TEST if test and test.p is not None else "",
                    "bytes": result.mean("bytes"),
                    "seconds": result.mean("seconds"),
                    "reporting": result.experiment.reporting,
                    "images": result.images,
                    "rounds": budget.rounds,
                    "net": result.experiment.net.name,
                    "parameters": result.mean("parameters"),
                    "paper_accuracy": paper.accuracy,
                    "paper_gap_closed": result.paper_gap,
                    "paper_source": paper.source,
                    "differs_in": " ".join(result.differs),
                    "notes": " ".join(notes),
                }
            )
    return found


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    return as_csv([rows[0], *(row.values() for row in rows)])


def json_text(rows: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(rows, indent=2) + "\n"
