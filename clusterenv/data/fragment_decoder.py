"""Opens the Arrow IPC messages of fragments, at the head.

The head trusts no message: what does not match the schema, the spaces or the shard raises
``ValueError`` before a row of it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clusterenv.data.arrow import RowSpec, SparseRows, field_of, sparse_field_of, spec_of
from clusterenv.data.batch import Batch, Sealed
from clusterenv.data.fragment import Cut
from clusterenv.data.ipc import read_message
from clusterenv.data.record_batch import ORIGIN, STATE, Origin, Sparse, is_sparse, next_of
from clusterenv.data.spaces import Array, Column, Layout

__all__ = ["ExpectedRows", "FragmentDecoder", "largest_fragment"]

_OWN_BYTES = 128  # of a row, besides observation, action and the policy's columns
_METADATA_BYTES = 1 << 16  # of a message
_STEP_COLUMNS = {
    "reward": np.dtype(np.float32),
    "terminated": np.dtype(np.bool_),
    "truncated": np.dtype(np.bool_),
    "episode": np.dtype(np.int32),
    "step": np.dtype(np.int32),
    "env": np.dtype(np.int32),
    "version": np.dtype(np.int32),
}


class ExpectedRows(NamedTuple):
    """What the head knows of a shard's fragments before it has received one."""

    origin: Origin
    horizon: int
    obs: Layout
    action: Layout
    text: bool
    """Whether rows have the text of the observations."""

    def check(self, schema: pa.Schema) -> None:
        """Raise ``ValueError`` that names the first difference of a schema."""
        for name, wanted in self.origin._asdict().items():
            found = Origin.of(schema)._asdict()[name]
            if found != wanted:
                raise ValueError(f"{name} is {found}, not {wanted}")
        if len(set(schema.names)) != len(schema.names):
            raise ValueError(f"a column is there twice: {', '.join(schema.names)}")
        fields = {field.name: field for field in schema}
        obs = {
            leaf.name("obs"): RowSpec(leaf.dtype, leaf.shape)
            for leaf in self.obs.leaves
            if leaf.is_array or (leaf.is_text and self.text)
        }
        wanted = [field_of(name, spec) for name, spec in obs.items()]
        wanted += [sparse_field_of(next_of(name), spec) for name, spec in obs.items()]
        for leaf in self.action.leaves:
            wanted.append(field_of(leaf.name("action"), RowSpec(leaf.dtype, leaf.shape)))
        for name, dtype in (*_STEP_COLUMNS.items(), *ORIGIN.items()):
            wanted.append(field_of(name, RowSpec(dtype, ())))
        for field in wanted:
            _check_field(fields, field)
        known = {field.name for field in wanted}
        for field in schema:
            spec_of(field)
            is_state = field.name.startswith(STATE)
            if field.name not in known and is_sparse(field) != is_state:
                raise ValueError(f"column {field.name!r} is a {field.type}, which it cannot be")


def _check_field(fields: Mapping[str, pa.Field], wanted: pa.Field) -> None:
    name = wanted.name
    if name not in fields:
        raise ValueError(f"column {name!r} is missing; there are {', '.join(fields)}")
    if not fields[name].equals(wanted, check_metadata=True):
        found = spec_of(fields[name])
        raise ValueError(
            f"column {name!r} is {found} ({fields[name].type}), not {spec_of(wanted)} "
            f"({wanted.type})"
        )


class _Plan(NamedTuple):
    """How a column is read."""

    name: str
    spec: RowSpec
    field: pa.Field


