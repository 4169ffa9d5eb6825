"""Placements: who holds labels, complete and disjoint where they must be, refused where impossible."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runs import outside
from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data.placement import Placed, balanced_pool, check, keep_back, place, reveal, stratified

BALANCED = np.arange(1000) % 10


def draw(truth: np.ndarray = BALANCED, groups: np.ndarray | None = None, /, *, seed: int = 0, **changes) -> Placed:
    return place(truth, groups, Data(**{"min_size": 1, **changes}), np.random.default_rng(seed))


def draw_if_possible(*data, seed: int, **changes) -> Placed | None:
    """None where skewed sizes did not give everyone an image; no other refusal is accepted."""
    try:
        return draw(*data, seed=seed, **changes)
    except TacitError as error:
        if changes["partition"] not in ("dirichlet", "quantity") or "always got too few" not in str(error):
            raise
        return None


def held_once(placed: Placed) -> np.ndarray:
    """Every image as often as parties hold it; a client that holds it labelled and unlabelled holds it once."""
    return np.concatenate([placed.server, *(np.union1d(*part) for part in placed.clients)])


def labeled_of(placed: Placed) -> np.ndarray:
    return np.concatenate([placed.server, *(labeled for labeled, _ in placed.clients)])


partitions = st.sampled_from(["iid", "dirichlet", "dirichlet-client", "shards", "quantity"])
placements = st.sampled_from(["server", "clients", "some-clients"])


@given(
    partition=partitions,
    placement=placements,
    clients=st.integers(1, 8),
    labels=st.integers(5, 60),
    alpha=st.sampled_from([0.1, 0.5, 5.0]),
    unknown=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
def test_complete_disjoint_and_deterministic(partition, placement, clients, labels, alpha, unknown, seed):
    generator = np.random.default_rng(seed)
    truth = generator.permutation(np.arange(400) % 5)
    truth[generator.random(400) < unknown] = -1
    clients *= 5  # so that shards divide
    changes = {"partition": partition, "placement": placement, "clients": clients, "labels": labels}
    changes |= {"alpha": alpha, "labeled_clients": min(2, clients)}
    placed = draw_if_possible(truth, seed=seed, **changes)
    if placed is None:
        return
    assert len(placed.clients) == clients
    np.testing.assert_array_equal(np.sort(held_once(placed)), np.arange(400))  # all, nobody twice
    labeled = labeled_of(placed)
    assert (truth[labeled] >= 0).all()
    counts = np.bincount(truth[labeled], minlength=5)
    if placement == "some-clients":
        for client, (with_labels, without) in enumerate(placed.clients):
            if client < 2:
                assert (truth[without] == -1).all()
            else:
                assert len(with_labels) == 0
    else:
        assert counts.sum() == labels
        assert counts.max() - counts.min() <= 1  # balanced
    if placement == "clients":
        assert len(placed.server) == 0
        for with_labels, without in placed.clients:
            assert np.isin(with_labels, without).all()
    again = draw(truth, seed=seed, **changes)
    np.testing.assert_array_equal(placed.server, again.server)
    for part, same in zip(placed.clients, again.clients, strict=True):
        np.testing.assert_array_equal(part[0], same[0])
        np.testing.assert_array_equal(part[1], same[1])


@given(partition=partitions, placement=placements, seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_groups_never_straddle_parties(partition, placement, seed):
    generator = np.random.default_rng(seed)
    groups = np.sort(generator.integers(0, 180, 400))
    truth = groups % 4
    truth[generator.random(400) < 0.05] = -1
    changes = {"partition": partition, "placement": placement, "clients": 4, "labels": 40, "alpha": 1.0}
    placed = draw_if_possible(truth, groups, seed=seed, **changes)
    if placed is None:
        return
    np.testing.assert_array_equal(np.sort(held_once(placed)), np.arange(400))
    owners = [set(groups[placed.server]), *(set(groups[np.union1d(*part)]) for part in placed.clients)]
    assert sum(map(len, owners)) == len(set(groups))
    if placement != "some-clients":
        assert 36 <= len(labeled_of(placed)) <= 40  # whole groups, never more than asked


def test_server_and_its_seed():
    placed = draw(placement="server", labels=50, clients=10)
    np.testing.assert_array_equal(np.bincount(BALANCED[placed.server]), [5] * 10)
    assert all(len(labeled) == 0 for labeled, _ in placed.clients)
    assert sum(len(unlabeled) for _, unlabeled in placed.clients) == 950
    other = draw(placement="server", labels=50, clients=10, seed=1)
    assert not np.array_equal(placed.server, other.server)


def test_labelled_and_unlabelled_pools_are_partitioned_independently():
    """A client's labelled classes tell nothing about its unlabelled ones: no correlation over many draws."""
    correlations = []
    for seed in range(30):
        placed = draw(placement="clients", labels=200, clients=10, alpha=0.3, seed=seed)
        own = np.array([np.bincount(BALANCED[labeled], minlength=10) for labeled, _ in placed.clients])
        others = np.array(
            [np.bincount(BALANCED[np.setdiff1d(rest, mine)], minlength=10) for mine, rest in placed.clients]
        )
        correlations.append(np.corrcoef(own.ravel(), others.ravel())[0, 1])
    assert abs(np.mean(correlations)) < 0.06  # 30 × 100 cells: a standard deviation of about .02


