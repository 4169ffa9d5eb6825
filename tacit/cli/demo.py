"""The main job: what do unlabelled images at the clients add to a few labels at the server?"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tacit.cli.app import run_and_show
from tacit.cli.data import load_shown
from tacit.compare import bounds_of, gap_closed
from tacit.errors import TacitError
from tacit.experiment import resolve
from tacit.payload import write_atomically
from tacit.recipes import load_recipe
from tacit.record import Run
from tacit.units import clock


def choose_recipe(screen: Console) -> dict[str, Any]:
    """The demo on MNIST, or on the embedded digits where MNIST cannot be had."""
    recipe = load_recipe("demo")
    try:
        load_shown(recipe["data"]["name"], screen)
        return recipe
    except TacitError as error:
        screen.print("[yellow]MNIST cannot be fetched here[/], so the embedded 8x8 digits are used.")
        screen.print(str(error), style="dim", markup=False, highlight=False)
        return load_recipe("demo-digits")


def run_demo(out: Path, screen: Console) -> None:
    recipe = choose_recipe(screen)
    experiment = resolve(recipe)
    lower, upper = bounds_of(experiment)
    name = experiment.method["name"]
    plan = {"lower bound": lower, name: experiment, "upper bound": upper}
    screen.print(
        f"[bold]{recipe['title']}[/]\nThree runs on the same split, with the same net and rounds: FedAvg on the labels "
        f"alone (lower bound), {name} with the unlabelled images, FedAvg with all labels revealed (upper bound)."
    )
    results: dict[str, Any] = {}
    folders: list[Run] = []
    for label, one in plan.items():
        folder = out / label.replace(" ", "-")
        again = f"tacit demo --out {out}"
        finished = run_and_show(one, folder, True, again, label=f"{label:<11}")
        results[label] = finished.summary
        folders.append(finished)
    bottom, method, top = results.values()
    gap = gap_closed(method["accuracy"], bottom["accuracy"], top["accuracy"])
    folders[1].add_to_summary(gap_closed=gap, lower_bound=bottom["accuracy"], upper_bound=top["accuracy"])

    table = Table(title=recipe["title"], title_justify="left")
    for column in ("", "accuracy", "AUC", "labels right", "sent up", "time"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for label, summary in results.items():
        right = summary.get("pseudo_accuracy")
        table.add_row(
            label,
            f"{100 * summary['accuracy']:.1f} %",
            f"{100 * summary['auc']:.1f} %",
            f"{100 * right:.1f} %" if right else "–",
            f"{summary['bytes_up'] / 1e6:.0f} MB" if summary["bytes_up"] else "–",
            clock(summary["seconds"]),
        )
    screen.print(table)
    if gap is not None:
        screen.print(
            f"[bold]Gap closed: {100 * gap:.0f} %[/] of the way from the labels alone to all labels, "
            f"without a single further label (one seed, reduced scale)."
        )
    else:
        screen.print("The bounds leave no gap to close: the upper bound has not converged in so few rounds.")
    write_atomically(out / "comparison.json", json.dumps({"gap_closed": gap, "runs": results}, indent=2).encode())
    screen.print(f"Written to {out} (finished runs are shown again, not repeated; remove the folder to run anew).")
