"""Whether batch norm folded into the convolutions before it pays when a global model is evaluated, in batches of 256.

Folded weights are made anew for each evaluation, because the model has changed; that is in the time. In a ResNet every
norm follows a convolution and can be folded, but with live taps and channels last a norm costs next to nothing, so it
stays; in a wide residual net the one in the middle of each block is folded; in the small CNN none, as pooling lies
between. Beside it: the plain net, without live taps, channels last or folding. CPU time.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.reference import plain_net
from benchmarks.timing import Row, interleaved, ratio, single_thread
from tacit.config.resolve import resolve
from tacit.data.federation import Federation
from tacit.evaluation.scores import PREDICT_BATCH
from tacit.nets.folding import folded
from tacit.nets.layers import Net
from tacit.runs.plan import prepare
from tacit.views import Views

TITLE = "Evaluation"

SETTINGS: dict[str, Any] = {"data.placement": "clients", "data.labels": 0, "net.norm": "bn", "device": "cpu"}
CASES: dict[str, dict[str, Any]] = {
    "ResNet-18, 28×28": {"data.name": "fashion-mnist", "net.name": "resnet18", "data.test_subset": 2048},
    "ResNet-18 with the small stem, 32×32": {
        "data.name": "cifar10",
        "net.name": "resnet18",
        "net.stem": "cifar",
        "data.test_subset": 256,
    },
    "WRN-28-2, 32×32": {"data.name": "cifar10", "net.name": "wrn-28-2", "data.test_subset": 512},
}


def with_statistics(net: Net) -> Net:
    """Norms with statistics as after training, so that folding them does something."""
    generator = torch.Generator().manual_seed(1)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            assert layer.running_mean is not None
            assert layer.running_var is not None
            layer.running_mean.normal_(0, 0.1, generator=generator)
            layer.running_var.uniform_(0.5, 1.5, generator=generator)
    return net


@torch.inference_mode()
def logits(net: nn.Module, images: Tensor, views: Views) -> Tensor:
    """As tacit predicts, without its choice whether to fold."""
    net.eval()
    return torch.cat([net(views.plain(part)) for part in images.split(PREDICT_BATCH)])


def measure(cases: Mapping[str, Mapping[str, Any]] = CASES, times: int = 5) -> list[Row]:
    with single_thread():
        return [row for name, settings in cases.items() for row in measure_case(name, settings, times)]


def measure_case(name: str, settings: Mapping[str, Any], times: int) -> list[Row]:
    plan = prepare(resolve(SETTINGS, settings))
    images = Federation(plan.dataset, plan.split, plan.setup.device).test().images
    net, views = with_statistics(plan.setup.build(torch.Generator().manual_seed(0))), plan.setup.views  # type: ignore[arg-type]
    far = (logits(net, images[:256], views) - logits(folded(net), images[:256], views)).abs().max()
    if far > 1e-3:
        raise RuntimeError(f"{name}: the folded net gives other logits, by {float(far):.1e}")
    plain = plain_net(plan)
    works = {
        "own": lambda: logits(net, images, views),
        "folded": lambda: logits(folded(net), images, views),
        "plain": lambda: logits(plain, images, views),
    }
    spent = interleaved(works, times)
    rate = f"{len(images) / sorted(one.cpu for one in spent['folded'])[times // 2]:,.0f} images a CPU-second"
    rows = [ratio(f"{name}: plain net / ours", spent["plain"], spent["folded"], note=rate)]
    if net.norms_to_fold():
        rows.append(ratio(f"{name}: ours without folding / ours", spent["own"], spent["folded"], note=rate))
    return rows
