"""The nets: shapes, sizes by hand, an independent ResNet-18, first weights, BN policies, refusals."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tacit.core.errors import TacitError
from tacit.nets import build, known, parameter_count
from tacit.nets.folding import PAYS_FROM, folded, for_evaluation
from tacit.nets.layers import StaticBatchNorm2d, initialise

NAMES = ["cnn", "wrn-10-1", "resnet18", "vit-tiny"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int, channels: int, size: int, seed: int = 1) -> Tensor:
    return torch.randn(count, channels, size, size, generator=seeded(seed))


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("cnn", "imagenet"),
        ("wrn-10-1", "imagenet"),
        ("resnet18", "imagenet"),
        ("resnet18", "cifar"),
        ("vit-tiny", "imagenet"),
    ],
)
@pytest.mark.parametrize("norm", ["bn", "gn"])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 8), (1, 28), (3, 21)])
def test_shapes_and_gradients(name: str, norm: str, stem: str, channels: int, size: int) -> None:
    net = build(name, classes=7, channels=channels, size=size, norm=norm, stem=stem, generator=seeded())
    x = images(3, channels, size)
    features, logits = net.features(x), net(x)
    assert logits.shape == (3, 7)
    assert features.shape == (3, net.head.in_features)
    assert torch.equal(net.head(features), logits)
    F.cross_entropy(logits, torch.tensor([0, 1, 2])).backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("size", [8, 9, 12, 15, 31, 33, 64])
def test_any_size(size: int) -> None:
    for name in NAMES:
        net = build(name, classes=4, channels=1, size=size, generator=seeded()).eval()
        assert net(images(1, 1, size)).isfinite().all(), name


def test_head_is_in_the_state_dict_once() -> None:
    for name in NAMES:
        net = build(name, classes=5, channels=3, size=16)
        heads = [key for key, value in net.state_dict().items() if value.shape[:1] == (5,)]
        assert heads == ["fc.weight", "fc.bias"], name
        assert net.head is net.fc


# ---------------------------------------------------------------------------------------------- counts


def wide_count(depth: int, width: int, classes: int, channels: int) -> int:
    """Stem; per block two norms (scale and shift), two 3×3 convolutions, a 1×1 shortcut; norm; head."""
    total, inputs = 9 * channels * 16, 16
    for stage, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range((depth - 4) // 6):
            total += 2 * inputs + 9 * inputs * outputs + 2 * outputs + 9 * outputs * outputs
            if block == 0 and (stage > 0 or inputs != outputs):
                total += inputs * outputs
            inputs = outputs
    return total + 2 * inputs + inputs * classes + classes


def transformer_count(tokens: int, patch: int, classes: int, channels: int, width: int = 192) -> int:
    block = 2 * 2 * width  # two norms
    block += 3 * width * width + 3 * width + width * width + width  # query, key, value; projection
    block += 4 * width * width + 4 * width + 4 * width * width + width  # perceptron
    patches = patch * patch * channels * width + width
    return patches + width + tokens * width + 12 * block + 2 * width + width * classes + classes


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_counts_of_the_papers_nets(norm: str) -> None:
    def count(name: str, classes: int = 10, channels: int = 3, **options: str) -> int:
        return parameter_count(
            build(name, classes=classes, channels=channels, size=32, norm=norm, **options)  # type: ignore[arg-type]
        )

    assert count("wrn-28-2") == wide_count(28, 2, 10, 3) == 1_467_610
    assert count("wrn-16-1", classes=4, channels=1) == wide_count(16, 1, 4, 1)
    # 11,689,512 with 1000 classes is the number on every model page; each class costs 512 + 1.
    assert count("resnet18", classes=1000) == 11_689_512
    assert count("resnet18") == 11_689_512 - 990 * 513 == 11_181_642
    assert count("resnet18", channels=1) == 11_181_642 - 2 * 49 * 64
    assert count("resnet18", stem="cifar") == 11_181_642 - 3 * (49 - 9) * 64 == 11_173_962
    assert count("vit-tiny") == transformer_count(65, 4, 10, 3) == 5_362_762
    # three convolutions, three norms, the head
    assert count("cnn", channels=1) == 288 + 18_432 + 73_728 + 2 * (32 + 64 + 128) + 11_530 == 104_426
    assert count("cnn-8", channels=1) == 72 + 1_152 + 4_608 + 2 * (8 + 16 + 32) + 32 * 9 * 10 + 10


def test_count_of_the_wide_net_for_cifar100() -> None:
    net = build("wrn-28-8", classes=100, channels=3, size=32)
    assert parameter_count(net) == wide_count(28, 8, 100, 3) == 23_401_012


# ------------------------------------------------------------------------- an independent ResNet-18, WRN


def plain_norm(x: Tensor, weights: dict[str, Tensor], key: str) -> Tensor:
    mean, variance = weights[f"{key}.running_mean"], weights[f"{key}.running_var"]
    scale = weights[f"{key}.weight"] / (variance + 1e-5).sqrt()
    return (x - mean[:, None, None]) * scale[:, None, None] + weights[f"{key}.bias"][:, None, None]


def plain_resnet18(x: Tensor, weights: dict[str, Tensor], stem: str) -> Tensor:
    """Straight from the paper's table, with the usual names, evaluation mode."""

    def step(x: Tensor, conv: str, norm: str, stride: int, padding: int) -> Tensor:
        return plain_norm(F.conv2d(x, weights[conv + ".weight"], stride=stride, padding=padding), weights, norm)

    if stem == "imagenet":
        x = F.max_pool2d(step(x, "conv1", "bn1", 2, 3).relu(), 3, 2, 1)
    else:
        x = step(x, "conv1", "bn1", 1, 1).relu()
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            key, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            out = step(x, f"{key}.conv1", f"{key}.bn1", stride, 1).relu()
            out = step(out, f"{key}.conv2", f"{key}.bn2", 1, 1)
            if stride == 2:
                x = step(x, f"{key}.downsample.0", f"{key}.downsample.1", 2, 0)
            x = (out + x).relu()
    return x.flatten(2).mean(2) @ weights["fc.weight"].T + weights["fc.bias"]


