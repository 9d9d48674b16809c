"""Requests a policy: whether what it decided can be used, besides the actions themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Column
from clusterenv.policies.base import Context, Decision, Policy
from clusterenv.simulation.blocks import TAKEN
from clusterenv.simulation.policy_faults import PolicyFault, Where, as_array
from clusterenv.simulation.recurrent_state import check_state

__all__ = ["ExtrasCheck", "annotate", "ask", "check_log_prob"]

_PREFIXES = ("obs.", "next_obs.", "state.")


def ask(policy: Policy, obs: Any, context: Context, where: Where) -> Decision:
    """Return what a policy decides.

    Raises
    ------
    PolicyFault
        If it raises, or returns anything but a ``Decision``.
    """
    try:
        decision = policy.act(obs, context)
    except (Exception, SystemExit) as error:
        raise PolicyFault(
            f"the policy raised {type(error).__name__} on {where}: {error}"
        ) from error
    if not isinstance(decision, Decision):
        raise PolicyFault(
            f"{type(policy).__name__}.act() returned a {type(decision).__name__} on {where}: it "
            "must return clusterenv.policies.Decision(action, {'log_prob': …})"
        )
    check_state(decision.state, context.state, where)
    return decision


class ExtrasCheck:
    """Turns a policy's extras into columns, the same ones at every step.

    Parameters
    ----------
    n
        Environments.
    taken
        Names that are not the policy's.
    """

    def __init__(self, n: int, taken: Collection[str]) -> None:
        self._n = n
        self._taken = taken
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] | None = None

    def __call__(self, extras: Mapping[str, Tensor], where: Where) -> dict[str, Column]:
        """Return the columns.

        Raises
        ------
        PolicyFault
            If one is no tensor with a row for each environment, has a name that is taken, or is
            not as at the first step.
        """
        if type(extras) is not dict and not isinstance(extras, Mapping):
            raise PolicyFault(
                f"the policy's extras on {where} are a {type(extras).__name__}; expected tensors "
                "by name: Decision(action, {'log_prob': …})"
            )
        columns = {}
        known = self._kinds or {}
        alike = len(known) == len(extras)
        for name, tensor in extras.items():
            if not isinstance(tensor, Tensor):
                raise PolicyFault(
                    f"the policy's {name!r} on {where} is a {type(tensor).__name__}; expected a "
                    f"tensor with a row for each of the {self._n} environments"
                )
            column = columns[name] = as_array(tensor, name, where)
            alike = alike and known.get(name) == (column.dtype, column.shape)
        if not alike or self._kinds is None:
            kinds = {name: (column.dtype, column.shape) for name, column in columns.items()}
            self._settle(kinds, where)
        return columns

    def _settle(
        self, kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]], where: Where
    ) -> None:
        for name, (_, shape) in kinds.items():
            if name in self._taken or name.startswith(_PREFIXES):
                raise PolicyFault(
                    f"the policy's extra {name!r} has the name of a column that is there already; "
                    "call it something else"
                )
            if shape[:1] != (self._n,):
                raise PolicyFault(
                    f"the policy's {name!r} on {where} has shape {shape}; expected a row for each "
                    f"of the {self._n} environments"
                )
        if self._kinds is not None:
            name = next(k for k in {**self._kinds, **kinds} if self._kinds.get(k) != kinds.get(k))
            raise PolicyFault(
                f"the policy's extra {name!r} was {_say(self._kinds.get(name))} and is now, on "
                f"{where}, {_say(kinds.get(name))}; it must be the same at every step"
            )
        self._kinds = kinds


def _say(kind: tuple[np.dtype[Any], tuple[int, ...]] | None) -> str:
    return "missing" if kind is None else f"{kind[0]} of shape {kind[1]}"


def check_log_prob(values: Column | None, where: Callable[[int], str]) -> None:
    """Raise if a log-probability is not finite; ``where`` names the place of a row."""
    # The sum of finite numbers is finite, and found in half the time; else one looks again.
    if values is None or math.isfinite(np.add.reduce(values, axis=None)):
        return
    if not np.isfinite(values).all():
        bad = int(np.argwhere(~np.isfinite(values))[0][0])
        raise PolicyFault(f"the policy's log_prob is {values[bad]} for {where(bad)}")


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
        if name in fragment.columns or name in TAKEN or name.startswith(_PREFIXES):
            raise PolicyFault(
                f"annotate() returned {name!r}, which is the name of a column that is there "
                f"already, or comes later; the fragment has {', '.join(fragment.columns)}"
            )
        if column.shape[:1] != (rows,) or column.dtype.kind not in "biuf":
            raise PolicyFault(
                f"annotate() returned {name!r} of shape {column.shape} and dtype {column.dtype}; "
                f"expected numbers, a row for each of the fragment's {rows} rows"
            )
        fragment.columns[name] = column
