"""`tacit tune`: find a training recipe for a problem on its bounds, within so many minutes."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tacit.cli.compare import command_again
from tacit.cli.options import Quiet, Recipe, Set, console, layers
from tacit.core.errors import TacitError

if TYPE_CHECKING:
    from tacit.compare.rows import PendingRun
    from tacit.compare.tune import Search, Trial
    from tacit.core.settings import Experiment

MEASURED = 0.125  # share of the passes of the trial by which the rest is estimated


def tune(
    recipe: Recipe,
    minutes: Annotated[float, typer.Option(min=0.1, max=100_000, help="how long the search may take, about")] = 30.0,
    by: Annotated[
        Literal["accuracy", "balanced_accuracy", "loss"], typer.Option(help="the figure on the labels kept back")
    ] = "accuracy",
    scale: Annotated[str, typer.Option(help="search on a smaller version of the problem (see tacit compare)")] = "full",
    set_: Set = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="default: NAME-tuned.toml")] = None,
    runs: Annotated[Path, typer.Option(help="where the trials go, and are found again")] = Path("runs/tune"),
    force: Annotated[bool, typer.Option("--force", help="write over FILE if it is there")] = False,
    quiet: Quiet = False,
) -> None:
    """Search rate, batch, local epochs, schedule and server optimiser on a problem's bounds, and write them down."""
    from tacit.compare import tune as tuning
    from tacit.config.resolve import resolve
    from tacit.config.scale import scaled
    from tacit.core.paths import check_file, check_folder
    from tacit.core.payload import write_atomically
    from tacit.core.settings import flatten

    name = Path(recipe).stem
    target = out or Path(f"{name}-tuned.toml")
    check_file(target)
    if target.exists() and not force:
        raise TacitError(f"{target} is there already. Nothing was changed. Choose another --out, or add --force.")
    check_folder(runs, "--runs")
    given, settings = layers(recipe, set_)
    whole = resolve(given, settings)
    experiment, reduction = scaled(whole, scale, fixed=flatten(settings))
    folder = tuning.search_folder(runs, name, experiment, by)
    screen = console()
    if reduction and not quiet:
        screen.print(f"The search is at {reduction}.")
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[best]}"), TimeElapsedColumn(),
        console=screen, disable=quiet, transient=True,
    ) as progress:  # fmt: skip
        bar = progress.add_task("measuring", total=None, best="")
        try:
            begun = tuning.saved_plan(folder)
            if begun is not None and begun.minutes != minutes and not quiet:
                screen.print(
                    f"A search within {begun.minutes:g} minutes was begun in {folder}, and goes on as it was planned. "
                    f"For one within {minutes:g}, give another --runs."
                )
            plan = begun or begin(experiment, minutes, by, folder)
            counts = tuning.halved(len(plan.candidates), plan.shares)
            progress.update(bar, total=tuning.cost(len(plan.candidates), plan.shares))
            best = [-float("inf")]

            def tell(trial: "Trial") -> None:
                best[0] = max(best[0], trial.figure)
                progress.update(bar, advance=trial.share, best=f"best {best[0]:.4f}")

            rungs: list[list[Trial]] = []
            for trials in tuning.search(experiment, plan, folder, run_one, tell):
                rungs.append(trials)
                following = counts[len(rungs)] if len(rungs) < len(counts) else 0
                progress.update(bar, description=f"{following or len(trials)} candidates")
        except KeyboardInterrupt:
            progress.stop()
            screen.print(f"\nStopped. Finished trials are saved in {folder}. To go on:\n  {command_again()}")
            raise typer.Exit(130) from None
    write_atomically(target, tuning.tuned_toml({**flatten(given), **settings}, whole, plan, rungs).encode())
    if not quiet:
        screen.print(table_of(plan, rungs))
        if sentence := tuning.doubt(rungs, kept_back(folder)):
            screen.print(sentence)
        shown = shlex.quote(str(target))
        screen.print(f"Written: {target}. For all rows of a comparison:\n  tacit compare … --tuned {shown}")


def begin(experiment: "Experiment", minutes: float, by: str, folder: Path) -> "Search":
    """Measure one short trial, and fix what is tried in the time that is given.

    The time is what the trial noted itself: after a stop, or where fewer minutes were refused, it is finished already.
    """
    from tacit.compare import tune as tuning
    from tacit.compare.rows import PendingRun, run_folder
    from tacit.runs.folder import Run

    seconds = 0.0
    trials = tuning.trials_of(experiment, {}, MEASURED)
    for one, bound in zip(trials, ("lower", "upper"), strict=False):
        job = PendingRun(one, run_folder(folder, f"candidate-0-{bound}", one))
        if not job.finished:
            run_one(job, "")
        seconds += (Run(job.folder).summary or {})["seconds"]
    full = seconds / 60 / MEASURED
    count = tuning.fitting(minutes, full)
    plan = tuning.Search(tuple(tuning.candidates(count, experiment.seed)), tuning.RUNGS, by, minutes)
    tuning.save_plan(plan, folder)
    return plan


def run_one(job: "PendingRun", label: str) -> None:
    from tacit.engine.run import run_experiment

    run_experiment(job.experiment, job.folder, resume=True)


def kept_back(folder: Path) -> float:
    """How many labelled images judged the trials."""
    from tacit.runs.folder import Run

    records = [Run(path.parent).records for path in sorted(folder.glob("*/summary.json"))]
    return max((lines[-1].get("validation_images") or 0.0 for lines in records if lines), default=0.0)


def table_of(plan: "Search", rungs: "list[list[Trial]]") -> Table:
    """The candidates that came furthest, the best first."""
    from tacit.compare.tune import in_words

    table = Table("passes", "figure", "candidate", box=SIMPLE_HEAD, show_edge=False)
    for trials in reversed(rungs):
        for trial in trials[:3]:
            table.add_row(f"{trial.share:.0%}", f"{trial.figure:.4f}", in_words(plan.candidates[trial.candidate]))
    return table
