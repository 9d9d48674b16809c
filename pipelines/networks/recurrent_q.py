"""Values of discrete actions by an LSTM, and a policy that acts by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.policies import Context, Decision, EpsilonGreedy
from pipelines.networks.q_network import actions_of, layers_of

__all__ = ["RecurrentEpsilonGreedy", "RecurrentQNetwork"]

State = Mapping[str, Tensor]


class RecurrentQNetwork(nn.Module):
    """A duelling network above an LSTM over features, last action and last reward.

    Its state has ``hidden`` and ``cell``, the ``last_action`` as one-hot and the ``last_reward``,
    which as an input is clipped to ±1. All are zero where an episode begins.

    Parameters
    ----------
    observation_space, action_space, hidden
        As for :class:`pipelines.networks.q_network.QNetwork`; ``hidden`` are the layers below the
        LSTM.
    units
        Of the LSTM, and of the hidden layers of the two heads.
    cnn
        As for :class:`pipelines.networks.q_network.QNetwork`.

    Raises
    ------
    ConfigError
        If the spaces are others.

    Examples
    --------
    >>> box = gym.spaces.Box(-1, 1, (4,))
    >>> q = RecurrentQNetwork(box, gym.spaces.Discrete(2), hidden=(32,), units=8)
    >>> values, memory = q(torch.zeros(3, 4), q.initial_state(3))
    >>> values.shape, memory["hidden"].shape
    (torch.Size([3, 2]), torch.Size([3, 8]))
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        hidden: tuple[int, ...] = (64,),
        units: int = 64,
        cnn: str | None = None,
    ) -> None:
        super().__init__()
        self.actions, self.units = actions_of(action_space), units
        self.eyes, self.body, features = layers_of(observation_space, hidden, cnn)
        self.core = nn.LSTM(features + self.actions + 1, units)
        self.advantage = nn.Sequential(
            nn.Linear(units, units), nn.ReLU(), nn.Linear(units, self.actions)
        )
        self.value = nn.Sequential(nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 1))

    def initial_state(self, n: int) -> dict[str, Tensor]:
        """Return the state where an episode begins."""
        return {
            "hidden": torch.zeros(n, self.units),
            "cell": torch.zeros(n, self.units),
            "last_action": torch.zeros(n, self.actions),
            "last_reward": torch.zeros(n),
        }

    def encode(self, action: Tensor) -> Tensor:
        """Return actions as one-hot."""
        return nn.functional.one_hot(action.long(), self.actions).float()

    def forward(self, obs: Tensor, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the values, ``[n, actions]``, and ``hidden`` and ``cell`` afterwards."""
        inputs = self._inputs(obs, state["last_action"], state["last_reward"])
        memory = state["hidden"].unsqueeze(0), state["cell"].unsqueeze(0)
        out, (hidden, cell) = self.core(inputs.unsqueeze(0), memory)
        return self._heads(out[0]), {"hidden": hidden[0], "cell": cell[0]}

    def unroll(
        self,
        obs: Tensor,
        action: Tensor,
        reward: Tensor,
        state: State,
        burn_in: int = 0,
        exact: Tensor | None = None,
    ) -> Tensor:
        """Return the values at consecutive observations of one episode in each column.

        Parameters
        ----------
        obs
            ``[time + 1, n, …]``: of all rows, and what follows the last one.
        action, reward
            Of the rows, ``[time, n]``.
        state
            Before the first row.
        burn_in
            Rows that only bring the state up to date: no gradient goes from later rows into them.
        exact
            Columns whose first state is exact, ``[n]``, so that they need no burn-in.

        Returns
        -------
        Tensor
            ``[time + 1, n, actions]``.
        """
        before = torch.cat([state["last_action"].unsqueeze(0), self.encode(action)])
        earned = torch.cat([state["last_reward"].unsqueeze(0), reward])
        flat = self._inputs(obs.flatten(0, 1), before.flatten(0, 1), earned.flatten())
        inputs = flat.view(*earned.shape, -1)
        memory = state["hidden"].unsqueeze(0), state["cell"].unsqueeze(0)
        outs = []
        if burn_in:
            out, (hidden, cell) = self.core(inputs[:burn_in], memory)
            outs.append(out)
            memory = hidden.detach(), cell.detach()
            if exact is not None:
                kept = exact.view(1, -1, 1)
                memory = hidden.where(kept, memory[0]), cell.where(kept, memory[1])
        outs.append(self.core(inputs[burn_in:], memory)[0])
        return self._heads(torch.cat(outs))

    def _inputs(self, obs: Tensor, action: Tensor, reward: Tensor) -> Tensor:
        features = self.body(self.eyes(obs))
        return torch.cat([features, action, reward.clamp(-1, 1).unsqueeze(-1)], -1)

    def _heads(self, out: Tensor) -> Tensor:
        advantage: Tensor = self.advantage(out)
        value: Tensor = self.value(out)
        return value + advantage - advantage.mean(-1, keepdim=True)


class RecurrentEpsilonGreedy(EpsilonGreedy):
    """Epsilon-greedy by the values of a recurrent network.

    Parameters
    ----------
    q_module
        As :class:`RecurrentQNetwork`.
    epsilon, temperature
        As for :class:`clusterenv.policies.EpsilonGreedy`.
    """

    module: RecurrentQNetwork

    def __init__(
        self,
        q_module: RecurrentQNetwork,
        epsilon: float | Sequence[float] = 0.05,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(q_module, epsilon, temperature)

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return self.module.initial_state(n)

    def with_epsilon(self, epsilon: float | Sequence[float]) -> RecurrentEpsilonGreedy:
        return RecurrentEpsilonGreedy(self.module, epsilon, self.temperature)

    def values(self, obs: Any, context: Context) -> Tensor:
        return self._advance(obs, context)[0]

    def act(self, obs: Any, context: Context) -> Decision:
        values, memory = self._advance(obs, context)
        decision = self.decide(values, context)
        last_action = self.module.encode(decision.action)
        return decision._replace(state={**context.state, **memory, "last_action": last_action})

    def _advance(self, obs: Tensor, context: Context) -> tuple[Tensor, dict[str, Tensor]]:
        values, memory = self.module(obs, context.state)
        if context.mask is not None:
            values = values.masked_fill(~context.mask.to(torch.bool), float("-inf"))
        return values, memory
