"""Debiased aggregation: Algorithm 2 step by step, the released code's rule, and the exact minimiser with its proof."""

from collections.abc import Callable
from itertools import chain, combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tacit.methods.feddb import (
    away_from_uniform,
    balancing_weights,
    exact_weights,
    imbalance,
    paper_weights,
    released_weights,
    to_simplex,
    uniform_weights,
)

RULES: tuple[Callable[[Tensor], Tensor], ...] = (paper_weights, released_weights, exact_weights, uniform_weights)


def dirichlet(clients: int, classes: int, alpha: float, seed: int) -> Tensor:
    """APP-Us [M, K] of very different clients."""
    shape = torch.full((clients, classes), alpha, dtype=torch.float64)
    drawn = torch._standard_gamma(shape, generator=torch.Generator().manual_seed(seed)) + 1e-12
    return drawn / drawn.sum(dim=1, keepdim=True)


def objective(app_u: Tensor, weights: Tensor, pull: float) -> float:
    return 0.5 * imbalance(app_u, weights) ** 2 + 0.5 * pull * float((weights - 1 / len(app_u)).square().sum())


def brute_force(app_u: Tensor, pull: float) -> float:
    """The least objective, by trying every set of clients that may have a weight at all.

    The minimiser on the simplex minimises over the plane of its own clients, too (and some minimiser lies where
    those planes' minimisers are unique). So: for each set, solve the linear equations of the plane, and keep what is
    not negative.
    """
    points, clients = away_from_uniform(app_u), len(app_u)
    quadratic = points @ points.T + pull * torch.eye(clients, dtype=torch.float64)
    linear = torch.full((clients,), pull / clients, dtype=torch.float64)
    best = float("inf")
    for chosen in chain.from_iterable(combinations(range(clients), size) for size in range(1, clients + 1)):
        some, size = list(chosen), len(chosen)
        equations = torch.ones(size + 1, size + 1, dtype=torch.float64)
        equations[:size, :size] = quadratic[some][:, some]
        equations[size, size] = 0
        right = torch.cat([linear[some], torch.ones(1, dtype=torch.float64)])
        solution = torch.linalg.lstsq(equations, right, driver="gelsd").solution[:size]
        if (solution >= -1e-12).all() and abs(float(solution.sum()) - 1) < 1e-9:
            weights = torch.zeros(clients, dtype=torch.float64)
            weights[some] = solution.clamp(min=0)
            best = min(best, objective(app_u, weights / weights.sum(), pull))
    return best


def on_the_simplex(weights: Tensor) -> bool:
    return bool((weights >= 0).all()) and abs(float(weights.sum()) - 1) < 1e-9


@given(
    clients=st.integers(1, 6),
    classes=st.integers(2, 7),
    alpha=st.sampled_from([0.05, 0.3, 1.0, 10.0]),
    pull=st.sampled_from([0.0, 0.0, 1e-3, 0.1]),
    seed=st.integers(0, 10**6),
)
@settings(deadline=None, max_examples=60)
def test_exact_is_the_minimum(clients: int, classes: int, alpha: float, pull: float, seed: int) -> None:
    app_u = dirichlet(clients, classes, alpha, seed)
    weights = exact_weights(app_u, pull)
    assert on_the_simplex(weights)
    assert objective(app_u, weights, pull) <= brute_force(app_u, pull) + 1e-11


@pytest.mark.parametrize("clients", [10, 30, 200])
def test_exact_proves_itself_where_brute_force_cannot_go(clients: int) -> None:
    """f(β) − min f ≤ ∇·β − min ∇ for a convex f on the simplex: a bound that needs no other solver."""
    for seed in range(3):
        app_u = dirichlet(clients, 10, 0.1, seed)
        weights = exact_weights(app_u)
        points = away_from_uniform(app_u)
        gradient = points @ (weights @ points)
        assert on_the_simplex(weights)
        assert float(gradient @ weights - gradient.min()) < 1e-11


@given(seed=st.integers(0, 10**6), size=st.integers(1, 8))
@settings(deadline=None)
def test_the_projection_is_the_nearest_point(seed: int, size: int) -> None:
    """For the nearest point n, (x − n) · (y − n) ≤ 0 for every y of the simplex: enough to try its corners."""
    point = 2 * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    nearest = to_simplex(point)
    assert on_the_simplex(nearest)
    away = point - nearest
    assert float((away - away @ nearest).max()) < 1e-12


def test_algorithm_2_step_by_step() -> None:
    """Three clients, two classes, p − 1/2 = ±.4, ±.1, ∓.2: two iterations written out."""
    app_u = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    first_entry = torch.tensor([0.4, 0.1, -0.2], dtype=torch.float64)
    beta = torch.full((3,), 1 / 3, dtype=torch.float64)
    # The mixture is off by (m, −m), m = Σ β a, of norm √2·|m|; ∂/∂β_i = 2 a_i m / (√2 |m|) = √2 · a_i · sign(m), and
    # m is positive both times. By hand: e^−.2324, e^.1919, e^.6162 of their sum, then e^−.3601, e^.1728, e^.7631.
    for by_hand in ([0.20557, 0.31420, 0.48024], [0.17305, 0.29486, 0.53209]):
        assert float(beta @ first_entry) > 0
        beta = torch.softmax(beta - 2**0.5 * first_entry, dim=0)
        assert beta.tolist() == pytest.approx(by_hand, abs=1e-5)
    torch.testing.assert_close(paper_weights(app_u, steps=2), beta)


