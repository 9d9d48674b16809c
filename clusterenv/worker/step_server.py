"""Answers the requests of a ``ClusterEnv`` for one shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode

from clusterenv.data.pickling import dumps, loads
from clusterenv.data.spaces import Column, Layout
from clusterenv.errors import ConnectionClosed
from clusterenv.policies.policy import Policy
from clusterenv.simulation.engines.base import Engine, Infos, Slot
from clusterenv.simulation.masks import InfoMask
from clusterenv.simulation.policy_rng import PolicyRNG
from clusterenv.simulation.policy_runner import PolicyRunner
from clusterenv.sync.weights import Weights, load, manifest_of
from clusterenv.transport.connection import BlockingConnection
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

_RESERVED = {"action", "policy_version", "env_id", "lost", "final_obs", "final_info"}
"""Keys of the infos that a policy's extras cannot have."""


class StepServer:
    """Answers the head's requests in order: steps, resets, calls, and steps by a policy."""

    def __init__(self, engine: Engine, connection: BlockingConnection, first: int) -> None:
        self._engine = engine
        self._connection = connection
        self._first = first
        self._layout = Layout(engine.description.observation_space)
        self._actions = Layout(engine.description.action_space)
        self._slot = Slot.empty(self._layout, engine.num_envs)
        self._whole = StepRequest(None, self._actions.dtypes, [])
        self._policy_rng = PolicyRNG(None)
        self._probe_rng = np.random.default_rng(0)
        self._info_mask = InfoMask(engine.num_envs)
        self._began = np.ones(engine.num_envs, np.bool_)  # whose recurrent state must be reset
        mode = engine.description.autoreset_mode
        self._resets_next_step = mode is not AutoresetMode.SAME_STEP

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
        finished = self._over() if self._resets_next_step else None
        infos = self._engine.step(actions, self._slot, indices)
        at = slice(None) if rows is None else rows
        self._track_episodes(infos, at, indices, finished)
        self._send_result(infos, at)

    def _reset(self, request: ResetRequest) -> None:
        if request.mask is None and request.seeds[0] is not None:
            self._policy_rng = PolicyRNG(request.seeds[0])  # the policy's draws repeat too
        infos = self._engine.reset(self._slot, request.seeds, request.options, request.mask)
        began = np.ones_like(self._began) if request.mask is None else request.mask
        self._info_mask.update(infos, began=began)
        self._began |= began
        self._send_result(infos, slice(None))

    def _act(self, request: ActRequest, weights: npt.NDArray[np.uint8]) -> None:
        runner = self._load_policy(request, weights)
        finished = self._over() if self._resets_next_step else None
        obs = [torch.from_numpy(self._slot.obs[k]) for k in self._layout.arrays]
        with torch.inference_mode():
            runner.reset_state(self._began)
            chosen = runner.act(obs, self._info_mask.value, finished)
        self._began[:] = False
        infos = self._engine.step([chosen["action"]], self._slot, None)
        with torch.inference_mode():
            runner.take_rewards(self._slot.reward)
        self._track_episodes(infos, slice(None), None, finished)
        chosen["policy_version"] = np.full(self._engine.num_envs, request.version, np.int64)
        states = self._sample_states(runner, request.state_rows) if request.state_rows else None
        self._send_result(infos, slice(None), chosen, states)

    def _load_policy(self, request: ActRequest, weights: npt.NDArray[np.uint8]) -> PolicyRunner:
        """Take the policy, or newer weights, if the request carries them."""
        if request.policy is not None:
            self._policy: Policy = loads(request.policy).eval()
            self._manifest = manifest_of(self._policy)
        if weights.nbytes:
            load(self._policy, self._manifest, Weights(request.version, weights))
        if request.policy is not None:  # after the weights, which may be the initial state
            envs = np.arange(self._first, self._first + self._engine.num_envs, dtype=np.int32)
            about, rng = self._engine.description, self._policy_rng
            self._runner = PolicyRunner(self._policy, about, envs, rng, _RESERVED)
            self._began[:] = False
        self._runner.rng = self._policy_rng
        return self._runner

    def _sample_states(
        self, runner: PolicyRunner, count: int
    ) -> tuple[npt.NDArray[np.intp], dict[str, Column]]:
        """Return rows within an episode, and the recurrent state that acts on them next."""
        with torch.inference_mode():
            runner.reset_state(self._began)
        self._began[:] = False
        rows = self._probe_rng.permutation(np.flatnonzero(~self._over()))[:count]
        return rows, runner.state_at(rows)

    def _call(self, raw: bytes | bytearray) -> bytes:
        """Return a method's result, or its failure; the environments stay usable."""
        doing = "call"
        try:
            request = CallRequest(*loads(raw))
            doing = request.method
            return dumps(getattr(self._engine, request.method)(*request.args))
        except BaseException as error:  # some environments call sys.exit()
            return dumps(failure_of(error, self._first, doing))

    def _over(self) -> npt.NDArray[np.bool_]:
        """Return whose last step ended an episode."""
        return self._slot.terminated | self._slot.truncated

    def _track_episodes(
        self,
        infos: Infos,
        rows: slice | npt.NDArray[np.intp],
        indices: Sequence[int] | None,
        finished: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Record which environments begin an episode, and the masks that a step returned.

        ``finished`` are those that the step only reset; ``None`` if the engine resets in the step
        that ends an episode.
        """
        began = np.zeros_like(self._began)
        began[rows] = (self._over() if finished is None else finished)[rows]
        self._began |= began
        self._info_mask.update(infos, indices, began)

    def _send_result(
        self,
        infos: Infos,
        rows: slice | npt.NDArray[np.intp],
        chosen: dict[str, Column] | None = None,
        states: tuple[npt.NDArray[np.intp], dict[str, Column]] | None = None,
    ) -> None:
        objects = [self._slot.obs[k][rows] for k in self._layout.objects]
        meta = ResultMeta(infos, objects, chosen, states)
        blob = dumps(tuple(meta)) if infos or objects or chosen else b""
        self._connection.send(MessageKind.RESULT, blob, self._slot.buffers(self._layout, rows))


def _indices(rows: slice | npt.NDArray[np.intp]) -> Sequence[int]:
    if isinstance(rows, slice):
        return range(rows.start, rows.stop)
    indices: list[int] = rows.tolist()
    return indices
