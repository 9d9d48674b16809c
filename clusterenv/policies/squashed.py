"""Gaussians whose samples tanh squashes into the bounds of a Box, as SAC's actors are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Distribution, constraints, register_kl

from clusterenv.data.checks import check_instance, check_number, items_of
from clusterenv.errors import ConfigError, shown
from clusterenv.policies.policy import Context, Decision, Policy

__all__ = ["SquashedGaussian", "SquashedNormal"]

_LOG_2 = math.log(2.0)
_HALF_LOG_2_PI = 0.5 * math.log(2 * math.pi)


class SquashedNormal(Distribution):
    """Independent normals after tanh and scaling: ``center + radius * tanh(x)``.

    The divergence of two with the same bounds, ``torch.distributions.kl_divergence``, is exact and
    in closed form: squashing is a bijection, which leaves the divergence of the normals as it is.
    The entropy has no closed form; ``-log_prob`` of a sample estimates it.

    Parameters
    ----------
    loc, log_std
        Of the normals before squashing, ``[…, *radius.shape]``.
    center, radius
        Of the range of the actions, ``[low + high] / 2`` and ``[high - low] / 2``.

    Examples
    --------
    >>> zero = torch.zeros(1, 2)
    >>> actions = SquashedNormal(zero, zero, torch.zeros(2), torch.full((2,), 0.4))
    >>> actions.rsample().abs().max() < 0.4, actions.median
    (tensor(True), tensor([[0., 0.]]))
    """

    has_rsample = True

    def __init__(self, loc: Tensor, log_std: Tensor, center: Tensor, radius: Tensor) -> None:
        self.loc, self.log_std = loc, log_std
        self.center, self.radius = center, radius
        at = loc.ndim - radius.ndim
        super().__init__(loc.shape[:at], loc.shape[at:], validate_args=False)

    @property
    def arg_constraints(self) -> dict[str, constraints.Constraint]:
        return {}

    @property
    def support(self) -> constraints.Constraint:
        low, high = self.center - self.radius, self.center + self.radius
        within = constraints.interval(low, high)  # type: ignore[no-untyped-call]
        return constraints.independent(within, self.radius.ndim)  # type: ignore[no-untyped-call]

    @property
    def median(self) -> Tensor:
        """The squashed mean, by which SAC is evaluated: in every dimension the median.

        The density may be higher elsewhere: at the bounds, if the deviation is large.
        """
        return self.squash(self.loc)

    def raw_rsample(self, sample_shape: tuple[int, ...] = ()) -> Tensor:
        """Draw from the normals, before squashing, with gradients."""
        noise = torch.randn_like(self.loc.expand(*sample_shape, *self.loc.shape))
        return self.loc + self.log_std.exp() * noise

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.squash(self.raw_rsample(tuple(sample_shape)))

    def squash(self, raw: Tensor) -> Tensor:
        """Return the actions of draws from the normals."""
        return self.center + self.radius * torch.tanh(raw)

    def raw_log_prob(self, raw: Tensor) -> Tensor:
        """Return the log-probability of the action ``squash(raw)``, as exact as can be.

        Near the bounds many draws give the same action in floating point; their
        log-probabilities differ, and by the draw they are known.
        """
        return self._log_prob((raw - self.loc) * torch.exp(-self.log_std), raw)

    def rsample_with_log_prob(self) -> tuple[Tensor, Tensor]:
        """Draw actions with gradients, and return their log-probabilities: less work than apart."""
        noise = torch.randn_like(self.loc)
        raw = self.loc + self.log_std.exp() * noise
        return self.squash(raw), self._log_prob(noise, raw)

    def _log_prob(self, noise: Tensor, raw: Tensor) -> Tensor:
        # The logarithm of tanh's derivative, 1 - tanh(x)^2, without cancellation for large x,
        # is 2 (log 2 - x - softplus(-2 x)).
        slope = raw + nn.functional.softplus(-2 * raw)
        known = 2 * _LOG_2 + _HALF_LOG_2_PI + self.radius.log()
        return self._summed(2 * slope - 0.5 * noise.square() - self.log_std - known)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of actions; one at a bound counts as the nearest inside."""
        return self.raw_log_prob(unsquash((value - self.center) / self.radius))

    def _summed(self, each: Tensor) -> Tensor:
        return each.flatten(each.ndim - self.radius.ndim).sum(-1) if self.radius.ndim else each


