"""Tiny real experiments, and how to compare their outcomes."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tacit.config.resolve import resolve
from tacit.contract.parties import Client, Hub, NetPool, RoundInfo
from tacit.data.federation import Federation
from tacit.runs.plan import Plan, prepare
from tacit.testing.trial import TINY as TINY
from tacit.testing.trial import digest as digest
from tacit.testing.trial import timeless as timeless


def outside(name: str) -> Path:
    """A file from outside the repository, out of the folder that TACIT_TEST_DATA names; read it, write nothing there.

    `make test` lets the variable name ../shared/data, where the project's own machines have that folder.
    """
    folder = os.environ.get("TACIT_TEST_DATA", "")
    path = Path(folder) / name
    if not folder or not path.is_file():
        pytest.skip(f"{name} is not part of the repository: let TACIT_TEST_DATA name the folder that holds it")
    return path


World = tuple[Plan, Federation]


def world_of(method: str, placement: str, **settings: Any) -> World:
    """A method's smoke experiment before its first round, for tests that call a verb of their own."""
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    layers = {"method.name": method, "method.preset": "smoke", "data.placement": placement}
    plan = prepare(resolve(layers, TINY, changes))
    return plan, Federation(plan.dataset, plan.split, plan.setup.device)


def client(world: World, number: int = 0) -> Client:
    plan, federation = world
    round_info = RoundInfo("main", 1, 4, 1)
    return Client(plan.setup, federation.client_shard(number), round_info, number, 0, NetPool(plan.setup))


def hub(world: World) -> Hub:
    plan, federation = world
    return Hub(plan.setup, federation.server_shard(), RoundInfo("main", 0, 4, 0), NetPool(plan.setup))


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two groups of weights agree in every name and every bit."""
    return set(one) == set(other) and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
