"""Evaluation beside training: every so many steps, on the same cluster, without exploration."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import clusterenv
from clusterenv.errors import WaitTimeout
from clusterenv.policies import Policy
from pipelines.experiment import files
from pipelines.experiment.args import RunArgs, env_arguments
from pipelines.experiment.display import Display
from pipelines.experiment.interrupt import Interrupt
from pipelines.experiment.metrics import Metrics
from pipelines.experiment.run_directory import arguments
from pipelines.experiment.splits import check_splits, environments, judge

__all__ = ["BEST", "NUM_ENVS", "Evaluations", "read_best"]

BEST = "best.pt"
"""File in a run directory: the weights of the best evaluated version."""
NUM_ENVS = 10
"""Environments that are evaluated together."""
SEED = 2**30  # added to the run's: no episode of the training is judged
LEAST_WAIT = 60.0  # seconds for the last evaluation; or three times the longest before
POLL = 0.2  # seconds between looks at Ctrl-C
NAMES = ("eval_return", "eval_return_low", "eval_return_high", "eval_length", "eval_steps")


class _Published(NamedTuple):
    """A version that was published and may become the best."""

    steps: int
    at: float
    weights: dict[str, Tensor]


class Evaluations:
    """The evaluations of a run; without ``--evaluate-every``, none.

    Parameters
    ----------
    args
        Of the run.
    kind
        The command: ``ppo``, ``dqn`` or ``apex``.
    out
        The run directory.
    past
        Metrics of the session before, if the run is resumed.
    """

    def __init__(self, args: RunArgs, kind: str, out: Path, past: Metrics | None) -> None:
        self._args, self._kind = args, kind
        self._path = out / BEST
        self._every = args.evaluate_every
        self._splits = args.evaluate_splits if self._every is not None else ()
        check_splits(args.env, self._splits, args.engine)
        self._num_envs = min(NUM_ENVS, args.evaluate_episodes)  # of each split
        self._due = 0
        self._published: dict[int, _Published] = {}
        self._longest = 0.0
        self._policy: Policy | None = None  # any version
        self._evaluator: clusterenv.Evaluator | None = None
        self.best: float = -math.inf
        """Mean return of the best version."""
        self.reached_at: int | None = None
        """Steps of the first version whose mean return is at the goal."""
        self.metrics: dict[str, Any] = {}
        """Of the newest evaluation, by the names of :class:`Metrics`."""
        if past is None:
            self._path.unlink(missing_ok=True)  # of a run that saved no checkpoint
        elif self._path.is_file():
            self.best = float(read_best(self._path)["return"])
        if self._every is not None:
            before = past or Metrics()
            values = ((name, getattr(before, name)) for name in NAMES)
            self.metrics = {name: math.nan if value is None else value for name, value in values}
        if self._splits:
            names = (f"eval_{split}" for split in self._splits)
            found = {name: before.eval_splits.get(name, math.nan) for name in names}
            self.metrics["eval_splits"] = found

    @property
    def on(self) -> bool:
        """Whether the run is evaluated."""
        return self._every is not None

    @contextlib.contextmanager
    def beside(
        self, collector: clusterenv.Collector, policy: Policy, steps: int
    ) -> Iterator[Evaluations]:
        """Evaluate beside a collector, on its cluster; the run has made so many steps."""
        if self._every is None:
            yield self
            return
        self._due = (steps // self._every + 1) * self._every
        cluster = collector.client.cluster
        if cluster is not None:  # started for this run: a worker for the evaluation alone
            cluster.scale(len(cluster.plan) + 1)
        args, splits, num_envs = self._args, self._splits, self._num_envs
        with clusterenv.Evaluator(
            environments(args.env, splits, num_envs) if splits else args.env,
            policy,
            episodes=args.evaluate_episodes * max(1, len(splits)),
            num_envs=num_envs * max(1, len(splits)),
            cluster=collector.client,
            seed=args.seed + SEED,
            engine="gymnasium" if splits else args.engine,
            **env_arguments(args.evaluate_env_args, "--evaluate-env-args"),
        ) as self._evaluator:
            yield self

    def update(self, policy: Policy, version: int, steps: int) -> None:
        """Publish this version if it is time to, and take the results that are there."""
        if self._every is None:
            return
        if steps >= self._due:
            self._due = (steps // self._every + 1) * self._every
            self._publish(policy, version, steps)
        self._take()

    def finish(
        self,
        policy: Policy,
        version: int,
        steps: int,
        display: Display,
        interrupt: Interrupt,
    ) -> None:
        """Evaluate the last version too; wait for it, up to a deadline or an interruption."""
        if self._evaluator is None or interrupt.wanted:
            return
        self._take()
        if self.metrics["eval_steps"] != steps and version not in self._published:
            self._publish(policy, version, steps)
        timeout = max(LEAST_WAIT, 3 * self._longest)
        deadline = time.monotonic() + timeout
        while not interrupt.wanted:
            try:
                self._evaluator.wait(POLL)
                break
            except WaitTimeout:
                if time.monotonic() > deadline:
                    display.say(f"the last evaluation takes longer than {timeout:.0f} s; left out")
                    break
        self._take()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run must know; the best version is in its own file."""
        return {"goal": self._args.stop_at, "reached_at": self.reached_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; a goal that is higher now has not been reached."""
        goal, reached_at = self._args.stop_at, state.get("reached_at")
        if goal is not None and reached_at is not None and goal <= state["goal"]:
            self.reached_at = int(reached_at)

    def _publish(self, policy: Policy, version: int, steps: int) -> None:
        assert self._evaluator is not None
        self._policy = policy
        replaced = self._evaluator.publish(policy, version)
        self._published.pop(version if replaced is None else replaced, None)
        weights = {name: tensor.detach().clone() for name, tensor in policy.state_dict().items()}
        self._published[version] = _Published(steps, time.monotonic(), weights)

    def _take(self) -> None:
        assert self._evaluator is not None
        for evaluation in self._evaluator.results():
            published = self._published[evaluation.version]
            newer = self._published.items()
            self._published = {v: each for v, each in newer if v > evaluation.version}
            self._longest = max(self._longest, time.monotonic() - published.at)
            self._judge(evaluation, published)

    def _judge(self, evaluation: clusterenv.Evaluation, published: _Published) -> None:
        found = {}
        if self._splits:
            found = judge(evaluation, self._splits, self._num_envs)
            evaluation = found[self._splits[0]]
        mean, (low, high) = evaluation.mean, evaluation.interval
        length, steps = float(evaluation.lengths.mean()), published.steps
        self.metrics = dict(zip(NAMES, (mean, low, high, length, steps), strict=True))
        if found:
            means = {f"eval_{split}": part.mean for split, part in found.items()}
            self.metrics["eval_splits"] = means
        goal = self._args.stop_at
        if goal is not None and mean >= goal and self.reached_at is None:
            self.reached_at = steps
        if mean > self.best:
            self.best = mean
            self._keep(published, evaluation)

    def _keep(self, published: _Published, evaluation: clusterenv.Evaluation) -> None:
        assert self._policy is not None
        policy, weights = self._policy, published.weights
        notes = {
            "kind": self._kind,
            "args": arguments(self._args),
            "version": evaluation.version,
            "steps": published.steps,
            "return": evaluation.mean,
            "returns": evaluation.returns.tolist(),
        }
        files.replace(
            self._path,
            lambda file: clusterenv.save_policy(policy, file, weights=weights, notes=notes),
        )

    @property
    def said(self) -> list[str]:
        """Return what was written, for the summary."""
        if not self._path.is_file():
            return []
        best = read_best(self._path)
        return [
            f"{self._path}: version {best['version']:,} of {best['steps']:,} steps, evaluated "
            f"return {best['return']:.1f}"
        ]


def read_best(path: Path) -> dict[str, Any]:
    """Return what a ``best.pt`` holds."""
    return dict(torch.load(path, weights_only=True))