def plain_wide(x: Tensor, weights: dict[str, Tensor], blocks: int) -> Tensor:
    x = F.conv2d(x, weights["conv1.weight"], padding=1)
    for layer in (1, 2, 3):
        for block in range(blocks):
            key, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            active = plain_norm(x, weights, f"{key}.bn1").relu()
            out = F.conv2d(active, weights[f"{key}.conv1.weight"], stride=stride, padding=1)
            out = plain_norm(out, weights, f"{key}.bn2").relu()
            out = F.conv2d(out, weights[f"{key}.conv2.weight"], padding=1)
            if block == 0:
                x = F.conv2d(active, weights[f"{key}.shortcut.weight"], stride=stride)
            x = out + x
    x = plain_norm(x, weights, "bn1").relu()
    return x.flatten(2).mean(2) @ weights["fc.weight"].T + weights["fc.bias"]


def with_lively_norms(net: nn.Module) -> nn.Module:
    """Norm layers away from their start, so that mixing two of them up shows."""
    generator = seeded(7)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                tensor.data.uniform_(0.5, 1.5, generator=generator)
    return net.eval()


@pytest.mark.parametrize(("stem", "channels", "size"), [("imagenet", 3, 32), ("imagenet", 1, 28), ("cifar", 3, 16)])
def test_resnet18_equals_a_plain_one(stem: str, channels: int, size: int) -> None:
    net = build("resnet18", classes=10, channels=channels, size=size, norm="bn", stem=stem, generator=seeded())
    with_lively_norms(net)
    x = images(4, channels, size)
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain_resnet18(x, net.state_dict(), stem), rtol=1e-5, atol=1e-5)


def test_wide_net_equals_a_plain_one() -> None:
    net = with_lively_norms(build("wrn-16-2", classes=10, channels=3, size=16, norm="bn", generator=seeded()))
    x = images(4, 3, 16)
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain_wide(x, net.state_dict(), 2), rtol=1e-5, atol=1e-5)


def test_leaky_is_the_ssl_suites_variant() -> None:
    net = build("wrn-10-2", classes=10, channels=3, size=16, norm="bn", activation="leaky", generator=seeded())
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.001)}
    leaks = {module.negative_slope for module in net.modules() if isinstance(module, nn.LeakyReLU)}
    assert leaks == {0.1}
    assert not any(isinstance(module, nn.ReLU) for module in net.modules())


