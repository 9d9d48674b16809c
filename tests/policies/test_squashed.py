"""The squashed Gaussian: densities, divergence, gradients, and actions that stay in their space."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import AffineTransform, TanhTransform

from clusterenv.errors import ConfigError
from clusterenv.policies import Context, SquashedGaussian, SquashedNormal
from clusterenv.sync.divergence import mean_divergence

N = 2000
CONTEXT = Context(torch.arange(N))
BEST = Context(torch.arange(N), deterministic=True)
OBS = torch.randn(N, 3)
UNEVEN = gym.spaces.Box(np.float32([-0.1, -3]), np.float32([0.3, 5]))


def normal_of(mean: float, std: float, low: float = -1.0, high: float = 3.0) -> SquashedNormal:
    """One action of one dimension, in double precision."""
    loc, log_std, center, radius = (
        torch.tensor([x], dtype=torch.float64)
        for x in (mean, math.log(std), (low + high) / 2, (high - low) / 2)
    )
    return SquashedNormal(loc, log_std, center, radius)


def grid(*each: SquashedNormal) -> Tensor:
    """Actions from one bound to the other, the closer together the denser they are."""
    low = min(float(d.loc - 9 * d.log_std.exp()) for d in each)
    high = max(float(d.loc + 9 * d.log_std.exp()) for d in each)
    return each[0].squash(torch.linspace(max(low, -15), min(high, 15), 200_001).double())[:, None]


def integral(values: Tensor, actions: Tensor) -> float:
    return float(torch.trapezoid(values, actions[:, 0]))


# The distribution


def test_log_probabilities_are_those_of_torch() -> None:
    torch.manual_seed(0)
    loc, log_std = torch.randn(2, 50, 2, dtype=torch.float64)
    center, radius = torch.tensor([0.1, 1.0]).double(), torch.tensor([0.2, 4.0]).double()
    ours = SquashedNormal(loc, log_std, center, radius)
    theirs = TransformedDistribution(
        Independent(Normal(loc, log_std.exp()), 1),
        [TanhTransform(cache_size=1), AffineTransform(center, radius, event_dim=1)],
    )
    raw = ours.raw_rsample().clamp(-4, 4)  # beyond, torch's inverse of tanh is inexact
    action = ours.squash(raw)
    torch.testing.assert_close(ours.raw_log_prob(raw), theirs.log_prob(action))
    torch.testing.assert_close(ours.log_prob(action), theirs.log_prob(action))
    assert ours.sample((7,)).shape == theirs.sample((7,)).shape == (7, 50, 2)
    assert ours.support.check(ours.sample((7,))).all()


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.5, 0.1), (-2.0, 2.0), (0.3, 2.5)])
def test_the_density_of_actions_integrates_to_1(mean: float, std: float) -> None:
    policy = normal_of(mean, std)
    actions = grid(policy)
    assert integral(policy.log_prob(actions).exp(), actions) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("raw", [-80.0, -20.0, 0.0, 5.0, 20.0, 80.0])
def test_log_probabilities_hold_where_tanh_has_saturated(raw: float) -> None:
    one = torch.ones(1)
    policy = SquashedNormal(torch.tensor([raw]), 0 * one, 0 * one, one)  # in single precision
    # log(1 - tanh(x)^2) = -2 log cosh x, where log cosh x = |x| + log(1 + exp(-2|x|)) - log 2
    log_cosh = abs(raw) + math.log1p(math.exp(-2 * abs(raw))) - math.log(2)
    expected = -0.5 * math.log(2 * math.pi) + 2 * log_cosh
    assert policy.raw_log_prob(torch.tensor([raw])).item() == pytest.approx(expected, rel=1e-5)


def test_an_action_at_a_bound_has_a_finite_log_probability() -> None:
    one = torch.ones(1)
    policy = SquashedNormal(5 * one, 0 * one, 0 * one, 2 * one)
    found = policy.log_prob(torch.tensor([[2.0], [-2.0], [1.9999999]]))
    assert found.isfinite().all()
    assert found[0] > found[1]


CASES = [
    ((0.0, 1.0), (0.5, 1.0)),
    ((1.0, 0.5), (-1.0, 2.0)),
    ((-2.0, 0.2), (-2.5, 0.4)),
    ((0.0, 3.0), (0.0, 1.5)),
]


@pytest.mark.parametrize(("p", "q"), CASES)
def test_the_divergence_is_the_integral_over_actions(p: Any, q: Any) -> None:
    ours, other = normal_of(*p), normal_of(*q)
    actions = grid(ours)
    density, ratio = ours.log_prob(actions), ours.log_prob(actions) - other.log_prob(actions)
    expected = integral(density.exp() * ratio, actions)
    assert kl_divergence(ours, other).item() == pytest.approx(expected, rel=2e-3)
    normals = Normal(p[0], p[1]), Normal(q[0], q[1])
    assert kl_divergence(ours, other).item() == pytest.approx(kl_divergence(*normals).item())


def test_divergences_of_dimensions_are_summed_and_need_the_same_bounds() -> None:
    two = [normal_of(*CASES[0][i]) for i in range(2)]
    more = [normal_of(*CASES[1][i]) for i in range(2)]
    both = [
        SquashedNormal(
            torch.stack([a.loc, b.loc], -1),
            torch.stack([a.log_std, b.log_std], -1),
            a.center.expand(2),
            a.radius.expand(2),
        )
        for a, b in zip(two, more, strict=True)
    ]
    expected = kl_divergence(*two) + kl_divergence(*more)
    torch.testing.assert_close(kl_divergence(*both), expected.unsqueeze(0))
    assert mean_divergence(*both) == pytest.approx(expected.item())
    with pytest.raises(ConfigError, match="no divergence between SquashedNormal"):
        mean_divergence(two[0], normal_of(0.0, 1.0, high=4.0))


# The policy


def biased(space: gym.spaces.Box, mean: float, log_std: float = 0.0) -> SquashedGaussian:
    """A policy that acts the same on all observations."""
    size = math.prod(space.shape)
    module = nn.Linear(3, 2 * size)
    with torch.no_grad():
        module.weight.zero_()
        module.bias[:size] = mean
        module.bias[size:] = log_std
    return SquashedGaussian(module, space)


def test_it_acts_by_its_distribution() -> None:
    torch.manual_seed(0)
    policy = SquashedGaussian(nn.Linear(3, 4), UNEVEN)
    with torch.inference_mode():
        decision = policy.act(OBS, CONTEXT)
        expected = policy.distribution(OBS, CONTEXT)
    raw, log_prob = decision.extras["raw_action"], decision.extras["log_prob"]
    torch.testing.assert_close(log_prob, expected.raw_log_prob(raw))
    torch.testing.assert_close(log_prob, expected.log_prob(decision.action), atol=0.05, rtol=0.01)
    torch.testing.assert_close(decision.action, expected.squash(raw))
    assert log_prob.shape == (N,)
    assert (decision.action < expected.median).float().mean(0).tolist() == pytest.approx(
        [0.5, 0.5], abs=0.05
    )


def test_the_deterministic_action_is_the_squashed_mean() -> None:
    policy = SquashedGaussian(nn.Linear(3, 4), UNEVEN, epsilon=1.0)
    mean = policy.module(OBS)[:, :2]
    expected = torch.tensor([0.1, 1.0]) + torch.tensor([0.2, 4.0]) * mean.tanh()
    for context in (BEST, Context(torch.arange(N), {"epsilon": 1.0}, deterministic=True)):
        decision = policy.act(OBS, context)
        torch.testing.assert_close(decision.action, expected)
        assert decision.extras.keys() == {"raw_action", "log_prob"}


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("mean", [-1000.0, -8.0, 8.0, 1000.0])
def test_actions_never_leave_the_space(dtype: Any, mean: float) -> None:
    space = gym.spaces.Box(dtype(-0.1), dtype(0.3), (2,), dtype)  # not exact in any of these
    for context in (CONTEXT, BEST, Context(CONTEXT.envs, {"epsilon": 0.5})):
        with torch.inference_mode():
            decision = biased(space, mean).act(OBS, context)
        assert all(space.contains(row) for row in decision.action.numpy())
        assert all(column.isfinite().all() for column in decision.extras.values())
        assert decision.extras["log_prob"].dtype == torch.float32


def test_actions_have_gradients_with_respect_to_mean_and_deviation() -> None:
    torch.manual_seed(0)
    loc = torch.full((5, 2), 0.3, requires_grad=True)
    log_std = torch.full((5, 2), -1.0, requires_grad=True)
    policy = SquashedGaussian(nn.Identity(), UNEVEN)
    action, log_prob = policy.rsample((loc, log_std))
    unit = policy.unit(action).detach()
    action.sum().backward()
    slope = torch.tensor([0.2, 4.0]) * (1 - unit.square())
    torch.testing.assert_close(loc.grad, slope)
    torch.testing.assert_close(log_std.grad, slope * (unit.atanh() - 0.3), atol=1e-5, rtol=1e-4)
    # A wider Gaussian has the smaller log-probabilities, a mean at the side the larger ones.
    loc.grad = log_std.grad = None
    action, log_prob = policy.rsample((loc, log_std))
    log_prob.sum().backward()
    # d log pi(a)/d loc through the action alone is the slope's: 2 tanh(raw).
    torch.testing.assert_close(loc.grad, 2 * policy.unit(action).detach(), atol=1e-5, rtol=1e-4)
    assert not policy.distribution((loc, log_std)).sample().requires_grad


def test_the_deviation_is_clamped() -> None:
    for given, expected in ((-9.0, -3.0), (-2.0, -2.0), (9.0, 1.0)):
        module = biased(UNEVEN, 0.0, given).module
        policy = SquashedGaussian(module, UNEVEN, log_std=(-3, 1))
        assert policy.distribution(OBS).log_std.unique().item() == pytest.approx(expected)


def test_epsilon_makes_actions_uniform_and_their_density_that_of_the_mixture() -> None:
    torch.manual_seed(0)
    policy = biased(UNEVEN, 8.0)
    volume = 0.4 * 8
    uniform = policy.act(OBS, Context(CONTEXT.envs, {"epsilon": 1.0}))
    torch.testing.assert_close(uniform.extras["log_prob"], torch.full((N,), -math.log(volume)))
    quarters = torch.bincount(((policy.unit(uniform.action)[:, 1] + 1) * 2).long(), minlength=4)
    assert (quarters / N).tolist() == pytest.approx([0.25] * 4, abs=0.05)
    mixed = policy.act(OBS, Context(CONTEXT.envs, {"epsilon": 0.3}))
    assert (mixed.action[:, 1] < 4.9).float().mean().item() == pytest.approx(0.3, abs=0.05)
    density = policy.distribution(OBS).raw_log_prob(mixed.extras["raw_action"]).exp()
    expected = (0.7 * density + 0.3 / volume).log()
    torch.testing.assert_close(mixed.extras["log_prob"], expected, atol=1e-3, rtol=1e-3)
    with pytest.raises(ValueError, match=r"epsilon=1\.5 was published"):
        policy.act(OBS, Context(CONTEXT.envs, {"epsilon": 1.5}))


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_an_action_of_any_shape_has_one_log_probability(shape: tuple[int, ...]) -> None:
    space = gym.spaces.Box(-2, 2, shape)
    policy = SquashedGaussian(nn.Linear(3, 2 * math.prod(shape)), space)
    for context in (CONTEXT, Context(CONTEXT.envs, {"epsilon": 0.5})):
        decision = policy.act(OBS, context)
        assert decision.action.shape == (N, *shape)
        assert decision.extras["log_prob"].shape == (N,)
    assert kl_divergence(policy.distribution(OBS), policy.distribution(OBS)).shape == (N,)


def test_a_module_may_return_mean_deviation_and_value_apart() -> None:
    class Parts(nn.Module):
        def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return obs[:, :2], obs[:, 1:], obs.sum(1, keepdim=True)

    policy = SquashedGaussian(Parts(), UNEVEN)
    torch.testing.assert_close(policy.act(OBS, CONTEXT).extras["value"], OBS.sum(1))
    torch.testing.assert_close(policy.distribution(OBS).loc, OBS[:, :2])


NET = nn.Linear(3, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SquashedGaussian(NET, gym.spaces.Discrete(2)),  # type: ignore[arg-type]
            r"acts in a Box, got Discrete\(2\); for discrete actions: .*Categorical\(module\)",
        ),
        (
            lambda: SquashedGaussian(NET, gym.spaces.Box(-np.inf, np.inf, (2,))),
            r"between bounds.*got Box\(-inf.*policies\.Gaussian\(module.*Box\(-1, 1, \(2,\)\)",
        ),
        (lambda: SquashedGaussian(NET, gym.spaces.Box(-1, np.inf, (2,))), "between bounds"),
        (lambda: SquashedGaussian(NET, gym.spaces.Box(0, 0, (2,))), "a lower and a higher one"),
        (
            lambda: SquashedGaussian(NET, gym.spaces.Box(0, 9, (2,), np.uint8)),
            r"Box of floats, got Box\(0, 9.*SquashedGaussian\(module, env\.action_space\)",
        ),
        (lambda: SquashedGaussian(NET, None), "Box of floats, got None"),  # type: ignore[arg-type]
        (lambda: SquashedGaussian(len, UNEVEN), "module must be a Module"),  # type: ignore[arg-type]
        (lambda: SquashedGaussian(NET, UNEVEN, log_std=3), "log_std must be two numbers, got 3"),  # type: ignore[arg-type]
        (lambda: SquashedGaussian(NET, UNEVEN, log_std=(2, -5)), "a smaller and a larger number"),
        (lambda: SquashedGaussian(NET, UNEVEN, log_std=(math.nan, 2)), "log_std must be a number"),
        (lambda: SquashedGaussian(NET, UNEVEN, epsilon=2), "epsilon must be a number.*got 2"),
    ],
)
def test_what_cannot_be_squashed_is_refused_with_the_right_call(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
