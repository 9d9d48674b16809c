"""The sum tree against a plain list of numbers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from batches import Fleet, Vector

from clusterenv.store import Prioritized, ReplayStore
from clusterenv.store.samplers import sum_tree
from clusterenv.store.samplers.sum_tree import Level, SumTree
from clusterenv.store.samplers.sum_tree_numba import CompiledLevel

both = pytest.mark.parametrize("level", [Level, CompiledLevel])


def found_in(leaves: list[float], number: float) -> int:
    """Return the leaf at which the running sum passes a number."""
    for at, running in enumerate(itertools.accumulate(leaves)):
        if number < running:
            return at
    return len(leaves) - 1


@both
@pytest.mark.parametrize("size", [1, 2, 5, 1023, 1024, 1025, 3000, 70_001])
def test_numbers_are_found_where_the_running_sum_passes_them(size: int, level: type[Level]) -> None:
    rng = np.random.default_rng(size)
    tree, leaves = SumTree(size, level), [0.0] * size
    for _ in range(5):
        at = rng.integers(0, size, 40)
        values = rng.integers(0, 8, 40).astype(np.float64)  # sums of these are exact
        tree.put(at, values)
        for index, value in zip(at.tolist(), values.tolist(), strict=True):
            leaves[index] = value
        start = int(rng.integers(0, size))
        end = int(rng.integers(start, size)) + 1
        tree.put_range(start, end, 2.0)
        leaves[start:end] = [2.0] * (end - start)
        zeros = int(rng.integers(0, size - end + 1))
        tree.put_range(start, end, 3.0, zeros=zeros)
        leaves[start : end + zeros] = [3.0] * (end - start) + [0.0] * zeros
    assert tree.leaves[:size].tolist() == leaves
    assert tree.total == sum(leaves)
    numbers = rng.integers(0, int(tree.total), 30) + 0.5
    assert tree.find(numbers).tolist() == [found_in(leaves, number) for number in numbers]


@both
def test_a_leaf_given_twice_has_the_later_value(level: type[Level]) -> None:
    tree = SumTree(3000, level)
    tree.put(np.array([7, 7, 2999, 7]), np.array([5.0, 6.0, 1.0, 2.0]))
    assert tree.total == 3.0
    assert tree.leaves[7] == 2.0


@both
def test_sums_do_not_drift_however_often_leaves_change(level: type[Level]) -> None:
    rng = np.random.default_rng(0)
    tree = SumTree(5000, level)
    for _ in range(300):
        tree.put(rng.integers(0, 5000, 64), rng.random(64) * 10.0 ** rng.integers(-12, 12))
    tree.put_range(0, 5000, 0.0)
    assert tree.total == 0
    tree.put(np.array([4321]), np.array([0.25]))
    assert tree.total == 0.25
    assert tree.find(np.array([0.1])).tolist() == [4321]


@both
def test_an_empty_range_changes_nothing(level: type[Level]) -> None:
    tree = SumTree(5000, level)
    tree.put_range(3, 4000, 1.0)
    tree.put_range(10, 10, 7.0)
    tree.put(np.empty(0, np.int64), np.empty(0))
    assert tree.total == 3997


def test_compiled_loops_give_the_same_to_the_last_bit() -> None:
    rng = np.random.default_rng(3)
    plain, compiled = SumTree(40_000, Level), SumTree(40_000, CompiledLevel)
    for _ in range(50):
        at, values = rng.integers(0, 40_000, 256), rng.random(256) ** 8
        start, end = sorted(rng.integers(0, 40_000, 2).tolist())
        for tree in (plain, compiled):
            tree.put_range(start, end, 0.1, zeros=min(7, 40_000 - end))
            tree.put(at, values)
        assert plain.total == compiled.total
        sums = rng.random(256) * plain.total
        assert plain.find(sums).tolist() == compiled.find(sums).tolist()


@pytest.fixture
def uncached_level() -> Iterator[None]:
    """Choose the kind of level again, here and afterwards."""
    sum_tree._level_kind.cache_clear()
    yield
    sum_tree._level_kind.cache_clear()


@pytest.mark.usefixtures("uncached_level")
def test_numba_is_used_where_it_is_and_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum_tree._level_kind() is CompiledLevel
    sum_tree._level_kind.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)  # as if it were not installed
    assert sum_tree._level_kind() is Level


@pytest.mark.usefixtures("uncached_level")
def test_a_numba_that_does_not_fit_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "clusterenv.store.samplers.sum_tree_numba", None)
    assert sum_tree._level_kind() is Level
    assert "without Numba" in caplog.text


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
def test_indices_of_any_integer_type_set_priorities(dtype: type) -> None:
    fleet = Fleet(Vector(), shards=1, envs=8, horizon=512)
    with ReplayStore(4096, sampler=Prioritized()) as store:  # so many that there are levels
        store.add(fleet.next()[0])
        store.update_priorities(np.arange(200, dtype=dtype), np.full(200, 9.0))
        tree = store.sampler._tree  # type: ignore[attr-defined]
        assert tree.total == pytest.approx(tree.leaves.sum())


def test_damaged_files_of_compiled_loops_do_no_harm(tmp_path: Path) -> None:
    code = "from clusterenv.store.samplers.sum_tree_numba import CompiledLevel"
    command = [sys.executable, "-c", code]
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run(command, env=env, check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(b"")
    subprocess.run(command, env=env, check=True)
