"""Who takes part in a comparison: rows made from recipes, folders of recipes, TOML files and run folders.

A row is one experiment with one or several seeds; each of its runs has a folder, whose name holds a hash of the
settings. So a run is found again by every later comparison that wants the same one, and never mistaken for another.
"""

import fnmatch
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tacit.config.recipes import find_recipe, known_recipes
from tacit.config.resolve import resolve
from tacit.config.scale import scaled
from tacit.core.errors import TacitError
from tacit.core.paths import user_path
from tacit.core.settings import (
    FREE_ON_RESUME,
    MOST_SEED,
    Experiment,
    differences,
    flatten,
    read_toml,
    same_but_for_seed,
)
from tacit.runs.folder import Run


@dataclass(frozen=True)
class PendingRun:
    """One run: what, and where."""

    experiment: Experiment
    folder: Path

    @property
    def finished(self) -> bool:
        return (self.folder / "experiment.toml").is_file() and Run(self.folder).summary is not None


@dataclass(frozen=True)
class Row:
    """One line of a comparison: the same experiment with several seeds."""

    label: str
    jobs: tuple[PendingRun, ...]
    scale: str = ""  # what --scale did, in words
    matched: bool = False  # a bound that was made to pass over the labels as often as the first row does

    @property
    def experiment(self) -> Experiment:
        return self.jobs[0].experiment


def make_rows(
    names: Sequence[str],
    settings: Mapping[str, Any] | None = None,
    *,
    seeds: int | None = None,
    scale: str = "full",
    only: Sequence[str] = (),
    runs: Path = Path("runs/compare"),
) -> list[Row]:
    """The rows that names stand for, in the order of the names.

    A recipe or TOML file gets `seeds` seeds (one if not given), beginning with its own. Run folders that differ in
    nothing but the seed are one row, with the seeds that are there; `seeds` adds what is missing.
    """
    settings = settings or {}
    rows: dict[str, Row] = {}
    for source in chosen([source for name in names for source in sources_of(name)], only):
        given = read_toml(source.path)
        experiment = resolve(given, settings)
        reduction = ""
        if source.run is not None:
            check_unchanged(source.run, experiment, scale)
        else:
            experiment, reduction = scaled(experiment, scale, fixed=flatten(settings))
        key = identity(experiment, with_seed=False)
        row = rows.setdefault(key, Row(source.name, (), reduction))
        new = PendingRun(experiment, source.run or run_folder(runs, source.name, experiment))
        rows[key] = Row(row.label, distinct([*row.jobs, new]), row.scale)
    return short_labels([with_seeds(row, seeds or 1, runs) for row in rows.values()])


@dataclass(frozen=True)
class Source:
    """A file with an experiment in it; `run` is its folder if it is that of a run."""

    name: str
    path: Path
    run: Path | None = None


def sources_of(name: str) -> list[Source]:
    """The experiments that a name stands for: one, or all in a folder of recipes or runs."""
    known = known_recipes()
    if name in known:
        return [Source(name, known[name])]
    bare = name.strip("/")
    path = user_path(name)
    if path.is_dir():
        if found := runs_below(path):
            return found
        files = sorted(path.rglob("*.toml"))
        if files:
            return [Source(file.with_suffix("").as_posix().removeprefix("recipes/"), file) for file in files]
    for folder in (bare, bare.removeprefix("recipes/")):
        if inside := [Source(recipe, file) for recipe, file in known.items() if recipe.startswith(f"{folder}/")]:
            return inside
    if path.is_dir():
        raise TacitError(f"{path} holds neither runs of tacit nor recipes (.toml files). Give another folder.")
    return [Source(name.removesuffix(".toml").lstrip("./"), find_recipe(name))]


def runs_below(folder: Path) -> list[Source]:
    """A run folder itself, or all runs in a folder."""
    found = []
    for path in sorted(folder.rglob("experiment.toml")):
        run = path.parent
        if "checkpoint" not in run.parts:
            found.append(Source(re.sub(r"(-[0-9a-f]{10})?-seed\d+$", "", run.as_posix()), path, run))
    return found


