"""The calls of ``ClusterEnv``: requests to the shards, and results from their answers.

A shard may be lost before it answers. The requests that it did not answer are then replaced by
what is due to its environments: a reset, after which they come back truncated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from clusterenv.data.pickling import dumps, dumps_by_value
from clusterenv.data.spaces import Array, Column, Layout
from clusterenv.errors import ActionError, ConfigError, NothingSent
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.vector.calls import Calls, action_columns, env_indices, reset_arguments
from clusterenv.head.vector.env_groups import EnvGroup, EnvGroups, EnvIds, Result
from clusterenv.head.vector.exchange import ACT, CALL, RESET, STEP, Exchange, Request
from clusterenv.head.vector.remote_policy import RemotePolicy
from clusterenv.policies.policy import Policy
from clusterenv.simulation.policy_spaces import check_spaces
from clusterenv.sync.rules import SyncRule
from clusterenv.transport.messages import (
    CallRequest,
    Failure,
    ResetRequest,
    ResultMeta,
    StepRequest,
)

if TYPE_CHECKING:
    from clusterenv.head.fleet.fleet import Fleet
    from clusterenv.head.vector.recovery import Recovery

__all__ = ["Requests", "ResetResult", "StepResult"]

ResetResult: TypeAlias = tuple[Any, dict[str, Any]]
StepResult: TypeAlias = tuple[
    Any, npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
]

_ALL = slice(None)


class Requests:
    """Begins the calls of a ``ClusterEnv``, and returns a function that gives each result.

    Call that function after :meth:`collect`. Every answer is received into the result of the call
    that sent the request, so a late answer is never taken for that of a later call. Errors name
    the user's ``call``.
    """

    def __init__(self, fleet: Fleet, recovery: Recovery, exchange: Exchange, calls: Calls) -> None:
        about = fleet.description
        self._fleet = fleet
        self._groups = EnvGroups(fleet)
        self._recovery = recovery
        self._exchange = exchange
        self._calls = calls
        self._num_envs = calls.num_envs
        self._obs = Layout(about.observation_space)
        self._act = Layout(about.action_space)
        self._remote: RemotePolicy | None = None

    def close(self) -> None:
        """End the announcements of ``step(policy)``, if there were any."""
        if self._remote is not None:
            self._remote.close()

    # All environments

    def reset(
        self, call: str, seed: Any, options: dict[str, Any] | None
    ) -> Callable[[], ResetResult]:
        """Reset all environments, or those of a mask in ``options``."""
        self._calls.check_idle(call)
        result = Result(self._obs, self._num_envs)
        self._reset_all(seed, options, result)
        return lambda: (self._obs.nest(result.slot.obs), result.info())

    def step(self, call: str, actions: Any) -> Callable[[], StepResult]:
        """Step all environments."""
        self._calls.check_ready(call)
        columns = action_columns(self._act, actions, self._num_envs)
        result = Result(self._obs, self._num_envs)
        for whole in self._groups.whole:
            self._step(whole, [column[whole.span] for column in columns], result)
        return partial(self._step_result, result)

    def act(self, call: str, policy: nn.Module, rule: SyncRule) -> Callable[[], StepResult]:
        """Let a policy act beside all environments; the rule of the first call counts."""
        if not isinstance(policy, Policy):
            raise ActionError(
                f"step() got a {type(policy).__name__}; wrap it: "
                "envs.step(clusterenv.policies.Categorical(module)) or CleanRL(agent)"
            )
        self._calls.check_ready(call)
        if self._remote is None:
            about = self._fleet.description
            # Text is kept: it returns with the observations.
            check_spaces(about.observation_space, about.action_space, text="keep")
            self._remote = RemotePolicy(policy, rule, self._obs, self._fleet, self._num_envs)
        remote = self._remote
        remote.refresh(policy)
        result = Result(self._obs, self._num_envs)
        for whole in self._groups.whole:
            if self._recovery.due(whole.span).any():
                self._reset_due(whole, None, result)
                continue
            blob, body = remote.request(whole.shard)
            self._send(ACT, whole, result, blob, body)
        return partial(self._act_result, remote, result)

    def call(
        self, call: str, method: str, arguments: Callable[[ShardHandle], tuple[Any, ...]]
    ) -> Callable[[], tuple[Any, ...]]:
        """Call a method of all engines, with the arguments that each shard gets."""
        self._calls.check_received(call)
        values: dict[int, list[Any] | Exception] = {}

        def complete(handle: ShardHandle, blob: Any) -> None:
            failed = isinstance(blob, Failure)
            values[handle.index] = env_error(handle, blob) if failed else blob or []

        def send(shard: int) -> None:
            request = Request(CALL, complete, partial(send, shard), blob=blobs[shard])
            self._exchange.send(shard, request)

        # All are pickled before one is sent: arguments that cannot be pickled do no harm.
        requests = [CallRequest(method, arguments(handle)) for handle in self._fleet.handles]
        blobs = [dumps_by_value(tuple(request)) for request in requests]
        for shard in range(len(blobs)):
            send(shard)
        return partial(_in_order, values)

    def collect(self, timeout: float | None = None) -> None:
        """Receive every answer: one of each shard, or two if some of its environments were lost.

        Raises ``TimeoutError`` if some are missing after so many seconds.
        """
        exchange = self._exchange
        if timeout is None:
            while exchange.outstanding:
                exchange.recv()
            return
        deadline = time.monotonic() + timeout
        while exchange.outstanding:
            exchange.recv(max(0.0, deadline - time.monotonic()))

    # Some environments

    def send_reset(self, seed: Any, options: dict[str, Any] | None) -> None:
        """Reset all environments; :meth:`recv` returns them shard by shard."""
        self._calls.check_idle("async_reset")
        self._reset_all(seed, options, None)
        self._calls.begin_recv(np.arange(self._num_envs))

    def send(self, actions: Any, env_ids: Sequence[int] | npt.NDArray[Any] | None) -> None:
        """Step some environments; :meth:`recv` returns them shard by shard."""
        group = self._groups.cached(env_ids)
        ids = env_indices(env_ids, self._num_envs) if group is None else group.ids
        columns = action_columns(self._act, actions, len(ids))
        self._calls.check_ready("send", ids)
        if group is not None:
            self._step(group, columns, None)
        else:
            for group, at in list(self._groups.split(ids)):
                self._step(group, [column[at] for column in columns], None)
        self._calls.begin_recv(ids)

    def recv(self) -> StepResult:
        """Return the results of the group of environments that is ready first."""
        self._calls.check_idle("recv")
        if not self._calls.receiving:
            raise NothingSent(
                "recv() has nothing to wait for: call async_reset() or send(actions, env_ids) first"
            )
        result = None
        while result is None or result.ids is None:  # of a call whose …_wait() timed out
            result = self._exchange.recv()
        self._calls.end_recv(result.ids)
        obs, reward, terminated, truncated, info = self._step_result(result, result.ids)
        info["env_id"] = result.ids
        return obs, reward, terminated, truncated, info

    # Requests

    def _reset_all(self, seed: Any, options: dict[str, Any] | None, result: Result | None) -> None:
        maskable, started = self._fleet.description.maskable, self._calls.started
        seeds, options, mask = reset_arguments(
            seed, options, self._num_envs, maskable=maskable, started=started
        )
        if result is None:
            if mask is not None:
                raise ConfigError(
                    "async_reset() resets all environments; for some of them: "
                    "reset(options={'reset_mask': mask})"
                )
            self.collect()  # or recv() would return the results of earlier requests
        for whole in self._groups.whole:
            self._reset(whole, seeds, options, mask, result)
        self._calls.reset(mask)

    def _reset(
        self,
        whole: EnvGroup,
        seeds: list[int | None],
        options: dict[str, Any] | None,
        mask: npt.NDArray[np.bool_] | None,
        result: Result | None,
    ) -> None:
        """Reset the environments of a shard; ``seeds`` and ``mask`` are of all environments."""
        own_mask = None if mask is None else mask[whole.span]
        blob = dumps_by_value(tuple(ResetRequest(seeds[whole.span], options, own_mask)))
        again = partial(self._reset, whole, seeds, options, mask, result)
        self._recovery.began(whole.ids, seeds, mask)
        self._send(RESET, whole, result, blob, again=again)

    def _step(self, group: EnvGroup, columns: list[Column], result: Result | None) -> None:
        """Step environments, or reset those to which that is due."""
        if self._recovery.count and (due := self._recovery.due(group.ids)).any():
            self._reset_due(group, np.flatnonzero(due), result)
            if due.all():
                return
            left = np.flatnonzero(~due)
            group = self._groups.of(group.shard, group.ids[left])
            columns = [column[left] for column in columns]
        layout, blob, arrays = self._act, group.blob, columns
        if layout.objects or [column.dtype for column in columns] != layout.dtypes:
            arrays = [columns[k] for k in layout.arrays]
            objects = [columns[k] for k in layout.objects]
            dtypes = [array.dtype for array in arrays]
            blob = dumps(tuple(StepRequest(group.rows, dtypes, objects)))
        self._send(STEP, group, result, blob, arrays)

    def _reset_due(self, group: EnvGroup, which: EnvIds | None, result: Result | None) -> None:
        """Reset a group of a restarted shard, or its positions ``which``, in place of a step."""
        share = self._fleet.handles[group.shard].share
        ids = group.ids if which is None else group.ids[which]
        rows = ids - share.first
        seeds: list[int | None] = [None] * share.count
        for row, seed in zip(rows, self._recovery.seeds(ids, group.shard), strict=True):
            seeds[row] = seed
        mask = np.isin(np.arange(share.count), rows) if len(rows) < share.count else None
        whole = Result(self._obs, share.count)

        def complete(handle: ShardHandle, blob: Any) -> Result:
            self._add_blob(whole, _ALL, handle, blob)
            truncated, infos = self._recovery.settle(ids, handle.index)
            self._recovery.saw(ids, whole.slot.obs, rows)
            whole.slot.truncated[rows] = truncated
            target, places = result, ids
            if target is None:
                target, places = Result(self._obs, len(ids), ids), np.arange(len(ids))
            target.take(whole, rows, places)
            if infos is not None:
                target.report(handle.index, infos, places)
            return target

        again = partial(self._reset_due, group, which, result)
        blob = dumps(tuple(ResetRequest(seeds, None, mask)))
        arrays = whole.slot.buffers(self._obs, _ALL)
        self._exchange.send(group.shard, Request(RESET, complete, again, arrays, blob))

    def _send(
        self,
        kind: int,
        group: EnvGroup,
        result: Result | None,
        blob: bytes,
        body: Sequence[Array] = (),
        again: Callable[[], None] | None = None,
    ) -> None:
        """Send a request about a group.

        The answer is received into ``result``. If that is ``None``, or the group is only a part of
        its shard, it is received into a result of its own.
        """
        if result is not None and (kind != STEP or group.rows is None):
            target, into = result, group.span
        else:
            target, into = Result(self._obs, len(group.ids), group.ids), _ALL
        complete: Callable[[ShardHandle, Any], Result]
        complete = partial(self._complete, target, into, group.ids)
        if result is not None and target is not result:
            complete = partial(self._complete_part, target, result, group.ids)
        if again is None:
            again = partial(self._reset_due, group, None, result)
        arrays = target.slot.buffers(self._obs, into)
        self._exchange.send(group.shard, Request(kind, complete, again, arrays, blob, body))

    # Answers

    def _complete(
        self, target: Result, into: slice, ids: EnvIds, handle: ShardHandle, blob: Any
    ) -> Result:
        """Complete a result whose arrays were received."""
        self._add_blob(target, into, handle, blob)
        self._recovery.saw(ids, target.slot.obs, into)
        return target

    def _complete_part(
        self, part: Result, result: Result, ids: EnvIds, handle: ShardHandle, blob: Any
    ) -> Result:
        """Complete a result of some environments, and copy it into that of all."""
        self._complete(part, _ALL, ids, handle, blob)
        result.take(part, np.arange(len(ids)), ids)
        return result

    def _add_blob(self, target: Result, into: slice, handle: ShardHandle, blob: Any) -> None:
        """Add to a result what is not sent as arrays."""
        if blob is None:
            return
        infos, objects, chosen, states = ResultMeta(*blob)
        for k, column in zip(self._obs.objects, objects, strict=True):
            target.slot.obs[k][into] = column
        if infos:
            target.report(handle.index, infos, np.arange(target.n)[into])
        if chosen:
            target.choose(chosen, into)
        if states:
            rows, columns = states
            target.states.append((np.arange(target.n)[into][rows], columns))

    def _step_result(self, result: Result, ids: EnvIds | slice = _ALL) -> StepResult:
        obs, reward, terminated, truncated = result.slot
        self._calls.stepped(ids, terminated, truncated)
        return self._obs.nest(obs), reward, terminated, truncated, result.info()

    def _act_result(self, remote: RemotePolicy, result: Result) -> StepResult:
        obs, reward, terminated, truncated, info = self._step_result(result)
        remote.observe(result.slot.obs, terminated | truncated, info, result.states)
        info |= remote.complete(result.chosen, self._num_envs)
        return obs, reward, terminated, truncated, info


def _in_order(values: dict[int, list[Any] | Exception]) -> tuple[Any, ...]:
    """Return the values of all environments, or raise what one of them raised."""
    found: list[Any] = []
    for shard in sorted(values):
        of_shard = values[shard]
        if isinstance(of_shard, Exception):
            raise of_shard
        found += of_shard
    return tuple(found)
