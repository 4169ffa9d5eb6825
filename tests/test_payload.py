"""Payloads survive bytes, and nothing else is taken for one."""

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tacit.core import payload
from tacit.core.errors import TacitError

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool]
names = st.text("abcxyz._-0 é", min_size=1, max_size=8)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return values.to(draw(st.sampled_from(DTYPES)))


values = st.one_of(
    tensors(),
    st.dictionaries(names, tensors(), max_size=3),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
)


def same(a: payload.Value, b: payload.Value) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, values, max_size=4))
def test_what_comes_back_is_what_went_in(original: payload.Payload) -> None:
    back = payload.from_bytes(payload.to_bytes(original))
    assert list(back) == list(original)  # the order of names too
    assert all(same(original[name], back[name]) for name in original)


def test_tensors_that_share_memory_survive() -> None:
    flat = torch.arange(6.0)
    back = payload.from_bytes(payload.to_bytes({"model": {"a": flat[:2], "b": flat[2:], "c": flat}}))
    assert torch.equal(back["model"]["b"], flat[2:])  # type: ignore[index]


@pytest.mark.parametrize(
    "bad",
    [b"", b"hello", pickle.dumps({"model": 1}), payload.to_bytes({"t": torch.zeros(9)})[:-3]],
    ids=["empty", "text", "pickle", "cut off"],
)
def test_other_bytes_are_refused(bad: bytes) -> None:
    with pytest.raises(TacitError, match="not a payload"):
        payload.from_bytes(bad)


def test_plain_safetensors_are_not_a_payload() -> None:
    from safetensors.torch import save

    with pytest.raises(TacitError):
        payload.from_bytes(save({"t": torch.zeros(2)}))


@pytest.mark.parametrize("bad", [{"x": "text"}, {"x": None}, {"x": {"y": {"z": torch.zeros(1)}}}, {"a/b": 1}])
def test_what_is_no_payload_is_named(bad: dict) -> None:
    with pytest.raises(TypeError, match="payload"):
        payload.to_bytes(bad)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    payload.write(path, {"t": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(TacitError, match=r"state\.safetensors is damaged"):
        payload.read(path)


def test_differences_are_told() -> None:
    like = {"w": torch.zeros(2), "n": torch.tensor(1)}
    assert payload.difference({"w": torch.zeros(2), "n": torch.tensor(5)}, like) == ""
    assert "torch.float32, expected torch.int64" in payload.difference(
        {"w": torch.zeros(2), "n": torch.tensor(1.0)}, like
    )
    assert "not expected" in payload.difference({**like, "x": torch.zeros(1)}, like)


def test_infinity_is_found_in_numbers_and_tensors() -> None:
    assert payload.first_not_finite({"a": 1.0, "b": float("inf")}) == "b"
    assert payload.first_not_finite({"m": {"w": torch.tensor([float("nan")])}}) == "m/w"
    assert payload.first_not_finite({"m": {"steps": torch.tensor(3)}, "n": 2}) == ""
    assert payload.first_not_finite({"m": {"w": torch.tensor([1.0, float("inf"), -float("inf")])}}) == "m/w"
    assert payload.first_not_finite({"huge": torch.full((4,), 3e38)}) == ""  # its sum overflows, it does not
