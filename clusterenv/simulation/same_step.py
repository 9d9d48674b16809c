"""Builds fragments from engines that reset in the same step, without copying rows."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from clusterenv.data.fragment import Fragment
from clusterenv.data.infos import VectorInfo, pack
from clusterenv.data.spaces import Column
from clusterenv.simulation.engines.base import EnvRaised, Slot
from clusterenv.simulation.engines.native import batch_parts
from clusterenv.simulation.env_faults import Rebuilder
from clusterenv.simulation.fragment_builder import Block, BuilderInputs, FragmentBuilder

__all__ = ["SameStepBuilder"]

Bools = npt.NDArray[np.bool_]


class _TimeRow(NamedTuple):
    """The time row of a fragment that is being filled."""

    t: int
    slot: Slot
    block: Block
    state: dict[str, Column]
    """Recurrent state at the fragment's first time row."""
    final_obs: dict[int, Any]
    """Final observations of the fragment's episodes, by row."""


class SameStepBuilder(FragmentBuilder):
    """Writes steps straight into the fragment; without a rebuilder, faults are raised."""

    def __init__(self, inputs: BuilderInputs, rebuilder: Rebuilder | None) -> None:
        super().__init__(inputs)
        self._rebuilder = rebuilder
        self._obs_now = inputs.obs
        self._env_column = np.tile(self._runner.envs, self._horizon)

    @property
    def waiting_rows(self) -> int:
        return 0  # every step is in a fragment

    def fragment(self, block: Block, fresh: bool) -> Fragment:
        horizon, n, runner = self._horizon, self._n, self._runner
        obs = self._prepare(block)
        for column, now in zip(obs, self._obs_now, strict=True):
            column[0] = now
        state = {name: tensor.numpy().copy() for name, tensor in runner.state.items()}
        terminated, truncated = block["terminated"], block["truncated"]
        versions = np.full(horizon, runner.acting.version, np.int32)
        final_obs: dict[int, Any] = {}
        t = 0

        def episode_step(row: int) -> int:
            ended = np.flatnonzero(terminated[:t, row] | truncated[:t, row])
            return int(t - ended[-1] - 1 if len(ended) else t + self._tracker.step[row])

        runner.location.episode_step = episode_step
        switches = self.between is not None or runner.follows_choices
        check, step = self._space_check, self._engine.step
        for t, current, slot in self._time_rows(block, obs):
            action = self._act(current, block, t, None)
            if switches:
                versions[t] = runner.acting.version
            try:
                infos = step([action], slot, None)
            except EnvRaised as fault:
                self._recover(fault, action, _TimeRow(t, slot, block, state, final_obs))
            else:
                if infos:
                    self._take_infos(infos, t, None, final_obs, terminated[t] | truncated[t])
                if check is not None and not check.passes(slot):
                    self._recover(None, action, _TimeRow(t, slot, block, state, final_obs))
            if state:
                runner.take_rewards(block["reward"][t])
                runner.reset_state(terminated[t] | truncated[t])
        self._obs_now = [column[horizon] for column in obs]
        ended = terminated | truncated
        if len(final_obs) != np.count_nonzero(ended):
            self._check_final_obs(ended, final_obs)
        tracked = self._tracker.advance_block(np.arange(n), block["reward"], ended)
        last = np.flatnonzero(~ended[-1])
        tail = self._layout.empty(len(final_obs))
        for row, value in enumerate(final_obs.values()):
            self._layout.write(tail, row, value)
        tails = {
            name: np.concatenate([part, column[horizon][last]])
            for name, part, column in zip(self._obs_names, tail, obs, strict=True)
        }
        columns = {
            name: column[:horizon].reshape(horizon * n, *column.shape[2:])
            for name, column in block.items()
        }
        columns["episode"], columns["step"] = tracked.episode, tracked.step
        columns["env"] = self._env_column
        columns["version"] = np.repeat(versions, n)
        rows = np.concatenate([np.array(list(final_obs), np.int64), (horizon - 1) * n + last])
        cuts = self._rebuilder.take_cuts() if self._rebuilder is not None else []
        return Fragment(
            columns, n, rows, tails, state, tracked.returns, tracked.lengths, block=block, cuts=cuts
        )

    def check_final(self, value: Any) -> None:
        """Raise if the final observation of an episode is not in its space."""
        if self._space_check is not None:
            columns = self._layout.empty(1)
            self._layout.write(columns, 0, value)
            self._space_check.check_value(columns)

    def _take_infos(
        self,
        infos: Any,
        t: int,
        rows: Sequence[int] | None,
        final_obs: dict[int, Any],
        began: Bools,
    ) -> None:
        """Take action masks and final observations from the infos of ``rows``, or of all."""
        self._info_mask.update(infos, rows, began)
        if "final_obs" not in infos:
            return
        if isinstance(infos, VectorInfo):
            at = np.flatnonzero(began)
            values = self._unbatched(infos["final_obs"], at.tolist())
        else:
            at, values = infos["final_obs"]
        where = at if rows is None else np.asarray(rows)[at]
        final_obs.update(zip((t * self._n + where).tolist(), values, strict=True))

    def _unbatched(self, batch: Any, rows: list[int]) -> list[Any]:
        """Return the observations of some environments from an object array or a batch."""
        if isinstance(batch, np.ndarray) and batch.dtype == object:
            return [copy.deepcopy(batch[row]) for row in rows]  # may be views of live buffers
        parts = list(batch_parts(self._engine.description.observation_space, batch))
        return [self._layout.value(copy.copy(part[row]) for part in parts) for row in rows]

    def _check_final_obs(self, ended: Bools, final_obs: Collection[int]) -> None:
        """Raise if the final observation of an episode is missing."""
        for row in np.flatnonzero(ended).tolist():
            if row not in final_obs:
                raise EnvRaised(row % self._n, "step") from ValueError(
                    "an episode ended and the environment reset in the same step, but "
                    "info['final_obs'] does not have its last observation"
                )

    # Environments that fail: one is rebuilt, the others go on.

    def _recover(self, fault: EnvRaised | None, action: Column, at: _TimeRow) -> None:
        """Finish a step in which an environment raised, or left its space.

        The failed step does not count: the episode ends with the step before it, and the first
        step of the rebuilt environment takes its place.
        """
        t, slot = at.t, at.slot
        if self._rebuilder is None:
            if fault is None:
                assert self._space_check is not None
                raise self._space_check.fault(slot, self._n)
            raise fault
        while True:
            if fault is None:
                fault = self._broken_space(slot)
                if fault is None:
                    return
            elif fault.infos:
                done = np.setdiff1d(np.arange(self._n), [fault.env, *fault.left])
                ended = self._ended(slot, done)
                self._take_infos(pack(fault.infos), t, None, at.final_obs, ended)
            row, rows = fault.env, fault.left
            if fault.doing == "reset":
                self._rebuild(self._rebuilder, fault, action, slot.obs, t)
            else:
                at.final_obs.pop(t * self._n + row, None)
                cut_at = self._cut(row, at)
                obs = [at.block[name][t] for name in self._obs_names]
                self._rebuild(self._rebuilder, fault, action, obs, cut_at)
                self._act_again(row, action, obs, at)
                rows = [row, *rows]
            fault = None
            if rows:
                try:
                    infos = self._engine.step([action[rows]], slot, rows)
                    if infos:
                        ended = self._ended(slot, rows)
                        self._take_infos(infos, t, rows, at.final_obs, ended)
                except EnvRaised as another:
                    fault = another

    def _broken_space(self, slot: Slot) -> EnvRaised | None:
        """Return the fault of the first environment outside its space, if there is one."""
        broken = {} if self._space_check is None else self._space_check.faults(slot)
        if not broken:
            return None
        row, cause = next(iter(broken.items()))
        ended = slot.terminated[row] | slot.truncated[row]
        # After the end of an episode, the observation in the slot is that of the reset.
        fault = EnvRaised(row, "reset" if ended and np.isfinite(slot.reward[row]) else "step")
        fault.__cause__ = cause
        return fault

    def _rebuild(
        self, rebuilder: Rebuilder, fault: EnvRaised, action: Column, obs: list[Column], cut_at: int
    ) -> None:
        info = rebuilder.rebuild(fault, action[fault.env], obs, cut_at)
        began = np.arange(self._n) == fault.env
        self._info_mask.update(pack([(fault.env, info)]) if info else None, began=began)

    def _act_again(self, row: int, action: Column, obs: list[Column], at: _TimeRow) -> None:
        """Replace the action and the extras of an environment that was rebuilt."""
        with torch.inference_mode(False):  # where torch counts in-place changes
            tensors = [torch.from_numpy(obs[k]) for k in self._layout.arrays]
        allowed = self._info_mask.value
        initial = at.state if at.t == 0 else None
        columns = self._runner.act_again(row, tensors, allowed, initial)
        if allowed is not None:
            columns["action_mask"] = allowed
        for name, values in columns.items():
            at.block[name][at.t, row] = values[row]
        action[row] = columns["action"][row]

    def _ended(self, slot: Slot, rows: Any) -> Bools:
        """Return whose episode has ended, of those in ``rows``."""
        ended = np.zeros(self._n, np.bool_)
        ended[rows] = slot.terminated[rows] | slot.truncated[rows]
        return ended

    def _cut(self, row: int, at: _TimeRow) -> int:
        """End an environment's episode with its last good step; return that step's time row."""
        t, block = at.t, at.block
        if t == 0:
            self._tracker.cut(row)
            return -1
        if block["terminated"][t - 1, row] or block["truncated"][t - 1, row]:
            return -1  # the episode has no step yet
        block["truncated"][t - 1, row] = True
        final = (copy.copy(block[name][t, row]) for name in self._obs_names)
        at.final_obs[(t - 1) * self._n + row] = self._layout.value(final)
        return t - 1
