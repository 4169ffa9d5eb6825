"""A finished model in use: `tacit predict`, `tacit evaluate`, `run.predict`, calibration."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import tacit
from pictures import SITES, save, write_sites, write_tests
from tacit.cli.app import app
from tacit.core.errors import TacitError
from tacit.data.sources import load
from tacit.data.split import load_split
from tacit.evaluation.metrics import accuracy, expected_calibration_error
from tacit.inference.calibrate import at_temperature, fit_temperature
from tacit.inference.images import as_items, collect
from tacit.inference.measure import calibrated
from tacit.inference.model import load_model
from tacit.inference.notebook import NotebookRun

DIGITS = load("digits")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> NotebookRun:
    """A model that knows its digits a little: three rounds of FedAvg with all labels."""
    settings = {"method": {"name": "fedavg", "preset": "smoke"}, "data.placement": "clients", "data.labels": 1000}
    out = tmp_path_factory.mktemp("runs") / "digits"
    return tacit.run(settings, out=out, rounds=3, train__epochs=2)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tests(DIGITS, tmp_path_factory.mktemp("photos"), 60)


def command(*words: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def test_the_model_learned_something(run: NotebookRun) -> None:
    assert run.summary is not None
    assert run.summary["accuracy"] > 0.5


def test_predictions_in_three_formats_are_the_same(run: NotebookRun, photos: Path, tmp_path: Path) -> None:
    for ending in (".csv", ".jsonl", ".parquet"):
        output = command("predict", run.folder, photos, "-o", tmp_path / f"out{ending}")
        assert "61 rows written" in output
        assert "(could not be read)" in output
    rows = list(rows_of(tmp_path / "out.csv"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    table = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert len(rows) == len(lines) == len(table) == 61
    assert lines == table
    for row, line in zip(rows, lines, strict=True):
        assert (row["path"], row["prediction"], row["problem"]) == (line["path"], line["prediction"], line["problem"])
    assert rows[0]["path"].endswith("broken.png")
    assert (rows[0]["prediction"], rows[0]["confidence"], rows[0]["p_3"]) == ("", "", "")
    assert rows[0]["problem"] == "cannot identify image file"
    for row in rows[1:]:
        probs = [float(row[f"p_{name}"]) for name in DIGITS.classes]
        assert sum(probs) == pytest.approx(1, abs=1e-5)
        assert row["prediction"] == DIGITS.classes[int(np.argmax(probs))]
        assert float(row["confidence"]) == max(probs)
        assert row["problem"] == ""


def test_files_are_predicted_as_the_engine_predicts_their_pixels(run: NotebookRun, tmp_path: Path) -> None:
    """PNG is lossless, so a file and the test image that it was made of must get the same class, with the class names
    in the right order; and the whole must be as accurate as the run says."""
    for index in range(len(DIGITS.test_labels)):
        save(DIGITS.test_images[index], tmp_path / f"{index:04d}.png")
    found = run.predict(tmp_path)
    right = np.mean([DIGITS.classes.index(label) for label in found.labels] == DIGITS.test_labels)
    assert run.summary is not None
    assert right == pytest.approx(run.summary["accuracy"])


def test_abstaining_names_no_class_below_the_confidence(run: NotebookRun, photos: Path, tmp_path: Path) -> None:
    plain = run.predict(photos)
    middle = float(np.nanmedian(plain.confidence))
    output = command("predict", run.folder, photos, "-o", tmp_path / "out.csv", "--abstain", str(middle))
    assert "not sure enough" in output
    rows = list(rows_of(tmp_path / "out.csv"))[1:]
    unsure = [row for row in rows if row["problem"] == "not sure enough"]
    assert 0 < len(unsure) < len(rows)
    for row in rows:
        assert (row["prediction"] == "") == (float(row["confidence"]) < middle - 1e-6)
    with pytest.raises(TacitError, match="between 0 and 1"):
        run.predict(photos, abstain=80)


def test_images_may_be_given_in_many_ways(run: NotebookRun, tmp_path: Path) -> None:
    images = DIGITS.test_images[:12]
    files = [save(image, tmp_path / f"{number:02d}.png") for number, image in enumerate(images)]
    (tmp_path / "list.csv").write_text("path\n" + "".join(f"{file.name}\n" for file in files))
    np.savez(tmp_path / "some.npz", images=images)
    expected = run.predict(images)
    ways = [
        images[:, 0],
        images.transpose(0, 2, 3, 1),
        images.repeat(3, axis=1),
        images / 255,
        torch.from_numpy(images),
        [image[0] for image in images],
        files,
        [str(file) for file in files],
        tmp_path / "list.csv",
        str(tmp_path / "some.npz"),
        [Image.open(file) for file in files],
        [Image.open(file).convert("RGB") for file in files],
    ]
    for way in ways:
        found = run.predict(way)
        assert found.labels == expected.labels
        assert np.allclose(found.probabilities, expected.probabilities, atol=1e-6)
    assert run.predict(images[0, 0]).labels == expected.labels[:1]
    assert run.predict(str(files[3])).labels == expected.labels[3:4]
    assert len(run.predict(np.zeros((0, 8, 8), np.uint8))) == 0
    assert list(run.predict(images).to_pandas()["prediction"]) == expected.labels
    with pytest.raises(TacitError, match="not as a mixture"):
        as_items([files[0], images[0]])
    with pytest.raises(TacitError, match="nothing at"):
        collect([tmp_path / "gone.png"])


def test_mistakes_are_told_before_any_work(run: NotebookRun, photos: Path, tmp_path: Path) -> None:
    for words, message in (
        ((run.folder, photos, "-o", tmp_path / "out.txt"), r"\.csv, \.parquet, \.jsonl"),
        ((run.folder, photos, "-o", tmp_path / "no" / "out.csv"), "cannot be written"),
        ((tmp_path, photos), "neither the folder of a run"),
        ((run.folder, tmp_path), "no image in"),
    ):
        with pytest.raises(TacitError, match=message):
            command("predict", *words)


def test_an_unfinished_run_has_no_model(run: NotebookRun, tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text((run.folder / "experiment.toml").read_text())
    with pytest.raises(TacitError, match="tacit resume"):
        load_model(tmp_path)


def test_a_run_of_an_earlier_tacit_can_be_used(run: NotebookRun, tmp_path: Path) -> None:
    for name in ("experiment.toml", "model.safetensors", "split.npz"):
        (tmp_path / name).write_bytes((run.folder / name).read_bytes())
    old = load_model(tmp_path).description
    assert (old.classes, old.mean, old.temperature) == (DIGITS.classes, DIGITS.mean, 1.0)


# evaluate


def labelled_folder(root: Path, first: int, last: int) -> Path:
    for index in range(first, last):
        save(DIGITS.test_images[index], root / str(DIGITS.test_labels[index]) / f"{index}.png")
    return root


def test_evaluate_on_the_runs_own_test_images(run: NotebookRun) -> None:
    assert run.summary is not None
    assert f"Accuracy {100 * run.summary['accuracy']:.1f} %" in command("evaluate", run.folder)


def test_evaluate_on_own_images(run: NotebookRun, tmp_path: Path) -> None:
    folder = labelled_folder(tmp_path / "more", 0, 100)
    save(DIGITS.test_images[0], folder / "eleven" / "x.png")
    (folder / "3" / "bad.png").write_text("no")
    save(DIGITS.test_images[101], folder / "unlabeled" / "u.png")
    output = command("evaluate", run.folder, "--data", folder, "-o", tmp_path / "figures.json")
    assert "on 100 images" in output
    assert "bad.png (cannot identify image file)" in output
    assert "1 images of classes that the model does not know: eleven" in output
    figures = json.loads((tmp_path / "figures.json").read_text())
    probs = run.model.probabilities(torch.from_numpy(DIGITS.test_images[:100].copy()))
    assert figures["accuracy"] == pytest.approx(accuracy(probs, torch.from_numpy(DIGITS.test_labels[:100].copy())))
    low, high = figures["interval"]
    assert low < figures["accuracy"] < high
    assert np.sum(figures["confusion"]) == 100
    save(DIGITS.test_images[0], tmp_path / "strange" / "eleven" / "x.png")
    with pytest.raises(TacitError, match="no labelled image of the classes"):
        command("evaluate", run.folder, "--data", tmp_path / "strange")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> NotebookRun:
    """A run on somebody's own images at three sites: 4 labels of each class and 30 images without at each."""
    root = tmp_path_factory.mktemp("own")
    photos = write_sites(DIGITS, root / "my photos", labeled=4, unlabeled=30)
    data = {"name": "photos", "sites": [str(photos / site) for site in SITES], "partition": "sites", "clients": 3}
    settings = {"method": {"name": "fixmatch", "preset": "smoke"}, "data": {**data, "placement": "clients"}}
    return tacit.run(settings, out=root / "a run")


