"""Names made to act (on a terminal, on Rich, on a spreadsheet, on a browser) go through every command as mere names."""

import csv
import json
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from tacit.cli.app import main
from tacit.core.text import FORMULA, from_csv_cell
from tacit.data.sources import load

TITLE = "\x1b]0;PWN\x07"  # would change the window's title
HIDE = "\x1b[8m"  # would hide what follows; Rich has no use for it here
CLASSES = [
    f"[/red]{TITLE}",
    f"[bold]{HIDE}\x9b31m",
    "abc\u202etxt\u200b",
    "=cmd|' /C calc'!A0",
    "two\nlines\rover",
    "long " + "x" * 5000,
    "+1 <b>**|`$x$`",
    ":smile: @SUM(A1)",
]
SITES = [f"north[/b]{TITLE}", "-south|\u2066\t"]
FOLDER = "[/b]:smile:\u202e"  # control characters in a path on the command line are refused (tacit/core/paths.py)
QUICK = ["rounds=1", "net.name=cnn-4", "backend.name=local", "method.warmup=1", "method.generations=1"]


class Place:
    """A hostile data set and what the commands made of it."""

    def __init__(self, root: Path) -> None:
        self.root = root / FOLDER
        self.table, self.toml = self.root / "photos=[i].csv", self.root / "[/]mine.toml"
        self.run, self.images = self.root / "=[red]run", self.root / "new[/i]\u2066"
        digits = load("digits")
        rows = [("path", "label", "site")]
        for number in range(120):
            name, label = f"{number}-[/i]{TITLE if number % 7 == 0 else ''}.png", number % len(CLASSES)
            where = np.flatnonzero(digits.train_labels == label)[number // len(CLASSES)]
            self.save(digits.train_images[where], self.root / "all" / name)
            rows.append((f"all/{name}", CLASSES[label] if number < 100 else "", SITES[number % 2]))
        with self.table.open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        self.save(digits.test_images[0], self.images / "+a.png")
        self.save(digits.test_images[1], self.images / f"@{TITLE}.png")
        (self.images / "\u202e=bad.png").write_text("no picture")

    @staticmethod
    def save(image: np.ndarray, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0]).save(path)

    @property
    def settings(self) -> list[str]:
        return [word for one in QUICK for word in ("--set", one)]


Tacit = Callable[..., str]


