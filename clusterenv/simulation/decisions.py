"""Checks what a policy returns: actions, extras, recurrent state and annotations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Column, Layout
from clusterenv.policies.policy import Decision, Policy

__all__ = [
    "LAST_REWARD",
    "RESERVED_COLUMNS",
    "ActionCheck",
    "ExtrasCheck",
    "Location",
    "PolicyFault",
    "annotate",
    "as_array",
    "check_decision",
    "check_log_prob",
    "check_state",
    "initial_state",
]

RESERVED_COLUMNS = {
    *("obs", "next_obs", "action", "action_mask", "reward", "terminated", "truncated"),
    *("env", "episode", "step", "version", "run", "shard", "incarnation"),
}
"""Columns of every row, of which a policy's extras and annotations cannot have the names."""
_RESERVED_PREFIXES = ("obs.", "next_obs.", "state.")

LAST_REWARD = "last_reward"
"""Entry of a recurrent state that holds the reward of the step before."""

Kind = tuple[Any, tuple[int, ...]]
"""Dtype and shape."""

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class PolicyFault(Exception):
    """A policy raised, or returned something unusable; the message says what and where."""


class Location:
    """Environments (by global index) and step that a policy acts at, for error messages.

    Examples
    --------
    >>> location = Location(range(8, 12))
    >>> location.steps = 5
    >>> str(location), location.env(3)
    ('environments 8–11 at step 5 of the shard', 'environment 11 at step 5 of the shard')
    """

    def __init__(self, envs: Sequence[int]) -> None:
        self._envs = envs
        self.steps = 0
        """Steps that the shard has made."""
        self.episode_step: Callable[[int], int] | None = None
        """Returns an environment's step within its episode, given its row, if that is known."""

    def __str__(self) -> str:
        return f"environments {self._envs[0]}–{self._envs[-1]} at step {self.steps} of the shard"

    def env(self, row: int) -> str:
        """Name one environment and its step."""
        step = f"{self.steps} of the shard"
        if self.episode_step is not None:
            step = f"{self.episode_step(row)} of its episode"
        return f"environment {self._envs[row]} at step {step}"


def as_array(tensor: Tensor, name: str, location: object) -> Column:
    """Return the policy's tensor called ``name`` as an array, or raise ``PolicyFault``."""
    try:
        array: Column = tensor.numpy()
    except (TypeError, RuntimeError) as error:  # bfloat16, other devices, sparse tensors
        raise PolicyFault(
            f"the policy's {name!r} on {location} is {tensor.dtype} on {tensor.device}, which "
            f"NumPy cannot represent ({error}); return it as .float().cpu(), or .long().cpu()"
        ) from error
    return array


