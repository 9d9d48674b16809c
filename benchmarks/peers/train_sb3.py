"""Train with Stable-Baselines3's PPO or DQN.

``DummyVecEnv``, in the process that learns: with environments as cheap as these, it is faster on
two cores than ``SubprocVecEnv``, whose processes wait for each other at every step.

With ``--goal`` the settings of RL Baselines3 Zoo (``hyperparams/ppo.yml`` and ``dqn.yml``). It
names LunarLander-v2; v3 has its settings. A run ends after its number of steps.

    python -m benchmarks.peers.train_sb3 --algorithm ppo --env CartPole-v1 --goal 475
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from torch import nn

from benchmarks.peers import training


def linear(start: float) -> Callable[[float], float]:
    """Return a value that comes down to 0 with the part of the run that is left."""
    return lambda left: left * start


# fmt: off
ZOO: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "CartPole-v1"): {
        "num_envs": 8, "total_steps": 100_000, "n_steps": 32, "batch_size": 256, "n_epochs": 20,
        "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0, "learning_rate": linear(1e-3),
        "clip_range": linear(0.2),
    },
    ("ppo", "LunarLander-v3"): {
        "num_envs": 16, "total_steps": 1_000_000, "n_steps": 1024, "batch_size": 64, "n_epochs": 4,
        "gae_lambda": 0.98, "gamma": 0.999, "ent_coef": 0.01,
    },
    ("dqn", "CartPole-v1"): {
        "num_envs": 1, "total_steps": 50_000, "learning_rate": 2.3e-3, "batch_size": 64,
        "buffer_size": 100_000, "learning_starts": 1_000, "gamma": 0.99,
        "target_update_interval": 10, "train_freq": 256, "gradient_steps": 128,
        "exploration_fraction": 0.16, "exploration_final_eps": 0.04,
        "policy_kwargs": {"net_arch": [256, 256]},
    },
    ("dqn", "LunarLander-v3"): {
        "num_envs": 1, "total_steps": 100_000, "learning_rate": 6.3e-4, "batch_size": 128,
        "buffer_size": 50_000, "learning_starts": 0, "gamma": 0.99,
        "target_update_interval": 250, "train_freq": 4, "gradient_steps": -1,
        "exploration_fraction": 0.12, "exploration_final_eps": 0.1,
        "policy_kwargs": {"net_arch": [256, 256]},
    },
}
# fmt: on
ROWS = training.ENVS * training.PPO_HORIZON
SAME: dict[str, dict[str, Any]] = {
    "ppo": {
        "n_steps": training.PPO_HORIZON,
        "batch_size": ROWS // training.PPO_MINIBATCHES,
        "n_epochs": training.PPO_EPOCHS,
        "policy_kwargs": {"net_arch": list(training.HIDDEN), "activation_fn": nn.Tanh},
    },
    "dqn": {
        "batch_size": training.DQN_BATCH,
        "buffer_size": training.DQN_CAPACITY,
        "learning_starts": training.DQN_MIN_ROWS,
        "train_freq": 1,  # of all environments together
        "gradient_steps": training.ENVS // training.DQN_ROWS_PER_UPDATE,
        "policy_kwargs": {"net_arch": list(training.HIDDEN)},
    },
}


class Watch(BaseCallback):
    """Tells the training's clock of steps and episodes."""

    def __init__(self, watched: training.Training) -> None:
        super().__init__()
        self.watched = watched

    def _on_training_start(self) -> None:
        self.watched.begin()

    def _on_rollout_start(self) -> None:
        self.watched.updated(self.num_timesteps)  # those before were learned from

    def _on_step(self) -> bool:
        ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        self.watched.episodes(ended, self.num_timesteps)
        return not self.watched.over


def main() -> None:
    task = training.task_of(__doc__, tuple(SAME))
    torch.set_num_threads(1)
    if task.goal is None:
        settings = {"num_envs": training.ENVS, "total_steps": training.ENDLESS}
        settings |= SAME[task.algorithm]
    else:
        settings = dict(ZOO[task.algorithm, task.env])
    envs = make_vec_env(task.env, settings.pop("num_envs"), seed=task.seed)
    total_steps = settings.pop("total_steps")
    algorithm = {"ppo": PPO, "dqn": DQN}[task.algorithm]
    learner = algorithm("MlpPolicy", envs, seed=task.seed, device="cpu", **settings)
    watched = training.Training(task)
    learner.learn(total_steps, callback=Watch(watched))
    watched.report("stable-baselines3")
    envs.close()


if __name__ == "__main__":
    main()