@pytest.fixture
def tacit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tacit:
    """Run a command in this process, as `tacit` does; gives back all that it printed."""

    def command(*words: str | Path, exit_code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["tacit", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == exit_code, out + err
        return out + err

    return command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"))


def obeyed(text: str) -> set[str]:
    """What a terminal would act on; line breaks are layout."""
    return {sign for sign in text if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


@pytest.fixture(scope="module")
def finished(place: Place) -> Place:
    """After `tacit init` and `tacit run`."""
    with pytest.MonkeyPatch.context() as patch:
        for words in (
            ["init", place.table, "-o", place.toml],
            ["run", place.toml, *place.settings, "--out", place.run],
        ):
            patch.setattr(sys, "argv", ["tacit", *map(str, words)])
            with pytest.raises(SystemExit) as ended:
                main()
            assert not ended.value.code
    return place


def commands(place: Place) -> dict[str, list[str | Path]]:
    run, root = place.run, place.root
    return {
        "init": ["init", place.table, "-o", place.toml, "--force"],
        "split": ["split", place.toml, *place.settings, "--out", root / "[b]split.png"],
        "dry-run": ["run", place.toml, *place.settings, "--dry-run"],
        "run": ["run", place.toml, *place.settings, "--out", run, "--resume"],
        "report": ["report", root, "-o", root / "[b].html"],
        "compare": ["compare", run, "--runs", root / "more"],
        "compare-csv": ["compare", run, "--runs", root / "more", "--format", "csv"],
        "compare-markdown": ["compare", run, "--runs", root / "more", "--format", "markdown"],
        "compare-latex": ["compare", run, "--runs", root / "more", "--format", "latex"],
        "evaluate": ["evaluate", run],
        "evaluate-own": ["evaluate", run, "--data", place.table, "-o", root / "[b].json"],
        "predict": ["predict", run, place.images, "-o", root / "[b].csv"],
        "export": ["export", run, "--to", "safetensors", "-o", root / "[b].safetensors"],
        "advise": ["advise", run, "--count", "3"],
        "check": ["data", "check", place.table],
        "methods": ["methods"],
        "method": ["methods", "fedavg"],
        "recipes": ["recipes"],
        "figure": ["figure", "labels", run, "-o", root / "[b]labels.png"],
    }


NAMES = "init split dry-run run report compare compare-csv compare-markdown compare-latex evaluate evaluate-own predict"
NAMES += " export advise check methods method recipes figure"


@pytest.mark.parametrize("name", NAMES.split())
def test_nothing_that_is_printed_acts(finished: Place, tacit: Tacit, name: str) -> None:
    told = tacit(*commands(finished)[name])
    assert not obeyed(told), name
    assert "x" * 1000 not in told


@pytest.mark.parametrize("name", ["init", "split", "run", "evaluate", "predict", "compare"])
def test_in_colour_only_rich_itself_acts(
    finished: Place, tacit: Tacit, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    told = tacit(*commands(finished)[name])
    assert HIDE not in told
    assert not obeyed(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", told))


def test_a_whole_run_in_colour(finished: Place, tacit: Tacit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live view, too, and the words at the end of a run in a folder called [/b]."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    told = tacit("run", finished.toml, *finished.settings, "--out", finished.root / "[/b]")
    assert HIDE not in told
    assert not obeyed(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", told))
    assert "[/b]/card.html" in told


@pytest.mark.parametrize("colour", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [
        ["run", f"[/b]{TITLE}"],
        ["run", "--set", f"data.name=./[/b]{TITLE}\u202e"],
        ["run", "--set", f"{TITLE}[/b]=1"],
        ["predict", f"nothing[/b]{TITLE}", "x"],
        ["report", f"nothing[/b]{TITLE}"],
        ["methods", f"[/b]{TITLE}"],
        ["compare", f"[/b]{TITLE}"],
        ["data", "get", f"[/b]{TITLE}"],
    ],
)
def test_errors_quote_without_obeying(
    tacit: Tacit, monkeypatch: pytest.MonkeyPatch, words: list[str], colour: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", colour) if colour else monkeypatch.delenv("FORCE_COLOR", raising=False)
    told = tacit(*words, exit_code=2)
    assert "Error:" in told
    assert "Traceback" not in told
    assert TITLE not in told
    assert not obeyed(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", told))


def test_an_error_of_four_million_characters_is_shortened(tacit: Tacit) -> None:
    told = tacit("methods", "w" * 4_000_000, exit_code=2)
    assert len(told) < 20_000


def test_saved_files_keep_the_true_names(finished: Place) -> None:
    described = json.loads((finished.run / "model.json").read_text())
    assert sorted(described["classes"]) == sorted(name.strip() for name in CLASSES)
    assert json.loads((finished.run / "split.npz").with_name("model.json").read_text())["classes"]


def test_predictions_are_harmless_in_a_spreadsheet_and_read_back(finished: Place, tacit: Tacit) -> None:
    out = finished.root / "p.csv"
    tacit("predict", finished.run, finished.images, finished.table, "-o", out)
    with out.open(newline="") as file:
        rows = list(csv.reader(file))
    assert not [cell for row in rows for cell in row if cell.startswith(tuple(FORMULA))]
    head, *body = rows
    told = [dict(zip(head, map(from_csv_cell, row), strict=True)) for row in body]
    assert {row["prediction"] for row in told if row["prediction"]} <= {name.strip() for name in CLASSES}
    assert len(told) == 123
    for ending in (".jsonl", ".parquet"):
        tacit("predict", finished.run, finished.images, finished.table, "-o", out.with_suffix(ending))
    plain = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().split("\n") if line]
    assert [row["prediction"] for row in plain] == [row["prediction"] for row in told]
    assert [row["path"] for row in plain] == [row["path"] for row in told]
    assert parquet.read_table(out.with_suffix(".parquet"))["path"].to_pylist() == [row["path"] for row in told]


def test_a_table_of_ours_is_read_back_as_data(finished: Place, tacit: Tacit, tmp_path: Path) -> None:
    """Relative paths that begin like formulas are found again, because readers take the apostrophe off."""
    Place.save(np.zeros((1, 8, 8), np.uint8), tmp_path / "=a.png")
    (tmp_path / "t.csv").write_text("path\n'=a.png\n=a.png\n")
    tacit("predict", finished.run, tmp_path / "t.csv", "-o", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="") as file:
        assert [row["problem"] for row in csv.DictReader(file)] == ["", ""]


def test_other_tables_are_harmless_too(finished: Place, tacit: Tacit) -> None:
    tacit("advise", finished.run, "--count", "5")
    tacit("compare", finished.run, "--runs", finished.root / "more", "-o", finished.root / "c.csv")
    files = [finished.root / "c.csv", *finished.run.glob("kept/*/advice.csv")]
    assert len(files) > 1
    for path in files:
        with path.open(newline="") as file:
            rows = list(csv.reader(file))
        numbers = re.compile(r"[+-]?[0-9.e-]+$")
        bad = [c for row in rows for c in row if c.startswith(tuple(FORMULA)) and not numbers.match(c)]
        assert not bad, path


def test_the_card_shows_names_and_nothing_more(finished: Place) -> None:
    text, page = (finished.run / "card.md").read_text(), (finished.run / "card.html").read_text()
    assert not obeyed(text)
    assert not obeyed(page)
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "\n<b>" not in text
    table = text.split("### By class")[1].split("\n\n")[1].splitlines()
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table} == {7}, "no name ends its cell"
    assert len(table) == len(CLASSES) + 2


def test_nul_is_refused(tmp_path: Path, tacit: Tacit) -> None:
    for number in range(8):
        Place.save(np.full((1, 8, 8), number, np.uint8), tmp_path / f"{number}.png")
    rows = "".join(f"{number}.png,{'a' if number % 2 else 'b'}\0b\n" for number in range(8))
    (tmp_path / "t.csv").write_text("path,label\n" + rows)
    told = tacit("init", tmp_path / "t.csv", "-o", tmp_path / "x.toml", exit_code=2)
    assert "NUL" in told
    assert not (tmp_path / "x.toml").exists()
