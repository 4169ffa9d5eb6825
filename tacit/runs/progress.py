"""What is seen while a run goes on: a live view in a terminal, plain lines elsewhere, JSON for programs, or nothing."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tacit.contract.parties import RoundInfo
from tacit.core.console import SafeConsole, noted
from tacit.core.formatting import clock
from tacit.evaluation.headline import headline, leads
from tacit.runs.plan import Plan
from tacit.runs.watchers import NullWatcher, Watcher

Display = Literal["auto", "quiet", "json"]


class Screen(Watcher, Protocol):
    """A watcher that must be told when it is over, however it ends."""

    def close(self) -> None: ...


def figures(record: Mapping[str, Any]) -> str:
    """The figures of one round that a person wants to see go by.

    >>> figures({"accuracy": 0.912, "accepted_ratio": 0.75, "pseudo_accuracy": 0.98})
    'accuracy 91.2 %  accepted 75 % (98 % right)'
    """
    parts = []
    if first := headline(record):
        parts.append(first)
    if accepted := accepted_text(record):
        parts.append(accepted)
    if record.get("refused"):
        parts.append(f"{len(record['refused'])} refused")
    if record.get("skipped"):
        parts.append("round left out")
    return "  ".join(parts)


def accepted_text(record: Mapping[str, Any]) -> str:
    """How many pseudo-labels were accepted, and how many of those were right.

    >>> accepted_text({"accepted_ratio": 0.75, "pseudo_accuracy": 0.98}), accepted_text({"accepted_ratio": 0.0})
    ('accepted 75 % (98 % right)', 'accepted 0 %')
    >>> accepted_text({})
    ''
    """
    if record.get("accepted_ratio") is None:
        return ""
    right = record.get("pseudo_accuracy")
    return f"accepted {100 * record['accepted_ratio']:.0f} %" + (
        f" ({100 * right:.0f} % right)" if right is not None else ""
    )


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """The course of a figure in one line, from its least (▁) to its greatest value (█); the newest if there are many.

    >>> sparkline([0.1, 0.2, 0.8, 0.5]), sparkline([0.5, 0.5]), sparkline([])
    ('▁▂█▅', '▁▁', '')
    >>> sparkline(range(100), width=8)
    '▁▂▃▄▅▆▇█'
    """
    shown = list(values)[-width:]
    if not shown:
        return ""
    least, span = min(shown), max(shown) - min(shown)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (value - least) / span) if span else 0] for value in shown)


class Estimate:
    """Time left, from the rounds that this process has seen."""

    def __init__(self, done: int, steps: int) -> None:
        self.started, self.first, self.done, self.steps = time.monotonic(), done, done, steps

    def left(self) -> str:
        seen = self.done - self.first
        if not seen:
            return "?"
        return clock((time.monotonic() - self.started) / seen * (self.steps - self.done))


class LiveView:
    """Three lines that renew themselves: where the run is, its accuracy so far, and what the last round was like."""

    def __init__(self, console: SafeConsole, label: str = "") -> None:
        self.console = console
        self.label = label.strip()
        self.place, self.completed, self.steps = "starting", 0.0, 1
        self.leads = "accuracy"  # the figure that is shown by round
        self.accuracies: list[float] = []
        self.record: Mapping[str, Any] = {}
        self.over = ""
        self.live = Live(console=console, get_renderable=self._view, refresh_per_second=4)  # draws at once

    def start(self, plan: Plan, done: int) -> None:
        for warning in plan.warnings:
            self.console.print(noted(warning))
        self.label = self.label or plan.experiment.method["name"].rsplit("/")[-1].removesuffix(".py")
        self.completed, self.steps = float(done), plan.steps
        self.estimate = Estimate(done, plan.steps)
        self.live.start()

    def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None:
        self.completed = round_info.step + done / asked
        self.place = f"{place(round_info.stage, round_info.round, round_info.rounds)}, client {done} of {asked}"
        self.live.refresh()  # a client takes longer than three lines, and short rounds are to be seen, too

    def round_done(self, record: Mapping[str, Any]) -> None:
        self.estimate.done, self.completed, self.record = record["step"] + 1, float(record["step"] + 1), record
        if record.get("accuracy") is not None:
            self.leads = leads(record)
            self.accuracies.append(record[self.leads])
        self.place = place(record["stage"], record["round"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.over = f"{summary['rounds']} rounds in {clock(summary['seconds'])}"
        self.close()

    def close(self) -> None:
        self.live.stop()

    def _view(self) -> RenderableType:
        bar = ProgressBar(total=self.steps, completed=min(self.completed, self.steps), width=20)
        top = Table.grid(padding=(0, 2))
        top.add_row(Text(self.label, "bold"), bar, Text(self.over or self.place))
        lines: list[RenderableType] = [top]
        if self.accuracies:
            best = max(self.accuracies)
            course = sparkline(self.accuracies, width=max(8, min(40, self.console.width - 40)))
            named = self.leads.replace("_", " ")
            text = Text(f"  {named} {100 * self.accuracies[-1]:.1f} %  ", "green")
            text.append(course).append(f"  best {100 * best:.1f} %", "dim")
            if self.leads != "accuracy" and self.record:
                plain, always = (100 * self.record[key] for key in ("accuracy", "largest_class"))
                text.append(f"  accuracy {plain:.1f} %, always the largest class {always:.1f} %", "dim")
            lines.append(text)
        if self.record and not self.over:
            lines.append(Text("  " + " · ".join(self._facts()), "dim"))
        for line in lines[1:]:
            assert isinstance(line, Text)
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _facts(self) -> list[str]:
        record = self.record
        asked, answered = len(record.get("asked", ())), len(record.get("answered", ()))
        facts = [accepted_text(record), f"{answered} of {asked} clients answered" if asked else ""]
        facts += [f"{len(record['refused'])} refused" if record.get("refused") else ""]
        facts += ["round left out" if record.get("skipped") else ""]
        facts += [f"{record['seconds']:.1f} s a round", f"{self.estimate.left()} left"]
        return [fact for fact in facts if fact]


def place(stage: str, number: int, rounds: int | None = None) -> str:
    """Which round of which stage.

    >>> place("main", 4, 20), place("warm-up", 0)
    ('round 5 of 20', 'warm-up round 1')
    """
    return ("" if stage == "main" else f"{stage} ") + f"round {number + 1}" + (f" of {rounds}" if rounds else "")


class Lines:
    """One line a round, for logs and pipes."""

    def __init__(self, console: SafeConsole, label: str = "") -> None:
        self.console = console
        self.label = f"{label}: " if label else ""

    def start(self, plan: Plan, done: int) -> None:
        for warning in plan.warnings:
            self.console.print(f"Note: {warning}")
        self.estimate = Estimate(done, plan.steps)

    def client_done(self, round_info: RoundInfo, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None:
        self.estimate.done = record["step"] + 1
        where = f"{record['stage']} round {record['round'] + 1}"
        text = f"{self.label}{where}  {figures(record)}  ({record['seconds']:.1f} s, {self.estimate.left()} left)"
        self.console.print(text)

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonLines(NullWatcher):
    """One JSON object a round on the standard output, flushed: {"kind": "round", …} with all of its record."""

    def round_done(self, record: Mapping[str, Any]) -> None:
        print_json({"kind": "round", **record})

    def close(self) -> None: ...


class Nothing(NullWatcher):
    """--quiet."""

    def close(self) -> None: ...


def print_json(thing: Mapping[str, Any]) -> None:
    print(json.dumps(thing), flush=True)


def watcher_for(console: SafeConsole, label: str = "", view: Display = "auto") -> Screen:
    """The live view in a terminal, lines elsewhere, unless asked for otherwise."""
    if view != "auto":
        return JsonLines() if view == "json" else Nothing()
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveView(console, label) if live else Lines(console, label)
