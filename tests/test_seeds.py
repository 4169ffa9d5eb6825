"""Randomness has a name and no memory."""

import torch

from tacit.core import seeds


def test_every_part_of_the_name_matters() -> None:
    base = (0, "main", 3, "client-1/0", "views")
    others = [(1, *base[1:]), (0, "warm-up", *base[2:]), (*base[:2], 4, *base[3:]), (*base[:4], "clients")]
    numbers = [seeds.number(*name) for name in [base, *others]]
    assert len(set(numbers)) == len(numbers)


def test_a_fixed_number_stays_fixed() -> None:
    """Runs of different releases agree only while this does not change."""
    assert seeds.number(0, "main", 3, "client-7", "views") == 3795676888887695037


def test_the_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    torch.rand(3, generator=seeds.generator(0, "x"))
    seeds.numpy_generator(0, "x").random(3)
    assert torch.equal(torch.get_rng_state(), before)
