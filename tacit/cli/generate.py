"""`tacit generate`: images from the generator that a run has trained, and how good they are."""

import json
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from tacit.backends.base import one_thread
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.machine import pick_device
from tacit.core.paths import check_folder
from tacit.core.payload import write_atomically
from tacit.data.dataset import Dataset
from tacit.data.federation import load_dataset
from tacit.papers.generator import draw_images, generator_of, score_images, untrained_images
from tacit.papers.generator_quality import FeatureSpace
from tacit.runs.folder import Run
from tacit.runs.image_grid import png, sheet

SHOWN = 100  # images on the sheet


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
        images = draw_images(method, weights, count, dataset, seed, device)
        digits = len(str(count - 1))
        for number, image in enumerate(images):
            write_atomically(target / f"{number:0{digits}d}.png", png(image))
        write_atomically(target / "sheet.png", sheet(images[:SHOWN]))
        screen.print(f"{count} images in {target}, the first of them on {target / 'sheet.png'}.")
        if score:
            untrained = untrained_images(method, count, dataset, seed, device)
            report_score(images, untrained, dataset, seed, target, screen)
    finally:
        torch.set_num_threads(threads)


def report_score(
    images: Tensor, untrained: Tensor, dataset: Dataset, seed: int, target: Path, screen: SafeConsole
) -> None:
    """How good images are, on the screen and as score.json."""
    scores, space, half = score_images(images, untrained, dataset, seed)
    show_scores(scores, space, half, screen)
    report = {"features": space.name, "real": half, "count": len(images), "scores": scores}
    write_atomically(target / "score.json", (json.dumps(report, indent=2) + "\n").encode())


def show_scores(scores: dict[str, dict[str, float]], space: FeatureSpace, real: int, screen: SafeConsole) -> None:
    title = f"Against {real:,} test images, in the {space.name}"
    table = Table("images", "Fréchet distance", "precision", "recall", title=title)
    for name, score in scores.items():
        table.add_row(name, f"{score['frechet']:.1f}", f"{score['precision']:.2f}", f"{score['recall']:.2f}")
    screen.print(table)
