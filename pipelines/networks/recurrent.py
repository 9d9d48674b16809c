"""Actor and critic with an LSTM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from clusterenv.policies import Context, Decision, Policy
from clusterenv.returns import next_values
from clusterenv.store import Rollout
from pipelines.networks.action_head import ActionHead
from pipelines.networks.actor_critic import (
    Unrolled,
    body_of,
    features_of,
    flat,
    network,
    update_stats,
)
from pipelines.networks.observations import Observations

__all__ = ["RecurrentActorCritic"]

State = Mapping[str, Tensor]


class RecurrentActorCritic(Policy):
    """An LSTM over features, last action and last reward, below actor and critic.

    Its state is zero where an episode begins: ``hidden`` and ``cell``, the ``last_action`` and
    the ``last_reward``, which the workers fill in; as an input it is clipped to ±1.

    Parameters
    ----------
    observation_space, action_space, hidden, normalize_obs, cnn
        As for :class:`pipelines.networks.actor_critic.ActorCritic`; ``hidden`` are the layers
        below the LSTM.
    units
        Of the LSTM.

    Raises
    ------
    ConfigError
        If the spaces are others.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        hidden: tuple[int, ...] = (64,),
        units: int = 64,
        normalize_obs: bool = True,
        cnn: str | None = None,
    ) -> None:
        super().__init__()
        self.head = ActionHead(action_space)
        self.observations = Observations(observation_space)
        eyes, self.stats, features = body_of(observation_space, normalize_obs, cnn)
        self.flat = eyes is None
        if eyes is None:
            eyes = nn.Sequential(network((features, *hidden), last_gain=2**0.5), nn.Tanh())
            features = hidden[-1]
        self.eyes, self.units = eyes, units
        self.inputs = features + self.head.outputs + 1  # of the LSTM
        self.core: nn.Module = nn.LSTMCell(self.inputs, units)
        self.actor = network((units, self.head.outputs), last_gain=0.01)
        self.critic = network((units, 1), last_gain=1.0)

    def initial_state(self, n: int) -> dict[str, Tensor]:
        return {
            "hidden": torch.zeros(n, self.units),
            "cell": torch.zeros(n, self.units),
            "last_action": torch.zeros(n, self.head.outputs),
            "last_reward": torch.zeros(n),
        }

    def observed(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the observations of a rollout's columns, or of its tail, as one tensor."""
        return self.observations.of_columns(columns)

    def take_statistics(self, rows: Rollout) -> None:
        """Update the statistics that normalise observations, if there are any."""
        update_stats(self.stats, self.observations, rows)

    def act(self, obs: Any, context: Context) -> Decision:
        hidden, cell = self._advance(obs, context.state)
        decision = self.head.decide(self.actor(hidden), context)
        sampled = decision.extras.get("raw_action", decision.action)
        state = {**context.state, "hidden": hidden, "cell": cell}
        return decision._replace(state={**state, "last_action": self.head.encode(sampled)})

    def distribution(self, obs: Any, context: Context) -> Distribution:
        return self.head.distribution(self.actor(self._advance(obs, context.state)[0]))

    def unroll(self, rows: Rollout) -> Unrolled:
        """Judge all rows of a rollout, from the state at its first row."""
        state, reward = rows.state, rows["reward"]
        actions = self.head.encode(rows[self.head.column])
        begins = rows["step"] == 0
        goes_on = (~begins).unsqueeze(-1).float()
        before = torch.cat([state["last_action"].unsqueeze(0), actions[:-1]]) * goes_on
        earned = torch.cat([state["last_reward"].unsqueeze(0), reward[:-1]]).unsqueeze(-1) * goes_on
        features = self.features(self.observed(rows.columns).flatten(0, 1))
        features = features.view(*reward.shape, -1)
        inputs = torch.cat([features, before, earned.clamp(-1, 1)], -1)
        hidden, cell, steps = state["hidden"], state["cell"], []
        for given, keep in zip(inputs, goes_on, strict=True):
            hidden, cell = self.core(given, (hidden * keep, cell * keep))
            steps.append((hidden, cell))
        hiddens, cells = (torch.stack(part) for part in zip(*steps, strict=True))
        out, value = self.actor(hiddens), self.critic(hiddens).squeeze(-1)
        with torch.no_grad():
            after = {
                "hidden": hiddens.flatten(0, 1)[rows.tail_rows],
                "cell": cells.flatten(0, 1)[rows.tail_rows],
                "last_action": actions.flatten(0, 1)[rows.tail_rows],
                "last_reward": reward.flatten()[rows.tail_rows],
            }
            tail = self.critic(self._advance(self.observed(rows.tail), after)[0]).squeeze(-1)
            following = next_values(value, rows.tail_rows, tail)
        log_prob, entropy = self.head.judge(out, rows[self.head.column])
        return Unrolled(out, log_prob, entropy, value, following, cells)

    def features(self, obs: Any) -> Tensor:
        """Return what the LSTM gets of observations, besides action and reward."""
        image, numbers = self.observations.split(self.observations.gather(obs))
        numbers = None if numbers is None else flat(numbers, self.stats)
        if self.flat:
            seen: Tensor = self.eyes(numbers)
            return seen
        return features_of(self.eyes, image, numbers)

    def _advance(self, obs: Any, state: State) -> tuple[Tensor, Tensor]:
        """Return the LSTM's state after an observation."""
        earned = state["last_reward"].unsqueeze(-1).clamp(-1, 1)
        inputs = torch.cat([self.features(obs), state["last_action"], earned], -1)
        hidden, cell = self.core(inputs, (state["hidden"], state["cell"]))
        return hidden, cell
