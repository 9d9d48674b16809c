"""Which announcement a worker decides about, and when it pulls: no cluster, no sockets."""

from __future__ import annotations

from clusterenv.sync import Divergence, Every, EveryVersion
from clusterenv.sync.announcement import Announcement
from clusterenv.sync.subscriber import Subscriber


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


# In lock-step


def test_a_pinned_announcement_is_decided_about_though_a_newer_one_is_known() -> None:
    subscriber = Subscriber(EveryVersion(), version=0)
    subscriber.announced(Announcement(3, {}, {"epsilon": 0.3}, 3), hint=True)
    subscriber.pin(Announcement(2, {}, {"epsilon": 0.2}, 2))
    subscriber.announced(Announcement(4, {}, {"epsilon": 0.4}, 4), hint=True)
    assert subscriber.newest.scalars == {"epsilon": 0.2}
    assert (subscriber.decide(), subscriber.wanted) == (True, 2)
    subscriber.announced(Announcement(5, {}, {}, 5), hint=True)  # while the weights travel
    subscriber.pulled(2)
    assert not subscriber.decide()
    assert (subscriber.version, subscriber.divergence, subscriber.checks) == (2, 0.0, 1)


def test_a_pinned_announcement_needs_no_hint_and_is_decided_about_once() -> None:
    subscriber = Subscriber(Divergence(0.1), version=0)
    for _ in range(2):  # two rollouts, and no version in between
        subscriber.pin(Announcement(1, {0: 0.05}, {}, 1))
        assert not subscriber.decide()
    assert (subscriber.divergence, subscriber.checks) == (0.05, 1)
    subscriber.announced(Announcement(2, {0: 0.5}, {}, 2), hint=True)
    assert (subscriber.divergence, subscriber.undecided) == (0.05, False)
    subscriber.pin(Announcement(2, {0: 0.2}, {}, 2))
    assert (subscriber.divergence, subscriber.decide()) == (0.2, True)


def test_a_pinned_version_with_the_same_weights_needs_no_pull() -> None:
    subscriber = Subscriber(EveryVersion(), version=0)
    subscriber.announced(Announcement(2, {}, {}, 2), hint=True)
    subscriber.pin(Announcement(1, {}, {}, same_since=0))
    assert not subscriber.decide()
    assert subscriber.version == 1


def test_without_a_pin_the_newest_that_was_heard_counts_again() -> None:
    subscriber = Subscriber(EveryVersion(), version=0)
    subscriber.pin(Announcement(1, {}, {}, 1))
    subscriber.pin(None)
    assert subscriber.newest.version == 1
    subscriber.pin(Announcement(2, {}, {}, 2))
    subscriber.announced(Announcement(5, {}, {}, 5), hint=True)
    subscriber.pin(None)
    assert (subscriber.decide(), subscriber.wanted) == (True, 5)
