"""Builds fragments from engines that spend a step on resetting.

Steps are recorded in a ring; one gather per column leaves out those that only reset.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Column
from clusterenv.simulation.decisions import PolicyFault
from clusterenv.simulation.engines.base import EnvRaised, Slot
from clusterenv.simulation.episodes import (
    EpisodeTracker,
    TrackedSteps,
    choose_tracks,
    live_steps,
    steps_until_enough,
)
from clusterenv.simulation.fragment_builder import (
    STEP_COLUMNS,
    Block,
    BuilderInputs,
    FragmentBuilder,
    column_of,
)

__all__ = ["NextStepBuilder", "StepRing"]

RING_HORIZONS = 6
"""Length of the ring, in horizons: in the worst case every second step only resets."""

Ints = npt.NDArray[np.int64]


class Tracks(NamedTuple):
    """The recorded steps that become a fragment's rows."""

    at: Ints
    """Each row's time row in the ring, ``[horizon, n]``."""
    envs: Ints
    """The environment of each track, from 0."""
    flat: Ints
    """Each row's index into the ring's flattened columns."""


class StepRing:
    """Recorded steps, and which of them are real and in no fragment yet.

    The tracker counts the steps that are dropped, too: their episodes continue.
    """

    def __init__(self, n: int, horizon: int, tracker: EpisodeTracker) -> None:
        self.rows = RING_HORIZONS * horizon
        self.columns: dict[str, Column] = {}
        self.versions = np.zeros(self.rows, np.int32)
        self._n = n
        self._horizon = horizon
        self._tracker = tracker
        self.now = 0
        """Steps recorded so far."""
        self._dead = np.zeros(n, np.bool_)
        self._live = np.zeros((self.rows, n), np.bool_)
        self._waiting = np.zeros(n, np.int64)  # real steps that are in no fragment yet
        self._since = np.zeros(n, np.int64)  # the first step that may be in the next fragment

    @property
    def waiting_rows(self) -> int:
        """Real steps that are in no fragment."""
        return int(self._waiting.sum())

    def spans(self, all_envs: bool) -> Iterator[range]:
        """Yield consecutive time rows for the caller to fill, until a fragment is full."""
        while steps := steps_until_enough(self._waiting, self._horizon, all_envs):
            start = self.now % self.rows
            stop = min(start + steps, self.rows)
            yield range(start, stop)
            over = self.columns["terminated"][start:stop] | self.columns["truncated"][start:stop]
            live = self._live[start:stop] = live_steps(over, self._dead)
            self._dead = over[-1] & live[-1]
            self._waiting += np.count_nonzero(live, axis=0)
            self.now += stop - start

    def take(self) -> Tracks:
        """Choose the steps of a fragment and mark them as used."""
        window, waiting = self._window()
        times, envs = choose_tracks(waiting, self._horizon)
        self._waiting -= self._horizon * np.bincount(envs, minlength=self._n)
        self._since[envs] = window + times[-1] + 1  # the last of an environment's tracks wins
        times += window % self.rows
        np.subtract(times, self.rows, out=times, where=times >= self.rows)  # faster than modulo
        return Tracks(times, envs, (times * self._n + envs).reshape(-1))

    def versions_of(self, tracks: Tracks) -> Column:
        """Return the policy version of each row."""
        newest = self.versions[(self.now - 1) % self.rows]
        if (self.versions == newest).all():  # much faster than gathering, and nearly always so
            return np.full(tracks.at.size, newest, np.int32)
        return self.versions[tracks.at].reshape(-1)

    def drop(self) -> TrackedSteps:
        """Drop all steps that are in no fragment, and return them."""
        window, waiting = self._window()
        env, time = np.nonzero(waiting.T)
        at = (window + time) % self.rows
        envs, counts = np.unique(env, return_counts=True)
        reward, terminated, truncated = (self.columns[name][at, env] for name in STEP_COLUMNS)
        self._waiting[:] = 0
        self._since[:] = self.now
        return self._tracker.advance(envs, counts, reward, terminated | truncated)

    def _window(self) -> tuple[int, npt.NDArray[np.bool_]]:
        """Return the first step that may be unused, and which steps since then are."""
        first = int(self._since.min())
        times = np.arange(first, self.now)
        return first, self._live[times % self.rows] & (times[:, None] >= self._since)


