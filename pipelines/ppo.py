"""Train by proximal policy optimisation, with the policy on the workers.

``python -m pipelines.ppo --env LunarLander-v3``
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.returns import gae, next_values
from clusterenv.store import Rollout
from pipelines.envs import football
from pipelines.experiment import (
    Losses,
    RolloutAlgorithm,
    RolloutArgs,
    check_minibatches,
    main,
    shuffled,
)
from pipelines.experiment.checks import Bound, Count, Limit, NotNegative, Positive, Share
from pipelines.networks.actor_critic import ActorCritic
from pipelines.networks.flat_adam import FlatAdam
from pipelines.networks.running import RewardScaler, explained_variance

__all__ = ["PPO", "Args"]


@dataclass(frozen=True)
class Args(RolloutArgs):
    """Options; ``PPO.preset`` returns tuned ones for some environments."""

    env: str = "LunarLander-v3"  # id of a Gymnasium environment
    total_steps: Count = 1_000_000  # environment steps, summed over all environments
    sync: Literal["every-version", "every", "divergence", "never"] = "every-version"  # when to pull
    threshold: Limit = 0.05  # with --sync divergence: pull above this divergence
    lr: Positive = 3e-4  # learning rate of Adam
    anneal: bool = True  # decrease the learning rate linearly to 0
    lam: Share = 0.95  # lambda of generalised advantage estimation
    epochs: Count = 4  # passes over a rollout
    minibatches: Count = 4  # per pass
    clip: Bound = 0.2  # clipping range of the probability ratio
    max_correction: Bound = 2.0  # upper bound of the importance weights of older rows
    clip_value: bool = False  # clip new values to within clip of the old ones
    entropy: NotNegative = 0.01  # weight of the entropy bonus
    value_coef: NotNegative = 0.5  # weight of the value loss
    grad_norm: Bound = 0.5  # clip gradients to this norm
    normalize_obs: bool = True  # by their running mean and variance
    scale_rewards: bool | None = None  # by the running return's deviation; default: if continuous
    hidden: tuple[Count, ...] = (64, 64)  # layers of actor and critic
    checkpoint_every: Count = 50_000  # steps between checkpoints

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minibatches(self, self.minibatches)


# fmt: off
FOOTBALL: dict[str, Any] = {
    "engine": "native", "cnn": "pooled", "horizon": 64, "overlap": True, "epochs": 2,
    "minibatches": 16, "lr": 5e-4, "gamma": 0.993, "log_every": 5_000,
    "evaluate_env_args": ("reward=score",),
}
ATARI: dict[str, Any] = {
    "total_steps": 300_000, "num_envs": 16, "horizon": 64, "overlap": True, "epochs": 2,
    "minibatches": 8, "lr": 5e-4, "clip": 0.1, "scale_rewards": True, "hidden": (256,),
    "log_every": 2_000,
}
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "total_steps": 150_000, "horizon": 64, "epochs": 10, "lr": 1e-3,
        "gamma": 0.98, "lam": 0.9, "entropy": 0.0,
    },
    "LunarLander-v3": {
        "minibatches": 16, "lr": 1e-3, "gamma": 0.999, "lam": 0.98, "scale_rewards": True,
    },
    "Pendulum-v1": {
        # Whole episodes: with half of one, each update sees only swinging up, or only balancing.
        "total_steps": 400_000, "horizon": 200, "epochs": 10, "minibatches": 16,
        "lr": 5e-4, "gamma": 0.9, "entropy": 0.0,
    },
    "Breakout-v5": {**ATARI, "engine": "envpool"},
    "ale_py:ALE/Breakout-v5": {**ATARI, "engine": "native"},
    **dict.fromkeys(football.EASIEST, FOOTBALL),
}
# fmt: on


class PPO(RolloutAlgorithm[Args]):
    """Proximal policy optimisation (Schulman et al., 2017), clipped around the policy before."""

    name, title, args_type, presets = "ppo", "PPO", Args, PRESETS

    def __init__(
        self, args: Args, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__(args, observation_space, action_space)
        spaces = observation_space, action_space
        agent = ActorCritic(*spaces, args.hidden, args.normalize_obs, args.cnn)
        self.agent = self.policy = agent
        self.optimizer = FlatAdam(agent, args.lr)
        self.parts = {"agent": agent, "optimizer": self.optimizer}
        self.scaler = None
        if args.scale_rewards or (args.scale_rewards is None and agent.head.log_std is not None):
            self.scaler = self.parts["scaler"] = RewardScaler(args.num_envs, args.gamma)

    def learn(self, rows: Rollout, progress: float) -> Losses:
        lr = self.anneal(self.optimizer, progress)
        rewards = rows["reward"]
        if self.scaler is not None:
            rewards = self.scaler(rewards, rows["env"], rows["step"])
        columns, explained = self.prepare(rows, rewards)
        for epoch in range(1, self.args.epochs + 1):
            logged = epoch == self.args.epochs
            parts = shuffled(columns, self.args.minibatches)
            losses = [self.update(*part, logged=logged) for part in parts]
        self.agent.take_statistics(rows)  # only now: the update needed those that acted
        names = ("policy_loss", "value_loss", "entropy", "kl", "clip_fraction", "grad_norm")
        means = torch.stack(losses).mean(0).tolist()
        return {"lr": lr, **dict(zip(names, means, strict=True)), "explained_variance": explained}

    @torch.no_grad()
    def prepare(self, rows: Rollout, rewards: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return what an update needs of every row, the rows one after the other.

        And the share of the targets' variance that the values explain.
        """
        args, agent = self.args, self.agent
        obs = agent.normalize(agent.observed(rows.columns).flatten(0, 1))
        action = rows[agent.head.column].flatten(0, 1)
        behaviour = rows["log_prob"].flatten()  # of whichever version acted
        # Decoupled clipping: around the policy before this update, not the one that acted.
        # Clipping around an old acting policy would hold the learner near it.
        proximal, _, values = agent.judge(obs, action)
        correction = (proximal - behaviour).exp().clamp(max=args.max_correction)
        values = values.view_as(rewards)
        tail = agent.value(agent.observed(rows.tail))
        following = next_values(values, rows.tail_rows, tail)
        ends = rows["terminated"], rows["truncated"]
        advantages = gae(rewards, values, following, *ends, args.gamma, args.lam)
        targets = advantages + values
        flat = (part.flatten() for part in (values, targets, advantages))
        explained = explained_variance(values, targets)
        return (obs, action, proximal, correction, *flat), explained

    def update(
        self,
        obs: Tensor,
        action: Tensor,
        proximal: Tensor,
        correction: Tensor,
        old_value: Tensor,
        target: Tensor,
        advantage: Tensor,
        *,
        logged: bool,
    ) -> Tensor:
        """Make one step of the optimizer; return losses and diagnostics if they are logged."""
        args = self.args
        log_prob, entropy, value = self.agent.judge(obs, action)
        log_ratio = log_prob - proximal
        ratio = log_ratio.exp()
        std, mean = torch.std_mean(advantage)
        # The importance weights are positive, so they may be multiplied before the minimum.
        advantage = correction * (advantage - mean) / (std + 1e-8)
        clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
        policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
        if args.clip_value:
            near = old_value + (value - old_value).clamp(-args.clip, args.clip)
            error = torch.max((value - target).square(), (near - target).square())
            value_loss = 0.5 * error.mean()
        else:
            value_loss = 0.5 * nn.functional.mse_loss(value, target)
        entropy = entropy.mean()
        loss = policy_loss + args.value_coef * value_loss - args.entropy * entropy
        norm = self.optimizer.descend(loss, args.grad_norm)
        if not logged:
            return loss
        with torch.no_grad():
            kl = (ratio - 1 - log_ratio).mean()  # Schulman's estimate: never below 0
            outside = (ratio != clipped).float().mean()
            return torch.stack([policy_loss, value_loss, entropy, kl, outside, norm])


if __name__ == "__main__":
    main(PPO)
