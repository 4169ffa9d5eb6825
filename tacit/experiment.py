"""An experiment: what is written in TOML, checked before any work, and saved resolved with every run."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Placement = Literal["server", "clients", "some-clients"]
Partition = Literal["iid", "dirichlet", "dirichlet-client", "shards", "quantity"]


class Section(BaseModel):
    """A part of an experiment: frozen, and with no room for a misspelt key."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Data(Section):
    """Which images, who holds them, who holds labels."""

    name: str = Field("digits", description="a source (`tacit data list`), or the path of your own data")
    partition: Partition = Field("dirichlet", description="how images are dealt to the clients")
    alpha: Annotated[float, Field(gt=0, description="Dirichlet or quantity skew: small is skewed")] = 0.3
    shards: Annotated[int, Field(ge=1, description="shards a client holds (partition = shards)")] = 2
    min_size: Annotated[int, Field(ge=1, description="the least images a client must get")] = 10
    clients: Annotated[int, Field(ge=1, description="number of clients")] = 10
    placement: Placement = Field("server", description="who holds labels")
    labels: Annotated[int, Field(ge=1, description="labelled images in all (server, clients)")] = 50
    labeled_clients: Annotated[int, Field(ge=1, description="fully labelled clients (some-clients)")] = 1
    cover: Annotated[int, Field(ge=0, description="redraw until each class has this many labels")] = 0
    reveal: Literal["none", "all"] = Field("none", description="all: every label is given, the upper bound")
    subset: Annotated[int, Field(ge=0, description="use only so many training images (0: all)")] = 0
    test_subset: Annotated[int, Field(ge=0, description="use only so many test images (0: all)")] = 0
    image_size: Annotated[int, Field(ge=0, description="resize to this many pixels (0: as they are)")] = 0
    rgb: bool = Field(False, description="turn grey images into three equal channels")
    skip_unreadable: bool = Field(False, description="own folders: go on without unreadable files")
    split: str = Field("", description="a saved split to use instead of drawing one")
