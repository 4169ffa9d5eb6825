"""Who holds labels: at the server, a few at each client, or everything at some clients.

All draws come from one generator, in this order: the subset, its long tail, the labelled pool, the partition of the
labelled pool, the partition of the rest. Images whose label nobody knows (-1) are never part of a labelled pool.
"""

from typing import NamedTuple

import numpy as np

from tacit.core.errors import TacitError
from tacit.core.settings import Data
from tacit.data import partition

Parts = list[tuple[np.ndarray, np.ndarray]]  # (labelled, unlabelled) positions of each client


class Placed(NamedTuple):
    """Ascending positions in the training set, and what a reader of the split should know of the drawing."""

    server: np.ndarray  # labelled
    clients: Parts
    record: dict[str, int]


def place(labels: np.ndarray, groups: np.ndarray | None, settings: Data, generator: np.random.Generator) -> Placed:
    """Deal the training images out as the settings say.

    `server`: a class-balanced pool of `labels` images stays at the server, the rest is partitioned unlabelled.
    `clients`: such a pool and the rest are partitioned independently; a client's labelled images are in its
    unlabelled set, too (without their labels). `some-clients`: all is partitioned; the first clients know all
    labels, the others none. `cover` draws all of it again until the labelled parties together hold that many
    images of each class.

    >>> settings = Data(partition="iid", clients=2, placement="server", labels=2, min_size=1)
    >>> placed = place(np.array([0, 1, 0, 1, 0, 1]), None, settings, np.random.default_rng(0))
    >>> len(placed.server), [(len(labeled), len(unlabeled)) for labeled, unlabeled in placed.clients]
    (2, [(0, 2), (0, 2)])
    """
    classes = len(np.unique(labels[labels >= 0]))
    check(settings, len(labels), classes, int((labels >= 0).sum()))
    chosen = stratified(labels, settings.subset, generator) if settings.subset else np.arange(len(labels))
    if settings.imbalance > 1:
        chosen = chosen[long_tailed(labels[chosen], settings.imbalance, generator)]
        left = settings.model_copy(update={"subset": 0})
        check(left, len(chosen), classes, int((labels[chosen] >= 0).sum()))
    used_labels, used_groups = labels[chosen], None if groups is None else groups[chosen]
    rarest = _least_labels(used_labels, np.arange(len(chosen)))
    if settings.cover > rarest:
        raise TacitError(
            f"cover = {settings.cover}, but there are only {rarest} training images of the rarest class. "
            f"Write cover = {rarest} or less."
        )
    draw = {"server": _at_server, "clients": _at_clients, "some-clients": _at_some_clients}[settings.placement]
    draws = partition.most_draws(classes * settings.clients)
    for drawn in range(1, draws + 1):
        server, clients, record = draw(used_labels, used_groups, settings, generator)
        held = np.concatenate([server, *(labeled for labeled, _ in clients)])
        if _least_labels(used_labels, held) >= settings.cover:
            clients = [(chosen[labeled], chosen[unlabeled]) for labeled, unlabeled in clients]
            return Placed(chosen[server], clients, {**record, "draws": drawn})
    raise TacitError(
        f"cover = {settings.cover}: in {draws} draws the labelled images never held so many of each class "
        f"(partition {settings.partition}, placement {settings.placement}). Write a smaller cover, a larger "
        "alpha (less skew) or more labeled_clients."
    )


