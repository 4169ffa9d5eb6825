"""tacit: federated semi-supervised learning as real software.

import tacit
run = tacit.run("demo", out="runs/first")
run["accuracy"]                       # by round, as an array
run.records                           # all rounds, as a DataFrame if pandas is there
run.predict("new-images/").labels     # the class of each image, by name
run.plot()                            # the figures by round (needs matplotlib)
"""

from pathlib import Path
from typing import Any

__version__ = "0.1.0"  # written here alone; pyproject.toml reads it


def run(
    recipe: str | Path | dict[str, Any] = "",
    *,
    out: str | Path | None = None,
    resume: bool = False,
    quiet: bool = True,
    **settings: Any,
) -> Any:
    """Run an experiment and return it as a `tacit.notebook.NotebookRun`: its records, its model, its figures.

    `recipe` is the name of a recipe, a TOML file, or a dict of settings. Further settings are given by name, with
    two underscores for the dot: `tacit.run("demo", train__lr=0.1)`. Without `out` the run gets a folder of its own
    under runs/.
    """
    from tacit.engine import run_experiment
    from tacit.experiment import resolve
    from tacit.recipes import load_recipe
    from tacit.record import default_out

    base = recipe if isinstance(recipe, dict) else load_recipe(str(recipe)) if recipe else {}
    experiment = resolve(base, {name.replace("__", "."): value for name, value in settings.items()})
    name = "" if isinstance(recipe, dict) else str(recipe)
    folder = Path(out) if out is not None else default_out(name or experiment.method["name"], experiment.seed)
    watcher = None
    if not quiet:
        from tacit.cli.progress import watcher_for
        from tacit.screen import SafeConsole

        watcher = watcher_for(SafeConsole(soft_wrap=False))
    return load(run_experiment(experiment, folder, resume=resume, watcher=watcher).folder)


def load(folder: str | Path) -> Any:
    """A run that is already there."""
    from tacit.notebook import NotebookRun

    return NotebookRun(folder)
