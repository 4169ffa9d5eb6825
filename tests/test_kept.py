"""What clients keep: versions, crashes, bounds on the disk, and that none of it stays in memory."""

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runs import TINY, digest, timeless
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.payload import Payload
from tacit.core.settings import Experiment, Keep
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run
from tacit.runs.memory import ClientMemory

Tiny = Callable[..., Run]


def value(number: float) -> Payload:
    return {"x": torch.tensor([float(number)])}


def read(kept: ClientMemory, client: int, step: int, wave: int = 0) -> float | None:
    found = kept.read(client, step, wave)
    return float(found["x"]) if found else None  # type: ignore[arg-type]


def test_a_client_reads_the_newest_version_from_before(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path)
    assert kept.read(0, 5, 0) == {}
    kept.write(0, 2, 0, value(2))
    kept.write(0, 5, 0, value(5))
    kept.write(0, 5, 1, value(5.1))
    assert [read(kept, 0, step) for step in (2, 3, 5, 6)] == [None, 2.0, 2.0, pytest.approx(5.1)]
    assert read(kept, 0, 5, wave=1) == 5.0  # the second task of a round finds what the first kept
    assert read(kept, 1, 6) is None


def test_names_are_replaced_one_by_one(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path)
    kept.write(0, 0, 0, {"a": 1, "b": 1})
    kept.write(0, 1, 0, {"b": 2})
    assert kept.read(0, 2, 0) == {"a": 1, "b": 2}
    kept.write(0, 2, 0, {})
    assert kept.read(0, 3, 0) == {"a": 1, "b": 2}


def test_a_round_that_was_killed_finds_what_it_found_the_first_time(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path)
    kept.write(0, 3, 0, {"a": 3, "b": 3})
    kept.write(0, 7, 0, {"a": 7, "b": 7})
    kept.write(0, 9, 0, {"a": 9})  # killed here: b of round 9 was never written, and round 9 is run again
    kept.forget(9)
    assert kept.read(0, 9, 0) == {"a": 7, "b": 7}
    kept.write(0, 9, 0, {"a": 9, "b": 9})
    assert kept.read(0, 10, 0) == {"a": 9, "b": 9}


def test_a_file_that_was_being_written_is_not_read(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path)
    kept.write(0, 1, 0, value(1))
    (tmp_path / "client-0" / ".x@2-0.safetensors.123").write_bytes(b"half of")
    (tmp_path / "client-0" / "notes.txt").write_text("not ours")
    kept.forget(3)
    assert read(kept, 0, 3) == 1.0
    assert kept.nbytes() == (tmp_path / "client-0" / "x@1-0.safetensors").stat().st_size


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path)
    kept.write(0, 1, 0, value(1))
    path = tmp_path / "client-0" / "x@1-0.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(TacitError, match=r"x@1-0\.safetensors is damaged"):
        kept.read(0, 2, 0)


def test_what_no_round_can_ask_for_is_removed(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path)
    for step in range(5):
        kept.forget(step)
        kept.write(0, step, 0, value(step))
        files = sorted(path.name for path in (tmp_path / "client-0").iterdir())
        assert files == [f"x@{s}-0.safetensors" for s in range(max(0, step - 2), step + 1)]
    kept.forget(5)  # the run may still go back to round 4, which begins with what was kept in round 3
    assert sorted(path.name for path in (tmp_path / "client-0").iterdir()) == [f"x@{s}-0.safetensors" for s in (3, 4)]
    kept.forget(6)
    assert [path.name for path in (tmp_path / "client-0").iterdir()] == ["x@4-0.safetensors"]


def test_a_client_that_comes_back_after_300_rounds_finds_its_memory(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path)
    kept.write(17, 4, 0, {"local": {"w": torch.arange(6.0)}})
    for step in range(5, 305):
        kept.forget(step)
        kept.write(step % 10, step, 0, value(step))
    back = kept.read(17, 305, 0)
    assert torch.equal(back["local"]["w"], torch.arange(6.0))  # type: ignore[index]


def test_memory_does_not_grow_with_clients_that_are_not_active(tmp_path: Path) -> None:
    """Thirty clients keep a megabyte each; only one client's is ever in memory."""

    def live() -> int:
        gc.collect()
        return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor)

    kept = ClientMemory(tmp_path)
    before, most = live(), 0
    for client in range(30):
        kept.read(client - 1, client, 0)
        kept.write(client, client, 0, {"local": {"w": torch.full((250_000,), float(client))}})
        most = max(most, live())
    assert kept.nbytes() > 30_000_000
    assert most - before < 3_000_000


