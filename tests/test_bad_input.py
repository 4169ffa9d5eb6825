"""Bad input of every kind: a sentence and exit code 2, no traceback, nothing written, no data loaded."""

import dataclasses
import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

import tacit.data.own
import tacit.data.sources
from tacit.cli.app import main
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.memory_bounds import check_images, machine_memory
from tacit.core.settings import Experiment, known_keys, parse_setting
from tacit.engine.run import run_experiment
from tacit.methods import find_method, known_methods
from tacit.runs.plan import prepare

Ended = Callable[..., str]

MARKUP, CONTROL, NUL = "[/red]", "a\x1b]0;b\x07", "a\0b"
LONG_NAME, LONG_PATH = "a" * 300, "a/" * 2100
HUGE = str(10**400)
BEGUN = resolve({"method": {"name": "fixmatch", "preset": "smoke"}}).to_toml()
WIDE = "0x" + "f" * 5000  # a number of more digits than Python writes out


def everything_in(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file and folder with its size and time, to see that nothing was touched."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        found[str(path)] = (about.st_size, about.st_mtime_ns)
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with things that are not what they should be."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("text")
    (tmp_path / "nothing-in-it").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "empty.toml").touch()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "empty.npz").touch()
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "binary.toml").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "deep.toml").write_text("rounds = " + "[" * 20_000)
    (tmp_path / "large.toml").touch()
    os.truncate(tmp_path / "large.toml", 2_000_000)
    (tmp_path / "wide.toml").write_text(f"rounds = {WIDE}")
    (tmp_path / "nul.toml").write_text('title = "a\\u0000b"')
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "broken.py").write_text("def (:")
    (tmp_path / "other.py").write_text("x = 1")
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "run").mkdir()  # a run that has not begun
    (tmp_path / "run" / "experiment.toml").write_text(BEGUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ended(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ended:
    """Run a command in this process that must be refused; returns what it said."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts in its own
    monkeypatch.setenv("COLUMNS", "1000")  # a sentence is not broken into lines
    monkeypatch.setenv("TACIT_DATA", str(here / "data"))

    def run(*words: str, reads: bool = False) -> str:
        if not reads:  # all but the commands that look at one's own data
            monkeypatch.setattr(tacit.data.sources, "_load_named", _loaded)
            monkeypatch.setattr(tacit.data.own, "inspect", _loaded)
        before = everything_in(here)
        monkeypatch.setattr(sys, "argv", ["tacit", *words])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert end.value.code == 2, said.out + said.err
        assert "Traceback" not in said.out + said.err
        assert "Error" in said.err, said.out + said.err
        assert len(said.err) < 5000
        assert not set(said.err) & {"\0", "\a"}
        assert everything_in(here) == before
        return said.err

    return run


def _loaded(*_: Any, **__: Any) -> None:
    raise AssertionError("data was loaded before the mistake was told")


# --- Every key of an experiment ---------------------------------------------------------------------------

NUMBERS = ("three", MARKUP, NUL, CONTROL, "[1]", "-1", "1e20", HUGE, WIDE, "nan", "inf", "٣", "true", '"3"', "{a = 1}")
TEXTS = ("5", "[1]", "true", NUL, CONTROL, "a" * 5000, "a\u2028b", "\udcff", "2026-01-01")
SENSELESS: dict[object, tuple[str, ...]] = {
    int: ("1.5", *NUMBERS),
    float: NUMBERS,
    bool: ("5", "maybe", "[true]", "nan", NUL, MARKUP),
    str: TEXTS,
    Literal: ("5", "[1]", "", "nothing", MARKUP, NUL, "a" * 5000),
    tuple: ("5", "text", "[5]", '["a\\u0000b"]', f'["{LONG_NAME}"]', '["no-such-folder"]', '["~no-such-user/x"]'),
}
NAMES = (MARKUP, "no-such-thing", "file/x", LONG_NAME, "~no-such-user/x")  # in keys that name something that exists
MORE: dict[str, tuple[str, ...]] = {
    "rounds": ("0", "1000001"),
    "seed": (str(2**63),),
    "evaluate_every": ("0",),
    "device": ("[/red]", "gpu7", "cuda:-1", "cuda:99999999999", "cuda:٣", "meta"),
    "data.name": NAMES,
    "data.split": (*NAMES, "folder", "file", "empty.npz", "link"),
    "data.alpha": ("0", "1e-320", "1e7"),
    "data.clients": ("0", "100000"),
    "data.shards": ("0",),
    "data.min_size": ("0", "100000"),
    "data.labels": ("100000", "3"),
    "data.labeled_clients": ("0",),
    "data.cover": ("100000",),
    "data.subset": ("100000", "3"),
    "data.image_size": ("100000", "1", "7"),
    "net.name": (
        *NAMES,
        "cnn-0",
        "cnn-99999999999",
        "cnn-" + "9" * 400,
        "cnn--1",
        "cnn-٣",
        "resnet18-0",
        "wrn-28-0",
        "wrn-999999999998-2",
        "wrn-28-99999999999",
        "wrn-29-2",
        "vit-huge",
    ),
    "train.batch": ("0",),
    "train.lr": ("0",),
    "train.momentum": ("1",),
    "train.epochs": ("0", "100000"),
    "train.server_epochs": ("100000",),
    "participation.fraction": ("0", "1.5"),
    "participation.quorum": ("0", "100000"),
    "faults.dropout": ("1",),
    "faults.straggler": ("1",),
    "backend.name": ("flower",),
    "backend.workers": ("100000",),
    "paper.accuracy": ("101",),
    "paper.auc": ("101",),
    "method.name": (*NAMES, "./broken.py", "./other.py", "./folder.py", "./nowhere.py", "5", NUL, "a" * 5000),
    "method.preset": (MARKUP, "5", "[1]", NUL, LONG_NAME),
    "method.no_such_option": ("1",),
    "method": ("5", "[1]", "true", MARKUP, NUL),
    "no.such.key": ("1",),
    ".": ("1",),
    "data": ("5", "nothing-like-it"),
    "a\0b": ("1",),
    MARKUP: ("1",),
    "a" * 5000: ("1",),
    "data.name.x": ("1",),
}
KEPT_AS_THEY_ARE = [("title", MARKUP), ("title", "٣"), ("paper.source", MARKUP), ("backend.address", MARKUP)]


def annotation_of(key: str) -> Any:
    *path, last = key.split(".")
    model: Any = Experiment
    for part in path:
        model = model.model_fields[part].annotation
    return model.model_fields[last].annotation


def kind_of(annotation: Any) -> object:
    """int, float, bool, str, Literal or tuple."""
    kinds = [kind for kind in typing.get_args(annotation) if kind is not type(None)]
    origin = typing.get_origin(annotation)
    if origin in (Literal, tuple):
        return origin
    return kind_of(kinds[0]) if kinds else annotation


def bad_settings() -> Iterator[tuple[str, str]]:
    for key in known_keys():
        if key != "method":
            yield from ((key, value) for value in SENSELESS[kind_of(annotation_of(key))])
    for key, values in MORE.items():
        yield from ((key, value) for value in values)


ALL_BAD_SETTINGS = list(dict.fromkeys(bad_settings()))


def label(words: tuple[str, ...]) -> str:
    return "=".join(ascii(word)[1:-1][:30] for word in words)


@pytest.mark.parametrize(("key", "value"), ALL_BAD_SETTINGS, ids=map(label, ALL_BAD_SETTINGS))
def test_no_setting_takes_nonsense(key: str, value: str, here: Path, ended: Ended) -> None:
    preset = [] if key == "method.preset" else ["-s", "method.preset=smoke"]
    words = ["run", *preset, "--out", "new"]
    if "\0" in key + value:  # no word of a command can hold it, but a file can
        (here / "nul.toml").write_text(f"{json.dumps(key)} = {json.dumps(value)}")
        said = ended(*words, "nul.toml")
    else:
        said = ended(*words, "-s", f"{key}={value}")
    last = key.rpartition(".")[2]
    named = (last[:20], "There is no setting", "net", "method")
    assert not last.isidentifier() or any(name in said for name in named), said


@pytest.mark.parametrize(("key", "value"), KEPT_AS_THEY_ARE)
def test_texts_for_people_may_be_any(key: str, value: str) -> None:
    experiment = resolve(dict([parse_setting(f"{key}={value}")]))
    assert dict([parse_setting(f"{key}={value}")]).items() <= _flat(experiment).items()


def _flat(experiment: Experiment) -> dict[str, Any]:
    from tacit.core.settings import flatten

    return flatten(experiment.to_dict())


def test_a_setting_is_one_line(ended: Ended) -> None:
    assert "one key=value in one line" in ended("run", "-s", "rounds=3\nseed = 4")
    for setting in ("rounds", "=3", "", "rounds=[" + "[" * 20_000):
        ended("run", "-s", setting)


def bad_options(annotation: Any) -> tuple[Any, ...]:
    """Values that an option of a method must refuse, by its type."""
    kind = kind_of(typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation)
    numbers = (-1, 1e20, 10**400, 1 << 20000, float("nan"), float("inf"), "3", True, [1], NUL)
    return {int: (1.5, *numbers), float: numbers, bool: (5, NUL, []), Literal: (5, MARKUP, NUL, [])}[kind]


@pytest.mark.parametrize("name", known_methods())
def test_no_option_of_a_method_takes_nonsense(name: str) -> None:
    method = find_method(name)
    hints = typing.get_type_hints(method, include_extras=True)
    for option in dataclasses.fields(method):
        for value in bad_options(hints[option.name]):
            with pytest.raises(TacitError) as refused:
                resolve({"method.name": name, f"method.{option.name}": value, "data.placement": method.placements[0]})
            assert option.name in str(refused.value), value


def test_an_own_method_s_options_without_bounds_are_finite(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import dataclass\nfrom tacit.methods.fedavg import FedAvg\n"
        "@dataclass(frozen=True)\nclass Own(FedAvg):\n    far: float = 1.0\n    many: int = 1\n    name: str = ''\n"
    )
    for option, value in (("far", float("inf")), ("far", float("nan")), ("far", "1"), ("many", 2**64), ("name", NUL)):
        with pytest.raises(TacitError, match=f"method.{option} = "):
            resolve({"method.name": str(own), f"method.{option}": value})
    assert resolve({"method.name": str(own), "method.far": -1e20}).method["far"] == -1e20


def test_how_much_memory_it_would_take_is_told(ended: Ended) -> None:
    said = ended("run", "-s", "data.image_size=100000")  # 1,797 digits, a byte a pixel
    assert "1,797 images of 100000×100000 pixels with 1 channel would take 18.0 TB of memory; this machine has" in said
    said = ended("run", "-s", "net.name=cnn-99999999999")
    assert "The weights of net 'cnn-99999999999' would take" in said
    assert "Write a narrower one" in said
    check_images(1, 1, 100)
    with pytest.raises(TacitError, match=r"would take .* this machine has"):
        check_images(machine_memory() // 100 + 1, 1, 10)


def test_own_images_of_a_senseless_size_are_refused_before_they_are_read(here: Path, ended: Ended) -> None:
    from PIL import Image

    for name in ("a", "b"):
        for number in range(3):
            path = here / "own" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (9, 9), number * 20 + ord(name)).save(path)
    words = ("-s", "data.name=./own", "-s", "data.image_size=900000", "-s", "data.clients=1", "-s", "data.min_size=1")
    assert "6 images of 900000×900000 pixels with 1 channel would take 4.9 TB" in ended("run", *words, reads=True)


# --- Every command's arguments ----------------------------------------------------------------------------

BAD_PLACES = {
    "nul": "new\0",
    "control": CONTROL,
    "long name": LONG_NAME,
    "long path": LONG_PATH,
    "in a file": "file/new",
    "dangling link": "link",
    "in a dangling link": "link/new",
    "loop": "loop",
    "in a loop": "loop/new",
    "in a device": "/dev/null/new",
    "not UTF-8": "new\udcff",
}
FOLDERS = {
    "run": ("run", "--out"),
    "demo": ("demo", "--out"),
    "compare": ("compare", "demo-digits", "--runs"),
    "generate": ("generate", "run", "--out"),
}
FILES = {
    "split": (("split", "--out"), ".png"),
    "compare": (("compare", "demo-digits", "--out"), ".md"),
    "report": (("report", "run", "--out"), ".html"),
    "init": (("init", "folder", "--force", "--out"), ".toml"),
    "evaluate": (("evaluate", "run", "--out"), ".json"),
    "predict": (("predict", "run", "file", "--out"), ".csv"),
    "export": (("export", "run", "--out"), ".onnx"),
    "figure bias": (("figure", "bias", "run", "--out"), ".png"),
    "figure labels": (("figure", "labels", "run", "--out"), ".png"),
    "figure classes": (("figure", "classes", "run", "--out"), ".png"),
}


@pytest.mark.parametrize("place", BAD_PLACES)
@pytest.mark.parametrize("command", FOLDERS)
def test_no_command_takes_a_folder_that_cannot_be(command: str, place: str, ended: Ended) -> None:
    assert "hoose a" in ended(*FOLDERS[command], BAD_PLACES[place])


@pytest.mark.parametrize("command", FOLDERS)
def test_no_command_takes_a_file_for_a_folder(command: str, ended: Ended) -> None:
    assert "is a file, but a folder is needed" in ended(*FOLDERS[command], "file")


@pytest.mark.parametrize("place", [*BAD_PLACES, "folder"])
@pytest.mark.parametrize("command", FILES)
def test_no_command_takes_a_file_that_cannot_be(command: str, place: str, here: Path, ended: Ended) -> None:
    words, ending = FILES[command]
    if place == "folder":
        (here / f"folder{ending}").mkdir(exist_ok=True)
    elif place in ("dangling link", "loop"):
        (here / f"{BAD_PLACES[place]}{ending}").symlink_to(os.readlink(here / BAD_PLACES[place]))
    assert "hoose a" in ended(*words, ("folder" if place == "folder" else BAD_PLACES[place]) + ending)


@pytest.mark.parametrize("words", [*FOLDERS.values(), *(words for words, _ in FILES.values())], ids=" ".join)
def test_no_command_takes_a_place_without_permission(
    words: tuple[str, ...], ended: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = next((ending for some, ending in FILES.values() if some == words), "")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))  # root may anything
    assert "cannot be written to" in ended(*words, f"folder/new{ending}")


NOT_EXPERIMENTS = ("no-such", MARKUP, NUL, CONTROL, LONG_NAME, LONG_PATH, "~no-such-user/x.toml", "file", "folder")
NOT_EXPERIMENTS += ("link", "loop", "empty.toml", "binary.toml", "deep.toml", "large.toml", "wide.toml", "nul.toml")
NOT_EXPERIMENTS += ("folder.toml", "pipe.toml", "/dev/zero", "file/x.toml", "\udcff")
NOT_RUNS = ("no-such", MARKUP, NUL, CONTROL, LONG_NAME, LONG_PATH, "file", "folder", "link", "loop", "/dev/zero")
WRONG: dict[tuple[str, ...], tuple[str, ...]] = {
    ("run", "{}"): NOT_EXPERIMENTS,
    ("run", "--dry-run", "{}"): ("no-such", "binary.toml", LONG_NAME),
    ("split", "{}"): NOT_EXPERIMENTS,
    ("compare", "{}"): (*NOT_EXPERIMENTS, "nothing-in-it"),
    ("compare", "demo-digits", "--seeds", "{}"): ("0", "-1", "1000000000", HUGE, "x", "nan", "1.5"),
    ("compare", "demo-digits", "--scale", "{}"): ("0", "-1", "2", "nan", "inf", "x", MARKUP, NUL),
    ("compare", "demo-digits", "--only", "{}"): ("nothing", MARKUP),
    ("compare", "demo-digits", "--format", "{}"): ("nothing", MARKUP),
    ("compare", "demo-digits", "--set", "{}"): ("rounds=0", "seed=-1", "net.name=cnn-0", "x"),
    ("compare", "demo-digits", "--track", "{}"): ("nothing", MARKUP),
    ("compare", "-s", f"seed={2**63 - 1}", "--seeds", "2", "{}"): ("demo-digits",),
    ("run", "--track", "{}"): ("nothing", MARKUP),
    ("run", "--quiet", "--json", "{}"): ("demo",),
    ("{}",): ("nothing", MARKUP, ""),
    ("resume", "{}"): NOT_RUNS,
    ("report", "{}"): (*NOT_RUNS, "nothing-in-it"),
    ("advise", "{}"): NOT_RUNS,
    ("advise", "run", "--count", "{}"): ("0", "-1", "x"),
    ("generate", "{}"): NOT_RUNS,
    ("generate", "run", "--count", "{}"): ("0", "-1", "1000000000", HUGE, "x"),
    ("generate", "run", "--seed", "{}"): ("-1", HUGE, "x"),
    ("predict", "{}", "file"): (*NOT_RUNS, "run"),
    ("predict", "run", "file", "-o", "{}"): ("x.txt", "x", ""),
    ("export", "{}"): (*NOT_RUNS, "run"),
    ("export", "run", "--to", "{}"): ("nothing", MARKUP),
    ("export", "run", "--out", "{}"): ("x.txt",),
    ("evaluate", "{}"): (*NOT_RUNS, "run"),
    ("figure", "bias", "{}"): NOT_RUNS,
    ("figure", "labels", "{}"): NOT_RUNS,
    ("figure", "classes", "{}"): NOT_RUNS,
    ("figure", "bias", "run", "--out", "{}"): ("x.txt", "x"),
    ("figure", "classes", "run", "--round", "{}"): ("x", HUGE),
    ("methods", "{}"): ("nothing", MARKUP, NUL, LONG_NAME, "./nowhere.py", "./broken.py", "./folder.py", "other.py"),
    ("methods", "fedavg", "--set", "{}"): ("net.name=cnn-0", "net.name=cnn-99999999999", "x", "rounds=0"),
    ("recipes", "{}"): ("x",),
    ("init", "{}"): (
        "no-such",
        MARKUP,
        NUL,
        LONG_NAME,
        LONG_PATH,
        "file",
        "nothing-in-it",
        "folder",
        "link",
        "loop",
        "empty.csv",
        "empty.npz",
        "~no-such-user/x",
        "/dev/zero",
    ),
    ("init", "folder", "--clients", "{}"): ("-1", "x", HUGE),
    ("data", "get", "{}"): ("nothing", MARKUP, NUL, LONG_NAME, "file"),
    ("data", "check", "{}"): ("nothing", MARKUP, NUL, LONG_NAME, "~no-such-user/x", "file", "empty.csv", "empty.npz"),
    ("data", "list", "{}"): ("nothing", MARKUP, LONG_NAME),
    ("watch", "run", "--port", "{}"): ("-3", "99999", "x", HUGE),
    ("watch", "run", "--host", "{}"): ("a b c", "a..b", MARKUP, LONG_NAME),
}
KNOWN = {words[0] for words in WRONG} - {"{}"}
ALL_WRONG = [tuple(word.format(value) for word in words) for words, values in WRONG.items() for value in values]


@pytest.mark.parametrize("words", ALL_WRONG, ids=map(label, ALL_WRONG))
def test_no_command_takes_what_it_cannot_use(words: tuple[str, ...], ended: Ended) -> None:
    said = ended(*words, reads=words[0] in ("init", "data", "methods"))
    assert "No such command" not in said or words[0] not in KNOWN


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "-s", "backend.name=flower"), "tacit site run"),
        (("run", "--out", LONG_NAME), "at most 255 are possible"),
        (("run", "-s", "net.name=cnn-99999999999"), "Write a narrower one"),
        (("run", b"\xff.toml"), "is not valid UTF-8"),
    ],
)
def test_in_a_process_of_its_own(words: tuple[str | bytes, ...], said: str, here: Path) -> None:
    before = everything_in(here)
    failed = subprocess.run([sys.executable, "-m", "tacit", *words], capture_output=True, text=True, timeout=120)
    assert failed.returncode == 2, failed.stderr
    assert said in " ".join(failed.stderr.split())
    assert "Traceback" not in failed.stderr
    assert everything_in(here) == before


def test_there_are_enough() -> None:
    places = len(BAD_PLACES) * (len(FOLDERS) + len(FILES))
    assert len(ALL_BAD_SETTINGS) + len(ALL_WRONG) + places > 180


def test_a_run_goes_on_without_the_split_that_it_was_drawn_from(tmp_path: Path) -> None:
    """Its own copy counts: what is checked first must not ask for more than the run needs."""
    smoke = resolve({"method": {"name": "fedavg", "preset": "smoke"}, "data.subset": 300, "rounds": 1})
    prepare(smoke).split.save(tmp_path / "drawn.npz")
    experiment = resolve(smoke.to_dict(), {"data.split": str(tmp_path / "drawn.npz")})
    run_experiment(experiment, tmp_path / "run")
    (tmp_path / "drawn.npz").unlink()
    assert run_experiment(experiment, tmp_path / "run", resume=True).summary is not None
    with pytest.raises(TacitError, match="no readable split"):
        run_experiment(experiment, tmp_path / "new")
    assert not (tmp_path / "new").exists()
