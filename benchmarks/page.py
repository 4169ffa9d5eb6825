"""docs/evidence.md, and the table of our numbers on each method's page: made from the shelf, never typed.

A part's TOML says what is run and what the papers claim; which claims hold is decided here, from the runs.
"""

import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import order
from benchmarks.shelf import made
from tacit.compare import tables
from tacit.compare.results import Result, Survey, blocks_of, notes, results
from tacit.compare.rows import Row
from tacit.compare.verdicts import unsettled
from tacit.core.formatting import clock
from tacit.core.payload import write_atomically
from tacit.runs.folder import Run

PAGE = Path("docs/evidence.md")
METHODS = Path("docs/methods")
PICTURES = Path("docs/images/evidence")
SCORE = "last_five"
DONE = "summary.json"  # of a run that is finished
COLUMNS = ("method", "seeds", "last five", "AUC", "gap closed", "labels right", "accepted", "paper", "paper's gap")

PAPERS = ("CBAFed", "FedDB", "BSemiFL", "DDRFed", "tacit's own method")
OURS = "Questions of ours"
WAITING = "not run yet"
VERDICTS = {  # columns of the first table, and what they count
    "hold": ("holds here",),
    "do not hold": ("does not hold here",),
    "open": ("open",),
    "one seed": ("holds in one seed", "does not hold in one seed"),
    WAITING: (WAITING,),
    "not testable here": ("not testable at this scale",),
}

_known: dict[tuple[object, ...], list[list[Result]]] = {}  # by rows and the runs in them

Part = Mapping[str, Any]
Parts = Mapping[str, tuple[Part, Sequence[Row]]]

INTRO = """# Our numbers beside theirs

*This page is made by `make evidence` from the records in [evidence/runs](../evidence/runs/); nobody types its numbers.*

Everything here ran on two cores, so at a reduced scale, which each section states: less data, a smaller net, fewer
rounds; partition, placement, share of labels and stages are the paper's. Absolute accuracy does not compare across
scales. What does, with care, is the *gap closed* (the way from the lower bound, labels alone, to the upper one, all
labels) and the order of methods. A published number stands beside ours where the paper has that row. No gap is shown
between bounds that have not converged: the mean of the last fifth of their rounds must be less than half a point above
that of the fifth before.

*Last five* is the mean of the last five evaluated rounds, ± the standard deviation over seeds: single rounds swing.
It is of accuracy, and where one class has more than half of the test images of balanced accuracy. A claim *holds
here* if the difference has its sign in every seed, *does not hold here* if its mean has the other sign, and is *open*
if seeds disagree; one seed decides nothing. At paper scale a table is one command: `tacit compare
recipes/cbafed/table1 --only fashion-mnist` (with `--scale tenth` a smaller one).
"""


ORDER = """Points over the labels alone: the mean over seeds; bold in the picture where all seeds agree in sign. Within
a problem all methods have one split, net and training, and about as much computing as tacit's own method; the sections
below say how large everything was."""


class Finding(NamedTuple):
    """What became of a claim."""

    claim: Mapping[str, Any]
    verdict: str
    here: str


class Kept(Run):
    """A run of the shelf, whose records are read once."""

    @cached_property
    def records(self) -> Any:
        return self.rounds()


def kept(folder: Path) -> Kept:
    return _kept(folder, (folder / DONE).stat().st_mtime_ns)


@cache
def _kept(folder: Path, when: int) -> Kept:
    return Kept(folder)


def finished(rows: Sequence[Row]) -> list[Row]:
    """The rows with the seeds that are there, without those that have none."""
    there = [Row(row.label, tuple(job for job in row.jobs if job.finished), row.scale) for row in rows]
    return [row for row in there if row.jobs]


def survey(rows: Sequence[Row]) -> Survey:
    """The splits of kept runs, from their hashes: no data set is needed."""
    return {row.label: {job.experiment.seed: made(job.folder)["holdings"] for job in row.jobs} for row in rows}


def lines_of(rows: Sequence[Row]) -> dict[str, Result]:
    """What came out, by label."""
    return {one.label: one for block in blocks_with(rows) for one in block}


