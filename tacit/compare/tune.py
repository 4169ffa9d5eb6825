"""Find a training recipe for a problem by trying some on its bounds: successive halving, judged by labelled images that
are kept back, never by test images.

Every candidate gets the same number of passes over the data. All are tried with an eighth of them, the better half
goes on with a quarter, and so on; the last ones are tried in full. Each trial is an ordinary run in a folder of its
own, so a search that was stopped goes on where it was.
"""

import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from tacit.compare.results import bounds_of, can_reveal
from tacit.compare.rows import PendingRun, identity, run_folder
from tacit.config.resolve import resolve
from tacit.config.scale import size_of
from tacit.core.errors import TacitError
from tacit.core.payload import write_atomically
from tacit.core.seeds import numpy_generator
from tacit.core.settings import Experiment, flatten, nest
from tacit.core.text import safe
from tacit.runs.folder import Run

Settings = Mapping[str, Any]

PLAN = "tune.json"
KEPT_BACK = 0.2  # of the labels, where the experiment keeps none back itself
RUNGS = (0.125, 0.25, 0.5, 1.0)  # shares of all passes
FEWEST, MOST = 4, 64  # candidates

# What is tried: one of each. `constant` is with an average of the answers, which does what a falling rate does.
RATES = (0.02, 0.05, 0.1, 0.2)
BATCHES = (16, 32, 64)
# Local epochs a round, or a part of one: rounds follow, for passes stay.
MEETINGS: tuple[Settings, ...] = (
    {"train.epochs": 1, "train.parts": 4},
    {"train.epochs": 1, "train.parts": 1},
    {"train.epochs": 3, "train.parts": 1},
)
SCHEDULES: tuple[Settings, ...] = (
    {"train.schedule": "linear", "train.end": 0.02, "server.answer": "last"},
    {"train.schedule": "cosine", "train.end": 0.0, "server.answer": "last"},
    {"train.schedule": "constant", "server.answer": "ema", "server.answer_decay": 0.8},
)
SERVERS: tuple[Settings, ...] = (
    {"server.name": "mean"},
    {"server.name": "momentum", "server.momentum": 0.6},
    {"server.name": "momentum", "server.momentum": 0.9},
    {"server.name": "adam", "server.momentum": 0.9, "server.lr": 0.01},
)
ALWAYS: Settings = {
    "train.schedule_by": "step",
    "train.warmup": 0.05,
    "train.nesterov": True,
    "train.label_smoothing": 0.1,
}


@dataclass(frozen=True)
class Trial:
    """One candidate on one rung: its number, the share of the passes, and its figure (mean over the bounds)."""

    candidate: int
    share: float
    figure: float


@dataclass(frozen=True)
class Search:
    """What a search tries, fixed when it begins: so it is the same after a stop."""

    candidates: tuple[dict[str, Any], ...]  # the first is the experiment's own training
    shares: tuple[float, ...]
    by: str  # the figure on the images kept back
    minutes: float


def candidates(count: int, seed: int) -> list[dict[str, Any]]:
    """So many different ways to train: the experiment's own (nothing changed), and others drawn at random.

    >>> first, second = candidates(2, seed=0)
    >>> first, set(second) >= {"train.lr", "train.batch", "train.epochs", "train.schedule", "server.name"}
    ({}, True)
    """
    space = list(itertools.product(RATES, BATCHES, MEETINGS, SCHEDULES, SERVERS))
    drawn = numpy_generator(seed, "tune").permutation(len(space))[: count - 1]
    chosen = [space[place] for place in drawn]
    return [
        {},
        *(
            {**ALWAYS, "train.lr": lr, "train.batch": batch, **meetings, **schedule, **server}
            for lr, batch, meetings, schedule, server in chosen
        ),
    ]


def halved(candidates: int, shares: Sequence[float]) -> list[int]:
    """How many candidates are tried on each rung: all, then half of them, rounded up.

    >>> halved(16, RUNGS), halved(5, (0.5, 1.0))
    ([16, 8, 4, 2], [5, 3])
    """
    return [math.ceil(candidates / 2**rung) for rung in range(len(shares))]


