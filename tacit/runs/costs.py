"""What one image takes in a net, here and now: the base of all estimates."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tacit.nets.optimizer import optimizer_step, sgd
from tacit.pieces.train import predict

Timer = Callable[[], float]  # on the wall, or of this process's computing: a busy machine does not disturb that


class Speed(NamedTuple):
    """Seconds an image takes on one core."""

    training: float
    inference: float


def time_net(net: nn.Module, images: Tensor, times: int = 3, timer: Timer = time.perf_counter) -> Speed:
    """How long one of these images takes in this net, from a few batches."""
    optimizer = sgd(net, lr=1e-4)
    labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)

    def train() -> None:
        optimizer_step(net, optimizer, torch.nn.functional.cross_entropy(net(images), labels))

    return time_both(train, lambda: predict(net, images, lambda x: x), len(images), times, timer)


def time_both(train: Callable[[], object], infer: Callable[[], object], images: int, times: int, timer: Timer) -> Speed:
    """The mean time of an image in either, on one thread; the first time of each is not counted."""
    found = []
    with one_thread():
        for work in (train, infer):
            work()
            started = timer()
            for _ in range(times):
                work()
            found.append((timer() - started) / times / images)
    return Speed(*found)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
