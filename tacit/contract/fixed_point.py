"""Fixed-point numbers that are added up modulo a power of two, as secure aggregation needs them (Bonawitz et al., CCS
2017). Sums of whole numbers are exact in any order, and masks that cancel leave no trace."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ring = NDArray[Any]  # uint32 or uint64: numpy adds these modulo 2³² and 2⁶⁴

ROOM = 1.004  # for the half steps of the rounding of millions of parties
EXACT = 50  # bits of a sum, at most: a float64 has 53, and what is added up must come out of it as it went in


def ring_type(bits: int) -> np.dtype[Any]:
    """The type of numbers modulo 2^bits, the same bytes on every machine."""
    return np.dtype("<u4" if bits == 32 else "<u8")


@dataclass(frozen=True)
class FixedPoint:
    """Numbers in steps of 2^−fraction, modulo 2^bits; those above the middle are negative ones."""

    bits: int
    fraction: int

    @classmethod
    def wide(cls, bits: int, most: float) -> "FixedPoint":
        """The finest steps with which a sum of absolute values up to `most` does not reach the modulus' half.

        >>> FixedPoint.wide(32, most=1000.0)                                    # 2³¹ / 1000 > 2²¹
        FixedPoint(bits=32, fraction=21)
        """
        return cls(bits, math.floor(min(bits - 1, EXACT) - math.log2(max(most, 2.0**-60) * ROOM)))

    @property
    def step(self) -> float:
        return math.ldexp(1.0, -self.fraction)

    def encode(self, values: Floats) -> Ring:
        """Each value rounded to the nearest step: off by half of one, at most.

        >>> FixedPoint(32, 2).encode(np.array([0.3, -0.25]))                    # 0.3 · 4 = 1.2; 2³² − 1
        array([         1, 4294967295], dtype=uint32)
        """
        whole = np.rint(np.ldexp(values, self.fraction)).astype(np.int64)
        return whole.astype(ring_type(self.bits))

    def decode(self, total: Ring) -> Floats:
        """The sum as numbers. Of n values it is off by n half steps, at most, as long as it is not too large.

        >>> point, values = FixedPoint.wide(32, most=10.0), np.random.default_rng(0).uniform(-1, 1, (10, 1000))
        >>> total = sum(point.encode(row) for row in values)
        >>> bool(np.abs(point.decode(total) - values.sum(axis=0)).max() <= 10 * point.step / 2)
        True
        """
        signed = total.astype(ring_type(self.bits)).view(np.dtype(f"<i{self.bits // 8}"))
        return np.ldexp(signed.astype(np.float64), -self.fraction)


def clipped(values: Floats, limit: float) -> tuple[Floats, int]:
    """Values within ±limit, and how many had to be moved there.

    >>> clipped(np.array([0.5, -3.0]), 2.0)
    (array([ 0.5, -2. ]), 1)
    """
    outside = int((np.abs(values) > limit).sum())
    return (np.clip(values, -limit, limit), outside) if outside else (values, 0)
