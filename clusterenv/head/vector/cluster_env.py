"""``ClusterEnv``: Gymnasium's vector environment over a fleet of shards."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import nn

from clusterenv.data.checks import check_instance, is_number
from clusterenv.data.observation_mode import batch_observations
from clusterenv.data.summary import Summary
from clusterenv.errors import ClosedError, ClusterEnvError, ConfigError, ResultsPending, WaitTimeout
from clusterenv.head.fleet.restarts import Restarts
from clusterenv.head.lifecycle import Lifecycle
from clusterenv.head.vector.calls import AsyncState, Calls
from clusterenv.head.vector.exchange import Exchange
from clusterenv.head.vector.recovery import Recovery
from clusterenv.head.vector.requests import Requests, ResetResult, StepResult
from clusterenv.sync.announcement import topic_of
from clusterenv.sync.rules import EveryVersion, SyncRule

if TYPE_CHECKING:
    from distributed import Client

    from clusterenv.head.fleet.fleet import Fleet

__all__ = ["ClusterEnv"]

P = ParamSpec("P")
R = TypeVar("R")

_INTERRUPTED_SECONDS = 1.0


def _exclusive(
    method: Callable[Concatenate[ClusterEnv, P], R],
) -> Callable[Concatenate[ClusterEnv, P], R]:
    """Let one thread at a time call a method, and none in a fork or after ``close``."""
    name = method.__name__

    @wraps(method)
    def call(self: ClusterEnv, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._check_open()
        if not self._calling.acquire(False):
            raise ResultsPending(
                f"{name}() while another thread is in {self._called}(): one at a time; give each "
                "thread a ClusterEnv of its own, or share this one with a lock",
                self._called,
            )
        try:
            self._called = name
            return method(self, *args, **kwargs)
        except Exception as error:
            if self.closed and not self._closed_because and not isinstance(error, ClosedError):
                raise ClosedError(f"this ClusterEnv was closed while {name}() waited") from error
            raise
        finally:
            self._calling.release()

    return call


class ClusterEnv(Summary, Lifecycle, VectorEnv[Any, Any, Any]):
    """A ``gymnasium.vector.VectorEnv`` over the shards of a fleet; see :func:`clusterenv.make_vec`.

    ``reset`` and ``step`` wait for all shards. ``reset_async`` and ``step_async`` do not, until
    ``reset_wait`` and ``step_wait``, as in ``AsyncVectorEnv``. With ``async_reset``, ``send`` and
    ``recv`` the head answers each shard as soon as it is ready, so that no worker waits for
    another.

    One thread at a time may call it, in the process that made it; ``close`` may be called from any
    thread.

    Examples
    --------
    >>> import clusterenv
    >>> with clusterenv.make_vec("CartPole-v1", 4, shards=2) as envs:
    ...     envs.async_reset(seed=1)
    ...     for _ in range(10):
    ...         obs, reward, terminated, truncated, info = envs.recv()
    ...         envs.send([0] * len(obs), info["env_id"])
    """

    def __init__(self, fleet: Fleet, owned_client: Client | None, restarts: Restarts) -> None:
        self._fleet = fleet
        self._owned_client = owned_client
        self._calling = threading.Lock()
        self._called = ""  # by the thread that holds the lock
        self.sync: SyncRule = EveryVersion()
        """When ``step(policy)`` sends newer weights to a shard; set it before the first."""
        self.topic = topic_of(fleet.run)
        """Dask's topic on which ``step(policy)`` announces versions."""
        about = fleet.description
        last = fleet.handles[-1].share
        self.num_envs = int(last.first + last.count)
        autoreset = about.autoreset_mode is not AutoresetMode.DISABLED
        self._calls = Calls(self.num_envs, autoreset=autoreset)
        recovery = Recovery(fleet, restarts, self.num_envs)
        self._exchange = Exchange(fleet, recovery.recover, self._fail)
        self._requests = Requests(fleet, recovery, self._exchange, self._calls)
        self.spec = about.spec
        self.autoreset_mode = about.autoreset_mode
        self.metadata = {**about.metadata, "autoreset_mode": about.autoreset_mode}
        self.render_mode = about.render_mode
        self.observation_mode = about.observation_mode
        self.single_observation_space, self.observation_space = batch_observations(
            about.observation_mode, about.observation_spaces
        )
        self.single_action_space = about.action_space
        self.action_space = batch_space(about.action_space, self.num_envs)
        self._opened()

    # All environments at once

    @_exclusive
    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> ResetResult:
        """Reset all environments, or those of ``options["reset_mask"]``.

        Parameters
        ----------
        seed
            An integer (environment ``i`` gets ``seed + i``), a list with one seed per
            environment, or ``None``.
        options
            Passed to every environment; ``reset_mask`` is taken out first.
        """
        return self._finish(self._requests.reset("reset", seed, options))

    @_exclusive
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
        return self._finish(self._start_step("step", actions))

    # All environments, without waiting

    @_exclusive
    def reset_async(
        self,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin a :meth:`reset`; :meth:`reset_wait` returns its results."""
        finish = self._requests.reset("reset_async", seed, options)
        self._calls.begin(AsyncState.WAITING_RESET, finish)

    @_exclusive
    def reset_wait(self, timeout: float | None = None) -> ResetResult:
        """Return what :meth:`reset_async` has begun.

        Parameters
        ----------
        timeout
            Seconds to wait; ``None`` for as long as it takes.

        Raises
        ------
        NothingSent
            If no ``reset_async`` is under way.
        WaitTimeout
            If some environment has not finished in time. Its result is dropped when it arrives,
            and the environments must be reset before the next step.
        """
        result: ResetResult = self._wait(AsyncState.WAITING_RESET, timeout)
        return result

    @_exclusive
    def step_async(self, actions: Any) -> None:
        """Begin a :meth:`step`; :meth:`step_wait` returns its results."""
        self._calls.begin(AsyncState.WAITING_STEP, self._start_step("step_async", actions))

    @_exclusive
    def step_wait(self, timeout: float | None = None) -> StepResult:
        """Return what :meth:`step_async` has begun; as :meth:`reset_wait`."""
        result: StepResult = self._wait(AsyncState.WAITING_STEP, timeout)
        return result

    @_exclusive
    def call_async(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Begin a :meth:`call`; :meth:`call_wait` returns its results."""
        finish = self._start_call("call_async", name, args, kwargs)
        self._calls.begin(AsyncState.WAITING_CALL, finish)

    @_exclusive
    def call_wait(self, timeout: float | None = None) -> tuple[Any, ...]:
        """Return what :meth:`call_async` has begun; as :meth:`reset_wait`, but no reset is due."""
        values: tuple[Any, ...] = self._wait(AsyncState.WAITING_CALL, timeout)
        return values

    # Environments that are ready

    @_exclusive
    def async_reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin to reset all environments; :meth:`recv` returns them shard by shard."""
        self._requests.send_reset(seed, options)

    @_exclusive
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
        self._requests.send(actions, env_ids)

    @_exclusive
    def recv(self) -> StepResult:
        """Return the results of the group of environments that is ready first.

        Returns
        -------
        obs, reward, terminated, truncated, info
            As from ``step``, with one row per environment of ``info["env_id"]``.
        """
        return self._requests.recv()

    # The environments' own attributes

    @_exclusive
    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method, or read an attribute, of every environment."""
        return self._finish(self._start_call("call", name, args, kwargs))

    @_exclusive
    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute of every environment."""
        return self._finish(self._start_call("get_attr", name, (), {}))

    @_exclusive
    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute: a list or tuple gives each environment its own value."""
        check_instance("name", name, str, "envs.set_attr('gravity', 9.8)")
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise ConfigError(
                f"set_attr({name!r}, …) needs {self.num_envs} values, one per environment, "
                f"or a single one, got {len(values)}"
            )
        self._finish(
            self._requests.call("set_attr", "set_attr", lambda handle: (name, values[handle.span]))
        )

    @_exclusive
    def render(self) -> tuple[Any, ...]:
        """Return a frame of every environment."""
        return self._finish(self._requests.call("render", "render", lambda _handle: ()))

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """A copy of the random number generator of every environment."""
        return self.get_attr("np_random")

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of every environment."""
        return self.get_attr("np_random_seed")

    def close(self, timeout: float | None = None, **kwargs: Any) -> None:
        """Stop the shards, and the cluster if ``make_vec`` started it.

        Parameters
        ----------
        timeout
            Seconds that the shards are given to stop by themselves.
        **kwargs
            Of other vector environments, such as ``terminate``; ignored.
        """
        super().close(timeout)

    def _stop(self, timeout: float) -> None:
        self._requests.close()
        self._exchange.close()
        self._fleet.close(timeout)
        if self._calls.state is not AsyncState.DEFAULT:
            gym.logger.warn(
                f"Calling `close` while waiting for a pending call to `{self._calls.state.value}` "
                "to complete."
            )

    # Inside

    def _summary(self) -> Mapping[str, Any]:
        return {
            **({"": repr(self.spec.id)} if self.spec is not None else {}),
            "num_envs": self.num_envs,
            **({} if self.closed else {"shards": len(self._fleet.handles)}),
            "autoreset": self.autoreset_mode.name,
            **({"closed": True} if self.closed else {}),
        }

    def _start_step(self, call: str, actions: Any) -> Callable[[], StepResult]:
        if isinstance(actions, nn.Module):
            return self._requests.act(call, actions, self.sync)
        return self._requests.step(call, actions)

    def _start_call(
        self, call: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Callable[[], tuple[Any, ...]]:
        check_instance("name", name, str, f"envs.{call}('render_mode')")
        if name in ("reset", "step", "close"):
            raise ConfigError(f"{call}({name!r}) would bypass envs.{name}(): call that instead")
        return self._requests.call(call, "call", lambda _handle: (name, args, kwargs))

    def _finish(self, finish: Callable[[], R]) -> R:
        self._requests.collect()
        return finish()

    def _wait(self, state: AsyncState, timeout: float | None) -> Any:
        if timeout is not None and not (is_number(timeout) and timeout >= 0):
            raise ConfigError(
                f"{state.value}_wait(timeout={timeout!r}): seconds, or None: timeout=5.0"
            )
        finish = self._calls.end(state)
        try:
            self._requests.collect(timeout)
        except TimeoutError as error:
            if isinstance(error, ClusterEnvError):  # an environment's own
                raise
            self._calls.expired(state)
            raise WaitTimeout(
                f"{state.value}_wait() has timed out after {timeout:g} s: some environments have "
                "not finished yet. Their results are dropped when they arrive"
            ) from error
        return finish()

    def _fail(self, error: BaseException) -> None:
        """Close before an error reaches the caller, so that nothing is left running."""
        if self.closed:  # by another thread, which is why there is an error
            return
        self._closed_because = type(error).__name__
        # After Ctrl-C, do not wait for an environment that hangs.
        self.close(timeout=None if isinstance(error, Exception) else _INTERRUPTED_SECONDS)
