"""Restarts, moves, adds and drains the shards of a collector."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from clusterenv import config
from clusterenv.errors import ClosedError
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.fleet.placement import shards_to_add, shards_to_move
from clusterenv.head.fleet.restarts import Restarter, Restarts
from clusterenv.head.fleet.roster import ShardRecord

__all__ = ["Supervisor"]

logger = logging.getLogger("clusterenv")


class Supervisor:
    """Decides which shards are restarted, moved, added and drained, and places them.

    One thread watches the workers and adds shards; each restart and each move has a thread of
    its own. Workers without a shard get one, up to ``max_shards``, until :meth:`scale` is called.

    It calls ``opened`` with a shard that was placed and is open, ``drain`` with one that shall
    deliver what it has begun (:meth:`restart` or :meth:`release` follows), and ``over`` with the
    error that ends the run.
    """

    def __init__(
        self,
        fleet: Fleet,
        rule: Restarts,
        max_shards: int,
        opened: Callable[[ShardHandle], None],
        drain: Callable[[ShardRecord], None],
        over: Callable[[BaseException], None],
    ) -> None:
        self._fleet, self._roster = fleet, fleet.roster
        self._restarter = Restarter(rule, fleet)
        self._most = max_shards
        self._opened, self._drain, self._over = opened, drain, over
        self._scaled = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._watch, "supervisor")

    def restart(
        self, shard: int, error: Exception | None = None, end_process: bool = False
    ) -> None:
        """Restart a shard, or end the run if its budget is spent; see ``Restarter.restart``."""
        self._start(self._restart, f"restart-{shard}", shard, error, end_process)

    def release(self, handle: ShardHandle) -> None:
        """Let a shard go that has ended."""
        self._start(self._fleet.release, f"release-{handle.index}", handle)

    def scale(self, shards: int) -> None:
        """Add or drain shards until there are so many; workers that join get none beyond that."""
        with self._roster.lock:
            self._most = shards
            self._roster.scale(shards)
        self._scaled.set()

    def close(self, timeout: float) -> None:
        """Place nothing from now on, and wait for what is being placed."""
        self._fleet.closing.set()
        self._scaled.set()
        with self._roster.lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _start(self, target: Callable[..., None], name: str, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"clusterenv-{name}", daemon=True)
        with self._roster.lock:
            if self._fleet.closing.is_set():
                return
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _restart(self, shard: int, error: Exception | None, end_process: bool) -> None:
        try:
            handle = self._restarter.restart(shard, error, end_process)
        except ClosedError:
            return
        except Exception as problem:
            self._over(problem)
            return
        self._opened(handle)

    def _watch(self) -> None:
        """Follow the workers that join and leave, and calls of :meth:`scale`."""
        while not self._fleet.closing.is_set():
            scaled = self._scaled.wait(config.seconds("watch"))
            self._scaled.clear()
            try:
                if not scaled:
                    self._balance()
                self._fit()
            except ClosedError:
                return
            except Exception as error:
                self._over(error)
                return

    def _balance(self) -> None:
        """Move shards away from crowded workers and those about to leave; use free workers."""
        self._fleet.await_scheduler()
        try:
            load = self._fleet.load(self._fleet.client.nthreads())
            leaving = self._fleet.leaving()
        except Exception:  # the scheduler is gone, and the next look will show it
            return
        with self._roster.lock:
            if not self._roster.settled:
                return  # one change after the other
            homes = {r.index: r.handle.worker for r in self._roster.active if r.handle}
            placed = {index: worker for index, worker in homes.items() if worker in load}
            for index in shards_to_move(placed, load, leaving):
                self._drain(self._roster[index])
            wanted = self._roster.wanted
            self._roster.scale(wanted + shards_to_add(wanted, self._most, load, leaving))

    def _fit(self) -> None:
        """Add or drain shards until there are as many as wanted."""
        while wanted := self._roster.wanted:
            record = self._roster.add()
            if record is None:
                break
            try:
                handle = self._fleet.place(record)
            except ClosedError:
                raise
            except Exception as error:
                logger.warning("shard %d could not be added: %s", record.index, error)
                self._roster.abandon(record.index, wanted)
            else:
                self._opened(handle)
        for record in self._roster.surplus:
            self._drain(record)
