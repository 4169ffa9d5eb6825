"""`--dry-run`: everything that is known before the first round, and nothing else."""

import math
import time
from collections.abc import Collection, Sequence

import tomli_w
import torch
from rich.table import Table
from rich.text import Text

from tacit.backends.pool import default_workers
from tacit.cli.split import show_split
from tacit.config.resolve import preset_settings
from tacit.contract.kinds import parse
from tacit.contract.method import Stage
from tacit.core.console import SafeConsole, noted
from tacit.core.formatting import clock, size_text
from tacit.core.payload import nbytes
from tacit.core.settings import Experiment, flatten, nest
from tacit.data.catalogue import SOURCES
from tacit.data.glance import glance
from tacit.data.mapped import told
from tacit.data.sources import is_here, is_own
from tacit.methods import find_method
from tacit.nets.heads import feature_size
from tacit.pieces.train import at_once, weights_of
from tacit.runs.checks import check_settings
from tacit.runs.costs import Speed, Timer, time_net
from tacit.runs.plan import Plan, about_twin, prepare, typical_client

MOST_TIMED = 64  # images in a batch, to learn what one takes
LEAST_TIMED = 4  # of a large net that is enough
QUICK = 0.1  # seconds of a batch that is worth doubling
PRESET = "method.preset"


def preview(experiment: Experiment, screen: SafeConsole, given: Collection[str] = (), everything: bool = False) -> None:
    """Print it. `given` are the settings that somebody chose (dotted keys); `everything` shows the others, too."""
    check_settings(experiment)
    show_settings(experiment, given, everything, screen)
    data = experiment.data
    name = data.name
    if name in SOURCES and not is_here(name):
        screen.print(f"{name} is not here yet, so there is no split to show: run `tacit data get {name}` first.")
        return
    own = bool(data.sites) or is_own(name)
    if own and data.split:  # a saved split fits the images that can be read, and those have to be read for it
        plan = prepare(experiment, fetch=False)
    else:
        with glance():
            plan = prepare(experiment, fetch=False)
    show_split(plan.split, plan.dataset, None, screen)
    if own and not data.split:
        screen.print(
            noted(
                "images were counted by their names and not read. What cannot be read, and pictures that are there "
                "twice, are found when the run begins; the counts can then be a little lower."
            )
        )
    net = plan.setup.build()
    whole, weights = nbytes({"model": net.state_dict()}), nbytes({"model": weights_of(net)})
    travels = f", of which {size_text(weights)} learn and travel" if weights < whole else ""
    screen.print(f"Parameters: {sum(p.numel() for p in net.parameters()):,} ({size_text(whole)} with buffers{travels})")
    screen.print(memory_needed(plan))
    if plan.setup.features:
        screen.print(bank_needed(plan))
    show_cost(plan, weights, screen)


def show_settings(experiment: Experiment, given: Collection[str], everything: bool, screen: SafeConsole) -> None:
    """What was chosen first, then what the method's preset says, the rest on demand."""
    if everything:
        screen.print(Text("The experiment, resolved", "bold"))
        screen.print(experiment.to_toml())
        return
    settings = flatten(experiment.to_dict())
    method = find_method(experiment.method["name"])
    preset = [key for key in preset_settings(method, experiment.method["preset"]) if key not in given]
    chosen = {key: value for key, value in settings.items() if key in given or key == "method.name"}
    by_preset = {key: settings[key] for key in preset if key in settings and key not in chosen and key != PRESET}
    screen.print(Text("What was chosen", "bold"))
    screen.print(tomli_w.dumps(nest(chosen)))
    if by_preset:
        screen.print(Text(f"What the preset '{experiment.method['preset']}' of the method says", "bold"))
        screen.print(tomli_w.dumps(nest(by_preset)))
    rest = len(settings) - len(chosen) - len(by_preset)
    screen.print(f"{rest} more settings are as they are by default: --dry-run --all shows them.\n")


def show_cost(plan: Plan, weights: int, screen: SafeConsole) -> None:
    """Rounds, what travels and how long it takes, by stage."""
    table = Table("stage", "rounds", "clients a round", "down", "up", "time (rough)", title="What it would cost")
    features = feature_size(plan.setup.build().state_dict())
    needed = stage_seconds(plan)
    for stage in plan.stages:
        method = stage.method
        asked = plan.setup.participation.count(plan.setup.clients)
        sent = method.estimated_weights_bytes(weights, plan.setup.channels, features)
        down, up = (
            travel(
                [parse(kind).nbytes(sent, len(plan.setup.classes)) for kind in kinds.values()],
                method.estimated_tasks(asked),
            )
            for kinds in (method.server_sends, method.client_sends)
        )
        seconds = needed[stage.name]
        shown = "not estimated" if seconds is None else clock(seconds)
        table.add_row(stage.name, str(stage.rounds), f"≤ {asked}", down, up, shown)
    screen.print(table)
    unknown = [name for name, seconds in needed.items() if seconds is None]
    without = f" without {' and '.join(unknown)}" if unknown else ""
    total = sum(seconds or 0.0 for seconds in needed.values())
    if plan.experiment.guard.on:
        share = (needed["twin"] or 0.0) / max(total, 1e-9)
        screen.print(f"The guard's twin, which learns from the labels alone, is {100 * share:.0f} % of that time.")
        for line in about_twin(plan.experiment, plan.stages, plan.split):
            screen.print(noted(line))
    screen.print(
        f"{rounds_text(plan.stages)}. Roughly {clock(total)} in all{without} on this machine. Nothing was run or "
        "written."
    )


