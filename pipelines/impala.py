"""Train by IMPALA: actors that do not wait for the learner, and V-trace for what they did.

``python -m pipelines.impala --env CartPole-v1 --stop-at 475``

Espeholt et al. (2018). Shards collect fragments with the version they have; the learner takes
every fragment once, in the order in which they arrive. ``--recurrent 64`` adds an LSTM, whose
inputs include the last action and the last reward.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium as gym
from torch import Tensor

from clusterenv.errors import ConfigError
from clusterenv.returns import VTrace, vtrace
from clusterenv.store import Rollout
from pipelines.envs import football
from pipelines.experiment import Losses, StreamAlgorithm, StreamArgs, main
from pipelines.experiment.checks import Bound, Count, Limit, Natural, NotNegative, Positive, Share
from pipelines.networks.actor_critic import ActorCritic, Unrolled
from pipelines.networks.flat_adam import FlatAdam
from pipelines.networks.recurrent import RecurrentActorCritic
from pipelines.networks.running import explained_variance

__all__ = ["IMPALA", "Args", "VTraceArgs", "VTraceLearner"]

EXPLAINED_EVERY = 8
"""Fragments between those whose explained variance is logged: it would take 2 % of an update."""


@dataclass(frozen=True)
class VTraceArgs(StreamArgs):
    """Options of learners that correct for the lag by V-trace."""

    total_steps: Count = 500_000  # environment steps, summed over all environments
    horizon: Count = 16  # steps of each environment in a fragment
    sync: Literal["every-version", "every", "divergence", "never"] = "every-version"  # when to pull
    threshold: Limit = 0.05  # with --sync divergence: pull above this divergence
    anneal: bool = True  # decrease the learning rate linearly to 0
    lam: Share = 1.0  # how far later rows count in a target
    entropy: NotNegative = 0.01  # weight of the entropy bonus
    value_coef: NotNegative = 0.5  # weight of the value loss
    grad_norm: Bound = 40.0  # clip gradients to this norm
    reward_scale: Positive = 1.0  # the learner multiplies rewards by it
    reward_clip: Bound = float("inf")  # and clips them to this
    normalize_obs: bool = True  # by their running mean and variance; images are not
    minibatches: Count = 1  # into how many a fragment is split, with an update for each
    hidden: tuple[Count, ...] = (64, 64)  # layers of actor and critic


@dataclass(frozen=True)
class Args(VTraceArgs):
    """Options; ``IMPALA.preset`` returns tuned ones for some environments."""

    rho_bar: Bound = 1.0  # upper bound of the importance weights in the targets
    rho_pg: Bound = 1.0  # and in the policy gradient
    recurrent: Natural = 0  # units of an LSTM; 0 for none

    def __post_init__(self) -> None:
        super().__post_init__()
        envs = self.num_envs // (self.shards or 1)
        if self.minibatches > envs:
            raise ConfigError(
                f"--minibatches {self.minibatches} cannot split a fragment of {envs} environments, "
                f"whose time rows stay together: --minibatches {envs}"
            )
        if self.recurrent and not self.hidden:
            raise ConfigError(
                f"--recurrent {self.recurrent} needs a layer below the LSTM: --hidden 64"
            )


# fmt: off
FOOTBALL: dict[str, Any] = {
    "engine": "native", "cnn": "pooled", "total_steps": 1_000_000, "horizon": 32,
    "minibatches": 4, "lr": 1e-3, "gamma": 0.993, "lam": 0.95, "reward_scale": 5.0,
    "log_every": 5_000, "checkpoint_every": 50_000, "evaluate_env_args": ("reward=score",),
}
ATARI: dict[str, Any] = {
    "total_steps": 300_000, "horizon": 20, "minibatches": 4, "lr": 6e-4, "lam": 0.95,
    "entropy": 0.002, "reward_clip": 1.0, "hidden": (256,), "log_every": 2_000,
    "checkpoint_every": 50_000,
}
ZIPF: dict[str, Any] = {
    "num_envs": 64, "horizon": 32, "recurrent": 64, "cnn": "tiles:9", "engine": "native",
    "lr": 2e-3, "gamma": 0.98, "reward_scale": 10.0, "value_coef": 0.05,
    "log_every": 20_000, "checkpoint_every": 200_000, "evaluate_episodes": 50,
    "evaluate_splits": ("zipf", "uniform", "rare"),
}
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"lr": 2e-3, "reward_scale": 0.1},
    "clusterenv/CartPoleNoVelocity-v1": {
        "total_steps": 1_500_000, "horizon": 32, "lr": 1e-3, "reward_scale": 0.1,
        "recurrent": 64, "hidden": (64,),
    },
    "LunarLander-v3": {
        # Few environments and short fragments: few rows are in flight while the learner moves on.
        "total_steps": 1_500_000, "num_envs": 4, "horizon": 32, "minibatches": 2, "lr": 1e-3,
        "gamma": 0.999, "lam": 0.98, "entropy": 0.001, "grad_norm": 0.5, "reward_scale": 0.02,
    },
    **dict.fromkeys(football.EASIEST, FOOTBALL),
    "Breakout-v5": {**ATARI, "engine": "envpool"},
    "ale_py:ALE/Breakout-v5": {**ATARI, "engine": "native"},
    "clusterenv/ZipfGridworld-v0": {**ZIPF, "total_steps": 20_000_000},
    "clusterenv/ZipfGridworldSmall-v0": {**ZIPF, "total_steps": 2_000_000},
}
# fmt: on


class VTraceLearner(StreamAlgorithm[VTraceArgs]):
    """What learners with V-trace share: agent, optimizer, rewards and targets."""

    agent: ActorCritic | RecurrentActorCritic
    valued: tuple[Tensor, Tensor] | None = None
    """Values and targets of the rows that were learned from last."""
    fragments: int = 0
    """That this session has learned from."""

    def adopt(self, agent: ActorCritic | RecurrentActorCritic) -> None:
        """Take the agent that learns and acts."""
        self.agent = self.policy = agent
        self.optimizer = FlatAdam(agent, self.args.lr)
        self.parts = {"agent": agent, "optimizer": self.optimizer}

    def targets(self, rows: Rollout, unrolled: Unrolled, log_prob: Tensor, **bounds: Any) -> VTrace:
        """Return V-trace's targets and advantages, by a policy's log-probabilities."""
        args, value = self.args, unrolled.value.detach()
        rewards = (rows["reward"] * args.reward_scale).clamp(-args.reward_clip, args.reward_clip)
        found = vtrace(
            (log_prob - rows["log_prob"]).detach(),
            rewards,
            value,
            unrolled.next_value,
            rows["terminated"],
            rows["truncated"],
            args.gamma,
            args.lam,
            **bounds,
        )
        self.valued = value, found.targets
        return found

    def learn(self, rows: Rollout, progress: float) -> Losses:
        lr = self.anneal(self.optimizer, progress)
        losses = self.improve(rows)
        self.agent.take_statistics(rows)  # only now: the updates needed those that acted
        means = {name: sum(each[name] for each in losses) / len(losses) for name in losses[0]}
        self.fragments += 1
        if self.valued is not None and self.fragments % EXPLAINED_EVERY == 1:
            means["explained_variance"] = explained_variance(*self.valued)
        return {"lr": lr, **means}

    @abstractmethod
    def improve(self, rows: Rollout) -> list[Losses]:
        """Make the updates of a fragment; return losses and diagnostics of each."""


class IMPALA(VTraceLearner):
    """Importance-weighted actor-learner architecture."""

    name, title, presets = "impala", "IMPALA", PRESETS
    args_type: ClassVar[type[VTraceArgs]] = Args
    args: Args

    def __init__(
        self, args: Args, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__(args, observation_space, action_space)
        self.bounds = {"rho_bar": args.rho_bar, "rho_pg": args.rho_pg}
        self.adopt(self.make_agent())

    def make_agent(self) -> ActorCritic | RecurrentActorCritic:
        """Return the network that learns and acts."""
        args, spaces = self.args, (self.observation_space, self.action_space)
        seeing: Any = args.normalize_obs, args.cnn
        if args.recurrent:
            return RecurrentActorCritic(*spaces, args.hidden, args.recurrent, *seeing)
        return ActorCritic(*spaces, args.hidden, *seeing)

    def improve(self, rows: Rollout) -> list[Losses]:
        # An LSTM needs the time rows of an environment together. A fragment has the fewer
        # environments the more shards there are.
        parts = min(self.args.minibatches, rows["reward"].shape[1])
        return [self.update(part) for part in rows.split(parts)]

    def update(self, rows: Rollout) -> Losses:
        """Make one step of the optimizer."""
        loss, said = self.loss(rows, self.agent.unroll(rows))
        return {**said, "grad_norm": self.optimizer.descend(loss, self.args.grad_norm)}

    def loss(self, rows: Rollout, unrolled: Unrolled) -> tuple[Tensor, Losses]:
        """Return the loss of rows, and what to log of it."""
        args = self.args
        targets = self.targets(rows, unrolled, unrolled.log_prob, **self.bounds)
        policy_loss = -(targets.advantages * unrolled.log_prob).mean()
        value_loss = 0.5 * (targets.targets - unrolled.value).square().mean()
        entropy = unrolled.entropy.mean()
        loss = policy_loss + args.value_coef * value_loss - args.entropy * entropy
        weight = (unrolled.log_prob - rows["log_prob"]).detach().exp().mean()
        return loss, {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "importance": weight,
        }


if __name__ == "__main__":
    main(IMPALA)
