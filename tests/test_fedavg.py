"""FedAvg's bounds and FedAvg+'s residual connection, by hand."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tacit.contract.method import Reply
from tacit.core.payload import weights_in
from tacit.methods.fedavg import FedAvg
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


def reply(value: float, examples: float) -> Reply:
    model = {"w": torch.tensor([value]), "steps": torch.tensor(int(value))}
    return Reply(send={"model": model}, examples=examples)


def hub(number: int) -> SimpleNamespace:
    return SimpleNamespace(round=number, shard=SimpleNamespace(labeled=[]))


def test_the_mean_is_by_examples_and_counters_stay_whole() -> None:
    state = FedAvg().server_merge({"model": {}}, [reply(1, 30), reply(5, 10)], hub(0))  # type: ignore[arg-type]
    model = weights_in(state, "model")
    assert model["w"].item() == 2.0
    assert model["steps"].dtype == torch.int64
    assert model["steps"].item() == 2


def test_the_residual_connection_round_by_round() -> None:
    """Anchor after round 0; merged at rounds 2 and 4 with half of the anchor, which then moves along."""
    method = FedAvg(plus=True, residual_server=0.5, residual_every=2)
    state: dict = {"model": {"w": torch.tensor([99.0])}}  # the random start is no anchor
    seen = []
    for number, value in enumerate([4.0, 8.0, 12.0, 0.0, 0.0]):
        state = method.server_merge(state, [reply(value, 1)], hub(number))  # type: ignore[arg-type]
        seen.append(weights_in(state, "model")["w"].item())
    assert seen == [4.0, 8.0, 8.0, 0.0, 4.0]  # (4+12)/2 at round 2, (8+0)/2 at round 4


def test_nobody_learned_anything() -> None:
    before = {"model": {"w": torch.tensor([1.0])}}
    assert FedAvg().server_merge(before, [reply(5, 0)], hub(0)) is before  # type: ignore[arg-type]


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
