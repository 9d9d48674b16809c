"""Encodes a fragment as a description and the arrays of a message's body, and decodes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from clusterenv.data.arrow import from_utf8, to_utf8
from clusterenv.data.fragment import Fragment
from clusterenv.data.spaces import Array, Column, Layout
from clusterenv.errors import ConnectionClosed

__all__ = ["ArraySpec", "Parts", "decode", "encode", "largest_fragment", "nbytes_of"]

_UTF8 = "utf8"
_OWN_BYTES = 128  # of a row, besides observation, action and the policy's columns


class ArraySpec(NamedTuple):
    """One array of a fragment; a text column is two arrays: its offsets and its bytes."""

    name: str
    dtype: str
    """NumPy's name of it, or ``"utf8"`` for the bytes of text."""
    shape: tuple[int, ...]
    rows: int
    """Rows that are sent: all of them, or the first ones if the others only repeat these."""


class Parts(NamedTuple):
    """Description of the arrays of a fragment."""

    columns: list[ArraySpec]
    tail: list[ArraySpec]
    """The first array holds ``tail_rows``."""
    state: list[ArraySpec]


def encode(fragment: Fragment) -> tuple[Parts, list[Array]]:
    """Return the description of a fragment's arrays, and the arrays in the order of the body."""
    columns, tail, state = (
        [array for name, column in part.items() for array in _arrays(name, column)]
        for part in (fragment.columns, {"": fragment.tail_rows, **fragment.tail}, fragment.state)
    )
    # Values that are equal in every time row, or in all rows, are sent once.
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


def _arrays(name: str, column: Column) -> list[tuple[ArraySpec, Column]]:
    """Return the arrays that a column is sent as."""
    if column.dtype != object:
        return [(_spec(name, column), column)]
    offsets, utf8 = to_utf8(column)
    return [(_spec(name, offsets), offsets), (_spec(name, utf8)._replace(dtype=_UTF8), utf8)]


def nbytes_of(parts: Parts) -> int:
    """Return the bytes of the body, or raise ``ConnectionClosed`` for an invalid description."""
    total = 0
    for spec in _all(parts):
        rows, shape = spec.rows, spec.shape
        if min((rows, *shape), default=-1) < 0 or rows > shape[0] or (rows and shape[0] % rows):
            raise ConnectionClosed(f"column {spec.name!r} cannot have {rows} rows of shape {shape}")
        total += _dtype(spec).itemsize * rows * math.prod(shape[1:])
    return total


def largest_fragment(rows: int, obs: Layout, action: Layout, extras: int) -> int:
    """Return the most bytes that a fragment of ``rows`` may have.

    ``extras`` are bytes per row for the policy's columns, recurrent state and text.
    """
    # Every row may be a tail row, with a next observation of its own.
    own = 2 * obs.nbytes + action.nbytes + _OWN_BYTES
    return rows * (own + extras)


def decode(body: Column, parts: Parts) -> list[dict[str, Column]]:
    """Return columns, tail and state as views of a received body."""
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


def _columns(named: Iterable[tuple[ArraySpec, Column]]) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for spec, array in named:
        text = spec.dtype == _UTF8
        columns[spec.name] = from_utf8(columns[spec.name], array) if text else array
    return columns


def _all(parts: Parts) -> list[ArraySpec]:
    return [ArraySpec(*spec) for part in parts for spec in part]


def _order(specs: Sequence[ArraySpec]) -> list[int]:
    """Put wide items first, so that every array is aligned in the body."""
    return sorted(range(len(specs)), key=lambda k: -_dtype(specs[k]).itemsize)


def _dtype(spec: ArraySpec) -> np.dtype[Any]:
    return np.dtype(np.uint8 if spec.dtype == _UTF8 else spec.dtype)


def _spec(name: str, array: Column) -> ArraySpec:
    return ArraySpec(name, array.dtype.str, array.shape, len(array))
