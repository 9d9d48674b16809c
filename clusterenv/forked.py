"""Imported once by the process that local workers are forked from: each begins with all of it."""

from __future__ import annotations

import os

import numpy as np
import torch

import clusterenv.shard  # noqa: F401

__all__: list[str] = []

_HERE = os.getpid()


def _draw_apart() -> None:
    """Have a worker draw numbers of its own; Python's generator sees to that by itself.

    What a worker forks in its turn is left alone: a thread of it may hold torch's generator.
    """
    if os.getppid() == _HERE:
        np.random.seed()  # noqa: NPY002  # what old environments use
        torch.seed()


os.register_at_fork(after_in_child=_draw_apart)
