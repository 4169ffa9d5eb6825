"""Exported models say what torch says: ONNX in onnxruntime, torch's own format, safetensors."""

import csv
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

import tacit
from pictures import save
from tacit.cli.app import app
from tacit.core.errors import TacitError
from tacit.data.sources import load
from tacit.inference.export import OPSET, check_batch, onnx_bytes, torch_bytes
from tacit.inference.model import Description, Model, load_model
from tacit.inference.notebook import NotebookRun

DIGITS = load("digits")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> NotebookRun:
    settings = {"method": {"name": "fedavg", "preset": "smoke"}, "data.placement": "clients", "data.labels": 1000}
    return tacit.run(settings, out=tmp_path_factory.mktemp("runs") / "digits", rounds=2, train__epochs=2)


def command(*words: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_four_ways_give_the_same_classes_for_1000_images(run: NotebookRun, tmp_path: Path) -> None:
    """`tacit predict` on files, the Python API on arrays, ONNX in onnxruntime and torch's own file."""
    images = DIGITS.train_images[:1000]
    for index, image in enumerate(images):
        save(image, tmp_path / "images" / f"{index:04d}.png")
    said = command("export", run.folder, "--to", "onnx", "-o", tmp_path / "model.onnx")
    assert f"opset {OPSET}" in said
    assert "uint8 [batch, 1, 8, 8], any batch size" in said
    command("export", run.folder, "--to", "torch", "-o", tmp_path / "model.pt2")
    command("predict", run.folder, tmp_path / "images", "-o", tmp_path / "out.csv")

    with (tmp_path / "out.csv").open(newline="") as file:
        by_command = [row["prediction"] for row in csv.DictReader(file)]
    by_python = run.predict(images)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    by_onnx = session.run(None, {"images": images})[0]
    by_torch = torch.export.load(tmp_path / "model.pt2").module()(torch.from_numpy(images.copy())).numpy()
    assert by_command == by_python.labels
    assert len(set(by_command)) > 3  # not one class for all
    for probs in (by_onnx, by_torch):
        assert [DIGITS.classes[best] for best in probs.argmax(axis=1)] == by_command
        assert np.abs(probs - by_python.probabilities).max() < 1e-4


def test_the_onnx_file_says_what_it_needs(run: NotebookRun, tmp_path: Path) -> None:
    command("export", run.folder, "-o", tmp_path / "model.onnx")
    proto = onnx.load(tmp_path / "model.onnx")
    assert [entry.version for entry in proto.opset_import if entry.domain == ""] == [OPSET]
    (images,) = proto.graph.input
    assert images.name == "images"
    assert images.type.tensor_type.shape.dim[0].dim_param  # a name, not a number: any batch
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    known = session.get_modelmeta().custom_metadata_map
    about = Description.from_json(known["tacit"])
    assert about == run.model.description
    assert known["classes"].split("\n") == list(DIGITS.classes)
    assert "centre square" in known["preprocessing"]
    for batch in (1, 3, 300):
        assert session.run(None, {"images": DIGITS.train_images[:batch]})[0].shape == (batch, 10)


def test_a_safetensors_stands_for_the_run(run: NotebookRun, tmp_path: Path) -> None:
    path = tmp_path / "model-of-digits.safetensors"
    command("export", run.folder, "--to", "safetensors", "-o", path)
    again = load_model(path)
    images = torch.from_numpy(DIGITS.test_images[:50].copy())
    assert torch.equal(again.probabilities(images), run.model.probabilities(images))
    assert again.description == run.model.description
    with pytest.raises(TacitError, match="say on which, with --data"):
        command("evaluate", path)
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((run.folder / "model.safetensors").read_bytes())
    with pytest.raises(TacitError, match="weights only"):
        load_model(bare)


def test_torchs_file_carries_the_description(run: NotebookRun, tmp_path: Path) -> None:
    path = run.export(tmp_path / "model.pt2", to="torch")
    files = {"tacit.json": ""}
    torch.export.load(path, extra_files=files)
    assert json.loads(files["tacit.json"])["classes"] == list(DIGITS.classes)


@pytest.mark.parametrize(
    "net",
    [
        {"name": "cnn-4", "norm": "bn", "bn": "static"},
        {"name": "wrn-10-1", "norm": "bn", "bn": "average"},
        {"name": "vit-tiny", "norm": "gn", "bn": "average"},
    ],
    ids=lambda net: net["name"],
)
def test_every_kind_of_net_can_be_exported(net: dict[str, str]) -> None:
    """With weights and statistics that are not those of a fresh net, on colour images of odd sizes for the net."""
    from tacit import nets

    options = {**net, "stem": "imagenet", "activation": "relu"}
    settings = {key: value for key, value in options.items() if key != "name"}
    fresh = nets.build(
        net["name"], classes=3, channels=3, size=20, generator=torch.Generator().manual_seed(0), **settings
    )
    weights = fresh.state_dict()
    for name in weights:
        if name.endswith("running_var"):
            weights[name] += 1.5
    about = Description(("a", "b", "c"), 3, 20, (0.5, 0.4, 0.3), (0.2, 0.3, 0.2), options, temperature=1.7)
    model = Model(about, weights, Path("nowhere"))
    images = torch.randint(0, 256, (5, 3, 20, 20), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    expected = model.probabilities(images).numpy()
    assert expected.std(axis=0).max() > 1e-4  # the images do not all look the same to it
    session = onnxruntime.InferenceSession(onnx_bytes(model))
    assert np.abs(session.run(None, {"images": images.numpy()})[0] - expected).max() < 1e-4


def test_a_net_that_fixes_the_batch_is_refused() -> None:
    """torch's exporter writes such a net with the batch of its example; that must not pass for any batch."""
    proto = onnx.helper.make_model(
        onnx.helper.make_graph([], "none", [onnx.helper.make_tensor_value_info("images", 2, [2, 1, 8, 8])], [])
    )
    with pytest.raises(TacitError, match="fixed at 2"):
        check_batch(proto)


def test_a_prediction_that_depends_on_its_batch_is_told(run: NotebookRun) -> None:
    plain = run.model.description
    assert not plain.depends_on_batch
    assert Description(**{**plain.__dict__, "net": {**plain.net, "norm": "bn", "bn": "batch"}}).depends_on_batch


def test_wrong_words_are_refused(run: NotebookRun, tmp_path: Path) -> None:
    for words, message in (
        (("--to", "onx"), "Did you mean 'onnx'?"),
        (("--to", "onnx", "-o", tmp_path / "model.pt"), r"ends in \.onnx"),
    ):
        with pytest.raises(TacitError, match=message):
            command("export", run.folder, *words)


def test_without_onnx_the_way_is_told(run: NotebookRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(TacitError, match=r"tacit\[onnx\]"):
        onnx_bytes(run.model)
    assert torch_bytes(run.model)
