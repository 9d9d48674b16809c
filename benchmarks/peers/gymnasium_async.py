"""Steps per second of Gymnasium's ``AsyncVectorEnv``.

It has one process per environment, so 32 of them; shared memory is on, as by default. The 64-64
tanh policy acts at the head, on all observations at once, and nothing is kept of the steps.
The step after an episode's end only resets and is not counted.

    python -m benchmarks.peers.gymnasium_async --seconds 5
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import torch

from benchmarks.peers import common


def main() -> None:
    seconds = common.seconds(__doc__)
    torch.set_num_threads(1)
    count = common.WORKERS * common.ENVS_PER_WORKER
    envs = gym.make_vec(common.ENV, count, vectorization_mode="async")
    act = common.sampler()
    obs, _ = envs.reset(seed=1)
    over = np.zeros(count, np.bool_)

    def step() -> int:
        nonlocal obs, over
        obs, _, terminated, truncated, _ = envs.step(act(obs))
        rows = count - int(over.sum())
        over = terminated | truncated
        return rows

    common.measure("Gymnasium AsyncVectorEnv", "gymnasium", step, seconds)
    envs.close()


if __name__ == "__main__":
    main()