class NextStepBuilder(FragmentBuilder):
    """Gathers fragments from a ring of recorded steps."""

    def __init__(self, inputs: BuilderInputs) -> None:
        super().__init__(inputs, RING_HORIZONS)
        self._ring = StepRing(self._n, self._horizon, self._tracker)
        self._finished = np.zeros(self._n, np.bool_)  # whose next step only resets
        self._obs = self._prepare(self._ring.columns)
        for column, initial in zip(self._obs, inputs.obs, strict=True):
            column[0] = initial
        self._steps = list(self._time_rows(self._ring.columns, self._obs))

    @property
    def waiting_rows(self) -> int:
        return self._ring.waiting_rows

    def fragment(self, block: Block, fresh: bool) -> Fragment:
        ring, horizon, n = self._ring, self._horizon, self._n
        dropped = [ring.drop()] if fresh else []
        for span in ring.spans(all_envs=fresh):
            t = span.start
            ring.versions[t : span.stop] = self._runner.acting.version
            try:
                for t, current, slot in self._steps[span.start : span.stop]:
                    self._step(t, current, slot)
            except (PolicyFault, EnvRaised):
                self._check_spaces(range(span.start, t))  # an earlier fault is the cause
                raise
            self._check_spaces(span)
            if span.stop == ring.rows:  # the next step is written to the ring's first time row
                for column in self._obs:
                    column[0] = column[-1]
        tracks = ring.take()
        flat = {k: column.reshape(-1, *column.shape[2:]) for k, column in ring.columns.items()}
        columns = {
            name: _gather(column, tracks.flat, block, name)
            for name, column in flat.items()
            if not name.startswith("state.")
        }
        over = (columns["terminated"] | columns["truncated"]).reshape(horizon, n)
        reward = columns["reward"].reshape(horizon, n)
        tracked = self._tracker.advance_block(tracks.envs, reward, over)
        ended = [*dropped, tracked]
        if fresh:  # only now: these steps came after the tracks
            dropped.append(ring.drop())
            ended.append(dropped[-1])
        columns["episode"], columns["step"] = tracked.episode, tracked.step
        columns["env"] = np.tile(self._runner.envs[tracks.envs], horizon)
        columns["version"] = ring.versions_of(tracks)
        over[-1] = True
        rows = np.flatnonzero(over)
        tails = {name: flat[name][tracks.flat[rows] + n] for name in self._obs_names}
        state = {
            name.removeprefix("state."): column[tracks.at[0], tracks.envs]
            for name, column in ring.columns.items()
            if name.startswith("state.")
        }
        return Fragment(
            columns,
            n,
            rows,
            tails,
            state,
            [value for each in ended for value in each.returns],
            [length for each in ended for length in each.lengths],
            sum(len(each.step) for each in dropped),
            block=block,
        )

    def _step(self, t: int, current: list[Tensor], slot: Slot) -> None:
        """Make one step, and record it in time row ``t``."""
        ring, runner, finished = self._ring, self._runner, self._finished
        for name, tensor in runner.state.items():
            values = tensor.numpy()
            column_of(ring.columns, f"state.{name}", values, ring.rows)[t] = values
        action = self._act(current, ring.columns, t, finished)
        if self.between is not None or runner.follows_choices:
            ring.versions[t] = runner.acting.version
        infos: Any = self._engine.step([action], slot, None)
        self._info_mask.update(infos, began=finished)
        if runner.state or runner.masks_in_obs or self._info_mask.value is not None:
            # The state after a step that only reset an environment is dropped.
            ended = (slot.terminated | slot.truncated) & ~finished
            runner.take_rewards(slot.reward)
            runner.reset_state(finished | ended)
            self._finished = ended

    def _check_spaces(self, span: range) -> None:
        """Raise if an environment left its space in these time rows.

        Checking many steps at once takes a hundredth of the time of checking each.
        """
        check, record = self._space_check, self._ring.columns
        if check is None or not span:
            return
        steps = 1 if check.bounded else len(span)
        for start in span[::steps]:
            end = start + steps
            obs = [record[name][start + 1 : end + 1] for name in self._obs_names]
            given = [record[name][start:end] for name in STEP_COLUMNS]
            obs, given = ([c.reshape(-1, *c.shape[2:]) for c in part] for part in (obs, given))
            slot = Slot(obs, *given)
            if not check.passes(slot):
                raise check.fault(slot, self._n)


def _gather(column: Column, rows: npt.NDArray[np.int64], block: Block, name: str) -> Column:
    out = block.get(name)
    if out is None:
        out = block[name] = np.empty((len(rows), *column.shape[1:]), column.dtype)
    # With mode="raise" NumPy would gather into a buffer first.
    return np.take(column, rows, axis=0, out=out, mode="clip")
