"""docs/protocols.md: each value of the four papers' protocols beside that of the resolved recipes.

`make protocols` makes the page; a test compares it. What the papers say is in benchmarks/papers, one row a value, with
the section it stands in; what the recipes say is read from the recipes, resolved. Where they differ, a row must say
why, or the test fails.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tacit.config.recipes import known_recipes, load_recipe
from tacit.config.resolve import resolve
from tacit.core.settings import Experiment, Section, flatten, read_toml
from tacit.papers.coverage import PaperContents, matches, papers
from tacit.runs.plan import stages_of

PAGE = Path("docs/protocols.md")
FOLDER = Path(__file__).parent / "papers"

INTRO = """# The papers' protocols

*This page is made by `make protocols` from the recipes; nobody types what stands under "recipes".*

Each value that a paper states, the section it stands in, and what its recipes resolve to: all of those that the row is
about, counted. **=** they agree. **≠** some differ, and the reason is told below the table. **silent**: the paper does
not say, and this is what was assumed. Values known from released code alone are named as such.
"""


class Difference(Section):
    """Recipes that have another value than the paper, on purpose."""

    reason: str
    recipes: tuple[str, ...] = ()  # patterns; empty: all of the row
    methods: tuple[str, ...] = ()


class Row(Section):
    """One value of a protocol."""

    what: str
    where: str  # section of the paper
    paper: str  # the value as the paper has it
    setting: str  # a key of `facts`
    value: Any = None  # what a recipe should have, or a list of such; None: the paper is silent
    recipes: tuple[str, ...] = ()  # patterns; empty: all of the paper's tables and figures
    methods: tuple[str, ...] = ()  # names of methods; empty: all
    besides: tuple[str, ...] = ()  # patterns that the row is not about
    differs: tuple[Difference, ...] = ()
    note: str = ""  # why this was assumed, where the paper is silent or can be read in two ways

    def right(self, value: Any) -> bool:
        return self.value is None or value == self.value or (isinstance(self.value, list) and value in self.value)

    def is_about(self, name: str, method: str) -> bool:
        return (
            (not self.recipes or matches(name, self.recipes))
            and (not self.methods or method in self.methods)
            and not matches(name, self.besides)
        )


class Protocol(Section):
    """What a paper says about its experiments."""

    before: int  # recipes before the plan's part on protocols
    rows: tuple[Row, ...]


Facts = Mapping[str, Any]


def facts(experiment: Experiment) -> dict[str, Any]:
    """Every setting of a resolved experiment by its dotted key, and what follows from several of them."""
    stages = stages_of(experiment)
    main, warm_up = stages[-1].method, [stage for stage in stages if stage.name == "warm-up"]
    on_labels, on_the_rest = main.estimated_passes(experiment.train.epochs) or (0, 0)
    options, data = experiment.method, experiment.data
    shares = {"iid": "IID", "shards": f"{data.shards} shards"}
    return {
        **flatten(experiment.to_dict()),
        "active clients": experiment.participation.count(data.clients),
        "split": shares.get(data.partition, f"{data.partition} {data.alpha:g}"),
        "labelled clients": "all" if data.reveal == "all" else data.labeled_clients,
        "warm-up rounds": sum(stage.rounds for stage in warm_up),
        "warm-up epochs": sum(stage.rounds * passes(stage.method, experiment)[0] for stage in warm_up),
        "passes over labels": on_labels,
        "passes over the rest": on_the_rest,
        "unlabelled rate": options.get("unlabeled_lr", experiment.train.lr),
        "images a step": images_a_step(experiment),
    }


def images_a_step(experiment: Experiment) -> int | str:
    """A number, or `all`: an option of the method says so, or the batch is larger than any client."""
    batch: int = experiment.method.get("batch", experiment.train.batch)
    return "all" if batch == 0 or batch >= 10_000 else batch


def passes(method: Any, experiment: Experiment) -> tuple[int, int]:
    found: tuple[int, int] = method.estimated_passes(experiment.train.epochs) or (0, 0)
    return found


def protocols() -> dict[str, Protocol]:
    """What the papers say, by the folder of their recipes."""
    return {key: Protocol.model_validate(read_toml(FOLDER / f"{key}.toml")) for key in papers()}


def recipes_of(contents: PaperContents) -> dict[str, Facts]:
    """The facts of every recipe of a paper's tables and figures."""
    known = list(known_recipes())
    names = dict.fromkeys(name for item in contents.items for name in (*item.covered_by(known), *item.beside(known)))
    return {name: facts(resolve(load_recipe(name))) for name in names}


def unexplained(row: Row, found: Mapping[str, Facts]) -> list[str]:
    """The recipes that differ from the paper in this value without a reason."""
    return [name for name in differing(row, found) if reason_for(row, name, found[name]) is None]


def about(row: Row, found: Mapping[str, Facts]) -> list[str]:
    return [
        name for name, values in found.items() if row.is_about(name, values["method.name"]) and row.setting in values
    ]


def differing(row: Row, found: Mapping[str, Facts]) -> list[str]:
    return [name for name in about(row, found) if not row.right(found[name][row.setting])]


