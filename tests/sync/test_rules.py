"""Who pulls when: pure functions."""

from __future__ import annotations

import math

import pytest

from clusterenv.errors import ConfigError
from clusterenv.sync import Divergence, Every, EveryVersion, Never
from clusterenv.sync.announcement import Announcement
from clusterenv.sync.subscriber import Subscriber


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


def test_each_announcement_is_decided_once() -> None:
    subscriber = Subscriber(Divergence(0.1), version=0)
    assert not subscriber.decide()
    subscriber.announced(Announcement(1, {0: 0.05}, {}, 1))
    assert not subscriber.decide()
    assert not subscriber.decide()
    assert subscriber.checks == 1
    subscriber.announced(Announcement(2, {0: 0.2}, {}, 2))
    assert subscriber.decide()
    assert subscriber.checks == 2


def test_a_burst_of_versions_is_one_pull_and_missed_ones_do_no_harm() -> None:
    subscriber = Subscriber(Divergence(0.1), version=0)
    subscriber.announced(Announcement(1, {0: 0.2}, {}, 1))
    assert subscriber.decide()
    for version in range(2, 50):  # announced before anyone could answer the pull
        subscriber.announced(Announcement(version, {0: 0.3}, {}, version))
        assert not subscriber.decide()
    subscriber.pulled(49)
    assert (subscriber.version, subscriber.pulls, subscriber.divergence) == (49, 1, 0.0)
    subscriber.announced(Announcement(60, {49: 0.3}, {}, 60))
    assert subscriber.decide()


def test_a_late_joiner_with_an_unknown_version_pulls() -> None:
    subscriber = Subscriber(Divergence(0.1), version=0)
    subscriber.announced(Announcement(7, {5: 0.0}, {}, 7))
    assert subscriber.decide()


def test_announcements_that_are_late_doubled_or_reordered_change_nothing() -> None:
    subscriber = Subscriber(Every(2), version=0)
    for version in (2, 1, 2, 0):
        subscriber.announced(Announcement(version, {}, {"from": version}, version))
    assert subscriber.newest == Announcement(2, {}, {"from": 2}, 2)
    assert (subscriber.decide(), subscriber.wanted, subscriber.checks) == (True, 2, 1)


def test_a_hint_without_the_divergence_that_the_rule_needs_waits_for_the_credit() -> None:
    subscriber = Subscriber(Divergence(0.1), version=0)
    told = Announcement(1, {5: 0.2}, {}, 1)  # of other shards' versions
    subscriber.announced(told, hint=True)
    assert not subscriber.undecided
    subscriber.announced(told._replace(divergences={0: 0.05}))
    assert subscriber.undecided
    assert not subscriber.decide()
    counting = Subscriber(Every(1), version=0)  # needs none
    counting.announced(told, hint=True)
    assert counting.decide()


def test_a_version_announced_while_another_arrives_is_decided_about_at_once() -> None:
    subscriber = Subscriber(EveryVersion(), version=0)
    subscriber.announced(Announcement(1, {}, {}, 1))
    assert subscriber.decide()
    subscriber.announced(Announcement(2, {}, {}, 2))
    subscriber.pulled(1)
    assert subscriber.decide()
    assert subscriber.wanted == 2


def test_weights_that_arrive_before_their_announcement_keep_their_version() -> None:
    subscriber = Subscriber(EveryVersion(), version=0)
    subscriber.announced(Announcement(5, {}, {}, 5))
    assert subscriber.decide()
    subscriber.announced(Announcement(6, {}, {}, 6))
    subscriber.pulled(7)  # the head answered when 7 was the newest
    assert not subscriber.decide()
    assert subscriber.version == 7
    subscriber.announced(Announcement(7, {}, {}, 7))
    assert not subscriber.decide()
    assert (subscriber.version, subscriber.divergence) == (7, 0.0)
