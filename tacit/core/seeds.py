"""Randomness by name: every generator comes from (seed, stage, round, who, purpose).

Nothing here or elsewhere in tacit touches a global generator. Two processes, two machines or a resumed
run that ask for the same name get the same numbers, whatever happened before.
"""

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def number(*name: int | str) -> int:
    """A 63-bit whole number that depends on every part of the name and on nothing else.

    >>> number(0, "main", 3, "client-7", "views") == number(0, "main", 3, "client-7", "views")
    True
    >>> number(0, "main", 3, "client-7", "views") == number(0, "main", 3, "client-8", "views")
    False
    >>> number("ab", "c") == number("a", "bc")          # the parts do not run together
    False
    >>> number(1) == number("1")                        # nor do numbers and words
    False
    """
    digest = hashlib.blake2b(repr(name).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*name: int | str) -> "torch.Generator":
    """A fresh torch generator (on the CPU, so that a GPU run makes the same draws).

    >>> import torch
    >>> a, b = generator(0, "x"), generator(0, "x")
    >>> torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b))
    True
    """
    import torch  # here, because the commands that only look at data do without it, and start much sooner

    return torch.Generator().manual_seed(number(*name))


def numpy_generator(*name: int | str) -> np.random.Generator:
    """The same for numpy code (partitions are drawn with it).

    >>> float(numpy_generator(0, "x").random()) == float(numpy_generator(0, "x").random())
    True
    """
    return np.random.default_rng(number(*name))
