"""`tacit generate`: images from the generator that a run has trained, and how good they are."""

import json
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from tacit.backends.base import one_thread
from tacit.core import seeds
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.paths import check_folder
from tacit.core.payload import Weights, weights_in, write_atomically
from tacit.core.settings import pick_device
from tacit.data.dataset import Dataset
from tacit.data.federation import load_dataset
from tacit.engine.loop import stages_of
from tacit.methods.ddrfed.gdgm import Diffusion
from tacit.papers.generator_quality import FeatureSpace, learn_features
from tacit.pieces.train import weights_of
from tacit.runs.folder import Run
from tacit.runs.image_grid import png, sheet
from tacit.views import Views

SHOWN = 100  # images on the sheet
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


def generate_images(folder: Path, count: int, out: Path | None, seed: int, score: bool, screen: SafeConsole) -> None:
    """Draw images into a folder, one PNG each and all on a sheet; with `score`, tell how good they are."""
    run, target = Run(folder), out or folder / "generated"
    check_folder(target)
    method, weights = generator_of(run)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise TacitError(f"{target} is not an empty folder, and nothing was written. Choose another with --out.")
    dataset = load_dataset(run.experiment.data)
    device, threads = pick_device(run.experiment.device), one_thread()
    try:
        shape = (count, dataset.channels, dataset.size, dataset.size)
        images = method.generate(weights, shape, seeds.generator(seed, "tacit generate"), device)
        digits = len(str(count - 1))
        for number, image in enumerate(images):
            write_atomically(target / f"{number:0{digits}d}.png", png(image))
        write_atomically(target / "sheet.png", sheet(images[:SHOWN]))
        screen.print(f"{count} images in {target}, the first of them on {target / 'sheet.png'}.")
        if score:
            untrained = weights_of(method.new_unet(dataset.channels, seeds.generator(seed, "untrained")))
            drawn = method.generate(untrained, shape, seeds.generator(seed, "tacit generate"), device)
            report_score(images, drawn, dataset, seed, target, screen)
    finally:
        torch.set_num_threads(threads)


def report_score(
    images: Tensor, untrained: Tensor, dataset: Dataset, seed: int, target: Path, screen: SafeConsole
) -> None:
    """Score images beside three that say what a figure means; on the screen and as score.json."""
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
    show_scores(scores, space, half, screen)
    told = {"features": space.name, "real": half, "count": len(images), "scores": scores}
    write_atomically(target / "score.json", (json.dumps(told, indent=2) + "\n").encode())


def show_scores(scores: dict[str, dict[str, float]], space: FeatureSpace, real: int, screen: SafeConsole) -> None:
    title = f"Against {real:,} test images, in the {space.name}"
    table = Table("images", "Fréchet distance", "precision", "recall", title=title)
    for name, score in scores.items():
        table.add_row(name, f"{score['frechet']:.1f}", f"{score['precision']:.2f}", f"{score['recall']:.2f}")
    screen.print(table)
