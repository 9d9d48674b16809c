"""Train by double DQN from a replay store, while collection continues.

``python -m pipelines.dqn --env CartPole-v1 --stop-at 475``

The same command resumes a run that was killed: rows, priorities and learner are committed
together.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clusterenv
from clusterenv.errors import ClusterEnvError, Diverged
from clusterenv.policies import EpsilonGreedy
from clusterenv.store import NStep, Prioritized, Ratio, ReplayStore, Uniform
from pipelines import cli, dashboard, options, ranges
from pipelines.display import Display, summary
from pipelines.episodes import BatchStream, Episodes, mean
from pipelines.evaluation import Evaluations
from pipelines.learner_args import FREE, LearnerArgs
from pipelines.metrics import Metrics, collected
from pipelines.q_networks import QNetwork, stack_of
from pipelines.run import Interrupt
from pipelines.run_args import survival, sync_rule
from pipelines.sessions import Session

__all__ = ["Args", "Arrangement", "Learner", "Result", "preset", "targets", "train"]


@dataclass(frozen=True)
class Args(LearnerArgs):
    """Arguments; :func:`preset` returns tuned ones for some environments."""

    threshold: float = 0.1  # with --sync divergence: pull above this divergence
    epsilon_start: float = 1.0  # probability of a random action at first
    epsilon_end: float = 0.01  # and from --epsilon-steps on
    epsilon_steps: int = 20_000  # steps in which it comes down, linearly

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.check(self, ranges.SHARE, "epsilon_start", "epsilon_end")
        ranges.check(self, ranges.COUNT, "epsilon_steps")


# fmt: off
PRESETS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "lr": 2e-3, "anneal": True, "n_step": 3, "tau": 0.02, "epsilon_steps": 10_000,
    },
    "LunarLander-v3": {
        "total_steps": 1_000_000, "num_envs": 16, "lr": 5e-4, "anneal": True, "n_step": 3,
        "hidden": (256, 256), "capacity": 300_000, "min_rows": 5_000, "epsilon_end": 0.02,
        "epsilon_steps": 80_000, "log_every": 5_000, "checkpoint_every": 50_000,
    },
    "Pong-v5": {
        # A stack of 4 needs 4 frames beside the rows of each fragment: longer ones need fewer.
        "engine": "envpool", "total_steps": 100_000, "horizon": 64, "lr": 1e-4, "n_step": 3,
        "batch": 32, "rows_per_update": 8, "capacity": 100_000, "min_rows": 2_000, "hidden": (512,),
        "epsilon_steps": 20_000, "target_every": 500, "tau": 1.0, "prioritized": True,
        "duelling": True, "log_every": 1_000, "publish_every": 32,
    },
}
# fmt: on


def preset(env: str, **changes: Any) -> Args:
    """Return the arguments tuned for an environment, with ``changes``.

    Examples
    --------
    >>> preset("LunarLander-v3", seed=3).n_step
    3
    """
    return Args(**{"env": env, **PRESETS.get(env, {}), **changes})


# The learner


def targets(
    online: Callable[[Tensor], Tensor],
    target: Callable[[Tensor], Tensor],
    sample: Mapping[str, Tensor],
) -> Tensor:
    """Return double DQN's target for each row of a sample.

    ``reward + discount (1 - terminated) Q_target(next_obs, argmax_a Q_online(next_obs, a))``; an
    episode that was only truncated goes on being worth something.
    """
    following = sample["next_obs"]
    best = online(following).argmax(-1, keepdim=True)
    value = target(following).gather(-1, best).squeeze(-1)
    return sample["reward"] + sample["discount"] * ~sample["terminated"] * value


class Learner:
    """A Q network, its target network and an optimizer.

    Parameters
    ----------
    q
        The network that learns.
    args
        Learning rate, target network, gradient norm.
    """

    def __init__(self, q: QNetwork, args: LearnerArgs) -> None:
        self.q = q
        self.target = copy.deepcopy(q).requires_grad_(False)
        self.optimizer = torch.optim.Adam(q.parameters(), args.lr, eps=1e-5, fused=True)
        self.updates = 0
        self._args = args
        self._losses: list[Tensor] = []

    def update(self, sample: Mapping[str, Tensor]) -> Tensor:
        """Learn from a sample; return the absolute error of each row."""
        with torch.no_grad():
            wanted = targets(self.q, self.target, sample)
        action = sample["action"].long().unsqueeze(-1)
        values: Tensor = self.q(sample["obs"]).gather(-1, action).squeeze(-1)
        loss = nn.functional.smooth_l1_loss(values, wanted, reduction="none")
        loss = (sample["weights"] * loss).mean()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.q.parameters(), self._args.grad_norm)
        self.optimizer.step()
        self.updates += 1
        if self.updates % self._args.target_every == 0:
            self._move_target()
        values = values.detach()
        self._losses.append(torch.stack([loss.detach(), values.mean()]))
        return (wanted - values).abs()

    def anneal(self, steps: int) -> None:
        """Set the learning rate to what it is after so many steps."""
        left = max(0.0, 1 - steps / self._args.total_steps)
        self.optimizer.param_groups[0]["lr"] = self._args.lr * left

    @torch.no_grad()
    def _move_target(self) -> None:
        pairs = zip(self.target.parameters(), self.q.parameters(), strict=True)
        for ours, theirs in pairs:
            ours.lerp_(theirs, self._args.tau)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.optimizer.param_groups[0]["lr"])

    def means(self) -> dict[str, float]:
        """Return loss and value, the means of all updates since the last call."""
        losses, self._losses = self._losses, []
        values = torch.stack(losses).mean(0).tolist() if losses else [math.nan, math.nan]
        return dict(zip(("loss", "q"), values, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return what another learner goes on from."""
        return {
            "q": self.q.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.q.load_state_dict(state["q"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.updates = int(state["updates"])


# How its data is collected


@dataclass(frozen=True)
class Arrangement:
    """How environments explore, and which of them a run is judged by."""

    name: str
    """Of the command."""
    title: str
    policy: Callable[[QNetwork, Any], EpsilonGreedy]
    scalars: Callable[[Any, int], dict[str, float]]
    """What is announced with a version, by arguments and steps."""
    judged: Callable[[int], Sequence[int]]
    """Environments, of so many, whose returns tell when the goal is reached."""
    presets: Mapping[str, Mapping[str, Any]]
    """What suits an environment."""


def epsilon_greedy(q: QNetwork, args: Args) -> EpsilonGreedy:
    """Return the policy of plain DQN: all environments have the same epsilon."""
    return EpsilonGreedy(q, args.epsilon_start, args.temperature)


def epsilon_schedule(args: Args, steps: int) -> dict[str, float]:
    """Return epsilon after so many steps: down linearly, then constant.

    Examples
    --------
    >>> epsilon_schedule(Args(epsilon_steps=100, epsilon_end=0.5), 50)
    {'epsilon': 0.75}
    """
    part = min(1.0, steps / args.epsilon_steps)
    return {"epsilon": args.epsilon_start + part * (args.epsilon_end - args.epsilon_start)}


DQN = Arrangement("dqn", "DQN", epsilon_greedy, epsilon_schedule, range, PRESETS)


@dataclass(frozen=True)
class Result:
    """How a run ended; of a resumed run, counted from its beginning."""

    mean_return: float
    """Of the last 100 episodes; NaN if none ended."""
    judged_return: float
    """The same of those environments that are judged; NaN if too few ended."""
    steps: int
    updates: int
    version: int
    pulls: int
    weight_bytes: int
    seconds: float
    reached_at: int | None
    """Steps after which ``stop_at`` was reached; of the evaluated version, if there is one."""
    out: Path
    eval_return: float | None = None
    """Mean of the last evaluation."""

    @property
    def dataset(self) -> Path:
        """What ``clusterenv.open_dataset`` opens."""
        return self.out / "replay"


class Training:
    """A learner, its store and its run, from the run's last commit on.

    Parameters
    ----------
    args
        What the command line says.
    arrangement
        How the data is collected.
    """

    def __init__(self, args: LearnerArgs, arrangement: Arrangement) -> None:
        self.args, self.arrangement = args, arrangement
        name = f"{arrangement.name}-{args.env.replace('/', '-')}-seed{args.seed}"
        self.session = Session(args, arrangement.name, name, FREE)
        self.run = self.session.run
        self.title = f"{arrangement.title} on {args.env}"
        self.display = Display(self.title, args.total_steps, args.quiet)
        observations, actions = clusterenv.env_spaces(args.env, engine=args.engine)
        q = QNetwork(observations, actions, args.hidden, args.duelling)
        self.learner = Learner(q, args)
        self.policy = arrangement.policy(q, args)
        self.episodes = Episodes(args.num_envs, arrangement.judged(args.num_envs))
        self.metrics = Metrics()
        saved = self.run.load() if self.session.resumes else {}
        if saved:
            self.learner.load_state_dict(saved["learner"])
            self.episodes.load_state_dict(saved["episodes"])
            self.metrics = Metrics.read(saved["metrics"])
        past = self.metrics if self.session.resumes else None
        self.evaluations = Evaluations(args, arrangement.name, self.session.out, past)
        self.evaluations.load_state_dict(saved.get("evaluation", {}))
        base = Prioritized(args.alpha, args.beta) if args.prioritized else Uniform()
        self.sampler = NStep(args.n_step, args.gamma, base)
        self.store = ReplayStore(
            args.capacity,
            sampler=self.sampler,
            journal=self.session.journal,
            ratio=Ratio(args.batch / args.rows_per_update, min_rows=args.min_rows),
            stack=stack_of(observations),
            seed=args.seed,
        )

    @property
    def steps(self) -> int:
        """Rows that the last record speaks of."""
        return self.metrics.steps

    @property
    def reached(self) -> bool:
        """Whether the goal is reached: by an evaluation, if there are any."""
        if self.evaluations.on:
            return self.evaluations.reached_at is not None
        goal, judged = self.args.stop_at, self.metrics.judged_return
        return goal is not None and judged is not None and judged >= goal

    @property
    def reached_at(self) -> int | None:
        """Steps after which the goal was reached."""
        if self.evaluations.on:
            return self.evaluations.reached_at
        return self.steps if self.reached else None

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do."""
        return self.steps >= self.args.total_steps or self.reached

    def learn(self, collector: clusterenv.Collector, interrupt: Interrupt) -> None:
        """Learn while rows arrive, until the run is done or interrupted."""
        args, learner, base = self.args, self.learner, self.sampler.base
        stream = BatchStream(collector, self.episodes, interrupt, rows=self.steps)
        past, began, committed = self.metrics, time.monotonic(), self.steps

        def log() -> None:
            self.log(collector.stats(), past, time.monotonic() - began)

        self.announce(collector, self.steps)
        try:
            for sample in self.store.feed(stream, args.batch, tensors=True):
                if args.anneal:
                    learner.anneal(stream.rows)
                errors = learner.update(sample)
                if isinstance(base, Prioritized):
                    self.store.update_priorities(sample["indices"], errors)
                    part = min(1.0, stream.rows / args.total_steps)
                    base.beta = args.beta + (1 - args.beta) * part
                if learner.updates % args.publish_every == 0:
                    version = self.announce(collector, stream.rows)
                    self.evaluations.update(self.policy, version, stream.rows)
                if stream.rows >= args.total_steps or interrupt.wanted:
                    break
                if stream.rows - self.steps >= args.log_every:
                    log()
                    if self.reached:
                        break
                    if self.steps - committed >= args.checkpoint_every:
                        self.commit()
                        committed = self.steps
            if self.evaluations.on and not interrupt.wanted:
                version = self.announce(collector, stream.rows)
                self.evaluations.finish(self.policy, version, stream.rows, self.display)
        except Diverged:
            self.display.say(f"{self.session.out} is as it was at the last commit")
            raise
        except ClusterEnvError:
            # In a terminal, Ctrl-C also reaches the workers of a local cluster.
            if not interrupt.wanted:
                if self.store.stats.added_rows:  # something can be saved
                    log()
                    self.commit()
                    self.display.say(
                        f"saved {self.session.out} at {self.steps:,} steps; "
                        "the same command goes on from there"
                    )
                raise
        log()

    def announce(self, collector: clusterenv.Collector, steps: int) -> int:
        """Publish the network, and what the workers need besides; return the version."""
        return collector.publish(self.policy, **self.arrangement.scalars(self.args, steps))

    def log(self, stats: clusterenv.Stats, past: Metrics, seconds: float) -> None:
        """Write where it stands; ``past`` is where this session began."""
        held = self.store.stats
        steps = held.added_rows
        if (steps, self.learner.updates) == (self.steps, self.metrics.updates):  # nothing new
            self._record(dataclasses.replace(self.metrics, **self.evaluations.metrics))
            return
        scalars = self.arrangement.scalars(self.args, steps)
        learner: dict[str, Any] = {**self.learner.means(), **scalars}
        metrics = Metrics(
            steps=steps,
            seconds=past.seconds + seconds,
            steps_per_second=(steps - past.steps) / seconds,
            episodes=self.episodes.count,
            mean_return=mean(self.episodes.returns),
            judged_return=self.episodes.judgement,
            store_rows=held.rows,
            store_capacity=held.capacity,
            store_bytes=held.nbytes,
            store_age=held.newest_version - held.oldest_version,
            updates=self.learner.updates,
            lr=self.learner.lr,
            **learner,
            **self.evaluations.metrics,
            **collected(past, stats),
        )
        self._record(metrics)

    def _record(self, metrics: Metrics) -> None:
        if metrics != self.metrics:
            self.metrics = metrics
            self.run.log(metrics)
            self.display.show(metrics)

    def commit(self) -> None:
        """Make rows and learner count together."""
        args = self.args
        state = {
            "learner": self.learner.state_dict(),
            "episodes": self.episodes.state_dict(),
            "metrics": self.metrics.given(),
            "evaluation": self.evaluations.state_dict(),
            "network": {"hidden": list(args.hidden), "duelling": args.duelling},
        }
        self.session.commit(self.store, state, steps=self.steps, finished=self.over)


def train(args: LearnerArgs, arrangement: Arrangement = DQN) -> Result:
    """Train a Q network; write rows, learner and everything else to the run directory.

    A run in the directory that has not finished goes on.

    Raises
    ------
    ConfigError
        If the arguments do not fit the environment or the run directory.
    """
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    training = Training(args, arrangement)
    run, display, out = training.run, training.display, training.session.out
    interrupt = Interrupt("committing and stopping; Ctrl-C again stops at once", args.quiet)
    with contextlib.closing(run), training.store:
        if training.over:
            display.say(f"{out} is finished, at {training.steps:,} steps")
        else:
            if training.session.resumes:
                display.say(f"going on with {out} from {training.steps:,} steps")
            run.open(training.steps)
            with (
                display,
                interrupt,
                dashboard.shown(args.dashboard),
                clusterenv.Collector(
                    args.env,
                    training.policy,
                    num_envs=args.num_envs,
                    horizon=args.horizon,
                    shards=args.shards,
                    cluster=args.cluster,
                    engine=args.engine,
                    sync=sync_rule(args),
                    seed=args.seed + training.steps,  # a resumed run begins new episodes
                    version=training.metrics.version + training.session.resumes,
                    **survival(args),
                ) as collector,
                training.evaluations.beside(collector, training.policy, training.steps),
            ):
                dashboard.say_where(collector, display)
                interrupt.started()
                training.learn(collector, interrupt)
                training.commit()
    metrics, journal = training.metrics, training.session.journal
    curve = run.draw(f"{training.title}, --sync {args.sync}")
    files = [
        f"{out}: {run.progress.name}, metrics.jsonl, {run.checkpoint.name}, TensorBoard events",
        *training.evaluations.said,
        str(curve),
        f"{journal}: clusterenv.open_dataset({str(journal)!r}).to_table()",
    ]
    further: dict[str, Any] = {"out": out, "stop_at": None if training.reached else args.stop_at}
    if training.steps >= args.total_steps:
        further["total_steps"] = 2 * args.total_steps
    program = f"clusterenv train {arrangement.name}"
    go_on = options.command(program, args, arrangement.presets, **further)
    display.sum_up(summary(metrics, run.best, files, go_on))
    return Result(
        mean_return=metrics.mean_return,
        judged_return=training.episodes.judgement,
        steps=training.steps,
        updates=training.learner.updates,
        version=metrics.version,
        pulls=metrics.pulls,
        weight_bytes=metrics.weight_bytes,
        seconds=metrics.seconds,
        reached_at=training.reached_at,
        out=out,
        eval_return=metrics.eval_return,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and train."""
    train(
        options.read(Args, argv, presets=PRESETS, description=__doc__, prog="clusterenv train dqn")
    )


if __name__ == "__main__":
    cli.run_module("dqn", main)
