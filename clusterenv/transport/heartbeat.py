"""Detects shards that stopped answering or stopped stepping."""

from __future__ import annotations

__all__ = ["Heartbeat"]


class Heartbeat:
    """The time of a shard's last sign of life, and of the last step of its environments.

    All times are of one clock, which the caller reads.

    >>> heartbeat = Heartbeat(now=0)
    >>> heartbeat.pong(10, steps=5, busy=True)
    >>> heartbeat.pong(20, steps=5, busy=True)
    >>> heartbeat.fault(25, silence=30, step=60), heartbeat.fault(80, silence=100, step=60)
    (None, 'has not finished a step for 70 s: an environment hangs')
    """

    def __init__(self, now: float) -> None:
        self.heard_at = self._moved = now
        """Time of the last sign of life."""
        self._steps = -1
        self._busy = False

    @property
    def steps(self) -> int:
        """Steps that the shard had taken at its last ``PONG``."""
        return max(0, self._steps)

    def heard(self, now: float) -> None:
        """Record that bytes were received from the shard, or accepted by it."""
        self.heard_at = now

    def progress(self, now: float) -> None:
        """Record that a fragment, or a part of a message, was received."""
        self.heard_at = self._moved = now

    def pong(self, now: float, steps: int, busy: bool) -> None:
        """Record a ``PONG``: steps taken so far, and whether the environments are being stepped."""
        self.heard_at = now
        if steps != self._steps or not busy:
            self._moved = now
        self._steps, self._busy = steps, busy

    def fault(self, now: float, silence: float, step: float) -> str | None:
        """Return what is wrong, if anything: no answer or no step for that many seconds."""
        if now - self.heard_at > silence:
            return (
                f"has not answered for {now - self.heard_at:.0f} s: its process is stopped, holds "
                "Python's lock, or cannot be reached"
            )
        if self._busy and now - self._moved > step:
            return f"has not finished a step for {now - self._moved:.0f} s: an environment hangs"
        return None
