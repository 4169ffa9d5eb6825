"""What bounds a client's influence on the model ([robust]) and what the model tells of a client ([privacy])."""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tacit.core.section import Section

MOST = 1_000_000_000
MOST_SITES = 1_000_000
OF_SUMS = ("bits", "range", "threshold", "neighbours")  # of secure aggregation
# The settings of differential privacy: without `clip` they promise nothing.
OF_NOISE = ("noise", "statistics_noise", "delta", "epsilon", "where", "sampling", "examples", "randomness")


class Robust(Section):
    """Bounds on what a client may send, and means that a few bad clients cannot move far."""

    mean: Literal["mean", "median", "trimmed-mean", "multi-krum"] = Field(
        "mean", description="of clients' models: median and trimmed-mean by coordinate, multi-krum by distance"
    )
    trim: Annotated[float, Field(ge=0, lt=0.5, description="trimmed-mean: share left out at each end, as 0.2")] = 0.0
    byzantine: Annotated[int, Field(ge=0, le=MOST, description="multi-krum: bad clients to be survived")] = 0
    max_examples: Annotated[int, Field(ge=0, le=MOST, description="most examples a client may tell of (0: any)")] = 0
    max_norm: Annotated[float, Field(ge=0, le=1e9, description="largest norm of an update (0: any)")] = 0.0
    norm_quantile: Annotated[
        float, Field(ge=0, le=1, description="instead: this quantile of the norms of recent rounds, as 0.5 (0: none)")
    ] = 0.0
    norm_rounds: Annotated[int, Field(ge=1, le=1000, description="norm_quantile: so many rounds are recent")] = 5
    norm_factor: Annotated[float, Field(gt=0, le=1e6, description="norm_quantile: times this")] = 1.0
    out_of_bounds: Literal["clip", "refuse"] = Field("clip", description="what becomes of a reply out of bounds")

    @model_validator(mode="after")
    def _belongs_together(self) -> "Robust":
        if self.mean == "trimmed-mean" and not self.trim:
            raise ValueError('mean = "trimmed-mean" needs a share to leave out at each end: write trim = 0.2 beside it')
        if self.mean == "multi-krum" and not self.byzantine:
            raise ValueError('mean = "multi-krum" needs a number of bad clients: write byzantine = 1 beside it')
        if self.trim and self.mean != "trimmed-mean":
            raise ValueError(f'trim is for mean = "trimmed-mean"; here it is "{self.mean}"')
        if self.byzantine and self.mean != "multi-krum":
            raise ValueError(f'byzantine is for mean = "multi-krum"; here it is "{self.mean}"')
        if self.max_norm and self.norm_quantile:
            raise ValueError("max_norm and norm_quantile are two ways to bound one thing: leave one of them out")
        if not self.norm_quantile and (self.norm_rounds, self.norm_factor) != (5, 1.0):
            raise ValueError("norm_rounds and norm_factor are for norm_quantile: write norm_quantile = 0.5 beside them")
        if self.out_of_bounds != "clip" and not self.bounds:
            raise ValueError("out_of_bounds needs a bound: write max_norm, norm_quantile or max_examples beside it")
        return self

    @property
    def bounds(self) -> bool:
        """Whether anything that a client sends is bounded beyond what its declaration says."""
        return bool(self.max_examples or self.bounds_norms)

    @property
    def bounds_norms(self) -> bool:
        return bool(self.max_norm or self.norm_quantile)

    @property
    def on(self) -> bool:
        return bool(self.changed)


class Privacy(Section):
    """Client-level differential privacy: clip each update, average with a fixed denominator, add Gaussian noise."""

    clip: Annotated[float, Field(gt=0, le=1e9)] | None = Field(
        None, description="largest norm of an update; what is longer is cut"
    )
    noise: Annotated[float, Field(ge=0, le=1e9, description="of the sum of updates, in multiples of clip")] = 0.0
    statistics_noise: Annotated[
        float, Field(ge=0, le=1e9, description="of each statistic's sum, in multiples of its own bound")
    ] = 0.0
    delta: Annotated[float, Field(gt=0, lt=1, description="of (epsilon, delta); well below 1 / clients")] = 1e-5
    epsilon: Annotated[float, Field(gt=0, le=1e9)] | None = Field(
        None, description="budget: the run ends before it is exceeded"
    )
    where: Literal["server", "clients"] = Field("server", description="who adds the noise; clients: a share each")
    sampling: Literal["poisson", "fixed"] = Field(
        "poisson", description="who is asked: each client by chance, or a fixed number (weaker bound)"
    )
    examples: Annotated[
        int, Field(ge=1, le=MOST, description="as how many images each client counts, and the most it may count")
    ] = 100
    randomness: Literal["auto", "system", "seed"] = Field(
        "auto", description="of the noise: by the seed in simulations, by the system at real sites"
    )
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
    def _clipped_first(self) -> "Privacy":
        if not self.on:
            if set(self.changed) & set(OF_NOISE):
                raise ValueError(
                    "noise without clipping protects nobody: a single update may be as long as it likes. Write "
                    "clip = 1.0 (the largest norm of an update), or leave [privacy] out"
                )
            return self
        if self.epsilon is not None and not self.noise:
            raise ValueError("epsilon is a budget for noise, and noise is 0: write noise = 1.0, or leave epsilon out")
        if self.statistics_noise and not self.noise:
            raise ValueError("statistics_noise without noise leaves the model unprotected: write noise = 1.0, too")
        if self.where == "clients" and self.sampling != "fixed":
            raise ValueError(
                'where = "clients" needs sampling = "fixed": a client must know of how many shares its noise is one'
            )
        return self

    @model_validator(mode="after")
    def _sums_fit(self) -> "Privacy":
        stray = [name for name in self.changed if name in OF_SUMS]
        if stray and not self.secure_aggregation:
            raise ValueError(
                f"{stray[0]} is for secure aggregation, which is off: write secure_aggregation = true beside it, or "
                f"leave {stray[0]} out"
            )
        if self.neighbours % 2:
            raise ValueError(
                f"neighbours = {self.neighbours} is odd, but a client has as many on one side as on the other: write "
                f"neighbours = {self.neighbours + 1}"
            )
        if self.secure_aggregation and self.on:
            raise ValueError(
                "clip (differential privacy) and secure_aggregation do not go together: the first averages clients' "
                "updates one by one. Leave one of them out"
            )
        return self

    @property
    def on(self) -> bool:
        """Whether there is differential privacy."""
        return self.clip is not None

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
