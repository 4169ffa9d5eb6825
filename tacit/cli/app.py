"""The commands that run things (run, resume, compare, demo) and those that tell (methods, recipes, split, …)."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.text import Text

from tacit.cli.inference import register as register_use
from tacit.cli.init import register as register_init
from tacit.cli.options import FromRound, Json, Quiet, Recipe, Set, Track, console, layers, view_of
from tacit.cli.report import report, watch
from tacit.cli.running import run_and_show
from tacit.core.errors import TacitError
from tacit.core.text import safe, safe_lines
from tacit.version import __version__

if TYPE_CHECKING:
    pass

app = typer.Typer(
    name="tacit",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    help="Federated semi-supervised learning: many parties hold images, few hold labels, nobody hands data over.",
    epilog="Your own images: `tacit init FOLDER`. Else start with `tacit demo`, then `tacit methods`, `tacit recipes` "
    "and `tacit run RECIPE --dry-run`.",
)


LONGEST_ERROR = 10_000  # characters of an error that are shown


@app.command(epilog="Example: `tacit run demo --set method.threshold=0.95 --out runs/mine`")
def run(
    recipe: Recipe = "",
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="folder of the run (default: runs/NAME-seedN)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="go on if a run is there, else start")] = False,
    from_round: FromRound = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would be done, and do nothing")] = False,
    everything: Annotated[bool, typer.Option("--all", help="with --dry-run: every setting")] = False,
    quiet: Quiet = False,
    json: Json = False,
    track: Track = None,
) -> None:
    """Run an experiment."""
    from tacit.config.resolve import as_given, resolve
    from tacit.runs.folder import default_out
    from tacit.runs.writer import roll_back

    view = view_of(quiet, json)
    given = layers(recipe, set_)
    experiment = resolve(*given)
    if dry_run:
        from tacit.cli.preview import preview

        preview(experiment, console(), as_given(given), everything)
        return
    if everything:
        raise TacitError("--all shows every setting of a --dry-run: add --dry-run, or leave it out.")
    name = recipe or Path(experiment.method["name"]).stem
    folder = out or default_out(name, experiment.seed)
    if from_round is not None:
        if not resume:
            raise TacitError("--from-round goes back in a run that is there: add --resume.")
        roll_back(folder, from_round)
    run_and_show(experiment, folder, resume, command_again(recipe, set_, folder, track), view=view, track=track or ())


def command_again(recipe: str, settings: list[str] | None, folder: Path, track: list[str] | None) -> str:
    sets = [word for text in settings or [] for word in ("--set", text)]
    tracks = [word for name in track or [] for word in ("--track", name)]
    words = ["tacit", "run", *([recipe] if recipe else []), *sets, *tracks, "--out", str(folder), "--resume"]
    return shlex.join(words)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="the run folder")],
    from_round: FromRound = None,
    quiet: Quiet = False,
    json: Json = False,
    track: Track = None,
) -> None:
    """Go on with a run that was stopped, with its own settings."""
    from tacit.runs.folder import Run
    from tacit.runs.writer import roll_back

    again = shlex.join(["tacit", "resume", str(folder), *(word for name in track or [] for word in ("--track", name))])
    view = view_of(quiet, json)
    if from_round is not None:
        roll_back(folder, from_round)
    run_and_show(Run(folder).experiment, folder, resume=True, again=again, view=view, track=track or ())


@app.command("check-run", epilog="Example: `tacit check-run runs/mine`")
def check(folder: Annotated[Path, typer.Argument(help="the run folder")]) -> None:
    """Compare everything in a run folder with what the run wrote; name what is damaged or missing (exit code 1)."""
    from tacit.runs.folder import Run
    from tacit.runs.integrity import check_run

    found = check_run(folder)
    for line in found:
        console().print(line, markup=False, highlight=False)
    if found:
        raise typer.Exit(1)
    done = len(Run(folder).records)
    console().print(f"{folder} is as it was written ({done} rounds).", markup=False, highlight=False)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="where the runs go")] = Path("runs/demo")) -> None:
    """A semi-supervised method between its lower and its upper bound, on real data, in a few minutes."""
    from tacit.cli.demo import run_demo
    from tacit.core.paths import check_folder

    check_folder(out)
    run_demo(out, console())


@app.command()
def methods(
    name: Annotated[str, typer.Argument(help="tell all about one method")] = "",
    set_: Set = None,
) -> None:
    """What there is: placements, options with defaults, what travels and what stays."""
    from tacit.cli.listings import show_method, show_methods
    from tacit.core.settings import parse_setting

    if name:
        show_method(name, dict(parse_setting(text) for text in set_ or []), console())
    else:
        show_methods(console())


@app.command(epilog="Example: `tacit recipes feddb/table1`")
def recipes(
    under: Annotated[str, typer.Argument(metavar="FOLDER", help="only those in this folder, as in feddb/table1")] = "",
    papers: Annotated[
        bool, typer.Option("--papers", help="only the papers' tables and figures, with what covers them")
    ] = False,
    measure: Annotated[bool, typer.Option("--measure", help="time every net here, for the column `cost`")] = False,
) -> None:
    """The experiments that come with tacit, what of the papers they cover, and what they cost on this machine."""
    from tacit.cli.recipes import show_recipes

    show_recipes(under, papers, measure, console())


@app.command()
def split(
    recipe: Recipe = "",
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="draw it into this PNG (and save it as .npz beside)")] = None,
) -> None:
    """Show who would hold what: clients × classes, labelled and unlabelled."""
    from tacit.cli.split import show_split, targets
    from tacit.config.resolve import resolve
    from tacit.runs.plan import prepare

    if out is not None:
        targets(out)  # what cannot be written is told before any work
    plan = prepare(resolve(*layers(recipe, set_)))
    show_split(plan.split, plan.dataset, out, console())


@app.command(epilog="Example: `tacit generate runs/mine --count 100 --out drawn --score`")
def generate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="a run whose method trains a generator")],
    count: Annotated[int, typer.Option(min=1, max=1_000_000, help="how many images")] = 64,
    out: Annotated[Path | None, typer.Option(help="where they go (default: RUN/generated)")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="another seed draws other images")] = 0,
    score: Annotated[bool, typer.Option("--score", help="say how good they are, beside noise and real images")] = False,
) -> None:
    """Draw images with the generator that a run has trained."""
    from tacit.cli.generate import generate_images

    generate_images(folder, count, out, seed, score, console())


app.command(epilog="Example: `tacit report runs -o report.html`")(report)
app.command(epilog="Example: `tacit watch runs/mine`")(watch)
register_init(app)
register_use(app)


def show_version(wanted: bool) -> None:
    if wanted:
        print(f"tacit {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="and exit")] = False,
) -> None:
    pass


def complete() -> typer.Typer:
    """The command line with the commands that live in files of their own."""
    from tacit.cli.audit import audit
    from tacit.cli.check import check_method_file
    from tacit.cli.compare import compare
    from tacit.cli.data import app as data
    from tacit.cli.figure import app as figure
    from tacit.cli.site import app as site
    from tacit.cli.tune import tune

    if not any(group.name == "data" for group in app.registered_groups):
        app.add_typer(data, name="data", help="Get and check data sets.")
        app.add_typer(figure, name="figure")
        app.add_typer(site, name="site", help="Real sites: each party on its own machine (docs/sites.md).")
        app.command(epilog="Example: `tacit compare cbafed/quick --only cbafed --only lower --seeds 3`")(compare)
        app.command(epilog="Example: `tacit tune photos.toml --minutes 20`")(tune)
        app.command(epilog="Example: `tacit audit runs/mine-seed0`")(audit)
        app.command("check", epilog="Example: `tacit check ./mine.py --placement server`")(check_method_file)
    return app


def refuse(why: str) -> NoReturn:
    console(error=True).print(Text.assemble(("Error:", "bold red"), " ", safe_lines(why, LONGEST_ERROR)))
    sys.exit(2)


def main() -> None:
    """The entry point: an error that the user can fix is shown as a sentence, not as a traceback."""
    complete()
    try:
        if any("\0" in word for word in sys.argv):  # no path can hold it, and nothing else needs it
            raise TacitError("A word of the command holds the control character U+0000. Choose another name.")
        app()
    except TacitError as error:
        refuse(str(error))
    except OSError as error:
        if error.filename is None:  # not about a file: an error of ours
            raise
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        refuse(f"{safe(error.filename)}: {error.strerror}.{notes}")
    except KeyboardInterrupt:
        sys.exit(130)
