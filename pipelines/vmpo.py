"""Train by V-MPO: the better half of the actions, weighted by their advantages.

``python -m pipelines.vmpo --env CartPole-v1 --stop-at 475``

Song et al. (2020). A target network acts, and is what the learner must stay near to; it is copied
every ``--publish-every`` rollouts. Temperature and penalties are duals that learn by themselves.
There are no importance weights, and there is no entropy bonus.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.returns import gae
from clusterenv.store import Rollout
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
from pipelines.networks.popart import PopArt
from pipelines.networks.running import RewardScaler, explained_variance

__all__ = ["VMPO", "Args", "Duals", "policy_loss", "temperature_loss"]


@dataclass(frozen=True)
class Args(RolloutArgs):
    """Options; ``VMPO.preset`` returns tuned ones for some environments."""

    total_steps: Count = 300_000  # environment steps, summed over all environments
    horizon: Count = 64  # steps of each environment between updates
    sync: Literal["every-version", "every", "divergence", "never"] = "every-version"  # when to pull
    threshold: Limit = 0.05  # with --sync divergence: pull above this divergence
    lr: Positive = 1e-3  # learning rate of Adam
    dual_lr: Positive = 1e-2  # of temperature and penalties
    anneal: bool = True  # decrease the learning rate linearly to 0
    lam: Share = 0.95  # lambda of generalised advantage estimation
    epochs: Count = 8  # passes over a rollout
    minibatches: Count = 4  # per pass
    eta: Positive = 1.0  # initial temperature
    eps_eta: Positive = 0.02  # how far the weights may be from uniform
    alpha: Positive = 0.1  # initial penalty of the policy's step; of the mean, if continuous
    eps_alpha: Positive = 0.01  # how far the policy may step; of the mean, per dimension
    alpha_std: Positive = 1.0  # initial penalty of the standard deviation's step, if continuous
    eps_std: Positive = 5e-4  # how far the standard deviation may step, per dimension
    value_coef: NotNegative = 0.5  # weight of the value loss
    grad_norm: Bound = 0.5  # clip gradients to this norm
    normalize_obs: bool = True  # by their running mean and variance
    scale_rewards: bool = True  # by the running return's deviation
    popart: Share = 0.0  # step of the statistics that normalise values (PopArt); 0 for none
    hidden: tuple[Count, ...] = (64, 64)  # layers of actor and critic

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minibatches(self, self.minibatches)


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"eps_alpha": 0.005},
    "LunarLander-v3": {
        "total_steps": 1_500_000, "lr": 5e-4, "gamma": 0.999, "lam": 0.98, "eps_eta": 0.1,
    },
    "Pendulum-v1": {
        "total_steps": 500_000, "horizon": 200, "epochs": 10, "minibatches": 16, "lr": 5e-4,
        "gamma": 0.95, "eps_eta": 0.5, "eps_alpha": 0.05, "eps_std": 0.005,
    },
}
# fmt: on


def top_half(advantages: Tensor) -> Tensor:
    """Return which samples are at least as good as the median.

    Examples
    --------
    >>> top_half(torch.tensor([1.5, 4.0, 123.0, -3.0])).tolist()
    [False, True, True, False]
    """
    return advantages >= advantages.topk(max(1, len(advantages) // 2)).values[-1]


def policy_loss(log_probs: Tensor, advantages: Tensor, eta: Tensor) -> Tensor:
    """Return ``-sum psi log pi`` of the samples that are kept, ``psi = softmax(A / eta)``."""
    weights = (advantages / eta).softmax(0).detach()
    return -(weights * log_probs).sum()


def temperature_loss(advantages: Tensor, eta: Tensor, epsilon: float) -> Tensor:
    """Return the dual's loss, ``eta (epsilon + log mean exp(A / eta))``."""
    return eta * (epsilon + (advantages / eta).logsumexp(0) - math.log(len(advantages)))


class Duals(nn.Module):
    """Positive numbers that learn: the temperature, and the penalties of the policy's step.

    Parameters
    ----------
    eta
        Initial temperature.
    alphas
        Initial penalties, by name; each has as many numbers as its shape says.
    """

    def __init__(self, eta: float, alphas: Mapping[str, Tensor]) -> None:
        super().__init__()
        raw = {"eta": torch.tensor(eta), **alphas}
        # The inverse of softplus.
        self.raw = nn.ParameterDict(
            {name: x + torch.log(-torch.expm1(-x)) for name, x in raw.items()}
        )

    def __getitem__(self, name: str) -> Tensor:
        return nn.functional.softplus(self.raw[name])

    def penalty(self, name: str, kl: Tensor, epsilon: float) -> Tensor:
        """Return ``alpha (epsilon - KL) + sg(alpha) KL``, with no gradient of KL in the first.

        Parameters
        ----------
        name
            Of the penalty.
        kl
            Mean over all samples; one number, or one per dimension, which are added up.
        epsilon
            How large it may be.
        """
        alpha = self[name]
        return (alpha * (epsilon - kl.detach()) + alpha.detach() * kl).sum()


