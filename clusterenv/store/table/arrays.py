"""The arrays of a table: names, shapes, dtypes and size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from clusterenv.store.table.schema import ColumnSpec, TableSchema
from clusterenv.store.table.stacks import Stack

__all__ = ["STEP_FIELDS", "arrays_of", "bytes_needed"]

STEP_FIELDS = ("action", "reward")
"""In one record with the next slot, because every sample needs them: usually 16 bytes."""


def arrays_of(
    schema: TableSchema, capacity: int, side: int, stack: Stack | None
) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Yield name, shape and dtype of each array."""
    stacked = [] if stack is None else stack.of(list(schema.obs))
    yield "steps", (capacity,), _steps_dtype(schema, capacity + side)
    for name, spec in schema.rows.items():
        if name in STEP_FIELDS:
            continue
        shape, slots = spec.shape, capacity
        if name in schema.obs:
            slots += side
            shape = stack.frame(shape) if stack is not None and name in stacked else shape
        yield name, (slots, *shape), spec.dtype
    for name, spec in schema.state.items():
        yield f"state.{name}", (side, *spec.shape), spec.dtype
    yield "side_row", (side,), np.dtype(np.int64)
    if schema.state:
        yield "state_at", (capacity,), np.dtype(np.int64)
    if stack is not None:
        yield "previous", (capacity + side,), np.dtype(np.int64)


def bytes_needed(schema: TableSchema, capacity: int, side: int, stack: Stack | None = None) -> int:
    """Return the total size of the arrays."""
    arrays = arrays_of(schema, capacity, side, stack)
    return sum(ColumnSpec(dtype, shape).nbytes for _, shape, dtype in arrays)


def _steps_dtype(schema: TableSchema, slots: int) -> np.dtype[Any]:
    """Return the record of a row's step and the slot of its next observation."""
    link = np.dtype(np.int32 if 2 * slots < np.iinfo(np.int32).max else np.int64)
    fields: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [
        (name, schema.rows[name].dtype, schema.rows[name].shape) for name in STEP_FIELDS
    ]
    dtype = np.dtype([*fields, ("next", link, ())], align=True)
    # NumPy copies records of these sizes with single instructions.
    size = next((size for size in (16, 32) if dtype.itemsize <= size), dtype.itemsize)
    names = list(dtype.names or ())
    offsets = [dtype.fields[name][1] for name in names] if dtype.fields else []
    formats = [dtype[name] for name in names]
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": size}, align=True
    )
