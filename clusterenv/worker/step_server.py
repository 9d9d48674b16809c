"""Answers the requests of a ``ClusterEnv`` for one shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from clusterenv.data.pickling import dumps, loads
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ConnectionClosed
from clusterenv.simulation.engines import Engine, Infos, Slot
from clusterenv.simulation.local_policy import LocalPolicy
from clusterenv.simulation.masks import InfoMask
from clusterenv.simulation.random_stream import RandomStream
from clusterenv.transport.blocking import BlockingConnection
from clusterenv.transport.framing import Header
from clusterenv.transport.messages import (
    ActRequest,
    CallRequest,
    MessageKind,
    ResetRequest,
    ResultMeta,
    StepRequest,
)
from clusterenv.worker.failures import failure_of

__all__ = ["StepServer"]


class StepServer:
    """Answers the head's frames, in order."""

    def __init__(self, engine: Engine, connection: BlockingConnection, first: int) -> None:
        self._engine = engine
        self._connection = connection
        self._first = first
        self._layout = Layout(engine.description.observation_space)
        self._actions = Layout(engine.description.action_space)
        self._slot = Slot.empty(self._layout, engine.num_envs)
        self._whole = StepRequest(None, self._actions.dtypes, [])
        self._policy: LocalPolicy | None = None
        self._drawing = RandomStream(None)
        self._mask = InfoMask(engine.num_envs)
        self._began = np.ones(engine.num_envs, np.bool_)
        mode = engine.description.autoreset_mode
        self._spends_steps = mode is not AutoresetMode.SAME_STEP

    def run(self) -> None:
        """Serve until the connection closes."""
        while True:
            header = self._connection.recv_header()
            raw = self._connection.recv_raw(header)
            doing = MessageKind(header.kind).name.lower()
            try:
                if header.kind == MessageKind.STEP:
                    request = StepRequest(*loads(raw)) if raw else self._whole
                    self._step(request, self._read_actions(header, request))
                elif header.kind == MessageKind.RESET:
                    self._reset(ResetRequest(*loads(raw)))
                elif header.kind == MessageKind.ACT:
                    weights = np.empty(header.body, np.uint8)
                    self._connection.recv_body(header, [weights])
                    self._act(ActRequest(*loads(raw)), weights)
                else:
                    self._connection.send(MessageKind.VALUE, self._call(raw))
            except ConnectionClosed:
                raise
            except BaseException as error:  # some environments call sys.exit()
                self._connection.send(
                    MessageKind.FAILED, dumps(failure_of(error, self._first, doing))
                )

    def _read_actions(self, header: Header, request: StepRequest) -> list[Column]:
        n = self._engine.num_envs if request.rows is None else len(_indices(request.rows))
        arrays = [
            np.empty((n, *self._actions.leaves[k].shape), dtype)
            for k, dtype in zip(
                self._actions.arrays, request.dtypes or self._actions.dtypes, strict=True
            )
        ]
        self._connection.recv_body(header, arrays)
        if not request.objects:
            return arrays
        columns: list[Column] = [np.empty(0)] * len(self._actions.leaves)
        for k, array in zip(self._actions.arrays, arrays, strict=True):
            columns[k] = array
        for k, column in zip(self._actions.objects, request.objects, strict=True):
            columns[k] = column
        return columns

    def _step(self, request: StepRequest, actions: list[Column]) -> None:
        rows = request.rows
        indices = None if rows is None else _indices(rows)
        began = self._over() if self._spends_steps else None
        infos = self._engine.step(actions, self._slot, indices)
        self._note(infos, slice(None) if rows is None else rows, indices, began)
        self._send_result(infos, slice(None) if rows is None else rows)

    def _reset(self, request: ResetRequest) -> None:
        if request.mask is None and request.seeds[0] is not None:  # what a policy draws repeats too
            self._drawing = RandomStream(request.seeds[0])
        infos = self._engine.reset(self._slot, request.seeds, request.options, request.mask)
        began = np.ones_like(self._began) if request.mask is None else request.mask
        self._mask.note(infos, began=began)
        self._began |= began
        self._send_result(infos, slice(None))

    def _act(self, request: ActRequest, weights: npt.NDArray[np.uint8]) -> None:
        if self._policy is None:
            self._policy = LocalPolicy(self._engine.description, self._first, self._engine.num_envs)
        self._policy.update(request.policy, request.version, weights)
        dead = self._over() if self._spends_steps else np.zeros_like(self._began)
        with self._drawing:
            chosen = self._policy.act(self._slot.obs, self._began, dead, self._mask.value)
        self._began[:] = False
        infos = self._engine.step([chosen["action"]], self._slot, None)
        self._note(infos, slice(None), None, dead if self._spends_steps else None)
        self._send_result(infos, slice(None), chosen)

    def _call(self, raw: bytes | bytearray) -> bytes:
        """Return what a method of the engine returned, or the failure: the environments go on."""
        doing = "call"
        try:
            request = CallRequest(*loads(raw))
            doing = request.method
            return dumps(getattr(self._engine, request.method)(*request.args))
        except BaseException as error:  # some environments call sys.exit()
            return dumps(failure_of(error, self._first, doing))

    def _over(self) -> npt.NDArray[np.bool_]:
        """Return whose last step said that the episode is over."""
        return self._slot.terminated | self._slot.truncated

    def _note(
        self,
        infos: Infos,
        rows: slice | npt.NDArray[np.intp],
        indices: Sequence[int] | None,
        resets: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Note which environments begin an episode, and the masks that a step has given.

        Parameters
        ----------
        resets
            Whom the step only reset; ``None`` if it does so in the step that ends an episode.
        """
        began = np.zeros_like(self._began)
        began[rows] = (self._over() if resets is None else resets)[rows]
        self._began |= began
        self._mask.note(infos, indices, began)

    def _send_result(
        self,
        infos: Infos,
        rows: slice | npt.NDArray[np.intp],
        chosen: dict[str, Column] | None = None,
    ) -> None:
        objects = [self._slot.obs[k][rows] for k in self._layout.objects]
        meta = ResultMeta(infos, objects, chosen)
        blob = dumps(tuple(meta)) if infos or objects or chosen else b""
        self._connection.send(MessageKind.RESULT, blob, self._slot.buffers(self._layout, rows))


def _indices(rows: slice | npt.NDArray[np.intp]) -> Sequence[int]:
    if isinstance(rows, slice):
        return range(rows.start, rows.stop)
    indices: list[int] = rows.tolist()
    return indices
