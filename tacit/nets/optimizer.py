"""One step down the gradient: the optimiser, its momentum, clipping, and steps that leave dead taps alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tacit.nets.live_taps import TappedConv2d, matrices_of

Pace = Callable[[float, float], float]  # from the share of a round that is done, and a step's share of it, to a rate


class SGD(torch.optim.SGD):
    """Stochastic gradient descent in its fused form, on each parameter as it lies in memory.

    The fused step of PyTorch first copies what is not contiguous; so it is shown such parameters with their dimensions
    in the order of memory, where they are.

    Its rate may change from step to step (`pace`), as soon as it was told how many steps there will be (`expect`). What
    else than the loss moves the weights (`stay_near`, `give_correction`) is added to the gradients after clipping, as
    weight decay is.

    `factors`: of each parameter, by what the rate is multiplied for it (none: 1 for all).

    >>> weights = [nn.Parameter(torch.tensor([1.0])) for _ in range(2)]
    >>> optimizer = SGD(weights, lr=0.5, momentum=0.5, factors=(1.0, 0.1))
    >>> for _ in range(2):                                      # 1 − 0.5 · 1 − 0.5 · (1 + 0.5); a tenth of the way
    ...     for weight in weights: weight.grad = torch.tensor([1.0])
    ...     _ = optimizer.step()
    >>> [round(weight.item(), 4) for weight in weights], optimizer.rates
    ([-0.25, 0.875], [0.5, 0.5])
    """

    def __init__(self, parameters: Iterable[nn.Parameter], factors: Sequence[float] = (), **settings: Any) -> None:
        self.shown = list(parameters)
        self.factors = list(factors) or [1.0] * len(self.shown)
        self.rate = float(settings["lr"])
        self.orders = [in_memory_order(p) for p in self.shown]
        self.stored = [
            p if o is None else nn.Parameter(p.data.permute(o)) for p, o in zip(self.shown, self.orders, strict=True)
        ]
        self.leaves: list[nn.Parameter] = []  # they stand in for some of `shown` for a while: see live_taps_only
        self.rates: list[float] = []  # of the steps so far
        self.pace: Pace | None = None
        self.expected = 0  # steps in all; 0: not known, so that the rate stays
        self.pull, self.anchors = 0.0, list[Tensor]()
        self.corrections: list[Tensor] = []
        by_factor: dict[float, list[nn.Parameter]] = {}
        for parameter, factor in zip(self.stored, self.factors, strict=True):
            by_factor.setdefault(factor, []).append(parameter)
        groups = [{"params": same, "lr": self.rate * factor, "factor": factor} for factor, same in by_factor.items()]
        super().__init__(groups if len(groups) > 1 else self.stored, fused=True, **settings)

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return len(self.rates)

    def expect(self, steps: int) -> None:
        """So many steps there will be; who says it first is believed. Any further ones are at the last one's rate."""
        self.expected = self.expected or steps

    def stay_near(self, pull: float) -> None:
        """FedProx: pull/2 · ‖w − w₀‖² is added to the loss (Li et al., 2020, Eq. 2), w₀ the weights of this moment.

        >>> weight = nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = SGD([weight], lr=0.5)
        >>> optimizer.stay_near(0.5)
        >>> for _ in range(2):                                  # 1 − 0.5 · 2, then 0 − 0.5 · (2 + 0.5 · (0 − 1))
        ...     weight.grad = torch.tensor([2.0])
        ...     _ = optimizer.step()
        >>> weight.data
        tensor([-0.7500])
        """
        self.pull, self.anchors = pull, [p.detach().clone() for p in self.shown] if pull else []

    @property
    def moved_by_loss_alone(self) -> bool:
        """Whether a weight without a gradient is moved by nothing but weight decay and momentum."""
        return not (self.anchors or self.corrections)

    @property
    def one_rate(self) -> bool:
        """Whether all parameters have the same."""
        return len(self.param_groups) == 1

    @property
    def reach(self) -> float:
        """How far the steps so far would have taken a weight whose gradient was −1 all the time.

        Without momentum the sum of the rates, K·η for K steps at a rate η.

        >>> weight = nn.Parameter(torch.tensor([0.0]))
        >>> optimizer = SGD([weight], lr=0.5, momentum=0.5)
        >>> for _ in range(2):                                  # 0.5, then 0.5 · (1 + 0.5)
        ...     weight.grad = torch.tensor([-1.0])
        ...     _ = optimizer.step()
        >>> optimizer.reach, weight.data
        (1.25, tensor([1.2500]))
        """
        return reach(self.rates, self.param_groups[0]["momentum"], self.param_groups[0]["nesterov"])

    def step(self, closure: Any = None) -> Any:
        if self.pace is not None and self.expected:
            self.rate = self.pace(min(self.steps, self.expected - 1) / self.expected, 1 / self.expected)
            for group in self.param_groups:
                group["lr"] = self.rate * group.get("factor", 1.0)
        self.rates.append(self.param_groups[0]["lr"] if self.one_rate else self.rate)
        if not self.moved_by_loss_alone:
            self._add_to_gradients()
        for shown, stored, order in zip(self.shown, self.stored, self.orders, strict=True):
            if order is not None:
                stored.grad = None if shown.grad is None else shown.grad.permute(order)
        return super().step(closure)

    def _add_to_gradients(self) -> None:
        for place, parameter in enumerate(self.shown):
            if parameter.grad is None:  # not trained in this step
                continue
            if self.anchors:
                parameter.grad.add_(parameter.detach() - self.anchors[place], alpha=self.pull)
            if self.corrections:
                parameter.grad.add_(self.corrections[place])

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in (*self.shown, *self.stored, *self.leaves):
            parameter.grad = None

    def begin_momentum(self) -> None:
        """Momentum of zero where there is none yet: the next step does the same, and nothing else is asked of it."""
        for parameter in self.stored:
            self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))

    def momentum(self, place: int) -> Tensor | None:
        """The momentum of the parameter at this place, in that parameter's shape; None before its first step."""
        buffer: Tensor | None = self.state[self.stored[place]].get("momentum_buffer")
        order = self.orders[place]
        return buffer if buffer is None or order is None else buffer.permute(back(order))

    def set_momentum(self, place: int, momentum: Tensor) -> None:
        """Go on with this momentum for the parameter at this place."""
        same = torch.empty_like(self.shown[place]).detach().copy_(momentum)  # the fused step asks for the same layout
        order = self.orders[place]
        self.state[self.stored[place]]["momentum_buffer"] = same if order is None else same.permute(order)


