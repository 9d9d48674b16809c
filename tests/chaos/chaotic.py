"""An environment that obeys orders to raise or to hang, found under ``$CHAOS_ORDERS``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

ORDERS = "CHAOS_ORDERS"


class Chaotic(gym.Env[Any, Any]):
    """Observations are a mark of the episode and the steps taken in it, so a stitch would show."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        self.orders = Path(os.environ[ORDERS])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.now = 0
        # A float32 holds 24 bits exactly: few marks coincide by chance.
        self.mark = float(self.np_random.integers(1 << 24))
        self.length = int(self.np_random.integers(5, 80))
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.now += 1
        if self.now % 4 == 0:
            self._obey()
        time.sleep(0.0005)
        return self._observe(), 1.0, self.now == self.length, False, {}

    def _observe(self) -> Any:
        return np.array([self.mark, self.now], np.float32)

    def _obey(self) -> None:
        if not self.orders.exists():
            return
        try:
            order = self.orders.read_text()
            self.orders.rename(f"{self.orders}.done")
        except FileNotFoundError:  # another environment was faster
            return
        if order == "raise":
            raise RuntimeError("ordered to raise")
        if order == "hang":
            time.sleep(10_000)
        if order == "hold":
            sum(range(10**12))  # in C: Python's lock is held


gym.register("Chaotic-v0", Chaotic)
