"""Models that are cut short, garbage or of another kind: predict, evaluate and export say so in a sentence."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tacit.cli.app import main
from tacit.config.resolve import resolve
from tacit.engine.run import run_experiment
from tacit.inference.export import export
from tacit.inference.model import load_model

Edit = Callable[[Path], object]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"method.name": "fedavg", "method.preset": "smoke", "data.subset": 200, "data.test_subset": 50}
    small = {"rounds": 1, "net.name": "cnn-4", "backend.name": "local"}
    return run_experiment(resolve(settings, small), tmp_path_factory.mktemp("whole") / "run").folder


def tacit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["tacit", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out + err


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def other_shapes(path: Path) -> None:
    weights = load_file(path)
    save_file({name: tensor[:1].contiguous() if tensor.ndim else tensor for name, tensor in weights.items()}, path)


def described(**changes: object) -> Edit:
    def edit(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


EDITS: dict[str, tuple[str, Edit]] = {
    "weights-empty": ("model.safetensors", lambda path: path.write_bytes(b"")),
    "weights-cut": ("model.safetensors", cut),
    "weights-garbage": ("model.safetensors", lambda path: path.write_bytes(b"\xff" * 500)),
    "weights-huge-header": ("model.safetensors", lambda path: path.write_bytes(b"\xff" * 7 + b"\x7f" + bytes(100))),
    "weights-of-another": ("model.safetensors", other_shapes),
    "json-empty": ("model.json", lambda path: path.write_text("")),
    "json-cut": ("model.json", cut),
    "json-binary": ("model.json", lambda path: path.write_bytes(b"\xff\xfe\x00")),
    "json-list": ("model.json", lambda path: path.write_text("[]")),
    "json-deep": ("model.json", lambda path: path.write_text("[" * 100_000)),
    "json-lacks": ("model.json", lambda path: path.write_text('{"classes": ["a", "b"]}')),
    "json-size": ("model.json", described(size=10**9)),
    "json-size-text": ("model.json", described(size="8")),
    "json-classes": ("model.json", described(classes=7)),
    "json-nul": ("model.json", described(classes=["a", "b\0"])),
    "json-net": ("model.json", described(net={"name": "nothing", "norm": "gn", "bn": "average"})),
    "json-net-number": ("model.json", described(net=3)),
    "json-temperature": ("model.json", described(temperature=0)),
    "json-mean": ("model.json", described(mean=[])),
}


@pytest.mark.parametrize("case", EDITS)
def test_a_damaged_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    name, edit = EDITS[case]
    run, images = tmp_path / "run", tmp_path / "x.npz"
    shutil.copytree(whole, run)
    np.savez(images, images=np.zeros((2, 8, 8), np.uint8))
    edit(run / name)
    commands = (
        ["predict", run, images, "-o", tmp_path / "p.csv"],
        ["evaluate", run],
        ["export", run, "--to", "safetensors", "-o", tmp_path / "e.safetensors"],
    )
    for words in commands:
        code, told = tacit(monkeypatch, capsys, *words)
        assert code == 2, told
        assert told.startswith("Error:"), told
        assert "Traceback" not in told
        assert len(told) < 1500
    assert not (tmp_path / "p.csv").exists()
    assert not (tmp_path / "e.safetensors").exists()


def test_what_the_error_advises_makes_the_model_again(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = (run / "model.safetensors").read_bytes(), (run / "model.json").read_bytes()
    for name in ("model.safetensors", "model.json"):
        (run / name).write_bytes(b"garbage")
    (run / "summary.json").unlink()
    run_experiment(resolve(json_free(run)), run, resume=True)
    assert ((run / "model.safetensors").read_bytes(), (run / "model.json").read_bytes()) == before


def json_free(run: Path) -> dict[str, object]:
    from tacit.core.settings import read_toml

    return dict(read_toml(run / "experiment.toml"))


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_a_damaged_export(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "mine.safetensors"
    export(load_model(whole), "safetensors", path)
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 8, 8), np.uint8))
    path.write_bytes(path.read_bytes()[:-9] if content is None else content)
    code, told = tacit(monkeypatch, capsys, "predict", path, tmp_path / "x.npz", "-o", tmp_path / "p.csv")
    assert code == 2
    assert "mine.safetensors" in told


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04" + bytes(99), "object", "shape", "names"])
def test_bad_images(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | str,
) -> None:
    path = tmp_path / "bad.npz"
    arrays = {
        "object": {"images": np.array([{}], dtype=object)},
        "shape": {"images": np.zeros((2, 3, 4, 5, 6), np.uint8)},
        "names": {"\x1b]0;PWN\x07": np.zeros(3)},
    }
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **arrays[content])
    code, told = tacit(monkeypatch, capsys, "predict", whole, path, "-o", tmp_path / "p.csv")
    assert code == 2, told
    assert "bad.npz" in told
    assert "\x1b" not in told
