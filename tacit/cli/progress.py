"""What a person sees while a run goes on: a live bar in a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from tacit.engine import Plan
from tacit.sides import Moment
from tacit.units import clock


def figures(record: Mapping[str, Any]) -> str:
    """The figures of one round that a person wants to see go by.

    >>> figures({"accuracy": 0.912, "kept_ratio": 0.75, "pseudo_accuracy": 0.98})
    'accuracy 91.2 %  kept 75 % (98 % right)'
    """
    parts = []
    if record.get("accuracy") is not None:
        parts.append(f"accuracy {100 * record['accuracy']:.1f} %")
    if record.get("kept_ratio") is not None:
        right = record.get("pseudo_accuracy")
        parts.append(f"kept {100 * record['kept_ratio']:.0f} %" + (f" ({100 * right:.0f} % right)" if right else ""))
    if record.get("refused"):
        parts.append(f"{len(record['refused'])} refused")
    if record.get("skipped"):
        parts.append("round left out")
    return "  ".join(parts)


class Estimate:
    """Time left, from the rounds that this process has seen."""

    def __init__(self, done: int, steps: int) -> None:
        self.started, self.first, self.done, self.steps = time.monotonic(), done, done, steps

    def left(self) -> str:
        seen = self.done - self.first
        if not seen:
            return "?"
        return clock((time.monotonic() - self.started) / seen * (self.steps - self.done))


class LiveBar:
    """A bar with round, stage, figures and time left."""

    def __init__(self, console: Console, label: str = "") -> None:
        self.console = console
        self.label = label
        self.progress = Progress(
            TextColumn("{task.fields[label]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[place]}"),
            TextColumn("[green]{task.fields[figures]}"),
            TextColumn("[dim]{task.fields[left]}"),
            console=console,
        )
        self.task: TaskID | None = None

    def start(self, plan: Plan, done: int) -> None:
        for warning in plan.warnings:
            self.console.print(f"[yellow]Note:[/] {escape(warning)}")
        self.estimate = Estimate(done, plan.steps)
        self.progress.start()
        self.task = self.progress.add_task(
            "", total=plan.steps, completed=done, label=self.label, place="starting", figures="", left=""
        )

    def _update(self, **fields: Any) -> None:
        if self.task is not None:
            self.progress.update(self.task, **fields)

    def client_done(self, moment: Moment, done: int, asked: int) -> None:
        stage = "" if moment.stage == "main" else f"{moment.stage} "
        place = f"{stage}round {moment.round + 1}/{moment.rounds}, client {done}/{asked}"
        self._update(completed=moment.step + done / asked, place=place)

    def round_done(self, record: Mapping[str, Any]) -> None:
        self.estimate.done = record["step"] + 1
        left = f"{record['seconds']:.1f} s a round, {self.estimate.left()} left"
        self._update(completed=record["step"] + 1, figures=figures(record), left=left)

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._update(place=f"{summary['rounds']} rounds", left=clock(summary["seconds"]))
        self.close()

    def close(self) -> None:
        self.progress.stop()


class Lines:
    """One line a round, for logs and pipes."""

    def __init__(self, console: Console, label: str = "") -> None:
        self.console = console
        self.label = f"{label}: " if label else ""

    def start(self, plan: Plan, done: int) -> None:
        for warning in plan.warnings:
            self.console.print(f"Note: {warning}", markup=False)
        self.estimate = Estimate(done, plan.steps)

    def client_done(self, moment: Moment, done: int, asked: int) -> None: ...

    def round_done(self, record: Mapping[str, Any]) -> None:
        self.estimate.done = record["step"] + 1
        place = f"{record['stage']} round {record['round'] + 1}"
        text = f"{self.label}{place}  {figures(record)}  ({record['seconds']:.1f} s, {self.estimate.left()} left)"
        self.console.print(text, markup=False, highlight=False)

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def watcher_for(console: Console, label: str = "") -> LiveBar | Lines:
    """The live bar in a terminal, lines elsewhere."""
    return LiveBar(console, label) if console.is_terminal else Lines(console, label)
