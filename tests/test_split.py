"""A split: saved and loaded exactly, checked against the data, shown on screen and as a picture."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tacit.cli.split import show_split
from tacit.core.console import SafeConsole
from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data.dataset import Dataset
from tacit.data.draw import LABELED, UNLABELED, draw_split, picture_of
from tacit.data.sources import load
from tacit.data.split import Part, Split, ceiling, class_table, load_split, make_split, title, warnings

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def data_of(train: np.ndarray, test: np.ndarray, classes: tuple[str, ...] = NAMES, **more) -> Dataset:
    """Labels with one black pixel each; a split does not look at images."""
    return Dataset(
        name="toy",
        train_images=np.zeros((len(train), 1, 1, 1), np.uint8),
        train_labels=np.asarray(train, np.int64),
        test_images=np.zeros((len(test), 1, 1, 1), np.uint8),
        test_labels=np.asarray(test, np.int64),
        classes=classes,
        mean=(0.0,),
        std=(1.0,),
        **{"fingerprint": "abc", **more},
    )


TOY = data_of(np.arange(2000) % 10, np.arange(500) % 10)


def lists(split: Split) -> list[list[int]]:
    parts = [one for part in split.clients for one in (part.labeled, part.unlabeled)]
    return [array.tolist() for array in (split.server, *parts, split.test)]


def by_hand(placement: str = "some-clients", **recipe) -> tuple[Split, Dataset]:
    """Three classes; the server knows class 0, client 0 has two labels, client 1 has none."""
    dataset = data_of([0, 0, 1, 1, 2, 2, -1], [0, 1, 1, 2, 2, 2, 2, 2], ("cat", "dog", "[cow]"))
    whole = {
        **Data(name="toy", placement=placement, clients=2).model_dump(mode="json", exclude={"split"}),
        "train_images": 7,
        "test_images": 8,
        **recipe,
    }
    parts = (Part(np.array([1, 2]), np.array([1, 2, 6])), Part(np.array([], int), np.array([3, 4, 5])))
    return Split(np.array([0]), parts, np.arange(8), whole, 3, "abc"), dataset


@pytest.mark.parametrize(
    "changes",
    [
        {"placement": "server", "labels": 100, "alpha": 0.1},
        {"placement": "clients", "labels": 100, "test_subset": 120},
        {"placement": "some-clients", "cover": 1, "alpha": 5.0, "subset": 900},
        {"placement": "clients", "labels": 100, "reveal": "all", "partition": "shards"},
    ],
)
def test_saved_and_loaded_exactly(tmp_path, changes):
    split = make_split(TOY, Data(**changes), seed=7)
    path = tmp_path / "new" / "split.npz"
    split.save(path)
    loaded = load_split(path)
    assert lists(loaded) == lists(split)
    assert (loaded.recipe, loaded.seed, loaded.fingerprint) == (split.recipe, 7, "abc")
    loaded.check_against(TOY)
    assert [entry.name for entry in path.parent.iterdir()] == ["split.npz"]  # nothing left beside
    before = path.read_bytes()
    loaded.save(path)
    assert path.read_bytes() == before


def test_seeds_and_subsets():
    settings = Data(labels=100, test_subset=200)
    split = make_split(TOY, settings, 0)
    assert lists(split) == lists(make_split(TOY, settings, 0))
    assert lists(split) != lists(make_split(TOY, settings, 1))
    np.testing.assert_array_equal(np.bincount(TOY.test_labels[split.test]), [20] * 10)
    assert lists(make_split(TOY, Data(labels=100), 0))[:-1] == lists(split)[:-1]  # the test set has its own draw
    np.testing.assert_array_equal(make_split(TOY, Data(labels=100), 0).test, np.arange(500))


def test_nobody_can_write_into_a_split():
    split = make_split(TOY, Data(labels=100), 0)
    with pytest.raises(ValueError, match="read-only"):
        split.server[0] = 5


def test_a_saved_split_is_small(tmp_path):
    dataset = data_of(np.arange(50_000) % 10, np.arange(10_000) % 10)
    make_split(dataset, Data(labels=4000, placement="clients", clients=100), 0).save(tmp_path / "split.npz")
    assert (tmp_path / "split.npz").stat().st_size < 150_000


def test_damaged_files_are_named_and_never_half_used(tmp_path):
    split = make_split(TOY, Data(labels=100, clients=5), 0)
    good = tmp_path / "good.npz"
    split.save(good)
    whole = good.read_bytes()
    bad = tmp_path / "bad.npz"
    generator = np.random.default_rng(0)
    refused = 0
    for trial in range(300):
        damaged = bytearray(whole)
        if trial % 3 == 0:
            damaged = damaged[: generator.integers(len(whole))]
        else:
            damaged[generator.integers(len(whole))] ^= 1 << generator.integers(8)
        bad.write_bytes(damaged)
        try:
            loaded = load_split(bad)
        except TacitError as error:
            refused += "bad.npz is damaged" in str(error)
        else:  # a bit that carries nothing, such as a date in the zip's directory
            assert lists(loaded) == lists(split)
            assert loaded.recipe == split.recipe
    assert refused > 280


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offsets": lambda offsets: offsets[::-1]}, "do not belong together"),
        ({"offsets": lambda offsets: offsets[:-1]}, "do not belong together"),
        ({"indices": lambda indices: indices + 1990}, "images that do not exist"),
        ({"indices": lambda indices: indices - 1}, "images that do not exist"),
        ({"metadata": lambda text: np.array(str(text).replace("tacit-split-1", "tacit-split-9"))}, "tacit-split-9"),
        ({"metadata": lambda text: np.array("[]")}, "damaged"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, change, reason):
    path = tmp_path / "split.npz"
    make_split(TOY, Data(labels=100, clients=5), 0).save(path)
    with np.load(path) as file:
        content = dict(file)
    for key, edit in change.items():
        content[key] = edit(content[key])
    np.savez(path, **content)
    with pytest.raises(TacitError, match=reason):
        load_split(path)


def test_no_file_and_no_split(tmp_path):
    with pytest.raises(TacitError, match=r"no readable split at .*nothing\.npz"):
        load_split(tmp_path / "nothing.npz")
    with pytest.raises(TacitError, match="no readable split"):
        load_split(tmp_path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(TacitError, match="not a split of tacit"):
        load_split(tmp_path / "array.npy")


def test_other_data_is_refused():
    split = make_split(TOY, Data(name="toy", labels=100), 0)
    with pytest.raises(TacitError, match=r"'toy' with 2000 training and 500 test images, but .* has 1999 and 500"):
        split.check_against(data_of(np.arange(1999) % 10, TOY.test_labels))
    with pytest.raises(TacitError, match=r"fingerprint abc\) than 'toy' has \(xyz\)"):
        split.check_against(data_of(TOY.train_labels, TOY.test_labels, fingerprint="xyz"))


def test_a_saved_split_is_used_instead_of_drawing(tmp_path):
    path = tmp_path / "split.npz"
    made = make_split(TOY, Data(labels=100, clients=7), 0)
    made.save(path)
    used = make_split(TOY, Data(labels=100, clients=7, split=str(path)), 99)
    assert lists(used) == lists(made)
    assert used.seed == 0
    shown = make_split(TOY, Data(clients=7, split=str(path), reveal="all"), 0)
    assert lists(shown) == lists(make_split(TOY, Data(labels=100, clients=7, reveal="all"), 0))
    assert shown.recipe["reveal"] == "all"
    with pytest.raises(TacitError, match=r"has clients = 7, but the experiment says clients = 10\. Write clients = 7"):
        make_split(TOY, Data(split=str(path)), 0)
    with pytest.raises(TacitError, match="placement = server"):
        make_split(TOY, Data(clients=7, placement="clients", split=str(path)), 0)
    with pytest.raises(TacitError, match="made for"):
        make_split(data_of(np.arange(1999) % 10, TOY.test_labels), Data(clients=7, split=str(path)), 0)


def test_class_table_by_hand():
    split, dataset = by_hand()
    labeled, unlabeled = class_table(split, dataset.train_labels, 3)
    np.testing.assert_array_equal(labeled, [[1, 0, 0], [1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(unlabeled, [[0, 0, 0], [1, 1, 0], [0, 1, 2]])  # the -1 is in no column


def test_ceiling_and_warnings_by_hand():
    split, dataset = by_hand(reveal="none", name="digits")
    assert ceiling(split, dataset) == ((2,), 3 / 8)
    found = warnings(split, dataset)
    assert found == [
        "No labelled party holds the class '[cow]'. No method can learn it: accuracy cannot exceed 37.5 %.",
        "Fewer than 5 labels in all for 'cat', 'dog'. `cover = n` draws again until each class has n.",
        "2 of 2 clients hold fewer than 10 images (the smallest, client 0, holds 3).",
    ]


def test_warnings_of_the_other_placements():
    split, dataset = by_hand("clients", labels=5)
    assert warnings(split, dataset)[-2:] == [
        "1 of 2 clients hold no labelled image.",
        "The labelled pool is 2 images short of 5: no whole group fitted into what was still wanted.",
    ]
    for placement in ("server", "clients", "some-clients"):
        calm = make_split(TOY, Data(placement=placement, labels=100, partition="iid"), 0)
        assert warnings(calm, TOY) == []
        assert ceiling(calm, TOY) == ((), 1.0)


def test_an_untested_class_is_named():
    dataset = data_of(np.arange(300) % 3, np.array([0, 2, 2]), ("cat", "dog", "cow"))
    split = make_split(dataset, Data(labels=30, clients=3), 0)
    assert warnings(split, dataset) == ["No test image in use shows 'dog'."]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"labels": 100, "alpha": 0.1}, "toy: dirichlet 0.1, 10 clients, 100 labels at the server, seed 0"),
        (
            {"labels": 100, "placement": "clients", "partition": "shards"},
            "toy: shards 2, 10 clients, 100 labels at the clients, seed 0",
        ),
        ({"placement": "some-clients", "partition": "iid"}, "toy: iid, 10 clients, 1 labelled, seed 0"),
        ({"labels": 100, "reveal": "all"}, "toy: dirichlet 0.3, 10 clients, all labels revealed, seed 0"),
    ],
)
def test_titles(changes, expected):
    assert title(make_split(TOY, Data(name="toy", **changes), 0)) == expected


# --- Pictures and tables ----------------------------------------------------------------------------------


def colours(picture: Image.Image) -> dict[tuple[int, ...], int]:
    return {colour: count for count, colour in picture.getcolors(1 << 20)}  # type: ignore[misc, union-attr]


@pytest.mark.parametrize("clients", [10, 60, 100, 1000])
def test_pictures_of_few_and_many_clients(tmp_path, clients):
    split = make_split(TOY, Data(labels=50, clients=clients, partition="iid", min_size=1), 0)
    path = tmp_path / "split.png"
    draw_split(split, TOY, path)
    picture = Image.open(path)
    assert 700 < picture.width < 1200
    assert picture.height < 2400
    assert picture.height > {10: 350, 60: 1100, 100: 900, 1000: 2000}[clients]
    seen = colours(picture.convert("RGB"))
    assert seen[LABELED] > 5000  # the server's row: its ten cells all hold the most there is


def test_labelled_and_unlabelled_have_their_own_colours():
    """One labelled client of two: as many cells, the same counts, orange above blue."""
    split = make_split(TOY, Data(placement="some-clients", clients=2, partition="shards", shards=10), 0)
    picture = picture_of(split, TOY)
    pixels = np.asarray(picture).astype(int)
    orange = np.argwhere((pixels == LABELED).all(axis=2))[:, 0]
    blue = np.argwhere((pixels == UNLABELED).all(axis=2))[:, 0]
    assert orange[: len(orange) // 2].max() < blue.min()  # the rest of each is in the legend


def test_two_panels_where_a_party_holds_both():
    one = picture_of(make_split(TOY, Data(labels=100), 0), TOY)
    two = picture_of(make_split(TOY, Data(labels=100, placement="clients"), 0), TOY)
    assert two.width > 1.7 * one.width


def test_pictures_with_unknown_labels_many_classes_and_very_many_clients():
    truth = np.where(np.arange(30_000) % 3 == 0, -1, np.arange(30_000) % 100)
    names = tuple(f"class number {number}" for number in range(100))
    dataset = data_of(truth, np.arange(500) % 100, names)
    settings = Data(placement="some-clients", clients=2500, partition="iid")
    picture = picture_of(make_split(dataset, settings, 0), dataset)
    assert picture.height < 2400  # three clients a row


def shown(split: Split, dataset: Dataset, width: int = 100, out: Path | None = None) -> str:
    console = SafeConsole(file=io.StringIO(), width=width, soft_wrap=False)
    show_split(split, dataset, out, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_on_the_screen():
    split, dataset = by_hand()
    text = shown(split, dataset)
    rows = [re.sub(r"\s+", " ", line).strip() for line in text.splitlines()]
    assert rows[0] == "toy: dirichlet 0.3, 2 clients, 1 labelled, seed 3"
    assert rows[2] == "cat dog [cow] in all"
    assert rows[4:11] == [
        "server 1* · · 1*",
        "client 0 1* 1* · 2*",
        "1 1 3",
        "client 1 · 1 2 3",
        "",
        "all 2* 1* 2 3*",
        "1 2 6",
    ]
    assert "Note: No labelled party holds the class '[cow]'." in text
    assert "Tested on 8 of 8 test images." in text


def test_the_table_never_cuts_a_number():
    split = make_split(TOY, Data(labels=100, placement="clients", partition="iid"), 0)
    for width in (120, 80, 60, 50):
        lines = shown(split, TOY, width).splitlines()
        assert max(map(len, lines)) <= width
        numbers = [line for line in lines if re.match(r"\s*client \d", line)]
        assert len(numbers) == 10
        assert all(re.search(r"\b200$|\b10\*$|\b10 +200 +10 ", line) for line in numbers)
    assert "most of" in shown(split, TOY, 50)  # too narrow for the classes: one line a party


def test_many_clients_are_summarised():
    split = make_split(TOY, Data(labels=100, clients=100, partition="iid"), 0)
    text = shown(split, TOY)
    assert len(text.splitlines()) < 40
    assert re.search(r"automobile\s+10\s+190\s+\d+\s+\d+", text)
    assert re.search(r"unlabelled images\s+19\s+19\s+19", text)
    assert "client 7" not in text


def test_out_draws_and_saves_and_spares_other_files(tmp_path):
    split = make_split(TOY, Data(labels=100), 0)
    text = shown(split, TOY, out=tmp_path / "mine.png").replace("\n", "")
    assert "mine.png" in text
    assert Image.open(tmp_path / "mine.png").width > 500
    assert lists(load_split(tmp_path / "mine.npz")) == lists(split)
    shown(split, TOY, out=tmp_path / "mine")  # once more: a split may be written over
    np.savez(tmp_path / "precious.npz", x_train=np.zeros(3))
    with pytest.raises(TacitError, match="is not a split, so nothing was written"):
        shown(split, TOY, out=tmp_path / "precious.png")
    assert not (tmp_path / "precious.png").exists()
    with pytest.raises(TacitError, match=r"PNG file\. Write --out .*mine\.png"):
        shown(split, TOY, out=tmp_path / "mine.jpg")


@pytest.mark.parametrize("placement", ["server", "clients", "some-clients"])
def test_a_long_tail_is_of_all_training_images_and_of_no_test_image(placement: str) -> None:
    dataset = load("digits")
    settings = Data(name="digits", clients=3, labels=20, placement=placement, imbalance=8.0, min_size=1)
    split = make_split(dataset, settings, 0)
    labels = np.asarray(dataset.train_labels)
    held = np.unique(np.concatenate([split.server, *(np.concatenate([p.labeled, p.unlabeled]) for p in split.clients)]))
    counts, before = np.bincount(labels[held], minlength=10), np.bincount(labels)
    assert counts.tolist() == [round(many * 8.0 ** (-c / 9)) for c, many in enumerate(before)]
    assert len(split.test) == len(dataset.test_labels)


def test_what_a_long_tail_leaves_too_few_of_is_refused() -> None:
    settings = Data(name="digits", clients=3, placement="server", subset=200, labels=150, imbalance=100.0)
    with pytest.raises(TacitError, match=r"labels = 150, but there are only \d\d training images"):
        make_split(load("digits"), settings, 0)
