"""Several runs side by side: are they comparable, what came out, and is the difference more than luck?"""

import hashlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tacit.compare.convergence import Convergence, of_runs
from tacit.compare.rows import PendingRun, Row, listed, run_folder, short_labels
from tacit.compare.t_test import Paired, paired_test
from tacit.config.resolve import resolve
from tacit.contract.method import Stage
from tacit.core.settings import Experiment, Paper, flatten
from tacit.data.federation import load_dataset
from tacit.data.sources import is_own
from tacit.data.split import Split, load_split
from tacit.data.split import title as split_title
from tacit.evaluation.headline import leads
from tacit.runs.folder import Run
from tacit.runs.plan import label_passes, prepare, stages_of, typical_client


def gap_closed(method: float | None, lower: float | None, upper: float | None) -> float | None:
    """How much of the way from the lower to the upper bound a method goes: (method − lower) / (upper − lower).

    Below 0: worse than the labels alone. None where a figure is missing or the bounds leave no gap.

    >>> gap_closed(0.9, 0.8, 1.0)
    0.5
    >>> gap_closed(0.9, 0.8, 0.8) is None
    True
    """
    if method is None or lower is None or upper is None or upper - lower < 1e-9:
        return None
    return round((method - lower) / (upper - lower), 12)


def bounds_of(experiment: Experiment, as_many: bool = False) -> tuple[Experiment, Experiment]:
    """The lower and the upper bound of an experiment: FedAvg on the labels that exist, and on all of them.

    Data, split, net, training and seed stay, whatever set them; the bounds get as many rounds as all stages of the
    method together, and with `as_many` as many passes over the labels as the method makes: one that takes a labelled
    batch beside every unlabelled one sees its labels far more often than once an epoch.

    >>> lower, upper = bounds_of(resolve({"method": {"name": "fixmatch", "warmup": 5}, "rounds": 20}))
    >>> lower.method["name"], lower.rounds, upper.data.reveal
    ('fedavg', 25, 'all')
    >>> bound_of(lower), bound_of(upper), bound_of(resolve({"method.name": "fixmatch"}))
    ('lower', 'upper', '')
    """
    rounds = sum(stage.rounds for stage in stages_of(experiment) if not stage.apart)
    epochs = label_passes_a_round(experiment) if as_many else experiment.train.epochs
    settings = {**experiment.to_dict(), "method": {"name": "fedavg"}, "rounds": rounds, "pretrain": {}, "guard": {}}
    lower = resolve(settings, {"train.epochs": max(epochs, experiment.train.epochs)})
    return lower, resolve(lower.to_dict(), {"data.reveal": "all"})


def label_passes_a_round(experiment: Experiment) -> int:
    """Passes of a client over its labels in a round, the mean over all stages, from what clients really hold."""
    held = typical_client(prepare(experiment).split, experiment.train.batch)
    return label_passes(stages_of(experiment), experiment.train, held)


def bound_of(experiment: Experiment) -> str:
    """'lower' or 'upper' for plain FedAvg on the labels that exist or on all of them, else ''."""
    plain = resolve({"method.name": "fedavg"}).method
    options = {key: value for key, value in experiment.method.items() if key != "preset"}
    if options != {key: value for key, value in plain.items() if key != "preset"}:
        return ""
    if experiment.pretrain.on or experiment.guard.on:
        return ""
    return "upper" if experiment.data.reveal == "all" else "lower"


def with_bounds(rows: Sequence[Row], runs: Path) -> list[Row]:
    """The rows, and for each problem the bounds that are missing, with the budget of its first row and its seeds."""
    found = list(rows)
    for block in blocks_of(rows):
        there = {bound_of(row.experiment) for row in block}
        for name, bound in zip(("lower", "upper"), bounds_of(block[0].experiment, as_many=True), strict=True):
            if name not in there and (name == "lower" or can_reveal(bound)):
                found.append(bound_row(name, bound, block[0], runs))
    return short_labels(found)


def can_reveal(experiment: Experiment) -> bool:
    """Whether the labels of the unlabelled images are known to anybody: of somebody's own images they are not."""
    if not (experiment.data.sites or is_own(experiment.data.name)):
        return True
    return bool((np.asarray(load_dataset(experiment.data).train_labels) >= 0).all())


def bound_row(name: str, bound: Experiment, method: Row, runs: Path) -> Row:
    """A bound of a row as a row of its own."""
    bare = bound.model_copy(update={"title": f"{name} bound", "paper": Paper()})  # the method's number is not its own
    jobs = []
    for job in method.jobs:
        one = bare.model_copy(update={"seed": job.experiment.seed})
        jobs.append(PendingRun(one, run_folder(runs, f"{name}-bound", one)))
    return Row(f"{method.label}/{name} bound", tuple(jobs), method.scale, matched=True)


