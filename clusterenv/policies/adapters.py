"""Policies made from plain networks and from agents of other libraries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space
from torch import Tensor, nn
from torch.distributions import Categorical as CategoricalDistribution
from torch.distributions import Distribution, Independent, Normal

from clusterenv.data.checks import check_instance, check_number, check_whole, items_of
from clusterenv.data.spaces import Layout
from clusterenv.errors import ConfigError, shown
from clusterenv.policies.policy import Context, Decision, Policy, choose, masked

__all__ = ["Categorical", "CleanRL", "EpsilonGreedy", "Gaussian", "PaperAgent", "Random"]


class Categorical(Policy):
    """A network that returns the logits of discrete actions.

    Parameters
    ----------
    module
        Maps observations to logits, or to ``(logits, value)``.
    nvec
        For ``MultiDiscrete`` actions: how many logits belong to each of them, in order.
    """

    def __init__(self, module: nn.Module, nvec: Sequence[int] | None = None) -> None:
        super().__init__()
        check_instance("module", module, nn.Module, "Categorical(nn.Linear(4, 2))")
        self.module = module
        self.nvec = None if nvec is None else _choices(nvec)

    def act(self, obs: Any, context: Context) -> Decision:
        logits, extras = _with_value(self.module(obs))
        policy = self._distribution(masked(logits, context.mask))
        action = choose(policy, context)
        return Decision(action, {"log_prob": policy.log_prob(action), **extras})

    def distribution(self, obs: Any, context: Context) -> Distribution:
        logits, _ = _with_value(self.module(obs))
        return self._distribution(masked(logits, context.mask))

    def _distribution(self, logits: Tensor) -> Distribution:
        if self.nvec is None:
            return CategoricalDistribution(logits=logits, validate_args=False)
        return _multi_discrete(logits, self.nvec)


class Gaussian(Policy):
    """A network that returns means, or ``(mean, log_std)``, of continuous actions.

    Parameters
    ----------
    module
        Maps observations to means, to ``(mean, log_std)`` or ``(mean, log_std, value)``.
    action_space
        Sampled actions are clipped to its bounds; ``raw_action`` keeps what was sampled. May be
        left out if the space has no bounds; all actions then have one standard deviation.
    log_std
        Initial logarithm of the standard deviation if the module returns means alone.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self, module: nn.Module, action_space: spaces.Box | None = None, log_std: float = 0.0
    ) -> None:
        super().__init__()
        check_instance("module", module, nn.Module, "Gaussian(nn.Linear(4, 2), env.action_space)")
        right = "Gaussian(module, log_std=-1.0)"
        log_std = check_number("log_std", log_std, right, least=-50, most=50)
        if action_space is None:
            action_space = spaces.Box(-np.inf, np.inf, ())
        elif not isinstance(action_space, spaces.Box):
            raise ConfigError(
                f"Gaussian acts in a Box, got {shown(action_space)}: "
                "Gaussian(module, env.action_space)"
            )
        self.module = module
        self.log_std = nn.Parameter(torch.full(action_space.shape, log_std))
        self.register_buffer("low", torch.as_tensor(action_space.low))
        self.register_buffer("high", torch.as_tensor(action_space.high))

    def _parts(self, obs: Any) -> tuple[Distribution, dict[str, Tensor]]:
        output = self.module(obs)
        mean, *rest = output if isinstance(output, tuple) else (output,)
        log_std = rest[0] if rest else self.log_std.expand_as(mean)
        extras = {"value": rest[1].reshape(mean.shape[0])} if len(rest) > 1 else {}
        normal = Normal(mean, log_std.exp(), validate_args=False)
        return Independent(normal, mean.ndim - 1), extras

    def act(self, obs: Any, context: Context) -> Decision:
        policy, extras = self._parts(obs)
        raw = choose(policy, context)
        action = torch.minimum(torch.maximum(raw, self.low), self.high)
        return Decision(action, {"raw_action": raw, "log_prob": policy.log_prob(raw), **extras})

    def distribution(self, obs: Any, context: Context) -> Distribution:
        return self._parts(obs)[0]