def test_the_paper_rule_is_gradient_descent_with_a_softmax_in_the_loop() -> None:
    """Against autograd on the printed loss."""
    app_u = dirichlet(10, 10, 0.1, seed=1)
    beta = torch.full((10,), 0.1, dtype=torch.float64)
    for _ in range(100):
        beta = beta.detach().requires_grad_()
        (((beta[:, None] * app_u).sum(dim=0) - 0.1).square().sum().sqrt()).backward()
        beta = torch.softmax(beta.detach() - 1.0 * beta.grad, dim=0)
    torch.testing.assert_close(paper_weights(app_u), beta)


def test_the_released_rule_is_a_new_optimiser_each_step() -> None:
    """Against torch's own SGD with the settings that the released code has."""
    app_u = dirichlet(10, 10, 0.1, seed=2)
    beta = torch.full((10,), 0.1, dtype=torch.float64)
    for _ in range(100):
        parameter = torch.nn.Parameter(beta.clone())
        optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.9)
        ((parameter[:, None] * app_u).sum(dim=0) - 0.1).square().mean().backward()
        optimizer.step()
        beta = parameter.detach().softmax(dim=0)
    torch.testing.assert_close(released_weights(app_u), beta)
    assert float(released_weights(app_u).min()) > 0.09
    assert float(released_weights(app_u).max()) < 0.11


@pytest.mark.parametrize("seed", range(20))
def test_the_rules_in_order(seed: int) -> None:
    """Ten clients with Dir(.1) APP-Us: equal weights > released > paper > exact."""
    app_u = dirichlet(10, 10, 0.1, seed)
    rules = (uniform_weights, released_weights, paper_weights, exact_weights)
    equal, released, paper, exact = (imbalance(app_u, rule(app_u)) for rule in rules)
    assert equal > released > paper > exact


def test_the_figures_in_the_docs() -> None:
    """Mean imbalances of 30 draws, as docs/methods/feddb.md tells them."""
    rules = (uniform_weights, released_weights, paper_weights, exact_weights)
    draws = [dirichlet(10, 10, 0.1, seed) for seed in range(30)]
    means = [sum(imbalance(app_u, rule(app_u)) for app_u in draws) / 30 for rule in rules]
    assert means == pytest.approx([0.213, 0.210, 0.182, 0.131], abs=6e-4)


def test_with_a_hundred_active_clients_the_paper_rule_may_lose_to_equal_weights() -> None:
    """Its step does not shrink near the balance; docs/methods/feddb.md says so."""
    losses = [seed for seed in range(30) if _paper_loses(dirichlet(100, 10, 0.1, seed))]
    assert len(losses) == 17


def _paper_loses(app_u: Tensor) -> bool:
    return imbalance(app_u, paper_weights(app_u)) > imbalance(app_u, uniform_weights(app_u))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "app_u",
    [
        torch.tensor([[0.7, 0.2, 0.1]]),
        torch.tensor([[0.7, 0.2, 0.1]] * 5),
        torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]),
        torch.full((4, 5), 0.2),
        torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]),
    ],
    ids=["one client", "identical", "one-hot", "balanced", "zeros"],
)
def test_edges(rule: Callable[[Tensor], Tensor], app_u: Tensor) -> None:
    weights = rule(app_u)
    assert weights.shape == (len(app_u),)
    assert on_the_simplex(weights)
    if len(app_u.unique(dim=0)) == 1 or torch.equal(app_u, torch.eye(3)):
        torch.testing.assert_close(weights, uniform_weights(app_u))


@pytest.mark.parametrize("rule", RULES)
def test_clients_in_another_order_get_the_same_weights(rule: Callable[[Tensor], Tensor]) -> None:
    app_u, order = dirichlet(7, 10, 0.3, seed=5), torch.tensor([3, 0, 6, 1, 5, 2, 4])
    torch.testing.assert_close(rule(app_u[order]), rule(app_u)[order], rtol=1e-4, atol=1e-5)


def test_equal_clients_share_a_weight() -> None:
    """Three with class 0, one each with 1 and 2: a third for each class, and a ninth for each of the three."""
    app_u = torch.eye(3)[[0, 0, 0, 1, 2]]
    weights = exact_weights(app_u)
    torch.testing.assert_close(weights, torch.tensor([1 / 9, 1 / 9, 1 / 9, 1 / 3, 1 / 3]).double(), rtol=0, atol=1e-5)


def test_the_pull_trades_balance_for_equal_weights() -> None:
    app_u = dirichlet(10, 10, 0.1, seed=3)
    found = [exact_weights(app_u, pull) for pull in (0.0, 0.01, 0.1, 1.0, 1e4)]
    balances = [imbalance(app_u, weights) for weights in found]
    distances = [float((weights - 0.1).norm()) for weights in found]
    assert balances == sorted(balances)
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 10 * distances[-1]
    torch.testing.assert_close(found[-1], uniform_weights(app_u), rtol=0, atol=1e-4)


def test_the_rules_by_name() -> None:
    app_u = dirichlet(4, 5, 0.3, seed=0)
    assert torch.equal(balancing_weights(app_u, "paper"), paper_weights(app_u))
    assert torch.equal(balancing_weights(app_u, "released"), released_weights(app_u))
    assert torch.equal(balancing_weights(app_u, "exact", 0.1), exact_weights(app_u, 0.1))
    assert balancing_weights(app_u, "none").tolist() == [0.25] * 4
