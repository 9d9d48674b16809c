"""``Collector``: trajectories from shards that act by themselves, as a stream of batches."""

from __future__ import annotations

import atexit
import logging
import queue
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
from dask.utils import parse_bytes
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode

from clusterenv import config
from clusterenv.arguments import check_collector, check_survival
from clusterenv.batch import Batch
from clusterenv.channel import Header, dumps
from clusterenv.cluster import ClusterLike
from clusterenv.errors import (
    ChannelClosed,
    ClosedError,
    ConfigError,
    EnvError,
    PolicyError,
    WorkerLost,
)
from clusterenv.fleet import Link, env_error
from clusterenv.fragment import Cut
from clusterenv.frames import Frame
from clusterenv.launch import make_recipe, open_fleet
from clusterenv.policies.base import Policy
from clusterenv.schema import Layout
from clusterenv.serving import Serving
from clusterenv.stats import Stats, Tally
from clusterenv.stream import StreamSpec
from clusterenv.supervision import EnvFaults, Restarts
from clusterenv.supervisor import Supervisor
from clusterenv.sync.publisher import Publisher
from clusterenv.sync.rules import EveryVersion, SyncRule
from clusterenv.sync.weights import manifest_of
from clusterenv.wire import FragmentMeta, Parts, receive

__all__ = ["Collector"]

logger = logging.getLogger("clusterenv")

_WATCH_SECONDS = 0.5
_open: weakref.WeakSet[Collector] = weakref.WeakSet()


