"""Action masks from the infos of environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from clusterenv.data.spaces import Column
from clusterenv.simulation.decisions import PolicyFault

__all__ = ["InfoMask"]


class InfoMask:
    """The newest action mask from the infos of each environment."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._value: Column | None = None
        self._fault = ""
        self.settled = False
        """Whether a first mask is refused from now on, so that all rows have the same columns."""

    @property
    def value(self) -> Column | None:
        """Booleans, a row for each environment; ``None`` before the first mask.

        Raises ``PolicyFault`` if an environment returned a mask that cannot be read.
        """
        if self._fault:
            raise PolicyFault(self._fault)
        return self._value

    def update(
        self,
        infos: Any,
        rows: Sequence[int] | None = None,
        began: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Take over the masks in an engine's infos, which are those of ``rows`` or of all.

        Environments that ``began`` an episode lose their masks of the last one.
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
                f"info['action_mask'] cannot be read as a mask: {values!r:.200}. It must be an "
                "array of zeros and ones, with one entry per action for every environment"
            )
            return
        if self._value is None and self.settled:
            self._fault = (
                "info['action_mask'] came with a step and with no reset before it; return the "
                "first mask with reset(), so that all rows have the column"
            )
        if self._value is None:  # environments without a mask allow every action
            self._value = np.ones((self._n, *mask.shape[1:]), np.bool_)
        self._value[at if rows is None else np.asarray(rows)[at]] = mask


def _as_mask(values: Any) -> Column | None:
    """Return masks as an array with a row for each, or ``None`` if that is not possible."""
    try:
        array = values if isinstance(values, np.ndarray) else np.stack([*map(np.asarray, values)])
    except (ValueError, TypeError):  # some are longer than others
        return None
    return array if array.ndim > 1 and array.dtype.kind in "biuf" else None
