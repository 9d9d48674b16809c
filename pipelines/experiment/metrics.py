"""The record that every learner logs, displays and plots."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # those who only read metrics need no collector
    from clusterenv import Stats

__all__ = ["GROUPS", "LOSSES", "Metrics", "collected"]

LOSSES = "losses"
"""The group of what a learner returns from a step of learning."""
GROUPS = {
    "rollout": ("episodes", "mean_return", "mean_length", "judged_return"),
    "eval": ("eval_return", "eval_return_low", "eval_return_high", "eval_length", "eval_steps"),
    "sync": ("version", "pulls", "pulls_saved", "weight_bytes", "lag_mean"),
    "shards": ("restarts", "moves", "rebuilt", "lost_rows", "dropped_rows"),
    "store": ("store_rows", "store_capacity", "store_bytes", "store_age"),
    "throughput": (
        *("seconds", "steps_per_second", "queued", "updates"),
        *("learner_rows_per_second", "learner_share"),
    ),
}
"""The other metrics by group, as TensorBoard shows them."""
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


@dataclass(frozen=True)
class Metrics:
    """Totals since the start of a run; metrics that a learner does not have are ``None``.

    Examples
    --------
    >>> Metrics(steps=512, learner={"kl": 0.01}).given()["kl"]
    0.01
    >>> "store_rows" in Metrics(steps=512).given()
    False
    """

    # The run
    steps: int = 0  # environment steps, all environments together
    seconds: float = 0.0  # spent, all sessions together
    steps_per_second: float = 0.0  # of this session
    episodes: int = 0  # finished
    mean_return: float = math.nan  # of the last 100 finished episodes
    mean_length: float = math.nan  # their steps
    judged_return: float | None = None  # the same of the environments that decide on the goal
    # The newest evaluation; NaN before the first
    eval_return: float | None = None  # mean of its episodes
    eval_return_low: float | None = None  # lower bound of the mean's 95 % confidence interval
    eval_return_high: float | None = None  # upper bound
    eval_length: float | None = None  # mean steps of its episodes
    eval_steps: float | None = None  # steps at which the evaluated version was published
    eval_splits: Mapping[str, float] = field(default_factory=dict)  # mean of each: eval_<split>
    # The policy on its way to the workers
    version: int = 0  # the newest
    pulls: int = 0  # of weights, by all shards together
    pulls_saved: int = 0  # that every shard pulling every version would have made besides
    weight_bytes: int = 0  # moved, by the head and by workers
    lag_mean: float = 0.0  # versions behind the newest, over this session's fragments
    # The shards
    queued: int = 0  # batches received and not yet taken
    restarts: int = 0  # shards restarted after a loss
    moves: int = 0  # shards moved to another worker, with nothing lost
    rebuilt: int = 0  # environments rebuilt after a fault of their own
    lost_rows: int = 0  # taken by shards that were lost, and not delivered
    dropped_rows: int = 0  # left behind by a fresh start or a move
    # The store
    store_rows: int | None = None  # held
    store_capacity: int | None = None  # that it can hold
    store_bytes: int | None = None  # of memory
    store_age: int | None = None  # versions between its oldest and its newest row
    # The learner
    updates: int | None = None  # steps of learning
    learner_rows_per_second: float | None = None  # of the time that the learner works
    learner_share: float | None = None  # of the session's time that the learner works
    learner: Mapping[str, float] = field(default_factory=dict)  # its losses and scalars, by name

    def tags(self) -> dict[str, float]:
        """Return what there is, apart from ``steps``, by group and name: ``rollout/episodes``."""
        given = {name: value for name, value in self.given().items() if name != "steps"}
        group_of = {**_GROUP_OF, **dict.fromkeys(self.eval_splits, "eval")}
        return {f"{group_of.get(name, LOSSES)}/{name}": value for name, value in given.items()}

    def given(self) -> dict[str, float]:
        """Return what there is, by name."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        del values["learner"], values["eval_splits"]
        given = {name: value for name, value in values.items() if value is not None}
        return {**given, **self.eval_splits, **self.learner}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Metrics:
        """Return the metrics that :meth:`given` returned."""
        names = {each.name for each in dataclasses.fields(cls)}
        known = {name: value for name, value in record.items() if name in names}
        others = {name: value for name, value in record.items() if name not in names}
        splits = {name: value for name, value in others.items() if name.startswith("eval_")}
        learner = {name: value for name, value in others.items() if name not in splits}
        return cls(**known, eval_splits=splits, learner=learner)


def collected(past: Metrics, stats: Stats) -> dict[str, Any]:
    """Return the metrics of a collector, added to those of earlier sessions."""
    every = stats.announcements * len(stats.versions)
    return {
        "version": stats.version,
        "pulls": past.pulls + stats.pulls,
        "pulls_saved": past.pulls_saved + max(0, every - stats.pulls),
        "weight_bytes": past.weight_bytes + stats.weight_bytes + stats.relayed_bytes,
        "lag_mean": stats.lag_mean,
        "queued": stats.queued,
        **{
            name: getattr(past, name) + getattr(stats, name)
            for name in ("restarts", "moves", "rebuilt", "lost_rows", "dropped_rows")
        },
    }
