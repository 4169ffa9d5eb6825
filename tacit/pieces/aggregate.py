"""From many models to one."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def shares(examples: Sequence[float]) -> list[float]:
    """Each party's share of the whole: n_i / Σ n.

    >>> shares([30, 10])
    [0.75, 0.25]
    >>> shares([0, 0])
    [0.0, 0.0]
    """
    total = float(sum(examples))
    return [n / total if total > 0 else 0.0 for n in examples]


def labeled_shares(examples: Sequence[float], labeled: Sequence[bool], share: float) -> list[float]:
    """Shares in which the labelled parties together get `share` and the others the rest, each group by its examples.

    Where they have more than that by their examples they keep it: the share raises their weight, it never lowers it.
    Where one of the groups is empty or learned nothing, the other gets all.

    >>> labeled_shares([10, 60, 30], [True, False, False], 0.5)
    [0.5, 0.333..., 0.166...]
    >>> labeled_shares([75, 15, 10], [True, False, False], 0.5)
    [0.75, 0.15, 0.1]
    >>> labeled_shares([10, 0, 0], [True, False, False], 0.5)
    [1.0, 0.0, 0.0]
    """
    inside = [n if has else 0.0 for n, has in zip(examples, labeled, strict=True)]
    outside = [0.0 if has else n for n, has in zip(examples, labeled, strict=True)]
    if not (sum(inside) > 0 and sum(outside) > 0):
        return shares(examples)
    share = max(share, sum(inside) / float(sum(examples)))
    return [share * a + (1.0 - share) * b for a, b in zip(shares(inside), shares(outside), strict=True)]


def normalized_shares(weights: Sequence[float], reaches: Sequence[float]) -> list[float]:
    """Normalised averaging (FedNova, Wang et al., 2020, Eq. 7): each weight over how far its party's steps reach.

    Who holds five times the images counts five times as much, and takes five times the steps: a mean of models counts
    it twice over. Here each direction counts by its images alone. Of the paper's free choice of τ_eff, the length of
    the common step, it is that with which the weights sum to what they were: what is made stays a mean of models.

    >>> normalized_shares([0.5, 0.25, 0.25], [4.0, 1.0, 1.0])               # .125, .25, .25 of .625
    [0.2, 0.4, 0.4]
    >>> normalized_shares([0.75, 0.25, 0.0], [2.0, 2.0, 0.0])               # alike: nothing to do; none: no weight
    [0.75, 0.25, 0.0]
    """
    slowed = [w / reach if reach > 0 else 0.0 for w, reach in zip(weights, reaches, strict=True)]
    return [sum(weights) * share for share in shares(slowed)]


def status_shares(status: Sequence[float]) -> list[float]:
    """Learning status-aware shares ((FL)² Eq. 15): (1 − τ_k) / Σ (1 − τ); the less sure a party is, the more it counts.

    Where all are entirely sure, all count alike.

    >>> status_shares([0.75, 0.25])
    [0.25, 0.75]
    >>> status_shares([1.0, 1.0])
    [0.5, 0.5]
    """
    doubts = [max(0.0, 1.0 - tau) for tau in status]
    return shares(doubts if any(doubts) else [1.0] * len(doubts))


def weighted_mean(models: Iterable[Weights], weights: Sequence[float]) -> Weights:
    """Σ w_i θ_i, one model in memory at a time, in the order given.

    The models may come from a generator that fetches them from disk. One of weight zero changes nothing, whatever
    is in it. Whole-number buffers (BN's step counter) are averaged, rounded, and keep their type.

    >>> a = {"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(10)}
    >>> b = {"w": torch.tensor([3.0, 6.0]), "steps": torch.tensor(21)}
    >>> weighted_mean([a, b], [0.75, 0.25])
    {'w': tensor([1.5000, 3.0000]), 'steps': tensor(13)}
    """
    total: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    for tensors, weight in zip(models, weights, strict=True):
        if weight == 0:
            continue
        for name, tensor in tensors.items():
            if name not in total:
                types[name] = tensor.dtype
                wide = tensor if tensor.is_floating_point() else tensor.double()
                total[name] = wide * weight
            else:
                total[name].add_(tensor, alpha=weight)
    if not total:
        raise ValueError("the mean of no models: every weight is zero")
    return {
        name: tensor if types[name].is_floating_point else tensor.round().to(types[name])
        for name, tensor in total.items()
    }


def residual(older: Weights, newer: Weights, share: float) -> Weights:
    """Residual weight connection (CBAFed Eq. 1 at clients, Eq. 21 at the server): share · older + (1 − share) · newer.

    >>> residual({"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}, 0.75)
    {'w': tensor([1.2500])}
    """
    return weighted_mean([older, newer], [share, 1.0 - share])


def is_learned(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of a model is learned by steps: no counter, none of BN's running statistics.

    A step beyond a mean could make a variance negative.

    >>> is_learned("fc.bias", torch.zeros(1)), is_learned("bn.running_var", torch.zeros(1))
    (True, False)
    """
    return tensor.is_floating_point() and not name.endswith(("running_mean", "running_var"))


def server_momentum(old: Weights, mean: Weights, velocity: Weights, momentum: float) -> tuple[Weights, Weights]:
    """The server's step with momentum (learning rate 1): v ← m·v + (old − mean), new = old − v.

    Whole-number buffers and BN's running statistics take the mean's value: a step beyond the mean could make a
    variance negative. An empty velocity is zero: the first step goes to the mean.

    >>> old, mean = {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.0])}
    >>> new, velocity = server_momentum(old, mean, {}, 0.5)
    >>> new, velocity
    ({'w': tensor([0.])}, {'w': tensor([1.])})
    >>> server_momentum(new, mean, velocity, 0.5)[0]
    {'w': tensor([-0.5000])}
    """
    new, after = {}, {}
    for name, tensor in old.items():
        if not is_learned(name, tensor):
            new[name] = mean[name]
            continue
        step = tensor - mean[name]
        after[name] = step + momentum * velocity[name] if name in velocity else step
        new[name] = tensor - after[name]
    return new, after


def group_mean(members: Iterable[Weights], replica: Weights | None = None) -> Weights:
    """The plain mean of a group's models and, as one more of them, a replica of the labelled party's (FedRGD).

    >>> one, two, server = {"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}, {"w": torch.tensor([8.0])}
    >>> group_mean([one, two]), group_mean([one, two], server)
    ({'w': tensor([2.])}, {'w': tensor([4.])})
    """
    models = [*members] if replica is None else [*members, replica]
    return weighted_mean(models, shares([1.0] * len(models)))


def gradient_diversity(start: Weights, models: Iterable[Weights]) -> float:
    """How little the parties' steps Δ_i = θ_i − start agree: Σ ‖Δ_i‖² / ‖Σ Δ_i‖². All alike: 1/n; at right angles: 1.

    Whole-number buffers do not count. If the steps cancel out, or nobody moved, it is not a number.

    >>> start = {"w": torch.tensor([0.0, 0.0])}
    >>> east, north = {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}
    >>> gradient_diversity(start, [east, north]), gradient_diversity(start, [east, east])
    (1.0, 0.5)
    """
    alone = 0.0
    total: Weights = {}
    for model in models:
        for name in (name for name, tensor in start.items() if tensor.is_floating_point()):
            step = (model[name] - start[name]).double()
            alone += float(step.square().sum())
            total[name] = total[name] + step if name in total else step
    together = sum(float(step.square().sum()) for step in total.values())
    return alone / together if together > 0 else math.nan


def stacked(models: Sequence[Weights]) -> Weights:
    """Several models as one group of tensors, each with a first axis for the model: how a list of them travels.

    >>> stacked([{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0])}])
    {'w': tensor([[1.], [2.]])}
    """
    return {name: torch.stack([model[name] for model in models]) for name in models[0]}


def unstacked(models: Weights) -> list[Weights]:
    """The models that `stacked` put together; none from an empty group.

    >>> unstacked({"w": torch.tensor([[1.0], [2.0]])}), unstacked({})
    ([{'w': tensor([1.])}, {'w': tensor([2.])}], [])
    """
    count = len(next(iter(models.values()), ()))
    return [{name: tensor[i] for name, tensor in models.items()} for i in range(count)]
