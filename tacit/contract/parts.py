"""Rounds over a part of a party's images: more meetings for the same number of passes (`train.parts`)."""

from typing import NamedTuple

import torch
from torch import Tensor

from tacit.contract.shard import Labeled, Shard
from tacit.core import seeds


def part_in_turn(count: int, parts: int, round_number: int, *name: int | str) -> Tensor:
    """Which of so many images a round is about: in `parts` rounds each of them once, then dealt out anew.

    Where there are fewer images than parts, nobody is left with none: the first of the deal comes again.

    >>> first, second = (part_in_turn(5, 2, turn, 0, "client-1") for turn in (0, 1))
    >>> len(first), len(second), sorted([*first.tolist(), *second.tolist()])
    (3, 2, [0, 1, 2, 3, 4])
    >>> [len(part_in_turn(1, 3, turn, 0)) for turn in range(3)], len(part_in_turn(0, 3, 0, 0))
    ([1, 1, 1], 0)
    """
    deal, turn = divmod(max(round_number, 0), parts)
    order = torch.randperm(count, generator=seeds.generator(*name, deal, "parts"))
    part = order.tensor_split(parts)[turn]
    return part if len(part) else order[:1]


class Turn(NamedTuple):
    """What a party works with in a round, and which of its unlabelled images these are."""

    shard: Shard
    which: Tensor


def shard_in_turn(shard: Shard, parts: int, round_number: int, *name: int | str) -> Turn:
    """The part of a shard that a round is about."""
    own = part_in_turn(len(shard.labeled), parts, round_number, *name, "labeled")
    others = part_in_turn(len(shard.unlabeled), parts, round_number, *name, "unlabeled")
    own_here, others_here = own.to(shard.labeled.labels.device), others.to(shard.unlabeled.device)
    labeled = Labeled(shard.labeled.images[own_here], shard.labeled.labels[own_here])
    repeated = min(len(own), len(others)) if shard.repeated else 0
    return Turn(Shard(labeled, shard.unlabeled[others_here], repeated, shard.views), others)