def chosen(sources: Sequence[Source], only: Sequence[str]) -> list[Source]:
    """Those with one of the patterns in their name; with `*` and `?` it must be the whole name, or its last part.

    >>> both = [Source("a/mnist-lower", Path("x")), Source("a/cifar10-lower", Path("y"))]
    >>> [source.name for source in chosen(both, ["mnist"])], [source.name for source in chosen(both, ["c*"])]
    (['a/mnist-lower'], ['a/cifar10-lower'])
    """
    if not only:
        return list(sources)

    def fits(name: str, pattern: str) -> bool:
        return pattern in name or any(fnmatch.fnmatch(one, pattern) for one in (name, name.rpartition("/")[2]))

    found = [source for source in sources if any(fits(source.name, pattern) for pattern in only)]
    if not found:
        all_names = listed([source.name for source in sources])
        raise TacitError(f"--only {' '.join(only)} leaves nothing of {len(sources)} experiments: {all_names}.")
    return found


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, not too many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def identity(experiment: Experiment, with_seed: bool = True) -> str:
    """A short hash of what makes an experiment (`same_but_for_seed`), and of its seed."""
    settings = same_but_for_seed(experiment.to_dict())
    return _hash({**settings, "seed": experiment.seed} if with_seed else settings)


def _hash(settings: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def check_unchanged(run: Path, experiment: Experiment, scale: str) -> None:
    """A run that is there has the settings it has: --set and --scale must not pretend otherwise."""
    changed = differences(Run(run).experiment, experiment)
    if changed or scale != "full":
        why = "\n  ".join(changed) or f"--scale {scale}"
        raise TacitError(
            f"{run} is a run already, so its settings cannot be changed:\n  {why}\n"
            f"To run it with other settings, give its file instead: {run / 'experiment.toml'}."
        )


def distinct(jobs: Sequence[PendingRun]) -> tuple[PendingRun, ...]:
    """One job a seed, in the order of seeds; of two runs with one seed, the one that was named first."""
    by_seed: dict[int, PendingRun] = {}
    for job in jobs:
        by_seed.setdefault(job.experiment.seed, job)
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def with_seeds(row: Row, seeds: int, runs: Path) -> Row:
    """The row with at least so many seeds: its first one and those after it."""
    first = row.experiment.seed
    if first + seeds - 1 > MOST_SEED:
        raise TacitError(
            f"{seeds} seeds from {first} on go beyond the largest seed, {MOST_SEED}. Write a smaller seed."
        )
    more = [row.experiment.model_copy(update={"seed": seed}) for seed in range(first, first + seeds)]
    jobs = distinct([*row.jobs, *(PendingRun(one, run_folder(runs, row.label, one)) for one in more)])
    return replace(row, jobs=jobs)


def run_folder(runs: Path, name: str, experiment: Experiment) -> Path:
    """Where a run of a comparison goes: its name for people, and a hash of all with which it may be resumed.

    So runs on two devices have two folders, though in a table they are one experiment.
    """
    stem = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[-60:]
    fixed = {key: value for key, value in flatten(experiment.to_dict()).items() if key not in ("seed", *FREE_ON_RESUME)}
    return runs / f"{stem}-{_hash(fixed)}-seed{experiment.seed}"


def short_labels(rows: Sequence[Row]) -> list[Row]:
    """Labels without the folders that are not needed to tell them apart; those alike throughout are numbered.

    >>> [row.label for row in short_labels([Row("a/b/x", ()), Row("a/c/x", ()), Row("a/c/y", ()), Row("a/c/y", ())])]
    ['b/x', 'c/x', 'a/c/y', 'a/c/y (2)']
    """
    paths = [row.label.split("/") for row in rows]
    shown: list[str] = []
    for mine in paths:
        depth = 1
        while depth < len(mine) and sum(other[-depth:] == mine[-depth:] for other in paths) > 1:
            depth += 1
        label = "/".join(mine[-depth:])
        again = 1 + sum(other == mine for other in paths[: len(shown)])
        shown.append(f"{label} ({again})" if again > 1 else label)
    return [replace(row, label=label) for label, row in zip(shown, rows, strict=True)]
