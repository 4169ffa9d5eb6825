"""Images that belong together: found by column, name and looks; never on both sides of a test; told."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from typer.testing import CliRunner

import tacit
from tacit.cli.app import app
from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data.dataset import Dataset
from tacit.data.federation import load_dataset
from tacit.data.group_names import groups_by_name
from tacit.data.groups import NO_GROUPS, WITHOUT_GROUPS, group_warnings, halves, held_out
from tacit.data.near_duplicates import close_pairs, glance, near_duplicates
from tacit.data.own import inspect, load_sites
from tacit.data.party import Facts, load_party, server_parts
from tacit.data.sources import load
from tacit.inference.assess import Assessment, assess, recalibrate
from tacit.inference.calibrate import at_temperature, fit_temperature
from tacit.inference.measure import measure
from tacit.inference.model import load_model

# names

TOGETHER = [
    ["lesion_0012_a.jpg", "lesion_0012_b.jpg"],
    ["0012_a.jpg", "0012_B.png"],
    ["scan7-1.png", "scan7-2.png", "scan7-3.png"],
    ["eye 31 left.png", "eye 31 right.png"],
    ["x9_v1.png", "x9_v2.png"],
    ["holiday.jpg", "holiday copy.jpg", "holiday (1).jpg", "holiday - Kopie.jpg"],
    ["patient7_img1.png", "patient7_img22.png", "Patient-007_x.png"],
    ["nv/p/patient3/1.jpg", "mel/p/patient3/1.jpg"],
    ["12.jpg", "12.png"],
]
APART = [
    ["IMG_0001.jpg", "IMG_0002.jpg"],
    ["IMG_1.jpg", "IMG_2.jpg"],
    ["cat (1).jpg", "cat (2).jpg"],
    ["img_39676.png", "img_39677.png"],
    ["n01440764_18.jpg", "n01440764_19.jpg", "n01440764_21.jpg"],  # a number above 20: pictures are counted
    ["2024-05-12.jpg", "2024-05-13.jpg", "2024-05-30.jpg"],
    [f"s1_{number}.jpg" for number in range(13)],  # more than a few takes
    ["ISIC_0024306.jpg", "ISIC_0024307.jpg"],
    ["a/0012.jpg", "b/0012.jpg"],  # counters start again in each folder
    ["a/view1_frontal.jpg", "b/view1_frontal.jpg"],
    ["cat_left.jpg", "cat_right.jpg"],  # no number: a word for many
    ["2019/a.jpg", "2020/b.jpg"],
]
OTHERS = [f"plain{chr(97 + number)}x.jpg" for number in range(8)]  # so that no group is a whole class


@pytest.mark.parametrize("names", TOGETHER, ids=lambda names: names[0])
def test_names_that_belong_together(names: list[str]) -> None:
    found = groups_by_name([Path("all", name) for name in [*names, *OTHERS]], ["x"] * (len(names) + len(OTHERS)))
    assert len(set(found[: len(names)])) == 1, found
    assert found[0]
    assert set(found[len(names) :]) == {""}


@pytest.mark.parametrize("names", APART, ids=lambda names: names[0])
def test_names_that_tell_no_group(names: list[str]) -> None:
    found = groups_by_name([Path("all", name) for name in [*names, *OTHERS]], ["x"] * (len(names) + len(OTHERS)))
    assert set(found) == {""}


def test_a_class_that_is_numbered_is_no_group() -> None:
    paths = [Path(f"class{label}", f"class{label}_{number}.png") for label in (1, 2) for number in range(1, 11)]
    assert set(groups_by_name(paths, [path.parent.name for path in paths])) == {""}


def test_folders_below_a_class_are_patients_where_there_are_many() -> None:
    def paths(names: list[str]) -> list[Path]:
        return [Path(label, name, f"IMG_{i}.png") for label in ("mel", "nv") for name in names for i in range(3)]

    for names, number in (([f"{n:03d}" for n in range(9)], 9), (["2019", "2020"], 1), (["left", "right"], 1)):
        found = groups_by_name(paths(names), [path.parts[0] for path in paths(names)])
        assert len(set(found)) == number, names


# looks


def photographs(count: int, side: int = 96) -> list[Image.Image]:
    """Different parts of two photographs, none over another."""
    found = []
    for whole in load_sample_images().images:
        for top in range(0, whole.shape[0] - side + 1, side):
            for left in range(0, whole.shape[1] - side + 1, side):
                found.append(Image.fromarray(np.ascontiguousarray(whole[top : top + side, left : left + side])))
    return found[:count]


def packed_again(image: Image.Image, quality: int, side: int = 0) -> Image.Image:
    buffer = io.BytesIO()
    (image.resize((side, side)) if side else image).save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue()))


def test_a_picture_is_known_again_when_it_was_scaled_or_packed_again() -> None:
    seen = [one for one in photographs(48) if glance(one)]
    again = [packed_again(one, 60) for one in seen], [packed_again(one, 85, 70) for one in seen]
    found = near_duplicates([glance(one) for one in (*seen, *again[0], *again[1])]).reshape(3, -1)
    assert len(seen) > 30
    assert len(set(found[0].tolist())) == len(seen)  # different ones stay apart
    assert (found[1] == found[0]).mean() > 0.9
    assert (found[2] == found[0]).mean() > 0.9


@pytest.mark.parametrize("name", ["digits", "fashion-mnist"])
def test_drawings_that_are_alike_are_not_lumped_together(name: str) -> None:
    try:
        images = load(name, fetch=False).train_images[:1200, 0]
    except TacitError:
        pytest.skip(f"{name} is not here")
    pictures = [Image.fromarray(image) for image in images]
    assert not any(glance(picture) for picture in pictures)  # too small to be known by a look
    large = [glance(picture.resize((64, 64), Image.Resampling.BICUBIC)) for picture in pictures]
    assert (near_duplicates(large) != np.arange(len(large))).sum() <= 1  # 720,000 pairs


def test_close_codes_are_found_as_by_comparing_all() -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 2**63, 300, dtype=np.uint64)
    for place in range(0, 300, 3):  # some that differ from the one before in 1 to 8 bits
        bits = generator.choice(63, 1 + place % 8, replace=False).astype(np.uint64)
        codes[place + 1] = codes[place] ^ np.bitwise_or.reduce(np.uint64(1) << bits)
    found = {tuple(sorted(pair)) for pairs in close_pairs(codes) for pair in pairs.tolist()}
    apart = np.bitwise_count(codes[:, None] ^ codes[None])
    assert found == {(a, b) for a, b in np.argwhere(apart <= 6).tolist() if a < b}
    assert len(found) > 50


def test_many_pictures_of_one_thing_are_one_group() -> None:
    generator = np.random.default_rng(0)
    liveliest = max(photographs(48), key=lambda one: float(np.asarray(one).std()))
    base = np.asarray(liveliest.convert("L").resize((32, 32))).astype(int)
    frames = [(base + generator.integers(-2, 3, base.shape)).clip(0, 255).astype(np.uint8) for _ in range(300)]
    assert set(near_duplicates([frame.tobytes() for frame in frames]).tolist()) == {0}


# own data


@pytest.fixture
def lesions(tmp_path: Path) -> Path:
    """Two classes of twelve lesions with two photographs each, ten more without a label beside some of them."""
    generator = np.random.default_rng(1)
    for number in range(24):
        for take in "abc" if number < 10 else "ab":
            folder = tmp_path / "skin" / ("unlabeled" if take == "c" else ("mel", "nv")[number % 2])
            folder.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            pixels[0, 0, 0] = number
            Image.fromarray(pixels).save(folder / f"lesion_{number:04d}_{take}.png")
    return tmp_path / "skin"


def lesions_of(images: np.ndarray) -> set[int]:
    return set(images[:, 0, 0, 0].tolist())


def test_lesions_by_name_are_held_out_whole(lesions: Path) -> None:
    found = load(str(lesions))
    assert not lesions_of(found.train_images) & lesions_of(found.test_images)
    assert len(found.test_labels) == 2 * 2 * 2  # two lesions of each class
    tested = lesions_of(found.test_images)
    without = sum(number < 10 for number in tested)
    assert without > 0
    assert (found.train_labels == -1).sum() == 10 - without  # what would give a tested lesion away is left out
    assert f"tested with are left out ({without})" in found.note
    assert "58 images belong together in 24 groups by their names" in found.note
    assert "lesion_" not in found.note  # a note travels; names of files do not
    assert NO_GROUPS not in found.note
    assert not group_warnings(found)


def test_who_knows_better_turns_the_guess_off(lesions: Path) -> None:
    data = {"name": str(lesions)}
    assert load_dataset(Data(**data)).train_groups is not None
    found = load_dataset(Data(**data, groups="given"))
    assert found.train_groups is None
    assert (found.train_labels == -1).sum() == 10
    assert lesions_of(found.train_images) & lesions_of(found.test_images)
    assert group_warnings(found) == [WITHOUT_GROUPS]


def test_init_tells_what_was_taken_for_a_group(lesions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(lesions.parent)
    told = CliRunner().invoke(app, ["init", "skin"], env={"COLUMNS": "500"}).output
    assert "mel/lesion_0000_a.png = mel/lesion_0000_b.png = unlabeled/lesion_0000_c.png" in told
    assert 'write groups = "given" under [data]' in told
    assert "No groups are known" not in told
    assert 'groups = "found"' in Path("skin.toml").read_text()
    for number, path in enumerate(sorted(lesions.rglob("*.png"))):
        path.rename(path.with_name(f"IMG_{number:04d}.png"))
    told = CliRunner().invoke(app, ["init", "skin", "--force"], env={"COLUMNS": "500"}).output
    assert " ".join(WITHOUT_GROUPS.split()) in " ".join(told.split())
    assert "groups" not in Path("skin.toml").read_text()


def test_a_lesion_at_two_sites_is_one_lesion(tmp_path: Path, lesions: Path) -> None:
    """Sites may hold photographs of one lesion: what is tested at one of them is not trained on at another."""
    for path in sorted(lesions.rglob("*_b.png")):
        there = tmp_path / "south" / path.parent.name
        there.mkdir(parents=True, exist_ok=True)
        path.rename(there / path.name)
    found = load_sites([lesions, tmp_path / "south"], "both")
    assert not lesions_of(found.train_images) & lesions_of(found.test_images)


def test_npz_of_two_sites_have_their_own_groups(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for site in ("north", "south"):
        images = generator.integers(0, 256, (20, 8, 8), dtype=np.uint8)
        names = np.array([f"{site} {number // 2}" for number in range(20)])
        np.savez(tmp_path / f"{site}.npz", x_train=images, y_train=np.arange(20) // 2 % 2, group_train=names)
    found = load_sites([tmp_path / "north.npz", tmp_path / "south.npz"], "both")
    assert found.train_groups is not None
    assert found.test_groups is not None
    assert len({*found.train_groups.tolist(), *found.test_groups.tolist()}) == 20


def test_near_duplicates_are_not_on_both_sides(tmp_path: Path) -> None:
    pictures = [one for one in photographs(48) if glance(one)][-30:]
    for number, picture in enumerate(pictures):
        folder = tmp_path / ("a", "b")[number % 2]
        folder.mkdir(exist_ok=True)
        picture.save(folder / f"{number:04d}.png")
        packed_again(picture, 70).save(folder / f"{number + 5000}.jpg", quality=90)
    report = inspect(tmp_path)
    assert "60 images belong together in 30 groups by their looks (near-duplicates)" in report.remarks(64)
    found = load(str(tmp_path))
    assert found.train_groups is not None
    numbers = [int(Path(name).stem) % 5000 for name in found.train_files]
    assert sorted(numbers) == sorted(2 * list(set(numbers)))  # both or none
    assert len(found.test_labels) == 60 - len(numbers) == 12
    assert WITHOUT_GROUPS in group_warnings(found)  # who is who is still not known


def test_a_given_test_set_with_known_lesions_is_told(lesions: Path) -> None:
    moved = []
    for path in sorted(lesions.rglob("*.png")):
        part = "test" if path.stem in ("lesion_0000_b", "lesion_0001_b", "lesion_0020_a", "lesion_0020_b") else "train"
        target = lesions / part / path.parent.name
        target.mkdir(parents=True, exist_ok=True)
        moved.append(path.rename(target / path.name))
    found = load(str(lesions))
    (told,) = group_warnings(found)
    assert told.startswith("2 of 4 test images are of a group that is trained on, too")
    assert told in inspect(lesions).text


def test_no_group_lies_on_both_sides() -> None:
    generator = np.random.default_rng(3)
    for _ in range(50):
        groups = generator.integers(0, 40, 200)
        labels = generator.integers(-1, 4, 200)
        parts = held_out(labels, groups)
        train = ~parts.test & ~parts.left_out
        assert not set(groups[train]) & set(groups[parts.test])
        assert parts.test.any()
        assert (labels[parts.test] >= 0).all()
        assert (labels[parts.left_out] == -1).all()
        assert set(labels[train]) >= set(labels[labels >= 0])  # no class is only tested


def test_a_rare_class_in_a_large_group_stays_in_training() -> None:
    """Every group's first image is of class 0, so chance may hold out the only group with class 1."""
    for rare in range(10):
        groups = np.repeat(np.arange(10), 3)
        labels = np.zeros(30, int)
        labels[3 * rare + 1] = 1
        parts = held_out(labels, groups)
        assert 1 in labels[~parts.test]
        assert parts.test.any()


