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

from clusterenv.data.arrow import RowSpec, field_of, sparse_field_of, spec_of
from clusterenv.data.batch import Batch, Sealed
from clusterenv.data.fragment import Cut
from clusterenv.data.ipc import read_message
from clusterenv.data.record_batch import ORIGIN, STATE, Origin, is_sparse, next_of
from clusterenv.data.spaces import Array, Column, Layout

__all__ = ["ExpectedRows", "FragmentDecoder", "largest_fragment"]

_OWN_BYTES = 128  # of a row, besides observation, action and the policy's columns
_METADATA_BYTES = 1 << 16  # of a message
_NEXT = next_of("")
Rows = npt.NDArray[np.int64]
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

    at: int
    name: str
    spec: RowSpec
    kind: str
    """``text``, ``bits`` or ``numbers``."""
    items: int
    """Numbers of one row."""
    nbytes: int
    """Bytes of one row of numbers."""
    nested: bool
    """Whether a row is a list."""

    @classmethod
    def of(cls, at: int, field: pa.Field) -> _Plan:
        spec = spec_of(field)
        kind = "bits" if pa.types.is_boolean(field.type) else "numbers"
        kind = "text" if spec.is_text else kind
        nested = pa.types.is_fixed_size_list(field.type)
        return cls(at, field.name, spec, kind, spec.items, spec.nbytes, nested)


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
        fields = list(enumerate(self._schema))
        self._dense = [_Plan.of(at, field) for at, field in fields if not is_sparse(field)]
        self._sparse = [_Plan.of(at, field) for at, field in fields if is_sparse(field)]
        self._first_rows = np.arange(origin.num_envs)

    def decode(self, body: Array, policy_version: int, cuts: Sequence[Cut] = ()) -> Batch:
        """Return the batch of a message, as views of it; raise ``ValueError`` if it is invalid.

        ``policy_version`` must be the oldest of the first time row.
        """
        raw = pa.py_buffer(body)
        batch = read_message(raw, self._schema)
        if batch.num_rows != self._rows:
            raise ValueError(f"{batch.num_rows:,} rows instead of {self._rows:,}")
        memory = _Memory(body, raw.address)
        arrays = batch.columns
        columns = {plan.name: self._column(arrays[plan.at], plan, memory) for plan in self._dense}
        for name in ORIGIN:
            constant = getattr(self._origin, name)
            if not (columns.pop(name) == constant).all():
                raise ValueError(f"a row is not of {name} {constant}")
        env, first, width = columns["env"], self._origin.first_env, self._origin.num_envs
        if env.min() < first or env.max() >= first + width:
            raise ValueError(f"environments {env.min()}–{env.max()} are not of this shard")
        oldest = columns["version"][:width].min()
        if oldest != policy_version:
            raise ValueError(f"its rows begin with version {oldest}, and not {policy_version}")
        ends = columns["terminated"] | columns["truncated"]
        ends[-width:] = True
        tail_rows = np.flatnonzero(ends)
        tail, state = {}, {}
        for plan in self._sparse:
            array, name = arrays[plan.at], plan.name
            if name.startswith(STATE):
                values = self._values(array, plan, self._first_rows, memory)
                state[name.removeprefix(STATE)] = values
            else:
                tail[name.removeprefix(_NEXT)] = self._values(array, plan, tail_rows, memory)
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
        buffers = array.buffers()
        if buffers[0] is not None or (plan.nested and buffers[1] is not None):
            raise ValueError(f"column {plan.name!r} has null values")
        if plan.kind == "numbers":
            return memory.numbers(buffers[-1], plan, self._rows)
        if plan.kind == "bits":
            return memory.bits(buffers[1], self._rows)
        text: Column = array.to_numpy(zero_copy_only=False)
        return text

    def _values(self, array: pa.Array, plan: _Plan, rows: Rows, memory: _Memory) -> Column:
        """Return the values of a sparse column, which must be in these rows and no others."""
        valid, offsets, *values = array.buffers()
        count = len(rows)
        same = array.null_count == self._rows - count
        if not same or (valid is not None and not memory.bits(valid, self._rows)[rows].all()):
            raise ValueError(f"column {plan.name!r} has values in other rows than it must")
        if plan.kind == "text":
            text: Column = array.drop_null().to_numpy(zero_copy_only=False)
            return text
        if values[0] is not None:
            raise ValueError(f"column {plan.name!r} has null values")
        # They never decrease, which Arrow has checked: so all other rows are empty.
        starts = memory.view(offsets, 4 * (self._rows + 1)).view(np.int32)
        ends = np.arange(count + 1) * plan.items
        right = (starts.take(rows) == ends[:-1]).all() and (starts.take(rows + 1) == ends[1:]).all()
        if not right or starts[-1] != count * plan.items:
            raise ValueError(f"the lists of column {plan.name!r} are not {plan.spec}")
        return memory.numbers(values[1], plan, count)


class _Memory(NamedTuple):
    """The memory of a message; arrays are views of it, which pyarrow would make read-only."""

    body: Array
    address: int

    def view(self, buffer: pa.Buffer | None, size: int) -> Column:
        """Return the first bytes of a buffer of the message."""
        if not size:
            return np.empty(0, np.uint8)
        start = -1 if buffer is None else buffer.address - self.address
        if buffer is None or buffer.size < size or not 0 <= start <= len(self.body) - size:
            raise ValueError(f"{size:,} bytes of a column are not in the message")
        found: Column = self.body[start : start + size]
        return found

    def numbers(self, buffer: pa.Buffer | None, plan: _Plan, rows: int) -> Column:
        """Return so many rows of numbers."""
        dtype, shape = plan.spec
        flat = self.view(buffer, plan.nbytes * rows)
        if dtype.kind == "b" and flat.size and flat.max() > 1:
            raise ValueError(f"a value of {flat.max()} in column {plan.name!r} is no boolean")
        column = flat.view(dtype)
        return column.reshape(rows, *shape) if shape else column

    def bits(self, buffer: pa.Buffer | None, rows: int) -> Column:
        """Return so many booleans."""
        packed = self.view(buffer, (rows + 7) // 8)
        return np.unpackbits(packed, count=rows, bitorder="little").view(np.bool_)


def largest_fragment(rows: int, obs: Layout, action: Layout, extras: int) -> int:
    """Return the most bytes that the message of a fragment of ``rows`` may have.

    ``extras`` are bytes per row for the policy's columns, recurrent state and text.
    """
    # Every row may be a tail row, with a next observation of its own, and has offsets of them.
    own = 2 * obs.nbytes + action.nbytes + 8 * len(obs.leaves) + _OWN_BYTES
    return _METADATA_BYTES + rows * (own + extras)