# ------------------------------------------------------------------------------------------ first weights


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_first_weights_come_from_the_generator_alone(name: str, norm: str) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        return build(name, classes=5, channels=3, size=16, norm=norm, generator=seeded(seed)).state_dict()

    before = torch.get_rng_state()
    first, again, other = weights(3), weights(3), weights(4)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["fc.weight"], other["fc.weight"])
    for key, value in first.items():
        assert value.device.type == "cpu"
        assert value.isfinite().all(), key


def test_no_weight_is_forgotten() -> None:
    for name in NAMES:
        net = build(name, classes=5, channels=3, size=16, norm="bn", generator=seeded(3))
        expected = {key: value.clone() for key, value in net.state_dict().items()}
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.data.fill_(99)
        initialise(net, seeded(3))
        assert all(torch.equal(value, expected[key]) for key, value in net.state_dict().items()), name


def test_a_module_without_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match="PReLU"):
        initialise(nn.Sequential(nn.PReLU()), seeded())


def test_first_weights_have_the_intended_spread() -> None:
    weights = build("resnet18", classes=10, channels=3, size=32, norm="bn", generator=seeded()).state_dict()
    # normal with variance 2 / (9 · 512)
    assert weights["layer4.1.conv2.weight"].std().item() == pytest.approx((2 / 4608) ** 0.5, rel=0.01)
    assert weights["layer2.0.downsample.0.weight"].std().item() == pytest.approx((2 / 128) ** 0.5, rel=0.05)
    assert weights["fc.weight"].abs().max().item() == pytest.approx(512**-0.5, rel=0.01)
    assert weights["fc.bias"].eq(0).all()
    assert weights["bn1.weight"].eq(1).all()
    assert weights["bn1.running_var"].eq(1).all()
    assert weights["bn1.num_batches_tracked"].dtype == torch.int64


def test_without_generator_all_is_zero_and_can_be_loaded() -> None:
    empty = build("cnn", classes=10, channels=1, size=8, norm="bn")
    assert all(value.eq(0).all() for value in empty.state_dict().values())
    full = build("cnn", classes=10, channels=1, size=8, norm="bn", generator=seeded())
    empty.load_state_dict(full.state_dict())
    assert torch.equal(empty.eval()(images(2, 1, 8)), full.eval()(images(2, 1, 8)))


# ------------------------------------------------------------------------------------------- norm layers


def running(net: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in net.state_dict().items() if "running" in key or "tracked" in key}


def test_average_policy_moves_running_statistics() -> None:
    net = build("cnn", classes=3, channels=1, size=8, norm="bn", bn="average", generator=seeded())
    before = running(net)
    net.train()(images(4, 1, 8))
    after = running(net)
    assert len(before) == 9
    assert all(not torch.equal(before[key], after[key]) for key in before)


def test_static_policy_trains_like_average_but_keeps_its_buffers() -> None:
    average = build("cnn", classes=3, channels=1, size=8, norm="bn", bn="average", generator=seeded())
    static = build("cnn", classes=3, channels=1, size=8, norm="bn", bn="static", generator=seeded())
    assert list(average.state_dict()) == list(static.state_dict())
    assert any(isinstance(module, StaticBatchNorm2d) for module in static.modules())
    x, before = images(4, 1, 8), running(static)
    assert torch.equal(average.train()(x), static.train()(x))
    assert all(torch.equal(before[key], value) for key, value in running(static).items())
    static.load_state_dict(average.state_dict())  # evaluation reads the buffers
    assert torch.equal(average.eval()(x), static.eval()(x))
    assert not torch.allclose(static.eval()(x), static.train()(x))


def test_batch_policy_has_no_buffers_and_always_uses_the_batch() -> None:
    net = build("cnn", classes=3, channels=1, size=8, norm="bn", bn="batch", generator=seeded())
    assert running(net) == {}
    x = images(6, 1, 8)
    assert torch.equal(net.train()(x), net.eval()(x))
    assert not torch.allclose(net(x)[:3], net(x[:3]))  # who else is in the batch matters


def test_group_norm_ignores_the_policy_and_the_rest_of_the_batch() -> None:
    net = build("cnn", classes=3, channels=1, size=8, norm="gn", bn="static", generator=seeded())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    x = images(6, 1, 8)
    torch.testing.assert_close(net(x)[:3], net(x[:3]))


