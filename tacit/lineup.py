"""Who takes part in a comparison: rows made from recipes, folders of recipes, TOML files and run folders.

A row is one experiment with one or several seeds; each of its runs has a folder, whose name holds a hash of the
settings. So a run is found again by every later comparison that wants the same one, and never mistaken for another.
"""

import fnmatch
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tacit.errors import TacitError
from tacit.experiment import FREE_ON_RESUME, Experiment, differences, flatten, read_toml, resolve
from tacit.recipes import find_recipe, known_recipes
from tacit.record import Run
from tacit.scale import scaled

RUNS = Path("runs/compare")


@dataclass(frozen=True)
class Job:
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
    jobs: tuple[Job, ...]
    scale: str = ""  # what --scale did, in words

    @property
    def experiment(self) -> Experiment:
        return self.jobs[0].experiment


def line_up(
    names: Sequence[str],
    settings: Mapping[str, Any] | None = None,
    *,
    seeds: int | None = None,
    scale: str = "full",
    only: Sequence[str] = (),
    runs: Path = RUNS,
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
        said = ""
        if source.run is not None:
            check_unchanged(source.run, experiment, scale)
        else:
            experiment, said = scaled(experiment, scale, fixed=flatten(settings))
        key = identity(experiment, with_seed=False)
        first = rows.get(key)
        if source.run is not None:
            jobs = (*(first.jobs if first else ()), Job(experiment, source.run))
            rows[key] = Row(first.label if first else source.name, distinct(jobs), said)
        elif first is None:
            rows[key] = Row(source.name, (), said)
        if source.run is None or seeds is not None:
            rows[key] = with_seeds(rows[key], experiment, seeds or 1, source.name, runs)
    if not rows:
        raise TacitError("There is nothing to compare. Give recipes (`tacit recipes`), TOML files or run folders.")
    return short_labels(list(rows.values()))


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
    path = Path(name).expanduser()
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
            found.append(Source(re.sub(r"-seed\d+$", "", run.as_posix()), path, run))
    return found


def chosen(sources: Sequence[Source], only: Sequence[str]) -> list[Source]:
    """Those whose name holds one of the patterns; `*` and `?` stand for anything and for one letter.

    >>> both = [Source("a/mnist-lower", Path("x")), Source("a/cifar10-lower", Path("y"))]
    >>> [source.name for source in chosen(both, ["mnist"])], [source.name for source in chosen(both, ["*/c*"])]
    (['a/mnist-lower'], ['a/cifar10-lower'])
    """
    if not only:
        return list(sources)
    found = [s for s in sources if any(fnmatch.fnmatch(s.name, p) or p in s.name for p in only)]
    if not found:
        raise TacitError(
            f"--only {' '.join(only)} leaves nothing of {len(sources)} experiments: {listed([s.name for s in sources])}."
        )
    return found


def listed(names: Sequence[str], most: int = 8) -> str:
    """Names in a row, not too many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def identity(experiment: Experiment, with_seed: bool = True) -> str:
    """A short hash of all that decides the outcome of a run."""
    settings = {key: value for key, value in flatten(experiment.to_dict()).items() if key not in FREE_ON_RESUME}
    if not with_seed:
        del settings["seed"]
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


def distinct(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """One job a seed, in the order of seeds; of two runs with one seed, the one that was named first."""
    by_seed: dict[int, Job] = {}
    for job in jobs:
        by_seed.setdefault(job.experiment.seed, job)
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def with_seeds(row: Row, experiment: Experiment, seeds: int, name: str, runs: Path) -> Row:
    """The row with at least so many seeds: the experiment's own and those after it."""
    jobs = list(row.jobs)
    first = min((job.experiment.seed for job in jobs), default=experiment.seed)
    for seed in range(first, first + seeds):
        one = experiment.model_copy(update={"seed": seed})
        stem = re.sub(r"[^\w.+-]+", "-", name).strip("-.")[-60:]
        jobs.append(Job(one, runs / f"{stem}-{identity(one, with_seed=False)}-seed{seed}"))
    return Row(row.label, distinct(jobs), row.scale)


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
    return [Row(label, row.jobs, row.scale) for label, row in zip(shown, rows, strict=True)]
