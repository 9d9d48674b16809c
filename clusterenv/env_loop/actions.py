"""What a policy may return: actions that its masks allow, log-probabilities, annotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor

from clusterenv.fragment import Fragment
from clusterenv.policies.base import Policy
from clusterenv.schema import Column, Layout

__all__ = ["ActionCheck", "InfoMask", "PolicyFault", "annotate", "check_log_prob", "opened"]


class PolicyFault(Exception):
    """A policy returned something that cannot be used; the message says what and where."""


class InfoMask:
    """The action masks that environments gave in their infos, the newest of each."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.value: Column | None = None
        """``None`` until an environment has given one."""

    def note(self, infos: Any, rows: Sequence[int] | None = None) -> None:
        """Remember the masks in an engine's infos, which are of ``rows`` or of all.

        What is called ``action_mask`` but is no array of zeros and ones for each environment
        is left alone.
        """
        if not infos or "action_mask" not in infos:
            return
        given = infos["action_mask"]
        if isinstance(given, tuple):
            at, values = given
        else:
            at = np.flatnonzero(infos.get("_action_mask", np.ones(self._n, np.bool_)))
            values = given[at]
        if not isinstance(values, np.ndarray) or values.ndim < 2 or values.dtype.kind not in "biu":
            return
        if self.value is None:  # an environment that says nothing forbids nothing
            self.value = np.ones((self._n, *values.shape[1:]), np.bool_)
        self.value[at if rows is None else np.asarray(rows)[at]] = values


def opened(mask: Tensor, over: npt.NDArray[np.bool_]) -> Tensor:
    """Allow everything where nothing is allowed because the episode is over.

    The next step only resets such an environment, so that its action does not count; but a
    policy cannot choose from nothing.

    Parameters
    ----------
    mask
        Of booleans, a row for each environment.
    over
        Which episodes are over.

    Examples
    --------
    >>> opened(torch.tensor([[False, False], [False, True]]), np.array([True, True])).tolist()
    [[True, True], [False, True]]
    """
    if not over.any():
        return mask
    return mask | (torch.from_numpy(over)[:, None] & ~mask.any(-1, keepdim=True))


class ActionCheck:
    """Turns a policy's actions into what the engine takes, or says what is wrong with them."""

    def __init__(self, space: spaces.Space[Any], n: int) -> None:
        self._space = space
        (leaf,) = Layout(space).leaves
        self._dtype = leaf.dtype
        self._shape = (n, *leaf.shape)
        self._unsigned = np.dtype(f"u{self._dtype.itemsize}")
        self._start = 0
        self._low: Any = None
        self._high: Any = None
        self._choices = 0
        if isinstance(space, spaces.Discrete):
            self._start, self._choices = int(space.start), int(space.n)
            self._low, self._high = self._start, self._start + self._choices - 1
        elif isinstance(space, spaces.Box):
            self._low, self._high = space.low, space.high
        elif isinstance(space, spaces.MultiDiscrete):
            self._low, self._high = space.start, space.start + space.nvec - 1

    @property
    def is_complete(self) -> bool:
        """Whether what passes is in the space for certain."""
        return self._low is not None

    def __call__(self, action: Any, mask: Tensor | None, where: Callable[[int], str]) -> Column:
        """Return the actions as an array; ``where`` names the place of a row."""
        if not isinstance(action, Tensor):
            raise PolicyFault(f"act() must return a tensor of actions, got {type(action).__name__}")
        array = action.numpy()
        if array.shape != self._shape:
            raise PolicyFault(
                f"the policy's actions have shape {array.shape}, expected {self._shape}: "
                f"one of {self._space} for each environment"
            )
        if array.dtype is not self._dtype:
            if self._dtype.kind != "f" and array.dtype.kind == "f":
                raise PolicyFault(
                    f"the policy's actions are of dtype {array.dtype}, "
                    f"but {self._space} needs integers"
                )
            array = array.astype(self._dtype)
        if self._low is not None and not self._within(array):
            row = int(np.argwhere(~((array >= self._low) & (array <= self._high)))[0][0])
            raise PolicyFault(
                f"the policy chose {array[row]} for {where(row)}, outside {self._space}"
            )
        if mask is not None:
            allowed = mask[torch.arange(len(array)), torch.from_numpy(array - self._start)].numpy()
            if not allowed.all():
                row = int(np.flatnonzero(~allowed)[0])
                raise PolicyFault(
                    f"the policy chose action {array[row]} for {where(row)}, which its mask forbids"
                )
        return array

    def _within(self, array: Column) -> bool:
        if self._choices:  # as unsigned numbers, all that is below the start is far above the end
            shifted = array - self._start if self._start else array
            unsigned = shifted.view(self._unsigned)
            return bool(unsigned.item(unsigned.argmax()) < self._choices)  # faster than max()
        return bool(((array >= self._low) & (array <= self._high)).all())  # NaN is outside


def check_log_prob(columns: Mapping[str, Column]) -> None:
    """Raise if a log-probability is not finite; the row is named."""
    given = columns.get("log_prob")
    if given is not None and not np.isfinite(given).all():
        bad = int(np.argwhere(~np.isfinite(given))[0][0])
        raise PolicyFault(
            f"the policy's log_prob is {given[bad]} for environment {columns['env'][bad]} "
            f"at step {columns['step'][bad]} of its episode"
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
        if name in fragment.columns:
            raise PolicyFault(
                f"annotate() returned {name!r}, which the fragment has already; there are "
                f"{', '.join(fragment.columns)}"
            )
        if column.shape[:1] != (rows,) or column.dtype.kind not in "biuf":
            raise PolicyFault(
                f"annotate() returned {name!r} of shape {column.shape} and dtype {column.dtype}; "
                f"expected numbers, a row for each of the fragment's {rows} rows"
            )
        fragment.columns[name] = column
