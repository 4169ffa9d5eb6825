"""What the tests share: tiny real experiments on the embedded digits."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from runs import TINY
from tacit.config.resolve import resolve
from tacit.engine.run import run_experiment
from tacit.runs.folder import Run

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Flower's processes wait more than they work: begun first, they do not keep everybody waiting at the end."""
    items.sort(key=lambda item: item.path.name != "test_sites_flower.py")


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Run]:
    """Run a method with its smoke preset: tiny("fixmatch", "server", rounds=1)."""

    def start(method: str, placement: str = "server", name: str = "run", **settings: Any) -> Run:
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        experiment = resolve(
            {"method.name": method, "method.preset": "smoke", "data.placement": placement}, TINY, changes
        )
        return run_experiment(experiment, tmp_path / name)

    return start
