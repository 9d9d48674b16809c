"""Train with Sample Factory's APPO: two rollout workers, one learner process.

Steps per second are measured with the batched sampling that was the fastest for its sampler alone,
each worker with one vector of environments. With ``--goal`` the settings of its own CartPole
example (``sf_examples/train_gym_env.py``), for LunarLander too, for which it has none.

It needs Gymnasium before 1.0, where LunarLander is v2. The clock starts at the first environment
step, of which a rollout worker tells by a file.

    python -m benchmarks.peers.train_sample_factory --env CartPole-v1 --goal 475
"""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from benchmarks.peers import training
from benchmarks.peers.sample_factory import Vector

NAMES = {"LunarLander-v3": "LunarLander-v2"}
SAME = (
    "--num_envs_per_worker=1",
    "--worker_num_splits=1",
    "--batched_sampling=True",
    f"--rollout={training.STREAM_HORIZON}",
    f"--batch_size={training.STREAM_BATCH}",
    "--normalize_input=False",
    "--actor_critic_share_weights=False",
    "--nonlinearity=tanh",
    *("--encoder_mlp_layers", *map(str, training.HIDDEN)),
)
EXAMPLE = (
    "--num_envs_per_worker=20",
    "--policy_workers_per_policy=2",
    "--recurrence=1",
    "--with_vtrace=False",
    "--batch_size=512",
    "--reward_scale=0.1",
)


class Told(gym.Wrapper):
    """An environment that writes down when it was first stepped, unless another one has."""

    def __init__(self, env: gym.Env, file: Path) -> None:
        super().__init__(env)
        self._file: Path | None = file

    def step(self, action: Any) -> tuple:
        if self._file is not None:
            began = time.time()
            try:
                with self._file.open("x") as file:
                    file.write(repr(began))
            except FileExistsError:
                pass
            self._file = None
        return self.env.step(action)


def make_env(task: training.Task, first_step: Path, name: str, *_: Any, **__: Any) -> gym.Env:
    """Return an environment, or a worker's vector of them; Sample Factory gives the name."""
    if task.goal is None:
        return Vector(name, training.ENVS // training.WORKERS)
    return Told(gym.make(name), first_step)


class Watch(AlgoObserver):
    """Tells the training's clock of steps and episodes, and ends the run when it is over."""

    def __init__(self, watched: training.Training, first_step: Path) -> None:
        self.watched, self.first_step = watched, first_step
        self.began = False

    def steps(self, runner: Runner) -> int:
        return sum(runner.env_steps.values())

    def on_init(self, runner: Runner) -> None:
        runner.register_episodic_stats_handler(self.on_episodes)

    def on_episodes(self, runner: Runner, message: dict, _: int) -> None:
        self.begin()
        returns = np.ravel(message["episodic"]["reward"])  # several, of batched sampling
        self.watched.episodes(returns, self.steps(runner))

    def on_training_step(self, runner: Runner, _: int) -> None:
        self.begin()
        self.watched.updated(self.steps(runner))
        if self.watched.over:
            runner.cfg.train_for_env_steps = 0

    def begin(self) -> None:
        """Start the clock at the first environment step, or as soon as one is heard of."""
        if not self.began:
            known = self.first_step.exists()
            self.watched.begin(float(self.first_step.read_text()) if known else None)
            self.began = True


def main() -> None:
    task = training.task_of(__doc__, ("appo",))
    name = NAMES.get(task.env, task.env)
    with tempfile.TemporaryDirectory() as folder:
        first_step = Path(folder) / "first_step"
        register_env(name, functools.partial(make_env, task, first_step))
        arguments = [
            f"--env={name}",
            "--device=cpu",
            f"--train_dir={folder}",
            f"--seed={task.seed}",
            f"--num_workers={training.WORKERS}",
            f"--train_for_env_steps={training.ENDLESS}",
            "--use_rnn=False",
            *(SAME if task.goal is None else EXAMPLE),
        ]
        parser, _ = parse_sf_args(arguments)
        _, runner = make_runner(parse_full_cfg(parser, arguments))
        watched = training.Training(task)
        runner.register_observer(Watch(watched, first_step))
        runner.init()
        runner.run()
        watched.report("sample-factory")


if __name__ == "__main__":
    main()
