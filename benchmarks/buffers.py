"""Whether flat buffers and a fused optimiser pay: ten ResNet-18s averaged, one put into a net, one step of SGD.

*Flat* means all parameters of a model in one long tensor. tacit keeps models as named tensors and adds them up in
place; a flat buffer is measured beside it, so that it can be seen what it would gain. CPU time, one thread.
"""

import copy
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.reference import mean_of
from benchmarks.timing import Row, Spent, Work, interleaved, ratio, single_thread
from tacit import nets
from tacit.nets.optimizer import sgd
from tacit.pieces.aggregate import shares, weighted_mean
from tacit.pieces.train import weights_of

TITLE = "Buffers and steps"
CPU = torch.device("cpu")
SIZE = 28


def new_net(name: str) -> nn.Module:
    net = nets.build(name, classes=10, channels=1, size=SIZE, norm="bn", generator=torch.Generator().manual_seed(0))
    return net.arrange(CPU, SIZE)


def flat_mean(models: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = models[0] * weights[0]
    for model, weight in zip(models[1:], weights[1:], strict=True):
        total.add_(model, alpha=weight)
    return total


def several(work: Work, calls: int) -> Work:
    """The same thing so many times: one time would be too short to measure."""
    return lambda: [work() for _ in range(calls)]


def measure(name: str = "resnet18", models: int = 10, calls: int = 5, times: int = 7) -> list[Row]:
    with single_thread():
        return [
            *averaging(name, models, calls, times),
            *syncing(name, 4 * calls, times),
            *stepping(name, 4 * calls, times),
        ]


def averaging(name: str, models: int, calls: int, times: int) -> list[Row]:
    replies = [weights_of(new_net(name)) for _ in range(models)]
    long = [torch.cat([tensor.flatten().float() for tensor in reply.values()]) for reply in replies]
    weights = shares([1.0 + number for number in range(models)])
    works = {
        "ours": several(lambda: weighted_mean(replies, weights), calls),
        "loop": several(lambda: mean_of(replies, weights), calls),
        "flat": several(lambda: flat_mean(long, weights), calls),
    }
    spent = interleaved(works, times)
    what, took = f"the mean of {models} {name}", f"{milliseconds(spent['ours'], calls)} ms"
    return [
        ratio(f"{what}: state_dict loop / ours", spent["loop"], spent["ours"], note=took),
        ratio(f"{what}: ours / flat buffers", spent["ours"], spent["flat"], note=took),
    ]


def syncing(name: str, calls: int, times: int) -> list[Row]:
    """Into a net that is there already, against a copy of the whole net, and against one copy of a long tensor."""
    net, weights = new_net(name), weights_of(new_net(name))
    long = torch.cat([tensor.flatten().float() for tensor in weights.values()])
    target = torch.empty_like(long)
    works = {
        "ours": several(lambda: net.load_state_dict(weights), calls),
        "copy": several(lambda: copy.deepcopy(net), calls),
        "flat": several(lambda: target.copy_(long), calls),
    }
    spent = interleaved(works, times)
    what, took = f"weights into a {name}", f"{milliseconds(spent['ours'], calls)} ms"
    return [
        ratio(f"{what}: deepcopy / ours", spent["copy"], spent["ours"], note=took),
        ratio(f"{what}: ours / flat buffer", spent["ours"], spent["flat"], note=took),
    ]


def stepping(name: str, calls: int, times: int, batch: int = 10) -> list[Row]:
    """The optimiser's step alone, and a whole training step of ten images."""
    settings: dict[str, Any] = {"lr": 1e-4, "momentum": 0.9, "weight_decay": 5e-4}
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 1, SIZE, SIZE, generator=generator)
    y = torch.randint(0, 10, (batch,), generator=generator)
    alone: dict[str, Work] = {}
    whole: dict[str, Work] = {}
    for kind in ("ours", "torch"):
        net = new_net(name)
        optimizer = sgd(net, **settings) if kind == "ours" else torch.optim.SGD(net.parameters(), **settings)

        def train(net: nn.Module = net, optimizer: torch.optim.Optimizer = optimizer) -> None:
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

        train()  # so that there are gradients and momentum
        alone[kind], whole[kind] = several(optimizer.step, calls), several(train, calls)
    steps, trained = interleaved(alone, times), interleaved(whole, times)
    return [
        ratio(
            f"SGD's step, {name}: torch's / ours",
            steps["torch"],
            steps["ours"],
            note=f"{milliseconds(steps['ours'], calls)} ms",
        ),
        ratio(
            f"a training step of {batch} images, {name}: torch's SGD / ours",
            trained["torch"],
            trained["ours"],
            note=f"{milliseconds(trained['ours'], calls)} ms",
        ),
    ]


def milliseconds(spent: Sequence[Spent], calls: int) -> str:
    """The median of one call."""
    return f"{1000 * median(one.cpu for one in spent) / calls:.1f}"
