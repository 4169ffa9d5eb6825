"""The user's own data: folders good and bad, tables, .npz."""

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from tacit.core.errors import TacitError
from tacit.data.own import inspect_folder
from tacit.data.sources import load


def picture(path: Path, colour: int | tuple[int, int, int] = 0, size: tuple[int, int] = (16, 16)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def folder_of(root: Path, first: int = 0, **classes: int) -> Path:
    """Grey images, 16×16; the shade tells class and number: 50 · class + number."""
    for index, (name, number) in enumerate(classes.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(number):
            picture(root / name / f"{i:03d}.png", 50 * index + first + i)
    return root


def test_a_plain_folder(tmp_path: Path) -> None:
    found = load(str(folder_of(tmp_path / "pets", cat=10, dog=20, unlabeled=5)))
    assert (found.name, found.classes, found.mirror) == ("pets", ("cat", "dog"), True)
    assert found.train_images.shape == (8 + 16 + 5, 1, 16, 16)
    assert np.bincount(found.test_labels).tolist() == [2, 4]  # 20 % of each
    assert (found.train_labels == -1).sum() == 5
    for images, labels in ((found.train_images, found.train_labels), (found.test_images, found.test_labels)):
        for shade, label in zip(images[:, 0, 0, 0], labels, strict=True):
            assert shade // 50 == (2 if label == -1 else label)
    assert "no test set was given: 20 %" in found.note
    again = load(str(tmp_path / "pets"))
    assert again.fingerprint == found.fingerprint


def test_train_and_test_folders(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", cat=3, dog=4)
    folder_of(tmp_path / "test", first=10, cat=2, dog=1)
    folder_of(tmp_path, unlabeled=6)
    folder_of(tmp_path / "val", cat=1, dog=1)
    found = load(str(tmp_path))
    assert np.bincount(found.test_labels).tolist() == [2, 1]
    assert [(found.train_labels == label).sum() for label in (0, 1, -1)] == [3, 4, 6]
    assert "held out" not in found.note
    assert "not read: val" in found.note


def test_classes_that_are_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    found = load(str(folder_of(tmp_path, **{"10": 3, "9": 3, "2": 3})))
    assert found.classes == ("2", "9", "10")


def test_odd_sizes_follow_the_rule(tmp_path: Path) -> None:
    """Most common shorter side 20: a 40×20 picture keeps its middle 20 columns; others are scaled first."""
    for name in ("a", "b"):
        for i in range(4):
            wide = np.zeros((20, 40), np.uint8)
            wide[:, 10:30] = 200
            (tmp_path / name).mkdir(exist_ok=True)
            Image.fromarray(wide).save(tmp_path / name / f"{i}.png")
        picture(tmp_path / name / "big.png", 90, (100, 130))
    found = load(str(tmp_path))
    assert found.train_images.shape[1:] == (1, 20, 20)
    everything = np.concatenate([found.train_images, found.test_images])
    assert {int(image.min()) for image in everything} == {int(image.max()) for image in everything} == {200, 90}
    assert "40×20 (8), 100×130 (2): the shorter side becomes 20 pixels" in found.note
    assert load(str(tmp_path), image_size=12).train_images.shape[1:] == (1, 12, 12)


def test_large_images_are_capped(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(2):
            picture(tmp_path / name / f"{i}.png", i, (300, 200))
    assert load(str(tmp_path)).train_images.shape[1:] == (1, 64, 64)


def test_grey_and_colour_become_rgb(tmp_path: Path) -> None:
    folder_of(tmp_path, cat=3, dog=3)
    picture(tmp_path / "dog" / "red.png", (255, 0, 0))
    found = load(str(tmp_path))
    assert found.channels == 3
    assert "grey (6) and colour (1) images are mixed: all become RGB" in found.note
    everything = np.concatenate([found.train_images, found.test_images])
    assert sum((image[0] != image[1]).any() for image in everything) == 1


def test_unusual_files_are_read(tmp_path: Path) -> None:
    """16 bits, palette, transparency, a photograph that lies on its side."""
    folder_of(tmp_path, cat=4, dog=4)
    deep = np.full((16, 16), 0x8001, np.uint16)
    Image.fromarray(deep).save(tmp_path / "cat" / "deep.png")
    Image.new("P", (16, 16)).save(tmp_path / "cat" / "palette.gif")
    Image.new("RGBA", (16, 16), (1, 2, 3, 0)).save(tmp_path / "cat" / "clear.png")
    lying = Image.new("RGB", (40, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by a quarter
    lying.save(tmp_path / "cat" / "lying.jpg", exif=exif)
    report = inspect_folder(tmp_path)
    assert not report.bad
    assert report.sizes[(16, 40)] == 1
    assert (report.grey, report.colour) == (9, 3)
    found = load(str(tmp_path))
    everything = np.concatenate([found.train_images, found.test_images])
    assert 0x80 in everything[:, 0, 0, 0]


# bad folders


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    """100 files of which 3 cannot be read, an empty class, a text file, grey and colour mixed."""
    folder_of(tmp_path, cat=40, dog=56, horse=0)
    picture(tmp_path / "dog" / "colour.png", (1, 2, 3))
    whole = (tmp_path / "cat" / "000.png").read_bytes()
    (tmp_path / "cat" / "cut.png").write_bytes(whole[:40])
    (tmp_path / "cat" / "empty.jpg").touch()
    (tmp_path / "dog" / "page.jpg").write_text("<html>404</html>")
    (tmp_path / "dog" / "notes.txt").write_text("my notes")
    (tmp_path / "dog" / ".DS_Store").write_text("not worth a word")
    (tmp_path / "README.md").write_text("not in a class folder, and no image: nobody minds")
    return tmp_path


def test_a_bad_folder_gives_a_report(bad: Path) -> None:
    report = inspect_folder(bad)
    assert report.counts("train") == {"cat": 40, "dog": 57}
    assert {path.name for path, _ in report.unreadable} == {"cut.png", "empty.jpg", "page.jpg"}
    assert [path.name for path in report.not_images] == ["notes.txt"]
    assert report.empty_classes == ["horse"]
    assert (report.grey, report.colour) == (96, 1)
    for words in (
        "97 readable images in 2 classes, 0 unlabelled",
        "images that cannot be read (3 of 100, 3.0 %)",
        "cut.png",
        "not images, by their names (1): notes.txt",
        "empty classes (1): horse",
        "grey (96) and colour (1)",
    ):
        assert words in report.text


def test_a_bad_folder_is_refused_unless_one_goes_on(bad: Path) -> None:
    with pytest.raises(TacitError, match=r"3 of 100(.|\n)*skip_unreadable = true"):
        load(str(bad))
    found = load(str(bad), skip_unreadable=True)
    assert found.classes == ("cat", "dog")
    assert len(found.train_images) + len(found.test_images) == 97
    assert "left out: images that cannot be read (3 of 100" in found.note


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({}, "no readable image"),
        ({"cat": 1}, "1 readable image"),
        ({"cat": 9}, "1 class with images"),
        ({"cat": 9, "dog": 0}, "1 class with images"),
        ({"unlabeled": 9}, "no class with images"),
        ({"cat": 1, "dog": 1}, "one image for each class"),
    ],
)
def test_some_folders_cannot_be_used_at_all(tmp_path: Path, classes: dict[str, int], message: str) -> None:
    folder_of(tmp_path, **classes)
    for skip in (False, True):
        with pytest.raises(TacitError, match=rf"{message}(.|\n)*cannot be used"):
            load(str(tmp_path), skip_unreadable=skip)


def test_images_outside_class_folders_are_reported(tmp_path: Path) -> None:
    folder_of(tmp_path, cat=5, dog=5)
    picture(tmp_path / "lost.png")
    with pytest.raises(TacitError, match=r"lie in no class folder \(1\): lost.png"):
        load(str(tmp_path))
    assert len(load(str(tmp_path), skip_unreadable=True).train_images) == 8


# tables


def table_rows(root: Path) -> list[dict[str, str | None]]:
    """Six patients with two images each; the last image has no label."""
    rows: list[dict[str, str | None]] = []
    for i in range(12):
        picture(root / "images" / f"{i}.png", i)
        label = None if i == 11 else ("ill", "well")[i % 4 // 2]
        rows.append({"path": f"images/{i}.png", "label": label, "group": f"patient {i // 2}"})
    return rows


def write_table(path: Path, rows: list[dict[str, str | None]]) -> None:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [",".join(value or "" for value in row.values()) for row in rows]
        path.write_text("\n".join([",".join(rows[0]), *lines]))


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_with_groups(tmp_path: Path, ending: str) -> None:
    rows = table_rows(tmp_path)
    path = tmp_path / f"list{ending}"
    write_table(path, rows)
    found = load(str(path))
    assert found.classes == ("ill", "well")
    assert found.train_groups is not None
    assert found.test_groups is not None
    assert not set(found.train_groups) & set(found.test_groups)
    # One patient of each class is held out. The one that is well has an image without a label, which is left out.
    assert np.bincount(found.test_labels).tolist() == [2, 1]
    assert np.bincount(found.train_labels).tolist() == [4, 4]
    assert "unlabelled images of groups that are tested with are left out (1)" in found.note
    assert "groups are given for 12 images: 6" in found.note


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_with_its_own_split(tmp_path: Path, ending: str) -> None:
    rows = [row | {"split": "test" if i in (0, 2) else "train"} for i, row in enumerate(table_rows(tmp_path))]
    for row in rows:
        del row["group"]
    write_table(tmp_path / f"list{ending}", rows)
    found = load(str(tmp_path / f"list{ending}"))
    assert found.test_images[:, 0, 0, 0].tolist() == [0, 2]
    assert found.test_labels.tolist() == [0, 1]
    assert found.train_groups is None


def test_numbers_as_labels_in_parquet(tmp_path: Path) -> None:
    paths = [str(row["path"]) for row in table_rows(tmp_path)]
    labels = [float("nan") if i == 11 else float(i % 2 * 10) for i in range(12)]
    parquet.write_table(pyarrow.table({"path": paths, "label": labels}), tmp_path / "list.parquet")
    found = load(str(tmp_path / "list.parquet"))
    assert found.classes == ("0", "10")
    assert (found.train_labels == -1).sum() == 1


def test_bad_tables(tmp_path: Path) -> None:
    rows = table_rows(tmp_path)
    path = tmp_path / "list.csv"
    write_table(path, [{"file": f"no-{row['path']}", "label": row["label"]} for row in rows])
    with pytest.raises(TacitError, match=r"columns file, label; path missing"):
        load(str(path))
    write_table(path, [row | {"split": "holdout"} for row in rows])
    with pytest.raises(TacitError, match=r"row 1: split is 'holdout'"):
        load(str(path))
    write_table(path, [row | {"split": "test" if i == 11 else ""} for i, row in enumerate(rows)])
    with pytest.raises(TacitError, match=r"test images without a label"):
        load(str(path))
    write_table(path, [row | {"split": "test" if i == 0 else ""} for i, row in enumerate(rows)])
    with pytest.raises(TacitError, match=r"1 groups .* lie in both"):
        load(str(path))
    write_table(path, [*rows, {"path": "images/gone.png", "label": "ill", "group": ""}])
    with pytest.raises(TacitError, match=r"gone.png \(no such file\)"):
        load(str(path))
    assert len(load(str(path), skip_unreadable=True).classes) == 2
    (tmp_path / "list.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(TacitError, match=r"list.parquet"):
        load(str(tmp_path / "list.parquet"))
    (tmp_path / "list.txt").touch()
    with pytest.raises(TacitError, match=r"list.txt is no data set"):
        load(str(tmp_path / "list.txt"))


# .npz


def test_own_npz_without_test_set(tmp_path: Path) -> None:
    images = np.arange(20, dtype=np.uint8)[:, None, None] + np.zeros((20, 8, 12), np.uint8)
    labels = np.array([0] * 10 + [1] * 5 + [-1] * 5)
    np.savez(tmp_path / "mine.npz", x_train=images, y_train=labels)
    found = load(str(tmp_path / "mine.npz"))
    assert found.train_images.shape == (17, 1, 8, 8)  # the centre square
    assert np.bincount(found.test_labels).tolist() == [2, 1]
    assert found.classes == ("0", "1")
    assert "held out" in found.note
    assert "centre square" in found.note


def test_own_npz_with_groups_in_both_parts_is_refused(tmp_path: Path) -> None:
    images = np.arange(4, dtype=np.uint8)[:, None, None] + np.zeros((4, 8, 8), np.uint8)
    labels = np.array([0, 1, 0, 1])
    stored = {"x_train": images, "y_train": labels, "x_test": images + 10, "y_test": labels}
    groups = {"group_train": np.arange(4), "group_test": np.arange(3, 7)}
    np.savez(tmp_path / "mine.npz", **stored, **groups)
    with pytest.raises(TacitError, match="1 groups"):
        load(str(tmp_path / "mine.npz"))


def test_a_known_name_is_not_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "digits", cat=5, dog=5)
    assert load("digits").classes[0] == "0"
    assert load("./digits").classes == ("cat", "dog")
