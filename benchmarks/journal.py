"""CPU seconds of the head per million rows that it receives and writes to a journal.

The messages of a worker are made once. Then this process does what a head does with each of them:
it opens the message, checks it, makes a batch, and appends the batch to a journal. The second
column appends batches made by hand, whose rows have to be encoded first: the work that received
messages save. The best of several rounds counts.

    python benchmarks/journal.py                 # everything
    python benchmarks/journal.py frames          # some
    python benchmarks/journal.py --directory /dev/shm/journal
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gymnasium import spaces

from clusterenv import Batch
from clusterenv.data.fragment import Fragment
from clusterenv.data.fragment_decoder import ExpectedRows, FragmentDecoder
from clusterenv.data.fragment_encoder import FragmentEncoder
from clusterenv.data.record_batch import Origin
from clusterenv.data.spaces import Layout
from clusterenv.store import Journal

ENVS = 16
ROUNDS = 5
MESSAGES = 4  # different ones, written in turn


class Work(NamedTuple):
    """Rows like those of an environment."""

    title: str
    obs: spaces.Box
    horizon: int
    episode: int
    """Steps of an episode, on average."""
    rows: int
    """To write in a round."""


WORKS = {
    "cartpole": Work("CartPole", spaces.Box(-9, 9, (4,)), 128, 20, 1_000_000),
    "lunarlander": Work("LunarLander", spaces.Box(-9, 9, (8,)), 128, 200, 1_000_000),
    "frames": Work("84×84×4 frames", spaces.Box(0, 255, (84, 84, 4), np.uint8), 32, 1000, 16_384),
}
ACTIONS = spaces.Discrete(4)


def fragment(work: Work, seed: int) -> Fragment:
    """Return a fragment with random rows."""
    rng, rows = np.random.default_rng(seed), ENVS * work.horizon
    bits = rng.integers(0, 256, rows * int(np.prod(work.obs.shape)), np.uint8)
    ends = rng.random(rows) < 1 / work.episode
    columns = {
        "obs": bits.astype(work.obs.dtype).reshape(rows, *work.obs.shape),
        "reward": rng.random(rows, np.float32),
        "terminated": ends,
        "truncated": np.zeros(rows, np.bool_),
        "action": rng.integers(0, 4, rows),
        "log_prob": rng.random(rows, np.float32),
        "episode": np.zeros(rows, np.int32),
        "step": np.repeat(np.arange(work.horizon, dtype=np.int32), ENVS),
        "env": np.tile(np.arange(ENVS, dtype=np.int32), work.horizon),
        "version": np.zeros(rows, np.int32),
    }
    tails = np.flatnonzero(ends | (np.arange(rows) >= rows - ENVS))
    return Fragment(columns, ENVS, tails, {"obs": columns["obs"][tails]}, {})


def by_hand(batch: Batch) -> Batch:
    """Return the same batch without the message that it was received as."""
    return Batch(
        {name: batch.flat(name) for name in batch.names},
        batch.num_envs,
        tail_rows=batch.tail_rows,
        tail=batch.tail,
        state=batch.state,
        policy_version=batch.policy_version,
        **batch.origin,
    )


def cpu_seconds(work: Work, directory: Path, change: Callable[[Batch], Batch]) -> float:
    """Return the least CPU seconds that a million rows took."""
    origin = Origin(1, 0, 0, ENVS, 0)
    encoder, messages, schema = FragmentEncoder(origin), [], b""
    for seed in range(MESSAGES):
        first, pieces = encoder.encode(fragment(work, seed))
        schema = schema or first or b""
        messages.append(np.frombuffer(b"".join(pieces), np.uint8).copy())
    spaces_of_rows = Layout(work.obs), Layout(ACTIONS)
    decoder = FragmentDecoder(schema, ExpectedRows(origin, work.horizon, *spaces_of_rows, False))
    times = []
    for _ in range(ROUNDS):
        shutil.rmtree(directory, ignore_errors=True)
        rows = number = 0
        with closing(Journal(directory)) as journal:
            began = time.process_time()
            while rows < work.rows:
                batch = change(decoder.decode(messages[number % MESSAGES], policy_version=0))
                journal.append(batch)
                rows, number = rows + batch.num_rows, number + 1
            journal.commit()
            times.append((time.process_time() - began) * 1e6 / rows)
    shutil.rmtree(directory, ignore_errors=True)
    return min(times)


def main(args: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("works", nargs="*", default=list(WORKS), help=", ".join(WORKS))
    parser.add_argument("--directory", type=Path, help="default: a temporary one")
    given = parser.parse_args(args)
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.directory or Path(temporary, "journal")
        print("| rows | received, s per million | encoded again, s per million |\n|---|---|---|")
        for name in given.works:
            work = WORKS[name]
            received = cpu_seconds(work, directory, lambda batch: batch)
            encoded = cpu_seconds(work, directory, by_hand)
            print(f"| {work.title} | {received:.2f} | {encoded:.2f} |", flush=True)


if __name__ == "__main__":
    main()
