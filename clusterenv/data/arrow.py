"""Converts NumPy columns to Arrow arrays and back, without copies where the layout allows.

A column of dtype ``object`` holds text. Scalar booleans become bits; arrays of booleans become
bytes, because Arrow has no other form of them that shares memory.
"""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterenv.data.spaces import Column
from clusterenv.errors import ConfigError

__all__ = [
    "MOST_ITEMS",
    "RowSpec",
    "SparseRows",
    "field_of",
    "from_arrow",
    "from_sparse",
    "sparse_field_of",
    "spec_of",
    "to_array",
    "to_arrow",
    "to_sparse",
]

_SHAPE, _BOOL = b"shape", b"bool"
MOST_ITEMS = 2**31 - 1
"""Numbers in the lists of one array: their offsets are 32 bits."""
Rows = npt.NDArray[np.int64]


class RowSpec(NamedTuple):
    """Dtype and shape of one row of a column; dtype ``object`` for text."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, column: Column) -> RowSpec:
        """Return those of a column."""
        return cls(column.dtype, column.shape[1:])

    @property
    def is_text(self) -> bool:
        """Whether the rows are strings."""
        return self.dtype.kind == "O"

    @property
    def items(self) -> int:
        """Numbers of one row."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one row of numbers."""
        return self.dtype.itemsize * self.items

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def field_of(name: str, spec: RowSpec) -> pa.Field:
    """Return the Arrow field of a column; its metadata restore the shape of a row."""
    if spec.is_text:
        return pa.field(name, pa.string())
    if not spec.shape:
        return pa.field(name, _number(name, spec.dtype))
    return pa.field(name, pa.list_(_item(name, spec), spec.items), metadata=_metadata(spec))


def sparse_field_of(name: str, spec: RowSpec) -> pa.Field:
    """Return the Arrow field of a column of which only some rows have values."""
    if spec.is_text:
        return pa.field(name, pa.string())
    return pa.field(name, pa.list_(_item(name, spec)), metadata=_metadata(spec))


def spec_of(field: pa.Field) -> RowSpec:
    """Undo :func:`field_of` and :func:`sparse_field_of`; raise ``ValueError`` for other fields."""
    name, kind, metadata = field.name, field.type, field.metadata or {}
    if pa.types.is_string(kind):
        return RowSpec(np.dtype(object), ())
    fixed = pa.types.is_fixed_size_list(kind)
    if not fixed and not pa.types.is_list(kind):
        return RowSpec(_dtype(name, kind), ())
    shape = (
        json.loads(metadata[_SHAPE]) if _SHAPE in metadata else [kind.list_size if fixed else -1]
    )
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"column {name!r} has the shape {shape}")
    dtype = _dtype(name, kind.value_type)
    if _BOOL in metadata and dtype == np.uint8:
        dtype = np.dtype(np.bool_)
    found = RowSpec(dtype, tuple(shape))
    if fixed and found.items != kind.list_size:
        raise ValueError(f"column {name!r} is a {kind} of shape {shape}")
    return found


def to_array(column: Column, kind: pa.DataType) -> pa.Array:
    """Return a contiguous column as an array of the type of its field, sharing its memory."""
    rows = len(column)
    if column.dtype.kind == "O":
        return pa.array(column, kind)
    if column.ndim > 1:
        items = [_items(column, kind.value_type)]
        return pa.Array.from_buffers(kind, rows, [None], 0, children=items)
    if column.dtype.kind == "b":
        column = np.packbits(column, bitorder="little")
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(column)], 0)


def to_arrow(name: str, column: Column) -> tuple[pa.Field, pa.Array]:
    """Return a column as an Arrow array that shares its memory (booleans are packed).

    Examples
    --------
    >>> field, array = to_arrow("obs", np.zeros((5, 2, 2), np.float32))
    >>> field.type, len(array), spec_of(field).shape
    (FixedSizeListType(fixed_size_list<item: float>[4]), 5, (2, 2))
    """
    field = field_of(name, RowSpec.of(column))
    return field, to_array(np.ascontiguousarray(column), field.type)


