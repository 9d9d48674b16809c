"""The roster: state, incarnation, credits, policy version and counters of every shard.

It decides and counts; it does no I/O and reads no clock. ``Fleet`` places and closes shards,
``Receiver`` and ``Exchange`` talk to them, and all of them ask the roster.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from clusterenv.errors import ClosedError
from clusterenv.head.fleet.placement import Share

if TYPE_CHECKING:
    from clusterenv.head.fleet.handle import ShardHandle
    from clusterenv.transport.messages import FragmentMeta

__all__ = [
    "Arrival",
    "InvalidTransition",
    "Reason",
    "Roster",
    "ShardInfo",
    "ShardRecord",
    "ShardState",
]


class ShardState(enum.StrEnum):
    """Phase of a shard's life.

    ========  ========  ==============================================================
    from      to        when
    ========  ========  ==============================================================
    placing   opening   a worker was chosen, and the actor was submitted to it
    opening   running   its environments are open, and the head listens to it
    running   draining  it is to move to another worker, or fewer shards are wanted
    draining  placing   it has delivered everything, and continues on another worker
    draining  ended     it has delivered everything, and is not wanted any more
    running   lost      its worker is gone or hangs, or an environment raised
    placing   lost      no worker came; likewise ``opening`` and ``draining``
    draining  ended     it was lost, but is not wanted any more and owes nothing
    lost      placing   it is restarted, with the next incarnation
    ended     placing   more shards are wanted again, with the next incarnation
    placing   ended     it could not be added; likewise ``opening``
    any       ended     the fleet is closed
    ========  ========  ==============================================================
    """

    PLACING = "placing"
    OPENING = "opening"
    RUNNING = "running"
    DRAINING = "draining"
    LOST = "lost"
    ENDED = "ended"


_PLACING, _OPENING, _RUNNING, _DRAINING, _LOST, _ENDED = ShardState


class Reason(enum.StrEnum):
    """Why a shard is placed."""

    SCALE = "scale"
    LOSS = "loss"
    MOVE = "move"


class InvalidTransition(RuntimeError):
    """A shard cannot change its state in this way: an error in this package."""


@dataclass(frozen=True)
class ShardInfo:
    """One shard of a :class:`clusterenv.Collector`.

    Attributes
    ----------
    index
        Its number, as in ``Batch.shard``.
    worker
        Address of the Dask worker that holds it; ``None`` while no worker does.
    host
        Host of that address.
    state
        ``"placing"``, ``"opening"``, ``"running"``, ``"draining"``, ``"lost"`` or ``"ended"``.
    incarnation
        How often it was restarted, as in ``Batch.incarnation``.
    version
        Policy version that was last sent to it; ``None`` while it has none.
    envs
        Global indices of its environments.
    """

    index: int
    worker: str | None
    host: str | None
    state: ShardState
    incarnation: int
    version: int | None
    envs: range


class Arrival(NamedTuple):
    """A fragment that has arrived, to be counted now or with the rest of its rollout."""

    shard: int
    rows: int
    checks: int
    """Since the fragment before it."""
    pulls: int
    meta: FragmentMeta


@dataclass(slots=True, eq=False)
class ShardRecord:
    """All that the head knows of one shard."""

    index: int
    share: Share
    state: ShardState = _PLACING
    incarnation: int = 0
    because: Reason = Reason.SCALE
    """Why it was placed; of a shard that is drained, why it will be."""
    handle: ShardHandle | None = None
    """The head's end of the newest incarnation that a worker was chosen for."""
    version: int | None = None
    """Policy version in use."""
    relayed: bool = False
    """Whether it is getting weights from another worker."""
    credits: int = 0
    """Granted, and not yet used for a fragment that has arrived."""
    waiting: int = 0
    """Batches that arrived and were not taken yet, of all incarnations."""
    owes: int = 0
    """Lock-step fragments that were asked for and have not arrived."""
    delivered: int = 0
    """Rows that have arrived from this incarnation."""
    rows: int = 0
    """Rows that were counted, of all incarnations; the following counters likewise."""
    checks: int = 0
    pulls: int = 0
    reported: tuple[int, int] = (0, 0)
    """Checks and pulls that this incarnation has reported, counted or not."""
    acted: int | None = None
    """Policy version in the first row of the last fragment that was counted."""
    divergence: float | None = None
    """Of that version from the newest, when the fragment began."""

    @property
    def active(self) -> bool:
        """Whether the head listens to it."""
        return self.state in (_RUNNING, _DRAINING)

    @property
    def joining(self) -> bool:
        """Whether it has ended, or is only now being added."""
        added = self.because is Reason.SCALE and self.state not in (_RUNNING, _LOST)
        return added or self.state is _ENDED

    def info(self) -> ShardInfo:
        """Return what users see of it."""
        placed = self.active or self.state is _OPENING
        worker = self.handle.worker if placed and self.handle else None
        return ShardInfo(
            self.index,
            worker,
            urlsplit(worker).hostname if worker else None,
            self.state,
            self.incarnation,
            self.version,
            range(self.share.first, self.share.first + self.share.count),
        )


