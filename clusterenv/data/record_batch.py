"""The layout of rows in an Arrow record batch, as they travel and as they are stored.

A record batch holds the columns of the rows, and where they are from: ``run``, ``shard`` and
``incarnation``. Some columns are null in most rows: ``next_obs`` has values where no row of the
batch holds the next observation, ``state.…`` in the first time row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterenv.data.arrow import SparseRows, from_arrow, from_sparse, to_arrow, to_sparse
from clusterenv.data.spaces import Column

__all__ = [
    "ORIGIN",
    "STATE",
    "Origin",
    "Sparse",
    "ascending",
    "is_sparse",
    "next_of",
    "rows_of",
    "to_record_batch",
]

ORIGIN: Mapping[str, np.dtype[Any]] = {
    "run": np.dtype(np.int64),
    "shard": np.dtype(np.int32),
    "incarnation": np.dtype(np.int32),
}
"""Columns that are the same in all rows of a batch."""
STATE = "state."
"""Prefix of the columns of recurrent state."""
FORMAT = 1
"""Version of this layout, in the schema's metadata."""

Sparse = tuple[npt.NDArray[np.int64], Column]
"""Rows that have a value, and their values."""


class Origin(NamedTuple):
    """Where the rows of a record batch are from; travels as the metadata of its schema.

    Examples
    --------
    >>> origin = Origin(run=5, shard=1, incarnation=0, num_envs=16, first_env=16)
    >>> Origin.of(pa.schema([], origin.metadata())) == origin
    True
    """

    run: int
    shard: int
    incarnation: int
    num_envs: int
    first_env: int
    format: int = FORMAT

    def metadata(self) -> dict[str, str]:
        """Return the metadata of a schema."""
        return {name: str(value) for name, value in self._asdict().items()}

    @classmethod
    def of(cls, schema: pa.Schema) -> Origin:
        """Undo :meth:`metadata`; raise ``ValueError`` if a value is missing or no number."""
        found = schema.metadata or {}
        missing = [name for name in cls._fields if name.encode() not in found]
        if missing:
            raise ValueError(f"the schema does not tell {', '.join(missing)}")
        return cls(*(int(found[name.encode()]) for name in cls._fields))


def next_of(name: str) -> str:
    """Return the column of the next observations of an observation column."""
    return f"next_{name}"


def is_sparse(field: pa.Field) -> bool:
    """Whether a column is null in most rows."""
    return bool(pa.types.is_list(field.type)) or field.name.split(".")[0] == next_of("obs")


def ascending(
    rows: npt.NDArray[np.int64], tail: Mapping[str, Column]
) -> tuple[npt.NDArray[np.int64], Mapping[str, Column]]:
    """Return tail rows and their next observations in the order of the rows."""
    if (rows[1:] > rows[:-1]).all():
        return rows, tail
    order = np.argsort(rows, kind="stable")
    return rows[order], {name: column[order] for name, column in tail.items()}


def to_record_batch(
    columns: Mapping[str, Column],
    origin: Mapping[str, int],
    sparse: Mapping[str, Sparse],
    metadata: Mapping[str, str] | None = None,
) -> pa.RecordBatch:
    """Return rows as a record batch; ``sparse`` are the columns that are null in most rows.

    The rows of each sparse column must be ascending.
    """
    total = len(columns["reward"])
    parts = [to_arrow(name, column) for name, column in columns.items()]
    parts += [to_arrow(name, np.full(total, origin[name], ORIGIN[name])) for name in ORIGIN]
    parts += [to_sparse(k, SparseRows(rows, total), part) for k, (rows, part) in sparse.items()]
    fields, arrays = zip(*parts, strict=True)
    return pa.record_batch(list(arrays), schema=pa.schema(fields, metadata))


def rows_of(batch: pa.RecordBatch) -> tuple[dict[str, Column], dict[str, Sparse]]:
    """Undo :func:`to_record_batch`: return the columns, with the origin, and the sparse columns."""
    columns: dict[str, Column] = {}
    sparse: dict[str, Sparse] = {}
    for field, array in zip(batch.schema, batch.columns, strict=True):
        if is_sparse(field):
            sparse[field.name] = from_sparse(field, array)
        else:
            columns[field.name] = from_arrow(field, array)
    return columns, sparse
