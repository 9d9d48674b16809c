"""Adaptive policy synchronization: versions, divergences, weights, and when to pull."""

from __future__ import annotations

from clusterenv.sync.rules import Divergence, Every, EveryVersion, Never, SyncRule

__all__ = ["Divergence", "Every", "EveryVersion", "Never", "SyncRule"]
