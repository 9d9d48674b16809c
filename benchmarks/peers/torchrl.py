"""Steps per second of TorchRL's ``MultiAsyncCollector``.

Two collecting processes; in each, 16 environments in Gymnasium's ``SyncVectorEnv`` inside a
``GymWrapper``, which was twice as fast here as TorchRL's own ``SerialEnv``. The 64-64 tanh policy
samples with log-probabilities; batches are 128 steps per environment. The environments reset
within the step that ends an episode, so every frame is a step.

    python -m benchmarks.peers.torchrl --seconds 5
"""

from __future__ import annotations

import gymnasium as gym
import torch
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical
from torchrl.collectors import MultiAsyncCollector
from torchrl.envs import GymWrapper
from torchrl.modules import ProbabilisticActor

from benchmarks.peers import common


def make_envs() -> GymWrapper:
    envs = gym.make_vec(
        common.ENV,
        common.ENVS_PER_WORKER,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP},
    )
    return GymWrapper(envs, categorical_action_encoding=True)


def main() -> None:
    seconds = common.seconds(__doc__)
    torch.set_num_threads(1)
    policy = ProbabilisticActor(
        TensorDictModule(common.tanh_net(), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    collector = MultiAsyncCollector(
        [make_envs] * common.WORKERS,
        policy,
        frames_per_batch=common.ROWS_PER_FRAGMENT,
        total_frames=-1,
    )
    batches = iter(collector)
    common.measure("TorchRL MultiAsyncCollector", "torchrl", lambda: next(batches).numel(), seconds)
    collector.shutdown()


if __name__ == "__main__":
    main()
