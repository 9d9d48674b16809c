"""Train by SAC (soft actor-critic) from a replay store, while collection continues.

``python -m pipelines.sac --env Pendulum-v1``

Haarnoja et al. (2018): an actor that is paid for its entropy too, two critics of which the lower
counts, target critics, and a temperature that keeps the entropy at a target. Actions and entropies
are in units of the bounds, so that nothing depends on the unit of the actions. The first rows
are of uniformly random actions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.errors import ConfigError
from clusterenv.policies import SquashedGaussian
from pipelines.experiment import Losses, ReplayAlgorithm, ReplayArgs, main
from pipelines.experiment.checks import (
    Bound,
    Count,
    Finite,
    Fraction,
    Limit,
    Natural,
    NotNegative,
    Positive,
)
from pipelines.networks.continuous import Actor, TwinQ
from pipelines.networks.flat_adam import FlatAdam
from pipelines.networks.images import refuse_cnn
from pipelines.networks.target import follow

__all__ = ["SAC", "Args", "Temperature", "targets"]


@dataclass(frozen=True)
class Args(ReplayArgs):
    """Options; ``SAC.preset`` returns tuned ones for some environments."""

    env: str = "Pendulum-v1"  # id of a Gymnasium environment with continuous actions
    horizon: Count = 8  # steps of each environment in a batch
    sync: Literal["every-version", "every", "divergence", "never"] = "every-version"  # when to pull
    threshold: Limit = 0.05  # with --sync divergence: pull above this divergence
    lr: Positive = 3e-4  # learning rate of the actor
    critic_lr: Positive = 1e-3  # learning rate of the critics
    alpha_lr: NotNegative = 1e-3  # learning rate of the temperature; 0 keeps the initial one
    grad_norm: Bound = float("inf")  # clip gradients to this norm
    hidden: tuple[Count, ...] = (256, 256)  # hidden layers of actor and critics
    rows_per_update: Count = 1  # rows collected per update; limits collection and learner
    random_steps: Natural = 1_000  # first steps, with uniformly random actions
    tau: Fraction = 0.005  # step of the target critics towards the learner's; 1 copies them
    actor_every: Count = 1  # updates of the critics per update of actor and temperature
    initial_alpha: Positive = 1.0  # temperature at first: what entropy is worth
    target_entropy: Finite | None = None  # of the actions, in units of the bounds; default: -size


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "Pendulum-v1": {"total_steps": 20_000, "lr": 1e-3, "hidden": (64, 64), "log_every": 500},
    "LunarLanderContinuous-v3": {
        "total_steps": 500_000, "num_envs": 16, "lr": 1e-3, "anneal": True, "tau": 0.02,
        "target_entropy": -1.0, "hidden": (128, 128), "batch": 128, "n_step": 3,
        "rows_per_update": 4, "min_rows": 5_000, "random_steps": 10_000, "capacity": 500_000,
        "log_every": 5_000, "checkpoint_every": 50_000,
    },
    "HalfCheetah-v5": {
        "total_steps": 500_000, "min_rows": 5_000, "random_steps": 5_000, "capacity": 500_000,
        "log_every": 5_000, "checkpoint_every": 50_000,
    },
}
# fmt: on


def targets(
    rows: Mapping[str, Tensor], values: Tensor, log_prob: Tensor, alpha: Tensor | float
) -> Tensor:
    """Return the critics' target for each row of a sample.

    ``reward + discount (1 - terminated) (min_i Q_i(next_obs, a) - alpha log pi(a | next_obs))``;
    an episode that was only truncated goes on being worth something. Over several steps, the
    entropy of the last alone is paid for.

    Parameters
    ----------
    rows
        ``reward``, ``discount`` and ``terminated``.
    values
        Of an action of the policy at the next observation, by each target critic: ``[2, n]``.
    log_prob
        Of that action.
    alpha
        The temperature.
    """
    following = values.min(0).values - alpha * log_prob
    return rows["reward"] + rows["discount"] * ~rows["terminated"] * following


class Temperature(nn.Module):
    """What entropy is worth: positive, and learned, so that the entropy comes to a target."""

    def __init__(self, initial: float, target_entropy: float) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial)))
        self.target_entropy = target_entropy

    @property
    def alpha(self) -> Tensor:
        """Its value, without a gradient."""
        return self.log.detach().exp()

    def loss(self, log_prob: Tensor) -> Tensor:
        """Return a loss that raises the temperature if the entropy is below the target."""
        return -self.log * (log_prob.detach() + self.target_entropy).mean()


class SAC(ReplayAlgorithm[Args]):
    """Soft actor-critic."""

    name, title, presets = "sac", "SAC", PRESETS
    args_type: ClassVar[type[Args]] = Args

    def __init__(
        self, args: Args, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__(args, observation_space, action_space)
        if not isinstance(action_space, gym.spaces.Box):
            raise ConfigError(
                f"SAC needs continuous actions, in a Box with bounds; {args.env} has "
                f"{action_space}: clusterenv train dqn --env {args.env}, or clusterenv train ppo "
                f"--env {args.env}"
            )
        refuse_cnn(args.cnn, observation_space)
        spaces = observation_space, action_space
        self.policy: SquashedGaussian = SquashedGaussian(Actor(*spaces, args.hidden), action_space)
        self.q = TwinQ(*spaces, args.hidden)
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        size = math.prod(action_space.shape)
        wanted = -float(size) if args.target_entropy is None else args.target_entropy
        self.temperature = Temperature(args.initial_alpha, wanted)
        self.log_scale = float(self.policy.radius.log().sum())  # of the bounds, in an entropy
        self.actor_optimizer = FlatAdam(self.policy, args.lr, eps=1e-8)
        self.critic_optimizer = FlatAdam(self.q, args.critic_lr, eps=1e-8)
        self.alpha_optimizer = FlatAdam(self.temperature, args.alpha_lr, eps=1e-8)
        self.parts = {
            "policy": self.policy,
            "q": self.q,
            "target": self.target,
            "temperature": self.temperature,
            "actor_optimizer": self.actor_optimizer,
            "critic_optimizer": self.critic_optimizer,
            "alpha_optimizer": self.alpha_optimizer,
        }
        self.updates = 0

    def scalars(self, steps: int) -> dict[str, float]:
        return {"epsilon": float(steps < self.args.random_steps)}

    def learn(self, rows: Mapping[str, Tensor], progress: float) -> tuple[Losses, Tensor]:
        lr = self.anneal(self.actor_optimizer, progress)
        self.critic_optimizer.param_groups[0]["lr"] = lr * self.args.critic_lr / self.args.lr
        losses, errors = self.update_critics(rows)
        if self.updates % self.args.actor_every == 0:
            losses |= self.update_actor(rows["obs"])
        self.updates += 1
        follow(self.target, self.q, self.args.tau)
        return {"lr": lr, "alpha": self.temperature.alpha, **losses}, errors

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions of the policy and their log-probabilities, in units of the bounds."""
        action, log_prob = self.policy.rsample(obs)
        return self.policy.unit(action), log_prob + self.log_scale

    def update_critics(self, rows: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Make one step of the critics; return losses, and the error of each row."""
        with torch.no_grad():
            action, log_prob = self.sample(rows["next_obs"])
            values = self.target(rows["next_obs"], action)
            wanted = targets(rows, values, log_prob, self.temperature.alpha)
        values = self.q(rows["obs"], self.policy.unit(rows["action"]))
        errors = values - wanted
        loss = 0.5 * (rows["weights"] * errors.square()).mean(1).sum()
        norm = self.critic_optimizer.descend(loss, self.args.grad_norm)
        losses = {"loss": loss, "q": values.detach().mean(), "grad_norm": norm}
        return losses, errors.detach().abs().mean(0)

    def update_actor(self, obs: Tensor) -> dict[str, Tensor]:
        """Make one step of the actor and of the temperature; return losses and the entropy."""
        action, log_prob = self.sample(obs)
        self.q.requires_grad_(False)  # no gradient for its weights: a third of the work
        value = self.q(obs, action).min(0).values
        policy_loss = (self.temperature.alpha * log_prob - value).mean()
        self.actor_optimizer.descend(policy_loss, self.args.grad_norm)
        self.q.requires_grad_(True)
        self.alpha_optimizer.descend(self.temperature.loss(log_prob), float("inf"))
        return {"policy_loss": policy_loss, "entropy": -log_prob.detach().mean()}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates = int(state["updates"])


if __name__ == "__main__":
    main(SAC)
