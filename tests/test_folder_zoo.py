"""Folders as people have them, each with the reading, the question or the refusal that is expected."""

import itertools
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tacit.cli.app import app
from tacit.config.propose import parties
from tacit.config.resolve import resolve
from tacit.core.errors import Question, TacitError
from tacit.core.settings import Data
from tacit.data.federation import load_dataset
from tacit.data.folder_report import FolderReport
from tacit.data.own import inspect, inspect_sites
from tacit.data.sources import load

NUMBERS = itertools.count()


def picture(path: Path) -> Path:
    """A grey image of 8×8 that differs from all others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = next(NUMBERS)
    shades = np.frombuffer(number.to_bytes(8, "little") * 8, np.uint8).reshape(8, 8)
    Image.fromarray(shades).save(path)
    return path


def plant(root: Path, tree: str) -> Path:
    """Folders with so many images each, as in `a/nv:3 a/unlabeled:4`; spaces in names are written as +."""
    for word in tree.split():
        folder, _, number = word.partition(":")
        (root / folder.replace("+", " ")).mkdir(parents=True, exist_ok=True)
        for index in range(int(number or 0)):
            picture(root / folder.replace("+", " ") / f"{index}.png")
    return root


def said(report: FolderReport) -> str:
    """How it was read: by site the labelled and unlabelled images for training, the classes, the test images."""
    held = "; ".join(f"{party.name} {party.labeled}+{party.unlabeled}" for party in parties(report))
    tested = sum(item.part == "test" for item in report.items)
    return f"{held} | {' '.join(report.classes)} | {tested}"


def init(*words: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["init", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


READ = {
    # the layout of this field: one site labels, the others do not
    "one lab labels": ("a/nv:3 a/mel:3 a/unlabeled:4 b/unlabeled:4 c/unlabeled:4", "a 6+4; b 0+4; c 0+4 | mel nv | 0"),
    "the server labels": (
        "server/nv:3 server/mel:3 b/unlabeled:4 c/unlabeled:5",
        "b 0+4; c 0+5; server 6+0 | mel nv | 0",
    ),
    "every site labels": (
        "a/nv:3 a/mel:2 a/unlabeled:4 b/nv:3 b/mel:3 b/unlabeled:4",
        "a 5+4; b 6+4 | mel nv | 0",
    ),
    "a site lacks a class": ("a/nv:3 a/unlabeled:4 b/mel:3 b/unlabeled:4", "a 3+4; b 3+4 | mel nv | 0"),
    "a shared test set": (
        "a/nv:3 a/mel:3 a/unlabeled:4 b/unlabeled:4 test/nv:2 test/mel:2",
        "a 6+4; b 0+4 | mel nv | 4",
    ),
    "a test set tells classes from sites": (
        "a/nv:3 a/mel:3 b/nv:3 b/mel:3 test/nv:2 test/mel:2",
        "a 6+0; b 6+0 | mel nv | 4",
    ),
    "a test set by site": ("a/nv:3 a/mel:3 b/unlabeled:4 test/a/nv:1 test/a/mel:2", "a 6+0; b 0+4 | mel nv | 3"),
    "validation images": ("a/nv:3 a/mel:3 a/unlabeled:4 b/unlabeled:4 val/nv:2 val/mel:2", "a 6+4; b 0+4 | mel nv | 0"),
    "sites within train": (
        "train/a/nv:3 train/a/mel:3 train/b/unlabeled:4 test/nv:2 test/mel:2 val/nv:5",
        "a 6+0; b 0+4 | mel nv | 4",
    ),
    "train and test at each site": (
        "a/train/nv:3 a/train/mel:3 a/test/nv:1 a/test/mel:1 b/train/nv:2 b/unlabelled:4",
        "a 6+0; b 2+4 | mel nv | 2",
    ),
    "an empty site": ("a/nv:3 a/mel:3 a/unlabeled:1 b/unlabeled:4 c", "a 6+1; b 0+4 | mel nv | 0"),
    "a flat site beside one that tells": ("a/nv:3 a/mel:3 a/unlabeled:1 b:4", "a 6+1; b 0+4 | mel nv | 0"),
    # one party
    "classes": ("nv:3 mel:3 unlabeled:4", "zoo 6+4 | mel nv | 0"),
    "train and test": ("train/nv:3 train/mel:3 test/nv:2 test/mel:1 unlabeled:4", "zoo 6+4 | mel nv | 3"),
    "test beside classes": ("nv:3 mel:3 test/nv:2 test/mel:1", "zoo 6+0 | mel nv | 3"),
    "Train and TEST": ("Train/nv:3 Train/mel:3 TEST/nv:2 TEST/mel:1 Validation/nv:1", "zoo 6+0 | mel nv | 3"),
    "labeled and unlabeled": ("labeled/nv:3 labeled/mel:3 unlabeled:4", "zoo 6+4 | mel nv | 0"),
    "both within train": (
        "train/labelled/nv:3 train/labelled/mel:3 train/unlabelled:4 test/nv:1 test/mel:1",
        "zoo 6+4 | mel nv | 2",
    ),
    "parts within classes": ("nv/train:3 nv/test:2 mel/train:3 mel/test:1 mel/val:7", "zoo 6+0 | mel nv | 3"),
    "a patient a folder, with a test set": (
        "train/nv/p1:2 train/nv/p2:2 train/mel/p3:2 train/mel/p4:1 test/nv/p5:1 test/mel/p6:1",
        "zoo 7+0 | mel nv | 2",
    ),
    "one folder inside each class": ("nv/images:3 mel/images:3", "zoo 6+0 | mel nv | 0"),
    "a folder around it": ("zoo/nv:3 zoo/mel:3", "zoo 6+0 | mel nv | 0"),
    "three folders around it": ("x/y/zoo/nv:3 x/y/zoo/mel:3", "zoo 6+0 | mel nv | 0"),
    "a folder around sites": (
        "data/a/nv:3 data/a/mel:3 data/a/unlabeled:2 data/b/unlabeled:3",
        "a 6+2; b 0+3 | mel nv | 0",
    ),
    "what a Mac packs beside it": ("nv:3 mel:3 __MACOSX/nv:3 .cache:2", "zoo 6+0 | mel nv | 0"),
    "classes that are numbers": ("0:3 1:3 10:3 unlabeled:1", "zoo 9+1 | 0 1 10 | 0"),
}


@pytest.mark.parametrize("name", READ)
def test_one_reading_is_taken(name: str, tmp_path: Path) -> None:
    tree, expected = READ[name]
    report = inspect(plant(tmp_path / "zoo", tree))
    assert said(report) == expected
    assert ("neither trained nor tested on" in str(report.remarks(8))) == ("val" in tree.casefold())  # told


@pytest.mark.parametrize("name", READ)
def test_a_run_reads_what_init_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file that `init` wrote, and by the bare path, the same images are with the same parties."""
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "zoo", READ[name][0])
    init("zoo", "--out", "zoo.toml")
    data = resolve(tomllib.loads(Path("zoo.toml").read_text())).data
    by_file, bare = (
        load_dataset(data),
        load_dataset(Data(name="./zoo", skip_unreadable=True, image_size=data.image_size)),
    )
    assert (by_file.fingerprint, by_file.classes, by_file.sites) == (bare.fingerprint, bare.classes, bare.sites)
    assert [Path(path) for path in by_file.train_files] == [Path(path).resolve() for path in bare.train_files]
    assert by_file.train_sites is not None
    assert bare.train_sites is not None
    assert by_file.train_sites.tolist() == bare.train_sites.tolist()
    assert data.sites or data.layout == "classes"  # what was chosen is written down


