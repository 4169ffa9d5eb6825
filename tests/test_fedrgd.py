"""FedRGD: groups with a replica of the server's model each, server and clients in parallel."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from runs import TINY
from tacit.config.recipes import load_recipe
from tacit.config.resolve import build_method, resolve
from tacit.contract.method import Reply
from tacit.contract.parties import Hub, NetPool, RoundInfo
from tacit.core.payload import Weights, weights_in
from tacit.data.federation import Federation
from tacit.methods.fedrgd import FedRGD
from tacit.pieces.aggregate import gradient_diversity, group_mean, stacked, unstacked, weighted_mean
from tacit.runs.folder import Run
from tacit.runs.plan import Plan, prepare

Tiny = Callable[..., Run]


def world(placement: str = "server", **settings: Any) -> tuple[Plan, Federation]:
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    layers = {"method.name": "fedrgd", "method.preset": "smoke", "data.placement": placement}
    plan = prepare(resolve(layers, TINY, changes))
    return plan, Federation(plan.dataset, plan.split, plan.setup.device)


def hub_of(world: tuple[Plan, Federation], round: int = 0) -> Hub:
    plan, federation = world
    return Hub(plan.setup, federation.server_shard(), RoundInfo("main", round, 9, round), NetPool(plan.setup))


def moved(weights: Weights, by: float) -> Weights:
    return {name: tensor + by for name, tensor in weights.items()}


def replies(start: Weights, groups: Sequence[int], steps: Sequence[float], labeled: Sequence[int] = ()) -> list[Reply]:
    return [
        Reply(
            send={"model": moved(start, step), "unlabeled": 0 if client in labeled else 20},
            examples=10 + 50 * client,
            client=client,
            group=group,
        )
        for client, (group, step) in enumerate(zip(groups, steps, strict=True))
    ]


def close(got: Weights, expected: Weights) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-5)


def test_groups_by_hand() -> None:
    """Groups {1, 3} and {2, 5, 5} with a server at 8: (1 + 3 + 8)/3 = 4 and (2 + 5 + 5 + 8)/4 = 5, together 4.5.

    A plain mean of all, server once, would be 4; a server in one group only, something else again.
    """
    one = {"w": torch.tensor([1.0])}
    scaled = {value: {"w": one["w"] * value} for value in (1, 2, 3, 5, 8)}
    first = group_mean([scaled[1], scaled[3]], scaled[8])
    second = group_mean([scaled[2], scaled[5], scaled[5]], scaled[8])
    assert (first["w"].item(), second["w"].item()) == (4.0, 5.0)
    assert group_mean([first, second])["w"].item() == 4.5


def test_diversity_by_hand() -> None:
    start = {"w": torch.tensor([1.0, 1.0]), "steps": torch.tensor(5)}
    models = [
        {"w": torch.tensor([3.0, 1.0]), "steps": torch.tensor(9)},
        {"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(9)},
    ]
    assert gradient_diversity(start, models) == 1.0  # 4 + 1 over 4 + 1; the counter does not count
    back = {"w": torch.tensor([0.0, 1.0]), "steps": torch.tensor(0)}
    assert gradient_diversity(start, [models[0], back]) == 5.0  # 4 + 1 over 1
    assert gradient_diversity(start, [start]) != gradient_diversity(start, [start])  # not a number


def test_stacked_models_come_back_with_their_types() -> None:
    models = [{"w": torch.tensor([1.0]), "steps": torch.tensor(k)} for k in range(3)]
    back = unstacked(stacked(models))
    assert [model["steps"].item() for model in back] == [0, 1, 2]
    assert all(model["steps"].dtype == torch.int64 for model in back)


def test_clients_are_dealt_evenly_and_anew() -> None:
    place = world(data__clients=7, data__min_size=5)
    method = FedRGD(groups=3)
    dealt = []
    for round in range(4):
        hub = hub_of(place, round)
        tasks = method.server_send(method.server_start(hub, {}), hub)
        assert [task.client for task in tasks] == list(range(7))
        assert sorted(Counter(task.group for task in tasks).values()) == [2, 2, 3]
        dealt.append(tuple(task.group for task in tasks))
    assert len(set(dealt)) > 1


def test_the_server_trains_beside_the_clients_and_joins_every_group() -> None:
    place = world()
    method, start = FedRGD(groups=2), hub_of(place).new_weights()
    groups, steps = [0, 0, 0, 1], [0.1, 0.2, 0.6, -0.4]
    after = method.server_merge({"model": start}, replies(start, groups, steps), hub_of(place))
    trained = hub_of(place).finetune(start)  # from the old model, not from the merged one
    first = weighted_mean([moved(start, step) for step in steps[:3]] + [trained], [0.25] * 4)
    second = weighted_mean([moved(start, -0.4), trained], [0.5, 0.5])
    close(weights_in(after, "model"), weighted_mean([first, second], [0.5, 0.5]))
    assert set(after) == {"model"}


def test_fully_labelled_clients_take_the_servers_place() -> None:
    place = world("some-clients")
    method, start = FedRGD(groups=2), hub_of(place).new_weights()
    answers = replies(start, [0, 0, 1, 1], [8.0, 1.0, 3.0, 4.0], labeled=[0])
    after = method.server_merge({"model": start}, answers, hub_of(place))
    close(weights_in(after, "model"), moved(start, ((1 + 8) / 2 + (3 + 4 + 8) / 3) / 2))
    only = method.server_merge({"model": start}, answers[:1], hub_of(place))
    close(weights_in(only, "model"), moved(start, 8.0))


def test_without_a_labelled_party_groups_have_no_replica() -> None:
    place = world("clients")
    method, start = FedRGD(groups=2), hub_of(place).new_weights()
    after = method.server_merge({"model": start}, replies(start, [0, 0, 0, 1], [1, 2, 3, 8]), hub_of(place))
    close(weights_in(after, "model"), moved(start, (2 + 8) / 2))  # groups weigh alike, whatever their size


def test_a_group_without_replies_does_not_count() -> None:
    place = world("clients")
    method, start = FedRGD(groups=3), hub_of(place).new_weights()
    after = method.server_merge({"model": start}, replies(start, [2, 2], [1.0, 3.0]), hub_of(place))
    close(weights_in(after, "model"), moved(start, 2.0))


def test_clients_may_go_on_from_their_own_group() -> None:
    """`start = group`: fixed groups; the global model is their mean, and a group that did not answer stays."""
    place = world("clients")
    method, start = FedRGD(groups=2, start="group"), hub_of(place).new_weights()
    tasks = method.server_send({"model": start}, hub_of(place))
    assert [task.group for task in tasks] == [0, 1, 0, 1]
    state = method.server_merge({"model": start}, replies(start, [0, 1, 0, 1], [1, 5, 3, 7]), hub_of(place))
    close(weights_in(state, "model"), moved(start, 4.0))
    tasks = method.server_send(state, hub_of(place, 1))
    for task in tasks:
        close(task.weights("model"), moved(start, (2.0, 6.0)[task.group]))
    state = method.server_merge(state, replies(start, [0], [9.0]), hub_of(place, 1))
    close(weights_in(state, "model"), moved(start, 9.0))
    kept = unstacked(weights_in(state, "groups"))
    close(kept[1], moved(start, 6.0))


@pytest.mark.parametrize("placement", ["server", "clients", "some-clients"])
def test_group_starts_run_and_resume(placement: str, tiny: Tiny) -> None:
    run = tiny("fedrgd", placement, rounds=3, method__start="group")
    assert not any(record["refused"] or record["skipped"] for record in run.records)
    assert len(run.records) == 4


def test_the_record_has_the_diversity_and_debias_matters(tiny: Tiny) -> None:
    plain = tiny("fedrgd", "server", name="plain")
    debiased = tiny("fedrgd", "server", name="debiased", method__debias=True)
    assert all(record["diversity"] > 0 for record in plain.records if record["stage"] == "main")
    assert any(not torch.equal(plain.weights[name], debiased.weights[name]) for name in plain.weights)


def test_the_recipes_name_its_rows() -> None:
    for table in (1, 2, 3):
        for data in ("cifar10", "svhn", "cifar100"):
            for row, debias in (("fedrgd", False), ("fedrgd-feddpl", True)):
                experiment = resolve(load_recipe(f"feddb/table{table}/{data}-{row}"))
                other = resolve(load_recipe(f"feddb/table{table}/{data}-fixmatch"))
                assert build_method(experiment).debias == debias
                assert (experiment.data, experiment.rounds) == (other.data, other.rounds)
                assert experiment.net.norm == "gn"
                assert experiment.paper.accuracy
