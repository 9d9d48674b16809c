"""Packs Gymnasium's ``info`` dictionaries on the workers and merges them at the head.

The merged result equals what ``SyncVectorEnv`` builds with one ``_add_info`` per environment: one
array per key, with the dtype of the first environment that reports the key, and a mask ``_key``.
Values of one type are sent as arrays. Only keys with mixed or non-numeric values are merged one by
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Packed", "Rows", "VectorInfo", "merge", "merge_vector", "pack"]

Rows = list[tuple[int, dict[str, Any]]]
"""Infos of single environments: row number and dictionary."""

Packed = dict[str, tuple[npt.NDArray[np.intp], Any]]
"""Key to (rows that report it, values): an array, a list, or a nested ``Packed``."""

_Rows = npt.NDArray[np.intp]


class VectorInfo(dict[str, Any]):
    """The info of a native vector environment: arrays with a row per environment."""


def pack(rows: Rows) -> Packed:
    """Group the infos of several environments by key."""
    where: dict[str, list[int]] = {}
    what: dict[str, list[Any]] = {}
    for row, info in rows:
        for key, value in info.items():
            if key in where:
                where[key].append(row)
                what[key].append(value)
            else:
                where[key], what[key] = [row], [value]
    return {key: (np.array(at, np.intp), _column(key, at, what[key])) for key, at in where.items()}


def _column(key: str, at: list[int], values: list[Any]) -> Any:
    if key == "final_obs":
        return values
    first = values[0]
    kind = type(first)
    if isinstance(first, dict):
        if all(isinstance(value, dict) for value in values):
            return pack(list(zip(at, values, strict=True)))
    elif any(type(value) is not kind for value in values):
        pass
    elif kind in (int, float, bool) or issubclass(kind, np.number):
        return np.array(values, kind)
    elif isinstance(first, np.ndarray) and all(
        value.shape == first.shape and value.dtype == first.dtype for value in values
    ):
        return np.stack(values)
    return values


def merge(into: dict[str, Any], packed: Packed, rows: _Rows, n: int) -> None:
    """Add the packed infos of one shard to a vector info of ``n`` environments, in place.

    ``rows`` are the rows in the result of the shard's environments.
    """
    for key, (at, values) in packed.items():
        positions = rows[at]
        if isinstance(values, dict):
            merge(into.setdefault(key, {}), values, rows, n)
        elif isinstance(values, np.ndarray) and _fits(into.get(key), values):
            if key not in into:
                into[key] = np.zeros((n, *values.shape[1:]), values.dtype)
            into[key][positions] = values
        else:
            for position, value in zip(positions, values, strict=True):
                if key not in into:
                    into[key] = _room_for(key, value, n)
                into[key][position] = value
        if f"_{key}" not in into:
            into[f"_{key}"] = np.zeros(n, np.bool_)
        into[f"_{key}"][positions] = True


def _fits(room: npt.NDArray[Any] | None, values: npt.NDArray[Any]) -> bool:
    """Whether assigning values at once gives the same result as assigning them one by one."""
    return room is None or (room.dtype != object and room.shape[1:] == values.shape[1:])


def _room_for(key: str, value: Any, n: int) -> npt.NDArray[Any]:
    if key != "final_obs":
        if type(value) in (int, float, bool) or isinstance(value, np.number):
            return np.zeros(n, type(value))
        if isinstance(value, np.ndarray):
            return np.zeros((n, *value.shape), value.dtype)
    return np.full(n, None, object)


def merge_vector(into: dict[str, Any], info: VectorInfo, rows: _Rows, n: int) -> None:
    """Add the info of a native vector environment to a vector info."""
    for key, value in info.items():
        if isinstance(value, dict):
            merge_vector(into.setdefault(key, {}), VectorInfo(value), rows, n)
        elif isinstance(value, np.ndarray) and value.shape[:1] == (len(rows),):
            fill = None if value.dtype == object else np.zeros((), value.dtype)
            room = into.get(key, np.full((n, *value.shape[1:]), fill, value.dtype))
            into[key] = room.astype(np.result_type(room, value), copy=False)
            into[key][rows] = value
        elif isinstance(value, Sequence) and not isinstance(value, str) and len(value) == len(rows):
            if key not in into:
                into[key] = np.full(n, None, object)
            for row, item in zip(rows, value, strict=True):
                into[key][row] = item
        else:
            into[key] = value
