"""Every table and figure of the four papers, and what covers it: recipes, or a stated reason.

Each paper has a TOML file beside this one. `tacit recipes --papers` shows it, and a test fails where something is
neither covered nor explained.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from tacit.config.recipes import known_recipes
from tacit.core.settings import Section, read_toml

FOLDER = Path(__file__).parent
ORDER = ("feddb", "cbafed", "bsemifl", "ddrfed")


class Item(Section):
    """A table or figure of a paper."""

    name: str
    shows: str
    recipes: tuple[str, ...] = ()  # patterns of recipe names
    variants: tuple[str, ...] = ()  # of those, recipes beside the paper's cells: another reading, the released code
    cells: int = 0  # of a table: one experiment each
    missing: int = 0  # cells without a recipe, for the `reason`
    reason: str = ""  # why there is no recipe, or none for a part
    read: str = ""  # how the figure is had from runs

    def covered_by(self, known: Iterable[str]) -> list[str]:
        """The names of the recipes that give its cells."""
        return [name for name in known if matches(name, self.recipes) and not matches(name, self.variants)]

    def beside(self, known: Iterable[str]) -> list[str]:
        """The names of the variants."""
        return [name for name in known if matches(name, self.variants)]


class PaperContents(Section):
    """What a paper has, table by table."""

    name: str
    title: str
    venue: str
    ours: tuple[str, ...] = ()  # recipes for the same methods that no table or figure asks for
    items: tuple[Item, ...]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits one of the patterns; `*` does not go beyond a folder.

    >>> matches("feddb/table1/x", ["feddb/*"]), matches("feddb/table1/x", ["feddb/table[12]/*"])
    (False, True)
    """
    return any(
        name.count("/") == pattern.count("/")
        and all(fnmatchcase(*pair) for pair in zip(name.split("/"), pattern.split("/"), strict=True))
        for pattern in patterns
    )


def papers() -> dict[str, PaperContents]:
    """The four papers by the folder of their recipes."""
    return {key: PaperContents.model_validate(read_toml(FOLDER / f"{key}.toml")) for key in ORDER}


def gaps(contents: PaperContents, known: Iterable[str] | None = None) -> list[str]:
    """What is wrong with a paper's coverage, in sentences; empty where everything is covered or explained.

    >>> one = {"name": "Fig. 9", "shows": "a curve"}
    >>> gaps(PaperContents(name="X", title="", venue="", items=[one]))
    ['X, Fig. 9: neither a recipe nor a reason.']
    """
    names = list(known_recipes() if known is None else known)
    found = []
    for item in contents.items:
        where = f"{contents.name}, {item.name}"
        if not item.recipes and not item.reason:
            found.append(f"{where}: neither a recipe nor a reason.")
        found += [
            f"{where}: no recipe is called '{pattern}'."
            for pattern in (*item.recipes, *item.variants)
            if not any(matches(name, [pattern]) for name in names)
        ]
        there = len(item.covered_by(names))
        if item.cells and there + item.missing != item.cells:
            found.append(f"{where}: {item.cells} cells, but {there} recipes and {item.missing} explained.")
        if item.missing and not item.reason:
            found.append(f"{where}: {item.missing} cells are missing without a reason.")
    return found