@pytest.mark.parametrize(
    "name",
    [
        *(
            "unlabeled",
            "unlabelled",
            "Unlabeled",
            "UNLABELED",
            "unlabeled-images",
            "unlabelled_images",
            "Unlabeled+Data",
        ),
        *("no-label", "no_labels", "not-labelled", "un-labeled", "images_unlabeled", "unlabled", "unannotated"),
    ],
)
def test_unlabelled_in_any_spelling(name: str, tmp_path: Path) -> None:
    assert said(inspect(plant(tmp_path / "zoo", f"nv:2 mel:2 {name}:3"))) == "zoo 4+3 | mel nv | 0"
    sites = plant(tmp_path / "sites", f"a/nv:2 a/mel:2 a/{name}:3 b/{name}:2")
    assert said(inspect(sites)) == "a 4+3; b 0+2 | mel nv | 0"


@pytest.mark.parametrize("name", ["labels", "unclear", "unknown", "no_lesion", "testis", "validated", "trained"])
def test_names_of_classes_stay_names_of_classes(name: str, tmp_path: Path) -> None:
    assert inspect(plant(tmp_path / "zoo", f"nv:2 mel:2 {name}:3")).classes == sorted(["nv", "mel", name])


ASKED = {
    "sites, or classes with parts": ("a/nv:3 a/mel:3 b/nv:3 b/mel:3", ("--sites", "--classes")),
    "patients, or classes": ("nv/p1:2 nv/p2:2 mel/p3:2 mel/p4:2", ("--sites", "--classes")),
    "flat folders beside one with folders": ("a/nv:3 a/mel:3 b:4 c:4", ("--sites", "--classes")),
    "a server and flat folders": ("server/nv:3 server/mel:3 b:4 c:4", ("--sites", "--classes")),
    "sites within train, without a test set": ("train/a/nv:3 train/a/mel:3 train/b/nv:3", ("--sites", "--classes")),
    "unlabelled images beside sites": ("a/nv:3 a/mel:3 b/nv:3 b/mel:3 unlabeled:4", ("--classes",)),
    "a class in two spellings": (
        "a/nv:3 a/Mel:3 a/unlabeled:1 b/nv:2 b/mel:1",
        ("--merge-spellings", "--keep-spellings"),
    ),
    "two spellings at one party": ("nv:3 basal_cell:3 Basal+Cell:2", ("--merge-spellings", "--keep-spellings")),
}


