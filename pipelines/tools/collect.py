"""Collect a dataset on disk, without a learner.

``clusterenv collect --env CartPole-v1 --policy random --rows 10_000_000 --out runs/x``

Open the dataset with ``clusterenv.open_dataset("runs/x")``. After a stop or a kill, the same
command continues until the dataset is complete.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

import clusterenv
from clusterenv import Batch
from clusterenv.errors import ClusterEnvError, StoreNotWritten
from clusterenv.policies import Policy
from clusterenv.store import Journal, Stack
from pipelines.experiment import dashboard, options
from pipelines.experiment.checks import Bound, Count, Natural, Options, Share, check_shards
from pipelines.experiment.directories import check_kind, check_writable, note_of
from pipelines.experiment.display import Display
from pipelines.experiment.episodes import BatchStream, Episodes, mean
from pipelines.experiment.facts import duration
from pipelines.experiment.interrupt import Interrupt
from pipelines.experiment.jobs import job_files
from pipelines.experiment.metrics import Metrics, collected
from pipelines.experiment.run_directory import arguments, check_arguments
from pipelines.experiment.wording import count
from pipelines.networks.images import stack_of
from pipelines.tools.saved_policies import collecting_policy

__all__ = ["Args", "Result", "collect", "cut"]

FREE = ("rows", "shards", "cluster", "commit_seconds", "dashboard", "quiet", "out")


@dataclass(frozen=True)
class Args(Options):
    """What to collect, and where."""

    env: str  # id of a Gymnasium environment
    out: Path  # directory of the dataset; an incomplete one is resumed
    rows: Count = 1_000_000  # rows of the whole dataset
    policy: str = "random"  # random, or the directory or checkpoint of a run
    epsilon: Share = 0.05  # of a policy that is otherwise greedy: probability of a random action
    num_envs: Count = 16  # environments, all shards together
    horizon: Count = 128  # steps of each environment in a batch
    shards: Count | None = None  # worker processes; one per core if not given
    cluster: str | None = None  # scheduler address, file or jobqueue name; else this machine
    engine: str = "auto"  # what steps the environments
    text: Literal["refuse", "drop", "keep"] = "refuse"  # how to treat text in observations
    seed: Natural = 1  # environment i gets seed + i
    commit_seconds: Bound = 30.0  # between commits; a kill loses at most the rows of this time
    dashboard: bool = False  # show each shard on Dask's dashboard, on port 8787 of this machine
    quiet: bool = False  # print nothing

    def __post_init__(self) -> None:
        super().__post_init__()
        check_shards(self.num_envs, self.shards)


@dataclass(frozen=True)
class Result:
    """How a collection ended."""

    rows: int
    """In the dataset."""
    collected: int
    """By this session."""
    seconds: float
    mean_return: float
    """Of this session's last 100 episodes; NaN if none ended."""
    out: Path


def collect(args: Args) -> Result:
    """Collect until the dataset has all rows.

    Raises
    ------
    ConfigError
        If the policy does not fit the environment, or the directory is of another dataset.
    """
    check_kind(args.out, "collect")
    check_writable(args.out, example="data/mine")
    if note := note_of(args.out):
        check_arguments(args.out, note["dataset"], args, FREE)
    observations, actions = clusterenv.env_spaces(args.env, engine=args.engine)
    policy = collecting_policy(args.policy, observations, actions, args.epsilon)
    frames = stack_of(observations)
    journal = Journal(args.out, stack=None if frames is None else Stack(frames))
    with contextlib.closing(journal):
        return _collect(args, policy, journal)


