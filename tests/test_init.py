"""`tacit init`: what it finds, what it says, and whether what it writes fits and runs."""

import tomllib
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from pictures import SITES, save, write_sites
from tacit.cli.app import app
from tacit.config.propose import LEAST_ROUNDS, METHOD, Measured, parties, propose
from tacit.config.resolve import resolve
from tacit.core.errors import TacitError
from tacit.core.settings import Experiment
from tacit.data.federation import load_dataset
from tacit.data.groups import WITHOUT_GROUPS
from tacit.data.own import inspect, inspect_sites, load_sites
from tacit.data.sources import load
from tacit.data.split import class_table, make_split
from tacit.runs.plan import prepare

DIGITS = load("digits")


def init(*words: str | Path) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["init", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def written(path: Path) -> Experiment:
    return resolve(tomllib.loads(path.read_text()))


@pytest.fixture
def clinics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three sites: 4 labels of each digit and 30 images without labels at each."""
    monkeypatch.chdir(tmp_path)
    return write_sites(DIGITS, tmp_path / "clinics", labeled=4, unlabeled=30)


def test_three_sites_as_they_are(clinics: Path) -> None:
    output = init(*(clinics / site for site in SITES))
    for words in ("210 readable images, 10 classes, 3 sites", "north", "No test images were given"):
        assert words in output
    assert "tacit run clinics.toml" in output
    text = Path("clinics.toml").read_text()
    assert "the shorter side becomes 8 pixels" in text
    assert "every figure of the run rests on them" in text
    plan = prepare(written(Path("clinics.toml")))
    assert [len(part.unlabeled) for part in plan.split.clients] == [30, 30, 30]
    labels = np.asarray(plan.dataset.train_labels)
    labeled, _ = class_table(plan.split, labels, 10)
    assert labeled.sum() + len(plan.split.test) == 120  # no label is lost
    for number, part in enumerate(plan.split.clients):
        for index in (*part.labeled, *part.unlabeled):
            assert f"/{SITES[number]}/" in plan.dataset.train_files[index]  # nobody holds another's image
        assert (labels[part.unlabeled] == -1).all()


def test_the_folder_of_all_sites_does_as_well(clinics: Path) -> None:
    assert inspect(clinics).paths == [clinics / site for site in SITES]
    output = init(clinics)
    assert "3 sites" in output
    assert "add --classes" in output
    assert len(written(Path("clinics.toml")).data.sites) == 3
    as_classes = init(clinics, "--classes", "--out", "other.toml")
    assert "3 classes, 1 site" in as_classes
    assert inspect(clinics / "north").kind == "classes"


def test_every_fault_is_told_in_one_screen_and_nothing_is_lost(clinics: Path) -> None:
    whole = next((clinics / "north" / "3").glob("*.png"))
    (clinics / "north" / "3" / "cut.png").write_bytes(whole.read_bytes()[:50])
    (clinics / "south" / "4" / "empty.jpg").touch()
    (clinics / "south" / "4" / "page.jpg").write_text("<html>404</html>")
    (clinics / "south" / "4" / "notes.txt").write_text("hm")
    save(DIGITS.test_images[0], clinics / "west" / "lost.png")
    (clinics / "west" / "eleven").mkdir()
    save(DIGITS.test_images[1].repeat(3, axis=0), clinics / "west" / "5" / "colour.png")
    save(DIGITS.test_images[2], clinics / "west" / "5" / "large.png", (30, 17))
    (clinics / "west" / "6" / "twice.png").write_bytes(whole.read_bytes())  # a 3 at another site
    files = [path for path in clinics.rglob("*") if path.is_file()]
    output = init(*(clinics / site for site in SITES))
    assert output.count("\n") < 30
    for words in (
        "images that cannot be read (3 of 216, 1.4 %)",
        "cut.png",
        "not images, by their names (1): notes.txt",
        "images that lie in no class folder (1): lost.png",
        "empty classes (1): eleven",
        "grey (212) and colour (1) images are mixed: all become RGB",
        "8×8 (212), 30×17 (1)",
        "the same picture under two labels (1)",
        f"under two labels: 3/{whole.name} = 6/twice.png",
    ):
        assert words in output, words
    report = inspect_sites([clinics / site for site in SITES])
    told = len(report.items) + len(report.unreadable) + len(report.not_images) + len(report.stray)
    assert told == len(files)
    assert written(Path("clinics.toml")).data.skip_unreadable
    dataset = load_dataset(written(Path("clinics.toml")).data)
    assert len(dataset.train_images) + len(dataset.test_images) == 213
    assert sorted(path for path in clinics.rglob("*") if path.is_file()) == sorted(files)  # nothing was touched


def test_a_skewed_set_is_told_of_and_weighed_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for label, count in ((0, 40), (1, 15), (2, 6)):
        for index in np.flatnonzero(DIGITS.train_labels == label)[:count]:
            save(DIGITS.train_images[index], tmp_path / "my photos" / "nbm"[label] / f"{index}.png")
    output = init("my photos")
    assert "n has 65 % of the labels: a model that always names it would be right that often" in output
    assert "Fewer than 10 labels to learn from: m (5)." in output  # one of the six is held out
    assert "tacit run 'my photos.toml' --dry-run" in output
    text = Path("my photos.toml").read_text()
    assert "`tacit run 'my photos.toml' --dry-run`" in text
    assert 'class_weights = "balanced"       # m has 5 labels, n 32: rare classes count more' in text
    assert written(Path("my photos.toml")).train.class_weights == "balanced"
    (told,) = [line for line in prepare(written(Path("my photos.toml"))).warnings if "Fewer than" in line]
    assert "Fewer than 10 labels in all for 'm'" in told  # by the run, too


def test_a_balanced_set_is_left_alone_and_its_file_runs_another_method(clinics: Path) -> None:
    output = init(clinics)
    assert "Balanced accuracy" not in output
    assert "class_weights" not in Path("clinics.toml").read_text()
    Path("clinics.toml").write_text(Path("clinics.toml").read_text().replace(f'"{METHOD}"', '"fedavg"'))
    assert written(Path("clinics.toml")).method["name"] == "fedavg"  # fixmatch's own options wait


def test_twins_are_never_in_training_and_test(clinics: Path) -> None:
    """Every labelled image twice, and once more without its label elsewhere: whatever is held out, its twins are not
    trained on."""
    for path in sorted((clinics / "north").glob("[0-9]/*.png")):
        path.with_name(f"copy-{path.name}").write_bytes(path.read_bytes())
    for path in sorted((clinics / "south").glob("[0-4]/*.png")):
        (clinics / "west" / "unlabeled" / f"copy-{path.name}").write_bytes(path.read_bytes())
    dataset = load_sites([clinics / site for site in SITES], "clinics")
    trained = {image.tobytes() for image in dataset.train_images}
    assert len(dataset.test_images) > 20
    assert not [image for image in dataset.test_images if image.tobytes() in trained]


def test_copies_of_one_picture_cannot_be_tested_on(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(5):
            save(DIGITS.test_images[0], tmp_path / name / f"{number}.png")
    with pytest.raises(TacitError, match="equal pixels"):
        load(str(tmp_path))


def test_a_given_test_set_that_is_trained_on_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for index in range(100):
        part = "test" if index < 30 else "train"
        name = str(DIGITS.train_labels[index])
        save(DIGITS.train_images[index], tmp_path / "own" / part / name / f"{index}.png")
    for index in (3, 4, 5):
        save(DIGITS.train_images[index], tmp_path / "own" / "train" / str(DIGITS.train_labels[index]) / f"{index}.png")
    output = init("own")
    assert "training images that are in the test set, too (3)" in output
    assert "30" in output
    assert "No test images were given" not in output
    with pytest.raises(TacitError, match="in the test set, too"):
        load("./own")
    dataset = load_dataset(written(Path("own.toml")).data)
    assert (len(dataset.train_images), len(dataset.test_images)) == (70, 30)
    assert "left out: training images that are in the test set" in dataset.note


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_a_table_may_name_sites(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = []
    for index in range(120):
        save(DIGITS.train_images[index], tmp_path / "images" / f"{index}.png")
        label = str(DIGITS.train_labels[index]) if index < 60 else ""
        rows.append({"path": f"images/{index}.png", "label": label, "site": SITES[index % 3]})
    table = Path(f"list{ending}")
    if ending == ".csv":
        table.write_text("path,label,site\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    assert "3 sites" in init(table)
    plan = prepare(written(Path("list.toml")))
    assert plan.split.recipe["site_names"] == ["north", "south", "west"]
    assert [len(part.unlabeled) for part in plan.split.clients] == [20, 20, 20]


def test_an_npz_for_each_site_and_a_folder_beside_them(clinics: Path) -> None:
    for number, site in enumerate(("east", "far")):
        part = slice(300 + 50 * number, 350 + 50 * number)
        labels = DIGITS.train_labels[part].copy()
        labels[25:] = -1
        np.savez(f"{site}.npz", x_train=DIGITS.train_images[part], y_train=labels)
    output = init("east.npz", "far.npz", clinics / "north", "--out", "mixed.toml")
    assert "3 sites" in output
    plan = prepare(written(Path("mixed.toml")))
    assert [len(part.unlabeled) for part in plan.split.clients] == [25, 25, 30]
    assert plan.dataset.classes == tuple("0123456789")
    alone = init("east.npz")
    assert "50 readable images" in alone
    assert len(prepare(written(Path("east.toml"))).split.clients) == 1


def test_the_placement_follows_the_labels(clinics: Path) -> None:
    def placement(*sites: Path) -> tuple[str, str]:
        report = inspect_sites(list(sites)) if len(sites) > 1 else inspect(sites[0])
        proposal = propose(report, list(sites), "x")
        make_split_works(proposal.toml)
        return proposal.placement, proposal.method

    def make_split_works(toml: str) -> None:
        experiment = resolve(tomllib.loads(toml))
        make_split(load_dataset(experiment.data), experiment.data, 0)

    north, south, west = (clinics / site for site in SITES)
    assert placement(north, south, west) == ("clients", METHOD)
    assert placement(north) == ("clients", METHOD)
    bare = [clinics / "bare", clinics / "barer"]
    for number, folder in enumerate(bare):
        for index in range(20):
            save(DIGITS.test_images[20 * number + index], folder / "unlabeled" / f"{index}.png")
    assert placement(north, *bare) == ("clients", METHOD)  # one site has some labels
    full = clinics / "full"
    for index in range(60):
        save(DIGITS.test_images[100 + index], full / str(DIGITS.test_labels[100 + index]) / f"{index}.png")
    assert placement(full, *bare) == ("some-clients", METHOD)
    assert placement(full) == ("clients", "fedavg")  # nothing is unlabelled
    assert placement(full.rename(clinics / "server"), *bare) == ("server", METHOD)


def test_a_wrong_placement_is_refused_with_the_right_word(clinics: Path) -> None:
    init(clinics)
    settings = tomllib.loads(Path("clinics.toml").read_text())
    with pytest.raises(TacitError, match='Write placement = "clients"'):
        prepare(resolve(settings, {"data.placement": "server"}))
    with pytest.raises(TacitError, match="Write clients = 3"):
        prepare(resolve(settings, {"data.clients": 4}))
    with pytest.raises(TacitError, match="'digits' has none"):
        prepare(resolve({"data.partition": "sites"}))


def test_one_folder_can_be_spread_over_pretended_clients(clinics: Path) -> None:
    init(clinics / "north", "--clients", "3")
    plan = prepare(written(Path("north.toml")))
    assert plan.experiment.data.placement == "server"
    assert len(plan.split.server) == 40 - len(plan.split.test)  # all labels, not a balanced part of them
    assert [len(part.unlabeled) for part in plan.split.clients] == [10, 10, 10]
    warning, about_groups = plan.warnings
    assert about_groups == WITHOUT_GROUPS
    assert warning.startswith("Fewer than 10 labels in all for '0', ")


def test_what_is_there_is_not_written_over(clinics: Path) -> None:
    init(clinics)
    for words, message in (
        ((clinics,), "is there already"),
        ((clinics / "north", clinics / "north", "--out", "a.toml"), "given twice"),
        ((clinics / "north", clinics / "south", "--clients", "4", "--out", "b.toml"), "spreads one folder"),
        ((clinics / "nowhere", "--out", "c.toml"), "does not exist"),
        ((clinics / "north" / "unlabeled", "--out", "d.toml"), "fix what is marked"),
    ):
        with pytest.raises(TacitError, match=message):
            init(*words)
    assert sorted(path.name for path in Path().glob("*.toml")) == ["clinics.toml"]
    init(clinics, "--force")


def test_parties_are_counted_as_they_hold(clinics: Path) -> None:
    held = parties(inspect_sites([clinics / site for site in SITES]))
    assert [(p.name, p.labeled, p.unlabeled, p.test) for p in held] == [(site, 40, 30, 0) for site in SITES]


def test_with_enough_labels_there_is_a_guard_and_its_twin_is_as_well_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = init(write_sites(DIGITS, tmp_path / "clinics", labeled=5, unlabeled=30))
    assert "The guard is on: 24 labels are kept back: they choose what is shipped" in output
    experiment = written(Path("clinics.toml"))
    assert experiment.guard.on
    assert experiment.data.validation == 0.2
    plan = prepare(experiment)
    kept, learned = sum(map(len, plan.split.validation)), sum(len(part.labeled) for part in plan.split.clients)
    assert kept + learned + len(plan.split.test) == 150
    assert 20 <= kept <= 24
    assert not [line for line in plan.warnings if "twin" in line]  # guard.epochs is what the method makes
    assert plan.stages[0].name == "twin"


def test_too_few_labels_are_told_and_all_labels_need_no_guard(clinics: Path) -> None:
    output = init(clinics)
    assert "No guard: a fifth of 96 labels is 19, too few to judge models by; with 100 labels there would be" in output
    assert "# No guard: a fifth of 96 labels" in Path("clinics.toml").read_text()
    assert not written(Path("clinics.toml")).guard.on
    for site in SITES:
        for path in (clinics / site / "unlabeled").iterdir():
            path.unlink()
        (clinics / site / "unlabeled").rmdir()
    output = init(clinics, "--sites", "--force")
    assert "guard" not in output.lower()
    assert written(Path("clinics.toml")).method["name"] == "fedavg"


def test_the_budget_fits_the_machine(clinics: Path) -> None:
    init(clinics)
    text = Path("clinics.toml").read_text()
    assert "min on this machine, by a few steps that were timed" in text
    report = inspect(clinics)
    quick, slow, slower = (
        propose(report, [clinics], "x", measured=Measured(100, seconds, 60.0, 3)).rounds
        for seconds in (10.0, 2000.0, 1e6)
    )
    enough = propose(report, [clinics], "x").rounds
    assert (quick, slow, slower) == (enough, 42, LEAST_ROUNDS)  # 840 s are left at 20 s a round
    assert enough > 42


def test_photographs_begin_with_what_is_known_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    for label in ("cat", "dog"):
        for number in range(4):
            save(chance.integers(0, 256, (3, 80, 70), dtype=np.uint8), tmp_path / "pets" / label / f"{number}.png")
    report = inspect(tmp_path / "pets")
    proposed = tomllib.loads(propose(report, [tmp_path / "pets"], "pets", pretrained=True).toml)
    assert proposed["net"] == {"name": "lite0", "weights": "pretrained", "train": "all"}
    assert proposed["method"] == {"name": "fedavg"}, "every image has a label"
    assert proposed["train"]["lr"] == 0.01, "a rate of .1 is for random weights: it takes what was learned apart"
    assert proposed["data"]["image_size"] == 96
    for number in range(40):
        save(chance.integers(0, 256, (3, 80, 70), dtype=np.uint8), tmp_path / "pets" / "unlabeled" / f"{number}.png")
    more = inspect(tmp_path / "pets")
    for known, warmup, generations, folds in ((True, 20, 2, False), (False, 100, 5, True)):  # minutes, not hours
        text = propose(more, [tmp_path / "pets"], "pets", clients=2, pretrained=known).toml
        options = tomllib.loads(text)["method"]["provenance"]
        assert (options["warmup"], options["generations"]) == (warmup, generations)
        assert options.get("held_out", True) == folds
    for number in range(4, 60):
        save(chance.integers(0, 256, (3, 80, 70), dtype=np.uint8), tmp_path / "pets" / "cat" / f"{number}.png")
    skewed = tomllib.loads(propose(inspect(tmp_path / "pets"), [tmp_path / "pets"], "pets", pretrained=True).toml)
    assert "held_out" not in skewed["method"]["provenance"], "where dogs are rare, priors need the folds"
    without = tomllib.loads(propose(report, [tmp_path / "pets"], "pets").toml)
    assert (without["net"]["name"], without["data"]["image_size"], without["train"]["lr"]) == ("cnn", 64, 0.1)
    monkeypatch.setattr("tacit.nets.weights.installed", lambda name: False)
    assert "pip install 'tacit[pretrained]'" in init("pets", "--out", "unknown.toml")
    grey = inspect(write_sites(DIGITS, tmp_path / "clinics", labeled=4, unlabeled=5))
    small = tomllib.loads(propose(grey, [tmp_path / "clinics"], "clinics", pretrained=True).toml)
    assert small["net"]["name"] == "cnn"


def test_the_training_is_that_of_the_recipe_for_short_budgets(clinics: Path) -> None:
    init(clinics)
    experiment = written(Path("clinics.toml"))
    train, server = experiment.train, experiment.server
    assert (train.lr, train.schedule, train.schedule_by, train.end) == (0.1, "linear", "step", 0.01)
    assert (train.label_smoothing, server.name, server.momentum) == (0.1, "momentum", 0.67)  # of three sites
    assert experiment.method["generation_rounds"] == experiment.rounds // 4
    init(clinics / "north")
    assert written(Path("north.toml")).server.name == "mean"  # nobody to average with