# --- Are they comparable? ---------------------------------------------------------------------------------


class Holdings(NamedTuple):
    """What a split is, as hashes: who holds which image and what is tested; and which images have labels."""

    images: int
    title: str
    parties: str
    labels: str


def holdings(split: Split) -> Holdings:
    """Two splits are the same if both hashes are. Revealing all labels changes the second one only."""
    held = [split.server, *(np.union1d(part.labeled, part.unlabeled) for part in split.clients)]
    labeled = [part.labeled for part in split.clients]
    title = split_title(split).removesuffix(f", seed {split.seed}")
    return Holdings(sum(map(len, held)), title, _hash([*held, split.test], split.fingerprint), _hash(labeled))


def _hash(arrays: Sequence[np.ndarray], text: str = "") -> str:
    digest = hashlib.sha256(text.encode())
    for array in arrays:
        digest.update(np.int64(len(array)).tobytes() + np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


def holdings_of(job: PendingRun) -> Holdings:
    """Those of the split that was saved with the run, or of the one that it will have: draws it, checks the rest."""
    saved = job.folder / "split.npz"
    if job.finished and saved.is_file():
        return holdings(load_split(saved))
    return holdings(prepare(job.experiment, saved).split)


@dataclass(frozen=True)
class Budget:
    """What a method may spend: all stages together."""

    rounds: int
    clients: int  # asked in a round
    on_labels: int  # passes of a client over its labelled images
    on_the_rest: int  # and over its unlabelled ones; 0: it does not use them
    at_server: int  # passes of the server over its labels, where it has some

    def __str__(self) -> str:
        server = f", {self.at_server} over the server's" if self.at_server else ""
        return (
            f"{self.rounds} rounds × {self.clients} clients, {self.on_labels} passes over labelled images{server}, "
            f"{self.on_the_rest} over unlabelled ones"
        )


def budget_of(experiment: Experiment) -> Budget:
    """The budget of an experiment, from the stages of its method (what [guard] costs is not the method's).

    >>> fixmatch = {"method": {"name": "fixmatch", "warmup": 5}, "rounds": 20, "data.placement": "clients"}
    >>> print(budget_of(resolve(fixmatch)))
    25 rounds × 10 clients, 25 passes over labelled images, 20 over unlabelled ones
    """
    stages, train = [stage for stage in stages_of(experiment) if not stage.apart], experiment.train
    rounds = sum(stage.rounds for stage in stages)

    def passes(which: int) -> int:
        """Over labelled (0) or unlabelled images (1), a round being about so much of them."""
        each = [(s.method.estimated_passes(train.epochs) or (0, 0))[which] * s.rounds * share(s) for s in stages]
        return math.ceil(sum(each))

    def share(stage: Stage) -> Fraction:
        return Fraction(1, train.parts if stage.method.in_parts else 1)

    return Budget(
        rounds=rounds,
        clients=experiment.participation.count(experiment.data.clients),
        on_labels=passes(0),
        on_the_rest=passes(1),
        at_server=rounds * (train.server_epochs or train.epochs) if experiment.data.placement == "server" else 0,
    )


def data_key(experiment: Experiment) -> dict[str, Any]:
    """What makes two experiments the same problem: the data settings, without what only bounds change."""
    return experiment.data.model_dump(exclude={"reveal", "split"})


def blocks_of(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows on the same data and kind of split together: only they are compared with each other."""
    blocks: list[list[Row]] = []
    for row in rows:
        for block in blocks:
            if data_key(block[0].experiment) == data_key(row.experiment):
                block.append(row)
                break
        else:
            blocks.append([row])
    return blocks


Survey = Mapping[str, Mapping[int, Holdings]]  # by label and seed


def survey(rows: Sequence[Row]) -> dict[str, dict[int, Holdings]]:
    """The split of every run, before any work; an impossible experiment says so now."""
    return {row.label: {job.experiment.seed: holdings_of(job) for job in row.jobs} for row in rows}


def same_split(one: Row, other: Row, seed: int, seen: Survey) -> bool:
    """Whether two rows have the same split with this seed; a bound with all labels revealed may differ in labels."""
    a, b = seen[one.label].get(seed), seen[other.label].get(seed)
    if a is None or b is None:
        return False
    revealed = one.experiment.data.reveal != other.experiment.data.reveal
    return a.parties == b.parties and (revealed or a.labels == b.labels)


def differs(row: Row, first: Row, seen: Survey) -> list[str]:
    """In what a row is not on a par with the first one of its block."""
    mine, its = budget_of(row.experiment), budget_of(first.experiment)
    found = []
    both = set(seen[row.label]) & set(seen[first.label])
    if any(not same_split(row, first, seed, seen) for seed in both):
        found.append("split")
    if set(seen[row.label]) != set(seen[first.label]):
        found.append("seeds")
    unlike = mine.on_the_rest != its.on_the_rest and mine.on_the_rest and its.on_the_rest
    same = ["rounds", "clients", "at_server"]
    if not row.matched:
        same.append("on_labels")
    if unlike or any(getattr(mine, name) != getattr(its, name) for name in same):
        found.append("budget")
    if net_of(row.experiment) != net_of(first.experiment):
        found.append("net")
    if row.experiment.reporting != first.experiment.reporting:
        found.append("reporting")
    return found


def training_of(experiment: Experiment) -> dict[str, Any]:
    """How a side and the server take their steps; how many passes there are belongs to the budget."""
    train = experiment.train.model_dump(exclude={"epochs", "server_epochs"})
    return {**flatten(train, "train."), **flatten(experiment.server.model_dump(), "server.")}


def training_note(rows: Sequence[Row]) -> str:
    """Where training was tuned: whether all rows have one recipe, or each its own, and how it was found."""
    if not (tuned := dict.fromkeys(row.experiment.tuned for row in rows if row.experiment.tuned)):
        return ""
    if all(training_of(row.experiment) == training_of(rows[0].experiment) for row in rows):
        return f"One training recipe for all rows: {'; '.join(tuned)}."
    return "Rows have training recipes of their own: " + "; ".join(
        f"{row.label}: {row.experiment.tuned or 'not tuned'}" for row in rows
    )


def net_of(experiment: Experiment) -> str:
    """The net in words, with the options that it has.

    >>> net_of(resolve({"method.name": "fedavg", "net.name": "cnn", "net.norm": "gn", "net.bn": "static"}))
    'cnn (gn)'
    >>> net_of(resolve({"method.name": "fedavg", "net.name": "resnet18", "net.norm": "bn"}))
    'resnet18 (bn average, stem imagenet)'
    """
    net = experiment.net
    has = [net.norm if net.norm == "gn" else f"bn {net.bn}"]
    has += [f"stem {net.stem}"] if net.name.startswith("resnet") else []
    has += [net.activation] if net.name.startswith("wrn") else []
    return f"{net.name} ({', '.join(has)})"


def notes(blocks: Sequence[Sequence[Row]], seen: Survey) -> list[str]:
    """In what the rows are not on a par, in sentences: known before the work starts, and kept with the table."""
    remarks = []
    if len(blocks) > 1:
        how = sorted({key for block in blocks[1:] for key in unlike_keys(blocks[0][0], block[0])})
        remarks.append(
            f"The rows are {len(blocks)} different problems (they differ in {', '.join(how)}): each is compared within "
            "itself only."
        )
    for block in blocks:
        first, where = block[0], f" ({setting_of(block, seen)})" if len(blocks) > 1 else ""
        words = {row.label: differs(row, first, seen) for row in block}
        for word in dict.fromkeys(word for row in block for word in words[row.label]):
            groups: dict[str, list[str]] = {}
            for row in block:
                groups.setdefault(describe(word, row, first, seen), []).append(row.label)
            listing = "; ".join(f"{text}: {listed(labels)}" for text, labels in groups.items())
            remarks.append(f"Not the same {word}{where}. {listing[0].upper()}{listing[1:]}.")
        remarks += [note] if (note := training_note(block)) else []
    for text, labels in scales_of(blocks).items():
        remarks.append(
            f"Reduced {text} ({listed(labels)}). Numbers of papers are for the full scale, not to be reached."
        )
    return remarks


def setting_of(block: Sequence[Row], seen: Survey) -> str:
    """The problem that the rows of a block share, in words; said by a row without revealed labels if there is one."""
    row = min(block, key=lambda row: row.experiment.data.reveal == "all")
    return next(iter(seen[row.label].values())).title


def unlike_keys(one: Row, other: Row) -> list[str]:
    mine, its = flatten(data_key(one.experiment), "data."), flatten(data_key(other.experiment), "data.")
    return [key for key in mine if mine[key] != its[key]]


def describe(word: str, row: Row, first: Row, seen: Survey) -> str:
    """What a row has of that in which rows differ."""
    experiment = row.experiment
    if word == "budget":
        return str(budget_of(experiment))
    if word == "net":
        return net_of(experiment)
    if word == "reporting":
        return f"reports the {'last ten rounds' if experiment.reporting == 'last-10' else experiment.reporting}"
    seeds = sorted(seen[row.label])
    if word == "seeds":
        return f"seeds {', '.join(map(str, seeds))}"
    other = [seed for seed in seeds if seed in seen[first.label] and not same_split(row, first, seed, seen)]
    return f"other images or labels than {first.label} with seed {listed([*map(str, other)])}" if other else "alike"


def scales_of(blocks: Sequence[Sequence[Row]]) -> dict[str, list[str]]:
    """What --scale did, and to whom."""
    found: dict[str, list[str]] = {}
    for row in (row for block in blocks for row in block if row.scale):
        found.setdefault(row.scale, []).append(row.label)
    return found


# --- What came out ----------------------------------------------------------------------------------------


def run_missing(rows: Sequence[Row], run: Callable[[PendingRun, str], None]) -> None:
    """Run what is not finished, one seed of all rows after the other, so that early tables have all rows."""
    seeds = sorted({job.experiment.seed for row in rows for job in row.jobs})
    for seed in seeds:
        for row in rows:
            for job in row.jobs:
                if job.experiment.seed == seed and not job.finished:
                    run(job, f"{row.label} seed {seed}" if len(seeds) > 1 else row.label)


@dataclass(frozen=True)
class Result:
    """A finished line of the table. Shares are from 0 to 1; what a paper printed is in per cent."""

    label: str
    setting: str
    experiment: Experiment
    images: int
    runs: Mapping[int, Mapping[str, Any]]  # summaries by seed
    bound: str
    gap: float | None  # of `score`, between the bounds of the block
    paper_gap: float | None
    against_first: Paired | None  # over the seeds in which both have the same split
    differs: tuple[str, ...]
    convergence: Convergence | None = None  # of a bound: without it, no gap is shown

    @property
    def leads(self) -> str:
        """The figure that stands first: balanced accuracy where one class has more than half of the test images."""
        return next((leads(run) for run in self.runs.values()), "accuracy")

    def values(self, name: str) -> list[float]:
        return [float(run[name]) for run in self.runs.values() if run.get(name) is not None]

    def mean(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.fmean(values) if values else None

    def spread(self, name: str) -> float | None:
        """The standard deviation over seeds."""
        values = self.values(name)
        return statistics.stdev(values) if len(values) > 1 else None


def outcome(run: Run) -> dict[str, Any]:
    """The summary of a finished run, with the mean of the last five evaluated rounds and all bytes together.

    The mean is of the figure that leads: balanced accuracy where one class has more than half of the test images.
    """
    summary = run.summary or {}
    figure = leads(summary)
    tail = [record[figure] for record in run.records if record.get(figure) is not None][-5:]
    traffic = summary.get("bytes_up", 0) + summary.get("bytes_down", 0)
    return {**summary, "last_five": statistics.fmean(tail) if tail else None, "bytes": traffic}


def results(rows: Sequence[Row], seen: Survey, score: str = "") -> list[list[Result]]:
    """The finished lines by block. `score`: the figure of gaps and tests (default: the one that leads)."""
    found, given = [], score
    for block in blocks_of(rows):
        runs = {row.label: {j.experiment.seed: outcome(Run(j.folder)) for j in row.jobs if j.finished} for row in block}
        figure = next((leads(run) for line in runs.values() for run in line.values()), "accuracy")
        score = given or figure
        bounds = {bound_of(row.experiment): row for row in reversed(block)}  # the first of several counts
        lower, upper = (
            _mean([run.get(score) for run in runs[bounds[name].label].values()]) if name in bounds else None
            for name in ("lower", "upper")
        )
        settled = {
            row.label: of_runs(
                [Run(job.folder).records for job in row.jobs if job.finished],
                figure if score == "last_five" else score,
            )
            for name, row in bounds.items()
            if name
        }
        if not all(found.converged for found in settled.values()):
            lower = upper = None
        papers = [bounds[name].experiment.paper.accuracy if name in bounds else None for name in ("lower", "upper")]
        lines = []
        for row in block:
            bound = bound_of(row.experiment)
            own = _mean([run.get(score) for run in runs[row.label].values()])
            lines.append(
                Result(
                    label=row.label,
                    setting=setting_of(block, seen),
                    experiment=row.experiment,
                    images=next(iter(seen[row.label].values())).images,
                    runs=runs[row.label],
                    bound=bound,
                    gap=None if bound else gap_closed(own, lower, upper),
                    paper_gap=None if bound else gap_closed(row.experiment.paper.accuracy, *papers),
                    against_first=None if row is block[0] else _against(row, block[0], runs, seen, score),
                    differs=tuple(differs(row, block[0], seen)),
                    convergence=settled.get(row.label),
                )
            )
        found.append(lines)
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.fmean(numbers) if numbers else None


def _against(
    row: Row, first: Row, runs: Mapping[str, Mapping[int, Mapping[str, Any]]], seen: Survey, score: str
) -> Paired | None:
    """The paired test over the seeds that both have finished on the same split."""
    pairs = [
        (run[score], runs[first.label][seed][score])
        for seed, run in runs[row.label].items()
        if seed in runs[first.label]
        and same_split(row, first, seed, seen)
        and run.get(score) is not None
        and runs[first.label][seed].get(score) is not None
    ]
    return paired_test([mine for mine, _ in pairs], [its for _, its in pairs])
