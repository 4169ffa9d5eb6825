"""Equal numbers within one type of CPU: where strides could break that, and what is said when the type changes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from runs import TINY
from tacit import nets
from tacit.config.resolve import resolve
from tacit.core import payload
from tacit.core.machine import cpu_type
from tacit.engine import loop
from tacit.engine.run import run_experiment
from tacit.methods.rscfed import model_distance
from tacit.pieces.aggregate import gradient_diversity
from tacit.pieces.train import weights_of
from tacit.runs.plan import Plan
from tacit.runs.watchers import NullWatcher


@pytest.mark.parametrize("name", ["cnn-16", "resnet18", "wrn-10-1", "vit-tiny"])
def test_weights_lie_in_memory_as_those_that_travelled(name: str) -> None:
    """Sums over them run in the same order in every backend, whatever layout the net trains in."""

    def weights(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        net = nets.build(name, classes=10, channels=3, size=32, generator=generator)
        return weights_of(net.arrange(torch.device("cpu"), 32))

    one, other = weights(0), weights(1)
    travelled = payload.weights_in(payload.from_bytes(payload.to_bytes({"model": other})), "model")
    assert all(tensor.is_contiguous() for tensor in one.values())
    assert {name: t.stride() for name, t in other.items()} == {name: t.stride() for name, t in travelled.items()}
    assert model_distance(one, other) == model_distance(one, travelled)
    assert gradient_diversity(one, [other, one]) == gradient_diversity(one, [travelled, one])


class Stop(NullWatcher):
    """Stops after the first round, and keeps what it was told."""

    def __init__(self) -> None:
        self.warnings: tuple[str, ...] = ()

    def start(self, plan: Plan, done: int) -> None:
        self.warnings = plan.warnings

    def round_done(self, record: Mapping[str, Any]) -> None:
        if record["step"] == 0:
            raise KeyboardInterrupt


def test_going_on_with_another_type_of_cpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = resolve({"method.name": "fedavg", "method.preset": "smoke"}, TINY)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(loop, "cpu_type", lambda: "Cray X-MP, torch 2.6.0")
        with pytest.raises(KeyboardInterrupt):
            run_experiment(experiment, tmp_path / "run", watcher=Stop())
    watcher = Stop()
    run = run_experiment(experiment, tmp_path / "run", resume=True, watcher=watcher)
    assert any("computed on Cray X-MP" in warning and cpu_type() in warning for warning in watcher.warnings)
    assert [record["cpu"] for record in run.records] == ["Cray X-MP, torch 2.6.0", cpu_type()]
    assert run.summary is not None
    assert run.summary["cpu"] == ["Cray X-MP, torch 2.6.0", cpu_type()]
    assert any("Cray X-MP" in warning for warning in run.summary["warnings"])


def test_going_on_with_the_same_type_says_nothing(tmp_path: Path) -> None:
    experiment = resolve({"method.name": "fedavg", "method.preset": "smoke"}, TINY)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(experiment, tmp_path / "run", watcher=Stop())
    watcher = Stop()
    run_experiment(experiment, tmp_path / "run", resume=True, watcher=watcher)
    assert not any("computed on" in warning for warning in watcher.warnings)
