"""The inner loop that every method shares: batches, plain supervised epochs, prediction."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from tacit.nets.folding import for_evaluation
from tacit.nets.optimizer import live_taps_only
from tacit.nets.optimizer import optimizer_step as optimizer_step
from tacit.pieces.aggregate import residual
from tacit.pieces.loss import PLAIN, LabelLoss

View = Callable[[Tensor, torch.Generator], Tensor]
EPOCH_CHUNK = 1024  # images whose views are made at once: enough to be fast, little enough to fit any memory
MOST_NUMBERS = 1 << 25  # and numbers in these views: 128 MiB of floats


def at_once(numbers: int) -> int:
    """Images of so many numbers each whose views are made at once; how many changes nothing in them.

    >>> at_once(3 * 32 * 32), at_once(3 * 224 * 224), at_once(10**9)
    (1024, 222, 1)
    """
    return max(1, min(EPOCH_CHUNK, MOST_NUMBERS // max(numbers, 1)))


def batches(count: int, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The numbers 0 … count−1 in random order, in batches.

    A last batch of one joins the one before it, because batch norm cannot train on a single image; a party
    that holds a single image sees it twice in one batch, for the same reason.

    >>> [len(batch) for batch in batches(9, 4, torch.Generator().manual_seed(0))]
    [4, 5]
    >>> list(batches(1, 4, torch.Generator())), list(batches(0, 4, torch.Generator()))
    ([tensor([0, 0])], [])
    """
    if count == 1:
        yield torch.zeros(2, dtype=torch.int64)
        return
    order = torch.randperm(count, generator=generator)
    starts = list(range(0, count, max(size, 2)))
    if len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    for start, end in pairwise([*starts, count]):
        yield order[start:end]


def batch_count(count: int, size: int) -> int:
    """How many batches `batches` makes of so many images.

    >>> [batch_count(count, 4) for count in (0, 1, 4, 5, 6, 9)], batch_count(9, 1)
    ([0, 1, 1, 1, 2, 2], 4)
    """
    size = max(size, 2)
    whole, rest = divmod(count, size)
    return max(whole + (rest > 1), min(count, 1))


def viewed_batches(
    images: Tensor, size: int, view: View, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch: (which images, their views), with the views of many batches made at a time."""
    waiting: list[Tensor] = []
    enough = at_once(images[0].numel()) if len(images) else 1
    for batch in batches(len(images), size, generator):
        waiting.append(batch)
        if sum(map(len, waiting)) >= enough:
            yield from _view(waiting, images, view, generator)
            waiting = []
    yield from _view(waiting, images, view, generator)


def _view(
    waiting: list[Tensor], images: Tensor, view: View, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    if waiting:
        which = torch.cat(waiting).to(images.device)
        views = view(images[which], generator)
        sizes = [len(batch) for batch in waiting]
        yield from zip(which.split(sizes), views.split(sizes), strict=True)


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    view: View,
    optimizer: torch.optim.Optimizer,
    epochs: int,
    batch: int,
    clip: float,
    generator: torch.Generator,
    after_epoch: Callable[[int], None] | None = None,
    label_loss: LabelLoss = PLAIN,
) -> float:
    """Plain supervised training: cross-entropy on views of labelled images. Returns the last epoch's mean loss."""
    model.train()
    mean = math.nan
    for epoch in range(epochs):
        total, seen = torch.zeros((), device=images.device), 0
        with live_taps_only(model, optimizer):
            for which, views in viewed_batches(images, batch, view, generator):
                loss = label_loss(model(views), labels[which])
                optimizer_step(model, optimizer, loss, clip)
                total, seen = total + loss.detach() * len(which), seen + len(which)
        mean = float(total) / seen if seen else math.nan
        if after_epoch is not None:
            after_epoch(epoch)
    return mean


@torch.inference_mode()
def predict(model: nn.Module, images: Tensor, view: Callable[[Tensor], Tensor], batch: int = 256) -> Tensor:
    """Class probabilities [N, K] of all images, by the model as it would be used (eval mode).

    >>> uniform = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    >>> _ = [nn.init.zeros_(p) for p in uniform.parameters()]
    >>> predict(uniform, torch.zeros(3, 1, 2, 2), lambda x: x)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    was_training = model.training
    model.eval()
    faster = for_evaluation(model, len(images))
    parts = [faster(view(part)).softmax(dim=1) for part in images.split(batch)] if len(images) else []
    model.train(was_training)
    if not parts:
        return torch.zeros(0, 0)
    return torch.cat(parts).clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the model's parameters and buffers: what may travel, and stays as it is when training goes on.

    What `net.train` froze is not among them: every party has it already.

    The copy is contiguous, whatever the net's own memory layout: weights that travelled through bytes are, and the
    order in which a sum runs over a tensor, and so its last bit, depends on the strides.
    """
    contiguous, frozen = torch.contiguous_format, getattr(model, "frozen_names", ())
    moving = ((name, tensor) for name, tensor in model.state_dict().items() if name not in frozen)
    return {name: tensor.detach().cpu().clone(memory_format=contiguous) for name, tensor in moving}


def pull_back(model: nn.Module, every: int, share: float) -> Callable[[int], None]:
    """Residual weight connection while a client trains (CBAFed Eq. 1), to be called after each epoch.

    After epoch 0 the weights are remembered; each `every` epochs the model becomes
    share · remembered + (1 − share) · itself, and that is remembered.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> after_epoch = pull_back(net, every=2, share=0.75)
    >>> for epoch in range(3):
    ...     _ = net.weight.data.fill_(epoch)                    # stands for training
    ...     after_epoch(epoch)
    >>> net.weight.item()                                       # 0.75 · 0 + 0.25 · 2
    0.5
    """
    remembered: dict[str, Tensor] = {}

    def after_epoch(epoch: int) -> None:
        if share > 0 and epoch % every == 0:
            if remembered:
                model.load_state_dict(residual(remembered, weights_of(model), share))
            remembered.update(weights_of(model))

    return after_epoch
