"""Near-duplicates: one picture that was scaled, packed again or brightened. A perceptual hash finds candidates, a
comparison of small grey pictures decides.

The hash alone would join what only looks alike (dark spots on skin, shoes on black): of ISIC 2018's 8,009 training
photographs it calls 1,081 pairs alike, 957 of them of different lesions. After the comparison 47 photographs are joined
to another, 46 of them rightly (`python -m benchmarks.groups --looks`).
"""

from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

SMALLEST = 64  # pixels of the shorter side: smaller pictures have too little detail to be told apart by a look
SIDE = 32  # of the small grey picture that is compared
FLATTEST = 8.0  # grey levels (standard deviation) that a picture must have: blank ones are all alike
MOST_BITS = 6  # of the 63 may differ
FARTHEST = 0.1  # distance of two small pictures of mean 0 and length 1; the correlation is then above 0.995
BANDS, BAND_BITS = 7, 9  # at most six bits differ, so one of seven bands is equal
MOST_NEIGHBOURS = 1000  # compared with each picture in a band, so that very uniform sets end, too


def glance(image: Image.Image) -> bytes:
    """The picture in 32×32 grey levels; nothing where it is too small or too plain to be recognised by a look.

    >>> len(glance(Image.linear_gradient("L"))), glance(Image.new("L", (100, 100))), glance(Image.new("L", (63, 100)))
    (1024, b'', b'')
    """
    if min(image.size) < SMALLEST:
        return b""
    small = np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR, reducing_gap=3.0))
    return small.tobytes() if small.std() >= FLATTEST else b""


def near_duplicates(glances: Sequence[bytes]) -> np.ndarray:
    """int64 [N]: equal numbers for pictures that are near-duplicates; without a glance a picture stands alone.

    >>> coast, slope = Image.effect_mandelbrot((256, 256), (-1.5, -1, 0, 0.3), 99), Image.linear_gradient("L")
    >>> near_duplicates([glance(one) for one in (coast, slope, coast.resize((130, 140)))]).tolist()
    [0, 1, 0]
    """
    joined = np.arange(len(glances))
    places = np.array([place for place, one in enumerate(glances) if one], np.int64)
    if len(places) < 2:
        return joined
    small = np.frombuffer(b"".join(one for one in glances if one), np.uint8).reshape(len(places), -1)
    parent = np.arange(len(places))
    for pairs in close_pairs(hashes(small)):
        apart = pairs[parent[pairs[:, 0]] != parent[pairs[:, 1]]]  # what is joined already need not be compared
        if len(apart):
            _join(parent, apart[_distance(small, apart) <= FARTHEST])
    joined[places] = places[parent]
    return joined


def _join(parent: np.ndarray, pairs: np.ndarray) -> None:
    """Let each pair have one parent, the smaller one; every place ends up with the parent that has none above it."""
    for pair in pairs:
        low, high = sorted(_top(parent, place) for place in pair)
        parent[high] = low
    while len(pairs) and not np.array_equal(parent, parent[parent]):
        parent[:] = parent[parent]


def _top(parent: np.ndarray, place: int) -> int:
    while parent[place] != place:
        place = parent[place]
    return int(place)


def hashes(small: np.ndarray) -> np.ndarray:
    """uint64 [N]: the pHash of small grey pictures [N, 32·32]. 63 bits: which of the lowest frequencies of the cosine
    transform (8×8, without the mean) are above their median."""
    steps = np.arange(SIDE, dtype=np.float32) * 2 + 1
    waves = np.cos(np.pi * np.arange(8, dtype=np.float32)[:, None] * steps / (2 * SIDE))
    both = np.einsum("ui,vj->uvij", waves, waves).reshape(64, -1)[1:]
    result = np.empty(len(small), np.uint64)
    for start in range(0, len(small), 4096):
        strength = small[start : start + 4096].astype(np.float32) @ both.T
        bits = strength > np.median(strength, axis=1, keepdims=True)
        result[start : start + 4096] = bits @ (np.uint64(1) << np.arange(63, dtype=np.uint64))
    return result


def close_pairs(codes: np.ndarray) -> Iterator[np.ndarray]:
    """int64 [P, 2], many times: places of codes of 63 bits that differ in at most six. A pair may come again.

    Such codes agree in one of seven bands. In the order that has this band first, each code is compared with those
    that follow it for as long as their bands are equal: work for what is alike, not for all pairs.

    >>> pairs = np.concatenate(list(close_pairs(np.array([0b1111111, 0, 0b111111, 2**62], np.uint64))))
    >>> sorted({tuple(sorted(pair)) for pair in pairs.tolist()})
    [(0, 2), (1, 2), (1, 3)]
    """
    for band in range(BANDS):
        low, high = np.uint64(band * BAND_BITS), np.uint64(63 - band * BAND_BITS)
        turned = ((codes >> low) | (codes << high)) & np.uint64(2**63 - 1)  # the band is now in the lowest bits
        own = turned & np.uint64(2**BAND_BITS - 1)
        order = np.lexsort((turned, own))
        own, ordered = own[order], codes[order]
        places = np.arange(len(codes) - 1)
        for step in range(1, min(MOST_NEIGHBOURS, len(codes) - 1) + 1):
            places = places[: np.searchsorted(places, len(codes) - step)]
            places = places[own[places] == own[places + step]]
            if not len(places):
                break
            near = places[np.bitwise_count(ordered[places] ^ ordered[places + step]) <= MOST_BITS]
            yield np.stack([order[near], order[near + step]], axis=1)


def _distance(small: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """How far the pictures of each pair are apart, whatever their brightness and contrast."""
    sides = []
    for column in (0, 1):
        plain = small[pairs[:, column]].astype(np.float32)
        plain -= plain.mean(axis=1, keepdims=True)
        sides.append(plain / np.linalg.norm(plain, axis=1, keepdims=True))
    return np.asarray(np.linalg.norm(sides[0] - sides[1], axis=1))
