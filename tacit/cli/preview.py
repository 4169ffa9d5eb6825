"""`--dry-run`: everything that is known before the first round, and nothing else."""

import time

import torch
from rich.table import Table
from rich.text import Text

from tacit.backends.pool import default_workers
from tacit.cli.split import show_split
from tacit.contract.kinds import parse
from tacit.core.console import SafeConsole
from tacit.core.formatting import clock, size_text
from tacit.core.payload import nbytes
from tacit.core.settings import Experiment
from tacit.data.catalogue import SOURCES
from tacit.data.mapped import lies_here, told
from tacit.data.sources import is_here
from tacit.nets.optimizer import optimizer_step, sgd
from tacit.pieces.train import at_once, predict, weights_of
from tacit.runs.checks import check_settings
from tacit.runs.plan import Plan, prepare

MOST_TIMED = 1024  # images in a batch, to learn what one takes


def preview(experiment: Experiment, screen: SafeConsole) -> None:
    check_settings(experiment)
    screen.print(Text("The experiment, resolved", "bold"))
    screen.print(experiment.to_toml())
    name = experiment.data.name
    if name in SOURCES and not is_here(name):
        screen.print(f"{name} is not here yet, so there is no split to show: run `tacit data get {name}` first.")
        return
    plan = prepare(experiment, fetch=False)
    show_split(plan.split, plan.dataset, None, screen)

    net = plan.setup.build()
    whole, weights = nbytes({"model": net.state_dict()}), nbytes({"model": weights_of(net)})
    travels = f", of which {size_text(weights)} learn and travel" if weights < whole else ""
    screen.print(f"Parameters: {sum(p.numel() for p in net.parameters()):,} ({size_text(whole)} with buffers{travels})")

    screen.print(memory_needed(plan))
    seconds = seconds_per_image(plan)
    table = Table("stage", "rounds", "clients a round", "down", "up", "time (rough)", title="What it would cost")
    total, unknown = 0.0, list[str]()
    for stage in plan.stages:
        method = stage.method
        asked = plan.setup.participation.count(plan.setup.clients)
        sent = method.estimated_weights_bytes(weights, plan.setup.channels)
        down, up = (
            travel(
                [parse(kind).nbytes(sent, len(plan.setup.classes)) for kind in kinds.values()],
                method.estimated_tasks(asked),
            )
            for kinds in (method.server_sends, method.client_sends)
        )
        effort, tasks = method.estimated_passes(plan.setup.train.epochs), method.estimated_tasks(asked)
        time_needed = stage.rounds * round_seconds(plan, effort, tasks, *seconds) if effort else 0.0
        total, unknown = total + time_needed, [*unknown, *([] if effort else [stage.name])]
        table.add_row(
            stage.name, str(stage.rounds), f"≤ {asked}", down, up, clock(time_needed) if effort else "not estimated"
        )
    screen.print(table)
    without = f" without {' and '.join(unknown)}" if unknown else ""
    ready = " but images at their size, in the cache" if lies_here(plan.dataset.train_images) else ""
    screen.print(f"Roughly {clock(total)} in all{without} on this machine. Nothing was run or written{ready}.")


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


def travel(sizes: list[int | None], asked: int) -> str:
    """What all asked clients together are sent, or send, in a round.

    >>> travel([1000, 40], 10), travel([None], 10), travel([1000, None], 10)
    ('10.4 kB/round', 'depends', '≥ 10.0 kB/round')
    """
    known = [size for size in sizes if size is not None]
    if sizes and not known:
        return size_text(None)
    return f"{'≥ ' if len(known) < len(sizes) else ''}{size_text(asked * sum(known))}/round"


def seconds_per_image(plan: Plan) -> tuple[float, float]:
    """(training, inference) of this net here and now, from a few batches of noise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    setup = plan.setup
    generator = torch.Generator().manual_seed(0)
    net = setup.build(generator)
    shape = (min(setup.train.batch, MOST_TIMED), setup.channels, setup.size, setup.size)
    images = torch.rand(shape, generator=generator).to(setup.device)
    optimizer = sgd(net, lr=1e-4)
    labels = torch.zeros(len(images), dtype=torch.int64, device=setup.device)

    def train() -> None:
        optimizer_step(net, optimizer, torch.nn.functional.cross_entropy(net(images), labels))

    times = []
    for work in (train, lambda: predict(net, images, lambda x: x)):
        work()
        started = time.perf_counter()
        for _ in range(3):
            work()
        times.append((time.perf_counter() - started) / 3 / len(images))
    torch.set_num_threads(before)
    return times[0], times[1]


def round_seconds(plan: Plan, effort: tuple[int, int], tasks: int, training: float, inference: float) -> float:
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
