"""The env loop: a policy and an engine fill fragments, with no cluster in sight.

A fragment holds ``horizon`` consecutive rows of each of ``num_envs`` tracks, time-major. Every
row is a real step: where an engine spends a step on resetting, that step is left out, and the
true final observation of every episode is kept beside the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from clusterenv.envs import Engine, Slot
from clusterenv.errors import ConfigError
from clusterenv.policies.base import Context, Decision, Policy
from clusterenv.schema import Column, Layout

__all__ = ["EnvLoop", "Fragment", "Interrupted", "PolicyFault", "check_spaces"]

_ARENA = 6  # horizons of steps kept for engines that spend steps on resetting


@dataclass
class Fragment:
    """Columns of ``horizon × num_envs`` rows, and what belongs to them."""

    columns: dict[str, Column]
    tail_rows: npt.NDArray[np.int64]
    """Rows whose next observation is not the observation one time row below."""
    tail: dict[str, Column]
    """The true next observations of these rows, by observation column."""
    state: dict[str, Column]
    """Recurrent state at the first row of each track."""
    returns: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    dropped: int = 0
    """Rows that a fresh start left behind."""
    block: dict[str, Column] | None = None
    """Buffers behind the columns, for :meth:`EnvLoop.recycle`."""


class PolicyFault(Exception):
    """A policy returned something that cannot be used; the message says what and where."""


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
    seed
        Environment ``i`` of the whole gets ``seed + i``.
    """

    def __init__(
        self, engine: Engine, policy: Policy, first: int, horizon: int, seed: int | None
    ) -> None:
        about = engine.description
        check_spaces(about.observation_space, about.action_space)
        self.stop = False
        """Set by another thread to give up the fragment in hand."""
        self._engine = engine
        self._policy = policy
        self._horizon = horizon
        self._n = n = engine.num_envs
        self._obs = Layout(about.observation_space)
        self._obs_names = [leaf.name("obs") for leaf in self._obs.leaves]
        self._mask_leaf = next(
            (k for k, leaf in enumerate(self._obs.leaves) if leaf.path == ("action_mask",)), None
        )
        self._check_action = _ActionCheck(about.action_space, n)
        self._same_step = about.autoreset_mode is AutoresetMode.SAME_STEP
        self._envs = np.arange(first, first + n, dtype=np.int32)
        self._env_tensor = torch.from_numpy(self._envs.astype(np.int64))
        self._episode = np.zeros(n, np.int32)
        self._step = np.zeros(n, np.int32)
        self._return = np.zeros(n)
        self._length = np.zeros(n, np.int64)
        self._dead = np.zeros(n, np.bool_)
        self._mask: Column | None = None
        self._state = policy.initial_state(n)
        self._rows = horizon if self._same_step else _ARENA * horizon
        self._block: dict[str, Column] | None = None
        self._free: list[dict[str, Column]] = []
        self._now = 0
        self._live = np.zeros((self._rows, n), np.bool_)  # which recorded steps are rows
        self._versions = np.zeros(self._rows, np.int32)
        self._waiting = np.zeros(n, np.int64)  # live rows that are in no fragment yet
        self._since = np.zeros(n, np.int64)  # the step at which they begin
        self._returns: list[float] = []
        self._lengths: list[int] = []
        self._slot = Slot.empty(self._obs, n)
        seeds = [None] * n if seed is None else [seed + first + i for i in range(n)]
        self._note_mask(engine.reset(self._slot, seeds, None, None))

    def fragment(self, scalars: Mapping[str, float], version: int, fresh: bool = False) -> Fragment:
        """Step until a fragment is full, and return it.

        Parameters
        ----------
        scalars
            Passed to the policy.
        version
            The policy's version; every row remembers it.
        fresh
            Leave out rows that were recorded before this call (they are counted), so that
            the whole fragment is of this version.
        """
        with torch.inference_mode():
            if self._same_step:
                return self._lockstep(scalars, version)
            return self._tracks(scalars, version, fresh)

    def recycle(self, fragment: Fragment) -> None:
        """Take back the buffers of a fragment that nobody reads any more."""
        if fragment.block is not None and len(self._free) < 4:
            self._free.append(fragment.block)

    # Engines that reset in the same step: rows are written where they stay.

    def _lockstep(self, scalars: Mapping[str, float], version: int) -> Fragment:
        horizon, n = self._horizon, self._n
        block = self._free.pop() if self._free else {}
        # Observations have one time row more: what follows the last step.
        obs = [self._column(block, name, leaf, horizon + 1) for name, leaf in self._leaves()]
        for column, now in zip(obs, self._slot.obs, strict=True):
            column[0] = now
        obs_tensors = [torch.from_numpy(column) for column in obs]
        state = {name: tensor.numpy().copy() for name, tensor in self._state.items()}
        reward, terminated, truncated = self._flags(block, horizon)
        tail_rows: list[int] = []
        finals: list[Any] = []
        for t in range(horizon):
            current = self._obs.nest([tensor[t] for tensor in obs_tensors])
            action = self._act(current, scalars, block, t, horizon)
            slot = Slot([column[t + 1] for column in obs], reward[t], terminated[t], truncated[t])
            infos = self._engine.step([action], slot, None)
            if infos:
                self._note_mask(infos)
                if "final_obs" in infos:
                    at, values = infos["final_obs"]
                    tail_rows += (t * n + at).tolist()
                    finals += values
            self._account(reward[t], terminated[t] | truncated[t])
        self._slot = Slot([column[horizon] for column in obs], *self._slot[1:])
        last = np.flatnonzero(~(terminated[-1] | truncated[-1]))
        tail = self._obs.empty(len(finals))
        for row, value in enumerate(finals):
            self._obs.write(tail, row, value)
        rows = np.concatenate([np.array(tail_rows, np.int64), (horizon - 1) * n + last])
        columns = {
            name: column[:horizon].reshape(horizon * n, *column.shape[2:])
            for name, column in block.items()
        }
        tails = {
            name: np.concatenate([part, column[horizon][last]])
            for name, part, column in zip(self._obs_names, tail, obs, strict=True)
        }
        columns["env"] = np.tile(self._envs, horizon)
        columns["version"] = np.full(horizon * n, version, np.int32)
        fragment = self._sealed(columns, rows, tails, state)
        fragment.block = block
        return fragment

    # Engines that spend a step on resetting: record, then leave out the dead rows.

    def _tracks(self, scalars: Mapping[str, float], version: int, fresh: bool) -> Fragment:
        horizon, n, ring = self._horizon, self._n, self._rows
        block = self._block = self._block if self._block is not None else {}
        obs = [self._column(block, name, leaf, ring) for name, leaf in self._leaves()]
        if self._now == 0:
            for column, now in zip(obs, self._slot.obs, strict=True):
                column[0] = now
        reward, terminated, truncated = self._flags(block, ring)
        dropped = self._forget() if fresh else 0
        obs_tensors = [torch.from_numpy(column) for column in obs]
        while not self._enough(fresh):
            t, after = self._now % ring, (self._now + 1) % ring
            current = self._obs.nest([tensor[t] for tensor in obs_tensors])
            action = self._act(current, scalars, block, t, ring)
            slot = Slot([column[after] for column in obs], reward[t], terminated[t], truncated[t])
            self._note_mask(self._engine.step([action], slot, None))
            live = ~self._dead
            self._live[t] = live
            self._versions[t] = version
            self._waiting += live
            ended = (terminated[t] | truncated[t]) & live
            self._account(reward[t], ended, live)
            self._begin(self._dead)  # what acted in a dead step has not happened
            self._dead = ended
            self._now += 1
        times, envs = self._take_tracks()
        if fresh:
            dropped += self._forget()
        at = times % ring
        columns = {
            name: column[at, envs].reshape(horizon * n, *column.shape[2:])
            for name, column in block.items()
            if not name.startswith("state.")
        }
        columns["env"] = np.tile(self._envs[envs], horizon)
        columns["version"] = self._versions[at].reshape(-1)
        over = (columns["terminated"] | columns["truncated"]).reshape(horizon, n)
        over[-1] = True
        rows = np.flatnonzero(over)
        following = (times.reshape(-1)[rows] + 1) % ring
        which = np.broadcast_to(envs, times.shape).reshape(-1)[rows]
        tails = {
            name: column[following, which]
            for name, column in zip(self._obs_names, obs, strict=True)
        }
        state = {
            name.removeprefix("state."): column[at[0], envs]
            for name, column in block.items()
            if name.startswith("state.")
        }
        return self._sealed(columns, rows, tails, state, dropped)

    def _enough(self, fresh: bool) -> bool:
        tracks = self._waiting // self._horizon
        return bool(tracks.min() >= 1) if fresh else bool(tracks.sum() >= self._n)

    def _forget(self) -> int:
        dropped = int(self._waiting.sum())
        self._waiting[:] = 0
        self._since[:] = self._now
        return dropped

    def _take_tracks(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Choose the tracks that began first; return their steps [horizon, n] and envs [n].

        An environment with few resets gives more tracks than one with many, so no
        environment runs ahead of the others and nothing has to be thrown away.
        """
        horizon = self._horizon
        tracks = []
        for env in np.flatnonzero(self._waiting >= horizon).tolist():
            steps = np.arange(self._since[env], self._now)
            rows = steps[self._live[steps % self._rows, env]]
            parts = range(0, len(rows) - horizon + 1, horizon)
            tracks += [(int(rows[k]), env, rows[k : k + horizon]) for k in parts]
        tracks.sort(key=lambda track: track[:2])
        chosen = sorted(tracks[: self._n], key=lambda track: (track[1], track[0]))
        for _, env, rows in chosen:
            self._waiting[env] -= horizon
            self._since[env] = rows[-1] + 1
        times = np.stack([rows for _, _, rows in chosen], axis=1)
        return times, np.array([env for _, env, _ in chosen])

    # What both share

    def _act(
        self,
        obs: Any,
        scalars: Mapping[str, float],
        block: dict[str, Column],
        t: int,
        rows: int,
    ) -> Column:
        if self.stop:
            raise Interrupted
        mask = self._current_mask(obs)
        if not self._same_step:
            for name, tensor in self._state.items():
                _room(block, f"state.{name}", tensor.numpy(), rows)[t] = tensor.numpy()
        context = Context(self._env_tensor, scalars, self._state, mask)
        try:
            decision: Decision = self._policy.act(obs, context)
        except Exception as error:
            raise PolicyFault(
                f"the policy raised {type(error).__name__} on environments "
                f"{self._envs[0]}–{self._envs[-1]} at step {int(self._length.max())}: {error}"
            ) from error
        action = self._check_action(decision.action, mask, self._where)
        for name, tensor in decision.extras.items():
            values = tensor.numpy()
            if values.shape[:1] != (self._n,):
                raise PolicyFault(
                    f"the policy's {name!r} has shape {values.shape}; expected a row for each of "
                    f"the {self._n} environments"
                )
            _room(block, name, values, rows)[t] = values
        if self._mask is not None and mask is not None:
            _room(block, "action_mask", self._mask, rows)[t] = self._mask
        _room(block, "action", action, rows)[t] = action
        _room(block, "episode", self._episode, rows)[t] = self._episode
        _room(block, "step", self._step, rows)[t] = self._step
        if decision.state:
            self._state = {name: tensor.clone() for name, tensor in decision.state.items()}
        return action

    def _account(
        self,
        reward: Column,
        ended: npt.NDArray[np.bool_],
        live: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        if live is None:
            self._return += reward
            self._length += 1
            self._step += 1
        else:
            self._return[live] += reward[live]
            self._length += live
            self._step += live
        if ended.any():
            at = np.flatnonzero(ended)
            self._returns += self._return[at].tolist()
            self._lengths += self._length[at].tolist()
            self._return[at] = self._length[at] = self._step[at] = 0
            self._episode[at] += 1
            self._begin(ended)

    def _begin(self, which: npt.NDArray[np.bool_]) -> None:
        """Give environments that begin an episode their initial recurrent state."""
        if self._state and which.any():
            at = torch.from_numpy(np.flatnonzero(which))
            for name, tensor in self._policy.initial_state(len(at)).items():
                self._state[name][at] = tensor

    def _sealed(
        self,
        columns: dict[str, Column],
        rows: npt.NDArray[np.int64],
        tail: dict[str, Column],
        state: dict[str, Column],
        dropped: int = 0,
    ) -> Fragment:
        if "log_prob" in columns:
            bad = np.flatnonzero(~np.isfinite(columns["log_prob"]))
            if len(bad):
                raise PolicyFault(
                    f"the policy's log_prob is {columns['log_prob'][bad[0]]} for environment "
                    f"{columns['env'][bad[0]]} at step {columns['step'][bad[0]]} of its episode"
                )
        fragment = Fragment(columns, rows, tail, state, self._returns, self._lengths, dropped)
        self._returns, self._lengths = [], []
        return fragment

    def _note_mask(self, infos: Any) -> None:
        if not infos or "action_mask" not in infos:
            return
        given = infos["action_mask"]
        at, values = given if isinstance(given, tuple) else (slice(None), given)
        if self._mask is None:
            self._mask = np.ones((self._n, *np.shape(values)[1:]), np.bool_)
        self._mask[at] = values

    def _current_mask(self, obs: Any) -> Tensor | None:
        if self._mask_leaf is not None:
            mask: Tensor = obs["action_mask"]
            return mask.to(torch.bool)
        return None if self._mask is None else torch.from_numpy(self._mask)

    def _where(self, row: int) -> str:
        return f"environment {self._envs[row]} at step {self._step[row]} of its episode"

    def _leaves(self) -> Sequence[tuple[str, Any]]:
        return list(zip(self._obs_names, self._obs.leaves, strict=True))

    def _column(self, block: dict[str, Column], name: str, leaf: Any, rows: int) -> Column:
        if name not in block:
            block[name] = np.empty((rows, self._n, *leaf.shape), leaf.dtype)
        return block[name]

    def _flags(self, block: dict[str, Column], rows: int) -> tuple[Column, Column, Column]:
        kinds = (("reward", np.float32), ("terminated", np.bool_), ("truncated", np.bool_))
        for name, dtype in kinds:
            if name not in block:
                block[name] = np.empty((rows, self._n), dtype)
        return block["reward"], block["terminated"], block["truncated"]


class _ActionCheck:
    """Turns a policy's actions into what the engine takes, or says what is wrong with them."""

    def __init__(self, space: spaces.Space[Any], n: int) -> None:
        self._space = space
        (leaf,) = Layout(space).leaves
        self._dtype = leaf.dtype
        self._shape = (n, *leaf.shape)
        self._low: Any = None
        self._high: Any = None
        if isinstance(space, spaces.Discrete):
            self._low, self._high = int(space.start), int(space.start + space.n - 1)
        elif isinstance(space, spaces.Box):
            self._low, self._high = space.low, space.high
        elif isinstance(space, spaces.MultiDiscrete):
            self._low, self._high = space.start, space.start + space.nvec - 1

    def __call__(self, action: Any, mask: Tensor | None, where: Any) -> Column:
        if not isinstance(action, Tensor):
            raise PolicyFault(f"act() must return a tensor of actions, got {type(action).__name__}")
        array = action.numpy()
        if array.shape != self._shape:
            raise PolicyFault(
                f"the policy's actions have shape {array.shape}, expected {self._shape}: "
                f"one of {self._space} for each environment"
            )
        if self._dtype.kind != "f" and array.dtype.kind == "f":
            raise PolicyFault(
                f"the policy's actions are of dtype {array.dtype}, but {self._space} needs integers"
            )
        array = array.astype(self._dtype, copy=False)
        if self._low is not None:
            wrong = ~((array >= self._low) & (array <= self._high))  # NaN is wrong too
            if wrong.any():
                row = int(np.argwhere(wrong)[0][0])
                raise PolicyFault(
                    f"the policy chose {array[row]} for {where(row)}, outside {self._space}"
                )
        if mask is not None:
            row_of = torch.arange(len(array))
            start = self._low if isinstance(self._low, int) else 0
            allowed = mask[row_of, torch.from_numpy(array - start)].numpy()
            if not allowed.all():
                row = int(np.flatnonzero(~allowed)[0])
                raise PolicyFault(
                    f"the policy chose action {array[row]} for {where(row)}, which its mask forbids"
                )
        return array


def _room(block: dict[str, Column], name: str, values: Column, rows: int) -> Column:
    column = block.get(name)
    if column is None:
        column = block[name] = np.empty((rows, *values.shape), values.dtype)
    return column
