"""When requests are evaluated together, without any I/O."""

from __future__ import annotations

import pytest

from clusterenv.head.collect.batcher import Batcher


def batcher(rows: int = 64, wait: float = 0.5, **requests: int) -> Batcher[str]:
    made: Batcher[str] = Batcher(rows, wait)
    for name, count in requests.items():
        made.add(name, count, now=0.0)
    return made


def test_nothing_is_due_without_a_request() -> None:
    assert batcher().left(now=9.0, groups=4) is None


@pytest.mark.parametrize(("groups", "left"), [(1, 0.0), (2, 0.0), (3, 0.4), (8, 0.4)])
def test_half_of_the_groups_are_enough(groups: int, left: float) -> None:
    assert batcher(a=1).left(now=0.1, groups=groups) == pytest.approx(left)


def test_the_oldest_request_decides_how_long_it_may_take() -> None:
    requests = batcher(a=1)
    requests.add("b", 1, now=0.4)
    assert requests.left(now=0.4, groups=9) == pytest.approx(0.1)
    assert requests.left(now=7.0, groups=9) == 0.0


def test_enough_rows_are_a_batch() -> None:
    assert batcher(rows=4, a=2, b=2).left(now=0.0, groups=99) == 0.0


def test_a_batch_has_no_more_rows_than_allowed_and_the_oldest_come_first() -> None:
    requests = batcher(rows=4, a=2, b=2, c=2)
    assert requests.take() == ["a", "b"]
    assert requests.left(now=0.1, groups=9) == pytest.approx(0.4)
    assert requests.take() == ["c"]
    assert requests.left(now=0.0, groups=9) is None


def test_a_request_larger_than_a_batch_is_a_batch_of_its_own() -> None:
    requests = batcher(rows=4, a=9, b=1)
    assert requests.take() == ["a"]
    assert requests.take() == ["b"]


def test_requests_of_a_lost_shard_are_forgotten() -> None:
    requests = batcher(rows=4, a=2, b=2)
    requests.forget(lambda request: request == "a")
    assert requests.left(now=0.0, groups=9) == 0.5
    assert requests.take() == ["b"]
