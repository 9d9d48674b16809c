"""Engines that spend a step on resetting: steps are recorded, then the dead ones left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Column
from clusterenv.simulation.blocks import GIVEN, Block, check_memory, prepare, room, time_rows
from clusterenv.simulation.engines import Engine, EnvRaised, Slot
from clusterenv.simulation.filler import Filler
from clusterenv.simulation.policy_faults import PolicyFault
from clusterenv.simulation.policy_runner import PolicyRunner
from clusterenv.simulation.recorder import Recorder
from clusterenv.simulation.space_check import SpaceCheck

__all__ = ["Recorded"]


class Recorded(Filler):
    """Fills fragments from a ring of recorded steps.

    Parameters
    ----------
    engine, chooser, envs, horizon, guard
        As for :class:`Filler`.
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
        obs: list[Column],
    ) -> None:
        super().__init__(engine, chooser, envs, horizon, guard)
        self._recorder = Recorder(self._n, horizon, self._ledger)
        check_memory(self._layout, self._recorder.rows, self._n, horizon)
        self._obs = prepare(self._recorder.columns, self._layout, self._recorder.rows, self._n)
        for column, initial in zip(self._obs, obs, strict=True):
            column[0] = initial
        rows = range(self._recorder.rows)
        self._ring = list(time_rows(self._recorder.columns, self._obs, rows))

    @property
    def waiting_rows(self) -> int:
        return self._recorder.waiting_rows

    def fragment(self, block: Block, fresh: bool) -> Fragment:
        recorder, horizon, n = self._recorder, self._horizon, self._n
        record = recorder.columns
        books = [recorder.forget()] if fresh else []
        for span in recorder.spans(all_envs=fresh):
            t = span.start
            recorder.versions[t : span.stop] = self._chooser.version
            try:
                for t, current, slot in self._ring[span.start : span.stop]:
                    self._step(t, current, slot)
            except (PolicyFault, EnvRaised):
                self._check_given(record, range(span.start, t))  # what came first?
                raise
            self._check_given(record, span)
            if span.stop == recorder.rows:  # the ring begins anew
                for column in self._obs:
                    column[0] = column[-1]
        tracks = recorder.take()
        flat = {name: column.reshape(-1, *column.shape[2:]) for name, column in record.items()}
        columns = {
            name: _gather(column, tracks.flat, block, name)
            for name, column in flat.items()
            if not name.startswith("state.")
        }
        over = (columns["terminated"] | columns["truncated"]).reshape(horizon, n)
        book = self._ledger.post_block(tracks.envs, columns["reward"].reshape(horizon, n), over)
        books.append(book)
        if fresh:  # only now: what is left behind came after these tracks
            books.append(recorder.forget())
        columns["episode"], columns["step"] = book.episode.reshape(-1), book.step.reshape(-1)
        columns["env"] = np.tile(self._envs[tracks.envs], horizon)
        columns["version"] = recorder.versions[tracks.at].reshape(-1)
        over[-1] = True
        rows = np.flatnonzero(over)
        tails = {name: flat[name][tracks.flat[rows] + n] for name in self._obs_names}
        state = {
            name.removeprefix("state."): column[tracks.at[0], tracks.envs]
            for name, column in record.items()
            if name.startswith("state.")
        }
        return Fragment(
            columns,
            n,
            rows,
            tails,
            state,
            [value for each in books for value in each.returns],
            [length for each in books for length in each.lengths],
            sum(len(each.step) for each in books if each is not book),
            block=block,
        )

    def _step(self, t: int, current: list[Tensor], slot: Slot) -> None:
        """Make one step, and record it in time row ``t``."""
        recorder, chooser = self._recorder, self._chooser
        for name, held in chooser.state.items():
            values = held.numpy()
            room(recorder.columns, f"state.{name}", values, recorder.rows)[t] = values
        action = chooser.act(current, recorder.columns, t, recorder.rows)
        if chooser.switches:
            recorder.versions[t] = chooser.version
        infos: Any = self._engine.step([action], slot, None)
        chooser.mask.note(infos, began=chooser.dead)
        if chooser.state or chooser.masked:  # what acted in a dead step has not happened
            ended = (slot.terminated | slot.truncated) & ~chooser.dead
            chooser.reset_state(chooser.dead | ended)
            chooser.dead = ended

    def _check_given(self, record: Block, span: range) -> None:
        """Raise if an environment broke its space in these time rows.

        One look at many steps takes a hundredth of the time of a look at each.
        """
        if self._guard is None or not span:
            return
        steps = 1 if self._guard.bounded else len(span)
        for start in span[::steps]:
            end = start + steps
            obs = [record[name][start + 1 : end + 1] for name in self._obs_names]
            given = [record[name][start:end] for name in GIVEN]
            obs, given = ([c.reshape(-1, *c.shape[2:]) for c in part] for part in (obs, given))
            slot = Slot(obs, *given)
            if not self._guard.passes(slot):
                raise self._guard.fault(slot, self._n)


def _gather(column: Column, rows: npt.NDArray[np.int64], block: Block, name: str) -> Column:
    out = block.get(name)
    if out is None:
        out = block[name] = np.empty((len(rows), *column.shape[1:]), column.dtype)
    # The rows are right; with any other mode NumPy would write to a buffer first.
    return np.take(column, rows, axis=0, out=out, mode="clip")
