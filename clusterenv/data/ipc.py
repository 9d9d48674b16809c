"""Arrow IPC messages: written without copying, and read from mapped or received memory.

A stream is a schema message, any number of record-batch messages, and an end marker. Each message
is complete in itself, so one that was received can be appended to a stream of the same columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

__all__ = ["END_OF_STREAM", "MessageWriter", "read_message", "record_batches"]

END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_FILE_MAGIC = b"ARROW1"
_PREFIX_BYTES = 8  # before the metadata: a marker, and the size of the metadata
_SMALL = 4096  # bytes; shorter pieces are joined, so that TLS does not encrypt each by itself


class MessageWriter:
    """Writes record batches of one schema as IPC messages, without copying their columns.

    Examples
    --------
    >>> rows = pa.record_batch({"reward": [1.0, 2.0]})
    >>> message = b"".join(MessageWriter(rows.schema).message(rows))
    >>> stream = rows.schema.serialize().to_pybytes() + message + END_OF_STREAM
    >>> pa.ipc.open_stream(stream).read_all().num_rows
    2
    """

    closed = False  # Arrow uses this object as a file: write, tell, flush and close

    def __init__(self, schema: pa.Schema) -> None:
        self._pieces: list[memoryview] = []
        self._small = bytearray()
        self._written = 0
        self._writer = pa.ipc.new_stream(pa.PythonFile(self, "w"), schema)
        empty = [pa.array([], field.type) for field in schema]
        self.message(pa.record_batch(empty, schema=schema))  # Arrow writes the schema before it

    def message(self, rows: pa.RecordBatch) -> list[memoryview]:
        """Return the pieces of a record batch's message; they share the columns' memory."""
        self._pieces = []
        self._writer.write_batch(rows)
        self._join_small()
        return self._pieces

    def write(self, data: Any) -> int:
        size = len(data)
        if size < _SMALL:
            self._small += data
        else:
            self._join_small()
            self._pieces.append(memoryview(data).cast("B"))
        self._written += size
        return size

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _join_small(self) -> None:
        if self._small:
            self._pieces.append(memoryview(self._small))
            self._small = bytearray()


def read_message(raw: pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Return the record batch of a message, as views of it; raise ``ValueError`` if malformed.

    All offsets, lengths and text are checked, so reading the columns never leaves the message.
    """
    try:
        message = pa.ipc.read_message(raw)
        size = _PREFIX_BYTES + message.metadata.size + message.body.size
        if size != raw.size:
            raise ValueError(f"a message of {size:,} bytes in {raw.size:,}")
        rows = pa.ipc.read_record_batch(message, schema)
        rows.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, EOFError, NotImplementedError) as error:
        raise ValueError(str(error)) from error
    return rows


def record_batches(buffer: pa.Buffer) -> Iterator[pa.RecordBatch]:
    """Yield the record batches of a stream, or of an IPC file, as views of the buffer."""
    if buffer[: len(_FILE_MAGIC)].to_pybytes() == _FILE_MAGIC:
        file = pa.ipc.open_file(buffer)
        yield from (file.get_batch(index) for index in range(file.num_record_batches))
    else:
        yield from pa.ipc.open_stream(buffer)
