"""Fragments as Arrow messages: nothing is lost, and plain Arrow reads them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from compare import assert_same
from sealed import HORIZON, ORIGIN, expected, fragment, sealed

from clusterenv.data.fragment import Fragment
from clusterenv.data.fragment_decoder import FragmentDecoder
from clusterenv.data.fragment_encoder import FragmentEncoder
from clusterenv.errors import ConfigError


@pytest.mark.parametrize("horizon", [1, HORIZON, 40])
def test_a_fragment_is_decoded_as_it_was_encoded(horizon: int) -> None:
    encoder, decoder = FragmentEncoder(ORIGIN), None
    for seed in range(3):
        sent = fragment(seed, horizon)
        schema, body = sealed(encoder, sent)
        assert (schema is not None) == (seed == 0)
        if schema is not None:
            decoder = FragmentDecoder(schema, expected(horizon=horizon))
        assert decoder is not None
        batch = decoder.decode(body, policy_version=7)
        assert batch.names == list(sent.columns)
        assert_same({name: batch.flat(name) for name in batch.names}, sent.columns)
        order = np.argsort(sent.tail_rows)
        assert batch.tail_rows.tolist() == sent.tail_rows[order].tolist()
        assert_same(batch.tail, {name: column[order] for name, column in sent.tail.items()})
        assert_same(batch.state, sent.state)
        assert (batch.run, batch.shard, batch.incarnation) == ORIGIN[:3]
        assert (batch.num_envs, batch.horizon, batch.policy_version) == (2, horizon, 7)


def test_columns_share_the_memory_that_was_received() -> None:
    schema, body = sealed(FragmentEncoder(ORIGIN), fragment())
    assert schema is not None
    batch = FragmentDecoder(schema, expected()).decode(body, 7)
    copied = {"terminated", "truncated", "obs.mission"}
    for name in batch.names:
        assert np.shares_memory(batch.flat(name), body) == (name not in copied), name
    for name, column in batch.tail.items():
        assert np.shares_memory(column, body) == (name not in copied), name
    assert np.shares_memory(batch.state["h"], body)
    assert batch.flat("reward").flags.writeable  # torch warns of memory that is not
    assert batch.sealed is not None
    assert batch.record_batch is batch.sealed.record_batch
    own = batch.record_batch.column("obs.speed").flatten().buffers()[1].address
    assert body.ctypes.data < own < body.ctypes.data + body.nbytes


def test_large_columns_are_not_copied_for_the_message() -> None:
    sent = fragment(horizon=20_000)
    pieces = FragmentEncoder(ORIGIN).encode(sent)[1]
    arrays = [np.frombuffer(piece, np.uint8) for piece in pieces]
    for name in ("obs.frame", "obs.speed", "reward", "action"):
        column = sent.columns[name]
        assert any(np.shares_memory(column, array) for array in arrays), name
    assert len(pieces) < 60


def test_plain_arrow_reads_rows_tails_state_and_origin() -> None:
    sent = fragment()
    schema, body = sealed(FragmentEncoder(ORIGIN), sent)
    assert schema is not None
    table = pa.ipc.open_stream(schema + body.tobytes()).read_all()
    assert table.schema.metadata == {k.encode(): v.encode() for k, v in ORIGIN.metadata().items()}
    assert table["obs.mission"].to_pylist() == sent.columns["obs.mission"].tolist()
    assert table["run"].to_pylist() == [ORIGIN.run] * 6
    ends = table["next_obs.speed"].to_pylist()
    assert [row for row, end in enumerate(ends) if end is not None] == [0, 4, 5]
    at = sent.tail_rows.tolist().index(5)
    assert ends[5] == sent.tail["obs.speed"][at].tolist()
    assert table["next_obs.mission"].to_pylist()[5] == sent.tail["obs.mission"][at]
    assert table["state.h"].to_pylist()[:2] == sent.state["h"].tolist()
    assert table["state.h"].null_count == 4


def test_a_schema_is_sent_again_when_the_columns_change() -> None:
    encoder = FragmentEncoder(ORIGIN)
    assert sealed(encoder, fragment(0))[0] is not None
    assert sealed(encoder, fragment(1))[0] is None
    less = fragment(2)
    del less.columns["action_mask"]
    schema, body = sealed(encoder, less)
    assert schema is not None
    batch = FragmentDecoder(schema, expected()).decode(body, 7)
    assert "action_mask" not in batch.names
    wide = fragment(3)
    wide.columns["log_prob"] = wide.columns["log_prob"].astype(np.float64)
    assert sealed(encoder, wide)[0] is not None


def test_missing_text_is_not_taken_for_an_empty_one() -> None:
    given = fragment()
    given.columns["obs.mission"][2] = None
    with pytest.raises(ValueError, match="row 2 of a column of text is None"):
        FragmentEncoder(ORIGIN).encode(given)


def changed(given: Fragment, **columns: np.ndarray) -> Fragment:
    return replace(given, columns={**given.columns, **columns})


@pytest.mark.parametrize("dtype", [np.complex64, "datetime64[s]", ">f4"])
def test_what_arrow_cannot_hold_is_named(dtype: str) -> None:
    given = changed(fragment(), log_prob=np.zeros(6, dtype))
    with pytest.raises(ConfigError, match=r"column 'log_prob' is of dtype .* cannot hold; use"):
        FragmentEncoder(ORIGIN).encode(given)
