"""The loop: identical repeats, faults, refused replies, quorum, what a record holds."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import digest, timeless
from tacit.backends import waves
from tacit.contract.method import Method, Reply, Task
from tacit.contract.parties import Hub
from tacit.contract.record import KEYS
from tacit.core.errors import TacitError
from tacit.core.payload import Payload
from tacit.engine.summary import summarize
from tacit.engine.validation import refusal_reason
from tacit.methods.fedavg import FedAvg
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


def test_the_same_experiment_twice_gives_the_same_bytes(tiny: Tiny) -> None:
    first, second = tiny("fixmatch", "clients", name="a"), tiny("fixmatch", "clients", name="b")
    assert digest(first) == digest(second)
    assert timeless(first) == timeless(second)
    assert digest(tiny("fixmatch", "clients", name="c", seed=1)) != digest(first)


def test_the_resolved_experiment_reproduces_the_run(tiny: Tiny, tmp_path: Path) -> None:
    from tacit.config.resolve import resolve
    from tacit.core.settings import read_toml
    from tacit.engine.run import run_experiment

    first = tiny("fixmatch", "server", name="a")
    again = run_experiment(resolve(read_toml(first.folder / "experiment.toml")), tmp_path / "b")
    assert digest(again) == digest(first)


def test_a_record_holds_what_was_promised(tiny: Tiny) -> None:
    run = tiny("fixmatch", "clients")
    record = run.records[-1]
    figures = {"accuracy", "auc", "loss", "per_class", "pseudo_accuracy", "accepted_ratio"}
    assert figures | {"stage", "round", "asked", "answered", "bytes_up", "bytes_down", "seconds"} <= set(record)
    assert record["bytes_up"] > 0
    assert len(record["per_class"]) == 10
    assert run["accuracy"].shape == (len(run.records),)
    assert run["per_class"].shape == (len(run.records), 10)
    with pytest.raises(KeyError, match=r"there is: .*accuracy"):
        run["acuracy"]
    summary = run.summary
    assert summary is not None
    assert summary["accuracy"] == run["accuracy"][-1]
    for name in ("method", "placement", "seed", "reporting", "auc", "versions", "device"):
        assert name in summary


def test_drop_outs_are_seeded_and_recorded(tiny: Tiny) -> None:
    settings = {"rounds": 6, "data__clients": 8, "faults__dropout": 0.4}
    first, second = tiny("fedavg", "clients", name="a", **settings), tiny("fedavg", "clients", name="b", **settings)
    answered = [record["answered"] for record in first.records]
    assert answered == [record["answered"] for record in second.records]
    share = sum(map(len, answered)) / (6 * 8)
    assert 0.35 < share < 0.85
    assert len({tuple(clients) for clients in answered}) > 1


def test_stragglers_train_but_do_not_count(tiny: Tiny) -> None:
    run = tiny("fedavg", "clients", rounds=4, data__clients=6, faults__straggler=0.5)
    late = [refusal for record in run.records for refusal in record["refused"]]
    assert late
    assert all(refusal["why"] == "came too late" for refusal in late)
    for record in run.records:
        assert sorted(record["answered"] + [r["client"] for r in record["refused"]]) == record["asked"]


def test_below_the_quorum_the_model_stays(tiny: Tiny) -> None:
    run = tiny("fedavg", "clients", rounds=5, data__clients=6, faults__dropout=0.5, participation__quorum=4)
    skipped = [bool(record["skipped"]) for record in run.records]
    assert any(skipped)
    assert not all(skipped)
    accuracy = run["loss"]
    for number in range(1, 5):
        assert (accuracy[number] == accuracy[number - 1]) == skipped[number]


def test_participation_by_number_and_by_fraction(tiny: Tiny) -> None:
    by_number = tiny("fedavg", "clients", name="a", data__clients=8, participation__number=3)
    by_fraction = tiny("fedavg", "clients", name="b", data__clients=8, participation__fraction=0.25)
    assert [len(r["asked"]) for r in by_number.records] == [3, 3]
    assert [len(r["asked"]) for r in by_fraction.records] == [2, 2]
    assert by_number.records[0]["asked"] != by_number.records[1]["asked"]


@dataclass(frozen=True)
class Bad(FedAvg):
    """Client 1 sends something it must not."""

    harm: str = ""

    def client_train(self, task: Task, memory: dict, me: object) -> Reply:  # type: ignore[override]
        reply = super().client_train(task, memory, me)  # type: ignore[arg-type]
        if task.client != 1:
            return reply
        model = dict(reply.send["model"])  # type: ignore[arg-type]
        first = next(iter(model))
        if self.harm == "nan":
            model[first] = model[first] * math.nan
        elif self.harm == "shape":
            model[first] = model[first].flatten()
        elif self.harm == "missing":
            del model[first]
        elif self.harm == "no model":
            return dataclasses.replace(reply, send={})
        elif self.harm == "more":
            return dataclasses.replace(reply, send={**reply.send, "images": torch.zeros(3)})
        elif self.harm == "examples":
            return dataclasses.replace(reply, examples=math.inf)
        return dataclasses.replace(reply, send={"model": model})


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        ("nan", "holds NaN"),
        ("shape", "has shape"),
        ("missing", "is missing"),
        ("no model", "'model' is missing"),
        ("more", "'images' was not expected"),
        ("examples", "number of examples is inf"),
    ],
)
def test_a_bad_reply_is_named_and_does_not_reach_the_mean(
    harm: str, why: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tacit.runs.plan.build_method", lambda experiment, kind=None: Bad(harm=harm))
    run = tiny("fedavg", "clients", rounds=1)
    record = run.records[0]
    assert [refusal["client"] for refusal in record["refused"]] == [1]
    assert why in record["refused"][0]["why"]
    assert record["answered"] == [0, 2, 3]
    assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())


def test_declared_kinds_are_checked() -> None:
    sends = {"share": "[K]", "matrix": "[K,K]", "count": "number", "extra?": "[K]"}
    good = {"share": torch.zeros(3), "matrix": torch.zeros(3, 3), "count": 2}
    task = Task(0, {})
    assert refusal_reason(sends, task, Reply(send=good, examples=1), {}, 3) == ""
    assert "expected [3]" in refusal_reason(
        sends, task, Reply(send={**good, "share": torch.zeros(4)}, examples=1), {}, 3
    )
    assert "expected [3, 3]" in refusal_reason(
        sends, task, Reply(send={**good, "matrix": torch.zeros(3)}, examples=1), {}, 3
    )
    assert "not a number" in refusal_reason(
        sends, task, Reply(send={**good, "count": torch.zeros(1)}, examples=1), {}, 3
    )
    assert "expected [3]" in refusal_reason(
        sends, task, Reply(send={**good, "extra": torch.zeros(1)}, examples=1), {}, 3
    )


def test_a_failing_client_says_where(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Method, task: Task, memory: object, me: object) -> Reply:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(FedAvg, "client_train", fail)
    with pytest.raises(ZeroDivisionError) as caught:
        tiny("fedavg", "clients")
    assert "client 0 trained in round 0 of stage 'main'" in caught.value.__notes__[0]


def test_a_method_without_client_code_says_so(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tacit.runs.plan.build_method", lambda experiment, kind=None: Method())
    with pytest.raises(TacitError, match="does not define client_train"):
        tiny("fedavg", "clients")


def test_a_client_never_has_two_tasks_at_once() -> None:
    tasks = [Task(0, {}), Task(1, {}), Task(0, {}, 1), Task(2, {}), Task(0, {}, 2), Task(1, {}, 1)]
    split = [[place for place, _ in wave] for wave in waves(tasks)]
    assert split == [[0, 1, 3], [2, 5], [4]]


def test_evaluation_may_be_rarer_but_the_last_round_has_one(tiny: Tiny) -> None:
    run = tiny("fedavg", "clients", rounds=5, evaluate_every=2)
    assert ["accuracy" in record for record in run.records] == [False, True, False, True, True]


def test_clients_models_can_be_evaluated_too(tiny: Tiny) -> None:
    run = tiny("fedavg", "clients", rounds=2, evaluate_every=2, evaluate_clients=True, participation__number=1)
    first, last = run.records
    assert "clients_accuracy" not in first
    assert last["clients_accuracy"] == [last["accuracy"]], "one client: its model is the global one"
    assert last["clients_per_class"] == [last["per_class"]]
    several = tiny("fedavg", "clients", "several", rounds=1, evaluate_clients=True).records[0]
    assert len(several["clients_accuracy"]) == len(several["answered"]) > 1
    assert len(set(several["clients_accuracy"])) > 1


def test_reporting_rules() -> None:
    rounds = [{"round": r, "accuracy": a} for r, a in enumerate([0.1] * 5 + [0.9] + [0.5] * 10)]
    assert summarize(rounds, "best")["accuracy"] == 0.9
    assert summarize(rounds, "best")["reported_rounds"] == [5]
    assert summarize(rounds, "last-10")["accuracy"] == pytest.approx(0.5)
    assert summarize(rounds, "last-10")["accuracy_std"] == pytest.approx(0.0)
    assert summarize([], "last")["accuracy"] is None


def test_threads_are_given_back(tiny: Tiny) -> None:
    before = torch.get_num_threads()
    tiny("fedavg", "server")
    assert torch.get_num_threads() == before


def test_notes_cannot_stand_in_the_place_of_the_record(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def vain(self: FedAvg, state: dict, replies: list, hub: Hub) -> dict:
        hub.note(share=torch.tensor([0.5, math.nan]), scores=[torch.tensor(1.0), 2])
        with pytest.raises(ValueError, match="every record has that already"):
            hub.note(accuracy=0.99)
        return state

    monkeypatch.setattr(FedAvg, "server_merge", vain)
    record = tiny("fedavg", "clients").records[0]
    assert record["share"] == [0.5, None]
    assert record["scores"] == [1.0, 2]


def test_every_name_of_a_record_is_reserved(tiny: Tiny) -> None:
    record = tiny("fixmatch", "clients").records[-1]
    assert set(record) <= KEYS.keys()


def test_a_server_that_diverges_is_told_and_the_model_stays(tiny: Tiny) -> None:
    run = tiny("fedavg", "server", rounds=2, train__lr=1e6, train__clip=0.0)
    assert any("after the merge" in record["skipped"] for record in run.records)
    assert all(torch.isfinite(tensor).all() for tensor in run.weights.values())


def test_records_that_are_no_table_come_as_they_are(tiny: Tiny) -> None:
    run = tiny("fedavg", "clients", rounds=4, data__clients=6, faults__dropout=0.5)
    assert list(run["answered"]) == [record["answered"] for record in run.records]
    assert list(run["refused"]) == [[], [], [], []]


# A merge that fails


def fragile(monkeypatch: pytest.MonkeyPatch, culprits: set[int], harm: Callable[[], Any]) -> None:
    """FedAvg whose merge comes to grief whenever one of these clients is among the replies."""
    merge = FedAvg.server_merge

    def server_merge(self: FedAvg, state: Payload, replies: list[Reply], hub: Hub) -> Payload:
        merged = merge(self, state, replies, hub)
        return harm() if culprits & {reply.client for reply in replies} else merged

    monkeypatch.setattr(FedAvg, "server_merge", server_merge)


def test_the_reply_without_which_a_merge_works_is_refused(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    fragile(monkeypatch, {2}, lambda: {"model": {}}["nowhere"])
    run = tiny("fedavg", "clients")
    for record in run.records:
        assert record["answered"] == [0, 1, 3]
        (refused,) = record["refused"]
        assert refused["client"] == 2
        assert "the merge failed: KeyError" in refused["why"]
        assert "not without it" in refused["why"]
        assert not record["skipped"]


def test_a_merge_of_nonsense_is_not_taken(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not finite, whoever is left out: nobody alone is to blame, and the model stays."""
    nan = {"model": {"w": torch.tensor([float("nan")])}}
    fragile(monkeypatch, {0, 1, 2, 3}, lambda: nan)
    run = tiny("fedavg", "clients")
    assert all("NaN or infinity after the merge: the model stays" in record["skipped"] for record in run.records)


def test_a_merge_that_nobody_alone_is_to_blame_for_shows_its_author_the_error(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragile(monkeypatch, {0, 1}, lambda: [][0])
    with pytest.raises(IndexError):
        tiny("fedavg", "clients")
