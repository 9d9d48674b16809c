"""A collecting shard's requests for actions, if the policy acts at the head."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from clusterenv.data.spaces import Array
from clusterenv.policies.policy import Context, Decision
from clusterenv.simulation.fragment_builder import Interrupted
from clusterenv.simulation.head_policy import Choice, Choose
from clusterenv.transport.connection import BlockingConnection
from clusterenv.transport.framing import Header
from clusterenv.transport.messages import ActionField, ActionsMeta, MessageKind, ObservationsMeta

if TYPE_CHECKING:
    from clusterenv.simulation.groups import Span

__all__ = ["ActionRequests"]

Send = Callable[[MessageKind, bytes, Sequence[Array]], None]


class ActionRequests:
    """Sends the observations of groups of environments to the head, and waits for the actions.

    Each group has one request under way at most. The thread that reads the connection hands over
    what the head answers.
    """

    def __init__(self, spans: Sequence[Span], send: Send) -> None:
        self._spans, self._send = spans, send
        self._choices: list[queue.SimpleQueue[Choice | None]] = [queue.SimpleQueue() for _ in spans]
        self._waiting = [False] * len(spans)
        self._fields: list[ActionField] = []
        self._closed = False

    @property
    def all_wait(self) -> bool:
        """Whether every group waits for the head, so that no environment is being stepped."""
        return all(self._waiting)

    def chooser(self, group: int) -> Choose:
        """Return what asks the head for the actions of a group."""
        span = self._spans[group]

        def choose(obs: list[Tensor], context: Context) -> Choice:
            mask = [] if context.mask is None else [context.mask.numpy()]
            arrays = [tensor.numpy() for tensor in obs] + mask
            arrays += [tensor.numpy() for tensor in context.state.values()]
            meta = ObservationsMeta(group, *span, mask[0].shape[1] if mask else 0)
            body = [np.ascontiguousarray(array) for array in arrays]
            self._waiting[group] = True
            if self._closed:
                raise Interrupted
            self._send(MessageKind.OBSERVATIONS, meta.pack(), body)
            choice = self._choices[group].get()
            self._waiting[group] = False
            if choice is None:
                raise Interrupted
            return choice

        return choose

    def receive(self, connection: BlockingConnection, header: Header, meta: ActionsMeta) -> None:
        """Receive the body of the head's answer, and hand it to the group that waits for it."""
        if meta.fields is not None:
            self._fields = [ActionField(*field) for field in meta.fields]
        count = self._spans[meta.group].num_envs
        arrays = [np.empty((count, *field.shape), field.dtype) for field in self._fields]
        connection.recv_body(header, arrays)
        parts: dict[str, dict[str, Tensor]] = {"action": {}, "extras": {}, "state": {}}
        for field, array in zip(self._fields, arrays, strict=True):
            parts[field.part][field.name] = torch.from_numpy(array)
        decision = Decision(parts["action"]["action"], parts["extras"], parts["state"])
        self._choices[meta.group].put(Choice(meta.version, decision))

    def close(self) -> None:
        """Wake all groups, whose requests are not answered any more."""
        self._closed = True
        for choices in self._choices:
            choices.put(None)
