"""FedAvg's bounds and FedAvg+'s residual connection, by hand."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import runs
from tacit.contract.method import Reply, Task
from tacit.contract.parties import Hub
from tacit.core.errors import TacitError
from tacit.core.payload import Weights, weights_in
from tacit.core.safeguards import Robust
from tacit.core.settings import Server, Train
from tacit.methods.fedavg import FedAvg
from tacit.nets import optimizer
from tacit.runs.folder import Run
from tacit.testing import check_method

Tiny = Callable[..., Run]


def reply(value: float, examples: float) -> Reply:
    model = {"w": torch.tensor([value]), "steps": torch.tensor(int(value))}
    return Reply(send={"model": model}, examples=examples)


class HubByHand(SimpleNamespace):
    mean_model, _reach, steps = Hub.mean_model, Hub._reach, Hub.steps


def hub(number: int, labeled_clients: Sequence[int] = ()) -> Any:
    nothing, plain = SimpleNamespace(labeled=[]), SimpleNamespace(server=Server(), robust=Robust())
    more = {"labeled_clients": labeled_clients, "memory": {}, "next_memory": {}}
    return HubByHand(round=number, shard=nothing, _setup=plain, **more)


def test_the_mean_is_by_examples_and_counters_stay_whole() -> None:
    state = FedAvg().server_merge({"model": {}}, [reply(1, 30), reply(5, 10)], hub(0))
    model = weights_in(state, "model")
    assert model["w"].item() == 2.0
    assert model["steps"].dtype == torch.int64
    assert model["steps"].item() == 2


def test_normalised_averaging_counts_steps_once() -> None:
    """FedNova's Eq. 7: 200 examples in ten batches weigh as twice 100 in five would, if each went as far a step.

    A client that walked ten steps to 10 and one that walked five to −5 pull alike by the step; by its 200 examples the
    first pulls twice as hard. A plain mean is 5 = (2 · 10 − 5)/3: four times as hard.
    """
    normalised, nobody = hub(0), hub(0)
    for each, on in ((normalised, True), (nobody, False)):
        each._setup.server = Server(normalize=on)
        each.train, each.epochs = Train(batch=20, momentum=0.0), 1
    replies = [reply(10.0, 200), reply(-5.0, 100)]
    models = [weights_in(FedAvg().server_merge({"model": {}}, replies, each), "model") for each in (nobody, normalised)]
    assert models[0]["w"].item() == pytest.approx(5.0)
    # Directions +1 and −1 a step, two thirds and a third of the examples: (2/3 − 1/3) · τ, τ = 1/((2/3)/10 + (1/3)/5).
    assert models[1]["w"].item() == pytest.approx((2 / 3 - 1 / 3) * 7.5)


def test_normalised_averaging_knows_momentum_and_passes() -> None:
    """With momentum ten steps reach more than twice as far as five; the server's own passes are its own."""
    each = hub(0)
    each.train, each.epochs = Train(batch=20, momentum=0.9, nesterov=True, epochs=1), 3
    server = reply(1.0, 100)
    client, larger = (dataclasses.replace(reply(1.0, examples), client=0) for examples in (100, 200))
    assert each._reach(larger) > 2.5 * each._reach(client)
    assert each._reach(server) == pytest.approx(optimizer.reach([1.0] * 15, 0.9, True))
    assert each._reach(client) == pytest.approx(optimizer.reach([1.0] * 5, 0.9, True))


def test_normalised_averaging_is_refused_where_the_server_cannot_divide(tiny: Tiny) -> None:
    with pytest.raises(TacitError, match=r"server\.normalize"):
        tiny("fedavg", "clients", server__normalize=True, privacy__clip=1.0, privacy__noise=1.0)
    with pytest.raises(TacitError, match=r"server\.normalize"):
        tiny("rscfed", "some-clients", server__normalize=True, data__labeled_clients=2)


def test_the_residual_connection_round_by_round() -> None:
    """Anchor after round 0; merged at rounds 2 and 4 with half of the anchor, which then moves along."""
    method = FedAvg(plus=True, residual_server=0.5, residual_every=2)
    state: dict = {"model": {"w": torch.tensor([99.0])}}  # the random start is no anchor
    seen = []
    for number, value in enumerate([4.0, 8.0, 12.0, 0.0, 0.0]):
        state = method.server_merge(state, [reply(value, 1)], hub(number))
        seen.append(weights_in(state, "model")["w"].item())
    assert seen == [4.0, 8.0, 8.0, 0.0, 4.0]  # (4+12)/2 at round 2, (8+0)/2 at round 4


def test_nobody_learned_anything() -> None:
    before = {"model": {"w": torch.tensor([1.0])}}
    assert FedAvg().server_merge(before, [reply(5, 0)], hub(0)) is before


def test_who_is_asked(tiny: Tiny) -> None:
    """Labelled clients only; nobody when the server has all labels; everybody when all is revealed."""
    some = tiny("fedavg", "some-clients", name="a", data__labeled_clients=2)
    assert some.records[0]["asked"] == [0, 1]
    assert tiny("fedavg", "server", name="b").records[0]["asked"] == []
    assert tiny("fedavg", "server", name="c", data__reveal="all").records[0]["asked"] == [0, 1, 2, 3]


def test_more_labels_are_better(tiny: Tiny) -> None:
    settings = {"rounds": 6, "train__epochs": 3, "data__subset": 0, "data__test_subset": 0, "data__labels": 20}
    lower = tiny("fedavg", "clients", name="lower", **settings)
    upper = tiny("fedavg", "clients", name="upper", data__reveal="all", **settings)
    assert upper["accuracy"][-1] > lower["accuracy"][-1] + 0.1