def test_a_black_edge_is_all_that_an_odd_size_costs_a_transformer() -> None:
    net = build("vit-tiny", classes=3, channels=1, size=21, generator=seeded()).eval()  # patches of 3: 7×7
    assert net.padding == 0
    net = build("vit-tiny", classes=3, channels=1, size=22, generator=seeded()).eval()  # 22 → 24: 8×8
    assert net.padding == 2
    assert net.pos_embed.shape == (1, 65, 192)


def test_cnn_with_batch_norm_trains_on_a_single_tiny_image() -> None:
    net = build("cnn", classes=3, channels=1, size=8, norm="bn", generator=seeded())
    assert net.train()(images(1, 1, 8)).isfinite().all()  # no map is 1×1, so one image has a variance


def test_preferred_layouts() -> None:
    layouts = {name: build(name, classes=2, channels=1, size=8).channels_last for name in NAMES}
    assert layouts == {"cnn": True, "wrn-10-1": True, "resnet18": False, "vit-tiny": False}


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "resnet19"}, "no net 'resnet19'.*Did you mean 'resnet18'"),
        ({"name": "wrn28-2"}, "Did you mean 'wrn-28-2'"),
        ({"name": "wrn-27-2"}, "6n \\+ 4.*Write 'wrn-28-2'"),
        ({"name": "wrn-4-2"}, "Write 'wrn-10-2'"),
        ({"name": "wrn-28-0"}, "width must be at least 1"),
        ({"norm": "bnn"}, "net.norm is 'bnn'.*bn, gn.*Did you mean 'bn'"),
        ({"bn": "running"}, "one of average, static, batch"),
        ({"stem": "cifar10"}, "Did you mean 'cifar'"),
        ({"activation": "gelu"}, "one of relu, leaky"),
        ({"size": 7}, "size = 7.*at least 8.*data.image_size"),
        ({"classes": 1}, "classes = 1.*at least 2"),
        ({"channels": 0}, "channels = 0"),
    ],
)
def test_refusals(wrong: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"name": "wrn-10-1", "classes": 10, "channels": 3, "size": 32, **wrong}
    with pytest.raises(TacitError, match=message):
        build(**options)  # type: ignore[arg-type]


def test_known_names_are_built() -> None:
    names = [name for name, line in known() if line]
    assert names == ["cnn", "wrn-D-W", "resnet18", "vit-tiny", "lite0 … lite4", "timm:NAME"]
    for name in [*names[:4], "lite0", "lite4"]:
        build(name.replace("D-W", "16-1"), classes=10, channels=3, size=32)


@pytest.mark.parametrize("name", ["resnet18", "wrn-10-1"])
@pytest.mark.parametrize("bn", ["average", "static"])
@pytest.mark.parametrize("size", [28, 32, 48])
def test_folded_norms_change_nothing_but_the_time(name: str, bn: str, size: int) -> None:
    """On maps of few pixels and on larger ones; the net itself stays as it was."""
    net = build(name, classes=7, channels=3, size=size, norm="bn", bn=bn, generator=seeded())
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_(0, 0.3, generator=seeded(5))
            layer.running_var.uniform_(0.5, 2, generator=seeded(6))
    net.arrange(torch.device("cpu"), size).eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    x = images(9, 3, size)
    faster = folded(net)
    if name == "resnet18" and size <= 32:
        assert faster is net, "in the layout for few pixels a norm costs next to nothing"
        return
    count = sum(isinstance(layer, nn.BatchNorm2d) for layer in faster.modules())
    assert count < sum(isinstance(layer, nn.BatchNorm2d) for layer in net.modules())
    with torch.inference_mode():
        torch.testing.assert_close(faster(x), net(x), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize(("norm", "bn"), [("gn", "average"), ("bn", "batch")])
def test_norms_without_statistics_are_not_folded(norm: str, bn: str) -> None:
    net = build("resnet18", classes=7, channels=1, size=28, norm=norm, bn=bn, generator=seeded())
    assert folded(net) is net
    assert for_evaluation(net, 10_000) is net


def test_few_images_are_not_worth_a_copy() -> None:
    net = build("resnet18", classes=7, channels=1, size=28, norm="bn", generator=seeded())
    assert for_evaluation(net, PAYS_FROM - 1) is net
    assert for_evaluation(net, PAYS_FROM) is not net
    assert for_evaluation(nn.Linear(2, 2), PAYS_FROM) is not net
