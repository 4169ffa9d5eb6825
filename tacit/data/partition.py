"""Who gets which images: five ways to deal a set out to clients.

Each function takes the labels and returns one ascending array of positions per client; every position is in
exactly one of them. Each works in two steps: draw a table that says how many images of each class go to each
client (again, until every client has its minimum), then shuffle each class and cut it as the table says.

Images whose label nobody knows (-1) are dealt evenly and at random, whatever the labels do. Where `groups`
are given, images of one group (one patient, one lesion) stay together: a group counts as its most frequent
known label, and the cuts fall on the borders of groups, so that sizes follow the table as nearly as they can.

`min_size` is the least images a client must get: one number, or one for each client.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tacit.core.errors import TacitError

MOST_DRAWS = 1000  # of one table before we give up


def iid(
    labels: np.ndarray,
    clients: int,
    min_size: int | np.ndarray,
    generator: np.random.Generator,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Equal parts at random, whatever the labels.

    >>> parts = iid(np.array([0, 0, 0, 1, 1, 1, -1]), 3, 1, np.random.default_rng(0))
    >>> [len(part) for part in parts], sorted(np.concatenate(parts).tolist())
    ([3, 2, 2], [0, 1, 2, 3, 4, 5, 6])
    """
    one_class = np.zeros_like(labels)

    def table(sizes: np.ndarray) -> np.ndarray:
        return even_sizes(int(sizes.sum()), clients)[None]

    return _draw_and_deal(one_class, clients, min_size, generator, groups, table, "fewer clients")


