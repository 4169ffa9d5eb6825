"""Partitions: complete, deterministic, on the right axis, and equal to flwr-datasets' where both do the same."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tacit.core.errors import TacitError
from tacit.data import partition

Draw = Callable[..., list[np.ndarray]]

# each with the arguments between `clients` and `min_size`
SCHEMES: dict[str, tuple[Draw, tuple[float, ...]]] = {
    "iid": (partition.iid, ()),
    "dirichlet": (partition.dirichlet, (0.5,)),
    "dirichlet-client": (partition.dirichlet_client, (0.5,)),
    "shards": (partition.shards, (2,)),
    "quantity": (partition.quantity, (0.5,)),
}


def draw(name: str, labels: np.ndarray, clients: int, min_size: int | np.ndarray = 0, seed: int = 0, groups=None):
    function, extra = SCHEMES[name]
    return function(labels, clients, *extra, min_size, np.random.default_rng(seed), groups)


def table_of(parts: list[np.ndarray], labels: np.ndarray) -> np.ndarray:
    return np.array([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts]).T


def assert_complete(parts: list[np.ndarray], images: int) -> None:
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(images))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()  # ascending, so nothing twice


some_labels = st.lists(st.integers(-1, 4), min_size=1, max_size=200).map(lambda values: np.array(values, np.int64))


@pytest.mark.parametrize("name", SCHEMES)
@given(labels=some_labels, clients=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_every_index_exactly_once_and_the_same_again(name, labels, clients, seed):
    if name == "shards":
        classes = len(np.unique(labels[labels >= 0]))
        clients *= max(classes, 1)  # always an even share
    parts = draw(name, labels, clients, seed=seed)
    assert len(parts) == clients
    assert_complete(parts, len(labels))
    for part, again in zip(parts, draw(name, labels, clients, seed=seed), strict=True):
        np.testing.assert_array_equal(part, again)


@pytest.mark.parametrize("name", SCHEMES)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=2, max_size=60),
    clients=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_groups_never_straddle(name, sizes, clients, seed):
    generator = np.random.default_rng(seed)
    groups = generator.permutation(np.repeat(np.arange(len(sizes)) * 17 - 40, sizes))
    labels = np.where(generator.random(len(groups)) < 0.2, -1, generator.integers(0, 2, len(groups)))
    clients *= 2 if name == "shards" else 1
    parts = draw(name, labels, clients, seed=seed, groups=groups)
    assert_complete(parts, len(labels))
    owners = [set(groups[part]) for part in parts]
    assert sum(map(len, owners)) == len(set(groups))


def test_a_group_counts_as_its_most_frequent_known_label():
    # four groups of three; by majority 5 and 7 are of class 0, 6 and 8 of class 1, though labels are mixed
    groups = np.repeat([5, 6, 7, 8], 3)
    labels = np.array([0, 0, 1, 1, 1, 0, 0, -1, -1, 1, -1, 1])
    for seed in range(10):
        parts = partition.shards(labels, 2, 1, 1, np.random.default_rng(seed), groups)
        assert sorted(sorted(set(groups[part])) for part in parts) == [[5, 7], [6, 8]]


def test_sizes_with_groups_follow_the_table_to_within_a_group():
    """Groups of 1 and 9: no client is off by more than one large group, and the first one not on average."""
    groups = np.repeat(np.arange(120), np.tile([1, 9], 60))
    first = []
    for seed in range(200):
        parts = partition.iid(groups % 5, 6, 90, np.random.default_rng(seed), groups)
        assert all(abs(len(part) - 100) <= 9 for part in parts)
        first.append(len(parts[0]))
    assert np.mean(first) == pytest.approx(100, abs=0.8)  # four standard errors of rounding to a multiple of 9


@pytest.mark.parametrize("name", ["dirichlet", "dirichlet-client", "shards", "iid"])
def test_unknown_labels_are_dealt_evenly(name):
    labels = np.concatenate([np.repeat([0, 1, 2, 3], 50), np.full(83, -1)])
    parts = draw(name, labels, 10, seed=3)
    unknown = [int((labels[part] == -1).sum()) for part in parts]
    if name == "iid":
        assert 0 <= min(unknown) <= max(unknown) <= 28  # left to chance; sizes are even instead
    else:
        assert sorted(unknown) == [8] * 7 + [9] * 3
    if name == "dirichlet-client":
        labels = np.concatenate([np.repeat([0, 1, 2, 3], 51), np.full(83, -1)])  # 204 and 83 both leave some over
        assert sorted(map(len, draw(name, labels, 10))) == [28] * 3 + [29] * 7


def test_dirichlet_draws_per_class_over_clients():
    """Ten clients, alpha 1: a client's share of the first class is Beta(1, 9), variance .00818.

    Had each client drawn over the two classes instead, the share would have a variance of about .003.
    """
    generator = np.random.default_rng(0)
    sizes = np.array([10_000, 10_000])
    shares = np.array([partition.dirichlet_table(sizes, 10, 1.0, generator)[0, 3] / 10_000 for _ in range(4000)])
    assert shares.mean() == pytest.approx(0.1, abs=0.005)
    assert shares.var() == pytest.approx(9 / (100 * 11), rel=0.1)


def test_dirichlet_client_draws_per_client_over_classes():
    """Dir(alpha p) for many clients: the mean sum of squared shares is the sum of p² + p(1 − p)/(alpha + 1).

    Here .55, and .0045 more for drawing 100 images from it; less than a twentieth of it is lost because the
    last images of the classes most wanted do not suffice for all.
    """
    labels = np.tile(np.arange(10), 20_000)
    parts = partition.dirichlet_client(labels, 2000, 1.0, 1, np.random.default_rng(0))
    shares = table_of(parts, labels) / 100
    assert (shares**2).sum(axis=0).mean() == pytest.approx(0.5545, rel=0.05)


def test_dirichlet_client_follows_the_class_shares():
    labels = np.repeat([0, 1, 2], [7000, 2000, 1000])
    parts = partition.dirichlet_client(labels, 100, 1e6, 1, np.random.default_rng(0))
    shares = table_of(parts, labels) / 100
    np.testing.assert_allclose(shares.mean(axis=1), [0.7, 0.2, 0.1], atol=1e-9)
    assert shares[0].std() < 0.07  # multinomial noise only (.046), no mix of one's own


@given(
    sizes=st.lists(st.integers(1, 300), min_size=2, max_size=8).map(np.array),
    clients=st.integers(2, 10),
    alpha=st.sampled_from([1e-4, 0.01, 0.1, 0.8, 10.0]),
    seed=st.integers(0, 999),
)
@settings(max_examples=150, deadline=None)
def test_a_full_client_takes_none_of_the_later_classes(sizes, clients, alpha, seed):
    table = partition.dirichlet_table(sizes, clients, alpha, np.random.default_rng(seed))
    np.testing.assert_array_equal(table.sum(axis=1), sizes)
    held_before = np.cumsum(table, axis=0) - table
    full = held_before >= sizes.sum() / clients
    assert not table[full].any()


def test_the_balancing_rule_makes_a_difference():
    """Alpha so small that a class goes to one client: each client gets exactly one of the ten classes."""
    table = partition.dirichlet_table(np.full(10, 100), 10, 1e-5, np.random.default_rng(0))
    assert sorted(table.sum(axis=0)) == [100] * 10


def test_shards_are_equal_and_as_many_as_promised():
    labels = np.repeat(np.arange(10), 500)
    parts = partition.shards(labels, 100, 2, 10, np.random.default_rng(0))
    table = table_of(parts, labels)
    assert set(np.unique(table)) <= {0, 25, 50}  # 20 shards of 25 a class; 50: both of one class
    assert [len(part) for part in parts] == [50] * 100


@given(clients=st.integers(1, 60), shards=st.integers(1, 12), classes=st.integers(1, 30))
def test_refused_shards_name_numbers_that_work(clients, shards, classes):
    assume(clients * shards % classes)
    with pytest.raises(TacitError) as refused:
        partition.check_shards(clients, shards, classes)
    advice = str(refused.value).split("Write ")[1]
    numbers = [part.rstrip(".,").split(" = ") for part in advice.replace(", or ", " or ").split(" or ")]
    assert {name for name, _ in numbers} == {"clients", "shards"}
    for name, number in numbers:
        assert int(number) > 0
        partition.check_shards(**{"clients": clients, "shards": shards, "classes": classes, name: int(number)})


def test_quantity_skews_sizes_and_not_classes():
    """Ten clients, alpha .5: the variance of a share of Dir(.5) is .1 · .9 / 6."""
    labels = np.tile([0, 1], 1000)
    generator = np.random.default_rng(0)
    draws = [partition.quantity(labels, 10, 0.5, 0, generator) for _ in range(300)]
    sizes = np.array([[len(part) for part in parts] for parts in draws])
    assert (sizes / 2000).var() == pytest.approx(0.015, rel=0.1)
    large = [labels[part].mean() for parts in draws for part in parts if len(part) > 400]
    np.testing.assert_allclose(large, 0.5, atol=0.1)  # four standard deviations


def test_minimum_size_may_differ_by_client():
    least = np.array([0, 0, 300, 0])
    for seed in range(5):
        parts = partition.dirichlet(np.tile(np.arange(10), 100), 4, 0.3, least, np.random.default_rng(seed))
        assert len(parts[2]) >= 300


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: partition.iid(np.zeros(9, int), 5, 2, g), r"5 clients need 10 images .* only 9 to deal"),
        (
            lambda g: partition.dirichlet(np.tile([0, 1], 500), 100, 0.01, 9, g),
            r"In 1000 draws .* \(min_size = 9; .* short\)\. Write .*a larger alpha",
        ),
        (lambda g: partition.quantity(np.zeros(400, int), 10, 0.05, 30, g), "a larger alpha"),
        (lambda g: partition.shards(np.tile([0, 1, 2], 9), 4, 1, 1, g), "clients = 3 or clients = 6"),
    ],
)
def test_impossible_partitions_say_what_to_change(call, message):
    with pytest.raises(TacitError, match=message):
        call(np.random.default_rng(0))


def test_a_refused_draw_names_a_minimum_that_works():
    labels = np.tile(np.arange(10), 100)
    with pytest.raises(TacitError, match="min_size") as refused:
        partition.dirichlet(labels, 20, 0.3, 40, np.random.default_rng(0))
    possible = int(str(refused.value).split("Write min_size = ")[1].split(",")[0])
    assert 0 < possible < 40
    partition.dirichlet(labels, 20, 0.3, possible, np.random.default_rng(0))


# --- flwr-datasets as an oracle ---------------------------------------------------------------------------


def oracle_table(partitioner, labels: np.ndarray) -> np.ndarray:
    """Classes × partitions of a partitioner of flwr-datasets."""
    import datasets

    partitioner.dataset = datasets.Dataset.from_dict({"label": labels.tolist()})
    parts = [np.array(partitioner.load_partition(k)["label"], int) for k in range(partitioner.num_partitions)]
    return np.array([np.bincount(part, minlength=labels.max() + 1) for part in parts]).T


@pytest.mark.filterwarnings("ignore:The specified min_partition_size")
@pytest.mark.parametrize(("alpha", "min_size"), [(0.1, 1), (0.1, 50), (0.8, 10), (5.0, 10)])
def test_dirichlet_equals_flwr(alpha, min_size):
    """Exactly, table for table, also where both have to draw again.

    2,003 images over 10 or 7 clients: nobody can hold exactly N / M, where flwr-datasets lets a client go on
    and we, like the code of the papers, do not. Draws in which the last client gets nothing of some class are
    left out: its share is 0 (it is full) or nearly, and with a sum of .999… instead of 1 flwr-datasets rounds
    an image into its hands now and then, against the rule.
    """
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = np.random.default_rng(9).permutation(np.arange(2003) % 10)
    compared = redrawn = 0
    for seed in range(12):
        for clients in (10, 7):
            parts = partition.dirichlet(labels, clients, alpha, min_size, np.random.default_rng(seed))
            ours = table_of(parts, labels)
            if (ours[:, -1] == 0).any():
                continue
            oracle = DirichletPartitioner(clients, "label", alpha, min_size, self_balancing=True, seed=seed)
            np.testing.assert_array_equal(ours, oracle_table(oracle, labels))
            first = partition.dirichlet_table(np.bincount(labels), clients, alpha, np.random.default_rng(seed))
            compared, redrawn = compared + 1, redrawn + int(first.sum(axis=0).min() < min_size)
    assert compared >= 4
    assert redrawn or min_size < 50


@pytest.mark.parametrize("seed", [0, 1])
def test_quantity_equals_flwr_on_one_class(seed):
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = np.zeros(1000, int)
    oracle = DirichletPartitioner(8, "label", 0.7, 1, self_balancing=False, seed=seed)
    ours = partition.quantity(labels, 8, 0.7, 1, np.random.default_rng(seed))
    np.testing.assert_array_equal(table_of(ours, labels), oracle_table(oracle, labels))


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # of datasets, in pyarrow
@pytest.mark.parametrize(("clients", "shards"), [(10, 2), (5, 4), (20, 1)])
def test_shards_equal_flwr(clients, shards):
    from flwr_datasets.partitioner import ShardPartitioner

    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(5), 80))
    oracle = ShardPartitioner(clients, "label", num_shards_per_partition=shards, seed=4)
    ours = partition.shards(labels, clients, shards, 1, np.random.default_rng(4))
    np.testing.assert_array_equal(table_of(ours, labels), oracle_table(oracle, labels))


def test_iid_sizes_equal_flwr():
    from flwr_datasets.partitioner import IidPartitioner

    labels = np.zeros(103, int)
    ours = partition.iid(labels, 10, 1, np.random.default_rng(0))
    np.testing.assert_array_equal(table_of(ours, labels), oracle_table(IidPartitioner(10), labels))


def test_dirichlet_client_is_close_to_flwr():
    """The same mixes (same generator); who gets the last images of a class is left to chance in both.

    50 clients × 80 images: chance alone moves a share by up to .056 (one standard deviation), so the mean
    difference must stay below that, and the skew must agree to a tenth.
    """
    from flwr_datasets.partitioner import InnerDirichletPartitioner

    labels = np.tile(np.arange(5), 800)
    oracle = InnerDirichletPartitioner([80] * 50, "label", alpha=0.2, seed=3)
    theirs = oracle_table(oracle, labels) / 80
    parts = partition.dirichlet_client(labels, 50, 1.0, 1, np.random.default_rng(3))  # alpha · 1/5 = .2
    ours = table_of(parts, labels) / 80
    assert np.abs(ours - theirs).mean() < 0.056
    assert (ours**2).sum(axis=0).mean() == pytest.approx((theirs**2).sum(axis=0).mean(), rel=0.1)
