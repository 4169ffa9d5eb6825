"""What a client does to its reply before it leaves, with `[privacy]`: no figures beside it, and, where clients add the
noise themselves, everything clipped and with this client's share of it."""

import dataclasses
import secrets

import torch

from tacit.contract.method import Method, Reply, Task
from tacit.contract.parties import RoundInfo, Setup
from tacit.contract.statistics import as_vector, norm_bound, statistics_of
from tacit.core import seeds
from tacit.core.payload import Payload, Weights
from tacit.core.safeguards import Privacy
from tacit.pieces.aggregate import is_learned
from tacit.pieces.privacy import clip_factor, clipped, gaussian, noise_share
from tacit.pieces.robust import shortened, update_norm

ASKED = "tacit:asked"  # goes down with a task: of how many shares this client's noise is one


def with_share(task: Task, settings: Privacy, asked: int) -> Task:
    """A task that tells, where clients add noise, of how many shares theirs is one."""
    if not (settings.on and settings.where == "clients"):
        return task
    return dataclasses.replace(task, send={**task.send, ASKED: asked})


def without_share(task: Task) -> Task:
    """The task as the method made it."""
    if ASKED not in task.send:
        return task
    return dataclasses.replace(task, send={name: value for name, value in task.send.items() if name != ASKED})


def protected(reply: Reply, method: Method, task: Task, setup: Setup, round_info: RoundInfo) -> Reply:
    """A reply as it may leave: as it is without [privacy]; else without figures, and noised if that is done here."""
    settings = setup.privacy
    if not settings.on:
        return reply
    if settings.where == "clients":
        reply = dataclasses.replace(reply, send=_noised(reply, method, task, setup, round_info))
    return dataclasses.replace(reply, examples=1.0, metrics={})


def _noised(reply: Reply, method: Method, task: Task, setup: Setup, round_info: RoundInfo) -> Payload:
    settings, generator = setup.privacy, _generator(setup, round_info, task)
    asked = max(1, int(task.number(ASKED))) if ASKED in task.send else 1
    kinds = statistics_of(method.client_sends)
    groups = {
        name: reply.weights(name)
        for name in reply.send
        if name not in kinds and not isinstance(reply.send[name], int | float | torch.Tensor)
    }
    assert settings.clip is not None
    deviation = noise_share(settings.noise * settings.clip, asked)
    send: Payload = {}
    factor = clip_factor(joint_norm(groups, task), settings.clip)
    for name, group in groups.items():
        send[name] = {
            inner: (tensor + gaussian(tensor, deviation, generator)).to(tensor.dtype)
            if is_learned(inner, tensor)
            else base_of(task, name).get(inner, tensor)
            for inner, tensor in shortened(group, base_of(task, name), factor).items()
        }
    classes = len(setup.classes)
    for name, kind in kinds.items():
        bound = norm_bound(kind, classes, settings.examples)
        vector = clipped(as_vector(reply.send.get(name), kind, classes), bound)
        vector = vector + gaussian(vector, noise_share(settings.statistics_noise * bound, asked), generator)
        send[name] = float(vector) if not kind.shape else vector
    return send


def joint_norm(groups: dict[str, Weights], task: Task) -> float:
    """The norm of a whole update: of all groups of weights together."""
    norms = [update_norm(group, base_of(task, name)) for name, group in groups.items()]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64))) if norms else 0.0


def base_of(task: Task, name: str) -> Weights:
    """The weights that were sent down under this name."""
    return task.weights(name) if name in task.send else {}


def _generator(setup: Setup, round_info: RoundInfo, task: Task) -> torch.Generator:
    """By name in a simulation. At a real site from the operating system: whoever knows the seed must not know this."""
    by_seed = setup.privacy.randomness == "seed" or (setup.privacy.randomness == "auto" and not setup.real_sites)
    if by_seed:
        who = f"client-{task.client}/{task.group}"
        return seeds.generator(setup.seed, round_info.stage, round_info.round, who, "privacy noise")
    return torch.Generator().manual_seed(secrets.randbits(63))