@pytest.mark.parametrize("name", ASKED)
def test_two_readings_are_asked_about(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`init` ends with an error and writes nothing; a run with the bare path says the same sentence."""
    monkeypatch.chdir(tmp_path)
    tree, options = ASKED[name]
    plant(tmp_path / "zoo", tree)
    with pytest.raises(Question) as asked:
        init("zoo")
    assert tuple(answer.option for answer in asked.value.answers) == options
    assert all(option in str(asked.value) for option in options)
    assert "Nothing was guessed" in str(asked.value)
    assert not list(tmp_path.glob("zoo.toml"))
    with pytest.raises(Question) as again:
        load("./zoo")
    assert str(again.value) == str(asked.value)
    for answer, option in zip(asked.value.answers, options, strict=True):  # each answer settles it, and is written down
        init("zoo", option, "--force")
        data = resolve(tomllib.loads(Path("zoo.toml").read_text())).data
        assert data.sites or data.layout == "classes"
        settled = load("./zoo", how=Data(**answer.settings, image_size=8))
        assert load_dataset(data).fingerprint == settled.fingerprint


def test_the_question_shows_counts(tmp_path: Path) -> None:
    with pytest.raises(Question) as asked:
        inspect(plant(tmp_path / "zoo", "a/nv:3 a/mel:2 b/nv:1 b/mel:1"))
    sites, classes = (answer.words for answer in asked.value.answers)
    assert sites == "2 sites (a 5 labelled, 0 unlabelled; b 2 labelled, 0 unlabelled); 2 classes (mel 3, nv 4)"
    assert classes == "1 site; 2 classes (a 5, b 2), 0 unlabelled"


def test_spellings_are_merged_or_kept(tmp_path: Path) -> None:
    root = plant(tmp_path / "zoo", "a/nv:3 a/Mel:2 a/unlabeled:1 b/nv:2 b/mel:4")
    merged = inspect(root, how=Data(spellings="merge"))
    assert said(merged) == "a 5+1; b 6+0 | mel nv | 0"
    assert merged.counts("train")["mel"] == 6
    assert "'Mel' (2 images) and 'mel' (4 images) are one class, 'mel'" in merged.remarks(8)
    assert inspect(root, how=Data(spellings="keep")).classes == ["Mel", "mel", "nv"]


@pytest.mark.parametrize(("typed", "kind"), [("1\n", "sites"), ("9\n2\n", "classes")])
def test_on_a_terminal_it_is_asked(typed: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plant(tmp_path / "zoo", "a/nv:3 a/mel:3 b/nv:3 b/mel:3")
    monkeypatch.setattr("tacit.cli.init.someone_is_there", lambda: True)
    result = CliRunner().invoke(app, ["init", "zoo"], input=typed, catch_exceptions=False)
    assert result.exit_code == 0
    assert "2 sites (a 6 labelled" in result.output
    assert "Which is right?" in result.output
    data = resolve(tomllib.loads(Path("zoo.toml").read_text())).data
    assert bool(data.sites) == (kind == "sites")


REFUSED = {
    "labelled and unlabelled by class": ("nv/labeled:3 nv/unlabeled:3 mel/labeled:3", r"As classes: .*As sites: "),
    "hospitals by country": (
        "at/h1/nv:2 at/h1/unlabeled:2 de/h2/mel:2 de/h2/unlabeled:2",
        r"Give the sites one by one",
    ),
    "a test set of other classes": (
        "nv:3 mel:3 test/cat:2 test/dog:2",
        r"test images would be of other classes \(cat, dog\)",
    ),
    "a flat test set": ("nv:3 mel:3 test:4", r"test images without a label"),
    "a site whose folder says nothing": (
        "a/nv:3 a/mel:3 a/unlabeled:1 b/images:4",
        r"b/images: its name says that it holds images, not of which class",
    ),
    "nothing but unlabelled images": ("unlabeled:4", r"no class with images"),
    "nothing but pictures": (".:4", r"no class with images"),
    "one class": ("nv:4 unlabeled:3", r"1 class with images"),
    "nothing": ("nv mel", r"no readable image"),
    "sites without a label": ("a/unlabeled:3 b/unlabeled:3", r"As classes: .*As sites: there would be no class"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree, message = REFUSED[name]
    plant(tmp_path / "zoo", tree)
    with pytest.raises(TacitError, match=rf"(?s){message}"):
        load("./zoo")
    result = CliRunner().invoke(app, ["init", "zoo"])
    assert result.exit_code != 0
    assert not list(tmp_path.glob("*.toml"))


def test_a_model_that_knows_the_classes_settles_it(tmp_path: Path) -> None:
    """`tacit evaluate` on images that could be sites or classes: the model's classes tell."""
    root = plant(tmp_path / "zoo", "a/nv:3 a/mel:3 b/nv:3 b/mel:3")
    assert said(inspect(root, known=("nv", "mel", "bcc"))) == "a 6+0; b 6+0 | mel nv | 0"
    assert said(inspect(root, known=("a", "b"))) == "zoo 12+0 | a b | 0"
    with pytest.raises(Question):
        inspect(root, known=("x", "y"))


# sites that are given one by one


def test_a_flat_folder_given_as_a_site_is_unlabelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plant(tmp_path, "a/nv:3 a/mel:3 b:4 c:5")
    init("a", "b", "c", "--out", "x.toml")
    data = resolve(tomllib.loads(Path("x.toml").read_text())).data
    report = inspect_sites([Path(site) for site in data.sites])
    assert said(report) == "a 6+0; b 0+4; c 0+5 | mel nv | 0"
    assert not report.bad


@pytest.mark.parametrize("words", [("a", "b", "held-out/test"), ("a", "b", "--test", "held-out/test")])
def test_a_test_set_given_beside_sites(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plant(tmp_path, "a/nv:3 a/mel:3 b:4 held-out/test/nv:2 held-out/test/mel:2")
    assert "(shared by all)" in init(*words, "--out", "x.toml")
    data = resolve(tomllib.loads(Path("x.toml").read_text())).data
    assert [Path(test).name for test in data.tests] == ["test"]
    dataset = load_dataset(data)
    assert (dataset.sites, len(dataset.test_images), len(dataset.train_images)) == (("a", "b"), 4, 10)
    with pytest.raises(TacitError, match="its name says that it holds test images"):
        load_dataset(Data(name="x", sites=(*data.sites, *data.tests)))


def test_a_folder_of_sites_is_no_site(tmp_path: Path) -> None:
    plant(tmp_path, "labs/a/nv:3 labs/a/mel:3 labs/a/unlabeled:2 other/nv:3 other/mel:2")
    with pytest.raises(TacitError, match=r"labs is given as one party, but a/ holds a folder unlabeled/"):
        inspect_sites([tmp_path / "labs", tmp_path / "other"])


def test_images_beside_sites_are_told(tmp_path: Path) -> None:
    root = plant(tmp_path / "zoo", "a/nv:3 a/mel:3 a/unlabeled:2 b/unlabeled:2")
    picture(root / "lost.png")
    assert inspect(root).bad == ["images that lie in no class folder (1): lost.png"]


def test_a_link_that_leads_back(tmp_path: Path) -> None:
    root = plant(tmp_path / "zoo", "nv:3 mel:3")
    (root / "nv" / "again").symlink_to(root)
    (root / "back").symlink_to(tmp_path)
    assert len(inspect(root).items) == 6


def test_pipes_are_not_opened(tmp_path: Path) -> None:
    import os

    root = plant(tmp_path / "zoo", "nv:3 mel:3")
    for name in ("pipe", "pipe.png"):
        os.mkfifo(root / "nv" / name)
    (root / "mel" / "link").symlink_to(root / "nv" / "pipe")
    (root / "mel" / "gone.png").symlink_to(root / "nowhere.png")
    report = inspect(root)
    assert sorted(path.name for path in report.not_images) == ["link", "pipe", "pipe.png"]
    assert report.unreadable == [(root / "mel" / "gone.png", "no such file")]


# what could not be used


def test_the_whole_list_of_what_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import csv

    monkeypatch.chdir(tmp_path)
    root = plant(tmp_path / "zoo", "nv:3 mel:3 other")
    for number in range(20):
        (root / "nv" / f"broken-{number}.png").write_text("no picture")
    (root / "mel" / "=notes.txt").write_text("hm")
    picture(root / "loose.png")
    output = init("zoo")
    assert "What is not used, file by file (23 lines): zoo-unusable.csv" in output
    with open("zoo-unusable.csv", newline="") as file:
        rows = {Path(row["path"]).name: row["reason"] for row in csv.DictReader(file)}
    assert len(rows) == 23
    assert rows["broken-19.png"] == "cannot identify image file"
    assert rows["=notes.txt"] == "not an image, by its name"
    assert rows["loose.png"] == "lies in no class folder"
    assert rows["other"] == "a class without images"
    for path in root.glob("nv/broken*"):
        path.unlink()
    init("zoo", "--force")
    assert len(Path("zoo-unusable.csv").read_text().splitlines()) == 4  # an old list is not left behind