def blocks_with(rows: Sequence[Row]) -> list[list[Result]]:
    """What came out, problem by problem. Several places of the page ask for the same rows, and read them once."""
    when = {job.folder: (job.folder / DONE).stat().st_mtime_ns for row in rows for job in row.jobs}
    key = tuple(
        (row.label, repr(row.experiment.paper), *((job.folder, when[job.folder]) for job in row.jobs)) for row in rows
    )
    if key not in _known:
        _known[key] = results(rows, survey(rows), score=SCORE)
    return _known[key]


def judge(claim: Mapping[str, Any], lines: Mapping[str, Result]) -> Finding:
    """Whether a claim holds, by the differences within each seed.

    >>> judge({"says": "more is more", "untestable": "one seed takes a month"}, {}).verdict
    'not testable at this scale'
    """
    if "untestable" in claim:
        return Finding(claim, "not testable at this scale", claim["untestable"])
    one, other = lines.get(claim["better"]), lines.get(claim["than"])
    seeds = sorted(set(one.runs) & set(other.runs)) if one and other else []
    if not one or not other or not seeds:
        return Finding(claim, WAITING, "")
    apart = [100 * (one.runs[seed][SCORE] - other.runs[seed][SCORE]) for seed in seeds]
    mean, listed = statistics.fmean(apart), ", ".join(f"{value:+.1f}" for value in apart)
    here = f"{mean:+.1f} points (seeds: {listed})" if len(apart) > 1 else f"{mean:+.1f} points, one seed"
    if len(apart) == 1:
        verdict = "holds in one seed" if mean > 0 else "does not hold in one seed"
    elif min(apart) > 0:
        verdict = "holds here"
    else:
        verdict = "does not hold here" if mean <= 0 else "open"
    return Finding(claim, verdict, here)


def ordering(lines: Mapping[str, Result]) -> str:
    """How many pairs that the paper orders stand in the same order here."""
    known = [(one.experiment.paper.accuracy, one.mean(SCORE)) for one in lines.values()]
    pairs = [
        ((a - c) * (b - d) > 0)  # type: ignore[operator]
        for k, (a, b) in enumerate(known)
        for c, d in known[:k]
        if a is not None and c is not None and a != c
    ]
    return (
        f"Of the {len(pairs)} pairs of rows that the paper orders, {sum(pairs)} are in its order here." if pairs else ""
    )


def still_moving(rows: Sequence[Row], limit: float = 0.01) -> str:
    """Which rows have not settled: their last five rounds are better than the five before by more than a point."""
    rising = []
    for row in rows:
        curves = [
            [r["accuracy"] for r in kept(job.folder).records if r.get("accuracy") is not None] for job in row.jobs
        ]
        steps = [statistics.fmean(one[-5:]) - statistics.fmean(one[-10:-5]) for one in curves if len(one) >= 10]
        if steps and statistics.fmean(steps) > limit:
            rising.append(f"{row.label} ({100 * statistics.fmean(steps):+.1f})")
    if not rising:
        return ""
    return (
        f"Not converged, by the last five rounds against the five before, in points: {', '.join(rising)}. "
        "If a bound is among them, its gap means little."
    )


def by_stage(run: Run, what: str) -> list[float]:
    """For each round the median of its stage: the machine was busy, or the run was stopped, now and then."""
    values: dict[str, list[float]] = {}
    for record in run.records:
        values.setdefault(record["stage"], []).append(record[what])
    usual = {stage: statistics.median(seconds) for stage, seconds in values.items()}
    return [usual[record["stage"]] for record in run.records]


def duration(run: Run) -> float:
    """Seconds on the wall, evaluation included."""
    return sum(by_stage(run, "seconds"))


def costs(run: Run) -> list[float] | None:
    """CPU seconds of each round, all parties together, evaluation aside.

    Older records have the time on the wall alone. That of one core will do; of two cores nothing can be told (None).
    """
    if all(record.get("cpu_seconds") is not None for record in run.records):
        return [record["cpu_seconds"] for record in run.records]
    if ", 1 of " not in made(run.folder)["machine"]:
        return None
    return by_stage(run, "work")


def seconds_to(run: Run, costs: Sequence[float], target: float) -> float | None:
    """Seconds of computing until the mean of three evaluated rounds reached a share of right answers."""
    spent, seen = 0.0, []
    for record, cost in zip(run.records, costs, strict=True):
        spent += cost
        if record.get("accuracy") is not None:
            seen.append(record["accuracy"])
            if len(seen) > 2 and statistics.fmean(seen[-3:]) >= target:
                return spent
    return None