def test_residual_every_zero_is_refused() -> None:
    from tacit.config.resolve import resolve
    from tacit.core.errors import TacitError

    with pytest.raises(TacitError, match=r"method\.residual_every = 0: input should be greater than or equal to 1"):
        resolve({"method": "fedavg", "method.residual_every": 0})


# --- SCAFFOLD --------------------------------------------------------------------------------------------------------

PLAIN_SGD = {"train__momentum": 0.0, "train__weight_decay": 0.0, "train__clip": 0.0, "views__weak": "none"}


def controls(me: Any, weights: Weights, down: float, own: float) -> tuple[Task, dict]:
    """A task and a memory with control variates of one value each."""
    parameters = dict(me.model(weights).named_parameters())
    control, mine = ({name: torch.full(p.shape, value) for name, p in parameters.items()} for value in (down, own))
    return Task(0, {"model": weights, "control": control}), {"control": mine}


def test_one_step_of_scaffold_by_hand() -> None:
    """One step on all labels at once: y = x − η (g + c − c_i), and the new variate is g itself."""
    world = runs.world_of("fedavg", "clients", method__scaffold=True, train__batch=1000, **PLAIN_SGD)
    method, me, start = world[0].stages[-1].method, runs.client(world), runs.hub(world).new_weights()
    task, memory = controls(me, start, down=0.5, own=0.2)
    reply = method.client_train(task, memory, me)
    model, labeled = me.model(start), me.shard.labeled
    F.cross_entropy(model(me.views.plain(labeled.images)), labeled.labels).backward()
    for name, parameter in model.named_parameters():
        moved = start[name] - me.train.lr * (parameter.grad + 0.5 - 0.2)
        torch.testing.assert_close(reply.weights("model")[name], moved)
        torch.testing.assert_close(weights_in(reply.keep, "control")[name], parameter.grad, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(reply.weights("control")[name], parameter.grad - 0.2, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_momentum_and_a_schedule_the_variate_is_a_mean_of_gradients_still(nesterov: bool) -> None:
    """Steps so small that every gradient is nearly the first one: that is the variate, however they were taken."""
    settings = {**PLAIN_SGD, "train__momentum": 0.9, "train__nesterov": nesterov, "train__lr": 1e-4}
    four = {"train__epochs": 4, "train__batch": 1000, "train__schedule": "linear", "train__schedule_by": "step"}
    world = runs.world_of("fedavg", "clients", method__scaffold=True, **settings, **four)
    method, me, start = world[0].stages[-1].method, runs.client(world), runs.hub(world).new_weights()
    reply = method.client_train(*controls(me, start, down=0.0, own=0.0), me)
    model, labeled = me.model(start), me.shard.labeled
    F.cross_entropy(model(me.views.plain(labeled.images)), labeled.labels).backward()
    kept = torch.cat([tensor.flatten() for tensor in weights_in(reply.keep, "control").values()])
    first = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert (kept - first).norm() < 0.05 * first.norm(), "divided by K·η it would be twice as long, or more"


def test_without_variates_yet_it_is_fedavg(tiny: Tiny) -> None:
    """In the first round all variates are zero; from the second on they are not."""
    plain = tiny("fedavg", "clients", name="plain", rounds=1)
    first = tiny("fedavg", "clients", name="first", rounds=1, method__scaffold=True)
    assert runs.digest(plain) == runs.digest(first)
    plain, both = (tiny("fedavg", "clients", name=str(on), rounds=2, method__scaffold=on) for on in (False, True))
    assert runs.digest(plain) != runs.digest(both)
    assert both.records[0]["bytes_up"] > 1.9 * plain.records[0]["bytes_up"]


def test_the_servers_variate_moves_by_the_share_of_those_who_answered() -> None:
    """Two of four parties, with 30 and 10 labels: c + 2/4 · (¾ · 4 + ¼ · 8)."""
    state = {"model": {"w": torch.tensor([0.0])}, "control": {"w": torch.tensor([1.0])}}
    replies = [
        Reply(send={"model": {"w": torch.tensor([0.0])}, "control": {"w": torch.tensor([change])}}, examples=examples)
        for change, examples in ((4.0, 30), (8.0, 10))
    ]
    after = FedAvg(scaffold=True).server_merge(state, replies, hub(0, labeled_clients=range(4)))
    assert weights_in(after, "control")["w"].item() == 1.0 + 0.5 * 5.0


def test_a_server_with_labels_has_a_variate_of_its_own(tiny: Tiny) -> None:
    run = tiny("fedavg", "server", data__reveal="all", method__scaffold=True)
    assert {"model", "control", "own_control"} == set(run.state())


def test_plus_and_scaffold_are_refused_together() -> None:
    from tacit.config.resolve import resolve
    from tacit.core.errors import TacitError

    with pytest.raises(TacitError, match="plus and scaffold do not go together"):
        resolve({"method": "fedavg", "method.plus": True, "method.scaffold": True})


def test_scaffold_keeps_the_rules_of_the_house(tmp_path: Path) -> None:
    path = tmp_path / "scaffold.py"
    path.write_text(
        '"""FedAvg with control variates, whatever the options say."""\n\n'
        "from dataclasses import dataclass\nfrom typing import ClassVar\n\n"
        "from tacit.methods.fedavg import FedAvg\n\n\n"
        "@dataclass(frozen=True)\nclass Scaffold(FedAvg):\n"
        '    """SCAFFOLD."""\n\n    scaffold: bool = True\n    citation: ClassVar[str] = "Karimireddy et al."\n'
    )
    check_method(str(path), placements=["clients"]).raise_for_failures()