class Collector:
    """Collects trajectories with the policy beside the simulation.

    Parameters
    ----------
    env
        Whatever :func:`clusterenv.make_vec` takes.
    policy
        A :class:`clusterenv.policies.Policy`; its weights are the first version.
    num_envs, shards, cluster, engine, wrappers
        As for :func:`clusterenv.make_vec`.
    horizon
        Time rows of a fragment.
    sync
        When a shard pulls a newer version; see ``clusterenv.sync``.
    seed
        Environment ``i`` gets ``seed + i``.
    credits
        Fragments that each shard may be ahead of the reader when iterating; at least 2.
    max_shards
        Workers that join later, and have no shard, get one more of the same size, up to so
        many; by default none. See also :meth:`scale`.
    restarts
        How often a lost shard is placed again before the run ends: 5 times in 10 minutes by
        default, ``Restarts(0)`` for never.
    env_faults
        What becomes of an environment that raises or breaks its own space: by default it is
        rebuilt, alone, up to 5 times in 10 minutes; see :class:`clusterenv.EnvFaults`.
    switch
        Between what a shard changes its policy and scalars: ``"fragment"``, or ``"step"``
        to act with new weights from the next step on. ``rollout()`` always changes them
        between fragments.
    version
        Number of the first version; a run that goes on goes on counting.
    **env_kwargs
        Passed to the environment.

    Examples
    --------
    >>> import clusterenv, gymnasium, torch
    >>> net = torch.nn.Linear(4, 2)
    >>> policy = clusterenv.policies.Categorical(net)
    >>> options = {"num_envs": 4, "horizon": 8, "shards": 2}
    >>> with clusterenv.Collector("CartPole-v1", policy, **options) as collector:
    ...     batches = collector.rollout()
    ...     version = collector.publish(policy)
    >>> [batch["obs"].shape for batch in batches], version
    ([(8, 2, 4), (8, 2, 4)], 1)
    """

    def __init__(
        self,
        env: str | EnvSpec | Callable[..., gym.Env[Any, Any]] | Sequence[Callable[..., Any]],
        policy: Policy,
        *,
        num_envs: int,
        horizon: int,
        shards: int | None = None,
        cluster: ClusterLike = None,
        engine: str = "auto",
        sync: SyncRule | None = None,
        seed: int | None = None,
        credits: int = 2,  # noqa: A002
        max_shards: int | None = None,
        restarts: Restarts | None = None,
        env_faults: EnvFaults | None = None,
        switch: str = "fragment",
        version: int = 0,
        wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
        **env_kwargs: Any,
    ) -> None:
        self.closed = False
        rule = EveryVersion() if sync is None else sync
        restarts = Restarts() if restarts is None else restarts
        env_faults = EnvFaults() if env_faults is None else env_faults
        check_collector(policy, horizon, credits, rule, switch, version)
        check_survival(restarts, env_faults, shards, max_shards)
        # The loop resets in the same step, so that no step is spent on resetting.
        loop = engine in ("auto", "gymnasium")
        mode = AutoresetMode.SAME_STEP if loop else AutoresetMode.NEXT_STEP
        recipe = make_recipe(env, num_envs, engine, mode, wrappers, env_kwargs)
        relays = _relays(policy)
        try:
            spec = StreamSpec(policy, rule, horizon, seed, version, switch, env_faults, relays)
            stream = cloudpickle.dumps(spec)
        except Exception as error:
            raise ConfigError(
                f"the policy cannot be sent to a worker: {error}. Keep locks, files and "
                "environments out of it"
            ) from error
        self._credits = credits
        self._fleet, self._owned_client = open_fleet(recipe, num_envs, shards, cluster, stream)
        about = self._fleet.description
        self.observation_space = about.observation_space
        self.action_space = about.action_space
        self._layout = Layout(about.observation_space)
        self._obs_names = [leaf.name("obs") for leaf in self._layout.leaves]
        links = self._fleet.links
        self._publisher = Publisher(policy, rule, self._layout, len(links), version=version)
        self._locks = [threading.Lock() for _ in links]
        self._roster = threading.RLock()  # who has which tickets, and has heard what
        self._waiting = [0] * len(links)  # batches of each shard that were not taken yet
        self._awaited: set[int] = set()  # shards that owe a fragment to rollout()
        self._ending: set[int] = set()  # shards that are drained for good
        self._ended: set[int] = set()  # those of them that have been, behind others
        self._announced: bytes | None = None
        self._returning: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._looked = time.monotonic()
        self._deadlines = config.seconds("timeout.silence"), config.seconds("timeout.step")
        self._received: queue.SimpleQueue[Batch | BaseException] = queue.SimpleQueue()
        self._streaming = False
        self._failure: BaseException | None = None
        self._tally = Tally(len(links), version)
        self._serving = Serving(
            self._fleet, self._publisher, self._tally, self._send, relays=spec.relays
        )
        self._supervisor = Supervisor(
            self._fleet,
            restarts,
            max_shards or len(links),
            self._back,
            self._drain,
            self._received.put,
        )
        self._telemetry = self._fleet.telemetry(_title(env))
        self._intake = threading.Thread(target=self._receive, name="clusterenv-intake", daemon=True)
        self._intake.start()
        _open.add(self)
        self._telemetry.begin()  # now that somebody listens to the shards

    # Taking batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order in which they arrive, without end."""
        while True:
            yield self._next()

    def _next(self) -> Batch:
        self._check_open()
        if not self._streaming:
            with self._roster:
                self._streaming = True
                for link in self._fleet.links:
                    for _ in range(self._credits):
                        self._send(link, Frame.TICKET, dumps(False))
        batch = self._take()
        with self._roster:
            if batch.shard < len(self._fleet.links):
                self._send(self._fleet.links[batch.shard], Frame.TICKET, dumps(False))
        self._sample_probe(batch)
        return batch

    @property
    def ready(self) -> int:
        """Batches that can be taken without waiting."""
        return self._received.qsize()

    def collect(self, rows: int) -> list[Batch]:
        """Return batches of at least ``rows`` rows together, as they arrive."""
        if rows < 1:
            raise ConfigError(f"collect(rows) needs a positive number, got {rows}: collect(4096)")
        batches: list[Batch] = []
        while sum(batch.num_rows for batch in batches) < rows:
            batches.append(self._next())
        return batches

    def rollout(self) -> list[Batch]:
        """Return exactly one fragment of every shard, in order, begun after this call.

        A shard whose rule wants the newest version waits for it first, so with
        ``EveryVersion`` all rows are of one version. Between calls the shards rest.
        """
        self._check_open()
        if self._streaming:
            raise ConfigError(
                "rollout() after iterating: the shards run ahead by themselves now. Use one way "
                "per collector: for batch in collector, or batches = collector.rollout()"
            )
        with self._roster:
            staying = [link for link in self._fleet.links if link.index not in self._ending]
            self._awaited = {link.index for link in staying}
            for link in staying:
                self._send(link, Frame.TICKET, dumps(True))
        batches = sorted((self._take() for _ in staying), key=lambda batch: batch.shard)
        with self._tally.lock:
            self._tally.settle()
        for batch in batches:  # in this order, whichever came first: the same seed, the same run
            self._sample_probe(batch)
        return batches

    def publish(self, policy: Policy, **scalars: float) -> int:
        """Announce a new version of the policy.

        Weights move only to shards that ask for them. ``scalars`` travel with the
        announcement and need no pull.

        Returns
        -------
        int
            The new version's number.
        """
        self._check_open()
        for name, value in scalars.items():
            if not isinstance(value, (int, float)):
                raise ConfigError(f"publish({name}={value!r}): scalars are numbers")
        with self._roster:
            with self._tally.lock:
                announcement = self._publisher.publish(policy, scalars)
            blob = self._announced = dumps(tuple(announcement))
            self._tally.announced_bytes += len(blob) * len(self._fleet.links)
            for link in self._fleet.links:
                self._send(link, Frame.ANNOUNCE, blob)
        return announcement.version

    def scale(self, shards: int) -> None:
        """Collect with so many shards, each as large as the first, as soon as workers have them.

        Shards too many finish the fragment in hand, deliver it and end. It does not wait.
        """
        self._check_open()
        if not isinstance(shards, int) or shards < 1:
            raise ConfigError(f"scale({shards!r}): a positive number of shards, scale(4)")
        self._supervisor.scale(shards)

    @property
    def shards(self) -> int:
        """Shards that there are, those that are being placed again included."""
        return len(self._fleet.links)

    def stats(self) -> Stats:
        """Return what has been done so far."""
        with self._tally.lock:
            return self._tally.stats(self._publisher, self._received.qsize())

    @property
    def dashboard_link(self) -> str | None:
        """Where Dask's dashboard shows the shards; ``None`` if the cluster has no dashboard."""
        return self._telemetry.link

    # What runs beside the reader

    def _receive(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._woken, selectors.EVENT_READ)
                for link in self._fleet.links:
                    selector.register(link.channel, selectors.EVENT_READ, link)
                while not self.closed:
                    self._attend(selector)
        except Exception as error:
            if not self.closed:
                self._received.put(error)

    def _attend(self, selector: selectors.BaseSelector) -> None:
        """Read what has arrived, take in shards that are back, look after those that are quiet."""
        links = [link for link in self._fleet.links if not link.lost]
        buffered = [link for link in links if link.channel.has_buffered()]
        ready: list[Link | None] = [*buffered]
        if not ready:
            ready = [key.data for key, _ in selector.select(_WATCH_SECONDS)]
        for link in ready:
            if link is None:
                self._admit(selector)
            elif not link.lost:
                try:
                    self._read(selector, link)
                except (WorkerLost, EnvError, PolicyError, ConfigError) as error:
                    self._part(selector, link, error)
        for gone in self._fleet.gone():
            self._part(selector, gone, self._fleet.lost(gone))
        now = time.monotonic()
        if now - self._looked < _WATCH_SECONDS:
            return
        self._looked = now
        if self._telemetry.due(now):
            self._telemetry.tell(now, self.stats())
        for quiet in links:
            if quiet.lost:
                continue
            fault = quiet.pulse.fault(now, *self._deadlines)
            if fault is not None:
                self._part(selector, quiet, WorkerLost(f"{quiet} {fault}."), end_process=True)
            else:
                self._send(quiet, Frame.PING, dumps(None))

    def _part(
        self,
        selector: selectors.BaseSelector,
        link: Link,
        error: BaseException,
        end_process: bool = False,
    ) -> None:
        """Hear nothing more of a shard, and have it placed again."""
        if link.index in self._ending:
            self._drained(selector, link, 0)
            return
        self._serving.parted(link)
        selector.unregister(link.channel)
        with self._tally.lock:
            self._tally.lost(max(0, link.pulse.steps * link.share.count - link.delivered))
        self._supervisor.lost(link, error, end_process)

    def _drain(self, link: Link) -> None:
        """Have a shard deliver what it has in hand and no more."""
        with self._roster:
            link.draining = True
            if link.index >= self._supervisor.wanted:
                self._ending.add(link.index)
        self._send(link, Frame.DRAIN, dumps(None))

    def _drained(self, selector: selectors.BaseSelector, link: Link, rows: int) -> None:
        """Hear nothing more of a shard that has delivered all, and have it placed elsewhere."""
        self._serving.parted(link)
        selector.unregister(link.channel)
        with self._roster:
            with self._tally.lock:
                self._tally.left_behind(rows)
            ends = link.index in self._ending
            if ends:
                self._ended.add(link.index)
            while (last := self._fleet.links[-1].index) in self._ended:
                self._fleet.remove_last()
                self._ending.discard(last)
                self._ended.discard(last)
                del self._publisher.in_use[last:]
        self._supervisor.drained(link, remove=ends)

    def _back(self, link: Link) -> None:
        """Hand a shard that was placed again to the intake."""
        self._returning.put(link)
        self._waker.send(b"!")

    def _admit(self, selector: selectors.BaseSelector) -> None:
        """Take in a shard that was placed again: the newest policy, then tickets."""
        self._woken.recv(64)
        while not self._returning.empty():
            link = self._returning.get()
            with self._roster:
                self._fleet.replace(link)
                if link.index == len(self._locks):
                    self._locks.append(threading.Lock())
                    self._waiting.append(0)
                if link.index == len(self._publisher.in_use):
                    self._publisher.in_use.append(0)
                with self._tally.lock:
                    self._tally.began(link.index, link.incarnation, link.because)
                if self._announced is not None:
                    self._serving.give(link)
                    self._send(link, Frame.ANNOUNCE, self._announced)
                selector.register(link.channel, selectors.EVENT_READ, link)
                if self._streaming:
                    for _ in range(self._credits - self._waiting[link.index]):
                        self._send(link, Frame.TICKET, dumps(False))
                elif link.index in self._awaited:
                    self._send(link, Frame.TICKET, dumps(True))
            level = logging.WARNING if link.because == "loss" else logging.INFO
            logger.log(level, "%s is there, incarnation %d.", link, link.incarnation)

    def _read(self, selector: selectors.BaseSelector, link: Link) -> None:
        try:
            header = link.channel.try_header()
            if header is None:
                return
            blob = link.channel.recv_blob(header)
            link.pulse.heard(time.monotonic())
            if header.kind == Frame.FRAGMENT:
                batch = self._batch(link, header, FragmentMeta(*blob))
                link.pulse.progress(time.monotonic())
                with self._roster:
                    self._awaited.discard(link.index)
                    self._waiting[link.index] += 1
                    self._received.put(batch)
            elif header.kind == Frame.PULL:
                self._serving.pull(link, whole=blob)
            elif header.kind == Frame.HELD:
                self._serving.held(link, blob)
            elif header.kind == Frame.PONG:
                link.pulse.pong(time.monotonic(), *blob)
            elif header.kind == Frame.DRAINED:
                self._drained(selector, link, blob)
            elif header.kind == Frame.FAILED:
                raise env_error(link, blob)
        except ChannelClosed as error:
            raise self._fleet.lost(link) from error

    def _batch(self, link: Link, header: Header, meta: FragmentMeta) -> Batch:
        columns, tails, state = receive(link.channel, header, Parts(*meta.parts))
        tail_rows = tails.pop("")
        cuts = [Cut(*cut) for cut in meta.cuts]
        batch = Batch(
            columns,
            link.share.count,
            tail_rows=tail_rows,
            tail=tails,
            state=state,
            shard=link.index,
            incarnation=link.incarnation,
            policy_version=meta.version,
            cuts=cuts,
        )
        for cut in cuts:
            logger.warning("environment %d of %s was rebuilt: %s", cut.env, link, cut.reason)
        link.delivered += batch.num_rows
        with self._tally.lock:
            self._tally.add(link.index, batch.num_rows, header.body, meta)
            if self._streaming:
                self._tally.settle()
        return batch

    def _sample_probe(self, batch: Batch) -> None:
        mask = batch.flat("action_mask") if "action_mask" in batch.names else None
        with self._tally.lock:
            obs = [batch.flat(name) for name in self._obs_names]
            self._publisher.probe.add(obs, batch.flat("env"), mask)

    def _send(self, link: Link, kind: Frame, blob: bytes, body: Sequence[Any] = ()) -> None:
        try:
            with self._locks[link.index]:
                link.channel.send(kind, blob, body)
        except ChannelClosed:
            pass  # the intake notices it too, and knows what to do

    def _take(self) -> Batch:
        try:
            item = self._received.get()
        except BaseException:
            self.close(timeout=1.0)
            raise
        if isinstance(item, BaseException):
            self._failure = item
            self.close()
            raise item
        with self._roster:
            self._waiting[item.shard] -= 1
        return item

    # The end

    def _check_open(self) -> None:
        if self.closed:
            because = f" (after {type(self._failure).__name__})" if self._failure else ""
            raise ClosedError(f"this Collector is closed{because}; make a new one")

    def close(self, timeout: float | None = None) -> None:
        """Stop the shards, and the cluster if the collector started it."""
        if self.closed:
            return
        self.closed = True
        _open.discard(self)
        self._waker.send(b"!")
        try:
            seconds = config.seconds("timeout.close", timeout)
            self._supervisor.close(seconds)
            self._fleet.close(seconds)
        finally:
            if self._owned_client is not None:
                self._owned_client.close()
            if threading.current_thread() is not self._intake:
                self._intake.join(timeout=5.0)
            self._woken.close()
            self._waker.close()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not hasattr(self, "_intake") or self.closed:
            return
        if threading.current_thread() is threading.main_thread():
            self.close()
        else:  # perhaps Dask's event loop, which must not wait for itself
            threading.Thread(target=self.close, name="clusterenv-close").start()


def _relays(policy: Policy) -> bool:
    """Whether a policy is so large that workers hand its weights on."""
    least = config.get("channel.relay")
    return least is not None and manifest_of(policy).nbytes >= parse_bytes(least)


def _title(env: Any) -> str:
    """Return what people call an environment."""
    env = env[0] if isinstance(env, Sequence) and not isinstance(env, str) else env
    return str(getattr(env, "id", None) or getattr(env, "__name__", None) or env)


@atexit.register
def _close_all() -> None:
    for collector in list(_open):
        collector.close()
