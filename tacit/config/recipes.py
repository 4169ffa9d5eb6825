"""Recipes: experiments that come with tacit, one TOML file each."""

from pathlib import Path
from typing import Any

from tacit.core.errors import TacitError, nearest
from tacit.core.paths import user_path
from tacit.core.settings import read_toml
from tacit.core.text import safe


def recipe_folder() -> Path:
    """Where they lie: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parent.parent
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def known_recipes() -> dict[str, Path]:
    """Every recipe by its name: the path below the recipe folder, without the ending."""
    folder = recipe_folder()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.toml"))}


def find_recipe(name: str) -> Path:
    """The file of a recipe, by its name or by a path of your own."""
    recipes = known_recipes()
    if name in recipes:
        return recipes[name]
    path = user_path(name)
    if path.is_dir() and (path / "experiment.toml").is_file():
        return path / "experiment.toml"
    if path.is_file():
        return path
    raise TacitError(
        f"'{safe(name)}' is neither a recipe nor a file.{nearest(name, recipes)} `tacit recipes` lists the recipes; "
        "a file of your own is given by its path (mine.toml)."
    )


def load_recipe(name: str) -> dict[str, Any]:
    """The settings in a recipe."""
    return read_toml(find_recipe(name))