class VMPO(RolloutAlgorithm[Args]):
    """On-policy maximum a posteriori policy optimisation."""

    name, title, args_type, presets = "vmpo", "V-MPO", Args, PRESETS

    def __init__(
        self, args: Args, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__(args, observation_space, action_space)
        spaces = observation_space, action_space
        self.agent = ActorCritic(*spaces, args.hidden, args.normalize_obs, args.cnn)
        self.target = copy.deepcopy(self.agent).requires_grad_(False)
        self.policy = self.target
        self.limits = {"alpha": args.eps_alpha}
        alphas = {"alpha": torch.tensor(args.alpha)}
        if self.agent.head.log_std is not None:
            size = self.agent.head.outputs
            self.limits |= {"alpha_std": args.eps_std}
            alphas = {
                "alpha": torch.full((size,), args.alpha),
                "alpha_std": torch.full((size,), args.alpha_std),
            }
        self.duals = Duals(args.eta, alphas)
        self.optimizer = FlatAdam(self.agent, args.lr)
        self.dual_optimizer = FlatAdam(self.duals, args.dual_lr)
        self.scaler = RewardScaler(args.num_envs, args.gamma)
        self.parts = {
            "agent": self.agent,
            "target": self.target,
            "duals": self.duals,
            "optimizer": self.optimizer,
            "dual_optimizer": self.dual_optimizer,
            "scaler": self.scaler,
        }
        self.popart = None
        if args.popart:
            last = self.agent.critic[-1]
            assert isinstance(last, nn.Linear)
            self.popart = PopArt(last, args.popart)
            self.parts["popart"] = self.popart
        self.rollouts = 0

    def learn(self, rows: Rollout, progress: float) -> Losses:
        args = self.args
        lr = self.anneal(self.optimizer, progress)
        columns, explained = self.prepare(rows)
        for _ in range(args.epochs):
            losses = [self.update(*part) for part in shuffled(columns, args.minibatches)]
        self.agent.take_statistics(rows)
        self.rollouts += 1
        if self.rollouts % args.publish_every == 0:
            self.target.load_state_dict(self.agent.state_dict())
        means = {name: torch.stack([each[name] for each in losses]).mean() for name in losses[0]}
        return {"lr": lr, **means, "explained_variance": explained}

    @torch.no_grad()
    def prepare(self, rows: Rollout) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return what an update needs of every row, the rows one after the other.

        And the share of the targets' variance that the values explain.
        """
        args, unrolled = self.args, self.agent.unroll(rows)
        rewards = rows["reward"]
        if args.scale_rewards:
            rewards = self.scaler(rewards, rows["env"], rows["step"])
        values = unrolled.value, unrolled.next_value
        if self.popart is not None:
            values = self.popart.value(values[0]), self.popart.value(values[1])
        ends = rows["terminated"], rows["truncated"]
        advantages = gae(rewards, *values, *ends, args.gamma, args.lam)
        targets = advantages + values[0]
        explained = explained_variance(values[0], targets)
        if self.popart is not None:
            self.popart.update(targets)
            targets = self.popart.normalize(targets)
        obs = self.agent.observed(rows.columns).flatten(0, 1)
        old, _ = self.target(self.target.normalize(obs))
        action = rows[self.agent.head.column].flatten(0, 1)
        flat = advantages.flatten(), targets.flatten()
        return (self.agent.normalize(obs), action, old, *flat), explained

    def update(
        self, obs: Tensor, action: Tensor, old: Tensor, advantage: Tensor, target: Tensor
    ) -> dict[str, Tensor]:
        """Make one step of both optimizers; return losses and diagnostics."""
        args, duals = self.args, self.duals
        out, value = self.agent(obs)
        log_prob, entropy = self.agent.head.judge(out, action)
        kept = top_half(advantage)
        eta, best = duals["eta"], advantage[kept]
        gain = policy_loss(log_prob[kept], best, eta.detach())
        dual = temperature_loss(best, eta, args.eps_eta)
        kls = self.divergences(old, out)
        penalty = sum(duals.penalty(name, kls[name], limit) for name, limit in self.limits.items())
        value_loss = 0.5 * (value - target).square().mean()
        loss = gain + dual + penalty + args.value_coef * value_loss
        self.dual_optimizer.gradient.zero_()
        norm = self.optimizer.descend(loss, args.grad_norm)  # backward for both
        self.dual_optimizer.step()
        return {
            "policy_loss": gain.detach(),
            "value_loss": value_loss.detach(),
            "entropy": entropy.detach().mean(),
            "kl": kls["alpha"].detach().sum(),
            "eta": eta.detach(),
            "alpha": duals["alpha"].detach().mean(),
            "grad_norm": norm,
        }

    def divergences(self, old: Tensor, out: Tensor) -> dict[str, Tensor]:
        """Return the mean KL(target || learner): of discrete actions, one number.

        Of continuous actions, that of the means with the target's deviation, and that of the
        deviations with the target's mean, each per dimension.
        """
        log_std = self.agent.head.log_std
        if log_std is None:
            before, after = old.log_softmax(-1), out.log_softmax(-1)
            return {"alpha": (before.exp() * (before - after)).sum(-1).mean()}
        old_log_std = self.target.head.log_std
        assert old_log_std is not None
        mean = 0.5 * ((out - old) / old_log_std.exp()).square().mean(0)
        std = log_std - old_log_std + 0.5 * (2 * (old_log_std - log_std)).exp() - 0.5
        return {"alpha": mean, "alpha_std": std}

    def load_weights(self, state: Mapping[str, Any]) -> None:
        # Temperature and penalties begin as the options say.
        super().load_weights({name: part for name, part in state.items() if name != "duals"})

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rollouts": self.rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.rollouts = int(state["rollouts"])


if __name__ == "__main__":
    main(VMPO)
