"""Who pulls when: pure functions."""

from __future__ import annotations

import math

import pytest

from clusterenv.errors import ConfigError
from clusterenv.sync import Divergence, Every, EveryVersion, Never


def test_every_version() -> None:
    assert EveryVersion().should_pull(1, 0.0)


def test_every_n_versions() -> None:
    assert [Every(3).should_pull(lag, 9.0) for lag in (1, 2, 3, 4)] == [False, False, True, True]


def test_divergence_above_the_threshold() -> None:
    rule = Divergence(0.05)
    assert not rule.should_pull(1000, 0.05)
    assert rule.should_pull(1, 0.0501)
    assert rule.should_pull(1, math.inf)
    assert rule.should_pull(1, None)  # not known: better pull


def test_threshold_zero_pulls_whatever_changed() -> None:
    assert not Divergence(0).should_pull(1, 0.0)
    assert Divergence(0).should_pull(1, 1e-12)


def test_max_lag_pulls_whatever_the_divergence() -> None:
    rule = Divergence(0.5, max_lag=4)
    assert not rule.should_pull(4, 0.0)
    assert rule.should_pull(5, 0.0)


def test_never() -> None:
    assert not Never().should_pull(10**6, math.inf)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Divergence(-0.1), r"not below 0, got -0.1: Divergence\(0.05\)"),
        (lambda: Divergence(math.nan), "threshold must be a number, not below 0, got nan"),
        (lambda: Divergence("x"), "threshold must be a number, not below 0, got 'x'"),  # type: ignore[arg-type]
        (lambda: Divergence(0.1, max_lag=0), "max_lag must be an integer, at least 1, got 0"),
        (lambda: Divergence(0.1, max_lag=1.5), "max_lag must be an integer.*got 1.5"),  # type: ignore[arg-type]
        (lambda: Every(0), r"an integer of at least 1, got 0: Every\(4\)"),
        (lambda: Every(1.5), "an integer of at least 1, got 1.5"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_cannot_work_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
