"""Train with RLlib's PPO, IMPALA or APPO, on its new API stack, with two env runners.

PPO learns in the process of the algorithm; IMPALA and APPO in a learner process beside it, as by
default: so IMPALA took 1.2 to 1.6 times as many steps per second here. With ``--goal`` the settings
of RLlib's own CartPole examples (``rllib/examples/algorithms/*/cartpole_*.py``), with two env
runners of 16 environments instead of four or five. For LunarLander, without an example, the
defaults of each algorithm, with as many environments. The goal is noticed after an iteration: a
rollout of PPO, or half a second.

A step counts once, however often it is learned from: it is the smaller one of RLlib's counts of
steps sampled and trained.

    python -m benchmarks.peers.train_rllib --algorithm ppo --env CartPole-v1 --goal 475
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import ray
from ray.rllib.algorithms import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module.mean_std_filter import MeanStdFilter
from ray.rllib.core.learner import learner_group
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.train.backend import Backend, BackendConfig
from torch import distributed

from benchmarks.peers import training
from benchmarks.peers.rllib import start_ray

CONFIGS = {"ppo": PPOConfig, "impala": IMPALAConfig, "appo": APPOConfig}
ROWS = training.ENVS * training.PPO_HORIZON
STREAM = {"train_batch_size_per_learner": training.STREAM_BATCH}
SAME: dict[str, dict[str, Any]] = {
    "ppo": {
        "train_batch_size_per_learner": ROWS,
        "minibatch_size": ROWS // training.PPO_MINIBATCHES,
        "num_epochs": training.PPO_EPOCHS,
    },
    "impala": STREAM,
    "appo": {**STREAM, "circular_buffer_iterations_per_batch": 1},
}
# Training settings and network of the examples.
EXAMPLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo": (
        {"lr": 3e-4, "num_epochs": 6, "vf_loss_coeff": 0.01},
        {"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True},
    ),
    "impala": (
        {
            "train_batch_size_per_learner": 500,
            "grad_clip": 40.0,
            "grad_clip_by": "global_norm",
            "lr": 5e-4,
            "vf_loss_coeff": 0.05,
            "entropy_coeff": 0.0,
        },
        {"vf_share_layers": True},
    ),
    "appo": (
        {"circular_buffer_iterations_per_batch": 2, "vf_loss_coeff": 0.05, "entropy_coeff": 0.0},
        {"vf_share_layers": True},
    ),
}
STARTED, RETURNS = "first_started", "finished_returns"


def join_group_of_one() -> None:
    """Make the process group that a learner wants, without a server for others to join."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)


class LocalBackend(Backend):
    """Of one learner: Ray's own listens on all of the machine's interfaces for more of them."""

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        worker_group.execute(join_group_of_one)


class LocalConfig(BackendConfig):
    """Chooses :class:`LocalBackend`."""

    backend_cls = LocalBackend


def note_start(*, metrics_logger: Any, **_: Any) -> None:
    """Send the time of an episode's start along; the first one starts the clock."""
    metrics_logger.log_value(STARTED, time.time(), reduce="min")


def note_return(
    *, episode: Any, prev_episode_chunks: Any = (), metrics_logger: Any, **_: Any
) -> None:
    """Send the return of an episode that has ended along with the env runner's metrics.

    The end of a fragment cuts an episode into chunks: it is the sum of all of them.
    """
    total = sum(chunk.get_return() for chunk in (*(prev_episode_chunks or ()), episode))
    metrics_logger.log_value(RETURNS, total, reduce="item_series")


def normalized(*_: Any, **__: Any) -> MeanStdFilter:
    """Return what normalises observations, as RLlib's example of IMPALA does."""
    return MeanStdFilter()


def config_of(task: training.Task) -> AlgorithmConfig:
    """Return the algorithm's configuration for a task."""
    config = CONFIGS[task.algorithm]().environment(task.env)
    runners: dict[str, Any] = {
        "num_env_runners": training.WORKERS,
        "num_envs_per_env_runner": training.ENVS,
    }
    settings, net = {}, {}
    if task.goal is None:
        horizon = training.PPO_HORIZON if task.algorithm == "ppo" else training.STREAM_HORIZON
        runners["num_envs_per_env_runner"] = training.ENVS // training.WORKERS
        runners["rollout_fragment_length"] = horizon
        settings = SAME[task.algorithm]
        net = {"fcnet_hiddens": list(training.HIDDEN), "fcnet_activation": "tanh"}
        net["vf_share_layers"] = False
    elif task.env == "CartPole-v1":
        settings, net = EXAMPLES[task.algorithm]
        if task.algorithm == "impala":
            runners["env_to_module_connector"] = normalized
    config = config.env_runners(**runners).training(**settings).debugging(seed=task.seed)
    if net:
        config = config.rl_module(model_config=DefaultModelConfig(**net))
    config = config.learners(num_learners=0 if task.algorithm == "ppo" else 1)
    config = config.callbacks(on_episode_start=note_start, on_episode_end=note_return)
    return config.reporting(min_time_s_per_iteration=None if task.algorithm == "ppo" else 0.5)


def main() -> None:
    task = training.task_of(__doc__, tuple(CONFIGS))
    start_ray(cpus=training.WORKERS + 1)  # by its own count: the learner has no core of its own
    learner_group._get_backend_config = lambda _: LocalConfig()
    algorithm = config_of(task).build_algo()
    watched, began = training.Training(task), False
    while not watched.over:
        result = algorithm.train()
        runners = result.get("env_runners", {})
        if not began and STARTED in runners:
            watched.begin(float(runners[STARTED]))
            began = True
        sampled = int(runners.get("num_env_steps_sampled_lifetime", 0))
        learned = result.get("learners", {}).get("__all_modules__", {})
        trained = int(learned.get("num_env_steps_trained_lifetime", 0))
        watched.updated(min(sampled, trained))
        watched.episodes(np.ravel(runners.get(RETURNS, ())), sampled)  # a single one is no list
    watched.report("ray")
    algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
