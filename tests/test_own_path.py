"""The whole way, by the commands of the README: three sites' folders to a table of predictions."""

import csv
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pictures import save, write_sites, write_tests
from tacit.core.errors import TacitError
from tacit.data.dataset import Dataset
from tacit.data.sources import load

ROOT = Path(__file__).parent.parent
QUICK = ("rounds=1", "method.warmup=1", "method.generations=1", "net.name=cnn-8", "backend.name=local")


def few_thousand() -> Dataset:
    """Fashion-MNIST where it is here, else the embedded digits."""
    try:
        return load("fashion-mnist", fetch=False)
    except TacitError:
        return load("digits")


def commands_of_the_readme() -> list[list[str]]:
    text = (ROOT / "README.md").read_text()
    block = re.search(r"## From your own images.*?```bash\n(.*?)```", text, flags=re.DOTALL)
    assert block is not None
    return [shlex.split(line, comments=True) for line in block[1].splitlines() if line.strip()]


def test_four_commands_from_folders_to_predictions(tmp_path: Path) -> None:
    dataset = few_thousand()
    large = len(dataset.train_labels) > 10_000
    write_sites(dataset, tmp_path / "photos", labeled=10, unlabeled=600 if large else 100)
    write_tests(dataset, tmp_path / "new-images", 200)
    for index in range(200, 300):
        name = dataset.classes[dataset.test_labels[index]].replace("/", "-")
        save(dataset.test_images[index], tmp_path / "more-labelled-images" / name / f"{index}.png")
    commands = commands_of_the_readme()
    assert [words[:2] for words in commands] == [
        ["tacit", "init"],
        ["tacit", "run"],
        ["tacit", "evaluate"],
        ["tacit", "predict"],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}
    outputs = []
    for _, *words in commands:
        quick = [word for setting in QUICK for word in ("--set", setting)] if words[0] == "run" else []
        done = subprocess.run(
            [sys.executable, "-m", "tacit", *words, *quick],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append(done.stdout)
    told, trained, judged, predicted = outputs
    assert f"{2100 if large else 600:,} readable images, 10 classes, 3 sites" in told
    assert "tacit run photos.toml" in told  # each screen names the next command
    assert "tacit predict runs/photos-seed0" in trained
    assert (tmp_path / "runs" / "photos-seed0" / "card.html").is_file()
    assert "on 100 images" in judged
    assert "201 rows written" in predicted
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows if row["problem"]] == ["new-images/broken.png"]
    known = {name.replace("/", "-") for name in dataset.classes}
    assert {row["prediction"] for row in rows} <= known | {""}


def test_the_snippet_of_the_docs_runs_the_exported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines for onnxruntime in docs/your-own-images.md, as they stand, give what `tacit predict` gives."""
    import tacit

    page = (ROOT / "docs" / "your-own-images.md").read_text()
    code = next(code for code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "onnxruntime" in code)
    monkeypatch.chdir(tmp_path)
    dataset = load("digits")
    run = tacit.run({"method": {"name": "fedavg", "preset": "smoke"}, "data.placement": "clients"}, out="run")
    run.export("clothes.onnx")
    picture = save(dataset.test_images[5], tmp_path / "shoe.jpg", (31, 17))
    found: dict[str, object] = {}
    exec(compile(code, "your-own-images.md", "exec"), found)
    assert found["name"] == run.predict(picture).labels[0]
    assert found["confidence"] == pytest.approx(float(run.predict(picture).confidence[0]), abs=1e-4)