class Roster:
    """The records of all shards, by index; those that have ended stay, for their counters.

    Its lock guards the records, and all that the head counts and publishes beside them. It is
    the only lock that receiving takes. No method waits while it is held.
    """

    def __init__(self, shares: Sequence[Share]) -> None:
        self.lock = threading.RLock()
        self.wanted = len(shares)
        """Shards that there shall be; change it with :meth:`scale`."""
        self.closed = False
        self.limit: int | None = None
        """Fragments that each shard may be ahead of the reader; ``None`` in lock-step."""
        self.handles: tuple[ShardHandle, ...] = ()
        """Of all shards that were placed, by index."""
        self._records = [ShardRecord(index, share) for index, share in enumerate(shares)]

    def __getitem__(self, index: int) -> ShardRecord:
        return self._records[index]

    def __iter__(self) -> Iterator[ShardRecord]:
        return iter(tuple(self._records))

    def __len__(self) -> int:
        return len(self._records)

    # Questions

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """All shards up to the last that has not ended; ``shards[i].index`` is ``i``."""
        with self.lock:
            infos = [record.info() for record in self._records]
        while infos and infos[-1].state is _ENDED:
            infos.pop()
        return tuple(infos)

    @property
    def active(self) -> list[ShardRecord]:
        """The shards that the head listens to."""
        return [record for record in self if record.active]

    @property
    def surplus(self) -> list[ShardRecord]:
        """The running shards that are not wanted any more, the last one first."""
        return [r for r in self if self._unwanted(r) and r.state is _RUNNING][::-1]

    @property
    def settled(self) -> bool:
        """Whether all wanted shards run, and no other is left."""
        right = [r.state is (_ENDED if self._unwanted(r) else _RUNNING) for r in self]
        return len(right) >= self.wanted and all(right)

    def versions_in_use(self) -> set[int]:
        """Return the policy versions that shards act with."""
        return {record.version for record in self._records if record.version is not None}

    def count_workers(self) -> int:
        """Return how many worker processes hold a shard that the head listens to."""
        handles = [record.handle for record in self.active]
        return len({handle.worker for handle in handles if handle is not None})

    def _unwanted(self, record: ShardRecord) -> bool:
        return record.index >= self.wanted

    # Transitions

    def _change(self, index: int, to: ShardState, *allowed: ShardState) -> ShardRecord:
        record = self._records[index]
        if self.closed:
            raise ClosedError(f"closed while shard {index} was {record.state}")
        if record.state not in allowed:
            raise InvalidTransition(f"shard {index} cannot change from {record.state} to {to}")
        record.state = to
        if to in (_PLACING, _LOST, _ENDED):
            record.version = None
            record.credits = 0
            record.relayed = False
        if to is _PLACING:
            record.incarnation += 1
            record.delivered = 0
            record.reported = (0, 0)
        return record

    def place(self, index: int) -> ShardRecord:
        """Begin to restart a lost shard."""
        with self.lock:
            record = self._change(index, _PLACING, _LOST)
            record.because = Reason.LOSS
            return record

    def opening(self, index: int, handle: ShardHandle) -> None:
        """Record the worker that was chosen for a shard."""
        with self.lock:
            self._change(index, _OPENING, _PLACING).handle = handle
            self.handles = tuple(each.handle for each in self._records if each.handle is not None)

    def admit(self, index: int, version: int | None = None) -> ShardRecord:
        """Record that a shard runs, and the policy version that it begins with."""
        with self.lock:
            record = self._change(index, _RUNNING, _OPENING)
            record.version = version
            return record

    def drain(self, index: int) -> None:
        """Have a shard deliver what it has begun, and move, or end if it is not wanted."""
        with self.lock:
            record = self._change(index, _DRAINING, _RUNNING)
            record.because = Reason.SCALE if self._unwanted(record) else Reason.MOVE

    def drained(self, index: int) -> ShardState:
        """Record that a shard has delivered everything; return whether it ended or is placed."""
        with self.lock:
            return self._change(index, self._after_drain(index), _DRAINING).state

    def lost(self, index: int) -> ShardState:
        """Record that a shard is lost; one that was drained and is not needed has ended."""
        with self.lock:
            draining = self._records[index].state is _DRAINING
            ends = draining and self._after_drain(index) is _ENDED
            allowed = (_PLACING, _OPENING, _RUNNING, _DRAINING)
            return self._change(index, _ENDED if ends else _LOST, *allowed).state

    def _after_drain(self, index: int) -> ShardState:
        record = self._records[index]
        return _ENDED if self._unwanted(record) and not record.owes else _PLACING

    def scale(self, shards: int) -> None:
        """Set how many shards there shall be; :meth:`add` and :attr:`surplus` follow."""
        with self.lock:
            self.wanted = shards

    def add(self) -> ShardRecord | None:
        """Begin to place the first shard that is missing; return ``None`` if none is.

        A shard that had ended has the environments that it had, so that no seed of theirs is
        used twice. Others are as large as the first.
        """
        with self.lock:
            if self.closed:
                return None
            for record in self._records[: self.wanted]:
                if record.state is _ENDED:
                    record = self._change(record.index, _PLACING, _ENDED)
                    record.because = Reason.SCALE
                    return record
            if len(self._records) >= self.wanted:
                return None
            last = self._records[-1].share
            share = Share(last.first + last.count, self._records[0].share.count)
            self._records.append(ShardRecord(len(self._records), share))
            return self._records[-1]

    def abandon(self, index: int, wanted: int) -> None:
        """Record that a shard could not be added.

        From then on as many are wanted as there are before it, unless another number than
        ``wanted``, the one that it was added for, has been set meanwhile.
        """
        with self.lock:
            self._change(index, _ENDED, _PLACING, _OPENING)
            if self.wanted == wanted:
                self.wanted = index

    def close(self) -> tuple[list[ShardHandle], list[ShardHandle]]:
        """End all shards; return the handles of those that were active, and that were lost."""
        with self.lock:
            active = [r.handle for r in self if r.handle is not None and r.active]
            lost = [r.handle for r in self if r.handle is not None and r.state is _LOST]
            self.closed = True
            self.handles = ()
            for record in self._records:
                record.state, record.handle, record.version = _ENDED, None, None
            return active, lost

    # Credits and fragments

    @property
    def outstanding(self) -> int:
        """Lock-step fragments that were asked for and not taken."""
        return sum(record.owes + record.waiting for record in self._records)

    def request(self) -> int:
        """Have each shard owe one fragment more; return how many fragments will arrive."""
        with self.lock:
            if self.closed:
                raise ClosedError("closed while fragments were asked for")
            asked = [r for r in self if not self._unwanted(r) and not r.joining]
            for record in asked:
                record.owes += 1
            return len(asked)

    def grant(self, index: int) -> int:
        """Return how many more credits a shard is granted now, and count them."""
        with self.lock:
            record = self._records[index]
            due = record.owes if self.limit is None else self.limit - record.waiting
            more = max(0, due - record.credits) if record.state is _RUNNING else 0
            record.credits += more
            return more

    def received(self, index: int, rows: int, meta: FragmentMeta) -> Arrival:
        """Record a fragment that has arrived, for :meth:`count`."""
        with self.lock:
            record = self._records[index]
            record.owes = max(0, record.owes - 1)
            record.credits = max(0, record.credits - 1)
            record.waiting += 1
            record.delivered += rows
            checks, pulls = record.reported
            record.reported = meta.checks, meta.pulls
            return Arrival(index, rows, meta.checks - checks, meta.pulls - pulls, meta)

    def count(self, arrival: Arrival) -> None:
        """Add a fragment to its shard's counters."""
        with self.lock:
            record = self._records[arrival.shard]
            record.rows += arrival.rows
            record.checks += arrival.checks
            record.pulls += arrival.pulls
            record.acted, record.divergence = arrival.meta.version, arrival.meta.divergence

    def taken(self, index: int) -> None:
        """Count a batch that the reader has taken."""
        with self.lock:
            self._records[index].waiting -= 1
