"""The papers' protocols, read from the resolved recipes: what a table says is what its recipe does."""

import pytest

from tacit.config.recipes import find_recipe, known_recipes, load_recipe
from tacit.config.resolve import build_method, resolve
from tacit.core.settings import Experiment, same_but_for_seed
from tacit.methods.ddrfed.ddrfed import LabelsAlone


def resolved(start: str, *ends: str) -> dict[str, Experiment]:
    """The resolved recipes of a folder whose names end in one of these words, by name."""
    found = {name: resolve(load_recipe(name)) for name in known_recipes() if name.startswith(start)}
    return {name: one for name, one in found.items() if not ends or name.endswith(ends)}


def of_method(experiments: dict[str, Experiment], *methods: str) -> dict[str, Experiment]:
    return {name: one for name, one in experiments.items() if one.method["name"] in methods}


DDRFED = {k: v for k, v in resolved("ddrfed/").items() if k.split("/")[1] not in ("quick", "fig5")}  # generator alone
CBAFED_TABLES = {k: v for t in (1, 2, 3) for k, v in resolved(f"cbafed/table{t}/").items()}
BSEMIFL = {k: v for folder in ("table1", "fig4", "fig5") for k, v in resolved(f"bsemifl/{folder}/").items()}


# --- DDRFed -------------------------------------------------------------------------------------------------


def test_ddrfed_pretrains_everybody_for_200_rounds_at_its_rates() -> None:
    """Sec. 4.1.2, for the methods it compares with as for its own; CBAFed's stages end with a merge."""
    compared = of_method(DDRFED, "fedirm", "rscfed", "pdcfed")
    assert len([name for name in compared if name.startswith("ddrfed/table")]) >= 17
    rest = of_method(DDRFED, "fed_consist", "fixmatch", "freematch", "ddrfed", "cbafed")
    assert {one.method["name"] for one in rest.values()} == {"fed_consist", "fixmatch", "freematch", "ddrfed", "cbafed"}
    for name, one in {**compared, **rest}.items():
        merged = one.method["name"] == "cbafed"
        assert one.method["warmup"] == (201 if merged else 200), name
        assert one.rounds == (501 if merged else 500), name
        assert (one.train.lr, one.method["unlabeled_lr"]) == (0.03, 0.02), name
        assert one.train.momentum == 0.9, name
        stage = build_method(one).before()[-1]
        assert (stage.name, stage.rounds) == ("warm-up", one.method["warmup"]), name


def test_ddrfed_s_views_are_one_weak_view_throughout_and_three_operations() -> None:
    for name, one in DDRFED.items():
        assert (one.views.weak, one.views.strong) == ("crop", "ddrfed"), name
    own = of_method(DDRFED, "ddrfed")
    for name, one in own.items():
        dsa = "/dsa/" in name
        assert one.method["weak"] == ("dsa" if dsa else "views"), name
        warm_up = build_method(one).before()[-1].method
        assert isinstance(warm_up, LabelsAlone)
        assert warm_up.weak == one.method["weak"], name  # the same in both stages
    for name, one in resolved("ddrfed/dsa/").items():  # the other reading differs in nothing else
        other = DDRFED[name.replace("/dsa/", "/table1/")]
        assert {**same_but_for_seed(one.to_dict()), "method.weak": "views"} == same_but_for_seed(other.to_dict())


def test_rscfed_draws_two_groups_of_five_where_communication_is_compared() -> None:
    method = DDRFED["ddrfed/table6/cifar10-rscfed"].method
    assert (method["groups"], method["group_size"]) == (2, 5)  # Sec. 4.3.4
    for name in ("ddrfed/table1/cifar10-0.8-rscfed", "ddrfed/table3/cifar10-20-rscfed"):
        assert (DDRFED[name].method["groups"], DDRFED[name].method["group_size"]) == (3, 5)


@pytest.mark.parametrize("data", ["cifar10", "fashion-mnist"])
def test_the_base_of_table_4_is_fed_consist_of_table_1(data: str) -> None:
    """One number in the paper, so one experiment here."""
    base, row = DDRFED[f"ddrfed/table4/{data}-basic"], DDRFED[f"ddrfed/table1/{data}-0.8-fed-consist"]
    assert base.method["name"] == "fed_consist"
    assert same_but_for_seed(base.to_dict()) == same_but_for_seed(row.to_dict())
    assert (base.paper.accuracy, base.paper.auc) == (row.paper.accuracy, row.paper.auc)


# --- CBAFed -------------------------------------------------------------------------------------------------


