"""Weights in two parts that add up: σ learns from labels, ψ from images without them (FedMatch)."""

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tacit.pieces.train import batches

Part = Literal["sigma", "psi"]
Weights = dict[str, Tensor]


def joined(sigma: Weights, psi: Weights) -> Weights:
    """The weights θ = σ + ψ. What has no ψ (the buffers of a net) is as σ has it.

    >>> joined({"w": torch.tensor([1.0]), "steps": torch.tensor(3)}, {"w": torch.tensor([0.5])})
    {'w': tensor([1.5000]), 'steps': tensor(3)}
    """
    return {name: tensor + psi[name] if name in psi else tensor for name, tensor in sigma.items()}


class Decomposed(nn.Module):
    """A net whose every parameter is σ + ψ. A loss moves the part that is learning; the other one stands still.

    One optimiser over `parameters()` serves both: it passes over what has no gradient. The net's own parameters are
    not used until `merged`; its buffers are.

    >>> model = Decomposed(nn.Linear(1, 1, bias=False), {"weight": torch.tensor([[2.0]])}, {"weight": torch.ones(1, 1)})
    >>> loss = model.learning("psi")(torch.ones(1, 1)).sum()
    >>> loss.item()                                                             # (2 + 1) · 1
    3.0
    >>> loss.backward()
    >>> [p.grad for p in model.sigma], [p.grad for p in model.psi]
    ([None], [tensor([[1.]])])
    """

    def __init__(self, net: nn.Module, sigma: Weights, psi: Weights) -> None:
        super().__init__()
        self.net = net.requires_grad_(False)
        self.names = [name for name, _ in net.named_parameters()]
        # In the parameters' own memory layout, which the fused optimiser needs.
        self.sigma = nn.ParameterList(torch.empty_like(p).copy_(sigma[name]) for name, p in net.named_parameters())
        self.psi = nn.ParameterList(torch.empty_like(p).copy_(psi[name]) for name, p in net.named_parameters())

    def learning(self, part: Part) -> Self:
        """From now on only this part learns."""
        self.sigma.requires_grad_(part == "sigma")
        self.psi.requires_grad_(part == "psi")
        return self

    def forward(self, x: Tensor) -> Tensor:
        theta = {name: s + p for name, s, p in zip(self.names, self.sigma, self.psi, strict=True)}
        logits: Tensor = functional_call(self.net, theta, (x,))
        return logits

    def part(self, which: Part) -> Weights:
        """A copy of the parameters of one part, by name."""
        tensors = self.sigma if which == "sigma" else self.psi
        return {name: t.detach().cpu().clone() for name, t in zip(self.names, tensors, strict=True)}

    @torch.no_grad()
    def merged(self) -> nn.Module:
        """The plain net with the weights σ + ψ."""
        for parameter, s, p in zip(self.net.parameters(), self.sigma, self.psi, strict=True):
            parameter.copy_(s + p)
        return self.net


def disjoint_penalty(sigma: Iterable[Tensor], psi: Iterable[Tensor], pull: float, sparsity: float) -> Tensor:
    """pull · ‖σ − ψ‖² + sparsity · ‖ψ‖₁: what FedMatch adds to the loss that ψ learns. Sums, not means.

    >>> disjoint_penalty([torch.tensor([1.0, 2.0])], [torch.tensor([0.0, -1.0])], pull=10.0, sparsity=0.5)
    tensor(100.5000)
    """
    pairs = list(zip(sigma, psi, strict=True))
    apart = torch.stack([(s - p).square().sum() for s, p in pairs]).sum()
    size = torch.stack([p.abs().sum() for _, p in pairs]).sum()
    return pull * apart + sparsity * size


def cut_small(psi: Weights, limit: float) -> Weights:
    """Entries no larger than the limit become 0: what FedMatch need not send. The limit itself is cut, too.

    >>> cut_small({"w": torch.tensor([0.25, -0.5, 0.75])}, 0.5)
    {'w': tensor([0.0000, 0.0000, 0.7500])}
    """
    return {name: torch.where(tensor.abs() > limit, tensor, 0.0) for name, tensor in psi.items()}


def disjoint_batches(
    labeled: int, unlabeled: int, size: int, generator: torch.Generator
) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """One epoch: for each labelled batch, an equal part of the unlabelled images, so that both sets are seen once.

    Without labels, the unlabelled images come in batches of `size`.

    >>> shapes = lambda *counts: [
    ...     tuple(0 if part is None else len(part) for part in pair)
    ...     for pair in disjoint_batches(*counts, torch.Generator())
    ... ]
    >>> shapes(20, 90, 10), shapes(0, 20, 10), shapes(20, 0, 10), shapes(0, 0, 10)
    ([(10, 45), (10, 45)], [(0, 10), (0, 10)], [(10, 0), (10, 0)], [])
    """
    known = list(batches(labeled, size, generator))
    share = -(-unlabeled // len(known)) if known else size
    yield from zip_longest(known, batches(unlabeled, share, generator))
