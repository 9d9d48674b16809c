"""What ``ClusterEnv`` asks of its shards, and how their answers become results.

A shard may be lost before it answers. It is then asked for what it owes instead: the reset of
environments that come back truncated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.pickling import dumps, dumps_by_value
from clusterenv.data.spaces import Array, Column, Layout
from clusterenv.head.fleet.env_errors import env_error
from clusterenv.head.fleet.fleet import Fleet
from clusterenv.head.fleet.handle import ShardHandle
from clusterenv.head.vector.exchange import Exchange, Reader
from clusterenv.head.vector.groups import Group, Groups
from clusterenv.head.vector.recovery import Recovery
from clusterenv.head.vector.result import Result, Rows
from clusterenv.transport.messages import (
    CallRequest,
    Failure,
    MessageKind,
    ResetRequest,
    StepRequest,
)

__all__ = ["Requests"]


class Requests:
    """Sends resets, steps and calls.

    Answers are received into a ``result`` of all environments, or, if there is none, into
    one of their own, which the exchange hands out.

    Parameters
    ----------
    fleet
        The shards.
    groups
        Their environments.
    recovery
        Knows what is due to environments that were lost.
    exchange
        Carries requests and answers.
    """

    def __init__(
        self, fleet: Fleet, groups: Groups, recovery: Recovery, exchange: Exchange
    ) -> None:
        self._fleet = fleet
        self._groups = groups
        self._recovery = recovery
        self._exchange = exchange
        self._obs = Layout(fleet.description.observation_space)
        self._act = Layout(fleet.description.action_space)

    def reset(
        self,
        whole: Group,
        seeds: list[int | None],
        options: dict[str, Any] | None,
        mask: npt.NDArray[np.bool_] | None,
        result: Result | None,
    ) -> None:
        """Reset the environments of a shard; ``seeds`` and ``mask`` are of all environments."""
        own_mask = None if mask is None else mask[whole.span]
        blob = dumps_by_value(tuple(ResetRequest(seeds[whole.span], options, own_mask)))
        reader = self._reader(result, whole.span if result else slice(None), whole.ids)
        again = partial(self.reset, whole, seeds, options, mask, result)
        self._recovery.began(whole.ids, seeds, mask)
        self._exchange.send(whole.shard, MessageKind.RESET, reader, again, blob)

    def step(self, group: Group, columns: Sequence[Column], result: Result | None = None) -> None:
        """Step environments with these actions, or reset those to which that is due."""
        if self._recovery.pending(group.ids):
            due = self._recovery.due(group.ids)
            self._reset_due(group, np.flatnonzero(due), result)
            if due.all():
                return
            left = np.flatnonzero(~due)
            group = self._groups.of(group.shard, group.ids[left])
            columns = [column[left] for column in columns]
        arrays = [columns[k] for k in self._act.arrays]
        objects = [columns[k] for k in self._act.objects]
        dtypes = [array.dtype for array in arrays]
        blob = group.blob
        if objects or dtypes != self._act.dtypes:
            blob = dumps(tuple(StepRequest(group.rows, dtypes, objects)))
        if result and group.rows is not None:
            reader = self._reader_of(result, group.ids)
        else:
            reader = self._reader(result, group.span if result else slice(None), group.ids)
        self._exchange.send(
            group.shard, MessageKind.STEP, reader, self._instead(group, result), blob, arrays
        )

    def act(
        self, whole: Group, request: Callable[[], tuple[bytes, list[Array]]], result: Result
    ) -> None:
        """Let the policy of a shard act, or reset what is due.

        Parameters
        ----------
        whole
            All environments of the shard.
        request
            Returns blob and body of the message.
        """
        instead = self._instead(whole, result)
        if self._recovery.pending(whole.span):
            instead()
            return
        blob, body = request()
        reader = self._reader(result, whole.span, whole.ids)
        self._exchange.send(whole.shard, MessageKind.ACT, reader, instead, blob, body)

    def call(
        self,
        method: str,
        arguments: Callable[[ShardHandle], tuple[Any, ...]],
        into: dict[int, list[Any] | Exception],
    ) -> None:
        """Call a method of all engines, and put what each returned, or raised, into a dictionary.

        Parameters
        ----------
        method
            Of :class:`~clusterenv.simulation.engines.Engine`.
        arguments
            Returns the arguments for a shard.
        into
            By shard.
        """

        def value(handle: ShardHandle, values: Any) -> dict[int, list[Any] | Exception]:
            failed = isinstance(values, Failure)
            into[handle.index] = env_error(handle, values) if failed else values or []
            return into

        def send(shard: int) -> None:
            reader = Reader((), value)
            self._exchange.send(shard, MessageKind.CALL, reader, partial(send, shard), blobs[shard])

        # All are made before one is sent: arguments that cannot be pickled do no harm.
        requests = [CallRequest(method, arguments(handle)) for handle in self._fleet.handles]
        blobs = [dumps_by_value(tuple(request)) for request in requests]
        for shard in range(len(blobs)):
            send(shard)

    def _instead(self, group: Group, result: Result | None) -> Callable[[], None]:
        """Return what asks for all that is due to a group whose shard was lost."""
        return partial(self._reset_due, group, np.arange(len(group.ids)), result)

    def _reset_due(self, group: Group, which: Rows, result: Result | None) -> None:
        """Reset environments of a lost shard instead of stepping them."""
        handle = self._fleet.handles[group.shard]
        ids = group.ids[which]
        rows = ids - handle.share.first
        seeds: list[int | None] = [None] * handle.share.count
        for row, seed in zip(rows.tolist(), self._recovery.seeds(ids), strict=True):
            seeds[row] = seed
        mask = None
        if len(rows) < handle.share.count:
            mask = np.isin(np.arange(handle.share.count), rows)

        whole = Result(self._obs, handle.share.count)

        def value(handle: ShardHandle, blob: Any) -> Result:
            self._complete(handle, blob, whole, slice(None))
            truncated, infos = self._recovery.settle(ids, handle.index)
            self._recovery.saw(ids, [column[rows] for column in whole.slot.obs])
            whole.slot.truncated[rows] = truncated
            target, places = result or Result(self._obs, len(ids), ids), ids
            if result is None:
                places = np.arange(len(ids))
            target.take(whole, rows, places)
            if infos is not None:
                target.report(handle.index, infos, places)
            return target

        reader = Reader(whole.slot.buffers(self._obs, slice(None)), value)
        again = partial(self._reset_due, group, which, result)
        blob = dumps(tuple(ResetRequest(seeds, None, mask)))
        self._exchange.send(group.shard, MessageKind.RESET, reader, again, blob)

    # Answers

    def _reader(self, result: Result | None, into: slice, ids: Rows) -> Reader:
        """Return what takes an answer into ``result``, or into a result of its own."""
        target = result or Result(self._obs, len(ids), ids)

        def value(handle: ShardHandle, blob: Any) -> Result:
            self._complete(handle, blob, target, into)
            self._recovery.saw(ids, [column[into] for column in target.slot.obs])
            return target

        return Reader(target.slot.buffers(self._obs, into), value)

    def _reader_of(self, result: Result, ids: Rows) -> Reader:
        """Return what takes an answer about some environments of a shard into ``result``."""
        part = self._reader(None, slice(None), ids)

        def value(handle: ShardHandle, blob: Any) -> Result:
            result.take(part.value(handle, blob), np.arange(len(ids)), ids)
            return result

        return Reader(part.arrays, value)

    def _complete(self, handle: ShardHandle, blob: Any, target: Result, into: slice) -> None:
        """Add to a result what does not travel as arrays."""
        if blob is not None:
            infos, objects, chosen = blob
            for k, column in zip(self._obs.objects, objects, strict=True):
                target.slot.obs[k][into] = column
            if infos:
                target.report(handle.index, infos, np.arange(target.n)[into])
            if chosen:
                target.choose(chosen, into)
