"""Converts NumPy columns to Arrow arrays and back, without copies where the layout allows.

A column of dtype ``object`` holds text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterenv.data.spaces import Column

__all__ = ["from_arrow", "from_sparse", "from_utf8", "to_arrow", "to_sparse", "to_utf8"]

_SHAPE, _BOOL = b"shape", b"bool"
Rows = npt.NDArray[np.int64]


def to_arrow(name: str, column: Column) -> tuple[pa.Field, pa.Array]:
    """Return a column as an Arrow array that shares its memory (booleans are packed)."""
    rows, shape = len(column), column.shape[1:]
    if column.dtype == object:
        return pa.field(name, pa.string()), pa.array(column, pa.string())
    if column.dtype == np.bool_ and not shape:
        bits = pa.py_buffer(np.packbits(column, bitorder="little"))
        return pa.field(name, pa.bool_()), pa.Array.from_buffers(pa.bool_(), rows, [None, bits])
    values, metadata = _values(column)
    if not shape:
        return pa.field(name, values.type), values
    array = pa.FixedSizeListArray.from_arrays(values, _width(shape))
    return pa.field(name, array.type, metadata=metadata), array


def from_arrow(field: pa.Field, array: pa.Array) -> Column:
    """Undo :func:`to_arrow`."""
    if not pa.types.is_fixed_size_list(field.type):
        column: Column = array.to_numpy(zero_copy_only=False)
        return column
    metadata = field.metadata or {_SHAPE: json.dumps([field.type.list_size])}
    return _shaped(metadata, array.flatten().to_numpy(zero_copy_only=False), len(array))


def to_sparse(name: str, rows: Rows, column: Column, total: int) -> tuple[pa.Field, pa.Array]:
    """Return an array of ``total`` rows in which only ``rows`` have values; nulls take no space."""
    if column.dtype == object:
        sparse = np.full(total, None)
        sparse[rows] = column
        return to_arrow(name, sparse)
    shape = column.shape[1:]
    values, metadata = _values(column)
    has = np.zeros(total, np.bool_)
    has[rows] = True
    offsets = np.zeros(total + 1, np.int32)
    np.cumsum(has * np.int32(_width(shape)), out=offsets[1:])
    array = pa.ListArray.from_buffers(
        pa.list_(values.type),
        total,
        [pa.py_buffer(np.packbits(has, bitorder="little")), pa.py_buffer(offsets)],
        children=[values],
    )
    return pa.field(name, array.type, metadata=metadata), array


def from_sparse(field: pa.Field, array: pa.Array) -> tuple[Rows, Column]:
    """Undo :func:`to_sparse`: return the rows that have a value, and the values."""
    rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
    if pa.types.is_string(field.type):
        return rows, from_arrow(field, array.drop_null())
    values = array.flatten().to_numpy(zero_copy_only=False)
    return rows, _shaped(field.metadata, values, len(rows))


def to_utf8(column: Column) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Return the offsets of a text column's strings, and their UTF-8 bytes, as Arrow stores them.

    Examples
    --------
    >>> offsets, utf8 = to_utf8(np.array(["go", "", "left"], object))
    >>> offsets.tolist(), bytes(utf8)
    ([0, 2, 2, 6], b'goleft')
    """
    array = pa.array(column, pa.string())
    if array.null_count:
        raise ValueError(f"row {np.argmax(array.is_null())} of a column of text is None")
    _, offsets, utf8 = array.buffers()
    return np.frombuffer(offsets, np.int32, len(column) + 1), np.frombuffer(utf8, np.uint8)


def from_utf8(offsets: npt.NDArray[np.int32], utf8: npt.NDArray[np.uint8]) -> Column:
    """Undo :func:`to_utf8`; raise ``ValueError`` for invalid offsets or bytes.

    No memory outside of them is read.
    """
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(utf8)]
    array = pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)
    array.validate(full=True)
    return from_arrow(pa.field("", pa.string()), array)


def _values(column: Column) -> tuple[pa.Array, dict[bytes, str]]:
    """Return a column's numbers as a flat array, and the metadata that restores its shape."""
    metadata = {_SHAPE: json.dumps(column.shape[1:])}
    if column.dtype == np.bool_:
        metadata[_BOOL] = "true"
        column = column.view(np.uint8)
    column = np.ascontiguousarray(column)
    buffer = pa.py_buffer(column)
    kind = pa.from_numpy_dtype(column.dtype)
    return pa.Array.from_buffers(kind, column.size, [None, buffer]), metadata


def _shaped(metadata: Mapping[bytes, bytes | str], values: npt.NDArray[Any], rows: int) -> Column:
    shaped = values.reshape(rows, *json.loads(metadata[_SHAPE]))
    return shaped.view(np.bool_) if _BOOL in metadata else shaped


def _width(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))
