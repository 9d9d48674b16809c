"""A fragment on its way: what its frame says of it, the arrays of its body, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clusterenv.data.arrow import from_utf8, to_utf8
from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Array, Column, Layout
from clusterenv.errors import ConnectionClosed

__all__ = ["ColumnSpec", "Parts", "columns_of", "largest_fragment", "nbytes_of", "packed"]

_UTF8 = "utf8"
_OWN_BYTES = 128  # of a row's columns that are neither observation nor action nor the policy's


class ColumnSpec(NamedTuple):
    """One array of a fragment; a column of text is two: offsets of its strings, and their bytes."""

    name: str
    dtype: str
    """As NumPy writes it, or ``"utf8"`` for the bytes of text."""
    shape: tuple[int, ...]
    rows: int
    """Rows that travel: all, or as many as repeat themselves until the end."""


class Parts(NamedTuple):
    """The arrays of a fragment."""

    columns: list[ColumnSpec]
    tail: list[ColumnSpec]
    """The first are the rows that have a tail."""
    state: list[ColumnSpec]


def packed(fragment: Fragment) -> tuple[Parts, list[Array]]:
    """Describe the arrays of a fragment, and return them in the order in which they travel."""
    columns, tail, state = (
        [array for name, column in part.items() for array in _arrays(name, column)]
        for part in (
            fragment.columns,
            {"": fragment.tail_rows, **fragment.tail},
            fragment.state,
        )
    )
    # What is the same in every time row, or in all rows, travels once.
    period = {"env": fragment.num_envs}
    version = fragment.columns["version"]
    if version.min() == version.max():
        period["version"] = 1
    parts = Parts(
        [spec._replace(rows=period.get(spec.name, spec.rows)) for spec, _ in columns],
        [spec for spec, _ in tail],
        [spec for spec, _ in state],
    )
    specs, arrays = _all(parts), [array for _, array in (*columns, *tail, *state)]
    return parts, [np.ascontiguousarray(arrays[k][: specs[k].rows]) for k in _order(specs)]


def _arrays(name: str, column: Column) -> list[tuple[ColumnSpec, Column]]:
    """Return what travels of a column."""
    if column.dtype != object:
        return [(_spec(name, column), column)]
    offsets, utf8 = to_utf8(column)
    return [(_spec(name, offsets), offsets), (_spec(name, utf8)._replace(dtype=_UTF8), utf8)]


def nbytes_of(parts: Parts) -> int:
    """Return the size of the body that holds these arrays.

    Raises
    ------
    ConnectionClosed
        If no arrays can be like that.
    """
    total = 0
    for spec in _all(parts):
        rows, shape = spec.rows, spec.shape
        if min((rows, *shape), default=-1) < 0 or rows > shape[0] or (rows and shape[0] % rows):
            raise ConnectionClosed(f"column {spec.name!r} cannot have {rows} rows of shape {shape}")
        total += _dtype(spec).itemsize * rows * math.prod(shape[1:])
    return total


def largest_fragment(rows: int, obs: Layout, action: Layout, extras: int) -> int:
    """Return the most bytes that a fragment of so many rows may have.

    Parameters
    ----------
    rows
        Of the fragment.
    obs, action
        Of the spaces.
    extras
        Bytes of a row for the policy's own columns, recurrent state and text.
    """
    # Every row may have a next observation of its own, with its number.
    own = 2 * obs.nbytes + action.nbytes + _OWN_BYTES
    return rows * (own + extras)


def columns_of(body: Column, parts: Parts) -> list[dict[str, Column]]:
    """Return columns, tail and state as views of a body that has arrived."""
    specs = _all(parts)
    arrays: dict[int, Column] = {}
    begin = 0
    for k in _order(specs):
        spec = specs[k]
        dtype, shape = _dtype(spec), (spec.rows, *spec.shape[1:])
        end = begin + dtype.itemsize * int(np.prod(shape))
        array = body[begin:end].view(dtype).reshape(shape)
        if spec.rows < spec.shape[0]:
            array = np.tile(array, (spec.shape[0] // spec.rows, *(1 for _ in shape[1:])))
        arrays[k] = array
        begin = end
    named = ((spec, arrays[k]) for k, spec in enumerate(specs))
    return [_columns(next(named) for _ in part) for part in parts]


def _columns(named: Iterable[tuple[ColumnSpec, Column]]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for spec, array in named:
        text = spec.dtype == _UTF8
        columns[spec.name] = from_utf8(columns[spec.name], array) if text else array
    return columns


def _all(parts: Parts) -> list[ColumnSpec]:
    return [ColumnSpec(*spec) for part in parts for spec in part]


def _order(specs: Sequence[ColumnSpec]) -> list[int]:
    """Wide items first, so that all lie aligned in one piece of memory."""
    return sorted(range(len(specs)), key=lambda k: -_dtype(specs[k]).itemsize)


def _dtype(spec: ColumnSpec) -> np.dtype[Any]:
    return np.dtype(np.uint8 if spec.dtype == _UTF8 else spec.dtype)


def _spec(name: str, array: Column) -> ColumnSpec:
    return ColumnSpec(name, array.dtype.str, array.shape, len(array))