def test_evaluate_tells_what_was_trained_on(own: NotebookRun, tmp_path: Path) -> None:
    photos = own.folder.parent / "my photos"
    output = command("evaluate", own.folder, "--data", photos, "-o", tmp_path / "figures.json")
    figures = json.loads((tmp_path / "figures.json").read_text())
    held_out = len(load_split(own.split_path).test)
    assert figures["trained_on"] == {"labeled": 120 - held_out, "unlabeled": 0}
    assert f"{120 - held_out} of these 120 images were trained on" in output
    assert f"On the other {held_out}: " in output
    assert figures["not_trained_on"]["accuracy"] == pytest.approx(own.summary["accuracy"])  # the run's own test images
    assert {name: one["images"] for name, one in figures["sites"].items()} == dict.fromkeys(SITES, 40)
    # Under other names, in another format, at another place, and labelled later.
    later = tmp_path / "later"
    for number, path in enumerate(sorted((photos / "north" / "unlabeled").iterdir())[:10]):
        (later / str(number % 10)).mkdir(parents=True)
        Image.open(path).save(later / str(number % 10) / f"{number}.bmp")
    for index in range(5):
        save(DIGITS.test_images[index], later / str(DIGITS.test_labels[index]) / f"new-{index}.png")
    output = command("evaluate", own.folder, "--data", later)
    assert "10 of these 15 images were trained on (0 with their labels, 10 without)" in output
    with pytest.raises(TacitError, match=r"5 labels \(of 15; the others were trained on\) are too few"):
        command("evaluate", own.folder, "--data", later, "--calibrate")


