"""A run with its progress on the screen: what `run`, `resume`, `compare` and `demo` have in common."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tacit.cli.options import console
from tacit.core.console import SafeConsole
from tacit.core.text import as_word

if TYPE_CHECKING:
    from tacit.runs.progress import Display


def run_and_show(
    experiment: Any,
    folder: Path,
    resume: bool,
    again: str,
    label: str = "",
    view: "Display" = "auto",
    track: Sequence[str] = (),
    screen: SafeConsole | None = None,
) -> Any:
    """Run with progress; Ctrl-C says how to go on and exits with 130."""
    from tacit.cli.data import load_shown
    from tacit.engine.checks import check_run
    from tacit.engine.run import run_experiment
    from tacit.runs.progress import print_json, watcher_for
    from tacit.runs.trackers import Together, trackers

    screen = screen or console(error=view != "auto")  # the standard output is for programs, or for nobody
    check_run(experiment, folder)  # before data is fetched
    watcher = Together(watcher_for(screen, label, view), *trackers(track, folder))
    try:
        if view == "auto" and not experiment.data.sites:
            load_shown(experiment.data.name, screen)
        finished = run_experiment(experiment, folder, resume=resume, watcher=watcher)
    except KeyboardInterrupt:
        watcher.close()
        screen.print(f"\nStopped. All finished rounds are saved in {folder}. To go on:\n  {again}")
        raise typer.Exit(130) from None
    except Exception as error:
        if (folder / "checkpoint").is_dir():  # shown below the traceback, where it is read
            error.add_note(f"All finished rounds are saved in {folder}. When this is fixed, go on with:\n  {again}")
        raise
    finally:
        watcher.close()
    summary = finished.summary or {}
    if view == "json":
        print_json({"kind": "summary", "folder": str(folder), **summary})
    elif view == "auto" and not label:
        show_result(summary, folder, screen)
    return finished


def show_result(summary: Mapping[str, Any], folder: Path, screen: SafeConsole) -> None:
    """At the end: how good the model is, which it is, and how to use it."""
    from tacit.compare.recalls import mean_recall
    from tacit.engine.private import privacy_spent
    from tacit.evaluation.headline import headline, leads

    if summary["accuracy"] is not None:
        screen.print(f"{summary['method']}: {headline(summary, 2)} ({summary['reporting']})")
        if leads(summary) == "balanced_accuracy" and (recalls := mean_recall([folder])):
            screen.print(f"Recall by class (95 % intervals): {recalls}")
    if guard := summary.get("guard"):
        screen.print(guard["sentence"])
    screen.print("\n".join([*privacy_spent(summary), f"Written to {folder}"]))
    if (folder / "card.html").is_file():
        screen.print(
            f"The model card: {folder / 'card.html'}. To use the model:\n"
            f"  tacit predict {as_word(folder)} IMAGES -o predictions.csv\n"
            f"  tacit export {as_word(folder)} --to onnx"
        )