def test_half_precision_halves_the_weights_and_nothing_else(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(5000, generator=generator), "steps": torch.tensor(70_001)}
    weights["w"][0] = 1e8
    keep: Payload = {"local": weights, "sums": torch.tensor([1 / 3]), "number": 0.1}
    full, half = ClientMemory(tmp_path / "full"), ClientMemory(tmp_path / "half", Keep(half=True))
    full.write(0, 0, 0, keep)
    half.write(0, 0, 0, keep)
    assert full.nbytes() - half.nbytes() == pytest.approx(10_000, abs=200)
    back = half.read(0, 1, 0)
    local = back["local"]
    assert isinstance(local, dict)
    assert local["w"].dtype == torch.float32
    assert torch.allclose(local["w"][1:], weights["w"][1:], rtol=1e-3, atol=1e-6)
    assert local["w"][0] == 65504  # the largest half: finite, where a cast would give infinity
    assert local["steps"] == 70_001
    assert torch.equal(back["sums"], torch.tensor([1 / 3]))  # type: ignore[arg-type]
    assert back["number"] == 0.1
    assert torch.equal(full.read(0, 1, 0)["local"]["w"], weights["w"])  # type: ignore[index]


def test_only_the_latest_clients_keep(tmp_path: Path) -> None:
    kept = ClientMemory(tmp_path, Keep(latest=2))
    for step, clients in enumerate([(0, 1), (2,), (0,)]):
        kept.forget(step)
        for client in clients:
            kept.write(client, step, 0, value(step))
    kept.forget(3)
    assert [read(kept, client, 3) for client in (0, 1, 2)] == [2.0, None, 1.0]
    assert not (tmp_path / "client-1").exists()
    kept.write(5, 3, 0, value(3))
    kept.write(4, 3, 0, value(3))
    kept.write(3, 3, 0, value(3))
    kept.forget(4)  # three in one round, room for two: the lower numbers
    assert [client for client in range(6) if read(kept, client, 4) is not None] == [3, 4]


def simulate(folder: Path, seed: int, kills: random.Random | None) -> tuple[list[tuple[int, int, object]], int]:
    """Twenty rounds in which three of eight clients keep; with kills, rounds are begun several times."""
    kept, chance, seen = ClientMemory(folder, Keep(latest=4)), random.Random(seed), []
    for step in range(20):
        tasks = [(client, wave) for wave in range(2) for client in chance.sample(range(8), 3)]
        attempts = kills.randrange(3) if kills else 0
        for attempt in range(attempts + 1):
            kept.forget(step)
            stop = kills.randrange(len(tasks)) if kills and attempt < attempts else len(tasks)
            found = []
            for client, wave in tasks[:stop]:
                found.append((step, client, read(kept, client, step, wave)))
                kept.write(client, step, wave, value(1000 * step + 10 * client + wave))
        seen += found
    kept.forget(20)
    return seen, kept.nbytes()


@pytest.mark.parametrize("seed", range(5))
def test_bounded_memory_is_the_same_after_kills(seed: int, tmp_path: Path) -> None:
    whole = simulate(tmp_path / "whole", seed, None)
    assert any(found is None for step, _, found in whole[0] if step > 10)  # somebody was forgotten
    assert simulate(tmp_path / "killed", seed, random.Random(seed)) == whole


def remembering(latest: int = 2, half: bool = True, **settings: object) -> Experiment:
    """A method with a memory, two of five clients a round, room for two."""
    return resolve(
        {"method.name": "bsemifl", "method.preset": "smoke", "data.placement": "server"},
        TINY,
        {"rounds": 6, "data.clients": 5, "participation.number": 2, "keep.latest": latest, "keep.half": half},
        settings,
    )


def test_a_run_with_bounds_resumes_exactly_on_any_backend(tmp_path: Path) -> None:
    whole = run_experiment(remembering(), tmp_path / "whole")
    free = run_experiment(remembering(latest=0, half=False), tmp_path / "free")
    shares = [[record["client_metrics"]["global_weight"] for record in run.records] for run in (whole, free)]
    assert shares[0] != shares[1]  # somebody who was forgotten labelled with the global model alone
    assert 0 < whole.records[-1]["memory_bytes"] < 0.5 * free.records[-1]["memory_bytes"]
    assert whole.summary is not None
    assert whole.summary["memory_bytes"] == max(record["memory_bytes"] for record in whole.records)

    class Stop:
        def start(self, plan: object, done: int) -> None: ...
        def client_done(self, round_info: object, done: int, asked: int) -> None:
            if round_info.step == 4 and done == 1:  # type: ignore[attr-defined]
                raise KeyboardInterrupt

        def round_done(self, record: object) -> None: ...
        def finish(self, summary: object) -> None: ...

    with pytest.raises(KeyboardInterrupt):
        run_experiment(remembering(), tmp_path / "stopped", watcher=Stop())
    pool = remembering(**{"backend.name": "pool", "backend.workers": 2})
    resumed = run_experiment(pool, tmp_path / "stopped", resume=True)
    assert digest(resumed) == digest(whole)
    assert timeless(resumed) == timeless(whole)
    with pytest.raises(TacitError, match=r"keep\.latest: 2 in the run, 3 now"):
        run_experiment(remembering(latest=3), tmp_path / "whole", resume=True)


def test_a_method_without_memory_needs_no_disk(tiny: Tiny) -> None:
    run = tiny("fedavg", "clients")
    assert [record["memory_bytes"] for record in run.records] == [0, 0]
    assert not (run.folder / "kept").exists()
