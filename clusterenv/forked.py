"""Imported once by the process that local workers are forked from: each begins with all of it."""

from __future__ import annotations

import os

import numpy as np

import clusterenv.shard  # noqa: F401

__all__: list[str] = []

# Python's own generator draws a new seed after a fork; NumPy's would go on alike in all workers.
os.register_at_fork(after_in_child=np.random.seed)
