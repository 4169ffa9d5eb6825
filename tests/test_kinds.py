"""What methods declare of what they send, and what is refused because it does not fit."""

import math

import pytest
import torch

from tacit.contract.kinds import Registration, parse
from tacit.contract.method import Reply, Task
from tacit.core.errors import TacitError
from tacit.core.payload import Value
from tacit.engine.validation import refusal_reason
from tacit.methods import find_method, known_methods

K = 3
MODEL = {"w": torch.ones(2, 2), "bn.running_var": torch.ones(2), "bn.num_batches_tracked": torch.tensor(7)}


def refused(kind: str, value: Value | None, examples: float = 1, **party: float | bool) -> str:
    """Why a reply with this value under the name x is refused; '' if it is not."""
    reply = Reply(send={} if value is None else {"x": value}, examples=examples)
    known: dict = {"most": 100, **party}
    return refusal_reason({"x": kind}, Task(0, {"x": MODEL}), reply, {}, K, Registration(**known))


GOOD: list[tuple[str, Value]] = [
    ("weights", MODEL),
    ("weights", {**MODEL, "bn.running_var": torch.full((2,), 1e9)}),
    ("[K]", torch.tensor([-1.0, 0.0, 1e9])),
    ("int64 [2]", torch.tensor([4, -5])),
    ("counts[K]", torch.tensor([50.0, 50.0, 0.0])),
    ("distribution[K]", torch.tensor([0.0, 0.5, 0.5])),
    ("distributions[K,K]", torch.tensor([[0.2, 0.3, 0.5], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])),
    ("number", -1e9),
    ("share", 0),
    ("share", 1.0 + 1e-8),
    ("count", 100),
    ("any", {"images": torch.zeros(3, dtype=torch.uint8)}),
]


@pytest.mark.parametrize(("kind", "value"), GOOD, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(GOOD)])
def test_what_fits_is_taken(kind: str, value: Value) -> None:
    assert refused(kind, value) == ""


BAD: list[tuple[str, Value | None, str]] = [
    ("weights", None, "'x' is missing"),
    ("weights", 3, "not a group of tensors"),
    ("weights", {**MODEL, "w": torch.ones(4)}, "has shape [4], expected [2, 2]"),
    ("weights", {**MODEL, "w": torch.ones(2, 2).double()}, "is torch.float64, expected torch.float32"),
    ("weights", {**MODEL, "w": torch.ones(2, 2).bool()}, "is torch.bool, expected torch.float32"),
    ("weights", {**MODEL, "w": torch.full((2, 2), 1e30)}, "holds 1e+30, more than 1e+06 at most"),
    ("weights", {**MODEL, "w": torch.full((2, 2), -1e30)}, "holds -1e+30, more than 1e+06 at most"),
    ("weights", {**MODEL, "w": torch.tensor([[1.0, math.inf], [-math.inf, 1.0]])}, "NaN or infinity"),
    ("weights", {**MODEL, "bn.running_var": torch.tensor([1.0, -1e-3])}, "never below 0"),
    ("weights", {**MODEL, "bn.num_batches_tracked": torch.tensor(-1)}, "never below 0"),
    ("weights", {**MODEL, "bn.num_batches_tracked": torch.tensor(2**62)}, "at most"),
    ("[K]", torch.zeros(K, dtype=torch.bool), "is torch.bool, expected torch.float32"),
    ("[K]", torch.zeros(K, dtype=torch.int64), "is torch.int64, expected torch.float32"),
    ("[K]", torch.full((K,), 3e38), "more than 9.0072e+15 at most"),
    ("counts[K]", torch.tensor([-1e6, 1e6, 1.0]), "never below 0"),
    ("counts[K]", torch.tensor([50.0, 50.0, 1.0]), "counts 101 images, at most 100"),
    ("distribution[K]", torch.zeros(K), "sums to 0, expected 1"),
    ("distribution[K]", torch.full((K,), -1.0), "never below 0"),
    ("distribution[K]", torch.full((K,), 3e38), "at most"),
    ("distribution[K]", torch.tensor([0.5, 0.5, 0.5]), "sums to 1.5, expected 1"),
    ("distributions[K,K]", torch.eye(K) * 2, "sums to 2, expected 1"),
    ("number", torch.zeros(1), "not a number"),
    ("number", math.nan, "not a number up to"),
    ("number", 1e300, "not a number up to"),
    ("share", 1.5, "expected a share from 0 to 1"),
    ("share", -0.1, "expected a share from 0 to 1"),
    ("count", 2.5, "expected a whole number from 0 to 100"),
    ("count", 101, "expected a whole number from 0 to 100"),
    ("any", {"a": torch.tensor([math.nan])}, "NaN or infinity"),
]


@pytest.mark.parametrize(("kind", "value", "why"), BAD, ids=[f"{kind}-{n}" for n, (kind, *_) in enumerate(BAD)])
def test_what_does_not_fit_is_refused_with_the_reason(kind: str, value: Value | None, why: str) -> None:
    assert why in refused(kind, value)


@pytest.mark.parametrize("examples", [1e300, 1.7e308, math.inf, math.nan, -1, 100.5])
def test_examples_are_bounded_by_what_the_party_holds(examples: float) -> None:
    assert "its number of examples is" in refused("share", 0.5, examples)
    assert refused("share", 0.5, 100) == ""


def test_who_holds_no_labels_sends_nothing_that_was_learned_from_them() -> None:
    kind = "weights if labeled"
    assert refused(kind, None, labeled=True) == "'x' is missing"
    assert refused(kind, MODEL, labeled=True) == refused(kind, None, labeled=False) == ""
    assert "not expected of a client without labeled images" in refused(kind, MODEL, labeled=False)
    assert refused("weights if unlabeled", None) == refused("weights if unlabeled", MODEL) == "", "not known: may"


@pytest.mark.parametrize("text", ["", "weight", "[K", "[k]", "[-1]", "share[K]", "counts", "int64 share", "[K] if so"])
def test_a_declaration_that_says_nothing_is_told_before_work(text: str) -> None:
    with pytest.raises(TacitError, match="A method declares"):
        parse(text)


@pytest.mark.parametrize("name", known_methods())
def test_every_declaration_can_be_read(name: str) -> None:
    method = find_method(name)
    for declared in (method.server_sends, method.client_sends, method.client_keeps):
        assert all(parse(kind) for kind in declared.values())
