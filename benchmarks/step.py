"""A training step of EfficientNet-Lite0 on 32 images of 96 pixels, all of it trained, norms frozen: what is gained by
keeping a step's memory for the next one (`core.machine.keep_freed_memory`), which every run does.

Each turn is a process of its own, because what glibc was told cannot be taken back. Wall time: clearing pages is the
system's work, and on a virtual machine in part its host's. Random weights and noise.
"""

import json
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timing import Row, single_thread, spread
from tacit.core.machine import keep_freed_memory
from tacit.nets import build

TITLE = "A step of a pretrained net"
WAYS = ("kept", "given back")


def seconds_a_step(way: str, size: int, steps: int) -> float:
    """The median over steps, after one that is not counted."""
    if way == "kept":
        keep_freed_memory()
    generator = torch.Generator().manual_seed(0)
    net = build("lite0", classes=10, channels=3, size=size, norm="bn", bn="frozen", generator=generator)
    net.arrange(torch.device("cpu"), size).train()
    images = torch.randn(32, 3, size, size, generator=generator).to(memory_format=torch.channels_last)
    labels = torch.arange(32) % 10
    settle(net, images)
    taken = []
    for _ in range(steps + 1):
        started = time.perf_counter()
        net.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        taken.append(time.perf_counter() - started)
    return sorted(taken[1:])[steps // 2]


@torch.no_grad()
def settle(net: nn.Module, images: torch.Tensor) -> None:
    """Frozen norms take the statistics of these images: with none, numbers die away into denormals, which are slow."""
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
        norm.train()
    net(images)
    for norm in norms:
        norm.eval()


def alone(way: str, size: int, steps: int) -> float:
    """`seconds_a_step` in a new process."""
    words = [sys.executable, "-m", "benchmarks.step", way, str(size), str(steps)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words[1:])} failed:\n{done.stderr}")
    return float(json.loads(done.stdout))


def measure(size: int = 96, steps: int = 10, times: int = 5) -> list[Row]:
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(times):
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            taken[way].append(alone(way, size, steps))
    note = f"{1000 * sorted(taken['kept'])[times // 2] / 32:.1f} ms an image, kept"
    ratios = [one / kept for one, kept in zip(taken["given back"], taken["kept"], strict=True)]
    return [spread("memory given back / kept", ratios, "×", note=note)]


if __name__ == "__main__":
    with single_thread():
        print(json.dumps(seconds_a_step(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
