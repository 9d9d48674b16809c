"""A fragment on its way: what its frame says of it, the arrays of its body, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from clusterenv.channel import Array
from clusterenv.errors import ChannelClosed
from clusterenv.fragment import Cut, Fragment
from clusterenv.schema import Column, Layout

__all__ = [
    "ColumnSpec",
    "FragmentMeta",
    "Parts",
    "body_of",
    "columns_of",
    "largest_fragment",
    "nbytes_of",
    "parts_of",
]

_OWN_BYTES = 128  # of a row's columns that are neither observation nor action nor the policy's


class ColumnSpec(NamedTuple):
    """One array of a fragment."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    """Rows that travel: all, or as many as repeat themselves until the end."""


class Parts(NamedTuple):
    """The arrays of a fragment."""

    columns: list[ColumnSpec]
    tail: list[ColumnSpec]
    """The first are the rows that have a tail."""
    state: list[ColumnSpec]


class FragmentMeta(NamedTuple):
    """Blob of a ``FRAGMENT`` frame."""

    version: int
    """Of the first time row, where tracks differ the oldest: no row's is older."""
    newest: int
    """The newest version the shard had heard of when the fragment began."""
    divergence: float | None
    parts: Parts
    returns: list[float]
    lengths: list[int]
    dropped: int
    checks: int
    pulls: int
    cuts: list[Cut]


def parts_of(fragment: Fragment) -> Parts:
    """Describe the arrays of a fragment."""
    n = fragment.num_envs
    columns = [_spec(name, column) for name, column in fragment.columns.items()]
    # What is the same in every time row, or in all rows, travels once.
    period = {"env": n}
    version = fragment.columns["version"]
    if version.min() == version.max():
        period["version"] = 1
    columns = [spec._replace(rows=period.get(spec.name, spec.rows)) for spec in columns]
    tail = [_spec("", fragment.tail_rows), *(_spec(*item) for item in fragment.tail.items())]
    return Parts(columns, tail, [_spec(*item) for item in fragment.state.items()])


def body_of(fragment: Fragment, parts: Parts) -> list[Array]:
    """Return what travels, in the order in which it does."""
    arrays = [
        *fragment.columns.values(),
        fragment.tail_rows,
        *fragment.tail.values(),
        *fragment.state.values(),
    ]
    specs = _all(parts)
    return [np.ascontiguousarray(arrays[k][: specs[k].rows]) for k in _order(specs)]


def nbytes_of(parts: Parts) -> int:
    """Return the size of the body that holds these arrays.

    Raises
    ------
    ChannelClosed
        If no arrays can be like that.
    """
    total = 0
    for spec in _all(parts):
        rows, shape = spec.rows, spec.shape
        if min((rows, *shape), default=-1) < 0 or rows > shape[0] or (rows and shape[0] % rows):
            raise ChannelClosed(f"column {spec.name!r} cannot have {rows} rows of shape {shape}")
        total += np.dtype(spec.dtype).itemsize * rows * math.prod(shape[1:])
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
        Bytes of a row for the policy's own columns and recurrent state.
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
        dtype, shape = np.dtype(spec.dtype), (spec.rows, *spec.shape[1:])
        end = begin + dtype.itemsize * int(np.prod(shape))
        array = body[begin:end].view(dtype).reshape(shape)
        if spec.rows < spec.shape[0]:
            array = np.tile(array, (spec.shape[0] // spec.rows, *(1 for _ in shape[1:])))
        arrays[k] = array
        begin = end
    named = ((spec.name, arrays[k]) for k, spec in enumerate(specs))
    return [dict(next(named) for _ in part) for part in parts]


def _all(parts: Parts) -> list[ColumnSpec]:
    return [ColumnSpec(*spec) for part in parts for spec in part]


def _order(specs: Sequence[ColumnSpec]) -> list[int]:
    """Wide items first, so that all lie aligned in one piece of memory."""
    return sorted(range(len(specs)), key=lambda k: -np.dtype(specs[k].dtype).itemsize)


def _spec(name: str, array: Column) -> ColumnSpec:
    return ColumnSpec(name, array.dtype.str, array.shape, len(array))
