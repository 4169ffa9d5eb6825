"""What would leave a site, shown before anything is sent: a real round on the site's own images, kept to itself."""

import dataclasses
import tempfile
from pathlib import Path

import torch
from rich.table import Table

from tacit.backends.base import Worker
from tacit.contract.method import Method, Reply, Stage
from tacit.contract.parties import Hub, Labeled, NetPool, RoundInfo, Setup, Shard
from tacit.core import payload
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.formatting import size_text
from tacit.core.payload import Payload
from tacit.core.settings import Experiment
from tacit.data.party import Facts, facts_of, read_facts
from tacit.runs.memory import ClientMemory
from tacit.runs.plan import stages_of
from tacit.sites.accept import Refusal, method_file
from tacit.sites.backend import Federated
from tacit.sites.policy import check_message
from tacit.sites.safeguards import changes
from tacit.sites.site import OwnShard, Site, hello_of, sent, site_setup
from tacit.sites.trail import Counts, contents_of
from tacit.sites.wire import SharedFacts, pack


def preview_site(site: Site, experiment: Experiment, facts_file: Path | None, screen: SafeConsole) -> None:
    """One round of every stage, by the same code that answers the server."""
    facts = read_facts(facts_file) if facts_file else facts_of(site.settings.data, experiment.data.image_size)
    screen.print("The same code as in a run works on this site's own images now. Nothing is sent.\n")
    own = look(site, experiment, facts)[2]
    hello = hello_of(own.shard, 0)
    screen.print(
        f"Once, at the start: whether this site holds labels ({'yes' if hello.labeled else 'no'}) and how many images "
        f"it takes part with ({hello.images:,}), in {len(pack(hello))} bytes."
    )
    for stage, reply in replies(site, experiment, facts):
        table = Table("name", "type and shape", "bytes", "values", title=f"Each round of stage '{stage.name}'")
        for name, tensor in payload.tensors(reply.send):
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            table.add_row(name, kind, f"{tensor.numel() * tensor.element_size():,}", _values(tensor))
        for name, value in reply.send.items():
            if isinstance(value, int | float):
                table.add_row(name, "number", "8", f"{value:g}")
        table.add_row("(examples)", "number", "", f"{reply.examples:g}")
        for name, number in reply.metrics.items():
            table.add_row(f"(metric) {name}", "number", "", f"{number:g}")
        screen.print(table)
        if experiment.privacy.secure_aggregation:
            screen.print(unseen(stage, reply, experiment))
            continue
        screen.print(f"{len(sent(reply)):,} bytes in all ({size_text(len(sent(reply)))}), names and shapes included.")
        if held := _held_back(site, sent(reply)):
            screen.print(f"It would not leave: {held}.")
    if len(own.kept_back):
        screen.print(
            f"Each time the model is evaluated: of {len(own.kept_back)} labelled images that are kept back here, by "
            "class, how many there are, how many the model names rightly, and the sum of their losses."
        )
    for sentence in changes(experiment):
        screen.print(sentence)
    screen.print(
        "\nWeights were trained on this site's images, and small vectors count its classes or its predictions: see "
        "'What is protected and what is not' in docs/sites.md."
    )


def unseen(stage: Stage, reply: Reply, experiment: Experiment) -> str:
    """What secure aggregation changes about what leaves."""
    names = stage.method.merges_sums
    numbers = sum(t.numel() for name, t in payload.tensors(reply.send) if name.split("/")[0] in names)
    size = size_text(numbers * experiment.privacy.bits // 8)
    return (
        "None of it leaves as it is, and metrics do not leave at all: secure aggregation is on. "
        f"{', '.join(names)} and the number of examples leave as {numbers:,} whole numbers under masks ({size}), "
        "beside public keys and sealed shares of secrets. The server can open the sum over all sites, and nothing less."
    )


def _held_back(site: Site, message: bytes) -> str:
    """Why this site's policy would not let a message go; '' if it would."""
    try:
        check_message(site.settings.policy, contents_of(message), len(message), Counts())
    except Refusal as refusal:
        return str(refusal)
    return ""


def _values(tensor: torch.Tensor) -> str:
    """Small tensors in full: they are what a reader can judge."""
    if tensor.numel() > 20:
        return "weights"
    return ", ".join(f"{value:.4g}" for value in tensor.flatten().tolist())


def look(site: Site, experiment: Experiment, facts: Facts) -> tuple[Experiment, type[Method], OwnShard]:
    """What this site would use if the server asked for this experiment; a refusal, if it would refuse."""
    file = method_file(experiment)
    federated = Federated(
        "preview",
        (site.settings.name,),
        SharedFacts(**dataclasses.asdict(facts)),
        method_sha256=file.sha256 if file else "",
        frozen_sha256=site_setup(experiment, facts, 1, ()).frozen_sha256,
    )
    return site._look(federated.request(experiment, 0, "hello"))


def replies(site: Site, experiment: Experiment, facts: Facts) -> list[tuple[Stage, Reply]]:
    """This site's reply in the first round of every stage it takes part in; the server is made up."""
    own, method, held = look(site, experiment, facts)
    labeled = (0,) if len(held.shard.labeled) else ()
    setup = site_setup(own, facts, 1, labeled)
    found: list[tuple[Stage, Reply]] = []
    past: dict[str, Payload] = {}
    with tempfile.TemporaryDirectory() as folder:  # what it would keep is forgotten again
        worker = Worker(setup, held, ClientMemory(Path(folder), own.keep))
        for stage in stages_of(own, method):
            state, tasks = _server(stage, setup, past)
            if not stage.apart:
                past[stage.name] = state
            if tasks:
                round_info = RoundInfo(stage.name, 0, stage.rounds, len(found))
                outcome = worker.run(stage, round_info, 0, tasks[0])
                if outcome.fault:
                    raise TacitError(f"Stage '{stage.name}' would send nothing: {outcome.fault}.")
                found.append((stage, outcome.reply))
    return found


def _server(stage: Stage, setup: Setup, past: dict[str, Payload]) -> tuple[Payload, list]:
    """The first state and tasks of a server that knows nothing: one black image stands for its labels."""
    black = torch.zeros(1, setup.channels, setup.size, setup.size, dtype=torch.uint8, device=setup.device)
    shard = Shard(Labeled(black, torch.zeros(1, dtype=torch.int64, device=setup.device)), black[:0])
    net_pool = NetPool(setup)
    state = stage.method.server_start(Hub(setup, shard, RoundInfo(stage.name, -1, stage.rounds, 0), net_pool), past)
    net_pool.clear()
    return state, stage.method.server_send(
        state, Hub(setup, shard, RoundInfo(stage.name, 0, stage.rounds, 0), net_pool)
    )
