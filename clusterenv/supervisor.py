"""Places lost shards again, beside whoever noticed the loss."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable

from clusterenv import config
from clusterenv.errors import ClusterEnvError, ConfigError, EnvError, PolicyError, WorkerLost
from clusterenv.fleet import Fleet, Link
from clusterenv.supervision import Restarts

__all__ = ["Supervisor"]

logger = logging.getLogger("clusterenv")


class Supervisor:
    """Gives every lost shard another incarnation, as long as the rule allows.

    Parameters
    ----------
    fleet
        Places the shards.
    rule
        How often, and how soon.
    back
        Called, in a thread of its own, with a shard that is there again.
    over
        Called with the error that ends the run.
    """

    def __init__(
        self,
        fleet: Fleet,
        rule: Restarts,
        back: Callable[[Link], None],
        over: Callable[[BaseException], None],
    ) -> None:
        self._fleet = fleet
        self._rule = rule
        self._back = back
        self._over = over
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._losses: defaultdict[int, list[float]] = defaultdict(list)
        self._errors: defaultdict[int, list[BaseException]] = defaultdict(list)
        self._incarnations: defaultdict[int, int] = defaultdict(int)

    def lost(self, link: Link, error: BaseException, end_process: bool = False) -> None:
        """Place a lost shard again after a while, or end the run with all that was seen.

        Parameters
        ----------
        link
            The shard; nothing that it sends from now on is heard.
        error
            How it was noticed.
        end_process
            Whether the worker's process hangs and must be ended first.
        """
        link.lost = True
        link.disconnect()
        with self._lock:
            if self._closing.is_set():
                return
            self._losses[link.index].append(time.monotonic())
            self._errors[link.index].append(error)
            wait = self._rule.wait(self._losses[link.index], time.monotonic())
            if isinstance(error, (ConfigError, PolicyError)):  # the next one would fail too
                wait = None
            if wait is None:
                self._over(self._verdict(link))
                return
            logger.warning("%s Placing it again%s.", error, f" in {wait:g} s" if wait else "")
            thread = threading.Thread(
                target=self._restore,
                args=(link, wait, end_process),
                name=f"clusterenv-restart-{link.index}",
                daemon=True,
            )
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
            thread.start()

    def close(self, timeout: float) -> None:
        """Place nothing again from now on."""
        with self._lock:
            self._closing.set()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _restore(self, link: Link, wait: float, end_process: bool) -> None:
        if self._closing.wait(wait):
            return
        if end_process:
            self._fleet.end_process(link)
        with self._lock:
            self._incarnations[link.index] += 1
            incarnation = self._incarnations[link.index]
        try:
            again = self._fleet.place_again(link, incarnation)
        except Exception as error:
            if not self._closing.is_set():
                self.lost(link, error)
            return
        with self._lock:
            if not self._closing.is_set():
                self._back(again)
                return
        self._fleet.discard(again, config.seconds("timeout.close"))

    def _verdict(self, link: Link) -> BaseException:
        """Return the error that ends the run: the last one, and all before it."""
        errors = self._errors[link.index]
        last = errors[-1]
        if len(errors) == 1:
            return last
        kind: type[ClusterEnvError] = WorkerLost
        for each in (ConfigError, PolicyError, EnvError):
            if isinstance(last, each):
                kind = each
        seen = "\n\n".join(f"{number}. {error}" for number, error in enumerate(errors, 1))
        verdict = kind(
            f"shard {link.index} was lost {len(errors)} times, and {self._rule} allows no more. "
            f"What was seen:\n\n{seen}"
        )
        verdict.__cause__ = last
        return verdict