def test_evaluate_is_silent_where_nothing_was_trained_on_and_says_where_it_cannot_know(
    own: NotebookRun, run: NotebookRun, tmp_path: Path
) -> None:
    more = labelled_folder(tmp_path / "more", 0, 40)
    assert "trained on" not in command("evaluate", own.folder, "--data", more)
    assert "trained on" not in command("evaluate", run.folder, "--data", more)  # a named set
    command("export", own.folder, "--to", "safetensors", "-o", tmp_path / "x.safetensors")
    assert "does not know which images" in command("evaluate", tmp_path / "x.safetensors", "--data", more)
    for path in own.folder.glob("*.*"):
        if path.name != "trained.npz":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert "did not note which images" in command("evaluate", tmp_path, "--data", more)


def test_balanced_accuracy_leads_where_one_class_has_most_images(run: NotebookRun, tmp_path: Path) -> None:
    for label, count in ((0, 20), (1, 5), (2, 5)):
        for index in np.flatnonzero(DIGITS.test_labels == label)[:count]:
            save(DIGITS.test_images[index], tmp_path / "skewed" / str(label) / f"{index}.png")
    output = command("evaluate", run.folder, "--data", tmp_path / "skewed")
    assert output.startswith("Balanced accuracy ")
    assert "always the largest class: 66.7 %" in output
    assert "95 % interval" in output


# calibration


def test_the_temperature_is_where_the_cross_entropy_is_smallest() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(300, 5, generator=generator)
    labels = torch.distributions.Categorical(logits=logits / 2.5).sample()
    best = fit_temperature(logits.softmax(dim=1), labels)
    grid = torch.linspace(0.5, 6, 111)
    losses = torch.stack([cross_entropy(logits / t, labels) for t in grid])
    assert best == pytest.approx(float(grid[losses.argmin()]), abs=0.05)


def test_temperature_keeps_the_classes_and_mends_confidence() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 4, generator=generator)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    sharp = (3 * logits).softmax(dim=1)  # three times too sure
    fitted = fit_temperature(sharp[:1000], labels[:1000])
    fixed = at_temperature(sharp[1000:], fitted)
    assert fitted == pytest.approx(3, rel=0.15)
    assert torch.equal(fixed.argmax(dim=1), sharp[1000:].argmax(dim=1))
    before, after = (expected_calibration_error(p, labels[1000:]) for p in (sharp[1000:], fixed))
    assert after < 0.3 * before


def test_too_few_labels_give_no_temperature(run: NotebookRun) -> None:
    bare = load_model(run.folder).description
    probs, labels = torch.full((29, 10), 0.1), torch.zeros(29, dtype=torch.int64)
    assert calibrated(bare, probs, labels) is bare


def test_calibrating_again_is_saved_and_changes_confidence_only(run: NotebookRun, tmp_path: Path) -> None:
    for path in run.folder.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = tacit.load(tmp_path).predict(DIGITS.test_images[:100])
    text = json.loads((tmp_path / "model.json").read_text())
    text["temperature"] *= 4
    (tmp_path / "model.json").write_text(json.dumps(text))
    dull = tacit.load(tmp_path).predict(DIGITS.test_images[:100])
    assert dull.confidence.mean() < before.confidence.mean()
    output = command("evaluate", tmp_path, "--calibrate")
    assert "is saved with the run" in output
    after = tacit.load(tmp_path).predict(DIGITS.test_images[:100])
    assert after.labels == dull.labels == before.labels
    assert np.allclose(after.probabilities, before.probabilities, atol=1e-3)  # back at the best temperature


# the notebook


def test_records_are_a_frame_if_pandas_is_there(run: NotebookRun, monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas

    frame = run.records
    assert isinstance(frame, pandas.DataFrame)
    assert frame["accuracy"].tolist() == run["accuracy"].tolist()
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    assert isinstance(run.records, list)
    assert len(run.records) == len(frame) == 3


def test_the_plot_shows_the_figures(run: NotebookRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = run.plot()
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 5000
    drawn = figure.axes[0].lines[0]
    assert drawn.get_ydata().tolist() == pytest.approx((100 * run["accuracy"]).tolist())
    assert len(figure.axes[-1].lines) == 10  # one for each class
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(TacitError, match=r"tacit\[plot\]"):
        run.plot()


def test_a_run_says_what_it_is(run: NotebookRun) -> None:
    assert "fedavg on digits, accuracy" in repr(run)