def from_arrow(field: pa.Field, array: pa.Array) -> Column:
    """Undo :func:`to_arrow`."""
    if not pa.types.is_fixed_size_list(field.type):
        column: Column = array.to_numpy(zero_copy_only=False)
        return column
    return _shaped(array.flatten(), spec_of(field), len(array))


class SparseRows:
    """Some of ``total`` rows, in ascending order, as the arrays of sparse columns need them.

    Examples
    --------
    >>> sparse = SparseRows(np.array([1, 3]), 4)
    >>> sparse.offsets(2).tolist()
    [0, 0, 2, 2, 4]
    >>> sparse.array(np.array([[5, 6], [7, 8]]), pa.list_(pa.int64())).to_pylist()
    [None, [5, 6], None, [7, 8]]
    """

    def __init__(self, rows: Rows, total: int) -> None:
        self.rows = rows
        self.total = total
        has = np.zeros(total, np.bool_)
        has[rows] = True
        self.bits = np.packbits(has, bitorder="little")
        edges = np.empty(len(rows) + 2, np.int64)
        edges[0], edges[1:-1], edges[-1] = -1, rows, total
        numbers = np.arange(len(rows) + 1, dtype=np.int32)
        self._counts = numbers.repeat(edges[1:] - edges[:-1])

    def offsets(self, items: int) -> npt.NDArray[np.int32]:
        """Return where the numbers of each row begin, if each of these rows has ``items``."""
        if len(self.rows) * items > MOST_ITEMS:
            raise ConfigError(
                f"{len(self.rows):,} next observations or states of {items:,} numbers are more "
                f"than a list of Arrow holds; collect with a shorter horizon"
            )
        return self._counts if items == 1 else self._counts * np.int32(items)

    def array(self, values: Column, kind: pa.DataType) -> pa.Array:
        """Return an array in which only these rows have values; nulls take no space."""
        if values.dtype == object:
            sparse = np.full(self.total, None)
            sparse[self.rows] = values
            return pa.array(sparse, kind)
        buffers = [pa.py_buffer(self.bits), pa.py_buffer(self.offsets(math.prod(values.shape[1:])))]
        nulls = self.total - len(self.rows)
        children = [_items(values, kind.value_type)]
        return pa.ListArray.from_buffers(kind, self.total, buffers, nulls, children=children)


def to_sparse(name: str, rows: SparseRows, column: Column) -> tuple[pa.Field, pa.Array]:
    """Return an array in which only some rows have values."""
    field = sparse_field_of(name, RowSpec.of(column))
    return field, rows.array(np.ascontiguousarray(column), field.type)


def from_sparse(field: pa.Field, array: pa.Array) -> tuple[Rows, Column]:
    """Undo :func:`to_sparse`: return the rows that have a value, and the values."""
    rows = np.flatnonzero(array.is_valid().to_numpy(zero_copy_only=False))
    if pa.types.is_string(field.type):
        return rows, from_arrow(field, array.drop_null())
    return rows, _shaped(array.flatten(), spec_of(field), len(rows))


def _items(column: Column, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, column.size, [None, pa.py_buffer(column)], 0)


def _shaped(values: pa.Array, spec: RowSpec, rows: int) -> Column:
    flat: Column = values.to_numpy(zero_copy_only=False)
    return flat.view(spec.dtype).reshape(rows, *spec.shape)


def _metadata(spec: RowSpec) -> dict[bytes, str]:
    shape = {_SHAPE: json.dumps(spec.shape)}
    return {**shape, _BOOL: "true"} if spec.dtype == np.bool_ else shape


def _item(name: str, spec: RowSpec) -> pa.DataType:
    return pa.uint8() if spec.dtype == np.bool_ else _number(name, spec.dtype)


def _number(name: str, dtype: np.dtype[Any]) -> pa.DataType:
    if dtype.kind not in "biuf" or not dtype.isnative:
        raise ConfigError(
            f"column {name!r} is of dtype {dtype}, which Arrow cannot hold; use integers, "
            "booleans or real numbers of the machine's byte order"
        )
    return pa.from_numpy_dtype(dtype)


def _dtype(name: str, kind: pa.DataType) -> np.dtype[Any]:
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    raise ValueError(f"column {name!r} is of type {kind}, which no column of numbers or text is")
