"""`tacit figure`: the papers' figures, drawn from the records of runs."""

from pathlib import Path
from statistics import fmean
from typing import Annotated

import typer

from tacit.core.console import SafeConsole

app = typer.Typer(no_args_is_help=True, help="Draw a paper's figure from the records of runs (extra `plot`).")

Folder = Annotated[Path, typer.Argument(help="a run folder")]
Out = Annotated[Path, typer.Option("--out", "-o", help="the picture: .png, .svg or .pdf")]


@app.command()
def bias(folder: Folder, out: Out = Path("bias.png")) -> None:
    """Does APP-U track a model's bias better than the label distribution does? (FedDB, Fig. 3)"""
    from tacit.papers.feddb_figures import draw_bias
    from tacit.runs.folder import Run

    screen = SafeConsole()
    for kind, rounds in draw_bias(Run(folder), out).items():
        if rounds:
            to_app_u, to_labels = (
                fmean(one.to_app_u.mean for one in rounds),
                fmean(one.to_labels.mean for one in rounds),
            )
            screen.print(
                f"{kind} model, {len(rounds)} rounds: {to_app_u:.3f} to APP-U, {to_labels:.3f} to labels (mean)"
            )
    screen.print(f"Written to {out}")


@app.command()
def labels(
    folders: Annotated[list[Path], typer.Argument(help="run folders")], out: Out = Path("pseudo-labels.png")
) -> None:
    """How right pseudo-labels were and how many were accepted, by round (FedDB, Figs. 6 and 7)."""
    from tacit.papers.feddb_figures import draw_labels
    from tacit.runs.folder import Run

    draw_labels({folder.name: Run(folder) for folder in folders}, out)
    SafeConsole().print(f"Written to {out}")


@app.command()
def classes(
    folder: Folder,
    out: Out = Path("classes.png"),
    round: Annotated[int, typer.Option(help="which round, from 0 (default: the last one)")] = -1,
) -> None:
    """Class-wise accuracy of local and global models over the clients' label distributions (FedDB, Fig. 1)."""
    from tacit.papers.feddb_figures import draw_classes
    from tacit.runs.folder import Run

    draw_classes(Run(folder), out, round)
    SafeConsole().print(f"Written to {out}")
