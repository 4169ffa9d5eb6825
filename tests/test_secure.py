"""Secure aggregation in simulations: fixed-point sums, merges that see nothing else, refusals before any work."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runs import TINY, digest, hub, timeless, world_of
from tacit.backends import LocalBackend
from tacit.config.resolve import resolve
from tacit.contract.method import Method, Reply, Stage
from tacit.contract.sums import Summation, summation, summed, why_not
from tacit.core.errors import TacitError
from tacit.core.payload import Payload
from tacit.core.safeguards import Privacy
from tacit.core.settings import Experiment
from tacit.data.federation import Federation
from tacit.engine.run import run_experiment, run_plan
from tacit.methods import find_method, known_methods
from tacit.methods.fixmatch import FixMatch
from tacit.runs.folder import Run
from tacit.runs.memory import ClientMemory
from tacit.runs.plan import prepare, stages_of
from tacit.runs.watchers import NullWatcher
from tacit.testing.sums import apart
from tacit.testing.trial import Interruptions, Trial

SECURE = {"privacy.secure_aggregation": True}
# With these options the method can merge from sums, though not with those that its paper has.
OPTIONS: dict[str, dict[str, object]] = {
    "feddb": {"method.dma": "none"},
    "fedmatch": {"method.helpers": 0},
    "ddrfed": {"method.gdgm": False},
}
NEVER = {"rscfed", "fedrgd", "orchestra", "pfedknow"}


def secure(name: str, placement: str, **more: object) -> Experiment:
    layers = {"method.name": name, "method.preset": "smoke", "data.placement": placement}
    return resolve(layers, TINY, SECURE, {key.replace("__", "."): value for key, value in more.items()})


# --- The encoding ---------------------------------------------------------------------------------------------------


def rule(bits: int, clients: int, most: float, size: int = 7) -> Summation:
    sent: Payload = {"model": {"w": torch.zeros(size), "steps": torch.tensor(3)}}
    return summation(FixMatch(), sent, 2, Privacy(secure_aggregation=True, bits=bits, range=4.0), clients, most)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([32, 64]), st.integers(2, 40), st.integers(0, 2**32 - 1), st.floats(1.0, 1e5))
def test_the_mean_of_a_sum_is_off_by_no_more_than_it_says(bits: int, clients: int, seed: int, most: float) -> None:
    chance, encoding = np.random.default_rng(seed), rule(bits, clients, most)
    models, weights = chance.uniform(-4, 4, (clients, 7)), chance.uniform(0.1, 1, clients) * most
    replies = [
        Reply(send={"model": {"w": torch.from_numpy(x), "steps": torch.tensor(9)}}, examples=n, client=k)
        for k, (x, n) in enumerate(zip(models, weights.tolist(), strict=True))
    ]
    found = encoding.decode(summed(encoding, replies, ()), clients)
    wide = replace(encoding, slots=tuple(replace(s, dtype=torch.float64) for s in encoding.slots))
    exact = wide.decode(summed(wide, replies, ()), clients).reply.weights("model")["w"].numpy()
    error = np.abs(exact - (weights[:, None] * models).sum(axis=0) / weights.sum()).max()
    assert error <= found.error
    assert found.error <= clients * 4.0 * 21 / 2.0 ** min(bits - 1, 50)  # half steps: as fine as the modulus allows
    assert found.clipped == 0
    assert found.reply.parties == clients
    assert int(found.reply.weights("model")["steps"]) == 9
    assert found.reply.examples == pytest.approx(weights.sum(), rel=1e-5)


@settings(deadline=None, max_examples=20)
@given(st.permutations(range(6)), st.integers(0, 2**32 - 1))
def test_the_order_of_clients_changes_no_bit(order: Sequence[int], seed: int) -> None:
    """As it does where floats are added up."""
    encoding, chance = rule(32, 6, 100.0), np.random.default_rng(seed)
    replies = [
        Reply(
            send={"model": {"w": torch.from_numpy(chance.normal(size=7)).float(), "steps": torch.tensor(k)}},
            examples=k,
            client=k,
        )
        for k in range(6)
    ]
    total = summed(encoding, replies, ())
    assert (total == summed(encoding, [replies[k] for k in order], ())).all()


def test_the_largest_sum_that_can_be_does_not_wrap() -> None:
    for bits in (32, 64):
        for sign in (1.0, -1.0):
            encoding = rule(bits, 3, 1000.0)
            send: Payload = {"model": {"w": torch.full((7,), sign * 4.0), "steps": torch.tensor(2**20)}}
            every = [Reply(send=send, examples=1000.0) for _ in range(3)]
            mean = encoding.decode(summed(encoding, every, ()), 3).reply
            assert torch.allclose(mean.weights("model")["w"], torch.full((7,), sign * 4.0), atol=1e-6)
            assert int(mean.weights("model")["steps"]) == 2**20
            assert mean.examples == 3000


def test_what_is_beyond_the_range_is_clipped_and_counted() -> None:
    encoding = rule(32, 2, 10.0)
    far: Payload = {"model": {"w": torch.tensor([9.0, -9.0, 1, 1, 1, 1, 1]), "steps": torch.tensor(1)}}
    near: Payload = {"model": {"w": torch.ones(7), "steps": torch.tensor(1)}}
    found = encoding.decode(summed(encoding, [Reply(send=far, examples=5), Reply(send=near, examples=5)], ()), 2)
    assert found.reply.weights("model")["w"].tolist() == [2.5, -1.5, 1, 1, 1, 1, 1]
    assert found.clipped == pytest.approx(2 / 8 / 2, abs=1e-6)  # of eight values two at one of two clients


def test_a_client_that_learned_nothing_adds_nothing() -> None:
    encoding = rule(32, 2, 10.0)
    odd: Payload = {"model": {"w": torch.full((7,), 3.0), "steps": torch.tensor(1)}}
    send: Payload = {"model": {"w": torch.ones(7), "steps": torch.tensor(1)}}
    found = encoding.decode(summed(encoding, [Reply(send=send, examples=5), Reply(send=odd, examples=0)], ()), 2)
    assert found.reply.weights("model")["w"].tolist() == [1.0] * 7
    assert found.reply.parties == 1
    nobody = encoding.decode(summed(encoding, [Reply(send=odd, examples=0)], ()), 1).reply
    assert nobody.examples == 0
    assert nobody.weights("model")["w"].tolist() == [0.0] * 7  # a merge does not look at it


def test_a_weight_beyond_its_bound_is_no_part_of_a_sum() -> None:
    with pytest.raises(TacitError, match="weighs 11 in a sum, from 0 to 10 were expected"):
        rule(32, 2, 10.0).encode(Reply(send={}, examples=11), False)


# --- Merges from sums -----------------------------------------------------------------------------------------------

VARIANTS = [
    *((name, place, OPTIONS[name]) for name in OPTIONS for place in ("clients", "server")),
    ("fedavg", "clients", {"method.scaffold": True}),
    ("fedavg", "clients", {"method.plus": True}),
    ("fedavg", "clients", {"server.name": "adam"}),
    ("semifl", "clients", {"method.weigh": "accepted"}),
    ("semifl", "server", {"method.alternate": False}),
    ("fl2", "clients", {"method.status_aware": False}),
    ("fedirm", "clients", {"method.weigh": "examples"}),
    ("fedirm", "server", {"method.weigh": "half"}),
    ("fed_consist", "some-clients", {"method.plus": True, "data.labeled_clients": 2}),
    ("ddrfed", "some-clients", {"method.gdgm": False, "method.phi": 6.0, "data.labeled_clients": 2}),
    ("pdcfed", "some-clients", {"data.labeled_clients": 2}),
]


@pytest.mark.parametrize(
    ("name", "place", "options"), VARIANTS, ids=[f"{n}-{p}-{'-'.join(map(str, o))}" for n, p, o in VARIANTS]
)
def test_options_with_which_sums_are_enough(name: str, place: str, options: dict[str, object], tmp_path: Path) -> None:
    """What test_conformance.py asks of every method, with options that change what the merge needs."""
    looked = 0
    for merging in changed_trial(name, place, options, tmp_path / "plain").whole.notebook.merges:
        if merging.replies:
            labeled = merging.hub.labeled_clients
            assert apart(merging.method, merging.state, merging.replies, merging.hub, merging.state, labeled) == ""
            looked += 1
    assert looked
    for merging in changed_trial(name, place, {**options, **SECURE}, tmp_path / "secure").whole.notebook.merges:
        assert len(merging.replies) <= 1
        assert all((reply.client, reply.metrics) == (-1, {}) for reply in merging.replies)


def changed_trial(name: str, place: str, options: dict[str, object], folder: Path) -> Trial:
    class Changed(Trial):
        def experiment(self, changes: object = None) -> Experiment:
            return super().experiment(options)

    return Changed(name, find_method(name), None, place, "smoke", 0.0, folder)


def test_a_false_declaration_is_found() -> None:
    """DMA weighs clients by their own APP-U: a mean by equal weights is something else."""
    world = world_of("feddb", "clients")
    method, server = world[0].stages[-1].method, hub(world)
    state: Payload = {"model": server.new_weights()}
    generator = torch.Generator().manual_seed(0)
    replies = [
        Reply(
            send={
                "model": {name: t + torch.randn(t.shape, generator=generator) for name, t in state["model"].items()},  # type: ignore[union-attr]
                "app_u": torch.rand(10, generator=generator).softmax(dim=0),
            },
            examples=5,
            client=k,
        )
        for k in range(4)
    ]
    assert "is off by" in apart(method, state, replies, server, state, ())
    assert "DMA" in method.needs_each(world[0].experiment)


def test_a_class_that_changes_the_merge_declares_anew() -> None:
    @dataclass(frozen=True)
    class Other(FixMatch):
        def server_merge(self, state: Payload, replies: Sequence[Reply], hub: object) -> Payload:
            return state

    @dataclass(frozen=True)
    class Same(FixMatch):
        threshold: float = 0.5

    assert "does not declare anew" in why_not(Other())
    assert why_not(Same()) == ""
    assert "does not declare" in why_not(Method())


# --- Whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "place"), [("cbafed", "clients"), ("fixmatch", "server")])
def test_pool_and_resume_give_the_bytes_of_one_process(name: str, place: str, tmp_path: Path) -> None:
    experiment = secure(name, place)
    local = run_experiment(experiment, tmp_path / "local")
    pool = run_experiment(secure(name, place, backend__name="pool", backend__workers=2), tmp_path / "pool")
    assert digest(pool) == digest(local)
    assert timeless(pool) == timeless(local)
    interruptions, resumed = Interruptions(stages_of(experiment)), None
    while resumed is None:
        try:
            resumed = run_experiment(experiment, tmp_path / "resumed", resume=True, watcher=interruptions)
        except KeyboardInterrupt:
            continue
    assert digest(resumed) == digest(local)
    assert timeless(resumed) == timeless(local)


def test_ray_gives_the_bytes_of_one_process(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    local = run_experiment(secure("fedavg", "clients", rounds=1), tmp_path / "local")
    more = {"rounds": 1, "backend__name": "ray", "backend__workers": 1}
    assert digest(run_experiment(secure("fedavg", "clients", **more), tmp_path / "ray")) == digest(local)


def test_records_tell_nothing_of_single_clients(tmp_path: Path) -> None:
    run = run_experiment(secure("cbafed", "clients"), tmp_path / "run")
    plain = run_experiment(resolve(run.experiment.to_dict(), {"privacy": Privacy().model_dump()}), tmp_path / "plain")
    for record, usual in zip(run.records, plain.records, strict=True):
        assert record["client_metrics"] == {}
        assert usual["client_metrics"]
        assert record["answered"] == usual["answered"] == [0, 1, 2, 3]
        assert record["party_weights"] == [1.0]
        assert record["secure_clipped"] == 0
        assert 0 < record["secure_error"] < 1e-5
        # 32 bits a number, as a float has: what is added are the weights and figures of the sum.
        assert 1 <= record["bytes_up"] / usual["bytes_up"] < 1.01
    assert "sums over at least two clients" in (run.folder / "card.html").read_text()
    assert run.records[-1]["accepted_ratio"] is not None  # over all clients, where a simulation knows it
    assert "secure_error" not in plain.records[0]


def test_a_round_with_too_few_clients_is_skipped_and_told(tmp_path: Path) -> None:
    experiment = secure("fedavg", "clients", seed=87, rounds=3, faults__dropout=0.6)  # 3, 1 and 0 of four answer
    run = run_experiment(experiment, tmp_path / "run")
    assert [len(record["answered"]) for record in run.records] == [3, 0, 0]
    assert run.records[1]["skipped"] == "1 clients left for a sum, 3 needed (privacy.threshold): the model stays"
    assert run.records[1]["accuracy"] == run.records[0]["accuracy"]


def test_who_comes_too_late_is_not_in_the_sum(tmp_path: Path) -> None:
    run = run_experiment(secure("fedavg", "clients", rounds=4, faults__straggler=0.3), tmp_path / "run")
    late = [refused["client"] for record in run.records for refused in record["refused"]]
    assert late
    for record in run.records:
        out = [refused["client"] for refused in record["refused"]]
        assert sorted([*record["answered"], *out]) == [0, 1, 2, 3] or record["skipped"]


@dataclass(frozen=True)
class Spoilt(Method):
    """One client sends NaN."""

    merges_sums: ClassVar = {"model": "mean"}

    def client_train(self, task: object, memory: object, me: object) -> Reply:
        sent = {name: tensor + 1 for name, tensor in task.weights("model").items()}  # type: ignore[attr-defined]
        bad = {name: tensor * float("nan") for name, tensor in sent.items()}
        return Reply(send={"model": bad if me.number == 1 else sent}, examples=1)  # type: ignore[attr-defined]


def test_a_bad_reply_is_left_out_before_it_is_added(tmp_path: Path) -> None:
    plan = prepare(secure("fedavg", "clients", rounds=1))
    plan = replace(plan, stages=(Stage("main", Spoilt(), 1),))
    federation = Federation(plan.dataset, plan.split, plan.setup.device)
    run = run_plan(
        plan,
        tmp_path / "run",
        lambda plan, folder: LocalBackend(plan.setup, federation, ClientMemory(folder.memory_folder)),
        False,
        NullWatcher(),
    )
    (record,) = run.records
    assert record["answered"] == [0, 2, 3]
    assert [refused["client"] for refused in record["refused"]] == [1]
    assert not record["skipped"]
    assert all(torch.isfinite(tensor).all() for tensor in Run(run.folder).weights.values())


# --- What is refused, before any work -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", known_methods())
def test_each_method_either_runs_or_is_refused_in_a_sentence(name: str) -> None:
    """The table of docs/secure-aggregation.md says the same."""
    refused = {}
    for place in find_method(name).placements:
        try:
            stages_of(secure(name, place))
        except TacitError as error:
            refused[place] = str(error)
    assert all(text.startswith(f"The method '{name}' cannot merge from sums alone") for text in refused.values())
    if name in NEVER:
        assert set(refused) == set(find_method(name).placements)
    elif name in OPTIONS:
        assert set(refused) == set(find_method(name).placements)
        stages_of(secure(name, "clients", **OPTIONS[name]))
    else:
        assert set(refused) <= {"some-clients"}
    table = (Path(__file__).parent.parent / "docs" / "secure-aggregation.md").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith(f"| [{name}](")]
    assert row.split("|")[2].strip() == ("no" if name in NEVER else "with options" if name in OPTIONS else "yes")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"privacy.bits": 64}, r"\[privacy\] bits is for secure aggregation, which is off"),
        ({**SECURE, "privacy.bits": 16}, r"privacy\.bits = 16"),
        ({**SECURE, "privacy.range": 0}, r"privacy\.range = 0"),
        ({**SECURE, "privacy.neighbours": 3}, "neighbours = 3 is odd"),
        ({**SECURE, "participation.number": 1}, "a sum over one client is that client's own"),
        ({**SECURE, "privacy.threshold": 9}, r"privacy\.threshold = 9 .* only 4 share a secret"),
        ({**SECURE, "privacy.threshold": 2}, "could open one by one half and another by the other. Write at least 3"),
        ({**SECURE, "evaluate_clients": True}, "needs each client's model"),
        ({**SECURE, "data.validation": 0.2}, "which secure aggregation does not hide"),
        ({**SECURE, "data.clients": 2_000_000, "data.subset": 0}, "clients|bits"),
        ({"privacy.secure_agregation": True}, "Did you mean 'privacy.secure_aggregation'"),
        ({**SECURE, "method.name": "semifl", "net.norm": "bn", "net.bn": "static"}, "pools BN's statistics"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], words: str) -> None:
    layers = {"method.name": "fedavg", "method.preset": "smoke", "data.placement": "clients"}
    with pytest.raises(TacitError, match=words):
        stages_of(resolve(layers, TINY, settings))


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("fedavg", {}, "the stage 'main' asks labelled clients alone, of which there are 1: a sum over one client"),
        ("cbafed", {}, "the stage 'warm-up' asks labelled clients alone"),
        ("fedu", {}, "the stage 'main' asks labelled clients alone"),
        ("fedirm", {"data__labeled_clients": 3}, "Only clients with labels send 'relation', and 3 of 4 hold labels"),
        ("fedmatch", {"method__helpers": 0, "data__labeled_clients": 3}, "Only clients with labels send 'sigma'"),
    ],
)
def test_sums_over_few_labelled_clients_are_refused(
    name: str, more: dict[str, object], words: str, tmp_path: Path
) -> None:
    with pytest.raises(TacitError, match=words):
        run_experiment(secure(name, "some-clients", **more), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_that_are_off_are_not_written() -> None:
    plain = resolve({"method.name": "fedavg", "method.preset": "smoke"})
    assert "privacy" not in plain.to_dict()
    assert plain == resolve(plain.to_dict(), {"privacy": {"secure_aggregation": False}})
    assert secure("fedavg", "clients").to_dict()["privacy"]["bits"] == 32
