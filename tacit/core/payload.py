"""The only thing that travels or is kept: named tensors, groups of named tensors, and numbers.

A payload is a plain dict. As bytes it is one safetensors file: nothing in it can be executed, and what
comes back is equal to what went in, type for type and bit for bit.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as decode
from safetensors.torch import save as encode
from safetensors.torch import save_file
from torch import Tensor

from tacit.core.errors import TacitError
from tacit.core.files import atomic_path, file_errors, read_bytes
from tacit.core.files import write_atomically as write_atomically
from tacit.core.text import safe

Weights = dict[str, Tensor]


class Copied(Weights):
    """Weights that were copied, contiguous, for whoever holds them now (`me.weights(model)` makes them).

    Nobody else has these tensors, so that they can be handed over without a second copy.

    What is made of it by `dict(...)` or a comprehension is an ordinary dict again.
    """


def save(flat: Weights, path: Path, header: dict[str, str] | None = None) -> None:
    """One safetensors file; where it cannot be written, who reads the error can do something about it."""
    try:
        save_file(flat, path, metadata=header)
    except SafetensorError as error:
        raise TacitError(
            f"{path} cannot be written: {error}. Make room on that disk, or move the run's folder to another one; "
            "finished rounds are saved: go on with --resume."
        ) from error


def _lying_flat(tensor: Tensor) -> Tensor:
    """As its numbers are written to a file: on the CPU, without gaps, no lazy minus sign."""
    return tensor.detach().cpu().resolve_neg().contiguous()


class OnDisk(Mapping[str, Tensor]):
    """A group of tensors that lies in a file; each is read when it is asked for, and held by nobody."""

    def __init__(self, path: Path, group: Mapping[str, Tensor]) -> None:
        self.path = path
        self.names = list(group)
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in group.values())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # a new file: whoever has mapped an old one keeps what it had
        save(unshared({name: _lying_flat(tensor) for name, tensor in group.items()}), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def read(self) -> Weights:
        """The whole group: mapped, so that it is read from the file where it is looked at, and outlives the file."""
        with safe_open(self.path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in self.names}


Value = Tensor | Weights | OnDisk | int | float
Payload = dict[str, Value]

FORMAT = "tacit-payload-1"
# What a safetensors header may call a tensor's type. Anything else (8-bit floats, complex numbers …) is refused.
DTYPES = frozenset(["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"])
TENSORS = frozenset(  # the same as torch calls them
    getattr(torch, name)
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
)
LARGEST = 2**63  # of whole numbers


@dataclass(frozen=True)
class Limits:
    """How much of a payload from elsewhere is looked at; more is refused before anything is made of it."""

    total: int = 1 << 34  # bytes in all
    header: int = 1 << 20  # bytes of names, shapes and numbers: some eight thousand tensors
    tensors: int = 1 << 16
    axes: int = 8  # of one tensor


NO_STRANGER = Limits(header=1 << 24)  # for files that this process or its own kind wrote


def tensors(payload: Mapping[str, Value]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its full name.

    >>> [name for name, _ in tensors({"model": {"w": torch.zeros(2)}, "share": torch.ones(3), "n": 4})]
    ['model/w', 'share']
    """
    for name, value in payload.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, Mapping):
            for inner, tensor in value.items():
                yield f"{name}/{inner}", tensor


def weights_in(payload: Mapping[str, Value], name: str, missing: Weights | None = None) -> Weights:
    """The group of tensors with this name, for a caller that needs a group and nothing else; or what stands for it.

    >>> weights_in({"model": {"w": torch.zeros(1)}}, "model")
    {'w': tensor([0.])}
    >>> weights_in({}, "momentum", missing={})
    {}
    """
    if missing is not None and name not in payload:
        return missing
    value = payload[name]
    if isinstance(value, OnDisk):
        return value.read()
    if not isinstance(value, dict):
        raise TypeError(f"payload entry {name!r} is not a group of tensors but {type(value).__name__}")
    return value


# What was written before, by identity; the group is held, so that no other can take its place in memory.
Written = dict[int, tuple[Weights, OnDisk]]


def set_aside(payload: Mapping[str, Value], path: Path, written: Written | None = None) -> Payload:
    """The same payload with its groups of tensors in files beside this path; what is small stays in memory.

    `written` remembers, so that no group is written twice.
    """
    known: Written = {} if written is None else written
    aside: Payload = {}
    for name, value in payload.items():
        if isinstance(value, dict):
            if id(value) not in known:
                known[id(value)] = value, OnDisk(path.with_name(f"{path.stem}-{name}{path.suffix}"), value)
            aside[name] = known[id(value)][1]
        else:
            aside[name] = value
    return aside