def cost_table(rows: Sequence[Row], targets: Sequence[float]) -> list[str]:
    """What a point costs: for each row and target the median time of the seeds that reached it."""
    heads = ["method", *(f"{target} %" for target in targets), "the whole run"]
    lines = [_line(heads), "|" + "---|" * len(heads)]
    for row in rows:
        runs = [kept(job.folder) for job in row.jobs]
        known = [(run, spent) for run in runs if (spent := costs(run)) is not None]
        if not known:
            lines.append(_line([row.label, *("–" for _ in heads[1:])]))
            continue
        cells = []
        for target in targets:
            times = [seconds_to(run, spent, target / 100) for run, spent in known]
            reached = [time for time in times if time is not None]
            some = f" ({len(reached)} of {len(times)} seeds)" if 0 < len(reached) < len(times) else ""
            cells.append(clock(statistics.median(reached)) + some if reached else "not reached")
        whole = statistics.median(sum(spent) for _, spent in known)
        lines.append(_line([row.label, *cells, clock(whole)]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def provenance(name: str, rows: Sequence[Row]) -> str:
    """Which command, commits, seeds and minutes made a section."""
    jobs = {job.folder: job for row in rows for job in row.jobs}
    facts = [made(folder) for folder in jobs]
    commits = ", ".join(dict.fromkeys(fact["commit"] for fact in facts))
    minutes = sum(duration(kept(folder)) for folder in jobs) / 60
    seeds = max(len(row.jobs) for row in rows)
    machines = "; ".join(dict.fromkeys(fact["machine"] for fact in facts))
    return (
        f"`make evidence PART={name} SEEDS={seeds}`: {len(jobs)} runs, {minutes:.0f} minutes together ({machines}), "
        f"commit {commits}."
    )


def budget(parts: Parts) -> str:
    """What all of it took, as one sentence."""
    jobs = {job.folder: job for _, rows in parts.values() for row in finished(rows) for job in row.jobs}
    hours = {folder: duration(kept(folder)) / 3600 for folder in jobs}
    first = sum(hours[folder] for folder, job in jobs.items() if job.experiment.seed == 0)
    return (
        f"All of it is {len(jobs)} runs, {sum(hours.values()):.1f} hours one after the other (most of them on one core "
        f"of two); the first seed of everything (`make evidence SEEDS=1`) is {first:.1f} hours."
    )


def folded(summary: str, lines: Sequence[str]) -> list[str]:
    """What only some readers want, behind a click; nothing if there is nothing."""
    if not any(lines):
        return []
    return ['<details markdown="1">', f"<summary>{summary}</summary>", "", *lines, "</details>", ""]


def guard_table(rows: Sequence[Row]) -> list[str]:
    """What each method came to, what the labels alone did, what was shipped, and how far that fell below the latter.

    The standard error is that of the difference over seeds.
    """
    heads = ["method", "seeds", "labels alone", "the method", "shipped", "shipped: the method's, by seed", "points"]
    text, worst = [_line(heads), "|" + "---|" * len(heads)], []
    for row in rows:
        found = [Run(job.folder).summary for job in row.jobs]
        tested = [one["guard"]["tested"] for one in found]
        columns = [
            [one["twin"] for one in tested],
            [one["method"] for one in tested],
            [one["accuracy"] for one in found],
        ]
        apart = [100 * (shipped - twin) for twin, _, shipped in zip(*columns, strict=True)]
        error = statistics.stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
        if statistics.fmean(apart) < -error:
            worst.append(row.label)
        kept = ", ".join("yes" if one["guard"]["ships"] == "method" else one["guard"]["ships"] for one in found)
        means = [f"{100 * statistics.fmean(column):.1f}" for column in columns]
        points = f"{statistics.fmean(apart):+.1f} (seeds: {', '.join(f'{value:+.1f}' for value in apart)})"
        text.append(_line([row.label, str(len(found)), *means, kept, points]))
    said = f"more than one standard error below the labels alone: {', '.join(worst) or 'no row'}."
    return [*text, "", f"**What was shipped is {said}**", ""]


def section(name: str, part: Part, rows: Sequence[Row]) -> list[str]:
    """One part of the page: how large, the table, and the rest folded."""
    text = [f"## {part['title']}", "", part["scale"], ""]
    rows = finished(rows)
    if not rows:
        return [*text, "Not run yet.", ""]
    if part.get("guarded"):
        more = [f"- {note}" for note in part.get("notes", ())]
        return [*text, provenance(name, rows), "", *guard_table(rows), *more, ""]
    seen = survey(rows)
    blocks = blocks_with(rows)
    lines = {one.label: one for block in blocks for one in block}
    told = [ordering(lines), *unsettled(blocks), still_moving(rows), *notes(blocks_of(rows), seen)]
    told += part.get("notes", ())
    table = tables.markdown(tables.sheet(blocks, notes=[note for note in told if note], columns=COLUMNS)).splitlines()
    first_note = next((place for place, line in enumerate(table) if line.startswith("- ")), len(table))
    text += [provenance(name, rows), "", *table[:first_note], ""]
    more = [*table[first_note:], ""]
    if (PICTURES / f"{name}.png").is_file():
        more += [f"![Accuracy by round]({(PICTURES / name).relative_to('docs')}.png)", ""]
    if targets := part.get("targets"):
        explained = (
            "Time of one core (all parties together, evaluation aside; median of seeds) until three rounds had a mean "
            "of at least (–: made before CPU time was recorded, on two cores)"
        )
        more += [f"**What a point costs.** {explained}", "", *cost_table(rows, targets), ""]
    return [*text, *folded("Notes, curves and what a point costs", more)]


def paper_of(claim: Mapping[str, Any]) -> str:
    """Whose claim it is, by what its source begins with.

    >>> paper_of({"source": "FedDB, Table 3"}), paper_of({"source": "what everybody does"})
    ('FedDB', 'Questions of ours')
    """
    return next((paper for paper in PAPERS if claim["source"].startswith(paper)), OURS)


def counted(findings: Sequence[Finding]) -> list[str]:
    """How many claims came out in which way, in the order of `VERDICTS`."""
    verdicts = [found.verdict for found in findings]
    return [str(sum(map(verdicts.count, kinds)) or "–") for kinds in VERDICTS.values()]


def claims_table(parts: Parts) -> list[str]:
    """The verdicts: a table of counts, then one screen for each paper, with what was looked for folded below it."""
    found: dict[str, list[tuple[str, Finding]]] = {paper: [] for paper in (*PAPERS, OURS)}
    for name, (part, rows) in parts.items():
        lines = lines_of(finished(rows))
        for claim in part.get("claims", ()):
            found[paper_of(claim)].append((name, judge(claim, lines)))
    heads = ["whose claims", *VERDICTS]
    text = ["## The claims", "", _line(heads), "|" + "---|" * len(heads)]
    text += [_line([paper, *counted([one for _, one in those])]) for paper, those in found.items() if those]
    for paper, those in found.items():
        if not those:
            continue
        text += ["", f"### {paper}", "", "| claim | the source | here | verdict |", "|---|---|---|---|"]
        because, waiting = [], []
        for name, one in those:
            if one.verdict == WAITING:
                waiting.append(f"- {one.claim['says']} ({one.claim['source']}; part {name})")
                continue
            link = f"**{one.verdict}** ({name})"
            text.append(_line([one.claim["says"], one.claim["source"], one.here, link]))
            if "why" in one.claim:
                because.append(f"- *{one.claim['says']}*: {one.claim['why']}")
        text += ["", *folded("What was looked for where a claim fell short", [*because, ""] if because else [])]
        text += folded(f"Claims not run yet: {len(waiting)}", [*waiting, ""] if waiting else [])
    return text


def every_method(parts: Parts) -> list[str]:
    """All methods, each in the placement it is at home in, against the labels alone on the same splits."""
    text = ["## Every method, in one placement each", "", "Points are against the lower bound of the same part.", ""]
    heads = ["method", "part", "seeds", "last five", "lower bound", "points", "labels right", "accepted"]
    text += [_line(heads), "|" + "---|" * len(heads)]
    for name, (part, rows) in parts.items():
        lines = lines_of(finished(rows))
        for one in (lines[label] for label in part.get("headline", ()) if label in lines and "lower" in lines):
            apart = judge({"better": one.label, "than": "lower"}, lines).here
            link = f"[{one.label}](methods/{one.experiment.method['name']}.md)"
            cells = [tables.COLUMNS[what](one) for what in ("seeds", "last five")]
            cells += [tables.percent(lines["lower"], SCORE), apart.replace(" points", "")]
            cells += [tables.COLUMNS[what](one) for what in ("labels right", "accepted")]
            text.append(_line([link, name, *cells]))
    return [*text, ""]


def order_of(parts: Parts) -> order.Order:
    """Points over the labels alone by method and problem, of the parts that are made for that."""
    return order.order(
        (
            (part, lines_of(finished(rows)), {row.label: cpu_time(row) for row in finished(rows)})
            for part, rows in parts.values()
            if part.get("order_of_methods")
        ),
        SCORE,
    )


def cpu_time(row: Row) -> float:
    """CPU seconds of a run, the median of seeds."""
    known = [sum(spent) for job in row.jobs if (spent := costs(kept(job.folder))) is not None]
    return statistics.median(known) if known else float("nan")


def order_of_methods(parts: Parts) -> list[str]:
    """The heat map, its numbers, and a sentence for each placement."""
    found = order_of(parts)
    if len(found) < 2:
        return []  # one method has no order
    text = ["## The order of methods", "", ORDER, "", *order.advice(found), ""]
    if (PICTURES / "order.png").is_file():
        text += [
            f"![Points over the labels alone, by method and problem]({(PICTURES / 'order').relative_to('docs')}.png)",
            "",
        ]
    return [*text, *folded("The numbers, with their spread over seeds and what a run costs", [*order.table(found), ""])]


def page(parts: Parts) -> str:
    """The whole page."""
    text = [INTRO, budget(parts), "", *claims_table(parts), *order_of_methods(parts), *every_method(parts)]
    for name, (part, rows) in parts.items():
        text += section(name, part, rows)
    return "\n".join(text).rstrip() + "\n"


START, END = "<!-- made by make evidence -->", "<!-- end -->"


def method_table(method: str, parts: Parts) -> str:
    """Our numbers of a method beside the paper's, wherever it took part, with the bounds around it."""
    text = []
    for part, all_rows in parts.values():
        rows = finished(all_rows)
        if part.get("guarded") or not any(row.jobs[0].experiment.method["name"] == method for row in rows):
            continue
        lines = [
            one
            for one in lines_of(rows).values()
            if one.experiment.method["name"] == method or (one.bound and part.get("bounds", True))
        ]
        if any(one.experiment.method["name"] == method and (not one.bound or method == "fedavg") for one in lines):
            table = tables.sheet(
                [lines], columns=("method", "seeds", "last five", "gap closed", "paper", "paper's gap")
            )
            body = [line for line in tables.markdown(table).splitlines() if line.startswith("|")]
            sources = dict.fromkeys(one.experiment.paper.source for one in lines if one.experiment.paper.source)
            theirs = f" Paper: {'; '.join(sources)}, at full scale." if sources else " No paper has these rows."
            text += [f"**{part['title']}.** {part['scale']}{theirs}", "", *body, ""]
    if not text:
        return ""
    return "\n".join([START, "", *text, "More, with commands and commits: [evidence](../evidence.md).", "", END])


def write(parts: Parts) -> None:
    """The page, and the tables on the methods' pages."""
    write_atomically(PAGE, page(parts).encode())
    for path in METHODS.glob("*.md"):
        text = path.read_text()
        changed = with_table(text, method_table(path.stem, parts))
        if changed != text:
            write_atomically(path, changed.encode())


def with_table(text: str, table: str) -> str:
    """A method's page with its table put where the old one was, else at the end.

    >>> with_table("# x", "<!-- made by make evidence -->new<!-- end -->").splitlines()[-1]
    '<!-- made by make evidence -->new<!-- end -->'
    """
    if not table:
        return text
    if START in text:
        return re.sub(re.escape(START) + ".*?" + re.escape(END), lambda _: table, text, flags=re.DOTALL)
    return f"{text.rstrip()}\n\n## Our numbers beside the paper's\n\n{table}\n"
