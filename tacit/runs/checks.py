"""What can be said of an experiment from its settings alone: told before data is loaded and anything is written."""

from pathlib import Path

from tacit import nets
from tacit.core.errors import TacitError, nearest
from tacit.core.machine import pick_device
from tacit.core.memory_bounds import check_images
from tacit.core.settings import Experiment
from tacit.data import placement
from tacit.data.catalogue import find_source
from tacit.data.published import PUBLISHED, check_published
from tacit.data.sources import is_own
from tacit.data.split import load_split


def check_settings(experiment: Experiment, saved_split: Path | None = None) -> None:
    """Refuse a device, data, a split or a net that is not there, or that would take more memory than there is.

    The split that was saved with a run takes the place of the one that the settings name.
    """
    pick_device(experiment.device)
    data, net = experiment.data, experiment.net.model_dump()
    if data.split in PUBLISHED:
        check_published(data)
    elif data.split and not (saved_split and saved_split.is_file()):
        if not Path(data.split).exists() and (near := nearest(data.split, PUBLISHED)):
            raise TacitError(f"There is no split '{data.split}', neither published nor saved here.{near}")
        load_split(Path(data.split))
    for key, path in (*(("sites", site) for site in data.sites), *(("tests", test) for test in data.tests)):
        if not Path(path).exists():
            raise TacitError(f"data.{key}: {path} does not exist. Expected a folder, .npz, .csv or .parquet.")
    if data.sites or is_own(data.name):  # how many images, and of what size, is known when they have been read
        nets.outline(**net, classes=2, channels=3, size=data.image_size or 32)
        return
    source = find_source(data.name)
    if data.tests:
        raise TacitError(
            f"data.tests is for your own images, but '{data.name}' has test images of its own: leave it out."
        )
    channels = 3 if data.rgb else source.shape[0]
    if data.image_size or channels != source.shape[0]:  # as they are, they stay on the disk
        check_images(sum(source.images), channels, data.image_size or source.shape[-1])
    nets.outline(**net, classes=len(source.classes), channels=channels, size=data.image_size or source.shape[-1])
    if data.partition != "sites" and not source.total:  # where the split into train and test is ours, counts may differ
        placement.check(data, source.images[0], len(source.classes), source.images[0])