def at_hand(payload: Mapping[str, Value]) -> Payload:
    """The same payload without `OnDisk`: groups of tensors in files are mapped, not read, until they are looked at."""
    return {name: value.read() if isinstance(value, OnDisk) else value for name, value in payload.items()}


@dataclass(frozen=True)
class Parcel:
    """A payload on its way to another process of this machine: its groups of tensors lie in files.

    Through a pipe a model would be copied again and again; a file is written once and mapped by all who read it.
    """

    names: tuple[str, ...]
    small: bytes
    groups: dict[str, OnDisk]

    def open(self) -> Payload:
        """The payload; its groups are still in their files."""
        values: Payload = {**from_bytes(self.small), **self.groups}
        return {name: values[name] for name in self.names}


def pack(payload: Mapping[str, Value], path: Path, written: Written | None = None) -> Parcel:
    """A parcel whose files lie beside this path. They must stay until it was opened; its tensors outlive them."""
    check(payload)
    aside = set_aside(payload, path, written)
    groups = {name: value for name, value in aside.items() if isinstance(value, OnDisk)}
    small = to_bytes({name: value for name, value in aside.items() if name not in groups})
    return Parcel(tuple(payload), small, groups)


def tensor_in(payload: Mapping[str, Value], name: str) -> Tensor:
    """The tensor with this name, for a caller that needs a tensor and nothing else."""
    value = payload[name]
    if not isinstance(value, Tensor):
        raise TypeError(f"payload entry {name!r} is not a tensor but {type(value).__name__}")
    return value


def number_in(payload: Mapping[str, Value], name: str) -> float:
    """The number with this name, for a caller that needs a number and nothing else.

    >>> number_in({"status": 0.5}, "status")
    0.5
    """
    value = payload[name]
    if not isinstance(value, int | float):
        raise TypeError(f"payload entry {name!r} is not a number but {type(value).__name__}")
    return value


def check(payload: Mapping[str, Value]) -> None:
    """Refuse anything that is not a payload, by name.

    >>> check({"model": {"w": [1, 2]}})
    Traceback (most recent call last):
    TypeError: payload entry 'model/w' is a list; a payload holds tensors, groups of tensors and numbers
    """
    if not isinstance(payload, Mapping):
        raise TypeError(f"a {type(payload).__name__} is no payload, which is a dict of tensors, groups and numbers")
    for name, value in payload.items():
        if not _is_name(name) or "/" in name:
            raise TypeError(f"payload name {safe(repr(name))} must be a word without '/'")
        if not isinstance(value, Mapping):
            _check_entry(name, value, number=True)
            continue
        for inner, entry in value.items():
            if not _is_name(inner):
                raise TypeError(f"payload name {safe(repr(inner))} in '{safe(name)}' must be a word")
            _check_entry(f"{name}/{inner}", entry, number=False)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and name not in ("", "__metadata__")


def _check_entry(name: str, entry: object, number: bool) -> None:
    if isinstance(entry, Tensor):
        if kind := _odd(entry):
            raise TypeError(f"payload entry {safe(name)!r} is a {kind} tensor, which no payload holds")
    elif not (number and isinstance(entry, int | float)):
        kind = type(entry).__name__
        raise TypeError(
            f"payload entry {safe(name)!r} is a {kind}; a payload holds tensors, groups of tensors and numbers"
        )
    elif isinstance(entry, int) and not -LARGEST <= entry < LARGEST:
        raise TypeError(f"payload entry {safe(name)!r} is a whole number of more than 64 bits")


def _odd(tensor: Tensor) -> str:
    """What keeps a tensor from travelling; '' if it may."""
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested or tensor.is_meta:
        return "nested" if tensor.is_nested else "meta"
    return "" if tensor.dtype in TENSORS else str(tensor.dtype).removeprefix("torch.")


def seal(payload: Mapping[str, Value]) -> Payload:
    """A payload as it comes out at the other side of a wall within one process: equal, and with nothing in common.

    Bytes that are written and read do the same; this is cheaper. What is no payload is refused.

    >>> mine = torch.zeros(2)
    >>> theirs = seal({"w": mine, "n": 3})
    >>> mine += 1
    >>> theirs
    {'w': tensor([0., 0.]), 'n': 3}
    """
    check(payload)
    return {name: _own(value) for name, value in payload.items()}


