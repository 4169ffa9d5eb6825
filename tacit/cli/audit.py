"""The command that tries what a model gives away about its training images."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table


def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished run, its data still there")],
    most: Annotated[int, typer.Option(min=100, max=1_000_000, help="images of either kind that are looked at")] = 5000,
) -> None:
    """Can the model's training images be told from others? Two attacks of membership inference, into RUN/audit.json."""
    from tacit.card.audit import KINDS, NAMES, cells, sentence
    from tacit.core.console import SafeConsole, noted
    from tacit.core.errors import TacitError
    from tacit.core.payload import write_atomically
    from tacit.core.text import safe_lines
    from tacit.engine.handover import card_again
    from tacit.inference.membership import ATTACKS, FILE, audit_model, audit_text
    from tacit.inference.model import load_model
    from tacit.runs.costs import one_thread
    from tacit.runs.folder import Run
    from tacit.runs.plan import prepare

    console, folder = SafeConsole(), Run(run)
    if folder.in_use:
        raise TacitError(f"A process is working on {run}. Audit it when that is done.")
    model = load_model(run)
    plan = prepare(folder.experiment, folder.split_path)
    with one_thread():
        found = audit_model(model, plan, folder.records, most)
    table = Table("images learned from", "attack", "members", "others", "AUC", "found at 1 % false alarms")
    for name, words in KINDS.items():
        if (group := getattr(found, name)) is not None:
            for attack in ATTACKS:
                figures = cells(getattr(group, attack))
                table.add_row(words, NAMES[attack], f"{group.members:,}", f"{group.others:,}", *figures)
            console.print(sentence(group, words).replace("**", ""))
    console.print(table)
    for remark in found.remarks:
        console.print(noted(remark))
    write_atomically(run / FILE, audit_text(found).encode())
    card_again(folder, plan, found)
    console.print(f"Written to {safe_lines(run / FILE)}, and into the model card. More: docs/audit.md")
