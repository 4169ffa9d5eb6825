"""Many replies at once: beyond a budget they wait on disk, and the mean is the same."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from runs import digest
from tacit.backends import base
from tacit.backends.base import Inbox, Outcome
from tacit.contract.method import Reply, mean_model
from tacit.core import payload
from tacit.core.errors import TacitError
from tacit.core.payload import OnDisk, weights_in
from tacit.runs.folder import Run

Tiny = Callable[..., Run]


def outcome(client: int) -> Outcome:
    generator = torch.Generator().manual_seed(client)
    model = {"w": torch.randn(1000, generator=generator), "steps": torch.tensor(client)}
    send = {"model": model, "counts": torch.full((3,), float(client)), "loss": 0.5}
    return Outcome(Reply(send=send, examples=1 + client, client=client), None, 0.0)


@pytest.mark.parametrize(("fitting", "on_disk"), [(5, False), (4, True)])
def test_what_is_too_much_lies_on_disk_and_nothing_changes(tmp_path: Path, fitting: int, on_disk: bool) -> None:
    size = payload.nbytes(outcome(0).reply.send)
    inbox = Inbox(tmp_path / "replies", budget=fitting * size)
    inbox.open(expected=5)
    for client in (4, 0, 3, 1, 2):  # as they became ready
        inbox.put(client, outcome(client))
    waiting = inbox.in_order()
    assert [one.reply.client for one in waiting] == [0, 1, 2, 3, 4]
    assert [isinstance(one.reply.send["model"], OnDisk) for one in waiting] == [on_disk] * 5, "all, or none"
    for client, one in enumerate(waiting):
        expected = outcome(client).reply.send
        assert payload.nbytes(one.reply.send) == payload.nbytes(expected)
        assert list(one.reply.send) == list(expected)
        assert torch.equal(weights_in(one.reply.send, "model")["w"], weights_in(expected, "model")["w"])
        assert one.reply.send["counts"] is not None
        assert payload.difference(one.reply.send["model"], weights_in(expected, "model")) == ""
        assert payload.first_not_finite(one.reply.send) == ""
    weights = [0.1, 0.2, 0.3, 0.25, 0.15]
    mean = mean_model([one.reply for one in waiting], weights)
    plain = mean_model([outcome(client).reply for client in range(5)], weights)
    assert all(torch.equal(mean[name], plain[name]) for name in plain)
    assert mean["steps"].dtype == torch.int64
    inbox.clear()
    assert len(inbox) == 0
    assert not (tmp_path / "replies").exists()


def test_a_bad_reply_is_found_on_disk_too(tmp_path: Path) -> None:
    bad = outcome(0)
    weights_in(bad.reply.send, "model")["w"][7] = float("nan")
    inbox = Inbox(tmp_path / "replies", budget=0)
    inbox.open(expected=1)
    inbox.put(0, bad)
    assert payload.first_not_finite(inbox.in_order()[0].reply.send) == "model/w"


def test_a_parcel_is_the_payload_and_nobody_can_change_it_for_another(tmp_path: Path) -> None:
    send = {"shares": torch.tensor([0.5, 0.5]), **outcome(3).reply.send, "empty": {}}
    parcel = pickle.loads(pickle.dumps(payload.pack(send, tmp_path / "new" / "task.safetensors")))
    assert len(pickle.dumps(parcel)) < payload.nbytes(send), "the model does not travel with it"
    mine, theirs = payload.at_hand(parcel.open()), payload.at_hand(parcel.open())
    assert list(mine) == list(send)
    assert dict(payload.tensors(mine)).keys() == dict(payload.tensors(send)).keys()
    assert all(torch.equal(tensor, dict(payload.tensors(send))[name]) for name, tensor in payload.tensors(mine))
    assert (mine["loss"], mine["empty"]) == (0.5, {})
    weights_in(mine, "model")["w"].zero_()  # a client trains on what it was sent
    assert torch.equal(weights_in(theirs, "model")["w"], weights_in(send, "model")["w"])
    assert torch.equal(weights_in(parcel.open(), "model")["w"], weights_in(send, "model")["w"])
    payload.pack({"model": {"w": torch.zeros(2)}}, tmp_path / "new" / "task.safetensors")  # the next task's
    assert torch.equal(weights_in(theirs, "model")["w"], weights_in(send, "model")["w"])


@pytest.mark.parametrize("backend", ["local", "pool"])
@pytest.mark.parametrize("method", ["cbafed", "feddb"])
def test_a_run_with_all_replies_on_disk_is_the_same_run(
    tiny: Tiny, method: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"backend__name": backend, "backend__workers": 2, "evaluate_clients": True}
    plain = tiny(method, "some-clients", "plain", **settings)
    monkeypatch.setattr(base.Inbox.__init__, "__defaults__", (0,))
    aside = tiny(method, "some-clients", "aside", **settings)
    assert digest(aside) == digest(plain)
    assert [r["clients_accuracy"] for r in aside.records] == [r["clients_accuracy"] for r in plain.records]
    assert [r["bytes_up"] for r in aside.records] == [r["bytes_up"] for r in plain.records]
    assert not (aside.folder / "replies").exists()
    assert not (plain.folder / "replies").exists()
    assert all(record["cpu_seconds"] > 0 for run in (plain, aside) for record in run.records)


def test_a_full_disk_is_said_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(flat: object, path: Path, **more: object) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    payload.write(tmp_path / "state.safetensors", {"n": 1})
    monkeypatch.setattr(payload, "save_file", full)
    for write in (payload.pack, lambda send, path: payload.write(path, send)):
        with pytest.raises(TacitError, match=r"cannot be written: No space left.*Make room") as caught:
            write({"model": {"w": torch.ones(3)}}, tmp_path / "state.safetensors")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value), "it comes back from a worker"
    monkeypatch.undo()
    assert payload.read(tmp_path / "state.safetensors") == {"n": 1}, "the old content"
    assert not list(tmp_path.glob(".*")), "half a file"


def test_what_is_sent_to_many_is_written_once(tmp_path: Path) -> None:
    model, written = {"w": torch.ones(3)}, payload.Written()
    parcels = [
        payload.pack({"model": model, "own": {"w": torch.full((3,), float(k))}}, tmp_path / f"{k}", written)
        for k in range(3)
    ]
    assert len({parcel.groups["model"].path for parcel in parcels}) == 1
    assert [payload.weights_in(parcel.open(), "own")["w"][0].item() for parcel in parcels] == [0.0, 1.0, 2.0]
    assert len(list(tmp_path.iterdir())) == 4