def test_every_merge_is_the_last_thing_that_happens() -> None:
    """Rounds are counted from 0 and merged at 5, 10, …; `last` is what is reported."""
    merging = {
        name: one
        for name, one in {**resolved("cbafed/"), **DDRFED}.items()
        if "/quick/" not in name and "/reduced/" not in name
        if (one.method["name"] == "fedavg" and one.method["plus"]) or one.method["name"] == "cbafed"
        if one.method["residual_server"]
    }
    assert len(merging) > 30
    for name, one in merging.items():
        every = one.method["residual_every"]
        assert one.rounds % every == 1, name
        if "warmup" in one.method:
            last = one.method["warmup"] if one.method["warmup"] > 1 else one.method["warmup_epochs"]
            assert last % every == 1, name
    assert merging["cbafed/table1/svhn-fedavg-plus"].rounds == 501
    assert merging["cbafed/table1/cifar100-fedavg-plus"].rounds == 1001
    assert merging["cbafed/table1/cifar100-cbafed"].rounds == 1001
    assert merging["cbafed/table3/fedavg-plus"].rounds == 51
    assert merging["cbafed/table3/cbafed"].method["warmup"] == 51


def test_cbafed_s_baselines_share_its_protocol() -> None:
    """Sec. 4.1: 11 local epochs with labels and 1 without, for all methods; rates .03 and .02 as released."""
    rows = of_method(CBAFED_TABLES, "fedirm", "fed_consist", "rscfed", "cbafed")
    assert len(rows) == 35
    for name, one in rows.items():
        assert (one.method["labeled_epochs"], one.train.epochs) == (11, 1), name
        assert (one.train.lr, one.method["unlabeled_lr"], one.train.batch) == (0.03, 0.02, 64), name
        assert one.rounds == (1001 if "cifar100" in name else 501), name
        two = "table3" in name
        warm_up = (51, 11) if two else (1, 1001 if "cifar100" in name else 501)
        assert (one.method["warmup"], one.method["warmup_epochs"]) == warm_up, name
    for name, one in of_method(CBAFED_TABLES, "fedavg").items():  # bounds: the recipe says why one has one epoch
        epochs = 11 if name.endswith("upper") or "table3" in name else 1
        assert one.train.epochs == epochs, name
        assert "Fig. 2" in find_recipe(name).read_text() or epochs == 11, name


def test_cbafed_s_strategies_have_200_rounds() -> None:
    """Sec. 4.3."""
    assert {one.rounds for one in resolved("cbafed/fig3/").values()} == {200}
    assert len(resolved("cbafed/fig3/")) >= 5


def test_weighing_labels_ten_times_is_the_released_code_s() -> None:
    for name, one in of_method(CBAFED_TABLES, "cbafed").items():
        assert one.method["labeled_boost"] == 1.0, name  # Eq. 20
    released = resolve(load_recipe("cbafed/released/isic2018-cbafed"))
    assert (released.method["labeled_boost"], released.method["preset"]) == (10.0, "released")
    assert resolve(load_recipe("cbafed/released/svhn-cbafed")).data.split == "cbafed-svhn"


def test_table_2_says_that_its_net_is_not_the_paper_s() -> None:
    names = [name for name in known_recipes() if name.startswith("cbafed/table2/")]
    assert len(names) == 8
    for name in names:
        assert "vit_tiny_patch16_224" in find_recipe(name).read_text(), name


# --- BSemiFL ------------------------------------------------------------------------------------------------


def test_bsemifl_compares_with_one_sgd() -> None:
    """Sec. 7.1: rate, momentum, weight decay, batch and epochs for all; nothing of clipping, Nesterov or a schedule."""
    methods = {one.method["name"] for one in BSEMIFL.values()}
    assert {"semifl", "bsemifl", "fedmatch", "fl2"} <= methods
    for name, one in of_method(BSEMIFL, "semifl", "bsemifl", "fedmatch", "fl2").items():
        train = one.train
        assert (train.lr, train.momentum, train.weight_decay, train.batch, train.epochs) == (0.03, 0.9, 5e-4, 10, 5), (
            name
        )
        assert (train.nesterov, train.clip, train.schedule) == (False, 0.0, "constant"), name
        assert (one.rounds, one.participation.fraction, one.reporting) == (800, 0.1, "last-10"), name


def test_bsemifl_s_thresholds() -> None:
    """Sec. 7.1: .7 for its own, .95 for SemiFL and FedMatch."""
    table = resolved("bsemifl/table1/")
    for method, threshold in (("bsemifl", 0.7), ("semifl", 0.95), ("fedmatch", 0.95)):
        rows = of_method(table, method)
        assert len(rows) == 9
        assert {one.method["threshold"] for one in rows.values()} == {threshold}


# --- What is assumed where a paper is silent is said in the recipe ------------------------------------------


@pytest.mark.parametrize("folder", ["cbafed/table1", "cbafed/table2", "cbafed/table3", "cbafed/fig3", "ddrfed/table1"])
def test_recipes_say_what_they_assume(folder: str) -> None:
    for name in known_recipes():
        if name.startswith(folder):
            head = find_recipe(name).read_text().split("title =")[0].replace("\n# ", " ")
            assert any(word in head for word in ("does not say", "prints no", "are not printed", "Assumed")), name
