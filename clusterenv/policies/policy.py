"""The policy protocol: acting on a worker, and a distribution to compare versions by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError

__all__ = ["Context", "Decision", "Policy"]


@dataclass(frozen=True)
class Context:
    """A policy's inputs besides the observations; each tensor has a row per environment."""

    envs: Tensor
    """Global env indices."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """The newest published value under each name, such as ``epsilon``."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """Recurrent state; empty for a policy that has none."""
    mask: Tensor | None = None
    """Which actions are allowed; ``None`` if the environments have no masks."""
    deterministic: bool = False
    """Whether to choose the best action instead of exploring, as :class:`clusterenv.Evaluator`
    asks: the most probable one, the mean, epsilon 0. A policy that ignores it acts as always."""


class Decision(NamedTuple):
    """A policy's answer; each tensor has a row per environment."""

    action: Tensor
    extras: Mapping[str, Tensor] = {}
    """Further columns of the trajectory: ``log_prob``, ``value``, ``logits``, …"""
    state: Mapping[str, Tensor] = {}
    """The recurrent state after this step."""


class Policy(nn.Module):
    """Base class of all policies.

    The class travels to the workers once; afterwards only its ``state_dict`` does, buffers
    included, and only when a worker pulls. ``act`` runs on the workers under
    ``torch.inference_mode``, or with ``Collector(…, inference="head")`` at the head, for a number
    of environments that changes from call to call. ``distribution`` runs at the head, to compute
    how far two versions have diverged.

    Examples
    --------
    >>> class Coin(Policy):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.logits = nn.Parameter(torch.zeros(2))
    ...     def distribution(self, obs, context):
    ...         return torch.distributions.Categorical(logits=self.logits.expand(len(obs), 2))
    ...     def act(self, obs, context):
    ...         coin = self.distribution(obs, context)
    ...         action = coin.sample()
    ...         return Decision(action, {"log_prob": coin.log_prob(action)})
    >>> Coin().act(torch.zeros(3, 4), Context(torch.arange(3))).action.shape
    torch.Size([3])
    """

    def act(self, obs: Any, context: Context) -> Decision:
        """Choose an action for every environment.

        Parameters
        ----------
        obs
            A tensor, or for Dict and Tuple spaces a dictionary or tuple of tensors.
        context
            Env indices, scalars, recurrent state, action mask, and whether to explore.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define act(obs, context)")

    def distribution(self, obs: Any, context: Context) -> Distribution:
        """Return the distribution of actions, from which divergences are computed."""
        raise NotImplementedError(
            f"{type(self).__name__} does not define distribution(obs, context)"
        )

    def annotate(self, fragment: Fragment) -> Mapping[str, Column]:
        """Compute further columns from a whole fragment, on the worker that made it.

        Called once per finished fragment, and only if a policy defines it. The arrays that it
        returns, a row for each of the fragment's rows, become columns of the batch: for example
        the initial priorities of a replay store.

        Parameters
        ----------
        fragment
            Its ``columns`` are flat, row ``t * num_envs + e``; ``tail`` holds the true next
            observations of ``tail_rows``. For all other rows the next observation is that of
            row ``row + num_envs``. Do not write into it.
        """
        return {}

    def initial_state(self, n: int) -> dict[str, Tensor]:
        """Return the recurrent state of ``n`` environments at the start of an episode.

        An entry ``last_reward``, ``torch.zeros(n)``, is set to the reward of every step, so that
        the policy finds the reward of the step before in ``context.state["last_reward"]``.
        """
        return {}


def check_policy(policy: Any) -> None:
    """Raise ``ConfigError`` if the policy of a collector or an evaluator is none."""
    if not isinstance(policy, Policy):
        raise ConfigError(
            f"policy is a {type(policy).__name__}; wrap it: "
            "clusterenv.policies.Categorical(module), Gaussian(module, action_space), "
            "EpsilonGreedy(q_module) or CleanRL(agent)"
        )


def choose(distribution: Distribution, context: Context) -> Tensor:
    """Sample actions from a distribution, or take its mode if the context is deterministic.

    Examples
    --------
    >>> coin = torch.distributions.Categorical(logits=torch.tensor([[0.0, 1.0]]))
    >>> choose(coin, Context(torch.arange(1), deterministic=True))
    tensor([1])
    """
    if not context.deterministic:
        return distribution.sample()
    try:
        return distribution.mode
    except NotImplementedError:
        raise ConfigError(
            f"{type(distribution).__name__} has no mode, so that its best action is not known: "
            "return a distribution that has one, write act() for context.deterministic, or "
            "evaluate with sampled actions: Evaluator(…, deterministic=False)"
        ) from None


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Set the logits of forbidden actions to ``-inf``."""
    if mask is None:
        return logits
    return logits.masked_fill(~mask.to(torch.bool), float("-inf"))