# real sites


def test_the_server_holds_out_whole_groups(lesions: Path) -> None:
    facts = Facts(("mel", "nv"), 3, 16, (0.5,) * 3, (0.5,) * 3)
    party = load_party(lesions, facts)
    train, test = server_parts(party, labels_at_server=True)
    assert len(test) == 8
    assert not lesions_of(party.images[train]) & lesions_of(party.images[test])
    assert "by their names" in party.about_groups


# temperature


def overconfident(number: int) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Groups of six images; a group is right or wrong as a whole. All say 90 %."""
    groups = np.arange(number) // 6
    labels = torch.from_numpy((np.random.default_rng(0).random(number)[groups] > 0.7).astype(np.int64))
    return torch.tensor([[0.9, 0.1]]).repeat(number, 1), labels, groups


def test_no_group_is_in_both_halves_and_halves_are_alike_in_size() -> None:
    groups = np.random.default_rng(0).integers(0, 30, 200)
    first, second = halves(groups, 200)
    assert not set(groups[first]) & set(groups[second])
    assert sorted([*first, *second]) == list(range(200))
    assert abs(len(first) - len(second)) <= 2


def test_calibrated_figures_are_cross_fitted_by_group() -> None:
    probs, labels, groups = overconfident(120)
    first, second = halves(groups, 120)
    expected = probs.clone()
    for own, other in ((first, second), (second, first)):
        expected[own] = at_temperature(probs[own], fit_temperature(probs[other], labels[other]))
    by_group = measure(probs, labels, groups)["ece_calibrated"]
    right = (labels == 0).float().numpy()
    bins = {round(float(p), 6) for p in expected[:, 0]}
    by_hand = sum(
        abs(float(expected[mine, 0].mean()) - right[mine].mean()) * len(mine) / 120
        for mine in ([i for i in range(120) if round(float(expected[i, 0]), 6) == value] for value in bins)
    )
    assert by_group == pytest.approx(by_hand, abs=1e-6)
    by_image = measure(probs, labels)["ece_calibrated"]  # groups on both sides: it looks better than it is
    assert by_image < by_group
    assert measure(probs[:50], labels[:50], groups[:50])["ece_calibrated"] is None  # too few for two halves


def test_evaluate_does_not_judge_a_temperature_by_the_labels_it_was_fitted_on() -> None:
    probs, labels, groups = overconfident(120)
    fitted = fit_temperature(probs, labels)
    shipped = at_temperature(probs, fitted)
    elsewhere = Assessment("other images", shipped, labels, ("a", "b"))
    own = Assessment("the test images of a run", shipped, labels, ("a", "b"), groups=groups, fitted=fitted)
    assert elsewhere.figures["ece"] == pytest.approx(0, abs=1e-3)  # at the very labels it was fitted on: nothing left
    assert own.figures["ece"] == pytest.approx(measure(probs, labels, groups)["ece_calibrated"], abs=1e-6)
    assert own.figures["ece"] > 0.01
    assert own.figures["accuracy"] == elsewhere.figures["accuracy"]
    few = Assessment("few", shipped[:20], labels[:20], ("a", "b"), fitted=fitted)
    torch.testing.assert_close(few.judged, probs[:20])


def test_evaluate_agrees_with_the_card_on_the_runs_own_test_images(tmp_path: Path) -> None:
    run = tacit.run(
        {"method": {"name": "fedavg", "preset": "smoke"}, "data.placement": "clients"}, out=tmp_path / "run"
    )
    written = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    found = assess(run.model, "")
    assert found.fitted == run.model.description.temperature != 1
    assert found.figures["ece"] == pytest.approx(written["ece_calibrated"], abs=1e-4)
    assert found.figures["accuracy"] == written["accuracy"]
    np.savez(
        tmp_path / "later.npz",
        x_train=load("digits").train_images[:1],
        y_train=load("digits").train_labels[:1],
        x_test=load("digits").test_images[:200],
        y_test=load("digits").test_labels[:200],
    )
    recalibrate(run.model, assess(run.model, str(tmp_path / "later.npz")))
    assert assess(load_model(tmp_path / "run"), "").fitted == 0  # the labels of another time are a fair judge's


def test_a_data_set_of_ours_needs_no_word_on_groups() -> None:
    found: Dataset = load("digits")
    assert not group_warnings(found)