class EpsilonGreedy(Policy):
    """The best action of a Q network, or with probability epsilon a uniformly random one.

    Every row has the columns ``q``, the greatest value, and ``exploratory``, whether the action was
    drawn at random; such a draw may give the best action too.

    Parameters
    ----------
    q_module
        Maps observations to action values.
    epsilon
        Used unless the scalar ``epsilon`` has been published. A sequence assigns one to each
        environment by its global index (a ladder), which the scalar then scales.
    temperature
        Temperature of the softmax of the values, the distribution from which divergences are
        computed; the scalar ``temperature`` overrides it.
    """

    def __init__(
        self,
        q_module: nn.Module,
        epsilon: float | Sequence[float] = 0.05,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        check_instance("q_module", q_module, nn.Module, "EpsilonGreedy(nn.Linear(4, 2))")
        right = "EpsilonGreedy(q, temperature=1)"
        self.temperature = check_number("temperature", temperature, right, above=0)
        self.module = q_module
        try:
            self.epsilon = torch.as_tensor(epsilon, dtype=torch.float32).detach()
        except (TypeError, ValueError, RuntimeError, OverflowError):  # not numbers
            self.epsilon = torch.tensor(math.nan)
        self.ladder = self.epsilon.ndim > 0
        within = ((self.epsilon >= 0) & (self.epsilon <= 1)).all()
        if self.epsilon.ndim > 1 or not self.epsilon.numel() or not within:
            raise ConfigError(
                f"epsilon must be from 0 to 1, or several such numbers, got {shown(epsilon)}: "
                "EpsilonGreedy(q, epsilon=0.05)"
            )

    def with_epsilon(self, epsilon: float | Sequence[float]) -> EpsilonGreedy:
        """Return a policy with the same network and another epsilon."""
        return EpsilonGreedy(self.module, epsilon, self.temperature)

    def values(self, obs: Any, context: Context) -> Tensor:
        """Return the values of all actions; those of forbidden actions are ``-inf``."""
        return masked(self.module(obs), context.mask)

    def act(self, obs: Any, context: Context) -> Decision:
        return self.decide(self.values(obs, context), context)

    def decide(self, values: Tensor, context: Context) -> Decision:
        """Choose actions by their values; those of forbidden actions are ``-inf``."""
        # An exported policy cannot branch on numbers.
        if not torch.compiler.is_compiling() and values.isnan().any():
            raise ValueError("the Q network returned NaN")
        best = values.argmax(-1)
        q = values.max(-1).values
        if context.deterministic:
            return Decision(best, {"q": q, "exploratory": torch.zeros_like(best, dtype=torch.bool)})
        allowed = torch.isfinite(values).to(values.dtype)
        anything = allowed.multinomial(1).squeeze(-1)
        explore = torch.rand(len(best), device=best.device) < self._epsilon(context).to(best.device)
        return Decision(torch.where(explore, anything, best), {"q": q, "exploratory": explore})

    def _epsilon(self, context: Context) -> Tensor:
        published = context.scalars.get("epsilon")
        if published is not None and not 0 <= published <= 1:
            raise ValueError(f"epsilon={published} was published; it is from 0 to 1")
        if self.ladder:
            steps = self.epsilon[context.envs.cpu() % len(self.epsilon)]
            return steps if published is None else steps * published
        return self.epsilon if published is None else torch.tensor(published)

    def distribution(self, obs: Any, context: Context) -> Distribution:
        temperature = context.scalars.get("temperature", self.temperature)
        if not temperature > 0:
            raise ConfigError(f"temperature={temperature} was published; it is positive")
        logits = self.values(obs, context) / temperature
        logits = logits - logits.max(-1, keepdim=True).values
        # Below this an action is never chosen, and its probability would underflow to 0.
        logits = logits.where(logits.isneginf(), logits.clamp(min=-50.0))
        return CategoricalDistribution(logits=logits, validate_args=False)


class CleanRL(Policy):
    """An agent with ``get_action_and_value(obs)``, as CleanRL's scripts define it.

    Parameters
    ----------
    agent
        Its ``get_action_and_value`` returns action, log-probability, entropy and value.
    distribution
        Maps ``(agent, obs)`` to the distribution of actions. By default the logits of
        ``agent.actor``, of several choices if the agent has ``nvec``, or ``actor_mean`` and
        ``actor_logstd`` for continuous actions.
    """

    def __init__(self, agent: nn.Module, distribution: Any = None) -> None:
        super().__init__()
        check_instance("agent", agent, nn.Module, "CleanRL(agent)")
        if distribution is not None and not callable(distribution):
            raise ConfigError(
                f"distribution={shown(distribution)} cannot be called: "
                "CleanRL(agent, distribution=lambda agent, obs: Categorical(logits=…))"
            )
        if not callable(getattr(agent, "get_action_and_value", None)):
            raise ConfigError(
                f"{type(agent).__name__} has no get_action_and_value(obs); for a plain network use "
                "clusterenv.policies.Categorical(module)"
            )
        self.agent: Any = agent
        self._make_distribution = distribution
        self._fits = distribution is not None

    def act(self, obs: Any, context: Context) -> Decision:
        if context.deterministic:
            policy = self.distribution(obs, context)
            best = choose(policy, context)
            return Decision(best, {"log_prob": policy.log_prob(best)})
        action, log_prob, _, value = self.agent.get_action_and_value(obs)
        return Decision(action, {"log_prob": log_prob, "value": value.reshape(len(action))})

    def distribution(self, obs: Any, context: Context) -> Distribution:
        agent: Any = self.agent
        if self._make_distribution is not None:
            made: Distribution = self._make_distribution(agent, obs)
            return made
        if hasattr(agent, "actor_mean"):
            mean = agent.actor_mean(obs)
            spread = agent.actor_logstd.expand_as(mean).exp()
            return Independent(Normal(mean, spread, validate_args=False), 1)
        if hasattr(agent, "actor"):
            logits = agent.actor(_hidden(agent, obs))
            if hasattr(agent, "nvec"):
                return _multi_discrete(logits, [int(n) for n in agent.nvec])
            self._check_fits(logits, obs)
            return CategoricalDistribution(logits=logits)
        raise ConfigError(
            f"{type(agent).__name__} has neither actor nor actor_mean; define its "
            "distribution: CleanRL(agent, distribution=lambda agent, obs: Categorical(logits=…))"
        )

    def _check_fits(self, logits: Tensor, obs: Any) -> None:
        """Raise if the agent's actions are not one choice among its logits; checked once."""
        if self._fits:
            return
        with torch.random.fork_rng(devices=[]):  # leave the learner's random numbers alone
            action = self.agent.get_action_and_value(obs)[0]
        if action.shape != logits.shape[:-1]:
            raise ConfigError(
                f"{type(self.agent).__name__} chooses actions of shape {tuple(action.shape)} by "
                f"logits of shape {tuple(logits.shape)}, which is not one choice each; define its "
                "distribution: CleanRL(agent, distribution=lambda agent, obs: …), or for "
                "MultiDiscrete keep agent.nvec"
            )
        self._fits = True


class PaperAgent(Policy):
    """A module with ``.actor`` that returns action, log-probability, entropy and value."""

    def __init__(self, agent: nn.Module) -> None:
        super().__init__()
        check_instance("agent", agent, nn.Module, "PaperAgent(agent)")
        if not isinstance(getattr(agent, "actor", None), nn.Module):
            raise ConfigError(f"{type(agent).__name__} has no .actor module that gives logits")
        self.agent = agent

    def act(self, obs: Any, context: Context) -> Decision:
        if context.deterministic:
            policy = self.distribution(obs, context)
            best = choose(policy, context)
            return Decision(best, {"log_prob": policy.log_prob(best)})
        action, log_prob, _, value = self.agent(obs)
        return Decision(action, {"log_prob": log_prob, "value": value.reshape(len(action))})

    def distribution(self, obs: Any, context: Context) -> Distribution:
        agent: Any = self.agent
        return CategoricalDistribution(logits=agent.actor(obs), validate_args=False)


class Random(Policy):
    """Random actions, as from ``action_space.sample()``; it has no weights."""

    def __init__(self, action_space: gym.Space[Any], seed: int | None = None) -> None:
        super().__init__()
        if not isinstance(action_space, gym.Space) or len(Layout(action_space).arrays) != 1:
            raise ConfigError(
                f"action_space must be a space of one array, got {shown(action_space)}: "
                "Random(env.action_space)"
            )
        if seed is not None:
            seed = check_whole("seed", seed, "Random(env.action_space, seed=1)")
        self.action_space = action_space
        self._seed = seed
        self._spaces: dict[int, gym.Space[Any]] = {}  # by the number of environments

    def act(self, obs: Any, context: Context) -> Decision:
        if context.mask is not None:
            return Decision(self._allowed(context.mask.to(torch.float32)))
        n = len(context.envs)
        if n not in self._spaces:
            self._spaces[n] = batch_space(self.action_space, n)
            # Every shard has a copy; with the same seed all copies would draw the same.
            first = int(context.envs[0])
            drawn = int(torch.randint(2**31, ())) if self._seed is None else self._seed + first
            self._spaces[n].seed(drawn)
        return Decision(torch.as_tensor(self._spaces[n].sample()))

    def _allowed(self, mask: Tensor) -> Tensor:
        """Draw from the allowed actions: one choice, or one of each part."""
        space: Any = self.action_space
        if isinstance(space, spaces.Discrete):
            return mask.multinomial(1).squeeze(-1) + int(space.start)
        parts = torch.split(mask, space.nvec.reshape(-1).tolist(), dim=-1)
        chosen = torch.cat([part.multinomial(1) for part in parts], dim=-1)
        return chosen.reshape(-1, *space.shape) + torch.as_tensor(space.start)


def _choices(nvec: Any) -> list[int]:
    """Return the sizes of several choices."""
    right = "Categorical(module, nvec=[3, 2])"
    sizes = items_of(nvec)
    if not sizes:
        raise ConfigError(f"nvec must be a list of integers, got {shown(nvec)}: {right}")
    return [check_whole("nvec", size, right, least=1) for size in sizes]


def _multi_discrete(logits: Tensor, nvec: Sequence[int]) -> Distribution:
    """Return the distribution of several choices, each by its own part of the logits."""
    widest = max(nvec)
    parts = [
        nn.functional.pad(part, (0, widest - part.shape[-1]), value=float("-inf"))
        for part in torch.split(logits, list(nvec), dim=-1)
    ]
    stacked = CategoricalDistribution(logits=torch.stack(parts, dim=-2), validate_args=False)
    return Independent(stacked, 1, validate_args=False)


def _with_value(output: Any) -> tuple[Tensor, dict[str, Tensor]]:
    if isinstance(output, tuple):
        logits, value = output
        return logits, {"value": value.reshape(logits.shape[0])}
    return output, {}


def _hidden(agent: Any, obs: Any) -> Any:
    # CleanRL's Atari agents share a network below actor and critic and scale the frames.
    if not hasattr(agent, "network"):
        return obs
    return agent.network(obs / 255.0 if obs.dtype == torch.uint8 else obs)