def cost(candidates: int, shares: Sequence[float]) -> float:
    """The cost of a search, in trials with all passes.

    >>> cost(16, RUNGS)
    8.0
    """
    return sum(count * share for count, share in zip(halved(candidates, shares), shares, strict=True))


def fitting(minutes: float, full: float, shares: Sequence[float] = RUNGS) -> int:
    """How many candidates fit into so many minutes, where one full trial takes `full` of them; a refusal if too few do.

    >>> fitting(40, full=5.0)
    16
    """
    count = next((n for n in range(MOST, FEWEST - 1, -1) if cost(n, shares) * full <= minutes), 0)
    if not count:
        needed = math.ceil(cost(FEWEST, shares) * full)
        raise TacitError(
            f"A search over {FEWEST} candidates would take about {needed} minutes here (a full trial takes "
            f"{full:.1f}), and {minutes:g} are given. Give --minutes {needed} or more, or make the problem smaller "
            "(--scale, --set rounds=…, --set data.subset=…)."
        )
    return count


# --- One trial --------------------------------------------------------------------------------------------


def trials_of(experiment: Experiment, settings: Settings, share: float) -> list[Experiment]:
    """The bounds of an experiment, trained in a candidate's way with a share of the passes.

    Rounds are such that passes over the data stay, however many local epochs there are. Labels are kept back to judge
    by; the test set is cut down to one image a class, for nobody looks at it.

    >>> lower, upper = trials_of(resolve({"rounds": 20, "train.epochs": 3}), {"train.epochs": 1}, 0.5)
    >>> lower.rounds, lower.train.epochs, lower.data.validation, upper.data.reveal
    (30, 1, 0.2, 'all')
    """
    own = bounds_of(experiment)[0]
    rounds = max(1, math.ceil(round(share * own.rounds * own.train.passes / passes_of(settings, own), 9)))
    changes = {
        **settings,
        "rounds": rounds,
        "evaluate_every": rounds,
        "reporting": "last",
        "best_by": "test",
        "data.validation": own.data.validation or KEPT_BACK,
        "data.test_subset": size_of(own.data)[1],
    }
    lower = resolve(own.to_dict(), changes)
    upper = resolve(lower.to_dict(), {"data.reveal": "all"})
    return [lower, upper] if can_reveal(experiment) else [lower]


def figure_of(runs: Sequence[Run], by: str) -> float:
    """The mean over the bounds of their figure on the images kept back; the higher the better (a loss is negated)."""
    values = [run.records[-1].get(f"validation_{by}") for run in runs]
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return -math.inf  # it diverged
    return statistics.fmean(found) * (-1 if by == "loss" else 1)


# --- The search -------------------------------------------------------------------------------------------


def search(
    experiment: Experiment,
    plan: Search,
    folder: Path,
    run: Callable[[PendingRun, str], None],
    tell: Callable[[Trial], None] = lambda trial: None,
) -> Iterator[list[Trial]]:
    """The trials of one rung after the other; the better half of each goes on to the next."""
    alive = list(range(len(plan.candidates)))
    for rung, (share, count) in enumerate(zip(plan.shares, halved(len(plan.candidates), plan.shares), strict=True)):
        trials = []
        for number in alive[:count]:
            jobs = [
                PendingRun(one, run_folder(folder, f"candidate-{number}-{bound}", one))
                for one, bound in zip(
                    trials_of(experiment, plan.candidates[number], share), ("lower", "upper"), strict=False
                )
            ]
            for job in jobs:
                if not job.finished:
                    run(job, f"rung {rung + 1} of {len(plan.shares)}, candidate {number}")
            trials.append(Trial(number, share, figure_of([Run(job.folder) for job in jobs], plan.by)))
            tell(trials[-1])
        trials.sort(key=lambda trial: -trial.figure)
        alive = [trial.candidate for trial in trials]
        yield trials


