"""``ClusterEnv``: Gymnasium's vector environment over a fleet of shards."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from distributed import Client
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import nn

from clusterenv import config
from clusterenv.arguments import (
    Reset,
    check_counts,
    check_restarts,
    env_indices,
    reset_arguments,
)
from clusterenv.asking import Asking
from clusterenv.cluster import ClusterLike
from clusterenv.env_loop import check_spaces
from clusterenv.envs import Slot
from clusterenv.errors import (
    ActionError,
    ClosedError,
    ConfigError,
    NothingSent,
    ResetNeeded,
    ResultsPending,
)
from clusterenv.exchange import Answer, Exchange
from clusterenv.fleet import Fleet, Link
from clusterenv.groups import Groups
from clusterenv.launch import make_recipe, open_fleet
from clusterenv.policies.base import Policy
from clusterenv.recovery import Recovery
from clusterenv.remote_policy import RemotePolicy
from clusterenv.result import Result, Rows
from clusterenv.schema import Column, Layout
from clusterenv.supervision import Restarts
from clusterenv.sync.rules import EveryVersion, SyncRule

__all__ = ["ClusterEnv", "make_vec"]

StepResult = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
]

_INTERRUPTED_SECONDS = 1.0

_open: weakref.WeakSet[ClusterEnv] = weakref.WeakSet()


def make_vec(
    env: str | EnvSpec | Callable[..., gym.Env[Any, Any]] | Sequence[Callable[..., Any]],
    num_envs: int,
    *,
    shards: int | None = None,
    cluster: ClusterLike = None,
    engine: str = "auto",
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
    restarts: Restarts | None = None,
    **env_kwargs: Any,
) -> ClusterEnv:
    """Make a vector environment whose environments live on a Dask cluster.

    Parameters
    ----------
    env
        A Gymnasium id or spec, a callable that makes one environment, or a sequence of
        ``num_envs`` such callables, as ``SyncVectorEnv`` takes them.
    num_envs
        Number of environments.
    shards
        Number of groups they are split into, each on a worker process of its own.
        By default one per worker that the cluster has now.
    cluster
        Whatever :func:`clusterenv.connect` takes; by default a ``LocalCluster`` that
        is stopped again by ``close()``.
    engine
        ``"auto"`` and ``"gymnasium"``: any environment, equal to ``SyncVectorEnv``.
        ``"native"``: the environment's own ``vector_entry_point``. ``"envpool"``:
        EnvPool's task of this name. See ``docs/engines.md`` for what the last two change.
    autoreset_mode
        ``NEXT_STEP``, ``SAME_STEP`` or ``DISABLED``.
    wrappers
        Applied to each environment on the worker, first to last.
    restarts
        How often a lost shard is placed again: 5 times in 10 minutes by default,
        ``Restarts(0)`` for never. Its environments come back truncated, with the observation
        of a reset and the reason in ``info["lost"]``.
    **env_kwargs
        Passed to the environment.

    Raises
    ------
    ConfigError, UnknownEnv, NoWorkers, EnvError
        At once, and with nothing left running.

    Examples
    --------
    >>> import clusterenv
    >>> envs = clusterenv.make_vec("CartPole-v1", 4, shards=2)
    >>> obs, info = envs.reset(seed=1)
    >>> obs.shape
    (4, 4)
    >>> obs, reward, terminated, truncated, info = envs.step([0, 1, 0, 1])
    >>> envs.close()
    """
    restarts = Restarts() if restarts is None else restarts
    check_restarts(restarts)
    check_counts(num_envs, shards)
    recipe = make_recipe(env, num_envs, engine, autoreset_mode, wrappers, env_kwargs)
    return ClusterEnv(*open_fleet(recipe, num_envs, shards, cluster), restarts)


class ClusterEnv(VectorEnv[Any, Any, Any]):
    """A ``gymnasium.vector.VectorEnv`` over the shards of a fleet; see :func:`make_vec`.

    ``reset`` and ``step`` wait for all shards. With ``async_reset``, ``send`` and ``recv``
    the head answers each shard as soon as it is ready, so that no worker waits for another.

    Examples
    --------
    >>> import clusterenv
    >>> with clusterenv.make_vec("CartPole-v1", 4, shards=2) as envs:
    ...     envs.async_reset(seed=1)
    ...     for _ in range(10):
    ...         obs, reward, terminated, truncated, info = envs.recv()
    ...         envs.send([0] * len(obs), info["env_id"])
    """

    def __init__(
        self,
        fleet: Fleet,
        owned_client: Client | None,
        restarts: Restarts,
    ) -> None:
        self._fleet = fleet
        self._owned_client = owned_client
        self._closed_because = ""
        self.sync: SyncRule = EveryVersion()
        """When ``step(policy)`` sends newer weights to a shard; set it before the first."""
        self._remote: RemotePolicy | None = None
        about = fleet.description
        last = fleet.links[-1].share
        self.num_envs = int(last.first + last.count)
        self._groups = Groups(fleet)
        recovery = Recovery(fleet, restarts, self.num_envs)
        self._exchange = Exchange(fleet, recovery.recover, self._fail)
        self._ask = Asking(fleet, self._groups, recovery, self._exchange)
        self._process = os.getpid()
        self.spec = about.spec
        self.metadata = dict(about.metadata)
        self.render_mode = about.render_mode
        self.single_observation_space = about.observation_space
        self.single_action_space = about.action_space
        self.observation_space = batch_space(about.observation_space, self.num_envs)
        self.action_space = batch_space(about.action_space, self.num_envs)
        self._obs = Layout(about.observation_space)
        self._act = Layout(about.action_space)
        self._pending = np.zeros(self.num_envs, np.bool_)
        self._started = False  # the first reset is of all environments
        self._over = np.zeros(self.num_envs, np.bool_)  # wait for a reset; DISABLED only
        self._disabled = about.autoreset_mode is AutoresetMode.DISABLED
        _open.add(self)

    # The synchronous face

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``.

        Parameters
        ----------
        seed
            An integer (environment ``i`` gets ``seed + i``), a list with one seed per
            environment, or ``None``.
        options
            Passed to every environment; ``reset_mask`` is taken out first.
        """
        self._check_open()
        seeds, options, mask = self._reset(seed, options)
        self._drop_pending()
        result = Result(self._obs, self.num_envs)
        self._send_reset(seeds, options, mask, result)
        self._collect()
        return self._obs.nest(result.slot.obs), result.info()

    def step(self, actions: Any) -> StepResult:
        """Step every environment and wait for all of them.

        Parameters
        ----------
        actions
            A batch of actions, or a :class:`clusterenv.policies.Policy`: then the policy acts
            beside the environments, and ``info`` holds the chosen ``action``, the policy's
            own columns (``log_prob``, ``value``, …) and the ``policy_version`` that acted.
            Weights travel when :attr:`sync` says so; whether they have changed is found by
            comparing them, at every step, in about a millisecond per million.
        """
        self._check_open()
        if isinstance(actions, nn.Module):
            return self._step_policy(actions)
        columns = self._action_columns(actions, self.num_envs)
        self._check_ready(slice(None))
        result = Result(self._obs, self.num_envs)
        for whole in self._groups.whole:
            self._ask.step(whole, [column[whole.span] for column in columns], result)
        self._collect()
        if self._disabled:
            self._note_over(slice(None), result.slot)
        obs, reward, terminated, truncated = result.slot
        return self._obs.nest(obs), reward, terminated, truncated, result.info()

    def _step_policy(self, policy: nn.Module) -> StepResult:
        if not isinstance(policy, Policy):
            raise ActionError(
                f"step() got a {type(policy).__name__}; wrap it: "
                "envs.step(clusterenv.policies.Categorical(module)) or CleanRL(agent)"
            )
        self._check_ready(slice(None))
        if self._remote is None:
            spaces = self.single_observation_space, self.single_action_space
            check_spaces(*spaces, text="keep")  # it comes back with the observations
            links = len(self._fleet.links)
            self._remote = RemotePolicy(policy, self.sync, self._obs, links, self.num_envs)
        self._remote.refresh(policy)
        result = Result(self._obs, self.num_envs)
        for whole in self._groups.whole:
            self._ask.act(whole, partial(self._remote.request, whole.shard), result)
        self._collect()
        if self._disabled:
            self._note_over(slice(None), result.slot)
        obs, reward, terminated, truncated = result.slot
        info = result.info()
        self._remote.observe(obs, terminated | truncated, info)
        info |= self._remote.complete(result.chosen, self.num_envs)
        return self._obs.nest(obs), reward, terminated, truncated, info

    # The asynchronous face

    def async_reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin to reset all environments; :meth:`recv` returns them shard by shard."""
        self._check_open()
        seeds, options, mask = self._reset(seed, options)
        if mask is not None:
            raise ConfigError(
                "async_reset() resets all environments; for some of them: "
                "reset(options={'reset_mask': mask})"
            )
        self._drop_pending()
        self._send_reset(seeds, options, None, None)
        self._pending[:] = True

    def send(self, actions: Any, env_ids: Sequence[int] | npt.NDArray[Any] | None = None) -> None:
        """Begin to step some environments; :meth:`recv` returns the results.

        Parameters
        ----------
        actions
            One action per environment of ``env_ids``.
        env_ids
            Global env indices, as :meth:`recv` gave them in ``info["env_id"]``; by default
            all. With the engines ``"native"`` and ``"envpool"``: whole shards, in order.
        """
        self._check_open()
        known = self._groups.known(env_ids)
        if known is not None:  # what recv() gave: nothing to look up
            columns = self._action_columns(actions, len(known.ids))
            self._check_ready(known.ids)
            self._ask.step(known, columns)
            self._pending[known.ids] = True
            return
        ids = env_indices(env_ids, self.num_envs)
        columns = self._action_columns(actions, len(ids))
        self._check_ready(ids)
        for group, at in list(self._groups.split(ids)):
            self._ask.step(group, [column[at] for column in columns])
        self._pending[ids] = True

    def recv(self) -> StepResult:
        """Return the results of whichever group of environments is ready first.

        Returns
        -------
        obs, reward, terminated, truncated, info
            As from ``step``, with one row per environment of ``info["env_id"]``.
        """
        self._check_open()
        if not self._pending.any():
            raise NothingSent(
                "recv() has nothing to wait for: call async_reset() or send(actions, env_ids) first"
            )
        result: Result = self._next_answer().value
        self._pending[result.ids] = False
        if self._disabled:
            self._note_over(result.ids, result.slot)
        obs, reward, terminated, truncated = result.slot
        info = result.info()
        info["env_id"] = result.ids
        return self._obs.nest(obs), reward, terminated, truncated, info

    # The environments' own attributes

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or read an attribute, of every environment."""
        return tuple(self._call("call", lambda _link: (name, args, kwargs)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute: a list or tuple gives each environment its own value."""
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ConfigError(
                f"set_attr({name!r}, …) needs {self.num_envs} values, one per environment, "
                f"or a single one, got {len(values)}"
            )
        self._call("set_attr", lambda link: (name, values[link.span]))

    def render(self) -> tuple[Any, ...]:
        """Return a frame of every environment."""
        return tuple(self._call("render", lambda _link: ()))

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment."""
        return self.get_attr("np_random_seed")

    def close_extras(self, timeout: float | None = None, **kwargs: Any) -> None:
        """Stop the shards, and the cluster if ``make_vec`` started it.

        Parameters
        ----------
        timeout
            Seconds that the shards are given to stop by themselves.
        """
        seconds = config.seconds("timeout.close", timeout)
        _open.discard(self)
        if os.getpid() != self._process:
            return  # a fork: the environments belong to the parent
        self._exchange.close()
        try:
            self._fleet.close(seconds)
        finally:
            if self._owned_client is not None:
                self._owned_client.close()

    def __enter__(self) -> ClusterEnv:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not hasattr(self, "_process") or self.closed:
            return
        # This may be Dask's event loop, or a thread that holds a lock of the client.
        threading.Thread(target=self.close, name="clusterenv-close").start()

    # Requests

    def _send_reset(
        self,
        seeds: list[int | None],
        options: dict[str, Any] | None,
        mask: npt.NDArray[np.bool_] | None,
        result: Result | None,
    ) -> None:
        for whole in self._groups.whole:
            self._ask.reset(whole, seeds, options, mask, result)
        chosen = slice(None) if mask is None else mask
        self._over[chosen] = False
        self._started = True

    def _call(self, method: str, arguments: Callable[[Link], tuple[Any, ...]]) -> list[Any]:
        self._check_open()
        if self._pending.any():
            raise ResultsPending(self._pending_message(method))
        self._ask.call(method, arguments)
        answers = [self._exchange.recv().value for _ in self._fleet.links]
        for answer in answers:  # a wrong name is no reason to close
            if isinstance(answer, Exception):
                raise answer
        return [value for _, values in sorted(answers, key=lambda a: a[0]) for value in values]

    def _collect(self) -> None:
        """Receive every answer: one of each shard, or two if some of its environments were lost."""
        while self._exchange.outstanding:
            self._next_answer()

    def _next_answer(self) -> Answer:
        answer = self._exchange.recv()
        if isinstance(answer.value, Exception):
            self._fail(answer.value)
            raise answer.value
        return answer

    def _drop_pending(self) -> None:
        """Receive and forget what was sent before, so that a reset begins anew."""
        self._collect()
        self._pending[:] = False

    def _fail(self, error: BaseException) -> None:
        """Close before an error reaches the caller, so that nothing is left running."""
        self._closed_because = f"after {type(error).__name__}"
        # Whoever presses Ctrl-C does not want to wait for an environment that hangs.
        self.close(timeout=None if isinstance(error, Exception) else _INTERRUPTED_SECONDS)

    # Checks

    def _check_open(self) -> None:
        if self.closed:
            because = f" ({self._closed_because})" if self._closed_because else ""
            raise ClosedError(f"this ClusterEnv is closed{because}; make a new one with make_vec")

    def _check_ready(self, ids: Rows | slice) -> None:
        if self._pending[ids].any():
            raise ResultsPending(self._pending_message("actions"))
        if not self._started:
            raise ResetNeeded("actions before reset(): call obs, info = envs.reset(seed=1) first")
        if self._disabled and self._over[ids].any():
            over = np.flatnonzero(self._over).tolist()
            raise ResetNeeded(
                f"the episodes of environments {over} are over and autoreset_mode is DISABLED: "
                "call envs.reset(options={'reset_mask': terminated | truncated}) first"
            )

    def _pending_message(self, what: str) -> str:
        waiting = np.flatnonzero(self._pending).tolist()
        return f"{what} while environments {waiting} have results to be received: call recv() first"

    def _note_over(self, ids: Rows | slice, slot: Slot) -> None:
        self._over[ids] = slot.terminated | slot.truncated

    def _action_columns(self, actions: Any, n: int) -> list[Column]:
        try:
            return self._act.columns(actions, n)
        except ValueError as error:
            raise ActionError(
                f"{error}. The action space of one environment is {self.single_action_space}; "
                "envs.action_space.sample() shows a right one"
            ) from error

    def _reset(self, seed: Any, options: dict[str, Any] | None) -> Reset:
        maskable = self._fleet.description.maskable
        return reset_arguments(
            seed, options, self.num_envs, maskable=maskable, started=self._started
        )


@atexit.register
def _close_all() -> None:
    for env in list(_open):
        env.close()
