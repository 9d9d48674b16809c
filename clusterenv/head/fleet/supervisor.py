"""Keeps the record of losses, and places lost shards again beside whoever noticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from clusterenv import config
from clusterenv.errors import (
    SchedulerLost,
)
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.fleet.placement import shards_to_add, shards_to_move
from clusterenv.head.fleet.restarts import RestartHistory, Restarts

__all__ = ["Supervisor"]

logger = logging.getLogger("clusterenv")


class Supervisor:
    """Gives every lost shard another incarnation, and moves shards where they should be.

    Parameters
    ----------
    fleet
        Places the shards.
    rule
        How often, and how soon.
    max_shards
        Workers that have no shard get one, up to so many shards, until :meth:`scale` says how many.
    back
        Called, in a thread of its own, with a shard that is there.
    drain
        Called with a shard that shall finish what it has in hand; :meth:`drained` follows.
    over
        Called with the error that ends the run.
    """

    def __init__(
        self,
        fleet: Fleet,
        rule: Restarts,
        max_shards: int,
        back: Callable[[ShardHandle], None],
        drain: Callable[[ShardHandle], None],
        over: Callable[[BaseException], None],
    ) -> None:
        self._fleet = fleet
        self._losses = RestartHistory(rule)
        self._most = max_shards
        self._wanted = len(fleet.handles)
        self._back = back
        self._drain = drain
        self._over = over
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._fitting = threading.Lock()
        self._removed: set[int] = set()
        self._start(self._watch, "watch")

    def lost(self, handle: ShardHandle, error: BaseException, end_process: bool = False) -> None:
        """Place a lost shard again after a while, or end the run with all that was seen.

        Parameters
        ----------
        handle
            The shard; nothing that it sends from now on is heard.
        error
            How it was noticed.
        end_process
            Whether the worker's process hangs and must be ended first.
        """
        handle.lost = True
        handle.disconnect()
        with self._lock:
            if self._closing.is_set():
                return
            wait = self._losses.note(handle.index, error)
            if wait is None:
                self._over(self._losses.verdict(handle.index))
                return
        logger.warning("%s Placing it again%s.", error, f" in {wait:g} s" if wait else "")
        self._start(self._restore, f"restart-{handle.index}", handle, wait, end_process)

    def drained(self, handle: ShardHandle, remove: bool) -> None:
        """Stop a shard that has delivered everything, and place it elsewhere or not at all."""
        handle.lost = True
        if remove:
            with self._lock:
                self._removed.add(handle.index)
        else:
            logger.info("%s moves to another worker.", handle)
        self._start(self._move, f"move-{handle.index}", handle, remove)

    def scale(self, shards: int) -> None:
        """Collect with so many shards, as soon as they are there or drained, and with no more."""
        with self._lock:
            self._most = shards
        self._want(shards)

    def _want(self, shards: int) -> None:
        with self._lock:
            self._wanted = shards
        self._start(self._fit, "scale")

    @property
    def wanted(self) -> int:
        """Shards that there shall be."""
        return self._wanted

    def close(self, timeout: float) -> None:
        """Place nothing again from now on."""
        self._closing.set()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    # Threads

    def _start(self, target: Callable[..., None], name: str, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name=f"clusterenv-{name}", daemon=True)
        with self._lock:
            if self._closing.is_set():
                return
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _restore(self, handle: ShardHandle, wait: float, end_process: bool) -> None:
        if self._closing.wait(wait):
            return
        if end_process:
            self._fleet.end_process(handle)
        self._place(handle, "loss")

    def _move(self, handle: ShardHandle, remove: bool) -> None:
        self._fleet.discard(handle, config.seconds("timeout.close"))
        if remove:
            self._fit()  # more may be wanted by now
        else:
            self._place(handle, "move")

    def _place(self, handle: ShardHandle, because: str) -> None:
        with self._lock:
            incarnation = self._losses.next_incarnation(handle.index)
        try:
            again = self._fleet.place_again(handle, incarnation)
        except Exception as error:
            if not self._closing.is_set():
                self.lost(handle, error)
            return
        again.because = because
        self._hand(again)

    def _hand(self, handle: ShardHandle) -> None:
        """Hand a shard over, unless everything ends."""
        with self._lock:
            if not self._closing.is_set():
                self._back(handle)
                return
        self._fleet.discard(handle, config.seconds("timeout.close"))

    def _watch(self) -> None:
        """Look every now and then at which workers came, and which are to leave."""
        while not self._closing.wait(config.seconds("watch")):
            try:
                self._fleet.await_scheduler()
                load = self._fleet.load()
            except SchedulerLost as error:
                self._over(error)
                return
            except Exception:  # the scheduler is about to be noticed as lost
                continue
            leaving = self._fleet.leaving()
            handles = [handle for handle in self._fleet.handles if not handle.lost]
            if any(handle.draining for handle in handles) or len(handles) < self._wanted:
                continue  # one thing after the other
            placed = {handle.index: handle for handle in handles if handle.worker in load}
            homes = {index: handle.worker for index, handle in placed.items()}
            for index in shards_to_move(homes, load, leaving):
                self._drain(placed[index])
            if more := shards_to_add(self._wanted, self._most, load, leaving):
                self._want(self._wanted + more)

    def _fit(self) -> None:
        """Add or drain shards until there are as many as wanted."""
        with self._fitting:
            while not self._closing.is_set() and len(self._fleet.handles) < self._wanted:
                index, wanted = len(self._fleet.handles), self._wanted
                with self._lock:
                    again = index in self._removed
                    incarnation = self._losses.next_incarnation(index) if again else 0
                try:
                    self._hand(self._fleet.place_more(index, incarnation))
                except Exception as error:
                    logger.warning("no shard %d: %s", index, error)
                    with self._lock:
                        if self._wanted == wanted:  # nobody has asked for others meanwhile
                            self._wanted = len(self._fleet.handles)
                            return
                while len(self._fleet.handles) == index and not self._closing.wait(0.01):
                    pass
            for handle in reversed(self._fleet.handles[self._wanted :]):
                if not handle.lost and not handle.draining:  # one that is lost, when it is back
                    self._drain(handle)
