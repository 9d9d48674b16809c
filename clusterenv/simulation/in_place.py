"""Engines that reset in the same step: rows are written where they stay."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clusterenv.data.fragment import Fragment
from clusterenv.data.infos import VectorInfo, pack
from clusterenv.data.spaces import Column
from clusterenv.simulation.blocks import GIVEN, Block, check_memory, prepare, time_rows
from clusterenv.simulation.engines import Engine, EnvRaised, Slot
from clusterenv.simulation.engines.native import batch_parts
from clusterenv.simulation.filler import Filler
from clusterenv.simulation.policy_faults import StepOf
from clusterenv.simulation.policy_runner import PolicyRunner
from clusterenv.simulation.rebuilding import Rebuilder
from clusterenv.simulation.space_check import SpaceCheck

__all__ = ["InPlace"]


class _Place(NamedTuple):
    """Where in a fragment a step stands."""

    t: int
    block: Block
    state: dict[str, Column]
    finals: dict[int, Any]
    step_of: StepOf


class InPlace(Filler):
    """Fills fragments without a copy, and mends environments that fail.

    Parameters
    ----------
    engine, chooser, envs, horizon, guard
        As for :class:`Filler`.
    mender
        Rebuilds environments that fail; without it a fault is raised.
    obs
        What the first reset gave.
    """

    def __init__(
        self,
        engine: Engine,
        chooser: PolicyRunner,
        envs: npt.NDArray[np.int32],
        horizon: int,
        guard: SpaceCheck | None,
        mender: Rebuilder | None,
        obs: list[Column],
    ) -> None:
        super().__init__(engine, chooser, envs, horizon, guard)
        check_memory(self._layout, horizon, self._n, horizon)
        self._mender = mender
        self._obs_now = obs

    @property
    def waiting_rows(self) -> int:
        return 0  # every step is in a fragment

    def fragment(self, block: Block, fresh: bool) -> Fragment:
        horizon, n, chooser = self._horizon, self._n, self._chooser
        obs = prepare(block, self._layout, horizon, n)
        for column, now in zip(obs, self._obs_now, strict=True):
            column[0] = now
        state = {name: tensor.numpy().copy() for name, tensor in chooser.state.items()}
        terminated, truncated = block["terminated"], block["truncated"]
        versions = np.empty(horizon, np.int32)
        finals: dict[int, Any] = {}  # by row

        def step_of(row: int, t: int) -> str:
            ended = np.flatnonzero(terminated[:t, row] | truncated[:t, row])
            steps = t - ended[-1] - 1 if len(ended) else t + self._ledger.step[row]
            return f"{steps} of its episode"

        for t, current, slot in time_rows(block, obs, range(horizon)):
            action = chooser.act(current, block, t, horizon, step_of)
            versions[t] = chooser.version
            try:
                infos = self._engine.step([action], slot, None)
            except EnvRaised as fault:
                if self._mender is None:
                    raise
                place = _Place(t, block, state, finals, step_of)
                self._mend(self._mender, fault, action, slot, place)
            else:
                if infos:
                    self._note(infos, t, None, finals, terminated[t] | truncated[t])
                if self._guard is not None and not self._guard.passes(slot):
                    if self._mender is None:
                        raise self._guard.fault(slot, n)
                    place = _Place(t, block, state, finals, step_of)
                    self._mend(self._mender, None, action, slot, place)
            if chooser.state:
                chooser.reset_state(terminated[t] | truncated[t])
        self._obs_now = [column[horizon] for column in obs]
        ended = terminated | truncated
        if len(finals) != np.count_nonzero(ended):
            self._check_finals(ended, finals)
        book = self._ledger.post_block(np.arange(n), block["reward"], ended)
        last = np.flatnonzero(~ended[-1])
        tail = self._layout.empty(len(finals))
        for row, value in enumerate(finals.values()):
            self._layout.write(tail, row, value)
        tails = {
            name: np.concatenate([part, column[horizon][last]])
            for name, part, column in zip(self._obs_names, tail, obs, strict=True)
        }
        columns = {
            name: column[:horizon].reshape(horizon * n, *column.shape[2:])
            for name, column in block.items()
        }
        columns["episode"], columns["step"] = book.episode.reshape(-1), book.step.reshape(-1)
        columns["env"] = np.tile(self._envs, horizon)
        columns["version"] = np.repeat(versions, n)
        rows = np.concatenate([np.array(list(finals), np.int64), (horizon - 1) * n + last])
        cuts = self._mender.take_cuts() if self._mender is not None else []
        return Fragment(
            columns, n, rows, tails, state, book.returns, book.lengths, block=block, cuts=cuts
        )

    def check_final(self, value: Any) -> None:
        """Raise if the last observation of an episode is not as it should be."""
        if self._guard is not None:
            columns = self._layout.empty(1)
            self._layout.write(columns, 0, value)
            self._guard.check_value(columns)

    def _note(
        self,
        infos: Any,
        t: int,
        rows: Sequence[int] | None,
        finals: dict[int, Any],
        began: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Take from the infos of a step, of ``rows`` or of all, what belongs to the fragment."""
        self._chooser.mask.note(infos, rows, began)
        if "final_obs" not in infos:
            return
        if isinstance(infos, VectorInfo):
            at = np.flatnonzero(np.zeros(0) if began is None else began)
            values = self._unbatched(infos["final_obs"], at.tolist())
        else:
            at, values = infos["final_obs"]
        where = at if rows is None else np.asarray(rows)[at]
        finals.update(zip((t * self._n + where).tolist(), values, strict=True))

    def _unbatched(self, batch: Any, rows: list[int]) -> list[Any]:
        """Return the observations of some environments: of an array of them, or of a batch."""
        if isinstance(batch, np.ndarray) and batch.dtype == object:
            return [copy.deepcopy(batch[row]) for row in rows]  # may be views of what changes
        parts = list(batch_parts(self._engine.description.observation_space, batch))
        return [self._layout.value(copy.copy(part[row]) for part in parts) for row in rows]

    def _check_finals(self, ended: npt.NDArray[np.bool_], finals: Collection[int]) -> None:
        """Raise if an episode has ended of which the last observation is not known."""
        for row in np.flatnonzero(ended).tolist():
            if row not in finals:
                raise EnvRaised(row % self._n, "step") from ValueError(
                    "an episode ended and the environment reset in the same step, but "
                    "info['final_obs'] does not have its last observation"
                )

    # Environments that fail: one is rebuilt, the others go on.

    def _mend(
        self, mender: Rebuilder, fault: EnvRaised | None, action: Column, slot: Slot, place: _Place
    ) -> None:
        """Finish a step in which an environment raised, or broke its space.

        A step that failed has not happened: the episode ends with the one before it, and the
        rebuilt environment's first step takes its place.
        """
        t = place.t
        while True:
            if fault is None:
                broken = {} if self._guard is None else self._guard.faults(slot)
                if not broken:
                    return
                row, cause = next(iter(broken.items()))
                ended = slot.terminated[row] | slot.truncated[row]
                # After an end, what was written is the observation of a reset.
                fault = EnvRaised(
                    row, "reset" if ended and np.isfinite(slot.reward[row]) else "step"
                )
                fault.__cause__ = cause
            elif fault.infos:
                done = np.setdiff1d(np.arange(self._n), [fault.env, *fault.left])
                began = self._ended(slot, done)
                self._note(pack(fault.infos), t, None, place.finals, began)
            row, rows = fault.env, fault.left
            if fault.doing == "reset":
                self._rebuild(mender, fault, action, slot.obs, t)
            else:
                place.finals.pop(t * self._n + row, None)
                at = self._cut(row, place)
                now = [place.block[name][t] for name in self._obs_names]
                self._rebuild(mender, fault, action, now, at)
                arrays = [now[k] for k in self._layout.arrays]
                action[row] = self._chooser.act_again(
                    *(row, arrays, place.block, t, self._horizon, place.step_of),
                    given=(*GIVEN, *self._obs_names),
                    first=place.state if t == 0 else None,
                )
                rows = [row, *rows]
            fault = None
            if rows:
                try:
                    infos = self._engine.step([action[rows]], slot, rows)
                    if infos:
                        self._note(infos, t, rows, place.finals, self._ended(slot, rows))
                except EnvRaised as another:
                    fault = another

    def _rebuild(
        self, mender: Rebuilder, fault: EnvRaised, action: Column, obs: list[Column], cut_at: int
    ) -> None:
        info = mender.rebuild(fault, action[fault.env], obs, cut_at)
        began = np.arange(self._n) == fault.env
        self._chooser.mask.note(pack([(fault.env, info)]) if info else None, began=began)

    def _ended(self, slot: Slot, rows: Any) -> npt.NDArray[np.bool_]:
        """Return whose episode has ended, of those in ``rows``."""
        ended = np.zeros(self._n, np.bool_)
        ended[rows] = slot.terminated[rows] | slot.truncated[rows]
        return ended

    def _cut(self, row: int, place: _Place) -> int:
        """End the episode of an environment with its last good step; return when that was."""
        t, block = place.t, place.block
        if t == 0:
            self._ledger.cut(row)
            return -1
        if block["terminated"][t - 1, row] or block["truncated"][t - 1, row]:
            return -1  # it had no step
        block["truncated"][t - 1, row] = True
        final = (copy.copy(block[name][t, row]) for name in self._obs_names)
        place.finals[(t - 1) * self._n + row] = self._layout.value(final)
        return t - 1
