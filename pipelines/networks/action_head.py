"""What the outputs of an actor mean, by the action space."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from clusterenv.errors import ConfigError
from clusterenv.policies import Context, Decision

__all__ = ["ActionHead"]


class ActionHead(nn.Module):
    """Logits of discrete actions, or means of continuous ones with a learned deviation.

    Parameters
    ----------
    space
        A ``Discrete`` that starts at 0, or a ``Box`` of one axis of floats.

    Attributes
    ----------
    outputs
        Numbers that the actor gives for an action.
    log_std
        Logarithm of the standard deviation; ``None`` for discrete actions.
    column
        The column of a batch that holds what was sampled.

    Raises
    ------
    ConfigError
        If the space is another.
    """

    low: Tensor
    high: Tensor

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        if isinstance(space, gym.spaces.Discrete) and space.start == 0:
            self.outputs = int(space.n)
            self.log_std = None
        elif (
            isinstance(space, gym.spaces.Box)
            and len(space.shape) == 1
            and np.issubdtype(space.dtype, np.floating)
        ):
            self.outputs = space.shape[0]
            self.log_std = nn.Parameter(torch.zeros(self.outputs))
            self.register_buffer("low", torch.as_tensor(space.low))
            self.register_buffer("high", torch.as_tensor(space.high))
        else:
            raise ConfigError(
                "an actor needs actions in Discrete(n) or in a Box of one axis of floats, "
                f"got {space}; wrap the environment with an ActionWrapper"
            )
        self.column = "action" if self.log_std is None else "raw_action"

    def distribution(self, out: Tensor) -> Distribution:
        """Return the distribution of actions."""
        if self.log_std is None:
            return Categorical(logits=out, validate_args=False)
        spread = self.log_std.exp().expand_as(out)
        return Independent(Normal(out, spread, validate_args=False), 1, validate_args=False)

    def judge(self, out: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probability of actions, and the entropy of their distributions.

        The same as by :meth:`distribution`, in fewer calls.
        """
        if self.log_std is None:
            log_probs = out.log_softmax(-1)
            log_prob = log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)
            return log_prob, -(log_probs.exp() * log_probs).sum(-1)
        distances = (action - out) * torch.exp(-self.log_std)
        width = self.log_std + 0.5 * math.log(2 * math.pi)
        log_prob = -(0.5 * distances.square() + width).sum(-1)
        return log_prob, (width + 0.5).sum().expand_as(log_prob)

    def decide(self, out: Tensor, context: Context) -> Decision:
        """Sample an action, or take the most probable one, or the mean, if asked to."""
        distribution = self.distribution(out)
        action = distribution.mode if context.deterministic else distribution.sample()
        extras = {"log_prob": distribution.log_prob(action)}
        if self.log_std is not None:
            extras["raw_action"] = action
            action = action.clamp(self.low, self.high)
        return Decision(action, extras)

    def encode(self, action: Tensor) -> Tensor:
        """Return actions as inputs of a network, ``[…, outputs]``: discrete ones as one-hot."""
        if self.log_std is None:
            return nn.functional.one_hot(action.long(), self.outputs).float()
        return action
