"""When a shard last sent something, and when its environments last moved."""

from __future__ import annotations

__all__ = ["Heartbeat"]


class Heartbeat:
    """When a shard was last heard, and when its environments last moved.

    Examples
    --------
    >>> heartbeat = Heartbeat(now=0)
    >>> heartbeat.pong(10, steps=5, busy=True)
    >>> heartbeat.pong(20, steps=5, busy=True)
    >>> heartbeat.fault(25, silence=30, step=60), heartbeat.fault(80, silence=100, step=60)
    (None, 'has not finished a step for 70 s: an environment hangs')
    """

    def __init__(self, now: float) -> None:
        self._heard = self._moved = now
        self._steps = -1
        self._busy = False

    @property
    def steps(self) -> int:
        """Steps that the shard had taken when it last answered."""
        return max(0, self._steps)

    @property
    def heard_at(self) -> float:
        """When something last came."""
        return self._heard

    def heard(self, now: float) -> None:
        """Note that something came."""
        self._heard = now

    def progress(self, now: float) -> None:
        """Note that a fragment came."""
        self._heard = self._moved = now

    def pong(self, now: float, steps: int, busy: bool) -> None:
        """Note an answer: steps taken so far, and whether more are being taken."""
        self._heard = now
        if steps != self._steps or not busy:
            self._moved = now
        self._steps, self._busy = steps, busy

    def fault(self, now: float, silence: float, step: float) -> str | None:
        """Say what is wrong, if anything is: no answer for long, or no step for long."""
        if now - self._heard > silence:
            return (
                f"has not answered for {now - self._heard:.0f} s: its process is stopped, holds "
                "Python's lock, or cannot be reached"
            )
        if self._busy and now - self._moved > step:
            return f"has not finished a step for {now - self._moved:.0f} s: an environment hangs"
        return None
