"""Secure aggregation between sites that do not see each other: SecAgg (Bonawitz et al., CCS 2017), with the circles of
SecAgg+ (Bell et al., CCS 2020). No network here: what each party computes, and what it hands over.

Each pair of sites agrees on a secret, from which one adds and the other subtracts the same mask; each adds one more
mask of its own. The sum of all masked vectors still holds the own masks, and where a site is gone, its halves of the
pairs' masks. Secrets for removing these were given in shares to the sites of its circle, sealed, before: of a site that
is in the sum they hand out the shares of its own mask, of one that is gone those of its pairs' masks, and never both.

Keys, seeds and nonces come from the operating system's generator and are new in each round. They cancel, so they have
no name (as randomness has elsewhere), and change no result.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tacit.contract.fixed_point import Ring
from tacit.core.errors import TacitError

SECRET = 32  # bytes of a key or a seed
NONCE = 12
MISSING = "Secure aggregation at real sites needs Flower and what comes with it: pip install 'tacit[flower]'"


@dataclass(frozen=True)
class Keys:
    """A site's public keys of a round: one for the masks of pairs, one for sealing shares."""

    mask: bytes
    seal: bytes


@dataclass(frozen=True)
class Shares:
    """What a site hands out to open a sum: shares of the seeds of those in it, of the keys of those who are gone."""

    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]


def circle_of(ring: Sequence[int], who: int, neighbours: int) -> list[int]:
    """The sites that share secrets with this one, itself included: half of its neighbours on each side of the ring.

    >>> circle_of([5, 1, 4, 2, 3], 5, 2), circle_of([5, 1, 4, 2, 3], 5, 0)
    ([1, 3, 5], [1, 2, 3, 4, 5])
    """
    if not neighbours or neighbours + 1 >= len(ring):
        return sorted(ring)
    place, half = list(ring).index(who), neighbours // 2
    return sorted(ring[(place + step) % len(ring)] for step in range(-half, half + 1))


class Participant:
    """One site in one round. Its steps come in this order, each once: `keys`, `share`, `take`, `mask`, `open`."""

    def __init__(self, me: int, context: bytes) -> None:
        x25519 = _x25519()
        self.me, self.context = (
            me,
            context,
        )  # the run and the round: nothing that was sealed for one is of use in another
        self._mask_key, self._seal_key = x25519.generate(), x25519.generate()
        self._seed = os.urandom(SECRET)
        self._circle: dict[int, Keys] = {}
        self._threshold = 0
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # by whose they are: of its seed, of its mask key
        self._masked = self._opened = False

    @property
    def keys(self) -> Keys:
        return Keys(_public(self._mask_key), _public(self._seal_key))

    def share(self, circle: Mapping[int, Keys], threshold: int) -> dict[int, bytes]:
        """For each other site of the circle, its shares of this one's secrets, sealed so that only it can read them."""
        public = [key for keys in circle.values() for key in (keys.mask, keys.seal)]
        if self._circle or circle.get(self.me) != self.keys or len(set(public)) < len(public):
            raise TacitError("the keys of a sum are not one pair for each site, this one's among them")
        if not 2 <= threshold <= len(circle) < 2 * threshold:
            raise TacitError(f"{threshold} of {len(circle)} sites cannot be the ones that open a sum")
        self._circle, self._threshold = dict(circle), threshold
        ids = sorted(circle)
        seeds = split_secret(self._seed, threshold, len(ids))
        keys = split_secret(_private(self._mask_key), threshold, len(ids))
        each = dict(zip(ids, zip(seeds, keys, strict=True), strict=True))
        self._shares = {self.me: each.pop(self.me)}
        return {other: self._seal(other, seed, key) for other, (seed, key) in each.items()}

    def take(self, sealed: Mapping[int, bytes]) -> None:
        """The shares of the others' secrets. Who is among them has begun this sum, and its masks are counted on."""
        for other, content in sealed.items():
            if other not in self._circle or other == self.me:
                raise TacitError("sealed shares of a site that is not in the circle")
            self._shares[other] = self._unseal(other, content)
        if len(self._shares) < self._threshold:
            raise TacitError(f"{len(self._shares)} sites are left in the circle, {self._threshold} are needed")

    def mask(self, vector: Ring) -> Ring:
        """The vector under this site's own mask and those that it has in common with others."""
        if self._masked or len(self._shares) < max(self._threshold, 2):
            raise TacitError("a vector is masked once in a round, after the shares were exchanged")
        self._masked = True
        total = vector + stream(self._seed, vector)
        for other in sorted(self._shares.keys() - {self.me}):
            secret = agree(_private(self._mask_key), self._circle[other].mask, b"mask", self.context)
            total = add_pair(total, self.me, other, secret)
        return total

    def open(self, alive: Collection[int], gone: Collection[int]) -> Shares:
        """Shares that open the sum of those alive: of each site one secret or the other, and once in a round."""
        known = self._shares.keys()
        if self._opened or not self._masked or set(alive) & set(gone) or not {*alive, *gone} <= known:
            raise TacitError("shares are handed out once in a round, of each site for one of its secrets")
        if len(set(alive)) < self._threshold or self.me not in alive:
            raise TacitError(f"a sum over {len(set(alive))} sites, {self._threshold} are needed, this one among them")
        self._opened = True
        return Shares({who: self._shares[who][0] for who in alive}, {who: self._shares[who][1] for who in gone})

    def _seal(self, other: int, seed: bytes, key: bytes) -> bytes:
        nonce = os.urandom(NONCE)
        content = len(seed).to_bytes(2, "little") + seed + key
        return nonce + self._cipher(other).encrypt(nonce, content, _route(self.context, self.me, other))

    def _unseal(self, other: int, sealed: bytes) -> tuple[bytes, bytes]:
        from cryptography.exceptions import InvalidTag

        try:
            nonce, content = sealed[:NONCE], sealed[NONCE:]
            plain = self._cipher(other).decrypt(nonce, content, _route(self.context, other, self.me))
        except (InvalidTag, ValueError):
            raise TacitError("sealed shares that are not for this site and this round") from None
        length = int.from_bytes(plain[:2], "little")
        return plain[2 : 2 + length], plain[2 + length :]

    def _cipher(self, other: int) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(agree(_private(self._seal_key), self._circle[other].seal, b"seal", self.context))