def test_clients_minimum_counts_labelled_and_unlabelled_together():
    placed = draw(placement="clients", labels=100, clients=10, min_size=60, alpha=0.5)
    assert all(len(unlabeled) >= 60 for _, unlabeled in placed.clients)
    assert min(len(labeled) for labeled, _ in placed.clients) >= 1
    assert placed.record["least_labeled"] == 1
    exact = draw(placement="clients", labels=100, clients=10, min_size=100, partition="iid")
    assert all(len(unlabeled) == 100 for _, unlabeled in exact.clients)  # 10 labelled and 90 others


def test_fewer_labels_than_clients_leave_some_without():
    placed = draw(placement="clients", labels=10, clients=20, partition="iid")
    assert sorted(len(labeled) for labeled, _ in placed.clients) == [0] * 10 + [1] * 10
    assert placed.record["least_labeled"] == 0


def test_some_clients():
    placed = draw(placement="some-clients", labeled_clients=2, clients=5, partition="iid")
    assert [(len(labeled), len(unlabeled)) for labeled, unlabeled in placed.clients] == [
        *[(200, 0)] * 2,
        *[(0, 200)] * 3,
    ]


@pytest.mark.parametrize("placement", ["server", "clients", "some-clients"])
def test_reveal_gives_holders_their_labels_and_moves_nothing(placement):
    truth = np.where(np.arange(1000) % 7 == 0, -1, BALANCED)
    hidden = draw(truth, placement=placement, labels=50, clients=5)
    for labeled, unlabeled in hidden.clients:
        all_labeled, same = reveal(truth, labeled, unlabeled)
        np.testing.assert_array_equal(unlabeled, same)
        held = np.union1d(labeled, unlabeled)
        np.testing.assert_array_equal(all_labeled, held[truth[held] >= 0])


def test_cover_draws_again_until_every_class_is_labelled():
    plain = [draw(placement="some-clients", alpha=1.0, clients=10, seed=seed) for seed in range(8)]
    least = [np.bincount(BALANCED[labeled_of(p)], minlength=10).min() for p in plain]
    assert min(least) == 0  # or there is nothing to cover
    assert all(p.record["draws"] == 1 for p in plain)
    covered = [draw(placement="some-clients", alpha=1.0, clients=10, seed=seed, cover=3) for seed in range(8)]
    assert all(np.bincount(BALANCED[labeled_of(p)], minlength=10).min() >= 3 for p in covered)
    assert max(p.record["draws"] for p in covered) > 1


def test_subset_keeps_the_shares():
    truth = np.repeat([0, 1, 2, -1], [700, 200, 50, 50])
    placed = draw(truth, placement="some-clients", subset=100, clients=4, partition="iid")
    used = held_once(placed)
    assert len(used) == len(set(used)) == 100
    assert [int((truth[used] == label).sum()) for label in (0, 1, 2, -1)] == [70, 20, 5, 5]


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    data=st.data(),
)
def test_stratified_is_exact_and_never_loses_a_class(sizes, data):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    count = data.draw(st.integers(len(sizes), len(labels)))
    picked = stratified(labels, count, np.random.default_rng(0))
    taken = np.bincount(labels[picked], minlength=len(sizes))
    assert len(picked) == len(set(picked)) == count
    assert taken.min() >= 1
    exact = np.array(sizes) * count / len(labels)
    rare = exact < 1
    assert (taken[rare] == 1).all()
    assert (np.abs(taken - exact)[~rare] < 1 + rare.sum()).all()


def test_chance_decides_which_classes_get_the_remainder():
    """13 labels of 10 classes: three classes get two; in 100 draws each class about 30 times."""
    twice = np.zeros(10, int)
    for seed in range(100):
        counts = np.bincount(BALANCED[balanced_pool(BALANCED, None, 13, np.random.default_rng(seed))], minlength=10)
        assert sorted(counts) == [1] * 7 + [2] * 3
        twice += counts == 2
    assert twice.min() > 10


