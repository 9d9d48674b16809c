"""A worker's view of the announced versions, and its decision to pull."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from clusterenv.sync.rules import SyncRule

__all__ = ["Announcement", "Subscriber"]


class Announcement(NamedTuple):
    """What the head publishes about a new version: everything but the weights."""

    version: int
    divergences: Mapping[int, float]
    """From each version in use to this one."""
    scalars: Mapping[str, float]
    same_since: int
    """The first version with the same weights; a worker that has it need not pull."""


class Subscriber:
    """The versions that a worker has and knows of, and whether it should pull.

    Decides only: the caller receives announcements, requests weights and loads them.

    >>> from clusterenv.sync.rules import Every
    >>> subscriber = Subscriber(Every(2), version=0)
    >>> subscriber.newest = Announcement(1, {}, {}, same_since=1)
    >>> subscriber.decide()
    False
    >>> subscriber.newest = Announcement(2, {}, {}, same_since=2)
    >>> subscriber.decide(), subscriber.wanted
    (True, 2)
    """

    def __init__(self, rule: SyncRule, version: int) -> None:
        self._rule = rule
        self._loaded = version  # of the weights; later versions may have the same ones
        self.version = version
        """The version that acts: the newest one with the weights that are loaded."""
        self.newest = Announcement(version, {}, {}, version)
        """The newest announcement; set by the caller."""
        self.checks = 0
        """Announcements decided about."""
        self.pulls = 0
        """Versions loaded."""
        self._decided = version  # the newest version that was decided about
        self.wanted: int | None = None
        """The version that was requested and has not arrived."""

    @property
    def divergence(self) -> float | None:
        """Divergence of the loaded version from the newest; ``None`` if it is not known."""
        if self._loaded >= self.newest.same_since:
            return 0.0
        return self.newest.divergences.get(self._loaded)

    @property
    def undecided(self) -> bool:
        """Whether there is a new announcement to decide about, and no pull under way."""
        return self.newest.version != self._decided and self.wanted is None

    def decide(self) -> bool:
        """Return whether to request the newest version; decides once per announcement."""
        if not self.undecided:
            return False
        newest = self.newest.version
        self._decided = newest
        self.checks += 1
        if self._loaded >= self.newest.same_since:
            self.version = newest
            return False
        if self._rule.should_pull(newest - self.version, self.divergence):
            self.wanted = newest
            return True
        return False

    def pulled(self, version: int) -> None:
        """Record that a version was loaded and acts from now on."""
        self.version = self._loaded = version
        self.pulls += 1
        if self.wanted is not None and version >= self.wanted:
            self.wanted = None