def _route(context: bytes, sender: int, receiver: int) -> bytes:
    return context + b"|%d>%d" % (sender, receiver)


@dataclass(frozen=True)
class Assembly:
    """What the server knows of a sum, and how it opens it."""

    context: bytes
    threshold: int
    keys: Mapping[int, Keys]  # of all sites that were asked for shares
    circles: Mapping[int, Sequence[int]]
    shared: Collection[int] = field(default=())  # whose sealed shares were passed on: they may have masked

    def gone(self, alive: Collection[int]) -> list[int]:
        return sorted(set(self.shared) - set(alive))

    def open(self, total: Ring, alive: Collection[int], answers: Mapping[int, Shares]) -> Ring:
        """The sum of the vectors of those alive, from the sum of their masked ones and what sites handed out."""
        for who in sorted(alive):
            total = total - stream(self._secret(who, [shares.seeds for shares in answers.values()]), total)
        for who in self.gone(alive):
            near = [other for other in self.circles[who] if other in alive]
            if not near:  # it had masks in common with nobody who is left
                continue
            key = self._secret(who, [shares.keys for shares in answers.values()])
            for other in near:  # what `other` added for the pair is taken away again, from its side
                secret = agree(key, self.keys[other].mask, b"mask", self.context)
                total = add_pair(total, who, other, secret)
        return total

    def _secret(self, who: int, handed: Sequence[Mapping[int, bytes]]) -> bytes:
        found = [shares[who] for shares in handed if who in shares]
        if len(found) < self.threshold:
            raise TacitError(f"{len(found)} shares of a secret were handed out, {self.threshold} are needed")
        return join_secret(found[: self.threshold])


# --- What it is made of --------------------------------------------------------------------------------------------


def add_pair(vector: Ring, me: int, other: int, secret: bytes) -> Ring:
    """A vector with the mask of a pair: the lower number adds it, the higher one subtracts it.

    >>> one, two = np.arange(3, dtype=np.uint32), np.arange(3, dtype=np.uint32)
    >>> (add_pair(one, 1, 2, b"s" * 32) + add_pair(two, 2, 1, b"s" * 32)).tolist()
    [0, 2, 4]
    """
    mask = stream(secret, vector)
    return vector + mask if me < other else vector - mask


def stream(secret: bytes, like: Ring) -> Ring:
    """As many random numbers as a vector has, from a secret of 32 bytes: AES-256 in counter mode.

    >>> like = np.zeros(3, np.uint32)
    >>> bool((stream(b"s" * 32, like) == stream(b"s" * 32, like)).all()), stream(b"s" * 32, like).dtype
    (True, dtype('uint32'))
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES(secret), modes.CTR(bytes(16))).encryptor()  # each secret is used for one stream
    return np.frombuffer(cipher.update(bytes(like.nbytes)), dtype=like.dtype)


def agree(private: bytes, public: bytes, purpose: bytes, context: bytes) -> bytes:
    """The secret of two sites, the same for both: X25519, then HKDF with SHA-256."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise TacitError("a key that is none") from None
    return HKDF(hashes.SHA256(), SECRET, None, b"tacit " + purpose + b" " + context).derive(shared)


def split_secret(secret: bytes, threshold: int, count: int) -> list[bytes]:
    """Shamir's shares of a secret, by Flower: any `threshold` of them give it back, fewer tell nothing.

    >>> shares = split_secret(b"s" * 32, 2, 3)
    >>> join_secret([shares[2], shares[0]]) == b"s" * 32
    True
    """
    try:
        from flwr.common.secure_aggregation.crypto.shamir import create_shares
    except ImportError:
        raise TacitError(MISSING) from None
    return create_shares(secret, threshold, count)


def join_secret(shares: Sequence[bytes]) -> bytes:
    """The secret of so many shares."""
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    try:
        secret = combine_shares(list(shares))
    except (ValueError, IndexError, TypeError):
        raise TacitError("shares that do not fit together") from None
    if len(secret) != SECRET:
        raise TacitError("shares that do not fit together")
    return secret


def _x25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    except ImportError:
        raise TacitError(MISSING) from None
    return X25519PrivateKey


def _public(key: Any) -> bytes:
    raw: bytes = key.public_key().public_bytes_raw()
    return raw


def _private(key: Any) -> bytes:
    raw: bytes = key.private_bytes_raw()
    return raw