def test_pool_of_whole_groups_fits_exactly_where_it_can():
    groups = np.array([1, 1, 1, 2, 2, 3, 4, 4, 5, 6])
    truth = np.array([0, 0, 0, 0, 0, 0, 1, 1, 1, -1])
    for seed in range(20):
        pool = balanced_pool(truth, groups, 6, np.random.default_rng(seed))
        assert len(pool) <= 6
        for group in set(groups[pool]):
            assert np.isin(np.flatnonzero(groups == group), pool).all()
        assert np.bincount(truth[pool], minlength=2)[1] == 3  # groups 4 and 5 are all of class 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": 9}, r"labels = 9, .* each of the 10 classes\. Write labels = 10 or more"),
        ({"labels": 1001}, r"labels = 1001, .* only 1000 training images\. Write labels = 1000 or less"),
        ({"labels": 950, "min_size": 10}, r"need 100 images, .* only 50 beside the server's 950\. Write min_size = 5"),
        ({"placement": "clients", "min_size": 101}, r"need 1010 images, .* only 1000\. Write min_size = 100 or less"),
        ({"placement": "clients", "clients": 1001}, r"only 1000\. Write fewer clients"),
        ({"partition": "shards", "clients": 7}, r"14 pieces, .* Write clients = 5 or clients = 10, or shards = 10"),
        ({"partition": "shards", "clients": 500, "shards": 4}, "more pieces than the 950 images"),
        ({"subset": 2000}, r"subset = 2000, .* only 1000 .* Write subset = 1000 or less"),
        ({"subset": 5}, r"subset = 5 cannot hold .* Write subset = 10 or more"),
        ({"cover": 6}, r"needs 60 labels, but labels = 50\. Write cover = 5 or less"),
        ({"placement": "some-clients", "cover": 101}, r"needs 1010 images, .* Write cover = 100 or less"),
        ({"placement": "some-clients", "cover": 1, "partition": "shards"}, "hold at most 2 of 10 classes"),
    ],
)
def test_impossible_settings_are_refused_before_drawing(changes, message):
    settings = Data(**{"labels": 50, "clients": 10, "min_size": 1, **changes})
    with pytest.raises(TacitError, match=message):
        check(settings, 1000, 10)

    class NoDrawing:
        """Stands for a generator that must not be touched."""

    with pytest.raises(TacitError, match=message):
        place(BALANCED, None, settings, NoDrawing())  # type: ignore[arg-type]


def test_more_labelled_clients_than_clients_are_refused():
    settings = Data.model_construct(**{**Data().model_dump(), "placement": "some-clients", "labeled_clients": 12})
    with pytest.raises(TacitError, match=r"labeled_clients = 12, .* only 10 clients\. Write labeled_clients = 10"):
        check(settings, 1000, 10)


def test_a_saved_split_is_not_checked():
    check(Data(labels=9, split="some.npz"), 1000, 10)


@pytest.mark.parametrize(
    ("labels", "changes", "message"),
    [
        (np.repeat([0, 1], [95, 5]), {"labels": 20}, r"needs 10 images of each, but class 1 has only 5 .* labels = 10"),
        (np.full(100, -1), {"labels": 20}, "no label of the training images is known"),
        (np.repeat([0, 1], [95, 5]), {"placement": "some-clients", "cover": 6}, "only 5 training images of the rarest"),
        (BALANCED, {"placement": "some-clients", "alpha": 0.01, "cover": 20}, "never held so many of each class"),
    ],
)
def test_what_only_the_labels_show_to_be_impossible(labels, changes, message):
    with pytest.raises(TacitError, match=message):
        draw(labels, clients=5, **changes)


@pytest.mark.parametrize("placement", ["server", "clients", "some-clients"])
def test_lesions_of_real_skin_data_never_straddle(placement):
    with np.load(outside("isic2018.npz")) as arrays:
        truth, names = arrays["y_train"].astype(np.int64), arrays["group_train"]
    groups = np.unique(names, return_inverse=True)[1]
    placed = draw(truth, groups, placement=placement, labels=350, alpha=0.8, cover=1)
    np.testing.assert_array_equal(np.sort(held_once(placed)), np.arange(len(truth)))
    owners = [set(groups[placed.server]), *(set(groups[np.union1d(*part)]) for part in placed.clients)]
    assert sum(map(len, owners)) == len(set(groups))
    counts = np.bincount(truth[labeled_of(placed)], minlength=7)
    assert counts.min() >= 1
    if placement != "some-clients":
        assert counts.tolist() == [50] * 7  # 67 % of the images are of one class, but not of the labels


@given(
    st.lists(st.integers(0, 4), max_size=60),
    st.floats(0.01, 0.9),
    st.integers(0, 2**32 - 1),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_what_is_kept_back_is_a_share_and_never_the_last_of_a_class(classes, share, seed, grouped):
    labels = np.array(classes, np.int64)
    groups = np.arange(len(labels)) // 2 if grouped else None
    kept = keep_back(labels, groups, share, np.random.default_rng(seed))
    assert kept.sum() <= round(share * len(labels))
    held, left = np.bincount(labels, minlength=5), np.bincount(labels[~kept], minlength=5)
    assert (left[held > 0] > 0).all()
    if groups is not None:
        assert not np.isin(groups[kept], groups[~kept]).any()


def test_so_many_are_kept_back_where_every_class_is_large():
    kept = keep_back(BALANCED, None, 0.2, np.random.default_rng(0))
    assert np.bincount(BALANCED[kept]).tolist() == [20] * 10
