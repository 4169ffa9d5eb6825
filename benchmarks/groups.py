"""What an own hold-out is worth without groups: `python -m benchmarks.groups FOLDER` (isic2018.npz in TACIT_TEST_DATA).

Photographs of ISIC 2018's training part (32×32, often several of one lesion; about 3,000, by whole lesions, others for
each seed) are written out twice as a user's .npz without a test set: with lesion ids, and with them hidden. A small net
learns from what is not held out. Its figures on its own hold-out are compared with those on ISIC's test part, which
shares no lesion with either. The table goes into docs/data.md, between the marks.

`python -m benchmarks.groups --looks` counts how many different pictures are taken for near-duplicates.
"""

import os
import re
import sys
from pathlib import Path
from statistics import mean

import numpy as np
from PIL import Image

from benchmarks.machine import commit
from tacit.api import run
from tacit.data.near_duplicates import glance, near_duplicates
from tacit.data.own import load_own
from tacit.data.sources import load
from tacit.inference.assess import assess

SEEDS, ROUNDS, IMAGES = (0, 1, 2), 20, 3000
FIGURES = {"accuracy": "accuracy", "balanced_accuracy": "balanced accuracy", "auc": "macro AUC"}
PAGE = Path("docs/data.md")
MARKS = "<!-- groups: made by benchmarks/groups.py -->", "<!-- end of groups -->"


def write(folder: Path, source: Path, seed: int) -> np.ndarray:
    """hidden.npz and given.npz to learn from, test.npz to test with; returns the lesion of each image to learn from."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = dict(np.load(source))
    lesions, counts = np.unique(stored["group_train"], return_counts=True)
    order = np.random.default_rng(seed).permutation(len(lesions))
    chosen = np.isin(stored["group_train"], lesions[order[np.cumsum(counts[order]) <= IMAGES]])
    own = {"x_train": stored["x_train"][chosen], "y_train": stored["y_train"][chosen], "classes": stored["classes"]}
    np.savez(folder / "hidden.npz", **own)
    np.savez(folder / "given.npz", **own, group_train=stored["group_train"][chosen])
    few = {"x_train": stored["x_test"][:1], "y_train": stored["y_test"][:1]}  # an .npz has a training part
    np.savez(folder / "test.npz", **few, **{name: stored[name] for name in ("x_test", "y_test", "classes")})
    return np.asarray(stored["group_train"][chosen])


def trained(folder: Path, which: str, seed: int) -> dict[str, dict[str, float]]:
    """The figures of one model on its own hold-out and on images of other lesions."""
    made = run(
        {
            "seed": seed,
            "rounds": ROUNDS,
            "data": {"name": str(folder / f"{which}.npz"), "partition": "iid", "clients": 1, "labels": 0},
            "data.placement": "clients",
            "net.name": "cnn-16",
            "backend.name": "local",
            "train": {"lr": 0.05, "batch": 64, "epochs": 2},
            "method": {"name": "fedavg"},
        },
        out=folder / which,
        resume=True,
    )
    places = {"own": "", "other": str(folder / "test.npz")}
    found = {place: assess(made.model, data).figures for place, data in places.items()}
    return {place: {name: 100 * figures[name] for name in FIGURES} for place, figures in found.items()}


def shared(folder: Path, which: str, lesions: np.ndarray) -> tuple[int, int]:
    """How many of the held-out images show a lesion that is trained on, and how many are held out."""
    dataset = load_own(folder / f"{which}.npz")
    train = np.array([int(re.findall(r"\d+", name)[-1]) for name in dataset.train_files])
    test = np.setdiff1d(np.arange(len(lesions)), train)
    return int(np.isin(lesions[test], lesions[train]).sum()), len(test)


def table(folder: Path, source: Path) -> str:
    lesions = {seed: write(folder / str(seed), source, seed) for seed in SEEDS}
    lines = [
        "| lesion ids | held out, of a trained lesion | figure | own hold-out | other lesions | difference |",
        "|---|---|---|---|---|---|",
    ]
    for which, said in (("hidden", "hidden: split by image"), ("given", "given: split by lesion")):
        held = [shared(folder / str(seed), which, lesions[seed]) for seed in SEEDS]
        both, number = (sum(column) for column in zip(*held, strict=True))
        runs = [trained(folder / str(seed), which, seed) for seed in SEEDS]
        for place, (name, shown) in enumerate(FIGURES.items()):
            own, other = ([one[side][name] for one in runs] for side in ("own", "other"))
            first = f"{said} | {both:,} of {number:,}" if not place else " | "
            gaps = [a - b for a, b in zip(own, other, strict=True)]
            spread = f"{min(gaps):+.1f} to {max(gaps):+.1f}"
            lines.append(
                f"| {first} | {shown} | {mean(own):.1f} % | {mean(other):.1f} % | {mean(gaps):+.1f} ({spread}) |"
            )
    told = (
        f"`python -m benchmarks.groups FOLDER`: means of seeds {', '.join(map(str, SEEDS))}, each with lesions of\n"
        f"its own (in brackets the lowest and the highest difference); about {IMAGES:,} images, 32×32 pixels,\n"
        f"`cnn-16`, fedavg with one client, {2 * ROUNDS} passes over the labels; commit {commit()}."
    )
    return "\n".join([*lines, "", told])


def looks() -> str:
    """Of sets whose pictures are all different (or nearly: some hold true duplicates), how many are joined."""
    lines = ["| set | pictures | joined to another by looks |", "|---|---|---|"]
    for name in ("digits", "fashion-mnist", "cifar10", "isic2018"):
        dataset = load(name, root=Path(os.environ["TACIT_TEST_DATA"]) if name == "isic2018" else None)
        images, lesions = dataset.train_images[:10_000], dataset.train_groups
        pictures = (Image.fromarray(one[0] if len(one) == 1 else one.transpose(1, 2, 0)) for one in images)
        first = near_duplicates([glance(one.resize((64, 64), Image.Resampling.BICUBIC)) for one in pictures])
        joined = np.flatnonzero(first != np.arange(len(first)))
        right = "" if lesions is None else f", {int((lesions[joined] == lesions[first[joined]]).sum())} of one lesion"
        lines.append(f"| `{name}` | {len(images):,} | {len(joined)}{right} |")
    return "\n".join(lines)


def main(folder: Path) -> None:
    source = Path(os.environ.get("TACIT_TEST_DATA", ".")) / "isic2018.npz"
    if not source.is_file():
        raise SystemExit(f"{source} is not there. Put ISIC 2018's .npz (docs/data.md) into the folder TACIT_TEST_DATA.")
    made = table(folder, source)
    before, after = (PAGE.read_text().partition(mark) for mark in MARKS)
    if before[1] and after[1]:
        PAGE.write_text(f"{before[0]}{MARKS[0]}\n\n{made}\n\n{MARKS[1]}{after[2]}")
    sys.stdout.write(f"{made}\n")


if __name__ == "__main__":
    if sys.argv[1] == "--looks":
        sys.stdout.write(f"{looks()}\n")
    else:
        main(Path(sys.argv[1]))
