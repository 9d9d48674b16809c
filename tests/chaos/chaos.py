"""DQN collects while workers are killed, stopped and made to hang: ``python tests/chaos/chaos.py``.

Every few seconds something happens to a random worker or environment. Afterwards the rows on disk
are checked by their provenance, and a table tells what was survived, and how soon.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dask

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
)
from chaotic import ORDERS
from checks import Account, check_rows

import clusterenv
from clusterenv.head.lifecycle import open_heads
from pipelines import experiment
from pipelines.dqn import DQN, Args

FAULTS = ("kill", "stop", "hang", "hold", "raise")
DEADLINES = {"clusterenv.timeout.silence": "4s", "clusterenv.timeout.step": "3s"}
PATIENCE = 90.0


@dataclass
class Report:
    """What was done to a run, and how it took it."""

    injected: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    recovery: dict[str, list[float]] = field(default_factory=lambda: {f: [] for f in FAULTS})
    before: float = 0.0
    """Rows per second, before the first fault."""
    after: float = 0.0
    """And from ten seconds after the last on."""
    stats: clusterenv.Stats | None = None
    account: Account | None = None
    problem: BaseException | None = None

    def table(self) -> str:
        """Return it as Markdown."""
        assert self.stats is not None
        assert self.account is not None
        lines = [
            "| fault | injected | survived | recovery, median s | longest s |",
            "|---|--:|--:|--:|--:|",
        ]
        for fault in FAULTS:
            times = self.recovery[fault]
            shown = f"{statistics.median(times):.1f} | {max(times):.1f}" if times else "– | –"
            lines.append(f"| {fault} | {self.injected[fault]} | {len(times)} | {shown} |")
        stats = self.stats
        lines += [
            "",
            f"{self.account.rows:,} rows in {self.account.episodes:,} episodes and "
            f"{self.account.incarnations} incarnations, each row once, no episode with a gap; "
            f"{stats.restarts} restarts, {stats.rebuilt} environments rebuilt, "
            f"{stats.lost_rows} rows lost with their shard, {stats.dropped_rows} dropped.",
            f"{self.before:,.0f} rows/s before the first fault, {self.after:,.0f} after the last: "
            f"{self.after / self.before:.2f}.",
        ]
        return "\n".join(lines)


class Injector(threading.Thread):
    """Does harm, and watches how it is taken; ends the run with Ctrl-C."""

    def __init__(
        self, cluster: Any, orders: Path, seconds: float, seed: int, measure: float
    ) -> None:
        super().__init__(name="injector", daemon=True)
        self.report = Report()
        self._cluster = cluster
        self._orders = orders
        self._seconds = seconds
        self._measure = measure
        self._random = random.Random(seed)

    def run(self) -> None:
        try:
            self._harm()
        except BaseException as error:
            self.report.problem = error
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    def _harm(self) -> None:
        _wait(lambda: bool(_collectors()) and self._stats().rows > 2_000, "the run to begin")
        report = self.report
        report.before = self._throughput()
        ends = time.monotonic() + self._seconds
        left = list(FAULTS)  # each at least once
        while time.monotonic() < ends or left:
            fault = self._random.choice(left or FAULTS)
            if fault in left:
                left.remove(fault)
            report.injected[fault] += 1
            began = time.monotonic()
            self._inject(fault)
            report.recovery[fault].append(time.monotonic() - began)
            time.sleep(self._random.uniform(0.5, 3))
        time.sleep(self._measure)
        report.after = self._throughput()
        report.stats = self._stats()

    def _stats(self) -> clusterenv.Stats:
        for collector in _collectors():
            return collector.stats()
        raise RuntimeError("the run has ended")

    def _throughput(self) -> float:
        rows, began = self._stats().rows, time.monotonic()
        time.sleep(self._measure)
        return (self._stats().rows - rows) / (time.monotonic() - began)

    def _inject(self, fault: str) -> None:
        """Do one thing, and wait until it has been noticed and all shards deliver again."""
        before = self._stats()
        if fault in ("kill", "stop"):
            holders = {shard.worker for c in _collectors() for shard in c.shards}
            nannies = [n for n in self._cluster.workers.values() if n.worker_address in holders]
            _wait(lambda: any(n.process and n.process.pid for n in nannies), "a worker")
            pids = [n.process.pid for n in nannies if n.process and n.process.pid]
            os.kill(
                self._random.choice(pids), signal.SIGKILL if fault == "kill" else signal.SIGSTOP
            )
        else:
            beside = self._orders.with_suffix(".new")
            beside.write_text(fault)
            beside.rename(self._orders)

        def noticed() -> bool:
            now = self._stats()
            return now.restarts + now.rebuilt > before.restarts + before.rebuilt

        _wait(noticed, f"{fault} to be noticed")
        rows = self._by_shard()
        _wait(
            lambda: all(now > then for now, then in zip(self._by_shard(), rows, strict=True)),
            f"all shards to deliver after {fault}",
        )

    def _by_shard(self) -> Sequence[float]:
        stats = self._stats()
        return [round(rate * stats.seconds) for rate in stats.steps_per_second]


def _collectors() -> list[clusterenv.Collector]:
    return [head for head in open_heads if isinstance(head, clusterenv.Collector)]


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE:g} s for {what}")
        time.sleep(0.02)


def run(
    out: Path, seconds: float, seed: int = 0, measure: float = 5.0, inference: str = "worker"
) -> Report:
    """Let DQN collect through chaos, check all rows it kept, and report."""
    orders = out.parent / "orders"
    os.environ[ORDERS] = str(orders)
    with (
        dask.config.set(DEADLINES),
        clusterenv.connect("local", n_workers=2, set_as_default=False, security=False) as client,
    ):
        injector = Injector(client.cluster, orders, seconds, seed, measure)
        args = Args(
            env="chaotic:Chaotic-v0",
            total_steps=10**9,
            horizon=16,
            cluster=client.scheduler.address,
            shards=2,
            inference=inference,
            capacity=1_000_000 + int(10_000 * seconds),  # all rows stay
            rows_per_update=64,
            log_every=5_000,
            hidden=(16,),
            restarts=10_000,
            restart_wait=0.5,
            env_faults=10_000,
            out=out,
            quiet=True,
        )
        injector.start()
        experiment.run(DQN, args)
        injector.join()
    report = injector.report
    if report.problem is not None:
        raise report.problem
    report.account = check_rows(out / "replay")
    collected = report.stats.rows if report.stats else 0
    # Ctrl-C may find batches on their way to the store: two of each shard at the most.
    on_the_way = 2 * args.num_envs * args.horizon
    assert report.account.rows >= collected - on_the_way, f"{collected} rows were collected"
    return report


def main() -> None:
    """Read the command line, run, print the table; fail if throughput did not come back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-throughput", action="store_true", help="do not judge by time")
    parser.add_argument("--inference", default="worker", help="worker or head")
    given = parser.parse_args()
    logging.getLogger("clusterenv").setLevel(logging.ERROR)
    measure = 1.0 if given.no_throughput else 10.0
    with tempfile.TemporaryDirectory() as directory:
        out, seconds = Path(directory) / "run", 60 * given.minutes
        report = run(out, seconds, given.seed, measure, given.inference)
    print(report.table())
    if report.after < 0.9 * report.before and not given.no_throughput:
        sys.exit("throughput did not come back to 90 % of what it was")


if __name__ == "__main__":
    main()
