"""`--scale` shrinks what lasts, in every method, by the type of an option and not by its name."""

import dataclasses
import math
import typing
from pathlib import Path

import pytest

from tacit.config.recipes import load_recipe
from tacit.config.resolve import resolve
from tacit.config.scale import lengths, scaled
from tacit.contract.method import Length
from tacit.methods import find_method, known_methods
from tacit.pieces.teacher import ramp_up

LENGTHS = {  # every option of every method that lasts some rounds, or epochs of one long round
    "bsemifl": {"warmup"},
    "cbafed": {"warmup", "warmup_epochs"},
    "ddrfed": {"warmup", "warmup_epochs", "diffusion_rounds", "generation_rounds"},
    "fed_consist": {"warmup", "warmup_epochs"},
    "fedavg": set[str](),
    "feddb": set[str](),
    "fedema": {"feature_rounds"},
    "fedfame": set[str](),
    "fedirm": {"ramp", "warmup", "warmup_epochs"},
    "fedmatch": set[str](),
    "fedrgd": {"warmup", "warmup_epochs"},
    "fedu": {"feature_rounds"},
    "fixmatch": {"warmup", "warmup_epochs"},
    "fl2": {"warmup"},
    "flexmatch": {"warmup", "warmup_epochs"},
    "freematch": {"warmup", "warmup_epochs"},
    "orchestra": {"feature_rounds"},
    "pdcfed": {"warmup", "warmup_epochs"},
    "pfedknow": {"warmup"},
    "provenance": {"generation_rounds", "warmup"},
    "rscfed": {"warmup", "warmup_epochs"},
    "semifl": set[str](),
}


@pytest.mark.parametrize("name", known_methods())
def test_every_length_of_a_method_is_marked_and_nothing_else(name: str) -> None:
    """A new method, or a new length, has to be entered above: forgotten ones would stay long in a small run."""
    kind = find_method(name)
    hints = typing.get_type_hints(kind, include_extras=True)
    marked = {
        field.name
        for field in dataclasses.fields(kind)
        if any(isinstance(mark, Length) for mark in getattr(hints[field.name], "__metadata__", ()))
    }
    assert marked == LENGTHS[name]


@pytest.mark.parametrize("name", known_methods())
def test_a_tenth_of_every_method(name: str) -> None:
    """What lasts 60 rounds lasts 6, every other option stays; epochs shrink where their stage is one round."""
    everywhere = "some-clients" in find_method(name).placements and name != "fedrgd"
    placement = {"data.placement": "some-clients" if everywhere else "server"}
    long = {key: 60 for key in LENGTHS[name] if not key.endswith("_epochs")}
    whole = resolve(
        {"method.name": name, "data.clients": 4, "rounds": 100, **placement},
        {f"method.{key}": value for key, value in long.items()},
    )
    small = scaled(whole, "tenth")[0].method
    assert {key: small[key] for key in long} == dict.fromkeys(long, 6)
    assert {key: value for key, value in small.items() if key not in long} == {
        key: value for key, value in whole.method.items() if key not in long
    }
    if "warmup_epochs" in LENGTHS[name]:
        once = resolve(whole.to_dict(), {"method.warmup": 1, "method.warmup_epochs": 501})
        assert scaled(once, "tenth")[0].method["warmup_epochs"] == 51


def test_the_ramp_of_fedirm_reaches_its_full_weight_at_a_tenth() -> None:
    for recipe in ("ddrfed/table1/cifar10-0.8-fedirm", "cbafed/table1/fashion-mnist-fedirm"):
        small = scaled(resolve(load_recipe(recipe)), "tenth")[0]
        assert small.method["ramp"] == 3
        assert ramp_up(small.rounds - 1, small.method["ramp"]) == 1.0
        assert ramp_up(math.ceil(0.1 * small.rounds), small.method["ramp"]) == 1.0  # as early as in the whole one


OWN = """
from dataclasses import dataclass
from typing import Annotated
from tacit import Count, Epochs, Length, Method, Rounds

@dataclass(frozen=True)
class Mine(Method):
    patience: Annotated[Rounds, "rounds before it begins"] = 40
    burn_in: Annotated[Count, Length(of="patience"), "epochs in each of them"] = 70
    warmup_style: Annotated[Count, "a number that is no length, whatever it is called"] = 40
    warmup: Annotated[Rounds, "rounds of labels alone"] = 1
    warmup_epochs: Annotated[Epochs, "epochs in each of them"] = 200
"""


def test_a_method_of_your_own_shrinks_by_its_types(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    whole = resolve({"method.name": str(path), "rounds": 100})
    assert lengths(whole.method) == {"patience": 40, "warmup_epochs": 200}
    small, said = scaled(whole, "tenth")
    assert [small.method[key] for key in ("patience", "burn_in", "warmup_style", "warmup_epochs")] == [4, 70, 40, 20]
    assert "4 of 40 patience" in said
    once = resolve(whole.to_dict(), {"method.patience": 1})
    assert lengths(once.method) == {"burn_in": 70, "warmup_epochs": 200}
