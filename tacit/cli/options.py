"""Options that several commands share, and what they become."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError

if TYPE_CHECKING:
    from tacit.runs.progress import Display

Recipe = Annotated[str, typer.Argument(help="a recipe (`tacit recipes`), a TOML file, or a run folder to repeat")]


Set = Annotated[list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="change one setting; repeat")]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="show nothing but errors")]


Json = Annotated[bool, typer.Option("--json", help="one JSON object a round on the standard output, then the summary")]


Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="also tell tensorboard, mlflow or wandb (docs/trackers.md); repeat"),
]


FromRound = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="N", help="go back to the state after N rounds of all stages (see keep.checkpoints) and go on"
    ),
]


def console(error: bool = False) -> SafeConsole:
    return SafeConsole(stderr=error)


def layers(recipe: str, settings: list[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a recipe and those of the command line above them."""
    from tacit.config.recipes import load_recipe
    from tacit.core.settings import parse_setting

    return (load_recipe(recipe) if recipe else {}), dict(parse_setting(text) for text in settings or [])


def view_of(quiet: bool, json: bool) -> "Display":
    if quiet and json:
        raise TacitError("--quiet shows nothing and --json shows every round. Choose one of them.")
    return "quiet" if quiet else "json" if json else "auto"
