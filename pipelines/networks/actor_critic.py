"""Actors and critics without memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from clusterenv.policies import Context, Decision, Policy
from clusterenv.returns import next_values
from clusterenv.store import Rollout
from pipelines.networks.action_head import ActionHead
from pipelines.networks.images import image_network, refuse_cnn
from pipelines.networks.observations import Observations, Seen
from pipelines.networks.running import RunningStats

__all__ = [
    "ActorCritic",
    "Unrolled",
    "body_of",
    "features_of",
    "flat",
    "network",
    "update_stats",
]

CNN = "residual"
"""Convolutions over images, unless others are asked for."""


class Unrolled(NamedTuple):
    """What an agent says of a rollout; all are ``[time, env]``, but the first and the last."""

    out: Tensor
    """The actor's outputs, ``[time, env, outputs]``."""
    log_prob: Tensor
    """Of the actions that were taken."""
    entropy: Tensor
    value: Tensor
    next_value: Tensor
    """Of the true next observations, without a gradient."""
    cell: Tensor | None = None
    """Of an LSTM, after each row, ``[time, env, units]``."""


class ActorCritic(Policy):
    """Separate tanh networks over normalised observations, or one convolutional over images.

    Parameters
    ----------
    observation_space
        A ``Box``. Images are uint8 of at least 16 × 16 pixels, with the channels, or stacked
        frames, on the first axis, stacked frames with channels on the first two, or colours on the
        last; everything else is flattened. Or a ``Dict`` or ``Tuple`` of such parts, see
        :class:`pipelines.networks.observations.Observations`.
    action_space
        See :class:`ActionHead`.
    hidden
        Sizes of the hidden layers; not for an image alone, whose network has its own.
    normalize_obs
        Whether flat observations are normalised by ``stats``, which the learner updates.
    cnn
        Convolutions over images, see :func:`pipelines.networks.images.image_network`.

    Raises
    ------
    ConfigError
        If the spaces are others.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        hidden: tuple[int, ...] = (64, 64),
        normalize_obs: bool = True,
        cnn: str | None = None,
    ) -> None:
        super().__init__()
        self.head = ActionHead(action_space)
        self.observations = Observations(observation_space)
        self.eyes, self.stats, inputs = body_of(observation_space, normalize_obs, cnn)
        layers = hidden if self.observations.numbers else ()
        self.actor = network((inputs, *layers, self.head.outputs), last_gain=0.01)
        self.critic = network((inputs, *layers, 1), last_gain=1.0)

    def observed(self, columns: Mapping[str, Tensor]) -> Tensor:
        """Return the observations of a rollout's columns, or of its tail, as one tensor."""
        return self.observations.of_columns(columns)

    def normalize(self, obs: Tensor) -> Tensor:
        """Return observations as :meth:`forward` takes them: images as they are, others flat."""
        image, numbers = self.observations.split(obs)
        if numbers is None:
            return obs
        return self.observations.join(Seen(image, flat(numbers, self.stats)))

    def take_statistics(self, rows: Rollout) -> None:
        """Update the statistics that normalise observations, if there are any."""
        update_stats(self.stats, self.observations, rows)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the actor's outputs, ``[n, outputs]``, and the values, ``[n]``."""
        features = self.see(inputs)
        return self.actor(features), self.critic(features).squeeze(-1)

    def see(self, inputs: Tensor) -> Tensor:
        """Return the features of observations as :meth:`normalize` returns them."""
        image, numbers = self.observations.split(inputs)
        return features_of(self.eyes, image, numbers)

    def distribution(self, obs: Any, context: Context | None = None) -> Distribution:
        return self.head.distribution(self._out(obs))

    def _out(self, obs: Any) -> Tensor:
        out: Tensor = self.actor(self.see(self.normalize(self.observations.gather(obs))))
        return out

    def value(self, obs: Tensor) -> Tensor:
        """Return the critic's estimate, ``[n]``."""
        value: Tensor = self.critic(self.see(self.normalize(obs)))
        return value.squeeze(-1)

    def judge(self, inputs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return an action's log-probability, the entropy and the value of each row.

        Parameters
        ----------
        inputs
            Observations as :meth:`normalize` returns them.
        action
            As it was sampled.
        """
        out, value = self(inputs)
        return *self.head.judge(out, action), value

    def unroll(self, rows: Rollout) -> Unrolled:
        """Judge all rows of a rollout."""
        shape = rows["reward"].shape
        out, value = self(self.normalize(self.observed(rows.columns).flatten(0, 1)))
        out, value = out.view(*shape, -1), value.view(shape)
        log_prob, entropy = self.head.judge(out, rows[self.head.column])
        with torch.no_grad():
            tail = self.value(self.observed(rows.tail))
            following = next_values(value, rows.tail_rows, tail)
        return Unrolled(out, log_prob, entropy, value, following)

    def act(self, obs: Any, context: Context) -> Decision:
        # No values: the head computes them with its newest critic, of which a worker that
        # lags behind has only an old copy.
        return self.head.decide(self._out(obs), context)


def body_of(
    space: gym.Space[Any], normalize_obs: bool, cnn: str | None = None
) -> tuple[nn.Module | None, RunningStats | None, int]:
    """Return convolutions for images, statistics for flat observations, and their outputs.

    Raises
    ------
    ConfigError
        If observations are neither, or no images that the convolutions take.
    """
    observations = Observations(space)
    image, inputs = observations.image, observations.numbers
    stats = RunningStats(observations.shape) if normalize_obs and inputs else None
    if image is None:
        refuse_cnn(cnn, space)
        return None, stats, inputs
    eyes, features = image_network(cnn or CNN, image)
    return eyes, stats, inputs + features


def features_of(eyes: nn.Module | None, image: Tensor | None, numbers: Tensor | None) -> Tensor:
    """Return the features of an image, the numbers beside it, or both."""
    if eyes is None or image is None:
        assert numbers is not None
        return numbers
    features: Tensor = eyes(image)
    return features if numbers is None else torch.cat([features, numbers], -1)


def update_stats(stats: RunningStats | None, observations: Observations, rows: Rollout) -> None:
    """Update statistics by the observations of a rollout."""
    if stats is not None:
        numbers = observations.split(observations.of_columns(rows.columns).flatten(0, 1)).numbers
        assert numbers is not None
        stats.update(numbers)


def flat(obs: Tensor, stats: RunningStats | None) -> Tensor:
    """Return observations that are no images as ``[n, inputs]``."""
    obs = obs.float()
    return (obs if stats is None else stats(obs)).flatten(1)


def network(sizes: tuple[int, ...], last_gain: float) -> nn.Sequential:
    """Return a tanh network with orthogonal weights."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    with torch.no_grad():
        linear.weight *= last_gain / math.sqrt(2)
    return nn.Sequential(*layers[:-1])
