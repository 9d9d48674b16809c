"""Packed and merged infos equal Gymnasium's own, without any cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compare import assert_same
from gymnasium.vector import VectorEnv

from clusterenv.data.infos import Rows, VectorInfo, merge, merge_vector, pack


def gymnasium_merge(infos: list[list[dict[str, Any]]]) -> dict[str, Any]:
    env: VectorEnv[Any, Any, Any] = VectorEnv()
    env.num_envs = len(infos)
    merged: dict[str, Any] = {}
    for index, each in enumerate(infos):
        for info in each:
            merged = env._add_info(merged, info, index)
    return merged


def our_merge(infos: list[list[dict[str, Any]]], shards: list[int]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    first = 0
    for count in shards:
        part = infos[first : first + count]
        rows: Rows = [(row, info) for row, each in enumerate(part) for info in each if info]
        merge(merged, pack(rows), np.arange(first, first + count), len(infos))
        first += count
    return merged


CASES: dict[str, list[list[dict[str, Any]]]] = {
    "nothing": [[{}], [{}], [{}], [{}]],
    "numbers": [[{"a": 1}], [{"a": 2, "b": 0.5}], [{}], [{"b": 1.5}]],
    "the first type wins": [[{"a": 1}], [{"a": 2.7}], [{"a": True}], [{"a": np.float32(3.9)}]],
    "in the second shard": [[{}], [{}], [{"a": 1}], [{"a": 2.7}]],
    "float before int": [[{"a": 0.5}], [{"a": 2}], [{"a": 3}], [{"a": 4}]],
    "numpy": [
        [{"a": np.int8(1), "v": np.ones(2)}],
        [{"v": np.zeros(2)}],
        [{}],
        [{"a": np.int8(3)}],
    ],
    "arrays of another dtype": [
        [{"v": np.ones(2, np.int64)}],
        [{"v": np.full(2, 1.5)}],
        [{"v": np.full(2, 2.5)}],
        [{}],
    ],
    "objects": [[{"a": "x"}], [{"a": None}], [{"a": [1, 2]}], [{"a": {1, 2}}]],
    "booleans of numpy": [[{"a": np.bool_(True)}], [{}], [{"a": np.bool_(False)}], [{}]],
    "nested": [
        [{"d": {"x": 1}}],
        [{"d": {"x": 2, "y": {"z": 0.1}}}],
        [{}],
        [{"d": {"y": {"z": 1}}}],
    ],
    "an object before arrays": [
        [{"x": None}],
        [{"x": np.arange(3.0)}],
        [{"x": np.arange(3.0)}],
        [{"x": np.float32(1.5)}],
    ],
    "same step": [
        [{"final_obs": np.ones(2), "final_info": {"r": 1.0}}, {"start": 1}],
        [{"start": 2}],
        [{"final_obs": {"k": np.ones(1)}, "final_info": {}}, {}],
        [{}],
    ],
}


@pytest.mark.parametrize("shards", [[4], [2, 2], [1, 2, 1], [3, 1]])
@pytest.mark.parametrize("case", CASES)
def test_merging_equals_gymnasium(case: str, shards: list[int]) -> None:
    assert_same(our_merge(CASES[case], shards), gymnasium_merge(CASES[case]))


def test_numbers_of_one_type_travel_as_arrays() -> None:
    packed = pack([(0, {"a": 1.0}), (2, {"a": 2.0})])
    rows, values = packed["a"]
    assert_same(rows, np.array([0, 2]))
    assert_same(values, np.array([1.0, 2.0]))


def test_infos_of_native_environments_are_put_side_by_side() -> None:
    merged: dict[str, Any] = {}
    for first in (0, 2):
        info = {
            "lives": np.array([first, first + 1], np.int32),
            "deep": {"x": np.array([first, first])},
            "names": ["a", "b"],
            "version": 3,
        }
        merge_vector(merged, VectorInfo(info), np.arange(first, first + 2), 4)
    assert_same(merged["lives"], np.array([0, 1, 2, 3], np.int32))
    assert merged["deep"]["x"].tolist() == [0, 0, 2, 2]
    assert merged["names"].tolist() == ["a", "b", "a", "b"]
    assert merged["version"] == 3


def test_rows_that_a_native_environment_did_not_report_are_none() -> None:
    merged: dict[str, Any] = {}
    final = np.array([np.ones(1), None], object)
    merge_vector(merged, VectorInfo(final_obs=final, xy=(10, 20)), np.arange(2), 4)
    assert merged["final_obs"][1:].tolist() == [None, None, None]
    merge_vector(merged, VectorInfo(name=np.array(["abcdef", "g"])), np.arange(2), 4)
    merge_vector(merged, VectorInfo(name=np.array(["longer than that", "h"])), np.arange(2, 4), 4)
    assert merged["name"].tolist() == ["abcdef", "g", "longer than that", "h"]