def search_folder(runs: Path, name: str, experiment: Experiment, by: str) -> Path:
    """Where a search keeps its runs: found again by the same experiment and figure."""
    return run_folder(runs, f"{name}-{by}", experiment).with_name(f"{name}-{by}-{identity(experiment)}")


def saved_plan(folder: Path) -> Search | None:
    """What a search that was begun here tries; None if there is none."""
    path = folder / PLAN
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_text())
        tried = tuple(dict(settings) for settings in saved["candidates"])
        return Search(tried, tuple(saved["shares"]), str(saved["by"]), float(saved["minutes"]))
    except (ValueError, KeyError, TypeError) as error:
        raise TacitError(f"{path} is damaged ({safe(error)}). Delete it; runs that are finished stay.") from None


def save_plan(plan: Search, folder: Path) -> None:
    write_atomically(folder / PLAN, (json.dumps(asdict(plan), indent=2) + "\n").encode())


# --- What comes of it -------------------------------------------------------------------------------------


def tuned_settings(experiment: Experiment, best: Settings) -> dict[str, Any]:
    """The settings to write: the candidate's, and as many rounds as keep the passes."""
    passes = experiment.rounds * experiment.train.passes
    return {**best, "rounds": math.ceil(round(passes / passes_of(best, experiment), 9))}


def passes_of(settings: Settings, experiment: Experiment) -> float:
    """Passes over the data in a round, in a candidate's way; what it does not say is the experiment's own."""
    epochs, parts = (settings.get(f"train.{what}", getattr(experiment.train, what)) for what in ("epochs", "parts"))
    return float(epochs / parts)


def in_words(settings: Settings) -> str:
    """A candidate in one line.

    >>> in_words({"train.lr": 0.1, "server.name": "mean"}), in_words({})
    ('lr 0.1, server mean', 'as it was')
    """
    shown = {key: value for key, value in settings.items() if key not in ALWAYS}
    words = [f"{key.removeprefix('train.').removesuffix('.name').replace('.', ' ')} {shown[key]}" for key in shown]
    return ", ".join(words) or "as it was"


def tuned_toml(given: Settings, experiment: Experiment, plan: Search, rungs: Sequence[Sequence[Trial]]) -> str:
    """The experiment's own file with the training that was found, and above it what was tried."""
    best = plan.candidates[rungs[-1][0].candidate]
    how = (
        f"{len(plan.candidates)} ways to train were tried within {plan.minutes:g} minutes on the bounds, by "
        f"{plan.by.replace('_', ' ')} on labels kept back"
    )
    lines = [f"# Written by `tacit tune`: {how}.", "# Passes, candidate, figure (mean over the bounds):"]
    for trials in rungs:
        for trial in trials[:5]:
            words = in_words(plan.candidates[trial.candidate])
            lines.append(f"#   {trial.share:5.0%}  {trial.figure:7.4f}  {trial.candidate:3d}  {words}")
    merged = {**flatten(given), **tuned_settings(experiment, best), "tuned": how}
    return "\n".join(lines) + "\n\n" + tomli_w.dumps(nest(merged))


def doubt(rungs: Sequence[Sequence[Trial]], images: float) -> str:
    """A sentence where the first is not told from the next by so many images; '' where it is, or for losses.

    It looks at the last rung on which there were two.

    >>> doubt([[Trial(1, 1.0, 0.52), Trial(0, 1.0, 0.50)]], images=100)
    'With 100 % of the passes the first two were 2.0 points apart, within the chance of 100 images kept back (± 5.0):
    either may be the better.'
    """
    last = next((trials for trials in reversed(rungs) if len(trials) > 1), [])
    if not last or not 0 < last[0].figure <= 1 or not images:
        return ""
    apart, chance = last[0].figure - last[1].figure, float(np.sqrt(last[0].figure * (1 - last[0].figure) / images))
    if apart > 2 * chance:
        return ""
    return (
        f"With {100 * last[0].share:g} % of the passes the first two were {100 * apart:.1f} points apart, within the "
        f"chance of {images:g} images kept back (± {100 * chance:.1f}): either may be the better."
    )
