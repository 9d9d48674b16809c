"""Mask invalid actions with an ``action_mask`` in a Dict observation.

The policy gets the mask as ``context.mask``. The worker checks every action against the mask; a
forbidden action ends the run with an error. The policies of ClusterEnv give forbidden actions
zero probability. An environment may also return the mask in ``info["action_mask"]``.

    python examples/action_mask.py --items 12
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import clusterenv
from clusterenv.policies import Categorical, Context

Obs = dict[str, npt.NDArray[Any]]


class Shelf(gym.Env[Any, np.int64]):
    """Take all items from a shelf, each once; early ones count more."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.action_space = gym.spaces.Discrete(items)
        self.observation_space = gym.spaces.Dict(
            values=gym.spaces.Box(0, 1, (items,), np.float32),
            action_mask=gym.spaces.MultiBinary(items),
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        super().reset(seed=seed)
        self.values = self.np_random.random(self.items, np.float32)
        self.left = np.ones(self.items, np.int8)
        return self._observe(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        reward = float(self.values[action]) * self.left.mean()
        self.left[action] = 0
        return self._observe(), reward, not self.left.any(), False, {}

    def _observe(self) -> Obs:
        return {"values": self.values.copy(), "action_mask": self.left.copy()}


class Scores(nn.Module):
    """A network on one entry of the observation; it ignores the mask."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.layer = nn.Linear(items, items)

    def forward(self, obs: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self.layer(obs["values"])
        return scores


def main() -> None:
    """Collect, and check every row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--items", type=int, default=8)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--cluster", default="local", help="anything that clusterenv.connect takes")
    args = parser.parse_args()
    torch.manual_seed(1)

    policy = Categorical(Scores(args.items))
    with clusterenv.Collector(
        Shelf,
        policy,
        num_envs=args.num_envs,
        horizon=64,
        cluster=args.cluster,
        seed=1,
        items=args.items,
    ) as collector:
        batches = collector.collect(args.rows)

    def column(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([batch.flat(name) for batch in batches]))

    values, mask, action = column("obs.values"), column("obs.action_mask"), column("action")
    rows = torch.arange(len(action))
    allowed = mask.bool()

    print("left  rows   without the mask, forbidden")
    with torch.no_grad():
        blind = policy.module({"values": values}).softmax(-1)
        for left in range(args.items, 0, -1):
            at = allowed.sum(-1) == left
            share = blind[at].masked_fill(allowed[at], 0).sum(-1).mean()
            print(f"{left:>4}{int(at.sum()):>6,}{share:>30.0%}")

        # With the same mask, a learner recomputes the probabilities of the workers.
        context = Context(column("env"), mask=mask)
        again = policy.distribution({"values": values}, context).log_prob(action)
    forbidden = int((~allowed[rows, action]).sum())
    print(f"forbidden actions taken: {forbidden} of {len(action):,}")
    difference = (again - column("log_prob")).abs().max()
    print(f"log-probabilities computed again differ by at most {difference:.0e}")


if __name__ == "__main__":
    main()