def reach(rates: Iterable[float], momentum: float, nesterov: bool) -> float:
    """How far steps at these rates take a weight whose gradient is always −1, from a momentum of zero.

    Of FedNova (Wang et al., 2020) it is η ‖a‖₁: without momentum the number of steps, with it more than in proportion.

    >>> reach([1.0] * 5, 0.0, False), reach([1.0], 0.5, True), reach([1.0] * 3, 0.5, False)    # 1 + 1.5 + 1.75
    (5.0, 1.5, 4.25)
    """
    speed = way = 0.0
    for rate in rates:
        speed = momentum * speed + 1.0
        way += rate * (1.0 + momentum * speed if nesterov else speed)
    return way


def in_memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is contiguous; None if it is as it stands, or in none.

    >>> in_memory_order(torch.zeros(2, 3, 4, 5)), in_memory_order(torch.zeros(2, 3, 4, 5).permute(0, 3, 1, 2))
    (None, (0, 2, 3, 1))
    """
    order = tuple(sorted(range(tensor.dim()), key=lambda place: tensor.stride()[place], reverse=True))
    return None if tensor.is_contiguous() or not tensor.permute(order).is_contiguous() else order


def back(order: Sequence[int]) -> tuple[int, ...]:
    """The order that undoes another.

    >>> back((0, 2, 3, 1))
    (0, 3, 1, 2)
    """
    return tuple(order.index(place) for place in range(len(order)))


def sgd(
    model: nn.Module,
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    layer_decay: float = 1.0,
) -> SGD:
    """Stochastic gradient descent for all parameters of a model that learn; at rates by depth where asked for."""
    learning = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    factors = depth_factors(model, layer_decay) if layer_decay != 1 else {}
    return SGD(
        [parameter for _, parameter in learning],
        factors=[factors[name] for name, _ in learning] if factors else (),
        lr=lr,
        momentum=momentum,
        weight_decay=weight_decay,
        nesterov=nesterov,
    )


@runtime_checkable
class InSteps(Protocol):
    """A net that knows its steps from the images to the head, and its head."""

    fc: nn.Linear

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def steps(self) -> list[tuple[nn.Module, ...]]: ...


def depth_factors(model: nn.Module, decay: float) -> dict[str, float]:
    """By what the rate is multiplied for each parameter: decay^d, d steps before the head (`train.layer_decay`).

    The head has 1, the last block decay, the one before it decay², as in layer-wise rate decay (ELECTRA, Clark et al.
    2020; BEiT, Bao et al. 2022). What belongs to no step (a ViT's positions) is before the first one; what is built on
    a net (a projector) is part of the head.

    >>> class Two(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.one, self.two, self.fc = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1)
    ...     def steps(self): return [(self.one,), (self.two,)]
    >>> depth_factors(Two(), 0.5)
    {'one.weight': 0.25, 'two.weight': 0.5, 'fc.weight': 1.0, 'fc.bias': 1.0}
    """
    depth: dict[int, int] = {}
    for net in (module for module in model.modules() if isinstance(module, InSteps)):
        steps = net.steps()
        depth |= {id(p): len(steps) + 1 for p in net.parameters()}
        depth |= {id(p): 0 for p in net.fc.parameters()}
        for place, step in enumerate(steps):
            depth |= {id(p): len(steps) - place for part in step for p in part.parameters()}
    return {name: decay ** depth.get(id(p), 0) for name, p in model.named_parameters()}


def momentum_of(model: nn.Module, optimizer: SGD) -> dict[str, Tensor]:
    """A copy of the optimiser's momentum, by parameter name: what a client keeps to go on where it stopped."""
    buffers = ((name, optimizer.momentum(place)) for place, name in places_of(model, optimizer))
    return {name: buffer.detach().cpu().clone() for name, buffer in buffers if buffer is not None}


def give_momentum(model: nn.Module, optimizer: SGD, momentum: dict[str, Tensor]) -> None:
    """Let the optimiser go on with a momentum that was kept; nothing kept, nothing changed.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> first = sgd(net, lr=0.1)
    >>> optimizer_step(net, first, net.weight.sum())
    >>> second = sgd(net, lr=0.1)
    >>> give_momentum(net, second, momentum_of(net, first))
    >>> momentum_of(net, second)
    {'weight': tensor([[1.]])}
    """
    for place, name in places_of(model, optimizer):
        if name in momentum:
            optimizer.set_momentum(place, momentum[name])


def give_correction(model: nn.Module, optimizer: SGD, correction: Mapping[str, Tensor]) -> None:
    """From now on every gradient has this added, by parameter name: SCAFFOLD's c − c_i (Eq. 3)."""
    names = [name for _, name in sorted(places_of(model, optimizer))]
    optimizer.corrections = [correction[name].to(p.device) for name, p in zip(names, optimizer.shown, strict=True)]


def places_of(model: nn.Module, optimizer: SGD) -> list[tuple[int, str]]:
    """The model's parameters that an optimiser moves: their places in it, and their names."""
    places = {id(parameter): place for place, parameter in enumerate(optimizer.shown)}
    return [(places[id(p)], name) for name, p in model.named_parameters() if id(p) in places]


@contextmanager
def live_taps_only(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, steps carry no gradients of taps that only touch padding; afterwards all is as if they had.

    Such taps have no gradient, so k steps of descent only decay them, which is one linear map of weight and momentum.
    Nobody may read or set weights inside, and the loss may depend on them through the model's answers only. Where
    something else moves them (`stay_near`, `give_correction`), or rates differ (`depth_factors`), all taps take part in
    every step.
    """
    places = {id(p): place for place, p in enumerate(optimizer.shown)} if isinstance(optimizer, SGD) else {}
    tapped = [layer for layer in model.modules() if isinstance(layer, TappedConv2d) and layer.has_dead_taps]
    layers = [layer for layer in tapped if id(layer.weight) in places]  # the others do not learn
    if not layers or not isinstance(optimizer, SGD) or not (optimizer.moved_by_loss_alone and optimizer.one_rate):
        yield
        return
    group, before = optimizer.param_groups[0], optimizer.steps
    mine = [places[id(layer.weight)] for layer in layers]
    if group["momentum"]:
        optimizer.begin_momentum()
    for layer, place in zip(layers, mine, strict=True):
        layer.leaves = tuple(nn.Parameter(matrix) for matrix in matrices_of(layer.weight.data, layer.live))
        optimizer.leaves += layer.leaves
        if (momentum := optimizer.momentum(place)) is not None:
            for leaf, part in zip(layer.leaves, matrices_of(momentum, layer.live), strict=True):
                optimizer.state[leaf]["momentum_buffer"] = part
    group["params"] = [p for place, p in enumerate(optimizer.stored) if place not in set(mine)] + optimizer.leaves
    try:
        yield
    finally:
        for leaf in optimizer.leaves:
            optimizer.state.pop(leaf, None)
        optimizer.leaves, group["params"] = [], list(optimizer.stored)
        for layer, place in zip(layers, mine, strict=True):
            layer.leaves = ()
            for row, column in layer.dead:
                momentum = optimizer.momentum(place)
                decay(
                    layer.weight.data[:, :, row, column],
                    None if momentum is None else momentum[:, :, row, column],
                    optimizer.rates[before:],
                    **{name: group[name] for name in ("momentum", "weight_decay", "nesterov")},
                )


def decay(
    weight: Tensor, buffer: Tensor | None, rates: Sequence[float], momentum: float, weight_decay: float, nesterov: bool
) -> None:
    """What steps of descent at these rates do to weights without a gradient, in place.

    >>> net, other = nn.Linear(1, 1, bias=False), torch.tensor([[0.5]])
    >>> _ = net.weight.data.fill_(0.5)
    >>> optimizer = sgd(net, lr=0.1, momentum=0.9, weight_decay=0.2)
    >>> for rate in (0.1, 0.1, 0.05):
    ...     optimizer.param_groups[0]["lr"], net.weight.grad = rate, torch.zeros(1, 1)
    ...     _ = optimizer.step()
    >>> decay(other, torch.zeros(1, 1), (0.1, 0.1, 0.05), 0.9, 0.2, False)
    >>> torch.allclose(other, net.weight)
    True
    """
    look_ahead = 1 + momentum if nesterov else 1.0
    all_steps = torch.eye(2, dtype=torch.float64)
    for lr, steps in groupby(rates):
        one_step = torch.tensor(
            [
                [1 - lr * weight_decay * look_ahead, -lr * momentum * (momentum if nesterov else 1.0)],
                [weight_decay, momentum],
            ],
            dtype=torch.float64,
        )
        all_steps = torch.linalg.matrix_power(one_step, len(list(steps))) @ all_steps
    (a, b), (c, d) = all_steps.tolist()
    if buffer is None:
        weight.mul_(a)
        return
    earlier = weight.clone()
    weight.mul_(a).add_(buffer, alpha=b)
    buffer.mul_(d).add_(earlier, alpha=c)


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, clip: float = 0.0) -> None:
    """One step down the gradient of the loss, whose norm is cut at `clip` (0: not cut)."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    clip_gradient(trained_by(optimizer), clip)
    optimizer.step()


def trained_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters that have gradients when an optimiser takes its step."""
    if isinstance(optimizer, SGD):
        return [*optimizer.shown, *optimizer.leaves]
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def clip_gradient(parameters: Sequence[nn.Parameter], most: float) -> None:
    """Cut the norm of the whole gradient at `most` (0: leave it).

    On a CPU a gradient that is short enough is left alone; PyTorch's own function multiplies it by 1, which is one more
    pass over all of it. On a GPU asking for the norm would cost more than it saves.

    >>> net = nn.Linear(2, 1, bias=False)
    >>> for most in (0.0, 5.0, 1.0):
    ...     net.weight.grad = torch.tensor([[3.0, 4.0]])
    ...     clip_gradient([net.weight], most)
    ...     print(round(net.weight.grad.norm().item(), 6))
    5.0
    5.0
    1.0
    """
    gradients = [p.grad for p in parameters if p.grad is not None] if most > 0 else []
    if gradients:
        norm = nn.utils.get_total_norm(gradients)
        if norm.device.type != "cpu" or not norm <= most:  # a norm that is no number must not pass for a short one
            nn.utils.clip_grads_with_norm_(parameters, most, norm)
