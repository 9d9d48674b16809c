"""The env loop: a policy and an engine fill fragments, with no cluster in sight.

A fragment holds ``horizon`` consecutive rows of each of ``num_envs`` tracks, time-major. Every
row is a real step: where an engine spends a step on resetting, that step is left out, and the
true final observation of every episode is kept beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from clusterenv.actions import ActionCheck, PolicyFault
from clusterenv.envs import Engine, Slot
from clusterenv.errors import ConfigError
from clusterenv.ledger import Book, Ledger, choose_tracks, steps_until_enough
from clusterenv.policies.base import Context, Decision, Policy
from clusterenv.schema import Column, Layout

__all__ = ["EnvLoop", "Fragment", "Interrupted", "check_spaces"]

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
        self._masks_in_obs = ("action_mask",) in [leaf.path for leaf in self._obs.leaves]
        self._check_action = ActionCheck(about.action_space, n)
        self._same_step = about.autoreset_mode is AutoresetMode.SAME_STEP
        self._envs = np.arange(first, first + n, dtype=np.int32)
        self._env_tensor = torch.from_numpy(self._envs.astype(np.int64))
        self._ledger = Ledger.begin(n)
        self._mask: Column | None = None
        self._state = policy.initial_state(n)
        self._context = Context(self._env_tensor)
        self._free: list[dict[str, Column]] = []
        # Engines that spend steps on resetting are recorded into a ring first.
        self._ring = _ARENA * horizon
        self._record: dict[str, Column] = {}
        self._now = 0
        self._dead = np.zeros(n, np.bool_)
        self._live = np.zeros((self._ring, n), np.bool_)
        self._versions = np.zeros(self._ring, np.int32)
        self._waiting = np.zeros(n, np.int64)  # live rows that are in no fragment yet
        self._since = np.zeros(n, np.int64)  # the step from which they count
        slot = Slot.empty(self._obs, n)
        seeds = [None] * n if seed is None else [seed + first + i for i in range(n)]
        self._note_mask(engine.reset(slot, seeds, None, None))
        self._obs_now = slot.obs

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
        self._context = Context(self._env_tensor, scalars, self._state)
        with torch.inference_mode():
            if self._same_step:
                return self._in_place(version)
            return self._recorded(version, fresh)

    def recycle(self, fragment: Fragment) -> None:
        """Take back the buffers of a fragment that nobody reads any more."""
        if fragment.block is not None and len(self._free) < 4:
            self._free.append(fragment.block)

    # Engines that reset in the same step: rows are written where they stay.

    def _in_place(self, version: int) -> Fragment:
        horizon, n = self._horizon, self._n
        block = self._free.pop() if self._free else {}
        # Observations have one time row more: what follows the last step.
        obs = self._prepare(block, horizon, horizon + 1)
        for column, now in zip(obs, self._obs_now, strict=True):
            column[0] = now
        state = {name: tensor.numpy().copy() for name, tensor in self._state.items()}
        terminated, truncated = block["terminated"], block["truncated"]
        tail_rows: list[int] = []
        finals: list[Any] = []
        for t, (current, slot) in enumerate(self._steps(block, obs, horizon)):
            action = self._act(current, block, t, horizon)
            infos = self._engine.step([action], slot, None)
            if infos:
                self._note_mask(infos)
                if "final_obs" in infos:
                    at, values = infos["final_obs"]
                    tail_rows += (t * n + at).tolist()
                    finals += values
            if self._state:
                self._begin(terminated[t] | truncated[t])
        self._obs_now = [column[horizon] for column in obs]
        ended = terminated | truncated
        book = self._ledger.post(block["reward"], ended)
        last = np.flatnonzero(~ended[-1])
        tail = self._obs.empty(len(finals))
        for row, value in enumerate(finals):
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
        columns["version"] = np.full(horizon * n, version, np.int32)
        rows = np.concatenate([np.array(tail_rows, np.int64), (horizon - 1) * n + last])
        return _sealed(columns, rows, tails, state, book, block=block)

    def _steps(
        self, block: dict[str, Column], obs: list[Column], horizon: int
    ) -> Iterator[tuple[Any, Slot]]:
        """Yield, for each time row, the observations to act on and where the step's result goes."""
        tensors = zip(*(torch.from_numpy(column).unbind(0) for column in obs), strict=True)
        following = zip(*(list(column)[1:] for column in obs), strict=True)
        flags = zip(block["reward"], block["terminated"], block["truncated"], strict=True)
        for current, after, flag in zip(tensors, following, flags, strict=False):
            yield self._obs.nest(current), Slot(list(after), *flag)

    # Engines that spend a step on resetting: record, then leave out the dead rows.

    def _recorded(self, version: int, fresh: bool) -> Fragment:
        horizon, n, ring, record = self._horizon, self._n, self._ring, self._record
        obs = self._prepare(record, ring, ring)
        if self._now == 0:
            for column, initial in zip(obs, self._obs_now, strict=True):
                column[0] = initial
        reward, terminated, truncated = (
            record[name] for name in ("reward", "terminated", "truncated")
        )
        tensors = [torch.from_numpy(column) for column in obs]
        dropped = self._forget() if fresh else 0
        began = self._now
        while steps := steps_until_enough(self._waiting, horizon, all_envs=fresh):
            for now in range(self._now, self._now + steps):
                t, beyond = now % ring, (now + 1) % ring
                for name, held in self._state.items():
                    _room(record, f"state.{name}", held.numpy(), ring)[t] = held.numpy()
                current = self._obs.nest([tensor[t] for tensor in tensors])
                action = self._act(current, record, t, ring)
                following = [column[beyond] for column in obs]
                slot = Slot(following, reward[t], terminated[t], truncated[t])
                infos = self._engine.step([action], slot, None)
                if infos:
                    self._note_mask(infos)
                live = self._live[t] = ~self._dead
                self._waiting += live
                if self._state:  # what acted in a dead step has not happened
                    self._begin(self._dead)
                self._dead = (terminated[t] | truncated[t]) & live
                if self._state:
                    self._begin(self._dead)
            self._now += steps
        book = self._post(began, version)
        first = int(self._since.min())
        window = np.arange(first, self._now)
        waiting = self._live[window % ring] & (window[:, None] >= self._since)
        times, envs = choose_tracks(waiting, horizon, n)
        times += first
        self._waiting -= horizon * np.bincount(envs, minlength=n)
        np.maximum.at(self._since, envs, times[-1] + 1)
        if fresh:
            dropped += self._forget()
        flat = (times % ring * n + envs).reshape(-1)
        columns = {
            name: column.reshape(ring * n, *column.shape[2:])[flat]
            for name, column in record.items()
            if not name.startswith("state.")
        }
        columns["env"] = np.tile(self._envs[envs], horizon)
        columns["version"] = self._versions[times % ring].reshape(-1)
        over = (columns["terminated"] | columns["truncated"]).reshape(horizon, n)
        over[-1] = True
        rows = np.flatnonzero(over)
        after_rows = (flat[rows] + n) % (ring * n)
        tails = {
            name: column.reshape(ring * n, *column.shape[2:])[after_rows]
            for name, column in zip(self._obs_names, obs, strict=True)
        }
        state = {
            name.removeprefix("state."): column[times[0] % ring, envs]
            for name, column in record.items()
            if name.startswith("state.")
        }
        return _sealed(columns, rows, tails, state, book, dropped)

    def _post(self, began: int, version: int) -> Book:
        """Enter the steps recorded since ``began``."""
        at = np.arange(began, self._now) % self._ring
        live = self._live[at]
        record = self._record
        ended = (record["terminated"][at] | record["truncated"][at]) & live
        if not len(at):
            return Book(np.empty((0, 0), np.int32), np.empty((0, 0), np.int32), [], [])
        book = self._ledger.post(record["reward"][at], ended, live)
        _room(record, "episode", book.episode[0], self._ring)[at] = book.episode
        _room(record, "step", book.step[0], self._ring)[at] = book.step
        self._versions[at] = version
        return book

    def _forget(self) -> int:
        dropped = int(self._waiting.sum())
        self._waiting[:] = 0
        self._since[:] = self._now
        return dropped

    # What both share

    def _prepare(self, block: dict[str, Column], rows: int, obs_rows: int) -> list[Column]:
        """Make sure of the columns that the spaces ask for; return those of the observations."""
        if "reward" not in block:
            for name, leaf in zip(self._obs_names, self._obs.leaves, strict=True):
                block[name] = np.empty((obs_rows, self._n, *leaf.shape), leaf.dtype)
            block["reward"] = np.empty((rows, self._n), np.float32)
            block["terminated"] = np.empty((rows, self._n), np.bool_)
            block["truncated"] = np.empty((rows, self._n), np.bool_)
        return [block[name] for name in self._obs_names]

    def _act(self, obs: Any, block: dict[str, Column], t: int, rows: int) -> Column:
        """Ask the policy, check its answer, and write it into time row ``t``."""
        if self.stop:
            raise Interrupted
        context, mask = self._context, None
        if self._masks_in_obs or self._mask is not None:
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
        if self._mask is not None:
            _room(block, "action_mask", self._mask, rows)[t] = self._mask
        if decision.state:
            self._state = {name: tensor.clone() for name, tensor in decision.state.items()}
            self._context = replace(self._context, state=self._state)
        return action

    def _step_of(self, row: int, block: dict[str, Column], t: int) -> str:
        if not self._same_step:
            return f"{self._now} of the shard"
        ended = np.flatnonzero(block["terminated"][:t, row] | block["truncated"][:t, row])
        steps = t - ended[-1] - 1 if len(ended) else t + self._ledger.step[row]
        return f"{steps} of its episode"

    def _begin(self, which: npt.NDArray[np.bool_]) -> None:
        """Give environments that begin an episode their initial recurrent state."""
        if which.any():
            at = torch.from_numpy(np.flatnonzero(which))
            for name, tensor in self._policy.initial_state(len(at)).items():
                self._state[name][at] = tensor

    def _note_mask(self, infos: Any) -> None:
        if not infos or "action_mask" not in infos:
            return
        given = infos["action_mask"]
        at, values = given if isinstance(given, tuple) else (slice(None), given)
        if self._mask is None:
            self._mask = np.ones((self._n, *np.shape(values)[1:]), np.bool_)
        self._mask[at] = values

    def _current_mask(self, obs: Any) -> Tensor:
        if self._mask is not None:
            return torch.from_numpy(self._mask)
        mask: Tensor = obs["action_mask"]
        return mask.to(torch.bool)


def _sealed(
    columns: dict[str, Column],
    rows: npt.NDArray[np.int64],
    tail: dict[str, Column],
    state: dict[str, Column],
    book: Book,
    dropped: int = 0,
    block: dict[str, Column] | None = None,
) -> Fragment:
    if "log_prob" in columns:
        bad = np.flatnonzero(~np.isfinite(columns["log_prob"]))
        if len(bad):
            raise PolicyFault(
                f"the policy's log_prob is {columns['log_prob'][bad[0]]} for environment "
                f"{columns['env'][bad[0]]} at step {columns['step'][bad[0]]} of its episode"
            )
    return Fragment(columns, rows, tail, state, book.returns, book.lengths, dropped, block)


def _room(block: dict[str, Column], name: str, values: Column, rows: int) -> Column:
    column = block.get(name)
    if column is None:
        column = block[name] = np.empty((rows, *values.shape), values.dtype)
    return column
