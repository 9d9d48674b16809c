"""Steps per second of RLlib's env runners, without its learner.

Two env runners of the new API stack with 16 environments each in Gymnasium's ``SyncVectorEnv``,
the default; PPO's module with 64-64 tanh, in its form for inference. Fragments of 128 steps per
environment are asked for as IMPALA does, asynchronously, with up to two requests in flight per
runner, and the episodes arrive at the head.

    python -m benchmarks.peers.rllib --seconds 5
"""

from __future__ import annotations

import os
import sys

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from benchmarks.peers import common

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or it listens on all interfaces
    "RAY_ENABLE_AUTO_CONNECT": "0",  # or what is tidied up late starts another Ray
}


def start_ray(cpus: int) -> None:
    """Start Ray for this machine alone, on its loopback interface.

    Ray reads some settings when it is imported: without them, the program begins anew with them.
    """
    if not SETTINGS.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | SETTINGS)
    ray.init(
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address="127.0.0.1",
    )


def main() -> None:
    seconds = common.seconds(__doc__)
    start_ray(common.WORKERS)
    config = (
        PPOConfig()
        .environment(common.ENV)
        .env_runners(
            num_env_runners=common.WORKERS,
            num_envs_per_env_runner=common.ENVS_PER_WORKER,
            rollout_fragment_length=common.HORIZON,
            max_requests_in_flight_per_env_runner=2,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh"))
    )
    runners = EnvRunnerGroup(config=config, local_env_runner=False)

    def fragments() -> int:
        runners.foreach_env_runner_async("sample")
        answers = runners.fetch_ready_async_reqs(timeout_seconds=1.0)
        return sum(len(episode) for _, episodes in answers for episode in episodes)

    common.measure("RLlib env runners", "ray", fragments, seconds)
    runners.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
