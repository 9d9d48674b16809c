"""Train by IMPACT: IMPALA's actors, a target network, and each fragment used several times.

``python -m pipelines.impact --env CartPole-v1 --stop-at 475``

Luo et al. (2020). A circular buffer keeps the newest fragments; each is drawn at random, a bounded
number of times. With ``pi``, the learner, ``pi_t``, a target network, and ``mu``, the policy that
acted, the surrogate of PPO is clipped around ``pi_t`` with the ratio ``pi / max(pi_t, mu / 2)``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import gymnasium as gym
import torch
from torch import Tensor
from torch.distributions import kl_divergence

from clusterenv.errors import ConfigError
from clusterenv.store import Recent, Rollout
from pipelines.experiment import Losses, main, shuffled
from pipelines.experiment.checks import Bound, Count, NotNegative, Positive
from pipelines.impala import VTraceArgs, VTraceLearner
from pipelines.networks.actor_critic import ActorCritic

__all__ = ["IMPACT", "Args", "ratio"]


@dataclass(frozen=True)
class Args(VTraceArgs):
    """Options; ``IMPACT.preset`` returns tuned ones for some environments."""

    buffer: Count = 4  # newest fragments that are kept
    uses: Count = 2  # how often each may be drawn
    draws: Count = 1  # fragments that are drawn, if there are, for each one that is taken
    target_every: Count = 4  # draws between copies to the target network
    clip: Bound = 0.4  # clipping range of the ratio
    normalize_advantages: bool = True  # to mean 0 and deviation 1, in each fragment
    kl_coef: NotNegative = 0.0  # initial weight of the KL divergence from the target; 0 for none
    kl_target: Positive = 0.01  # with --kl-coef: its weight grows above twice, falls below half

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws > self.uses:
            raise ConfigError(
                f"--draws {self.draws} of each fragment are more than its --uses {self.uses}: "
                f"--uses {self.draws}"
            )


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"lr": 2e-3, "horizon": 32, "target_every": 16, "reward_scale": 0.1},
    "LunarLander-v3": {
        # As IMPALA's: few rows in flight, and advantages as they are, as a fragment has only 128.
        "total_steps": 1_500_000, "num_envs": 8, "horizon": 32, "minibatches": 4, "lr": 1e-3,
        "gamma": 0.999, "lam": 0.98, "entropy": 0.001, "grad_norm": 0.5, "reward_scale": 0.02,
        "normalize_advantages": False,
    },
    "Pendulum-v1": {
        # Whole episodes, as for PPO; few environments, so that the rows in flight are few.
        "total_steps": 500_000, "num_envs": 8, "horizon": 200, "minibatches": 4, "uses": 4,
        "draws": 4, "target_every": 8, "clip": 0.2, "lr": 5e-4, "gamma": 0.95, "lam": 0.95,
        "entropy": 0.0, "grad_norm": 0.5, "reward_scale": 0.03,
    },
}
# fmt: on


def ratio(log_prob: Tensor, target: Tensor, behaviour: Tensor) -> Tensor:
    """Return ``min(mu / pi_t, 2) pi / mu``, which is ``pi / max(pi_t, mu / 2)``.

    Examples
    --------
    >>> half, third, whole = torch.tensor([0.5, 1 / 3, 1.0]).log().unsqueeze(-1)
    >>> round(ratio(half, third, half).item(), 3), round(ratio(half, third, whole).item(), 3)
    (1.5, 1.0)
    """
    return (log_prob - torch.maximum(target, behaviour - math.log(2))).exp()


class IMPACT(VTraceLearner):
    """Importance-weighted asynchronous architecture with clipped target networks."""

    name, title, presets = "impact", "IMPACT", PRESETS
    args_type: ClassVar[type[VTraceArgs]] = Args
    agent: ActorCritic
    args: Args

    def __init__(
        self, args: Args, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__(args, observation_space, action_space)
        spaces = observation_space, action_space
        self.adopt(ActorCritic(*spaces, args.hidden, args.normalize_obs, args.cnn))
        self.target = copy.deepcopy(self.agent).requires_grad_(False)
        self.parts = {**self.parts, "target": self.target}
        self.draws, self.samples, self.kl_coef = args.draws, 0, args.kl_coef
        self.kls: list[float] = []  # since the target network was copied

    def recent(self) -> Recent:
        return Recent(self.args.buffer, self.args.uses)

    def improve(self, rows: Rollout) -> list[Losses]:
        columns = self.prepare(rows)
        losses = [self.update(*part) for part in shuffled(columns, self.args.minibatches)]
        self.kls += [float(each["kl"]) for each in losses]
        self.samples += 1
        if self.samples % self.args.target_every == 0:
            self.adapt(fmean(self.kls))
            self.kls = []
            self.target.load_state_dict(self.agent.state_dict())
        return losses

    @torch.no_grad()
    def prepare(self, rows: Rollout) -> tuple[Tensor, ...]:
        """Return what an update needs of every row, the rows one after the other."""
        unrolled, reference = self.agent.unroll(rows), self.target.unroll(rows)
        targets = self.targets(rows, unrolled, reference.log_prob)
        advantage = targets.advantages
        if self.args.normalize_advantages:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        obs = self.agent.normalize(self.agent.observed(rows.columns).flatten(0, 1))
        action = rows[self.agent.head.column].flatten(0, 1)
        near = reference.log_prob, rows["log_prob"], advantage, targets.targets
        return obs, action, reference.out.flatten(0, 1), *(column.flatten() for column in near)

    def update(
        self,
        obs: Tensor,
        action: Tensor,
        reference: Tensor,
        target_log_prob: Tensor,
        behaviour: Tensor,
        advantage: Tensor,
        target: Tensor,
    ) -> Losses:
        """Make one step of the optimizer."""
        args = self.args
        out, value = self.agent(obs)
        log_prob, entropies = self.agent.head.judge(out, action)
        weight = ratio(log_prob, target_log_prob, behaviour)
        clipped = weight.clamp(1 - args.clip, 1 + args.clip)
        policy_loss = -torch.min(weight * advantage, clipped * advantage).mean()
        value_loss = 0.5 * (target - value).square().mean()
        entropy = entropies.mean()
        heads = self.target.head.distribution(reference), self.agent.head.distribution(out)
        kl = kl_divergence(*heads).mean()
        loss = policy_loss + args.value_coef * value_loss - args.entropy * entropy
        if self.kl_coef:
            loss = loss + self.kl_coef * kl
        norm = self.optimizer.descend(loss, args.grad_norm)
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": kl.detach(),
            "kl_coef": self.kl_coef,
            "clip_fraction": (weight != clipped).float().mean(),
            "grad_norm": norm,
        }

    def adapt(self, kl: float) -> None:
        """Make the penalty stronger if the learner was far from its target, weaker if near."""
        if kl > 2 * self.args.kl_target:
            self.kl_coef = min(1.5 * self.kl_coef, 1e4)
        elif kl < 0.5 * self.args.kl_target and self.kl_coef:
            self.kl_coef = max(0.5 * self.kl_coef, 1e-4)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "samples": self.samples, "kl_coef": self.kl_coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.samples, self.kl_coef = int(state["samples"]), float(state["kl_coef"])


if __name__ == "__main__":
    main(IMPACT)
