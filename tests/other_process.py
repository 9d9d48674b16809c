"""Another process with stores of its own; it imports everything once and does as it is told.

Each line on its standard input is a task in JSON; it answers each with a line.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from batches import Fleet

from clusterenv.store import Prioritized, ReplayStore

CAPACITY = 70


def new_store(directory: str | Path) -> ReplayStore:
    return ReplayStore(CAPACITY, sampler=Prioritized(), journal=directory, seed=0)


def new_fleet(number: int) -> Fleet:
    return Fleet(seed=number, envs=3, horizon=4)


def one_round(store: ReplayStore, fleet: Fleet) -> None:
    """Add, learn and commit."""
    store.add(fleet.next()[0])
    indices = np.arange(store.stats.evicted_rows, store.stats.added_rows)
    store.update_priorities(indices, errors(indices))
    store.commit(rounds=store.note.get("rounds", 0) + 1)


def errors(indices: np.ndarray) -> np.ndarray:
    return np.asarray(np.sin(indices) ** 2)


def kill_at_random(directory: str, count: int, seed: int) -> list[int]:
    """Kill so many writers, and return how many rounds each had committed."""
    moments = random.Random(seed)
    reported = []
    for number in range(count):
        reads, child = writer(Path(directory, str(number)), number)
        with os.fdopen(reads, "rb", buffering=0) as pipe:
            rounds = moments.choice([0, 0, 0, 1, 2, 6])
            for _ in range(1 + rounds):
                assert pipe.read(1)
            time.sleep(moments.uniform(0, 0.02 if rounds else 0.06))  # the moment is random
            os.kill(child, signal.SIGKILL)
            reported.append(rounds + len(pipe.readall() or b""))
        assert killed(child)
    return reported


def kill_at_steps(directory: str, rounds: int) -> list[int]:
    """Kill writers before and after each thing they do on disk; return what each had committed."""
    reported = []
    while True:
        number = len(reported)
        reads, child = writer(Path(directory, str(number)), number, number, rounds)
        with os.fdopen(reads, "rb", buffering=0) as pipe:
            done = len(pipe.readall() or b"") - 1
        if not killed(child):
            return reported
        reported.append(done)


def killed(child: int) -> bool:
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def writer(
    directory: Path, number: int, steps: int | None = None, rounds: int = 10**9
) -> tuple[int, int]:
    """Begin a process that adds and commits; return where it reports, and its number."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        return reads, child
    try:
        if steps is not None:
            die_at(steps)
        os.write(writes, b"b")
        store, fleet = new_store(directory), new_fleet(number)
        for _ in range(rounds):
            one_round(store, fleet)
            os.write(writes, b".")
    finally:
        os._exit(0)


def die_at(steps: int) -> None:
    """Kill this process before, or with odd numbers after, what it does on disk by then."""
    left = itertools.count(steps, -1)

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **options)
            if next(left) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return step

    for name in ("fsync", "rename", "unlink", "open"):
        setattr(os, name, deadly(getattr(os, name)))


def main() -> None:
    held: dict[str, ReplayStore] = {}
    for line in sys.stdin:
        task: dict[str, Any] = json.loads(line)
        answer: Any = os.getpid()
        if task["do"] == "open":
            held[task["directory"]] = new_store(task["directory"])
        elif task["do"] == "close":
            held.pop(task["directory"]).close()
        elif task["do"] == "kill":
            answer = kill_at_random(task["directory"], task["count"], task["seed"])
        else:
            answer = kill_at_steps(task["directory"], task["rounds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
