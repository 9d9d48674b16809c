"""Train by R2D2: recurrent double Q-learning from stored sequences (Kapturowski et al., 2019).

``python -m pipelines.r2d2 --env clusterenv/CartPoleNoVelocity-v1 --stop-at 475``

The store keeps the LSTM's state at the first row of every sequence. Both networks first run over
``--burn-in`` rows, which brings that state up to date with their weights, and learn from the rows
after these. Values are learned on the scale of :func:`clusterenv.returns.rescale`. Environments
explore as in Ape-X, and the workers compute the errors that first rank a sequence.
``--zero-state`` and ``--burn-in 0`` leave out what they name, to see what it is good for.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clusterenv.errors import ConfigError
from clusterenv.policies import Fragment
from clusterenv.returns import inverse_rescale, n_step_returns, rescale, sequence_priorities
from clusterenv.store import Prioritized, Sequences
from pipelines.apex import ladder
from pipelines.experiment import Losses, ReplayAlgorithm, ReplayArgs, main
from pipelines.experiment.checks import (
    Bound,
    Count,
    Fraction,
    Inside,
    Natural,
    NotNegative,
    Positive,
    Share,
)
from pipelines.networks.episode_rows import EpisodeRows, episodes_of
from pipelines.networks.flat_adam import FlatAdam
from pipelines.networks.images import stack_of
from pipelines.networks.recurrent_q import RecurrentEpsilonGreedy, RecurrentQNetwork

__all__ = ["R2D2", "Args", "RecurrentExplorers", "td_errors"]


@dataclass(frozen=True)
class Args(ReplayArgs):
    """Options; ``R2D2.preset`` returns tuned ones for some environments."""

    num_envs: Count = 16  # environments, summed over all shards
    horizon: Count = 24  # rows from one sequence's first to the next one's; a fragment has as many
    sync: Literal["every-version", "every", "divergence", "never"] = "every-version"  # when to pull
    lr: Positive = 5e-4  # learning rate of Adam
    gamma: Share = 0.997  # discount per step
    grad_norm: Bound = 40.0  # clip gradients to this norm
    hidden: tuple[Count, ...] = (64,)  # hidden layers below the LSTM
    n_step: Count = 5  # steps of a return before bootstrapping
    batch: Count = 32  # sequences per update
    rows_per_update: Count = 64  # rows collected per update; limits collection and learner
    prioritized: bool = True  # prioritised sampling by the errors of a sequence
    alpha: Share = 0.9  # with --prioritized: exponent of the priorities
    beta: Share = 0.6  # with --prioritized: initial exponent of the weights; grows to 1
    publish_every: Count = 8  # updates between published versions
    sequence: Count = 48  # rows of a sequence, the burn-in included
    burn_in: Natural = 8  # of these, rows that only bring the stored state up to date
    zero_state: bool = False  # begin every sequence with a state of zeros instead of the stored one
    units: Count = 64  # of the LSTM
    target_every: Count = 200  # updates between updates of the target network
    tau: Fraction = 1.0  # step of the target network towards the learner's; 1 copies it
    temperature: Positive = 1.0  # of the softmax over values that --sync divergence compares
    ladder_base: Inside = 0.4  # epsilon of the first environment
    ladder_power: NotNegative = 7.0  # the last explores with base to the power of 1 + this

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.burn_in >= self.sequence:
            raise ConfigError(
                f"--burn-in {self.burn_in} leaves no row to learn from, of --sequence "
                f"{self.sequence}: --burn-in {self.sequence // 2}"
            )
        if self.horizon > self.sequence:
            raise ConfigError(
                f"--horizon {self.horizon} leaves rows out, as a sequence of --sequence "
                f"{self.sequence} begins with every fragment: --horizon {self.sequence}"
            )
        if self.sequence * self.num_envs > self.capacity:
            raise ConfigError(
                f"--capacity {self.capacity} has no room for a sequence of {self.sequence} rows of "
                f"each of {self.num_envs} environments: "
                f"--capacity {10 * self.sequence * self.num_envs}"
            )


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "clusterenv/CartPoleNoVelocity-v1": {
        "total_steps": 400_000, "lr": 1e-3, "anneal": True, "gamma": 0.99, "rows_per_update": 32,
    },
    "Pong-v5": {
        "engine": "envpool", "total_steps": 100_000, "num_envs": 8, "horizon": 40, "sequence": 80,
        "burn_in": 40, "batch": 16, "rows_per_update": 640, "capacity": 100_000,
        "min_rows": 5_000, "hidden": (256,), "units": 256, "lr": 1e-4, "publish_every": 1,
        "log_every": 1_000,
    },
}
# fmt: on


def td_errors(online: Tensor, target: Tensor, rows: EpisodeRows, gamma: float, n: int) -> Tensor:
    """Return how far the value of every row's action is from its target, ``[time, n]``.

    With ``h`` = :func:`clusterenv.returns.rescale`, the target is ``h(sum of up to n rewards +
    gamma^n h^-1(Q_target(s, argmax Q_online(s))))`` with ``s`` ``n`` rows further on.

    Parameters
    ----------
    online, target
        Values by the network that learns and by the target network, ``[time + 1, n, actions]``.
    rows
        Whose values these are.
    gamma, n
        Discount per step, and steps of a return.
    """
    best = online.detach().argmax(-1, keepdim=True)
    following = inverse_rescale(target.gather(-1, best).squeeze(-1)[1:])
    ends = rows.terminated, rows.truncated
    returns = n_step_returns(rows.reward, following, *ends, gamma, n)
    taken = online[:-1].gather(-1, rows.action.long().unsqueeze(-1)).squeeze(-1)
    return rescale(returns) - taken


class RecurrentExplorers(RecurrentEpsilonGreedy):
    """Acts with an epsilon per environment; adds absolute TD errors as the column ``priority``.

    Parameters
    ----------
    q_module, epsilon, temperature
        As for :class:`pipelines.networks.recurrent_q.RecurrentEpsilonGreedy`.
    n_step, gamma
        As the learner has them. Returns end with the fragment.
    """

    def __init__(
        self,
        q_module: RecurrentQNetwork,
        epsilon: list[float],
        n_step: int,
        gamma: float,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(q_module, epsilon, temperature)
        self.n_step = n_step
        self.gamma = gamma

    def annotate(self, fragment: Fragment) -> Mapping[str, npt.NDArray[Any]]:
        rows, at, mask = episodes_of(fragment, self.module.initial_state(1))
        rows = rows.to(next(self.module.parameters()).device)
        values = self.module.unroll(rows.obs, rows.action, rows.reward, rows.state)
        errors = td_errors(values, values, rows, self.gamma, self.n_step)
        priority = np.empty(at.max() + 1, np.float32)
        priority[at[mask]] = errors.abs().cpu().numpy()[mask]
        return {"priority": priority}


class R2D2(ReplayAlgorithm[Args]):
    """Recurrent replay distributed DQN."""

    name, title, presets = "r2d2", "R2D2", PRESETS
    args_type: ClassVar[type[Args]] = Args

    def __init__(
        self, args: Args, observation_space: gym.Space[Any], action_space: gym.Space[Any]
    ) -> None:
        super().__init__(args, observation_space, action_space)
        spaces = observation_space, action_space
        self.q = RecurrentQNetwork(*spaces, args.hidden, args.units, args.cnn)
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.optimizer = FlatAdam(self.q, args.lr)
        self.parts = {"q": self.q, "target": self.target, "optimizer": self.optimizer}
        self.updates = 0
        self.stack = stack_of(observation_space)
        epsilon = ladder(args.num_envs, args.ladder_base, args.ladder_power)
        self.policy = RecurrentExplorers(self.q, epsilon, args.n_step, args.gamma, args.temperature)

    def sampler(self) -> Sequences:
        args = self.args
        base = Prioritized(args.alpha, args.beta) if args.prioritized else None
        length, overlap = args.sequence - args.burn_in, args.sequence - args.horizon
        return Sequences(length, args.burn_in, overlap, base)

    def judged(self) -> range:
        """Return the quarter of the environments with the smallest epsilon."""
        return range(self.args.num_envs - max(1, self.args.num_envs // 4), self.args.num_envs)

    def learn(self, rows: Mapping[str, Tensor], progress: float) -> tuple[Losses, Tensor]:
        args = self.args
        lr = self.anneal(self.optimizer, progress)
        errors, learn = self.errors(rows)
        loss = 0.5 * errors.square().sum(0)
        loss = (rows["weights"] * loss).mean()
        self.optimizer.descend(loss, args.grad_norm)
        self.updates += 1
        if self.updates % args.target_every == 0:
            self.move_target()
        priorities = sequence_priorities(errors.detach(), learn)
        return {"lr": lr, "loss": loss, "td": priorities.mean()}, priorities

    def errors(self, sample: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the TD errors of a sample, 0 where nothing is learned, and where that is."""
        args, rows, learn = self.args, EpisodeRows.of(sample), sample["learn"].transpose(0, 1)
        state = dict(rows.state)
        if args.zero_state:
            state |= {name: torch.zeros_like(state[name]) for name in ("hidden", "cell")}
        steps = (rows.obs, rows.action, rows.reward, state)
        exact = learn[0]  # what is learned from whole begins an episode
        online = self.q.unroll(*steps, args.burn_in, exact)
        with torch.no_grad():
            target = self.target.unroll(*steps)
        errors = td_errors(online, target, rows, args.gamma, args.n_step)
        return errors.where(learn, 0.0), learn

    @torch.no_grad()
    def move_target(self) -> None:
        """Move the target network towards the one that learns."""
        for ours, theirs in zip(self.target.parameters(), self.q.parameters(), strict=True):
            ours.lerp_(theirs, self.args.tau)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.updates = int(state["updates"])


if __name__ == "__main__":
    main(R2D2)
