"""Run a learner: everything around the algorithm, the same for all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clusterenv
from clusterenv.errors import ClusterEnvError, ConfigError, Diverged
from pipelines import learners
from pipelines.experiment import config_file, dashboard, options
from pipelines.experiment.algorithm import Algorithm, Losses, check_algorithm
from pipelines.experiment.args import FREE, RunArgs, collector_options
from pipelines.experiment.directories import JOURNAL, check_kind, check_writable, unused
from pipelines.experiment.display import Display
from pipelines.experiment.episodes import Episodes, mean
from pipelines.experiment.evaluation import Evaluations
from pipelines.experiment.facts import summary
from pipelines.experiment.feeds import feed_of
from pipelines.experiment.initial_weights import take_weights
from pipelines.experiment.interrupt import Interrupt
from pipelines.experiment.jobs import job_files
from pipelines.experiment.metrics import Metrics, collected
from pipelines.experiment.run_directory import (
    POLICY,
    RunDirectory,
    arguments,
    find_directory,
    has_checkpoint,
)
from pipelines.experiment.run_log import RunLog

__all__ = ["Result", "run"]


@dataclass(frozen=True)
class Result:
    """How a run ended; of a resumed run, counted from its beginning."""

    mean_return: float
    """Of the last 100 episodes; NaN if none ended."""
    judged_return: float
    """The same of the environments that are judged; NaN if too few ended."""
    eval_return: float | None
    """Mean of the last evaluation."""
    steps: int
    updates: int
    version: int
    pulls: int
    weight_bytes: int
    seconds: float
    reached_at: int | None
    """Steps after which ``stop_at`` was reached; of the evaluated version, if there is one."""
    out: Path

    @property
    def dataset(self) -> Path:
        """What ``clusterenv.open_dataset`` opens, of learners with a replay store."""
        return self.out / JOURNAL


def run(algorithm: type[Algorithm[Any, Any]], args: RunArgs) -> Result:
    """Train a learner; write everything to the run directory.

    A run in the directory that has not finished goes on.

    Parameters
    ----------
    algorithm
        A class of learners.
    args
        Of its ``args_type``; ``algorithm.preset(env, …)`` returns tuned ones.

    Raises
    ------
    ConfigError
        If the class lacks something, or the options do not fit the environment or the directory.
    """
    kind = check_algorithm(algorithm)
    if not isinstance(args, kind.args_type):
        raise ConfigError(
            f"run({kind.__name__}, args) got {type(args).__name__}: "
            f"run({kind.__name__}, {kind.__name__}.preset({args.env!r}))"
        )
    out = find_directory(args, kind.name)
    check_kind(out, kind.name)
    check_writable(out)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    learner = kind(args, *clusterenv.env_spaces(args.env, engine=args.engine))
    if args.init_from is not None and not has_checkpoint(args, kind.name):
        take_weights(learner, args.init_from)
    directory = RunDirectory(args, kind.name, FREE)
    with contextlib.closing(directory):
        return _Experiment(learner, directory).run()


class _Means:
    """Means of what was lost since they were last taken."""

    def __init__(self) -> None:
        self._values: defaultdict[str, list[float | Tensor]] = defaultdict(list)

    def add(self, losses: Losses) -> None:
        for name, value in losses.items():
            self._values[name].append(value.detach() if isinstance(value, Tensor) else value)

    def take(self) -> dict[str, float]:
        """Return the means.

        Raises
        ------
        Diverged
            If one is not finite.
        """
        taken, self._values = self._values, defaultdict(list)
        means = {name: float(torch.tensor(values).mean()) for name, values in taken.items()}
        for name, value in means.items():
            if not math.isfinite(value):
                raise Diverged(f"the learner has diverged: its {name} is {value}")
        return means


class _Experiment:
    """One session of a run."""

    def __init__(self, learner: Algorithm[Any, Any], directory: RunDirectory) -> None:
        self.learner, self.directory = learner, directory
        self.args: RunArgs = learner.args
        self.title = f"{learner.title} on {self.args.env}"
        args = self.args
        self.display = Display(self.title, args.total_steps, args.quiet, args.cluster)
        self.log = RunLog(directory.path)
        self.episodes = Episodes(self.args.num_envs, learner.judged())
        self.metrics, self.losses, self.updates = Metrics(), _Means(), 0
        saved = directory.load()
        if saved:
            self.restore(saved)
        self.past = self.metrics
        past = self.past if directory.resumes else None
        self.evaluations = Evaluations(self.args, learner.name, directory.path, past)
        self.evaluations.load_state_dict(saved.get("evaluation", {}))
        self.feed = feed_of(learner, self.episodes, self.past.steps, directory.journal)

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        try:
            self.learner.load_state_dict(saved["learner"])
        except (KeyError, ValueError, RuntimeError) as error:
            said, out = " ".join(str(error).split()), self.directory.path
            raise ConfigError(
                f"{self.directory.checkpoint} does not fit the learner: {said}; begin another "
                f"run: --out {unused(out)}"
            ) from error
        self.episodes.load_state_dict(saved["episodes"])
        self.metrics = Metrics.read(saved["metrics"])
        self.updates = int(saved["metrics"]["updates"])
        torch.set_rng_state(saved["rng"])

    @property
    def program(self) -> str:
        """The command without options."""
        known = self.learner.name in learners.learners()
        return f"clusterenv train {self.learner.name}" if known else f"python {sys.argv[0]}"

    @property
    def reached_at(self) -> int | None:
        """Steps after which the goal was reached: by an evaluation, if there are any."""
        if self.evaluations.on:
            return self.evaluations.reached_at
        goal, judged = self.args.stop_at, self.metrics.judged_return
        reached = goal is not None and judged is not None and judged >= goal
        return self.metrics.steps if reached else None

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do."""
        return self.metrics.steps >= self.args.total_steps or self.reached_at is not None

    @property
    def ended(self) -> str:
        """Why there is nothing left to do; empty if there is."""
        if not self.over:
            return ""
        return "done" if self.reached_at is None else "goal reached"

    def run(self) -> Result:
        """Learn until it is over, and say how it ended."""
        args, display, out = self.args, self.display, self.directory.path
        interrupt = Interrupt("saving and stopping; Ctrl-C again stops at once", args.quiet)
        finished = self.over
        with contextlib.closing(self.log), contextlib.closing(self.feed):
            if finished:
                display.say(f"{out} is finished, at {self.metrics.steps:,} steps")
            else:
                if self.directory.resumes:
                    display.say(f"going on with {out} from {self.metrics.steps:,} steps")
                elif args.init_from is not None:
                    display.say(f"starting from the weights of {args.init_from}")
                words = options.words_of(args, self.learner.presets)
                command = shlex.join([*self.program.split(), *words])
                config = config_file.record(type(self.learner), command, arguments(args))
                self.directory.begin(config)
                self.log.open(
                    self.past.steps if self.directory.resumes else None,
                    args.wandb,
                    {"learner": self.learner.name, **config["options"]},
                )
                with display, interrupt, self.collecting() as collector:
                    dashboard.say_where(collector, display)
                    interrupt.started()
                    self.learn(collector, interrupt)
                    if ended := self.ended:
                        display.finish(self.metrics, ended)
                    self.commit()
        return self.sum_up()

    @contextlib.contextmanager
    def collecting(self) -> Iterator[clusterenv.Collector]:
        """Collect with the learner's policy, and evaluate it beside if the run is evaluated."""
        args, policy, steps = self.args, self.learner.policy, self.past.steps
        # What a resumed run had learned since the last version is a new one.
        self.feed.version = self.past.version + self.directory.resumes
        with (
            dashboard.shown(args.dashboard),
            job_files(self.directory.path),
            clusterenv.Collector(
                args.env,
                policy,
                seed=args.seed + steps,  # a resumed run begins new episodes
                version=self.feed.version,
                **collector_options(args),
                **self.feed.collector_options(),
            ) as collector,
            self.evaluations.beside(collector, policy, steps),
        ):
            yield collector

    def learn(self, collector: clusterenv.Collector, interrupt: Interrupt) -> None:
        """Learn while rows arrive, until the run is over or interrupted."""
        args, feed, began = self.args, self.feed, time.monotonic()
        committed = self.metrics.steps

        def record() -> None:
            self.record(collector.stats(), time.monotonic() - began)

        if scalars := self.learner.scalars(feed.steps):
            feed.version = collector.publish(self.learner.policy, **scalars)
        try:
            for losses in feed.learn(collector, interrupt):
                self.losses.add(losses)
                self.updates += 1
                if self.updates % args.publish_every == 0:
                    self.publish(collector)
                    self.evaluations.update(self.learner.policy, feed.version, feed.steps)
                if feed.steps >= args.total_steps or interrupt.wanted:
                    break
                if feed.steps - self.metrics.steps >= args.log_every:
                    record()
                    if self.over:
                        break
                    if self.metrics.steps - committed >= args.checkpoint_every:
                        self.commit()
                        committed = self.metrics.steps
            if self.evaluations.on and not interrupt.wanted:
                if self.updates % args.publish_every:
                    self.publish(collector)
                latest = self.learner.policy, feed.version, feed.steps
                self.evaluations.finish(*latest, self.display, interrupt)
        except Diverged:
            kept = self.directory.checkpoint
            self.display.say(
                f"the last checkpoint is as it was: {kept}" if kept else "no checkpoint"
            )
            raise
        except ClusterEnvError:
            # In a terminal, Ctrl-C also reaches the workers of a local cluster.
            if not interrupt.wanted:
                if feed.steps > self.past.steps:  # something can be saved
                    record()
                    self.commit()
                    self.display.say(
                        f"saved {self.directory.path} at {self.metrics.steps:,} steps; the same "
                        "command goes on from there"
                    )
                raise
        record()

    def publish(self, collector: clusterenv.Collector) -> None:
        """Publish the policy, and what the workers need besides."""
        scalars = self.learner.scalars(self.feed.steps)
        self.feed.version = collector.publish(self.learner.policy, **scalars)

    def record(self, stats: clusterenv.Stats, seconds: float) -> None:
        """Write down where the run stands."""
        past, steps = self.past, self.feed.steps
        if (steps, self.updates) == (self.metrics.steps, self.metrics.updates):  # nothing new
            metrics = dataclasses.replace(self.metrics, **self.evaluations.metrics)
        else:
            metrics = Metrics(
                steps=steps,
                seconds=past.seconds + seconds,
                steps_per_second=(steps - past.steps) / seconds,
                episodes=self.episodes.count,
                mean_return=mean(self.episodes.returns),
                mean_length=mean(self.episodes.lengths),
                judged_return=self.episodes.judgement,
                updates=self.updates,
                learner={**self.losses.take(), **self.learner.scalars(steps)},
                **self.feed.metrics(seconds),
                **self.evaluations.metrics,
                **collected(past, stats),
            )
        if metrics != self.metrics:
            self.metrics = metrics
            self.log.write(metrics)
            self.display.show(metrics)

    def commit(self) -> None:
        """Write a checkpoint, with the rows of the store if there is one."""
        state = {
            "learner": self.learner.state_dict(),
            "episodes": self.episodes.state_dict(),
            "metrics": self.metrics.given(),
            "evaluation": self.evaluations.state_dict(),
            "rng": torch.get_rng_state(),
        }
        notes = {"steps": self.metrics.steps, "finished": self.over}
        self.directory.commit(state, self.feed.store, **notes)
        self.directory.keep_policy(self.learner.policy, self.metrics.steps)

    def sum_up(self) -> Result:
        """Draw the curve; print where everything is, and the command that goes on."""
        args, metrics, out = self.args, self.metrics, self.directory.path
        curve = self.log.draw(f"{self.title}, --sync {args.sync}")
        kept = self.directory.checkpoint
        checkpoint = f" {POLICY}, {kept.name}," if kept else ""
        files = [
            f"{out}: {self.log.progress.name}, metrics.jsonl,{checkpoint} TensorBoard events",
            *self.evaluations.said,
            str(curve),
        ]
        if self.feed.store is not None:
            journal = str(self.directory.journal)
            files.append(f"{journal}: clusterenv.open_dataset({journal!r}).to_table()")
        further: dict[str, Any] = {"out": out, "fresh": False}
        if self.reached_at is not None:
            further["stop_at"] = None
        if metrics.steps >= args.total_steps:
            further["total_steps"] = 2 * args.total_steps
        go_on = options.command(self.program, args, self.learner.presets, **further)
        self.display.sum_up(summary(metrics, self.log.best, files, go_on))
        return Result(
            mean_return=metrics.mean_return,
            judged_return=self.episodes.judgement,
            eval_return=metrics.eval_return,
            steps=metrics.steps,
            updates=self.updates,
            version=metrics.version,
            pulls=metrics.pulls,
            weight_bytes=metrics.weight_bytes,
            seconds=metrics.seconds,
            reached_at=self.reached_at,
            out=out,
        )
