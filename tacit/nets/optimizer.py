"""One step down the gradient: the optimiser, its momentum, clipping, and steps that leave dead taps alone."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tacit.nets.live_taps import TappedConv2d, matrices_of


class SGD(torch.optim.SGD):
    """Stochastic gradient descent in its fused form, on each parameter as it lies in memory.

    The fused step of PyTorch first copies what is not contiguous; so it is shown such parameters with their dimensions
    in the order of memory, where they are.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        self.shown = list(parameters)
        self.orders = [in_memory_order(p) for p in self.shown]
        self.stored = [
            p if o is None else nn.Parameter(p.data.permute(o)) for p, o in zip(self.shown, self.orders, strict=True)
        ]
        self.leaves: list[nn.Parameter] = []  # they stand in for some of `shown` for a while: see live_taps_only
        self.steps = 0
        super().__init__(self.stored, fused=True, **settings)

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for shown, stored, order in zip(self.shown, self.stored, self.orders, strict=True):
            if order is not None:
                stored.grad = None if shown.grad is None else shown.grad.permute(order)
        return super().step(closure)

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


def sgd(model: nn.Module, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, nesterov: bool = False) -> SGD:
    """Stochastic gradient descent for all parameters of a model that learn."""
    learning = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return SGD(learning, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov)


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


def places_of(model: nn.Module, optimizer: SGD) -> list[tuple[int, str]]:
    """The model's parameters that an optimiser moves: their places in it, and their names."""
    places = {id(parameter): place for place, parameter in enumerate(optimizer.shown)}
    return [(places[id(p)], name) for name, p in model.named_parameters() if id(p) in places]


@contextmanager
def live_taps_only(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, steps carry no gradients of taps that only touch padding; afterwards all is as if they had.

    Such taps have no gradient, so k steps of descent only decay them, which is one linear map of weight and momentum.
    Nobody may read or set weights inside, and the loss may depend on them through the model's answers only.
    """
    places = {id(p): place for place, p in enumerate(optimizer.shown)} if isinstance(optimizer, SGD) else {}
    tapped = [layer for layer in model.modules() if isinstance(layer, TappedConv2d) and layer.has_dead_taps]
    layers = [layer for layer in tapped if id(layer.weight) in places]  # the others do not learn
    if not layers or not isinstance(optimizer, SGD):
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
                    optimizer.steps - before,
                    **{name: group[name] for name in ("lr", "momentum", "weight_decay", "nesterov")},
                )


def decay(
    weight: Tensor, buffer: Tensor | None, steps: int, lr: float, momentum: float, weight_decay: float, nesterov: bool
) -> None:
    """What so many steps of descent do to weights without a gradient, in place.

    >>> net, other = nn.Linear(1, 1, bias=False), torch.tensor([[0.5]])
    >>> _ = net.weight.data.fill_(0.5)
    >>> optimizer = sgd(net, lr=0.1, momentum=0.9, weight_decay=0.2)
    >>> for _ in range(3):
    ...     net.weight.grad = torch.zeros(1, 1)
    ...     _ = optimizer.step()
    >>> decay(other, torch.zeros(1, 1), 3, 0.1, 0.9, 0.2, False)
    >>> torch.allclose(other, net.weight)
    True
    """
    look_ahead = 1 + momentum if nesterov else 1.0
    one_step = torch.tensor(
        [
            [1 - lr * weight_decay * look_ahead, -lr * momentum * (momentum if nesterov else 1.0)],
            [weight_decay, momentum],
        ],
        dtype=torch.float64,
    )
    (a, b), (c, d) = torch.linalg.matrix_power(one_step, steps).tolist()
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
