"""Stores: they gather the batches of a collector and hand their rows to a learner."""

from __future__ import annotations

from clusterenv.store.rollout import Rollout, RolloutStats, RolloutStore

__all__ = ["Rollout", "RolloutStats", "RolloutStore"]
