"""CartPole whose observations lack the velocities, so that a policy needs a memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control import CartPoleEnv

__all__ = ["CartPoleNoVelocity"]

SEEN = [0, 2]  # position of the cart, angle of the pole

Obs = npt.NDArray[np.float32]


class CartPoleNoVelocity(CartPoleEnv):
    """CartPole that shows the cart's position and the pole's angle alone.

    Examples
    --------
    >>> env = CartPoleNoVelocity()
    >>> env.reset(seed=1)[0].shape, env.observation_space.shape
    ((2,), (2,))
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        space = self.observation_space
        assert isinstance(space, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(space.low[SEEN], space.high[SEEN])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return obs[SEEN], info

    def step(self, action: Any) -> tuple[Obs, float, bool, bool, dict[str, Any]]:
        obs, *rest = super().step(action)  # type: ignore[no-untyped-call]
        return obs[SEEN], *rest
