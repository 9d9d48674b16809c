"""A worker's side of synchronization: what it has heard of, what it has, what it asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from clusterenv.sync.rules import SyncRule

__all__ = ["Announcement", "Subscriber"]


class Announcement(NamedTuple):
    """What the head says of a new version: everything but the weights."""

    version: int
    divergences: Mapping[int, float]
    """From each version in use to this one."""
    scalars: Mapping[str, float]
    same_since: int
    """The first version with these very weights; who has one of them need not pull."""


class Subscriber:
    """A worker's side of synchronization: what it has heard, and whether it wants more."""

    def __init__(self, rule: SyncRule, version: int) -> None:
        self._rule = rule
        self._held = version  # the weights' own; version may be a newer one with the same
        self.version = version
        """That acts: the newest of which the weights are at hand."""
        self.newest = Announcement(version, {}, {}, version)
        self.checks = 0
        self.pulls = 0
        self._decided = version  # the newest version that was decided about
        self.wanted: int | None = None

    @property
    def divergence(self) -> float | None:
        """Of the own version from the newest, as far as it is known."""
        if self._held >= self.newest.same_since:
            return 0.0
        return self.newest.divergences.get(self._held)

    @property
    def undecided(self) -> bool:
        """Whether there is an announcement that was not judged, and none is waited for."""
        return self.newest.version != self._decided and self.wanted is None

    def decide(self) -> bool:
        """Whether to ask for the newest version now; each announcement is judged once."""
        if not self.undecided:
            return False
        newest = self.newest.version
        self._decided = newest
        self.checks += 1
        if self._held >= self.newest.same_since:
            self.version = newest
            return False
        if self._rule.should_pull(newest - self.version, self.divergence):
            self.wanted = newest
            return True
        return False

    def pulled(self, version: int) -> None:
        """Note that a version arrived and acts from now on."""
        self.version = self._held = version
        self.pulls += 1
        if self.wanted is not None and version >= self.wanted:
            self.wanted = None
