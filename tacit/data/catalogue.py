"""All named data sets."""

from tacit.core.errors import TacitError, nearest
from tacit.data.classic_sets import CLASSIC_SETS
from tacit.data.entry import Source
from tacit.data.medical_sets import MEDICAL_SETS

SOURCES: dict[str, Source] = {source.name: source for source in (*CLASSIC_SETS, *MEDICAL_SETS)}


def find_source(name: str) -> Source:
    """The named source, or an error with the nearest name.

    >>> find_source("cifar10").images
    (50000, 10000)
    >>> find_source("cifar")
    Traceback (most recent call last):
    tacit.core.errors.TacitError: There is no data set 'cifar'... Did you mean 'cifar10'?...
    """
    if name in SOURCES:
        return SOURCES[name]
    if name == "medmnist/chestmnist":
        raise TacitError("medmnist/chestmnist is multi-label (14 labels for each image); choose a set with one.")
    raise TacitError(
        f"There is no data set '{name}' and no file or folder of that name.{nearest(name, SOURCES)} "
        "`tacit data list` shows the named sets; your own data is given by its path."
    )
