"""The main job: what do unlabelled images at the clients add to a few labels at the server?"""

import json
from pathlib import Path
from typing import Any

from rich.text import Text

from tacit.cli.data import load_shown
from tacit.cli.running import run_and_show
from tacit.compare.results import bounds_of, results, survey
from tacit.compare.rows import PendingRun, Row
from tacit.compare.tables import for_screen, sheet
from tacit.compare.verdicts import unsettled
from tacit.config.recipes import load_recipe
from tacit.config.resolve import resolve
from tacit.core.console import SafeConsole, noted
from tacit.core.errors import TacitError
from tacit.core.payload import write_atomically
from tacit.core.text import as_word
from tacit.runs.folder import Run


def choose_recipe(screen: SafeConsole) -> dict[str, Any]:
    """The demo on MNIST, or on the embedded digits where MNIST cannot be had."""
    recipe = load_recipe("demo")
    try:
        load_shown(recipe["data"]["name"], screen)
        return recipe
    except TacitError as error:
        screen.print(noted("the embedded 8x8 digits are used.", "MNIST cannot be fetched here:"))
        screen.print(str(error), style="dim")
        return load_recipe("demo-digits")


def run_demo(out: Path, screen: SafeConsole) -> None:
    recipe = choose_recipe(screen)
    experiment = resolve(recipe)
    lower, upper = bounds_of(experiment)
    name = experiment.method["name"]
    plan = {"lower bound": lower, name: experiment, "upper bound": upper}
    screen.print(
        Text.assemble(
            (recipe["title"], "bold"),
            "\nThree runs on the same split, with the same net and rounds: FedAvg on the labels alone (lower bound), "
            f"{name} with the unlabelled images, FedAvg with all labels revealed (upper bound).",
        )
    )
    rows = [Row(label, (PendingRun(one, out / label.replace(" ", "-")),)) for label, one in plan.items()]
    for row in rows:
        job = row.jobs[0]
        run_and_show(job.experiment, job.folder, True, f"tacit demo --out {as_word(out)}", label=f"{row.label:<11}")
    (bottom, method, top), *_ = blocks = results(rows, survey(rows))
    gap, found = method.gap, {line.label: line.runs[experiment.seed] for line in (bottom, method, top)}
    bounds = {"lower_bound": bottom.mean("accuracy"), "upper_bound": top.mean("accuracy")}
    Run(rows[1].jobs[0].folder).add_to_summary(gap_closed=gap, **bounds)

    columns = ("method", "accuracy", "AUC", "labels right", "sent", "time a run")
    for table in for_screen(sheet(blocks, columns=columns), screen.width):
        screen.print(table)
    if gap is not None:
        screen.print(
            Text.assemble(
                (f"Gap closed: {100 * gap:.0f} %", "bold"),
                " of the way from the labels alone to all labels, without a single further label (one seed, reduced "
                "scale).",
            )
        )
    else:
        for why in unsettled(blocks) or ["The bounds leave no gap to close."]:
            screen.print(why)
    write_atomically(out / "comparison.json", json.dumps({"gap_closed": gap, "runs": found}, indent=2).encode())
    screen.print(f"Written to {out} (finished runs are shown again, not repeated; remove the folder to run anew).")
