"""Figures of quality: against scipy, and in the order that everybody would put the images in."""

import numpy as np
import pytest
import torch
from scipy.linalg import sqrtm

from tacit.core.errors import TacitError
from tacit.data.sources import load
from tacit.papers.generator_quality import frechet_distance, learn_features, precision_recall
from tacit.views import Views


def features(count: int, seed: int, size: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size, generator=generator)
    return torch.randn(count, size, generator=generator) @ mix + seed


def test_the_frechet_distance_is_scipys() -> None:
    one, two = features(80, 1), features(60, 2)
    a, b = one.double().numpy(), two.double().numpy()
    first, second = np.cov(a.T), np.cov(b.T)
    expected = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(first + second - 2 * sqrtm(first @ second).real)
    assert frechet_distance(one, two) == pytest.approx(expected, rel=1e-6)
    assert frechet_distance(one, two) == pytest.approx(frechet_distance(two, one), rel=1e-6)


def test_fewer_images_than_features_are_no_obstacle() -> None:
    few = features(4, 1, size=30)
    assert frechet_distance(few, few) == pytest.approx(0.0, abs=1e-3)


def test_precision_and_recall_tell_lack_of_quality_from_lack_of_variety() -> None:
    near, far = features(100, 0), features(100, 0) + 50.0
    both = torch.cat([near, far])
    precision, recall = precision_recall(both, near + 0.001)  # all good, but half is missing
    assert precision > 0.95
    assert recall == pytest.approx(0.5, abs=0.05)
    precision, recall = precision_recall(near, torch.cat([near + 0.001, far]))  # all there, but half is rubbish
    assert precision == pytest.approx(0.5, abs=0.05)
    assert recall > 0.95


@pytest.mark.parametrize("made", [torch.zeros(1, 5), torch.zeros(9, 4), torch.zeros(9)])
def test_what_cannot_be_scored_is_refused(made: torch.Tensor) -> None:
    with pytest.raises(TacitError, match="Quality needs features"):
        precision_recall(features(9, 0), made)


def test_real_images_score_better_than_blurred_ones_and_those_better_than_noise() -> None:
    data = load("digits")
    images, labels = torch.from_numpy(data.train_images[:].copy()), torch.from_numpy(data.train_labels[:].copy())
    space = learn_features(images[:1000], labels[:1000], Views(data.mean, data.std, flip=data.mirror), epochs=4)
    assert "trained here" in space.name
    real, other = images[1000:1200], images[1200:1400]
    blurred = torch.nn.functional.avg_pool2d(other.float(), 3, stride=1, padding=1).round().to(torch.uint8)
    noise = torch.randint(0, 256, other.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scores = [space.score(real, made) for made in (other, blurred, noise)]
    assert scores[0]["frechet"] < scores[1]["frechet"] < scores[2]["frechet"]
    assert scores[0]["precision"] > scores[2]["precision"]
    assert scores[0]["recall"] > scores[2]["recall"]


def test_labels_that_nobody_knows_are_left_out() -> None:
    data = load("digits")
    images, unknown = torch.from_numpy(data.train_images[:20].copy()), torch.full((20,), -1)
    with pytest.raises(TacitError, match="at least two classes"):
        learn_features(images, unknown, Views(data.mean, data.std))
