"""Train by double DQN from a replay store, while collection continues.

``python -m pipelines.dqn --env CartPole-v1 --stop-at 475``

Rows, priorities and learner are saved together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym
import torch
from torch import Tensor, nn

from clusterenv.policies import EpsilonGreedy
from pipelines.experiment import Losses, ReplayAlgorithm, ReplayArgs, main
from pipelines.experiment.checks import Count, Fraction, Limit, Positive, Share
from pipelines.networks.flat_adam import FlatAdam
from pipelines.networks.images import stack_of
from pipelines.networks.q_network import QNetwork
from pipelines.networks.target import follow

__all__ = ["DQN", "Args", "QArgs", "targets"]


@dataclass(frozen=True)
class QArgs(ReplayArgs):
    """Options of learners with a Q network."""

    temperature: Positive = 1.0  # of the softmax over values that --sync divergence compares
    target_every: Count = 1  # updates between updates of the target network
    tau: Fraction = 0.005  # step of the target network towards the learner's; 1 copies it
    duelling: bool = False  # separate state value and advantages


@dataclass(frozen=True)
class Args(QArgs):
    """Options; ``DQN.preset`` returns tuned ones for some environments."""

    threshold: Limit = 0.1  # with --sync divergence: pull above this divergence
    epsilon_start: Share = 1.0  # probability of a random action at first
    epsilon_end: Share = 0.01  # and from --epsilon-steps on
    epsilon_steps: Count = 20_000  # steps in which it comes down, linearly


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "lr": 2e-3, "anneal": True, "n_step": 3, "tau": 0.02, "epsilon_steps": 10_000,
    },
    "LunarLander-v3": {
        "total_steps": 1_000_000, "num_envs": 16, "lr": 5e-4, "anneal": True, "n_step": 3,
        "hidden": (256, 256), "capacity": 300_000, "min_rows": 5_000, "epsilon_end": 0.02,
        "epsilon_steps": 80_000, "log_every": 5_000, "checkpoint_every": 50_000,
        "sync": "every-version",
    },
    "Pong-v5": {
        # A stack of 4 needs 4 frames beside the rows of each fragment: longer ones need fewer.
        "engine": "envpool", "total_steps": 100_000, "horizon": 64, "lr": 1e-4, "n_step": 3,
        "batch": 32, "rows_per_update": 8, "capacity": 100_000, "min_rows": 2_000, "hidden": (512,),
        "epsilon_steps": 20_000, "target_every": 500, "tau": 1.0, "prioritized": True,
        "duelling": True, "log_every": 1_000, "publish_every": 32,
    },
}
# fmt: on


def targets(
    online: Callable[[Tensor], Tensor],
    target: Callable[[Tensor], Tensor],
    sample: Mapping[str, Tensor],
) -> Tensor:
    """Return double DQN's target for each row of a sample.

    ``reward + discount (1 - terminated) Q_target(next_obs, argmax_a Q_online(next_obs, a))``; an
    episode that was only truncated goes on being worth something.
    """
    following = sample["next_obs"]
    best = online(following).argmax(-1, keepdim=True)
    value = target(following).gather(-1, best).squeeze(-1)
    return sample["reward"] + sample["discount"] * ~sample["terminated"] * value


class DQN(ReplayAlgorithm[QArgs]):
    """Double DQN (van Hasselt et al., 2016): all environments explore with the same epsilon."""

    name, title, presets = "dqn", "DQN", PRESETS
    args_type: ClassVar[type[QArgs]] = Args

    def __init__(
        self, args: QArgs, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__(args, observation_space, action_space)
        spaces = observation_space, action_space
        self.q = QNetwork(*spaces, args.hidden, args.duelling, args.cnn)
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.optimizer = FlatAdam(self.q, args.lr)
        self.parts = {"q": self.q, "target": self.target, "optimizer": self.optimizer}
        self.updates = 0
        self.stack = stack_of(observation_space)
        self.policy = self.explore()

    def explore(self) -> EpsilonGreedy:
        """Return the policy that collects."""
        return EpsilonGreedy(self.q, self.scalars(0)["epsilon"], self.args.temperature)

    def scalars(self, steps: int) -> dict[str, float]:
        args = self.args
        assert isinstance(args, Args)
        part = min(1.0, steps / args.epsilon_steps)
        return {"epsilon": args.epsilon_start + part * (args.epsilon_end - args.epsilon_start)}

    def learn(self, rows: Mapping[str, Tensor], progress: float) -> tuple[Losses, Tensor]:
        lr = self.anneal(self.optimizer, progress)
        with torch.no_grad():
            wanted = targets(self.q, self.target, rows)
        action = rows["action"].long().unsqueeze(-1)
        values: Tensor = self.q(rows["obs"]).gather(-1, action).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(values, wanted, reduction="none")
        loss = (rows["weights"] * loss).mean()
        norm = self.optimizer.descend(loss, self.args.grad_norm)
        self.updates += 1
        if self.updates % self.args.target_every == 0:
            self.move_target()
        values = values.detach()
        losses: Losses = {"lr": lr, "loss": loss, "q": values.mean(), "grad_norm": norm}
        return losses, (wanted - values).abs()

    def move_target(self) -> None:
        """Move the target network towards the one that learns."""
        follow(self.target, self.q, self.args.tau)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates = int(state["updates"])


if __name__ == "__main__":
    main(DQN)
