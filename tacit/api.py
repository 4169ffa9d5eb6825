"""`tacit.run` and `tacit.load`: experiments from Python."""

from pathlib import Path
from typing import Any

from tacit.config.recipes import load_recipe
from tacit.config.resolve import resolve
from tacit.core.console import SafeConsole
from tacit.engine.run import run_experiment
from tacit.inference.notebook import NotebookRun
from tacit.runs.folder import default_out
from tacit.runs.progress import watcher_for


def run(
    recipe: str | Path | dict[str, Any] = "",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = True,
    **settings: Any,
) -> NotebookRun:
    """Run an experiment and return it: its records, its model, its figures.

    `recipe` is the name of a recipe, a TOML file, or a dict of settings. Further settings are given by name, with
    two underscores for the dot: `tacit.run("demo", train__lr=0.1)`. Without `out` the run gets a folder of its own
    under runs/.
    """
    base = recipe if isinstance(recipe, dict) else load_recipe(str(recipe)) if recipe else {}
    experiment = resolve(base, {name.replace("__", "."): value for name, value in settings.items()})
    name = "" if isinstance(recipe, dict) else str(recipe)
    folder = Path(out) if out is not None else default_out(name or experiment.method["name"], experiment.seed)
    watcher = None if quiet else watcher_for(SafeConsole(soft_wrap=False))
    return load(run_experiment(experiment, folder, resume=resume, watcher=watcher).folder)


def load(folder: str | Path) -> NotebookRun:
    """A run that is already there."""
    return NotebookRun(folder)
