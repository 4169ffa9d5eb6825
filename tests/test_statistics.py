"""BN statistics from data, by hand and against PyTorch."""

import pytest
import torch
from torch import Tensor, nn

from tacit.core.errors import TacitError
from tacit.nets import build
from tacit.nets.statistics import recompute_statistics


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_pixel(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)


def test_by_hand_with_unequal_batches() -> None:
    layer = nn.BatchNorm2d(1)
    recompute_statistics(layer, [one_pixel(1, 3, 2), one_pixel(8, 6)])
    # mean (1 + 3 + 2 + 8 + 6) / 5 = 4; squared distances 9 + 1 + 4 + 16 + 4 = 34, over 5 − 1
    assert layer.running_mean.item() == pytest.approx(4)
    assert layer.running_var.item() == pytest.approx(8.5)
    assert layer.num_batches_tracked.item() == 2


@pytest.mark.parametrize("bn", ["average", "static"])
def test_one_batch_equals_pytorchs_own_in_every_layer(bn: str) -> None:
    ours = build("wrn-10-1", classes=3, channels=1, size=8, norm="bn", bn=bn, generator=seeded())
    torchs = build("wrn-10-1", classes=3, channels=1, size=8, norm="bn", generator=seeded())
    for module in torchs.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # cumulative
    x = torch.randn(20, 1, 8, 8, generator=seeded(1))
    recompute_statistics(ours, [x])
    torchs.train()(x)
    for key, value in torchs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-5, atol=1e-6, msg=key)


def test_the_first_layer_does_not_depend_on_how_data_is_cut() -> None:
    net = build("cnn", classes=3, channels=1, size=8, norm="bn", bn="static", generator=seeded())
    x = torch.randn(50, 1, 8, 8, generator=seeded(1)) + torch.arange(50.0).view(-1, 1, 1, 1)  # sorted data
    recompute_statistics(net, [x[:49]])
    whole = net.norm1.running_var.clone()
    recompute_statistics(net, x.split(7))
    torch.testing.assert_close(net.norm1.running_var, whole)
    assert net.norm1.num_batches_tracked.item() == 7  # the lone fiftieth image was left out
    assert not torch.allclose(net.norm3.running_var, torch.ones(128))


def test_large_offset_keeps_its_variance() -> None:
    layer = nn.BatchNorm2d(1)
    recompute_statistics(layer, [one_pixel(4096, 4098), one_pixel(4097, 4097)])
    assert layer.running_mean.item() == pytest.approx(4097)
    assert layer.running_var.item() == pytest.approx(2 / 3)


def test_nothing_else_changes() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, momentum=0.3), nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(72)
    )
    net.train()
    net[1].eval()
    net[1].running_mean.fill_(5)
    parameters = {key: value.clone() for key, value in net.named_parameters()}
    buffers = [(value.data_ptr(), value.dtype) for value in net.buffers()]
    before = torch.get_rng_state()
    recompute_statistics(net, iter([torch.randn(4, 1, 8, 8, generator=seeded()) for _ in range(3)]))
    assert torch.equal(before, torch.get_rng_state())  # dropout was off
    assert [module.training for module in net] == [True, False, True, True, True]
    assert net.training
    assert net[1].momentum == 0.3
    assert net[1].track_running_stats
    assert all(torch.equal(value, parameters[key]) for key, value in net.named_parameters())
    assert all(value.grad is None for value in net.parameters())
    assert [(value.data_ptr(), value.dtype) for value in net.buffers()] == buffers  # in place, int64 stays
    assert not any(module._forward_pre_hooks for module in net)
    assert net[1].running_mean.abs().max() < 2
    assert net[4].running_var.ne(1).all()


def test_flags_come_back_and_statistics_stay_when_a_batch_fails() -> None:
    net = nn.Sequential(nn.BatchNorm2d(1)).train()
    with pytest.raises(ValueError):
        recompute_statistics(net, [one_pixel(1, 2), torch.zeros(3, 4)])
    assert net[0].training
    assert net[0].track_running_stats
    assert net[0].running_mean.item() == 0
    assert not net[0]._forward_pre_hooks


def test_no_batches_is_an_error() -> None:
    for batches in ([], [one_pixel(1)]):
        with pytest.raises(TacitError, match="two or more images"):
            recompute_statistics(nn.BatchNorm2d(1), batches)


@pytest.mark.parametrize(("norm", "bn"), [("gn", "average"), ("bn", "batch")])
def test_models_without_running_statistics_are_not_even_run(norm: str, bn: str) -> None:
    net = build("cnn", classes=3, channels=1, size=8, norm=norm, bn=bn, generator=seeded())
    before = {key: value.clone() for key, value in net.state_dict().items()}

    def never() -> Tensor:
        raise AssertionError("asked for a batch")

    recompute_statistics(net, (never() for _ in range(1)))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


def test_a_static_net_evaluates_well_after_it() -> None:
    net = build("cnn", classes=3, channels=1, size=8, norm="bn", bn="static", generator=seeded())
    x = 5 + 3 * torch.randn(2000, 1, 8, 8, generator=seeded(1))
    recompute_statistics(net, [x])
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), net.train()(x), rtol=1e-3, atol=1e-3)