def place_sites(labels: np.ndarray, sites: np.ndarray | None, names: tuple[str, ...], settings: Data) -> Placed:
    """Nothing is dealt: every site holds its own images, with the labels that they have there. -1 is the server.

    >>> settings = Data(partition="sites", clients=2, placement="clients")
    >>> placed = place_sites(np.array([0, 1, -1, 0]), np.array([0, 0, 1, 1]), ("a", "b"), settings)
    >>> [(labeled.tolist(), unlabeled.tolist()) for labeled, unlabeled in placed.clients]
    [([0, 1], []), ([3], [2])]
    """
    if sites is None:
        raise TacitError(
            f"partition = sites needs data of your own, which lies at sites; '{settings.name}' has none. "
            "Write another partition, such as dirichlet."
        )
    if settings.clients != len(names):
        raise TacitError(
            f"clients = {settings.clients}, but there are {len(names)} sites ({', '.join(names)}). "
            f"Write clients = {len(names)}."
        )
    if settings.subset or settings.cover or settings.imbalance > 1:
        raise TacitError("partition = sites takes the data as it lies: write subset = 0, cover = 0 and imbalance = 1.")
    known = labels >= 0
    clients: Parts = [
        (np.flatnonzero((sites == number) & known), np.flatnonzero((sites == number) & ~known))
        for number in range(len(names))
    ]
    server = np.flatnonzero((sites < 0) & known)
    fitting = fitting_placements(len(server), [(len(own), len(rest)) for own, rest in clients])
    if settings.placement not in fitting:
        raise TacitError(
            f'placement = "{settings.placement}" is not how the labels lie: {len(server)} at the server, '
            + ", ".join(f"{len(own)} at {name}" for name, (own, _) in zip(names, clients, strict=True))
            + f'. Write placement = "{fitting[0]}".'
        )
    return Placed(server, clients, {})


def fitting_placements(at_server: int, at_clients: list[tuple[int, int]]) -> list[str]:
    """The placements that describe where labels lie (labelled, unlabelled of each client), the best word first.

    >>> fitting_placements(50, [(0, 100), (0, 90)]), fitting_placements(0, [(10, 100), (0, 90)])
    (['server'], ['clients', 'some-clients'])
    >>> fitting_placements(0, [(100, 0), (0, 90)])
    ['some-clients', 'clients']
    """
    labeled = [labels > 0 for labels, _ in at_clients]
    if not any(labeled):
        return ["server"]
    if all(labeled) or at_server:
        return ["clients"]
    whole = all(rest == 0 for labels, rest in at_clients if labels)
    return ["some-clients", "clients"] if whole else ["clients", "some-clients"]


