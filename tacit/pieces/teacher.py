"""Learning from a teacher: a copy of the model whose weights follow slowly (RSCFed, FedIRM)."""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from tacit.nets.optimizer import optimizer_step
from tacit.pieces.consistency import TwoViews


def sharpen(probs: Tensor, temperature: float) -> Tensor:
    """p^(1/T), each image's classes summing to 1 again: [N, K] → [N, K]. Below T = 1 the likeliest class gains.

    >>> sharpen(torch.tensor([[0.75, 0.25]]), 0.5)                              # 9 : 1
    tensor([[0.9000, 0.1000]])
    >>> sharpen(torch.tensor([[0.75, 0.25]]), 1.0)
    tensor([[0.7500, 0.2500]])
    """
    return (probs.clamp(min=1e-30).log() / temperature).softmax(dim=1)


def squared_error(probs: Tensor, target: Tensor) -> Tensor:
    """(1/N) Σ_n Σ_k (p_nk − t_nk)²: summed over the classes, the mean over the images only.

    >>> squared_error(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[0.0, 1.0], [0.5, 0.5]]))   # (2 + 0) / 2
    tensor(1.)
    """
    return (probs - target).square().sum(dim=1).mean()


def early_decay(step: int, highest: float) -> float:
    """min(1 − 1/(step + 1), highest): at first the teacher is the plain mean of all students so far.

    >>> [early_decay(step, 0.999) for step in (0, 1, 3, 5000)]
    [0.0, 0.5, 0.75, 0.999]
    """
    return min(1.0 - 1.0 / (step + 1), highest)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, decay: float, statistics: bool = True) -> None:
    """teacher ← decay · teacher + (1 − decay) · student, for the parameters.

    BN's running statistics (and its step counter) are taken over from the student: those of other weights would
    not fit. Without `statistics` they stay what they were.

    >>> teacher, student = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = teacher.weight.data.fill_(1.0), student.weight.data.fill_(3.0)
    >>> follow(teacher, student, 0.75)
    >>> teacher.weight.item()                                                   # 0.75 · 1 + 0.25 · 3
    1.5
    """
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.lerp_(fast, 1.0 - decay)
    if statistics:
        for old, new in zip(teacher.buffers(), student.buffers(), strict=True):
            old.copy_(new)


def ramp_up(done: float, length: float) -> float:
    """The sigmoid-shaped ramp exp(−5 (1 − done/length)²), from almost 0 to 1; without a length it is 1.

    >>> [round(ramp_up(done, 30), 4) for done in (0, 15, 30, 99)], ramp_up(0, 0)
    ([0.0067, 0.2865, 1.0, 1.0], 1.0)
    """
    left = 1.0 - min(done / length, 1.0) if length > 0 else 0.0
    return math.exp(-5.0 * left**2)


def learn_with_teacher(
    model: nn.Module,
    teacher: nn.Module,
    unlabeled: Iterable[TwoViews],
    loss_of: Callable[[Tensor, Tensor, Tensor], Tensor],
    *,
    optimizer: torch.optim.Optimizer,
    clip: float,
    decays: Iterator[float],
    statistics: bool = True,
) -> tuple[float, int]:
    """In each step the teacher looks at one view, the student learns on the other, and the teacher follows.

    `loss_of(which, views, target)` is the loss of a batch: the images' numbers, the student's views, the teacher's
    probabilities. The teacher predicts as it would be used (eval mode). Returns the mean loss and the steps done.
    """
    model.train()
    teacher.eval()
    total, steps = 0.0, 0
    for which, shown, learned in unlabeled:
        with torch.no_grad():
            target = teacher(shown).softmax(dim=1)
        loss = loss_of(which, learned, target)
        optimizer_step(model, optimizer, loss, clip)
        follow(teacher, model, next(decays), statistics)
        total, steps = total + float(loss.detach()), steps + 1
    return total / max(steps, 1), steps
