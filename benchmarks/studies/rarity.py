"""Does the contrastive loss know what is rare? Without a learner, on Zipf's gridworld.

``python -m benchmarks.studies.rarity`` takes the observations of random actions into a familiarity
buffer, trains the network by the contrastive loss alone, and prints the rank correlation of the
rarity with the true one: as the episodic memory does it, with equal images to be told apart, and
with a network that learns nothing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from benchmarks.studies.command import main
from benchmarks.studies.rare_tasks import correlation
from pipelines.episodic_memory import MemoryIMPALA
from pipelines.experiment.checks import Count, Natural, Options

__all__ = ["ARMS", "Args", "measure", "study"]

NUM_ENVS = 64
STEPS = 8  # of all environments between updates
ARMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "equal images told apart": {"apart": True},
    "nothing learned": {"lr": 1e-12},
}


@dataclass(frozen=True)
class Args(Options):
    """What to measure."""

    env: str = "clusterenv/ZipfGridworldSmall-v0"  # a Zipf gridworld
    seeds: tuple[Natural, ...] = (1, 1001, 2001)  # environment i gets seed + i
    updates: Count = 800  # of the contrastive loss


def measure(args: Args, seed: int, lr: float = 1e-3, apart: bool = False) -> float:
    """Return the rank correlation after so many updates."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = gym.make_vec(args.env, NUM_ENVS, vectorization_mode="vector_entry_point")
    planned = dataclasses.replace(MemoryIMPALA.preset(args.env), seed=seed, lr=lr)
    learner = MemoryIMPALA(planned, envs.single_observation_space, envs.single_action_space)
    optimizer = torch.optim.Adam(learner.agent.parameters(), lr)
    obs, _ = envs.reset(seed=seed)
    for _ in range(args.updates):
        for _ in range(STEPS):
            obs, *_ = envs.step(rng.integers(8, size=NUM_ENVS))
        chosen = torch.from_numpy(obs[rng.permutation(NUM_ENVS)[: planned.items]])
        learner.familiarity.add(chosen, torch.zeros(len(chosen), planned.recurrent))
        if apart:
            codes = learner.familiarity.items.code
            codes.copy_(torch.arange(len(codes)))
        loss = learner.contrast()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    envs.close()
    return correlation(args.env, learner.familiarity.state_dict())


def study(args: Args) -> None:
    """Measure, and print a table."""
    torch.set_num_threads(1)
    print("| | Spearman, by seed |\n|---|---|")
    for arm, changes in ARMS.items():
        found = (f"{measure(args, seed, **changes):.2f}" for seed in args.seeds)
        print(f"| {arm} | {', '.join(found)} |", flush=True)


if __name__ == "__main__":
    main(study, Args)