def reveal(labels: np.ndarray, labeled: np.ndarray, unlabeled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every image with a known label becomes labelled for its holder; the unlabelled set stays as it is.

    >>> labeled, unlabeled = reveal(np.array([1, -1, 0]), np.array([], int), np.array([0, 1, 2]))
    >>> labeled.tolist(), unlabeled.tolist()
    ([0, 2], [0, 1, 2])
    """
    return np.union1d(labeled, unlabeled[labels[unlabeled] >= 0]), unlabeled


def keep_back(
    labels: np.ndarray, groups: np.ndarray | None, share: float, generator: np.random.Generator
) -> np.ndarray:
    """Which of a party's labelled images (with these labels) it judges models by, and never learns: about `share` of
    them, whole groups, of each class no more than its share rounded up, and never the last image of a class.

    >>> labels = np.array([0] * 10 + [1] * 5 + [2])
    >>> kept = keep_back(labels, None, 0.25, np.random.default_rng(0))
    >>> int(kept.sum()), int(kept[labels == 2].sum())
    (4, 0)
    """
    kept = np.zeros(len(labels), bool)
    number = np.arange(len(labels)) if groups is None else np.unique(groups, return_inverse=True)[1]
    held = np.bincount(labels, minlength=1)
    most = np.minimum(np.ceil(np.round(share * held, 9)), np.maximum(held - 1, 0))
    taken = np.zeros_like(held)
    wanted = round(share * len(labels))
    for group in generator.permutation(number.max(initial=-1) + 1):
        members = np.flatnonzero(number == group) if groups is not None else np.array([group])
        more = taken + np.bincount(labels[members], minlength=len(held))
        if (more <= most).all() and more.sum() <= wanted:
            kept[members], taken = True, more
    return kept


def check(settings: Data, train_images: int, classes: int, labeled: int = 0) -> None:
    """Refuse what no draw can satisfy, before any work; says what to write instead.

    >>> check(Data(placement="server", labels=5), 1000, 10)
    Traceback (most recent call last):
    tacit.core.errors.TacitError: labels = 5, but a labelled pool needs an image of each of the 10 classes. Write
    labels = 10 or more.
    """
    if settings.split:
        return  # a saved split is not drawn
    if settings.subset > train_images:
        raise TacitError(
            f"subset = {settings.subset}, but there are only {train_images} training images. "
            f"Write subset = {train_images} or less (0: all)."
        )
    if 0 < settings.subset < classes:
        raise TacitError(
            f"subset = {settings.subset} cannot hold an image of each of the {classes} classes. "
            f"Write subset = {classes} or more (0: all)."
        )
    images = settings.subset or train_images
    if settings.placement == "some-clients":
        _check_some_clients(settings, images, classes)
    else:
        _check_pool(settings, images, classes)
    at_server = (settings.labels or labeled) if settings.placement == "server" else 0
    for_clients = images - at_server
    if settings.clients * settings.min_size > for_clients:
        possible = for_clients // settings.clients
        fix = f"min_size = {possible} or less, or " if possible else ""
        pool = f" beside the server's {at_server}" if at_server else ""
        raise TacitError(
            f"{settings.clients} clients with min_size = {settings.min_size} need "
            f"{settings.clients * settings.min_size} images, but there are only {for_clients}{pool}. "
            f"Write {fix}fewer clients."
        )
    if settings.partition == "shards":
        partition.check_shards(settings.clients, settings.shards, classes)
        if settings.clients * settings.shards > for_clients:
            raise TacitError(
                f"{settings.clients} clients × {settings.shards} shards are more pieces than the "
                f"{for_clients} images there are to deal. Write fewer clients or fewer shards."
            )


def _check_pool(settings: Data, images: int, classes: int) -> None:
    if settings.labels == 0:  # all that are known
        return
    if settings.labels < classes:
        raise TacitError(
            f"labels = {settings.labels}, but a labelled pool needs an image of each of the {classes} classes. "
            f"Write labels = {classes} or more."
        )
    if settings.labels > images:
        raise TacitError(
            f"labels = {settings.labels}, but there are only {images} training images. Write labels = {images} or less."
        )
    if settings.cover * classes > settings.labels:
        raise TacitError(
            f"cover = {settings.cover} for {classes} classes needs {settings.cover * classes} labels, but "
            f"labels = {settings.labels}. Write cover = {settings.labels // classes} or less, or more labels."
        )


def _check_some_clients(settings: Data, images: int, classes: int) -> None:
    if settings.labeled_clients > settings.clients:
        raise TacitError(
            f"labeled_clients = {settings.labeled_clients}, but there are only {settings.clients} clients. "
            f"Write labeled_clients = {settings.clients} or less, or more clients."
        )
    if settings.cover * classes > images:
        raise TacitError(
            f"cover = {settings.cover} for {classes} classes needs {settings.cover * classes} images, but there "
            f"are only {images}. Write cover = {images // classes} or less."
        )
    pieces = settings.labeled_clients * settings.shards
    if settings.cover and settings.partition == "shards" and pieces < classes:
        raise TacitError(
            f"cover = {settings.cover}, but {settings.labeled_clients} labelled clients × {settings.shards} "
            f"shards hold at most {pieces} of {classes} classes. Write cover = 0, more labeled_clients or more "
            "shards."
        )


def _at_server(labels: np.ndarray, groups: np.ndarray | None, settings: Data, generator: np.random.Generator) -> Placed:
    pool = _pool(labels, groups, settings.labels, generator)
    rest = np.setdiff1d(np.arange(len(labels)), pool)
    parts = _partition(labels, groups, rest, settings, settings.min_size, generator)
    return Placed(pool, [(_nothing(), part) for part in parts], {})


def _at_clients(
    labels: np.ndarray, groups: np.ndarray | None, settings: Data, generator: np.random.Generator
) -> Placed:
    """Every client gets a label where there are enough and a draw is found, else some clients get none."""
    pool = _pool(labels, groups, settings.labels, generator)
    rest = np.setdiff1d(np.arange(len(labels)), pool)
    least = 1 if len(pool) >= settings.clients else 0
    try:
        labeled = _partition(labels, groups, pool, settings, least, generator)
    except TacitError:
        least = 0
        labeled = _partition(labels, groups, pool, settings, least, generator)
    still_needed = np.maximum(settings.min_size - np.array([len(part) for part in labeled]), 0)
    unlabeled = _partition(labels, groups, rest, settings, still_needed, generator)
    clients = [(own, np.sort(np.concatenate([others, own]))) for own, others in zip(labeled, unlabeled, strict=True)]
    return Placed(_nothing(), clients, {"least_labeled": least})


def _at_some_clients(
    labels: np.ndarray, groups: np.ndarray | None, settings: Data, generator: np.random.Generator
) -> Placed:
    everything = np.arange(len(labels))
    parts = _partition(labels, groups, everything, settings, settings.min_size, generator)
    clients = [
        (part[labels[part] >= 0], part[labels[part] < 0]) if client < settings.labeled_clients else (_nothing(), part)
        for client, part in enumerate(parts)
    ]
    return Placed(_nothing(), clients, {})


def deal(labels: np.ndarray, positions: np.ndarray, settings: Data, generator: np.random.Generator) -> list[np.ndarray]:
    """Deal these positions to all clients, unlabelled, with the partition that the settings name."""
    return _partition(labels, None, positions, settings, settings.min_size, generator)


def _nothing() -> np.ndarray:
    return np.empty(0, np.int64)


def _partition(
    labels: np.ndarray,
    groups: np.ndarray | None,
    positions: np.ndarray,
    settings: Data,
    min_size: int | np.ndarray,
    generator: np.random.Generator,
) -> list[np.ndarray]:
    """Deal these positions out with the partition that the settings name."""
    some_labels, some_groups = labels[positions], None if groups is None else groups[positions]
    clients = settings.clients
    if settings.partition == "iid":
        parts = partition.iid(some_labels, clients, min_size, generator, some_groups)
    elif settings.partition == "shards":
        parts = partition.shards(some_labels, clients, settings.shards, min_size, generator, some_groups)
    else:
        by_alpha = {
            "dirichlet": partition.dirichlet,
            "dirichlet-client": partition.dirichlet_client,
            "quantity": partition.quantity,
        }
        draw = by_alpha[settings.partition]
        parts = draw(some_labels, clients, settings.alpha, min_size, generator, some_groups)
    return [positions[part] for part in parts]


def _pool(labels: np.ndarray, groups: np.ndarray | None, count: int, generator: np.random.Generator) -> np.ndarray:
    """Every labelled image where no number is asked for (0), else a balanced pool of so many."""
    return balanced_pool(labels, groups, count, generator) if count else np.flatnonzero(labels >= 0)


def balanced_pool(
    labels: np.ndarray, groups: np.ndarray | None, count: int, generator: np.random.Generator
) -> np.ndarray:
    """`count` images at random, equally many of each class (chance decides who gets the remainder).

    With groups the pool consists of whole groups with only known labels, and holds a few images less where no
    group fits into what is still wanted.

    >>> labels = np.array([0, 0, 0, 0, 1, 1, 1, -1])
    >>> labels[balanced_pool(labels, None, 4, np.random.default_rng(0))].tolist()
    [0, 0, 1, 1]
    """
    usable = labels >= 0
    if groups is not None:
        usable &= ~np.isin(groups, groups[labels < 0])
    wanted = _balanced_counts(labels[labels >= 0], labels[usable], count, generator)
    if groups is not None:
        return _pool_of_groups(labels, groups, np.flatnonzero(usable), wanted, generator)
    picked = [
        generator.permutation(np.flatnonzero(labels == label))[:number] for label, number in enumerate(wanted) if number
    ]
    return np.sort(np.concatenate(picked))


def _balanced_counts(known: np.ndarray, usable: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """How many to take of each class; refused if there are too few usable images of one."""
    present = np.unique(known)
    if len(present) == 0:
        raise TacitError(f"labels = {count}, but no label of the training images is known. Use data with labels.")
    available = np.bincount(usable, minlength=int(present.max()) + 1)
    rarest = present[available[present].argmin()]
    needed = -(-count // len(present))
    if needed > available[rarest]:
        raise TacitError(
            f"labels = {count}: a balanced pool of {len(present)} classes needs {needed} images of each, but "
            f"class {rarest} has only {available[rarest]} that can be used. "
            f"Write labels = {available[rarest] * len(present)} or less."
        )
    wanted = np.zeros_like(available)
    wanted[present] = count // len(present)
    wanted[generator.permutation(present)[: count % len(present)]] += 1
    return wanted


def _pool_of_groups(
    labels: np.ndarray,
    groups: np.ndarray,
    usable: np.ndarray,
    wanted: np.ndarray,
    generator: np.random.Generator,
) -> np.ndarray:
    """Go through the groups in random order and take each that fits into what is still wanted."""
    by_group = usable[np.argsort(groups[usable], kind="stable")]
    starts = np.flatnonzero(np.diff(groups[by_group])) + 1
    members = np.split(by_group, starts)
    still = wanted.copy()
    picked = []
    for number in generator.permutation(len(members)):
        held = np.bincount(labels[members[number]], minlength=len(still))
        if (held <= still).all():
            picked.append(members[number])
            still -= held
            if not still.any():
                break
    return np.sort(np.concatenate(picked)) if picked else _nothing()


def stratified(labels: np.ndarray, count: int, generator: np.random.Generator) -> np.ndarray:
    """A random subset that keeps the shares of the classes (and of unknown labels), at least one of each.

    >>> labels = np.array([0] * 6 + [1] * 3)
    >>> labels[stratified(labels, 3, np.random.default_rng(0))].tolist()
    [0, 0, 1]
    """
    values, sizes = np.unique(labels, return_counts=True)
    if not len(values) <= count <= len(labels):
        raise TacitError(
            f"A subset of {count} images of {len(labels)} in {len(values)} classes cannot be drawn. "
            f"Write a number from {len(values)} to {len(labels)} (0: all)."
        )
    exact = sizes * count / len(labels)
    taken = np.maximum(np.floor(exact), 1).astype(np.int64)
    while taken.sum() < count:
        taken[np.argmax(exact - taken)] += 1
    while taken.sum() > count:
        taken[np.argmax(taken)] -= 1
    picked = [
        generator.permutation(np.flatnonzero(labels == value))[:number]
        for value, number in zip(values, taken, strict=True)
    ]
    return np.sort(np.concatenate(picked))


def long_tailed(labels: np.ndarray, imbalance: float, generator: np.random.Generator) -> np.ndarray:
    """Which images stay where class c of K keeps a share of imbalance^(−c / (K − 1)) of its images, at least one: the
    long tail of Cui et al. (CVPR 2019). Images whose label nobody knows stay.

    >>> labels = np.repeat([0, 1, 2], 9)
    >>> np.bincount(labels[long_tailed(labels, 9.0, np.random.default_rng(0))]).tolist()
    [9, 3, 1]
    """
    known = np.unique(labels[labels >= 0])
    stay = [np.flatnonzero(labels < 0)]
    for place, value in enumerate(known):
        there = np.flatnonzero(labels == value)
        kept = max(1, round(len(there) * imbalance ** (-place / max(len(known) - 1, 1))))
        stay.append(generator.permutation(there)[:kept])
    return np.sort(np.concatenate(stay))


def _least_labels(labels: np.ndarray, held: np.ndarray) -> int:
    """How many of the held images are of the class that has the fewest (of the classes that are known at all).

    >>> _least_labels(np.array([0, 0, 1, 1, 1, -1, 3, 3]), np.array([0, 2, 3, 6, 7]))
    1
    """
    present = np.unique(labels[labels >= 0])
    known = labels[held][labels[held] >= 0]
    counts = np.bincount(known, minlength=int(labels.max(initial=0)) + 1)
    return int(counts[present].min(initial=len(labels)))
