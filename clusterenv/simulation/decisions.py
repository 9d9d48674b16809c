"""Checks what a policy returns besides actions: extras, recurrent state and annotations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Column
from clusterenv.policies.policy import Policy
from clusterenv.simulation.policy_faults import Location, PolicyFault, as_array

__all__ = [
    "RESERVED_COLUMNS",
    "ExtrasCheck",
    "annotate",
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

Kind = tuple[Any, tuple[int, ...]]
"""Dtype and shape."""


class ExtrasCheck:
    """Converts a policy's extras to columns, which must be the same at every step.

    Parameters
    ----------
    n
        Number of environments.
    reserved
        Names that extras cannot have.
    """

    def __init__(self, n: int, reserved: Collection[str]) -> None:
        self._n = n
        self._reserved = reserved
        self._kinds: dict[str, Kind] | None = None

    def __call__(self, extras: Mapping[str, Tensor], location: Location) -> dict[str, Column]:
        """Return the columns.

        Raises
        ------
        PolicyFault
            If one is not a tensor with a row for each environment, has a reserved name, or
            differs in dtype or shape from the first step.
        """
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


def check_log_prob(values: Column, env_at: Callable[[int], str]) -> None:
    """Raise if a log-probability is not finite; ``env_at`` names the environment of a row."""
    # A finite sum means finite values, and takes half the time; otherwise look at each.
    if math.isfinite(np.add.reduce(values, axis=None)):
        return
    if not np.isfinite(values).all():
        bad = int(np.argwhere(~np.isfinite(values))[0][0])
        raise PolicyFault(f"the policy's log_prob is {values[bad]} for {env_at(bad)}")


def initial_state(policy: Policy, n: int) -> dict[str, Tensor]:
    """Return the recurrent state of ``n`` environments at the start of an episode.

    Raises
    ------
    PolicyFault
        If the policy raises, or its state does not have a row for each environment.
    """
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
    """Add the columns that a policy computes from a whole fragment.

    Raises
    ------
    PolicyFault
        If the policy raises, or a column is not one number per row or has a reserved name.
    """
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
