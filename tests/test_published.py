"""The split of CBAFed's public code: as many images of each class at the labelled client as its authors had."""

import dataclasses

import numpy as np
import pytest

from tacit.config.recipes import load_recipe
from tacit.config.resolve import resolve
from tacit.config.scale import scaled
from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data.catalogue import SOURCES
from tacit.data.dataset import Dataset
from tacit.data.published import PUBLISHED
from tacit.data.split import Split, class_table, load_split, make_split, title
from tacit.runs.checks import check_settings

COUNTS = [15, 292, 986, 116, 63, 1285, 1352, 1438, 807, 267]
SETTINGS = Data(name="svhn", split="cbafed-svhn", placement="some-clients", partition="dirichlet", alpha=0.8, cover=1)


@pytest.fixture(scope="module")
def svhn() -> Dataset:
    """SVHN's labels, as many as it has of each class; the images do not matter here."""
    train = np.repeat(np.arange(10), SOURCES["svhn"].train)
    return Dataset(
        "svhn",
        np.zeros((len(train), 1, 1, 1), np.uint8),
        np.random.default_rng(0).permutation(train),
        np.zeros((10, 1, 1, 1), np.uint8),
        np.arange(10),
        SOURCES["svhn"].classes,
        (0.0,),
        (1.0,),
        fingerprint="svhn",
    )


def table(split: Split, data: Dataset) -> tuple[np.ndarray, np.ndarray]:
    return class_table(split, np.asarray(data.train_labels), 10)


def test_the_labelled_client_has_the_published_counts(svhn: Dataset, tmp_path) -> None:  # type: ignore[no-untyped-def]
    split = make_split(svhn, SETTINGS, seed=0)
    labeled, unlabeled = table(split, svhn)
    assert labeled[1].tolist() == COUNTS == list(PUBLISHED["cbafed-svhn"].labeled)
    assert labeled[2:].sum() == 0
    assert (labeled + unlabeled).sum(axis=0).tolist() == list(SOURCES["svhn"].train)  # every image, once
    held = np.concatenate([np.concatenate([part.labeled, part.unlabeled]) for part in split.clients])
    assert len(np.unique(held)) == len(held) == 73257
    assert len(split.clients) == 10
    assert min(len(part.unlabeled) for part in split.clients[1:]) >= SETTINGS.min_size
    assert title(split) == "svhn: cbafed-svhn, the rest dirichlet 0.8, 10 clients, 1 labelled, seed 0"
    other = make_split(svhn, SETTINGS, seed=1)
    assert table(other, svhn)[0][1].tolist() == COUNTS  # the counts stay, the images and the rest are drawn
    assert not np.array_equal(other.clients[0].labeled, split.clients[0].labeled)
    split.save(tmp_path / "split.npz")
    assert load_split(tmp_path / "split.npz").recipe["published"] == "cbafed-svhn"
    everything = make_split(svhn, SETTINGS.model_copy(update={"reveal": "all"}), seed=0)
    assert table(everything, svhn)[0].sum() == 73257


def test_a_smaller_one_keeps_the_shape(svhn: Dataset) -> None:
    small, _ = scaled(resolve(load_recipe("cbafed/released/svhn-cbafed")), "tenth")
    labeled, _ = table(make_split(svhn, small.data, seed=0), svhn)
    assert labeled[1].tolist() == [2, 30, 99, 12, 7, 129, 136, 144, 81, 27]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "cifar10"}, "is a split with data.name = svhn, but the experiment says cifar10"),
        ({"clients": 5}, "data.clients = 10"),
        ({"placement": "server"}, "data.placement = some-clients"),
        ({"labeled_clients": 2}, "data.labeled_clients = 1"),
        ({"split": "cbafed-svnh"}, "There is no split 'cbafed-svnh', neither published nor saved here. Did you mean"),
    ],
)
def test_what_it_does_not_go_with_is_told_before_any_work(changes: dict, message: str) -> None:
    settings = {f"data.{key}": value for key, value in {**SETTINGS.model_dump(), **changes}.items()}
    with pytest.raises(TacitError, match=message):
        check_settings(resolve(settings))


def test_more_of_a_class_than_it_has_is_refused(svhn: Dataset) -> None:
    with pytest.raises(TacitError, match="has 15 images of its rarest class"):
        make_split(svhn, SETTINGS.model_copy(update={"cover": 16}), seed=0)
    few = dataclasses.replace(svhn, train_labels=np.arange(1000) % 10, train_images=svhn.train_images[:1000])
    with pytest.raises(TacitError, match="has 292 images of class 1, but there are 100"):
        make_split(few, SETTINGS, seed=0)
