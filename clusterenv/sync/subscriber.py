"""A worker's view of the announced versions, and its decision to pull."""

from __future__ import annotations

import threading

from clusterenv.sync.announcement import Announcement
from clusterenv.sync.rules import SyncRule

__all__ = ["Subscriber"]


class Subscriber:
    """The versions that a worker has and knows of, and whether it should pull.

    Decides only: the caller receives announcements, requests weights and loads them.

    >>> from clusterenv.sync.rules import Every
    >>> subscriber = Subscriber(Every(2), version=0)
    >>> subscriber.announced(Announcement(1, {}, {}, same_since=1))
    >>> subscriber.decide()
    False
    >>> subscriber.announced(Announcement(2, {}, {}, same_since=2))
    >>> subscriber.decide(), subscriber.wanted
    (True, 2)
    """

    def __init__(self, rule: SyncRule, version: int) -> None:
        self._rule = rule
        self._loaded = version  # of the weights; later versions may have the same ones
        self.version = version
        """The version that acts: the newest one with the weights that are loaded."""
        self._heard = Announcement(version, {}, {}, version)
        self._pinned: Announcement | None = None
        self._announcing = threading.Lock()
        self.checks = 0
        """Announcements decided about."""
        self.pulls = 0
        """Versions loaded."""
        self._decided = version  # the newest version that was decided about
        self.wanted: int | None = None
        """The version that was requested and has not arrived."""

    @property
    def newest(self) -> Announcement:
        """The announcement to decide about: the newest, or the one that is pinned."""
        return self._pinned or self._heard

    def pin(self, announcement: Announcement | None) -> None:
        """Decide about this announcement alone, even if a newer one is known; ``None`` ends it.

        In lock-step the credit of a fragment names the version to decide about. Hints that arrive
        before the fragment begins must not change it.
        """
        if announcement is not None:
            self.announced(announcement)
        self._pinned = announcement

    def announced(self, announcement: Announcement, hint: bool = False) -> None:
        """Take up an announcement, from any thread; one that is not newer is ignored.

        A ``hint`` came by the topic, which may name the divergences of some versions only. If the
        rule needs one that is missing, the hint is ignored: the next credit has it.
        """
        with self._announcing:
            if announcement.version <= self._heard.version:
                return
            needed = hint and self._rule.needs_divergence
            if needed and self._divergence_from(announcement) is None:
                return
            self._heard = announcement

    def _divergence_from(self, announcement: Announcement) -> float | None:
        if self._loaded >= announcement.same_since:
            return 0.0
        return announcement.divergences.get(self._loaded)

    @property
    def divergence(self) -> float | None:
        """Divergence of the loaded version from the newest; ``None`` if it is not known."""
        return self._divergence_from(self.newest)

    @property
    def undecided(self) -> bool:
        """Whether there is a new announcement to decide about, and no pull under way."""
        return self.newest.version > self._decided and self.wanted is None

    def decide(self) -> bool:
        """Return whether to request the newest version; decides once per announcement."""
        if not self.undecided:
            return False
        newest = self.newest  # another thread may replace it
        self._decided = newest.version
        self.checks += 1
        if newest.version <= self.version:  # weights may arrive before their announcement
            return False
        if self._loaded >= newest.same_since:
            self.version = newest.version
            return False
        lag = newest.version - self.version
        if self._rule.should_pull(lag, self._divergence_from(newest)):
            self.wanted = newest.version
            return True
        return False

    def pulled(self, version: int) -> None:
        """Record that a version was loaded and acts from now on."""
        self.version = self._loaded = version
        self.pulls += 1
        if self.wanted is not None and version >= self.wanted:
            self.wanted = None
