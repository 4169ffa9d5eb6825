"""`tacit check`: the rules that every method keeps, asked of a method file of the user's own."""

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tacit.cli.options import console
from tacit.core.console import SafeConsole

if TYPE_CHECKING:
    from tacit.testing.findings import Finding, Report, Skip

ONLY = (
    "only this rule (loads, runs, declared, deterministic, pool, resume, isolated, silent-clients, learns, "
    "bad-replies, sums)"
)


def check_method_file(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="a method file (./mine.py), or a name (fixmatch)")],
    placement: Annotated[
        list[str] | None,
        typer.Option(metavar="P", help="only with labels there: server, clients or some-clients; repeat"),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(metavar="X", help="accuracy on the digits that it must reach (default 0.25)")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="RULE", help=f"{ONLY}; repeat")] = None,
    json: Annotated[bool, typer.Option("--json", help="one JSON object a finding, then the report")] = False,
) -> None:
    """Check a method file of your own (./mine.py), or a method that tacit knows by name, by the rules of every method.

    Tiny runs on the embedded digits, a minute or less; nothing is written. For each rule that is broken it says what to
    do (docs/adding-a-method.md has the rules). Exit code 0: all are kept; 1: one is broken; 2: there is no such method.
    """
    from tacit.runs.progress import print_json
    from tacit.testing import check_method
    from tacit.testing.findings import Finding

    screen = console()

    def tell(found: "Finding | Skip") -> None:
        if not json:
            screen.print(line_of(found))
        elif isinstance(found, Finding):
            print_json({"kind": "finding", **dataclasses.asdict(found)})
        else:
            print_json({"kind": "skipped", **found._asdict()})

    report = check_method(method, placements=placement, threshold=threshold, only=only, tell=tell)
    if json:
        counts = {"checks": len(report.findings), "failures": len(report.failures), "warnings": len(report.warnings)}
        seconds = round(report.seconds, 2)
        print_json({"kind": "report", "method": report.method, "passed": report.passed, **counts, "seconds": seconds})
    else:
        show_end(report, screen)
    if not report.passed:
        raise typer.Exit(1)


def line_of(found: "Finding | Skip") -> Text:
    """One line: whether it passed, which rule, where labels are, how long it took, what was seen."""
    from tacit.testing.findings import Skip

    where = f"{found.rule:<15}{found.placement:<13}"
    if isinstance(found, Skip):
        return Text(f"– {where}         not asked, because '{found.because}' failed", "dim")
    mark, colour = ("!", "yellow") if found.is_warning else ("✓", "green") if found.passed else ("✗", "red")
    seen = found.why if found.passed and not found.is_warning else ""
    return Text.assemble((mark, colour), f" {where}{found.seconds:6.1f} s", (f"  {seen}" if seen else "", "dim"))


def show_end(report: "Report", screen: SafeConsole) -> None:
    """What is wrong and what to do, the same thing once; then the sum."""
    from tacit.testing.findings import told_once

    for findings, mark, colour in ((report.failures, "✗", "red"), (report.warnings, "!", "yellow")):
        for title, why, remedy in told_once(findings):
            screen.print(
                Text.assemble("\n", (f"{mark} {title}", f"bold {colour}"), f"\n  {why}\n  What to do: {remedy}")
            )
    checks, failures, warnings = len(report.findings), len(report.failures), len(report.warnings)
    whole = f"all {checks} checks" if checks > 1 else "the one check"
    said = f"passes {whole}" if report.passed else f"fails {failures} of {checks} check{'s' if checks > 1 else ''}"
    more = f", with {warnings} warning{'s' if warnings > 1 else ''}" if warnings else ""
    left = f"; {len(report.skipped)} were not asked" if report.skipped else ""
    screen.print(f"\n{report.method} {said}{more}{left} ({report.seconds:.0f} s).")
