"""Batches of known content, and the rows that are in them, one by one.

What a row holds follows from where it is from: its observation is that of its step, and its next
observation that of the step after in the same episode. Nothing here shares code with a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterenv import Batch
from clusterenv.data.fragment import Fragment
from clusterenv.store import ReplayStore, Uniform

FRAME = (6, 6)


def as_batch(fragment: Fragment) -> Batch:
    """Return a fragment as the head would have it."""
    return Batch(
        fragment.columns,
        fragment.num_envs,
        tail_rows=fragment.tail_rows,
        tail=fragment.tail,
        state=fragment.state,
        run=0,
        shard=0,
        incarnation=0,
        policy_version=0,
        cuts=fragment.cuts,
    )


@dataclass(frozen=True)
class Row:
    """Where a row is from, and how its step ended."""

    run: int
    shard: int
    incarnation: int
    env: int
    episode: int
    step: int
    terminated: bool
    truncated: bool

    @property
    def reward(self) -> float:
        number = 1000 * (self.run % 100) + 100 * self.env + 10 * self.episode + self.step
        return float(np.float32(np.sin(number)))

    @property
    def action(self) -> int:
        return (self.env + self.episode + self.step) % 5

    @property
    def key(self) -> tuple[int, ...]:
        return self.run, self.shard, self.incarnation, self.env, self.episode, self.step

    @property
    def after(self) -> tuple[int, ...]:
        """The key of the row that follows in the episode."""
        return (*self.key[:-1], self.step + 1)

    def state(self) -> np.ndarray:
        """Recurrent state before the step; zero where an episode begins."""
        known = [self.env + 1, self.episode + 1, self.step] if self.step else [0, 0, 0]
        return np.array(known, np.float32)


@dataclass(frozen=True)
class Vector:
    """Observations that contain their origin."""

    names = ("obs",)

    def at(self, row: Row, step: int) -> dict[str, np.ndarray]:
        return {"obs": np.array([*row.key[:-1], step], np.float32)}


@dataclass(frozen=True)
class TwoLeaves:
    """Dict observations."""

    names = ("obs.a", "obs.b")

    def at(self, row: Row, step: int) -> dict[str, np.ndarray]:
        first = np.array([row.env, step], np.float32)
        second = np.array([row.key[:3], [row.env, row.episode, step]], np.int64)
        return {"obs.a": first, "obs.b": second}


@dataclass(frozen=True)
class Frames:
    """Stacks of the last frames; what is before an episode is zero, or its first frame."""

    size: int = 4
    axis: int = 0
    padding: str = "zero"
    names = ("obs",)

    def frame(self, row: Row, step: int) -> np.ndarray:
        if step < 0:
            if self.padding == "zero":
                return np.zeros(FRAME, np.uint8)
            step = 0
        number = 1 + row.shard + 3 * row.incarnation + 7 * row.env + 31 * row.episode + 101 * step
        number += 57 * row.run
        return (np.arange(36) * 5 + number * 17).astype(np.uint8).reshape(FRAME)

    def at(self, row: Row, step: int) -> dict[str, np.ndarray]:
        frames = [self.frame(row, step - back) for back in range(self.size - 1, -1, -1)]
        return {"obs": np.stack(frames, self.axis)}


@dataclass(frozen=True)
class FramesAndSpeed:
    """Dict observations of which one is a stack."""

    frames = Frames()
    names = ("obs.image", "obs.speed")

    def at(self, row: Row, step: int) -> dict[str, np.ndarray]:
        speed = np.array([row.env, row.episode, step, step**2], np.float32)  # four, as frames are
        return {"obs.image": self.frames.at(row, step)["obs"], "obs.speed": speed}


Content = Vector | TwoLeaves | Frames | FramesAndSpeed


class Fleet:
    """Shards that hand over fragments, as those of one collector do.

    Parameters
    ----------
    run
        Number of the collector.
    episode
        Steps of an episode, about.
    tracks
        Whether an environment may give several tracks of a fragment and another none, as with
        engines that spend steps on resetting.
    state
        Whether fragments have recurrent state.
    priority
        Whether rows come with a priority.
    """

    def __init__(
        self,
        content: Content | None = None,
        *,
        seed: int = 0,
        run: int = 0,
        shards: int = 2,
        envs: int = 3,
        horizon: int = 4,
        episode: float = 6,
        tracks: bool = False,
        state: bool = False,
        priority: bool = False,
    ) -> None:
        self.content: Content = Vector() if content is None else content
        self.rng = np.random.default_rng(seed)
        self.run, self.shards, self.envs, self.horizon = run, shards, envs, horizon
        self.episode, self.tracks, self.state, self.priority = episode, tracks, state, priority
        self.incarnation = [0] * shards
        self._now = {
            (shard, env): (0, 0)
            for shard in range(shards)
            for env in range(shard * envs, (shard + 1) * envs)
        }
        self.version = 0

    def restart(self, shard: int) -> None:
        """Restart a shard, as after the loss of a worker."""
        self.incarnation[shard] += 1
        for at in [at for at in self._now if at[0] == shard]:
            self._now[at] = (0, 0)

    def rows(self, shard: int, horizon: int | None = None) -> list[Row]:
        """Step a shard's environments, and return a fragment's rows, time-major."""
        heads = list(range(shard * self.envs, (shard + 1) * self.envs))
        if self.tracks:
            heads = sorted(self.rng.choice(heads, self.envs).tolist())
        steps = self.horizon if horizon is None else horizon
        tracks = [[self._step(shard, env) for _ in range(steps)] for env in heads]
        return [track[t] for t in range(steps) for track in tracks]

    def next(self, shard: int | None = None, horizon: int | None = None) -> tuple[Batch, list[Row]]:
        """Return a fragment, of any shard by default, and its rows."""
        if shard is None:
            shard = int(self.rng.integers(self.shards))
        rows = self.rows(shard, horizon)
        self.version += 1
        return self.batch(rows), rows

    def batch(self, rows: Sequence[Row], num_envs: int | None = None, **more: Any) -> Batch:
        """Return the batch of these rows."""
        width = self.envs if num_envs is None else num_envs
        columns = columns_of(rows, self.content)
        if self.priority:
            columns["priority"] = np.array([abs(row.reward) for row in rows], np.float32)
        last = len(rows) - width
        ends = [at for at, row in enumerate(rows) if row.terminated or row.truncated or at >= last]
        self.rng.shuffle(ends)  # an env loop gives episodes' ends first, then the fragment's
        state = {"h": np.stack([row.state() for row in rows[:width]])} if self.state else {}
        return Batch(
            columns,
            width,
            tail_rows=np.array(ends, np.int64),
            tail=observations([rows[at] for at in ends], self.content, 1),
            state=state,
            run=rows[0].run,
            shard=rows[0].shard,
            incarnation=rows[0].incarnation,
            policy_version=more.get("policy_version", self.version),
        )

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next()[0]

    def _step(self, shard: int, env: int) -> Row:
        episode, step = self._now[shard, env]
        ended = self.rng.random() < 1 / self.episode
        terminated = bool(ended and self.rng.random() < 0.5)
        self._now[shard, env] = (episode + 1, 0) if ended else (episode, step + 1)
        place = self.run, shard, self.incarnation[shard], env
        return Row(*place, episode, step, terminated, bool(ended) > terminated)


def observations(rows: Iterable[Row], content: Content, ahead: int = 0) -> dict[str, np.ndarray]:
    """Return the observations of rows, or of the step after."""
    parts = [content.at(row, row.step + ahead) for row in rows]
    example = content.at(Row(0, 0, 0, 0, 0, 0, False, False), 0)
    return {
        name: np.stack([part[name] for part in parts])
        if parts
        else np.empty((0, *example[name].shape), example[name].dtype)
        for name in content.names
    }


def columns_of(rows: Sequence[Row], content: Content) -> dict[str, np.ndarray]:
    """Return the columns of these rows, as a collector names them."""
    return {
        **observations(rows, content),
        "reward": np.array([row.reward for row in rows], np.float32),
        "terminated": np.array([row.terminated for row in rows], np.bool_),
        "truncated": np.array([row.truncated for row in rows], np.bool_),
        "action": np.array([row.action for row in rows], np.int64),
        "episode": np.array([row.episode for row in rows], np.int32),
        "step": np.array([row.step for row in rows], np.int32),
        "env": np.array([row.env for row in rows], np.int32),
        "version": np.zeros(len(rows), np.int32),
    }


def transitions(rows: Sequence[Row], content: Content) -> dict[str, np.ndarray]:
    """Return what a sample of these rows must hold, besides indices and weights."""
    names = (*content.names, "action", "reward", "terminated", "truncated")
    columns = columns_of(rows, content)
    following = observations(rows, content, 1)
    return {name: columns[name] for name in names} | {
        f"next_{name}": column for name, column in following.items()
    }


def fill(store: ReplayStore, fleet: Fleet, batches: int) -> list[Row]:
    """Add so many fragments, and return their rows."""
    rows: list[Row] = []
    for _ in range(batches):
        batch, more = fleet.next()
        store.add(batch)
        rows += more
    return rows


def all_of(store: ReplayStore) -> dict[str, np.ndarray]:
    """Return every row of a store that samples without replacement, oldest first."""
    sampler = getattr(store.sampler, "base", store.sampler)
    assert isinstance(sampler, Uniform)
    assert not sampler.replace
    sample = store.sample(len(store))
    order = np.argsort(sample["indices"])
    return {name: column[order] for name, column in sample.items()}


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fail unless all that is expected was found, bit for bit."""
    for name, column in expected.items():
        assert found[name].dtype == column.dtype, name
        np.testing.assert_array_equal(found[name], column, err_msg=name, strict=True)


def changed(batch: Batch, **parts: Any) -> Batch:
    """Return a batch with other columns (``None`` leaves one out) or other parts."""
    own = ("tail_rows", "tail", "state", "run", "shard", "incarnation", "policy_version")
    given = {name: parts.pop(name, getattr(batch, name)) for name in (*own, "num_envs")}
    columns = {name: batch.flat(name) for name in batch.names} | parts
    kept = {name: column for name, column in columns.items() if column is not None}
    return Batch(kept, given.pop("num_envs"), **given)
