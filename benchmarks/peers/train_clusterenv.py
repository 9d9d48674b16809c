"""Train with ClusterEnv's learners: two shards on this machine, as ``pipelines.experiment`` runs.

With ``--goal`` the learner's preset for the environment. Steps, seconds and returns are those of
the run's ``progress.csv``, here with a row every 500 steps; the goal is noticed at such a row. All
that a run writes is written: metrics, TensorBoard, checkpoints and, by DQN, the journal of rows.

    python -m benchmarks.peers.train_clusterenv --algorithm ppo --env CartPole-v1 --goal 475
"""

from __future__ import annotations

import importlib
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import clusterenv
from benchmarks.peers import training
from pipelines.experiment import run
from pipelines.experiment.sinks import read_csv

SAME: dict[str, dict[str, Any]] = {
    "ppo": {
        "horizon": training.PPO_HORIZON,
        "epochs": training.PPO_EPOCHS,
        "minibatches": training.PPO_MINIBATCHES,
    },
    "dqn": {
        "batch": training.DQN_BATCH,
        "rows_per_update": training.DQN_ROWS_PER_UPDATE,
        "capacity": training.DQN_CAPACITY,
        "min_rows": training.DQN_MIN_ROWS,
    },
    "impala": {"horizon": training.STREAM_HORIZON},
}


def stop_after(seconds: float, progress: Path) -> None:
    """End the run as Ctrl-C does, once it has learned for so long."""
    while True:
        time.sleep(0.5)
        rows = read_csv(progress)
        if rows and float(rows[-1]["seconds"]) >= seconds:
            os.kill(os.getpid(), signal.SIGINT)
            return


def main() -> None:
    task = training.task_of(__doc__, tuple(SAME))
    learner = getattr(
        importlib.import_module(f"pipelines.{task.algorithm}"), task.algorithm.upper()
    )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        shared: dict[str, Any] = {
            "seed": task.seed, "shards": training.WORKERS, "quiet": True, "out": out,
            "log_every": 500,
        }  # fmt: skip
        if task.goal is None:
            args = learner.args_type(
                env=task.env,
                num_envs=training.ENVS,
                hidden=training.HIDDEN,
                total_steps=training.ENDLESS,
                **SAME[task.algorithm],
                **shared,
            )
        else:
            args = learner.preset(task.env, stop_at=task.goal, **shared)
        limit = (task.limit, out / "progress.csv")
        threading.Thread(target=stop_after, args=limit, daemon=True).start()
        result = run(learner, args)
        version = f"clusterenv {clusterenv.__version__}"
        if task.goal is None:
            rows = read_csv(out / "progress.csv")
            marks = [(float(row["seconds"]), int(row["steps"])) for row in rows]
            training.print_report(version, steps_per_second=training.rate(marks))
        else:
            reached = result.reached_at is not None and result.seconds <= task.timeout
            measured = (result.seconds, result.steps, result.mean_return)
            training.print_report(version, reached, *measured)


if __name__ == "__main__":
    main()
