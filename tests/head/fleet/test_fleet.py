"""The decisions of the fleet, without any cluster."""

from __future__ import annotations

import pytest

from clusterenv.head.fleet.placement import Share, place, split


@pytest.mark.parametrize(
    ("num_envs", "shards"), [(1, 1), (2, 1), (2, 2), (7, 2), (7, 3), (7, 7), (64, 3)]
)
def test_shares_are_even_contiguous_and_complete(num_envs: int, shards: int) -> None:
    shares = split(num_envs, shards)
    counts = [share.count for share in shares]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == num_envs
    assert [share.first for share in shares] == [sum(counts[:k]) for k in range(shards)]
    assert shares[0] == Share(0, counts[0])


def test_shards_go_to_the_workers_with_the_fewest() -> None:
    load = {"a": 2, "b": 0, "c": 1, "d": 0}
    assert place(load, 3) == ["b", "d", "c"]
    assert len(set(place(load, 4))) == 4