def unsquash(unit: Tensor) -> Tensor:
    """Return what tanh maps to these numbers; those at ±1 count as the nearest inside."""
    most = 1 - torch.finfo(unit.dtype).eps
    return torch.atanh(unit.clamp(-most, most))


@register_kl(SquashedNormal, SquashedNormal)  # type: ignore[no-untyped-call, untyped-decorator]
def _kl_squashed(p: SquashedNormal, q: SquashedNormal) -> Tensor:
    same = torch.equal(p.center, q.center) and torch.equal(p.radius, q.radius)
    if not same:  # neither is a density on the other's actions
        raise NotImplementedError("squashed normals with other bounds have no divergence")
    ratio = (2 * (p.log_std - q.log_std)).exp()
    distance = ((p.loc - q.loc) * torch.exp(-q.log_std)).square()
    return p._summed(0.5 * (ratio + distance - 1) + q.log_std - p.log_std)


class SquashedGaussian(Policy):
    """A network that returns mean and log-deviation of a Gaussian, which tanh squashes; for SAC.

    Actions cover the whole Box and never leave it. The columns ``raw_action`` (before squashing)
    and ``log_prob`` are what :class:`Gaussian` gives too; ``log_prob`` is that of the action, with
    the determinants of tanh and of the scaling. A deterministic action is the squashed mean.

    Parameters
    ----------
    module
        Maps observations to ``(mean, log_std)``, to ``(mean, log_std, value)``, or to one tensor
        of both, ``[n, 2 * size]``.
    action_space
        A ``Box`` of floats with bounds.
    log_std
        The range to which the logarithm of the standard deviation is clamped.
    epsilon
        Probability of a uniformly random action, unless the scalar ``epsilon`` has been published:
        1 while the first rows are collected, for example. ``log_prob`` includes it.

    Raises
    ------
    ConfigError
        If the space has no bounds, or is another.

    Examples
    --------
    >>> policy = SquashedGaussian(nn.Linear(3, 2), spaces.Box(-2, 2, (1,)))
    >>> action, log_prob = policy.rsample(torch.zeros(5, 3))
    >>> action.shape, log_prob.shape, action.requires_grad
    (torch.Size([5, 1]), torch.Size([5]), True)
    """

    low: Tensor
    high: Tensor
    center: Tensor
    radius: Tensor

    def __init__(
        self,
        module: nn.Module,
        action_space: spaces.Box,
        log_std: tuple[float, float] = (-5.0, 2.0),
        epsilon: float = 0.0,
    ) -> None:
        super().__init__()
        right = "SquashedGaussian(nn.Linear(4, 2), env.action_space)"
        check_instance("module", module, nn.Module, right)
        self.log_std = _range(log_std)
        right = "SquashedGaussian(module, env.action_space, epsilon=0)"
        self.epsilon = check_number("epsilon", epsilon, right, least=0, most=1)
        self.module = module
        bounds = zip(("low", "high", "center", "radius"), _bounds(action_space), strict=True)
        for name, bound in bounds:  # not in the state: they follow from the space
            self.register_buffer(name, bound, persistent=False)

    def act(self, obs: Any, context: Context) -> Decision:
        made, extras = self._parts(obs)
        if context.deterministic:
            raw = made.loc
            log_prob = made.raw_log_prob(raw)
        else:
            raw = made.raw_rsample()
            raw, log_prob = self._explore(raw, made, context)
        action = torch.minimum(torch.maximum(made.squash(raw), self.low), self.high)
        return Decision(
            action.to(self.low.dtype), {"raw_action": raw, "log_prob": log_prob, **extras}
        )

    def distribution(self, obs: Any, context: Context | None = None) -> SquashedNormal:
        """Return the distribution of actions, without the random ones of ``epsilon``."""
        return self._parts(obs)[0]

    def rsample(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Draw actions with gradients, for the learner, and return their log-probabilities."""
        return self._parts(obs)[0].rsample_with_log_prob()

    def unit(self, action: Tensor) -> Tensor:
        """Return actions in units of the bounds, from -1 to 1, as a critic takes them best."""
        return (action.float() - self.center) / self.radius

    def _parts(self, obs: Any) -> tuple[SquashedNormal, dict[str, Tensor]]:
        output = self.module(obs)
        if isinstance(output, tuple):
            mean, log_std, *rest = output
        else:
            shape, rest = (output.shape[0], *self.radius.shape), []
            mean, log_std = (part.reshape(shape) for part in output.chunk(2, dim=-1))
        log_std = log_std.clamp(*self.log_std)
        extras = {"value": rest[0].reshape(mean.shape[0])} if rest else {}
        return SquashedNormal(mean, log_std, self.center, self.radius), extras

    def _explore(
        self, raw: Tensor, made: SquashedNormal, context: Context
    ) -> tuple[Tensor, Tensor]:
        """Replace some draws by uniform ones; return log-probabilities of the mixture."""
        epsilon = context.scalars.get("epsilon", self.epsilon)
        if not 0 <= epsilon <= 1:
            raise ValueError(f"epsilon={epsilon} was published; it is from 0 to 1")
        if epsilon == 0:
            return raw, made.raw_log_prob(raw)
        explore = torch.rand(raw.shape[0], device=raw.device) < epsilon
        uniform = unsquash(2 * torch.rand_like(raw) - 1)
        raw = torch.where(explore.view(-1, *[1] * self.radius.ndim), uniform, raw)
        density = -(2 * self.radius).log().sum()  # of a uniform action
        shares = torch.tensor([1 - epsilon, epsilon], device=raw.device).log()
        return raw, torch.logaddexp(shares[0] + made.raw_log_prob(raw), shares[1] + density)


def _range(log_std: Any) -> tuple[float, float]:
    """Return the smallest and the largest logarithm of a standard deviation."""
    right = "SquashedGaussian(module, env.action_space, log_std=(-5, 2))"
    ends = items_of(log_std)
    if ends is None or len(ends) != 2:
        raise ConfigError(f"log_std must be two numbers, got {shown(log_std)}: {right}")
    low, high = (check_number("log_std", end, right, least=-50, most=50) for end in ends)
    if low >= high:
        raise ConfigError(
            f"log_std must be a smaller and a larger number, got {shown(log_std)}: {right}"
        )
    return low, high


def _bounds(space: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return low, high, center and radius (half the width) of a space that tanh can fill."""
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        raise ConfigError(
            f"SquashedGaussian acts in a Box, got {space}; for discrete actions: "
            "clusterenv.policies.Categorical(module), or EpsilonGreedy(q_module)"
        )
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ConfigError(
            f"SquashedGaussian acts in a Box of floats, got {shown(space)}: "
            "SquashedGaussian(module, env.action_space)"
        )
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    center, radius = (high / 2 + low / 2).float(), (high / 2 - low / 2).float()
    if not (radius.isfinite() & (radius > 0)).all():
        raise ConfigError(
            f"tanh squashes actions between bounds, a lower and a higher one, got {space}; without "
            "bounds: clusterenv.policies.Gaussian(module, env.action_space), or choose some: "
            f"gymnasium.wrappers.TransformAction(env, lambda a: a, Box(-1, 1, {space.shape}))"
        )
    return low, high, center, radius
