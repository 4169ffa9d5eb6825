"""The commands that show runs as a page: report and watch."""

from pathlib import Path
from typing import Annotated

import typer

Folders = Annotated[list[Path], typer.Argument(help="run folders, or folders of many runs", show_default=False)]


def report(
    folders: Folders,
    out: Annotated[Path, typer.Option("--out", "-o", help="the HTML file to write")] = Path("report.html"),
) -> None:
    """Write runs as one page, to look at in a browser: curves, classes, split, cost, how to reproduce."""
    from tacit.cli.options import console
    from tacit.core.errors import TacitError
    from tacit.core.paths import check_file
    from tacit.core.payload import write_atomically
    from tacit.report.collect import collect
    from tacit.report.page import build

    for folder in folders:
        if not folder.is_dir():
            raise TacitError(f"There is no folder {folder}. Give a run folder, or a folder of runs.")
    check_file(out)
    if not out.parent.is_dir():
        raise TacitError(f"{out} cannot be written: give --out as a file in a folder that exists (report.html).")
    data = collect(folders)
    if not data["runs"]:
        raise TacitError(
            f"There is no run in {', '.join(map(str, folders))}. A run folder holds an experiment.toml; "
            "`tacit run … --out FOLDER` makes one."
        )
    text = build(data).encode()
    write_atomically(out, text)
    screen = console()
    for run in data["runs"]:
        if run["state"] != "finished":
            screen.print(f"{run['name']}: {' '.join([run['says'], *run['problems']])}")
    screen.print(f"{len(data['runs'])} runs, {len(text) / 1e6:.1f} MB. Written to {out}")


def watch(
    folders: Folders,
    host: Annotated[str, typer.Option(help="the address to listen on; 0.0.0.0 lets others look, too")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="(default: 8750, or any if that is taken; 0: any)")
    ] = None,
) -> None:
    """Show runs in a browser while they go on. Ctrl-C ends it; the runs are not touched."""
    from tacit.cli.options import console
    from tacit.report.collect import find_runs
    from tacit.report.serve import PageServer

    screen = console()
    server = PageServer(folders, host, port)
    try:
        if not find_runs(folders):
            named = ", ".join(map(str, folders))
            screen.print(f"There is no run in {named} yet. The page fills when one begins.")
        if not server.only_loopback:
            screen.print(f"Everyone who can reach {host} can look.")
        screen.print(f"Watching at {server.address} (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        screen.print("\nNo longer watching.")
    finally:
        server.server_close()