def _collect(args: Args, policy: Policy, journal: Journal) -> Result:
    before = rows = journal.manifest.end
    display = Display(f"Collecting {args.env}", args.rows, args.quiet, args.cluster)
    episodes = Episodes(args.num_envs)
    if rows >= args.rows:
        display.say(f"{args.out} has {count(rows, 'row')} already; nothing to collect")
        return Result(rows, 0, 0.0, math.nan, args.out)
    if rows:
        display.say(f"going on with {args.out} from {count(rows, 'row')}")
    interrupt = Interrupt("committing and stopping; Ctrl-C again stops at once", args.quiet)
    began = committed = time.monotonic()
    seconds = 0.0

    def commit() -> None:
        journal.commit(note={"dataset": arguments(args)})

    try:
        with (
            display,
            interrupt,
            dashboard.shown(args.dashboard),
            job_files(args.out),
            clusterenv.Collector(
                args.env,
                policy,
                num_envs=args.num_envs,
                horizon=args.horizon,
                shards=args.shards,
                cluster=args.cluster,
                engine=args.engine,
                sync=clusterenv.Never(),
                text=args.text,
                seed=args.seed + rows,  # a session that goes on begins new episodes
            ) as collector,
        ):
            dashboard.say_where(collector, display)
            interrupt.started()
            began = time.monotonic()
            for batch in BatchStream(collector, episodes, interrupt):
                for part in cut(batch, args.rows - rows):
                    journal.append(part)
                    rows += part.num_rows
                seconds = time.monotonic() - began
                if display.due or rows == args.rows:
                    display.show(
                        Metrics(
                            steps=rows,
                            seconds=seconds,
                            steps_per_second=(rows - before) / seconds,
                            episodes=episodes.count,
                            mean_return=mean(episodes.returns),
                            **collected(Metrics(), collector.stats()),
                        )
                    )
                if rows == args.rows:
                    break
                if time.monotonic() - committed >= args.commit_seconds:
                    commit()
                    committed = time.monotonic()
    except ClusterEnvError as error:
        # In a terminal, Ctrl-C also reaches the workers of a local cluster.
        if not interrupt.wanted:
            if seconds and not isinstance(error, StoreNotWritten):  # something can be saved
                commit()
                display.say(
                    f"saved {count(rows, 'row')} in {args.out}; the same command goes on from there"
                )
            raise
    commit()
    further = {"rows": 2 * args.rows} if rows == args.rows else {}
    display.sum_up(
        [
            ("rows", f"{count(rows, 'row')}, {rows - before:,} of them in {duration(seconds)}"),
            (
                "return",
                f"{mean(episodes.returns):.1f}, mean of {count(len(episodes.returns), 'episode')}",
            ),
            ("wrote", f"{args.out}: clusterenv.open_dataset({str(args.out)!r}).to_table()"),
            ("go on", options.command("clusterenv collect", args, {}, **further)),
        ]
    )
    return Result(rows, rows - before, seconds, mean(episodes.returns), args.out)


def cut(batch: Batch, rows: int) -> Iterator[Batch]:
    """Yield the first ``rows`` rows of a batch, as one or two batches; all, if it has fewer.

    Whole time rows come first; what is left over is a batch of one time row with fewer
    environments.
    """
    times, rest = divmod(rows, batch.num_envs)
    if times >= batch.horizon:
        yield batch
        return
    if times:
        yield _part(batch, 0, times * batch.num_envs, batch.num_envs)
    if rest:
        yield _part(batch, times * batch.num_envs, times * batch.num_envs + rest, rest)


def _part(batch: Batch, start: int, end: int, num_envs: int) -> Batch:
    """Return rows ``start`` to ``end``; their last ``num_envs`` are the last time row."""
    at = np.full(batch.num_rows, -1)
    at[batch.tail_rows] = np.arange(len(batch.tail_rows))
    last = np.arange(end - num_envs, end)
    given = batch.tail_rows[(batch.tail_rows >= start) & (batch.tail_rows < end - num_envs)]
    tail_rows = np.concatenate([given, last])
    tail = {}
    for name, values in batch.tail.items():
        # What follows a row lies on the tail, or one time row below.
        below = batch.flat(name)[np.minimum(tail_rows + batch.num_envs, batch.num_rows - 1)]
        known = at[tail_rows] >= 0
        below[known] = values[at[tail_rows[known]]]
        tail[name] = below
    return Batch(
        {name: batch.flat(name)[start:end] for name in batch.names},
        num_envs,
        tail_rows=tail_rows - start,
        tail=tail,
        # Known at the first time row alone.
        state={name: part[: 0 if start else num_envs] for name, part in batch.state.items()},
        run=batch.run,
        shard=batch.shard,
        incarnation=batch.incarnation,
        policy_version=batch.policy_version,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and collect."""
    collect(options.read(Args, argv, description=__doc__, prog="clusterenv collect"))
