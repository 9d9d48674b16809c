"""Round trips of ``ClusterEnv``: requests to the shards, and the results of their answers."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ActionError, ActionTypeError, ConfigError, NothingSent
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.vector.arguments import env_indices, reset_arguments
from clusterenv.head.vector.calls import Calls
from clusterenv.head.vector.exchange import Answer, Exchange, Fail
from clusterenv.head.vector.groups import Groups
from clusterenv.head.vector.recovery import Recovery
from clusterenv.head.vector.remote_policy import RemotePolicy
from clusterenv.head.vector.requests import Requests
from clusterenv.head.vector.result import Result
from clusterenv.policies.base import Policy
from clusterenv.simulation.loop import check_spaces
from clusterenv.sync.rules import SyncRule

__all__ = ["ResetResult", "RoundTrips", "StepResult"]

ResetResult: TypeAlias = tuple[Any, dict[str, Any]]
StepResult: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
]


class RoundTrips:
    """Begins the calls of a ``ClusterEnv``, and returns what finishes each of them.

    What a method returns is to be called after :meth:`collect`, and gives the result of the call.
    Every answer is read into the result of the call that asked for it, so an answer that comes
    late is never taken for that of a later call.

    Parameters
    ----------
    fleet
        The shards.
    recovery
        Knows what is due to environments that were lost.
    exchange
        Carries requests and answers.
    calls
        Says what may be called, and is told what was.
    fail
        Called with what an environment raised in a reset or step, before it is raised here; a
        method, and held weakly.
    """

    def __init__(
        self, fleet: Fleet, recovery: Recovery, exchange: Exchange, calls: Calls, fail: Fail
    ) -> None:
        self._fleet = fleet
        self._groups = Groups(fleet)
        self._ask = Requests(fleet, self._groups, recovery, exchange)
        self._exchange = exchange
        self._calls = calls
        self._fail = weakref.WeakMethod(fail)
        self._num_envs = len(calls.sent)
        self._obs = Layout(fleet.description.observation_space)
        self._act = Layout(fleet.description.action_space)
        self._remote: RemotePolicy | None = None

    # All environments

    def reset(
        self, call: str, seed: Any, options: dict[str, Any] | None
    ) -> Callable[[], ResetResult]:
        """Reset all environments, or those of a mask in ``options``.

        Parameters
        ----------
        call
            The user's, for errors.
        """
        self._calls.check_idle(call)
        result = Result(self._obs, self._num_envs)
        self._reset(seed, options, result)
        return lambda: (self._obs.nest(result.slot.obs), result.info())

    def step(self, call: str, actions: Any) -> Callable[[], StepResult]:
        """Step all environments; as :meth:`reset`."""
        self._calls.check_ready(call)
        columns = self._columns(actions, self._num_envs)
        result = Result(self._obs, self._num_envs)
        for whole in self._groups.whole:
            self._ask.step(whole, [column[whole.span] for column in columns], result)
        return partial(self._step_result, result)

    def act(self, call: str, policy: nn.Module, rule: SyncRule) -> Callable[[], StepResult]:
        """Let a policy act beside all environments; as :meth:`step`.

        Parameters
        ----------
        rule
            When newer weights are sent; the one that comes first counts.
        """
        if not isinstance(policy, Policy):
            raise ActionError(
                f"step() got a {type(policy).__name__}; wrap it: "
                "envs.step(clusterenv.policies.Categorical(module)) or CleanRL(agent)"
            )
        self._calls.check_ready(call)
        if self._remote is None:
            about = self._fleet.description
            spaces = about.observation_space, about.action_space
            check_spaces(*spaces, text="keep")  # it comes back with the observations
            self._remote = RemotePolicy(policy, rule, self._obs, self._fleet.roster, self._num_envs)
        self._remote.refresh(policy)
        result = Result(self._obs, self._num_envs)
        for whole in self._groups.whole:
            self._ask.act(whole, partial(self._remote.request, whole.shard), result)
        return partial(self._act_result, self._remote, result)

    def call(
        self, call: str, method: str, arguments: Callable[[ShardHandle], tuple[Any, ...]]
    ) -> Callable[[], tuple[Any, ...]]:
        """Call a method of all engines, with the arguments that each shard gets."""
        self._calls.check_received(call)
        values: dict[int, list[Any] | Exception] = {}
        self._ask.call(method, arguments, values)
        return partial(_in_order, values)

    def collect(self, timeout: float | None = None) -> None:
        """Receive every answer: one of each shard, or two if some of its environments were lost.

        Raises
        ------
        TimeoutError
            If not all came within so many seconds.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while self._exchange.outstanding:
            self._receive(None if timeout is None else max(0.0, deadline - time.monotonic()))

    # Some environments

    def send_reset(self, seed: Any, options: dict[str, Any] | None) -> None:
        """Reset all environments; :meth:`recv` returns them shard by shard."""
        self._calls.check_idle("async_reset")
        self._reset(seed, options, None)
        self._calls.sent[:] = True

    def send(self, actions: Any, env_ids: Sequence[int] | npt.NDArray[Any] | None) -> None:
        """Step some environments; :meth:`recv` returns them shard by shard."""
        known = self._groups.known(env_ids)
        if known is not None:  # what recv() gave: nothing to look up
            columns = self._columns(actions, len(known.ids))
            self._calls.check_ready("send", known.ids)
            self._ask.step(known, columns)
            self._calls.sent[known.ids] = True
            return
        ids = env_indices(env_ids, self._num_envs)
        columns = self._columns(actions, len(ids))
        self._calls.check_ready("send", ids)
        for group, at in list(self._groups.split(ids)):
            self._ask.step(group, [column[at] for column in columns])
        self._calls.sent[ids] = True

    def recv(self) -> StepResult:
        """Return the results of whichever environments are ready first."""
        self._calls.check_idle("recv")
        if not self._calls.sent.any():
            raise NothingSent(
                "recv() has nothing to wait for: call async_reset() or send(actions, env_ids) first"
            )
        result = self._receive().value
        while not isinstance(result, Result):  # of a call that call_wait() did not wait for
            result = self._receive().value
        self._calls.sent[result.ids] = False
        obs, reward, terminated, truncated = result.slot
        self._calls.stepped(result.ids, terminated, truncated)
        info = result.info()
        info["env_id"] = result.ids
        return self._obs.nest(obs), reward, terminated, truncated, info

    # Inside

    def _reset(self, seed: Any, options: dict[str, Any] | None, result: Result | None) -> None:
        maskable, started = self._fleet.description.maskable, self._calls.started
        seeds, options, mask = reset_arguments(
            seed, options, self._num_envs, maskable=maskable, started=started
        )
        if result is None and mask is not None:
            raise ConfigError(
                "async_reset() resets all environments; for some of them: "
                "reset(options={'reset_mask': mask})"
            )
        if result is None:
            self.collect()  # what was sent before, or recv() would return that
        for whole in self._groups.whole:
            self._ask.reset(whole, seeds, options, mask, result)
        self._calls.reset(mask)

    def _step_result(self, result: Result) -> StepResult:
        obs, reward, terminated, truncated = result.slot
        self._calls.stepped(slice(None), terminated, truncated)
        return self._obs.nest(obs), reward, terminated, truncated, result.info()

    def _act_result(self, remote: RemotePolicy, result: Result) -> StepResult:
        obs, reward, terminated, truncated, info = self._step_result(result)
        remote.observe(result.slot.obs, terminated | truncated, info)
        info |= remote.complete(result.chosen, self._num_envs)
        return obs, reward, terminated, truncated, info

    def _receive(self, timeout: float | None = None) -> Answer:
        answer = self._exchange.recv(timeout)
        if isinstance(answer.value, Exception):
            fail = self._fail()
            if fail is not None:
                fail(answer.value)
            raise answer.value
        return answer

    def _columns(self, actions: Any, n: int) -> list[Column]:
        try:
            return self._act.columns(actions, n)
        except (TypeError, ValueError) as error:
            kind = ActionTypeError if isinstance(error, TypeError) else ActionError
            raise kind(
                f"{error}. The action space of one environment is "
                f"{self._fleet.description.action_space}; "
                "envs.action_space.sample() shows a right one"
            ) from error


def _in_order(values: dict[int, list[Any] | Exception]) -> tuple[Any, ...]:
    """Return the values of all environments, or raise what one of them raised."""
    found: list[Any] = []
    for shard in sorted(values):
        of_shard = values[shard]
        if isinstance(of_shard, Exception):
            raise of_shard
        found += of_shard
    return tuple(found)
