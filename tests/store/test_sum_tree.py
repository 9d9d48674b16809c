"""The sum tree against a plain list of numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from clusterenv.store.sum_tree import SumTree


def found_in(leaves: list[float], number: float) -> int:
    """Return the leaf at which the running sum passes a number."""
    for at, running in enumerate(itertools.accumulate(leaves)):
        if number < running:
            return at
    return len(leaves) - 1


@pytest.mark.parametrize("size", [1, 2, 5, 1023, 1024, 1025, 3000, 70_001])
def test_numbers_are_found_where_the_running_sum_passes_them(size: int) -> None:
    rng = np.random.default_rng(size)
    tree, leaves = SumTree(size), [0.0] * size
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


def test_a_leaf_given_twice_has_the_later_value() -> None:
    tree = SumTree(3000)
    tree.put(np.array([7, 7, 2999, 7]), np.array([5.0, 6.0, 1.0, 2.0]))
    assert tree.total == 3.0
    assert tree.leaves[7] == 2.0


def test_sums_do_not_drift_however_often_leaves_change() -> None:
    rng = np.random.default_rng(0)
    tree = SumTree(5000)
    for _ in range(300):
        tree.put(rng.integers(0, 5000, 64), rng.random(64) * 10.0 ** rng.integers(-12, 12))
    tree.put_range(0, 5000, 0.0)
    assert tree.total == 0
    tree.put(np.array([4321]), np.array([0.25]))
    assert tree.total == 0.25
    assert tree.find(np.array([0.1])).tolist() == [4321]


def test_an_empty_range_changes_nothing() -> None:
    tree = SumTree(5000)
    tree.put_range(3, 4000, 1.0)
    tree.put_range(10, 10, 7.0)
    tree.put(np.empty(0, np.int64), np.empty(0))
    assert tree.total == 3997