class ActionCheck:
    """Converts a policy's actions for the engine, or raises :class:`PolicyFault`."""

    def __init__(self, space: spaces.Space[Any], n: int) -> None:
        self._space = space
        (leaf,) = Layout(space).leaves
        self._dtype = leaf.dtype
        self._shape = (n, *leaf.shape)
        self._takes = "biuf" if self._dtype.kind == "f" else "biu"  # kinds of dtype
        self._start: Any = 0
        self._low: Any = None
        self._high: Any = None
        self._choices = 0
        self._parts: list[int] = []  # entries of a mask that belong to each number of an action
        if isinstance(space, spaces.Discrete):
            self._start, self._choices = int(space.start), int(space.n)
            self._low, self._high = self._start, self._start + self._choices - 1
            self._parts = [self._choices]
        elif isinstance(space, spaces.Box):
            self._low, self._high = space.low, space.high
        elif isinstance(space, spaces.MultiDiscrete):
            self._start = space.start
            self._low, self._high = space.start, space.start + space.nvec - 1
            self._parts = space.nvec.reshape(-1).tolist()
        elif isinstance(space, spaces.MultiBinary):
            self._low, self._high = 0, 1
        self.is_complete = self._low is not None
        """Whether every action that passes is in the space."""

    def check_mask(self, mask: Tensor, location: Location) -> None:
        """Raise unless a mask fits the space and allows every environment at least one action.

        It is ``[envs, choices]``; for ``MultiDiscrete`` the choices of one number after the other.
        """
        if not self._parts or mask.shape[1:] != (sum(self._parts),):
            fits = f"{sum(self._parts)} entries" if self._parts else "no mask"
            raise PolicyFault(
                f"the action mask has shape {tuple(mask.shape[1:])} for each environment; "
                f"{self._space} needs {fits}"
            )
        for part in torch.split(mask, self._parts, dim=1):
            some = part.any(1)
            if not some.all():
                row = int(some.to(torch.uint8).argmin())
                raise PolicyFault(f"the action mask allows no action to {location.env(row)}")

    def __call__(self, action: Any, mask: Tensor | None, location: Location) -> Column:
        """Return the actions as an array."""
        if not isinstance(action, Tensor):
            raise PolicyFault(
                "act() must return a tensor of actions, got a "
                f"{type(action).__name__} on {location}"
            )
        array = as_array(action, "action", location)
        if array.shape != self._shape:
            raise PolicyFault(
                f"the policy's actions on {location} have shape {array.shape}, expected "
                f"{self._shape}: one of {self._space} for each environment"
            )
        if array.dtype.kind not in self._takes:
            needs = "real numbers" if self._dtype.kind == "f" else "integers"
            raise PolicyFault(
                f"the policy's actions on {location} are of dtype {array.dtype}, "
                f"but {self._space} needs {needs}"
            )
        if self._dtype.kind == "f" and array.dtype != self._dtype:
            array = array.astype(self._dtype)
        if self.is_complete and not self._within(array):
            right = (array >= self._low) & (array <= self._high)
            row = int(np.argwhere(~right)[0][0])
            raise PolicyFault(
                f"the policy chose {array[row]} for {location.env(row)}, outside {self._space}"
            )
        if array.dtype != self._dtype:  # after the check: casting may wrap a large integer
            array = array.astype(self._dtype)
        if mask is not None:
            firsts = np.cumsum([0, *self._parts[:-1]])
            chosen = (array - self._start).reshape(len(array), -1) + firsts
            allowed = mask.gather(1, torch.from_numpy(chosen.astype(np.int64))).all(1).numpy()
            if not allowed.all():
                row = int(np.flatnonzero(~allowed)[0])
                raise PolicyFault(
                    f"the policy chose action {array[row]} for {location.env(row)}, which its mask "
                    "forbids"
                )
        return array

    def _within(self, array: Column) -> bool:
        size = array.dtype.itemsize
        if self._choices and size >= self._dtype.itemsize:
            # As unsigned numbers, those below the start are far above the end.
            shifted = array - self._start if self._start else array
            unsigned = shifted.view(_UNSIGNED[size])
            return bool(unsigned.item(unsigned.argmax()) < self._choices)  # faster than max()
        return bool(((array >= self._low) & (array <= self._high)).all())  # NaN is outside


class ExtrasCheck:
    """Converts a policy's extras to columns, or raises :class:`PolicyFault`.

    Each must have a row for each of ``n`` environments, a name that is not reserved, and the same
    dtype and shape at every step.
    """

    def __init__(self, n: int, reserved: Collection[str]) -> None:
        self._n = n
        self._reserved = reserved
        self._kinds: dict[str, Kind] | None = None

    def __call__(self, extras: Mapping[str, Tensor], location: Location) -> dict[str, Column]:
        """Return the extras as columns."""
        if type(extras) is not dict and not isinstance(extras, Mapping):
            raise PolicyFault(
                f"the policy's extras on {location} are a {type(extras).__name__}; expected "
                "tensors by name: Decision(action, {'log_prob': …})"
            )
        columns = {}
        known = self._kinds or {}
        same = len(known) == len(extras)
        for name, tensor in extras.items():
            if not isinstance(tensor, Tensor):
                raise PolicyFault(
                    f"the policy's {name!r} on {location} is a {type(tensor).__name__}; expected "
                    f"a tensor with a row for each of the {self._n} environments"
                )
            column = columns[name] = as_array(tensor, name, location)
            same = same and known.get(name) == (column.dtype, column.shape)
        if not same or self._kinds is None:
            kinds = {name: (column.dtype, column.shape) for name, column in columns.items()}
            self._check_kinds(kinds, location)
            self._kinds = kinds
        return columns

    def _check_kinds(self, kinds: dict[str, Kind], location: Location) -> None:
        for name, (_, shape) in kinds.items():
            if name in self._reserved or name.startswith(_RESERVED_PREFIXES):
                raise PolicyFault(
                    f"the policy's extra {name!r} has the name of a column that exists already; "
                    "call it something else"
                )
            if shape[:1] != (self._n,):
                raise PolicyFault(
                    f"the policy's {name!r} on {location} has shape {shape}; expected a row for "
                    f"each of the {self._n} environments"
                )
        if self._kinds is not None:
            name = next(k for k in {**self._kinds, **kinds} if self._kinds.get(k) != kinds.get(k))
            raise PolicyFault(
                f"the policy's extra {name!r} was {_shown_kind(self._kinds.get(name))} and is "
                f"now, on {location}, {_shown_kind(kinds.get(name))}; it must be the same at "
                "every step"
            )