def quantity(
    labels: np.ndarray,
    clients: int,
    alpha: float,
    min_size: int | np.ndarray,
    generator: np.random.Generator,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Sizes from a symmetric Dirichlet(alpha) over the clients; who gets which image is left to chance.

    With a huge alpha all shares are equal (cuts at 3.3 and 6.7):

    >>> [len(part) for part in quantity(np.zeros(10, int), 3, 1e9, 1, np.random.default_rng(0))]
    [3, 3, 4]
    """
    one_class = np.zeros_like(labels)

    def table(sizes: np.ndarray) -> np.ndarray:
        return cut(generator.dirichlet(np.full(clients, alpha)), int(sizes.sum()))[None]

    advice = "a larger alpha (less skew) or fewer clients"
    return _draw_and_deal(one_class, clients, min_size, generator, groups, table, advice)


def dirichlet(
    labels: np.ndarray,
    clients: int,
    alpha: float,
    min_size: int | np.ndarray,
    generator: np.random.Generator,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Each class is shared out over the clients by its own symmetric Dirichlet(alpha) draw.

    The usual balancing rule holds: a client that already has its even share (N / clients) takes none of the
    later classes, and the others' shares are scaled up to 1. With a huge alpha all shares are equal (each
    class of ten is cut at 3.3 and 6.7):

    >>> [len(part) for part in dirichlet(np.array([0, 1] * 10), 3, 1e9, 1, np.random.default_rng(0))]
    [6, 6, 8]
    """

    def table(sizes: np.ndarray) -> np.ndarray:
        return dirichlet_table(sizes, clients, alpha, generator)

    advice = "a larger alpha (less skew) or fewer clients"
    return _draw_and_deal(labels, clients, min_size, generator, groups, table, advice)


def dirichlet_client(
    labels: np.ndarray,
    clients: int,
    alpha: float,
    min_size: int | np.ndarray,
    generator: np.random.Generator,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Each client draws its own class mix from Dirichlet(alpha · class shares); all get equally many images.

    A client draws its images by its mix; when a class runs dry, those who still want images go on with the
    classes that are left.

    >>> parts = dirichlet_client(np.array([0, 1] * 10), 4, 0.5, 1, np.random.default_rng(0))
    >>> [len(part) for part in parts]
    [5, 5, 5, 5]
    """

    def table(sizes: np.ndarray) -> np.ndarray:
        return dirichlet_client_table(sizes, clients, alpha, generator)

    return _draw_and_deal(labels, clients, min_size, generator, groups, table, "fewer clients")


def shards(
    labels: np.ndarray,
    clients: int,
    shards: int,
    min_size: int | np.ndarray,
    generator: np.random.Generator,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Each class is cut into shards · clients / classes equal pieces; each client gets `shards` of them.

    Two pieces of a client may be of the same class, so a client holds at most `shards` classes.

    >>> labels = np.repeat([0, 1], 6)
    >>> parts = shards(labels, 4, 1, 1, np.random.default_rng(0))
    >>> sorted(labels[part].tolist() for part in parts)
    [[0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    """
    check_shards(clients, shards, len(np.unique(labels[labels >= 0])))

    def table(sizes: np.ndarray) -> np.ndarray:
        return shards_table(sizes, clients, shards, generator)

    advice = "fewer clients or fewer shards"
    return _draw_and_deal(labels, clients, min_size, generator, groups, table, advice)


def check_shards(clients: int, shards: int, classes: int) -> None:
    """Refuse numbers that do not give every class the same number of pieces; name the nearest that do.

    >>> check_shards(10, 2, 10)
    >>> check_shards(7, 2, 10)
    Traceback (most recent call last):
    tacit.core.errors.TacitError: 7 clients × 2 shards are 14 pieces, which 10 classes cannot share evenly. Write
    clients = 5 or clients = 10, or shards = 10.
    """
    if classes == 0 or (clients * shards) % classes == 0:
        return
    client_step = classes // np.gcd(classes, shards)
    shard_step = classes // np.gcd(classes, clients)
    below, above = clients // client_step * client_step, (clients // client_step + 1) * client_step
    nearest_clients = " or ".join(f"clients = {number}" for number in (below, above) if number)
    nearest_shards = max(round(shards / shard_step), 1) * shard_step
    raise TacitError(
        f"{clients} clients × {shards} shards are {clients * shards} pieces, which {classes} classes cannot "
        f"share evenly. Write {nearest_clients}, or shards = {nearest_shards}."
    )


# --- Tables: images per class (rows) and client (columns) -------------------------------------------------


def even_sizes(total: int, clients: int, first: int = 0) -> np.ndarray:
    """Sizes that differ by at most 1; what is left over goes to the clients from `first` on.

    >>> even_sizes(8, 3).tolist(), even_sizes(8, 3, first=2).tolist()
    ([3, 3, 2], [3, 2, 3])
    """
    extra = (np.arange(clients) - first) % clients < total % clients
    return total // clients + extra.astype(np.int64)


def cut(shares: np.ndarray, total: int) -> np.ndarray:
    """Whole numbers that follow the shares and add up to the total: cut at the running sums, rounded down.

    >>> cut(np.array([0.3, 0.0, 0.5, 0.2, 0.0]), 11).tolist()       # cuts at 3.3, 3.3, 8.8, 11
    [3, 0, 5, 3, 0]
    """
    ends = np.cumsum(shares)
    ends = (ends / ends[-1] * total).astype(np.int64)  # x / x is exactly 1, so a last share of 0 gets nothing
    return np.diff(ends, prepend=0)


def dirichlet_table(sizes: np.ndarray, clients: int, alpha: float, generator: np.random.Generator) -> np.ndarray:
    """One Dirichlet draw per class over the clients, with the balancing rule of `dirichlet`.

    With a tiny alpha a class goes to one client, who is then full and gets none of the next:

    >>> dirichlet_table(np.array([10, 10]), 2, 1e-6, np.random.default_rng(0)).max(axis=0).tolist()
    [10, 10]
    """
    even_share = sizes.sum() / clients
    held = np.zeros(clients, np.int64)
    rows = []
    for size in sizes:
        shares = generator.dirichlet(np.full(clients, alpha))
        shares[held >= even_share] = 0
        if not shares.any():  # a tiny alpha gives exact zeros; someone is always below the even share
            shares = (held < even_share).astype(float)
        rows.append(cut(shares, int(size)))
        held += rows[-1]
    return np.array(rows)


def dirichlet_client_table(sizes: np.ndarray, clients: int, alpha: float, generator: np.random.Generator) -> np.ndarray:
    """One Dirichlet draw per client over the classes; all clients ask at once, so that none comes last.

    >>> table = dirichlet_client_table(np.array([30, 10]), 4, 1.0, np.random.default_rng(0))
    >>> table.sum(axis=0).tolist(), table.sum(axis=1).tolist()
    ([10, 10, 10, 10], [30, 10])
    """
    mix = generator.dirichlet(alpha * sizes / sizes.sum(), clients)
    left = sizes.copy()
    missing = even_sizes(int(sizes.sum()), clients)
    table = np.zeros((clients, len(sizes)), np.int64)
    while missing.any():  # each turn fills every client or empties a class
        chance = mix * (left > 0)
        chance[chance.sum(axis=1) < 1e-12] = left  # wants only what is gone: takes what there is
        chance /= chance.sum(axis=1, keepdims=True)
        wishes = generator.multinomial(missing, chance)
        for which in np.flatnonzero(wishes.sum(axis=0) > left):
            wishes[:, which] = generator.multivariate_hypergeometric(wishes[:, which], left[which], method="marginals")
        table += wishes
        left -= wishes.sum(axis=0)
        missing -= wishes.sum(axis=1)
    return table.T


def shards_table(sizes: np.ndarray, clients: int, shards: int, generator: np.random.Generator) -> np.ndarray:
    """Pieces in class order, shuffled, `shards` of them to each client.

    >>> table = shards_table(np.array([6, 8]), 4, 1, np.random.default_rng(0))
    >>> sorted(table.T.tolist())                    # the clients, in some order
    [[0, 4], [0, 4], [3, 0], [3, 0]]
    """
    pieces = shards * clients // len(sizes)
    piece_sizes = np.concatenate([even_sizes(int(size), pieces) for size in sizes])
    piece_classes = np.repeat(np.arange(len(sizes)), pieces)
    dealt = generator.permutation(shards * clients)
    table = np.zeros((len(sizes), clients), np.int64)
    np.add.at(table, (piece_classes[dealt], np.repeat(np.arange(clients), shards)), piece_sizes[dealt])
    return table


def most_draws(cells: int) -> int:
    """How often a table of so many cells may be drawn: fewer times if it is huge, so that failing is quick.

    >>> most_draws(10 * 100), most_draws(10 * 10_000)
    (1000, 200)
    """
    return max(20, min(MOST_DRAWS, 20_000_000 // max(cells, 1)))


# --- Dealing ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Units:
    """What is dealt: single images, or whole groups of them."""

    of_image: np.ndarray  # the unit of each image
    label: np.ndarray  # of each unit; -1 if unknown
    size: np.ndarray  # images in each unit


def _units(labels: np.ndarray, groups: np.ndarray | None) -> _Units:
    if groups is None:
        return _Units(np.arange(len(labels)), labels, np.ones(len(labels), np.int64))
    _, of_image, size = np.unique(groups, return_inverse=True, return_counts=True)
    return _Units(of_image, _group_labels(labels, of_image, len(size)), size)


def _group_labels(labels: np.ndarray, of_image: np.ndarray, groups: int) -> np.ndarray:
    """The most frequent known label of each group (the smaller one of two); -1 if none is known.

    >>> _group_labels(np.array([2, 1, 1, -1, 0, -1]), np.array([0, 0, 0, 1, 2, 2]), 3).tolist()
    [1, -1, 0]
    """
    classes = int(labels.max(initial=0)) + 1
    known = labels >= 0
    counts = np.bincount(of_image[known] * classes + labels[known], minlength=groups * classes)
    counts = counts.reshape(groups, classes)
    return np.where(counts.any(axis=1), counts.argmax(axis=1), -1)


def _draw_and_deal(
    labels: np.ndarray,
    clients: int,
    min_size: int | np.ndarray,
    generator: np.random.Generator,
    groups: np.ndarray | None,
    draw_table: Callable[[np.ndarray], np.ndarray],
    advice: str,
) -> list[np.ndarray]:
    """Draw tables until every client has its minimum, then shuffle and cut each class accordingly."""
    least = np.broadcast_to(np.asarray(min_size), clients)
    if least.sum() > len(labels):
        raise TacitError(
            f"{clients} clients need {least.sum()} images (min_size = {least.max()}), but there are only "
            f"{len(labels)} to deal. Write a smaller min_size or fewer clients."
        )
    units = _units(labels, groups)
    sizes_by_class = np.bincount(units.label + 1, weights=units.size, minlength=1).astype(np.int64)
    unknown, sizes = sizes_by_class[0], sizes_by_class[1:]
    present = np.flatnonzero(sizes)
    draws = most_draws(len(present) * clients)
    shortest = len(labels)  # by how much the worst client fell short, in the best draw
    for _ in range(draws):
        table = draw_table(sizes[present]) if len(present) else np.zeros((0, clients), np.int64)
        unknown_row = even_sizes(int(unknown), clients, first=int(sizes.sum()) % clients)
        shortage = (least - table.sum(axis=0) - unknown_row).max()
        if shortage <= 0:
            parts = _deal(units, present, np.vstack([table, unknown_row]), generator)
            shortage = (least - [len(part) for part in parts]).max()  # whole groups may shift the sizes
            if shortage <= 0:
                return parts
        shortest = min(shortest, shortage)
    possible = int(least.max()) - shortest
    fix = f"min_size = {possible}, {advice}" if possible > 0 else advice
    raise TacitError(
        f"In {draws} draws some client always got too few images (min_size = {least.max()}; at best it was "
        f"{shortest} short). Write {fix}."
    )


def _deal(units: _Units, present: np.ndarray, table: np.ndarray, generator: np.random.Generator) -> list[np.ndarray]:
    """Shuffle each class, lay its units in a row; the client whose stretch holds a unit's middle gets it."""
    owner = np.empty(len(units.label), np.int64)
    for label, row in zip([*present, -1], table, strict=True):
        members = generator.permutation(np.flatnonzero(units.label == label))
        size = units.size[members]
        middle = np.cumsum(size) - size / 2
        owner[members] = np.searchsorted(np.cumsum(row), middle, side="right")
    owner_of_image = owner[units.of_image]
    ends = np.cumsum(np.bincount(owner_of_image, minlength=table.shape[1]))
    return np.split(np.argsort(owner_of_image, kind="stable"), ends[:-1])
