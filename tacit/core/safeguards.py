"""What guards parties against each other: [privacy]."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tacit.core.section import Section

MOST_SITES = 1_000_000


class Privacy(Section):
    """What the server is not to learn of single clients."""

    secure_aggregation: bool = Field(False, description="the server learns sums over clients, and no client's own")
    bits: Literal[32, 64] = Field(32, description="secure aggregation: bits of a number on its way")
    range: Annotated[
        float, Field(gt=0, le=1e6, description="secure aggregation: weights beyond it are clipped, and counted")
    ] = 16.0
    threshold: Annotated[
        int, Field(ge=0, le=MOST_SITES, description="secure aggregation: least clients of a sum (0: two thirds)")
    ] = 0
    neighbours: Annotated[
        int, Field(ge=0, le=MOST_SITES, description="secure aggregation: clients that one exchanges keys with (0: all)")
    ] = 0

    @model_validator(mode="after")
    def _only_with_secure_aggregation(self) -> "Privacy":
        changed = [name for name in ("bits", "range", "threshold", "neighbours") if name in self._changed]
        if changed and not self.secure_aggregation:
            raise ValueError(
                f"{changed[0]} is for secure aggregation, which is off: write secure_aggregation = true beside it, or "
                f"leave {changed[0]} out"
            )
        if self.neighbours % 2:
            raise ValueError(
                f"neighbours = {self.neighbours} is odd, but a client has as many on one side as on the other: write "
                f"neighbours = {self.neighbours + 1}"
            )
        return self

    @property
    def _changed(self) -> set[str]:
        """The settings that are not as they are by default."""
        return {name for name, info in type(self).model_fields.items() if getattr(self, name) != info.default}

    def circle(self, asked: int) -> int:
        """How many clients share a client's secrets, itself included, where so many are asked.

        >>> Privacy().circle(10), Privacy(secure_aggregation=True, neighbours=4).circle(10)
        (10, 5)
        """
        return min(asked, self.neighbours + 1) if self.neighbours else asked  # itself, and half of them on each side

    def least(self, asked: int) -> int:
        """How many clients a sum has at least, where so many are asked; so many of a circle open it. Never one alone.

        >>> [Privacy().least(asked) for asked in (1, 2, 3, 4, 10)]
        [2, 2, 2, 3, 7]
        >>> Privacy(secure_aggregation=True, threshold=9).least(10)
        9
        """
        return self.threshold or max(2, math.ceil(2 * self.circle(asked) / 3))
