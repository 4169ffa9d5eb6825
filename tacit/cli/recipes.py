"""`tacit recipes`: the experiments that come with tacit, and what of the papers they cover."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Column, Table

from tacit.config.recipes import known_recipes
from tacit.config.resolve import resolve
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError, nearest
from tacit.core.settings import Experiment, read_toml
from tacit.core.text import safe
from tacit.papers.cost import core_hours, measure, measured
from tacit.papers.coverage import Item, PaperContents, papers

Hours = Mapping[str, float | None]  # of one core, by the name of a recipe


def show_recipes(under: str, only_papers: bool, measure_now: bool, screen: SafeConsole) -> None:
    """The recipes in a folder (or all), then the papers' tables and figures with what covers them."""
    recipes = below(under)
    experiments: dict[str, Experiment] = {}
    if measure_now or measured():
        experiments = {name: resolve(read_toml(path)) for name, path in recipes.items()}
    if measure_now:
        measure(experiments.values(), screen.print)
    speeds = measured()
    hours = {name: core_hours(experiment, speeds) for name, experiment in experiments.items()}
    if not only_papers:
        screen.print(recipe_table(recipes, hours))
    for contents in papers().values():
        table = paper_table(contents, recipes, hours, whole=not under)
        if table.row_count:
            screen.print(table)
    screen.print(explanation(hours))


def below(under: str) -> dict[str, Path]:
    """The recipes in a folder, by name; all of them without one."""
    known = known_recipes()
    bare = under.removeprefix("recipes/").strip("/")
    found = {name: path for name, path in known.items() if not bare or name == bare or name.startswith(f"{bare}/")}
    if not found:
        folders = sorted({name.rpartition("/")[0] for name in known} - {""})
        raise TacitError(
            f"There is no recipe and no folder of recipes '{safe(under)}'.{nearest(bare, folders)} `tacit recipes` "
            "lists all."
        )
    return found


def recipe_table(recipes: Mapping[str, Path], hours: Hours) -> Table:
    name_whole = Column("recipe", no_wrap=True)  # to be copied
    table = Table(name_whole, "what", "method", "paper", "cost", title="Recipes: tacit run RECIPE")
    for name, path in recipes.items():
        settings = read_toml(path)
        paper = settings.get("paper", {})
        number = f"{paper['accuracy']} ({paper.get('source', '')})" if "accuracy" in paper else ""
        method = settings.get("method", {}).get("name", "")
        table.add_row(name, settings.get("title", ""), method, number, cost_text([hours.get(name)]))
    return table


def paper_table(contents: PaperContents, recipes: Mapping[str, Path], hours: Hours, whole: bool) -> Table:
    """The tables and figures of a paper: the recipes that cover them, or why there is none, and what they cost.

    Those without one of these recipes are left out, unless the whole paper is asked for.
    """
    title = f"{contents.name} ({contents.venue}): tables and figures"
    table = Table("", "shows", "covered by", "recipes", "cost", title=title)
    for item in contents.items:
        names = item.covered_by(recipes)
        if not names and not whole:
            continue
        cost = cost_text([hours.get(name) for name in names]) if names else "–"
        table.add_row(item.name, item.shows, covering(item), counted(item, len(names)), cost)
    return table


def covering(item: Item) -> str:
    """The folders or patterns of an item's recipes, and the reason for what has none.

    >>> covering(Item(name="Fig. 1", shows="", recipes=["a/fig1/*", "a/table1/x-*"], reason="y is to come"))
    'a/fig1, a/table1/x-* (y is to come)'
    >>> covering(Item(name="Fig. 2", shows="", reason="a drawing")), covering(
    ...     Item(name="Table 1", shows="", recipes=["a/table1/*"], variants=["a/released/*"]))
    ('no recipe: a drawing', 'a/table1; variants: a/released')
    """
    folders, beside = (
        ", ".join(pattern.removesuffix("/*") for pattern in patterns) for patterns in (item.recipes, item.variants)
    )
    if not folders:
        return f"no recipe: {item.reason}"
    return folders + (f"; variants: {beside}" if beside else "") + (f" ({item.reason})" if item.reason else "")


def counted(item: Item, there: int) -> str:
    """How many recipes there are, of how many cells.

    >>> counted(Item(name="Table 1", shows="", cells=30), 24), counted(Item(name="Fig. 1", shows=""), 2)
    ('24 of 30', '2')
    """
    return f"{there} of {item.cells}" if item.cells else str(there or "–")


def cost_text(hours: Sequence[float | None]) -> str:
    """Hours of one core, for people.

    >>> cost_text([0.004]), cost_text([1.26, 2]), cost_text([1000.0, 200.0]), cost_text([4.0, None]), cost_text([])
    ('0.24 min', '3.3 h', '50 days', '?', '?')
    """
    known = [one for one in hours if one is not None]
    if not known or len(known) < len(hours):
        return "?"
    total = sum(known)
    if total < 1:
        return f"{60 * total:.2g} min"
    return f"{total:.1f} h" if total < 100 else f"{total / 24:,.0f} days"


def explanation(hours: Hours) -> str:
    """What the costs mean, or how to have them."""
    if not hours:
        return "What they cost on this machine: `tacit recipes --measure` times each net once (a few minutes)."
    return (
        "Costs are of one core of this machine and one seed, from the time of an image in each net (measured before; "
        "`tacit recipes --measure` does so anew). They are rough: half or twice as much is no surprise; a method "
        "that accepts few pseudo-labels takes less."
    )
