"""Tables as people have them: separators, encodings, columns of other names, ids, one-hot; what is open is asked."""

import tomllib
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from pictures import save
from tacit.cli.app import app
from tacit.config.resolve import resolve
from tacit.core.errors import Question, TacitError
from tacit.core.settings import Data
from tacit.data.columns import read_table
from tacit.data.federation import load_dataset
from tacit.data.own import inspect
from tacit.data.sources import load
from tacit.inference.images import collect

DIGITS = load("digits")
NAMES = ("mel", "nv")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve images, ISIC_00.png … ISIC_11.png, in images/."""
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        save(DIGITS.train_images[number], tmp_path / "images" / f"ISIC_{number:02d}.png")
    return tmp_path


def table(path: Path, head: str, line: str, separator: str = ",", encoding: str = "utf-8") -> Path:
    """Twelve rows; {n} is the number, {label} mel or nv."""
    rows = [line.format(n=f"{n:02d}", label=NAMES[n % 2], other=NAMES[1 - n % 2]) for n in range(12)]
    path.write_bytes("\n".join([head, *rows, ""]).replace(",", separator).encode(encoding))
    return path


def init(*words: str | Path) -> tuple[str, Data]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["init", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (written,) = Path().glob("*.toml")
    data = resolve(tomllib.loads(written.read_text())).data
    load_dataset(data)  # what was written is read
    written.unlink()
    return result.output, data


def counted(path: Path, how: Data | None = None) -> dict[str, int]:
    report = inspect(path, how=how or Data())
    assert not report.bad, report.bad
    return dict(report.counts("train"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_separators_and_encodings(here: Path, separator: str, encoding: str) -> None:
    path = table(here / "t.csv", "PATH,Label", "images/ISIC_{n}.png,größer {label}", separator, encoding)
    assert counted(path) == {"größer mel": 6, "größer nv": 6}


def test_a_column_with_windows_letters_in_its_name(here: Path) -> None:
    path = table(here / "t.csv", "bild;größe;art", "ISIC_{n};{other};{label}", encoding="cp1252")
    with pytest.raises(Question, match="--label-column 'größe'"):
        inspect(path)
    assert counted(path, Data(label_column="größe")) == {"nv": 6, "mel": 6}


def test_a_heading_that_is_too_long(here: Path) -> None:
    (here / "t.csv").write_text("path," + "x" * 200_000 + "\na,b\n")
    with pytest.raises(TacitError, match="cannot be read as a table"):
        inspect(here / "t.csv")


@pytest.mark.parametrize(
    ("head", "line"),
    [
        ("image_id,dx", "ISIC_{n},{label}"),  # ids without an ending, in images/
        ("Image Name,Diagnosis", "ISIC_{n}.png,{label}"),
        ("file,class", r"images\ISIC_{n}.png,{label}"),
        ("file,class", r"C:\Users\me\study\images\ISIC_{n}.png,{label}"),  # of another machine
        ("name,kind,age", "ISIC_{n},{label},{n}.5"),  # the only column whose values repeat
        ("lesion,image,sex,dx", "L{n},ISIC_{n},f,{label}"),
        ("path,label", "ISIC_{n}.png,{label}"),  # paths as if they lay beside the table
    ],
)
def test_columns_by_name_and_contents(here: Path, head: str, line: str) -> None:
    path = table(here / "t.csv", head, line)
    assert counted(path) == {"mel": 6, "nv": 6}
    output, data = init(path)
    if not head.startswith("path"):
        assert "paths are taken from the column" in output
        assert data.path_column in head.split(",")
        assert data.label_column in head.split(",")


def test_one_hot_as_isic_has_it(here: Path) -> None:
    path = here / "GroundTruth.csv"
    rows = [f"ISIC_{n:02d},{float(n % 3 == 0)},{float(n % 3 == 1)},{float(n % 3 == 2)}" for n in range(12)]
    path.write_text("\n".join(["image,MEL,NV,BCC", *rows]))
    assert counted(path) == {"MEL": 4, "NV": 4, "BCC": 4}
    output, data = init(path)
    assert "labels are the names of the columns MEL, NV, BCC" in output
    assert (data.path_column, data.label_column) == ("image", "one-hot")
    path.write_text("\n".join(["image,MEL,NV,BCC", *rows[:-1], "ISIC_11,1.0,1.0,0.0"]))
    for how in (Data(), Data(label_column="one-hot")):
        with pytest.raises(TacitError, match=r"row 12: 2 of the columns MEL, NV, BCC are 1. Expected exactly one"):
            inspect(path, how=how)


def test_two_columns_that_could_be_the_label_are_asked_about(here: Path) -> None:
    path = table(here / "t.csv", "image_id,outcome,sex", "ISIC_{n},{label},{other}")
    with pytest.raises(Question) as asked:
        inspect(path)
    assert [answer.option for answer in asked.value.answers] == ["--label-column outcome", "--label-column sex"]
    assert asked.value.answers[0].words == "mel 6, nv 6"
    with pytest.raises(Question):
        CliRunner().invoke(app, ["init", str(path)], catch_exceptions=False)
    assert not list(Path().glob("*.toml"))
    _, data = init(path, "--label-column", "OUTCOME")
    assert (data.path_column, data.label_column) == ("image_id", "outcome")
    both = table(here / "u.csv", "image_id,dx,target", "ISIC_{n},{label},{other}")  # two usual names
    with pytest.raises(Question, match="2 columns could be the label"):
        inspect(both)


def test_two_columns_that_name_different_files_are_asked_about(here: Path) -> None:
    for number in range(12):
        save(DIGITS.train_images[50 + number], here / "masks" / f"mask_{number:02d}.png")
    path = table(here / "t.csv", "image,mask,dx", "ISIC_{n},mask_{n},{label}")
    with pytest.raises(Question) as asked:
        inspect(path)
    assert [answer.option for answer in asked.value.answers] == ["--path-column image", "--path-column mask"]
    assert counted(path, Data(path_column="image")) == {"mel": 6, "nv": 6}


def test_options_name_columns(here: Path) -> None:
    path = table(here / "t.csv", "f,d,patient,hospital,fold", "ISIC_{n},{label},P{n},{other},")
    words = ["--path-column", "f", "--label-column", "d", "--group-column", "patient", "--site-column", "hospital"]
    output, data = init(path, *words, "--split-column", "fold")
    assert "2 sites" in output
    assert (data.group_column, data.site_column, data.split_column) == ("patient", "hospital", "fold")
    dataset = load_dataset(data)
    assert dataset.train_groups is not None
    assert dataset.sites == ("mel", "nv")
    with pytest.raises(TacitError, match=r"has no column 'hospitl' \(data.site_column\). Did you mean 'hospital'\?"):
        CliRunner().invoke(app, ["init", str(path), "--site-column", "hospitl"], catch_exceptions=False)


def test_rows_without_a_site_are_asked_about(here: Path) -> None:
    path = here / "t.csv"
    sites = ["north", "south", ""]
    rows = [f"images/ISIC_{n:02d}.png,{NAMES[n % 2]},{sites[n % 3]}" for n in range(12)]
    path.write_text("\n".join(["path,label,site", *rows]))
    with pytest.raises(Question) as asked:
        inspect(path)
    assert "4 of 12 rows name no site" in str(asked.value)
    assert [answer.option for answer in asked.value.answers] == ["--siteless leave-out", "--siteless server"]
    output, data = init(path, "--siteless", "leave-out")
    assert "2 sites" in output
    assert (data.siteless, len(inspect(path, how=data).items)) == ("leave-out", 8)
    assert inspect(path, how=Data(siteless="west")).sites == ["north", "south", "west"]
    dataset = load(str(path), how=Data(siteless="server"))
    assert dataset.sites == ("north", "south")
    assert dataset.train_sites is not None
    assert (dataset.train_sites == -1).any()
    tests = [f"{row},{'test' if row.endswith(',') else 'train'}" for row in rows]
    path.write_text("\n".join(["path,label,site,split", *tests]))  # test images may be everybody's
    assert inspect(path).sites == ["north", "south"]


def test_parts_in_any_case_and_val_aside(here: Path) -> None:
    parts = ["Train", "TEST", "Validation", ""]
    rows = [f"images/ISIC_{n:02d}.png,{NAMES[n // 4 % 2]},{parts[n % 4]}" for n in range(12)]
    (here / "t.csv").write_text("\n".join(["path,label,split", *rows]))
    report = inspect(here / "t.csv")
    assert (report.counts("train").total(), report.counts("test").total()) == (6, 3)
    assert "not read: 3 rows of val (neither trained nor tested on)" in report.remarks(8)


def test_an_id_that_two_files_have(here: Path) -> None:
    save(DIGITS.train_images[99], here / "more" / "ISIC_03.png")
    path = table(here / "t.csv", "image_id,dx", "ISIC_{n},{label}")
    report = inspect(path)
    assert report.unreadable == [
        (Path("ISIC_03"), "2 files have that name, as images/ISIC_03.png and more/ISIC_03.png")
    ]


def test_labels_that_say_unlabelled(here: Path) -> None:
    rows = [f"images/ISIC_{n:02d}.png,{('mel', 'nv', 'Unlabelled')[n % 3]}" for n in range(12)]
    (here / "t.csv").write_text("\n".join(["path,label", *rows]))
    assert counted(here / "t.csv") == {"mel": 4, "nv": 4, "": 4}


# a folder with a table in it


@pytest.mark.parametrize("flat", [False, True])
def test_a_folder_of_images_and_a_table_is_seen(here: Path, flat: bool) -> None:
    zoo = here / "zoo"
    zoo.mkdir()
    (here / "images").rename(zoo / "images")
    if flat:
        for path in (zoo / "images").iterdir():
            path.rename(zoo / path.name)
        (zoo / "images").rmdir()
    table(zoo / "labels.csv", "image_id,dx", "ISIC_{n},{label}")
    (zoo / "prices.csv").write_text("what,how much\nbread,3\n")  # a table of something else
    assert counted(zoo) == {"mel": 6, "nv": 6}
    _, data = init("zoo")
    assert (data.name, data.layout, data.label_column) == (str(zoo.resolve()), "table", "dx")
    for name in ("unlabelled/x.png", "images/more/y.png"):
        save(DIGITS.train_images[70 + len(name)], zoo / name)
    report = inspect(zoo)
    assert dict(report.counts("train")) == {"mel": 6, "nv": 6, "": 1}
    assert "not read: 1 images that labels.csv does not name" in report.remarks(8)
    assert len(load_dataset(data).train_labels) == len(load("./zoo").train_labels)
    table(zoo / "more.csv", "image_id,dx", "ISIC_{n},{other}")
    with pytest.raises(TacitError, match=r"holds 2 tables that name its images: labels\.csv, more\.csv"):
        inspect(zoo)


def test_class_folders_and_a_table_are_asked_about(here: Path) -> None:
    zoo = here / "zoo"
    for number in range(12):
        (zoo / NAMES[number % 2]).mkdir(parents=True, exist_ok=True)
        (here / "images" / f"ISIC_{number:02d}.png").rename(zoo / NAMES[number % 2] / f"ISIC_{number:02d}.png")
    labels = table(zoo / "labels.csv", "image_id,dx", "ISIC_{n},{other}")
    with pytest.raises(Question) as asked:
        inspect(zoo)
    assert [dict(answer.settings) for answer in asked.value.answers] == [{"layout": "classes"}, {"layout": "table"}]
    output, data = init("zoo", "--table")
    assert (data.layout, "mel 6, nv 6" in output) == ("table", True)
    assert counted(zoo, Data(layout="classes")) == {"mel": 6, "nv": 6}
    assert inspect(labels).kind == "table"
    labels.write_text("what,how much\nbread,3\n")
    assert counted(zoo) == {"mel": 6, "nv": 6}


def test_a_site_may_be_a_folder_with_a_table(here: Path) -> None:
    table(here / "labels.csv", "image_id,dx", "ISIC_{n},{label}")
    for number in range(5):
        save(DIGITS.train_images[100 + number], here / "other" / f"{number}.png")
    (here / "one").mkdir()
    for name in ("images", "labels.csv"):
        (here / name).rename(here / "one" / name)
    output, data = init("one", "other", "--out", "x.toml")
    assert "2 sites" in output
    dataset = load_dataset(data)
    assert dataset.sites == ("one", "other")
    assert (dataset.train_labels == -1).sum() == 5


# Parquet, prediction


def test_parquet_columns_of_other_names(here: Path) -> None:
    columns = {"image": [f"ISIC_{n:02d}" for n in range(12)], "dx": [NAMES[n % 2] for n in range(12)]}
    more = {"age": [40.5 + n for n in range(12)], "bytes": [b"x"] * 12, "list": [[1, 2]] * 12}
    parquet.write_table(pyarrow.table(columns | more), here / "t.parquet")
    assert counted(here / "t.parquet") == {"mel": 6, "nv": 6}


def test_prediction_finds_the_files_of_such_a_table(here: Path) -> None:
    path = table(here / "t.csv", "image_id;dx", "ISIC_{n};{label}")
    assert [item.path for item in collect([path])] == [here / "images" / f"ISIC_{n:02d}.png" for n in range(12)]


def test_a_plain_table_is_read_as_ever(here: Path) -> None:
    path = table(here / "t.csv", "path,label,dx", "images/ISIC_{n}.png,{label},{other}")
    found = read_table(path)
    assert (found.chosen, found.told) == ({}, [])
    assert found.rows[0] == {"path": "images/ISIC_00.png", "label": "mel"}
