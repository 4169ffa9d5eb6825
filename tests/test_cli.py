"""The command line as a person uses it: real processes, every message read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pictures import write_sites
from tacit.cli.app import complete, main
from tacit.core.errors import TacitError
from tacit.data.glance import glancing
from tacit.data.sources import load

app = complete()


def tacit(*words: str, cwd: Path | None = None, data: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "160", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    if data is not None:
        environment["TACIT_DATA"] = str(data)
    return subprocess.run(
        [sys.executable, "-m", "tacit", *words], capture_output=True, text=True, env=environment, cwd=cwd, timeout=120
    )


def quick(*words: str) -> str:
    """The same without a new process, for commands that only tell."""
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


SMOKE = ("--set", "method.name=fixmatch", "--set", "method.preset=smoke", "--set", "data.subset=300")


def test_run_writes_a_folder(tmp_path: Path) -> None:
    done = tacit("run", *SMOKE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "fixmatch-seed0"
    names = {path.name for path in folder.iterdir()}
    assert {"experiment.toml", "rounds.jsonl", "summary.json", "split.npz", "model.safetensors", "checkpoint"} <= names
    assert json.loads((folder / "summary.json").read_text())["method"] == "fixmatch"
    assert "main round 2" in done.stdout
    assert "left)" in done.stdout
    again = tacit("run", *SMOKE, cwd=tmp_path)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "nothing-like-it"), "is neither a recipe nor a file"),
        (("run", "dem"), "Did you mean 'demo'?"),
        (("run", "--set", "method.name=fedvag"), "Did you mean 'fedavg'?"),
        (("run", "--set", "method=fedvag"), "Did you mean 'fedavg'?"),
        (("run", "--set", "train=3"), "train = 3"),
        (("run", "--set", "data.name=nowhere"), "nowhere"),
        (("run", "--set", "data.clients=500", "--set", "method.preset=smoke"), "500"),
        (("run", "--set", "net.name=resnet81"), "resnet"),
        (("resume", "no-such-folder"), "holds no run of tacit"),
        (("methods", "fedvag"), "Did you mean 'fedavg'?"),
    ],
)
def test_mistakes_end_with_two_and_a_sentence(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the entry point itself, in this process: ten new ones would spend half a minute on imports."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tacit", *words])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts in its own
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 2, said.out + said.err
    assert message in said.err
    assert "Traceback" not in said.err
    assert not (tmp_path / "runs").exists()  # nothing was begun


def test_a_mistake_in_a_process_of_its_own(tmp_path: Path) -> None:
    failed = tacit("run", "dem", cwd=tmp_path)
    assert failed.returncode == 2, failed.stdout + failed.stderr
    assert "Did you mean 'demo'?" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_help_does_without_torch() -> None:
    """Importing it takes longer than everything else that commands do which only tell or set up."""
    code = "import sys; from tacit.cli.app import complete; complete(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_dry_run_tells_and_does_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = quick("run", *SMOKE, "--dry-run")
    for word in ("[method]", 'name = "fixmatch"', "Parameters", "What it would cost", "warm-up", "Roughly", "server"):
        assert word in output
    assert list(tmp_path.iterdir()) == []
    assert "3 rounds: 1 of warm-up, then 2 of main." in output
    assert "What the preset 'smoke' of the method says" in output
    assert "weight_decay" not in output  # nobody chose it
    everything = quick("run", *SMOKE, "--dry-run", "--all")
    assert "weight_decay = 0.0005" in everything
    with pytest.raises(TacitError, match="add --dry-run"):
        quick("run", *SMOKE, "--all")


def test_dry_run_of_own_images_decodes_none_and_shows_the_same_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = write_sites(load("digits"), tmp_path / "my photos", labeled=5, unlabeled=20)
    quick("init", str(photos))
    settings = ["--set", "net.name=cnn-16", "--set", "train.lr=0.05"]
    split = quick("split", "my photos.toml", *settings)

    def decoded(*_: object) -> None:
        pytest.fail("an image was decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    output = quick("run", "my photos.toml", *settings, "--dry-run")
    assert split.split("Tested on")[0].strip() in output
    assert "images were counted by their names and not read" in output
    assert "lr = 0.05" in output
    told = " ".join(output.split())
    assert "1,738 rounds: 869 of twin, then 100 of fold 1, then 100 of fold 2, then 100 of warm-up," in told
    assert "then 71 of generation 4, then 285 of main." in told
    assert not glancing()
    with pytest.raises(pytest.fail.Exception):
        quick("split", "my photos.toml")


def test_methods_tell_what_travels() -> None:
    assert "fixmatch" in quick("methods")
    output = quick("methods", "fixmatch", "--set", "net.name=resnet18")
    for word in ("threshold", "0.95", "confidence that a pseudo-label needs", "NeurIPS 2020", "goes up", "44.7 MB"):
        assert word in output


def test_recipes_are_listed_and_resolve() -> None:
    from tacit.config.recipes import known_recipes, load_recipe
    from tacit.config.resolve import resolve

    output = quick("recipes")
    for name in known_recipes():
        assert name in output
        resolve(load_recipe(name))


def test_split_draws_a_picture(tmp_path: Path) -> None:
    output = quick("split", *SMOKE, "--out", str(tmp_path / "split.png"))
    assert "server" in output
    assert (tmp_path / "split.png").stat().st_size > 1000


def test_help_teaches() -> None:
    output = quick("--help")
    for word in ("run", "resume", "generate", "methods", "recipes", "data", "split", "demo"):
        assert word in output


def test_a_plain_script_may_use_the_pool(tmp_path: Path) -> None:
    """No `if __name__ == "__main__"`: workers must not run the script again."""
    script = tmp_path / "three.py"
    script.write_text(
        "import tacit\n"
        "run = tacit.run({'method': {'name': 'fedavg', 'preset': 'smoke'}}, out='runs/first', \n"
        "                data__placement='clients', backend__name='pool', backend__workers=2, data__subset=300)\n"
        "print('rounds', len(run['accuracy']))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rounds 2") == 1


def test_a_run_that_fails_says_what_is_saved_and_goes_on_when_mended(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    code = (
        "from tacit.methods.fedavg import FedAvg\n"
        "class Own(FedAvg):\n"
        "    def client_train(self, task, memory, me):\n"
        "        if me.round == 1: raise ZeroDivisionError('oops')\n"
        "        return super().client_train(task, memory, me)\n"
    )
    own.write_text(code)
    words = ("--set", "method=./own.py", "--set", "method.preset=smoke", "--set", "data.placement=clients")
    failed = tacit("run", *words, "--out", "mine", cwd=tmp_path)
    assert failed.returncode == 1
    assert "while client 0 trained in round 1 of stage 'main'" in failed.stderr
    assert "All finished rounds are saved in mine" in failed.stderr
    assert "--out mine --resume" in failed.stderr
    own.write_text(code.replace("me.round == 1", "False"))
    assert tacit("run", *words, "--out", "mine", "--resume", cwd=tmp_path).returncode == 0
    assert len((tmp_path / "mine" / "rounds.jsonl").read_text().splitlines()) == 2


def test_dry_run_fetches_nothing(tmp_path: Path) -> None:
    told = tacit("run", "demo", "--dry-run", data=tmp_path / "empty")
    assert told.returncode == 0, told.stderr
    assert "run `tacit data get mnist` first" in told.stdout
    assert not (tmp_path / "empty").exists()


def test_python_in_three_lines(tmp_path: Path) -> None:
    import tacit as package

    run = package.run({"method": {"name": "fedavg", "preset": "smoke"}}, out=tmp_path / "run", train__lr=0.05)
    assert run.experiment.train.lr == 0.05
    assert len(run["accuracy"]) == 2
    assert package.load(tmp_path / "run").summary == run.summary