class FragmentDecoder:
    """Opens the fragments of one connection to a shard, without copying their columns.

    Parameters
    ----------
    raw
        The schema's message, as the shard sent it.
    expected
        What the rows of the shard must be.

    Raises
    ------
    ValueError
        If the schema cannot be read or is not that of the shard.
    """

    def __init__(self, raw: bytes, expected: ExpectedRows) -> None:
        try:
            self._schema = pa.ipc.read_schema(pa.py_buffer(raw))
        except (pa.ArrowException, OSError, EOFError) as error:
            raise ValueError(str(error)) from error
        expected.check(self._schema)
        self._origin = origin = expected.origin
        self._rows = expected.horizon * origin.num_envs
        self._plain = self._schema.remove_metadata()
        plans = [_Plan(field.name, spec_of(field), field) for field in self._schema]
        self._plans = [(k, plan) for k, plan in enumerate(plans) if not is_sparse(plan.field)]
        self._sparse = [(k, plan) for k, plan in enumerate(plans) if is_sparse(plan.field)]
        self._constant = {
            name: np.full(self._rows, getattr(origin, name), dtype).tobytes()
            for name, dtype in ORIGIN.items()
        }

    def decode(self, body: Array, policy_version: int, cuts: Sequence[Cut] = ()) -> Batch:
        """Return the batch of a message, as views of it; raise ``ValueError`` if it is invalid."""
        raw = pa.py_buffer(body)
        batch = read_message(raw, self._schema)
        if batch.num_rows != self._rows:
            raise ValueError(f"{batch.num_rows:,} rows instead of {self._rows:,}")
        memory = _Memory(body, raw.address)
        columns = {
            plan.name: self._column(batch.column(k), plan, memory) for k, plan in self._plans
        }
        for name, constant in self._constant.items():
            if columns.pop(name).tobytes() != constant:
                raise ValueError(f"a row is not of {name} {getattr(self._origin, name)}")
        env, first, width = columns["env"], self._origin.first_env, self._origin.num_envs
        if env.min() < first or env.max() >= first + width:
            raise ValueError(f"environments {env.min()}–{env.max()} are not of this shard")
        sparse = {
            plan.name: self._sparse_column(batch.column(k), plan, memory)
            for k, plan in self._sparse
        }
        ends = columns["terminated"] | columns["truncated"]
        ends[-width:] = True
        tail_rows, first_rows = np.flatnonzero(ends), np.arange(width)
        tail, state = {}, {}
        for name, (rows, values) in sparse.items():
            is_state = name.startswith(STATE)
            if not np.array_equal(rows, first_rows if is_state else tail_rows):
                raise ValueError(f"column {name!r} has values in other rows than it must")
            if is_state:
                state[name.removeprefix(STATE)] = values
            else:
                tail[name.removeprefix(next_of(""))] = values
        return Batch(
            columns,
            width,
            tail_rows=tail_rows,
            tail=tail,
            state=state,
            run=self._origin.run,
            shard=self._origin.shard,
            incarnation=self._origin.incarnation,
            policy_version=policy_version,
            cuts=cuts,
            sealed=Sealed(self._plain, body, batch),
        )

    def _column(self, array: pa.Array, plan: _Plan, memory: _Memory) -> Column:
        spec = plan.spec
        *others, values = array.buffers()
        if any(other is not None for other in (others[:1] if spec.is_text else others)):
            raise ValueError(f"column {plan.name!r} has null values")
        if spec.is_text:
            text: Column = array.to_numpy(zero_copy_only=False)
            return text
        if spec.dtype == np.bool_ and not spec.shape:
            return _bits(memory, values, self._rows)
        return memory.array(values, spec, self._rows)

    def _sparse_column(self, array: pa.Array, plan: _Plan, memory: _Memory) -> Sparse:
        valid, offsets, *values = array.buffers()
        if valid is None:
            rows = np.arange(self._rows)
        else:
            rows = np.flatnonzero(_bits(memory, valid, self._rows))
        if plan.spec.is_text:
            return rows, array.drop_null().to_numpy(zero_copy_only=False)
        if values[0] is not None:
            raise ValueError(f"column {plan.name!r} has null values")
        found = memory.array(offsets, RowSpec(np.dtype(np.int32), ()), self._rows + 1)
        if found.tobytes() != SparseRows(rows, self._rows).offsets(plan.spec.items).tobytes():
            raise ValueError(f"the lists of column {plan.name!r} are not {plan.spec}")
        return rows, memory.array(values[1], plan.spec, len(rows))


class _Memory(NamedTuple):
    """The memory of a message; arrays are views of it, which pyarrow would make read-only."""

    body: Array
    address: int

    def array(self, buffer: pa.Buffer | None, spec: RowSpec, rows: int) -> Column:
        """Return the rows that a buffer of the message holds."""
        size = spec.nbytes * rows
        if not size:
            return np.empty((rows, *spec.shape), spec.dtype)
        start = -1 if buffer is None else buffer.address - self.address
        if buffer is None or buffer.size < size or not 0 <= start <= self.body.nbytes - size:
            raise ValueError(f"{rows:,} rows of {spec} are not in the message")
        flat = self.body[start : start + size]
        if spec.dtype == np.bool_ and flat.max() > 1:
            raise ValueError(f"a value of {flat.max()} is no boolean")
        column: Column = flat.view(spec.dtype)
        return column.reshape(rows, *spec.shape) if spec.shape else column


def _bits(memory: _Memory, buffer: pa.Buffer | None, rows: int) -> npt.NDArray[np.bool_]:
    packed = memory.array(buffer, RowSpec(np.dtype(np.uint8), ()), (rows + 7) // 8)
    return np.unpackbits(packed, count=rows, bitorder="little").view(np.bool_)


def largest_fragment(rows: int, obs: Layout, action: Layout, extras: int) -> int:
    """Return the most bytes that the message of a fragment of ``rows`` may have.

    ``extras`` are bytes per row for the policy's columns, recurrent state and text.
    """
    # Every row may be a tail row, with a next observation of its own, and has offsets of them.
    own = 2 * obs.nbytes + action.nbytes + 8 * len(obs.leaves) + _OWN_BYTES
    return _METADATA_BYTES + rows * (own + extras)
