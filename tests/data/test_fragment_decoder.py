"""What the head does with messages that are not what they must be: it refuses them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from gymnasium import spaces
from sealed import ORIGIN, expected, fragment, sealed

from clusterenv import Batch
from clusterenv.data.fragment_decoder import ExpectedRows, FragmentDecoder, largest_fragment
from clusterenv.data.fragment_encoder import FragmentEncoder
from clusterenv.data.spaces import Layout


@pytest.fixture
def message() -> tuple[FragmentDecoder, np.ndarray]:
    schema, body = sealed(FragmentEncoder(ORIGIN), fragment())
    assert schema is not None
    return FragmentDecoder(schema, expected()), body


def check(batch: Batch) -> None:
    """Fail unless everything in a batch has the length that it must have."""
    assert batch.num_rows == 6
    for name in batch.names:
        assert len(batch.flat(name)) == 6
        batch.flat(name).copy()
    assert len(batch.tail_rows) >= 2
    for tail in batch.tail.values():
        assert len(tail) == len(batch.tail_rows)
    for state in batch.state.values():
        assert len(state) == 2
    batch.next_obs()
    batch.torch()
    batch.record_batch.to_pylist()


def test_a_message_that_was_cut_is_refused(message: tuple[FragmentDecoder, np.ndarray]) -> None:
    decoder, body = message
    for size in range(len(body)):
        with pytest.raises(ValueError, match=r"."):
            decoder.decode(body[:size], 7)
    with pytest.raises(ValueError, match=r"a message of .* bytes in"):
        decoder.decode(np.concatenate([body, np.zeros(8, np.uint8)]), 7)


def test_no_altered_byte_gives_a_batch_of_wrong_lengths(
    message: tuple[FragmentDecoder, np.ndarray],
) -> None:
    decoder, body = message
    good = refused = 0
    for at in range(len(body)):
        for flip in (0x01, 0x80, 0xFF):
            altered = body.copy()
            altered[at] ^= flip
            try:
                batch = decoder.decode(altered, 7)
            except ValueError:
                refused += 1
            else:
                good += 1
                check(batch)
    assert refused > 500  # in metadata, offsets, bits and origin
    assert good > 500  # in numbers, where any value is one


def test_many_altered_bytes_never_give_a_batch_of_wrong_lengths(
    message: tuple[FragmentDecoder, np.ndarray],
) -> None:
    decoder, body = message
    rng = np.random.default_rng(0)
    for _ in range(3000):
        altered = body.copy()
        at = rng.integers(0, rng.choice([100, 1600, len(body)]), rng.integers(1, 9))
        altered[at] = rng.choice([0, 1, 127, 255, int(rng.integers(256))], len(at))
        try:
            check(decoder.decode(altered, 7))
        except ValueError:
            pass


def test_bytes_that_are_no_message_are_refused(
    message: tuple[FragmentDecoder, np.ndarray],
) -> None:
    decoder, body = message
    rows = decoder.decode(body, 7).record_batch
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, rows.schema) as writer:
        writer.write(rows)
    others = [
        b"",
        bytes(8),
        b"\xff" * 64,
        pickle.dumps(rows.to_pydict()),
        rows.schema.serialize().to_pybytes(),
        stream.getvalue().to_pybytes(),
        json.dumps({"rows": 6}).encode(),
    ]
    for raw in others:
        with pytest.raises(ValueError, match=r"."):
            decoder.decode(np.frombuffer(raw, np.uint8), 7)


def encoded(rows: pa.RecordBatch, **options: Any) -> np.ndarray:
    if not options:
        return np.frombuffer(rows.serialize(), np.uint8)
    sink = pa.BufferOutputStream()
    writer = pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(**options))
    writer.write_batch(rows)
    stream = sink.getvalue()
    begin = rows.schema.serialize().size
    return np.frombuffer(stream, np.uint8)[begin:]


def with_column(rows: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    columns = [column if field.name == name else rows.column(field.name) for field in rows.schema]
    return pa.record_batch(columns, schema=rows.schema)


def lists(rows: list[int], items: int = 3) -> pa.Array:
    """Return lists of numbers in some of six rows."""
    return pa.array(
        [[0.5] * items if k in rows else None for k in range(6)], pa.list_(pa.float32())
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rows: rows.slice(0, 4), "4 rows instead of 6"),
        (
            lambda rows: with_column(rows, "run", pa.array([1] * 6)),
            "a row is not of run 2305843009",
        ),
        (
            lambda rows: with_column(rows, "shard", pa.array([3, 3, 3, 3, 3, 2], pa.int32())),
            "a row is not of shard 3",
        ),
        (
            lambda rows: with_column(rows, "env", pa.array([6, 7, 6, 7, 6, 8], pa.int32())),
            "environments 6–8 are not of this shard",
        ),
        (
            lambda rows: with_column(rows, "reward", pa.array([1.0] * 5 + [None], pa.float32())),
            "column 'reward' has null values",
        ),
        (
            lambda rows: with_column(rows, "obs.mission", pa.array(["a"] * 5 + [None])),
            "column 'obs.mission' has null values",
        ),
        (
            lambda rows: with_column(rows, "next_obs.speed", lists([4, 5])),
            "column 'next_obs.speed' has values in other rows",
        ),
        (
            lambda rows: with_column(rows, "next_obs.speed", lists([0, 4, 5], items=2)),
            r"lists of column 'next_obs.speed' are not float32 \[3\]",
        ),
        (
            lambda rows: with_column(rows, "state.h", lists([0])),
            "column 'state.h' has values in other rows",
        ),
        (
            lambda rows: with_column(
                rows, "state.h", pa.array([[1, 2, None]] * 2 + [None] * 4, pa.list_(pa.float32()))
            ),
            "column 'state.h' has null values",
        ),
    ],
)
def test_rows_that_are_not_those_of_a_fragment_are_refused(
    message: tuple[FragmentDecoder, np.ndarray],
    change: Callable[[pa.RecordBatch], pa.RecordBatch],
    says: str,
) -> None:
    decoder, body = message
    rows = decoder.decode(body, 7).record_batch
    check(decoder.decode(encoded(rows), 7))
    with pytest.raises(ValueError, match=says):
        decoder.decode(encoded(change(rows)), 7)


def test_compressed_columns_are_refused(message: tuple[FragmentDecoder, np.ndarray]) -> None:
    decoder, body = message
    rows = decoder.decode(body, 7).record_batch
    with pytest.raises(ValueError, match="are not in the message"):
        decoder.decode(encoded(rows, compression="zstd"), 7)


def renamed(schema: pa.Schema, column: str, **changes: Any) -> pa.Schema:
    at, field = schema.get_field_index(column), schema.field(column)
    new = pa.field(
        changes.get("name", column), changes.get("type", field.type), metadata=field.metadata
    )
    return schema.set(at, new)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.with_metadata(None), "does not tell run, shard, incarnation, num_envs, first"),
        (lambda s: s.with_metadata({**s.metadata, b"shard": b"4"}), "shard is 4, not 3"),
        (lambda s: s.with_metadata({**s.metadata, b"run": b"x"}), "invalid literal"),
        (lambda s: s.with_metadata({**s.metadata, b"format": b"2"}), "format is 2, not 1"),
        (lambda s: s.with_metadata({**s.metadata, b"num_envs": b"3"}), "num_envs is 3, not 2"),
        (lambda s: renamed(s, "obs.speed", name="obs.s"), "column 'obs.speed' is missing; there"),
        (lambda s: renamed(s, "reward", type=pa.float64()), r"'reward' is float64 \[\] \(double\)"),
        (lambda s: renamed(s, "next_obs.level", type=pa.int64()), "'next_obs.level' is int64"),
        (lambda s: renamed(s, "action", name="reward"), "a column is there twice"),
        (
            lambda s: renamed(s, "log_prob", type=pa.timestamp("s")),
            "'log_prob' is of type timestamp",
        ),
        (lambda s: renamed(s, "state.h", name="memory"), r"'memory' is a list.*which it cannot be"),
        (lambda s: renamed(s, "state.h", type=pa.list_(pa.string())), "is of type string"),
    ],
)
def test_a_schema_of_another_shard_or_environment_is_named(
    change: Callable[[pa.Schema], pa.Schema], says: str
) -> None:
    raw = sealed(FragmentEncoder(ORIGIN), fragment())[0]
    schema = pa.ipc.read_schema(pa.py_buffer(raw))
    FragmentDecoder(schema.serialize().to_pybytes(), expected())
    with pytest.raises(ValueError, match=says):
        FragmentDecoder(change(schema).serialize().to_pybytes(), expected())


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (expected(obs=Layout(spaces.Box(0, 1, (3,)))), "column 'obs' is missing"),
        (expected(action=Layout(spaces.Box(0, 1, (2,)))), "'action' is int64 .* not float32"),
        (expected(origin=ORIGIN._replace(first_env=0)), "first_env is 6, not 0"),
        (expected(text=False), "'next_obs.mission' is a string, which it cannot be"),
    ],
)
def test_the_spaces_say_what_the_schema_must_be(wanted: ExpectedRows, says: str) -> None:
    raw = sealed(FragmentEncoder(ORIGIN), fragment())[0]
    assert raw is not None
    with pytest.raises(ValueError, match=says):
        FragmentDecoder(raw, wanted)


def test_an_altered_schema_is_refused_or_that_of_the_shard() -> None:
    raw, body = sealed(FragmentEncoder(ORIGIN), fragment())
    assert raw is not None
    for at in range(len(raw)):
        with pytest.raises(ValueError, match=r"."):
            FragmentDecoder(raw[:at], expected())
        for flip in (0x01, 0xFF):
            altered = bytearray(raw)
            altered[at] ^= flip
            try:
                check(FragmentDecoder(bytes(altered), expected()).decode(body, 7))
            except ValueError:
                pass
    for other in (b"", pickle.dumps({"reward": "f4"}), b"\xff" * 64):
        with pytest.raises(ValueError, match=r"."):
            FragmentDecoder(other, expected())


def test_the_version_of_a_fragment_is_the_oldest_of_its_first_time_row(
    message: tuple[FragmentDecoder, np.ndarray],
) -> None:
    decoder, body = message
    rows = decoder.decode(body, 7).record_batch
    switched = encoded(with_column(rows, "version", pa.array([8, 7, 9, 9, 9, 6], pa.int32())))
    assert decoder.decode(switched, 7).policy_version == 7
    for version in (6, 8, 2**62):
        with pytest.raises(ValueError, match=f"begin with version 7, and not {version}"):
            decoder.decode(switched, version)


def test_a_fragment_of_a_shorter_horizon_is_refused() -> None:
    schema, body = sealed(FragmentEncoder(ORIGIN), fragment(horizon=2))
    assert schema is not None
    with pytest.raises(ValueError, match="4 rows instead of 6"):
        FragmentDecoder(schema, expected()).decode(body, 7)


def test_a_fragment_is_bounded_by_its_rows_and_spaces() -> None:
    obs = Layout(spaces.Box(0, 255, (84, 84, 4), np.uint8))
    action = Layout(spaces.Discrete(4))
    frame, none = 84 * 84 * 4, largest_fragment(0, obs, action, extras=0)
    assert 2 * frame < largest_fragment(1, obs, action, extras=0) - none < 2 * frame + 200
    with_extras = largest_fragment(10, obs, action, extras=7) - none
    assert with_extras == 10 * (largest_fragment(1, obs, action, extras=0) - none + 7)


def test_the_largest_fragment_holds_every_fragment_without_extras() -> None:
    given = fragment(horizon=1)
    own = ("action_mask", "log_prob", "obs.mission")
    given = replace(
        given, state={}, columns={k: c for k, c in given.columns.items() if k not in own}
    )
    given.tail.pop("obs.mission")
    obs = Layout(expected().obs.space)
    assert len(sealed(FragmentEncoder(ORIGIN), given)[1]) <= largest_fragment(
        2, obs, expected().action, extras=0
    )