def stage_seconds(plan: Plan, timer: Timer = time.perf_counter) -> dict[str, float | None]:
    """How long each stage takes on this machine, roughly, from a few batches; None: nothing is known."""
    speed = seconds_per_image(plan, timer)
    held = typical_client(plan.split, plan.setup.train.batch)
    asked = plan.setup.participation.count(plan.setup.clients)
    found: dict[str, float | None] = {}
    for stage in plan.stages:
        effort, tasks = (
            stage.method.estimated_passes(plan.setup.train.epochs, held),
            stage.method.estimated_tasks(asked),
        )
        parts = plan.setup.train.parts if stage.method.in_parts else 1
        found[stage.name] = stage.rounds * round_seconds(plan, effort, tasks / parts, *speed) if effort else None
    return found


def rounds_text(stages: Sequence[Stage]) -> str:
    """All rounds, those of the stages before the method's own among them.

    >>> from tacit.methods.fedavg import FedAvg
    >>> rounds_text([Stage("warm-up", FedAvg(), 5), Stage("main", FedAvg(), 22)])
    '27 rounds: 5 of warm-up, then 22 of main'
    """
    whole = f"{sum(stage.rounds for stage in stages):,} rounds"
    parts = ", then ".join(f"{stage.rounds:,} of {stage.name}" for stage in stages)
    return f"{whole}: {parts}" if len(stages) > 1 else whole


def memory_needed(plan: Plan) -> str:
    """Where the images lie, and how many of them are in a process's memory at once, in words."""
    setup, split, train = plan.setup, plan.split, plan.setup.train
    one = setup.channels * setup.size**2
    images = len(plan.dataset.train_images) + len(plan.dataset.test_images)
    largest = max(len(part.labeled) + len(part.unlabeled) for part in split.clients)
    views = 4 * one * max(train.batch, at_once(one))  # floats
    client, test = size_text(one * largest), size_text(one * len(split.test))
    return (
        f"{told(images, setup.channels, setup.size)}. In memory at once: the largest client's {client}, the test set's "
        f"{test}, and {size_text(views)} of views."
    )


def bank_needed(plan: Plan) -> str:
    """What a bank of features takes on the disk, in words."""
    setup, split = plan.setup, plan.split
    one = 4 * math.prod(setup.taken)
    unlabeled = sum(len(part.unlabeled) for part in split.clients)
    labeled = len(split.server) + sum(len(part.labeled) for part in split.clients)
    views = len(split.test) + (labeled + unlabeled) * (1 + 2 * setup.net.views)
    return (
        f"The frozen part of the net sees each view once, and what it makes of it, {size_text(one)}, is kept: at most "
        f"{views:,} views, {size_text(views * one)} (less where a method asks for fewer kinds of views, or an earlier "
        "run had the same). The time of this first pass is not in what follows."
    )


def travel(sizes: list[int | None], asked: int) -> str:
    """What all asked clients together are sent, or send, in a round.

    >>> travel([1000, 40], 10), travel([None], 10), travel([1000, None], 10)
    ('10.4 kB/round', 'depends', '≥ 10.0 kB/round')
    """
    known = [size for size in sizes if size is not None]
    if sizes and not known:
        return size_text(None)
    return f"{'≥ ' if len(known) < len(sizes) else ''}{size_text(asked * sum(known))}/round"


def seconds_per_image(plan: Plan, timer: Timer = time.perf_counter) -> Speed:
    """What one image takes in this net here and now, from a few batches of noise."""
    setup = plan.setup
    generator = torch.Generator().manual_seed(0)
    net = setup.build(generator)
    net = net.without_frozen() if setup.net.views else net
    most = min(setup.train.batch, MOST_TIMED)
    images = torch.rand((most, *setup.taken), generator=generator).to(setup.device)
    count = min(LEAST_TIMED, most)
    while True:  # larger batches as long as they are quick
        speed = time_net(net, images[:count], times=1, timer=timer)
        if count == most or speed.training * count > QUICK:
            return speed
        count = min(2 * count, most)


def round_seconds(plan: Plan, effort: tuple[int, int], tasks: float, training: float, inference: float) -> float:
    """The images of so many clients trained on as often as the method says, labelled once; the test set predicted."""
    settings = plan.experiment.backend
    workers = (settings.workers or default_workers()) if settings.name == "pool" else 1
    train = plan.setup.train
    on_labels, on_the_rest = effort
    labeled = sum(len(part.labeled) for part in plan.split.clients)
    unlabeled = sum(len(part.unlabeled) for part in plan.split.clients)
    passes = (labeled * on_labels + unlabeled * on_the_rest) * training + (unlabeled * inference if on_the_rest else 0)
    clients = passes * tasks / plan.setup.clients
    server = len(plan.split.server) * (train.server_epochs or train.epochs) * training
    tests = len(plan.split.test) * inference / plan.experiment.evaluate_every
    return (clients + tests) / workers + server
