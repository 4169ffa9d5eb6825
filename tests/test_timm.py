"""Models of timm by name, against a stand-in with timm's interface: timm itself needs torchvision."""

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runs import hub, same, world_of
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.nets import build


class StandIn(nn.Module):
    """As timm's models are without a head: `num_features`, `blocks`, `default_cfg`."""

    def __init__(self, in_chans: int, img_size: int, pretrained: bool) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, 24, 24), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1)}
        self.num_features = 6
        self.patch_embed = nn.Conv2d(in_chans, 6, 4, 4)
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        self.norm = nn.LayerNorm(6)
        self.register_buffer("grid", torch.arange(img_size // 4), persistent=False)  # in no state_dict
        if pretrained:
            nn.init.constant_(self.patch_embed.weight, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        assert int(self.grid.sum()) > 0
        return self.norm(self.blocks(self.patch_embed(x).flatten(2).mean(2)))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def create_model(name: str, pretrained: bool, num_classes: int, in_chans: int = 3, img_size: int = 24) -> nn.Module:
        asked.append({"name": name, "pretrained": pretrained, "in_chans": in_chans})
        if name != "vit_small_thing":
            raise RuntimeError(f"Unknown model ({name})")
        assert num_classes == 0
        return StandIn(in_chans, img_size, pretrained)

    module = types.ModuleType("timm")
    module.__spec__ = ModuleSpec("timm", None)
    module.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", module)
    return asked


def test_a_model_by_name_with_its_weights_its_size_and_its_normalisation(stand_in: list[dict[str, Any]]) -> None:
    place = world_of("fedavg", "server", net__name="timm:vit_small_thing", net__weights="pretrained")
    data = place[0].experiment.data
    assert (data.image_size, data.rgb, data.mean, data.std) == (24, True, (0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    first = hub(place).new_weights()
    assert bool((first["body.patch_embed.weight"] == 0.25).all())
    assert first["fc.weight"].shape == (10, 6)
    assert same(first, hub(place).new_weights())
    net = hub(place).model(first)
    assert net(torch.zeros(2, 3, 24, 24)).shape == (2, 10)


def test_first_weights_come_from_the_seed_alone(stand_in: list[dict[str, Any]]) -> None:
    def drawn(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        net = build("timm:vit_small_thing", classes=3, channels=3, size=24, generator=generator)
        return net.state_dict()

    before = torch.get_rng_state()
    one, two, other = drawn(1), drawn(1), drawn(2)
    assert same(one, two)
    assert not same(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_blocks_of_a_model_can_be_frozen(stand_in: list[dict[str, Any]]) -> None:
    net = build("timm:vit_small_thing", classes=3, channels=3, size=24).train_only("last-1")
    learning = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert learning == {
        *("fc.weight", "fc.bias", "body.blocks.1.weight", "body.blocks.1.bias", "body.norm.weight", "body.norm.bias")
    }


def test_what_timm_does_not_know_is_told(stand_in: list[dict[str, Any]]) -> None:
    with pytest.raises(TacitError, match=r"timm could not make 'resnet5' \(Unknown model"):
        build("timm:resnet5", classes=3, channels=3, size=24)
    asked = len(stand_in)
    for name in ("timm:hf-hub:somebody/net", "timm:../net", "timm:"):
        with pytest.raises(TacitError, match="There is no net"):
            build(name, classes=3, channels=3, size=24)
    assert len(stand_in) == asked  # timm was never asked


def test_without_timm_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(TacitError, match="pip install timm"):
        build("timm:vit_tiny_patch16_224", classes=3, channels=3, size=224)
    assert resolve({"net.name": "timm:vit_tiny_patch16_224"}).net.name == "timm:vit_tiny_patch16_224"
