"""A shard that sends what is no fragment of its own is restarted, and none of it is a batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from collecting import check, collecting
from distributed import Client

pytestmark = [pytest.mark.usefixtures("leaves_nothing"), pytest.mark.timeout(120)]


@pytest.fixture
def sabotaged(client: Client, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A cluster of which every worker process sends one wrong message of a kind."""
    kind = request.param

    def sabotage() -> None:
        import pickle

        import numpy as np

        from clusterenv.data.fragment_encoder import FragmentEncoder
        from clusterenv.transport.messages import FragmentMeta

        encode, pack = FragmentEncoder.encode, FragmentMeta.pack

        def wrong_encode(self: Any, fragment: Any) -> Any:
            schema, pieces = encode(self, fragment)
            if FragmentEncoder.wrong:  # type: ignore[attr-defined]
                FragmentEncoder.wrong = False  # type: ignore[attr-defined]
                if kind == "cut":
                    pieces[-1] = pieces[-1][:-8]
                elif kind == "offsets":
                    whole = bytearray(b"".join(pieces))
                    whole[-2000:] = b"\xff" * 2000
                    pieces = [memoryview(whole)]
                elif kind == "pickle":
                    pieces = [memoryview(pickle.dumps(fragment.columns))]
                elif kind == "schema":
                    schema = schema.replace(b"incarnation", b"incarnatiom")
                elif kind == "shape":  # of a state, which no space tells
                    fragment.state = {"h": np.zeros((fragment.num_envs, *7 * [1]), np.float32)}
                    schema, pieces = encode(self, fragment)
                    schema = schema.replace(b"[1, 1, 1, 1, 1, 1, 1]", b"[%d]" % (10**19 - 1))
                elif kind == "no schema":
                    schema = None
                elif kind == "short":
                    n = fragment.num_envs
                    for name, column in fragment.columns.items():
                        fragment.columns[name] = column[n:]
                    fragment.tail_rows = np.maximum(fragment.tail_rows - n, 0)
                    pieces = encode(self, fragment)[1]
            return schema, pieces

        def wrong_pack(self: Any) -> bytes:
            if kind in ("meta", "nested", "version") and FragmentMeta.wrong:  # type: ignore[attr-defined]
                FragmentMeta.wrong = False  # type: ignore[attr-defined]
                nested = pack(self._replace(cuts=[])) + b"[" * 100_000
                newer = pack(self._replace(version=self.version + 1))
                sent = {"nested": nested, "version": newer, "meta": pickle.dumps(tuple(self))}
                return sent[kind]
            return pack(self)

        FragmentEncoder.wrong = FragmentMeta.wrong = True  # type: ignore[attr-defined]
        FragmentEncoder.original, FragmentMeta.original = encode, pack  # type: ignore[attr-defined]
        FragmentEncoder.encode = wrong_encode  # type: ignore[method-assign]
        FragmentMeta.pack = wrong_pack  # type: ignore[method-assign]

    def undo() -> None:
        from clusterenv.data.fragment_encoder import FragmentEncoder
        from clusterenv.transport.messages import FragmentMeta

        FragmentEncoder.encode = FragmentEncoder.original  # type: ignore[attr-defined, method-assign]
        FragmentMeta.pack = FragmentMeta.original  # type: ignore[attr-defined, method-assign]

    client.run(sabotage)
    yield client
    client.run(undo)


@pytest.mark.parametrize(
    "sabotaged",
    [
        "cut",
        "offsets",
        "pickle",
        "schema",
        "no schema",
        "shape",
        "short",
        "meta",
        "nested",
        "version",
    ],
    indirect=True,
)
def test_a_message_that_is_no_fragment_restarts_its_shard(
    sabotaged: Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "clusterenv")
    with collecting(sabotaged) as collector:
        batches = list(collector.collect(1500))
        stats = collector.stats()
    assert 1 <= stats.restarts <= 3
    assert "cannot be read" in caplog.text or "sent a schema that is not its own" in caplog.text
    assert all(batch.num_rows == 32 for batch in batches)
    check(batches)
