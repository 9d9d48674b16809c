"""Action masks: which actions environments allow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clusterenv.data.spaces import Column
from clusterenv.simulation.policy_faults import PolicyFault

__all__ = ["InfoMask", "opened"]


class InfoMask:
    """The action masks that environments gave in their infos, the newest of each."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._value: Column | None = None
        self._fault = ""
        self.settled = False
        """Whether none may come any more, if none has come: rows have the same columns always."""

    @property
    def value(self) -> Column | None:
        """Booleans, a row for each environment; ``None`` until one has given a mask.

        Raises
        ------
        PolicyFault
            If what an environment gave cannot be understood: a mask must not be passed over.
        """
        if self._fault:
            raise PolicyFault(self._fault)
        return self._value

    def note(
        self,
        infos: Any,
        rows: Sequence[int] | None = None,
        began: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Remember the masks in an engine's infos, which are of ``rows`` or of all.

        Parameters
        ----------
        began
            Environments that begin an episode: what they gave in the last one is forgotten.
        """
        if self._value is not None and began is not None:
            self._value[began] = True
        if not infos or "action_mask" not in infos:
            return
        given = infos["action_mask"]
        if isinstance(given, tuple):
            at, values = given
        else:
            at = np.flatnonzero(infos.get("_action_mask", np.ones(self._n, np.bool_)))
            values = [given[k] for k in at] if given.dtype == object else given[at]
        mask = _as_mask(values)
        if mask is None or (self._value is not None and mask.shape[1:] != self._value.shape[1:]):
            self._fault = (
                f"info['action_mask'] cannot be read as a mask: {values!r:.200}. It is an array of "
                "zeros and ones, as long for every environment as there are actions"
            )
            return
        if self._value is None and self.settled:
            self._fault = (
                "info['action_mask'] came with a step and with no reset before it; environments "
                "that give masks give the first with reset(), so that all rows have the column"
            )
        if self._value is None:  # an environment that says nothing forbids nothing
            self._value = np.ones((self._n, *mask.shape[1:]), np.bool_)
        self._value[at if rows is None else np.asarray(rows)[at]] = mask


def _as_mask(values: Any) -> Column | None:
    """Return masks as an array with a row for each, or ``None`` if they are none."""
    try:
        array = values if isinstance(values, np.ndarray) else np.stack([*map(np.asarray, values)])
    except (ValueError, TypeError):  # some are longer than others
        return None
    return array if array.ndim > 1 and array.dtype.kind in "biuf" else None


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
