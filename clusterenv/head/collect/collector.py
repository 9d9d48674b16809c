"""``Collector``: trajectories from shards that act by themselves, as a stream of batches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import torch
from dask.utils import parse_bytes
from gymnasium.envs.registration import EnvSpec

from clusterenv import config
from clusterenv.cluster.connect import ClusterLike
from clusterenv.data.batch import Batch
from clusterenv.data.checks import check_flag, is_number
from clusterenv.data.pickling import dumps_by_value
from clusterenv.data.spaces import Layout
from clusterenv.data.summary import Summary
from clusterenv.errors import ClosedError, ConfigError, shown
from clusterenv.head.collect.inference import (
    Inference,
    InferenceOptions,
    stand_in,
)
from clusterenv.head.collect.options import CollectorOptions
from clusterenv.head.collect.receiver import Receiver
from clusterenv.head.fleet.launch import (
    StreamSpec,
    check_counts,
    check_shards,
    make_recipe,
    open_fleet,
)
from clusterenv.head.fleet.restarts import Restarts, restart_rule
from clusterenv.head.fleet.roster import ShardInfo
from clusterenv.head.lifecycle import Lifecycle
from clusterenv.head.monitor.announcer import Announcer
from clusterenv.head.monitor.runs import check_name, register
from clusterenv.head.monitor.stats import Stats, Tally
from clusterenv.head.monitor.telemetry import Telemetry
from clusterenv.policies.policy import Policy, check_policy
from clusterenv.simulation.env_faults import EnvFaults
from clusterenv.sync.announcement import check_scalars, finite_scalars
from clusterenv.sync.publisher import Publisher
from clusterenv.sync.rules import EveryVersion, Never, SyncRule
from clusterenv.sync.weights import manifest_of

__all__ = ["Collector"]

_LONGEST_TITLE = 48


class Collector(Summary, Lifecycle):
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
        Time rows of a fragment, at most 2**20; a fragment must fit into a worker's memory.
    sync
        When a shard pulls a newer version; see ``clusterenv.sync``.
    seed
        Environment ``i`` gets ``seed + i``.
    credits
        Fragments that each shard may be ahead of the reader when iterating, from 2 to 1024.
        The head holds them in memory.
    overlap
        Whether :meth:`rollout` requests the next rollout before it returns one, so that the
        shards simulate while the learner works. Rollouts are then one version older.
    max_shards
        Workers that join later, and have no shard, get one more of the same size, up to so
        many; by default none. See also :meth:`scale`.
    restarts
        How often a lost shard is restarted before the run ends: 5 times in 10 minutes by
        default, ``Restarts(0)`` for never.
    env_faults
        What becomes of an environment that raises or breaks its own space: by default it is
        rebuilt, alone, up to 5 times in 10 minutes; see :class:`clusterenv.EnvFaults`.
    switch
        Between what a shard changes its policy and scalars: ``"fragment"``, or ``"step"``
        to act with new weights from the next step on. ``rollout()`` always changes them
        between fragments.
    text
        What becomes of text in observations: ``"keep"`` makes it a column of strings,
        ``"drop"`` leaves it out, ``"refuse"`` raises. The policy, which gets tensors, acts on the
        rest of the observation.
    inference
        Where the policy is evaluated: by each ``"worker"`` for its own environments, or at the
        ``"head"``, in batches of the environments of all shards. Then no weights travel, the
        newest version acts in every step, and observations and actions travel with each.
    device
        Of the policy at the head, with ``inference="head"``: ``"cpu"``, the default, or ``"cuda"``.
    version
        Number of the first version, at most 2**30; a run that goes on goes on counting.
    name
        Of the run, for those who :func:`clusterenv.follow` it; no other run on the cluster may
        have it. By default the environment's id and the run's number.
    **env_kwargs
        Passed to the environment.

    Attributes
    ----------
    run
        Number of this collector, an int64 that no other has; every batch and every row on disk
        says it. Later collectors have larger numbers: the upper 42 bits are the milliseconds
        since 1970 at which it began, the lower 21 are random.
    name
        Name of the run.
    topic
        Dask's topic on which versions are announced: ``client.get_events(collector.topic)``.

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
        overlap: bool = False,
        max_shards: int | None = None,
        restarts: Restarts | None = None,
        env_faults: EnvFaults | None = None,
        switch: str = "fragment",
        text: Literal["refuse", "drop", "keep"] = "refuse",
        inference: Literal["worker", "head"] = "worker",
        device: str | torch.device | None = None,
        version: int = 0,
        name: str | None = None,
        wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
        **env_kwargs: Any,
    ) -> None:
        check_counts(num_envs, shards)
        check_name(name)
        self._overlap = check_flag("overlap", overlap, "Collector(…, overlap=True)")
        at_head = InferenceOptions.of(inference, device, sync, overlap)
        options = CollectorOptions(shards, max_shards, credits, restart_rule(restarts))
        check_policy(policy)
        rule = Never() if at_head else EveryVersion()
        spec = StreamSpec(
            policy=stand_in(policy) if at_head else policy,
            rule=rule if sync is None else sync,
            horizon=horizon,
            seed=seed,
            version=version,
            switch=switch,
            env_faults=EnvFaults() if env_faults is None else env_faults,
            text=text,
            relays=_relays(policy) and at_head is None,
            groups=1 if at_head is None else at_head.groups,
        )
        self._num_envs, self._rule = num_envs, None if at_head else spec.rule
        recipe = make_recipe(env, num_envs, engine, None, wrappers, env_kwargs)
        self._fleet, self._owned_client = open_fleet(
            recipe, num_envs, shards, cluster, dumps_by_value(spec, "the policy")
        )
        with contextlib.ExitStack() as undo:  # what follows may raise
            if self._owned_client is not None:
                undo.callback(self._owned_client.close)
            undo.callback(self._fleet.close, config.seconds("timeout.close"))
            entry = register(self._fleet.client, name, self._fleet.run, _title(env))
            workers = self._fleet.roster.count_workers
            self._announcer = Announcer(self._fleet.client, entry, workers)
            undo.callback(self._announcer.close)
            self._begin(policy, spec, options, at_head)
            undo.pop_all()
        self._opened()
        self._telemetry.begin()  # now that the head listens to the shards

    def _begin(
        self,
        policy: Policy,
        spec: StreamSpec,
        options: CollectorOptions,
        at_head: InferenceOptions | None,
    ) -> None:
        """Make all that the head needs besides the shards."""
        entry = self._announcer.entry
        self.run, self.name, self.topic = entry.number, entry.run, entry.topic
        about = self._fleet.description
        self.observation_space = about.observation_space
        self.action_space = about.action_space
        layout = Layout(about.observation_space)
        self._obs_names = [leaf.name("obs") for leaf in layout.leaves if leaf.is_array]
        self._roster = self._fleet.roster
        self._publishing = threading.Lock()  # taken before the roster's lock
        self._rolling = threading.Lock()  # likewise; a rollout is taken by one thread
        in_use = self._roster.versions_in_use
        self._publisher = Publisher(policy, spec.rule, layout, in_use, spec.version)
        self._tally = Tally(spec.version)
        self._telemetry = Telemetry(self._fleet.client, self._announcer)
        inference = None
        if at_head is not None:
            inference = Inference(policy, spec.version, self.observation_space, at_head)
        self._receiver = Receiver(
            self._fleet, spec, options, self._publisher, self._tally, self._telemetry, inference
        )
        self._announcer.announce(self._publisher.announced._replace(time=time.time()))

    # Taking batches

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches in the order in which they arrive, without end."""
        while True:
            yield self._next()

    def _next(self) -> Batch:
        self._check_open()
        if self._overlap:
            raise ConfigError(
                "a collector with overlap=True returns rollouts only: batches = "
                "collector.rollout(). To iterate, or to collect(rows), which run ahead anyway: "
                "Collector(…, overlap=False)"
            )
        if not self._receiver.streaming:
            self._receiver.stream()
        batch = self._take()
        self._sample_probe(batch)
        return batch

    @property
    def ready(self) -> int:
        """Batches that can be taken without waiting; an error that ends the run counts too.

        With ``overlap=True``, those of the next rollout that have arrived.
        """
        self._guard.check()
        return self._receiver.ready

    def collect(self, rows: int) -> list[Batch]:
        """Return batches of at least ``rows`` rows together, as they arrive."""
        if not is_number(rows) or not 1 <= rows < 2**31:
            raise ConfigError(
                "collect(rows) needs a number from 1 to 2**31 - 1, as all rows are in memory at "
                f"once, got {shown(rows)}: collect(4096)"
            )
        batches: list[Batch] = []
        while sum(batch.num_rows for batch in batches) < rows:
            batches.append(self._next())
        return batches

    def rollout(self) -> list[Batch]:
        """Return exactly one fragment of every shard, in order, begun after this call.

        A shard whose rule wants the newest version waits for it first, so with
        ``EveryVersion`` all rows are of one version. Between calls the shards rest.

        With ``overlap=True`` the next rollout is requested before this one is returned, with the
        version that is the newest then. Its fragments begin at once and have been simulated, in
        part or all, when the next call takes them. So if a version is published after each
        rollout, the rows of the first two are of the first version, and those of each later one
        are a version older than the newest. The rule decides on the announcement of the request,
        so the same seed gives the same rows, versions and statistics, however long the learner
        or a shard takes. :meth:`scale` shows one rollout later, and an error of a shard at the
        next call. ``close()`` drops a rollout that was requested and not taken.
        """
        self._check_open()
        with self._rolling:
            self._check_open()  # by now
            if self._receiver.streaming:
                raise ConfigError(
                    "rollout() after iterating: the shards run ahead by themselves now. Use one "
                    "way per collector: for batch in collector, or batches = collector.rollout()"
                )
            asked = self._receiver.request_rollout()
            batches = sorted((self._take() for _ in range(asked)), key=lambda batch: batch.shard)
            self._receiver.complete_rollout()
            for batch in batches:  # whichever came first: the same seed, the same run
                self._sample_probe(batch)
            if self._overlap:
                self._receiver.request_rollout()
            return batches

    def publish(self, policy: Policy, **scalars: float) -> int:
        """Announce a new version of the policy.

        Weights move only to shards that ask for them. Every credit that a shard gets from now on
        tells of the version, and so does an event on the run's topic, without waiting for it.
        ``scalars`` travel with the announcement and need no pull; each keeps its value until it
        is published again.

        Returns
        -------
        int
            The new version's number.

        Raises
        ------
        ConfigError
            If it is another policy than the first, a scalar is no finite number, or there are too
            many of them.
        Diverged
            If the policy has become NaN; the workers go on with the version they have.
        """
        self._check_open()
        if not isinstance(policy, Policy):
            raise ConfigError(
                f"publish() got a {type(policy).__name__}; publish the policy that the collector "
                "was made with, or a copy of it: collector.publish(policy)"
            )
        numbers = finite_scalars(scalars, "publish(policy")
        check_scalars({**self._publisher.announced.scalars, **numbers})
        with self._publishing:
            # Evaluated outside the lock that receiving needs, and so is the cached checksum.
            prepared = self._publisher.prepare(policy, numbers, self._roster.lock)
            _ = prepared.weights.digest
            announcement = self._receiver.publish(prepared)
            self._announcer.announce(announcement)
            return announcement.version

    def scale(self, shards: int) -> None:
        """Collect with so many shards, each as large as the first, as soon as workers have them.

        Shards too many finish the fragment in hand, deliver it and end. It does not wait. From
        then on this number counts, not ``max_shards``.
        """
        self._check_open()
        check_shards("shards", shards, "collector.scale(4)")
        self._receiver.supervisor.scale(shards)

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """The shards, by index: worker, state, incarnation and policy version of each.

        Shards that are being placed or restarted are included; those that have ended are not,
        unless a later one has not.
        """
        return self._roster.shards

    def stats(self) -> Stats:
        """Return the statistics so far."""
        self._guard.check()
        return self._receiver.stats()

    @property
    def dashboard_link(self) -> str | None:
        """Where Dask's dashboard shows the shards; ``None`` if the cluster has no dashboard."""
        return self._telemetry.link

    # Inside

    def _summary(self) -> Mapping[str, Any]:
        return {
            "": repr(self.name),
            "num_envs": self._num_envs,
            **({} if self.closed else {"shards": len(self.shards)}),
            **({"inference": "head"} if self._rule is None else {"sync": self._rule}),
            "version": self._publisher.version,
            "rows": sum(record.rows for record in self._roster),
            **({"closed": True} if self.closed else {}),
        }

    def _sample_probe(self, batch: Batch) -> None:
        # A recurrent state is known at the first time row alone, and it is what decides.
        rows = slice(batch.num_envs if batch.state else None)
        obs = [batch.flat(name)[rows] for name in self._obs_names]
        mask = batch.flat("action_mask")[rows] if "action_mask" in batch.names else None
        with self._roster.lock:
            self._publisher.observe(obs, batch.flat("env")[rows], mask, batch.state)

    def _take(self) -> Batch:
        try:
            item = self._receiver.take()
        except BaseException:
            self.close(timeout=1.0)
            raise
        if isinstance(item, BaseException):
            if not isinstance(item, ClosedError):
                self._closed_because = type(item).__name__
            self.close()
            raise item
        return item

    def _stop(self, timeout: float) -> None:
        self._announcer.close()
        self._receiver.close(timeout)


def _relays(policy: Policy) -> bool:
    """Whether a policy is so large that workers hand its weights on."""
    least = config.get("channel.relay")
    return least is not None and manifest_of(policy).nbytes >= parse_bytes(least)


def _title(env: Any) -> str:
    """Return what people call an environment."""
    env = env[0] if isinstance(env, Sequence) and not isinstance(env, str) else env
    env = getattr(env, "func", env)  # of functools.partial
    title = str(getattr(env, "id", None) or getattr(env, "__name__", None) or env)
    return title if len(title) <= _LONGEST_TITLE else f"{title[:_LONGEST_TITLE]}…"
