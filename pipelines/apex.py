"""Train by Ape-X: DQN's learner, and an epsilon per environment (Horgan et al., 2018).

``python -m pipelines.apex --env CartPole-v1 --stop-at 475``

Environment ``i`` of ``N`` explores with ``epsilon_i = 0.4^(1 + 7 i / (N - 1))``. The workers
compute the initial priority of every row, so the learner can rank a row before sampling it. A run
is judged by the quarter of the environments that explores least; the others act at random too
often to measure the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from clusterenv.policies import Context, Decision, EpsilonGreedy, Fragment
from pipelines.dqn import DQN, QArgs
from pipelines.envs import football
from pipelines.experiment import main
from pipelines.experiment.checks import Count, Inside, NotNegative

__all__ = ["Apex", "Args", "Explorers", "ladder", "td_errors"]


@dataclass(frozen=True)
class Args(QArgs):
    """Options; ``Apex.preset`` returns tuned ones for some environments."""

    num_envs: Count = 16  # environments, summed over all shards
    n_step: Count = 3  # steps of a return before it is bootstrapped
    prioritized: bool = True  # sample in proportion to the errors
    ladder_base: Inside = 0.4  # epsilon of the first environment
    ladder_power: NotNegative = 7.0  # the last explores with base to the power of 1 + this


# fmt: off
FOOTBALL: dict[str, Any] = {
    # A stack of 4 needs 4 frames beside the rows of each fragment: longer ones need fewer.
    "engine": "native", "cnn": "pooled", "total_steps": 1_000_000, "horizon": 64,
    "lr": 2.5e-4, "anneal": True, "gamma": 0.993, "batch": 64, "rows_per_update": 32,
    "capacity": 50_000, "min_rows": 5_000, "hidden": (256,), "duelling": True,
    "target_every": 100, "tau": 1.0, "n_step": 5, "log_every": 5_000, "checkpoint_every": 50_000,
    "sync": "every-version", "evaluate_env_args": ("reward=score",),
}
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"lr": 2e-3, "anneal": True, "tau": 0.02, "rows_per_update": 4},
    "LunarLander-v3": {  # DQN's, with this file's exploration and priorities
        "total_steps": 1_000_000, "lr": 5e-4, "anneal": True, "hidden": (256, 256),
        "capacity": 300_000, "min_rows": 5_000, "log_every": 5_000, "checkpoint_every": 50_000,
    },
    **dict.fromkeys(football.EASIEST, FOOTBALL),
}
# fmt: on


def ladder(num_envs: int, base: float = 0.4, power: float = 7.0) -> list[float]:
    """Return the epsilon of every environment.

    Examples
    --------
    >>> [round(epsilon, 4) for epsilon in ladder(3)]
    [0.4, 0.0162, 0.0007]
    """
    return [base ** (1 + power * i / max(1, num_envs - 1)) for i in range(num_envs)]


class Explorers(EpsilonGreedy):
    """Epsilon-greedy with an epsilon per environment; adds TD errors as the column ``priority``.

    Parameters
    ----------
    q_module
        Maps observations to action values.
    epsilon
        Of each environment.
    n_step, gamma
        As the learner's sampler has them.
    temperature
        As for :class:`clusterenv.policies.EpsilonGreedy`.
    """

    def __init__(
        self,
        q_module: nn.Module,
        epsilon: list[float],
        n_step: int,
        gamma: float,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(q_module, epsilon, temperature)
        self.n_step = n_step
        self.gamma = gamma

    def decide(self, values: Tensor, context: Context) -> Decision:
        decision = super().decide(values, context)
        taken = values.gather(-1, decision.action.unsqueeze(-1)).squeeze(-1)
        return decision._replace(extras={**decision.extras, "q_taken": taken})

    def annotate(self, fragment: Fragment) -> Mapping[str, npt.NDArray[Any]]:
        best = fragment.columns["q"]
        following = np.empty_like(best)
        following[: -fragment.num_envs] = best[fragment.num_envs :]
        tail: Tensor = self.module(torch.from_numpy(fragment.tail["obs"]))
        following[fragment.tail_rows] = tail.max(-1).values.numpy()
        errors = td_errors(fragment, following, self.n_step, self.gamma)
        return {"priority": np.abs(errors).astype(np.float32)}


def td_errors(
    fragment: Fragment, following: npt.NDArray[Any], n_step: int, gamma: float
) -> npt.NDArray[np.float64]:
    """Return the TD error of every row's ``q_taken``, from returns of up to ``n_step`` steps.

    Parameters
    ----------
    fragment
        Rows with ``q_taken``. A return ends with the episode, and with the fragment.
    following
        Value of each row's next observation.
    n_step, gamma
        Steps of a return, and discount per step.
    """
    columns = fragment.columns
    reward = columns["reward"].astype(np.float64)
    ends = np.zeros(len(reward), np.bool_)
    ends[fragment.tail_rows] = True
    total, discount = reward.copy(), np.full(len(reward), gamma)
    last = np.arange(len(reward))  # the row that each return has come to
    for _ in range(n_step - 1):
        going = np.flatnonzero(~ends[last])
        last[going] += fragment.num_envs
        total[going] += discount[going] * reward[last[going]]
        discount[going] *= gamma
    target = total + discount * ~columns["terminated"][last] * following[last]
    errors: npt.NDArray[np.float64] = target - columns["q_taken"]
    return errors


class Apex(DQN):
    """Ape-X: DQN's learner with explorers that differ."""

    name, title, args_type, presets = "apex", "Ape-X", Args, PRESETS

    def explore(self) -> Explorers:
        args = self.args
        assert isinstance(args, Args)
        epsilon = ladder(args.num_envs, args.ladder_base, args.ladder_power)
        return Explorers(self.q, epsilon, args.n_step, args.gamma, args.temperature)

    def scalars(self, steps: int) -> dict[str, float]:
        return {}  # each environment keeps its epsilon

    def judged(self) -> range:
        """Return the quarter of the environments with the smallest epsilon."""
        return range(self.args.num_envs - max(1, self.args.num_envs // 4), self.args.num_envs)


if __name__ == "__main__":
    main(Apex)