def check_decision(decision: Any, policy: Policy, location: object) -> None:
    """Raise unless a policy returned a ``Decision``."""
    if not isinstance(decision, Decision):
        raise PolicyFault(
            f"{type(policy).__name__}.act() returned a {type(decision).__name__} on "
            f"{location}: it must return clusterenv.policies.Decision(action, {{'log_prob': "
            "…})"
        )


def check_log_prob(values: Column, env_at: Callable[[int], str]) -> None:
    """Raise if a log-probability is not finite; ``env_at`` names the environment of a row."""
    # A finite sum means finite values, and takes half the time; otherwise look at each.
    if math.isfinite(np.add.reduce(values, axis=None)):
        return
    if not np.isfinite(values).all():
        bad = int(np.argwhere(~np.isfinite(values))[0][0])
        raise PolicyFault(f"the policy's log_prob is {values[bad]} for {env_at(bad)}")


def initial_state(policy: Policy, n: int) -> dict[str, Tensor]:
    """Return the recurrent state of ``n`` environments at the start of an episode."""
    try:
        state = policy.initial_state(n)
    except (Exception, SystemExit) as error:
        raise PolicyFault(
            f"the policy raised {type(error).__name__} in initial_state({n}): {error}"
        ) from error
    kinds = _state_kinds(state)
    if kinds is None or any(shape[:1] != (n,) for _, shape in kinds.values()):
        raise PolicyFault(
            f"initial_state({n}) returned {_shown_state(state)}; expected tensors by name, each "
            f"with a row for each of the {n} environments: {{'h': torch.zeros({n}, 64)}}"
        )
    if kinds.get(LAST_REWARD, (torch.float32, (n,))) != (torch.float32, (n,)):
        raise PolicyFault(
            f"initial_state({n}) returned {_shown_state(state)}; rewards are written into "
            f"{LAST_REWARD!r}, so it must be a number for each environment: "
            f"{{{LAST_REWARD!r}: torch.zeros({n})}}"
        )
    # A copy, since rows are overwritten later: the policy may return a parameter or a view.
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def check_state(state: Any, before: Mapping[str, Tensor], location: Location) -> None:
    """Raise unless a state is empty, or has the names, dtypes and shapes of the one before."""
    kinds = _state_kinds(state)
    if kinds != {} and (kinds is None or kinds != _state_kinds(before)):
        raise PolicyFault(
            f"the policy's state after act() on {location} is {_shown_state(state)}; it was "
            f"{_shown_state(before)} before, and must stay as initial_state() returns it"
        )


def annotate(fragment: Fragment, policy: Policy) -> None:
    """Add the columns that a policy computes from a whole fragment."""
    rows = len(fragment.columns["reward"])
    try:
        given = {name: np.asarray(values) for name, values in policy.annotate(fragment).items()}
    except Exception as error:
        envs = fragment.columns["env"]
        raise PolicyFault(
            f"the policy raised {type(error).__name__} in annotate() on environments "
            f"{envs.min()}–{envs.max()}: {error}"
        ) from error
    for name, column in given.items():
        reserved = name in RESERVED_COLUMNS or name.startswith(_RESERVED_PREFIXES)
        if reserved or name in fragment.columns:
            raise PolicyFault(
                f"annotate() returned {name!r}, which is the name of a column that exists "
                f"already or is added later; the fragment has {', '.join(fragment.columns)}"
            )
        if column.shape[:1] != (rows,) or column.dtype.kind not in "biuf":
            raise PolicyFault(
                f"annotate() returned {name!r} of shape {column.shape} and dtype {column.dtype}; "
                f"expected numbers, a row for each of the fragment's {rows} rows"
            )
        fragment.columns[name] = column


def _state_kinds(state: Any) -> dict[str, Kind] | None:
    """Return dtypes and shapes by name; ``None`` if the state is not a mapping to tensors."""
    if isinstance(state, Mapping) and all(isinstance(t, Tensor) for t in state.values()):
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    return None


def _shown_kind(kind: Kind | None) -> str:
    return "missing" if kind is None else f"{kind[0]} of shape {kind[1]}"


def _shown_state(state: Any) -> str:
    if not isinstance(state, Mapping):
        return f"a {type(state).__name__}"
    shown = (
        f"{name!r}: {value.dtype} of shape {tuple(value.shape)}"
        if isinstance(value, Tensor)
        else f"{name!r}: a {type(value).__name__}"
        for name, value in state.items()
    )
    return f"{{{', '.join(shown)}}}"
