"""The generator that a run of DDRFed has trained: images from it, and how good they are."""

import torch
from torch import Tensor

from tacit.core import seeds
from tacit.core.errors import TacitError
from tacit.core.payload import Weights, weights_in
from tacit.data.dataset import Dataset
from tacit.methods.ddrfed.gdgm import Diffusion
from tacit.papers.generator_quality import FeatureSpace, learn_features
from tacit.pieces.train import weights_of
from tacit.runs.folder import Run
from tacit.runs.plan import stages_of
from tacit.views import Views

LEARNED = 10_000  # labelled images that the feature space is learned from, at most


def generator_of(run: Run) -> tuple[Diffusion, Weights]:
    """The run's generator as it stands: of the finished stage, or after the last finished round of it."""
    for number, stage in enumerate(stages_of(run.experiment)):
        if isinstance(stage.method, Diffusion):
            records = [record for record in run.records if record["stage"] == stage.name]
            if not records:
                raise TacitError(f"{run.folder} has not finished a round of its generator yet. Try again later.")
            state = run.stage_state(number) or run.state()
            return stage.method, weights_in(state, "ema")
    name = run.experiment.method["name"]
    raise TacitError(
        f"{run.folder} has no generator: {name} trained none. One comes with method.name=ddrfed and method.gdgm=true; "
        "`tacit run ddrfed/quick/fashion-mnist-generator` trains a small one."
    )


def draw_images(
    method: Diffusion, weights: Weights, count: int, dataset: Dataset, seed: int, device: torch.device
) -> Tensor:
    """So many images, uint8 [N, C, H, W], as large as those of the data set."""
    shape = (count, dataset.channels, dataset.size, dataset.size)
    return method.generate(weights, shape, seeds.generator(seed, "tacit generate"), device)


def untrained_images(method: Diffusion, count: int, dataset: Dataset, seed: int, device: torch.device) -> Tensor:
    """What the same net draws before it has learned anything."""
    untrained = weights_of(method.new_unet(dataset.channels, seeds.generator(seed, "untrained")))
    return draw_images(method, untrained, count, dataset, seed, device)


def score_images(
    images: Tensor, untrained: Tensor, dataset: Dataset, seed: int
) -> tuple[dict[str, dict[str, float]], FeatureSpace, int]:
    """Scores of images beside three that say what a figure means; in which space, against how many test images."""
    views = Views(mean=dataset.mean, std=dataset.std, flip=dataset.mirror)
    chance = seeds.generator(seed, "tacit score")
    train = torch.randperm(len(dataset.train_labels), generator=chance)[:LEARNED].sort().values.numpy()
    space = learn_features(
        torch.from_numpy(dataset.train_images[train].copy()),
        torch.from_numpy(dataset.train_labels[train].copy()),
        views,
        seed=seed,
    )
    real = torch.from_numpy(dataset.test_images[:].copy())
    real = real[torch.randperm(len(real), generator=chance)[: 2 * len(images)]]
    half = len(real) // 2
    sets = {
        "these images": images,
        "the same net, untrained": untrained,
        "noise": torch.randint(0, 256, images.shape, generator=chance, dtype=torch.uint8),
        "other real images (the best there is)": real[half:],
    }
    scores = {name: space.score(real[:half], made) for name, made in sets.items()}
    return scores, space, half