def reason_for(row: Row, name: str, values: Facts) -> str | None:
    for one in row.differs:
        fits = (not one.recipes or matches(name, one.recipes)) and (
            not one.methods or values["method.name"] in one.methods
        )
        if fits:
            return one.reason
    return None


def spread(values: Iterable[Any]) -> str:
    """Values with how often each is there; one alone without.

    >>> spread([5, 5]), spread([5, 5, 1])
    ('5', '5 (2), 1 (1)')
    """
    counted = Counter(map(shown, values))
    return (
        ", ".join(f"{value} ({count})" for value, count in counted.most_common())
        if len(counted) > 1
        else "".join(counted)
    )


def shown(value: Any) -> str:
    """A value as a recipe would write it, without quotes.

    >>> shown(True), shown(0.0005), shown("bn"), shown(100.0)
    ('yes', '0.0005', 'bn', '100')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def mark(row: Row, found: Mapping[str, Facts]) -> str:
    if row.value is None:
        return "silent"
    return "**≠**" if differing(row, found) else "="


def protocol_table(protocol: Protocol, found: Mapping[str, Facts]) -> list[str]:
    """One line a value, and below the reasons for those that differ."""
    heads = ("what", "the paper", "where", "its recipes", "how many", "")
    text = [line(heads), "|---" * len(heads) + "|"]
    reasons, notes = list[str](), [f"- *{row.what}*: {row.note}." for row in protocol.rows if row.note]
    for row in protocol.rows:
        names = about(row, found)
        ours = spread(found[name][row.setting] for name in names)
        text.append(line([row.what, row.paper or "not told", row.where, ours, str(len(names)), mark(row, found)]))
        grouped: dict[str, list[str]] = {}
        for name in differing(row, found):
            grouped.setdefault(reason_for(row, name, found[name]) or "**no reason is given**", []).append(name)
        for reason, which in grouped.items():
            values = spread(found[name][row.setting] for name in which)
            reasons.append(f"- *{row.what}*: {values} in {places(which)}: {reason}.")
    text.append("")
    for title, lines in (("Where they differ:", reasons), ("What was assumed, and why:", notes)):
        text += [title, "", *lines, ""] if lines else []
    return text


def places(names: Sequence[str]) -> str:
    """The folders of recipes, with how many of each.

    >>> places(["a/table1/x", "a/table1/y", "a/fig2/z"])
    '`a/table1` (2), `a/fig2/z`'
    """
    folders = Counter(name.rpartition("/")[0] for name in names)
    only = {name.rpartition("/")[0]: name for name in names}
    return ", ".join(f"`{one}` ({count})" if count > 1 else f"`{only[one]}`" for one, count in folders.items())


def counts_table(all_papers: Mapping[str, PaperContents], said: Mapping[str, Protocol]) -> list[str]:
    """How many recipes each paper has, before and now."""
    known = list(known_recipes())
    heads = ("paper", "recipes before", "now", "for its tables and figures", "at a reduced scale, ours")
    text = ["## Recipes by paper", "", line(heads), "|---" * len(heads) + "|"]
    rows = []
    for key, contents in all_papers.items():
        names = [name for name in known if name.startswith(f"{key}/")]
        ours = [name for name in names if matches(name, contents.ours)]
        rows.append((said[key].before, len(names), len(names) - len(ours), len(ours)))
        text.append(line([contents.name, *map(str, rows[-1])]))
    totals = [str(sum(column)) for column in zip(*rows, strict=True)]
    return [*text, line(["all", *totals]), ""]


def coverage_table(contents: PaperContents) -> list[str]:
    """Every table and figure of a paper with what covers it."""
    known = list(known_recipes())
    heads = ("", "shows", "covered by", "recipes", "how it is had from runs")
    text = [line(heads), "|---" * len(heads) + "|"]
    for item in contents.items:
        there = len(item.covered_by(known))
        folders, beside = (
            ", ".join(f"`{pattern.removesuffix('/*')}`" for pattern in patterns)
            for patterns in (item.recipes, item.variants)
        )
        variants = f"variants: {beside}" if beside else ""
        covered = "; ".join(part for part in (folders, variants, item.reason) if part)
        count = f"{there} of {item.cells}" if item.cells else str(there or "–")
        default = f"`tacit compare {item.recipes[0].removesuffix('/*')}`" if item.cells and item.recipes else ""
        text.append(line([item.name, item.shows, covered, count, item.read or default]))
    return [*text, ""]


def page(found_by_paper: Mapping[str, Mapping[str, Facts]] | None = None) -> str:
    """The whole page; who has resolved the recipes before may give them."""
    all_papers, said = papers(), protocols()
    text = [INTRO, *counts_table(all_papers, said)]
    for key, contents in all_papers.items():
        found = found_by_paper[key] if found_by_paper else recipes_of(contents)
        text += [f"## {contents.name}", "", f"*{contents.title}, {contents.venue}.*", ""]
        text += [*protocol_table(said[key], found), "### Tables and figures", "", *coverage_table(contents)]
    text.append("What each costs on a machine: `tacit recipes --papers` (after `tacit recipes --measure`).")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