def hand_over(payload: Mapping[str, Value]) -> Payload:
    """`seal`, where the giver is done with its payload: weights that were copied to be given away are not copied again.

    >>> copied, shared = Copied(w=torch.zeros(2)), {"w": torch.zeros(2)}
    >>> given = hand_over({"a": copied, "again": copied, "b": shared})
    >>> given["a"]["w"] is copied["w"], given["again"]["w"] is copied["w"], given["b"]["w"] is shared["w"]
    (True, False, False)
    """
    check(payload)
    given, taken = Payload(), set[int]()
    for name, value in payload.items():
        if isinstance(value, Copied) and id(value) not in taken:
            given[name] = dict(value)
            taken.add(id(value))
        else:
            given[name] = _own(value)
    return given


def _own(value: Value) -> Value:
    if isinstance(value, Mapping):
        return {inner: _own_tensor(tensor) for inner, tensor in value.items()}
    if isinstance(value, Tensor):
        return _own_tensor(value)
    return int(value) if isinstance(value, int) else float(value)


def _own_tensor(tensor: Tensor) -> Tensor:
    """A copy by itself and without gaps: the order of a sum, and so its last bit, depends on the strides."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def nbytes(payload: Mapping[str, Value]) -> int:
    """Size of the content: tensors at their width, numbers at eight bytes.

    >>> nbytes({"model": {"w": torch.zeros(2, 3)}, "n": 4})
    32
    """
    numbers = sum(isinstance(value, int | float) for value in payload.values())
    aside = sum(value.nbytes for value in payload.values() if isinstance(value, OnDisk))
    here = {name: value for name, value in payload.items() if not isinstance(value, OnDisk)}
    return sum(t.numel() * t.element_size() for _, t in tensors(here)) + aside + 8 * numbers


def to_bytes(payload: Mapping[str, Value]) -> bytes:
    """One safetensors file; the order of names and the numbers travel in its header.

    >>> from_bytes(to_bytes({"n": 3, "x": 0.5, "t": torch.tensor([7], dtype=torch.int64)}))
    {'n': 3, 'x': 0.5, 't': tensor([7])}
    """
    return encode(*_parts(payload))


def _parts(payload: Mapping[str, Value]) -> tuple[Weights, dict[str, str]]:
    """What the file holds: tensors by their full names, and everything else for its header."""
    check(payload)
    order: list[object] = []
    for name, value in payload.items():
        if isinstance(value, Tensor):
            order.append([name, "tensor"])
        elif isinstance(value, Mapping):
            order.append([name, "group", list(value)])
        else:  # floats as hex: JSON has no infinity, and not every writer keeps the last bit
            order.append([name, "int", int(value)] if isinstance(value, int) else [name, "float", value.hex()])
    flat = {name: _lying_flat(tensor) for name, tensor in tensors(payload)}
    return unshared(flat), {"format": FORMAT, "order": json.dumps(order)}


def unshared(flat: Weights) -> Weights:
    """Copies of tensors that lie in one storage with another (a safetensors file holds each on its own)."""
    seen: set[int] = set()
    result = {}
    for name, tensor in flat.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def from_bytes(data: bytes, limits: Limits = NO_STRANGER) -> Payload:
    """The payload that `to_bytes` wrote. Anything else is refused, and nothing in it is ever executed.

    Sizes, types and nesting are looked at before a tensor is made, so that bytes from a stranger cost no more memory
    than they have themselves.
    """
    try:
        order = _order(data, limits)
        flat = decode(data)
        payload: Payload = {}
        for name, kind, *rest in order:
            if name in payload:
                raise ValueError(f"'{name}' is there twice")
            if kind == "tensor":
                payload[name] = flat.pop(name)
            elif kind == "group":
                payload[name] = {inner: flat.pop(f"{name}/{inner}") for inner in rest[0]}
            elif kind == "int" and type(rest[0]) is int:
                payload[name] = rest[0]
            elif kind == "float":
                payload[name] = float.fromhex(rest[0])
            else:
                raise ValueError(f"'{name}' is of no known kind")
        if flat:
            raise ValueError(f"'{next(iter(flat))}' belongs to nothing")
        check(payload)
    except (SafetensorError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError) as error:
        # RuntimeError: torch's on impossible shapes, and Python's own RecursionError on deep nesting.
        raise TacitError(f"These bytes are not a payload of tacit ({safe(error, 300)}). They were not used.") from error
    return payload


def _order(data: bytes, limits: Limits) -> list[list[Any]]:
    """The names of a payload in their order, from a header that keeps within the limits."""
    if len(data) > limits.total:
        raise ValueError(f"{len(data)} bytes, at most {limits.total} are allowed")
    length = int.from_bytes(data[:8], "little")
    if not 2 <= length <= min(len(data) - 8, limits.header):
        raise ValueError(f"a header of {length} bytes, at most {min(max(len(data) - 8, 0), limits.header)} are allowed")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__") if isinstance(header, dict) else {}
    if metadata["format"] != FORMAT:
        raise ValueError(f"format is {metadata['format']!r}, expected {FORMAT!r}")
    if len(header) > limits.tensors:
        raise ValueError(f"{len(header)} tensors, at most {limits.tensors} are allowed")
    for name, about in header.items():
        if about["dtype"] not in DTYPES:
            raise ValueError(f"'{name}' is of type {about['dtype']!r}, which no payload has")
        if len(about["shape"]) > limits.axes:
            raise ValueError(f"'{name}' has {len(about['shape'])} axes, at most {limits.axes} are allowed")
    order: list[list[Any]] = json.loads(metadata["order"])
    return order


def write(path: Path, payload: Mapping[str, Value]) -> str:
    """Write beside and rename: a reader sees the old file or the new one, never half of one.

    Returns the digest of its content, which the file carries in its header: `read` notices any damage.
    """
    flat, header = _parts(payload)
    header["digest"] = _digest(flat, header["order"])
    with atomic_path(path) as new:
        save(flat, new, header)
    return header["digest"]


def read(path: Path) -> Payload:
    """The payload in a file; an unreadable or damaged file is named."""
    return read_with_digest(path)[0]


def read_with_digest(path: Path) -> tuple[Payload, str]:
    """The payload in a file and the digest of its content, which must be the one in its header."""
    data = read_bytes(path)
    try:
        content = from_bytes(data)
        found = content_digest(content)
        if _stored_digest(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])) not in (found, ""):
            raise TacitError("its content is not what was written")
    except TacitError as error:
        raise TacitError(f"{path} is damaged or is not tacit's: {error}") from error
    return content, found


def digest_in(path: Path) -> str:
    """The digest that a file says it has, from its header alone."""
    try:
        with file_errors(path, "read"), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return _stored_digest(json.loads(file.read(min(length, NO_STRANGER.header))))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise TacitError(f"{path} is damaged or is not tacit's: {error}") from error


def content_digest(payload: Mapping[str, Value]) -> str:
    """The digest that a file with this payload has."""
    flat, header = _parts(payload)
    return _digest(flat, header["order"])


def _stored_digest(header: dict[str, Any]) -> str:
    """What the header says; '' in a file of an older version, which has nothing in its place."""
    metadata = header["__metadata__"]
    if set(metadata) == {"format", "order"}:
        return ""
    stored: str = metadata["digest"] if set(metadata) == {"format", "order", "digest"} else "damaged"
    return stored


def _digest(flat: Weights, order: str) -> str:
    """SHA-256 of all that a payload says: its order and numbers, and each tensor's name, type, shape and content."""
    found = hashlib.sha256(order.encode())
    for name in sorted(flat):
        tensor = flat[name]
        found.update(f"\0{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def difference(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """The first way in which one group's names, shapes or types differ from another's; '' if in none.

    >>> difference({"w": torch.zeros(2)}, {"w": torch.zeros(3)})
    'w has shape [2], expected [3]'
    >>> difference({}, {"w": torch.zeros(3)})
    'w is missing'
    """
    for name, like in expected.items():
        if name not in got:
            return f"{name} is missing"
        tensor = got[name]
        if tensor.shape != like.shape:
            return f"{name} has shape {list(tensor.shape)}, expected {list(like.shape)}"
        if tensor.dtype != like.dtype:
            return f"{name} is {tensor.dtype}, expected {like.dtype}"
    extra = next((name for name in got if name not in expected), "")
    return f"{safe(extra)} was not expected" if extra else ""


def first_not_finite(payload: Mapping[str, Value]) -> str:
    """The name of the first entry with NaN or infinity, '' if there is none.

    >>> first_not_finite({"model": {"w": torch.tensor([1.0, float("nan")])}})
    'model/w'
    """
    for name, tensor in tensors(payload):
        # NaN and infinity survive a sum, and a sum is ten times as fast as looking at each number.
        suspicious = tensor.is_floating_point() and not bool(torch.isfinite(tensor.sum()))
        if suspicious and not bool(torch.isfinite(tensor).all()):
            return name
    for name, value in payload.items():
        if isinstance(value, float) and not torch.isfinite(torch.tensor(value)):
            return name
    return ""
