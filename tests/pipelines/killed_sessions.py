"""Kills sessions again and again while they commit; run by a test, in a process of its own.

A process with one thread may fork: each round's session is a child, killed after a while.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from batches import Fleet

from clusterenv.store import Prioritized, ReplayStore, open_snapshot
from pipelines.experiment.directories import note_of
from pipelines.experiment.run_directory import RunDirectory, arguments


@dataclass(frozen=True)
class Args:
    out: Path
    fresh: bool = False


def session(out: Path) -> None:
    """Go on from the last commit, and commit batch after batch until killed."""
    args = Args(out)
    directory = RunDirectory(args, "dqn", ())
    directory.begin({"learner": "dqn", "options": arguments(args)})
    store = ReplayStore(500, sampler=Prioritized(), journal=directory.journal)
    before = directory.load()["rows"] if directory.resumes else 0
    assert store.stats.added_rows == before
    fleet = Fleet(seed=before)
    while True:
        store.add(fleet.next()[0])
        rows = store.stats.added_rows
        state = {"rows": rows, "weights": torch.full((64, 64), rows)}
        directory.commit(state, store, steps=rows, finished=False)


def main(out: Path, rounds: int) -> None:
    """Kill so many sessions; after each, rows and learner must be of one commit."""
    torch.set_num_threads(1)
    draw, last = random.Random(1), 0
    for _ in range(rounds):
        child = os.fork()
        if child == 0:
            try:
                session(out)
            finally:
                os._exit(1)  # a session ends by being killed alone
        time.sleep(draw.uniform(0.005, 0.25))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        note = note_of(out) or {}
        if "learner" not in note:
            continue
        learner = torch.load(out / note["learner"], weights_only=True)
        assert learner["rows"] == note["steps"] == open_snapshot(out / "replay").end >= last
        assert (learner["weights"] == note["steps"]).all()
        last = note["steps"]
    print(last)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
