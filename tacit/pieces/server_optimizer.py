"""The server's step from the old model towards the mean of its clients' (Reddi et al., Adaptive Federated Optimization,
ICLR 2021, Algorithm 2; momentum: Hsu et al., 2019)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tacit.pieces.aggregate import Weights, is_learned

Memory = dict[str, Weights]  # "velocity" (m of the paper) and "square" (v), each by tensor

RATES = {"mean": 1.0, "momentum": 1.0, "adam": 0.01, "yogi": 0.01}  # where none is named


@dataclass(frozen=True)
class ServerOptimizer:
    """From the old model and the clients' mean to the next model. Δ = mean − old stands in for the gradient."""

    name: str = "mean"  # or "momentum", "adam", "yogi"
    lr: float = 0.0  # η; 0: by RATES
    momentum: float = 0.9  # β, or β₁
    beta2: float = 0.99
    tau: float = 1e-3

    def step(self, old: Weights, mean: Weights, memory: Memory) -> tuple[Weights, Memory]:
        """The next model and what is remembered for the step after it; an empty memory: the first step.

        What is not learned (counters, BN's running statistics) takes the mean's value.

        >>> old, mean = {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.0])}      # Δ = −1
        >>> ServerOptimizer().step(old, mean, {}), ServerOptimizer(lr=0.5).step(old, mean, {})[0]
        (({'w': tensor([0.])}, {}), {'w': tensor([0.5000])})
        >>> optimizer = ServerOptimizer("momentum", momentum=0.5)
        >>> new, memory = optimizer.step(old, mean, {})
        >>> new, optimizer.step(new, mean, memory)[0]                               # 0 + (0.5 · −1 + 0)
        ({'w': tensor([0.])}, {'w': tensor([-0.5000])})
        """
        rate = self.lr or RATES[self.name]
        if self.name == "mean" and rate == 1.0:
            return mean, {}
        new, velocity, square = {}, {}, {}
        for name, tensor in old.items():
            if not is_learned(name, tensor):
                new[name] = mean[name]
                continue
            delta = mean[name] - tensor
            if self.name == "mean":
                step = delta
            elif self.name == "momentum":
                step = velocity[name] = self.momentum * _before(memory, "velocity", name, delta) + delta
            else:
                velocity[name] = first_moment(_before(memory, "velocity", name, delta), delta, self.momentum)
                earlier = _before(memory, "square", name, delta, self.tau**2)
                square[name] = (adam_moment if self.name == "adam" else yogi_moment)(earlier, delta, self.beta2)
                step = velocity[name] / (square[name].sqrt() + self.tau)  # the algorithm's last line
            new[name] = tensor + rate * step
        return new, {kind: moments for kind, moments in (("velocity", velocity), ("square", square)) if moments}


def _before(memory: Memory, kind: str, name: str, like: Tensor, start: float = 0.0) -> Tensor:
    """What was remembered of a tensor; at first `start` everywhere (v₋₁ = τ²: the least that the paper allows)."""
    return memory[kind][name] if kind in memory else torch.full_like(like, start)


def first_moment(earlier: Tensor, delta: Tensor, beta: float) -> Tensor:
    """m ← β₁ m + (1 − β₁) Δ (Algorithm 2, all rules), without a correction of its start.

    >>> first_moment(torch.tensor([1.0]), torch.tensor([3.0]), 0.75)
    tensor([1.5000])
    """
    return beta * earlier + (1.0 - beta) * delta


def adam_moment(earlier: Tensor, delta: Tensor, beta: float) -> Tensor:
    """v ← β₂ v + (1 − β₂) Δ² (Algorithm 2, FedAdam).

    >>> adam_moment(torch.tensor([1.0]), torch.tensor([3.0]), 0.75)             # 0.75 · 1 + 0.25 · 9
    tensor([3.])
    """
    return beta * earlier + (1.0 - beta) * delta.square()


def yogi_moment(earlier: Tensor, delta: Tensor, beta: float) -> Tensor:
    """v ← v − (1 − β₂) Δ² sign(v − Δ²) (Algorithm 2, FedYogi): it moves by Δ² alone, however far it is.

    >>> yogi_moment(torch.tensor([1.0, 10.0]), torch.tensor([3.0, 2.0]), 0.75)  # 1 + 0.25 · 9, 10 − 0.25 · 4
    tensor([3.2500, 9.0000])
    """
    square = delta.square()
    return earlier - (1.0 - beta) * square * torch.sign(earlier - square)
