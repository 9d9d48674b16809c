"""The env loop: a policy and an engine fill fragments, with no cluster in sight.

A fragment holds ``horizon`` consecutive rows of each of ``num_envs`` tracks, time-major. Every
row is a real step: where an engine spends a step on resetting, that step is left out, and the
true final observation of every episode is kept beside the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from clusterenv.actions import (
    ActionCheck,
    InfoMask,
    PolicyFault,
    annotate,
    check_log_prob,
    opened,
)
from clusterenv.envs import Engine, EnvRaised, Slot
from clusterenv.envs.loop import LoopEngine
from clusterenv.errors import ConfigError
from clusterenv.fragment import Fragment
from clusterenv.guard import Guard
from clusterenv.infos import pack
from clusterenv.ledger import Ledger
from clusterenv.mending import Mender
from clusterenv.policies.base import Context, Decision, Policy
from clusterenv.recorder import Recorder
from clusterenv.schema import Column, Layout
from clusterenv.supervision import EnvFaults

__all__ = ["Acting", "EnvLoop", "Interrupted", "check_spaces"]


class Acting(NamedTuple):
    """With what a policy acts: its version, and the scalars of the newest announcement."""

    version: int
    scalars: Mapping[str, float]


class _Place(NamedTuple):
    """Where in a fragment a step stands."""

    t: int
    block: dict[str, Column]
    state: dict[str, Column]
    finals: dict[int, Any]


_GIVEN = ("reward", "terminated", "truncated")


class Interrupted(Exception):
    """The fragment in hand was given up because somebody set ``stop``."""


def check_spaces(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
    """Raise unless trajectories of these spaces have a tensor form."""
    for leaf in Layout(observation_space).leaves:
        if not leaf.is_array:
            raise ConfigError(
                f"{leaf.name('obs')} has no tensor form; leave it out with a wrapper: "
                "wrappers=(lambda env: FilterObservation(env, ['image']),)"
            )
    if isinstance(action_space, (spaces.Dict, spaces.Tuple)) or not Layout(action_space).arrays:
        raise ConfigError(
            f"a policy acts in one array, but the action space is {action_space}; flatten it with "
            "a wrapper such as gymnasium.wrappers.TransformAction"
        )


class EnvLoop:
    """Fills fragments.

    Parameters
    ----------
    engine
        The environments. If it resets in the same step, observations are written straight
        into the fragment; otherwise steps are recorded first and the dead ones left out.
    policy
        Acts on all environments at once.
    first
        Global index of the first environment.
    horizon
        Time rows of a fragment.
    seeds
        One per environment.
    faults
        What becomes of environments that fail. Engines that cannot rebuild a single one
        raise; so does every engine if nothing is given.
    """

    def __init__(
        self,
        engine: Engine,
        policy: Policy,
        first: int,
        horizon: int,
        seeds: Sequence[int | None],
        faults: EnvFaults | None = None,
    ) -> None:
        about = engine.description
        check_spaces(about.observation_space, about.action_space)
        self.stop = False
        """Set by another thread to give up the fragment in hand."""
        self.steps = 0
        """Steps of all environments so far; tells whoever asks that they move."""
        self._engine = engine
        self._policy = policy
        self._horizon = horizon
        self._n = n = engine.num_envs
        self._obs = Layout(about.observation_space)
        self._obs_names = [leaf.name("obs") for leaf in self._obs.leaves]
        self._masks_in_obs = ("action_mask",) in [leaf.path for leaf in self._obs.leaves]
        self._check_action = ActionCheck(about.action_space, n)
        self._envs = np.arange(first, first + n, dtype=np.int32)
        self._env_tensor = torch.from_numpy(self._envs.astype(np.int64))
        self._ledger = Ledger.begin(n)
        self._mask = InfoMask(n)
        self._state = policy.initial_state(n)
        self._context = Context(self._env_tensor)
        self._free: list[dict[str, Column]] = []
        same_step = about.autoreset_mode is AutoresetMode.SAME_STEP
        self._recorder = None if same_step else Recorder(n, horizon, self._ledger)
        self._ring: list[tuple[int, Sequence[Tensor], Slot]] = []  # views of the recorder's rows
        self._dead = np.zeros(n, np.bool_)  # kept for recurrent policies and masks
        self._annotates = type(policy).annotate is not Policy.annotate
        self._guard = None if faults is None else Guard(about.observation_space, faults.bounds)
        self._mender: Mender | None = None
        if isinstance(engine, LoopEngine) and faults is not None:
            self._mender = Mender(engine, faults, first, seeds)
            engine.check_final = self._check_final
        if self._check_action.is_complete:
            engine.trust_actions()
        slot = Slot.empty(self._obs, n)
        self._mask.note(engine.reset(slot, list(seeds), None, None))
        self._obs_now = slot.obs

    def fragment(
        self, acting: Acting, fresh: bool = False, between: Callable[[], Acting] | None = None
    ) -> Fragment:
        """Step until a fragment is full, and return it.

        Parameters
        ----------
        acting
            With what the policy acts; every row remembers the version.
        fresh
            Leave out rows that were recorded before this call (they are counted), so that
            the whole fragment is of this version.
        between
            Called before every step; with what it returns the policy acts from there on.
        """
        self._acting, self._between = acting, between
        self._context = Context(self._env_tensor, acting.scalars, self._state)
        with torch.inference_mode():
            fragment = (
                self._in_place()
                if self._recorder is None
                else self._recorded(self._recorder, fresh)
            )
            check_log_prob(fragment.columns)
            if self._annotates:
                annotate(fragment, self._policy)
        return fragment

    @property
    def waiting_rows(self) -> int:
        """Rows that were recorded and are in no fragment."""
        return 0 if self._recorder is None else self._recorder.waiting_rows

    def recycle(self, fragment: Fragment) -> None:
        """Take back the buffers of a fragment that nobody reads any more."""
        if fragment.block is not None and len(self._free) < 4:
            self._free.append(fragment.block)

    # Engines that reset in the same step: rows are written where they stay.

    def _in_place(self) -> Fragment:
        horizon, n = self._horizon, self._n
        block = self._free.pop() if self._free else {}
        obs = self._prepare(block, horizon)
        for column, now in zip(obs, self._obs_now, strict=True):
            column[0] = now
        state = {name: tensor.numpy().copy() for name, tensor in self._state.items()}
        terminated, truncated = block["terminated"], block["truncated"]
        versions = np.empty(horizon, np.int32)
        finals: dict[int, Any] = {}  # by row
        steps = range(horizon)
        for t, current, slot in self._steps(block, obs, steps):
            action = self._act(self._obs.nest(current), block, t, horizon)
            versions[t] = self._acting.version
            try:
                infos = self._engine.step([action], slot, None)
            except EnvRaised as fault:
                if self._mender is None:
                    raise
                self._mend(self._mender, fault, action, slot, _Place(t, block, state, finals))
            else:
                if infos:
                    self._note(infos, t, None, finals)
                if self._guard is not None and not self._guard.passes(slot):
                    if self._mender is None:
                        raise self._broken(self._guard, slot)
                    self._mend(self._mender, None, action, slot, _Place(t, block, state, finals))
            if self._state:
                self._begin(terminated[t] | truncated[t])
        self._obs_now = [column[horizon] for column in obs]
        ended = terminated | truncated
        book = self._ledger.post_block(np.arange(n), block["reward"], ended)
        last = np.flatnonzero(~ended[-1])
        tail = self._obs.empty(len(finals))
        for row, value in enumerate(finals.values()):
            self._obs.write(tail, row, value)
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

    def _note(self, infos: Any, t: int, rows: Sequence[int] | None, finals: dict[int, Any]) -> None:
        """Take from the infos of a step, of ``rows`` or of all, what belongs to the fragment."""
        self._mask.note(infos, rows)
        if "final_obs" in infos:
            at, values = infos["final_obs"]
            where = at if rows is None else np.asarray(rows)[at]
            finals.update(zip((t * self._n + where).tolist(), values, strict=True))

    # Environments that fail: one is rebuilt, the others go on.

    def _mend(
        self, mender: Mender, fault: EnvRaised | None, action: Column, slot: Slot, place: _Place
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
                self._note(pack(fault.infos), t, None, place.finals)
            row, rows = fault.env, fault.left
            if fault.doing == "reset":
                info = mender.rebuild(fault, action[row], slot.obs, t)
                self._mask.note(pack([(row, info)]) if info else None)
            else:
                place.finals.pop(t * self._n + row, None)
                at = self._cut(row, place)
                now = [place.block[name][t] for name in self._obs_names]
                info = mender.rebuild(fault, action[row], now, at)
                self._mask.note(pack([(row, info)]) if info else None)
                action[row] = self._act_again(row, now, place)
                rows = [row, *rows]
            fault = None
            if rows:
                try:
                    infos = self._engine.step([action[rows]], slot, rows)
                    if infos:
                        self._note(infos, t, rows, place.finals)
                except EnvRaised as another:
                    fault = another

    def _cut(self, row: int, place: _Place) -> int:
        """End the episode of an environment with its last good step; return when that was."""
        t, block = place.t, place.block
        if t == 0:
            self._ledger.cut(row)
            return -1
        if block["terminated"][t - 1, row] or block["truncated"][t - 1, row]:
            return -1  # it had no step
        block["truncated"][t - 1, row] = True
        final = [block[name][t, row].copy() for name in self._obs_names]
        place.finals[(t - 1) * self._n + row] = self._obs.nest(final)
        return t - 1

    def _act_again(self, row: int, now: list[Column], place: _Place) -> Any:
        """Choose an action for an environment that begins anew, and write it over the old one."""
        t, block = place.t, place.block
        before = self._state
        if before:
            self._state = {name: tensor.clone() for name, tensor in before.items()}
            begins = np.zeros(self._n, np.bool_)
            begins[row] = True
            self._begin(begins)
            if t == 0:
                for name, held in place.state.items():
                    held[row] = self._state[name][row].numpy()
            self._context = replace(self._context, state=self._state)
        obs = self._obs.nest([torch.from_numpy(column) for column in now])
        kept = {name: column[t].copy() for name, column in block.items() if name not in _GIVEN}
        between, self._between = self._between, None  # one version for all of this step
        action = self._act(obs, block, t, self._horizon)
        self._between = between
        for name, column in kept.items():
            if name not in self._obs_names:
                column[row] = block[name][t, row]
                block[name][t] = column
        if before:
            for name, tensor in before.items():
                tensor[row] = self._state[name][row]
            self._state = before
            self._context = replace(self._context, state=before)
        return action[row]

    def _check_final(self, value: Any) -> None:
        if self._guard is not None:
            columns = self._obs.empty(1)
            self._obs.write(columns, 0, value)
            self._guard.check_value(columns)

    def _broken(self, guard: Guard, slot: Slot) -> EnvRaised:
        found = guard.faults(slot)
        first = min(found)  # one time row after the other
        fault = EnvRaised(first % self._n, "step")
        fault.__cause__ = found[first]
        return fault

    # Engines that spend a step on resetting: record, then leave out the dead rows.

    def _recorded(self, recorder: Recorder, fresh: bool) -> Fragment:
        horizon, n, record = self._horizon, self._n, recorder.columns
        obs = self._prepare(record, recorder.rows)
        if not self._ring:
            for column, initial in zip(obs, self._obs_now, strict=True):
                column[0] = initial
            self._ring = list(self._steps(record, obs, range(recorder.rows)))
        left = [recorder.forget()] if fresh else []
        for span in recorder.spans(all_envs=fresh):
            t = span.start
            try:
                for t, current, slot in self._ring[span.start : span.stop]:
                    self._record(recorder, t, current, slot)
            except (PolicyFault, EnvRaised):
                self._check_given(record, range(span.start, t))  # what came first?
                raise
            self._check_given(record, span)
            if span.stop == recorder.rows:  # the ring begins anew
                for column in obs:
                    column[0] = column[-1]
        tracks = recorder.take()
        if fresh:
            left.append(recorder.forget())
        block = self._free.pop() if self._free else {}
        flat = {name: column.reshape(-1, *column.shape[2:]) for name, column in record.items()}
        columns = {
            name: _gather(column, tracks.flat, block, name)
            for name, column in flat.items()
            if not name.startswith("state.")
        }
        over = (columns["terminated"] | columns["truncated"]).reshape(horizon, n)
        book = self._ledger.post_block(tracks.envs, columns["reward"].reshape(horizon, n), over)
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
        books = [*left, book]
        return Fragment(
            columns,
            n,
            rows,
            tails,
            state,
            [value for each in books for value in each.returns],
            [length for each in books for length in each.lengths],
            sum(len(each.step) for each in left),
            block=block,
        )

    def _record(self, recorder: Recorder, t: int, current: Sequence[Tensor], slot: Slot) -> None:
        """Make one step, and record it in time row ``t``."""
        for name, held in self._state.items():
            values = held.numpy()
            _room(recorder.columns, f"state.{name}", values, recorder.rows)[t] = values
        action = self._act(self._obs.nest(current), recorder.columns, t, recorder.rows)
        recorder.versions[t] = self._acting.version
        infos = self._engine.step([action], slot, None)
        if infos:
            self._mask.note(infos)
        if self._state or self._masked:  # what acted in a dead step has not happened
            ended = (slot.terminated | slot.truncated) & ~self._dead
            self._begin(self._dead | ended)
            self._dead = ended

    def _check_given(self, record: dict[str, Column], span: range) -> None:
        """Raise if an environment broke its space in these time rows.

        One look at many steps takes a hundredth of the time of a look at each.
        """
        if self._guard is None or not span:
            return
        steps = 1 if self._guard.bounded else len(span)
        for start in span[::steps]:
            end = start + steps
            obs = [record[name][start + 1 : end + 1] for name in self._obs_names]
            given = [record[name][start:end] for name in _GIVEN]
            obs, given = ([c.reshape(-1, *c.shape[2:]) for c in part] for part in (obs, given))
            slot = Slot(obs, *given)
            if not self._guard.passes(slot):
                raise self._broken(self._guard, slot)

    # What both share

    def _steps(
        self, block: dict[str, Column], obs: list[Column], span: range
    ) -> Iterator[tuple[int, Sequence[Tensor], Slot]]:
        """Yield time rows, the observations to act on and where the step's result goes."""
        here, after = slice(span.start, span.stop), slice(span.start + 1, span.stop + 1)
        tensors = zip(*(torch.from_numpy(column[here]).unbind(0) for column in obs), strict=True)
        following = zip(*(column[after] for column in obs), strict=True)
        flags = (block[name][here] for name in ("reward", "terminated", "truncated"))
        for t, current, beyond, *flag in zip(span, tensors, following, *flags, strict=True):
            yield t, current, Slot(list(beyond), *flag)

    def _prepare(self, block: dict[str, Column], rows: int) -> list[Column]:
        """Make sure of the columns that the spaces ask for; return those of the observations.

        Observations have one time row more: what follows the last step.
        """
        if "reward" not in block:
            for name, leaf in zip(self._obs_names, self._obs.leaves, strict=True):
                block[name] = np.empty((rows + 1, self._n, *leaf.shape), leaf.dtype)
            block["reward"] = np.empty((rows, self._n), np.float32)
            block["terminated"] = np.empty((rows, self._n), np.bool_)
            block["truncated"] = np.empty((rows, self._n), np.bool_)
        return [block[name] for name in self._obs_names]

    def _act(self, obs: Any, block: dict[str, Column], t: int, rows: int) -> Column:
        """Ask the policy, check its answer, and write it into time row ``t``."""
        if self.stop:
            raise Interrupted
        self.steps += 1
        if self._between is not None:
            self._switch(self._between())
        context, mask = self._context, None
        if self._masked:
            mask = self._current_mask(obs)
            context = replace(context, mask=mask)
        try:
            decision: Decision = self._policy.act(obs, context)
        except Exception as error:
            raise PolicyFault(
                f"the policy raised {type(error).__name__} on environments "
                f"{self._envs[0]}–{self._envs[-1]} at time row {t}: {error}"
            ) from error

        def where(row: int) -> str:
            return f"environment {self._envs[row]} at step {self._step_of(row, block, t)}"

        action = self._check_action(decision.action, mask, where)
        _room(block, "action", action, rows)[t] = action
        for name, tensor in decision.extras.items():
            values = tensor.numpy()
            if values.shape[:1] != (self._n,):
                raise PolicyFault(
                    f"the policy's {name!r} has shape {values.shape}; expected a row for each of "
                    f"the {self._n} environments"
                )
            _room(block, name, values, rows)[t] = values
        if self._mask.value is not None:
            _room(block, "action_mask", self._mask.value, rows)[t] = self._mask.value
        if decision.state:
            self._state = {name: tensor.clone() for name, tensor in decision.state.items()}
            self._context = replace(self._context, state=self._state)
        return action

    def _switch(self, acting: Acting) -> None:
        if acting.scalars is not self._acting.scalars:
            self._context = replace(self._context, scalars=acting.scalars)
        self._acting = acting

    def _step_of(self, row: int, block: dict[str, Column], t: int) -> str:
        if self._recorder is not None:
            return f"{self._recorder.now} of the shard"
        ended = np.flatnonzero(block["terminated"][:t, row] | block["truncated"][:t, row])
        steps = t - ended[-1] - 1 if len(ended) else t + self._ledger.step[row]
        return f"{steps} of its episode"

    def _begin(self, which: npt.NDArray[np.bool_]) -> None:
        """Give environments that begin an episode their initial recurrent state."""
        if which.any():
            at = torch.from_numpy(np.flatnonzero(which))
            for name, tensor in self._policy.initial_state(len(at)).items():
                self._state[name][at] = tensor

    @property
    def _masked(self) -> bool:
        return self._masks_in_obs or self._mask.value is not None

    def _current_mask(self, obs: Any) -> Tensor:
        if self._mask.value is not None:
            return opened(torch.from_numpy(self._mask.value), self._dead)
        mask: Tensor = obs["action_mask"]
        return opened(mask.to(torch.bool), self._dead)


def _gather(
    column: Column, rows: npt.NDArray[np.int64], block: dict[str, Column], name: str
) -> Column:
    out = block.get(name)
    if out is None:
        out = block[name] = np.empty((len(rows), *column.shape[1:]), column.dtype)
    # The rows are right; with any other mode NumPy would write to a buffer first.
    return np.take(column, rows, axis=0, out=out, mode="clip")


def _room(block: dict[str, Column], name: str, values: Column, rows: int) -> Column:
    column = block.get(name)
    if column is None:
        column = block[name] = np.empty((rows, *values.shape), values.dtype)
    return column
