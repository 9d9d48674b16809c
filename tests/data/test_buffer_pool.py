"""Memory is reused only when no array refers to it, and no more of it is kept than a bound."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from clusterenv.data import buffer_pool
from clusterenv.data.buffer_pool import LARGE, BufferPool

BYTES = np.dtype(np.uint8)


def place(array: np.ndarray[Any, Any]) -> int:
    return int(array.ctypes.data)


def test_memory_that_is_no_longer_referenced_is_reused() -> None:
    pool = BufferPool()
    first = pool.empty((300, 84, 84), BYTES)
    at = place(first)
    del first
    again = pool.empty((75, 84, 84), np.dtype(np.float32))  # other rows, as many bytes
    assert (place(again), again.shape, again.dtype) == (at, (75, 84, 84), np.float32)
    assert again.flags.c_contiguous
    assert again.flags.writeable


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "row": lambda array: array[7],
    "reshaped": lambda array: array.reshape(-1)[5:],
    "viewed": lambda array: array.view(np.int16),
    "tensor": torch.from_numpy,
    "part of a tensor": lambda array: torch.from_numpy(array)[3:5],
    "memory": memoryview,
    "arrow": lambda array: pa.array(array.reshape(-1)),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_is_still_referenced_is_not_reused(holder: str) -> None:
    pool = BufferPool()
    array = pool.empty((300, 7056), BYTES)
    array[:] = 7
    at, held = place(array), HOLDERS[holder](array)
    del array
    gc.collect()
    other = pool.empty((300, 7056), BYTES)
    other[:] = 9
    assert place(other) != at
    assert (np.asarray(held).view(np.uint8) == 7).all()
    del held
    assert place(pool.empty((300, 7056), BYTES)) == at


def test_memory_that_another_thread_frees_is_reused() -> None:
    pool = BufferPool()
    held = [pool.empty((2 * LARGE,), BYTES)]
    at = place(held[0])
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert place(pool.empty((2 * LARGE,), BYTES)) == at


def test_free_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_pool, "_MAX_FREE", 5 * LARGE)
    pool = BufferPool()
    arrays = [pool.empty((2 * LARGE,), BYTES) for _ in range(4)]
    del arrays
    assert pool.free_bytes == 4 * LARGE
    other = pool.empty((3 * LARGE,), BYTES)
    at = place(other)
    del other  # what is not used any more makes room
    assert place(pool.empty((3 * LARGE,), BYTES)) == at


def test_threads_that_allocate_and_free_at_once_never_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buffer_pool, "_MAX_FREE", 12 * LARGE)
    pool, wrong = BufferPool(), []

    def work(mark: int) -> None:
        rng = np.random.default_rng(mark)
        for _ in range(300):
            size = int(rng.integers(LARGE, 5 * LARGE))
            array = pool.empty((size,), BYTES)
            array[::4096] = mark
            if (array[::4096] != mark).any() or len(array) != size:
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert pool.free_bytes <= 12 * LARGE


def test_an_array_outlives_its_pool() -> None:
    array = BufferPool().empty((LARGE,), BYTES)
    array[:] = 3
    gc.collect()
    assert (array == 3).all()


@pytest.mark.parametrize("nbytes", [LARGE, LARGE + 1, 3 * LARGE - 1, 14_450_688])
def test_sizes_are_rounded_by_an_eighth_at_most(nbytes: int) -> None:
    assert nbytes <= buffer_pool._rounded(nbytes) <= nbytes * 9 / 8
