"""``Evaluator``: plays episodes with the newest policy version, beside training."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium as gym
from distributed import Client
from gymnasium.envs.registration import EnvSpec

from clusterenv import config
from clusterenv.cluster.connect import ClusterLike, connect, starts_cluster
from clusterenv.data.buffer_pool import BufferPool
from clusterenv.data.checks import check_flag, check_whole
from clusterenv.data.pickling import dumps_by_value
from clusterenv.data.summary import Summary
from clusterenv.errors import ClosedError, WaitTimeout
from clusterenv.head.evaluate.remote import RemoteEvaluation
from clusterenv.head.evaluate.result import Evaluation
from clusterenv.head.fleet.launch import EvaluationSpec, make_recipe, pickled_recipe
from clusterenv.head.fleet.restarts import Restarts, restart_rule
from clusterenv.head.lifecycle import Lifecycle
from clusterenv.policies.policy import Policy, check_policy
from clusterenv.simulation.quotas import split_episodes
from clusterenv.sync.announcement import finite_scalars
from clusterenv.sync.weights import Weights, check_numbers, manifest_of, pack

__all__ = ["Evaluator"]

_MOST_EPISODES = 2**20


class Evaluator(Summary, Lifecycle):
    """Plays episodes with the newest version of a policy, on a worker, beside training.

    One thread of one worker evaluates, so it takes one core at most: a worker without shards if
    there is one, or else the one with the fewest. Weights travel there; returns and lengths travel
    back. Each evaluation resets all environments with the same seeds, and the number of episodes
    of each is fixed beforehand, so that versions are compared fairly.

    Parameters
    ----------
    env
        Whatever :func:`clusterenv.make_vec` takes. Its episodes must end: give it a time limit.
    policy
        A :class:`clusterenv.policies.Policy`; :meth:`publish` takes its versions.
    episodes
        Of one evaluation.
    num_envs
        Environments that are stepped together; no more than there are episodes.
    cluster
        Whatever :func:`clusterenv.connect` takes: ``collector.client`` shares the collector's
        cluster. By default one worker process is started on this machine.
    seed
        Environment ``i`` gets ``seed + i``. By default one is drawn, for all evaluations.
    deterministic
        Whether the policy chooses its best action instead of exploring.
    restarts
        How often an evaluation whose worker was lost is repeated on another one: 5 times in 10
        minutes by default.
    engine, wrappers
        As for :func:`clusterenv.make_vec`.
    **env_kwargs
        Passed to the environment.

    Raises
    ------
    ConfigError
        If an argument is invalid, or the policy does not fit the environment's spaces.
    Diverged
        If the policy is NaN.
    EnvError
        If an environment cannot be made.

    Examples
    --------
    >>> import clusterenv, torch
    >>> policy = clusterenv.policies.Categorical(torch.nn.Linear(4, 2))
    >>> with clusterenv.Evaluator("CartPole-v1", policy, episodes=4, num_envs=2) as evaluator:
    ...     replaced = evaluator.publish(policy, version=1)
    ...     evaluator.wait(timeout=60)
    ...     [(version, returns, lengths)] = evaluator.results()
    >>> version, returns.shape
    (1, (4,))
    """

    def __init__(
        self,
        env: str | EnvSpec | Callable[..., gym.Env[Any, Any]] | Sequence[Callable[..., Any]],
        policy: Policy,
        *,
        episodes: int = 20,
        num_envs: int = 10,
        cluster: ClusterLike = None,
        seed: int | None = None,
        deterministic: bool = True,
        restarts: Restarts | None = None,
        engine: str = "auto",
        wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
        **env_kwargs: Any,
    ) -> None:
        right = "Evaluator(env, policy, episodes=20, num_envs=10)"
        check_whole("episodes", episodes, right, least=1, most=_MOST_EPISODES)
        check_whole("num_envs", num_envs, right, least=1, most=_MOST_EPISODES)
        check_flag("deterministic", deterministic, "Evaluator(env, policy, deterministic=True)")
        check_policy(policy)
        seed = secrets.randbits(31) if seed is None else seed
        self.seed = check_whole("seed", seed, "Evaluator(env, policy, seed=1)")
        config.check()
        check_numbers(policy, 0)
        quotas = split_episodes(episodes, min(num_envs, episodes))
        self._shape = {"episodes": episodes, "num_envs": len(quotas), "seed": self.seed}
        recipe = make_recipe(env, len(quotas), engine, None, wrappers, env_kwargs)
        spec = EvaluationSpec(policy, quotas, seed, deterministic, config.get("worker.tune"))
        pickled = pickled_recipe(recipe), dumps_by_value(spec, "the policy")
        rule = restart_rule(restarts)
        self._manifest = manifest_of(policy)
        self._pool = BufferPool()
        options = {"n_workers": 1} if starts_cluster(cluster) else {}
        self._client = connect(cluster, set_as_default=False, **options)
        self._owned_client = self._client if self._client is not cluster else None
        self._versions = _Versions()
        with contextlib.ExitStack() as undo:  # what follows may raise
            if self._owned_client is not None:
                undo.callback(self._owned_client.close)
            self._remote = RemoteEvaluation(self._client, *pickled, rule)
            undo.callback(self._remote.close, config.seconds("timeout.close"))
            self._remote.open()
            undo.pop_all()
        self._thread = threading.Thread(
            target=_serve,
            args=(self._versions, self._remote),
            name="clusterenv-evaluator",
            daemon=True,
        )
        self._thread.start()
        self._opened()

    def _summary(self) -> Mapping[str, Any]:
        return {**self._shape, **({"closed": True} if self.closed else {})}

    @property
    def client(self) -> Client:
        """Dask's client of the cluster that evaluates."""
        return self._client

    def publish(self, policy: Policy, version: int, **scalars: float) -> int | None:
        """Evaluate a version as soon as the running evaluation has ended; does not wait.

        The weights are copied. A version that has not begun is replaced by a newer one.

        Parameters
        ----------
        policy
            The evaluator's policy, or a copy of it.
        version
            Its number, which the :class:`Evaluation` will have.
        **scalars
            For a policy that needs them: ``context.scalars``.

        Returns
        -------
        int or None
            The version that it replaces, which will not be evaluated.

        Raises
        ------
        ConfigError
            If it is another policy, or a scalar is no finite number.
        Diverged
            If the policy is NaN.
        """
        self._check_open()
        self._versions.check()
        check_policy(policy)
        right = "publish(policy, version=1)"
        check_whole("version", version, right)
        numbers = finite_scalars(scalars, "publish(policy, version")
        check_numbers(policy, version)
        weights = pack(policy, self._manifest, version, self._pool)
        replaced = self._versions.put(_Version(weights, numbers))
        return None if replaced is None else replaced.weights.version

    def results(self) -> Iterator[Evaluation]:
        """Yield evaluations that have ended since the last call, oldest first; does not wait.

        Raises
        ------
        EnvError
            If an environment raised.
        PolicyError
            If the policy raised, or returned something unusable.
        WorkerLost
            If an evaluation was lost more often than ``restarts`` allows.
        """
        self._guard.check()
        while (found := self._versions.take()) is not None:
            yield found
        self._versions.check()

    __iter__ = results

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the newest version has been evaluated.

        Raises
        ------
        WaitTimeout
            If that takes longer than ``timeout`` seconds.
        """
        self._check_open()
        if not self._versions.wait(timeout):
            raise WaitTimeout(f"the evaluation did not end within {timeout:g} s")
        self._versions.check()

    def _stop(self, timeout: float) -> None:
        self._versions.close()
        self._remote.close(timeout)
        self._thread.join(timeout)


class _Version(NamedTuple):
    weights: Weights
    scalars: dict[str, float]


class _Versions:
    """The version that is next, and the evaluations that have ended; of all threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: _Version | None = None
        self._busy = False
        self._closed = False
        self._finished: deque[Evaluation] = deque()
        self._error: BaseException | None = None

    def put(self, version: _Version) -> _Version | None:
        """Make a version the next one; return the one that it replaces."""
        with self._changed:
            replaced, self._next = self._next, version
            self._changed.notify_all()
        return replaced

    def begin(self) -> _Version | None:
        """Wait for a version and begin its evaluation; ``None`` when it is closed."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._next is not None)
            if self._closed:
                return None
            version, self._next, self._busy = self._next, None, True
            return version

    def finish(self, evaluation: Evaluation) -> None:
        """Keep the result of the running evaluation."""
        with self._changed:
            self._finished.append(evaluation)

    def fail(self, error: BaseException) -> None:
        """End all evaluations with an error, unless they were closed."""
        with self._changed:
            self._error = None if self._closed else error
            self._changed.notify_all()

    def take(self) -> Evaluation | None:
        """Return the oldest evaluation that has ended."""
        with self._changed:
            return self._finished.popleft() if self._finished else None

    def check(self) -> None:
        """Raise the error that ended the evaluations, if there is one."""
        if self._error is not None:
            raise self._error

    def wait(self, timeout: float | None) -> bool:
        """Wait until nothing is left to do; return whether that came in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._error) or self._closed or not (self._busy or self._next), timeout
            )

    def close(self) -> None:
        """Begin no other evaluation."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _serve(versions: _Versions, remote: RemoteEvaluation) -> None:
    """Evaluate one version after the other; the thread of an evaluator."""
    try:
        while (version := versions.begin()) is not None:
            versions.finish(remote.evaluate(version.weights, version.scalars))
            del version  # its memory goes back to the pool
    except ClosedError:
        pass
    except BaseException as error:
        versions.fail(error)
