"""Seals fragments as Arrow IPC messages, on workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from clusterenv.data.arrow import RowSpec, SparseRows, field_of, sparse_field_of, to_array
from clusterenv.data.fragment import Fragment
from clusterenv.data.ipc import MessageWriter
from clusterenv.data.record_batch import ORIGIN, STATE, Origin, ascending, next_of
from clusterenv.data.spaces import Column

__all__ = ["FragmentEncoder"]

_COPIED = 1 << 20  # bytes; up to here, one copy takes less time than handing over every column


class FragmentEncoder:
    """Seals the fragments of one shard, each as one record-batch message.

    Schema, types and the columns that never change are made once.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._kinds: list[Any] = []
        self._schema = pa.schema([])
        self._types: list[pa.DataType] = []
        self._constants: list[pa.Array] = []
        self._first_rows = SparseRows(np.empty(0, np.int64), 0)

    def encode(self, fragment: Fragment) -> tuple[bytes | None, list[memoryview]]:
        """Return the message of a fragment in pieces, which may share the memory of its columns.

        The first value is the schema's message if this fragment has other columns than the one
        before it, and for the first fragment; otherwise ``None``.
        """
        rows, tail = ascending(fragment.tail_rows, fragment.tail)
        parts = fragment.columns, tail, fragment.state
        kinds = [(k, c.dtype, c.shape[1:]) for part in parts for k, c in part.items()]
        total, changed = len(fragment.columns["reward"]), kinds != self._kinds
        if changed:
            self._prepare(*parts)
            self._kinds = kinds
        if total != self._first_rows.total:
            self._fill(total, fragment.num_envs)
        types = iter(self._types)
        arrays = [_to_array(column, next(types)) for column in fragment.columns.values()]
        arrays += self._constants
        ends = SparseRows(rows, total)
        for where, part in ((ends, tail), (self._first_rows, fragment.state)):
            arrays += [
                where.array(np.ascontiguousarray(column), next(types)) for column in part.values()
            ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        schema = self._schema.serialize().to_pybytes() if changed else None
        if sum(column.nbytes for column in fragment.columns.values()) > _COPIED:
            return schema, self._writer.message(batch)
        return schema, [memoryview(batch.serialize()).cast("B")]

    def _prepare(
        self, columns: Mapping[str, Column], tail: Mapping[str, Column], state: Mapping[str, Column]
    ) -> None:
        """Make the schema for fragments with such columns."""
        fields = [field_of(name, RowSpec.of(column)) for name, column in columns.items()]
        sparse = [
            sparse_field_of(next_of(name), RowSpec.of(column)) for name, column in tail.items()
        ]
        sparse += [
            sparse_field_of(STATE + name, RowSpec.of(column)) for name, column in state.items()
        ]
        origin = [field_of(name, RowSpec(dtype, ())) for name, dtype in ORIGIN.items()]
        self._schema = pa.schema([*fields, *origin, *sparse], self._origin.metadata())
        self._types = [field.type for field in (*fields, *sparse)]
        self._writer = MessageWriter(self._schema)

    def _fill(self, total: int, num_envs: int) -> None:
        """Make the columns that are the same in all fragments of so many rows."""
        origin = self._origin._asdict()
        self._constants = [
            to_array(np.full(total, origin[name], dtype), pa.from_numpy_dtype(dtype))
            for name, dtype in ORIGIN.items()
        ]
        self._first_rows = SparseRows(np.arange(num_envs), total)


def _to_array(column: Column, kind: pa.DataType) -> pa.Array:
    array = to_array(np.ascontiguousarray(column), kind)
    if array.null_count:
        raise ValueError(f"row {np.argmax(array.is_null())} of a column of text is None")
    return array
